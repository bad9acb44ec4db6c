"""Runs every analysis from the papers on a finished run; for those that do not apply, it notes the reason.

Everything is measured on the run's unseen clients, who arrive after training. It is simulation only, as in
``unalike.report.analyses.measures``: nothing is charged to a ledger and nothing of the run changes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unalike.core.federation import Federation
from unalike.core.method import Describes, DescribesData, MasksClasses, Method, ProtectsNewcomers, State
from unalike.data.population import Population
from unalike.report.analyses import file, measures
from unalike.report.analyses.file import (
    ANALYSES,
    Analyses,
    AtBytes,
    AtEpsilon,
    Correlation,
    CurvePoint,
    Key,
    LabelMask,
    Place,
    SameClasses,
)
from unalike.report.analyses.measures import DoesNotApply, Newcomers
from unalike.report.figures.parts import sample_evenly
from unalike.runs import folder
from unalike.runs.errors import FLAG, UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.measure import serves_unlabeled


@dataclass(frozen=True)
class Extent:
    """Where the curves are measured, and on how many clients."""

    alphas: Sequence[float] = (0.05, 0.1, 0.3, 1.0, 3.0, 10.0)
    angles: Sequence[float] = (0, 15, 30, 45, 60, 75, 90)
    sigmas: Sequence[float] = (0, 0.5, 1.0, 1.5, 2.0)
    sizes: Sequence[int] = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 3000)
    epsilons: Sequence[float] = (0.3, 1.0, 5.0)
    newcomers: int = 200
    mapped: int = file.MOST_CLIENTS


QUICK = Extent((0.1, 1.0, 10.0), (0, 45, 90), (0, 1.0, 2.0), (5, 20, 100), (1.0,), newcomers=50, mapped=200)


def finished_run(path: Path) -> FinishedRun:
    """A run that can be analysed, or an error that says what the folder is instead."""
    if (path / folder.COMPARISON).exists():
        first = folder.compared_runs(path)[0]
        raise UserError(f"{path} holds a comparison; analyse its runs one by one, for example: {first}")
    folder.check_run(path)
    if not (path / folder.RESULT).is_file():
        raise UserError(f"{path} has not ended: it has no {folder.RESULT}; finish it with: unalike resume {path}")
    return FinishedRun.open(path)


def analyse(
    run: FinishedRun,
    *,
    quick: bool = False,
    delta: float | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Analyses:
    """Every analysis that applies to the run; ``tell`` gets a line when one begins or is left out.

    ``delta``: of private newcomers with any number of rows, also where it protects nobody, as P2's 0.01 from 100 rows
    on; None: as ``unalike personalize`` takes it.
    Each gives plain values; ``Analyses`` checks them as it checks a file that is read.
    """
    if delta is not None and not 0 < delta < 1:
        raise UserError(f"delta = {delta:g}{FLAG}: expected a number above 0 and below 1", "privacy.delta")
    bench = Bench(run, QUICK if quick else Extent(), delta)
    found: dict[str, Any] = {}
    left_out: dict[Key, str] = {}
    for number, (name, step) in enumerate(_STEPS.items(), start=1):
        tell(f"{number}/{len(_STEPS)} {ANALYSES[name].name}")
        try:
            found[name] = step(bench)
        except DoesNotApply as error:
            left_out[name] = str(error)[: file.MOST_LETTERS]
            tell(f"    does not apply: {error}")
    return Analyses.model_validate({"round": run.round, "quick": quick, "left_out": left_out, **found})


@dataclass(frozen=True)
class Bench:
    """A finished run, set up to be measured."""

    run: FinishedRun
    extent: Extent
    delta: float | None = None  # of private newcomers; None: by their number of rows

    def delta_of(self, samples: int) -> float:
        return self.run.newcomer_delta(samples) if self.delta is None else self.delta

    @cached_property
    def asked(self) -> tuple[Method, State, Federation]:
        """What newcomers are scored with: as after the last round, so unchanged ones score what the run measured."""
        return self.run.method, self.run.state, self.run.prepared.federation(round=self.run.round)

    @property
    def method_name(self) -> str:
        """``some/file.py:MyMethod`` is called MyMethod."""
        return self.run.recipe.method.rpartition(":")[2]

    @cached_property
    def population(self) -> Population:
        """The run's; its unseen clients are those that can be served and tested, at most ``extent.newcomers``."""
        whole = self.run.prepared.population
        able = self._served[whole.unseen] & whole.test.labeled[whole.unseen] & (whole.test.size[whole.unseen] > 0)
        return replace(whole, unseen=_sample_evenly(whole.unseen[able], self.extent.newcomers))

    @cached_property
    def _served(self) -> Tensor:
        """[C] who has the rows, and if need be the labels, that the method makes a personal model of."""
        train = self.run.prepared.population.train
        return (train.size > 0) & (train.labeled | serves_unlabeled(self.run.method))

    def need(self, *, classes: bool) -> None:
        """Newcomers, and for some analyses classes."""
        if classes and (self.population.classes is None or not self.population.has_labels):
            raise DoesNotApply(f"{self.population.name} has no classes")
        if len(self.run.prepared.population.unseen) == 0:
            raise DoesNotApply("the run has no unseen clients; train with data.unseen above 0")
        if len(self.population.unseen) == 0:
            raise DoesNotApply(f"{self.method_name} can serve and test none of the unseen clients")

    @cached_property
    def everybody(self) -> tuple[Tensor, Tensor]:
        """Positions [C] of training clients, evenly, and of all newcomers; and which of them are newcomers."""
        seen, unseen = self.population.seen, self.population.unseen
        which = torch.cat([_sample_evenly(seen[self._served[seen]], self.extent.mapped - len(unseen)), unseen])
        return which, torch.isin(which, unseen)

    def scores_of(self, method: Method) -> Tensor:
        """The score [C] of everybody; NaN for a client that has none."""
        which, _ = self.everybody
        clients = Newcomers(self.population.train.select(which), self.population.test.select(which))
        return clients.score(method, *self.asked[1:]).score

    def descriptors(self, state: State) -> Tensor:
        """[C, l] of everybody."""
        method, _, federation = self.asked
        if not isinstance(method, Describes):
            raise DoesNotApply(f"{self.method_name} has no descriptors of clients; pefll, odpfl, flowdup, pfedhn have")
        which, _ = self.everybody
        if len(which) < 4:
            raise DoesNotApply(f"{len(which)} clients can be described; a map needs 4 or more")
        vectors = measures.descriptors_of(method, state, federation, self.population.train.select(which)).detach()
        if len(vectors) < len(which) or not bool(vectors.isfinite().all()):
            raise DoesNotApply("some clients failed to describe their data")
        if float((vectors - vectors[0]).abs().max()) == 0:
            raise DoesNotApply("all clients have the same descriptor")
        return vectors


