"""``unalike demo``."""

from __future__ import annotations

from typing import Annotated

import typer

from unalike.commands.console import progress_console
from unalike.commands.options import Output, command, flag
from unalike.commands.run import carry_out_and_print

app = typer.Typer()


@command(app, "unalike demo", "unalike demo --rounds 2 --out runs/quick")
def demo(output: Output, rounds: Annotated[int | None, flag("Rounds of each method.")] = None) -> None:
    """Compare methods on 40 clients that know two digits each; ends in a table and a report."""
    from unalike.studio.runs.demo import demo_plan

    plan = demo_plan(rounds)
    if not output.quiet and not output.as_json:
        console = progress_console()
        console.print("40 clients write 2 of the 10 digits each. 30 train together; 10 arrive afterwards (unseen),")
        console.print("and are then served once more with their labels hidden (unlabeled).")
    carry_out_and_print(plan, output)
