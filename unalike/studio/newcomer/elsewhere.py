"""A run scored on clients of another source: trained on simulated clients, say, and tried on real ones (T1 §7.3)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unalike.data import load
from unalike.studio.errors import UserError
from unalike.studio.runs.finished import FinishedRun
from unalike.studio.runs.measure import measure, metric_of
from unalike.studio.simulate import simulate


def score_elsewhere(
    path: Path, data: str, *, partition: str | None = None, clients: int | None = None, seed: int = 0, **options: Any
) -> dict[str, Any]:
    """Every client of ``data`` is a newcomer to the run at ``path``: it gets its model from its training rows, and the
    model is tried on its test rows. Rows are read and scaled as in the run; ``options`` as in ``unalike.data.load``.
    """
    finished = FinishedRun.open(path)
    how: dict[str, Any] = {"partition": partition, "clients": clients, "unseen": 0, "seed": seed, **options}
    population = load(data, schema=finished.schema, **how).using(finished.schema)
    federation, everybody = simulate(population, seed=seed), torch.arange(len(population))
    population = replace(population, seen=everybody[:0], unseen=everybody)
    measured = measure(finished.method, finished.state, federation, population)
    if not measured:
        raise UserError(f"{finished.recipe.method} makes no models for newcomers, so there is nothing to score")
    groups = {
        "labeled" if one.group == "unseen" else one.group: {
            "clients": int((~one.scores.score.isnan()).sum()),
            "mean": one.scores.mean,
            "p10": one.scores.p10,
            "worst": one.scores.worst,
        }
        for one in measured
    }
    return {
        "run": str(path),
        "trained_on": finished.recipe.data.name,
        "partition": finished.recipe.data.partition,
        "data": population.name,
        "metric": metric_of(population),
        "scores": groups,
        "notes": finished.notes,
    }
