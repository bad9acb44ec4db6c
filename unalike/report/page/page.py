"""The report: one self-contained HTML file about one run or a comparison of several.

It is made from the files of the run folders alone (``unalike.report.page.read`` says which) and needs no network, no
library and no script to be read: the script only adds tooltips and highlights one run in all charts. The page itself is
``report.html`` beside this file, a Jinja2 template that escapes all text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from unalike.core.disk import write_whole
from unalike.report.page import transcript, words
from unalike.report.page.read import Run, read_runs
from unalike.runs import folder
from unalike.runs.errors import UserError, explain_disk_errors
from unalike.runs.result import GROUPS
from unalike.runs.words import counted, duration, listed, size, stated

if TYPE_CHECKING:
    from jinja2 import Template

    from unalike.runs.run import Comparison

_HERE = Path(__file__).parent


def write_report(run_folders: Sequence[Path], out: Path) -> None:
    """Write the report of one run folder, or of several to compare, to ``out``. Reads nothing but those folders."""
    page = render(read_runs(run_folders))
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page.encode())


def report_on(comparison: Comparison) -> Path | None:
    """Write the report of a comparison's runs into its folder, if it has one, and say where."""
    runs = [result.folder for result in comparison.results if result.folder is not None]
    if comparison.folder is None:
        return None
    with explain_disk_errors(comparison.folder):
        written = folder.report_of(comparison.folder, runs)
        write_report(runs, written)
    return written


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    metrics = {run.result.metric for run in runs}
    if len(metrics) > 1:
        raise UserError(
            f"these runs are scored by {listed(sorted(metrics))}, which cannot be compared; report them apart"
        )
    scale = words.Scale(metrics.pop(), runs[0].lower_is_better)

    # What draws is imported only where something is drawn: it takes a second that a plain run need not spend.
    from unalike.report.figures import theme
    from unalike.report.page import analyses, charts

    groups = words.groups_present(runs)
    leaders = {group: words.leaders(runs, group) for group in groups}
    script = (_HERE / "report.js").read_text(encoding="utf-8")
    return _template().render(
        runs=runs,
        scale=scale,
        theme=theme,
        charts=charts,
        analyses=analyses if any(run.analyses for run in runs) else None,
        groups=groups,
        best={group: best for group, best in leaders.items() if len(best) < len(words.runs_serving(runs, group))},
        facts=_facts(runs),
        notes=_notes(runs, groups),
        labels=[run.label for run in runs],
        clients=words.client_table(runs, scale),
        mapped_groups={group for run in runs if run.map for group in run.map.group},
        score_span=charts.score_span(runs),
        unbounded=[run.label for run in runs if not words.is_bounded(run)],
        workers=_workers,
        differing=_differing(runs),
        versions=_versions(runs),
        style=(_HERE / "report.css").read_text(encoding="utf-8"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"size": size, "duration": duration, "stated": stated, "listed": listed}
    environment.globals |= {"words": words, "transcript": transcript}
    return environment.get_template("report.html")


def _distinct(values: Sequence[str]) -> str:
    return listed(list(dict.fromkeys(values)), 6) if values else ""


def _facts(runs: Sequence[Run]) -> dict[str, str]:
    """What the page says above all else."""
    return {
        "data": _distinct([run.result.data for run in runs]),
        "clients": _distinct([f"{run.result.client_count:,}" for run in runs if run.result.client_count]),
        "rounds": _distinct([f"{run.result.round_count:,}" for run in runs]),
        "seed": _distinct([str(seed) for run in runs for seed in run.seeds]),
    }


def _versions(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What the runs were made with."""
    names = dict.fromkeys(name for run in runs for name in run.versions)
    return [(name, _distinct([run.versions[name] for run in runs if name in run.versions])) for name in names]


def _notes(runs: Sequence[Run], groups: Sequence[str]) -> list[str]:
    """What one must know to read the table of results."""
    notes = [f"{words.GROUP_NAMES[group].capitalize()} {words.GROUP_MEANING[group]}." for group in groups]
    over = "clients, and the deviation over seeds" if any(len(run.seeds) > 1 for run in runs) else "clients, as is ±"
    how = "at least their 90th" if runs[0].lower_is_better else "at most their 10th"
    notes.append(f"The mean is over {over}; a tenth of the clients score {how} percentile.")
    notes.append("“Not served”: the method has no model for these clients.")
    unserved = [words.GROUP_NAMES[group].capitalize() for group in GROUPS if group not in groups]
    if unserved and not any(run.withheld for run in runs):
        notes.append(f"{listed(unserved)}: not served by any run here, or there are none.")
    for run in runs:
        for group in groups:
            summary = run.result.accuracy.of(group)
            if summary is not None and summary.failed:
                whom = f"{summary.failed:,} of {summary.clients:,} {words.GROUP_NAMES[group]}"
                notes.append(f"{run.label}: {whom} have no finite score and are not in the mean.")
        if run.result.stopped:
            notes.append(f"{run.label}: {run.result.stopped}")
        if run.result.failures:
            notes.append(f"{run.label}: {counted(run.result.failures, 'reply', 'replies')} of clients failed to come.")
    if len(runs) > 1:
        notes.append(
            "A lead counts only over the same clients: better with every seed, and client by client by more than two "
            "standard errors."
        )
    return notes


def _workers(run: Run) -> list[tuple[str, ...]]:
    """What each worker of a cluster, or site of a network, did."""
    return [
        (
            one.name or f"worker {one.worker}",
            *(f"{count:,}" for count in (one.clients, one.asks, one.answered, one.failed)),
            duration(one.waited),
            *((duration(one.seconds), f"{one.rate:,.0f}") if one.seconds else ("not told", "not told")),
            str(one.restarts),
            str(one.missed),
            size(one.bytes_down),
            size(one.bytes_up),
        )
        for one in run.result.workers
    ]


def _differing(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Settings in which runs differ. A hyperparameter that only one method has is no difference between runs."""
    found = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [run.settings.get(key, "—") for run in runs]
        if len(set(values) - {"—"} if key.startswith("hyperparameters.") else set(values)) > 1:
            found.append((Markup("<code>{}</code>").format(key.removeprefix("hyperparameters.")), *values))
    return found
