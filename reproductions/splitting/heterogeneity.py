"""T2 Table 2.1 and Figure 2.7: what the methods solve, and how they respond to unlike clients."""

from __future__ import annotations

from typing import Any

import altair as alt
import torch

from reproductions.item import Found, Item, Numbers, Row, Tick, Work, claim, near
from reproductions.splitting.charts import Line, panels
from reproductions.splitting.training import (
    CHOSEN_HERE,
    LEAST_SQUARES,
    METHODS,
    ROUNDS,
    SEEDS,
    convex,
    fedavg,
    made,
    network,
    records,
    scheme,
    solved,
    worst_step,
)
from unalike.core.client import Clients
from unalike.core.method import train
from unalike.methods import METHODS as ALL
from unalike.runs.simulate import simulate

# Table 2.1

_SCHEMES = {"FedProx": (1, 1, 1), "FedSplit": (2, 2, 1), "FedPi": (2, 2, 0.5), "FedRP": (2, 1, 1)}
_SOLVES = {"FedAvg (k = 1)": "2.1", "FedProx": "2.6", "FedSplit": "2.1", "FedPi": "2.1", "FedRP": "2.6"}
_DIMINISHES = ("FedAvg (k = 5)", "FedProx", "FedRP")
_TABLE_ETA, _TABLE_SEEDS = 1e-4, (0,)


def _distances(tick: Tick, method: str, hyperparameters: dict[str, Any], rounds: int, seed: int, eta: float) -> Numbers:
    """How far z̄ ends from the solutions of (2.1) and, for this η, of (2.6), relative to the length of the former.

    (2.6) is solved in closed form: Σ_i (I + ηQ_i)⁻¹ (Q_iθ − c_i) = 0.
    """
    clients, optimum = solved(LEAST_SQUARES, seed)
    assert isinstance(clients, Clients)
    federation = simulate(clients, seed, block=len(clients), threads=1)
    best = optimum.theta
    eye = torch.eye(len(best), dtype=torch.float64)
    left, right = torch.zeros_like(eye), torch.zeros_like(best)
    for position in range(len(clients)):
        x, y = clients.rows(position)
        assert y is not None
        Q, c = x.double().T @ x.double(), x.double().T @ y.double()
        smooth = torch.linalg.inv(eye + eta * Q)
        left, right = left + smooth @ Q, right + smooth @ c
    regularized = torch.linalg.solve(left, right)
    theta = train(
        made(method, hyperparameters, federation, "linear"), federation, rounds, None, lambda n, _: tick(n, rounds)
    ).theta
    length = best.norm()
    return {
        "2.1": float((theta - best).norm() / length),
        "2.6": float((theta - regularized).norm() / length),
        "between": float((best - regularized).norm() / length),
    }


def _scheme_name(label: str) -> str:
    return f"{label}: (α, β, γ), largest deviation"


def _solves_name(label: str) -> str:
    return f"{label}, constant η: distance from the solution of (2.1 or 2.6), relative to that between the two"


def _falls_name(label: str) -> str:
    return f"{label}, η_t → 0: distance from the solution of (2.1), relative to a constant η"


def _table_rows() -> tuple[Row, ...]:
    exact = "605 rounds and rounding: far below the distance between the two solutions"
    return (
        *(
            claim(_scheme_name(label), f"{values}", "none", low=0, high=0, exact=True)
            for label, values in _SCHEMES.items()
        ),
        *(
            claim(_solves_name(label), f"solves ({which})", exact, high=1e-3, exact=True)
            for label, which in _SOLVES.items()
        ),
        *(
            claim(_falls_name(label), "solves (2.1)", "605 rounds of 1/t shorten η to a seventh, and so the distance; "
                  "a half is asked for", high=0.5, exact=True)
            for label in _DIMINISHES
        ),
    )  # fmt: skip


def _table(work: Work) -> Found:
    values: dict[str, list[float]] = {}
    table: list[dict[str, Any]] = []
    for label, wanted in _SCHEMES.items():
        defaults = {"alpha": 1.0, "beta": 1.0, "gamma": 1.0, **ALL[METHODS[label]].variant}
        ours = [defaults[name] for name in ("alpha", "beta", "gamma")]
        values[_scheme_name(label)] = [max(abs(a - b) for a, b in zip(ours, wanted, strict=True))]
    longer = ROUNDS / sum(1 / t for t in range(1, ROUNDS + 1))  # the same Ση_t
    falling = {"schedule": {"kind": "1/t"}}
    runs = {
        "FedAvg (k = 1)": (fedavg(LEAST_SQUARES, 1, 1e-5), None),
        "FedAvg (k = 5)": (
            fedavg(LEAST_SQUARES, 5, 1e-5),
            fedavg(LEAST_SQUARES, 5, min(1e-5 * longer, 2.5e-4), **falling),
        ),
        **{label: (scheme(label, LEAST_SQUARES, _TABLE_ETA), None) for label in ("FedSplit", "FedPi")},
        **{
            label: (
                scheme(label, LEAST_SQUARES, _TABLE_ETA),
                scheme(label, LEAST_SQUARES, _TABLE_ETA * longer, **falling),
            )
            for label in ("FedProx", "FedRP")
        },
    }
    for seed in _TABLE_SEEDS:
        for label, (constant, diminishing) in runs.items():
            settings = {"rounds": ROUNDS, "seed": seed, "eta": _TABLE_ETA}
            found = work.part(f"{label}, constant, seed {seed}", _distances, **constant, **settings)
            table.append({"method": label, "step": "constant", "seed": seed, **found})
            if label in _SOLVES:
                distance = found[_SOLVES[label]] / found["between"]
                values.setdefault(_solves_name(label), []).append(distance)
            if diminishing is not None:
                fell = work.part(f"{label}, 1/t, seed {seed}", _distances, **diminishing, **settings)
                table.append({"method": label, "step": "1/t", "seed": seed, **fell})
                values.setdefault(_falls_name(label), []).append(fell["2.1"] / found["2.1"])
    return Found(values, table)


