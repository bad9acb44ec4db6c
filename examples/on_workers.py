"""The same run in one process and on two workers of a Ray cluster, one of which is killed on the way.

python examples/on_workers.py

Ray opens ports on every interface of the machine: `make demo-cluster` runs this in a network of its own.
"""

import os
import signal
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unalike.deploy.session import Session
from unalike.runs import checkpoint
from unalike.runs.recipe.recipe import Data, Recipe, Runtime
from unalike.runs.run import run_recipe
from unalike.runs.watcher import Watcher

KILL_AFTER = 3  # rounds


class Shows(Watcher):
    """Prints the rounds and the workers, and kills worker 1 in the middle of a round."""

    def __init__(self, session: Session | None = None) -> None:
        self.session, self.text = session, ""

    def workers(self, text: str) -> None:
        self.text = text

    def round(self, record: Mapping[str, Any]) -> None:
        print(f"  round {record['round']}: loss {record['loss']:.4f}  {self.text}", flush=True)
        if self.session is not None and record["round"] == KILL_AFTER:
            victim = self.session.workers.processes()[1]
            print(f"  now worker 1 (process {victim}) is killed while it trains", flush=True)
            threading.Timer(0.15, os.kill, (victim, signal.SIGKILL)).start()


def main() -> None:
    # equal steps of equal blocks, so that a round takes about half a second
    settings: dict[str, Any] = {"local": {"epochs": 10, "batch": 10, "lr": 0.05}, "cohort": 1.0}
    data = Data(name="digits", partition="dirichlet:0.3", clients=100)
    recipe = Recipe(
        method="fedavg", rounds=8, data=data, hyperparameters=settings, runtime=Runtime(block=25, threads=1)
    )
    on_ray = recipe.model_copy(update={"runtime": Runtime(name="ray", workers=2, block=25, threads=1)})
    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder, "here"), Path(folder, "there")
        print("one process:")
        one = run_recipe(recipe, here, watcher=Shows())
        print("two workers (Ray takes some seconds to start):", flush=True)
        session = Session(on_ray.runtime)
        try:
            two = run_recipe(on_ray, there, watcher=Shows(session), workers=session)
        finally:
            session.close()
        for line in two.workers:
            print(
                f"  worker {line.worker}: {line.clients} clients, {line.answered:,} replies, {line.failed} failed, "
                f"{line.rate:,.0f} clients/s, started again {line.restarts}×"
            )
        states = [checkpoint.load(path) for path in (here, there)]
        assert states[0] is not None and states[1] is not None
        gap = max(float((states[0].state[name] - states[1].state[name]).abs().max()) for name in states[0].state)
    scores = [result.accuracy.seen.mean for result in (one, two) if result.accuracy.seen is not None]
    # two shards of one process are as far apart: the order of sums, after eight rounds of ten epochs
    if gap > 1e-3 or abs(scores[0] - scores[1]) > 1e-2 or two.workers[1].restarts == 0:
        raise SystemExit(f"NOT the same: states differ by {gap:.2g}, scores are {scores}")
    print(
        f"The result on two workers, one of them killed and back, equals the one-process run: accuracy "
        f"{100 * scores[1]:.1f} % and {100 * scores[0]:.1f} %, models apart by at most {gap:.1g}."
    )


if __name__ == "__main__":
    main()
