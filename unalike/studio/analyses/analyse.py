"""All analyses of the papers that apply to a finished run, one after the other, each with a reason where it does not.

Everything is measured on the run's unseen clients, who arrive after training. It is simulation only, as in
``unalike.studio.analyses.figures``: nothing is charged to a ledger and nothing of the run changes.
"""

from __future__ import annotations

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
from unalike.studio.analyses import figures, file
from unalike.studio.analyses.figures import Newcomers
from unalike.studio.analyses.file import NAMES, Analyses, CurvePoint, SameClasses
from unalike.studio.errors import UserError
from unalike.studio.runs import folder
from unalike.studio.runs.finished import FinishedRun
from unalike.studio.runs.measure import serves_unlabeled


class DoesNotApply(Exception):
    """An analysis has nothing to say about this run; the message says why."""


@dataclass(frozen=True)
class Extent:
    """Where the curves are measured, and on how many clients."""

    alphas: Sequence[float] = (0.05, 0.1, 0.3, 1.0, 3.0, 10.0)
    angles: Sequence[float] = (0, 15, 30, 45, 60, 75, 90)
    sigmas: Sequence[float] = (0, 0.5, 1.0, 1.5, 2.0)
    sizes: Sequence[int] = (5, 10, 20, 50, 100, 200, 500, 1000, 2000)
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


def analyse(run: FinishedRun, *, quick: bool = False, tell: Callable[[str], None] = lambda _: None) -> Analyses:
    """Every analysis that applies to the run; ``tell`` gets a line when one begins or is left out.

    Each gives plain values; ``Analyses`` checks them as it checks a file that is read.
    """
    bench = Bench.of(run, QUICK if quick else Extent())
    steps = (_map, _correlation, _same_classes, _label_mask, _alpha, _rotation, _blur, _size, _bytes)
    found: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for number, (name, step) in enumerate(zip(NAMES, steps, strict=True), start=1):
        tell(f"{number}/{len(steps)} {NAMES[name]}")
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
    federation: Federation
    population: Population  # its unseen clients are those that can be served and tested, at most ``extent.newcomers``
    extent: Extent

    @classmethod
    def of(cls, run: FinishedRun, extent: Extent) -> Bench:
        whole = run.prepared.population
        served = whole.test.labeled & (whole.train.labeled | serves_unlabeled(run.method))
        able = served & (whole.train.size > 0) & (whole.test.size > 0)
        unseen = _evenly(whole.unseen[able[whole.unseen]], extent.newcomers)
        # of the run's last round, so that an unchanged newcomer gets the score that the run's result has
        federation = run.prepared.federation(round=run.round)
        return cls(run, federation, replace(whole, unseen=unseen), extent)

    @property
    def asked(self) -> tuple[Method, State, Federation]:
        """What newcomers are scored with."""
        return self.run.method, self.run.state, self.federation

    @property
    def method_name(self) -> str:
        """``some/file.py:MyMethod`` is called MyMethod."""
        return self.run.recipe.method.rpartition(":")[2]

    def need_newcomers(self) -> None:
        if len(self.run.prepared.population.unseen) == 0:
            raise DoesNotApply("the run has no unseen clients; train with --unseen above 0")
        if len(self.population.unseen) == 0:
            raise DoesNotApply(f"{self.method_name} can serve and test none of the unseen clients")

    def need_classes(self) -> None:
        if self.population.classes is None or not self.population.has_labels:
            raise DoesNotApply(f"{self.population.name} has no classes")

    @cached_property
    def everybody(self) -> tuple[Tensor, Tensor]:
        """Positions [C] of training clients, evenly, and of the newcomers; and which of them are newcomers."""
        seen = _evenly(self.population.seen, self.extent.mapped)
        which = torch.cat([seen, self.population.unseen])
        return which, torch.arange(len(which)) >= len(seen)

    def scores_of(self, method: Method) -> Tensor:
        """The score [C] of everybody; NaN for a client that has none."""
        which, _ = self.everybody
        clients = Newcomers(self.population.train.select(which), self.population.test.select(which))
        return clients.score(method, self.run.state, self.federation).score

    @cached_property
    def described(self) -> tuple[Tensor, Tensor]:
        """Positions of clients, and their descriptors [C, l]: the newcomers and, evenly, training clients."""
        method, state, federation = self.asked
        if not isinstance(method, Describes):
            raise DoesNotApply(f"{self.method_name} has no descriptors of clients; pefll, odpfl and pfedhn have")
        train = self.population.train
        able = (train.size > 0) & (train.labeled | serves_unlabeled(method))
        seen = self.population.seen[able[self.population.seen]]
        which = torch.cat([_evenly(seen, self.extent.mapped - len(self.population.unseen)), self.population.unseen])
        if len(which) < 4:
            raise DoesNotApply(f"{len(which)} clients can be described; a map needs 4 or more")
        vectors = figures.descriptors_of(method, state, federation, train.select(which)).detach()
        if len(vectors) < len(which) or not bool(vectors.isfinite().all()):
            raise DoesNotApply("some clients failed to describe their data")
        if float((vectors - vectors[0]).abs().max()) == 0:
            raise DoesNotApply("all clients have the same descriptor")
        return which, vectors


