"""The ``unalike`` command: puts the commands together and tells errors in a sentence."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import click
import typer

from unalike.commands import (
    analyse,
    data,
    estimate,
    kmeans,
    listing,
    mdm,
    network,
    node,
    personalize,
    predict,
    privacy,
    run,
    score,
    serve,
    tune,
)
from unalike.commands.console import progress_console, with_flags
from unalike.commands.options import examples
from unalike.core.outside import CannotLoad, WrongReturn, describe_error, line_of, trust
from unalike.runs.errors import Interrupted, UserError
from unalike.runs.recipe.keys import PARTITION_OPTIONS
from unalike.version import __version__

TRACEBACK = "UNALIKE_TRACEBACK"  # set it to see where an error comes from
SIGNALLED = 128  # what a shell expects after a signal: 128 and its number


class Commands(typer.core.TyperGroup):
    """A group whose commands end with a message, not with a traceback, when the user can put things right."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if "Did you mean" in error.message:  # Typer's words; a newer Click adds its own to them
                raise click.UsageError(error.message, error.ctx) from None
            raise

    def invoke(self, ctx: click.Context) -> Any:
        with explain_errors():
            return super().invoke(ctx)


@contextmanager
def explain_errors() -> Iterator[None]:
    """End with a sentence and an exit code, not with a traceback, when the user can put things right."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise  # a flag that does not exist, or the end
    except KeyboardInterrupt:
        _print_message("stopped at once; `unalike resume RUN` goes on from the last checkpoint")
        raise typer.Exit(SIGNALLED + signal.SIGINT) from None
    except BrokenPipeError:  # `unalike ... | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that closing the output fails no more
        raise typer.Exit(SIGNALLED + signal.SIGPIPE) from None
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        raise typer.Exit(_explain(error)) from None


def _explain(error: Exception) -> int:
    """Tell what the user can put right, and give the exit code; any other error is raised again."""
    from unalike.core.federation import QuorumError
    from unalike.data import DataError
    from unalike.privacy import BudgetExceeded, SecureSumAborted
    from unalike.runtime.shard.shard import Refused
    from unalike.runtime.workers import WorkerError

    match error:
        case Interrupted():
            _print_message(str(error))
            return SIGNALLED + error.by
        case UserError() | CannotLoad():
            _print_message(with_flags(error), "error")
        case WrongReturn():
            _print_message(f"{error}\n(set {TRACEBACK}=1 to see where this comes from)", "error")
        case DataError():
            _print_message(_with_partition_flags(with_flags(error)), "error")
        case _ if line_of(error) and not isinstance(error, QuorumError | BudgetExceeded | SecureSumAborted):
            # the user's own code
            _print_message(f"{describe_error(error)}\n(set {TRACEBACK}=1 to see the whole way there)", "error")
        case OSError() | QuorumError() | BudgetExceeded() | SecureSumAborted() | WorkerError() | Refused():
            _print_message(f"{error}\n(set {TRACEBACK}=1 to see where this comes from)", "error")
        case _:
            raise error
    return 1


def _with_partition_flags(message: str) -> str:
    """What is wrong with a partition's option, with the flag that sets it."""
    what, has, known = message.partition("; it has ")
    for flag, (_, option) in PARTITION_OPTIONS.items():
        if message.startswith(f"{option} must "):
            return f"--{flag} ({option}){message.removeprefix(option)}"
        if flag != option:
            what = what.replace(f"has no option {option!r}", f"has no option {option!r} (--{flag})")
        known = known.replace(option, f"{option} (--{flag})", 1)
    return what + has + known


def _print_message(text: str, kind: str | None = None) -> None:
    console = progress_console()
    if kind is not None:
        console.print(f"[bold red]{kind}:[/bold red] ", end="")
    console.print(text, markup=False, soft_wrap=True)


app = typer.Typer(
    cls=Commands, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=True
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
    trust_code: Annotated[
        list[str] | None,
        typer.Option("--trust-code", metavar="FILE", help="A .py file of yours that a run folder may have loaded."),
    ] = None,
) -> None:
    """Personalized, private federated learning among clients that are not alike."""
    for file in trust_code or ():
        trust(file)


for _part in (
    run,
    tune,
    personalize,
    predict,
    score,
    serve,
    analyse,
    data,
    listing,
    kmeans,
    mdm,
    privacy,
    estimate,
    network,
    node,
):
    app.add_typer(_part.app)


def main() -> None:
    """The entry point of the ``unalike`` script."""
    shown = warnings.showwarning

    def show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if category.__module__.startswith("unalike."):
            _print_message(f"note: {message}")  # our own warnings are sentences; they need no line of source code
        else:
            shown(message, category, *where, **more)

    warnings.showwarning = show_warning
    app(_options_first(sys.argv[1:]), prog_name="unalike")


def _options_first(arguments: Sequence[str]) -> list[str]:
    """``--trust-code FILE`` before the command, wherever it was given."""
    rest, trusted = list[str](), list[str]()
    given = iter(arguments)
    for one in given:
        if one == "--trust-code":
            trusted += [one, next(given, "")]
        else:
            (trusted if one.startswith("--trust-code=") else rest).append(one)
    return trusted + rest
