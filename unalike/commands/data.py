"""``unalike data``: how unlike are the clients?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from unalike.commands import options
from unalike.commands.console import check_free, print_files, printed, write_figure
from unalike.commands.options import examples, settings_from

if TYPE_CHECKING:
    from unalike.data import Description
    from unalike.data.population import Population

_BARS = " ▁▂▃▄▅▆▇█"


def data(
    data: Annotated[str, typer.Argument(metavar="DATASET", hidden=True)],
    partition: options.Partition = None,
    alpha: options.Alpha = None,
    classes: options.Classes = None,
    clients: options.ClientCount = None,
    samples: options.Samples = None,
    unseen: options.Unseen = None,
    labeled: options.Labeled = None,
    client_column: options.ClientColumn = None,
    label_column: options.LabelColumn = None,
    seed: options.Seed = None,
    set_: options.Set = None,
    show: Annotated[int, typer.Option(help="How many clients to list.", min=0)] = 10,
    plot: Annotated[Path | None, typer.Option(help="A new file for the figure: .html, .pdf, .png or .svg.")] = None,
    written: Annotated[
        Path | None,
        typer.Option(
            "--schema",
            help="A new file for what rows look like: columns, values of text, classes. Check it, make it public, and "
            "train with --set data.schema=FILE.",
        ),
    ] = None,
) -> None:
    """Print and plot how heterogeneous the clients of a data set are.

    DATASET is a name of `unalike datasets`, a file or a folder.
    """
    settings = settings_from(locals())
    check_free(plot=plot, schema=written)
    from unalike.data import describe
    from unalike.studio.recipe.settings import plan_for
    from unalike.studio.runs.folder import disk_errors_told, save_schema
    from unalike.studio.runs.prepare import load_data

    plan = plan_for(["fedavg"], settings, set_ or [])
    population = load_data(plan.runs[0][1])
    description = describe(population)
    console = printed()
    console.print(_summary(description))
    if show:
        console.print(_clients(description, population, show))
    if plot is not None:
        from unalike.studio.figures.clients import population_chart

        write_figure(plot, population_chart(population))
    if written is not None:
        with disk_errors_told(written, "unalike data"):
            save_schema(written, population.schema)
    print_files(figure=plot, schema=written)


def _summary(description: Description) -> Table:
    table = Table(title=description.title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in description.summary.items():
        table.add_row(name, value)
    return table


def _clients(description: Description, population: Population, count: int) -> Table:
    """The first clients, each with a small plot of its labels (one bar for each class)."""
    plotted = population.classes is not None and population.classes <= 62
    histogram = population.histogram() if plotted else None
    title = "the first clients" + (f"; labels {_class_range(population)}" if plotted else "")
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(description.header):
        table.add_column(name, justify="left" if index == 0 else "right")
    if plotted:
        table.add_column("labels", no_wrap=True)
    for index, row in enumerate(description.rows(count)):
        table.add_row(*row, *([] if histogram is None else [_bars(histogram[index].tolist())]))
    return table


def _class_range(population: Population) -> str:
    names = population.class_names or [str(number) for number in range(population.classes or 0)]
    return f"{names[0]} … {names[-1]}"


def _bars(counts: list[int]) -> str:
    most = max(1, *counts) if counts else 1
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // most)] for count in counts)


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "unalike data digits --partition dirichlet --alpha 0.1 --clients 20",
            "unalike data digits --partition pathological --plot digits.html",
            "unalike data digits --schema digits.json",
        )
    )(data)
