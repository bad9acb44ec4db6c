"""Fit a mixture, or choose among several numbers of components, and measure it: all that ``unalike mdm`` tells.

from unalike.analytics.mdm.study import histograms, study
done = study(histograms("mdm:medium-2"), unalike.simulate, components=[1, 2, 3])
print(done.values["log_likelihood"], done.fitted.mixture)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from unalike.analytics.mdm.algorithm import MDM, Choice, Fitted
from unalike.analytics.mdm.counts import (
    check_largest,
    histogram_clients,
    population_histograms,
    read_counts,
    true_mixture,
)
from unalike.analytics.mdm.distance import compare
from unalike.analytics.mdm.privacy import noise_for_budget
from unalike.core.client import Clients
from unalike.core.federation import Federation
from unalike.data import load
from unalike.data.partition.mixture import MDMError, Mixture, relative_error
from unalike.privacy.ledger import Ledger

Federate = Callable[..., Federation]  # where the clients live is the caller's choice: `unalike.simulate`
_BLOCK_NUMBERS = 1 << 24  # numbers that one block of clients may send


@dataclass(frozen=True)
class Histograms:
    """Clients with their histograms, the mixture that they were drawn from if it is known, and the classes' names."""

    clients: Clients
    truth: Mixture | None = None
    names: list[str] | None = None


@dataclass(frozen=True)
class Study:
    """The fitted mixture, what is known about it as plain values, and groups of clients to draw (see ``compare``)."""

    fitted: Fitted
    values: dict[str, Any]
    groups: dict[str, NDArray[Any]]  # empty unless clients were compared


def histograms(
    data: str, *, partition: str | None = None, clients: int | None = None, seed: int = 0, **options: Any
) -> Histograms:
    """The label histograms of a named source, a file or a folder; ``options`` as in ``unalike.data.load``."""
    population = load(
        data,
        normalize=False,
        seed=seed,
        partition=partition,
        clients=clients,
        min_samples=1,
        test=0.0,
        unseen=0.0,
        **options,
    )
    names = None if population.class_names is None else [str(name) for name in population.class_names]
    return Histograms(population_histograms(population), true_mixture(population), names)


def histograms_in(file: str | Path) -> Histograms:
    """Ready histograms from a CSV, NPZ or NPY file."""
    return Histograms(histogram_clients(read_counts(file)))


