"""Messages of fewer bits: right on average, bounded where a clip says so, and counted as what they are."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.core.helpers import clients
from unalike import Client, Each, Federation, Mean, Sum, each, send, simulate, task
from unalike.core.bits import FEWEST, PIECE, REST, in_few_bits, message_bytes
from unalike.core.draws import Draws, key
from unalike.core.model import Model
from unalike.core.task import Sent
from unalike.methods.fedavg import FedAvg
from unalike.networks.architectures import build
from unalike.privacy import Gaussian


@task
def echo(client: Client, value: Tensor) -> Sent:
    return send(value=value)


class Enumerated:
    """Draws of which every number is the i-th of ``count`` equally likely ones."""

    def __init__(self, i: int, count: int = 512) -> None:
        self.word = i * (1 << 64) // count + (1 << 64) // (2 * count)

    def bits(self, count: int) -> Tensor:
        return torch.full((count,), self.word - (1 << 64) * (self.word >= 1 << 63), dtype=torch.int64)


@pytest.mark.parametrize("bits", [4, 5, 8, 16])
def test_every_number_is_right_on_average_over_all_draws(bits: int) -> None:
    value = torch.randn(2 * PIECE + 17, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean = torch.stack([in_few_bits(value, bits, Enumerated(i)) for i in range(512)]).mean(0)  # type: ignore[arg-type]
    step = float(value.abs().max()) / (2 ** (bits - 1) - 1)
    assert float((mean - value).abs().max()) <= step / 512 + 1e-6


@pytest.mark.parametrize("bits", [4, 8])
def test_a_piece_has_no_more_values_than_its_bits_can_say(bits: int) -> None:
    value = torch.randn(3 * PIECE, generator=torch.Generator().manual_seed(2))
    value[:PIECE] = 0  # and a piece without a scale
    read = in_few_bits(value, bits, Draws(key(0)))
    levels = 2 ** (bits - 1) - 1
    assert not read[:PIECE].any()
    for piece, own in zip(read.split(PIECE)[1:], value.split(PIECE)[1:], strict=True):
        steps = piece.numpy() / (float(own.abs().max()) / levels)
        assert np.allclose(steps, np.round(steps), atol=1e-3) and np.abs(steps).max() <= levels + 1e-3
        assert np.abs(steps - own.numpy() * levels / float(own.abs().max())).max() < 1 + 1e-3


def test_the_squared_error_is_below_three_quarters_of_the_squared_length() -> None:
    """All numbers but the largest at a share f of a step: E(x̂ − x)² = f(1 − f) step² for each, by the binomial."""
    step = 1 / (2 ** (FEWEST - 1) - 1)
    f = np.linspace(0, 1, 10001)
    error, length = (PIECE - 1) * f * (1 - f) * step**2, 1 + (PIECE - 1) * f**2 * step**2
    assert float((error / length).max()) < 0.75
    worst = float(f[(error / length).argmax()])
    value = torch.full((PIECE,), worst * step, dtype=torch.float64)
    value[0] = 1.0
    found = [float((in_few_bits(value, FEWEST, Draws(key(i))) - value).square().sum()) for i in range(300)]
    assert np.mean(found) == pytest.approx(float(error.max() if worst == 0.5 else error[f == worst][0]), rel=0.05)


def values_of(count: int, length: int = 300) -> Tensor:
    return torch.randn(count, length, generator=torch.Generator().manual_seed(3))


def kept(federation: Federation, name: str) -> Tensor:
    shard = federation.runtime.shards[0]  # type: ignore[attr-defined]
    return shard.kept(federation.run).column(name, federation.roster.ids)[0]


def test_what_rounding_took_off_comes_with_later_messages() -> None:
    federation, values = simulate(clients([1] * 5), seed=0), values_of(5)
    total = torch.zeros(300)
    for number in range(1, 21):
        total += (
            federation.begin_round(number)
            .everyone()
            .ask(echo, value=each(values), into=Sum("value", bits=4, feedback=True))["value"]
        )
    owed = kept(federation, f"{REST}value")
    assert torch.allclose(total + owed.sum(0), 20 * values.sum(0), atol=1e-3)  # the errors telescope
    plain = simulate(clients([1] * 5), seed=0).everyone()
    once = plain.ask(echo, value=each(values), into=Sum("value", bits=4))["value"]
    assert float((total / 20 - values.sum(0)).norm()) < 0.2 * float((once - values.sum(0)).norm())


@pytest.mark.parametrize("release", [Sum("value", bits=4), Each("value", bits=4), Mean("value", bits=8, clip=1.0)])
def test_blocks_of_any_size_send_the_same_bits(release: Sum | Each) -> None:
    values = values_of(7)
    found = [
        simulate(clients([1, 2, 3, 4, 5, 6, 7]), seed=0, block=block).everyone().ask(
            echo, value=each(values), into=release
        )["value"]
        for block in (1, 3, 7)
    ]  # fmt: skip
    if isinstance(release, Each):
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        assert not torch.equal(found[0], values)
    assert all(torch.allclose(found[0], one, atol=1e-6) for one in found)


def test_a_message_is_no_longer_than_its_clip_and_the_noise_is_what_the_ledger_is_told() -> None:
    values = 100 * values_of(6)
    lone = Sum("value", clip=2.0, bits=4)
    for i in range(6):
        federation = simulate(clients([1]), seed=i)
        sent = federation.everyone().ask(echo, value=each(values[i : i + 1]), into=lone)["value"]
        assert 1.5 < float(sent.norm()) <= 2.0
    release = Sum("value", clip=2.0, noise=Gaussian(3.0), bits=4)
    zeros = torch.zeros(4, 500)
    draws = [
        simulate(clients([1] * 4), seed=i).everyone().ask(echo, value=each(zeros), into=release) for i in range(20)
    ]
    assert float(torch.stack([one["value"] for one in draws]).std()) == pytest.approx(6.0, rel=0.05)


def test_bytes_are_those_of_the_bits() -> None:
    assert message_bytes(257, 4) == 129 + 8
    for bits, expected in ((None, 4 * 300), (16, 600 + 8), (8, 300 + 8), (4, 150 + 8)):
        for release in (Sum("value", bits=bits), Each("value", bits=bits)):
            federation = simulate(clients([1] * 5), seed=0)
            federation.everyone().ask(echo, value=each(values_of(5)), into=release)
            assert federation.traffic.up["value"] == 5 * expected
            row = federation.transcript.rows()[0]
            assert (row["bytes"], row["bits"]) == (5 * expected, bits)


@pytest.mark.parametrize(("bits", "width"), [(None, 4), (12, 2), (5, 1)])
def test_a_secure_sum_of_few_bits_is_right_on_average_and_smaller(bits: int | None, width: int) -> None:
    values = torch.nn.functional.normalize(values_of(6, 40))
    release, sums = Sum("value", clip=1.0, secure=True, bits=bits), []
    for seed in range(12 if bits == 5 else 3):
        federation = simulate(clients([1] * 6), seed=seed)
        sums.append(federation.everyone().ask(echo, value=each(values), into=release)["value"])
        assert federation.traffic.up["masked"] == 6 * 40 * width
    step = 1.0 / int((2 ** (8 * width - 1) - 1) / 6)  # each client's numbers lie on this grid
    errors = torch.stack(sums) - values.sum(0)
    assert float(errors.abs().max()) <= 6 * step + 1e-6
    assert float(errors.mean(0).norm()) <= 2 * step * (6 * 40 / 4 / len(sums)) ** 0.5 + 1e-5  # no more than chance has
    if bits is not None:
        assert torch.allclose(torch.stack(sums) / step, (torch.stack(sums) / step).round(), atol=1e-2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Sum("value", bits=3), "expected 4 to 16"),
        (lambda: Sum("value", feedback=True), "set bits"),
        (lambda: Each(bits=8), "name exactly one"),
        (lambda: Each("value", clip=1.0, noise=Gaussian(1.0), bits=8), "without noise of its own"),
        (lambda: Sum("value", sensitivity=1.0, unit="point", noise=Gaussian(1.0), bits=8), "one point"),
        (lambda: Sum("value", clip=1.0, secure=True, bits=8, feedback=True), "without feedback"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()  # type: ignore[operator]


def test_shares_of_noise_need_a_fine_grid() -> None:
    federation = simulate(clients([1] * 6), seed=0, trust="nobody")
    release = Sum("value", clip=1.0, noise=Gaussian(1.0), secure=True, bits=8)
    with pytest.raises(ValueError, match="too coarse"):
        federation.everyone().ask(echo, value=each(values_of(6)), into=release)


def test_methods_that_average_say_so_before_they_run() -> None:
    model = Model(build("logistic", (4,), 3))
    with pytest.raises(ValueError, match="FedAvg: bits=2"):
        FedAvg(model, bits=2)
    (update, loss) = FedAvg(model, bits=8, feedback=True).fit.releases()
    assert (update.bits, update.feedback, loss.bits) == (8, True, None)
