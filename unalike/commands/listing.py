"""``unalike methods``, ``datasets``, ``recipes`` and ``examples``: lists of what there is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from unalike.commands.console import say
from unalike.commands.options import command, examples
from unalike.runs.errors import UserError
from unalike.runs.recipe.keys import flatten

if TYPE_CHECKING:
    from unalike.data.sources.catalog import NamedSource


app = typer.Typer()


@command(app, "unalike methods", "unalike methods fedavg")
def methods(name: Annotated[str | None, typer.Argument(hidden=True)] = None) -> None:
    """List the methods, or show one with its hyperparameters and their defaults.

    NAME is the method to show, or file.py:Class; without it all are listed.
    """
    from unalike.methods import METHODS, by_name
    from unalike.newcomers.bundle import served_by_default

    if name is None:
        rows = ((key, row.summary, row.paper) for key, row in by_name().items())
        _list(("method", "what it does", "paper"), rows)
        say("By `unalike bundle` newcomers are served so:")
        served = dict[str, list[str]]()
        for one in METHODS:
            served.setdefault(served_by_default(one), []).append(one)
        for how, names in sorted(served.items(), key=lambda one: one[0].startswith("not")):
            say(f"  {how}: {', '.join(names)}")
        say("unalike methods NAME shows a method's hyperparameters.")
        return
    import tomli_w

    from unalike.runs.recipe.hyperparameters import describe, method_named

    values = describe(name)
    if name in METHODS:
        row = METHODS[name]
        say(f"# {row.title}: {row.summary} ({row.paper})")
        say(f"# A newcomer by `unalike bundle`: {served_by_default(name)}")
    first, *shared = method_named(name).cls.__mro__[:-1]
    for cls in (first, *shared):  # with what it shares with other methods, such as Averaging
        document = ("" if cls is first else f"\n{cls.__name__}: ") + _plain(cls.__doc__ or "").strip()
        say(*(f"# {line.strip()}".rstrip() for line in document.splitlines()))
    say(tomli_w.dumps({"method": name, "hyperparameters": values}))
    for preset, changes in method_named(name).presets.items():
        changed = ", ".join(f"{key} = {value}" for key, value in flatten(changes).items()) or "these defaults"
        say(f"# --preset {preset}: {changed}")


def _plain(text: str) -> str:
    """A docstring's text as a terminal shows it."""
    return text.replace("``", "")


def _where(source: NamedSource) -> str:
    return "yes" if source.local else "to download" if source.downloadable else "to make: its error tells how"


@command(app, "unalike datasets")
def datasets() -> None:
    """List the data sets, the partitions and the models that go by a name."""
    from unalike.data import list_partitions, list_sources
    from unalike.networks import architectures

    sources = ((one.name, one.description, _where(one)) for one in list_sources())
    _list(("data set", "what it is", "here?"), sources)
    _list(("partition", "how rows are dealt out to clients"), list_partitions().items())
    _list(("model", "what it is"), architectures.names().items())
    say("Your own data: --data my.npz, my.csv (with --client-column), or a folder.")


recipes_app = typer.Typer(name="recipes", invoke_without_command=True)
app.add_typer(recipes_app)


@recipes_app.callback(epilog=examples("unalike recipes", "unalike recipes show digits-pathological"))
def recipes(context: typer.Context) -> None:
    """List the recipes that come with Unalike; `unalike run NAME` runs one."""
    if context.invoked_subcommand is not None:
        return
    from unalike.runs.recipe.recipe import plan_of, read_toml, shipped

    plans = {name: plan_of(read_toml(file), str(file)) for name, file in shipped().items()}
    about = ((name, f"{plan.title}: {', '.join(label for label, _ in plan.runs)}") for name, plan in plans.items())
    _list(("recipe", "what it is"), about)


@command(recipes_app, "unalike recipes show digits-pathological")
def show(name: Annotated[str, typer.Argument(metavar="NAME", hidden=True)]) -> None:
    """Print a recipe with its comments.

    NAME is a name of `unalike recipes`.
    """
    _print("recipes", name)


@command(app, "unalike examples", "unalike examples my_method", name="examples")
def programs(name: Annotated[str | None, typer.Argument(hidden=True)] = None) -> None:
    """List example programs and notebooks, or print one, to be saved: unalike examples my_method > my_method.py

    NAME is the example to print; without it all are listed.
    """
    if name is not None:
        _print("examples", name)
        return
    from unalike.runs.recipe.recipe import shipped

    _list(("example", "what it shows"), ((name, _title(file)) for name, file in shipped("examples").items()))


def _title(file: Path) -> str:
    """The first line of a program's docstring, or of a notebook's first cell."""
    import ast

    if file.suffix == ".ipynb":
        first: str = json.loads(file.read_bytes())["cells"][0]["source"][0]
        return f"a notebook: {first.removeprefix('# ').strip()}"
    return (ast.get_docstring(ast.parse(file.read_bytes())) or "").partition("\n")[0]


def _print(what: Literal["recipes", "examples"], name: str) -> None:
    from unalike.core.notes import did_you_mean
    from unalike.runs.recipe.recipe import shipped

    known = shipped(what)
    if name not in known:
        raise UserError(f"no {what.rstrip('s')} is called {name!r}{did_you_mean(name, list(known))}")
    typer.echo(known[name].read_text(encoding="utf-8"), nl=False)


def _list(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*columns)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*map(_plain, row))
    say(table)
