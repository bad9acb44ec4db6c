"""Helpers of the data tests."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unalike.data import list_sources


@pytest.fixture
def real() -> Callable[[str], str]:
    """``real("mnist")`` gives the name back, or skips the test on a machine whose data folder has no such data set."""

    def check(name: str) -> str:
        if not {entry.name: entry.local for entry in list_sources()}[name.partition(":")[0]]:
            pytest.skip(f"{name} is not in the data folder; set UNALIKE_DATA to one that has it")
        return name

    return check


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with nothing in it, and no network."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise urllib.error.URLError("the network is unreachable")

    monkeypatch.setenv("UNALIKE_DATA", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    return tmp_path
