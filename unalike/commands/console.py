"""What all commands do around their work: where they print, progress, files that must be new, errors in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from unalike.studio.figures.file import Figure


def printed() -> Console:
    """Where results are printed: as wide as the terminal, and wide enough for any table when piped."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def progress_console() -> Console:
    """Progress and notes go to stderr, so that what is printed can be piped."""
    return Console(stderr=True, highlight=False)


@contextmanager
def bar(total: int, silent: bool, what: str = "rounds") -> Iterator[Callable[[int], None]]:
    """A bar that every call moves on by one."""
    from rich.progress import Progress

    with Progress(console=progress_console(), transient=True, disable=silent) as progress:
        work = progress.add_task(what, total=total)
        yield lambda _: progress.advance(work)


@contextmanager
def spinner(first: str, silent: bool) -> Iterator[Callable[[str], None]]:
    """Says what is being computed: ``first``, then what it is called with."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=progress_console(), transient=True, disable=silent) as progress:
        work = progress.add_task(first, total=None)
        yield lambda text: progress.update(work, description=text)


@contextmanager
def errors_told() -> Iterator[None]:
    """What is wrong with data or settings is the user's to put right, so it is said without a traceback."""
    from unalike.studio.errors import UserError

    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def check_free(**files: Path | None) -> None:
    """Nothing is overwritten, and a figure is a kind of file that can be drawn. A file goes by the name of its flag."""
    if files.get("plot") is not None:
        from unalike.studio.figures.file import check_ending

        check_ending(files["plot"])
    for name, file in files.items():
        if file is not None and file.exists():
            from unalike.studio.errors import UserError

            raise UserError(f"{file} exists already, and nothing is overwritten: choose another file with --{name}")


def write(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    from unalike.core.disk import write_whole
    from unalike.studio.runs.folder import disk_errors_told

    with disk_errors_told(file.parent):
        write_whole(file, text.encode())


def write_figure(file: Path, chart: Figure) -> None:
    """Draw a chart in a file of the kind that its ending says."""
    from unalike.studio.figures.file import save
    from unalike.studio.runs.folder import disk_errors_told

    with disk_errors_told(file.parent):
        save(chart, file)


def print_files(**files: Path | None) -> None:
    """Say what was written where."""
    for what, file in files.items():
        if file is not None:
            printed().print(f"{what}: {file}", soft_wrap=True, markup=False)


def epsilon_text(epsilon: float | None) -> str:
    """ε with four digits; None: nothing is promised."""
    return "∞" if epsilon is None else f"{epsilon:.4g}"


def guarantee(privacy: Mapping[str, Any]) -> str:
    """What ``privacy`` promises to each client."""
    return f"ε = {epsilon_text(privacy['epsilon'])} at δ = {privacy['delta']:.3g} for each client"
