"""What all commands do around their work: where they print, progress, files that must be new, errors in a sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from unalike.core.disk import check_writable, write_whole
from unalike.core.notes import Note, printable
from unalike.runs.errors import UserError, explain_disk_errors
from unalike.runs.recipe.keys import flag_of

if TYPE_CHECKING:
    from unalike.deploy.session import Place
    from unalike.report.figures.file import Figure


def results_console() -> Console:
    """Where results are printed: as wide as the terminal, and wide enough for any table when piped."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=120)


def say(*parts: str | Table) -> None:
    """Print lines as they are, and tables with lines that break between words only."""
    console = results_console()
    for part in parts:
        if isinstance(part, Table):
            _fit(part, console)
        console.print(printable(part, "\n\t") if isinstance(part, str) else part, soft_wrap=isinstance(part, str))


def _fit(table: Table, console: Console) -> None:
    """Give every column room for its longest word, if there is so much, and the rest to those that need the least."""
    ranges = []
    for column in table.columns:
        cells = [Measurement.get(console, console.options, cell) for cell in (column.header, *column.cells)]
        most = max(cell.maximum for cell in cells)
        ranges.append(Measurement(most if column.no_wrap else max(cell.minimum for cell in cells), most))
    needed = 1 + sum(1 + least for least, _ in ranges)  # with the borders
    table.padding = (0, 1) if needed + 2 * len(ranges) <= console.width else (0, 0)
    room = console.width - needed - 2 * table.padding[1] * len(ranges)
    if room >= 0:
        for column, (least, most) in sorted(zip(table.columns, ranges, strict=True), key=lambda one: one[1].span):
            column.width = least + min(room, most - least)
            room -= column.width - least


def progress_console() -> Console:
    """Progress and notes go to stderr, so that what is printed can be piped."""
    return Console(stderr=True, highlight=False)


@contextmanager
def bar(total: int, silent: bool, place: Place, what: str = "rounds") -> Iterator[Callable[[int], None]]:
    """A bar that every call moves on by one, with what workers do beside it."""
    from rich.progress import Progress

    with Progress(console=progress_console(), transient=True, disable=silent) as progress:
        work = progress.add_task(what, total=total)
        place.watch(lambda workers: progress.update(work, description=f"{what} ({workers})"))
        yield lambda _: progress.advance(work)


@contextmanager
def spinner(first: str, silent: bool, place: Place) -> Iterator[Callable[[str], None]]:
    """Says what is being computed: ``first``, then what it is called with; and what workers do."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=progress_console(), transient=True, disable=silent) as progress:
        said, work = {"now": first, "workers": ""}, progress.add_task(first, total=None)

        def tell(**text: str) -> None:
            said.update(text)
            progress.update(work, description="  ".join(one for one in said.values() if one))

        place.watch(lambda workers: tell(workers=workers))
        yield lambda text: tell(now=text)


def worker_lines(result: Mapping[str, Any]) -> list[str]:
    """A line for each worker, where there were any."""
    lines = []
    for one in result.get("workers", []):
        done = ""
        if "rate" in one:
            done = f"{one['answered']:,} replies, {one['failed']:,} failed, {one['rate']:,.0f} clients/s, "
        lines.append(f"{one['name']}: {one['clients']:,} clients, {done}started again {one['restarts']}×")
    return lines


@contextmanager
def explain_data_errors() -> Iterator[None]:
    """What is wrong with data or settings is the user's to put right, so it is said without a traceback."""
    from unalike.data.source import DataError
    from unalike.privacy.checks import SettingError

    try:
        yield
    except (DataError, SettingError) as error:
        text = str(error) if type(error) is DataError else name_flags(str(error))  # the data names flags itself
        raise UserError(text) from error


def name_flags(text: str) -> str:
    """What an analysis says about its settings, with the flags of the command that runs in place of Python's names."""
    context = click.get_current_context(silent=True)
    for one in () if context is None else context.command.params:
        text = re.sub(rf"(?<![-\w]){one.name}=(?=\S)", f"{one.opts[0]} ", text)
        if "_" in str(one.name):
            text = re.sub(rf"(?<![-\w]){one.name}(?!\w)", one.opts[0], text)
    return text


def check_free(**files: Path | None) -> None:
    """Nothing is overwritten, and a figure is a kind of file that can be drawn. A file goes by the name of its flag."""
    if files.get("plot") is not None:
        from unalike.report.figures.file import check_ending

        check_ending(files["plot"])
    for name, file in files.items():
        if file is not None and file.exists():
            raise UserError(f"{file} exists already, and nothing is overwritten: choose another file with --{name}")


def check_places(*files: Path | None, again: str | None = None) -> None:
    """Make the folders of files that will be written; what keeps them from being written is said before any work."""
    for file in filter(None, files):
        with explain_disk_errors(file.parent, again=again):
            file.parent.mkdir(parents=True, exist_ok=True)
            check_writable(file)


def write(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with explain_disk_errors(file.parent):
        write_whole(file, text.encode())


def write_figure(file: Path, chart: Figure) -> None:
    """Draw a chart in a file of the kind that its ending says."""
    from unalike.report.figures.file import save

    with explain_disk_errors(file.parent):
        save(chart, file)


def with_flags(text: str | Exception) -> str:
    """What runs and data say about settings, with the flags that set them."""
    note = getattr(text, "note", text)
    return note.with_flags(flag_of) if isinstance(note, Note) else str(note)


def print_files(**files: Path | None) -> None:
    """Say what was written where."""
    say(*(f"{what}: {file}" for what, file in files.items() if file is not None))


def epsilon_text(epsilon: float | None) -> str:
    """ε with four digits; None and infinity: nothing is promised."""
    return "∞" if epsilon is None or math.isinf(epsilon) else f"{epsilon:.4g}"


def guarantee(privacy: Mapping[str, Any]) -> str:
    """What ``privacy`` promises to each client."""
    simulated = " (simulated noise, which protects nobody)" if privacy.get("noise") == "simulated" else ""
    return f"ε = {epsilon_text(privacy['epsilon'])} at δ = {privacy['delta']:.3g} for each client{simulated}"
