"""``unalike demo``, ``run``, ``compare``, ``resume`` and ``report``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unalike.commands.console import check_free, print_files, progress_console, say, write
from unalike.commands.options import (
    Dealing,
    Output,
    Run,
    Running,
    Training,
    address_flag,
    command,
    flag,
    json_flag,
    plan_from_flags,
    quiet_flag,
)
from unalike.runs.errors import UserError, explain_disk_errors

if TYPE_CHECKING:
    from unalike.runs.recipe.recipe import Plan
    from unalike.runs.run import Comparison


app = typer.Typer()

_METHODS = ("local", "fedavg", "fedavg-finetune", "flowdup", "pefll-unlabeled", "odpfl")
_SETTINGS: dict[str, Any] = {
    "title": "demo",
    "data": "digits",
    "partition": "rotation",  # each client turns its pictures by 0, 90, 180 or 270 degrees
    "clients": 80,  # of about 22 rows each, 4 of them to test on: too few to train alone
    "unseen": 20,
    "model": "logistic",  # small enough for any device, and too small to read all four angles
    "cohort": 20,
    "rounds": 100,
    "threads": 1,  # the models are tiny: more threads only wait for one another
}


@command(app, "unalike demo", "unalike demo --rounds 2 --out runs/quick")
def demo(output: Output, rounds: int | None = flag("Rounds of each method.")) -> None:
    """Compare methods on 80 clients that hold their pictures at different angles; ends in a table and a report."""
    from unalike.runs.recipe.settings import plan_for

    plan = plan_for(_METHODS, _SETTINGS | ({} if rounds is None else {"rounds": rounds}))
    if not output.quiet and not output.as_json:
        console = progress_console()
        console.print(
            "80 clients have about 18 handwritten digits each, held at an angle of the client's own: 0, 90, 180 or 270 "
            "degrees. That is too little to learn from alone, and one small model cannot read all angles. 60 clients "
            "train together. 20 arrive afterwards (unseen) and are served once more with their labels hidden "
            "(unlabeled): each gets a model that is made from its own pictures."
        )
    run_and_print(plan, output)


@command(
    app,
    "unalike run fedavg --data digits --partition dirichlet --rounds 10",
    "unalike run fedavg-finetune --classes 2 --clients 40 --rounds 10",
    "unalike run fedprox --rounds 10 --set mu=0.5 --set local.momentum=0.9",
    "unalike run fedavg --rounds 10 --runtime ray --workers 2",
)
def run(
    target: Annotated[str, typer.Argument(metavar="TARGET", hidden=True)],
    dealing: Dealing,
    training: Training,
    running: Running,
    output: Output,
) -> None:
    """Train TARGET and measure it on seen, unseen and unlabeled clients.

    TARGET is a method, a recipe (its name or a .toml file), or a method of your own: file.py:Class.
    """
    run_and_print(plan_from_flags([target], dealing, training, running), output)


@command(
    app,
    "unalike compare local fedavg --partition pathological --rounds 10",
    "unalike compare fedavg fedprox --alpha 0.1 --rounds 5 --seeds 2",
)
def compare(
    targets: Annotated[list[str], typer.Argument(hidden=True)],
    dealing: Dealing,
    training: Training,
    running: Running,
    output: Output,
) -> None:
    """Train several methods over the same clients: one table, one report.

    TARGETS are methods (names or file.py:Class), or one recipe that compares some.
    """
    run_and_print(plan_from_flags(targets, dealing, training, running), output)


@command(app, "unalike run fedavg --rounds 10 --out runs/mine", "unalike resume runs/mine")
def resume(
    run_folder: Run, address: str | None = address_flag(), quiet: bool = quiet_flag(), as_json: bool = json_flag()
) -> None:
    """Go on with a run or comparison that was stopped; it ends as if it had never been.

    RUN is its folder.
    """
    from unalike.commands.progress import watcher_for
    from unalike.deploy import open_session
    from unalike.runs import folder
    from unalike.runs.run import resume as go_on

    ended = all((one / folder.RESULT).exists() for one in folder.runs_in(run_folder))
    watcher = watcher_for(progress_console(), quiet or as_json)
    comparison = go_on(run_folder, watcher=watcher, address=address, start_workers=open_session)
    if ended and not (quiet or as_json):
        progress_console().print(f"{run_folder} had ended already; this is its result", markup=False)
    show(comparison, as_json)


@command(
    app,
    "unalike run fedavg --rounds 10 --out runs/first",
    "unalike report runs/first --out first.html",
    "unalike report runs/first --latex",
    "unalike report runs/first --csv --table clients --out clients.csv",
    "unalike report runs/first --figures first-figures --ending svg",
)
def report(
    run_folders: Annotated[list[Path], typer.Argument(metavar="RUN...", hidden=True)],
    out: Path | None = flag("A new file. (default: report.html in the folder RUN; of several, in the current folder)"),
    latex: bool = flag("Print a table as LaTeX, for booktabs.", default=False),
    csv: bool = flag("Print a table as CSV.", default=False),
    as_json: bool = flag("Print a table as JSON.", "--json", default=False),
    table: str = flag("Which: results, clients, rounds, transcript or settings.", default="results"),
    figures: Path | None = flag("A new folder for all charts, each a file of its own."),
    ending: str = flag("Of these files: pdf, svg, png or html.", default="pdf"),
) -> None:
    """Write the report of a finished run, or of several side by side.

    RUN is the folder of a finished run or comparison. Its own report.html is
    written anew; no other file is overwritten. With an ε it lies in simulation/,
    because no noise protects the scores that it shows.

    With --latex, --csv or --json a table is printed (or goes to --out), and no page
    is written; runs that differ in their seed alone are one row, mean ± deviation.
    With --figures all charts are written as files, for papers and slides.
    """
    from unalike.report.page.page import write_report
    from unalike.runs import folder

    folders = [inner for path in run_folders for inner in folder.runs_in(path)]
    forms = [name for name, asked in (("latex", latex), ("csv", csv), ("json", as_json)) if asked]
    if forms or figures is not None:
        _export(folders, forms, table, out, figures, ending)
        return
    own = folder.report_of(run_folders[0], folders) if len(run_folders) == 1 else None
    target = out or own or Path(folder.REPORT)
    if target != own:
        check_free(out=target)
    with explain_disk_errors(target.parent):
        write_report(folders, target)
    print_files(report=target)


def _export(
    folders: list[Path], forms: list[str], name: str, out: Path | None, figures: Path | None, ending: str
) -> None:
    """A report's table, printed or written, or its charts as files."""
    from unalike.report import export
    from unalike.report.figures.file import check_ending
    from unalike.report.page.read import read_runs

    if len(forms) > 1:
        raise UserError(f"--{forms[0]} and --{forms[1]}: a table has one form; choose one")
    runs = read_runs(folders)
    if figures is not None:
        check_ending(Path(f"figure.{ending}"))
        check_free(figures=figures)
        with explain_disk_errors(figures):
            written = export.figures(runs, figures, ending)
        say(f"{len(written)} figures in {figures}")
    for form in forms:
        text = export.table(runs, name, form)
        if out is None:
            typer.echo(text, nl=False)
            continue
        check_free(out=out)
        write(out, text)
        print_files(table=out)


