"""Small run folders as a run would leave them, made up but plausible; for tests of what reads them."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

FINAL = {  # method: mean on seen, on unseen, on unlabeled clients; how far clients differ
    "local": (0.93, None, None, 0.05),
    "fedavg": (0.79, 0.77, 0.77, 0.13),
    "fedavg-finetune": (0.955, 0.94, None, 0.04),
    "pefll": (0.958, 0.951, 0.87, 0.035),
}


def make_run(
    folder: Path, method: str, *, clients: int = 30, rounds: int = 20, seed: int = 0, private: bool = False
) -> Path:
    """A finished run of ``method`` on digits dealt out two classes to a client."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(7)
    unseen = max(1, clients // 4)
    names = [f"client-{i:03d}" for i in range(clients)]
    group = ["unseen" if i >= clients - unseen else "seen" for i in range(clients)]
    histogram = np.zeros((clients, 10), dtype=int)
    for row in histogram:
        row[random.choice(10, 2, replace=False)] = random.integers(8, 60, 2)
    hard = random.normal(0, 1, clients)
    noise = np.random.default_rng(seed + len(method))
    *means, spread = FINAL[method]
    rows: list[dict[str, Any]] = []
    accuracy: dict[str, dict[str, float] | None] = {}
    for name, mean in zip(("seen", "unseen", "unlabeled"), means, strict=True):
        members = [i for i in range(clients) if group[i] == ("unseen" if name == "unlabeled" else name)]
        if mean is None:
            accuracy[name] = None
            continue
        tests = histogram[members].sum(1) // 4 + 1
        score = np.clip(mean + spread * (0.8 * hard[members] + 0.4 * noise.normal(0, 1, len(members))), 0, 1)
        score = np.round(score * tests) / tests
        accuracy[name] = {"mean": float(score.mean()), "std": float(score.std()), "p10": float(np.quantile(score, 0.1))}
        for i, n, value in zip(members, tests, score, strict=True):
            train = int(histogram[i].sum() - n)
            row = {"client": names[i], "group": name, "n_train": train, "n_test": n, "score": value, "loss": 1 - value}
            rows.append(row)
    size, cohort = 4810, 10
    sends = 0 if method == "local" else size * 4 * cohort
    lines = []
    for number in range(1, rounds + 1):
        line: dict[str, Any] = {
            "round": number,
            "seconds": 0.3 * number,
            "loss": 2.3 * math.exp(-number / 8) + 0.1,
            "bytes_up": sends * number,
            "bytes_down": sends * number,
            "epsilon": 0.9 * math.sqrt(number) if private else None,
        }
        if number % 2 == 0 or number == rounds:
            for name, summary in accuracy.items():
                if summary is not None:
                    share = 1 - 0.8 * math.exp(-3 * number / rounds) + 0.8 * math.exp(-3)
                    line[name] = {key: value * (share if key != "std" else 1) for key, value in summary.items()}
        lines.append(line)
    result = {
        "method": method,
        "data": "digits",
        "seed": seed,
        "rounds": rounds,
        "seconds": 0.3 * rounds,
        "metric": "accuracy",
        "accuracy": accuracy,
        "bytes": {"up": sends * rounds, "down": sends * rounds},
        "privacy": {"private": True, "epsilon": 0.9 * math.sqrt(rounds), "delta": 1e-5, "unit": "client"}
        if private
        else {"private": False, "epsilon": None, "delta": None, "unit": None},
    }
    sight = {
        "task": "FedAvg.fit",
        "array": "update",
        "shape": [size],
        "seen_as": "mean",
        "unit": "client" if private else None,
        "clip": 1.0 if private else None,
        "noise": {"kind": "Gaussian", "noise_multiplier": 1.1} if private else None,
        "sampling": {"kind": "FixedSize", "size": cohort, "population": clients - unseen},
        "note": "seeded noise: protects nobody outside a simulation" if private else None,
        "first": 1,
        "last": rounds,
        "times": rounds,
        "replies": cohort * rounds,
        "bytes": sends * rounds,
    }
    count = {**sight, "task": "PeFLL.describe", "array": "descriptor", "shape": [32], "seen_as": "individual"}
    count |= {"unit": None, "clip": None, "noise": None, "note": None, "bytes": 32 * 4 * cohort * rounds}
    transcript = [] if method == "local" else [sight] if method != "pefll" or private else [count, sight]
    recipe = f'method = "{method}"\nrounds = {rounds}\nseed = {seed}\n\n[data]\nname = "digits"\nclients = {clients}\n'
    versions = {"python": "3.11.7", "system": "Linux", "unalike": "0.1.0", "torch": "2.13.0", "numpy": "2.4.1"}
    clients_file = {
        "names": names,
        "group": group,
        "n": histogram.sum(1).tolist(),
        "label_histogram": histogram.tolist(),
    }
    descriptors = (histogram @ random.normal(0, 0.1, (10, 6))).round(3).tolist() if method == "pefll" else None
    write = {
        "unalike.json": json.dumps({"format": 1, "version": "0.1.0"}),
        "result.json": json.dumps(result),
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        "transcript.json": json.dumps(transcript),
        "recipe.toml": recipe,
        "versions.json": json.dumps(versions),
        "simulation/map.json": json.dumps({**clients_file, "descriptor": descriptors, "class_names": None}),
    }
    (folder / "simulation").mkdir()
    for name, text in write.items():
        (folder / name).write_text(text, encoding="utf-8")
    with (folder / "simulation" / "scores.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, ["client", "group", "n_train", "n_test", "score", "loss"])
        table.writeheader()
        table.writerows(rows)
    return folder
