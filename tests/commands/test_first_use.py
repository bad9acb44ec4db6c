"""What a newcomer meets first: plans that say whom they are for, papers by name, and tables in a narrow terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import click
import numpy as np
import pytest
from rich.console import Console
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

from tests.commands.test_commands import commands
from unalike.api import run
from unalike.commands import console
from unalike.commands.main import app
from unalike.commands.progress import describe
from unalike.core.notes import did_you_mean
from unalike.methods import METHODS
from unalike.privacy import Poisson, calibrate
from unalike.runs.measure import serves_unlabeled
from unalike.runs.prepare import prepare
from unalike.runs.recipe.settings import plan_for
from unalike.runs.result import ByGroup, Bytes, Privacy, Result, Summary, as_text, table

OUR_IDS = re.compile(r"\b[TP][1-4]\b")
DOCS = Path(__file__).parents[2] / "docs"
NO_PAPER = re.compile(r"\(Thms?\b|Theorems? [\d, and]+\)|\(Alg(?:orithms?|\.)? [\d, and]+\)")  # whose theorem?


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def unalike(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


def widen(patch: pytest.MonkeyPatch, columns: int) -> None:
    """Let the terminal have so many columns."""
    patch.setattr(console, "results_console", lambda: Console(width=columns, highlight=False, markup=False))


def test_a_plan_is_for_the_clients_that_were_named() -> None:
    words = ("privacy", "plan", "fedavg", "--clients", "1000", "--cohort", "100", "--noise-multiplier", "1")
    words += ("--clip", "0.5", "--rounds", "20")
    plan = json.loads(unalike(*words, "--json"))
    expected = calibrate.predict_cost(1.0, 20, Poisson(0.1), delta=1000**-1.1)
    assert (plan["clients"], plan["data"]) == (1000, None)
    assert (plan["noise"], plan["rate"], plan["clip"], plan["rounds"]) == (1.0, 0.1, 0.5, 20)
    assert plan["epsilon"] == pytest.approx(expected.epsilon) and plan["delta"] == pytest.approx(1000**-1.1)
    assert "planned for 1,000 training clients, whatever their data" in unalike(*words)
    assert json.loads(unalike(*words, "--unseen", "0.2", "--json"))["clients"] == 800


def test_a_plan_for_data_says_whom_the_data_leaves_out() -> None:
    told = unalike("privacy", "plan", "fedavg", "--clients", "1000", "--data", "digits")
    assert "planned for 717 training clients of digits; 80 more are unseen; 203 of 1,000 clients have too" in told
    sizes = unalike("privacy", "plan", "fedavg", "--clients", "20", "--unit", "point")  # needs sizes, hence data
    assert "planned for 18 training clients of digits" in sizes


def test_a_run_says_which_clients_it_leaves_out_and_why() -> None:
    told: list[str] = []
    watcher = Mock(note=told.append)
    rows = np.arange(30, dtype=np.float32)[:, None], np.arange(30) % 2, np.minimum(np.arange(30) // 5, 4)
    rows[2][-1] = 5  # alone
    for clients in (20, 10):
        settings = {"partition": "iid", "clients": clients, "rounds": 1, "unseen": 0, "cohort": 2}
        run("fedavg", data=rows, watcher=watcher, **settings)
    assert len(told) == 1 and "10 of 20 clients have too few rows to train and test on and are left out" in told[0]
    assert "with fewer clients (--clients) each has more rows" in console.with_flags(told[0])
    run("fedavg", data=rows, watcher=watcher, rounds=1, unseen=0, cohort=2)  # the data's own clients
    assert told[1].endswith("1 of 6 clients have too few rows to train and test on and are left out: 5")


def test_help_names_papers_and_not_our_documents() -> None:
    shown = {command: unalike(*command, "--help") for command in commands()}
    found = {command: OUR_IDS.findall(text) + NO_PAPER.findall(text) for command, text in shown.items()}
    assert len(found) > 20 and not any(found.values()), found


def test_no_text_of_a_help_is_taken_for_markup() -> None:
    for path, command in walk(get_command(app)):
        for option in command.params:
            text = str(getattr(option, "help", None) or "")
            assert Text.from_markup(text).plain == text, f"{path} {option.name}: {text}"


def test_listings_name_papers_and_not_our_documents() -> None:
    shown = [unalike(name) for name in ("methods", "datasets", "recipes", "examples")]
    shown += [unalike("methods", name) for name in METHODS]
    text = "\n".join(shown)
    assert OUR_IDS.findall(text) == [] and "thesis" not in text and "``" not in text


def test_the_tables_of_methods_name_all_of_them_and_say_what_they_do() -> None:
    """Of docs/personalization.md: whom a method serves, and whether noise can protect clients."""
    served = table_of(DOCS / "personalization.md")
    assert served.keys() == METHODS.keys() <= table_of(DOCS.parent / "README.md").keys()
    settings = {"data": "digits", "partition": "iid", "clients": 12, "model": "mlp"}
    for name, entry in METHODS.items():
        *_, unlabeled, private = served[name]
        method = prepare(plan_for([name], settings).runs[0][1]).method
        assert serves_unlabeled(method) == (unlabeled != "not served"), name
        if name != "local":  # which sends nothing
            assert hasattr(entry.cls, "client_private") == private.startswith("yes"), name


def table_of(page: Path) -> dict[str, list[str]]:
    """The other cells of every line that begins with names of methods."""
    lines = re.findall(r"^\| (`[^|]+`) \| (.*) \|$", page.read_text(encoding="utf-8"), re.M)
    return {name: cells.split(" | ") for names, cells in lines for name in re.findall(r"`([^`]+)`", names)}


def result_of(label: str, **more: object) -> Result:
    summary = Summary(mean=1.0, std=0.1, p10=1.0)
    scores = ByGroup(seen=summary, unseen=summary, unlabeled=None if label == "fedavg-finetune" else summary)
    return Result.model_validate(
        {"method": label, "label": label, "data": "digits", "seed": 0, "rounds": 60, "seconds": 200.0, "folder": None}
        | {"metric": "accuracy", "accuracy": scores, "bytes": Bytes(up=343_000_000, down=12_300_000_000)}
        | {"privacy": Privacy(), "partition": "pathological:2", "clients": 100, "unseen": 30, **more}
    )


def walk(command: click.Command, path: str = "unalike") -> Iterator[tuple[str, click.Command]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, f"{path} {name}")


def words_of(text: str) -> set[str]:
    return set(re.findall(r"[^\s┃│┡╇┩┏┳┓└┴┘━─├┼┤┌┬┐]+", text))


def test_the_table_of_results_breaks_no_word_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [[result_of(name)] for name in ("fedavg", "fedavg-finetune", "pefll-unlabeled")]
    for rows in (groups, [2 * group for group in groups]):  # one seed, two seeds
        widen(monkeypatch, 300)
        console.say(table(rows, "demo"))
        wide = capsys.readouterr().out
        widen(monkeypatch, 80)
        console.say(table(rows, "demo"))
        narrow = capsys.readouterr().out
        assert max(map(len, narrow.splitlines())) <= 80
        assert words_of(narrow) == words_of(wide)


@pytest.mark.parametrize(
    "words",
    [
        ["methods"],
        ["datasets"],
        ["recipes"],
        ["examples"],
        ["data", "digits", "--clients", "20"],
        ["privacy", "plan", "fedavg", "--clients", "100", "--noise-multiplier", "1", "--clip", "0.5"],
        ["mdm", "--data", "mdm:medium-2,clients=50", "--rounds", "2"],
        ["estimate", "gaussian", "--data", "gaussian-means:clients=50"],
    ],
    ids=lambda words: words[0],
)
def test_tables_break_no_word_in_80_columns(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    for columns in (300, 80):
        widen(monkeypatch, columns)
        shown.append(words_of(re.sub(r"[\d.]+ s\b", "", unalike(*words))))
    assert shown[0] == shown[1]


def test_an_expected_score_is_shown() -> None:
    expected = {"seen": 0.9, "unseen": None, "unlabeled": None}
    shown = as_text(table([[result_of("fedavg", expected=expected)]]))
    assert {"[expected", "90.0%]"} <= words_of(shown)


OWN = """
from dataclasses import dataclass, field
import torch
from unalike import LocalSGD, Mean, Model, State, send, task

