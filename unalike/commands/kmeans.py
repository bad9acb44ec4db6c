"""``unalike kmeans``: cluster points that stay with their clients, privately."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from unalike.commands import options
from unalike.commands.console import (
    check_free,
    epsilon_text,
    print_files,
    say,
    spinner,
    worker_lines,
    write,
    write_figure,
)
from unalike.commands.options import command, expect, flag
from unalike.runs.errors import UserError

if TYPE_CHECKING:
    from unalike.analytics.kmeans.algorithm import FedDPKMeans
    from unalike.analytics.kmeans.budget import KMeansPrivacy
    from unalike.analytics.kmeans.pareto import ParetoResult
    from unalike.analytics.kmeans.study import KMeansResult

_data, _method, _privacy = (partial(flag, panel=one) for one in ("Data", "Method", "Privacy"))

_COLUMNS = 8  # of centres that are printed


@dataclass(frozen=True)
class Reading(options.TableFlags):
    """Which points to cluster."""

    data: str = _data("A name of `unalike datasets`, or your own file or folder.", default="gaussian-mixture")
    server: Path | None = _data("File of public points with the same features.")
    server_points: int | None = _data(
        "Or take this many random points of the clients; they count as public, and no noise protects them."
    )
    clients: int | None = options.client_count_flag()
    standardize: bool = _data("Scale features by the server data.", default=False)
    range_: list[str] | None = options.range_flag()

    def settings(self) -> dict[str, Any]:
        """What to read, as plain values."""
        own = ("data", "server_points", "clients", "standardize")
        given = {name: getattr(self, name) for name in own} | self.options()
        server = None if self.server is None else str(self.server)
        return {**given, "server": server, "ranges": options.ranges_of(self.range_ or [])}


@dataclass(frozen=True)
class Budget:
    """What the clustering may cost."""

    epsilon: float | None = _privacy("ε of everything together; without it no noise.")
    delta: float = _privacy("δ.", default=1e-6)
    unit: str = _privacy("Who is protected: point or client.", default="point")
    split: str | None = _privacy(
        "Shares of ε for Gram matrix, weights, sums, counts; with six, sums and counts of --steps."
    )
    simulate_noise: bool = options.simulate_noise_flag()

    def privacy(self) -> KMeansPrivacy | None:
        from unalike.analytics.kmeans.budget import BudgetSplit, KMeansPrivacy

        if self.unit not in ("point", "client"):
            raise UserError(f"--unit must be 'point' or 'client', got {self.unit!r}")
        if self.epsilon is None:
            return None
        shares: BudgetSplit | None = None
        if self.split is not None:
            with expect("--split", self.split, "four or six numbers above 0 such as .2,.2,.45,.15"):
                shares = BudgetSplit(*(float(part) for part in self.split.split(",")))
        return KMeansPrivacy(self.epsilon, self.delta, self.unit, shares)  # type: ignore[arg-type]  # checked above


@dataclass(frozen=True)
class Settings:
    """How to cluster."""

    k: str = _method("Clusters; 'auto' takes the elbow, up to --k-max.", "--k", default="10")
    k_max: int = _method("Most clusters that --k auto tries.", default=20)
    steps: int = _method("Steps of FedDP-Lloyds.", default=0)
    cohort: float | None = _method("Clients per query, drawn anew; below 1: their share. (default: all)")
    radius: float | None = _method("Points are clipped to it. (default: that of the server data)")
    center: bool = _method("Measure points from the server data's mean, or from zero.", default=True)
    margin: float = _method(
        "Step 3 takes points this many times as near to a centre as to others; 0.333 in Alg. 13, 15.", default=1.0
    )
    simplify: int = _method("Rounds of thinning out the server data first.", default=0)
    threshold: str = _method("Weight that is enough there: by the noise, or as printed.", default="noise")
    diameter: str | None = _method("Reduce it (Lemma 28): smallest cluster's share, largest deviation, e.g. 0.05,1.5.")
    ground: str | None = _method("Do without server data: lattice or packing in the subspace.")
    places: int = _method("Of that lattice or packing, at most.", default=2000)
    secure: bool = _method("Sum under masks: the server sees no client's own.", default=False)
    client_points: int | None = _privacy("With --unit client: points a client has, a public number.")
    clips: str | None = _privacy(
        "With --unit client: bounds on its shares, e.g. gram=900,means=20. (default: by the rest)"
    )

    def method(self, privacy: KMeansPrivacy | None, clients: int) -> FedDPKMeans:
        from unalike.analytics.kmeans.algorithm import FedDPKMeans
        from unalike.analytics.kmeans.budget import Clips
        from unalike.analytics.kmeans.diameter import Diameter

        with expect("--k", self.k, "a whole number or 'auto'"):
            k = None if self.k == "auto" else int(self.k)
        clips, diameter = Clips(), None
        if self.clips is not None:
            names = ", ".join(Clips.__dataclass_fields__)
            with expect("--clips", self.clips, f"like gram=900,means=20 with some of {names}"):
                pairs = (part.split("=") for part in self.clips.split(","))
                clips = Clips(**{name.strip(): float(value) for name, value in pairs})
        if self.diameter is not None:
            form = "two numbers, the share of the smallest cluster and the largest deviation"
            with expect("--diameter", self.diameter, form):
                smallest, deviation = (float(part) for part in self.diameter.split(","))
            diameter = Diameter(smallest, deviation)
        sample = self.cohort
        if sample is not None and not 0 < sample < 1:
            sample = min(1.0, sample / clients)
        parsed = ("k", "cohort", "diameter", "clips")
        how: dict[str, Any] = {name: value for name, value in vars(self).items() if name not in parsed}
        return FedDPKMeans(k=k, privacy=privacy, clips=clips, sample=sample, diameter=diameter, **how)


@dataclass(frozen=True)
class Comparing:
    """What to compare with, and over which budgets."""

    baselines: bool = flag("Run the methods that Scott (2026) compares with, too.", default=False)
    pareto: bool = flag("Sweep ε and Lloyd steps (from --epsilon down).", default=False)
    explore: int = flag("With --pareto: this many random splits of ε, in place of one.", default=0, min=0)
    seeds: int = flag("With --explore: runs of each split, of which the mean counts.", default=1, min=1)
    starts: int | None = flag(
        "Starts of the non-private optimum; 0 leaves it out. (default: 10; none where clients are elsewhere)", min=0
    )

    def check(self, k: str, epsilon: float | None, centers: Path | None) -> None:
        if self.pareto and centers is not None:
            raise UserError(
                "--pareto makes many clusterings: leave out --centers and --assignments, or run the one that you want "
                "without --pareto"
            )
        if self.pareto and epsilon is None:
            raise UserError("--pareto sweeps ε up to --epsilon: give the largest, for example --epsilon 2")
        if self.pareto and k == "auto":
            raise UserError("--pareto compares clusterings of one k: give --k a number")
        if self.explore and not self.pareto:
            raise UserError("--explore is for the front: add --pareto")


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
    reading: Reading,
    settings: Settings,
    budget: Budget,
    comparing: Comparing,
    where: options.Where,
    seed: int = flag("Of data, starts and noise.", default=0),
    plot: Path | None = options.plot_flag(),
    centers: Path | None = flag("Write sizes and centres, by column, to this new CSV file."),
    assignments: Path | None = flag("Write each row's cluster to this new CSV file."),
    as_json: bool = options.json_flag(),
) -> None:
    """Cluster the clients' points with FedDP-KMeans: private, federated k-means (Scott, 2026, chapter 6).

    All costs are k-means costs per point, measured in simulation. ε is that of all questions together, as the ledger
    composes them.
    """
    check_free(plot=plot, centers=centers, assignments=assignments)
    from unalike.analytics.kmeans.pareto import fronts
    from unalike.analytics.kmeans.study import KMeansResult, cluster

    comparing.check(settings.k, budget.epsilon, centers or assignments)
    where.refuse(starts=bool(comparing.starts), assignments=assignments is not None)
    found: KMeansResult | ParetoResult
    with where.place(budget.epsilon, budget.simulate_noise) as place:
        points = place.read("points", **reading.settings(), seed=seed, none=settings.ground is not None)
        method = settings.method(budget.privacy(), len(points.clients))
        how: dict[str, Any] = {"seed": seed, "baselines": comparing.baselines}
        how["starts"] = comparing.starts if comparing.starts is not None else 0 if place.away else 10
        with spinner("clustering", as_json, place) as progress:
            if comparing.pareto:
                how |= {"explored": comparing.explore, "seeds": comparing.seeds}
                found = fronts(method, points, place.federate, progress=progress, **how)
            else:
                found = cluster(method, points, place.federate, progress=progress, **how)
    if plot is not None:
        from unalike.report.figures.kmeans import chart

        write_figure(plot, chart(found))
    if isinstance(found, KMeansResult):
        if centers is not None:
            write(centers, found.table().to_csv(index=False, float_format="%.7g"))
        if assignments is not None:
            write(assignments, found.assignments().to_csv(index=False))
    if as_json:
        noise = options.noise_source(budget.epsilon, budget.simulate_noise)
        typer.echo(json.dumps({**found.values(), **noise, **place.summary()}))
        return
    _print(found)
    say(*worker_lines(place.summary()))
    if budget.simulate_noise and budget.epsilon is not None:
        say("the noise is simulated (seeded): it protects nobody")
    print_files(figure=plot, centres=centers, assignments=assignments)


def _print(found: KMeansResult | ParetoResult) -> None:
    from unalike.analytics.kmeans.study import KMeansResult

    points, values = found.points, found.values()
    say(
        f"{points.name}: {points.total:,} points of {len(points.clients):,} clients, {values['dimension']} features, "
        f"{len(points.server)} server points"
    )
    if values["features"] is not None:
        say(f"clustered by: {', '.join(values['features'])}")
    table = Table("method", "ε in total", "Lloyd steps", "cost per point")
    for row in found.compared:
        steps = "" if row.steps is None else str(row.steps)
        cost = "not measured" if isnan(row.cost) else f"{row.cost:.4f}"
        table.add_row(row.method, epsilon_text(row.epsilon), steps, cost)
    say(table)
    if isinstance(found, KMeansResult):
        _print_clustering(found)
    elif values["on_front"]:
        shares = ", ".join(f"{name} {share:.2f}" for name, share in values["on_front"]["shares"].items())
        steps = ", ".join(f"{share:.2f} took {count}" for count, share in values["on_front"]["lloyd_steps"].items())
        say(f"the {values['on_front']['runs']} runs on the front: shares of ε: {shares}; of Lloyd steps {steps}")


def _print_clustering(found: KMeansResult) -> None:
    """Sizes, how good it is, and the centres where they are few columns."""
    from unalike.analytics.kmeans.study import describe_assumptions

    points, sizes = found.points, found.clustering.sizes
    say(*([] if found.assumptions is None else describe_assumptions(found.assumptions)))
    if sizes is not None:
        noisy = " (noisy)" if found.method.privacy is not None else ""
        say(f"points in each cluster{noisy}: {', '.join(f'{size:,.0f}' for size in sizes.tolist())}")
    gap = "" if found.gap is None else f"{100 * found.gap:.3f} % above the optimum; "
    say(f"k = {found.clustering.k}; {gap}{found.seconds:.3f} s", *(f"note: {note}" for note in found.notes))
    if points.columns is not None and len(points.names) <= _COLUMNS:
        centers = Table("centre", *points.names)
        for k, center in enumerate(points.in_units(found.centers).tolist()):
            centers.add_row(str(k), *(f"{number:.4g}" for number in center))
        say(centers)
