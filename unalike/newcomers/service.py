"""The service behind `unalike serve`: a newcomer sends its descriptor and gets a model. No rows, no torch.

It reads bundles (``unalike/newcomers/bundle.py``) and runs ``make.onnx`` with ONNX Runtime. Whoever runs it sees
descriptors, so it is the party that a newcomer's noise protects against; it keeps no body and logs none.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unalike.core.disk import write_whole
from unalike.runs.errors import UserError
from unalike.version import __version__

PAGE = Path(__file__).parent / "page"
AT_TOP = ("index.html", "offline.js")  # a service worker serves the pages below its own place; the rest is in page/
FORMAT = 1
PUBLIC = ("card.json", "schema.json", "describe.onnx", "model.onnx")
TYPES = {".json": "application/json", ".onnx": "application/octet-stream", ".html": "text/html; charset=utf-8"}
TYPES |= {".mjs": "text/javascript; charset=utf-8", ".wasm": "application/wasm"}
TYPES |= {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
HEADERS = {  # of every answer; the page itself has the same policy in its head, for a folder on another web server
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
ENGINE = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")  # of onnxruntime-web
CHECKED_EVERY = 1.0  # seconds between two looks at whether a bundle has changed


@dataclass
class Bundle:
    """A bundle's files in memory, checked against its card."""

    folder: Path
    card: dict[str, Any]
    files: dict[str, bytes]
    make: onnxruntime.InferenceSession | None
    stamp: tuple[int, ...]

    @classmethod
    def open(cls, folder: Path) -> Bundle:
        """Read a bundle; ``UserError`` says what is wrong with it."""
        try:
            stamp = _stamp(folder)
            card = json.loads((folder / "card.json").read_bytes())
            files = {"card.json": (folder / "card.json").read_bytes()}
            for name, about in card["files"].items():
                if name not in (*PUBLIC, "make.onnx"):
                    raise ValueError(f"it lists the file {name!r}, which no bundle has")
                files[name] = (folder / name).read_bytes()
                if hashlib.sha256(files[name]).hexdigest() != about["sha256"]:
                    raise ValueError(f"{name} is not the file that the card was written for")
            if card["format"] != FORMAT or not {"schema.json", "model.onnx"} <= set(files):
                raise ValueError(f"it has format {card['format']}, and this version reads {FORMAT}")
            if not re.fullmatch(r"\w[\w.-]{0,99}", card["name"]):
                raise ValueError(f"its name {card['name']!r} has more than letters, digits, dots and hyphens")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{folder}: expected a bundle that `unalike bundle` wrote, but {type(error).__name__}: {error}; "
                "write it again"
            ) from error
        return cls(folder, card, files, _session(files.get("make.onnx")), stamp)

    @property
    def name(self) -> str:
        return str(self.card["name"])

    def model_for(self, v: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
        assert self.make is not None
        theta: np.ndarray[Any, np.dtype[np.float32]] = self.make.run(None, {"v": v})[0]
        return theta

    def is_unlike(self, v: np.ndarray[Any, np.dtype[np.float32]]) -> bool | None:
        """Are these data unlike those of the training clients? Yes or no: a distance would give their place away."""
        about = self.card.get("usual")
        if about is None:
            return None
        return bool(np.linalg.norm((v.astype(np.float64) - about["centre"]) * about["scale"]) > about["within"])


def _session(graph: bytes | None) -> onnxruntime.InferenceSession | None:
    if graph is None:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _stamp(folder: Path) -> tuple[int, ...]:
    return tuple((folder / name).stat().st_mtime_ns for name in ("card.json", "model.onnx"))


class Key(NamedTuple):
    """Whose an API key is, and how many models a minute it may get."""

    name: str
    rate: float


@dataclass
class Limits:
    """How many models a minute each key may get, or where there are no keys each address."""

    rate: float
    keys: Mapping[str, Key] = field(default_factory=dict)
    _used: dict[str, tuple[float, float]] = field(default_factory=dict)  # who → (models left, when)

    def who(self, request: Request) -> Key:
        """Whose request it is."""
        if not self.keys:
            return Key(request.client.host if request.client else "somebody", self.rate)
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip().encode()
        found = [who for key, who in self.keys.items() if hmac.compare_digest(key.encode(), given)]
        if not found:
            raise Refused(401, "expected a key: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"})
        return found[0]

    def take(self, who: Key) -> None:
        """Count a model for ``who``; refused where it has to wait for one."""
        now = time.monotonic()
        if len(self._used) > 10_000:  # addresses that have not come for a minute have all of their models back
            self._used = {one: (left, at) for one, (left, at) in self._used.items() if now - at < 60}
        left, at = self._used.get(who.name, (who.rate, now))
        left = min(who.rate, left + (now - at) * who.rate / 60)
        self._used[who.name] = (left - 1 if left >= 1 else left, now)
        if left < 1:
            wait = math.ceil((1 - left) * 60 / who.rate)
            said = f"expected at most {who.rate:g} requests a minute; try again in {wait} s"
            raise Refused(429, said, {"Retry-After": str(wait)})


