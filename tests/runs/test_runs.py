"""Runs, their folders, and what is left of them after crashes of every kind."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import os
import re
import shutil
import signal
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.child import in_child
from tests.runs.helpers import SMALL, At, Crash, crash, metrics, timeless
from unalike.api import Interrupted, UserError, compare, resume, run
from unalike.commands import console
from unalike.commands.main import app
from unalike.core.disk import part_file, write_whole
from unalike.core.federation import Cohort, Federation
from unalike.core.schema import Schema
from unalike.data import from_arrays
from unalike.notebook import Result
from unalike.runs import folder as folders
from unalike.runs import training
from unalike.runs.checkpoint import load as load_checkpoint
from unalike.runs.measure import Measured
from unalike.runs.recipe.recipe import to_recipe
from unalike.runs.watcher import Watcher

ALONE = {name: value for name, value in SMALL.items() if name != "cohort"}  # for Local, whose clients keep their models


def test_three_lines() -> None:
    from unalike import run

    result = run("fedavg", data="digits", partition="pathological", rounds=2)
    text = str(result)

    assert "fedavg" in text and "unseen" in text
    assert result.accuracy.unseen is not None and 0 <= result.accuracy.unseen.mean <= 1


def test_a_run_folder_has_everything(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run("fedavg", out=out, seed=3, **SMALL)
    stored = json.loads((out / "result.json").read_text())
    assert stored == result.to_json()
    assert (stored["method"], stored["data"], stored["seed"], stored["rounds"]) == ("fedavg", "digits", 3, 8)
    assert set(stored["accuracy"]) == {"seen", "unseen", "unlabeled"}
    assert not stored["privacy"].pop("private") and not any(stored["privacy"].values())
    assert stored["bytes"]["up"] > 0 and stored["bytes"]["down"] > 0
    recipe = tomllib.loads((out / "recipe.toml").read_text())
    assert recipe["seed"] == 3 and recipe["hyperparameters"]["local"]["lr"] == 0.1
    assert json.loads((out / "versions.json").read_text())["torch"].startswith("2.")
    assert [record["round"] for record in metrics(out)] == list(range(1, 9))
    assert [record["round"] for record in metrics(out) if "seen" in record] == [4, 8]
    assert len(list(csv.DictReader((out / "metrics.csv").read_text().splitlines()))) == 8
    rows = list(csv.DictReader((out / "simulation" / "scores.csv").read_text().splitlines()))
    assert [row["group"] for row in rows] == ["seen"] * 9 + ["unseen"] * 3 + ["unlabeled"] * 3
    scores = [float(row["score"]) for row in rows if row["group"] == "seen"]
    assert sum(scores) / 9 == pytest.approx(stored["accuracy"]["seen"]["mean"], abs=1e-6)
    assert stored["accuracy"]["seen"]["worst"] == pytest.approx(min(scores), abs=1e-6)
    assert stored["accuracy"]["seen"]["p10"] == pytest.approx(float(torch.tensor(scores).quantile(0.1)), abs=1e-6)
    transcript = json.loads((out / "transcript.json").read_text())
    assert {row["array"] for row in transcript} == {"update", "loss"}
    assert load_file(out / "checkpoint.safetensors")["theta"].shape == (650,)
    assert "<html" in (out / "report.html").read_text()
    roster = folders.load_roster(out)
    assert len(roster) == 9 and roster.schema == Schema.from_json((out / "schema.json").read_text())
    assert roster.schema.shift is not None and roster.schema.shape == (1, 8, 8) and roster.schema.classes == 10
    kept = {file.name for file in (out / "clients").iterdir()}
    assert kept == {"fingerprint.json"}, "FedAvg's clients keep nothing"
    assert not (out / "scores.csv").exists() and (out / "simulation" / "map.json").exists()


def test_the_same_settings_give_the_same_result_and_writing_changes_nothing(tmp_path: Path) -> None:
    first = run("fedavg", out=tmp_path / "a", **SMALL)
    second = run("fedavg", **SMALL)
    assert first.accuracy == second.accuracy and first.bytes == second.bytes
    assert run("fedavg", seed=1, **SMALL).accuracy != first.accuracy


def test_what_is_not_served_is_not_scored() -> None:
    served, labels_needed = run("fedavg", **SMALL), run("fedavg-finetune", **SMALL)
    assert served.accuracy.unlabeled == served.accuracy.unseen, "one model for all needs no labels of newcomers"
    assert labels_needed.accuracy.unlabeled is None and labels_needed.accuracy.unseen is not None
    assert "not served" in str(labels_needed) and "not served" not in str(served)


def test_clients_without_labels_are_counted_but_not_scored_where_labels_are_needed() -> None:
    half = run("fedavg-finetune", labeled=0.5, **SMALL).accuracy.seen
    everyone = run("fedavg", labeled=0.5, **SMALL).accuracy.seen
    assert half is not None and everyone is not None
    assert (half.clients, half.scored) == (9, 4)
    assert (everyone.clients, everyone.scored) == (9, 9)


@pytest.mark.usefixtures("drawings")
def test_clients_whose_model_is_not_finite_are_counted_and_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from unalike.methods.fedavg import FedAvg\n"
        "@dataclass(frozen=True)\n"
        "class Broken(FedAvg):\n"
        "    broken: int = 0\n"
        "    def personalize(self, state, cohort):\n"
        "        theta = super().personalize(state, cohort).clone()\n"
        "        theta[: self.broken] = 1e38\n"
        "        return theta\n"
    )
    settings = {**SMALL, "rounds": 1, "unseen": 0, "out": tmp_path / "run"}
    result = run(f"{file}:Broken", **settings, hyperparameters={"broken": 3})
    seen = result.accuracy.seen
    assert seen is not None and (seen.clients, seen.scored, seen.failed) == (12, 9, 3)
    says = "3 of 12 seen clients have no finite score"
    assert f"Broken: {says} and are left out of the mean" in " ".join(str(result).split())
    assert says in (tmp_path / "run" / "report.html").read_text()
    with pytest.raises(UserError, match=r"training diverged in round 1: 8 clients .*\n.*Scorer.score"):
        run(f"{file}:Broken", **{**settings, "out": None}, hyperparameters={"broken": 8})


def test_no_unseen_clients_means_null() -> None:
    result = run("fedavg", **{**SMALL, "unseen": 0.0})
    assert result.accuracy.unseen is None and result.accuracy.unlabeled is None and result.accuracy.seen


def test_no_rounds_measures_the_start(tmp_path: Path) -> None:
    result = run("local", out=tmp_path / "run", **{**ALONE, "rounds": 0})
    assert result.accuracy.unseen is not None and [record["round"] for record in metrics(tmp_path / "run")] == [0]


def test_own_arrays_run_and_resume_from_python(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, client = torch.randn(300, 5, generator=generator), torch.arange(300) % 10
    population = from_arrays(x, (x[:, 0] > 0).long(), client, name="mine")
    settings = {"rounds": 6, "checkpoint_every": 2, "eval_every": 6, "block": 4}
    whole = run("fedavg", data=population, out=tmp_path / "a", **settings)
    with pytest.raises(Crash):
        run("fedavg", data=population, out=tmp_path / "b", watcher=At(5, crash), **settings)
    with pytest.raises(UserError, match="given from Python"):
        resume(tmp_path / "b")
    assert resume(tmp_path / "b", data=population).accuracy == whole.accuracy


def same_tensors(one: Path, other: Path, name: str) -> None:
    a, b = (load_file(folder / name) for folder in (one, other))
    assert a and a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a), name


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("local", ALONE | {"hyperparameters": {"local": {"steps": 4}}}),
        (
            "fedavg-finetune",
            SMALL | {"hyperparameters": {"server": {"kind": "adam", "lr": 0.01}, "finetune": {"steps": 4}}},
        ),
    ],
)
def test_a_resumed_run_ends_like_an_uninterrupted_one(method: str, settings: Any, tmp_path: Path) -> None:
    whole = run(method, out=tmp_path / "whole", **settings)
    for crashed_after in (2, 5, 8):  # before the first checkpoint, between two, before the result
        broken = tmp_path / f"broken-{crashed_after}"
        with pytest.raises(Crash):
            run(method, out=broken, watcher=At(crashed_after, crash), **settings)
        assert not (broken / "result.json").exists()
        resumed = resume(broken)
        assert resumed.accuracy == whole.accuracy and resumed.bytes == whole.bytes
        assert timeless(broken) == timeless(tmp_path / "whole")
        for name in ("simulation/scores.csv", "transcript.json", "ledger.json", "schema.json"):
            assert (broken / name).read_text() == (tmp_path / "whole" / name).read_text(), name
        same_tensors(tmp_path / "whole", broken, "checkpoint.safetensors")
        if method == "local":
            same_tensors(tmp_path / "whole", broken, "clients/8.safetensors")


def test_failures_and_empty_private_cohorts_survive_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    sample = Federation.sample

    def watched(self: Federation, *arguments: Any, **named: Any) -> Cohort:
        cohort = sample(self, *arguments, **named)
        sizes.append(len(cohort))
        return cohort

    monkeypatch.setattr(Federation, "sample", watched)
    lossy = {**SMALL, "drop": 0.15}
    # with this seed a Poisson cohort of one expected client is empty in round 4, the first after the checkpoint
    private = {**SMALL, "seed": 1, "cohort": 0.1, "noise_multiplier": 1.0, "clip": 0.5, "delta": 0.01}
    private["simulate_noise"] = True  # so that both runs have the same noise
    for name, settings in (("lossy", lossy), ("private", private)):
        whole = run("fedavg", out=tmp_path / name, **settings)
        with pytest.raises(Crash):
            run("fedavg", out=tmp_path / f"{name}-broken", watcher=At(5, crash), **settings)
        resumed = resume(tmp_path / f"{name}-broken")
        assert resumed.failures == whole.failures
        same_tensors(tmp_path / name, tmp_path / f"{name}-broken", "checkpoint.safetensors")
    failed = [record["failures"] for record in metrics(tmp_path / "lossy")]
    assert sum(failed) == Result.load(tmp_path / "lossy").failures
    assert sum(failed[:3]) and sum(failed[3:]), "nobody failed before or after the checkpoint: choose another seed"
    replies = json.loads((tmp_path / "private" / "transcript.json").read_text())[0]
    assert 0 in sizes, "no cohort was empty: choose another seed"
    assert replies["times"] == 8, "an empty cohort sends its noise like any other"


DIES = """
import os, signal
from dataclasses import dataclass
from pathlib import Path
from unalike.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Dies(FedAvg):
    def round(self, state, federation):
        result = super().round(state, federation)
        mark = Path(__file__).with_name("died")
        if federation.round == 7 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result
