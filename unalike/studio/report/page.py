"""The report: one self-contained HTML file about one run or a comparison of several.

It is made from the files of the run folders alone (``unalike.studio.report.read`` says which) and needs no network, no
library and no script to be read: the script only adds tooltips for touch and highlights one run in all charts.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from unalike.studio.report import analyses as report_analyses
from unalike.studio.report import charts as report_charts
from unalike.studio.report import plots
from unalike.studio.report.markup import Html, join, tag
from unalike.studio.report.read import GROUPS, ReportError, Run, Sight, read_runs
from unalike.studio.report.words import (
    GROUP_MEANING,
    GROUP_NAMES,
    SEEN_AS,
    Scale,
    details,
    duration,
    epsilon,
    finding,
    leaders,
    listed,
    numbers,
    present,
    rounds_of,
    senders,
    served,
    size,
    spoken,
    transcript_summary,
)
from unalike.studio.runs.folder import write_whole

__all__ = ["ReportError", "write_report"]


def write_report(run_folders: Sequence[Path], out: Path) -> None:
    """Write the report of one run folder, or of several to compare, to ``out``. Reads nothing but those folders."""
    page = render(read_runs(run_folders))
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page.encode())


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    metrics = {run.result.metric for run in runs}
    if len(metrics) > 1:
        raise ReportError(
            f"these runs are scored by {listed(sorted(metrics))}, which cannot be compared; report them apart"
        )
    scale = Scale(metrics.pop())
    title = "Unalike: " + (runs[0].label if len(runs) == 1 else f"{len(runs)} runs compared")
    reading = (
        "Each dot is a client; where dots would not fit, bars count clients. "
        "The full line marks the mean, the dashed one the 10th percentile of clients."
    )
    mapping = (
        "Clients near each other have alike data; a larger mark has more samples; its colour is its score. "
        "Classes are written where the clients that have much of them are."
    )
    analyses = []
    if any(run.analyses is not None for run in runs):
        analyses = [_section("analyses", "Analyses", report_analyses.ABOUT, report_analyses.charts(runs, scale))]
    sections = [
        _section("result", "Result", None, _result_table(runs, scale)),
        _section(
            "rounds", "Over the rounds", f"Mean {scale.metric} over clients.", report_charts.accuracy(runs, scale)
        ),
        _section("clients", "Client by client", reading, report_charts.distribution(runs, scale)),
        _section("map", "Map of the clients", mapping, report_charts.client_maps(runs, scale)),
        *analyses,
        _section("cost", "What it cost", None, report_charts.costs(runs)),
        _section("transcript", "What left the clients", _TRANSCRIPT, *map(_transcript, runs)),
        _section("recipe", "How to repeat it", None, _recipes(runs), _versions(runs)),
    ]
    style, script = _asset("report.css"), _asset("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Html(style)),
    )
    body = tag("body", _header(runs, scale), _legend(runs), tag("main", *sections), tag("script", Html(script)))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


_TRANSCRIPT = (
    "Every array that the server, or anybody on the wire, could see. "
    "Hover over an entry of “Server sees” for its exact meaning."
)


def _asset(name: str) -> str:
    return resources.files("unalike.studio.report").joinpath(name).read_text(encoding="utf-8")


def _section(anchor: str, name: str, about: str | None, *content: Html) -> Html:
    return tag(
        "section", tag("h2", name), None if about is None else tag("p", about, class_="about"), *content, id=anchor
    )


def _header(runs: Sequence[Run], scale: Scale) -> Html:
    facts = []
    for name, values in (
        ("data", [run.result.data for run in runs]),
        ("clients", [f"{count:,}" for run in runs if (count := len(run.names))]),
        ("rounds", [f"{run.result.rounds:,}" for run in runs]),
        ("seed", [str(run.result.seed) for run in runs if run.result.seed is not None]),
    ):
        if values:
            facts.append(tag("span", f"{name} ", tag("b", listed(list(dict.fromkeys(values)), 6))))
    missing = [
        tag(
            "p",
            f"{run.label}: no {listed(run.missing, 9)} in {run.folder.name}; what is made from that is left out.",
            class_="missing",
        )
        for run in runs
        if run.missing
    ]
    return tag(
        "header",
        tag("p", tag("b", "unalike"), " report", class_="brand"),
        tag("h1", finding(runs, scale)),
        tag("ul", *(tag("li", line) for line in details(runs, scale)), class_="deck"),
        tag("p", *facts, class_="facts"),
        *missing,
    )


def _legend(runs: Sequence[Run]) -> Html:
    """Names of the runs with their colours, always in sight; with the script, each one highlights its run."""
    if len(runs) == 1:
        return Html("")
    chips = [
        tag(
            "button",
            plots.key_mark(plots.shape_of(i), "mark"),
            run.label,
            type="button",
            class_=f"run {plots.colour(i)}",
            data_focus=i,
            aria_pressed="false",
        )
        for i, run in enumerate(runs)
    ]
    return tag("nav", *chips, aria_label="Runs")


def _result_table(runs: Sequence[Run], scale: Scale) -> Html:
    groups = present(runs)
    best = {group: leaders(runs, group) for group in groups}
    clear = {group for group in groups if len(best[group]) < len(served(runs, group))}
    top = [tag("th", "Method", rowspan=2, scope="col", class_="pin")]
    below = []
    for group in groups:
        top.append(tag("th", GROUP_NAMES[group].capitalize(), colspan=2, scope="colgroup", class_="group"))
        below += [tag("th", "mean ± std", scope="col", class_="first"), tag("th", "10th percentile", scope="col")]
    top.append(tag("th", "Cost", colspan=4, scope="colgroup", class_="group"))
    below += [
        tag("th", name, scope="col", class_="first" if i == 0 else None)
        for i, name in enumerate(("sent up", "sent down", "ε", "time"))
    ]
    rows = []
    for i, run in enumerate(runs):
        result = run.result
        name = tag(
            "th", plots.key_mark(plots.shape_of(i), "mark"), run.label, scope="row", class_=f"pin {plots.colour(i)}"
        )
        cells = [cell for group in groups for cell in _scores(run, group, scale, group in clear and run in best[group])]
        cells += [
            tag("td", size(result.bytes.up), class_="first"),
            tag("td", size(result.bytes.down)),
            tag("td", _epsilon(run)),
            tag("td", duration(result.seconds)),
        ]
        rows.append(tag("tr", name, *cells, class_="run", data_run=i))
    table = tag("table", tag("thead", tag("tr", *top), tag("tr", *below)), tag("tbody", *rows), class_="result")
    words = [f"{GROUP_NAMES[group].capitalize()} {GROUP_MEANING[group]}." for group in groups]
    notes = " ".join(words) + (
        " Mean and standard deviation are over clients; a tenth of them score at most their 10th percentile."
        " “Not served”: the method has no model for these clients."
    )
    unserved = [GROUP_NAMES[group].capitalize() for group in GROUPS if group not in groups]
    if unserved:
        notes += f" {listed(unserved)}: not served by any run here, or there are none."
    for run in runs:
        for group in groups:
            summary = run.result.accuracy.of(group)
            if summary is not None and summary.failed:
                notes += (
                    f" {run.label}: {summary.failed:,} of {summary.clients:,} {GROUP_NAMES[group]} have no finite score"
                )
                notes += " and are not in the mean."
        if run.result.failures:
            notes += f" {run.label}: {run.result.failures:,} replies of clients failed to come."
    if len(runs) > 1:
        notes += (
            " A lead counts only over the same clients, with a difference, client by client, above two standard errors."
        )
    return join([_scrolling(table, "Results"), tag("p", notes, class_="note")])


def _scores(run: Run, group: str, scale: Scale, best: bool) -> list[Html]:
    summary = run.result.accuracy.of(group)
    if summary is None or summary.mean is None:
        return [tag("td", "not served", colspan=2, class_="first unserved")]
    mean = tag("b", scale(summary.mean), class_="best" if best else None)
    spread = None if summary.std is None else tag("span", " " + scale.spread(summary.std), class_="spread")
    p10 = "—" if summary.p10 is None else scale(summary.p10)
    wanted = run.result.expected.get(group)
    expected = None if wanted is None else tag("small", f"expected {scale(wanted)}")
    return [tag("td", mean, spread, expected, class_="first"), tag("td", p10)]


def _epsilon(run: Run) -> str | Html:
    privacy = run.result.privacy
    if privacy.epsilon is None or math.isinf(privacy.epsilon) or not (privacy.delta and privacy.epsilon):
        return epsilon(privacy.epsilon)
    return join([epsilon(privacy.epsilon), tag("small", f"δ = {privacy.delta:.2g}")])


def _transcript(run: Run) -> Html:
    head = tag("h3", run.label, " ", tag("span", transcript_summary(run) if run.transcript is not None else ""))
    if run.transcript is None:
        return join([head, tag("p", "There is no transcript.json in the run folder.", class_="absent")])
    if not run.transcript:
        return head
    names = (
        "Array",
        "Numbers",
        "Clients each time",
        "When",
        "Server sees",
        "Clipped to",
        "Noise",
        "ε",
        "Bytes",
        "Note",
    )
    rows = [tag("tr", *_sight(row, run)) for row in run.transcript]
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", name, scope="col") for name in names))),
        tag("tbody", *rows),
        class_="transcript",
    )
    return join([head, _scrolling(table, f"What left the clients, {run.label}")])


def _sight(row: Sight, run: Run) -> list[Html]:
    words, kind, meaning = SEEN_AS.get(row.seen_as, (row.seen_as, "trusted", row.seen_as))
    if row.note == "simulation only":
        spent = "none"
    elif row.epsilon is not None:
        spent = epsilon(row.epsilon)
    else:
        spent = "∞" if row.noise is None else f"in the total of {epsilon(run.result.privacy.epsilon)}"
    unit = "" if row.unit is None else f" (protects one {'data point' if row.unit == 'point' else 'client'})"
    chosen = None if row.sampling is None else tag("small", spoken(row.sampling))
    return [
        tag("th", tag("code", row.array), tag("small", f"by {row.task}"), scope="row"),
        tag("td", numbers(row), class_="number"),
        tag("td", senders(row), chosen, class_="number"),
        tag("td", rounds_of(row), tag("small", f"{row.times:,} times")),
        tag("td", tag("span", words, class_=f"badge {kind}", title=meaning)),
        tag("td", "no limit" if row.clip is None else f"length {row.clip:g}"),
        tag("td", "none" if row.noise is None else spoken(row.noise) + unit),
        tag("td", spent, class_="number"),
        tag("td", size(row.bytes), class_="number"),
        tag("td", row.note or "—"),
    ]


def _recipes(runs: Sequence[Run]) -> Html:
    parts = []
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    unlike = [key for key in keys if _differs(key, runs)]
    if unlike:
        head = tag(
            "tr", tag("th", "Setting", scope="col", class_="pin"), *(tag("th", run.label, scope="col") for run in runs)
        )
        rows = [
            tag(
                "tr",
                tag("th", tag("code", key.removeprefix("hyperparameters.")), scope="row", class_="pin"),
                *(tag("td", run.settings.get(key, "—")) for run in runs),
            )
            for key in unlike
        ]
        parts.append(tag("h3", "What differs between the runs"))
        parts.append(
            _scrolling(tag("table", tag("thead", head), tag("tbody", *rows), class_="plain"), "Differing settings")
        )
    command = tag("code", "unalike run recipe.toml --out NEW_FOLDER")
    parts.append(tag("p", "A recipe, saved as recipe.toml, repeats its run: ", command, class_="note"))
    for run in runs:
        if run.recipe is None:
            parts.append(tag("p", f"{run.label}: there is no recipe.toml in the run folder.", class_="absent"))
        else:
            parts.append(
                tag("details", tag("summary", f"Recipe of {run.label}"), tag("pre", run.recipe), open=len(runs) == 1)
            )
    return join(parts)


def _differs(key: str, runs: Sequence[Run]) -> bool:
    """Do runs differ in a setting? A hyperparameter that only one method has is no difference between runs."""
    values = [run.settings.get(key) for run in runs]
    if key.startswith("hyperparameters."):
        values = [value for value in values if value is not None]
    return len(set(values)) > 1


def _versions(runs: Sequence[Run]) -> Html:
    names = list(dict.fromkeys(name for run in runs for name in run.versions))
    if not names:
        return tag("p", "There is no versions.json in the run folder.", class_="absent")
    rows = []
    for name in names:
        values = listed(list(dict.fromkeys(run.versions[name] for run in runs if name in run.versions)))
        rows.append(tag("tr", tag("th", name, scope="row"), tag("td", values)))
    table = _scrolling(tag("table", tag("tbody", *rows), class_="plain"), "Versions")
    return tag("details", tag("summary", "Versions"), table)


def _scrolling(table: Html, name: str) -> Html:
    """A wide table scrolls by itself, never the page."""
    return tag("div", table, class_="scroll", role="region", aria_label=name, tabindex=0)
