"""``unalike run``, ``compare``, ``resume`` and ``report``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unalike.commands.console import check_free, print_files, progress_console, say
from unalike.commands.options import Address, Dealing, Json, Output, Quiet, Running, Training, command, flag, planned

if TYPE_CHECKING:
    from unalike.studio.recipe.recipe import Plan
    from unalike.studio.runs.run import Comparison


app = typer.Typer()


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
    carry_out_and_print(planned([target], dealing, training, running), output)


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
    carry_out_and_print(planned(targets, dealing, training, running), output)


@command(app, "unalike run fedavg --rounds 10 --out runs/mine", "unalike resume runs/mine")
def resume(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", hidden=True)],
    address: Address = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Go on with a run or comparison that was stopped; it ends as if it had never been.

    RUN is its folder.
    """
    from unalike.studio.runs import folder
    from unalike.studio.runs.progress import watcher_for
    from unalike.studio.runs.run import resume_any

    ended = all((one / folder.RESULT).exists() for one in _runs_in(run_folder))
    comparison = resume_any(run_folder, watcher=watcher_for(progress_console(), quiet or as_json), address=address)
    if ended and not (quiet or as_json):
        progress_console().print(f"{run_folder} had ended already; this is its result", markup=False)
    show(comparison, as_json)


@command(app, "unalike run fedavg --rounds 10 --out runs/first", "unalike report runs/first --out first.html")
def report(
    run_folders: Annotated[list[Path], typer.Argument(metavar="RUN...", hidden=True)],
    out: Annotated[
        Path | None, flag("A new file. (default: report.html in the folder RUN; of several, in the current folder)")
    ] = None,
) -> None:
    """Write the report of a finished run, or of several side by side.

    RUN is the folder of a finished run or comparison. Its own report.html is
    written anew; no other file is overwritten. With an ε it lies in simulation/,
    because no noise protects the scores that it shows.
    """
    from unalike.studio.report.page import write_report
    from unalike.studio.runs import folder

    folders = [inner for path in run_folders for inner in _runs_in(path)]
    own = folder.report_of(run_folders[0], folders) if len(run_folders) == 1 else None
    target = out or own or Path(folder.REPORT)
    if target != own:
        check_free(out=target)
    with folder.disk_errors_told(target.parent):
        write_report(folders, target)
    print_files(report=target)


def _runs_in(path: Path) -> list[Path]:
    from unalike.studio.errors import UserError
    from unalike.studio.runs import folder

    if not path.is_dir():
        raise UserError(f"there is no run folder {path}")
    if not (path / folder.COMPARISON).exists():
        return [path]
    return folder.compared_runs(path)


def carry_out_and_print(plan: Plan, output: Output) -> None:
    """What ``run``, ``compare`` and ``demo`` have in common."""
    from unalike.studio.runs import folder
    from unalike.studio.runs.progress import watcher_for
    from unalike.studio.runs.run import carry_out

    path = output.out or folder.fresh_name(Path("runs") / _run_name(plan))
    watcher = watcher_for(progress_console(), output.quiet or output.as_json)
    for note in plan.notes:
        watcher.note(f"note: {note}")
    show(carry_out(plan, path, watcher=watcher), output.as_json)


def _run_name(plan: Plan) -> str:
    from unalike.studio.runs.folder import plain_name

    label, recipe = plan.runs[0]
    what = label if len(plan.runs) == 1 else plan.title or "comparison"
    data = Path(recipe.data.name.partition(":")[0]).stem
    return plain_name(f"{what}-{data}")


def show(comparison: Comparison, as_json: bool) -> None:
    if as_json:
        results: Sequence[Any] = [{**r.to_json(), "folder": str(r.folder)} for r in comparison.results]
        typer.echo(json.dumps(results[0] if len(results) == 1 else results, indent=2))
        return
    from unalike.studio.runs import folder
    from unalike.studio.runs.result import table

    say(table(comparison.groups, comparison.title))
    runs = [result.folder for result in comparison.results if result.folder is not None]
    print_files(report=None if comparison.folder is None else folder.report_of(comparison.folder, runs))
