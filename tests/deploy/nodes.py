"""Sites without a network: their hosts are in this process, and answer when they are asked."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.network.sites import OPEN, rows
from unalike.deploy import keys
from unalike.deploy.node.host import NodeHost, Site
from unalike.deploy.sites import Sites
from unalike.runs.recipe.recipe import Runtime
from unalike.runtime.workers import Workers


def make_site(
    folder: Path, name: str = "a", number: int = 0, policy: dict[str, Any] | None = None, **table: Any
) -> Site:
    """A site's folder, opened. policy: keys that differ from an open one."""
    site = folder / name
    keys.init_node(site, name)
    rows(number, **table).to_csv(site / "rows.csv", index=False)
    (site / "node.toml").write_text('data = "rows.csv"\n')
    (site / "policy.toml").write_text(tomli_w.dumps({**OPEN, **(policy or {})}))
    return open_site(site)


def open_site(folder: Path) -> Site:
    def tell(text: str) -> None:
        with (folder / "log").open("a") as log:
            log.write(text + "\n")

    return Site.open(folder, folder.name, "tests", tell)


class Here:
    """The engine: hosts in this process."""

    def __init__(self, sites: list[Site]) -> None:
        self.sites, self.count = sites, len(sites)
        self.hosts = [NodeHost(site) for site in sites]

    def name(self, number: int) -> str:
        return f"node {self.sites[number].name}"

    def begin(self, number: int, what: str, *data: bytes) -> Future[bytes]:
        answer: Future[bytes] = Future()
        answer.set_result(self.hosts[number].call(what, *data))
        return answer

    def share(self, data: bytes) -> bytes:
        return data

    def end(self, number: int) -> None: ...

    def close(self) -> None: ...


def use(monkeypatch: pytest.MonkeyPatch, sites: list[Site]) -> Here:
    """Runs on a network reach these sites."""
    engine = Here(sites)

    def reach(self: Sites, how: Runtime) -> Workers:
        if self._workers is None:
            self._workers, self._names = Workers(engine), [site.name for site in sites]
        return self._workers

    monkeypatch.setattr(Sites, "_reach", reach)
    return engine
