"""T1 Figures 3.3, 3.4 and A.5 to A.7: are clients that MDM simulates like the true ones, and IID clients not?

The thesis shows maps (t-SNE). Here a number says it: the distance of two groups of clients, the mean total variation
between partners in the best matching. 0 stands for what two halves of the true clients have by chance, 1 for the
distance of clients that are fully IID.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from reproductions.charts import dots
from reproductions.clustering import OTHER_CENSUS
from reproductions.item import Found, Item, Numbers, Row, Tick, Work, claim
from unalike.analytics.mdm.study import fit_mixture, read_histograms
from unalike.runs.simulate import simulate

_SEEDS = (0, 1, 2)
_ROUNDS = 100
_GROUPS = {"mdm": "MDM", "iid": "fully IID", "halves_of_true": "halves of the true clients"}
_ALIKE = (
    "writers have nearly equal shares of the classes, in amounts that no Dirichlet has: what MDM adds to IID clients "
    "is mostly noise"
)


def _distances(tick: Tick, source: str, components: int, seed: int) -> Numbers:
    """Distances from the true clients."""
    found = fit_mixture(
        read_histograms(source, seed=seed),
        simulate,
        components=(components,),
        compare=True,
        seed=seed,
        rounds=_ROUNDS,
        cohort=1000,
        progress=lambda done: tick(done, _ROUNDS),
    )
    assert found.distance is not None
    return dict(found.distance)


def _place(what: str, components: int) -> str:
    return f"{what}, K = {components}: where MDM clients lie between chance (0) and IID clients (1)"


def _compute(work: Work, sources: dict[str, str], components: tuple[int, ...]) -> Found:
    table: list[dict[str, Any]] = []
    values: dict[str, list[float]] = {}
    for what, source in sources.items():
        for count in components:
            for seed in _SEEDS:
                name = f"{what}, K = {count}, seed {seed}"
                found = work.part(name, _distances, source=source, components=count, seed=seed)
                chance = found["halves_of_true"]
                place = (found["mdm"] - chance) / (found["iid"] - chance)
                values.setdefault(_place(what, count), []).append(place)
                table += [
                    {"column": f"{what}, K = {count}", "method": label, "seed": seed, "distance": found[key]}
                    for key, label in _GROUPS.items()
                ]
    shown = [{**row, "accuracy": row["distance"]} for row in table]
    rows = [{key: row[key] for key in ("method", "column", "accuracy")} for row in shown]
    chart = dots(rows, list(_GROUPS.values()), title="distance from the true clients")
    return Found(values, table, chart)


def _item(id: str, title: str, sources: dict[str, str], components: tuple[int, ...], **more: Any) -> Item:
    census = "FEMNIST" not in sources
    row: Callable[..., Row] = functools.partial(
        claim,
        paper="true clients exist in several clusters, IID clients fail to show them, MDM clients do an admirable job",
        because="nearer to chance than to IID clients; a map has no number",
        high=0.5,
        main=True,
        **({"not_comparable": OTHER_CENSUS} if census else {"explanation": _ALIKE}),
    )
    return Item(
        id=id,
        title=title,
        claim="MDM clients are close to the true ones, where fully IID clients fail to show how clients differ.",
        two_cores="yes",
        rows=tuple(row(_place(what, count)) for what in sources for count in components),
        compute=functools.partial(_compute, sources=sources, components=components),
        seeds=_SEEDS,
        settings={"rounds": "100 of up to 1,000 clients", "start": "ours", "groups": "up to 1,000 clients"},
        **more,
    )


_RACE, _INCOME, _LETTERS = {"race": "acs:race"}, {"income": "acs:income-bins"}, {"FEMNIST": "femnist"}
_FEWER = ("396 writers",)
ITEMS = (
    _item("t1-figure-3.3", "FEMNIST: true, IID and MDM clients", _LETTERS, (3,), lacks=_FEWER),
    _item("t1-figure-a.5", "FEMNIST: true, IID and MDM clients of 2 and 3 components", _LETTERS, (2, 3), lacks=_FEWER),
    _item("t1-figure-3.4", "Census: true, IID and MDM clients by race and by income", {**_RACE, **_INCOME}, (7,)),
    _item("t1-figure-a.6", "Census: clients by race, 1, 3, 5 and 7 components", _RACE, (1, 3, 5, 7)),
    _item("t1-figure-a.7", "Census: clients by binned income, 1, 3, 5 and 7 components", _INCOME, (1, 3, 5, 7)),
)
