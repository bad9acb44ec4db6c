"""What must be quick does not load what is slow: which packages a fresh process has imported, whatever the time."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import unalike
from benchmarks.start import COMMANDS, HEAVY, TELL, loaded_by, loaded_by_command, loaded_by_first_round, python
from unalike.commands.main import app


@pytest.mark.parametrize("words", [*COMMANDS, "rnu", "privacy plan --help", "recipes --help"])
def test_help_and_misspelt_words_are_answered_without_heavy_packages(words: str) -> None:
    assert loaded_by_command(words) == []


def test_an_unknown_command_is_answered_with_the_near_ones_once() -> None:
    shown = CliRunner().invoke(app, ["models"])
    assert shown.exit_code == 2 and shown.output.count("Did you mean") == 1 and "'methods'" in shown.output


def test_the_help_of_every_command_loads_no_heavy_package() -> None:
    program = """
from typer.main import get_command
from typer.testing import CliRunner
from unalike.commands.main import app

def paths(command, above=()):
    yield above
    for name, inner in getattr(command, "commands", {}).items():
        yield from paths(inner, (*above, name))

every = list(paths(get_command(app)))
assert len(every) > 20, every
for path in every:
    shown = CliRunner().invoke(app, [*path, "--help"])
    assert shown.exit_code == 0 and "Usage: " in shown.output, path
"""
    assert loaded_by(program) == []


def test_shell_completion_loads_no_heavy_package() -> None:
    complete = "import os, sys\nos.environ |= {'_UNALIKE_COMPLETE': 'complete_bash', 'COMP_WORDS': 'unalike run --ro', "
    complete += "'COMP_CWORD': '2'}\nfrom unalike.commands.main import main\nsys.argv = ['unalike']\n"
    assert loaded_by(f"{complete}try:\n    main()\nexcept SystemExit:\n    pass") == []
    done = subprocess.run([sys.executable, "-c", f"{complete}main()"], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["--rounds"]


WITHOUT_NOISE = """
import torch
from unalike import Client, Clients, Federation, Mean, send, task
from unalike.core.request import Program
from unalike.runtime.shard.shard import Shard
from unalike.runtime.simulate import Simulation
from unalike.privacy import Gaussian, Ledger

@task
def mean(client: Client):
    return send(x=client.x.mean(0))

people = Clients.from_sizes(torch.randn(20, 3), None, torch.full((5,), 4))
program = Program(open=True)
federation = Federation(Simulation([Shard({"train": people}, people.roster(), program)], program))
federation.sample(4).ask(mean, into=Mean("x"))
assert federation.ledger.epsilon(1e-5) == float("inf") and federation.ledger.method == "non-private"
assert Ledger.from_state(federation.ledger.state()) == federation.ledger
"""
WITH_NOISE = 'federation.sample(4).ask(mean, into=Mean("x", clip=1.0, noise=Gaussian(1.0)))'


def test_names_and_runs_without_noise_never_load_dp_accounting_and_one_with_noise_does() -> None:
    """In one process, which has loaded no more after each step than the step needed."""
    some = "unalike.LocalSGD; unalike.Federation"
    steps = ("import unalike", some, WITHOUT_NOISE, "from unalike import *", WITH_NOISE)
    printed = python("-c", "".join(f"{step}\n{TELL}\n" for step in steps))
    package, names, bare, all_names, noisy = (json.loads(line) for line in printed.splitlines())
    assert package == [] and names == bare == ["torch"]
    assert "dp_accounting" not in all_names and "dp_accounting" in noisy


def test_every_public_name_is_the_one_of_its_module() -> None:
    assert set(unalike.__all__) <= set(dir(unalike))
    listed = ast.parse(Path(unalike.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in listed.body if isinstance(node, ast.ImportFrom)]
    homes = {name.name: str(node.module) for node in imports for name in node.names}
    assert set(homes) == set(unalike.__all__)
    for name, module in homes.items():
        assert getattr(unalike, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="module 'unalike' has no attribute 'Typo'"):
        _ = unalike.Typo  # type: ignore[attr-defined]


def test_waiting_threads_sleep_unless_told_otherwise() -> None:
    """The variable must be there before PyTorch is loaded, whichever name is used first."""
    program = "import os, sys, unalike; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    plain = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for given, expected in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        words = [sys.executable, "-c", program]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env={**plain, **given})
        assert done.stdout.split() == ["False", expected]


def test_a_first_round_loads_pytorch_alone() -> None:
    """Neither its compiler, which takes as long as itself, nor the packages of tables, accounting and drawing."""
    assert loaded_by_first_round() == ["torch"]


def test_the_check_notices_a_heavy_package() -> None:
    assert loaded_by("import scipy") == ["scipy"] and "scipy" in HEAVY