def study(
    given: Histograms,
    federate: Federate,
    *,
    components: Sequence[int] = (2,),
    rounds: int = 100,
    cohort: int = 1000,
    start: Literal["concentration", "random"] = "concentration",
    validation: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    clip: float = 20.0,
    largest: int | None = None,
    compared: bool = False,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> Study:
    """Fit by EM; of several ``components`` choose one by clients kept apart (``validation``: a number or share).

    With ``epsilon`` everything together is (ε, δ)-DP for a client; δ is n^-1.1 for n clients unless given, and
    ``largest``, the most samples that a client may have, must be given. ``compared``: measure how near simulated
    clients are to the true ones.
    """
    choosing = len(components) > 1
    fitting, unseen = held_out(given.clients, validation, choosing, seed)
    settings = MDM(
        categories=given.clients.x.shape[1],
        largest=_bound(given, largest, private=epsilon is not None),
        components=components[0],
        rounds=rounds,
        cohort=min(cohort, len(fitting)),
        start=start,
        clip=clip,
    )
    check_largest(given.clients.x, settings.largest)
    for count in components:
        replace(settings, components=count).check(fitting.roster())
    delta = len(fitting) ** -1.1 if delta is None else delta
    if epsilon is not None:
        noise = noise_for_budget(settings, len(fitting), components, epsilon, delta, validated=choosing)
        settings = replace(settings, noise=noise)
    ledger = Ledger()
    block = _block(settings, max(components))
    federation = others = federate(fitting, seed=seed, block=block, threads=1, ledger=ledger)
    if unseen is not None:
        others = federate(unseen, seed=seed + 1, block=block, threads=1, ledger=ledger)
    begin = time.perf_counter()
    choice: Choice | None = None
    if unseen is not None and choosing:
        choice = settings.choose(federation, others, components, progress)
        fitted = choice.fitted
    else:
        fitted = settings.fit(federation, progress)
    seconds = time.perf_counter() - begin
    mixture = fitted.mixture
    with others.aside() as aside:  # a simulation's measurement, charged to nobody
        measured = replace(settings, noise=None).score(aside, [mixture]).log_likelihood
    values: dict[str, Any] = {
        "clients": len(fitting),
        "validation_clients": 0 if unseen is None else len(unseen),
        "categories": settings.categories,
        "components": mixture.components,
        "rounds": rounds,
        "cohort": settings.cohort,
        "seed": seed,
        "relative_error": _errors(mixture, given.truth),
        "log_likelihood": None if measured is None else measured[0],
        "seconds": round(seconds, 3),
        "tau": mixture.tau.tolist(),
        "alpha": mixture.alpha.tolist(),
        "selection": _selection(choice),
        "privacy": _privacy(ledger, settings, delta),
        "bytes": {"up": federation.traffic.total_up, "down": federation.traffic.total_down},
        "notes": fitted.notes,
    }
    groups: dict[str, NDArray[Any]] = {}
    if compared:
        values["distance"], groups = compare(given.clients.x.numpy(), mixture, seed)
    return Study(fitted, values, groups)


def held_out(clients: Clients, validation: float | None, choosing: bool, seed: int) -> tuple[Clients, Clients | None]:
    """Clients to fit on, and clients to choose by (None: nothing is to be chosen)."""
    share = (0.2 if choosing else 0.0) if validation is None else validation
    number = int(share) if share >= 1 else round(share * len(clients))
    if share < 0 or number >= len(clients) or (choosing and number == 0):
        raise MDMError(
            f"validation={share:g} of {len(clients)} clients: some must be left to fit on, and some kept apart to "
            "choose the number of components by; give a share below 1 or another number"
        )
    if number == 0:
        return clients, None
    order = torch.from_numpy(np.random.default_rng([seed, 5]).permutation(len(clients)))
    return clients.select(order[number:].sort().values), clients.select(order[:number].sort().values)


def _bound(given: Histograms, largest: int | None, private: bool) -> int:
    if largest is not None:
        return largest
    if given.truth is not None:
        return given.truth.largest
    if private:
        raise MDMError(
            "with an ε, the most samples that a client may have must not be read from the data; give it as largest "
            "(--largest)"
        )
    return int(given.clients.x.sum(1).max())


def _block(settings: MDM, components: int) -> int:
    """A block of all clients where memory allows: nothing is padded, and the tables are made once for a block."""
    numbers = components * (len(settings.edges) + settings.categories + 1)
    return max(64, min(8192, _BLOCK_NUMBERS // numbers))


def _errors(found: Mixture, truth: Mixture | None) -> dict[str, float] | None:
    if truth is None or truth.alpha.shape != found.alpha.shape:
        return None
    return relative_error(found, truth)


def _selection(choice: Choice | None) -> list[dict[str, float]] | None:
    if choice is None:
        return None
    rows = []
    for j, components in enumerate(choice.components):
        row = {"components": components, "below_best": choice.below_best[j], "standard_error": choice.error[j]}
        if choice.log_likelihood is not None:
            row["log_likelihood"] = choice.log_likelihood[j]
        rows.append(row)
    return rows


def _privacy(ledger: Ledger, settings: MDM, delta: float) -> dict[str, Any] | None:
    if settings.noise is None:
        return None
    noise = getattr(settings.noise, "noise_multiplier", None)
    spent = {"epsilon": ledger.epsilon(delta), "delta": delta, "unit": "client"}
    return {**spent, "noise_multiplier": noise, "clip": settings.clip}
