"""``unalike data``: how unlike are the clients?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from unalike.commands.console import check_free, print_files, say, with_flags, write, write_figure
from unalike.commands.options import Dealing, command, flag, plan_from_flags, plot_flag, seed_flag, set_flag

if TYPE_CHECKING:
    from unalike.data import Description
    from unalike.data.population import Population

_BARS = " ▁▂▃▄▅▆▇█"


app = typer.Typer()


@command(
    app,
    "unalike data digits --partition dirichlet --alpha 0.1 --clients 20",
    "unalike data digits --partition pathological --plot digits.html",
    "unalike data digits --schema digits.json",
)
def data(
    data: Annotated[str, typer.Argument(metavar="DATASET", hidden=True)],
    dealing: Dealing,
    seed: int | None = seed_flag(),
    set_: list[str] | None = set_flag(),
    show: int = flag("How many clients to list.", default=10, min=0),
    plot: Path | None = plot_flag(),
    written: Path | None = flag(
        "A new file for what rows look like: columns with center and deviation, values of text, classes. Check "
        "it, put public numbers in it, and train with --set data.schema=FILE.",
        "--schema",
    ),
) -> None:
    """Print and plot how heterogeneous the clients of a data set are.

    DATASET is a name of `unalike datasets`, a file or a folder.
    """
    check_free(plot=plot, schema=written)
    from unalike.data import describe
    from unalike.data.schema_file import schema_text
    from unalike.runs.load import load_data

    population = load_data(plan_from_flags(["fedavg"], dealing, seed=seed, set_=set_).runs[0][1])
    description = describe(population)
    say(_summary(description))
    if description.column_reports:
        say(_columns(description))
    if show:
        say(_clients(description, population, show))
    if plot is not None:
        from unalike.report.figures.clients import population_chart

        write_figure(plot, population_chart(population))
    if written is not None:
        write(written, schema_text(population) + "\n")
    print_files(figure=plot, schema=written)


def _summary(description: Description) -> Table:
    table = Table("", "", title=description.title, show_header=False, title_justify="left")
    for name, value in description.summary.items():
        table.add_row(name, with_flags(value))
    return table


def _columns(description: Description) -> Table:
    """What was made of each column of the user's table."""
    table = Table("column", "read as", "holds", title="the columns", title_justify="left")
    table.add_column("missing", justify="right")
    for one in description.column_reports:
        table.add_row(one.name, one.role, one.content, f"{one.missing:,}" if one.missing else "")
    return table


def _clients(description: Description, population: Population, count: int) -> Table:
    """The first clients, each with a small plot of its labels (one bar for each class)."""
    plotted = population.classes is not None and population.classes <= 62
    names = population.class_names or range(population.classes or 0)
    title = "the first clients" + (f"; labels {names[0]} … {names[-1]}" if plotted else "")
    table = Table(description.header[0], title=title, title_justify="left")
    for name in description.header[1:]:
        table.add_column(name, justify="right")
    if plotted:
        table.add_column("labels", no_wrap=True)
    bars = map(_bars, population.histogram().tolist()) if plotted else None
    for row in description.rows(count):
        table.add_row(*row, *([] if bars is None else [next(bars)]))
    return table


def _bars(counts: list[int]) -> str:
    most = max(1, *counts)
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // most)] for count in counts)