def read_keys(file: Path, rate: float) -> dict[str, Key]:
    """API keys: a line ``NAME KEY``, or ``NAME KEY MODELS_A_MINUTE``, each; ``#`` begins a comment."""
    keys = dict[str, Key]()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--keys {file} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        own = words[2] if len(words) == 3 else str(rate)
        if len(words) not in (2, 3) or len(words[1]) < 16 or not own.replace(".", "", 1).isdigit() or float(own) < 1:
            raise UserError(
                f"--keys {file}, line {number}: expected NAME KEY, and perhaps how many models a minute (at least 1), "
                "with a key of at least 16 characters"
            )
        if words[1] in keys or words[0] in {key.name for key in keys.values()}:
            raise UserError(f"--keys {file}, line {number}: the name or the key is there already")
        keys[words[1]] = Key(words[0], float(own))
    if not keys:
        raise UserError(f"--keys {file} holds no key; expected a line NAME KEY for each")
    return keys


class Refused(Exception):
    """A request that cannot be answered: a status, and what was expected."""

    def __init__(self, status: int, expected: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(expected)
        self.status, self.expected, self.headers = status, expected, dict(headers or {})


def service(
    folders: Sequence[Path],
    *,
    offline: bool = False,
    limit: float = 600.0,
    keys: Mapping[str, Key] | None = None,
    engine: Path | None = None,
) -> FastAPI:
    """The application.

    - ``offline``: ``make.onnx`` is given out, so that a page makes models by itself and nothing need leave it.
    - ``limit``: models a minute for each key or address; ``keys``: who may ask; none: everybody.
    - ``engine``: a folder with ONNX Runtime Web, by which pages compute in the place of their own interpreter.
    """
    shelf = _Shelf(folders, offline, engine is not None)
    for lacking in (file for file in ENGINE if engine is not None and not (engine / file).is_file()):
        raise UserError(f"--engine {engine} has no {lacking}; expected the folder dist of the package onnxruntime-web")
    limits, registry = Limits(limit, keys or {}), CollectorRegistry()
    asked = Counter("unalike_requests", "Requests by path and status", ["path", "status"], registry=registry)
    seconds = Histogram(
        "unalike_model_seconds",
        "Time to make a model",
        registry=registry,
        buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0),
    )
    app = FastAPI(title="Unalike: a model for whoever asks", version=__version__, docs_url=None, redoc_url=None)

    def allowed(policy: str) -> str:
        return policy if engine is None else policy.replace("script-src 'self'", "script-src 'self' 'wasm-unsafe-eval'")

    app.add_middleware(_Guarded, asked=asked, headers={key: allowed(value) for key, value in HEADERS.items()})

    @app.exception_handler(Refused)
    async def explain(request: Request, refused: Refused) -> Response:
        response = _json({"error": refused.expected}, refused.status)
        response.headers.update(refused.headers)
        return response

    @app.exception_handler(HTTPException)
    async def nothing_here(request: Request, error: HTTPException) -> Response:
        return _json({"error": f"there is nothing at {request.url.path} for {request.method}"}, error.status_code)

    @app.get("/healthz", summary="Is the service up?")
    async def healthz() -> Response:
        shelf.refresh()
        return _json({"status": "ok", "bundles": sorted(shelf.bundles)})

    @app.get("/metrics", summary="Counters for Prometheus")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    @app.get("/v1/runs", summary="The cards of all bundles")
    @app.get("/v1/runs.json", include_in_schema=False)
    async def runs() -> Response:
        shelf.refresh()
        return _json(shelf.cards())

    @app.get("/v1/runs/{name}/{file}", summary="A file of a bundle, with an ETag")
    async def bundle_file(name: str, file: str, request: Request) -> Response:
        held = shelf.get(name)
        if file not in held.files or not (file in PUBLIC or shelf.gives_make(held)):
            raise Refused(404, f"{name} gives out {', '.join(shelf.given(held))}; {file} is not among them")
        return _with_etag(shelf.body(held, file), Path(file).suffix, request)

    @app.post("/v1/runs/{name}/personalize", summary="A descriptor in, a model out")
    async def personalize(name: str, request: Request) -> Response:
        """The body is the descriptor: ``length`` numbers of the card, little-endian float32, and nothing else.

        The answer is the model's parameters: safetensors, or JSON where Accept asks for it.
        """
        held = shelf.get(name)
        if held.card["made_at"] != "server":
            why = (
                "a newcomer makes its model by itself" if held.card["made_at"] else "everybody gets model.onnx as it is"
            )
            raise Refused(404, f"{name} takes no descriptors: {why}; get its files")
        limits.take(limits.who(request))
        v = await _descriptor(request, held.card["length"])
        start = time.perf_counter()
        theta, unlike = held.model_for(v), held.is_unlike(v)
        seconds.observe(time.perf_counter() - start)
        if not bool(np.isfinite(theta).all()):
            raise Refused(422, "expected a descriptor that describe.onnx made; this one gives no finite model")
        if "application/json" in request.headers.get("accept", ""):
            return _json({"theta": theta, "unlike": unlike})
        return Response(_safetensors(theta, unlike), media_type="application/octet-stream")

    @app.get("/", include_in_schema=False)
    async def home(request: Request) -> Response:
        return _with_etag(allowed((PAGE / "index.html").read_text(encoding="utf-8")).encode(), ".html", request)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(_describe_api(app.openapi()), media_type="text/html; charset=utf-8")

    @app.get("/offline.js", include_in_schema=False)
    @app.get("/page/{file}", include_in_schema=False)
    async def page(request: Request, file: str = "offline.js") -> Response:
        if file not in {path.name for path in PAGE.iterdir()}:
            raise Refused(404, "there is nothing here")
        return _with_etag((PAGE / file).read_bytes(), Path(file).suffix, request)

    @app.get("/page/ort/{file}", include_in_schema=False)
    async def engine_file(request: Request, file: str) -> Response:
        if engine is None or file not in ENGINE:
            raise Refused(404, "there is nothing here")
        return _with_etag((engine / file).read_bytes(), Path(file).suffix, request)

    return app