def _evenly(which: Tensor, most: int) -> Tensor:
    """At most so many of them, evenly, the first and the last among them."""
    if len(which) <= most:
        return which
    return which[torch.linspace(0, len(which) - 1, most).round().to(torch.int64)]


def _curve(bench: Bench, places: Sequence[float], newcomers: Callable[[float], Newcomers]) -> list[CurvePoint]:
    return _some(figures.curve(places, newcomers, *bench.asked))


def _some(points: list[CurvePoint]) -> list[CurvePoint]:
    if not points:
        raise DoesNotApply("no newcomer could be scored")
    return points


def _map(bench: Bench) -> dict[str, Any]:
    """P2 Fig. 7."""
    which, vectors = bench.described
    population = bench.population
    unseen = set(population.unseen.tolist())
    classes: list[str | None] = [None] * len(which)
    if population.classes is not None and population.has_labels:
        counts = population.histogram(population.train)[which]
        names = population.class_names or [str(c) for c in range(population.classes)]
        tops = zip(counts.argmax(1).tolist(), counts.sum(1).tolist(), strict=True)
        classes = [str(names[top])[: file.MOST_LETTERS] if total else None for top, total in tops]
    return {
        "names": [population.train.name(i)[: file.MOST_LETTERS] for i in which.tolist()],
        "group": ["unseen" if i in unseen else "seen" for i in which.tolist()],
        "main_class": classes,
        "pca": figures.descriptor_map(vectors, "pca").tolist(),
        "t_sne": figures.descriptor_map(vectors, "t-sne").tolist(),
    }


def _untrained(bench: Bench, which: Tensor) -> Tensor | None:
    """Descriptors by the networks as training began; None for methods that learn descriptors without a network."""
    method, _, federation = bench.asked
    if not isinstance(method, DescribesData):
        return None
    clients = bench.population.train.select(which)
    vectors = figures.descriptors_of(method, method.start(federation.seed), federation, clients).detach()
    return vectors if len(vectors) == len(which) and bool(vectors.isfinite().all()) else None


def _correlation(bench: Bench) -> dict[str, float | None]:
    """T1 Fig. 4.1, and beside it that of untrained networks: random ones keep some of the order, too."""
    bench.need_classes()
    which, vectors = bench.described
    bench.need_newcomers()
    counts = bench.population.histogram(bench.population.train)[which].to(torch.float64)
    known = counts.sum(1) > 0
    shares = counts[known] / counts[known].sum(1, keepdim=True)
    of = torch.isin(which[known], bench.population.unseen).nonzero().flatten()
    found = figures.rank_correlation(vectors[known], shares, of)
    found = found[~found.isnan()]
    if len(found) == 0:
        raise DoesNotApply("all clients have the same class shares")
    before = _untrained(bench, which)
    untrained = math.nan if before is None else float(figures.rank_correlation(before[known], shares, of).nanmean())
    return {
        "mean": float(found.mean()),
        "low": float(found.min()),
        "high": float(found.max()),
        "clients": len(found),
        "untrained": None if math.isnan(untrained) else untrained,
    }


def _same_classes(bench: Bench) -> SameClasses:
    """The gap of T1 Table 4.1 between unseen and seen clients, without the luck of the classes that they drew."""
    bench.need_classes()
    bench.need_newcomers()
    population, (which, unseen) = bench.population, bench.everybody
    counts = population.histogram(population.train)[which]
    if float((counts > 0).sum(1).median()) > counts.shape[1] / 2:
        raise DoesNotApply("most clients have most of the classes, so those that one lacks are chance")
    scores = bench.scores_of(bench.run.method)
    found = figures.same_classes(scores, counts, unseen.nonzero().flatten())
    if found is None:
        raise DoesNotApply("no unseen client has just the classes of a training client")
    return found.model_copy(update=_twins(bench, which[~unseen], scores[~unseen]))


