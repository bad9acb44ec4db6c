"""``unalike kmeans``: cluster points that stay with their clients, privately."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from unalike.commands import options
from unalike.commands.console import (
    check_free,
    epsilon_text,
    errors_told,
    print_files,
    printed,
    spinner,
    write,
    write_figure,
)
from unalike.commands.options import columns_from, examples

if TYPE_CHECKING:
    from unalike.analytics.kmeans.budget import Privacy

_DATA, _METHOD, _PRIVACY = "Data", "Method", "Privacy"


def kmeans(
    data: Annotated[
        str, typer.Option(help="A name of `unalike datasets`, or your own file or folder.", rich_help_panel=_DATA)
    ] = "gaussian-mixture",
    server: Annotated[
        Path | None, typer.Option(help="File of public points with the same features.", rich_help_panel=_DATA)
    ] = None,
    server_points: Annotated[
        int | None,
        typer.Option(help="Or make so many random points of the clients public.", rich_help_panel=_DATA),
    ] = None,
    clients: options.ClientCount = None,
    client_column: options.ClientColumn = None,
    label_column: options.LabelColumn = None,
    standardize: Annotated[
        bool, typer.Option("--standardize", help="Scale features by the server data.", rich_help_panel=_DATA)
    ] = False,
    k: Annotated[
        str, typer.Option("--k", help="Clusters; 'auto' takes the elbow, up to --k-max.", rich_help_panel=_METHOD)
    ] = "10",
    k_max: Annotated[int, typer.Option(help="Most clusters that --k auto tries.", rich_help_panel=_METHOD)] = 20,
    steps: Annotated[int, typer.Option(help="Steps of FedDP-Lloyds.", rich_help_panel=_METHOD)] = 0,
    radius: Annotated[
        float | None,
        typer.Option(help="Points are clipped to it.  [default: that of the server data]", rich_help_panel=_METHOD),
    ] = None,
    center: Annotated[
        bool, typer.Option(help="Measure points from the server data's mean, or from zero.", rich_help_panel=_METHOD)
    ] = True,
    simplify: Annotated[
        int, typer.Option(help="Rounds of thinning out the server data (Alg. 14).", rich_help_panel=_METHOD)
    ] = 0,
    epsilon: Annotated[
        float | None, typer.Option(help="ε of everything together; without it no noise.", rich_help_panel=_PRIVACY)
    ] = None,
    delta: Annotated[float, typer.Option(help="δ.", rich_help_panel=_PRIVACY)] = 1e-6,
    unit: Annotated[str, typer.Option(help="Who is protected: point or client.", rich_help_panel=_PRIVACY)] = "point",
    client_points: Annotated[
        int | None,
        typer.Option(help="With --unit client: points a client has, a public number.", rich_help_panel=_PRIVACY),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Shares of ε for Gram matrix, weights, sums, counts.", rich_help_panel=_PRIVACY),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of data, starts and noise.")] = 0,
    baselines: Annotated[bool, typer.Option("--baselines", help="Run those of the thesis as well.")] = False,
    pareto: Annotated[bool, typer.Option("--pareto", help="Sweep ε and Lloyd steps (from --epsilon down).")] = False,
    starts: Annotated[int, typer.Option(help="Starts of the non-private optimum; 0 leaves it out.", min=0)] = 5,
    plot: Annotated[Path | None, typer.Option(help="A new file for the figure: .html, .pdf, .png or .svg.")] = None,
    centers: Annotated[Path | None, typer.Option(help="Write the centres to this new CSV file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Cluster the clients' points with FedDP-KMeans: private, federated k-means (T1 ch. 6).

    All costs are k-means costs per point, measured in simulation. ε is that of all questions together, as the ledger
    composes them.
    """
    check_free(plot=plot, centers=centers)
    from unalike import simulate
    from unalike.analytics.kmeans.algorithm import FedDPKMeans
    from unalike.analytics.kmeans.points import read_points
    from unalike.analytics.kmeans.results import Clustered, cluster, fronts
    from unalike.studio.errors import UserError

    if pareto and centers is not None:
        raise UserError(
            "--pareto makes many clusterings: leave out --centers, or run the one you want without --pareto"
        )
    if pareto and epsilon is None:
        raise UserError("--pareto sweeps ε up to --epsilon: give the largest, for example --epsilon 2")
    if pareto and k == "auto":
        raise UserError("--pareto compares clusterings of one k: give --k a number")
    with errors_told():
        method = FedDPKMeans(
            k=_number_of_clusters(k),
            privacy=_privacy(epsilon, delta, unit, split),
            steps=steps,
            radius=radius,
            center=center,
            client_points=client_points,
            simplify=simplify,
            k_max=k_max,
        )
        columns = columns_from(client_column, label_column)
        points = read_points(data, server=server, server_points=server_points, clients=clients, seed=seed, **columns)
        points = points.standardized() if standardize else points
        with spinner("reading data", silent=as_json) as progress:
            run = fronts if pareto else cluster
            done = run(method, points, simulate, seed=seed, baselines=baselines, starts=starts, progress=progress)
    if plot is not None:
        from unalike.studio.figures.kmeans import chart

        write_figure(plot, chart(done))
    if centers is not None and isinstance(done, Clustered):
        lines = [",".join(f"{value:.7g}" for value in row) for row in done.clustering.centers.tolist()]
        write(centers, "\n".join(lines) + "\n")
    if as_json:
        typer.echo(json.dumps(done.values))
    else:
        _print(done.values)
        print_files(figure=plot, centres=centers)


