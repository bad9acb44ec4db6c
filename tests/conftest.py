"""The process that only hands tests to others (``pytest -n``) imports nothing: they start seconds sooner."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.start")
