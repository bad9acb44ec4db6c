"""What goes wrong in a user's hands: a clear message, no traceback, an exit code, and nothing overwritten."""

from __future__ import annotations

import ast
import errno
import os
import re
import resource
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import unalike
from tests.child import in_child
from tests.runs.helpers import FLAGS, SMALL, At, Crash, crash
from unalike.api import run
from unalike.commands.main import app
from unalike.runs.recipe.keys import FLAGS as FLAG_NAMES

runner = CliRunner()


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(*words: str) -> str:
    """The message of a command that must fail."""
    result = runner.invoke(app, list(words))
    assert result.exit_code not in (0, 130), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_that_exists_is_not_overwritten() -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    message = refused("run", "fedavg", *FLAGS, "--out", "mine")
    assert "mine exists already, and nothing is overwritten: choose another (--out)" in message
    assert files_in(Path("mine")) == {"mine/thesis.txt": b"years of work"}
    assert "mine exists already" in refused("compare", "fedavg", "local", *FLAGS, "--out", "mine")
    Path("file").write_text("x")
    assert "file is a file, not a folder" in refused("run", "fedavg", *FLAGS, "--out", "file")


def test_an_unfinished_run_is_offered_to_be_resumed() -> None:
    with pytest.raises(Crash):
        run("fedavg", out="half", watcher=At(5, crash), **SMALL)
    before = files_in(Path("half"))
    assert "go on with its unfinished run (unalike resume half)" in refused("run", "fedavg", *FLAGS, "--out", "half")
    assert files_in(Path("half")) == before


def test_an_empty_folder_is_taken() -> None:
    Path("empty").mkdir()
    assert runner.invoke(app, ["run", "fedavg", *FLAGS, "--out", "empty"]).exit_code == 0


def test_a_read_only_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: str, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "mkdir", read_only)
    message = refused("run", "fedavg", *FLAGS, "--out", "sealed/run")
    assert "no permission to write" in message and "sealed" in message and "--out" in message


def test_a_folder_without_permission(tmp_path: Path) -> None:
    """For real, in a process that may not write: root may write anywhere, so it becomes somebody else first."""
    Path("locked").mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    run("fedavg", **SMALL)  # loads all that is loaded late, which somebody else may not read

    def somebody_else() -> None:
        if os.geteuid() == 0:
            os.setuid(65534)

    done = in_child("run", "fedavg", "--out", "locked/run", *FLAGS, first=somebody_else)
    assert done.code == 1 and "Traceback" not in done.err, done.err
    assert "no permission to write locked/run" in done.err
    assert not list(Path("locked").iterdir())


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    message = refused("run", "fedavg", *FLAGS, "--out", "run")
    assert "the disk is full" in message and "free some space" in message


def test_a_file_that_may_not_grow_is_told_like_a_full_disk() -> None:
    """For real: the operating system lets no file of the process grow beyond 2,000 bytes."""
    short = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (2000, 2000))
    done = in_child("run", "fedavg", "--out", "run", "--quiet", *FLAGS, first=short)
    assert done.code == 1 and "Traceback" not in done.err, done.err
    assert "the disk is full" in done.err and "unalike resume run" in done.err
    assert not list(Path("run").glob(".*.part"))


def test_a_recipe_with_a_typo() -> None:
    Path("typo.toml").write_text('method = "fedavg"\n[data]\nparttition = "iid"\n')
    message = refused("run", "typo.toml", "--out", "run")
    assert "typo.toml: unknown key 'data.parttition'; did you mean 'data.partition'?" in message
    assert not Path("run").exists()
    assert "'local.momentun'; did you mean 'local.momentum'?" in refused(
        "run", "fedavg", *FLAGS, "--set", "local.momentun=0.9", "--out", "run"
    )
    assert not Path("run").exists()


def test_a_negative_number_of_rounds() -> None:
    message = refused("run", "fedavg", "--rounds", "-5", "--out", "run")
    assert "rounds = -5 (--rounds): expected 0 or more" in message
    assert not Path("run").exists()


