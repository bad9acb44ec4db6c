"""``unalike kmeans``: cluster points that stay with their clients, privately."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from unalike import simulate
from unalike.analytics.kmeans.algorithm import FedDPKMeans, cost
from unalike.analytics.kmeans.baselines import INITIAL, k_fed, optimal
from unalike.analytics.kmeans.budget import Privacy, Split
from unalike.analytics.kmeans.points import Points, read_points
from unalike.analytics.kmeans.study import EPSILONS, OURS, clustering_page, front, pareto_page, run, sweep
from unalike.commands import options
from unalike.commands.options import examples, printed, progress_console
from unalike.core.federation import Federation
from unalike.data import DataError
from unalike.studio.errors import UserError
from unalike.studio.runs.folder import disk_errors_told, write_whole

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
    plot: Annotated[Path | None, typer.Option(help="Write the figure to this new HTML file.")] = None,
    centers: Annotated[Path | None, typer.Option(help="Write the centres to this new CSV file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Cluster the clients' points with FedDP-KMeans: private, federated k-means (T1 ch. 6).

    All costs are k-means costs per point, measured in simulation. ε is that of all questions together, as the ledger
    composes them.
    """
    for file in (plot, centers):
        if file is not None and file.exists():
            raise UserError(f"{file} exists already, and nothing is overwritten: choose another file")
    if pareto and centers is not None:
        raise UserError(
            "--pareto makes many clusterings: leave out --centers, or run the one you want without --pareto"
        )
    try:
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
        columns = {"client_column": client_column, "label_column": label_column}
        given = {name: value for name, value in columns.items() if value is not None}
        points = read_points(data, server=server, server_points=server_points, clients=clients, seed=seed, **given)
        points = points.standardized() if standardize else points
        with _progress(silent=as_json) as say:
            result, page = (_sweep if pareto else _cluster)(method, points, seed, baselines, starts, say)
    except (DataError, ValueError) as error:
        raise UserError(str(error)) from error
    with disk_errors_told((plot or centers or Path()).parent):
        if plot is not None:
            write_whole(plot, page().encode())
        if centers is not None:
            lines = [",".join(f"{value:.7g}" for value in row) for row in result["centers"]]
            write_whole(centers, ("\n".join(lines) + "\n").encode())
    result.pop("centers", None)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(result)
        for what, file in (("figure", plot), ("centres", centers)):
            if file is not None:
                printed().print(f"{what}: {file}", soft_wrap=True, markup=False)


def _number_of_clusters(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise UserError(f"--k must be a whole number or 'auto', got {text!r}") from None


def _privacy(epsilon: float | None, delta: float, unit: str, split: str | None) -> Privacy | None:
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


Page = Callable[[], str]
Say = Callable[[str], None]


def _cluster(
    method: FedDPKMeans, points: Points, seed: int, baselines: bool, starts: int, say: Say
) -> tuple[dict[str, Any], Page]:
    """One clustering, and what it is to be compared with."""
    import sklearn.cluster  # noqa: F401  # a second that belongs neither to --help nor to the clustering

    say(OURS)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    federation, found = run(OURS, method, points, seed, simulate)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    ours = cost(federation, found.centers)
    result: dict[str, Any] = {
        **_about(method, points, seed),
        "k": found.k,
        "radius": round(found.radius, 4),
        "server_points_used": found.server_points,
        "cost": ours,
        "optimal_cost": None,
        "gap": None,
        "epsilon": _spent(federation, method),
        "accounting": federation.ledger.method,
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),  # what it would take on a machine that does nothing else
        "bytes": {"up": federation.traffic.total_up, "down": federation.traffic.total_down},
        "transcript": federation.transcript.rows(),
        "centers": found.centers.tolist(),
    }
    if found.curve:
        result["elbow"] = list(found.curve)
    costs = {OURS: ours}
    if starts:
        say("the optimum, pooled and without privacy")
        best = optimal(points.clients, found.k, starts, seed, near=found.centers)
        costs["Optimal"] = result["optimal_cost"] = cost(federation, best)
        result["gap"] = ours / costs["Optimal"] - 1 if costs["Optimal"] > 0 else 0.0
    if baselines:
        result["baselines"], more = _baselines(method, found.k, points, seed, say)
        costs |= more
    title = f"{points.name}: k = {found.k}, ε = {_shown(result['epsilon'])}"
    return result, lambda: clustering_page(found, points.server, costs, title)