class _Guarded:
    """Adds the headers of every answer, and counts it. Plain ASGI: a middleware of FastAPI's takes twice the time."""

    def __init__(self, app: ASGIApp, asked: Counter, headers: Mapping[str, str]) -> None:
        self.app, self.asked, self.headers = app, asked, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = "no-store" if scope["method"] == "POST" else "no-cache"  # no-cache: ask whether it has changed
                extra = {**self.headers, "cache-control": kept}
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in extra.items())]
                self.asked.labels(getattr(scope.get("route"), "path", "other"), str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, guarded if scope["type"] == "http" else send)


class _Shelf:
    """The bundles by name. One that changes on disk is read again; if it cannot be, the old one goes on."""

    def __init__(self, folders: Sequence[Path], offline: bool, engine: bool = False) -> None:
        self.offline, self.engine, self._looked = offline, engine, time.monotonic()
        self.bundles: dict[str, Bundle] = {}
        for folder in folders:
            bundle = Bundle.open(folder)
            if bundle.name in self.bundles:
                raise UserError(f"{folder} and {self.bundles[bundle.name].folder} are both called {bundle.name!r}")
            self.bundles[bundle.name] = bundle

    def get(self, name: str) -> Bundle:
        self.refresh()
        if name not in self.bundles:
            raise Refused(404, f"there is no run {name!r}; there are {', '.join(sorted(self.bundles))}")
        return self.bundles[name]

    def refresh(self) -> None:
        if time.monotonic() - self._looked < CHECKED_EVERY:
            return
        self._looked = time.monotonic()
        for name, old in list(self.bundles.items()):
            try:
                if _stamp(old.folder) != old.stamp and (new := Bundle.open(old.folder)).name == name:
                    self.bundles[name] = new
            except (OSError, UserError):
                continue  # it is being written

    def gives_make(self, bundle: Bundle) -> bool:
        return self.offline or bundle.card["made_at"] == "newcomer"

    def given(self, bundle: Bundle) -> list[str]:
        given = (*PUBLIC, "make.onnx") if self.gives_make(bundle) else PUBLIC
        return [file for file in given if file in bundle.files]

    def card(self, name: str) -> dict[str, Any]:
        """What a page needs to know: the card without what tells where training clients lie.

        ``columns`` as pairs: JavaScript would put an object's keys that look like numbers first.
        """
        bundle = self.bundles[name]
        card = {key: value for key, value in bundle.card.items() if key != "usual"}
        columns = json.loads(bundle.files["schema.json"]).get("columns")
        columns = None if columns is None else [*columns.items()]
        card |= {"columns": columns, "offline": self.gives_make(bundle) and bundle.make is not None}
        return card | ({"engine": ENGINE} if self.engine else {})

    def body(self, bundle: Bundle, file: str) -> bytes:
        return orjson.dumps(self.card(bundle.name)) if file == "card.json" else bundle.files[file]

    def cards(self) -> list[dict[str, Any]]:
        return [self.card(name) for name in sorted(self.bundles)]


