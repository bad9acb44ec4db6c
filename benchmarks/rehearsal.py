"""How near is a learning rate that was chosen on simulated clients to the one that the real ones choose?

    UNALIKE_DATA=... python -m benchmarks.rehearsal femnist --out femnist.json
    UNALIKE_DATA=... python -m benchmarks.rehearsal cifar-10 --out cifar-10.json

FedAvg with a perceptron (or ``--model lenet``) is trained with each of five rates on the real clients, on clients
that MDM simulates from their private label histograms (``unalike tune --on mdm`` chooses there), and on clients of
the same number that have rows at random. Each kind chooses its rate by its own validation rows. What counts is how
well the real clients are served, on their test rows, by the rate that was chosen elsewhere. Parts that are in the
file are not computed again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import unalike as ua
from unalike.data.sources.images import cifar10
from unalike.runs.errors import Diverged
from unalike.runs.load import load_data
from unalike.runs.recipe.settings import plan_for
from unalike.runs.rehearsal import MIXTURE, Rehearsal

RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
KINDS = ("real", "MDM", "random")
Settings = dict[str, Any]


def femnist(folder: Path, seed: int) -> tuple[Settings, Rehearsal]:
    """200 writers are the real clients; the characters of all others are the server's. A row is protected."""
    return {"data": "femnist:writers=200", "cohort": 20}, Rehearsal("femnist:writers=-200", 2.0, unit="point")


def cifar(folder: Path, seed: int) -> tuple[Settings, Rehearsal]:
    """Half of the pictures are those of 100 clients with few classes each, half the server's. A row is protected."""
    source, halves = cifar10(), (folder / "real.npz", folder / "server.npz")
    assert source.y is not None
    order = np.random.default_rng(seed).permutation(len(source.x))
    for file, rows in zip(halves, np.array_split(order, 2), strict=True):
        np.savez(file, x=source.x[rows], y=source.y[rows])
    real = {"data": str(halves[0]), "partition": "inner-dirichlet:0.1", "clients": 100, "cohort": 20}
    return real, Rehearsal(str(halves[1]), 2.0, unit="point")


def train(settings: Settings, rate: float) -> dict[str, float]:
    """Mean accuracy over the clients, on validation and on test rows; none where training diverged."""
    try:
        done = ua.run("fedavg", lr=rate, **settings)
    except Diverged:
        return {"validation": 0.0, "test": 0.0}
    served = done.accuracy.seen
    return {"validation": done.validation or 0.0, "test": served.mean if served else 0.0}


def study(name: str, model: str, rounds: int, seeds: int, file: Path) -> dict[str, Any]:
    """Every training by its name, and what the mixture cost."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as text:
            folder = Path(text)
            real, rehearsal = {"femnist": femnist, "cifar-10": cifar}[name](folder, seed)
            common = {"rounds": rounds, "eval_every": rounds, "model": model, "validation": 0.2, "seed": seed}
            real |= {**common, "unseen": 0}
            [(_, recipe)] = plan_for(["fedavg"], real).runs
            simulated, cost = rehearsal.prepare(recipe, load_data(recipe), folder)
            found[f"cost {seed}"] = cost
            dealt = {"data": simulated.data.name, "clients": simulated.data.clients, "test": 0.0}
            like = {**real, **dealt, "partition": f"mdm:{folder / MIXTURE}"}
            iid = {**real, **dealt, "partition": f"mdm:{folder / MIXTURE},mode=iid"}
            for kind, settings in zip(KINDS, (real, like, iid), strict=True):
                for rate in RATES:
                    key = f"{kind} {seed} {rate:g}"
                    if key not in found:
                        found[key] = train(settings, rate)
                        file.write_text(json.dumps(found, indent=1))
                        print(key, found[key], flush=True)
    return found


def choices(found: dict[str, Any], seeds: int) -> str:
    """For each kind: its choices, and what the real clients score by them."""
    lines = []
    for kind in KINDS:
        chosen = [max(RATES, key=lambda rate: found[f"{kind} {seed} {rate:g}"]["validation"]) for seed in range(seeds)]
        scores = [found[f"real {seed} {rate:g}"]["test"] for seed, rate in enumerate(chosen)]
        best = [max(found[f"real {seed} {rate:g}"]["test"] for rate in RATES) for seed in range(seeds)]
        lost = statistics.fmean(one - own for one, own in zip(best, scores, strict=True))
        rates = ", ".join(f"{rate:g}" for rate in chosen)
        lines.append(
            f"{kind}: chose {rates}; the real clients score {statistics.fmean(scores):.3f}, {lost:.3f} off the best"
        )
    return "\n".join([*lines, f"the mixture cost {found['cost 0']}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=["femnist", "cifar-10"])
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    print(choices(study(given.data, given.model, given.rounds, given.seeds, given.out), given.seeds))


if __name__ == "__main__":
    main()
