"""``unalike demo``."""

from __future__ import annotations

from typing import Any

import typer

from unalike.commands.console import progress_console
from unalike.commands.options import Output, command, flag
from unalike.commands.run import run_and_print

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
