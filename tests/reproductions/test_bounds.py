"""Generalization bounds: the terms of T1 Theorems 4 and 8 by hand, and for a small run from its own parameters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from reproductions.bounds import Drawn, app, bounds_of, divergence, learning_to_learn, transductive
from unalike import simulate
from unalike.report.analyses.measures import DoesNotApply
from unalike.runs.finished import FinishedRun
from unalike.runs.recipe.recipe import to_recipe
from unalike.runs.run import run_recipe


def trained(folder: Path, method: str, **hyperparameters: Any) -> FinishedRun:
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 3))
    np.savez(folder / "all.npz", x=x, y=(x[:, 0] > 0).astype(int), client=np.arange(60) // 10)
    recipe = {
        "method": method,
        "rounds": 2,
        "data": {"name": str(folder / "all.npz"), "unseen": 1, "test": 0.2},
        "model": {"name": "logistic"},
        "hyperparameters": {"cohort": 2, **hyperparameters},
    }
    run_recipe(to_recipe(recipe, "test"), folder / "run")
    return FinishedRun.open(folder / "run")


def test_a_divergence_of_gaussians() -> None:
    """Of the closed form for equal covariances, which torch knows too."""
    a, b = torch.tensor([0.3, -1.0, 2.0]), torch.tensor([0.1, 0.5, 1.0])
    normal = torch.distributions.Normal
    wanted = torch.distributions.kl_divergence(normal(a, 0.2), normal(b, 0.2)).sum()
    assert divergence(a, b, 0.04) == pytest.approx(float(wanted))


def test_the_terms_by_hand() -> None:
    """n = 25 clients of m = 40 rows, δ = 0.1, KLs of 3 and 60 (T1 B.3; Theorem 3 prints the same but for one 2)."""
    bound = learning_to_learn("zero", [Drawn(0.25, 60.0)], 3.0, 25, 40, 0.1)
    assert bound.between == pytest.approx(math.sqrt((3 + math.log(4 * 5 / 0.1)) / 50))  # 0.4074
    assert bound.within == pytest.approx(math.sqrt((60 + math.log(80_000) + 1) / 2000))  # 0.1903
    assert bound.total == pytest.approx(0.25 + 0.40737 + 0.19011, abs=1e-3) and not bound.vacuous
    other = transductive("zero", [Drawn(0.25, 60.0)], 3.0, 16, 25, 40, 0.1)
    t = 3 * math.log(16) * math.sqrt(16 * 9 / 25)
    assert other.between == pytest.approx(math.sqrt(9 / 25 * (3 + math.log(2 * t / 0.1)) / 32))
    assert other.within == pytest.approx(bound.within)
    full = transductive("zero", [Drawn(0.25, 60.0)], 1e9, 25, 25, 40, 0.1)
    assert full.between == 0 and math.isfinite(full.total), "everybody is labeled: nobody is left to generalize to"
    assert math.isfinite(transductive("zero", [Drawn(0.25, 60.0)], 3.0, 1, 25, 40, 0.1).total)


def test_expectations_are_means_of_the_roots() -> None:
    draws = [Drawn(0.1, 0.0), Drawn(0.3, 1000.0)]
    bound = learning_to_learn("zero", draws, 3.0, 25, 40, 0.1)
    logs = math.log(80_000) + 1
    assert bound.within == pytest.approx((math.sqrt(logs / 2000) + math.sqrt((1000 + logs) / 2000)) / 2)
    assert bound.empirical == pytest.approx(0.2)


@pytest.mark.parametrize("method", ["pefll-unlabeled", "odpfl"])
def test_a_run_is_measured_by_its_own_parameters(method: str, tmp_path: Path) -> None:
    run = trained(tmp_path, method, descriptor=2, local={"steps": 2})
    alpha = 1e-14  # draws are then the means
    zero, initial = bounds_of(run, alpha=alpha, draws=1)
    first, places = run.method.start(0), run.method.learned()  # type: ignore[attr-defined]
    for bound, before in ((zero, False), (initial, True)):
        far = sum(float((run.state[at].double() - before * first[name]).square().sum()) for at, name in places.items())
        assert bound.parts["KL of the networks"] == pytest.approx(far / (2 * alpha), rel=1e-4)
    population = run.prepared.population
    clients = population.train.select(population.seen)
    theta = run.method.personalize(run.state, simulate(clients).everyone())
    assert isinstance(theta, torch.Tensor)
    assert zero.parts["KL of the models"] == pytest.approx(float(theta.double().square().sum()) / (2 * alpha), rel=1e-4)
    wrong = []
    for i, one in enumerate(theta):
        x, y = clients.block(torch.tensor([i])).x[0], clients.rows(i)[1]
        wrong.append(float((run.method.model(one, x).argmax(1) != y).float().mean()))
    assert zero.empirical == initial.empirical == pytest.approx(sum(wrong) / len(wrong), abs=1e-6)
    n, m = 5, 8
    within = math.sqrt((zero.parts["KL of the models"] + math.log(8 * n * m / 0.05) + 1) / (2 * n * m))
    assert zero.within == pytest.approx(within) and zero.vacuous
    assert initial.between < zero.between, "networks stay nearer to where they began than to 0"


def test_flowdup_and_the_command_line(tmp_path: Path) -> None:
    run = trained(tmp_path, "flowdup", dimension=4, features=3, width=3, cohort=5)
    shown = CliRunner().invoke(app, [str(run.path), "--json"])
    assert shown.exit_code == 0, shown.output
    zero, initial = json.loads(shown.output)
    assert zero["theorem"] == "Theorem 4" and zero["between"] == 0, "all training clients have labels"
    assert zero["vacuous"] and zero["total"] == pytest.approx(zero["empirical"] + zero["within"])
    assert initial["parts"]["KL of the networks"] < zero["parts"]["KL of the networks"]
    psi_r = run.state["prior"].double()
    assert zero["parts"]["KL of the models"] > float(psi_r.square().sum()) / 2e-6
    words = CliRunner().invoke(app, [str(run.path)]).output
    assert "promises nothing" in words


def test_what_has_no_bound_says_so(tmp_path: Path) -> None:
    with pytest.raises(DoesNotApply, match="fedavg has no bound here"):
        bounds_of(trained(tmp_path, "fedavg"))
