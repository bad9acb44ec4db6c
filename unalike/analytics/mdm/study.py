"""Read histograms, fit a mixture or choose among several numbers of components, and measure it.

from unalike.analytics.mdm.study import fit_mixture, read_histograms
found = fit_mixture(read_histograms("mdm:medium-2"), unalike.simulate, components=[1, 2, 3])
print(found.mixture, found.log_likelihood)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from unalike.analytics.mdm.algorithm import MDM, Choice, MixtureFit
from unalike.analytics.mdm.counts import (
    check_most,
    feature_histograms,
    histogram_clients,
    population_histograms,
    true_mixture,
)
from unalike.analytics.mdm.privacy import NoisyHistograms, noise_for_budget
from unalike.analytics.reading import FILLED, read_population
from unalike.core.client import Clients
from unalike.core.federation import Federation, QuorumError
from unalike.data.partition.features import Feature, category_names, features_of
from unalike.data.partition.histograms import read_counts
from unalike.data.partition.mixture import MDMError, Mixture, relative_error
from unalike.data.source import Fill
from unalike.privacy.ledger import Ledger
from unalike.privacy.mechanisms import Gaussian

Federate = Callable[..., Federation]  # where the clients live is the caller's choice: `unalike.simulate`
_BLOCK_NUMBERS = 1 << 24  # numbers that one block of clients may send


@dataclass(frozen=True)
class Histograms:
    """Clients with their histograms, the mixture that they were drawn from if it is known, and the classes' names."""

    clients: Clients
    truth: Mixture | None = None
    names: list[str] | None = None
    features: tuple[Feature, ...] = ()  # none: the histograms are of labels
    most: int = 0  # samples of the client that has most of them
    fill: Fill | None = None  # what a missing number of a feature became