async def _descriptor(request: Request, length: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    expected, body = 4 * length, bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > expected:
            raise Refused(413, f"expected a body of {expected} bytes ({length} little-endian float32), got more")
    if len(body) != expected:
        raise Refused(400, f"expected a body of {expected} bytes ({length} little-endian float32), got {len(body)}")
    v = np.frombuffer(bytes(body), dtype="<f4")
    if not bool(np.isfinite(v).all()):
        raise Refused(422, f"expected {length} finite numbers, got NaN or infinity")
    return v


def _safetensors(theta: np.ndarray[Any, np.dtype[np.float32]], unlike: bool | None) -> bytes:
    about = {} if unlike is None else {"__metadata__": {"unlike": "yes" if unlike else "no"}}
    header: bytes = orjson.dumps(
        {**about, "theta": {"dtype": "F32", "shape": [len(theta)], "data_offsets": [0, 4 * len(theta)]}}
    )
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + theta.astype("<f4").tobytes()


def _json(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json")


def _with_etag(body: bytes, suffix: str, request: Request) -> Response:
    tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"ETag": tag})
    return Response(body, media_type=TYPES.get(suffix, "application/octet-stream"), headers={"ETag": tag})


def _describe_api(api: Mapping[str, Any]) -> str:
    """The OpenAPI description as a page that loads nothing from elsewhere."""
    from markupsafe import escape

    rows = [
        f"<tr><td><code>{kind.upper()} {escape(path)}</code></td><td>{escape(about.get('summary', ''))}<br>"
        f"{escape(about.get('description', ''))}</td></tr>"
        for path, kinds in api["paths"].items()
        for kind, about in kinds.items()
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<title>{escape(api["info"]["title"])}</title><link rel="stylesheet" href="/page/style.css"><main><h1>'
        f'{escape(api["info"]["title"])}</h1><p>The same as <a href="/openapi.json">OpenAPI</a>.</p><table>'
        f"{''.join(rows)}</table></main></html>"
    )


def export_page(folders: Sequence[Path], out: Path) -> None:
    """The page and the bundles as a folder for any web server: models are made in the page."""
    shelf = _Shelf(folders, offline=True)
    files = {path.name if path.name in AT_TOP else f"page/{path.name}": path.read_bytes() for path in PAGE.iterdir()}
    files["v1/runs.json"] = orjson.dumps(shelf.cards())
    for name, bundle in shelf.bundles.items():
        for file in shelf.given(bundle):
            files[f"v1/runs/{name}/{file}"] = shelf.body(bundle, file)
    for place, body in files.items():
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        write_whole(out / place, body, 0o644)


def server_of(
    app: Starlette, cert: Path | None = None, key: Path | None = None, proxied: bool = False
) -> uvicorn.Server:
    """``proxied``: believe what a proxy on this machine says about who asks."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        ssl_certfile=cert,
        ssl_keyfile=key,
        proxy_headers=proxied,
        server_header=False,
        timeout_graceful_shutdown=10,
        limit_concurrency=1000,
    )
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """The socket of a service; port 0 takes a free one."""
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise UserError(f"cannot listen at {host}:{port}: {error.strerror}; choose with --host and --port") from error
    # asyncio does this only for sockets that name their protocol; without it the body of an answer, which follows its
    # head, waits until the client has acknowledged that: 40 ms
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def run_service(
    app: Starlette,
    host: str,
    port: int,
    cert: Path | None = None,
    key: Path | None = None,
    proxied: bool = False,
    ready: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT or SIGTERM, which let running requests finish; ``ready`` is told the address.

    Port 0 takes a free one.
    """
    try:
        if cert is not None:
            ssl.create_default_context().load_cert_chain(cert, key)
    except OSError as error:  # SSLError is one
        raise UserError(f"--tls-cert {cert} and --tls-key {key} are not a certificate and its key: {error}") from error
    with listen(host, port) as listening:
        ready(f"{'https' if cert else 'http'}://{host}:{listening.getsockname()[1]}/")
        app.state.server = server_of(app, cert, key, proxied)
        app.state.server.run(sockets=[listening])