"""


def test_kill_9_then_resume(tmp_path: Path) -> None:
    """A process killed in the middle of round 7, from a method that lives outside of the package.

    Of a method whose clients keep their models, so that more could go wrong than with FedAvg.
    """
    (tmp_path / "dies.py").write_text(DIES.replace("fedavg", "local").replace("FedAvg", "Local"))
    settings = ALONE
    method, out = f"{tmp_path / 'dies.py'}:Dies", tmp_path / "run"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    killed = in_child("run", method, *flags, "--out", out, "--quiet")
    assert killed.code == -signal.SIGKILL, killed.err
    saved = load_checkpoint(out)
    assert saved is not None and saved.round == 6, "at most one checkpoint interval is lost"
    resumed = in_child("resume", out, "--json", "--trust-code", tmp_path / "dies.py")
    assert resumed.code == 0, resumed.err
    whole = run(method, **settings)
    assert json.loads(resumed.out)["accuracy"] == whole.to_json()["accuracy"]
    assert json.loads((out / "result.json").read_text())["accuracy"] == whole.to_json()["accuracy"]
    assert [record["round"] for record in metrics(out)] == list(range(1, 9))


def test_ctrl_c_finishes_the_round_and_saves(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"stopped after round 5 of 8\. Go on with: unalike resume .*run"):
        run("fedavg", out=tmp_path / "run", watcher=At(4, lambda: os.kill(os.getpid(), signal.SIGINT)), **SMALL)
    assert signal.getsignal(signal.SIGINT) is before
    saved = load_checkpoint(tmp_path / "run")
    assert saved is not None and saved.round == 5
    assert resume(tmp_path / "run").accuracy == run("fedavg", **SMALL).accuracy


def test_sigterm_is_answered_as_what_it_is(tmp_path: Path) -> None:
    said: list[str] = []

    class Listening(At):
        def note(self, text: str) -> None:
            said.append(text)

    for number in (signal.SIGTERM, signal.SIGINT):
        with pytest.raises(Interrupted, match="stopped after round 2"):
            run("fedavg", watcher=Listening(1, partial(os.kill, os.getpid(), number)), **SMALL)
    assert said == [
        f"stopping after this round; {again} again to stop at once" for again in ("send SIGTERM", "press Ctrl-C")
    ]


def test_a_loss_that_runs_away_is_told_once() -> None:
    said: list[str] = []

    class Listening(Watcher):
        def note(self, text: str) -> None:
            said.append(text)

    with contextlib.suppress(UserError):  # it may end where numbers do
        run("fedavg", watcher=Listening(), lr=1e6, **SMALL)
    [told] = [text for text in said if "runs away" in text]
    assert re.search(r"fedavg: the loss is \S+ in round \d+: training runs away; try a smaller learning rate$", told)
    assert console.with_flags(told).endswith("try a smaller learning rate (--lr)")


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run("fedavg", out=tmp_path / "run", watcher=At(4, twice), **SMALL)
    assert resume(tmp_path / "run").accuracy == run("fedavg", **SMALL).accuracy


def test_a_finished_run_is_only_read(tmp_path: Path) -> None:
    result = run("fedavg", out=tmp_path / "run", **SMALL)
    before = (tmp_path / "run" / "checkpoint.safetensors").stat().st_mtime_ns
    assert resume(tmp_path / "run") == result
    assert (tmp_path / "run" / "checkpoint.safetensors").stat().st_mtime_ns == before


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        run("fedavg", out=tmp_path / "run", watcher=At(5, crash), **SMALL)
    with folders.RunFolder(tmp_path / "run"), pytest.raises(UserError, match="in use by another run"):
        resume(tmp_path / "run")


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill() -> None:
        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(UserError, match=r"the disk is full: .* unalike resume .*run"):
        run("fedavg", out=tmp_path / "run", watcher=At(5, fill), **SMALL)
    saved = load_checkpoint(tmp_path / "run")
    assert saved is not None and saved.round == 3
    assert not list((tmp_path / "run").glob(".*.part")), "no half-written file is left"
    monkeypatch.undo()
    assert resume(tmp_path / "run").accuracy == run("fedavg", **SMALL).accuracy


def test_a_disk_that_fills_up_with_what_clients_keep_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Path, content: bytes, mode: int = 0o666) -> None:
        if file.parent.name == "clients":
            part_file(file).write_bytes(content[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        write_whole(file, content, mode)

    def fill() -> None:
        monkeypatch.setattr("unalike.runs.checkpoint.write_whole", full)

    with pytest.raises(UserError, match=r"the disk is full: .*6\.safetensors .* unalike resume .*run"):
        run("local", out=tmp_path / "run", watcher=At(4, fill), **ALONE)
    saved = load_checkpoint(tmp_path / "run")
    assert saved is not None and saved.round == 3 and saved.kept
    monkeypatch.undo()
    file = tmp_path / "run" / "clients" / "3.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"clients/3\.safetensors is damaged"):
        resume(tmp_path / "run")
    file.unlink()
    with pytest.raises(UserError, match=r"clients/3\.safetensors is missing: what the clients keep"):
        resume(tmp_path / "run")
    file.write_bytes(content)
    whole = run("local", out=tmp_path / "whole", **ALONE)
    assert resume(tmp_path / "run").accuracy == whole.accuracy
    same_tensors(tmp_path / "run", tmp_path / "whole", "clients/8.safetensors")


CHANGES = [
    (lambda t: t.assign(a=t["a"] + (t.index == 7)), "inputs differ"),
    (lambda t: t.assign(y=1 - t["y"]), "labels differ"),
    (lambda t: t.assign(client=t["client"] + 5), "names differ"),
    (lambda t: t[t["client"] < 8], "2 clients fewer, 20 rows fewer, sizes differ"),
    (lambda t: pd.concat([t, t.tail(1)]), "1 row more, sizes differ, inputs differ, labels differ"),
]


@pytest.mark.parametrize(("change", "says"), CHANGES)
def test_a_run_does_not_go_on_with_other_data(
    change: Callable[[pd.DataFrame], pd.DataFrame], says: str, tmp_path: Path
) -> None:
    rows = np.arange(100)
    table = pd.DataFrame({"client": rows // 10, "a": np.sin(rows), "b": np.cos(rows), "y": rows % 2})
    table.to_csv(tmp_path / "mine.csv", index=False)
    settings = {"rounds": 4, "checkpoint_every": 2, "block": 4, "model": "logistic", "test": 0, "unseen": 1}
    with pytest.raises(Crash):
        run("fedavg", data=tmp_path / "mine.csv", out=tmp_path / "run", watcher=At(3, crash), **settings)
    change(table).to_csv(tmp_path / "mine.csv", index=False)
    with pytest.raises(UserError, match=r"has changed since the run began: ") as told:
        resume(tmp_path / "run")
    assert says in str(told.value)
    table.to_csv(tmp_path / "mine.csv", index=False)
    assert resume(tmp_path / "run").round_count == 4


def test_the_fingerprint_of_data_has_a_key_of_its_own_and_the_scaling_is_asked_for_once(tmp_path: Path) -> None:
    x, client = np.random.default_rng(0).normal(3, 2, (200, 4)), np.arange(200) % 10
    data = (x, (x[:, 0] > 3).astype(int), client)
    settings = {"rounds": 4, "checkpoint_every": 2, "block": 4, "model": "logistic"}
    whole = run("fedavg", data=data, out=tmp_path / "a", **settings)
    with pytest.raises(Crash):
        run("fedavg", data=data, out=tmp_path / "b", watcher=At(1, crash), **settings)
    assert resume(tmp_path / "b", data=data).bytes == whole.bytes
    for name in ("transcript.json", "ledger.json", "schema.json"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text(), name
    asked = {row["array"]: row["times"] for row in json.loads((tmp_path / "b" / "transcript.json").read_text())}
    assert asked["total"] == asked["square"] == 1
    one, other = (json.loads((tmp_path / name / "clients" / "fingerprint.json").read_text()) for name in "ab")
    assert one["clients"] == other["clients"] == 10 and one["rows"] == 200
    assert one["key"] != other["key"] and one["inputs"] != other["inputs"], "equal data has no equal digest"


FORMATS = [
    ('{"format": 2, "version": "9.0"}', "has format 2"),
    ('{"format": "1"}', 'has format "1"'),
    ("{}", "has no format number"),
    ("[]", "has format []"),
    (None, "has no format number"),
]


@pytest.mark.parametrize(("about", "says"), FORMATS)
def test_a_folder_of_another_format_is_refused(about: str | None, says: str, tmp_path: Path) -> None:
    both = tmp_path / "both"
    for path in (both, both / "fedavg"):
        folders.create(path, to_recipe({"method": "fedavg"}, "test") if path.name == "fedavg" else None)
        file = path / "unalike.json"
        assert json.loads(file.read_text())["format"] == folders.FORMAT == 1
        file.unlink() if about is None else file.write_text(about)
    (both / "comparison.json").write_text('{"runs": [{"folder": "fedavg"}]}')
    for name in ("result.json", "transcript.json"):
        (both / "fedavg" / name).write_text("{}")
    newcomer = ("--data", str(tmp_path / "mine.npz"))
    commands = (("resume",), ("report",), ("analyse",), ("personalize", *newcomer), ("privacy", "show"))
    for command in commands:
        for path in (both / "fedavg", both):
            if path == both and command[0] in ("personalize", "privacy"):
                continue  # they take runs alone
            result = CliRunner().invoke(app, [*command, str(path)])
            shown = " ".join(result.output.split())
            assert result.exit_code == 1 and f"{path.name} {says}" in shown, (command, shown)
            assert "reads format 1" in shown and "use the version that made it" in shown
            assert ("unalike run" in shown) == (path != both), "a run can be repeated from its recipe"
            assert "had ended already" not in shown


def test_seeds_give_mean_and_deviation_over_seeds(tmp_path: Path) -> None:
    comparison = compare("fedavg", out=tmp_path / "c", seeds=2, **SMALL)
    assert [result.seed for result in comparison.groups[0]] == [0, 1]
    text = str(comparison)
    assert "mean ± std over 2 seeds" in text and re.search(r"^ +fedavg  .* ± ", text, re.MULTILINE)
    with pytest.raises(UserError, match=r"use compare\(\.\.\.\)"):
        run("fedavg", seeds=2, **SMALL)


def test_a_comparison_is_over_the_same_clients_and_can_be_resumed(tmp_path: Path) -> None:
    whole = compare("local", "fedavg", "fedavg-finetune", out=tmp_path / "whole", **SMALL)
    names = ("local", "fedavg", "fedavg-finetune")
    maps = [(tmp_path / "whole" / name / "simulation" / "map.json").read_text() for name in names]
    assert maps[0] == maps[1] == maps[2]
    assert (tmp_path / "whole" / "report.html").exists()

    class CrashInSecond(At):
        label = ""

        def begin(self, label: str, rounds: int, done: int, metric: str) -> None:
            self.label = label

    watcher = CrashInSecond(5, lambda: crash() if watcher.label == "fedavg" else None)
    with pytest.raises(Crash):
        compare("local", "fedavg", "fedavg-finetune", out=tmp_path / "broken", watcher=watcher, **SMALL)
    resumed = resume(tmp_path / "broken")
    assert [r.accuracy for r in resumed.results] == [r.accuracy for r in whole.results]
    assert [r.label for r in resumed.results] == ["local", "fedavg", "fedavg-finetune"]


@pytest.mark.parametrize("stopped_in", [2, 3])  # rounds: between two, and the last one of the first run
def test_a_stopped_comparison_names_its_own_folder_and_keeps_its_labels(stopped_in: int, tmp_path: Path) -> None:
    recipe, out = tmp_path / "two.toml", tmp_path / "both"
    recipe.write_text(
        '[[compare]]\nlabel = "ε = 8"\nmethod = "fedavg"\n[[compare]]\nlabel = "Größe"\nmethod = "local"\n'
    )
    settings = {**ALONE, "rounds": 3}
    watcher = At(stopped_in - 1, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted) as stopped:
        compare(str(recipe), out=out, watcher=watcher, **settings)
    assert str(stopped.value).endswith(f"Go on with: unalike resume {out}")
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"epsilon-8"}
    if stopped_in == 2:
        with pytest.raises(UserError, match=rf"unalike resume {out}\b"):
            compare(str(recipe), out=out, **settings)
        assert resume(out / "epsilon-8").label == "ε = 8", "a run knows its own label"
    resumed = resume(out)
    assert [result.label for result in resumed.results] == ["ε = 8", "Größe"]
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"epsilon-8", "grosse"}
    assert resumed.results[1].accuracy == run("local", **settings).accuracy


def test_training_and_measuring_are_timed_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, points = [0.0], list[bool]()

    def measure(*arguments: Any, newcomers: bool = True, by: Any = None) -> list[Measured]:
        now[0] += 100
        points.append(newcomers)
        return really(*arguments, newcomers=newcomers, by=by)

    class Second(Watcher):
        def round(self, record: Mapping[str, Any]) -> None:
            now[0] += 1
            if record["round"] == 5 and len(points) == 1:
                raise Crash

    really = training.measure
    monkeypatch.setattr(training, "measure", measure)
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with pytest.raises(Crash):
        run("local", out=tmp_path / "run", watcher=Second(), **ALONE)  # measured in round 4, saved in round 3
    assert [(record["seconds"], record["measuring"]) for record in metrics(tmp_path / "run")][3:] == [
        (3, 100),
        (4, 100),
    ]
    result = resume(tmp_path / "run", watcher=Second())
    assert (result.seconds, result.measuring) == (7, 200) and points == [False, False, True]
    assert "time of training alone (measuring took 3 min 20 s more)" in " ".join(str(result).split())
    unseen = ["unseen" in record and record["unseen"] is not None for record in metrics(tmp_path / "run")]
    assert unseen == [False] * 7 + [True], "newcomers would train anew from the start at every measurement"


def test_a_mistake_in_the_last_method_is_told_before_the_first_one_trains(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no method is called"):
        compare(str(_recipe(tmp_path)), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _recipe(tmp_path: Path) -> Path:
    file = tmp_path / "two.toml"
    file.write_text('[[compare]]\nmethod = "local"\n[[compare]]\nmethod = "fedvag"\n')
    return file


def test_a_recipe_keeps_its_own_data_when_run_from_python(tmp_path: Path) -> None:
    """Unless other data is named: the default of a method must not replace a recipe's."""
    lines = ["client,a,b,y", *(f"{row % 6},{row % 7},{row % 5},{row % 2}" for row in range(60))]
    (tmp_path / "shops.csv").write_text("\n".join(lines) + "\n")
    recipe = tmp_path / "shops.toml"
    recipe.write_text(f'method = "fedavg"\nrounds = 1\n[data]\nname = "{tmp_path / "shops.csv"}"\n')
    assert run(str(recipe), cohort=2).data == compare(str(recipe), cohort=2).results[0].data == "shops.csv"
    assert run(str(recipe), data="digits", cohort=2).data == "digits"


