"""The report's section of analyses: the papers' figures, for the runs that ``unalike analyse`` was called for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unalike.studio.analyses.file import FIGURES, NAMES, PAPERS, Analyses, AtEpsilon, CurvePoint, DescriptorMap
from unalike.studio.figures.clients import client_map
from unalike.studio.figures.training import BYTES, Axis, Line, lines, span
from unalike.studio.report.charts import Panel, mapped, marker, panel, score_span
from unalike.studio.report.read import Run
from unalike.studio.report.words import Scale
from unalike.studio.words import counted, listed, size

ABOUT = (
    "What the papers look at beside accuracy, measured after training on clients that arrived late. "
    "It is simulation only: no server would see it. A band is one standard error over clients."
)
_MOST_CLASSES = 20  # whose names are written on a map

# One line for each analysed run: its number, its label, and what was found
_Known = Sequence[tuple[int, str, Analyses]]


@dataclass(frozen=True)
class Table:
    """One line for each run that has it: the run's number, and a cell under each of the heads."""

    name: str
    about: str
    heads: Sequence[str]
    rows: Mapping[int, tuple[str, ...]]


@dataclass(frozen=True)
class Section:
    """Tables, maps side by side, curves of all analysed runs in one chart each, and what does not apply in words."""

    tables: list[Table]
    maps: list[Panel]
    map_about: str
    curves: list[Panel]
    notes: list[str]


@dataclass(frozen=True)
class _Curves:
    """A chart before the scale that all of them share is known."""

    name: str
    about: str
    lines: list[Line]
    x: Axis
    run: int | None = None  # None: of all runs


def section(runs: Sequence[Run], scale: Scale) -> Section:
    known = [(i, run.label, run.analyses) for i, run in enumerate(runs) if run.analyses is not None]
    tables = [_correlations(known), _same_classes(known, scale), _label_mask(known, scale)]
    about = f"a class is written where clients are that have most of it ({FIGURES['map']})"
    tables = [table for table in tables if table.rows]
    return Section(tables, _maps(runs, scale), about, _curves(known, scale, len(runs)), _notes(runs))


def heading(name: str) -> str:
    return NAMES[name].capitalize()


def _curves(known: _Known, scale: Scale, runs: int) -> list[Panel]:
    plain = [(i, label, curve) for i, label, found in known for curve in found.size if curve.epsilon is None]
    if len(known) == 1 and len(known[0][2].size) > 1:
        plain = []  # the chart with ε has this line as well
    samples = "samples, at most"
    sizes = [_line(i, label, curve.points, scale, samples) for i, label, curve in plain]
    charts = [_at_places("size", "of a newcomer", sizes, samples, log=True)]
    for name, across, unit in (
        ("alpha", "Dirichlet α (small: few classes each)", ""),
        ("rotation", "turned by", "°"),
        ("blur", "σ in pixels", ""),
    ):
        found = [_line(i, label, getattr(one, name), scale, across, unit) for i, label, one in known]
        charts.insert(-1, _at_places(name, "of newcomers", found, across, unit, log=name == "alpha"))
    charts += [_by_epsilon(i, "" if runs == 1 else f", {label}", one.size, scale) for i, label, one in known]
    charts += [_per_byte(group, known, scale) for group in ("seen", "unseen")]
    charts = [chart for chart in charts if any(line.points for line in chart.lines)]
    if not charts:
        return []
    ends = [end for chart in charts for line in chart.lines for end in _ends(line, scale)]
    y = Axis(format=scale.format, domain=span(ends))
    panels = []
    for chart in charts:
        drawn = lines([line for line in chart.lines if line.points], chart.x, y, legend=chart.run is not None)
        title = f"{scale.metric}: {NAMES[chart.name]} {chart.about}"
        panels.append(panel(heading(chart.name), f"{chart.about} ({FIGURES[chart.name]})", title, drawn, chart.run))
    return panels


def _ends(line: Line, scale: Scale) -> list[float]:
    """From where to where each point's band goes; no accuracy is outside of 0 and 1."""
    errors = line.errors or [0.0] * len(line.points)
    ends = [y + way * error for (_, y), error in zip(line.points, errors, strict=True) for way in (-1, 1)]
    return [min(max(end, 0.0), 1.0) for end in ends] if scale.percent else ends


def _line(
    run: int,
    label: str,
    points: Sequence[CurvePoint],
    scale: Scale,
    across: str,
    unit: str = "",
    mark: int | None = None,
) -> Line:
    tips = []
    for point in points:
        error = "" if point.error is None or mark is not None else f" {scale.spread(point.error)}"
        tips.append(f"{label}\n{across} {point.at:,g}{unit}: {scale(point.mean)}{error}")
    errors = [point.error for point in points if point.error is not None]
    # several lines of one colour have no bands, which would hide each other
    bands = errors if len(errors) == len(points) and mark is None else ()
    return Line(run, label, [(point.at, point.mean) for point in points], tips, bands, mark)


def _at_places(
    name: str, about: str, found: list[Line], across: str, unit: str = "", *, log: bool = False, run: int | None = None
) -> _Curves:
    """A chart whose axis is labelled where something was measured."""
    places = sorted({x for line in found for x, _ in line.points})
    label = f"format(datum.value, ',~g') + '{unit}'"
    return _Curves(name, about, found, Axis(across, label=label, log=log, places=places), run)


