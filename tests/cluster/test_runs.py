"""Runs of recipes on real workers, from the command down: data are loaded there, and results are as in one process."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from unalike.api import Interrupted, UserError, compare, resume, run
from unalike.data.sources.catalog import CATALOG
from unalike.deploy import plain
from unalike.deploy.session import deal, workers_folder
from unalike.runs import checkpoint, folder
from unalike.runs.absent import Absent
from unalike.runs.finished import FinishedRun
from unalike.runs.load import load_data
from unalike.runs.recipe.recipe import Data, Recipe
from unalike.runs.watcher import Watcher
from unalike.runtime.workers import Workers

QUICK = {"data": "digits", "clients": 20, "rounds": 2, "local_epochs": 1, "block": 8, "checkpoint_every": 1}
ON_RAY = {"runtime": "ray", "workers": 2}


def states(one: Path, other: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    saved = [checkpoint.load(path) for path in (one, other)]
    assert saved[0] is not None and saved[1] is not None and saved[0].state.keys() == saved[1].state.keys()
    return [(saved[0].state[name], saved[1].state[name]) for name in saved[0].state]


@pytest.mark.parametrize("method", ["fedavg", "pefll", "local"])
def test_a_run_ends_as_in_one_process_and_equal_bits_when_repeated(
    method: str, shared: Workers, tmp_path: Path
) -> None:
    here = run(method, **QUICK, out=tmp_path / "here")
    there, again = (run(method, **QUICK, **ON_RAY, out=tmp_path / name) for name in ("there", "again"))
    for ours, theirs in states(tmp_path / "here", tmp_path / "there"):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(*pair) for pair in states(tmp_path / "there", tmp_path / "again"))
    scores = [pd.read_csv(tmp_path / name / folder.SCORES) for name in ("here", "there", "again")]
    pd.testing.assert_frame_equal(scores[0], scores[1], rtol=1e-3, atol=1e-4)
    pd.testing.assert_frame_equal(scores[1], scores[2], rtol=0)
    assert (here.bytes, here.client_count, here.failures) == (there.bytes, there.client_count, there.failures)
    maps = [json.loads((tmp_path / name / folder.CLIENT_MAP).read_text()) for name in ("here", "there")]
    assert all(maps[0][what] == maps[1][what] for what in ("names", "group", "n", "label_histogram"))
    assert again.accuracy == there.accuracy
    kept = [FinishedRun.open(tmp_path / name).kept for name in ("here", "there")]
    assert kept[0].keys() == kept[1].keys()
    for name in {key.rsplit(".", 1)[0] for key in kept[0]}:
        ids = [one[f"{name}.ids"].sort() for one in kept]
        assert torch.equal(ids[0].values, ids[1].values)
        values = [one[f"{name}.values"][order.indices] for one, order in zip(kept, ids, strict=True)]
        torch.testing.assert_close(values[1], values[0], rtol=1e-4, atol=1e-5)


def test_the_result_and_the_report_have_a_line_for_each_worker(shared: Workers, tmp_path: Path, drawings: None) -> None:
    said: list[str] = []

    class Heard(Watcher):
        def workers(self, text: str) -> None:
            said.append(text)

    found = run("fedavg", **QUICK, **ON_RAY, out=tmp_path / "run", watcher=Heard())
    assert [one.clients for one in found.workers] == [10, 10]
    assert all(one.rate > 0 and one.answered > 0 and one.failed == 0 for one in found.workers)
    assert json.loads((tmp_path / "run" / folder.RESULT).read_text())["workers"][1]["worker"] == 1
    assert "Who computed it" in (tmp_path / "run" / folder.REPORT).read_text()
    assert said and "0: " in said[-1] and "clients/s" in said[-1]


def test_inputs_are_scaled_by_what_the_workers_clients_say(shared: Workers, tmp_path: Path) -> None:
    rows = [{"client": f"c{i % 5}", "a": i * 7 % 11, "b": 100.0 + i * 3 % 13, "y": i % 2} for i in range(60)]
    file = tmp_path / "rows.csv"
    pd.DataFrame(rows).to_csv(file, index=False)
    quick = {**QUICK, "clients": None, "unseen": 1}
    for name, more in (("here", {}), ("there", ON_RAY)):
        run("fedavg", **{**quick, "data": str(file)}, **more, out=tmp_path / name)
    schemas = [folder.load_roster(tmp_path / name).schema for name in ("here", "there")]
    assert schemas[0].shift is not None and schemas[1].shift is not None
    torch.testing.assert_close(schemas[0].shift, schemas[1].shift)
    for ours, theirs in states(tmp_path / "here", tmp_path / "there"):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6)


def test_the_driver_never_opens_the_data(shared: Workers, tmp_path: Path) -> None:
    """An audit hook sees every file that this process opens."""
    file, opened = tmp_path / "rows.csv", []
    pd.DataFrame([{"client": i % 4, "a": i * 0.5, "y": i % 2} for i in range(40)]).to_csv(file, index=False)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]) == str(file):
            opened.append(event)

    sys.addaudithook(watch)
    file.read_bytes()
    assert opened, "the hook sees nothing, so it proves nothing"
    opened.clear()
    run("fedavg", **{**QUICK, "clients": None, "data": str(file)}, **ON_RAY, out=tmp_path / "run")
    assert not opened


def test_a_comparison_shares_workers_and_data(shared: Workers, tmp_path: Path) -> None:
    found = compare("local", "fedavg", **QUICK, **ON_RAY, out=tmp_path / "both")
    assert [len(one.workers) for one in found.results] == [2, 2]
    alone = run("fedavg", **QUICK, **ON_RAY, out=tmp_path / "alone")
    assert found["fedavg"].accuracy == alone.accuracy


class Stop(Watcher):
    """Ends the run as a full stop of the machine would: after a round, with an error that nothing handles."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, record: object) -> None:
        if record["round"] == self.after:  # type: ignore[index]
            raise KeyboardInterrupt


