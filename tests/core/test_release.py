"""Releases: bounds hold, noise has the size that the ledger was told, nonsense is refused."""

import pytest
import torch
from torch import Tensor

from tests.core.helpers import clients
from unalike import Client, Each, Mean, Sum, each, send, simulate, task
from unalike.core.task import Sent
from unalike.privacy import Gaussian, Laplace


@task
def echo(client: Client, value: Tensor) -> Sent:
    return send(value=value)


def ask(release: Each | Sum, values: Tensor, poisson: bool = False, seed: int = 0) -> Tensor:
    federation = simulate(clients([1] * len(values)), seed=seed)
    return federation.everyone().ask(echo, value=each(values), into=release)["value"]


def test_every_client_is_clipped() -> None:
    values = torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("inf"), 1.0]])
    clipped = ask(Each("value", clip=1.0), values)
    assert torch.allclose(clipped, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]), atol=1e-5)
    assert torch.allclose(ask(Sum("value", clip=1.0), values), torch.tensor([0.9, 1.2]), atol=1e-5)


@pytest.mark.parametrize(
    ("release", "std"),
    [
        (Sum("value", clip=2.0, noise=Gaussian(3.0)), 6.0),
        (Sum("value", sensitivity=0.5, unit="point", noise=Gaussian(3.0)), 1.5),
        (Mean("value", clip=2.0, noise=Gaussian(3.0)), 6.0 / 4),
        (Sum("value", clip=2.0, noise=Laplace(0.5)), 2**0.5 * 4.0),
    ],
)
def test_noise_has_the_spread_that_the_ledger_is_told(release: Sum, std: float) -> None:
    draws = torch.stack([ask(release, torch.zeros(4, 500), seed=seed) for seed in range(20)]).reshape(-1)
    assert float(draws.std()) == pytest.approx(std, rel=0.05)
    assert abs(float(draws.mean())) < 5 * std / 100


def test_a_fixed_size_cohort_doubles_the_sensitivity() -> None:
    def spread(poisson: bool) -> float:
        noise = []
        for seed in range(40):
            federation = simulate(clients([1] * 20), seed=seed)
            cohort = federation.sample(10, poisson=poisson)
            values = each(torch.zeros(len(cohort), 100))
            noise.append(cohort.ask(echo, value=values, into=Sum("value", clip=1.0, noise=Gaussian(1.0)))["value"])
        return float(torch.stack(noise).std())

    assert spread(poisson=True) == pytest.approx(1.0, rel=0.05)
    assert spread(poisson=False) == pytest.approx(2.0, rel=0.05)


def test_a_noisy_mean_divides_by_the_expected_number_of_clients() -> None:
    federation = simulate(clients([1] * 20), seed=4)
    cohort = federation.sample(10, poisson=True)
    assert len(cohort) != 10
    released = cohort.ask(
        echo, value=each(torch.ones(len(cohort), 1)), into=Mean("value", clip=10.0, noise=Gaussian(1e-6))
    )
    assert float(released["value"]) == pytest.approx(len(cohort) / 10, abs=1e-3)


@task
def counted(client: Client) -> Sent:
    return send(count=client.n, weight=client.n / 4)


def test_whole_numbers_are_weighed_by_weights_that_are_not_whole() -> None:
    mean = simulate(clients([1, 3])).everyone().ask(counted, into=Mean("count", weight="weight"))["count"]
    assert float(mean) == pytest.approx((1 * 0.25 + 3 * 0.75) / 1.0)


def test_local_noise_differs_from_client_to_client() -> None:
    noisy = ask(Each("value", clip=1.0, noise=Gaussian(1.0)), torch.zeros(50, 40))
    assert float(noisy.std()) == pytest.approx(2.0, rel=0.05)  # two inputs of a client differ by up to 2·clip
    assert float(noisy.mean(0).std()) < 0.6  # 2/√50 if the clients' noise is independent, 2 if it is the same


@pytest.mark.parametrize(
    "release", [Each("value", clip=1.0, noise=Gaussian(1.0)), Sum("value", clip=1.0, noise=Gaussian(1.0))]
)
def test_every_ask_and_every_round_has_noise_of_its_own(release: Each | Sum) -> None:
    federation = simulate(clients([1] * 3))
    seen = []
    for number in (1, 2):
        cohort = federation.begin_round(number).everyone()
        seen += [cohort.ask(echo, value=each(torch.zeros(3, 400)), into=release)["value"] for _ in range(2)]
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert abs(float(torch.corrcoef(torch.stack([one.reshape(-1), other.reshape(-1)]))[0, 1])) < 0.25


def test_an_empty_poisson_cohort_still_releases_noise() -> None:
    federation = simulate(clients([1] * 4))
    release = Sum("value", clip=1.0, noise=Gaussian(1.0))
    sizes = set()
    for number in range(1, 60):
        cohort = federation.begin_round(number).sample(1, poisson=True)
        replies = cohort.ask(echo, value=each(torch.zeros(len(cohort), 5)), into=release)
        sizes.add((len(cohort) == 0, replies["value"].shape))
    assert sizes == {(True, torch.Size([5])), (False, torch.Size([5]))}
    first = next(f for seed in range(99) if not len((f := simulate(clients([1] * 4), seed)).sample(1, poisson=True)))
    cohort = first.begin_round(0).sample(1, poisson=True)  # nobody has sent anything before
    value = cohort.ask(echo, value=each(torch.zeros(0, 5)), into=release)["value"]
    assert len(cohort) == 0 and value.shape == (5,) and float(value.abs().min()) > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sum("value", noise=Gaussian(1.0)), "noise without a bound protects nobody"),
        (lambda: Sum("value", clip=0.0), "clip=0.0; expected a number above 0"),
        (lambda: Sum("value", clip=float("nan")), "expected a number above 0"),
        (lambda: Mean("value", clip=1.0, noise=Gaussian(1.0), weight="n"), "weights from the clients' data break"),
        (lambda: Sum("value", clip=1.0, noise=Gaussian(1.0), unit="point"), "a clip bounds what a client sends"),
        (lambda: Sum("value", unit="user"), "expected 'client' or 'point'"),  # type: ignore[arg-type]
        (lambda: Sum("value", secure=True), "secure sum is over bounded integers"),
        (lambda: Each(clip=1.0, noise=Gaussian(1.0)), "name exactly one"),
    ],
)
def test_nonsense_is_refused_when_it_is_made(make: type, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