def read_histograms(
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
    how = {"min_samples": 1, "seed": seed, "partition": partition, "clients": clients, **options}
    population, groups, _ = read_population(data, pieces, **how)
    if feature:
        classes = [str(name) for name in population.class_names or range(population.classes or 0)] or None
        found = features_of(feature, bins, population.columns, classes)
        made = _with_most(feature_histograms(population, found, groups), None, category_names(found), found)
        return replace(made, fill=population.fill)
    if bins:
        raise MDMError("bins are of features: name them, feature=...")
    names = None if population.class_names is None else [str(name) for name in population.class_names]
    return _with_most(population_histograms(population), true_mixture(population), names)


def _with_most(clients: Clients, *more: Any) -> Histograms:
    return replace(Histograms(clients, *more), most=int(clients.x.sum(1).max()))


def read_counts_file(file: str | Path) -> Histograms:
    """Ready histograms from a CSV, NPZ or NPY file."""
    return _with_most(histogram_clients(read_counts(file)))


@dataclass(frozen=True)
class MixturePrivacy:
    """What a fit may cost in all: ε, and δ (n^-1.1 for n clients unless given).

    ``unit="client"`` protects a client by noise on sums, or (``local``) on its own share of them. ``unit="point"``
    protects one row of a client: clients send noisy histograms once, and all is made of those.
    """

    epsilon: float
    delta: float | None = None
    unit: Literal["client", "point"] = "client"
    local: bool = False

    def __post_init__(self) -> None:
        if self.unit not in ("client", "point"):
            raise MDMError(f"unit={self.unit!r}; expected 'client' or 'point', whom the noise protects")
        if self.unit == "point" and self.local:
            raise MDMError("with unit='point' clients add their noise themselves, once: leave local out")


@dataclass(frozen=True)
class MixtureResult:
    """The fitted mixture, what it cost and how good it is."""

    histograms: Histograms
    settings: MDM
    fit: MixtureFit
    choice: Choice | None  # None: only one number of components was fitted
    clients: int
    validation_clients: int
    seed: int
    privacy: MixturePrivacy | None  # with δ
    epsilon: float  # by the ledger; infinite: not private
    bytes_up: int
    bytes_down: int
    seconds: float
    log_likelihood: float | None  # per client, measured in simulation
    distance: dict[str, float] | None = None  # of simulated clients from the true ones, if they were compared
    groups: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # the clients that were compared, to draw

    @property
    def mixture(self) -> Mixture:
        return self.fit.mixture

    @property
    def relative_error(self) -> dict[str, float] | None:
        """Where the true mixture is known and has as many components."""
        truth = self.histograms.truth
        comparable = truth is not None and truth.alpha.shape == self.mixture.alpha.shape
        return relative_error(self.mixture, truth) if truth is not None and comparable else None

    def values(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        values: dict[str, Any] = {
            "clients": self.clients,
            "validation_clients": self.validation_clients,
            "features": [one.name for one in self.histograms.features] or None,
            "categories": self.settings.categories,
            "components": self.mixture.components,
            "rounds": self.settings.rounds,
            "cohort": self.settings.cohort,
            "seed": self.seed,
            "relative_error": self.relative_error,
            "log_likelihood": self.log_likelihood,
            "seconds": round(self.seconds, 3),
            "tau": self.mixture.tau.tolist(),
            "alpha": self.mixture.alpha.tolist(),
            "selection": self.choice and self.choice.rows(),
            "secure": self.settings.secure,
            "privacy": None,
            "bytes": {"up": self.bytes_up, "down": self.bytes_down},
            "notes": self.fit.notes,
        }
        if self.privacy is not None:
            values["privacy"] = {**asdict(self.privacy), "epsilon": self.epsilon}
            if isinstance(self.settings.noise, Gaussian):
                noise = {"noise_multiplier": self.settings.noise.noise_multiplier, "clip": self.settings.clip}
                values["privacy"] |= noise
            else:
                values["privacy"]["local"] = True
        return values if self.distance is None else {**values, "distance": self.distance}


def fit_mixture(
    histograms: Histograms,
    federate: Federate,
    *,
    components: Sequence[int] = (2,),
    validation: float | None = None,
    privacy: MixturePrivacy | None = None,
    largest: int | None = None,
    compare: bool = False,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
    **how: Any,
) -> MixtureResult:
    """Fit by EM; of several ``components`` choose one by clients kept apart (``validation``: a number or share).

    ``how``: rounds, cohort, start, clip and secure, as of ``MDM``. ``largest`` is the most samples that a client may
    have; it must be given if clients are protected. ``compare``: measure how near simulated clients are to the true
    ones.
    """
    ledger, begin, used = Ledger(), time.perf_counter(), histograms
    of_points, of_clients = (privacy if privacy and privacy.unit == unit else None for unit in ("point", "client"))
    if of_points is not None:
        if used.fill == "client":
            raise MDMError(FILLED)
        if how.get("secure"):
            raise MDMError("with unit='point' there are no sums to mask, only noisy histograms: leave secure out")
        asked = federate(used.clients, seed=seed, threads=1, ledger=ledger)
        used = _with_most(NoisyHistograms(of_points.epsilon).gather(asked))
        privacy = replace(of_points, delta=0.0)
    choosing = len(components) > 1
    fitting, others = split_clients(used.clients, validation, choosing, seed)
    if of_clients is not None and of_clients.delta is None:
        privacy = of_clients = replace(of_clients, delta=len(fitting) ** -1.1)
    settings = _settings(used, fitting, components, of_clients, largest, how)
    block = _block_of(settings, components)
    charged = ledger if of_points is None else Ledger()  # what is made of noisy histograms costs nothing more
    federation = scoring = federate(fitting, seed=seed, block=block, threads=1, ledger=charged)
    if others is not None:
        scoring = federate(others, seed=seed + 1, block=block, threads=1, ledger=charged)
    choice = settings.choose(federation, scoring, components, progress) if choosing else None
    found = settings.fit(federation, progress) if choice is None else choice.fitted
    seconds = time.perf_counter() - begin
    found = replace(found, mixture=replace(found.mixture, features=histograms.features))
    delta = 0.5 if of_clients is None or of_clients.delta is None else of_clients.delta
    result = MixtureResult(
        histograms=histograms,
        settings=settings,
        fit=found,
        choice=choice,
        clients=len(fitting),
        validation_clients=0 if others is None else len(others),
        seed=seed,
        privacy=privacy,
        epsilon=ledger.epsilon(delta) if of_points is None else of_points.epsilon,
        bytes_up=federation.traffic.total_up,
        bytes_down=federation.traffic.total_down,
        seconds=seconds,
        log_likelihood=_measure_likelihood(settings, scoring, found.mixture),
    )
    if not compare:
        return result
    distance, groups = compare_clients(histograms.clients.x.numpy(), found.mixture, seed)
    return replace(result, distance=distance, groups=groups)


def _block_of(settings: MDM, components: Sequence[int]) -> int:
    """How many clients to simulate at once: all where memory allows, as nothing is padded."""
    numbers = sum(components) * (len(settings.edges) + settings.categories + 1)
    return max(64, min(8192, _BLOCK_NUMBERS // numbers))


def _measure_likelihood(settings: MDM, federation: Federation, mixture: Mixture) -> float | None:
    """Per client, as only a simulation can measure it; charged to nobody. None where sites do not consent."""
    try:
        with federation.aside() as aside:
            measured = replace(settings, noise=None, local=False, secure=False).score(aside, [mixture])
    except QuorumError as error:
        if not error.refused:
            raise
        return None
    return None if measured.log_likelihood is None else measured.log_likelihood[0]


def _settings(
    given: Histograms,
    fitting: Clients,
    components: Sequence[int],
    privacy: MixturePrivacy | None,
    largest: int | None,
    how: Mapping[str, Any],
) -> MDM:
    """The algorithm's settings for these clients, with the least noise for the budget."""
    if largest is None and given.truth is None and privacy is not None:
        raise MDMError(
            "with an ε, the most samples that a client may have must not be read from the data: give largest=..."
        )
    bound = largest or (given.most if given.truth is None else given.truth.largest)
    settings = MDM(given.clients.x.shape[1], bound, components[0], **how)
    settings = replace(settings, cohort=min(settings.cohort, len(fitting)))
    check_most(given.most, settings.largest)
    for count in components:
        settings.check(fitting.roster(), count)
    if privacy is None:
        return settings
    assert privacy.delta is not None
    if privacy.local:
        settings = replace(settings, noise=Gaussian(1.0), local=True)  # its level comes next
    validated, budget = len(components) > 1, (privacy.epsilon, privacy.delta)
    return replace(settings, noise=noise_for_budget(settings, len(fitting), components, *budget, validated=validated))


def split_clients(
    clients: Clients, validation: float | None, choosing: bool, seed: int
) -> tuple[Clients, Clients | None]:
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


def client_distance(first: NDArray[Any], second: NDArray[Any]) -> float:
    """How unlike two groups of clients are: the mean total variation between a client of one group and its partner in
    the other, where partners are chosen to make it least (the Wasserstein distance between the two groups of shares).

    Histograms [n, C]; equally many in both groups. 0: the same clients; 1: no category in common.
    """
    if first.shape != second.shape:
        raise MDMError(f"expected two equally large groups of histograms, got {first.shape} and {second.shape}")
    p, q = (group / group.sum(1, keepdims=True) for group in (first, second))
    cost = cdist(p, q, "cityblock") / 2
    rows, columns = linear_sum_assignment(cost)
    return float(cost[rows, columns].mean())


def compare_clients(
    true: NDArray[Any], mixture: Mixture, seed: int, most: int = 1000
) -> tuple[dict[str, float], dict[str, NDArray[Any]]]:
    """Distances of MDM and fully IID clients from the true ones, and of the true ones' two halves from each other.

    A simulation's own view: it needs every true histogram. Groups are of one size, at most ``most``; the halves say
    what distance mere chance makes (rather more than at the full size, as they are smaller). Also gives the groups.
    """
    rng = np.random.default_rng([seed, 3])
    shuffled = true[rng.permutation(len(true))]
    if len(shuffled) < 4:
        raise MDMError(f"a comparison needs at least 4 clients, there are {len(shuffled)}")
    group = shuffled[:most]
    sizes = group.sum(1)
    pooled = true.sum(0) / true.sum()
    groups: dict[str, NDArray[Any]] = {
        "true": group,
        "mdm": mixture.sample(len(group), rng),
        "iid": rng.multinomial(sizes, np.broadcast_to(pooled, (len(group), len(pooled)))),
    }
    half = len(group) // 2
    distances = {name: client_distance(group, groups[name]) for name in ("mdm", "iid")}
    distances["halves_of_true"] = client_distance(group[:half], group[half : 2 * half])
    return distances, groups