# Figure 2.7

_NOISES = {0.25: 119e3, 2: 7.61e6, 10: 190.3e6}  # label noise, and the caption's H
_EXACT = ("FedSplit", "FedPi", "FedAvg (k = 1)")
_BIASED = ("FedProx", "FedRP", "FedAvg (k = 5)")
_SMALLEST = "largest end gap of FedSplit, FedPi, FedAvg (k = 1) relative to the smallest of the others"
_WORSE = "smallest growth of an end gap with H: FedProx, FedRP, FedAvg (k = 5)"
_WORSE_EXACT = "smallest growth of an end gap with H: FedSplit, FedPi, FedAvg (k = 1); below 1e-12 is rounding"
_PARTITIONS = {"iid": "i.i.d.", "pathological:6": "6 classes each", "pathological:2": "2 classes each"}
_FEDRP = (
    "FedAvg with many steps is the best, but FedRP is behind FedProx: to reflect an inexact proximal map overshoots, "
    "at least on few rows and in few rounds"
)
_SMALL = ("iid", "pathological:2")  # the ends of the scale are enough for a small run
_NETWORKS = "MNIST: final loss of the worse of FedRP and FedAvg (k large) relative to the best of the others, "
_ONE_STEP = "MNIST: final loss of FedAvg (k = 1) relative to FedAvg (k large), "


def convex_methods() -> dict[str, dict[str, Any]]:
    """The five methods, FedAvg twice, on least squares."""
    return {
        "FedAvg (k = 1)": fedavg(LEAST_SQUARES, 1, 1e-5),
        "FedAvg (k = 5)": fedavg(LEAST_SQUARES, 5, 1e-5),
        **{label: scheme(label, LEAST_SQUARES, 1e-4) for label in METHODS},
    }


LARGE_K = 10
NETWORK_RATE = {"batch": "none", "lr": 0.1, "momentum": 0.5}


def network_methods() -> dict[str, dict[str, Any]]:
    """The same for a network: every proximal map takes as many local steps as FedAvg with the large k."""
    base = {"cohort": 1.0}
    local = {"steps": LARGE_K, **NETWORK_RATE}
    return {
        "FedAvg (k = 1)": {
            "method": "splitting",
            "hyperparameters": {**base, "step": "gradient", "local": {**local, "steps": 1}},
        },
        "FedAvg (k large)": {"method": "splitting", "hyperparameters": {**base, "step": "gradient", "local": local}},
        **{label: {"method": name, "hyperparameters": {**base, "local": local}} for label, name in METHODS.items()},
    }


def _figure_rows() -> tuple[Row, ...]:
    return (
        *(
            near(f"H at label noise {noise:g}", H, 0.057 * H, "H is the mean of 25 draws, each nearly a χ² of 100 "
                 "degrees: 2.8 % a seed; twice that")
            for noise, H in _NOISES.items()
        ),
        *(
            claim(f"label noise {noise:g}: {_SMALLEST}", "they have the smallest gaps", "any: only the order is said",
                  high=1)
            for noise in _NOISES
        ),
        claim(_WORSE, "all deteriorate with H", "any growth", low=1),
        claim(_WORSE_EXACT, "all deteriorate with H", "any growth", low=1 + 1e-9,
              explanation="these three solve the original problem whatever the clients are, and end at rounding for "
              "every H; only the biased methods deteriorate"),
        *(
            claim(_NETWORKS + text, "FedRP and FedAvg with a large k are the best",
                  "the scale: any lower loss counts", high=1, explanation=_FEDRP)
            for text in _PARTITIONS.values()
        ),
        *(
            claim(_ONE_STEP + text, "k = 1 is significantly worse", "the scale: 'significantly' as at least 1.5 times",
                  low=1.5)
            for text in _PARTITIONS.values()
        ),
    )  # fmt: skip


def mnist(work: Work) -> dict[str, Any]:
    """How large the experiments with a network are."""
    return {
        "data": "mnist",
        "model": "lenet",
        "clients": work.choose("clients of the CNN", 20, 5),
        "samples": work.choose("rows of a client of the CNN", 3000, 75),
        "rounds": work.choose("rounds of the CNN", 200, 20),
    }


