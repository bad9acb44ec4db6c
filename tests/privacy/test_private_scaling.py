"""Inputs scaled by noisy statistics. The oracles: moments of the pooled rows, and dp_accounting's events by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pandas as pd
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from torch import Tensor

from tests.privacy.test_private_runs import invoked
from tests.runs.helpers import Crash
from unalike import Clients, data, simulate
from unalike.core.release import Trust, Unit
from unalike.core.wire import WireError
from unalike.data.source import Source
from unalike.deploy.program import program_of
from unalike.learn.scaling import PrivateScaling, scale_privately
from unalike.privacy import Gaussian
from unalike.runs.errors import UserError
from unalike.runs.folder import load_roster
from unalike.runs.prepare import prepare
from unalike.runs.recipe.recipe import Recipe
from unalike.runs.recipe.settings import plan_for
from unalike.runs.run import run_recipe
from unalike.runtime.simulate import Simulation

HARDLY = Gaussian(1e-10)
UNITS: tuple[Unit, ...] = ("client", "point")


def table(rows: int = 4000, clients: int = 400, seed: int = 0) -> Clients:
    """Features far from 0, spread wide and narrow, a constant, and one of zeros and ones."""
    random = np.random.default_rng(seed)
    columns = [
        random.normal(2000, 10, rows), random.normal(0, 1, rows), random.normal(5, 0.01, rows), np.full(rows, 7.0),
        (random.random(rows) < 0.3).astype(float),
    ]  # fmt: skip
    x = torch.tensor(np.stack(columns, 1), dtype=torch.float32)
    return Clients.from_sizes(x, None, torch.full((clients,), rows // clients))


@pytest.mark.parametrize("unit", UNITS)
def test_without_noise_it_is_the_mean_and_deviation_of_all_rows(unit: Unit) -> None:
    clients = table()
    federation = simulate(clients, shards=3, noise="seeded")
    found = scale_privately(federation, PrivateScaling.of(federation.roster.schema, HARDLY, unit))
    values = clients.x.numpy().astype(np.float64)
    deviation = values.std(0)
    deviation[3] = 1.0  # a constant is only shifted
    assert found.shift is not None and found.scale is not None
    np.testing.assert_allclose(found.shift.numpy(), values.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(1.0 / found.scale.numpy(), deviation, rtol=1e-3)
    assert federation.roster.schema == found


def test_images_are_scaled_by_channel() -> None:
    random = np.random.default_rng(0)
    x = torch.tensor(random.integers(0, 200, (90, 3, 4, 5)), dtype=torch.uint8)
    source = Source("pictures", "image", x.numpy(), client=np.arange(90) // 3)
    population = data.load(source, test=0, unseen=0, normalize="private")
    federation = simulate(population, scaling=PrivateScaling("image", 3, HARDLY), noise="seeded")
    found = federation.roster.schema
    assert found.shift is not None and found.scale is not None and found.shift.shape == (3, 1, 1)
    np.testing.assert_allclose(found.shift.flatten(), x.double().mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(1.0 / found.scale.flatten(), x.double().numpy().std((0, 2, 3)), rtol=1e-5)


def test_points_of_unequal_clients_count_alike_and_no_client_counts_more_than_the_median_one() -> None:
    x = torch.arange(1.0, 13.0)[:, None].repeat_interleave(4, 0)[:44]
    clients = Clients.from_sizes(x, None, torch.tensor([1, 4, 4, 4, 31]))
    federation = simulate(clients, noise="seeded")
    points = PrivateScaling.of(federation.roster.schema, HARDLY, "point")
    assert points.weight(federation.roster) == 44
    found = scale_privately(federation, points).shift
    assert found is not None and float(found) == pytest.approx(float(x.mean()), rel=1e-6)
    federation = simulate(clients, noise="seeded")
    alike = replace(points, unit="client")
    found = scale_privately(federation, alike).shift
    weights, ends = np.array([0.25, 1, 1, 1, 1]), (0, 1, 5, 9, 13, 44)
    means = np.array([x[a:b].mean() for a, b in pairwise(ends)])
    assert found is not None and float(found) == pytest.approx(weights @ means / 4.25, rel=1e-5)


def _sums(scaling: PrivateScaling, clients: Clients, center: Tensor, radius: Tensor) -> list[Tensor]:
    federation = simulate(clients, noise="seeded")
    everyone, usual = federation.everyone(), torch.tensor(3.0, dtype=torch.float64)
    given = {"center": center, "usual": usual}
    asks = [everyone.ask(scaling.counts, **given)["counts"]]
    asks.append(everyone.ask(scaling.means, radius=radius, **given)["mean"])
    return [*asks, everyone.ask(scaling.moments, radius=radius, **given)["moments"]]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("rows", [[1e30] * 3, [math.nan, 1.0, -1.0], [-1e5, 1e5, 3.0], [0.0, 1e-9, 1.0]])
def test_one_client_and_one_point_move_no_sum_by_more_than_its_sensitivity(unit: Unit, rows: list[float]) -> None:
    """Who is most extreme: with the client, or its last row, and without."""
    features, honest = 4, torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    extreme = torch.tensor(rows)[:, None].expand(3, features)
    center, radius = torch.full((features,), 0.5), torch.full((features,), 2.0)
    scaling = PrivateScaling("features", features, Gaussian(1e-12), unit)
    whole = Clients.from_sizes(torch.cat([honest, extreme]), None, torch.full((5,), 3))
    less = whole.select([0, 1, 2, 3]) if unit == "client" else replace(whole, size=torch.tensor([3, 3, 3, 3, 2]))
    bounds = (math.sqrt(features), math.sqrt(features), math.sqrt(2 * features))
    both = zip(_sums(scaling, whole, center, radius), _sums(scaling, less, center, radius), bounds, strict=True)
    for with_it, without, bound in both:
        assert torch.linalg.vector_norm(with_it - without) <= bound * (1 + 1e-9)


def by_hand(scaling: float, rounds: list[tuple[dp_accounting.DpEvent, int]], delta: float) -> float:
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(scaling), 4)
    for event, count in rounds:
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table of 300 clients whose labels follow from features of very different scales."""
    clients, path = table(rows=1500, clients=300), tmp_path_factory.mktemp("table") / "table.csv"
    x = clients.x[:, :3]
    y = ((x - x.mean(0)) / x.std(0)).sum(1) > 0
    frame = pd.DataFrame(x.double().numpy(), columns=["a", "b", "c"])
    frame.assign(y=y.int().numpy(), who=np.repeat(np.arange(300), 5)).to_csv(path, index=False)
    return str(path)


