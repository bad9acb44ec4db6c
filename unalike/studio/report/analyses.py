"""The report's section of analyses: the papers' figures, for the runs that ``unalike analyse`` was called for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unalike.studio.analyses.file import FIGURES, NAMES, PAPERS, Analyses, AtEpsilon, CurvePoint, DescriptorMap
from unalike.studio.report import plots
from unalike.studio.report.charts import SHAPE, map_legend, mapped, panel_of, panels_of, score_span, step_of
from unalike.studio.report.markup import Html, join, tag
from unalike.studio.report.read import Run
from unalike.studio.report.words import Scale, listed, size

ABOUT = (
    "What the papers look at beside accuracy, measured after training on clients that arrived late. "
    "It is simulation only: no server would see it. A band is one standard error over clients."
)
_MOST_CLASSES = 20  # whose names are written on a map

# One line for each analysed run: its number, its label, and what was found
_Known = Sequence[tuple[int, str, Analyses]]


@dataclass(frozen=True)
class _Panel:
    """A chart before the scale that all of them share is known."""

    name: str
    about: str
    lines: list[plots.Series]
    across: plots.Across
    run: int | None = None  # None: of all runs


def charts(runs: Sequence[Run], scale: Scale) -> Html:
    """Curves of all analysed runs in one chart each, their maps side by side, and what does not apply in words."""
    known = [(i, run.label, run.analyses) for i, run in enumerate(runs) if run.analyses is not None]
    return join(
        [
            _correlations(known),
            _same_classes(known, scale),
            _label_mask(known, scale),
            _maps(runs, scale),
            _curves(known, scale, len(runs)),
            _notes(runs),
        ]
    )


def _heading(name: str) -> str:
    return NAMES[name].capitalize()


def _curves(known: _Known, scale: Scale, runs: int) -> Html | None:
    alpha = [_series(i, label, found.alpha) for i, label, found in known]
    rotation = [_series(i, label, found.rotation) for i, label, found in known]
    blur = [_series(i, label, found.blur) for i, label, found in known]
    plain = [(i, label, curve) for i, label, found in known for curve in found.size if curve.epsilon is None]
    if len(known) == 1 and len(known[0][2].size) > 1:
        plain = []  # the chart with ε has this line as well
    sizes = [_series(i, label, curve.points) for i, label, curve in plain]
    panels = [
        _Panel("alpha", "of newcomers", alpha, _across("Dirichlet α (small: few classes each)", alpha, log=True)),
        _Panel("rotation", "of newcomers", rotation, _across("turned by", rotation, "°")),
        _Panel("blur", "of newcomers", blur, _across("σ in pixels", blur)),
        _Panel("size", "of a newcomer", sizes, _across("samples, at most", sizes, log=True)),
        *(_by_epsilon(i, "" if runs == 1 else f", {label}", found.size) for i, label, found in known),
        *(_per_byte(group, known) for group in ("seen", "unseen")),
    ]
    panels = [panel for panel in panels if any(line.points for line in panel.lines)]
    if not panels:
        return None
    low, high = zip(*(ends for panel in panels for line in panel.lines for ends in _ends(line, scale)), strict=True)
    ticks = plots.nice_ticks(min(low), max(high))
    drawn = []
    for panel in panels:
        title = f"{scale.metric}: {NAMES[panel.name]} {panel.about}"
        chart = plots.line_chart(panel.lines, ticks, title=title, form=scale.tick, across=panel.across)
        drawn.append(panel_of(_heading(panel.name), f"{panel.about} ({FIGURES[panel.name]})", chart, panel.run))
    return panels_of(drawn, "n3")


def _ends(line: plots.Series, scale: Scale) -> list[tuple[float, float]]:
    """From where to where each point's band goes; no accuracy is outside of 0 and 1."""
    errors = line.errors or [0.0] * len(line.points)
    ends = [(y - error, y + error) for (_, y), error in zip(line.points, errors, strict=True)]
    if not scale.percent:
        return ends
    return [(min(max(low, 0.0), 1.0), min(max(high, 0.0), 1.0)) for low, high in ends]


def _series(run: int, label: str, points: Sequence[CurvePoint]) -> plots.Series:
    at = [(point.at, point.mean) for point in points]
    errors = [point.error for point in points if point.error is not None]
    return plots.Series(run, label, at, errors if len(errors) == len(at) else ())


def _across(title: str, lines: Sequence[plots.Series], unit: str = "", *, log: bool = False) -> plots.Across:
    places = sorted({x for line in lines for x, _ in line.points})
    return plots.Across(title, lambda x: f"{x:,g}{unit}", places, log)


def _by_epsilon(run: int, whose: str, curves: Sequence[AtEpsilon]) -> _Panel:
    """The lines of a run whose newcomers can protect their descriptors; none for another run."""
    lines = []
    for number, curve in enumerate(curves if len(curves) > 1 else ()):
        points = [(point.at, point.mean) for point in curve.points]  # without bands: four of one colour hide each other
        lines.append(plots.Series(run, curve.label, points, shape=plots.shape_of(number)))
    # all curves have the same δ at the same number of samples
    delta = next((f", {curve.delta_label}" for curve in curves if curve.delta_label), "")
    return _Panel("size", f"and privacy{delta}{whose}", lines, _across("samples, at most", lines, log=True), run)


