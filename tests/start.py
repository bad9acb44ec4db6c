"""What every test starts from: one thread, fixed blocks, runs without reports, no cache of the user's.

And entropy that repeats: what the package takes from the operating system comes from a generator that is seeded by the
test's name, so that a statistical test that passes today passes tomorrow. ``UNALIKE_TEST_ENTROPY`` takes another seed
(``system`` takes none): a test that fails with some of them has too little margin.
"""

from __future__ import annotations

import functools
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer.testing
from hypothesis import settings

from unalike.privacy import discrete, system
from unalike.report.figures import file as figures
from unalike.report.page import page
from unalike.runs import folder
from unalike.runs.run import Comparison
from unalike.runtime.shard import tuning
from unalike.runtime.shard.tuning import Plan

torch.set_num_threads(1)

# The tree of all commands is built once, as in a process of a user's, and not for every line that a test types.
typer.testing._get_command = functools.cache(typer.testing._get_command)

# Ray listens on every interface and looks for outside addresses when it starts: no test may start it by mistake.
if [name for _, name in socket.if_nameindex()] != ["lo"]:
    sys.modules["ray"] = None  # type: ignore[assignment]

# No deadline, because a busy machine is not a bug; no example database, so that a run leaves nothing behind.
settings.register_profile("unalike", deadline=None, derandomize=True, database=None)
settings.load_profile("unalike")


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_disks() -> None:
    """What is written is for the tests alone, and no test pulls the plug: nobody waits until it is on the disk."""
    os.fsync = lambda _: None


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Downloads and other caches go to a folder of this test run (also in processes that a test starts)."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["UNALIKE_CACHE"] = str(folder)
    return folder


@pytest.fixture(autouse=True)
def entropy_that_repeats(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise, cohorts and batches of a private run are the same whenever this test runs, in any order."""
    seed = os.environ.get("UNALIKE_TEST_ENTROPY", "0")
    if seed == "system":
        return
    generator, lock = random.Random(f"{seed} {request.node.nodeid}"), threading.Lock()

    def urandom(count: int) -> bytes:
        with lock:
            return generator.randbytes(count)

    for module in (system, discrete):
        monkeypatch.setattr(module, "os", SimpleNamespace(urandom=urandom))


_measured = tuning._find


def _fixed(kind: str, rows: torch.Tensor, one: Plan, rehearse: tuning.Rehearse) -> Plan:
    return replace(one, block=min(len(rows), 32))


@pytest.fixture(autouse=True, scope="session")
def fixed_blocks() -> None:
    """Blocks of 32 where a user would have them measured, which takes longer than what most tests do with them."""
    tuning._find = _fixed


@pytest.fixture
def measured_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tests of the measuring itself. Undone by what undoes a test's own changes, in the order of both."""
    monkeypatch.setattr(tuning, "_find", _measured)


_drawn, _reported = figures.inline, page.report_on


def _no_report(comparison: Comparison) -> Path | None:
    if comparison.folder is None:
        return None
    runs = [result.folder for result in comparison.results if result.folder is not None]
    file = folder.report_of(comparison.folder, runs)
    file.parent.mkdir(exist_ok=True)
    file.write_text("<html></html>")
    return file


def _show(inline: Callable[[figures.Figure, str], str], write: Callable[[Comparison], Path | None]) -> None:
    figures.inline, page.report_on = inline, write
    if charts := sys.modules.get("unalike.report.page.charts"):
        charts.inline = inline  # type: ignore[attr-defined]


@pytest.fixture(autouse=True, scope="session")
def no_drawings() -> None:
    """A report is most of what a small run costs, and drawing is most of a report: runs have none, others no charts."""
    _show(lambda chart, title: "<svg></svg>", _no_report)


@pytest.fixture
def drawings() -> Iterator[None]:
    """For the tests that look at a report."""
    _show(_drawn, _reported)
    yield
    _show(lambda chart, title: "<svg></svg>", _no_report)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the larger data sets; a test that takes it is skipped where there is none."""
    folder = os.environ.get("UNALIKE_DATA")
    if not folder:
        pytest.skip("needs real data: set UNALIKE_DATA to its folder")
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"UNALIKE_DATA names {folder}, which is not a folder")
    return path
