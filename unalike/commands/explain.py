"""``unalike privacy explain``: what a run promises, in sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from unalike.commands.console import say
from unalike.commands.options import Json, command
from unalike.commands.privacy import app


@command(
    app,
    "unalike run fedavg --clients 200 --cohort 40 --rounds 10 --epsilon 4 --out runs/private",
    "unalike privacy explain runs/private",
)
def explain(run_folder: Annotated[Path, typer.Argument(metavar="RUN", hidden=True)], as_json: Json = False) -> None:
    """Say what a run protects from whom, under which assumptions, and what it does not.

    RUN is the folder of a finished run.
    """
    from unalike.runs import folder
    from unalike.runs.errors import UserError
    from unalike.runs.explanation import explain as explanation
    from unalike.runs.recipe.recipe import read_recipe

    if not run_folder.is_dir():
        raise UserError(f"there is no run folder {run_folder}")
    folder.check_format(run_folder)
    scaled = read_recipe(run_folder / folder.RECIPE).data.normalize is True
    spent = folder.read_json(run_folder / folder.RESULT)["privacy"]
    found = explanation(spent, folder.read_json(run_folder / folder.TRANSCRIPT), scaled)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for heading, sentences in found.items():
        say(heading, *(f"- {sentence}" for sentence in sentences), "")