def test_fedprox_without_mu_is_fedavg_and_with_it_is_not() -> None:
    plain = run("fedavg", **SMALL).accuracy
    assert run("fedprox", hyperparameters={"mu": 0.0}, **SMALL).accuracy == plain
    assert run("fedprox", hyperparameters={"mu": 50.0, "local": {"lr": 0.01}}, **SMALL).accuracy != plain


def test_scores_of_a_run_with_an_epsilon_lie_in_simulation_alone(tmp_path: Path) -> None:
    private = {**SMALL, "noise_multiplier": 1.0, "clip": 0.5, "delta": 1e-3}
    out, parts = tmp_path / "private", ("seen", "unseen", "unlabeled", "gap")
    with pytest.raises(Crash):
        run("fedavg", out=out, watcher=At(7, crash), **private)
    result = resume(out)
    assert result.accuracy.seen is not None and result.scores == "simulation/accuracy.json"

    public = [file for file in out.iterdir() if file.is_file()]
    written = {file.name: file.read_text() for file in public if file.suffix in (".json", ".jsonl", ".csv", ".toml")}
    assert {"result.json", "metrics.jsonl", "metrics.csv", "recipe.toml"} <= set(written)
    assert "report.html" not in {file.name for file in public}, "it shows the scores"
    assert not any(re.search(r'worst|"mean":|seen\.mean', text) for text in written.values())
    assert json.loads(written["result.json"])["accuracy"] == dict.fromkeys(("seen", "unseen", "unlabeled"))
    assert not any(set(parts) & record.keys() for record in metrics(out))

    apart = [json.loads(line) for line in (out / "simulation/metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in apart] == [4, 8], "those after the checkpoint were made again"
    assert apart[-1]["seen"] == result.accuracy.seen.model_dump()
    assert Result.load(out) == result
    runner = CliRunner()
    shown = runner.invoke(app, ["report", str(out)]).output
    assert f"{100 * result.accuracy.seen.mean:.1f}%" in (out / "simulation/report.html").read_text()
    assert "simulation/report.html" in "".join(shown.split())

    shutil.rmtree(out / "simulation")  # to hand the folder on
    assert Result.load(out).accuracy.seen is None
    assert runner.invoke(app, ["report", str(out)]).exit_code == 0
    page = (out / "report.html").read_text()
    assert "Scores were not handed on with this run" in page and "No round" not in page and "not served by" not in page
    assert "no simulation/ in private" in page and "%" not in page[page.index("<main>") : page.index('id="rounds"')]


def test_a_report_lies_where_what_it_shows_lies(tmp_path: Path) -> None:
    open_run, private = tmp_path / "open", tmp_path / "private"
    (private / "simulation").mkdir(parents=True)
    assert folders.report_of(tmp_path, [open_run, private]) == tmp_path / "report.html"
    (private / folders.ACCURACY).touch()
    assert folders.report_of(tmp_path, [open_run, private]) == tmp_path / "simulation/report.html"
    assert folders.report_of(tmp_path, [open_run]) == tmp_path / "report.html"


def test_damaged_scores_are_named(tmp_path: Path) -> None:
    run("fedavg", out=tmp_path / "run", noise_multiplier=1.0, clip=0.5, delta=1e-3, **{**SMALL, "rounds": 1})
    (tmp_path / "run/simulation/accuracy.json").write_text('{"seen": {"mean": "high"}}')
    with pytest.raises(UserError, match=r"simulation/accuracy\.json is damaged: seen\.mean"):
        Result.load(tmp_path / "run")


def test_noise_is_declared_and_accounted() -> None:
    simulated = run("fedavg", noise_multiplier=1.0, clip=0.5, delta=1e-3, simulate_noise=True, **SMALL).privacy
    assert not simulated.private and simulated.noise == "simulated", "seeded noise protects nobody"
    result = run("fedavg", noise_multiplier=1.0, clip=0.5, delta=1e-3, **SMALL)
    assert result.privacy.epsilon == pytest.approx(simulated.epsilon or 0)
    assert result.privacy.private and result.privacy.unit == "client" and result.privacy.delta == 1e-3
    assert result.privacy.epsilon is not None and 0 < result.privacy.epsilon < 100
    with pytest.raises(UserError, match="noise without a bound"):
        run("fedavg", noise_multiplier=1.0, **SMALL)
    with pytest.raises(UserError, match="no training client has labels"):
        run("fedavg", labeled=0.0, epsilon=3.0, delta=1e-3, **SMALL)
    with pytest.raises(UserError, match="local has no client-level privacy"):
        run("local", noise_multiplier=1.0, clip=0.5, **ALONE)


def test_time_of_training_is_without_that_of_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = training.Clock(seconds=7.0, measuring=2.0)  # of a run that goes on
    now[0] += 5.0
    with clock.measuring():
        now[0] += 3.0
    now[0] += 1.0
    assert clock.read() == {"seconds": 13.0, "measuring": 5.0}
