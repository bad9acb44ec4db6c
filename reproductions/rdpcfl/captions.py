"""What the captions of T2's Figures 4.8, D.5, D.6 and E.7 claim; their text and numbers are lost."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import altair as alt
import torch
from torch import Tensor

from reproductions.charts import LOG, curves
from reproductions.item import Found, Item, Numbers, Tick, Work, claim, near
from reproductions.rdpcfl.clusters import CLIP, CLUSTERS, DELTA, LACKS, ROUNDS, SIZE, rotated, separations
from unalike.core.model import Model
from unalike.learn.local import LocalSGD
from unalike.methods.mixture import STARTS, principal
from unalike.methods.rdpcfl import RDPCFL
from unalike.networks.architectures import build
from unalike.privacy.dpsgd import PointPrivacy
from unalike.runs.simulate import simulate

_SEEDS = (0, 1, 2)
_SMALL = 2000  # rows of a client, of 6,600


def _score(work: Work, seed: int, **settings: Any) -> Numbers:
    """MSS with four components, and whether all clients are in the right one."""
    name = ", ".join(f"{key} {value:g}" for key, value in settings.items())
    found = work.part(f"{name}, seed {seed}", separations, seed=seed, **settings)
    return {**settings, "seed": seed, "MSS": found[str(len(CLUSTERS))], "right": found["right"]}


# Figure 4.8

_LESS = "MSS of 2,000 rows over that of 6,600, b>1 = 32 (largest over ε)"
_MORE = "MSS of 2,000 rows with b>1 = 8 over that with 32 (least over ε)"
_BUDGETS = (5.0, 10.0)


def _figure_4_8(work: Work) -> Found:
    kinds = {"6,600 rows, b>1 = 32": (SIZE, 32), "2,000, 32": (_SMALL, 32), "2,000, 8": (_SMALL, 8)}
    table: list[dict[str, Any]] = []
    for seed, epsilon, (kind, (size, later)) in itertools.product(_SEEDS, _BUDGETS, kinds.items()):
        table.append({"kind": kind, **_score(work, seed, epsilon=epsilon, size=size, later=later)})
    by = {(row["kind"], row["epsilon"], row["seed"]): row["MSS"] for row in table}
    whole, small, fine = kinds

    def ratio(above: str, below: str, seed: int) -> list[float]:
        return [by[above, epsilon, seed] / by[below, epsilon, seed] for epsilon in _BUDGETS]

    values = {
        _LESS: [max(ratio(small, whole, seed)) for seed in _SEEDS],
        _MORE: [min(ratio(fine, small, seed)) for seed in _SEEDS],
    }
    rows = [{"ε": r["epsilon"], "MSS": r["MSS"], "kind": r["kind"]} for r in table if r["seed"] == 0]
    return Found(values, table, curves(rows, alt.X("ε:Q"), alt.Y("MSS:Q"), "kind"))


# Figure D.5

_FOUND = "experiments with MSS above 2: all clients in the right cluster (1: yes)"
_LOST = "experiments with MSS up to 2 in which a client is in a wrong cluster"


def _figure_d_5(work: Work) -> Found:
    table = [
        _score(work, seed, epsilon=epsilon, size=size, later=later)
        for seed, epsilon, (size, later) in itertools.product(
            _SEEDS, (1.0, 2.0, 5.0, 10.0), ((500, 32), (_SMALL, 32), (_SMALL, 256))
        )
    ]
    values = {
        _FOUND: [row["right"] for row in table if row["MSS"] > 2],
        _LOST: [float(sum(row["MSS"] <= 2 and not row["right"] for row in table))],
    }
    rows = [{"MSS": row["MSS"], "found": "yes" if row["right"] else "no"} for row in table]
    chart = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_tick(thickness=2, size=24)
        .encode(x=alt.X("MSS:Q", scale=LOG), y=alt.Y("found:N", title="all clusters right"))
        .properties(width=420, height=120)
    )
    made: alt.Chart = chart
    return Found(values, table, made)


# Figures D.6 and E.7


def _updates(first: int, rate: float, seed: int, private: PointPrivacy) -> tuple[Tensor, Tensor]:
    """[C, p] first updates with batches of ``first``, and the clients' clusters."""
    clients, true = rotated(_SMALL, seed)
    model = Model(build("mlp", (1, 28, 28), 10, hidden=(32,)))
    local = LocalSGD(epochs=1, batch=32, lr=rate, private=private)
    method = RDPCFL(model, local=local, rounds=ROUNDS, first_batch=first)
    cohort = simulate(clients, seed, noise="seeded").begin_round(1).everyone()
    return cohort.ask(method.fit_first, theta=model.init(seed))["update"], true


def _iterations(tick: Tick, first: int, seed: int) -> Numbers:
    """EM iterations of scikit-learn, on average over as many starts as the method has."""
    from sklearn.mixture import GaussianMixture

    private = PointPrivacy(CLIP, epsilon=10.0, delta=DELTA, rounds=ROUNDS)
    points = principal(_updates(first, 1.0, seed, private)[0]).numpy()
    options: dict[str, Any] = {"covariance_type": "spherical", "init_params": "k-means++"}
    made = [GaussianMixture(len(CLUSTERS), random_state=start, **options).fit(points) for start in range(STARTS)]
    return {"iterations": statistics.fmean(one.n_iter_ for one in made)}


