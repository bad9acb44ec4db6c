"""``python -m reproductions``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from unalike.commands.console import progress_console, results_console, say
from unalike.commands.main import explain_errors
from unalike.commands.options import command, flag, json_flag, quiet_flag
from unalike.runs.errors import explain_disk_errors

if TYPE_CHECKING:
    from reproductions.runner import Watch

_STYLES = {"holds": "green", "differs": "red", "not decided": "magenta", "not comparable": "yellow"}


class _Command(typer.core.TyperCommand):
    """Errors that a user can put right end in a sentence, as those of ``unalike`` do."""

    def invoke(self, ctx: click.Context) -> Any:
        with explain_errors():
            return super().invoke(ctx)


app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@command(
    app,
    "python -m reproductions --list",
    "python -m reproductions --page",
    "python -m reproductions t2-figure-2.1",
    "python -m reproductions p3-section-4-bernoulli",
)
def reproduce(
    id: Annotated[str | None, typer.Argument(hidden=True)] = None,
    list_: bool = flag("List all tables and figures with their verdicts.", "--list", default=False),
    full: bool = flag("At the paper's scale, where the default is smaller.", default=False),
    out: Path | None = flag(
        "Folder, or with --page a file. (default: runs/reproduce/ID, which goes on; docs/results.md)"
    ),
    page: bool = flag("Write a page of all items and their verdicts.", default=False),
    fresh: bool = flag("Compute again what the folder has already.", default=False),
    store: bool = flag("Keep verdict and figure in the repository, for --list and --page.", default=False),
    quiet: bool = quiet_flag(),
    as_json: bool = json_flag(),
) -> None:
    """Compute a table or figure of the documents again, and say whether it holds.

    ID is document, kind and number, such as t2-figure-2.7. The folder gets verdict.json (the paper's numbers beside
    ours), numbers.csv and figure.svg. If you stop it, the same command goes on.
    """
    from reproductions import catalog, runner
    from unalike.runs.errors import UserError

    if page:
        from reproductions.page import write_page

        file = out or Path("docs") / "results.md"
        with explain_disk_errors(file):
            write_page(catalog.items(), file)
        say(f"page: {file}")
        return
    if (id is None) != list_:
        raise UserError("give the id of one table or figure, or --list: see `python -m reproductions --help`")
    if id is None:
        _print_list(runner.listing(catalog.items()), catalog.DOCUMENTS, as_json)
        return
    item = catalog.item_named(id)
    folder = out or Path("runs") / "reproduce" / (f"{id}-full" if full else id)
    try:
        with explain_disk_errors(folder, f"python -m reproductions {id}"), _watching(quiet or as_json) as watch:
            if fresh:
                runner.forget(folder)
            verdict = runner.reproduce(item, folder, full=full, watch=watch)
    except KeyboardInterrupt:
        kept = f"stopped; what was computed is kept in {folder}, and the same command goes on"
        progress_console().print(kept, soft_wrap=True, markup=False)
        raise typer.Exit(130) from None
    if store:
        runner.store(verdict, folder)
    if as_json:
        typer.echo(json.dumps(verdict, ensure_ascii=False))
        return
    _print_verdict(verdict, folder)


class _Lines:
    """A moving line in a terminal; elsewhere a line for each part that is finished."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._line = progress.add_task("", total=None)
        self._parts = 0

    def going(self, name: str, done: int, total: int) -> None:
        self._progress.update(self._line, description=f"{self._parts} done; {name}" + f" {done}/{total}" * (total > 0))

    def finished(self, name: str, seconds: float, was_there: bool) -> None:
        self._parts += 1
        if not self._progress.console.is_terminal and not self._progress.disable:
            text = "was there already" if was_there else f"{seconds:.1f} s"
            self._progress.console.print(f"{name}: {text}", markup=False, soft_wrap=True)


@contextmanager
def _watching(silent: bool) -> Iterator[Watch]:
    console = progress_console()
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=silent) as progress:
        yield _Lines(progress)


def _print_list(entries: list[dict[str, Any]], documents: dict[str, str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(entries, ensure_ascii=False))
        return
    table = Table("id", "what it shows", "two cores", "verdict", "scale")
    table.columns[0].no_wrap = True
    for entry in entries:
        shown = [entry["id"], entry["title"], entry["two_cores"], _coloured(entry["verdict"]), entry["scale"] or "–"]
        table.add_row(*shown)
    done = sum(entry["verdict"] is not None for entry in entries)
    say(table, *(f"{short}: {document}" for short, document in documents.items()))
    say(f"{done} of {len(entries)} have a verdict; `python -m reproductions ID` computes one again.")


def _coloured(verdict: str | None) -> Text:
    return Text(verdict or "–", style=_STYLES.get(verdict or "", "dim"))


def _print_verdict(verdict: dict[str, Any], folder: Path) -> None:
    from unalike.runs.words import counted, duration

    if verdict["verdict"] is None:
        say(f"{verdict['id']}: no verdict. {verdict['title']}: {verdict['why']}")
        return
    rows = verdict["rows"]
    counts = [f"{n} {name}" for name in _STYLES if (n := sum(row["verdict"] == name for row in rows))]
    scale = "at the paper's scale" if verdict["scale"] == "paper" else f"scaled down ({verdict['scaled']})"
    say(
        f"{verdict['id']} {verdict['verdict']} ({counted(len(rows), 'row')}: {', '.join(counts)}), {scale}, "
        f"{counted(len(verdict['seeds']), 'seed')}, {duration(verdict['seconds'])}",
        f"{verdict['title']}. {verdict['claim']}",
    )
    table = Table("what", "paper", "ours", "holds if", "verdict")
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        ours = "–" if row["ours"] is None else f"{row['ours']:.4g}"
        ours += "" if row["spread"] is None else f" ± {row['spread']:.2g}"
        paper = row["paper"] if isinstance(row["paper"], str) else f"{row['paper']:g}"
        table.add_row(row["what"], paper, ours, _bounds(row["tolerance"]), _coloured(row["verdict"]))
        if "why" in row:
            reasons.setdefault((row["verdict"], row["why"]), []).append(row["what"])
    results_console().print(table)
    for (name, why), which in reasons.items():
        say(f"{which[0] if len(which) == 1 else counted(len(which), 'row')}: {name}, because {why}")
    if verdict["settings"]:
        say("Not named by the document, and chosen so:")
        say(*(f"  {name}: {value}" for name, value in verdict["settings"].items()))
    say(*(f"note: {note}" for note in verdict["notes"]))
    say(f"everything is in {folder}")


def _bounds(tolerance: dict[str, Any]) -> str:
    low, high = tolerance["low"], tolerance["high"]
    if low is None and high is None:
        return "any"
    if low is None or high is None:
        return f"≤ {high:.4g}" if low is None else f"≥ {low:.4g}"
    return f"{low:.4g} to {high:.4g}"


app.registered_commands[0].cls = _Command

if __name__ == "__main__":
    app(prog_name="python -m reproductions")