@dataclass(frozen=True)
class Mine:
    model: Model
    local: LocalSGD = LocalSGD(steps=1, batch=4, lr=0.1)

    @task
    def fit(self, client, theta):
        return send(update=self.local(self.model, theta, client) - theta)

    def start(self, seed):
        return State(theta=self.model.init(seed))

    def round(self, state, federation):
        replies = federation.sample(4).ask(self.fit, theta=state.theta, into=Mean("update"))
        return state.replace(theta=state.theta + replies["update"])

    def personalize(self, state, cohort):
        return state.theta.expand(len(cohort), -1)
"""


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("State(theta=self.model.init(seed))", "self.model.init(seed)", "start must return a State"),
        ("return state.replace(theta=state.theta", "return (state.theta", "round must return a State"),
        ('replies["update"]', 'replies["updat"]', "KeyError: no array 'updat' was released by this ask; there are: up"),
        ("state.theta.expand(len(cohort), -1)", "state.theta", "expected a matrix [C, d], one row a client"),
        ("batch=4", "batchs=4", "LocalSGD.__init__() got an unexpected keyword argument 'batchs'"),
        ("(steps=1, batch=4, lr=0.1)\n", "(batch=4, epochs=1)\n    mu = 0.5\n", "Mine.mu has no type"),
        ("return send(update=", "return (", "task Mine.fit must return send(...), but it returned Tensor"),
        ("client) - theta", "client) * torch.rand(())", "one seed would not give one result; draw from client.draws"),
        ("client) - theta", "client) - tehta", "NameError: name 'tehta' is not defined"),
        ("self.model.init(seed)", "self.model.init(seed) + missing", "NameError: name 'missing' is not defined"),
    ],
)
def test_a_bug_in_a_method_of_ones_own_is_told_with_its_line(right: str, wrong: str, message: str) -> None:
    source = OWN.replace(right, wrong)
    Path("mine.py").write_text(source)
    result = CliRunner().invoke(app, ["run", "mine.py:Mine", "--clients", "10", "--rounds", "1", "--quiet"])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    assert not list(Path().glob("runs/*")), "a run that failed before its first round leaves nothing"
    told = " ".join(result.output.split())
    assert message in told and "simulator.py" not in told
    number = int(re.findall(r"mine\.py:(\d+)", told)[0])
    around = source.splitlines()[number - 1 : number + 4]  # a value that was returned is told with its function's line
    assert any(line in "\n".join(around) for line in wrong.strip().splitlines()[-1:]), (told, around)


def test_rows_that_are_left_out_for_lack_of_a_value_are_counted() -> None:
    rows = "".join(f"{row % 4},{'' if row % 8 == 0 else row},{row % 2}\n" for row in range(80))
    Path("gaps.csv").write_text("client,a,y\n" + rows)
    words = ("--set", "data.options.missing=drop")
    assert "10 for lack of a value (missing=drop)" in unalike("data", "gaps.csv", *words)
    told = unalike("run", "fedavg", "--data", "gaps.csv", "--rounds", "1", "--cohort", "2", *words)
    assert "note: gaps.csv: left out for lack of a value: 10 rows" in told


def test_a_score_is_expected_only_of_a_run_as_its_recipe_was_written() -> None:
    Path("mine.toml").write_text('method = "fedavg"\nrounds = 3\n[expected]\nseen = 0.9\n')
    wanted = [plan_for(["mine.toml"], changed).runs[0][1].expected.seen for changed in ({}, {"seed": 4}, {"rounds": 2})]
    assert wanted == [0.9, 0.9, None]


def test_a_loss_is_short_however_large() -> None:
    shown = [describe({"loss": loss, "bytes_up": 0, "bytes_down": 0}, "accuracy") for loss in (1.5791e31, 2.3026, 0)]
    assert [line.split("  ")[0] for line in shown] == ["loss 1.58e+31", "loss 2.303", "loss 0"]


def test_a_large_delta_is_remarked_on() -> None:
    words = ("privacy", "plan", "fedavg", "--noise-multiplier", "1", "--clip", "0.5", "--clients")
    assert "δ = 0.0173 is large: it would allow one in 58 to be revealed" in unalike(*words, "40")
    assert "is large" not in unalike(*words, "1000")
    assert "is large" not in unalike(*words, "40", "--delta", "1e-5")
    spent = Privacy(private=True, epsilon=2.0, delta=40**-1.1, unit="client")
    assert "δ = 0.0173 is large" in " ".join(as_text(table([[result_of("fedavg", privacy=spent)]])).split())


def test_a_method_written_as_in_its_paper_is_recognised() -> None:
    for typed, meant in (("AdaPeD", "adaped"), ("Per-FedAvg", "perfedavg"), ("kNN-Per", "knnper")):
        assert did_you_mean(typed, METHODS) == f"; did you mean {meant!r}?"