def _by_epsilon(run: int, whose: str, curves: Sequence[AtEpsilon], scale: Scale) -> _Curves:
    """The lines of a run whose newcomers can protect their descriptors; none for another run."""
    across = "samples, at most"
    private = curves if len(curves) > 1 else ()
    found = [_line(run, curve.label, curve.points, scale, across, mark=i) for i, curve in enumerate(private)]
    # all curves have the same δ at the same number of samples
    delta = next((f", {curve.delta_label}" for curve in curves if curve.delta_label), "")
    return _at_places("size", f"and privacy{delta}{whose}", found, across, log=True, run=run)


def _per_byte(group: str, known: _Known, scale: Scale) -> _Curves:
    found = []
    for i, label, one in known:
        pairs = [(1e9 * row.gigabytes, getattr(row, group)) for row in one.bytes]
        points = [(x, y) for x, y in pairs if y is not None and x > 0]
        found.append(Line(i, label, points, [f"{label}\n{size(x)} sent: {scale(y)}" for x, y in points]))
    return _Curves("bytes", f"and {group} clients", found, Axis("sent, both ways", label=BYTES, log=True))


def _correlations(known: _Known) -> Table:
    """T1 Fig. 4.1 is one number for each method."""
    rows = {
        i: (
            f"{one.mean:.2f}",
            f"{one.low:.2f} to {one.high:.2f}",
            f"{one.clients:,}",
            "not measured" if one.untrained is None else f"{one.untrained:.2f}",
        )
        for i, _, found in known
        if (one := found.correlation) is not None
    }
    about = f"of distances between descriptors and between class shares; 1: the same order ({FIGURES['correlation']})"
    return Table("correlation", about, ("mean", "range", "unseen clients", "mean before training"), rows)


def _same_classes(known: _Known, scale: Scale) -> Table:
    """The gap between the two halves of T1 Table 4.1, like with like."""
    rows = {}
    for i, _, found in known:
        if (one := found.same_classes) is not None:
            novel = "none" if one.novel is None else f"{scale(one.novel)} ({counted(one.novel_clients, 'client')})"
            twins = "not measured"
            if one.twins is not None and one.twins_of is not None:
                twins = f"{scale(one.twins)}, {scale(one.twins_of)} of those {counted(one.pairs, 'client')}"
            rows[i] = (f"{scale(one.unseen)} ({counted(one.clients, 'client')})", scale(one.seen), novel, twins)
    about = f"are unseen clients served as well as training clients like them? ({FIGURES['same_classes']})"
    heads = (
        "unseen",
        "training clients with the same classes",
        "unseen, with classes like nobody's in training",
        "twins of training clients, made of unseen clients' rows",
    )
    return Table("same_classes", about, heads, rows)


def _label_mask(known: _Known, scale: Scale) -> Table:
    """T1 Table B.4."""
    rows = {
        i: tuple(scale(score) for score in (one.seen, one.seen_masked, one.unseen, one.unseen_masked))
        for i, _, found in known
        if (one := found.label_mask) is not None
    }
    about = f"clients that predict no class but their own, beside those that may predict any ({FIGURES['label_mask']})"
    return Table("label_mask", about, ("seen", "seen, own classes", "unseen", "unseen, own classes"), rows)


def _maps(runs: Sequence[Run], scale: Scale) -> list[Panel]:
    panels = []
    for i, run in enumerate(runs):
        found = run.analyses.map if run.analyses else None
        if found is None:
            continue
        mark = marker(run, scale, score_span(runs))
        for kind, places in (("PCA", found.pca), ("t-SNE", found.t_sne)):
            dots = []
            for j in mapped(len(found.names), len(runs)):
                main = found.main_class[j]
                about = ")" if main is None else f", mostly {main})"
                dots.append(mark(found.names[j], found.group[j], places[j], about, 3.8))
            chart = client_map(dots, _class_words(found, places))
            panels.append(panel(run.label, f"descriptors by {kind}", f"{kind} of descriptors, {run.label}", chart, i))
    return panels


def _class_words(clients: DescriptorMap, places: Sequence[tuple[float, float]]) -> list[tuple[float, float, str]]:
    """A class is written above the most central of its clients: the mean of scattered ones is nowhere on a map."""
    classes = sorted({main for main in clients.main_class if main is not None})
    if len(classes) > _MOST_CLASSES:
        return []
    words = []
    above = 0.05 * float(np.ptp(np.array(places), axis=0).max())
    for main in classes:
        own = np.array([place for place, its in zip(places, clients.main_class, strict=True) if its == main])
        far = np.abs(own[:, None] - own[None]).sum((1, 2))
        x, y = own[int(far.argmin())].tolist()
        words.append((x, y + above, main))
    return words


def _notes(runs: Sequence[Run]) -> list[str]:
    """What is not shown, and why."""
    notes = []
    for run in runs:
        if run.analyses is None:
            continue
        if run.analyses.quick:
            notes.append(f"{run.label}: analysed with --quick, on few clients and at few places.")
        for reason in dict.fromkeys(run.analyses.left_out.values()):
            names = [NAMES[name] for name, its in run.analyses.left_out.items() if its == reason]
            notes.append(f"{run.label}, not measured: {listed(names, 9)} ({reason}).")
    without = [run.label for run in runs if run.analyses is None]
    if without:
        notes.append(f"Not analysed: {listed(without, 9)}. For a run: unalike analyse RUN")
    return [*notes, f"{PAPERS}."]
