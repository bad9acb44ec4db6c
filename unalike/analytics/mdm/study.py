"""Fit a mixture, or choose among several numbers of components, and measure it: all that ``unalike mdm`` tells.

from unalike.analytics.mdm.study import histograms, study
done = study(histograms("mdm:medium-2"), unalike.simulate, components=[1, 2, 3])
print(done.values["log_likelihood"], done.fitted.mixture)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from unalike.analytics.mdm.algorithm import MDM, Choice, Fitted
from unalike.analytics.mdm.counts import (
    check_most,
    feature_histograms,
    histogram_clients,
    population_histograms,
    read_counts,
    true_mixture,
)
from unalike.analytics.mdm.distance import compare
from unalike.analytics.mdm.privacy import NoisyHistograms, noise_for_budget
from unalike.core.client import Clients
from unalike.core.federation import Federation
from unalike.core.request import Part
from unalike.data import in_pieces, load
from unalike.data.partition.features import Feature, category_names, features_of
from unalike.data.partition.mixture import MDMError, Mixture, relative_error
from unalike.data.population import Population
from unalike.privacy.ledger import Ledger
from unalike.privacy.mechanisms import Gaussian

Federate = Callable[..., Federation]  # where the clients live is the caller's choice: `unalike.simulate`
_PIECE = 1 << 14  # rows that are counted together
_BLOCK_NUMBERS = 1 << 24  # numbers that one block of clients may send


@dataclass(frozen=True)
class Histograms:
    """Clients with their histograms, the mixture that they were drawn from if it is known, and the classes' names."""

    clients: Clients
    truth: Mixture | None = None
    names: list[str] | None = None
    features: tuple[Feature, ...] = ()  # none: the histograms are of labels
    most: int = 0  # samples of the client that has most of them


@dataclass(frozen=True)
class Study:
    """The fitted mixture, what is known about it as plain values, and groups of clients to draw (see ``compare``)."""

    fitted: Fitted
    values: dict[str, Any]
    groups: dict[str, NDArray[Any]]  # empty unless clients were compared


def histograms(
    data: str,
    *,
    feature: Sequence[str] = (),
    bins: Mapping[str, Sequence[float]] = MappingProxyType({}),
    partition: str | None = None,
    clients: int | None = None,
    seed: int = 0,
    pieces: bool = False,
    **options: Any,
) -> Histograms:
    """The clients' histograms in a named source, a file or a folder; ``options`` as in ``unalike.data.load``.

    ``pieces``: with the inputs of some clients in memory at a time, or none if labels are counted; slower.

    They are of the label, or of the table's columns named by ``feature`` ("label" among them), jointly if there are
    several; ``bins`` says where those of a number begin.
    """
    fixed: dict[str, Any] = {"normalize": False, "min_samples": 1, "test": 0.0, "unseen": 0.0}
    fixed |= {"seed": seed, "partition": partition, "clients": clients}
    groups: Iterable[Mapping[Part, Clients]]
    if pieces:
        laid_out = in_pieces(data, **fixed, **options)
        population, groups = laid_out.facts, laid_out.groups(_PIECE)
    else:
        population = load(data, **fixed, **options)
        groups = [population.parts]
    if feature:
        found = features_of(feature, bins, population.columns, _class_names(population))
        return _counted(feature_histograms(population, found, groups), None, category_names(found), found)
    if bins:
        raise MDMError("bins are of features: name them with --feature")
    names = None if population.class_names is None else [str(name) for name in population.class_names]
    return _counted(population_histograms(population), true_mixture(population), names)


def _counted(clients: Clients, *more: Any) -> Histograms:
    return replace(Histograms(clients, *more), most=int(clients.x.sum(1).max()))


def _class_names(population: Population) -> list[str] | None:
    if population.classes is None:
        return None
    return [str(name) for name in population.class_names or range(population.classes)]


