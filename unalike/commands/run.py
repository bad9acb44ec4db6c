"""``unalike run``, ``compare``, ``resume`` and ``report``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unalike.commands import options
from unalike.commands.console import check_free, print_files, printed, progress_console
from unalike.commands.options import examples, settings_from

if TYPE_CHECKING:
    from unalike.studio.recipe.recipe import Plan
    from unalike.studio.runs.run import Comparison


def run(
    target: Annotated[str, typer.Argument(hidden=True)],
    data: options.Data = None,
    partition: options.Partition = None,
    alpha: options.Alpha = None,
    classes: options.Classes = None,
    clients: options.ClientCount = None,
    samples: options.Samples = None,
    unseen: options.Unseen = None,
    labeled: options.Labeled = None,
    client_column: options.ClientColumn = None,
    label_column: options.LabelColumn = None,
    model: options.ModelName = None,
    rounds: options.Rounds = None,
    cohort: options.CohortSize = None,
    local_epochs: options.LocalEpochs = None,
    local_steps: options.LocalSteps = None,
    batch: options.BatchSize = None,
    lr: options.Rate = None,
    seed: options.Seed = None,
    seeds: options.Seeds = None,
    set_: options.Set = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise_multiplier: options.NoiseMultiplier = None,
    clip: options.Clip = None,
    unit: options.Unit = None,
    eval_every: options.EvalEvery = None,
    checkpoint_every: options.CheckpointEvery = None,
    block: options.BlockSize = None,
    threads: options.Threads = None,
    device: options.Device = None,
    out: options.Out = None,
    quiet: options.QuietFlag = False,
    as_json: options.Json = False,
) -> None:
    """Train TARGET and measure it on seen, unseen and unlabeled clients.

    TARGET is a method, a recipe (its name or a .toml file), or a method of your own: file.py:Class.
    """
    _run_all([target], settings_from(locals()), set_, out, quiet, as_json)


def compare(
    targets: Annotated[list[str], typer.Argument(hidden=True)],
    data: options.Data = None,
    partition: options.Partition = None,
    alpha: options.Alpha = None,
    classes: options.Classes = None,
    clients: options.ClientCount = None,
    samples: options.Samples = None,
    unseen: options.Unseen = None,
    labeled: options.Labeled = None,
    client_column: options.ClientColumn = None,
    label_column: options.LabelColumn = None,
    model: options.ModelName = None,
    rounds: options.Rounds = None,
    cohort: options.CohortSize = None,
    local_epochs: options.LocalEpochs = None,
    local_steps: options.LocalSteps = None,
    batch: options.BatchSize = None,
    lr: options.Rate = None,
    seed: options.Seed = None,
    seeds: options.Seeds = None,
    set_: options.Set = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise_multiplier: options.NoiseMultiplier = None,
    clip: options.Clip = None,
    unit: options.Unit = None,
    eval_every: options.EvalEvery = None,
    checkpoint_every: options.CheckpointEvery = None,
    block: options.BlockSize = None,
    threads: options.Threads = None,
    device: options.Device = None,
    out: options.Out = None,
    quiet: options.QuietFlag = False,
    as_json: options.Json = False,
) -> None:
    """Train several methods over the same clients: one table, one report.

    TARGETS are methods (names or file.py:Class), or one recipe that compares some.
    """
    _run_all(targets, settings_from(locals()), set_, out, quiet, as_json)


def resume(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", hidden=True)],
    quiet: options.QuietFlag = False,
    as_json: options.Json = False,
) -> None:
    """Go on with a run or comparison that was stopped; it ends as if it had never been.

    RUN is its folder.
    """
    from unalike.studio.runs import folder
    from unalike.studio.runs.progress import watcher_for
    from unalike.studio.runs.run import resume_any

    ended = all((one / folder.RESULT).exists() for one in _runs_in(run_folder))
    comparison = resume_any(run_folder, watcher=watcher_for(progress_console(), quiet or as_json))
    if ended and not (quiet or as_json):
        progress_console().print(f"{run_folder} had ended already; this is its result", markup=False)
    show(comparison, as_json)


def report(
    run_folders: Annotated[list[Path], typer.Argument(metavar="RUN...", hidden=True)],
    out: Annotated[
        Path | None,
        typer.Option(help="A new file. (default: report.html in the folder RUN; of several, in the current folder)"),
    ] = None,
) -> None:
    """Write the report of a finished run, or of several side by side.

    RUN is the folder of a finished run or comparison. Its own report.html is
    written anew; no other file is overwritten.
    """
    from unalike.studio.report.page import write_report
    from unalike.studio.runs import folder

    folders = [inner for path in run_folders for inner in _runs_in(path)]
    own = run_folders[0] / folder.REPORT if len(run_folders) == 1 else None
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


def _run_all(
    targets: list[str],
    settings: dict[str, Any],
    overrides: list[str] | None,
    out: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    from unalike.studio.recipe.settings import plan_for

    carry_out_and_print(plan_for(targets, settings, overrides or []), out, quiet, as_json)


def carry_out_and_print(plan: Plan, out: Path | None, quiet: bool, as_json: bool) -> None:
    """What ``run``, ``compare`` and ``demo`` have in common."""
    from unalike.studio.runs import folder
    from unalike.studio.runs.progress import watcher_for
    from unalike.studio.runs.run import carry_out

    path = out or folder.fresh_name(Path("runs") / _run_name(plan))
    show(carry_out(plan, path, watcher=watcher_for(progress_console(), quiet or as_json)), as_json)


def _run_name(plan: Plan) -> str:
    label, recipe = plan.runs[0]
    what = label if len(plan.runs) == 1 else plan.title or "comparison"
    data = Path(recipe.data.name.partition(":")[0]).stem
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in f"{what}-{data}".lower())


def show(comparison: Comparison, as_json: bool) -> None:
    if as_json:
        results: Sequence[Any] = [{**r.to_json(), "folder": str(r.folder)} for r in comparison.results]
        typer.echo(json.dumps(results[0] if len(results) == 1 else results, indent=2))
        return
    from unalike.studio.runs import folder
    from unalike.studio.runs.result import table

    printed().print(table(comparison.groups, comparison.title))
    print_files(report=None if comparison.folder is None else comparison.folder / folder.REPORT)


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "unalike run fedavg --data digits --partition dirichlet --rounds 10",
            "unalike run fedavg-finetune --classes 2 --clients 40 --rounds 10",
            "unalike run fedprox --rounds 10 --set mu=0.5 --set local.momentum=0.9",
        )
    )(run)
    app.command(
        epilog=examples(
            "unalike compare local fedavg --partition pathological --rounds 10",
            "unalike compare fedavg fedprox --alpha 0.1 --rounds 5 --seeds 2",
        )
    )(compare)
    app.command(
        epilog=examples(
            "unalike run fedavg --rounds 10 --out runs/mine",
            "unalike resume runs/mine",
        )
    )(resume)
    app.command(
        epilog=examples(
            "unalike run fedavg --rounds 10 --out runs/first",
            "unalike report runs/first --out first.html",
        )
    )(report)
