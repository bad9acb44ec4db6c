"""Tests of the service and of its page in a real Chromium: `make test-web`, and not part of `make test`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Playwright

needed = all(importlib.util.find_spec(name) for name in ("fastapi", "orjson", "playwright", "prometheus_client"))
if not os.environ.get("UNALIKE_TEST_WEB") or not needed:
    collect_ignore_glob = ["test_*.py"]

# A browser that asks nobody for anything by itself.
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
TURNED = {"data": "digits", "partition": "rotation", "clients": 24, "unseen": 6}
COLUMNS = {"label_column": "sick", "client_column": "clinic", "id_column": "patient", "missing": "mean"}
SPHERE = {"encoder": "sphere"}  # so that one row moves a descriptor by no more than is known


def clinics(file: Path) -> Path:
    """A table with numbers, words, dates, truth values and gaps; two columns are called by numbers, not in order."""
    rng, count = np.random.default_rng(0), 480
    table = pd.DataFrame(
        {
            "clinic": [f"c{i % 24:02}" for i in range(count)],
            "patient": [f"{i:04}" for i in range(count)],
            "10": rng.normal(50, 12, count).round(2),
            "9": rng.integers(0, 5, count),
            "ward": rng.choice(["east", "west, upper", "south"], count),
            "since": [f"20{15 + i % 9}-0{1 + i % 8}-1{i % 10}" for i in range(count)],
            "smokes": rng.choice(["True", "False"], count),
        }
    )
    table["sick"] = np.where(table["10"] + 6 * table["9"] + rng.normal(0, 4, count) > 62, "yes", "no")
    table["10"] = table["10"].astype(object).where(rng.random(count) > 0.05, "")
    table.to_csv(file, index=False)
    return file


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A name to its run folder and its bundle, made when it is first asked for."""
    import unalike as ua
    from unalike.newcomers.bundle import write_bundle
    from unalike.runs.finished import FinishedRun

    folder = tmp_path_factory.mktemp("made")
    table = {"data": clinics(folder / "clinics.csv"), "unseen": 6, **COLUMNS}
    runs: dict[str, tuple[str, dict[str, Any]]] = {
        "clinics": ("odpfl", {**table, "indicator": True, "hyperparameters": SPHERE}),
        "digits": ("odpfl", {**TURNED, "hyperparameters": SPHERE}),
        "labels": ("pefll", {**table, "hyperparameters": {"sphere": True}}),
        "home": ("flowdup", TURNED),
        "same": ("fedavg", table),
    }

    @cache
    def make(name: str) -> tuple[Path, Path]:
        run, bundle, (method, settings) = folder / name, folder / "bundles" / name, runs[name]
        ua.run(method, model="logistic", rounds=2, out=run, **settings)
        write_bundle(FinishedRun.open(run), bundle)
        return run, bundle

    return make


@contextmanager
def serving(*bundles: Path, **options: Any) -> Iterator[str]:
    """The service in a thread of this process; its address."""
    from unalike.newcomers.service import service

    with running(service(list(bundles), **options)) as address:
        yield address


@contextmanager
def running(app: Any) -> Iterator[str]:
    """An application in a thread of this process; its address."""
    from unalike.newcomers.service import listen, server_of

    server = app.state.server = server_of(app)
    listening = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def chromium() -> str:
    """Where the browser is."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert found, "these tests need a browser: apt-get install chromium, or name one with CHROMIUM=/path"
    return found


@cache
def browser() -> tuple[Playwright, Browser]:
    """The browser, started when it is first asked for."""
    from playwright.sync_api import sync_playwright

    playing = sync_playwright().start()
    return playing, playing.chromium.launch(executable_path=chromium(), headless=True, args=list(QUIET))


@pytest.fixture(scope="session", autouse=True)
def browser_ends() -> Iterator[None]:
    yield
    if browser.cache_info().currsize:
        playing, started = browser()
        started.close()
        playing.stop()


@contextmanager
def browsing(**options: Any) -> Iterator[BrowserContext]:
    """A visitor who has never been anywhere."""
    context = browser()[1].new_context(accept_downloads=True, **options)
    context.set_default_timeout(20_000)
    try:
        yield context
    finally:
        context.close()


@pytest.fixture(scope="module")
def page(made: Callable[[str], tuple[Path, Path]]) -> Iterator[Page]:
    """The page of the clinics' bundle, for calls of its modules."""
    with serving(made("clinics")[1], made("digits")[1]) as address, browsing() as context:
        page = context.new_page()
        page.goto(address)
        page.get_by_text("rounds with").wait_for()
        yield page
