"""The ``unalike`` command: puts the commands together and tells errors in a sentence."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import click
import typer
from rich.console import Console

from unalike import __version__
from unalike.commands import analyse, data, demo, kmeans, listing, mdm, personalize, privacy, run
from unalike.commands.estimate import command as estimate
from unalike.commands.options import examples
from unalike.core.federation import QuorumError
from unalike.data import DataError
from unalike.privacy import BudgetExceeded, SecureSumAborted
from unalike.runtime.shard.simulator import LoopInstead
from unalike.studio.errors import Interrupted, UserError

TRACEBACK = "UNALIKE_TRACEBACK"  # set it to see where an error comes from
INTERRUPTED = 130  # what a shell expects after Ctrl-C


class Commands(typer.core.TyperGroup):
    """A group whose commands end with a message, not with a traceback, when the user can put things right."""

    def invoke(self, ctx: click.Context) -> Any:
        if os.environ.get(TRACEBACK):
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except (Interrupted, KeyboardInterrupt) as error:
            _say(str(error) or "stopped at once; `unalike resume RUN` goes on from the last checkpoint")
            raise typer.Exit(INTERRUPTED) from None
        except (UserError, DataError) as error:
            _say(str(error), "error")
        except (ValueError, TypeError, OSError, QuorumError, BudgetExceeded, SecureSumAborted) as error:
            _say(f"{error}\n(set {TRACEBACK}=1 to see where this comes from)", "error")
        raise typer.Exit(1)


def _say(text: str, kind: str | None = None) -> None:
    console = Console(stderr=True, highlight=False)
    if kind is not None:
        console.print(f"[bold red]{kind}:[/bold red] ", end="")
    console.print(text, markup=False, soft_wrap=True)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"unalike {__version__}")
        raise typer.Exit()


@app.callback(epilog=examples("unalike demo", "unalike run fedavg --data digits --partition pathological --rounds 20"))
def unalike(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Personalized, private federated learning among clients that are not alike."""


COMMANDS: tuple[Callable[[typer.Typer], None], ...] = (
    demo.register,
    run.register,
    personalize.register,
    analyse.register,
    data.register,
    listing.register,
    kmeans.register,
    mdm.register,
    privacy.register,
    estimate.register,
)
for _register in COMMANDS:
    _register(app)


def main() -> None:
    """The entry point of the ``unalike`` script."""
    shown = warnings.showwarning

    def told(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, LoopInstead):
            _say(f"note: {message}")  # a sentence, without a line of source code
        else:
            shown(message, category, *where, **more)

    warnings.showwarning = told
    app(prog_name="unalike")