_FIRST = (32, 256, _SMALL)
_FEWER = "EM iterations at full first batches, over those with b¹ = 32"


def _figure_d_6(work: Work) -> Found:
    table = [
        {"b¹": first, "seed": seed} | work.part(f"b¹ = {first}, seed {seed}", _iterations, first=first, seed=seed)
        for seed, first in itertools.product(_SEEDS, _FIRST)
    ]
    by = {(row["b¹"], row["seed"]): row["iterations"] for row in table}
    values = {_FEWER: [by[_SMALL, seed] / by[32, seed] for seed in _SEEDS]}
    rows = [{"b": row["b¹"], "iterations": row["iterations"], "seed": f"seed {row['seed']}"} for row in table]
    x = alt.X("b:Q", title="first batch size", scale=LOG)
    return Found(values, table, curves(rows, x, alt.Y("iterations:Q", title="EM iterations"), "seed"))


def _distances(tick: Tick, first: int, seed: int) -> Numbers:
    """Distances between the mean updates of the clusters, with hardly any noise."""
    updates, true = _updates(first, 5e-4, seed, PointPrivacy(CLIP, noise_multiplier=1e-4))
    centres = torch.stack([updates[true == cluster].mean(0) for cluster in range(len(CLUSTERS))])
    return {"distances": torch.pdist(centres.to(torch.float64)).tolist()}


_BATCHES = (20, 100, 500)
_SLOPE = "slope of log distance over −log b¹, mean over pairs of clusters"


def _figure_e_7(work: Work) -> Found:
    table, values = [], []
    for seed in _SEEDS:
        logs = []
        for first in _BATCHES:
            found = work.part(f"b¹ = {first}, seed {seed}", _distances, first=first, seed=seed)["distances"]
            table += [{"b¹": first, "seed": seed, "pair": i, "distance": one} for i, one in enumerate(found)]
            logs.append(statistics.fmean(map(math.log, found)))
        fitted = statistics.linear_regression([-math.log(first) for first in _BATCHES], logs)
        values.append(fitted.slope)
    rows = [
        {"b": row["b¹"], "distance": row["distance"], "pair": f"pair {row['pair'] + 1}"}
        for row in table
        if row["seed"] == 0
    ]
    x, y = alt.X("b:Q", title="first batch size", scale=LOG), alt.Y("distance:Q", scale=LOG)
    return Found({_SLOPE: values}, table, curves(rows, x, y, "pair"))


_ROWS = f"21 clients of {_SMALL:,} images, not 6,600"
ITEMS = (
    Item(
        id="t2-figure-4.8",
        title="R-DPCFL: MSS by ε for two sizes of clients",
        claim="A small local data set can be compensated for by smaller batches after the first round.",
        two_cores="scaled",
        rows=(
            claim(_LESS, "fewer rows, less separated", "any fall", high=1.0),
            claim(_MORE, "smaller b>1, larger MSS", "any rise", low=1.0, main=True),
        ),
        compute=_figure_4_8,
        seeds=_SEEDS,
        settings={"sizes, ε and batches": "6,600 and 2,000 rows; 5 and 10; 32 and 8. The figure's are lost"},
        lacks=(LACKS,),
    ),
    Item(
        id="t2-figure-d.5",
        title="R-DPCFL: whether clusters are found, by MSS",
        claim="An MSS above 2 always leads to correct detection of the clusters.",
        two_cores="scaled",
        rows=(
            claim(_FOUND, "always", "every experiment", low=1.0, exact=True, main=True),
            claim(_LOST, "below it they may be missed", "at least one, or MSS would tell nothing", low=1.0, exact=True),
        ),
        compute=_figure_d_5,
        seeds=_SEEDS,
        settings={"experiments": "ε of 1, 2, 5 and 10; 500 rows, and 2,000 with b>1 = 32 and 256"},
        lacks=(LACKS, _ROWS),
    ),
    Item(
        id="t2-figure-d.6",
        title="R-DPCFL: EM iterations by the first batch size",
        claim="The larger the first batch, the fewer iterations EM needs; with full batches very few.",
        two_cores="scaled",
        rows=(claim(_FEWER, "decreases as b¹ increases", "any fall", high=1.0, main=True),),
        compute=_figure_d_6,
        seeds=_SEEDS,
        settings={"ε, b>1": "10 and 32, as in Figure 4.5", "EM": "scikit-learn's, mean over ten starts by k-means++"},
        lacks=(LACKS, _ROWS),
    ),
    Item(
        id="t2-figure-e.7",
        title="R-DPCFL: distance of cluster centres by the first batch size",
        claim="The distance between centres falls k times as the first batch grows k times: a slope of .95.",
        two_cores="scaled",
        rows=(
            near(
                _SLOPE, 0.95, 0.1, "twice the distance of the printed slope from that of (C.8), which is 1", main=True
            ),
        ),
        compute=_figure_e_7,
        seeds=_SEEDS,
        settings={"rate": "5e-4, as in Figure 4.3", "noise": "z = 1e-4: centres are expectations"},
        lacks=(LACKS, _ROWS, "the left panel alone"),
    ),
)