def _figure(work: Work) -> Found:
    values: dict[str, list[float]] = {}
    table: list[dict[str, Any]] = []
    contents: dict[str, list[Line]] = {}
    for seed in SEEDS:
        ends: dict[str, list[float]] = {}
        for noise, caption in _NOISES.items():
            for label, run in convex_methods().items():
                settings = {"problem": LEAST_SQUARES, "rounds": ROUNDS, "seed": seed}
                name = f"label noise {noise:g}, {label}, seed {seed}"
                found = work.part(name, convex, options=f"noise={noise:g}", **settings, **run)
                table += records(f"label noise {noise:g}", label, seed, found)
                ends.setdefault(label, []).append(found["gaps"][-1])
                if seed == 0:
                    contents.setdefault(f"H ≈ {caption:.3g}", []).append(Line(label, found["gaps"]))
            values.setdefault(f"H at label noise {noise:g}", []).append(found["heterogeneity"])
            smallest = max(ends[label][-1] for label in _EXACT) / min(ends[label][-1] for label in _BIASED)
            values.setdefault(f"label noise {noise:g}: {_SMALLEST}", []).append(smallest)
        values.setdefault(_WORSE, []).append(min(_growth(ends[label]) for label in _BIASED))
        values.setdefault(_WORSE_EXACT, []).append(min(_growth(ends[label]) for label in _EXACT))
    networks: dict[str, list[Line]] = {}
    size = mnist(work)
    for partition in work.choose("splits of the CNN", tuple(_PARTITIONS), _SMALL):
        text, final = _PARTITIONS[partition], {}
        for label, run in network_methods().items():
            found = work.part(f"MNIST, {text}, {label}", network, partition=partition, seed=0, **size, **run)
            final[label] = found["loss"][-1]
            networks.setdefault(f"CNN, {text}", []).append(Line(label, found["loss"]))
            about = {"problem": f"MNIST, {text}", "line": label, "seed": 0}
            table += [{**about, "round": number, "loss": loss} for number, loss in enumerate(found["loss"], 1)]
            table.append({**about, "round": len(found["loss"]), "accuracy": found["accuracy"]})
        first, second = final["FedRP"], final["FedAvg (k large)"]
        others = [loss for label, loss in final.items() if label not in ("FedRP", "FedAvg (k large)")]
        values[_NETWORKS + text] = [max(first, second) / min(others)]
        values[_ONE_STEP + text] = [final["FedAvg (k = 1)"] / second]
    top = panels("Least squares", contents, "optimality gap")
    bottom = panels("CNN on MNIST", networks, "training loss")
    return Found(values, table, alt.vconcat(top, bottom).resolve_scale(color="independent"))


def _growth(ends: list[float]) -> float:
    """The smallest ratio of an end gap to that at the H before it."""
    return 1 / worst_step([max(gap, 1e-12) for gap in reversed(ends)])


ITEMS = (
    Item(
        id="t2-table-2.1",
        title="The methods as one scheme, and what they solve",
        claim="FedAvg, FedProx, FedSplit, FedPi and FedRP are one scheme with (α, β, γ); with a constant η FedAvg, "
        "FedSplit and FedPi solve (2.1), FedProx and FedRP (2.6); with η_t → 0 FedAvg, FedProx and FedRP solve (2.1).",
        two_cores="yes",
        rows=_table_rows(),
        compute=_table,
        seeds=_TABLE_SEEDS,
        settings={
            **CHOSEN_HERE,
            "problem": "least squares, 25 clients of 5000 rows, d = 100, label noise .25, 605 rounds",
            "FedAvg": "with k = 1 for a constant η: with more steps it solves neither problem, as §2.4.1 says",
            "1/t": "Ση_t as with the constant η, but for FedAvg no longer than 2.5e-4, below 2/λ_max",
            "columns": "nonconvex, sampling and stochastic are statements about the literature, and not computed",
        },
    ),
    Item(
        id="t2-figure-2.7",
        title="Five methods against the heterogeneity of clients",
        claim="On least squares FedSplit, FedPi and FedAvg with k = 1 have the smallest gaps, and all methods "
        "deteriorate as clients become more unlike. On a CNN FedRP and FedAvg with a large k are the best, and k = 1 "
        "is much worse.",
        two_cores="yes",
        rows=_figure_rows(),
        compute=_figure,
        seeds=SEEDS,
        settings={
            **CHOSEN_HERE,
            "heterogeneity": "label noise of deviation .25, 2 and 10, the author's; H with doubled gradients",
            "η": "1e-4; FedAvg 1e-5",
            "CNN": "LeNet; 10 local steps of rate .1 and momentum .5 on all of a client's rows, for every method (k = "
            "1: one); η = 10, the default. The document's own are lost",
            "changed after results were seen": "these CNN settings, after a first run of figure 2.8 with mini-batches; "
            "and the row on FedRP, which first asked for the better of FedRP and FedAvg",
        },
        lacks=("one seed of the CNN",),
    ),
)