def _baselines(
    method: FedDPKMeans, k: int, points: Points, seed: int, say: Say
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The baselines with at least one Lloyd step (with none they would not look at the clients), and k-FED."""
    rows: list[dict[str, Any]] = []
    told = replace(method, k=k, steps=max(1, method.steps))
    for name in INITIAL:
        say(name)
        federation, found = run(name, told, points, seed, simulate)
        spent = _spent(federation, method)
        rows.append({"method": name, "steps": told.steps, "cost": cost(federation, found.centers), "epsilon": spent})
    rows.append({"method": "k-FED", "steps": None, "cost": _k_fed_cost(points, k, seed, say), "epsilon": None})
    return rows, {row["method"]: row["cost"] for row in rows}


def _k_fed_cost(points: Points, k: int, seed: int, say: Say) -> float:
    say("k-FED, without privacy")
    federation = simulate(points.clients, seed=seed, block=points.block, threads=1)
    return cost(federation, k_fed(federation, k))


def _sweep(
    method: FedDPKMeans, points: Points, seed: int, baselines: bool, starts: int, say: Say
) -> tuple[dict[str, Any], Page]:
    """Pareto fronts of cost and ε."""
    if method.privacy is None:
        raise UserError("--pareto sweeps ε up to --epsilon: give the largest, for example --epsilon 2")
    if method.k is None:
        raise UserError("--pareto compares clusterings of one k: give --k a number")
    most = method.privacy.epsilon
    epsilons = sorted({e for e in EPSILONS[method.privacy.unit] if e < most} | {most})
    names = (OURS, *INITIAL) if baselines else (OURS,)
    measured = sweep(method, points, simulate, methods=names, epsilons=epsilons, seed=seed, progress=say)
    levels: dict[str, float] = {}
    federation = simulate(points.clients, seed=seed, block=points.block, threads=1)
    if starts:
        say("the optimum, pooled and without privacy")
        levels["Optimal"] = cost(federation, optimal(points.clients, method.k, starts, seed))
    if baselines:
        levels["k-FED"] = _k_fed_cost(points, method.k, seed, say)
    result = {
        **_about(method, points, seed),
        "optimal_cost": levels.get("Optimal"),
        "k_fed_cost": levels.get("k-FED"),
        "fronts": {name: [asdict(one) for one in front(measured, name)] for name in names},
        "runs": [asdict(one) for one in measured],
    }
    title = f"{points.name}: cost against ε, {method.privacy.unit}-level, δ = {method.privacy.delta:g}"
    return result, lambda: pareto_page(measured, levels, title)


def _about(method: FedDPKMeans, points: Points, seed: int) -> dict[str, Any]:
    privacy = method.privacy
    return {
        "data": points.name,
        "seed": seed,
        "k": method.k,
        "clients": len(points.clients),
        "points": points.total,
        "dimension": points.server.shape[1],
        "features": _features(points),
        "server_points": len(points.server),
        "steps": method.steps,
        "center": method.center,
        "unit": None if privacy is None else privacy.unit,
        "delta": None if privacy is None else privacy.delta,
        "budget": None if privacy is None else privacy.epsilon,
        "split": None if privacy is None else asdict(privacy.proportions),
    }


def _features(points: Points) -> list[str] | None:
    """The columns of a table that are clustered; one of text has a feature for each value. None: no table."""
    if points.columns is None:
        return None
    return [name if text is None else f"{name} ({len(text)} values)" for name, text in points.columns.items()]


def _spent(federation: Federation, method: FedDPKMeans) -> float | None:
    """ε so far, None for infinity (which JSON does not have)."""
    spent = math.inf if method.privacy is None else federation.ledger.epsilon(method.privacy.delta)
    return spent if math.isfinite(spent) else None


def _shown(epsilon: float | None) -> str:
    return "∞" if epsilon is None else f"{epsilon:.4g}"


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
                table.add_row(one["method"], _shown(one["epsilon"]), str(one["steps"]), f"{one['cost']:.4f}")
    else:
        table.add_row(OURS, _shown(result["epsilon"]), str(result["steps"]), f"{result['cost']:.4f}")
        for row in result.get("baselines", []):
            taken = "" if row["steps"] is None else str(row["steps"])
            table.add_row(row["method"], _shown(row["epsilon"]), taken, f"{row['cost']:.4f}")
    if result["optimal_cost"] is not None:
        table.add_row("Optimal", "∞", "", f"{result['optimal_cost']:.4f}")
    if result.get("k_fed_cost") is not None:
        table.add_row("k-FED", "∞", "", f"{result['k_fed_cost']:.4f}")
    console.print(table)
    if "seconds" in result:
        gap = "" if result["gap"] is None else f"{100 * result['gap']:.3f} % above the optimum; "
        console.print(f"k = {result['k']}; {gap}{result['seconds']} s")


@contextmanager
def _progress(silent: bool) -> Iterator[Say]:
    """Says what is being computed, on stderr."""
    if silent:
        yield lambda _: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=progress_console(), transient=True) as bar:
        task = bar.add_task("reading data", total=None)
        yield lambda text: bar.update(task, description=text)


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