def settings(file: str, **more: Any) -> dict[str, Any]:
    return {
        "data": file, "client_column": "who", "label_column": "y", "unseen": 0, "model": "logistic", "rounds": 3,
        "cohort": 0.2, "epsilon": 8.0, "delta": 1e-4, "simulate_noise": "simulated", "normalize": "private",
        "block": 64, "threads": 1,
    } | more  # fmt: skip


def recipe(**given: Any) -> Recipe:
    return plan_for(["fedavg"], given, ["data.options.classes=2"]).runs[0][1]


def prepared(**given: Any) -> Any:
    return prepare(recipe(**given))


@pytest.mark.parametrize("trust", ["server", "nobody"])
def test_the_ledgers_epsilon_is_that_of_both_parts_by_hand(file: str, trust: Trust, tmp_path: Path) -> None:
    ready = prepared(**settings(file, trust=trust, noise_multiplier=1.5, clip=0.5, epsilon=10.0))
    federation = ready.federation()
    z = ready.scaling.noise.noise_multiplier
    assert federation.ledger.epsilon(1e-4) == pytest.approx(by_hand(z, [], 1e-4), rel=1e-4)
    assert 1.998 <= by_hand(z, [], 1e-4) <= 2.0001  # a fifth of ε
    state = ready.method.start(0)
    for number in range(1, 4):
        state = ready.method.round(state, federation.begin_round(number))
    event = dp_accounting.GaussianDpEvent(ready.method.noise.noise_multiplier)
    expected = by_hand(z, [(dp_accounting.PoissonSampledDpEvent(0.2, event), 3)], 1e-4)
    assert federation.ledger.epsilon(1e-4) == pytest.approx(expected, rel=1e-4)
    assert math.isinf(federation.ledger.server_epsilon(1e-4)) == (trust == "server")
    asked = [(row["task"], row["unit"], row["trust"]) for row in federation.transcript.rows()]
    assert [name for name, *_ in asked[:3]] == [f"PrivateScaling.{one}" for one in ("counts", "means", "moments")]
    assert {one[1:] for one in asked} == {("client", trust)}


