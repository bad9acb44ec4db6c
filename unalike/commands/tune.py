"""``unalike tune``: a search for hyperparameters on validation rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from unalike.commands.console import print_files, progress_console, say
from unalike.commands.options import Dealing, Quiet, Running, Training, command, flag, planned

app = typer.Typer()


@command(
    app,
    "unalike tune fedavg --trials 3 --rounds 2 --clients 8 --out runs/search",
    "unalike tune fedavg local --trials 2 --rounds 2 --clients 8 --search local.lr=0.01:1 --out runs/two",
)
def tune(
    targets: Annotated[list[str], typer.Argument(metavar="METHODS...", hidden=True)],
    dealing: Dealing,
    training: Training,
    running: Running,
    out: Annotated[Path, flag("A folder for the search; where it holds one already, that goes on.")],
    trials: Annotated[int, flag("How many for each method.", min=1)] = 20,
    search: Annotated[
        list[str] | None,
        flag("What to search: KEY=LOW:HIGH, as in local.lr=0.01:1. (default: all learning rates)"),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Search for hyperparameters on validation rows, with as many trials for every method.

    METHODS are methods (names or file.py:Class), or one recipe that compares some.

    Trials that lag behind end early. The search ends in a recipe, tuned.toml in its
    folder, that `unalike compare` runs; test rows choose nothing. A search before a
    private run would look at exact scores, so one with an ε is refused. Needs Optuna:
    pip install 'unalike\\[tune]'.
    """
    from unalike.commands.progress import Lines
    from unalike.runs.errors import UserError
    from unalike.runs.tune import RECIPE
    from unalike.runs.tune import tune as run_search
    from unalike.runs.watcher import Watcher

    ranges = {}
    for wanted in search or []:
        key, _, ends = wanted.partition("=")
        try:
            low, high = (float(end) for end in ends.split(":"))
            if not 0 < low < high:
                raise ValueError
        except ValueError:
            raise UserError(f"--search {wanted}: expected KEY=LOW:HIGH with two numbers above 0") from None
        ranges[key] = (low, high)
    watcher = Watcher() if quiet else Lines(progress_console())
    found = run_search(planned(targets, dealing, training, running), trials, out, ranges, watcher)
    table = Table("method", "validation", "found", "trials", "ended early")
    for one in found:
        values = ", ".join(f"{key} = {value:.3g}" for key, value in one.values.items())
        table.add_row(one.label, f"{one.score:.4g}", values, str(one.trials), str(one.pruned))
    say(table)
    print_files(recipe=out / RECIPE)
