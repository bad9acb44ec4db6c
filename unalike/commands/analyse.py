"""``unalike analyse``: the papers' analyses of a finished run, in a table and in its report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from unalike.commands.console import print_files, progress_console, say
from unalike.commands.options import Json, command, flag

if TYPE_CHECKING:
    from unalike.studio.analyses.file import Analyses, CurvePoint
    from unalike.studio.report.words import Scale
    from unalike.studio.runs.finished import FinishedRun


app = typer.Typer()


@command(
    app,
    "unalike run pefll --classes 2 --unseen 0.2 --rounds 10 --out runs/look",
    "unalike analyse runs/look --quick",
)
def analyse(
    run: Annotated[Path, typer.Argument(metavar="RUN", hidden=True)],
    quick: Annotated[bool, flag("Fewer clients and fewer places of each curve.", "--quick")] = False,
    delta: Annotated[
        float | None,
        flag("δ of private newcomers, whatever their number of rows, e.g. 0.01. (default: as personalize)"),
    ] = None,
    bounds: Annotated[bool, flag("Print generalization bounds, term by term, and nothing else.", "--bounds")] = False,
    as_json: Json = False,
) -> None:
    """Look closer at a finished run, as the papers on models on demand do.

    RUN is the folder of the run.

    Do alike clients get alike descriptors: a map, and a rank correlation?
    Are unseen clients served as well as training clients with the same classes,
    and as well if nobody predicts a class that it does not have?
    What do newcomers get who are unlike the training clients: other shares of
    classes, turned or blurred images, few samples, a descriptor protected by ε?
    And what does a byte buy? What does not apply is named with the reason.

    With --bounds: what the theorems behind PeFLL and FLowDUP say about other
    clients, each of their terms by itself. For usual networks the total is above
    1, which promises nothing, and that is said.

    All is simulated after training, on the run's unseen clients, and charged to
    no ledger. It goes to simulation/analyses.json in the run folder and to its
    report, which is written anew. `unalike report RUN RUN` overlays several
    analysed runs.
    """
    from unalike.studio.analyses import analyse
    from unalike.studio.analyses.file import PAPERS, write_analyses
    from unalike.studio.report.page import write_report
    from unalike.studio.report.words import Scale
    from unalike.studio.runs import folder
    from unalike.studio.runs.measure import metric_of

    finished = analyse.finished_run(run)
    if bounds:
        _print_bounds(finished, as_json)
        return
    again = f"unalike analyse {run}{' --quick' if quick else ''}"
    disk_errors_told = partial(folder.disk_errors_told, run, again=again)
    with disk_errors_told():
        (run / folder.SIMULATION).mkdir(exist_ok=True)
        target = folder.report_of(run, [run])
        for file in (run / folder.ANALYSES, target):
            folder.check_writable(file)
    progress = progress_console()

    def tell(line: str) -> None:
        if not as_json:
            progress.print(line, markup=False, soft_wrap=True)

    found = analyse.analyse(finished, quick=quick, delta=delta, tell=tell)
    with disk_errors_told():
        write_analyses(run, found)
        write_report([run], target)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    _show(found, Scale(metric_of(finished.prepared.population)), finished.recipe.method)
    say(PAPERS)
    print_files(report=target)
    above = run.resolve().parent
    if (above / folder.COMPARISON).is_file():
        shown = run.parent if run.parent.resolve() == above else above  # the parent of `.` is `.`
        say(f"in the report of its comparison: unalike report {shown}")


def _print_bounds(run: FinishedRun, as_json: bool) -> None:
    from unalike.studio.analyses.bounds import bounds_of
    from unalike.studio.analyses.measures import DoesNotApply
    from unalike.studio.errors import UserError

    try:
        found = bounds_of(run)
    except DoesNotApply as error:
        raise UserError(f"--bounds does not apply: {error}") from error
    if as_json:
        typer.echo(json.dumps([asdict(one) | {"total": one.total, "vacuous": one.vacuous} for one in found], indent=2))
        return
    table = Table("prior", "training error", "between clients", "within a client", "total", title_justify="left")
    table.title = f"{run.recipe.method}, round {run.round}: {found[0].theorem} of Scott 2026"
    for one in found:
        middle = {"zero": "around 0", "initial": "around the first values"}[one.prior]
        numbers = (one.empirical, one.between, one.within, one.total)
        table.add_row(middle, *(f"{number:.4g}" for number in numbers))
    say(table)
    for one in found:
        parts = ", ".join(f"{name} = {value:.4g}" for name, value in one.parts.items())
        verdict = "1 or more, so it promises nothing" if one.vacuous else "below 1"
        say(f"prior {one.prior}: {parts}. The total is {verdict}.")


def _show(found: Analyses, scale: Scale, method: str) -> None:
    from unalike.studio.analyses.file import FIGURES, NAMES

    table = Table("analysis", "figure", "result", title=f"{method}, round {found.round}", title_justify="left")
    where = {name: figure.replace(", ", ",\n") for name, figure in FIGURES.items()}  # narrow: the results need the room
    for name in NAMES:
        for label, result in _results(found, name, scale):
            table.add_row(label, where[name], result)
    for name, reason in found.left_out.items():
        table.add_row(NAMES[name], where[name], f"does not apply: {reason}", style="dim")
    say(table)


def _results(found: Analyses, name: str, scale: Scale) -> list[tuple[str, str]]:
    """A line or two for one analysis: what it is called, and what came out."""
    from unalike.studio.analyses.file import NAMES
    from unalike.studio.words import size

    if name == "map" and found.map:
        return [(NAMES[name], f"{len(found.map):,} clients by PCA and t-SNE, drawn in the report")]
    if name == "correlation" and found.correlation is not None:
        one = found.correlation
        result = f"{one.mean:.2f} ({one.low:.2f} to {one.high:.2f}) over {one.clients:,} unseen clients"
        return [(NAMES[name], result + ("" if one.untrained is None else f"; {one.untrained:.2f} before training"))]
    if name == "same_classes" and found.same_classes is not None:
        like = found.same_classes
        result = f"{scale(like.unseen)} of {like.clients:,} unseen clients, {scale(like.seen)} of training clients"
        if like.novel is not None:
            result += f"; {scale(like.novel)} of {like.novel_clients:,} with classes like nobody's in training"
        rows = [(NAMES[name], result)]
        if like.twins is not None and like.twins_of is not None:
            result = f"{scale(like.twins)}; {scale(like.twins_of)} of those {like.pairs:,} clients"
            rows.append(("twins of training clients", f"made of unseen clients' rows: {result}"))
        return rows
    if name == "label_mask" and found.label_mask is not None:
        mask = found.label_mask
        result = f"{scale(mask.seen_masked)} seen, {scale(mask.unseen_masked)} unseen"
        return [(NAMES[name], f"{result}; {scale(mask.seen)} and {scale(mask.unseen)} among all classes")]
    if name in ("alpha", "rotation", "blur"):
        before, after = {"alpha": ("α ", ""), "rotation": ("", "°"), "blur": ("σ ", "")}[name]
        points: Sequence[CurvePoint] = getattr(found, name)
        return [(NAMES[name], _listed(points, before, after, scale))] if points else []
    if name == "size":
        rows = []
        for curve in found.size:
            words = [NAMES[name], curve.label, curve.delta_label] if len(found.size) > 1 else [NAMES[name]]
            rows.append((", ".join(word for word in words if word), _listed(curve.points, "", "", scale)))
        return rows
    if name == "bytes" and found.bytes:
        last = found.bytes[-1]
        scores = [
            f"{scale(mean)} {group}" for group in ("seen", "unseen") if (mean := getattr(last, group)) is not None
        ]
        return [(NAMES[name], f"{', '.join(scores)} after {size(1e9 * last.gigabytes)}")]
    return []


def _listed(points: Sequence[CurvePoint], before: str, after: str, scale: Scale) -> str:
    return "  ".join(f"{before}{point.at:,g}{after}: {scale(point.mean)}" for point in points)
