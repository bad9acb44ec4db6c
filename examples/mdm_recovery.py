"""Recovery of known mixtures, Table A.1 of Scott, 2026 (errors over three seeds), and of their number of components.

    python examples/mdm_recovery.py

Every fit of Table A.1 is 100 rounds with a cohort of 1,000 of 20,000 clients × 100 samples.
"""

from __future__ import annotations

import time

import numpy as np

from unalike import MDM, Federation, Mixture, histogram_clients, known_mixture, relative_error, simulate

SEEDS = (0, 1, 2)


def federation_of(mixture: Mixture, clients: int, seed: int) -> Federation:
    counts = mixture.sample(clients, np.random.default_rng(seed))
    return simulate(histogram_clients(counts), seed=seed, block=4096, threads=1)


def recovery(name: str, start: str = "concentration") -> tuple[list[float], list[float], list[float], list[float]]:
    """Errors of α and τ, wall-clock seconds, and processor seconds of this process."""
    truth = known_mixture(name)
    alphas, taus, seconds, own = [], [], [], []
    for seed in SEEDS:
        federation = federation_of(truth, 20_000, seed)
        settings = MDM(truth.categories, 100, components=truth.components, start=start)  # type: ignore[arg-type]  # MDM checks it
        begin, begin_own = time.perf_counter(), time.process_time()
        found = settings.fit(federation).mixture
        seconds.append(time.perf_counter() - begin)
        own.append(time.process_time() - begin_own)
        errors = relative_error(found, truth)
        alphas.append(errors["alpha"])
        taus.append(errors["tau"])
    return alphas, taus, seconds, own


def chosen(clients: int, seed: int) -> int:
    """The number of components that validation on 1,000 fresh clients chooses among 1 to 6 (T1 A.1.2: 3)."""
    truth = known_mixture("selection")
    fitting, unseen = federation_of(truth, clients, seed), federation_of(truth, 1000, 1000 + seed)
    settings = MDM(truth.categories, 100, cohort=clients, rounds=400)  # to convergence: the concentrated one is slow
    return settings.choose(fitting, unseen, range(1, 7)).fitted.mixture.components


def main() -> None:
    for name in ("low-1", "low-2", "low-3", "medium-1", "medium-2", "medium-3", "high-1", "high-2", "high-3"):
        numbers = [" ".join(f"{value:.3f}" for value in values) for values in recovery(name)]
        print("{:10} alpha {}   tau {}   seconds {}   of this process {}".format(name, *numbers), flush=True)
    print("high-3 from a random start: alpha", " ".join(f"{value:.3f}" for value in recovery("high-3", "random")[0]))
    for clients in (100, 200, 1000):
        print(f"A.1.2, n={clients}: K =", *(chosen(clients, seed) for seed in SEEDS), flush=True)


if __name__ == "__main__":
    main()
