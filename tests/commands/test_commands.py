"""The command line, as a person types it."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests.runs.helpers import FLAGS, At
from unalike.commands import options
from unalike.commands.main import app
from unalike.commands.progress import Lines, Live
from unalike.runs import run as run_module
from unalike.runs.recipe.recipe import Plan

runner = CliRunner()


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def unalike(*words: str, code: int = 0) -> str:
    """What the command prints; a traceback is never what a user should see."""
    result = runner.invoke(app, list(words))
    assert "Traceback" not in result.output
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.usefixtures("drawings")
def test_run_prints_a_table_and_a_report() -> None:
    shown = unalike("run", "fedavg", *FLAGS, "--out", "here")
    assert re.search(r"fedavg: round 8/8 +seen [\d.]+% +unseen [\d.]+% .*loss .*↑.*↓.*ε ∞", shown)
    assert "report: here/report.html" in shown and Path("here/report.html").exists()


def test_run_names_its_own_folder_and_never_the_same_twice() -> None:
    unalike("run", "fedavg", *FLAGS, "--quiet")
    unalike("run", "fedavg", *FLAGS, "--quiet")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["fedavg-digits", "fedavg-digits-2"]


def test_json_is_all_there_is() -> None:
    result = json.loads(unalike("run", "pefll", *FLAGS, "--json"))
    assert result["method"] == "pefll" and result["accuracy"]["unlabeled"] is None
    results = json.loads(unalike("compare", "local", "fedavg", *FLAGS, "--json"))
    assert [one["method"] for one in results] == ["local", "fedavg"]


def test_the_table_says_what_it_is_about() -> None:
    shown = " ".join(unalike("run", "fedavg", *FLAGS, "--quiet").split())
    assert "accuracy, mean over clients (10th percentile of clients)" in shown
    assert "digits, partition pathological:2, 12 clients, 3 of them unseen" in shown and "δ" not in shown
    noise = ("--noise-multiplier", "1", "--clip", "1", "--delta", "0.01")
    private = " ".join(unalike("run", "fedavg", *FLAGS, "--quiet", *noise).split())
    assert "ε at δ = 0.01 for each client" in private


def test_a_recipe_of_a_run_is_called_by_its_folder() -> None:
    unalike("run", "fedavg", *FLAGS, "--quiet", "--out", "first")
    shown = unalike("run", "first/recipe.toml", "--quiet", "--out", "again")
    assert shown.splitlines()[0].strip() == "first"


def test_quiet_prints_the_result_only() -> None:
    shown = unalike("run", "fedavg", *FLAGS, "--quiet")
    assert "round 8/8" not in shown and "report:" in shown


@pytest.mark.usefixtures("drawings")
def test_compare_says_who_is_not_served() -> None:
    shown = unalike("compare", "fedavg", "local", "fedavg-finetune", *FLAGS, "--out", "c")
    lines = {line.split()[0]: line for line in shown.splitlines() if line.startswith("  ") and line.strip()}
    assert "not served" in lines["local"] and "not served" in lines["fedavg-finetune"]
    assert "not served" not in lines["fedavg"]
    assert Path("c/report.html").exists() and Path("c/local/result.json").exists()


def test_a_flag_in_a_comparison_goes_to_those_who_have_it(tmp_path: Path) -> None:
    file = Path(__file__).parents[2] / "examples" / "my_method.py"
    shown = unalike("compare", "fedavg", f"{file}:FedRep", *FLAGS, "--lr", "0.05", "--rounds", "2")
    assert "FedRep" in shown and "note: --lr is for fedavg; FedRep cannot use it" in shown
    assert "has no hyperparameter 'local'" in unalike("run", f"{file}:FedRep", *FLAGS, "--lr", "0.05", code=1)


def test_a_method_outside_of_the_package() -> None:
    file = Path(__file__).parents[2] / "examples" / "my_method.py"
    result = json.loads(unalike("run", f"{file}:FedRep", *FLAGS, "--json"))
    assert result["method"] == f"{file}:FedRep" and result["accuracy"]["unseen"]["mean"] > 0.5


def test_recipe_file_and_set() -> None:
    Path("mine.toml").write_text('method = "fedavg"\nrounds = 3\n[data]\nclients = 12\n')
    result = json.loads(
        unalike("run", "mine.toml", "--set", "rounds=2", "--set", "local.lr=0.2", "--out", "r", "--json")
    )
    assert result["rounds"] == 2
    assert "lr = 0.2" in Path("r/recipe.toml").read_text()


def test_resume_and_report() -> None:
    unalike("run", "fedavg", *FLAGS, "--out", "r", "-q")
    shown = unalike("resume", "r")
    assert "r had ended already; this is its result" in shown and "report: r/report.html" in shown
    unalike("report", "r", "--out", "other.html")
    assert Path("other.html").stat().st_size > 10_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_its_code_and_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    watcher = At(2, lambda: os.kill(os.getpid(), number))
    monkeypatch.setattr("unalike.commands.progress.watcher_for", lambda console, quiet: watcher)
    shown = unalike("run", "fedavg", *FLAGS, "--out", "r", code=128 + number)
    assert "stopped after round 3 of 8. Go on with: unalike resume r" in shown
    assert shown.count("stopped") == 1
    monkeypatch.undo()


def test_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "McMahan" in unalike("methods")
    shown = unalike("methods", "fedavg-finetune")
    assert "[hyperparameters.finetune]" in shown and "steps = 50" in shown
    shown = unalike("datasets")
    assert "femnist" in shown and "dirichlet" in shown and "lenet" in shown
    monkeypatch.setenv("UNALIKE_DATA", "nothing-here")
    lines = unalike("datasets").splitlines()
    assert any("mnist" in line and "to download" in line for line in lines)
    assert any("femnist" in line and "to make" in line for line in lines)
    assert "digits-pathological" in unalike("recipes")
    assert "# " in unalike("recipes", "show", "digits-pathological")
    assert "did you mean 'digits-pathological'?" in unalike("recipes", "show", "digits-pathologic", code=1)
    assert "FedRep in 60 lines" in unalike("examples") and "class FedRep" in unalike("examples", "my_method")
    assert unalike("--version").startswith("unalike ")


def test_data_shows_how_unlike_clients_are() -> None:
    shown = unalike("data", "digits", "--partition", "pathological", "--clients", "20", "--plot", "p.html")
    assert "20 (18 seen, 2 unseen)" in shown and "█" in shown and "distance" in shown
    assert "<html" in Path("p.html").read_text()[:200]
    assert "exists already" in unalike("data", "digits", "--plot", "p.html", code=1)


def test_own_file_just_works() -> None:
    import numpy as np

    random = np.random.default_rng(0)
    x = random.normal(size=(200, 6)).astype(np.float32)
    np.savez("my.npz", x=x, y=(x[:, 0] > 0).astype(np.int64), client=np.arange(200) % 10)
    result = json.loads(unalike("run", "fedavg", "--data", "my.npz", "--model", "mlp", "--rounds", "5", "--json"))
    assert result["accuracy"]["seen"]["mean"] > 0.5


def commands(command: click.Command | None = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    command = typer.main.get_command(app) if command is None else command
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


def examples_of(command: tuple[str, ...]) -> list[str]:
    shown = unalike(*command, "--help").split("Examples", 1)
    assert len(shown) == 2, f"unalike {' '.join(command)} --help shows no example"
    return re.findall(r"^ *(unalike .*?) *$", shown[1], re.MULTILINE)


def test_help_breaks_lines_where_they_are_full_in_a_narrow_terminal() -> None:
    """No line of the text ends early: the first word of the next one would not have fitted."""
    for command in commands():
        shown = runner.invoke(app, [*command, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output
        text = shown.split("╭", 1)[0].split("Usage:", 1)[1]
        for paragraph in re.split(r"\n *\n", text)[1:]:
            lines = [line.strip() for line in paragraph.strip().splitlines()]
            for line, following in itertools.pairwise(lines):
                assert len(line) + 1 + len(following.split()[0]) > 78, f"unalike {' '.join(command)}: {line!r}"


OF_RUNS = [
    (),
    *[(name,) for name in ("demo", "run", "compare", "resume", "report", "analyse", "data", "methods", "datasets")],
]


@pytest.mark.parametrize("command", [*OF_RUNS, ("recipes",), ("recipes", "show")], ids=" ".join)
@pytest.mark.long
def test_examples_of_help_work_as_typed(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "run_plan", of_one_round)
    lines = examples_of(command)
    assert lines
    for line in lines:
        words = shlex.split(line)[1:]
        # the whole demo takes long, and a shorter one is among the examples; workers have tests of their own
        if words != ["demo"] and "ray" not in words:
            unalike(*words)


carried_out = run_module.run_plan


def of_one_round(plan: Plan, out: Path | None, **given: Any) -> run_module.Comparison:
    """All that was typed is read and used, but the number of rounds: the second round of a run is like the first."""
    runs = [(label, recipe.model_copy(update={"rounds": 1})) for label, recipe in plan.runs]
    return carried_out(plan.model_copy(update={"runs": runs}), out, **given)


def test_every_command_has_an_example() -> None:
    for command in commands():
        assert examples_of(command), command


def arguments(command: click.Command, path: str = "unalike") -> Iterator[tuple[str, str, str]]:
    """Every command's arguments: the command, the argument as its usage names it, and the command's description."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from arguments(inner, f"{path} {name}")
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            yield path, str(parameter.metavar or parameter.name).upper().rstrip("."), command.help or ""


