"""Draw how client-level noise acts on FedRP, with everybody's latest z and without: python splitting_noise.py SVG."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from unalike import Gaussian, Model, Optimum, Splitting, data, figures, simulate, train

ROUNDS, DIM, EVERY = 600, 20, 20


def gaps(absentees: Literal["latest", "left-out"], noise: float) -> list[tuple[float, float]]:
    """FedRP's gap over rounds, as means of twenty; every client is in a cohort with probability 1/4."""
    federation = simulate(data.load(f"least-squares:clients=40,points=50,dim={DIM}"), block=40)
    best, model = Optimum.find(federation, DIM), Model.named("linear", federation.roster)
    method = Splitting(model, 2, 1, 1, 0.25, eta=0.3, absentees=absentees, clip=0.5, noise=Gaussian(noise))
    found: list[float] = []
    train(method, federation, ROUNDS, after_round=lambda _, state: found.append(best.gap(state.theta, federation)))
    return [(t + EVERY / 2, sum(found[t : t + EVERY]) / EVERY) for t in range(0, ROUNDS, EVERY)]


def main(svg: str) -> None:
    drawn = []
    for run, (absentees, noise) in enumerate([("left-out", 2.0), ("latest", 2.0), ("left-out", 0.2), ("latest", 0.2)]):
        points = gaps(absentees, noise)  # type: ignore[arg-type]  # the method checks the rule
        print(f"{absentees}, z = {noise}: {points[9][1]:.3g} after 200 rounds, {points[-1][1]:.3g} after {ROUNDS}")
        drawn.append(figures.Line(run, f"{absentees}, z = {noise:g}", points, [f"{value:.2g}" for _, value in points]))
    figures.save(
        figures.lines(drawn, figures.Axis("round", "d"), figures.Axis("gap to the optimum", log=True), legend=True),
        Path(svg),
    )


if __name__ == "__main__":
    main(sys.argv[1])
