"""T1 ch. 6 and App. D: private k-means. Fronts of cost and ε, server data that lacks clusters, budget splits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from reproductions.item import Found, Item, Numbers, Row, Tick, Work, claim, near
from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.baselines import INITIAL, KFed, optimal
from unalike.analytics.kmeans.budget import KMeansPrivacy
from unalike.analytics.kmeans.client import cost
from unalike.analytics.kmeans.pareto import explore, front, shares_on_front, sweep
from unalike.analytics.kmeans.points import Points, read_points
from unalike.analytics.kmeans.study import OURS, KMeansRun
from unalike.report.figures.kmeans import pareto
from unalike.runs.simulate import simulate

_DELTA = 1e-6
_K = 10
_GAUSSIANS = "gaussian-mixture"
_POINT_EPSILONS = (0.1, 0.2, 0.4, 1.0, 2.0)
_SERVER = ("ServerKMeans++", "ServerLloyds")
_BY_FIGURE = "the figure's values are not printed"


@functools.lru_cache(maxsize=1)  # all methods of a figure have the same points, and some take long to read
def _points(data: str, seed: int) -> Points:
    return read_points(data, seed=seed)


def _method(unit: str, client_points: int | None = None, share: float | None = None, epsilon: float = 1) -> FedDPKMeans:
    """With the budget split that D.8.1 recommends; a sweep fills in ε. share: of the clients, asked in a query."""
    privacy = KMeansPrivacy(epsilon, _DELTA, unit)  # type: ignore[arg-type]  # 'point' or 'client'
    return FedDPKMeans(k=_K, privacy=privacy, client_points=client_points, sample=share)


def _front(
    tick: Tick,
    data: str,
    method: str,
    unit: str,
    epsilons: list[float],
    steps: list[int],
    client_points: int | None,
    sample: int | None,
    seed: int,
) -> Numbers:
    """All runs of one method: [ε, Lloyd steps, cost per point]."""
    points = _points(data, seed)
    settings = _method(unit, client_points, None if sample is None else min(1.0, sample / len(points.clients)))
    runs: dict[str, Any] = {"methods": (method,), "epsilons": epsilons, "steps": steps, "seed": seed}
    done, total = itertools.count(1), len(epsilons) * len(steps)
    found = sweep(settings, points, simulate, **runs, progress=lambda _: tick(next(done), total))
    return {"runs": [[one.epsilon, one.steps, one.cost] for one in found]}


def _levels(tick: Tick, data: str, starts: int, seed: int) -> Numbers:
    """What is reached without privacy."""
    points = _points(data, seed)
    federation = simulate(points.clients, seed=seed, block=points.block, threads=1)
    found = FedDPKMeans(k=_K, steps=2).fit(federation, points.server).centers
    return {
        "Optimal": cost(federation, optimal(points.clients, _K, starts, seed, near=[found])),
        "k-FED": cost(federation, KFed(_K).fit(federation)),
    }


def _fronts(
    work: Work,
    data: str,
    seed: int,
    *,
    unit: str = "point",
    epsilons: Sequence[float] = _POINT_EPSILONS,
    steps: Sequence[int] = (0, 1),
    client_points: int | None = None,
    sample: int | None = None,
    methods: Sequence[str] = (OURS, *INITIAL),
) -> list[KMeansRun]:
    """The runs of all methods, part by part."""
    measured = []
    for method in methods:
        found = work.part(
            f"{data}, {method}, seed {seed}" + ("" if sample is None else f", {sample} clients a query"),
            _front,
            data=data,
            method=method,
            unit=unit,
            epsilons=list(epsilons),
            steps=list(steps),
            client_points=client_points,
            sample=sample,
            seed=seed,
        )
        measured += [KMeansRun(method, epsilon, count, reached) for epsilon, count, reached in found["runs"]]
    return measured


def _at(measured: Sequence[KMeansRun], methods: Sequence[str], epsilon: float) -> float:
    """The least cost of some methods within ε."""
    return min(one.cost for one in measured if one.method in methods and one.epsilon <= 1.001 * epsilon)


def _table(data: str, seed: int, measured: Sequence[KMeansRun]) -> list[dict[str, Any]]:
    return [
        {"data": data, "seed": seed, "method": m.method, "epsilon": m.epsilon, "steps": m.steps, "cost": m.cost}
        for m in measured
    ]


# Figures 6.1, D.6, D.7: points are protected

_SEEDS = (0, 1, 2)
_REACHES = "Gaussians: cost at ε = 0.4 over the optimum"
_PLATEAU = "Gaussians: least cost of a private baseline at ε up to 2, over the optimum"
_KFED = "Gaussians: cost of k-FED over the optimum"
_BEATS = "cost at ε = 1 and 2 over that of the best private baseline, the worse of the two"
_NEARS = "cost at ε = 2 over the optimum"
_LOW = "cost at ε = 0.1 over that of the best server start"


OTHER_CENSUS = "another census: that of 2024 without two states, where T1 has that of 2018"


def _census_rows() -> tuple[Row, ...]:
    return (
        claim(
            f"census: {_BEATS}", "outperforms the baselines", "any gain counts", high=1.0, not_comparable=OTHER_CENSUS
        ),
        claim(
            f"census: {_NEARS}",
            "recovers the optimal non-private clustering",
            f"{_BY_FIGURE}: within 5 %",
            high=1.05,
            not_comparable=OTHER_CENSUS,
        ),
        claim(f"census: {_LOW}", "except at very low budgets", "any loss counts", low=1.0, not_comparable=OTHER_CENSUS),
    )


def _census(work: Work, worker: str) -> Found:
    """One seed: the census is what it is, and reading it takes long."""
    data, seed = f"acs:clusters,by=state,worker={worker}", _SEEDS[0]
    measured = _fronts(work, data, seed)
    levels = work.part(f"{data}, not private, seed {seed}", _levels, data=data, starts=4, seed=seed)
    values = {
        f"census: {_BEATS}": [_worse_of_two(measured)],
        f"census: {_NEARS}": [_at(measured, (OURS,), 2.0) / levels["Optimal"]],
        f"census: {_LOW}": [_at(measured, (OURS,), 0.1) / _at(measured, _SERVER, 0.1)],
    }
    chart = pareto(measured, levels, f"US census, {worker}: cost against ε, points")
    return Found(values, _table(data, seed, measured), chart)


def _worse_of_two(measured: Sequence[KMeansRun]) -> float:
    """Cost over that of the best private baseline at ε = 1 and 2, the worse of the two."""
    return max(_at(measured, (OURS,), e) / _at(measured, tuple(INITIAL), e) for e in (1.0, 2.0))


def _figure_6_1(work: Work) -> Found:
    census = _census(work, "federal")
    table = census.table
    values: dict[str, list[float]] = {_REACHES: [], _PLATEAU: [], _KFED: []}
    for seed in _SEEDS:
        measured = _fronts(work, _GAUSSIANS, seed)
        levels = work.part(f"{_GAUSSIANS}, not private, seed {seed}", _levels, data=_GAUSSIANS, starts=3, seed=seed)
        best = levels["Optimal"]
        values[_REACHES].append(_at(measured, (OURS,), 0.4) / best)
        values[_PLATEAU].append(_at(measured, tuple(INITIAL), 2.0) / best)
        values[_KFED].append(levels["k-FED"] / best)
        table += _table(_GAUSSIANS, seed, measured)
    chart = pareto(measured, levels, "Gaussian mixture: cost against ε, points")
    return Found({**census.values, **values}, table, chart)


_SETTINGS_POINT = {
    "budgets": "each ε with 0 and 1 Lloyd steps, split as D.8.1 recommends; T1 varies every ε_i and the steps",
    "centring": "points are measured from the mean of the server data; T1 measures from zero",
}
_CENSUS_DATA = {"census": "ACS PUMS of 2024 without California and Texas: 49 clients, one seed; T1 has 51 of 2018"}


# Figures 6.2, D.8, D.9: clients are protected, and a query is put to a sample of them

_CLIENT_EPSILONS = (0.5, 1.0, 2.0, 4.0)
_SAMPLE = 500
_BEATS_SERVER = "cost at ε = 4 over that of the best server start"
_BASELINES_STAY = "least cost of a server start at ε up to 4, over the optimum"
_MORE_CLIENTS = "cost over the optimum at ε = 1, less that with {} clients"
_CROSSING = "ε from which it is better than a server start, over that with {} clients"


def _clients_data(clients: int) -> str:
    return f"gaussian-mixture:clients={clients},points=50"


def _by_client(work: Work, clients: int, seed: int) -> tuple[list[KMeansRun], dict[str, float]]:
    data = _clients_data(clients)
    measured = _fronts(
        work,
        data,
        seed,
        unit="client",
        epsilons=_CLIENT_EPSILONS,
        client_points=50,
        sample=_SAMPLE,
        methods=(OURS, *_SERVER),
    )
    return measured, work.part(f"{data}, not private, seed {seed}", _levels, data=data, starts=3, seed=seed)


def _crossing(measured: Sequence[KMeansRun]) -> float:
    """The least ε of the sweep at which FedDP-KMeans is better than any server start; twice the largest if none is."""
    better = [e for e in _CLIENT_EPSILONS if _at(measured, (OURS,), e) < _at(measured, _SERVER, e)]
    return min(better, default=2 * _CLIENT_EPSILONS[-1])


def _client_item(id: str, clients: int, fewer: int | None) -> Item:
    rows = [
        claim(_BEATS_SERVER, "outperforms server starts", "any gain counts", high=1.0),
        claim(_BASELINES_STAY, "cannot overcome their poor start", "3 % above the optimum is a poor start", low=1.03),
    ]
    if fewer is not None:
        rows += [
            claim(
                _MORE_CLIENTS.format(fewer),
                "better for the same budget as clients grow",
                "any gain counts",
                high=0.0,
            ),
            claim(_CROSSING.format(fewer), "that budget becomes smaller", "the next ε of the sweep", high=0.99),
        ]

    def compute(work: Work) -> Found:
        values: dict[str, list[float]] = {row.what: [] for row in rows}
        table: list[dict[str, Any]] = []
        for seed in _SEEDS:
            measured, levels = _by_client(work, clients, seed)
            best = levels["Optimal"]
            values[_BEATS_SERVER].append(_at(measured, (OURS,), 4.0) / _at(measured, _SERVER, 4.0))
            values[_BASELINES_STAY].append(_at(measured, _SERVER, 4.0) / best)
            table += _table(_clients_data(clients), seed, measured)
            if fewer is not None:
                other, others = _by_client(work, fewer, seed)
                gap = _at(measured, (OURS,), 1.0) / best - _at(other, (OURS,), 1.0) / others["Optimal"]
                values[_MORE_CLIENTS.format(fewer)].append(gap)
                values[_CROSSING.format(fewer)].append(_crossing(measured) / _crossing(other))
                table += _table(_clients_data(fewer), seed, other)
        return Found(values, table, pareto(measured, levels, f"{clients:,} clients: cost against ε, clients"))

    return Item(
        id=id,
        title=f"Private k-means, client level, {clients:,} clients: Pareto fronts",
        claim="Server starts cannot overcome their poor initialization at any budget; FedDP-KMeans outperforms them, "
        "and with more clients it does so from a smaller ε on, by amplification through sub-sampling.",
        two_cores="yes",
        rows=tuple(rows),
        compute=compute,
        seeds=_SEEDS,
        settings={
            "clients a query": f"{_SAMPLE}, a Poisson sample for each; T1 does not name it",
            "ε": "0.5, 1, 2 and 4, each with 0 and 1 Lloyd steps, budget split as D.8.1 recommends",
            "bounds": "those of a typical client with 50 points, by the server data; T1 searches them",
            "Stack Overflow": "not computed: the right panel's data are not shipped",
        },
    )


# Figures D.1 to D.4: server data that lacks clusters

_MISSING = (0, 1, 2, 5)
_FEW_EPSILONS = (0.4, 1.0, 2.0)


def _lacking(missing: int) -> str:
    return f"{_GAUSSIANS}:missing={missing}"


def _worse(missing: int) -> str:
    return f"cost at ε = 1 with {missing} missing, over that with none"


def _figure_d_1(work: Work) -> Found:
    values: dict[str, list[float]] = {_worse(missing): [] for missing in _MISSING[1:]}
    table: list[dict[str, Any]] = []
    for seed in _SEEDS:
        found = {
            missing: _fronts(work, _lacking(missing), seed, epsilons=_FEW_EPSILONS, methods=(OURS,))
            for missing in _MISSING
        }
        for missing, measured in found.items():
            table += _table(_lacking(missing), seed, measured)
            if missing:
                values[_worse(missing)].append(_at(measured, (OURS,), 1.0) / _at(found[0], (OURS,), 1.0))
    named = [
        KMeansRun(f"{missing} missing", one.epsilon, one.steps, one.cost)
        for missing, measured in found.items()
        for one in measured
    ]
    return Found(values, table, pareto(named, {}, "FedDP-KMeans with clusters missing at the server"))


_THEY_TOO = "cost of the best server start at ε = 1, over that with none missing"


def _lacking_item(number: int, missing: int) -> Item:
    def compute(work: Work) -> Found:
        values: dict[str, list[float]] = {_BEATS: [], _THEY_TOO: []}
        table: list[dict[str, Any]] = []
        for seed in _SEEDS:
            measured = _fronts(work, _lacking(missing), seed, epsilons=_FEW_EPSILONS)
            whole = _fronts(work, _lacking(0), seed, epsilons=_FEW_EPSILONS, methods=_SERVER)
            values[_BEATS].append(_worse_of_two(measured))
            values[_THEY_TOO].append(_at(measured, _SERVER, 1.0) / _at(whole, _SERVER, 1.0))
            table += _table(_lacking(missing), seed, measured)
        return Found(values, table, pareto(measured, {}, f"{missing} of 10 clusters missing at the server"))

    return Item(
        id=f"t1-figure-d.{number}",
        title=f"Server data that lacks {missing} of 10 clusters: all methods",
        claim="Methods that start from server data suffer from missing clusters, too, and FedDP-KMeans is still the "
        "best.",
        two_cores="yes",
        rows=(
            claim(_BEATS, "still the best performing method", "any gain counts", high=1.0),
            claim(
                _THEY_TOO,
                "deteriorates, too",
                "any loss counts",
                low=1.0,
                explanation="the change is smaller than what two seeds differ by",
            ),
        ),
        compute=compute,
        seeds=_SEEDS,
        settings=_SETTINGS_POINT,
    )


# Tables D.1 to D.5, Figure D.5


def _radius(tick: Tick, data: str, seed: int) -> Numbers:
    return {"radius": float(torch.linalg.vector_norm(read_points(data, seed=seed).server, dim=1).max())}


def _table_d_1(work: Work) -> Found:
    table = []
    for seed in (0, 1, 2):
        radius = work.part(f"{_GAUSSIANS}, seed {seed}", _radius, data=_GAUSSIANS, seed=seed)["radius"]
        table.append({"data": _GAUSSIANS, "seed": seed, "radius": radius})
    return Found({f"radius of {_GAUSSIANS}": [row["radius"] for row in table]}, table)


_SHARES = {
    "point": {"gram": 0.18, "weights": 0.23, "sums": 0.43, "counts": 0.17},
    "client": {"gram": 0.38, "weights": 0.09, "sums": 0.42, "counts": 0.10},
}
_STEPS = {"point": (0.61, 0.39, 0.0), "client": (0.86, 0.11, 0.04)}
_EXPLORED = {"point": ("gaussian-mixture:points=200", 1.0), "client": ("gaussian-mixture:clients=1000,points=50", 4.0)}


def _explored(tick: Tick, unit: str, settings: int, seeds: int) -> Numbers:
    """The front of random budgets and Lloyd steps."""
    data, epsilon = _EXPLORED[unit]
    points = read_points(data, seed=0)
    method = _method(unit, 50 if unit == "client" else None, epsilon=epsilon)
    tried = itertools.count(1)  # more than there are settings, as some cost too much
    found = explore(
        method, points, simulate, settings=settings, seeds=seeds, progress=lambda _: tick(next(tried), 2 * settings)
    )
    best = front(found, OURS)
    return {
        **shares_on_front(best),
        "all": [[m.epsilon, m.steps, m.cost, *(m.split or ())] for m in found],
        "front": [[m.epsilon, m.steps, m.cost, *(m.split or ())] for m in best],
    }


def _share_name(name: str) -> str:
    return f"share of ε for the {name} on the front"


def _steps_name(count: int) -> str:
    return f"share of the front that took {count} Lloyd steps"


def _explored_table(unit: str, work: Work) -> tuple[Numbers, list[dict[str, Any]]]:
    settings, seeds = work.choose("random settings", 400, 90), work.choose("seeds of each", 3, 2)
    found = work.part(f"{unit}, {settings} random settings", _explored, unit=unit, settings=settings, seeds=seeds)
    columns = ("epsilon", "steps", "cost", "gram", "weights", "sums", "counts")
    on = {tuple(row) for row in found["front"]}
    return found, [{**dict(zip(columns, row, strict=True)), "on front": tuple(row) in on} for row in found["all"]]


_FEW = (
    "the runs on the front are few and their shares random: their mean has a standard error of .03 to .06; the "
    "data sets of the thesis itself differ by .06 to .14"
)


def _splits_item(id: str, unit: str, which: str) -> Item:
    def compute(work: Work) -> Found:
        found, table = _explored_table(unit, work)
        shares = found["shares"]
        values = {_share_name(name): [shares[name]] for name in _SHARES[unit]}
        rest = max(share for name, share in shares.items() if name != "sums")
        values[_LARGEST] = [shares["sums"] / rest]
        return Found(values, table, notes=[f"{found['runs']} of {len(table)} runs are on the front"])

    because = "a front of some ten runs with random shares leaves ± .05 to .1"
    return Item(
        id=id,
        title=f"Private k-means: budget splits on the front, {unit} level",
        claim="The mean shares of ε of the Pareto-optimal runs; most goes to the Gaussian mechanism of Step 3.",
        two_cores="scaled",
        rows=(
            *(near(_share_name(name), share, 0.1, because, explanation=_FEW) for name, share in _SHARES[unit].items()),
            claim(_LARGEST, "the most important step", "any lead counts", low=1.0),
        ),
        compute=compute,
        settings={"shares": "drawn at random, each above 2 %; T1 does not say which it tried", **_EXPLORING},
        lacks=(which,),
    )


_LARGEST = "share of the sums over the next largest"
_EXPLORING = {"T": "0, 1 or 2 at random; a Lloyd step gets what Step 3 gets"}


def _steps_item(id: str, unit: str, which: str) -> Item:
    def compute(work: Work) -> Found:
        found, table = _explored_table(unit, work)
        return Found({_steps_name(count): [found["lloyd_steps"][str(count)]] for count in range(3)}, table)

    return Item(
        id=id,
        title=f"Private k-means: Lloyd steps on the front, {unit} level",
        claim="Most Pareto-optimal runs take no Lloyd step at all, and few take two.",
        two_cores="scaled",
        rows=tuple(
            claim(
                _steps_name(count), f"{share:g}", "a tenth, as for the shares of ε", low=share - 0.1, high=share + 0.1
            )
            for count, share in enumerate(_STEPS[unit])
        ),
        compute=compute,
        settings=_EXPLORING,
        lacks=(which,),
    )


_ELBOW = "k at the elbow"


def _elbow(tick: Tick, seed: int) -> Numbers:
    points = read_points(_GAUSSIANS, seed=seed)
    federation = simulate(points.clients, seed=seed, block=points.block, threads=1)
    found = FedDPKMeans(k=None, k_max=20, privacy=KMeansPrivacy(1.0, _DELTA)).fit(federation, points.server)
    return {"k": found.k, "curve": list(found.curve)}


def _figure_d_5(work: Work) -> Found:
    found = [work.part(f"seed {seed}", _elbow, seed=seed) for seed in (0, 1, 2)]
    table = [
        {"seed": seed, "k": k, "cost": value}
        for seed, one in enumerate(found)
        for k, value in enumerate(one["curve"], start=1)
    ]
    return Found({_ELBOW: [one["k"] for one in found]}, table)


_POINT_SCALE = "100 clients of 200 points, not 1,000, ε up to 1, and one seed of the data"
_CLIENT_SCALE = "all clients asked, ε up to 4, and one seed of the data"
ITEMS = (
    Item(
        id="t1-figure-6.1",
        title="Private k-means, point level: Pareto fronts",
        claim="On Gaussians FedDP-KMeans is optimal from about ε = 0.4 on, and the private baselines plateau above; on "
        "the census it outperforms them except at very low budgets, and recovers the optimum at a high one.",
        two_cores="yes",
        rows=(
            claim(_REACHES, "optimal at around ε = 0.4", f"{_BY_FIGURE}: within 1 %", high=1.01),
            claim(_PLATEAU, "plateaus by a wide margin", "a margin of 3 % or more", low=1.03),
            claim(_KFED, "k-FED performs optimally", f"{_BY_FIGURE}: within 1 %", high=1.01),
            *_census_rows(),
        ),
        compute=_figure_6_1,
        seeds=_SEEDS,
        settings=_SETTINGS_POINT | _CENSUS_DATA,
    ),
    *(
        Item(
            id=id,
            title=f"Private k-means, point level, census ({worker}): Pareto fronts",
            claim="FedDP-KMeans outperforms the baselines except at very low budgets, and recovers the optimum at a "
            "high one.",
            two_cores="yes",
            rows=_census_rows(),
            compute=functools.partial(_census, worker=worker),
            settings=_SETTINGS_POINT | _CENSUS_DATA,
        )
        for id, worker in (("t1-figure-d.6", "nonprofit"), ("t1-figure-d.7", "self-employed"))
    ),
    _client_item("t1-figure-d.8", 1000, None),
    _client_item("t1-figure-6.2", 2000, 1000),
    _client_item("t1-figure-d.9", 5000, 2000),
    Item(
        id="t1-figure-d.1",
        title="Server data that lacks clusters: FedDP-KMeans",
        claim="With 1, 2 and 5 of 10 clusters missing at the server, performance deteriorates modestly.",
        two_cores="yes",
        rows=tuple(
            claim(
                _worse(missing),
                "deteriorates modestly",
                f"{_BY_FIGURE}: any loss, up to {100 * most:g} %",
                low=1.0,
                high=1 + most,
            )
            for missing, most in ((1, 0.05), (2, 0.05), (5, 0.1))
        ),
        compute=_figure_d_1,
        seeds=_SEEDS,
        settings=_SETTINGS_POINT,
    ),
    *(_lacking_item(number, missing) for number, missing in ((2, 1), (3, 2), (4, 5))),
    Item(
        id="t1-table-d.1",
        title="Radius of each data set",
        claim="The radius Δ of the server data, from zero: 10.57 for the Gaussian mixture and 2.65 for the census.",
        two_cores="yes",
        rows=(near(f"radius of {_GAUSSIANS}", 10.57, 0.5, "draws of the means differ"),),
        compute=_table_d_1,
        seeds=(0, 1, 2),
        settings={"census": "left out: any seven one-hot columns have a radius of √7 = 2.65"},
    ),
    _splits_item("t1-table-d.2", "point", _POINT_SCALE),
    _splits_item("t1-table-d.3", "client", _CLIENT_SCALE),
    _steps_item("t1-table-d.4", "point", _POINT_SCALE),
    _steps_item("t1-table-d.5", "client", _CLIENT_SCALE),
    Item(
        id="t1-figure-d.5",
        title="Private k-means: the elbow",
        claim="The elbow of the cost of the weighted server points lies at k = 10, the number of components.",
        two_cores="yes",
        rows=(near(_ELBOW, 10, 1, "the strangers among the server points may count as one more group"),),
        compute=_figure_d_5,
        seeds=(0, 1, 2),
        settings={"ε": "1, as the prior steps need one; k' = 20"},
    ),
)