def histograms_in(file: str | Path) -> Histograms:
    """Ready histograms from a CSV, NPZ or NPY file."""
    return _counted(histogram_clients(read_counts(file)))


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
    unit: Literal["client", "point"] = "client",
    local: bool = False,
    secure: bool = False,
    clip: float = 20.0,
    largest: int | None = None,
    compared: bool = False,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> Study:
    """Fit by EM; of several ``components`` choose one by clients kept apart (``validation``: a number or share).

    With ``epsilon`` everything together is (ε, δ)-DP for a client; δ is n^-1.1 for n clients unless given, and
    ``largest``, the most samples that a client may have, must be given. ``local``: clients add the noise themselves.
    With ``unit="point"`` one row of a client is protected: clients send noisy histograms once, and all is made of
    those. ``compared``: measure how near simulated clients are to the true ones.
    """
    choosing = len(components) > 1
    private: dict[str, Any] | None = None
    ledger, begin = Ledger(), time.perf_counter()
    true = given
    if unit not in ("client", "point"):
        raise MDMError(f"unit={unit!r}; expected 'client' or 'point', whom the noise protects")
    if (unit == "point" or local) and epsilon is None:
        raise MDMError("unit='point' and local are about privacy: give an ε")
    by_point = unit == "point"
    if by_point:
        assert epsilon is not None
        if local or secure:
            raise MDMError("with unit='point' clients add their noise themselves, once: leave local and secure out")
        asked = federate(given.clients, seed=seed, threads=1, ledger=ledger)
        noisy = NoisyHistograms(epsilon).gather(asked)
        given = replace(given, clients=noisy, truth=None, most=int(noisy.x.sum(1).max()))
        private = {"delta": 0.0, "unit": "point", "local": True}
        largest = None
    fitting, unseen = held_out(given.clients, validation, choosing, seed)
    settings = MDM(
        categories=given.clients.x.shape[1],
        largest=_bound(given, largest, private=epsilon is not None and not by_point),
        components=components[0],
        rounds=rounds,
        cohort=min(cohort, len(fitting)),
        start=start,
        clip=clip,
    )
    check_most(given.most, settings.largest)
    for count in components:
        replace(settings, components=count).check(fitting.roster())
    delta = 0.0 if by_point else len(fitting) ** -1.1 if delta is None else delta
    settings = replace(settings, secure=secure)
    if epsilon is not None and not by_point:
        if local:
            settings = replace(settings, noise=Gaussian(1.0), local=True)  # its level comes next
        noise = noise_for_budget(settings, len(fitting), components, epsilon, delta, validated=choosing)
        settings = replace(settings, noise=noise)
        level = noise.noise_multiplier
        private = {"delta": delta, "unit": "client", "noise_multiplier": level, "clip": clip, "local": local}
    shown = None if by_point else ledger  # what is made of noisy histograms costs nothing more
    block = _block(settings, sum(components))
    federation = others = federate(fitting, seed=seed, block=block, threads=1, ledger=shown or Ledger())
    if unseen is not None:
        others = federate(unseen, seed=seed + 1, block=block, threads=1, ledger=shown or Ledger())
    choice: Choice | None = None
    if unseen is not None and choosing:
        choice = settings.choose(federation, others, components, progress)
        fitted = choice.fitted
    else:
        fitted = settings.fit(federation, progress)
    seconds = time.perf_counter() - begin
    fitted = replace(fitted, mixture=replace(fitted.mixture, features=given.features))
    mixture, truth = fitted.mixture, true.truth
    if truth is not None and truth.alpha.shape != mixture.alpha.shape:
        truth = None  # errors are of equally many components
    with others.aside() as aside:  # a simulation's measurement, charged to nobody
        measured = replace(settings, noise=None, local=False, secure=False).score(aside, [mixture]).log_likelihood
    values: dict[str, Any] = {
        "clients": len(fitting),
        "validation_clients": 0 if unseen is None else len(unseen),
        "features": [one.name for one in given.features] or None,
        "categories": settings.categories,
        "components": mixture.components,
        "rounds": rounds,
        "cohort": settings.cohort,
        "seed": seed,
        "relative_error": None if truth is None else relative_error(mixture, truth),
        "log_likelihood": None if measured is None else measured[0],
        "seconds": round(seconds, 3),
        "tau": mixture.tau.tolist(),
        "alpha": mixture.alpha.tolist(),
        "selection": choice and choice.rows(),
        "secure": secure,
        "privacy": private and {**private, "epsilon": epsilon if by_point else ledger.epsilon(delta)},
        "bytes": {"up": federation.traffic.total_up, "down": federation.traffic.total_down},
        "notes": fitted.notes,
    }
    groups: dict[str, NDArray[Any]] = {}
    if compared:
        values["distance"], groups = compare(true.clients.x.numpy(), mixture, seed)
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
    return given.most


def _block(settings: MDM, components: int) -> int:
    """A block of all clients where memory allows: nothing is padded, and the tables are made once for a block."""
    numbers = components * (len(settings.edges) + settings.categories + 1)
    return max(64, min(8192, _BLOCK_NUMBERS // numbers))
