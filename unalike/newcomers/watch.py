"""``unalike watch``: a live page of a run folder, by server-sent events from its metrics.jsonl as that file grows.

Nothing in ``simulation/`` is read, and of a run with an ε no score is shown, wherever it stands.
"""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from unalike.newcomers.service import HEADERS, PAGE, TYPES
from unalike.runs.errors import UserError

METRICS, RECIPE, RESULT, MEASURED = "metrics.jsonl", "recipe.toml", "result.json", "simulation/metrics.jsonl"
HERE = Path(__file__).parent / "watch_page"
FILES = {"/": HERE / "index.html", "/watch.js": HERE / "watch.js", "/style.css": PAGE / "style.css"}
NUMBERS = ("round", "seconds", "loss", "bytes_up", "bytes_down", "failures", "epsilon")
GROUPS = ("seen", "unseen", "unlabeled")
EVERY = 0.5  # seconds between two looks at the file


def watching(run: Path) -> Starlette:
    """The application; ``app.state.server`` must be the server, so that what is open ends with it."""
    if not (run / RECIPE).is_file():
        raise UserError(f"{run} has no {RECIPE}; expected the folder of a run, as `unalike run --out` names it")

    async def file(request: Request) -> Response:
        path = FILES[request.url.path]
        return Response(path.read_bytes(), media_type=TYPES[path.suffix], headers=HEADERS)

    async def events(request: Request) -> Response:
        headers = {**HEADERS, "cache-control": "no-store"}
        return StreamingResponse(_events(run, request), media_type="text/event-stream", headers=headers)

    return Starlette(routes=[Route("/events", events), *(Route(path, file) for path in FILES)])


async def _events(run: Path, request: Request) -> AsyncIterator[str]:
    """What the run is, then its rounds as they come, from the first one again where the file was cut back."""
    yield _event("run", _about(run))
    at, known, over = 0, 0, False
    while not (request.app.state.server.should_exit or await request.is_disconnected()):
        if (run / METRICS).is_file():
            now = (run / METRICS).stat()
            if at and (now.st_ino != known or now.st_size < at):  # a run that was resumed makes the last rounds again
                at = 0
                yield _event("run", _about(run))
            with (run / METRICS).open("rb") as lines:
                lines.seek(at)
                whole = lines.read().rpartition(b"\n")[0]
            at, known = at + len(whole) + bool(whole), now.st_ino
            private = (run / MEASURED).exists()
            for line in whole.splitlines():
                yield _event("round", _shown(json.loads(line), private))
        if over != (over := (run / RESULT).is_file()):
            yield _event("over", over)
        await asyncio.sleep(EVERY)


def _event(kind: str, content: object) -> str:
    return f"event: {kind}\ndata: {json.dumps(content)}\n\n"


def _about(run: Path) -> dict[str, Any]:
    recipe = tomllib.loads((run / RECIPE).read_text(encoding="utf-8"))
    return {"name": run.resolve().name, "method": recipe["method"], "rounds": recipe["rounds"]}


def _shown(record: dict[str, Any], private: bool) -> dict[str, Any]:
    """What is drawn of a round."""
    shown = {key: record.get(key) for key in NUMBERS}
    if not private and record.get("epsilon") is None and not record.get("private"):
        shown |= {group: record[group]["mean"] for group in GROUPS if record.get(group)}
    return shown
