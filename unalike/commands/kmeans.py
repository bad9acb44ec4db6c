"""``unalike kmeans``: cluster points that stay with their clients, privately."""

from __future__ import annotations

import json
from functools import partial
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
    say,
    spinner,
    workers_told,
    write,
    write_figure,
)
from unalike.commands.options import columns_from, command, flag

if TYPE_CHECKING:
    from unalike.analytics.kmeans.budget import Clips, Privacy
    from unalike.analytics.kmeans.diameter import Diameter

_data, _method, _privacy = (partial(flag, panel=one) for one in ("Data", "Method", "Privacy"))


app = typer.Typer()


@command(
    app,
    "unalike kmeans --k 10 --epsilon 0.65 --delta 1e-6 --unit point --json",
    "unalike kmeans --data shops.csv --client-column shop --label-column returned --server-points 300 --k auto "
    "--epsilon 1",
    "unalike kmeans --data gaussian-mixture:clients=2000,points=50 --unit client --client-points 50 --epsilon 4 "
    "--pareto --baselines --plot front.html",
    "unalike kmeans --data shops.csv --client-column shop --ground packing --radius 12 --k 4 --epsilon 1 --secure",
    "unalike kmeans --data gaussian-mixture:clients=100000,points=20 --epsilon 1 --runtime ray --workers 2",
)
def kmeans(
    where: options.Where,
    data: Annotated[str, _data("A name of `unalike datasets`, or your own file or folder.")] = "gaussian-mixture",
    server: Annotated[Path | None, _data("File of public points with the same features.")] = None,
    server_points: Annotated[int | None, _data("Or make so many random points of the clients public.")] = None,
    clients: options.ClientCount = None,
    client_column: options.ClientColumn = None,
    label_column: options.LabelColumn = None,
    standardize: Annotated[bool, _data("Scale features by the server data.", "--standardize")] = False,
    k: Annotated[str, _method("Clusters; 'auto' takes the elbow, up to --k-max.", "--k")] = "10",
    k_max: Annotated[int, _method("Most clusters that --k auto tries.")] = 20,
    steps: Annotated[int, _method("Steps of FedDP-Lloyds.")] = 0,
    cohort: Annotated[
        float | None, _method("Clients per query, drawn anew; below 1: their share. (default: all)")
    ] = None,
    radius: Annotated[float | None, _method("Points are clipped to it. (default: that of the server data)")] = None,
    center: Annotated[bool, _method("Measure points from the server data's mean, or from zero.")] = True,
    simplify: Annotated[int, _method("Rounds of thinning out the server data first.")] = 0,
    diameter: Annotated[
        str | None, _method("Reduce it (Lemma 28): smallest cluster's share, largest deviation, e.g. 0.05,1.5.")
    ] = None,
    ground: Annotated[str | None, _method("Do without server data: lattice or packing in the subspace.")] = None,
    places: Annotated[int, _method("Of that lattice or packing, at most.")] = 2000,
    secure: Annotated[bool, _method("Sum under masks: the server sees no client's own.", "--secure")] = False,
    epsilon: Annotated[float | None, _privacy("ε of everything together; without it no noise.")] = None,
    delta: Annotated[float, _privacy("δ.")] = 1e-6,
    unit: Annotated[str, _privacy("Who is protected: point or client.")] = "point",
    client_points: Annotated[int | None, _privacy("With --unit client: points a client has, a public number.")] = None,
    clips: Annotated[
        str | None, _privacy("With --unit client: bounds on its shares, e.g. gram=900,means=20. (default: by the rest)")
    ] = None,
    split: Annotated[str | None, _privacy("Shares of ε for Gram matrix, weights, sums, counts.")] = None,
    simulate_noise: options.SimulateNoise = False,
    seed: Annotated[int, flag("Of data, starts and noise.")] = 0,
    baselines: Annotated[bool, flag("Run the methods that Scott (2026) compares with, too.", "--baselines")] = False,
    pareto: Annotated[bool, flag("Sweep ε and Lloyd steps (from --epsilon down).", "--pareto")] = False,
    explore: Annotated[int, flag("With --pareto: so many random splits of ε, in place of one.", min=0)] = 0,
    seeds: Annotated[int, flag("With --explore: runs of each split, of which the mean counts.", min=1)] = 1,
    starts: Annotated[
        int | None,
        flag("Starts of the non-private optimum; 0 leaves it out. (default: 5; none with --runtime ray)", min=0),
    ] = None,
    plot: options.Plot = None,
    centers: Annotated[Path | None, flag("Write the centres to this new CSV file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Cluster the clients' points with FedDP-KMeans: private, federated k-means (Scott, 2026, chapter 6).

    All costs are k-means costs per point, measured in simulation. ε is that of all questions together, as the ledger
    composes them.
    """
    check_free(plot=plot, centers=centers)
    from unalike.analytics.kmeans.algorithm import FedDPKMeans
    from unalike.analytics.kmeans.study import Clustered, Fronts, cluster, fronts
    from unalike.studio.errors import UserError

    if pareto and centers is not None:
        raise UserError(
            "--pareto makes many clusterings: leave out --centers, or run the one you want without --pareto"
        )
    if pareto and epsilon is None:
        raise UserError("--pareto sweeps ε up to --epsilon: give the largest, for example --epsilon 2")
    if pareto and k == "auto":
        raise UserError("--pareto compares clusterings of one k: give --k a number")
    if explore and not pareto:
        raise UserError("--explore is for the front: add --pareto")
    where.refuse(starts=bool(starts))
    with errors_told(), where.place(epsilon, simulate_noise) as place:
        points = place.read(
            "points",
            data=data,
            server=None if server is None else str(server),
            server_points=server_points,
            none=ground is not None,
            clients=clients,
            seed=seed,
            standardize=standardize,
            **columns_from(client_column, label_column),
        )
        method = FedDPKMeans(
            k=_number_of_clusters(k),
            privacy=_budget(epsilon, delta, unit, split),
            steps=steps,
            radius=radius,
            center=center,
            client_points=client_points,
            clips=_clips(clips),
            sample=_share(cohort, len(points.clients)),
            simplify=simplify,
            diameter=_diameter(diameter),
            ground=ground,  # type: ignore[arg-type]  # it checks this
            places=places,
            secure=secure,
            k_max=k_max,
        )
        starts = (0 if place.away else 5) if starts is None else starts
        with spinner("clustering", as_json, place) as progress:
            how: dict[str, Any] = {"seed": seed, "baselines": baselines, "starts": starts, "progress": progress}
            if pareto:
                done: Clustered | Fronts = fronts(method, points, place.federate, explored=explore, seeds=seeds, **how)
            else:
                done = cluster(method, points, place.federate, **how)
    if plot is not None:
        from unalike.studio.figures.kmeans import chart

        write_figure(plot, chart(done))
    if centers is not None and isinstance(done, Clustered):
        lines = [",".join(f"{value:.7g}" for value in row) for row in done.clustering.centers.tolist()]
        write(centers, "\n".join(lines) + "\n")
    if as_json:
        typer.echo(json.dumps({**done.values, **options.noise_told(epsilon, simulate_noise), **place.told()}))
    else:
        _print(done.values)
        say(*workers_told(place.told()))
        say(*["the noise is simulated (seeded): it protects nobody"] * (simulate_noise and epsilon is not None))
        print_files(figure=plot, centres=centers)


def _number_of_clusters(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        from unalike.studio.errors import UserError

        raise UserError(f"--k must be a whole number or 'auto', got {text!r}") from None


def _share(cohort: float | None, clients: int) -> float | None:
    if cohort is None:
        return None
    return cohort if 0 < cohort < 1 else min(1.0, cohort / clients)


def _clips(text: str | None) -> Clips:
    from unalike.analytics.kmeans.budget import Clips
    from unalike.studio.errors import UserError

    try:
        pairs = [part.split("=") for part in text.split(",")] if text is not None else []
        return Clips(**{name.strip(): float(value) for name, value in pairs})
    except (TypeError, ValueError) as error:
        names = ", ".join(Clips.__dataclass_fields__)
        raise UserError(f"--clips must be like gram=900,means=20 with some of {names}, got {text!r}") from error


def _diameter(text: str | None) -> Diameter | None:
    from unalike.analytics.kmeans.diameter import Diameter
    from unalike.studio.errors import UserError

    if text is None:
        return None
    try:
        smallest, deviation = (float(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(
            f"--diameter must be two numbers, the share of the smallest cluster and the largest deviation, got {text!r}"
        ) from error
    return Diameter(smallest, deviation)


def _budget(epsilon: float | None, delta: float, unit: str, split: str | None) -> Privacy | None:
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
    from unalike.analytics.kmeans.assumptions import told

    lines = [
        f"{result['data']}: {result['points']:,} points of {result['clients']:,} clients, "
        f"{result['dimension']} features, {result['server_points']} server points"
    ]
    if result["features"] is not None:
        lines.append(f"clustered by: {', '.join(result['features'])}")
    say(*lines)
    table = Table("method", "ε in total", "Lloyd steps", "cost per point")
    if "fronts" in result:
        rows = [one for front in result["fronts"].values() for one in front]
    else:
        rows = [{"method": "FedDP-KMeans", **result}, *result.get("baselines", [])]
    for name, cost in (("Optimal", result["optimal_cost"]), ("k-FED", result.get("k_fed_cost"))):
        rows += [] if cost is None else [{"method": name, "epsilon": None, "steps": None, "cost": cost}]
    for row in rows:
        steps = "" if row["steps"] is None else str(row["steps"])
        table.add_row(row["method"], epsilon_text(row["epsilon"]), steps, f"{row['cost']:.4f}")
    say(table)
    if result.get("on_front"):
        found = result["on_front"]
        shares = ", ".join(f"{name} {share:.2f}" for name, share in found["shares"].items())
        steps = ", ".join(f"{share:.2f} took {count}" for count, share in found["lloyd_steps"].items())
        say(f"the {found['runs']} runs on the front: shares of ε: {shares}; of Lloyd steps {steps}")
    if "assumptions" in result:
        say(*told(result["assumptions"]))
    if "seconds" in result:
        gap = "" if result["gap"] is None else f"{100 * result['gap']:.3f} % above the optimum; "
        say(f"k = {result['k']}; {gap}{result['seconds']} s")