@pytest.mark.parametrize("trust", ["server", "nobody"])
def test_points_pay_for_both_parts_too(file: str, trust: Trust) -> None:
    ready = prepared(**settings(file, trust=trust, unit="point", delta=1e-5, cohort=1.0, batch=100))
    federation = ready.federation()
    ready.method.round(ready.method.start(0), federation.begin_round(1))
    point, steps = ready.method.local.private, ready.method.local.steps_of(4)
    event = dp_accounting.GaussianDpEvent(point.multiplier(steps))
    spent = by_hand(
        ready.scaling.noise.noise_multiplier,
        [(dp_accounting.PoissonSampledDpEvent(steps.rate, event), steps.count)],
        1e-5,
    )
    assert federation.ledger.epsilon(1e-5) == pytest.approx(spent, rel=1e-3)
    planned = [(dp_accounting.PoissonSampledDpEvent(steps.rate, event), steps.count * 3)]
    assert by_hand(ready.scaling.noise.noise_multiplier, planned, 1e-5) == pytest.approx(8.0, rel=1e-3)
    assert math.isinf(federation.ledger.server_epsilon(1e-5)) == (trust == "server")


def test_a_run_saves_the_scaling_that_it_paid_for(file: str, tmp_path: Path) -> None:
    given = settings(file, simulate_noise=None, cohort=1.0)
    result = run_recipe(recipe(**given), tmp_path / "run")
    assert result.privacy.noise == "system" and 7.9 < (result.privacy.epsilon or 0.0) <= 8.0
    shown = json.loads(invoked("privacy", "show", str(tmp_path / "run"), "--json"))
    assert [row["array"] for row in shown["released"]] == ["counts", "mean", "moments", "update"]
    schema = load_roster(tmp_path / "run").schema
    assert schema.shift is not None and schema.scale is not None
    assert abs(float(schema.shift[0]) - 2000) < 20 and 5 < 1.0 / float(schema.scale[0]) < 40


def test_the_plan_shows_the_share(file: str) -> None:
    shared = ["--data", file, "--client-column=who", "--label-column=y", "--cohort=0.2", "--epsilon=8", "--delta=1e-4"]
    more = [
        "--noise-multiplier=2",
        "--clip=0.5",
        "--set",
        "data.options.classes=2",
        "--set",
        "data.normalize=private",
        "--rounds=3",
    ]
    told = invoked("privacy", "plan", "fedavg", *shared, *more)
    assert "of it, ε = 1.6 (by itself) scales the inputs" in " ".join(told.split())
    plain = json.loads(invoked("privacy", "plan", "fedavg", *shared, *more, "--set", "privacy.scaling=0.5", "--json"))
    assert plain["scaling"] == pytest.approx(4.0, rel=1e-3) and 4.0 < plain["epsilon"] < 6.0


def test_what_cannot_be_is_refused_and_says_what_can(file: str) -> None:
    with pytest.raises(UserError, match=r"data\.normalize=private"):
        prepared(**settings(file, normalize=True))
    with pytest.raises(UserError, match=r"give privacy\.epsilon"):
        prepared(**settings(file, epsilon=None, noise_multiplier=1.0, clip=0.5))
    with pytest.raises(UserError, match=r"drown in their noise.*privacy.scaling=0.5"):
        prepared(**settings(file, epsilon=0.5))
    with pytest.raises(UserError, match=r"give privacy\.epsilon"):
        prepared(**settings(file, epsilon=None, delta=None, simulate_noise=None))
    federation = simulate(table(), noise="seeded")
    with pytest.raises(ValueError, match="drown"):
        scale_privately(federation, PrivateScaling.of(federation.roster.schema, Gaussian(1e3), "client"))
    assert federation.serial == 0


def test_clients_elsewhere_give_no_exact_statistics(file: str) -> None:
    ready = prepared(**settings(file, cohort=1.0))
    program = program_of(ready.method, ready.roster.schema, scaling=ready.scaling)
    assert program.task("PrivateScaling.counts").releases()[0].noise == ready.scaling.noise
    with pytest.raises(WireError, match=r"no task 'Scaling\.totals'"):
        program.task("Scaling.totals")


def test_statistics_that_were_released_before_a_crash_stay_charged(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine stops after the first of the four sums; the run that is begun again pays for it."""
    given, asked, deliver = (
        settings(file, simulate_noise=None, rounds=0, noise_multiplier=2.0, clip=0.5),
        [],
        Simulation.deliver,
    )

    def stops(self: Simulation, request: Any) -> Any:
        if len(asked) == 1:
            raise Crash
        asked.append(request.task)
        return deliver(self, request)

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "deliver", stops)
        with pytest.raises(Crash):
            run_recipe(recipe(**given), tmp_path / "run")
    result = run_recipe(recipe(**given), tmp_path / "run")
    z = prepared(**given).scaling.noise.noise_multiplier
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(z), 6)  # two were charged, of which one was sent
    assert result.privacy.epsilon == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-3)
