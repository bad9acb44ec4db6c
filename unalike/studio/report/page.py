"""The report: one self-contained HTML file about one run or a comparison of several.

It is made from the files of the run folders alone (``unalike.studio.report.read`` says which) and needs no network, no
library and no script to be read: the script only adds tooltips and highlights one run in all charts. The page itself is
``report.html`` beside this file, a Jinja2 template that escapes all text.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

from unalike.core.disk import write_whole
from unalike.studio.report import words
from unalike.studio.report.read import ReportError, Run, read_runs
from unalike.studio.runs.result import GROUPS
from unalike.studio.words import counted, duration, epsilon, listed, size

__all__ = ["ReportError", "write_report"]

_HERE = Path(__file__).parent


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
    scale = words.Scale(metrics.pop())

    # What draws is imported only where something is drawn: it takes a second that a plain run need not spend.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from unalike.studio.figures import theme
    from unalike.studio.report import analyses, charts

    groups = words.present(runs)
    leaders = {group: words.leaders(runs, group) for group in groups}
    script = (_HERE / "report.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"size": size, "duration": duration, "epsilon": epsilon, "listed": listed, "words": words}
    return environment.get_template("report.html").render(
        runs=runs,
        scale=scale,
        theme=theme,
        groups=groups,
        best={group: best for group, best in leaders.items() if len(best) < len(words.served(runs, group))},
        facts=_facts(runs),
        notes=_notes(runs, groups),
        accuracy=charts.accuracy(runs, scale),
        distribution=charts.distribution(runs, scale),
        maps=charts.client_maps(runs, scale),
        mapped_groups={group for run in runs if run.map for group in run.map.group},
        score_span=charts.score_span(runs),
        analyses=analyses.section(runs, scale) if any(run.analyses is not None for run in runs) else None,
        about_analyses=analyses.ABOUT,
        heading=analyses.heading,
        costs=charts.costs(runs),
        unbounded=[run.label for run in runs if run.result.privacy.epsilon in (None, math.inf)],
        differing=_differing(runs),
        versions=_versions(runs),
        style=(_HERE / "report.css").read_text(encoding="utf-8"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _facts(runs: Sequence[Run]) -> dict[str, str]:
    """What the runs are about, in a few words."""
    found = {
        "data": [run.result.data for run in runs],
        "clients": [f"{count:,}" for run in runs if (count := len(run.names))],
        "rounds": [f"{run.result.rounds:,}" for run in runs],
        "seed": [str(run.result.seed) for run in runs],
    }
    return {name: listed(list(dict.fromkeys(values)), 6) for name, values in found.items() if values}


def _notes(runs: Sequence[Run], groups: Sequence[str]) -> list[str]:
    """What one must know to read the table of results."""
    notes = [f"{words.GROUP_NAMES[group].capitalize()} {words.GROUP_MEANING[group]}." for group in groups]
    notes.append("Mean and standard deviation are over clients; a tenth of them score at most their 10th percentile.")
    notes.append("“Not served”: the method has no model for these clients.")
    if unserved := [words.GROUP_NAMES[group].capitalize() for group in GROUPS if group not in groups]:
        notes.append(f"{listed(unserved)}: not served by any run here, or there are none.")
    for run in runs:
        for group in groups:
            summary = run.result.accuracy.of(group)
            if summary is not None and summary.failed:
                whom = f"{summary.failed:,} of {summary.clients:,} {words.GROUP_NAMES[group]}"
                notes.append(f"{run.label}: {whom} have no finite score and are not in the mean.")
        if run.result.failures:
            notes.append(f"{run.label}: {counted(run.result.failures, 'reply', 'replies')} of clients failed to come.")
    if len(runs) > 1:
        notes.append(
            "A lead counts only over the same clients, with a difference, client by client, above two standard errors."
        )
    return notes


def _differing(runs: Sequence[Run]) -> list[str]:
    """Settings in which runs differ. A hyperparameter that only one method has is no difference between runs."""
    found = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [run.settings.get(key) for run in runs]
        if key.startswith("hyperparameters."):
            values = [value for value in values if value is not None]
        if len(set(values)) > 1:
            found.append(key)
    return found


def _versions(runs: Sequence[Run]) -> dict[str, str]:
    names = dict.fromkeys(name for run in runs for name in run.versions)
    return {
        name: listed(list(dict.fromkeys(run.versions[name] for run in runs if name in run.versions))) for name in names
    }