def test_a_truncated_checkpoint() -> None:
    with pytest.raises(Crash):
        run("fedavg", out="run", watcher=At(5, crash), **SMALL)
    file = Path("run/checkpoint.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    before = files_in(Path("run"))
    message = refused("resume", "run")
    assert (
        "run/checkpoint.safetensors is damaged" in message and "unalike run run/recipe.toml --out NEW_FOLDER" in message
    )
    file.write_bytes(b"")
    assert "is damaged" in refused("resume", "run")
    file.write_bytes(before["run/checkpoint.safetensors"])
    assert files_in(Path("run")) == before, "nothing was overwritten"


def test_a_corrupt_data_file() -> None:
    Path("bad.npz").write_bytes(b"PK\x03\x04 this is no archive")
    message = refused("run", "fedavg", "--data", "bad.npz", "--out", "run")
    assert "bad.npz" in message and not Path("run").exists()
    np.savez("nan.npz", x=np.full((20, 3), np.nan), y=np.arange(20) % 2, client=np.arange(20) % 4)
    assert "nan.npz" in refused("run", "fedavg", "--data", "nan.npz", "--out", "run").lower()
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "fedavgg"], "did you mean 'fedavg'?"),
        (["run", "fedavg", "--data", "digit"], "did you mean 'digits'?"),
        (["run", "fedavg", "--partition", "dirichlett"], "did you mean 'dirichlet'?"),
        (["run", "fedavg", "--model", "lenett"], "did you mean 'lenet'?"),
        (
            ["run", "fedavg", "--clients", "10", "--cohort", "50"],
            "cohort = 50 (--cohort): there are 9 training clients with labels",
        ),
        (["run", "fedavg", "--partition", "iid", "--alpha", "0.1"], "has no option 'alpha'"),
        (
            ["run", "fedavg", "--partition", "pathological", "--alpha", "0.1"],
            "partition 'pathological' has no option 'alpha'; it has num_classes_per_partition (--classes), class_",
        ),
        (["run", "fedavg", "--partition", "iid", "--classes", "2"], "'num_classes_per_partition' (--classes); it has"),
        (["data", "digits", "--partition", "dirichlet:abc"], "--alpha (alpha) must be a number, got 'abc'"),
        (["run", "fedavg", "--local-epochs", "2", "--local-steps", "5"], "not both"),
        (["run", "fedavg", "--lr", "-0.1"], "fedavg, local.lr = -0.1: expected 0 or more (--lr)"),
        (["run", "fedavg", "--batch", "0"], "local.batch = 0: expected at least 1, or none for all of a client's"),
        (
            ["run", "fedavg", "--set", "data.alhpa=0.1"],
            "unknown key 'data.alhpa'; alpha is an option of a partition: set alpha, or data.partition = ",
        ),
        (
            ["run", "missing.py"],
            "missing.py is a file: name the method in it, missing.py:ClassName; and there is no such",
        ),
        (["run", "missing.toml"], "there is no recipe missing.toml"),
        (["run", "missing.py:Method"], "there is no file"),
        (["run", "fedavg", "--set", "nonsense"], "expected key=value"),
        (["run", "fedavg", "--seeds", "0"], "seeds = 0 (--seeds)"),
        (["run", "fedavg", "--set", "roundz=3"], "no hyperparameter 'roundz'; did you mean 'rounds'?"),
        (["run", "fedavg", "--set", "test=0.5"], "did you mean 'data.test'?"),
        (["run", "fedavg", "--set", "lr=0.5"], "did you mean 'local.lr' or 'finetune.lr' or 'server.lr'"),
        (
            ["run", "local", "--cohort", "5"],
            "local has no hyperparameter 'cohort' (--cohort): leave it out; it has local",
        ),
        (["run", "fedavg", "--set", "nothing_alike=1"], "there are: cohort, local"),
        (["run", "fedavg", "--classes", "20"], "--classes (num_classes_per_partition) must be between 1 and the 10"),
        (["run", "fedavg", "--lr", "inf"], "local.lr = inf (--lr): a learning rate is a finite number"),
        (["run", "fedavg", "--unit", "person"], "privacy.unit = 'person' (--unit)"),
        (["compare", "fedavg", "fedavg"], "fedavg is named twice"),
        (["resume", "nowhere"], "there is no run folder nowhere"),
        (["resume", "."], "is no run folder"),
        (["report", "."], "result.json"),
        (["methods", "fedavgg"], "did you mean 'fedavg'?"),
        (["data", "nothing.csv"], "there is no file or folder nothing.csv"),
    ],
)
def test_mistakes_are_answered(words: list[str], message: str) -> None:
    assert message in refused(*words)