def _per_byte(group: str, known: _Known) -> _Panel:
    lines = []
    for i, label, found in known:
        pairs = [(row.gigabytes, getattr(row, group)) for row in found.bytes]
        lines.append(plots.Series(i, label, [(x, y) for x, y in pairs if y is not None]))
    across = plots.Across("sent, both ways", lambda gigabytes: size(1e9 * gigabytes))
    return _Panel("bytes", f"and {group} clients", lines, across)


def _correlations(known: _Known) -> Html | None:
    """T1 Fig. 4.1 is one number for each method."""
    rows = {
        i: (
            label,
            f"{one.mean:.2f}",
            f"{one.low:.2f} to {one.high:.2f}",
            f"{one.clients:,}",
            "not measured" if one.untrained is None else f"{one.untrained:.2f}",
        )
        for i, label, found in known
        if (one := found.correlation) is not None
    }
    about = f"of distances between descriptors and between class shares; 1: the same order ({FIGURES['correlation']})"
    return _table("correlation", about, ("mean", "range", "unseen clients", "mean before training"), rows)


def _same_classes(known: _Known, scale: Scale) -> Html | None:
    """The gap between the two halves of T1 Table 4.1, like with like."""
    rows = {}
    for i, label, found in known:
        if (one := found.same_classes) is not None:
            novel = "none" if one.novel is None else f"{scale(one.novel)} ({one.novel_clients:,} clients)"
            twins = "not measured"
            if one.twins is not None and one.twins_of is not None:
                twins = f"{scale(one.twins)}, {scale(one.twins_of)} of those {one.pairs:,} clients"
            rows[i] = (label, f"{scale(one.unseen)} ({one.clients:,} clients)", scale(one.seen), novel, twins)
    about = f"are unseen clients served as well as training clients like them? ({FIGURES['same_classes']})"
    heads = (
        "unseen",
        "training clients with the same classes",
        "unseen, with classes like nobody's in training",
        "twins of training clients, made of unseen clients' rows",
    )
    return _table("same_classes", about, heads, rows)


def _label_mask(known: _Known, scale: Scale) -> Html | None:
    """T1 Table B.4."""
    rows = {
        i: (label, *(scale(score) for score in (one.seen, one.seen_masked, one.unseen, one.unseen_masked)))
        for i, label, found in known
        if (one := found.label_mask) is not None
    }
    about = f"clients that predict no class but their own, beside those that may predict any ({FIGURES['label_mask']})"
    return _table("label_mask", about, ("seen", "seen, own classes", "unseen", "unseen, own classes"), rows)


def _table(name: str, about: str, heads: Sequence[str], rows: Mapping[int, tuple[str, ...]]) -> Html | None:
    """A heading and a line for each run, by its number: its label, and a cell under each of the heads."""
    if not rows:
        return None
    lines = []
    for run, (label, *cells) in rows.items():
        mark = plots.key_mark(plots.shape_of(run), "mark")
        first = tag("th", mark, label, scope="row", class_=plots.colour(run))
        lines.append(tag("tr", first, *(tag("td", cell) for cell in cells), class_="run", data_run=run))
    head = tag("thead", tag("tr", *(tag("th", text, scope="col") for text in ("", *heads))))
    return join(
        [
            tag("h3", _heading(name), " ", tag("span", about)),
            tag("table", head, tag("tbody", *lines), class_="plain"),
        ]
    )


def _maps(runs: Sequence[Run], scale: Scale) -> Html | None:
    span = score_span(runs)
    panels = []
    groups: set[str] = set()
    for i, run in enumerate(runs):
        found = run.analyses.map if run.analyses else None
        if found is None:
            continue
        groups |= set(found.group)
        for kind, places in (("PCA", found.pca), ("t-SNE", found.t_sne)):
            chart = _map(run, found, places, scale, span, len(runs), f"{kind} of descriptors, {run.label}")
            panels.append(panel_of(run.label, f"descriptors by {kind}", chart, i))
    if not panels:
        return None
    about = f"a class is written where clients are that have most of it ({FIGURES['map']})"
    return join(
        [
            tag("h3", _heading("map"), " ", tag("span", about)),
            map_legend(groups, span, scale),
            panels_of(panels, "maps"),
        ]
    )


def _map(
    run: Run,
    clients: DescriptorMap,
    places: Sequence[tuple[float, float]],
    scale: Scale,
    span: tuple[float, float] | None,
    runs: int,
    title: str,
) -> Html:
    scored = {(row.client, row.group): row.score for row in run.clients}
    dots = []
    for i in mapped(len(clients.names), runs):
        name, group, main, (x, y) = clients.names[i], clients.group[i], clients.main_class[i], places[i]
        score = scored.get((name, group))
        mostly = "" if main is None else f", mostly {main}"
        tip = f"{name} ({group}{mostly})\n{run.label}: {'not served' if score is None else scale(score)}"
        step = None if score is None or span is None else step_of(score, span)
        dots.append(plots.Dot(x, y, tip, 4.4 if group == "unseen" else 3.6, step, SHAPE[group]))
    return plots.scatter(dots, _class_words(clients, places), title=title)


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


def _notes(runs: Sequence[Run]) -> Html:
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
    notes.append(f"{PAPERS}.")
    return join([tag("p", note, class_="note") for note in notes])
