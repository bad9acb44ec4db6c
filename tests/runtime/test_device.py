"""Runs ``on_pretended_device.py`` by itself: a device that PyTorch has come to know stays for the rest of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long  # test_fake_tensors.py has the same question for each task, answered without computing
def test_tasks_run_on_another_device() -> None:
    file = Path(__file__).with_name("on_pretended_device.py")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, str(file)]
    done = subprocess.run(command, cwd=file.parents[2], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