@pytest.mark.parametrize(
    "words", [["--data", "digit"], ["--data", "nothing.csv"], ["--classes", "20"], ["--model", "lenett"]]
)
def test_a_clear_message_offers_no_traceback(words: list[str]) -> None:
    assert "UNALIKE_TRACEBACK" not in refused("run", "fedavg", *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cohort", "50"], "there are 9 training clients with labels; give 1 to 9"),
        (["--cohort", "9", "--labeled", "0.5"], "training clients with labels; give 1 to"),
        (["--cohort", "0"], "cohort = 0.0 (--cohort)"),
        (["--cohort", "-2"], "cohort = -2.0 (--cohort)"),
        (
            ["--labeled", "0"],
            "fedavg trains with them: give more clients their labels (--labeled)",
        ),
        (["--data", "bare.csv"], "name the column that holds them (--label-column)"),
    ],
)
def test_clients_that_cannot_be_asked_are_told_before_the_folder_is_made(words: list[str], message: str) -> None:
    rows = [f"{row % 12},{row % 7},{row % 5}" for row in range(120)]
    Path("bare.csv").write_text("\n".join(["client,a,b", *rows]))
    told = refused("run", "fedavg", "--clients", "12", "--unseen", "3", "--rounds", "1", "--out", "run", *words)
    assert message in told and "UNALIKE_TRACEBACK" not in told
    assert not Path("run").exists()


def test_the_flags_that_messages_name_exist() -> None:
    shown = runner.invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    assert [flag for flag in [*FLAG_NAMES.values(), "--classes", "--alpha"] if f"{flag} " not in shown] == []


@pytest.mark.parametrize("room", ["analytics", "audit", "learn", "methods", "report", "runs"])
def test_an_error_from_below_names_settings_and_no_flags(room: str) -> None:
    """A command to type, `unalike data NAME --schema FILE`, may have flags."""
    named = []
    for file in Path(unalike.__file__).parent.joinpath(room).rglob("*.py"):
        for raised in (node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.Raise)):
            words = [
                one.value for one in ast.walk(raised) if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            text = "".join(words)
            named += [file.name] * bool(re.search(r"(?<![\w-])--[a-z]", text) and "unalike " not in text)
    assert named == []


def test_training_that_diverges_is_answered_with_the_learning_rate() -> None:
    told = refused("run", "fedavg", *FLAGS, "--model", "mlp", "--lr", "1e30")
    assert "training diverged in round 1: 4 clients" in told and "try a smaller learning rate (--lr)" in told
    assert "UNALIKE_TRACEBACK" not in told
    assert "smaller learning rate" not in refused("run", "fedavg", *FLAGS, "--set", "runtime.drop=1")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--local-epochs", "0"], "local.epochs = 0 (--local-epochs)"),
        (["--local-steps", "0"], "local.steps = 0 (--local-steps)"),
        (["--lr", "0"], "local.lr = 0 (--lr)"),
        (["--rounds", "0"], "rounds = 0 (--rounds)"),
    ],
)
def test_a_run_that_trains_nothing_says_so(words: list[str], reason: str) -> None:
    result = runner.invoke(app, ["run", "fedavg", *FLAGS, *words])
    assert result.exit_code == 0
    assert f"fedavg: nothing is trained: {reason}" in result.stderr


def test_a_run_that_trains_something_does_not_say_otherwise() -> None:
    assert "nothing is trained" not in runner.invoke(app, ["run", "fedavg", *FLAGS]).stderr


def test_a_method_file_without_its_class_is_answered_with_the_classes_in_it() -> None:
    Path("mine.py").write_text("raise SystemExit('it is not run')\nclass First: ...\nclass Second: ...\n")
    assert "mine.py is a file: name the method in it, mine.py:ClassName; its classes: First, Second" in refused(
        "run", "mine.py"
    )
    Path("mine.py").write_text("class\n")
    assert "it is not valid Python (line 1" in refused("run", "mine.py")


def test_a_report_overwrites_nothing_but_its_own_file() -> None:
    for name in ("first", "second"):
        run("fedavg", out=name, **(SMALL | {"rounds": 1}))
    Path("thesis.html").write_text("years of work")
    told = refused("report", "first", "second", "--out", "thesis.html")
    assert "thesis.html exists already, and nothing is overwritten: choose another file with --out" in told
    assert Path("thesis.html").read_text() == "years of work"
    Path("first/report.html").write_text("to be made anew")
    assert runner.invoke(app, ["report", "first"]).exit_code == 0
    assert Path("first/report.html").stat().st_size > 10_000
    assert runner.invoke(app, ["report", "first", "second"]).exit_code == 0
    assert Path("report.html").stat().st_size > 10_000
    assert "report.html exists already" in refused("report", "first", "second")


def test_a_method_file_with_a_mistake() -> None:
    Path("broken.py").write_text("import nothing_like_this\n")
    assert "importing" in (message := refused("run", "broken.py:Method")) and "nothing_like_this" in message
    Path("notadataclass.py").write_text(
        "class Method:\n    def start(self, seed): ...\n    round = personalize = start\n"
    )
    assert "mark it with @dataclass(frozen=True)" in refused("run", "notadataclass.py:Method")
    Path("half.py").write_text("class Method:\n    def start(self, seed): ...\n")
    assert "has no round(...)" in refused("run", "half.py:Method")
