"""The report's section of analyses: the papers' figures, for the runs that ``unalike analyse`` was called for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from unalike.report.analyses.file import ANALYSES, PAPERS, Analyses, CurvePoint, Key
from unalike.report.figures.clients import client_map
from unalike.report.figures.theme import LIGHT
from unalike.report.figures.training import BYTES, Axis, Line, lines, span
from unalike.report.page.charts import Panel, dots
from unalike.report.page.read import Run
from unalike.report.page.words import Scale
from unalike.runs.words import counted, listed, size

_MOST_CLASSES = 20  # whose names are written on a map


class _Places(NamedTuple):
    """The places of a curve: how their axis is called, what is written before and after one, and on which scale."""

    title: str
    before: str = ""
    after: str = ""
    log: bool = False


_PLACES: dict[Key, _Places] = {
    "alpha": _Places("Dirichlet α (small: few classes each)", before="α ", log=True),
    "rotation": _Places("turned by", after="°"),
    "blur": _Places("σ in pixels", before="σ "),
    "shift": _Places("KL divergence from the nearest training client's class shares", before="KL "),
    "size": _Places("samples, at most", log=True),
}


_CHANGES: tuple[Key, ...] = ("alpha", "rotation", "blur", "shift")  # of newcomers


_Known = tuple[int, str, Analyses]


def _known(runs: Sequence[Run]) -> list[_Known]:
    """The number, the label and the analyses of each run that has any."""
    return [(i, run.label, run.analyses) for i, run in enumerate(runs) if run.analyses is not None]


class _Chart(NamedTuple):
    """Lines before the scale that all charts share is known; ``run`` None: of all runs."""

    name: Key
    about: str
    lines: list[Line]
    run: int | None = None

    def axis(self) -> Axis:
        """Labelled where something was measured."""
        if self.name == "bytes":
            return Axis("sent, both ways", label=BYTES, log=True)
        title, _, after, log = _PLACES[self.name]
        at = sorted({x for line in self.lines for x, _ in line.points})
        return Axis(title, label=f"format(datum.value, ',~g') + '{after}'", log=log, places=at)


def curves(runs: Sequence[Run], scale: Scale, legend: bool = False) -> list[Panel]:
    """One chart for each analysis, of all runs, and one for each run whose newcomers can protect their descriptors."""
    known = _known(runs)
    charts = [
        _Chart(key, "of newcomers", [_line(i, label, key, getattr(one, key), scale) for i, label, one in known])
        for key in _CHANGES
    ]
    charts += _by_size(known, scale, several=len(runs) > 1)
    charts += [_by_bytes(known, group, scale) for group in ("seen", "unseen")]
    charts = [chart._replace(lines=[line for line in chart.lines if line.points]) for chart in charts]
    ends = [end for chart in charts for line in chart.lines for end in _ends(line)]
    # no accuracy is outside of 0 and 1
    y = Axis(format=scale.format, domain=span(np.clip(ends, 0, 1).tolist() if scale.percent else ends))
    panels = []
    for chart in (chart for chart in charts if chart.lines):
        drawn = lines(chart.lines, chart.axis(), y, legend=legend or chart.run is not None)
        name, figure = ANALYSES[chart.name]
        title = f"{scale.metric}: {name} {chart.about}"
        panels.append(Panel(name.capitalize(), f"{chart.about} ({figure})", title, drawn, chart.run))
    return panels


def _by_size(known: Sequence[_Known], scale: Scale, several: bool) -> list[_Chart]:
    """Scores over a newcomer's number of samples: of all runs, and with each ε of those that can protect it."""
    charts = []
    if len(known) > 1 or len(known[0][2].size) == 1:  # else the chart with ε has this line as well
        plain = [(i, label, curve) for i, label, one in known for curve in one.size if curve.epsilon is None]
        found = [_line(i, label, "size", curve.points, scale) for i, label, curve in plain]
        charts.append(_Chart("size", "of a newcomer", found))
    for i, label, one in known:
        if len(one.size) > 1:
            found = [_line(i, each.label, "size", each.points, scale, mark=j) for j, each in enumerate(one.size)]
            # all curves have the same δ at the same number of samples
            words = ("and privacy", one.size[-1].delta_label, label if several else "")
            charts.append(_Chart("size", ", ".join(filter(None, words)), found, run=i))
    return charts


def _by_bytes(known: Sequence[_Known], group: str, scale: Scale) -> _Chart:
    """Scores of a group of clients over what had been sent."""
    found = []
    for i, label, one in known:
        pairs = [(1e9 * row.gigabytes, getattr(row, group)) for row in one.bytes]
        points = [(x, y) for x, y in pairs if y is not None and x > 0]
        found.append(Line(i, label, points, [f"{label}\n{size(x)} sent: {scale(y)}" for x, y in points]))
    return _Chart("bytes", f"and {group} clients", found)


def _ends(line: Line) -> list[float]:
    """From where to where each point's band goes."""
    errors = line.errors or [0.0] * len(line.points)
    return [y + way * error for (_, y), error in zip(line.points, errors, strict=True) for way in (-1, 1)]


def _line(i: int, label: str, name: Key, points: Sequence[CurvePoint], scale: Scale, mark: int | None = None) -> Line:
    """A curve with its band; several lines of one colour have none, as bands would hide each other."""
    errors = [] if mark is not None else [point.error for point in points if point.error is not None]
    bands = errors if len(errors) == len(points) else []
    title, _, after, _ = _PLACES[name]
    tips = [f"{label}\n{title} {point.at:,g}{after}: {scale(point.mean)}" for point in points]
    if bands:
        tips = [f"{tip} {scale.spread(error)}" for tip, error in zip(tips, bands, strict=True)]
    return Line(i, label, [(point.at, point.mean) for point in points], tips, bands, mark)


