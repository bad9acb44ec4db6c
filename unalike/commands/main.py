"""The ``unalike`` command: puts the commands together and tells errors in a sentence."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Annotated, Any

import click
import typer

from unalike import __version__
from unalike.commands import (
    analyse,
    data,
    demo,
    estimate,
    kmeans,
    listing,
    mdm,
    personalize,
    plan,
    predict,
    privacy,
    reproduce,
    run,
    score,
)
from unalike.commands.console import progress_console
from unalike.commands.options import examples

TRACEBACK = "UNALIKE_TRACEBACK"  # set it to see where an error comes from
SIGNALLED = 128  # what a shell expects after a signal: 128 and its number


class Commands(typer.core.TyperGroup):
    """A group whose commands end with a message, not with a traceback, when the user can put things right."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise  # a flag that does not exist, or the end
        except KeyboardInterrupt:
            _say("stopped at once; `unalike resume RUN` goes on from the last checkpoint")
            raise typer.Exit(SIGNALLED + signal.SIGINT) from None
        except Exception as error:
            if os.environ.get(TRACEBACK):
                raise
            raise typer.Exit(_explain(error)) from None


def _explain(error: Exception) -> int:
    """Tell what the user can put right, and give the exit code; any other error is raised again."""
    from unalike.core.federation import QuorumError
    from unalike.core.outside import CannotLoad, line_of, told
    from unalike.data import DataError
    from unalike.privacy import BudgetExceeded, SecureSumAborted
    from unalike.studio.errors import Interrupted, UserError

    match error:
        case Interrupted():
            _say(str(error))
            return SIGNALLED + error.by
        case UserError() | DataError() | CannotLoad():
            _say(str(error), "error")
        case _ if line_of(error) and not isinstance(error, QuorumError | BudgetExceeded | SecureSumAborted):
            _say(f"{told(error)}\n(set {TRACEBACK}=1 to see the whole way there)", "error")  # the user's own code
        case ValueError() | TypeError() | OSError() | QuorumError() | BudgetExceeded() | SecureSumAborted():
            _say(f"{error}\n(set {TRACEBACK}=1 to see where this comes from)", "error")
        case _:
            raise error
    return 1


def _say(text: str, kind: str | None = None) -> None:
    console = progress_console()
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


for _part in (
    demo,
    run,
    personalize,
    predict,
    score,
    analyse,
    data,
    listing,
    kmeans,
    mdm,
    privacy,
    estimate,
    reproduce,
    plan,
):
    app.add_typer(_part.app)


def main() -> None:
    """The entry point of the ``unalike`` script."""
    shown = warnings.showwarning

    def told(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if category.__module__.startswith("unalike."):
            _say(f"note: {message}")  # our own warnings are sentences; they need no line of source code
        else:
            shown(message, category, *where, **more)

    warnings.showwarning = told
    app(prog_name="unalike")
