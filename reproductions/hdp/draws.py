"""ε and batch sizes that clients of Malekmohammadi's thesis declare, by Table 3.3: ``dist1`` to ``dist9``.

``python -m reproductions.hdp.draws dist6 20 > budgets.csv`` writes a file for ``unalike run --epsilons``. For 20, 40
or 60 clients they are the author's own draws, if ``robust-hdp/dists.json`` is in the data folder; otherwise they are
drawn from the table.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from torch import Tensor

from unalike.data.sources.folder import data_folder

DRAWS = "robust-hdp/dists.json"  # below the data folder
BATCHES = (16, 32, 64, 128)
LEAST = 0.05  # a normal distribution of ε has values below 0; no client's ε is below this
# Table 3.3: parts of a mixture as (share, "normal" or "uniform", mean or low, variance or high)
_DISTRIBUTIONS: dict[str, list[tuple[float, str, float, float]]] = {
    "dist1": [(1.0, "normal", 2.0, 1.0)],
    "dist2": [(0.2, "normal", 0.2, 0.01), (0.6, "normal", 1.0, 0.1), (0.2, "normal", 5.0, 1.0)],
    "dist3": [(1.0, "uniform", 0.2, 5.0)],
    "dist4": [(0.2, "normal", 0.2, 0.01), (0.6, "normal", 0.5, 0.1), (0.2, "normal", 2.0, 1.0)],
    "dist5": [(1.0, "uniform", 0.2, 2.0)],
    "dist6": [(0.3, "normal", 0.2, 0.01), (0.5, "normal", 0.5, 0.1), (0.2, "normal", 1.0, 0.1)],
    "dist7": [(1.0, "uniform", 0.2, 1.0)],
    "dist8": [(0.6, "normal", 0.2, 0.01), (0.4, "normal", 0.5, 0.1)],
    "dist9": [(1.0, "uniform", 0.2, 0.5)],
}


def authors_draws(name: str, count: int) -> dict[str, Tensor] | None:
    """ε and batch sizes of so many clients as the thesis's author drew them; None where they are not at hand."""
    file = data_folder() / DRAWS
    if not file.is_file():
        return None
    drawn = json.loads(file.read_text(encoding="utf-8"))[name.capitalize()].get(str(count))
    if drawn is None:
        return None
    return {
        "epsilon": torch.tensor(drawn["eps"], dtype=torch.float64),
        "batch": torch.tensor(drawn["batch"], dtype=torch.int64),
    }


def draw(name: str, count: int, seed: int) -> dict[str, Tensor]:
    random = np.random.default_rng([seed, 33])
    parts = _DISTRIBUTIONS[name]
    which = random.choice(len(parts), count, p=[part[0] for part in parts])
    values = np.empty(count)
    for place, index in enumerate(which):
        _, kind, first, second = parts[index]
        values[place] = random.normal(first, second**0.5) if kind == "normal" else random.uniform(first, second)
    return {
        "epsilon": torch.from_numpy(values.clip(LEAST)),
        "batch": torch.from_numpy(random.choice(BATCHES, count).astype(np.int64)),
    }


def main(name: str, count: int, seed: int = 0) -> None:
    """Print the file: a row for each client."""
    found = authors_draws(name, count) or draw(name, count, seed)
    print("client,epsilon,batch")
    for client, (epsilon, batch) in enumerate(zip(found["epsilon"].tolist(), found["batch"].tolist(), strict=True)):
        print(f"{client},{epsilon},{batch}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))