def _twins(bench: Bench, seen: Tensor, scores: Tensor) -> dict[str, float]:
    """Scores of training clients' twins, beside their own; nothing where unseen clients have no rows for any."""
    some = _evenly(torch.arange(len(seen)), bench.extent.newcomers)
    try:
        twins, having = figures.twins(bench.population, seen[some])
    except figures.TooFewRows:
        return {}
    both = torch.stack([twins.score(*bench.asked).score, scores[some[having]]])
    both = both[:, ~both.isnan().any(0)]
    if both.shape[1] == 0:
        return {}
    return {"twins": float(both[0].mean()), "twins_of": float(both[1].mean()), "pairs": both.shape[1]}


def _label_mask(bench: Bench) -> dict[str, float]:
    """T1 Table B.4: what it brings that a client never predicts a class that it does not have."""
    bench.need_classes()
    bench.need_newcomers()
    method = bench.run.method
    if not isinstance(method, MasksClasses):
        raise DoesNotApply("only PeFLL can keep a client from predicting classes that it does not have")
    which, unseen = bench.everybody
    if not bool(bench.population.train.labeled[which].all()):
        raise DoesNotApply("clients without labels do not know their classes")
    found = {}
    for name, masked in (("", False), ("_masked", True)):
        try:
            scores = bench.scores_of(method.masking(masked))
        except ValueError as error:  # a model that does not end in a bias for each class
            raise DoesNotApply(str(error)) from error
        found[f"seen{name}"] = float(scores[~unseen].nanmean())
        found[f"unseen{name}"] = float(scores[unseen].nanmean())
    return found


def _alpha(bench: Bench) -> list[CurvePoint]:
    """T1 Fig. B.1."""
    bench.need_classes()
    bench.need_newcomers()
    try:
        return _curve(bench, bench.extent.alphas, lambda alpha: figures.dealt_anew(bench.population, alpha))
    except figures.TooFewRows as error:
        raise DoesNotApply(str(error)) from error


def _images(bench: Bench) -> None:
    if bench.population.kind != "image":
        raise DoesNotApply(f"{bench.population.name} holds {bench.population.kind}, no images")
    bench.need_newcomers()


def _rotation(bench: Bench) -> list[CurvePoint]:
    """P2 Fig. 4."""
    _images(bench)
    return _curve(bench, bench.extent.angles, lambda angle: figures.rotated(bench.population, angle))


def _blur(bench: Bench) -> list[CurvePoint]:
    """P2 Fig. 4."""
    _images(bench)
    return _curve(bench, bench.extent.sigmas, lambda sigma: figures.blurred(bench.population, sigma))


def _size(bench: Bench) -> list[dict[str, Any]]:
    """P2 Fig. 5; without ε for methods that send nothing of known sensitivity.

    δ is what ``unalike personalize`` takes for so many samples, not P2's 0.01 for any number.
    """
    bench.need_newcomers()
    method, state, federation = bench.asked
    newcomers = Newcomers.unseen(bench.population)
    largest = int(newcomers.train.size.max())
    sizes = [*(size for size in bench.extent.sizes if 1.25 * size < largest), largest]
    if not isinstance(method, ProtectsNewcomers) or method.sensitivity(1) is None:
        return [{"epsilon": None, "points": _curve(bench, sizes, lambda size: newcomers.only_first(int(size)))}]
    own = method.newcomer_epsilon
    epsilons = sorted({*bench.extent.epsilons, *(() if own is None else (own,))})
    curves = figures.accuracy_by_size_and_epsilon(
        method, state, federation, newcomers, sizes, [None, *epsilons], bench.run.newcomer_delta
    )
    return [{"epsilon": epsilon, "points": _some(points)} for epsilon, points in curves.items()]


def _bytes(bench: Bench) -> list[dict[str, Any]]:
    """T1 Fig. B.5."""
    try:
        rows = figures.accuracy_per_gigabyte(bench.run.path)
    except figures.NoRounds as error:
        raise DoesNotApply(str(error)) from error
    if rows[-1][0] == 0:
        raise DoesNotApply(f"{bench.method_name} sends nothing in training")
    shown = _evenly(torch.arange(len(rows)), file.MOST_POINTS).tolist()
    return [dict(zip(("gigabytes", "seen", "unseen"), rows[i], strict=True)) for i in shown]
