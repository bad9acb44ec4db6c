"""What every test starts from: one thread, no cache of the user's, the same examples each time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# No deadline, because a busy machine is not a bug; no example database, so that a run leaves nothing behind.
settings.register_profile("unalike", deadline=None, derandomize=True, database=None)
settings.load_profile("unalike")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Downloads and other caches go to a folder of this test run (also in processes that a test starts)."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["UNALIKE_CACHE"] = str(folder)
    return folder


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