def test_every_argument_is_explained_in_words() -> None:
    found = list(arguments(typer.main.get_command(app)))
    assert len(found) >= 10
    for path, name, description in found:
        assert re.search(rf"(^ *|[.] ){name} (is|are) ", description, re.MULTILINE), f"{path} --help: what is {name}?"


def test_live_progress_has_all_that_was_promised() -> None:
    record = {
        "loss": 0.5,
        "bytes_up": 2000,
        "bytes_down": 3_000_000,
        "epsilon": 1.25,
        "seen": {"mean": 0.5},
    }
    for make in (Live, Lines):
        text = io.StringIO()
        watcher = make(Console(file=text, force_terminal=make is Live, width=100))
        watcher.begin("fedavg", 10, 0, "accuracy")
        for number in (2, 3):
            watcher.round({**record, "round": number, "unseen": None, "unlabeled": None})
        watcher.note("a note")
        watcher.end()
        shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text.getvalue())
        for part in ("fedavg", "3/10", "seen 50.0%", "loss 0.500", "↑2 kB ↓3 MB", "ε 1.25", "left", "a note"):
            assert part in shown, part


def test_the_time_that_is_left_leaves_out_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    text, clock = io.StringIO(), iter([0.0, 100.0, 101.0, 102.0])
    monkeypatch.setattr("unalike.commands.progress.time.monotonic", lambda: next(clock))
    watcher = Lines(Console(file=text, width=100))
    watcher.begin("fedavg", 10, 0, "accuracy")
    for number in (1, 2, 3):
        watcher.round({"round": number, "bytes_up": 0, "bytes_down": 0, "seen": {"mean": 0.5}})
    first, second, third = text.getvalue().splitlines()
    assert "left" not in first and second.endswith("8.0 s left") and third.endswith("7.0 s left")


def test_whole_numbers_are_counts_and_fractions_are_shares() -> None:
    found = options.settings_from(options.Dealing(unseen=0.2), options.Training(cohort=10.0), seed=3)
    assert (found["cohort"], found["unseen"], found["seed"]) == (10, 0.2, 3)
    assert isinstance(found["cohort"], int)
