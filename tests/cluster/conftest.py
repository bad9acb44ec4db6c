"""Tests with real workers of Ray, which run in a network of their own: `make test-cluster`.

Ray listens on every interface and looks for outside addresses when it starts. So these tests are collected only where
the one interface is the loopback.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from unalike.runtime.workers import Workers

ALONE = [name for _, name in socket.if_nameindex()] == ["lo"]
if not ALONE or importlib.util.find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Two of them, for all tests: to start Ray takes seconds."""
    from tests.cluster import faulty, sites
    from unalike.deploy.site import SITE
    from unalike.runtime.ray import start_workers

    with start_workers(2, sites=[SITE, faulty.HERE, sites.HERE]) as made:
        yield made


@pytest.fixture
def shared(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> Workers:
    """Runs of a test use the workers of all tests, and leave them running."""
    from unalike.deploy import session

    def start(count: int | None, address: str | None) -> Workers:
        assert count in (None, len(workers)) and address is None
        return workers

    monkeypatch.setattr(session, "start", start)
    monkeypatch.setattr(type(workers), "close", lambda _: None)
    return workers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray starts processes that it never waits for, which Python warns of when they are collected."""
    for item in items:
        if "tests/cluster" in item.nodeid:
            item.add_marker(pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