@pytest.mark.parametrize("lost", ["again", "failed"])
@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_driver_that_is_stopped_goes_on_as_if_nothing_had_happened(
    method: str, lost: str, shared: Workers, tmp_path: Path
) -> None:
    """The workers keep what their clients keep in folders of their own. The checkpoint is of round 2, the stop in 3."""
    settings = {**QUICK, **ON_RAY, "rounds": 4, "checkpoint_every": 2}
    recipe = Recipe(method=method, rounds=4).model_dump()
    assert recipe["runtime"]["lost"] == "again"
    whole = run(method, **settings, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(method, **settings, out=tmp_path / "stopped", watcher=Stop(3))
    path = tmp_path / "stopped"
    toml = path / folder.RECIPE
    assert 'lost = "again"' in toml.read_text()
    toml.write_text(toml.read_text().replace('lost = "again"', f'lost = "{lost}"'))
    assert list(workers_folder(path).glob("worker-*/run/*.reply"))
    gone_on = resume(path)
    assert gone_on.accuracy == whole.accuracy
    assert all(torch.equal(*pair) for pair in states(tmp_path / "whole", path))


def test_data_of_this_process_are_refused(shared: Workers) -> None:
    population = load_data(Recipe(method="fedavg", data=Data(clients=5)))
    with pytest.raises(UserError, match="workers load their clients' rows themselves"):
        run("fedavg", data=population, rounds=1, **ON_RAY)


def test_what_a_worker_cannot_load_is_told(shared: Workers) -> None:
    with pytest.raises(ValueError, match=r"worker 0: .*there is no file or folder /nowhere/rows\.csv"):
        run("fedavg", data="/nowhere/rows.csv", rounds=1, **ON_RAY)


def test_settings_for_workers_are_refused_where_there_are_none() -> None:
    with pytest.raises(UserError, match=r"workers is for workers of a cluster: set runtime\.name to ray"):
        run("fedavg", rounds=1, workers=2)
    assert "digits" in CATALOG and Interrupted


def test_what_is_known_of_absent_rows_crosses_whole() -> None:
    population = load_data(Recipe(method="fedavg", data=Data(clients=6, labeled=0.5)))
    there = plain.decode(plain.encode(Absent.of(population, {"rows": 1}, None)))
    assert isinstance(there, Absent) and len(there.train.x) == 0
    assert there.schema == population.schema and torch.equal(there.sizes, population.sizes)
    for name in ("seen", "unseen"):
        assert torch.equal(getattr(there, name), getattr(population, name))
    for name in ("name", "kind", "classes", "partition", "scaling", "network", "incomplete"):
        assert getattr(there, name) == getattr(population, name)
    assert {one.name for one in dataclasses.fields(Absent)} >= {"key", "fingerprint", "counts"}


def test_clients_are_dealt_out_by_their_work() -> None:
    cost, seen = torch.tensor([100, 1, 1, 90, 10, 1, 9, 1]), torch.tensor([0, 1, 2, 3, 4, 6])
    dealt = deal(cost, seen, 2)
    assert sorted(torch.cat(dealt).tolist()) == list(range(8))
    loads = [int(cost[[i for i in one.tolist() if i in seen.tolist()]].sum()) for one in dealt]
    assert max(loads) - min(loads) <= 10, loads
    with pytest.raises(UserError, match=r"9 workers \(--workers\) for 8 clients"):
        deal(cost, seen, 9)