def results(found: Analyses, scale: Scale) -> list[tuple[Key, str, str]]:
    """What came out, in a line or more for each analysis: its key, what it is called, and the result."""
    lines: list[tuple[Key, str, str]] = []
    if found.map:
        lines.append(("map", "", f"{len(found.map):,} clients by PCA and t-SNE, drawn in the report"))
    if one := found.correlation:
        before = "" if one.untrained is None else f"; {one.untrained:.2f} before training"
        over = f"over {counted(one.clients, 'unseen client')}"
        lines.append(("correlation", "", f"{one.mean:.2f} ({one.low:.2f} to {one.high:.2f}) {over}{before}"))
    if like := found.same_classes:
        result = f"{scale(like.unseen)} of {like.clients:,} unseen clients, {scale(like.seen)} of training clients"
        if like.novel is not None:
            result += f"; {scale(like.novel)} of {like.novel_clients:,} with classes like nobody's in training"
        lines.append(("same_classes", "", result))
        if like.twins is not None and like.twins_of is not None:
            twins = f"{scale(like.twins)}; {scale(like.twins_of)} of those {like.pairs:,} clients"
            lines.append(("same_classes", "twins of training clients", f"made of unseen clients' rows: {twins}"))
    if mask := found.label_mask:
        own = f"{scale(mask.seen_masked)} seen, {scale(mask.unseen_masked)} unseen"
        lines.append(("label_mask", "", f"{own}; {scale(mask.seen)} and {scale(mask.unseen)} among all classes"))
    curves: list[tuple[Key, str, list[CurvePoint]]] = [(name, "", getattr(found, name)) for name in _CHANGES]
    for curve in found.size:
        words = [ANALYSES["size"].name, curve.label, curve.delta_label] if len(found.size) > 1 else []
        curves.append(("size", ", ".join(filter(None, words)), curve.points))
    for name, label, points in curves:
        _, before, after, _ = _PLACES[name]
        if points:
            result = "  ".join(f"{before}{point.at:,g}{after}: {scale(point.mean)}" for point in points)
            lines.append((name, label, result))
    if found.bytes:
        last = found.bytes[-1]
        means = [(group, getattr(last, group)) for group in ("seen", "unseen")]
        groups = ", ".join(f"{scale(mean)} {group}" for group, mean in means if mean is not None)
        lines.append(("bytes", "", f"{groups} after {size(1e9 * last.gigabytes)}"))
    return [(name, label or ANALYSES[name].name, result) for name, label, result in lines]


def rows(runs: Sequence[Run], scale: Scale) -> list[tuple[int, str, str, str]]:
    """The results that no chart shows: the run's number, what the analysis is called, its figure, and the result."""
    plain = ("correlation", "same_classes", "label_mask")
    found = [(i, *line) for i, _, one in _known(runs) for line in results(one, scale) if line[0] in plain]
    return [(i, label, ANALYSES[name].figure, result) for i, name, label, result in found]


def maps(runs: Sequence[Run], scale: Scale) -> list[Panel]:
    """The descriptors of each run's clients, by PCA and by t-SNE."""
    panels = []
    for i, label, one in _known(runs):
        for kind, name in (("PCA", "pca"), ("t-SNE", "t_sne")) if one.map else ():
            places = np.array([getattr(place, name) for place in one.map])
            mostly = [place.main_class for place in one.map]
            spots = [
                (client.name, client.group, place, ")" if main is None else f", mostly {main})", 3.8)
                for client, place, main in zip(one.map, places.tolist(), mostly, strict=True)
            ]
            about = f"descriptors by {kind}"
            words, fills = _words(places, mostly), None
            if all(place.rotation is not None for place in one.map):
                turned = [f"{place.rotation:g}°" for place in one.map]
                words, fills, about = _words(places, turned), _colours(turned), f"{about}, coloured by rotation"
            chart = client_map(dots(runs[i], spots, scale, runs), words, fills)
            panels.append(Panel(label, about, f"{kind} of descriptors, {label}", chart, i))
    return panels


def _colours(groups: Sequence[str]) -> list[str]:
    """A colour for each client, one for all of a group; more groups than colours share them."""
    which = {group: number for number, group in enumerate(sorted(set(groups), key=lambda word: float(word[:-1])))}
    return [LIGHT[f"s{which[group] % 8}"] for group in groups]


def _words(places: np.ndarray, mostly: Sequence[str | None]) -> list[tuple[float, float, str]]:
    """A class, or an angle, stands above the most central of its clients: the mean of scattered ones is nowhere."""
    classes = sorted({main for main in mostly if main is not None})
    words = []
    for main in classes if len(classes) <= _MOST_CLASSES else ():
        own = places[[each == main for each in mostly]]
        x, y = own[np.abs(own[:, None] - own[None]).sum((1, 2)).argmin()].tolist()
        words.append((x, y + 0.05 * float(np.ptp(places, axis=0).max()), main))
    return words


def notes(runs: Sequence[Run]) -> list[str]:
    """What is not shown, and why."""
    found = []
    for _, label, one in _known(runs):
        if one.quick:
            found.append(f"{label}: analysed with --quick, on few clients and at few places.")
        for reason in dict.fromkeys(one.left_out.values()):
            names = [ANALYSES[name].name for name, its in one.left_out.items() if its == reason]
            found.append(f"{label}, not measured: {listed(names, 9)} ({reason}).")
    if without := [run.label for run in runs if run.analyses is None]:
        found.append(f"Not analysed: {listed(without, 9)}. For a run: unalike analyse RUN")
    return [*found, f"{PAPERS}."]
