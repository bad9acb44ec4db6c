"""``unalike methods``, ``datasets`` and ``recipes``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from unalike.commands.console import printed
from unalike.commands.options import examples

if TYPE_CHECKING:
    from unalike.data.sources.catalog import Listed


def methods(
    name: Annotated[str | None, typer.Argument(hidden=True)] = None,
) -> None:
    """List the methods, or show one with its hyperparameters and their defaults.

    NAME is the method to show, or file.py:Class; without it all are listed.
    """
    from unalike.methods import METHODS

    console = printed()
    if name is None:
        table = _table("method", "what it does", "paper")
        for key, entry in METHODS.items():
            table.add_row(key, entry.summary, entry.paper)
        console.print(table)
        console.print("unalike methods NAME shows a method's hyperparameters.", style="dim")
        return
    import tomli_w

    from unalike.studio.recipe.hyperparameters import describe, method_named

    values = describe(name)
    if name in METHODS:
        entry = METHODS[name]
        console.print(f"# {entry.title}: {entry.summary} ({entry.paper})", markup=False)
    document = (method_named(name).make.__doc__ or "").strip()
    for line in document.splitlines():
        console.print(f"# {line.strip()}".rstrip(), markup=False, soft_wrap=True)
    console.print(tomli_w.dumps({"method": name, "hyperparameters": values}), markup=False, soft_wrap=True)


def _where(source: Listed) -> str:
    return "yes" if source.local else "to download" if source.downloadable else "to make: its error tells how"


def datasets() -> None:
    """List the data sets, the partitions and the models that go by a name."""
    from unalike.data import list_partitions, list_sources
    from unalike.networks import architectures

    console = printed()
    table = _table("data set", "what it is", "here?")
    for source in list_sources():
        table.add_row(source.name, source.description, _where(source))
    console.print(table)
    table = _table("partition", "how rows are dealt out to clients")
    for name, about in list_partitions().items():
        table.add_row(name, about)
    console.print(table)
    table = _table("model", "what it is")
    for name, about in architectures.names().items():
        table.add_row(name, about)
    console.print(table)
    console.print("Your own data: --data my.npz, my.csv (with --client-column), or a folder.", style="dim")


recipes_app = typer.Typer(rich_markup_mode="rich", invoke_without_command=True)


@recipes_app.callback(epilog=examples("unalike recipes", "unalike recipes show digits-pathological"))
def recipes(context: typer.Context) -> None:
    """List the recipes that come with Unalike; `unalike run NAME` runs one."""
    if context.invoked_subcommand is not None:
        return
    from unalike.studio.recipe.recipe import plan_of, read_toml, shipped

    table = _table("recipe", "what it is", "methods")
    for name, file in shipped().items():
        plan = plan_of(read_toml(file), str(file))
        table.add_row(name, plan.title, ", ".join(label for label, _ in plan.runs))
    printed().print(table)


@recipes_app.command(epilog=examples("unalike recipes show digits-pathological"))
def show(name: Annotated[str, typer.Argument(hidden=True)]) -> None:
    """Print a recipe with its comments.

    NAME is a name of `unalike recipes`.
    """
    from unalike.core.suggest import nearest
    from unalike.studio.errors import UserError
    from unalike.studio.recipe.recipe import shipped

    known = shipped()
    if name not in known:
        raise UserError(f"no recipe is called {name!r}{nearest(name, list(known))}")
    typer.echo(known[name].read_text(encoding="utf-8"), nl=False)


def _table(*columns: str) -> Table:
    table = Table(title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0)
    return table


def register(app: typer.Typer) -> None:
    app.command(epilog=examples("unalike methods", "unalike methods fedavg"))(methods)
    app.command(epilog=examples("unalike datasets"))(datasets)
    app.add_typer(recipes_app, name="recipes")