def _sample_evenly(which: Tensor, most: int) -> Tensor:
    """At most so many of them, evenly, the first and the last among them."""
    return which[sample_evenly(range(len(which)), most)]


def _curve(bench: Bench, at: Sequence[float], changed: Callable[[Population, float], Newcomers]) -> list[CurvePoint]:
    """The scores of newcomers who are changed more and more."""
    bench.need(classes=False)
    return measures.curve(at, lambda i: changed(bench.population, at[i]).score(*bench.asked).score)


def _map(bench: Bench) -> list[Place]:
    """P2 Fig. 7; for FLowDUP r(X), T1 Fig. 5.1."""
    vectors = bench.descriptors(bench.run.state)
    population, (which, unseen) = bench.population, bench.everybody
    mostly: list[str | None] = [None] * len(which)
    if population.classes is not None and population.has_labels:
        counts = population.histogram(population.train)[which]
        names = population.class_names or range(population.classes)
        tops = zip(counts.argmax(1).tolist(), counts.sum(1).tolist(), strict=True)
        mostly = [str(names[top])[: file.MOST_LETTERS] if total else None for top, total in tops]
    turned = population.per_client.get("rotation")
    pca, t_sne = measures.descriptor_map(vectors).tolist(), measures.descriptor_map(vectors, "t-sne").tolist()
    return [
        Place(
            name=population.train.name(client)[: file.MOST_LETTERS],
            group="unseen" if unseen[i] else "seen",
            main_class=mostly[i],
            rotation=None if turned is None else float(turned[client]),
            pca=pca[i],
            t_sne=t_sne[i],
        )
        for i, client in enumerate(which.tolist())
    ]


def _correlation(bench: Bench) -> Correlation:
    """T1 Fig. 4.1, and beside it that of untrained networks: random ones keep some of the order, too."""
    bench.need(classes=True)
    (which, unseen), method = bench.everybody, bench.run.method
    vectors = bench.descriptors(bench.run.state)
    counts = bench.population.histogram(bench.population.train)[which].to(torch.float64)
    known = counts.sum(1) > 0
    shares, of = counts[known] / counts[known].sum(1, keepdim=True), unseen[known].nonzero().flatten()
    found = measures.rank_correlation(vectors[known], shares, of)
    found = found[~found.isnan()]
    if len(found) == 0:
        raise DoesNotApply("all clients have the same class shares")
    untrained = None
    if isinstance(method, DescribesData):  # others learn descriptors without a network
        with contextlib.suppress(DoesNotApply):
            before = bench.descriptors(method.start(bench.run.recipe.seed))
            mean = float(measures.rank_correlation(before[known], shares, of).nanmean())
            untrained = None if math.isnan(mean) else mean
    mean, low, high = (float(one) for one in (found.mean(), found.min(), found.max()))
    return Correlation(mean=mean, low=low, high=high, clients=len(found), untrained=untrained)


def _same_classes(bench: Bench) -> SameClasses:
    """The gap of T1 Table 4.1 between unseen and seen clients, without the luck of the classes that they drew."""
    bench.need(classes=True)
    population, (which, unseen) = bench.population, bench.everybody
    counts = population.histogram(population.train)[which]
    if float((counts > 0).sum(1).median()) > counts.shape[1] / 2:
        raise DoesNotApply("most clients have most of the classes, so those that one lacks are chance")
    scores = bench.scores_of(bench.run.method)
    found = measures.same_classes(scores, counts, unseen.nonzero().flatten())
    return found.model_copy(update=_twins(bench, which[~unseen], scores[~unseen]))


