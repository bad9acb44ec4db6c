"""Runs of recipes at five sites that are processes of their own: the same result as in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from tests.network.sites import Network, rows, together
from unalike.api import run
from unalike.commands.main import app
from unalike.report.page.page import write_report
from unalike.runs import checkpoint, folder

NAMES = ("a", "b", "c")
FIVE = (*NAMES, "d", "e")
QUICK = {"rounds": 2, "local_epochs": 1, "block": 4, "model": "mlp"}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    made = Network(tmp_path_factory.mktemp("network"))
    for number, name in enumerate(FIVE):
        made.add_site(name, rows(number))
    made.start_all(*FIVE)
    yield made
    made.close()


def states(one: Path, other: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    saved = [checkpoint.load(path) for path in (one, other)]
    assert saved[0] is not None and saved[1] is not None and saved[0].state.keys() == saved[1].state.keys()
    return [(saved[0].state[name], saved[1].state[name]) for name in saved[0].state]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {}),
        ("fedavg", {"secure": True, "clip": 1.0}),
        ("fedpi", {}),
        ("pefll", {}),
        ("flowdup", {}),
        ("adaped", {}),
        ("rdpcfl", {}),
        ("local", {}),
    ],
    ids=lambda one: one if isinstance(one, str) else ",".join(one),
)
def test_a_run_ends_as_in_one_process(method: str, settings: dict[str, Any], network: Network, tmp_path: Path) -> None:
    how = {**QUICK, "hyperparameters": settings}
    here = together([network.folder / name for name in FIVE])
    alone = run(method, data=here, **how, out=tmp_path / "here")
    at_sites = {"runtime": "network", "network": str(network.hub), "unseen": 0}
    spread = run(method, data="rows.csv", **how, **at_sites, out=tmp_path / "there")
    for ours, theirs in states(tmp_path / "here", tmp_path / "there"):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6)
    scores = [pd.read_csv(tmp_path / name / folder.SCORES) for name in ("here", "there")]
    assert scores[1]["client"].tolist() == [f"{name}/{number}" for name in FIVE for number in (1, 2, 3)]
    columns = ["score", "loss"]
    pd.testing.assert_frame_equal(scores[0][columns], scores[1][columns], rtol=1e-3, atol=1e-4)
    assert (alone.bytes, alone.failures) == (spread.bytes, spread.failures)
    assert [worker.name for worker in spread.workers] == [f"node {name}" for name in FIVE]
    if method == "fedavg" and not settings:
        write_report([tmp_path / "there"], tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        assert "Who computed it" in page and all(f"node {name}" in page for name in FIVE)
        run(method, data="rows.csv", **how, **at_sites, out=tmp_path / "again")
        assert all(torch.equal(*pair) for pair in states(tmp_path / "there", tmp_path / "again"))


def test_analyses_end_as_in_one_process(network: Network, tmp_path: Path) -> None:
    """As the commands do it; by the library: ``tests/deploy/test_analyses_at_sites.py``."""
    whole = pd.concat([pd.read_csv(network.folder / name / "rows.csv") for name in FIVE])
    whole.to_csv(tmp_path / "rows.csv", index=False)
    features = ",".join("abcde")
    kmeans = ["kmeans", "--features", features, "--k", "3", "--starts", "0"]
    server = pd.DataFrame(torch.randn(40, 5).numpy(), columns=list("abcde"))
    server.to_csv(tmp_path / "server.csv", index=False)
    commands: list[tuple[list[str], str]] = [
        ([*kmeans, "--server", str(tmp_path / "server.csv")], "cost"),
        ([*kmeans, "--ground", "packing", "--radius", "6", "--secure"], "cost"),
        (["mdm", "--components", "2", "--rounds", "3"], "log_likelihood"),
        (["estimate", "mixture", "--features", features], "prior"),
    ]  # fmt: skip
    for words, told in commands:
        found = []
        for where in (["--data", str(tmp_path / "rows.csv")],
                      ["--data", "rows", "--runtime", "network", "--network", str(network.hub)]):  # fmt: skip
            done = CliRunner().invoke(app, [*words, *where, "--json"])
            assert done.exit_code == 0, (words, done.output, done.exception)
            found.append(json.loads(done.stdout))
        here, there = (one[told]["candidates"][0] if told == "prior" else one[told] for one in found)
        assert here == pytest.approx(there, rel=1e-4), words
        assert [one["name"] for one in found[1]["workers"]] == [f"node {name}" for name in FIVE]
