"""T1 Figure 5.1: what FLowDUP's hypernetwork sees of a client, r(X), on rotated Fashion-MNIST."""

from __future__ import annotations

from typing import Any

import altair as alt
import torch
from torch import Tensor

from reproductions.item import Found, Item, Numbers, Tick, Work, claim
from unalike import data
from unalike.core.method import train
from unalike.core.model import Model
from unalike.learn.schedules import Schedule
from unalike.methods.flowdup import FLowDUP
from unalike.networks.architectures import build
from unalike.report.analyses.measures import descriptor_map, descriptors_of
from unalike.report.figures.file import Figure
from unalike.report.figures.theme import LIGHT
from unalike.runs.simulate import simulate

_SEEDS = (0, 1, 2)
_NEIGHBOURS = "newcomers whose nearest newcomer has the same rotation, after training less before (points)"
_CLUSTERS = "agreement of four clusters of r(X) with the rotations (adjusted Rand index), after training less before"
_LEARNED = "any gain: rotations may be told apart by random weights, too, and that is nothing FLowDUP has organized"
_SHOWN = "the representations are clustered according to which rotation the data has"


def _mapped(tick: Tick, network: str, clients: int, cohort: int, rounds: int, seed: int) -> Numbers:
    """r(X) of all newcomers before and after training: how well it tells rotations apart, and where it lies."""
    settings: dict[str, Any] = {"partition": "rotation", "clients": clients, "test": 0.143, "unseen": 0.1}
    population = data.load("fashion-mnist", **settings, seed=seed)
    model = Model(build(network, (1, 28, 28), 10))
    method = FLowDUP(model, cohort=cohort, schedule=Schedule("cosine", period=rounds))
    federation = simulate(population, seed, threads=1)
    first = method.start(seed)
    state = train(method, federation, rounds, first, lambda number, _: tick(number, rounds))
    newcomers = population.train.select(population.unseen)
    turned = population.per_client["rotation"][population.unseen]
    before, after = (descriptors_of(method, one, federation, newcomers).detach() for one in (first, state))
    return {
        "neighbours": alike(after, turned),
        "neighbours before": alike(before, turned),
        "clusters": agreement(after, turned),
        "clusters before": agreement(before, turned),
        "rotation": turned.tolist(),
        "PCA": descriptor_map(after).tolist(),
        "t-SNE": descriptor_map(after, "t-sne").tolist(),
    }


def alike(r: Tensor, groups: Tensor) -> float:
    """The share (%) of rows whose nearest other row is of the same group."""
    apart = torch.cdist(r.to(torch.float64), r.to(torch.float64)).fill_diagonal_(torch.inf)
    return 100 * float((groups[apart.argmin(1)] == groups).to(torch.float64).mean())


def agreement(r: Tensor, groups: Tensor) -> float:
    """How k-means clusters agree with the groups: 1 if they are the same, 0 by chance."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score

    names, numbers = torch.unique(groups, return_inverse=True)
    found = KMeans(len(names), n_init=10, random_state=0).fit_predict(r.to(torch.float64).numpy())
    return float(adjusted_rand_score(numbers.numpy(), found))


def _figure_1(work: Work) -> Found:
    settings: dict[str, Any] = {
        "network": work.choose("network", "cnn", "lenet"),
        "clients": work.choose("clients", 600, 400),
        "cohort": work.choose("clients a round", 100, 20),
        "rounds": work.choose("rounds", 500, 25),
    }
    found = [work.part(f"FLowDUP, seed {seed}", _mapped, seed=seed, **settings) for seed in _SEEDS]
    numbers = found[0]
    table = [
        {"rotation": angle, "PCA x": a[0], "PCA y": a[1], "t-SNE x": b[0], "t-SNE y": b[1]}
        for angle, a, b in zip(numbers["rotation"], numbers["PCA"], numbers["t-SNE"], strict=True)
    ]
    values = {
        _NEIGHBOURS: [one["neighbours"] - one["neighbours before"] for one in found],
        _CLUSTERS: [one["clusters"] - one["clusters before"] for one in found],
    }
    notes = [
        f"Seed {seed}: {one['neighbours']:.1f} % of the newcomers have a nearest one of their rotation, with random "
        f"weights {one['neighbours before']:.1f}; the clusters agree to {one['clusters']:.2f}, before to "
        f"{one['clusters before']:.2f}."
        for seed, one in zip(_SEEDS, found, strict=True)
    ]
    return Found(values, table, _maps(table), notes)


def _maps(table: list[dict[str, Any]]) -> Figure:
    rows = [
        {"map": kind, "x": row[f"{kind} x"], "y": row[f"{kind} y"], "rotation": f"{row['rotation']:g}°"}
        for row in table
        for kind in ("PCA", "t-SNE")
    ]
    angles = sorted({row["rotation"] for row in rows}, key=lambda word: float(word[:-1]))
    colours = alt.Scale(domain=angles, range=[LIGHT[f"s{i % 8}"] for i in range(len(angles))])
    chart: Figure = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_point(filled=True, size=45, opacity=0.85)
        .encode(
            x=alt.X("x:Q", axis=None, scale=alt.Scale(zero=False)),
            y=alt.Y("y:Q", axis=None, scale=alt.Scale(zero=False)),
            color=alt.Color("rotation:N", scale=colours),
            column=alt.Column("map:N", title=None),
        )
        .resolve_scale(x="independent", y="independent")
        .properties(width=260, height=240)
    )
    return chart


ITEMS = (
    Item(
        id="t1-figure-5.1",
        title="Map of FLowDUP's client representations, rotated Fashion-MNIST",
        claim="FLowDUP organizes its representations of clients by rotation, which nothing told it.",
        two_cores="hours",
        rows=(
            claim(_NEIGHBOURS, _SHOWN, _LEARNED, low=1e-9),
            claim(_CLUSTERS, _SHOWN, _LEARNED, low=1e-9),
        ),
        compute=_figure_1,
        seeds=_SEEDS,
        settings={
            "rates, λ, width of h2": "the defaults of Unalike; the thesis tuned its rates and λ and tells none of them",
            "clients": "the unseen ones: the thesis has its validation clients",
        },
    ),
)
