"""Secure sums as a release: exact, uniform, tolerant of drop-outs up to the threshold, closed beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from scipy.stats import kstest

from tests.core.helpers import clients, kept, linear, total
from unalike import Clients, Federation, Mean, Simulator, Sum, simulate
from unalike.core.client import Client
from unalike.core.release import SECURE_SHAPE
from unalike.core.request import Program, Reply, Request
from unalike.core.task import Sent, send, task
from unalike.methods.fedavg import FedAvg
from unalike.privacy import Everyone, Gaussian, Laplace, SecureSumAborted
from unalike.privacy.masks.session import Ring
from unalike.runtime.shard.shard import Shard
from unalike.runtime.simulate import Simulation


class Watched(Simulation):
    """Loses some clients in an exchange, and lets a test look at what crossed the wire."""

    def __init__(self, store: Clients) -> None:
        program = Program(open=True)
        super().__init__([Shard({"train": store}, store.roster(), program, Simulator(block=4))], program)
        self.lost: dict[str, set[int]] = {}
        self.seen: dict[str, list[Reply]] = {}

    def deliver(self, request: Request) -> Iterator[Reply]:
        gone = self.lost.get(request.task, set())
        for reply in super().deliver(request):
            ids = request.ids[reply.rows].tolist()
            stay = torch.tensor([client not in gone for client in ids], dtype=torch.bool)
            failed = {int(row): "the connection broke" for row in reply.rows[~stay]}
            arrays = [{name: value[stay] for name, value in one.items()} for one in reply.arrays]
            left = replace(reply, rows=reply.rows[stay], arrays=arrays, failed={**reply.failed, **failed})
            self.seen.setdefault(request.task, []).append(left)
            yield left


@task
def own_number(client: Client) -> Sent:
    return send(value=client.x[0])


def numbers(
    count: int, length: int = 5, lost: dict[str, set[int]] | None = None
) -> tuple[Federation, torch.Tensor, Watched]:
    """Clients of one row each, their numbers, and the runtime."""
    store = clients([1] * count, features=length)
    watched = Watched(store)
    watched.lost = lost or {}
    return Federation(watched), store.x, watched


def test_the_sum_is_exact_for_the_quantized_inputs() -> None:
    federation, x, _ = numbers(9)
    summed = federation.everyone().ask(own_number, into=Sum("value", clip=9.0, secure=True))["value"]
    ring = Ring(9.0, 9)
    grid = sum(torch.round(row.to(torch.float64) / ring.step) for row in x)
    assert torch.equal(summed, (grid * ring.step).to(torch.float32))


def test_a_mean_is_over_those_who_are_in_it_and_other_releases_go_along() -> None:
    federation, x, _ = numbers(6)
    replies = federation.everyone().ask(total, into=[Mean("total", clip=9.0, secure=True), Sum("n")])
    assert torch.allclose(replies["total"], x.mean(0), atol=1e-6)
    assert replies["n"] == 6
    rows = {row["array"]: row for row in federation.transcript.rows()}
    assert rows["total"]["seen_as"] == "secure mean"
    assert rows["total"]["shape"] == [5]
    assert not kept(federation).read(federation.roster.ids).values  # no secret and no vector is left behind


def test_a_masked_message_is_uniform_whatever_it_hides() -> None:
    federation, x, watched = numbers(4, length=3000)
    x.zero_()
    federation.everyone().ask(own_number, into=Sum("value", clip=1.0, secure=True))
    masked = torch.cat([reply.arrays[0]["masked"] for reply in watched.seen["mask"]])
    assert masked.shape == (4, 3000)
    for row in masked.to(torch.float64):
        assert kstest((row + 2.0**31) / 2.0**32, "uniform").pvalue > 1e-6


def test_no_exchange_carries_the_array_itself() -> None:
    federation, _, watched = numbers(5)
    federation.everyone().ask(own_number, into=Sum("value", clip=9.0, secure=True))
    names = {name for replies in watched.seen.values() for r in replies for one in r.arrays for name in one}
    assert names == {
        "secure.shape",
        "seal_key",
        "mask_key",
        "signature",
        "to",
        "sealed",
        "seed_digest",
        "share_digests",
        "masked",
        "confirmations",
        "owners",
        "shares",
    }


def test_the_name_of_a_run_does_not_change_the_bytes_of_a_secure_sum() -> None:
    """A run on workers has another name than one in this process."""
    down = []
    for name in ("run", "run-17"):
        federation = replace(simulate(clients([3, 4, 5])), run=name)
        federation.everyone().ask(total, into=Sum("total", clip=99.0, secure=True))
        down.append((dict(federation.traffic.down), federation.traffic.total_up))
    assert down[0] == down[1] and down[0][0]["purpose"] > 0


@pytest.mark.parametrize("exchange", ["own_number", "advertise", "share", "mask", "confirm", "unmask"])
def test_drop_outs_up_to_the_threshold_complete(exchange: str) -> None:
    federation, x, _ = numbers(9, lost={exchange: {2, 7}})
    replies = federation.everyone().ask(own_number, into=Sum("value", clip=9.0, secure=True))
    stay = [i for i in range(9) if i not in (2, 7)] if exchange not in ("confirm", "unmask") else list(range(9))
    assert torch.allclose(replies["value"], x[stay].sum(0), atol=1e-5)
    assert replies.answered.tolist() == stay
    assert {failure.client for failure in replies.failures} == {"2", "7"}
    assert all("the connection broke" in failure.reason for failure in replies.failures)


@pytest.mark.parametrize("exchange", ["advertise", "share", "mask", "confirm", "unmask"])
def test_beyond_the_threshold_it_aborts_and_nothing_is_revealed(exchange: str) -> None:
    federation, _, _ = numbers(9, lost={exchange: {0, 1, 2, 3, 4}})
    with pytest.raises(SecureSumAborted, match="too many clients dropped out; no vector was revealed"):
        federation.everyone().ask(own_number, into=Sum("value", clip=9.0, secure=True))
    assert not kept(federation).read(federation.roster.ids).values
    assert federation.transcript.rows() == []


def test_noise_is_scaled_to_the_clip_and_the_rounding_and_the_ledger_agrees_with_the_plain_sum() -> None:
    (federation, x, _), (plain, y, _) = numbers(5, length=4000), numbers(5, length=4000)
    x.zero_(), y.zero_()
    noisy = federation.everyone().ask(own_number, into=Sum("value", clip=2.0, noise=Gaussian(3.0), secure=True))
    plain.everyone().ask(own_number, into=Sum("value", clip=2.0, noise=Gaussian(3.0)))
    assert float(noisy["value"].std()) == pytest.approx(6.0, rel=0.05)
    assert federation.ledger.epsilon(1e-5) == plain.ledger.epsilon(1e-5)
    release = Sum("value", clip=2.0, noise=Gaussian(3.0), secure=True)
    ring = Ring(2.0, 5)
    assert release.change(Everyone(), 0.5 * ring.step * 4000**0.5) == pytest.approx(2.0 + 0.5 * ring.step * 4000**0.5)
    assert release.change(Everyone("replace_one"), 0.1) == pytest.approx(4.2)
    point = Sum("value", clip=2.0, sensitivity=0.5, unit="point", noise=Laplace(1.0), secure=True)
    assert point.change(Everyone(), 0.1) == pytest.approx(0.7)  # rounded with the point and without it


def test_many_clients_have_neighbours_instead_of_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unalike.core.secure._MANY", 8)  # so that 20 clients are many
    federation, x, _ = numbers(20, length=2, lost={"advertise": {5}, "share": {3, 17}})
    replies = federation.everyone().ask(own_number, into=Sum("value", clip=9.0, secure=True))
    stay = [i for i in range(20) if i not in (3, 5, 17)]
    assert torch.allclose(replies["value"], x[stay].sum(0), atol=1e-4)


def test_fedavg_sums_its_updates_under_masks() -> None:
    people = clients([12, 12, 12, 12])
    secure = FedAvg(linear(), cohort=1.0, clip=5.0, secure=True)
    state = secure.start(0)
    federation = simulate(people, strict=True)
    after = secure.round(state, federation.begin_round(1))
    plain = FedAvg(linear(), cohort=1.0, clip=5.0)
    expected = plain.round(state, simulate(people).begin_round(1))  # equal sizes: weights make no difference
    assert torch.allclose(after.theta, expected.theta, atol=1e-5)
    assert [row["seen_as"] for row in federation.transcript.rows()] == ["secure mean"]


def test_what_cannot_be_summed_is_refused_before_anything_is_sent() -> None:
    federation, _, watched = numbers(10)
    everyone = federation.everyone()
    federation.quorum = 0.3
    with pytest.raises(ValueError, match="the quorum of 30% is 3 of 10 clients, but a secure sum needs 5"):
        everyone.ask(own_number, into=Sum("value", clip=1.0, secure=True))
    federation.quorum = 0.5
    with pytest.raises(ValueError, match="one secure sum for each ask, got value, value"):
        everyone.ask(own_number, into=[Sum("value", clip=1.0, secure=True), Mean("value", clip=1.0, secure=True)])
    with pytest.raises(ValueError, match="a secure sum needs at least 3 clients, got 2"):
        federation.cohort([0, 1]).ask(own_number, into=Sum("value", clip=1.0, secure=True))
    with pytest.raises(ValueError, match="a secure sum is over bounded integers; set clip"):
        Sum("value", secure=True)
    with pytest.raises(ValueError, match="set clip"):
        FedAvg(linear(), secure=True)
    assert watched.seen == {}
    assert federation.ledger.epsilon(1e-5) == 0


@pytest.mark.parametrize("large", [100, 1 << 10], ids=["named", "sent"])
def test_the_bytes_of_a_secure_sum_do_not_tell_how_many_were_drawn(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of a cohort of the expected size, where nothing is a secret."""
    monkeypatch.setattr("unalike.core.federation._LARGE", large)
    store = clients([1] * 80)

    def exchanged(federation: Federation) -> list[dict[str, int]]:
        counters = federation.traffic.up, federation.traffic.down
        return [{name: size for name, size in one.items() if name != SECURE_SHAPE} for one in counters]

    plain = simulate(store, noise="seeded")
    plain.begin_round(1).cohort(range(40)).ask(own_number, into=Sum("value", clip=9.0, secure=True))
    for count, lost in ((38, set[int]()), (40, set[int]()), (41, {3}), (43, {3, 8})):
        watched = Watched(store)
        watched.lost = {"mask": lost}
        federation = Federation(watched, noise="seeded")
        drawn = federation.begin_round(1).sample(0.5, poisson=True)
        cohort = replace(drawn, positions=torch.arange(count))
        assert cohort.expected == 40
        cohort.ask(own_number, into=Sum("value", clip=9.0, noise=Gaussian(1.0), secure=True))
        assert exchanged(federation) == exchanged(plain)
        [row] = federation.transcript.rows()
        [known] = plain.transcript.rows()
        assert (row["replies"], row["bytes"]) == (known["replies"], known["bytes"])