def run_and_print(plan: Plan, output: Output) -> None:
    """What ``run``, ``compare`` and ``demo`` have in common."""
    from unalike.commands.progress import watcher_for
    from unalike.deploy import open_session
    from unalike.runs import folder
    from unalike.runs.run import run_plan

    path = output.out or folder.fresh_name(Path("runs") / _run_name(plan))
    watcher = watcher_for(progress_console(), output.quiet or output.as_json)
    if output.track is not None:
        from unalike.runs.tracking import Tracker

        watcher = Tracker(output.track, watcher)
    for note in plan.notes:
        watcher.note(f"note: {note}")
    show(run_plan(plan, path, watcher=watcher, start_workers=open_session), output.as_json)


def _run_name(plan: Plan) -> str:
    from unalike.runs.folder import plain_name

    label, recipe = plan.runs[0]
    what = label if len(plan.runs) == 1 else plan.title or "comparison"
    data = Path(recipe.data.name.partition(":")[0]).stem
    return plain_name(f"{what}-{data}")


def show(comparison: Comparison, as_json: bool) -> None:
    """Write the report, and print the results."""
    from unalike.report.page.page import report_on
    from unalike.runs.result import table

    report = report_on(comparison)
    if as_json:
        results: Sequence[Any] = [{**r.to_json(), "folder": str(r.folder)} for r in comparison.results]
        typer.echo(json.dumps(results[0] if len(results) == 1 else results, indent=2))
        return
    say(table(comparison.groups, comparison.title))
    print_files(report=report)
