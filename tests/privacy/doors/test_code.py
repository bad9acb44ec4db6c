"""Code runs where the user names it, and not because a folder, a recipe in it or a message does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unalike.commands.main import _options_first, app
from unalike.core import outside
from unalike.deploy.site import Site
from unalike.runtime.shard.host import Host, result
from unalike.runtime.shard.shard import Refused

METHOD = """
from pathlib import Path
from typing import Any
import unalike as ua

Path({mark!r}).touch()


class Mine(ua.FedAvg):
    pass
"""
SMALL = ("--data", "digits", "--clients", "6", "--rounds", "1", "--model", "logistic", "--threads", "1", "--quiet")


@dataclass
class Done:
    returncode: int
    stderr: str


def unalike(*words: object) -> Done:
    """The command in this process, which forgets first what earlier commands have loaded and trusted."""
    own = [name for name, module in sys.modules.items() if name.endswith(".py)") and module]  # loaded from files
    for name in own:
        del sys.modules[name]
    for known in (outside._loaded, outside._trusted, outside._stand_ins):
        known.clear()
    result = CliRunner().invoke(app, _options_first(list(map(str, words))))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, " ".join(result.stderr.split()))


@pytest.fixture(autouse=True, scope="module")
def as_before() -> Iterator[None]:
    """Other tests of this process find what they had loaded."""
    known = (outside._loaded, outside._trusted, outside._stand_ins)
    before = [known_one.copy() for known_one in known]
    yield
    for one, kept in zip(known, before, strict=True):
        one.clear()
        one.update(kept)  # type: ignore[attr-defined]


@pytest.mark.long
def test_another_process_does_not_run_it_either(trained: Path) -> None:
    mark = trained / "mark"
    mark.unlink(missing_ok=True)
    command = [sys.executable, "-m", "unalike", "personalize", str(trained / "run"), "--client", "0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert refused.returncode != 0 and "--trust-code" in refused.stderr and not mark.exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a method of one's own, named on the command line; ``mark`` is made when its code runs."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "mine.py").write_text(METHOD.format(mark=str(folder / "mark")))
    made = unalike("run", f"{folder / 'mine.py'}:Mine", *SMALL, "--out", folder / "run")
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize("command", ["resume", "personalize"])
def test_a_folder_does_not_run_the_code_that_it_names(trained: Path, command: str) -> None:
    mark, run = trained / "mark", trained / "run"
    if command == "resume":
        (run / "result.json").unlink(missing_ok=True)
    words = [command, run, *(["--client", "0", "--out", trained / "own"] if command == "personalize" else [])]
    mark.unlink(missing_ok=True)
    refused = unalike(*words)
    assert refused.returncode != 0 and "--trust-code" in refused.stderr and not mark.exists()

    other = trained / "other.py"
    other.write_text(METHOD.format(mark=str(mark)) + "\n# changed\n")
    assert "--trust-code" in unalike(*words, "--trust-code", other).stderr and not mark.exists()

    copy = trained / "copy.py"  # elsewhere, with equal content
    copy.write_bytes((trained / "mine.py").read_bytes())
    (trained / "mine.py").write_text("raise SystemExit('changed since')")
    try:
        allowed = unalike(*words, f"--trust-code={copy}")
    finally:
        (trained / "mine.py").write_bytes(copy.read_bytes())
    assert mark.exists() and "changed since" not in allowed.stderr
    assert allowed.returncode == 0, allowed.stderr


def test_a_recipe_of_a_folder_names_no_installed_function_either(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    made = unalike("run", "fedavg", *SMALL, "--out", folder)
    assert made.returncode == 0, made.stderr
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('method = "fedavg"', 'method = "os:system"'))
    for words in (["personalize", folder, "--client", "0"], ["privacy", "plan", recipe], ["run", recipe]):
        refused = unalike(*words)
        assert refused.returncode != 0 and "os, and code is not run because a folder names it" in refused.stderr, words


def test_a_host_loads_what_its_own_side_has_named() -> None:
    for host in (Host(), Host(["unalike.deploy.site:Site"])):
        with pytest.raises(Refused, match="not 'os:system'"):
            result(host.call("load", b"os:system", b"touch /tmp/never"), "host")
    with pytest.raises(Refused, match="does not know '__class__'"):
        result(Host().call("__class__"), "host")


def test_a_worker_runs_the_very_code_that_the_user_has_named(tmp_path: Path) -> None:
    """The path may lead elsewhere on another machine, or the file may have changed."""
    file, mark = tmp_path / "mine.py", tmp_path / "mark"
    file.write_text(METHOD.format(mark=str(mark)))
    recipe: dict[str, Any] = {"method": f"{file}:Mine", "data": {"name": "digits", "clients": 4}}
    for digest in ("0" * 64, None):
        with pytest.raises(ValueError, match=r"mine\.py is not here as it was where the run started"):
            Site(json.dumps({"recipe": recipe, "key": "00", "code": {str(file): digest}}))
    assert not mark.exists()
    assert Site(json.dumps({"recipe": recipe, "key": "00", "code": outside.code_of([recipe["method"]])})).about()


def test_a_run_of_a_comparison_does_not_run_code_that_its_own_recipe_names(tmp_path: Path) -> None:
    both, mark = tmp_path / "both", tmp_path / "mark"
    made = unalike("compare", "fedavg", "local", *SMALL, "--out", both)
    assert made.returncode == 0, made.stderr
    (tmp_path / "evil.py").write_text(METHOD.format(mark=str(mark)))
    recipe = both / "local" / "recipe.toml"
    (both / "local" / "result.json").unlink()
    recipe.write_text(recipe.read_text().replace('method = "local"', f'method = "{tmp_path}/evil.py:Mine"'))
    refused = unalike("resume", both)
    assert refused.returncode != 0 and "--trust-code" in refused.stderr and not mark.exists()
