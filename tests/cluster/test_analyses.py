"""``unalike kmeans``, ``mdm`` and ``estimate`` on real workers: the same result as in one process, and no row here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from unalike.analytics.estimation.samples import Samples
from unalike.analytics.kmeans.baselines import KFed
from unalike.commands.main import app
from unalike.core.wire import WireError
from unalike.deploy import plain
from unalike.deploy.session import Away, Session
from unalike.runs.recipe.recipe import Runtime
from unalike.runtime import workers as module
from unalike.runtime.workers import Workers

ON_RAY = ("--runtime", "ray", "--workers", "2")
POINTS = ("kmeans", "--data", "gaussian-mixture:clients=40,points=10,dim=4,components=3", "--k", "3")
FEW = ("kmeans", "--data", "gaussian-mixture:clients=10,points=20,dim=3,components=3", "--k", "3")  # for secure sums
MEANS = "gaussian-means:clients=60,dim=3,sigma_theta=0.5,sigma_x=1"
LINES = "linear-prior:dim=3,clients=40,points=12"
COMMANDS = {
    "kmeans": (*POINTS, "--steps", "1", "--starts", "0", "--baselines"),
    "kmeans, private": (*POINTS, "--starts", "0", "--epsilon", "8", "--delta", "1e-4", "--simulate-noise"),
    "kmeans, scaled": (*FEW, "--starts", "0", "--standardize", "--secure"),
    "mdm": ("mdm", "--data", "mdm:medium-2", "--clients", "80", "--components", "1-2", "--rounds", "3"),
    "mdm, noisy histograms": (
        *("mdm", "--data", "mdm:medium-2", "--clients", "60", "--components", "2", "--rounds", "2"),
        *("--unit", "point", "--epsilon", "4", "--simulate-noise"),
    ),
    "means": ("estimate", "gaussian", "--data", MEANS),
    "means, held out": ("estimate", "gaussian", "--data", "OWN", "--label-column", "", "--test", "0.3"),
    "rates": ("estimate", "bernoulli", "--data", "bernoulli:clients=60,points=8", "--epsilon", "3", "--simulate-noise"),
    "candidates": ("estimate", "mixture", "--data", MEANS, "--components", "2"),
    "linear": (
        "estimate",
        "linear",
        "--data",
        LINES,
        "--rounds",
        "3",
        "--mu",
        "0",
        "--sigma-theta",
        "0.1",
        "--sigma-x",
        "0.3",
    ),
    "linear, held out": ("estimate", "linear", "--data", "OWN", "--rounds", "3", "--test", "0.3"),
}
UNLIKE = {"seconds", "cpu_seconds"}  # how long it took


def told(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def assert_alike(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name in one.keys() - UNLIKE:
            assert_alike(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for place, pair in enumerate(zip(one, other, strict=True)):
            assert_alike(*pair, f"{where}[{place}]")
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6), where
    else:
        assert one == other, where


PRIVATE = {  # with noise of the operating system, which no two runs have alike
    "kmeans": (*FEW, "--epsilon", "8", "--delta", "1e-4", "--secure"),
    "mdm": ("mdm", "--data", "mdm:medium-2", "--clients", "60", "--rounds", "2", "--epsilon", "8", "--largest", "500"),
    "rates": ("estimate", "bernoulli", "--data", "bernoulli:clients=60,points=8", "--epsilon", "3"),
    "candidates": (
        *("estimate", "mixture", "--data", MEANS, "--components", "2", "--epsilon", "8", "--bound", "3"),
        *("--central", "--rounds", "2", "--radius", "1"),
    ),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    client = np.repeat(np.arange(20), 10)
    x = random.normal(size=(200, 2)) + random.normal(size=(20, 2))[client]
    file = tmp_path_factory.mktemp("own") / "own.csv"
    table = pd.DataFrame({"client": client, "a": x[:, 0], "b": x[:, 1]})
    table.assign(y=x @ [1.0, -2.0] + random.normal(size=200)).to_csv(file, index=False)
    return file


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_tells_the_same(name: str, own: Path, shared: Workers) -> None:
    arguments = [str(own) if one == "OWN" else one for one in COMMANDS[name]]
    here, there = told(*arguments), told(*arguments, *ON_RAY)
    workers = there.pop("workers")
    assert_alike(here, there)
    assert [one["worker"] for one in workers] == [0, 1] and all(one["rate"] > 0 for one in workers)


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_analysis_asks_for_nothing_that_workers_keep_to_themselves(name: str, shared: Workers) -> None:
    """A shard of a run with an ε refuses what has no noise: neither the algorithm nor its measures may need it."""
    found = told(*PRIVATE[name], *ON_RAY)
    assert (found.get("privacy") or found)["epsilon"] is not None


def test_a_baseline_without_noise_is_asked_where_there_is_none(shared: Workers) -> None:
    away = Away("system", Session(Runtime(name="ray", workers=2)))
    points = away.read("points", data=FEW[2], server=None, standardize=False, seed=0)
    with pytest.raises(RuntimeError, match="without noise: nothing is sent"):
        KFed(3).fit(away.federate(points.clients, 0, block=8))
    assert len(KFed(3).fit(away.federate(points.clients, 0, block=8, noise="seeded"))) == 3


def test_workers_are_told_while_they_work_and_at_the_end(shared: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "TICK", 1e-4)  # seconds until somebody is late: nobody is that fast
    watch = Away.watch

    def watched(away: Away, tell: Callable[[str], None]) -> None:
        watch(away, lambda text: (said.append(text), tell(text))[1])

    monkeypatch.setattr(Away, "watch", watched)
    done = CliRunner().invoke(app, ["estimate", "linear", "--data", LINES, "--rounds", "3", *ON_RAY])
    assert done.exit_code == 0, done.output
    assert "clients/s" in said[-1] and "late" not in said[-1]
    assert any("late: " in text for text in said)
    assert "worker 1: 20 clients, " in done.output


def test_this_process_has_no_row_and_a_worker_that_dies_is_told_again(shared: Workers) -> None:
    away = Away("seeded", Session(Runtime(name="ray", workers=2)))
    problem = away.read("samples", data=MEANS, check=None, counts=None, seed=0, clients=None, test=0.0)
    assert isinstance(problem, Samples) and len(problem.clients) == 60 and len(problem.clients.x) == 0
    from unalike.analytics.estimation.means import GaussianMeans

    federation = away.federate(problem.parts, 0, block=16)
    before = GaussianMeans().estimate(federation)
    shared.engine.end(1)
    after = GaussianMeans().estimate(away.federate(problem.parts, 0, block=16))
    torch.testing.assert_close(after.estimate, before.estimate)
    again = GaussianMeans(sigma_x=2.0, sigma_theta=0.1).estimate(away.federate(problem.parts, 0, block=16))
    assert not torch.allclose(again.estimate, before.estimate)  # other settings reached the workers


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("kmeans", "--starts", "3", *ON_RAY), "--starts would need the rows of all clients in one process"),
        (("mdm", "--data", "mdm:medium-2", "--compare", *ON_RAY), "--compare would need the rows"),
        (("estimate", "bernoulli", "--cross-validate", *ON_RAY), "--cross-validate would need the rows"),
        (("estimate", "gaussian", "--workers", "2"), "add --runtime ray"),
        (("kmeans", "--runtime", "cloud"), "expected simulate, ray or network"),
        (("estimate", "bernoulli", "--data", MEANS, *ON_RAY), "worker 0"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], says: str, shared: Workers) -> None:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code != 0 and says in " ".join(done.output.split()), done.output


def test_settings_are_classes_of_unalike_and_plain_values_and_nothing_else() -> None:
    made = Samples(torch.zeros(1), None)  # type: ignore[arg-type]  # any array will do
    back = plain.decode(plain.encode([made, {"a": (1, None, "b")}]))
    assert isinstance(back[0], Samples) and back[1] == {"a": (1, None, "b")}
    with pytest.raises(TypeError, match="cannot be described to a worker"):
        plain.encode(object())
    for bad in (b"os:system", b"unalike.deploy.plain:encode"):
        forged = plain.encode(made).replace(b"unalike.analytics.estimation.samples:Samples", bad.ljust(44))
        with pytest.raises(WireError, match="is no dataclass of Unalike"):
            plain.decode(forged)
