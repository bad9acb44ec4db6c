"""``unalike demo``."""

from __future__ import annotations

from typing import Annotated

import typer

from unalike.commands import options
from unalike.commands.console import progress_console
from unalike.commands.options import examples
from unalike.commands.run import carry_out_and_print


def demo(
    rounds: Annotated[int | None, typer.Option(help="Rounds of each method.")] = None,
    out: options.Out = None,
    quiet: options.QuietFlag = False,
    as_json: options.Json = False,
) -> None:
    """Compare methods on 100 clients that know two digits each; ends in a table and a report."""
    from unalike.studio.runs.demo import demo_plan

    plan = demo_plan(rounds)
    if not quiet and not as_json:
        console = progress_console()
        console.print("100 clients write 2 of the 10 digits each. 70 train together; 30 arrive afterwards (unseen),")
        console.print("and are then served once more with their labels hidden (unlabeled).")
    carry_out_and_print(plan, out, quiet, as_json)


def register(app: typer.Typer) -> None:
    app.command(epilog=examples("unalike demo", "unalike demo --rounds 2 --out runs/quick"))(demo)