def _number_of_clusters(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        from unalike.studio.errors import UserError

        raise UserError(f"--k must be a whole number or 'auto', got {text!r}") from None


def _privacy(epsilon: float | None, delta: float, unit: str, split: str | None) -> Privacy | None:
    from unalike.analytics.kmeans.budget import Privacy, Split
    from unalike.studio.errors import UserError

    if unit not in ("point", "client"):
        raise UserError(f"--unit must be 'point' or 'client', got {unit!r}")
    if epsilon is None:
        return None
    shares: Split | None = None
    if split is not None:
        try:
            shares = Split(*(float(part) for part in split.split(",")))
        except (TypeError, ValueError) as error:
            raise UserError(f"--split must be four numbers above 0 such as .2,.2,.45,.15, got {split!r}") from error
    return Privacy(epsilon, delta, unit, shares)  # type: ignore[arg-type]  # checked above


def _print(result: dict[str, Any]) -> None:
    console = printed()
    console.print(
        f"{result['data']}: {result['points']:,} points of {result['clients']:,} clients, "
        f"{result['dimension']} features, {result['server_points']} server points"
    )
    if result["features"] is not None:
        console.print(f"clustered by: {', '.join(result['features'])}", soft_wrap=True, markup=False)
    table = Table("method", "ε in total", "Lloyd steps", "cost per point")
    if "fronts" in result:
        for front_of in result["fronts"].values():
            for one in front_of:
                table.add_row(one["method"], epsilon_text(one["epsilon"]), str(one["steps"]), f"{one['cost']:.4f}")
    else:
        table.add_row("FedDP-KMeans", epsilon_text(result["epsilon"]), str(result["steps"]), f"{result['cost']:.4f}")
        for row in result.get("baselines", []):
            taken = "" if row["steps"] is None else str(row["steps"])
            table.add_row(row["method"], epsilon_text(row["epsilon"]), taken, f"{row['cost']:.4f}")
    if result["optimal_cost"] is not None:
        table.add_row("Optimal", "∞", "", f"{result['optimal_cost']:.4f}")
    if result.get("k_fed_cost") is not None:
        table.add_row("k-FED", "∞", "", f"{result['k_fed_cost']:.4f}")
    console.print(table)
    if "seconds" in result:
        gap = "" if result["gap"] is None else f"{100 * result['gap']:.3f} % above the optimum; "
        console.print(f"k = {result['k']}; {gap}{result['seconds']} s")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "unalike kmeans --k 10 --epsilon 0.65 --delta 1e-6 --unit point --json",
            "unalike kmeans --data shops.csv --client-column shop --label-column returned --server-points 300 "
            "--k auto --epsilon 1",
            "unalike kmeans --data gaussian-mixture:clients=2000,points=50 --unit client --client-points 50 "
            "--epsilon 4 --pareto --baselines --plot front.html",
        )
    )(kmeans)
