"""``unalike analyse``: the papers' analyses of a finished run, in a table and in its report."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from unalike.commands.console import print_files, progress_console, say
from unalike.commands.options import Run, command, flag, json_flag
from unalike.core import disk
from unalike.runs import errors

if TYPE_CHECKING:
    from unalike.report.analyses.file import Analyses
    from unalike.report.page.words import Scale


app = typer.Typer()


@command(
    app, "unalike run pefll --classes 2 --unseen 0.2 --rounds 10 --out runs/look", "unalike analyse runs/look --quick"
)
def analyse(
    run: Run,
    quick: bool = flag("Fewer clients and fewer places of each curve.", default=False),
    delta: float | None = flag(
        "δ of private newcomers, whatever their number of rows, e.g. 0.01. (default: as personalize)"
    ),
    as_json: bool = json_flag(),
) -> None:
    """Look closer at a finished run, as the papers on models on demand do.

    RUN is the folder of the run.

    Do alike clients get alike descriptors: a map, and a rank correlation?
    Are unseen clients served as well as training clients with the same classes,
    and as well if nobody predicts a class that it does not have?
    What do newcomers get who are unlike the training clients: other shares of
    classes, turned or blurred images, few samples, a descriptor protected by ε?
    And what does a byte buy? What does not apply is named with the reason.

    All is simulated after training, on the run's unseen clients, and charged to
    no ledger. It goes to simulation/analyses.json in the run folder and to its
    report, which is written anew. `unalike report RUN RUN` overlays several
    analysed runs.
    """
    from unalike.report.analyses import analyse
    from unalike.report.analyses.file import PAPERS, write_analyses
    from unalike.report.page.page import write_report
    from unalike.report.page.words import Scale
    from unalike.runs import folder
    from unalike.runs.measure import metric_of

    finished = analyse.finished_run(run)
    again = f"unalike analyse {run}{' --quick' if quick else ''}"
    explain_disk_errors = partial(errors.explain_disk_errors, run, again=again)
    with explain_disk_errors():
        (run / folder.SIMULATION).mkdir(exist_ok=True)
        target = folder.report_of(run, [run])
        for file in (run / folder.ANALYSES, target):
            disk.check_writable(file)
    progress = progress_console()

    def tell(line: str) -> None:
        if not as_json:
            progress.print(line, markup=False, soft_wrap=True)

    found = analyse.analyse(finished, quick=quick, delta=delta, tell=tell)
    with explain_disk_errors():
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


def _show(found: Analyses, scale: Scale, method: str) -> None:
    from unalike.report.analyses.file import ANALYSES
    from unalike.report.page.analyses import results

    table = Table("analysis", "figure", "result", title=f"{method}, round {found.round}", title_justify="left")
    where = {key: one.figure.replace(", ", ",\n") for key, one in ANALYSES.items()}  # narrow: the results need the room
    for name, label, result in results(found, scale):
        table.add_row(label, where[name], result)
    for name, reason in found.left_out.items():
        table.add_row(ANALYSES[name].name, where[name], f"does not apply: {reason}", style="dim")
    say(table)