def _twins(bench: Bench, seen: Tensor, scores: Tensor) -> dict[str, float]:
    """Scores of training clients' twins, beside their own; nothing where unseen clients have no rows for any."""
    some = _sample_evenly(torch.arange(len(seen)), bench.extent.newcomers)
    try:
        twins, having = measures.twins(bench.population, seen[some])
    except DoesNotApply:
        return {}
    both = torch.stack([twins.score(*bench.asked).score, scores[some[having]]])
    both = both[:, ~both.isnan().any(0)]
    if both.shape[1] == 0:
        return {}
    return {"twins": float(both[0].mean()), "twins_of": float(both[1].mean()), "pairs": both.shape[1]}


def _shift(bench: Bench) -> list[CurvePoint]:
    """P2 Fig. 3: unseen clients by how far their classes are from those of the nearest training client."""
    bench.need(classes=True)
    population, (which, unseen) = bench.population, bench.everybody
    seen = population.seen[population.train.labeled[population.seen]]
    if len(seen) == 0:
        raise DoesNotApply("no training client has labels")
    counts = population.histogram(population.train)
    divergence = measures.divergence_from_nearest(counts[which[unseen]], counts[seen])
    return measures.over_divergence(bench.scores_of(bench.run.method)[unseen], divergence)


def _label_mask(bench: Bench) -> LabelMask:
    """T1 Table B.4: what it brings that a client never predicts a class that it does not have."""
    bench.need(classes=True)
    method = bench.run.method
    if not isinstance(method, MasksClasses):
        raise DoesNotApply("only PeFLL can keep a client from predicting classes that it does not have")
    which, unseen = bench.everybody
    if not bool(bench.population.train.labeled[which].all()):
        raise DoesNotApply("clients without labels do not know their classes")
    try:
        plain, masked = (bench.scores_of(method.with_masking(on)) for on in (False, True))
    except ValueError as error:  # a model that does not end in a bias for each class
        raise DoesNotApply(str(error)) from error
    return LabelMask(
        seen=float(plain[~unseen].nanmean()),
        unseen=float(plain[unseen].nanmean()),
        seen_masked=float(masked[~unseen].nanmean()),
        unseen_masked=float(masked[unseen].nanmean()),
    )


def _size(bench: Bench) -> list[AtEpsilon]:
    """P2 Fig. 5; without ε for methods that send nothing of known sensitivity.

    δ is what ``unalike personalize`` takes for so many samples, unless one is given, such as P2's 0.01 for any number.
    Where clients are small, newcomers with more rows than any of them are made of unseen clients' rows.
    """
    bench.need(classes=False)
    method, state, federation = bench.asked
    newcomers = Newcomers.unseen(bench.population)
    largest = int(newcomers.train.size.max())
    sizes = [*(size for size in bench.extent.sizes if 1.25 * size < largest), largest]
    if not isinstance(method, ProtectsNewcomers) or method.sensitivity(1) is None:
        points = _curve(bench, sizes, lambda _, size: newcomers.only_first(int(size)))
        return [AtEpsilon(epsilon=None, points=points)]
    larger = [size for size in bench.extent.sizes if size > 1.25 * largest]
    if larger and (enlarged := measures.enlarge(bench.population, max(larger))) is not None:
        # noise falls with the rows: the papers' newcomers have up to 3,000
        newcomers, most = enlarged, int(enlarged.train.size.max())
        sizes += [size for size in larger if size <= most]
    own = method.newcomer_epsilon
    epsilons = [None, *sorted({*bench.extent.epsilons, *(() if own is None else (own,))})]
    curves = measures.accuracy_by_size_and_epsilon(
        method, state, federation, newcomers, sizes, epsilons, bench.delta_of
    )
    return [AtEpsilon(epsilon=epsilon, points=points) for epsilon, points in curves.items()]


def _bytes(bench: Bench) -> list[AtBytes]:
    """T1 Fig. B.5."""
    rows = measures.accuracy_per_byte(bench.run.path)
    if rows[-1].gigabytes == 0:
        raise DoesNotApply(f"{bench.method_name} sends nothing in training")
    return sample_evenly(rows, file.MOST_POINTS)


_STEPS: dict[Key, Callable[[Bench], Any]] = {
    "map": _map,
    "correlation": _correlation,
    "same_classes": _same_classes,
    "label_mask": _label_mask,
    "alpha": lambda bench: _curve(bench, bench.extent.alphas, measures.redraw_classes),
    "rotation": lambda bench: _curve(bench, bench.extent.angles, measures.rotate_images),
    "blur": lambda bench: _curve(bench, bench.extent.sigmas, measures.blur_images),
    "shift": _shift,
    "size": _size,
    "bytes": _bytes,
}
