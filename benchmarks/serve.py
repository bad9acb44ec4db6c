"""The service: how soon it starts, how many models a second it makes, how fast each is there, and whether it grows.

make bench-serve, or: python -m benchmarks.serve [--requests 100000] [--seconds 20]

One process of `unalike serve` with a bundle of digits (PeFLL, a hypernetwork of size S), and the same service in which
PyTorch makes the models instead of ONNX Runtime. Requests come from this process over four connections that stay open:
first 200 a second for some seconds, each at its time whether or not earlier ones were answered, then as many as it
takes. Times of an idle machine are comparable, those of a shared one are not; processor time a request nearly is.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

RATE = 200.0  # requests a second
CONNECTIONS = 4
TARGETS = "200/s with p50 < 5 ms and p99 < 25 ms; 1 ms CPU a request; start < 1.5 s; < 20 MB growth"


def make_bundle(folder: Path) -> Path:
    import unalike as ua

    ua.run("pefll", "digits", clients=60, partition="pathological", classes=2, rounds=5, out=folder / "digits")
    subprocess.run(
        [sys.executable, "-m", "unalike", "bundle", folder / "digits"], check=True, stdout=subprocess.DEVNULL
    )
    return folder / "digits.bundle"


def serve_by_torch(bundle: Path) -> None:
    """`unalike serve`, but PyTorch makes the models."""
    import torch

    from unalike.core.method import OnDemand
    from unalike.newcomers import service
    from unalike.runs.finished import FinishedRun

    torch.set_num_threads(1)
    run = FinishedRun.open(bundle.with_suffix(""))
    method, state = run.method, run.state
    assert isinstance(method, OnDemand)

    def model_for(self: service.Bundle, v: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        with torch.no_grad():
            made: np.ndarray = method.model_of(state, torch.from_numpy(v.copy())).numpy()  # type: ignore[type-arg]
        return made

    service.Bundle.model_for = model_for  # type: ignore[method-assign]
    app = service.service([bundle], limit=1e9)
    service.run_service(app, "127.0.0.1", 0, ready=lambda at: print(f"serving at {at}", flush=True))


@contextmanager
def started(*words: object) -> Iterator[tuple[int, int, float]]:
    """A service as a process: its pid, its port, and the seconds until it answered."""
    begin = time.perf_counter()
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *map(str, words)], stdout=subprocess.PIPE, text=True, env=one_thread
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().split("127.0.0.1:")[1].split("/")[0])
            line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            line.request("GET", "/healthz")
            line.getresponse().read()
            line.close()
            yield process.pid, port, time.perf_counter() - begin
        finally:
            process.terminate()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def megabytes(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Caller:
    """A connection that stays open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
        self.reader, self.writer = reader, writer
        head = f"POST /v1/runs/digits/personalize HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request = head.encode() + body

    async def ask(self) -> None:
        self.writer.write(self.request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(
            int(one.split(b":")[1]) for one in head.lower().split(b"\r\n") if one.startswith(b"content-length")
        )
        await self.reader.readexactly(length)


async def callers(port: int, length: int) -> list[Caller]:
    body = np.linspace(-0.5, 0.5, length).astype("<f4").tobytes()
    return [Caller(*await asyncio.open_connection("127.0.0.1", port), body) for _ in range(CONNECTIONS)]


async def at_a_rate(port: int, length: int, seconds: float) -> list[float]:
    """How long each request waited and took, from the time at which it was due."""
    took, start = list[float](), time.perf_counter() + 0.1

    async def one(caller: Caller, first: int) -> None:
        for number in range(first, int(seconds * RATE), CONNECTIONS):
            due = start + number / RATE
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await caller.ask()
            took.append(time.perf_counter() - due)

    await asyncio.gather(*(one(caller, i) for i, caller in enumerate(await callers(port, length))))
    return took


async def as_many(port: int, length: int, count: int) -> float:
    """Requests a second, one after the other on each connection."""
    open_ones, start = await callers(port, length), time.perf_counter()

    async def one(caller: Caller) -> None:
        for _ in range(count // CONNECTIONS):
            await caller.ask()

    await asyncio.gather(*map(one, open_ones))
    return count / (time.perf_counter() - start)


def measure(title: str, length: int, seconds: float, requests: int, *words: object) -> dict[str, float]:
    with started(*words) as (pid, port, start):
        asyncio.run(as_many(port, length, 2000))  # warm
        before, cpu = megabytes(pid), cpu_seconds(pid)
        took = sorted(asyncio.run(at_a_rate(port, length, seconds)))
        each = (cpu_seconds(pid) - cpu) / len(took)
        most = asyncio.run(as_many(port, length, requests))
        found = {
            "start_s": start,
            "p50_ms": 1e3 * statistics.median(took),
            "p99_ms": 1e3 * took[int(0.99 * len(took))],
            "cpu_ms": 1e3 * each,
            "most_per_s": most,
            "memory_mb": megabytes(pid),
            "growth_mb": megabytes(pid) - before,
        }
    print(f"{title:>14}  " + "  ".join(f"{key} {value:,.2f}" for key, value in found.items()), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, help="for the growth of memory")
    parser.add_argument("--seconds", type=float, default=20.0, help="at 200 requests a second")
    parser.add_argument("--torch", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.torch is not None:
        serve_by_torch(given.torch)
        return
    with tempfile.TemporaryDirectory() as folder:
        bundle = make_bundle(Path(folder))
        card = json.loads((bundle / "card.json").read_bytes())
        print(f"descriptor {4 * card['length']} bytes, model {4 * card['parameters']:,} bytes; wanted: {TARGETS}")
        print(f"load of this machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        limit = ("--limit", 1e9, "--port", 0)
        onnx = ("-m", "unalike", "serve", bundle, *limit)
        measure("ONNX Runtime", card["length"], given.seconds, given.requests, *onnx)
        by_torch = ("-m", "benchmarks.serve", "--torch", bundle)
        measure("PyTorch", card["length"], given.seconds, min(given.requests, 10_000), *by_torch)


if __name__ == "__main__":
    main()
