"""The workloads that every tool runs: written to a folder once, read by all of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Shared:
    """FedAvg, one epoch of local SGD, or PeFLL; random data, as speed does not depend on it."""

    name: str
    network: str
    shape: tuple[int, ...]
    cohort: int
    batch: int
    clients: int = 1000
    samples: int = 50
    classes: int = 10
    lr: float = 0.01
    pefll_steps: int = 0  # of a client in a round of PeFLL; 0: FedAvg
    block: int | None = None  # clients in a block of Unalike; None: it measures what is fastest

    @property
    def steps(self) -> int:
        """Client-steps of a round."""
        return self.cohort * (self.pefll_steps or -(-self.samples // self.batch))

    def quick(self) -> Shared:
        return replace(self, cohort=max(2, self.cohort // 5), pefll_steps=self.pefll_steps // 10)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        rows = self.clients * self.samples
        np.save(folder / "x.npy", rng.standard_normal((rows, *self.shape), dtype=np.float32))
        np.save(folder / "y.npy", rng.integers(self.classes, size=rows))
        np.save(folder / "sizes.npy", np.full(self.clients, self.samples))
        settings = asdict(self)
        del settings["clients"], settings["samples"]
        (folder / "workload.json").write_text(json.dumps(settings))
        return folder


MLP = Shared("MLP 64-64-10", "mlp", (64,), cohort=100, batch=10)
LENET = Shared("LeNet 28x28", "lenet", (1, 28, 28), cohort=50, batch=10)
LENET_CIFAR = Shared("LeNet 32x32x3", "lenet", (3, 32, 32), cohort=50, batch=32)
PEFLL = Shared("PeFLL, LeNet 28x28", "lenet", (1, 28, 28), cohort=5, batch=32, clients=100, lr=2e-3, pefll_steps=50)
ALL = (MLP, LENET, LENET_CIFAR)
