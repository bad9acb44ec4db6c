"""DP-AdaPeD (Figures 1 to 3), and how ψ moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import altair as alt

from reproductions.adaped.training import OPEN, flat, trained
from reproductions.charts import ACCURACY, curves
from reproductions.item import Found, Item, Work, claim
from unalike.report.figures.file import Figure

# How ψ moves: told in the text of §4, without a figure


def _psi_curves(work: Work) -> Found:
    rounds = 240 if work.full else 60
    settings: dict[str, Any] = {"source": "femnist", "cohort": 1 / 3, "rounds": rounds, "seed": 0}
    plain = work.part("AdaPeD", trained, method="AdaPeD", **settings)
    private = work.part("DP-AdaPeD, ε = 5", trained, method="AdaPeD", continued=False, epsilon=5.0, **settings)
    moved = {"AdaPeD": plain["psi"], "DP-AdaPeD, ε = 5": private["psi"]}
    table = [
        {"method": method, "round": 6 * (number + 1), "psi": psi}
        for method, curve in moved.items()
        for number, psi in enumerate(curve)
    ]
    noisy = moved["DP-AdaPeD, ε = 5"]
    values = {
        _FALLS: [moved["AdaPeD"][-1] - 4.0],
        _FALLS_FIRST: [min(noisy) - 4.0],
        _RISES: [noisy[-1] - min(noisy)],
    }
    return Found(values, table, curves(table, alt.X("round:Q"), alt.Y("psi:Q", title="ψ"), "method"))


_FALLS = "ψ at the end, less its start at 4, AdaPeD"
_FALLS_FIRST = "least ψ, less its start at 4, DP-AdaPeD"
_RISES = "ψ at the end, less its least value, DP-AdaPeD"

# Privacy

_EPSILONS = (2.0, 5.0, 10.0, 20.0)
_EVERY_STEP = "DP-AdaPeD, noise at every step"


def _above(epsilon: float, what: str) -> str:
    return f"DP-AdaPeD minus {what}, ε = {epsilon:g} (points)"


def _private(
    source: str,
    cohort: float,
    other: str,
    continued: bool,
    share: int,
    samples: int | None,
) -> Callable[[Work], Found]:
    """DP-AdaPeD over ε, against local training or DP-FedEM; share: of the rounds in a scaled run, samples: of rows."""

    def compute(work: Work) -> Found:
        rounds = 240 if source == "femnist" else 300
        table, values = [], {}
        settings: dict[str, Any] = {"source": source, "cohort": cohort, "rounds": rounds, "seed": 0}
        if not work.full:
            settings |= {"rounds": rounds // share, **({"samples": samples} if samples else {})}
        same = {"continued": True} if continued else {}  # as many steps as the clients of AdaPeD have
        local = work.part("Local", trained, method="Local", **same, **settings) if other == "Local" else None
        for epsilon in _EPSILONS:
            private = {**settings, "epsilon": epsilon}
            ours = work.part(f"DP-AdaPeD, ε = {epsilon:g}", trained, method="AdaPeD", continued=continued, **private)
            theirs = local or work.part(f"DP-FedEM, ε = {epsilon:g}", trained, method="FedEM", **private)
            values[_above(epsilon, other)] = [ours["accuracy"] - theirs["accuracy"]]
            shown = [("DP-AdaPeD", ours), (other, theirs)]
            if work.full:  # beside ours, which noises the whole change once: the mechanism that the paper prints
                how: dict[str, Any] = {"method": "AdaPeD", "continued": continued, "noisy_steps": "apart", **private}
                shown.append((_EVERY_STEP, work.part(f"{_EVERY_STEP}, ε = {epsilon:g}", trained, **how)))
            for method, numbers in shown:
                table.append({"method": method, "epsilon": epsilon, **flat(numbers)})
        common = [f"{row['common']:.0f} % (ε = {row['epsilon']:g})" for row in table if row["method"] == "DP-AdaPeD"]
        note = (
            f"The common model μ itself is right in {', '.join(common)} of its answers; a model that guesses in 10 %. "
            "Where μ knows nothing, a lead does not come from collaboration"
        )
        return Found(values, table, _curves(table), [note])

    return compute


def _curves(table: list[dict[str, Any]]) -> Figure:
    """Accuracy over ε: personal models, and AdaPeD's common model."""
    rows = [{"ε": row["epsilon"], "accuracy": row["accuracy"], "model": row["method"]} for row in table]
    rows += [
        {"ε": row["epsilon"], "accuracy": row["common"], "model": "common model μ of DP-AdaPeD"}
        for row in table
        if row["method"] == "DP-AdaPeD"
    ]
    return curves(rows, alt.X("ε:Q"), ACCURACY, "model", dashes="model")


_PRIVATE = {
    "clip": "1 for the whole change of (μ, ψ); the paper gives neither C nor σ nor δ. Fixed before any run",
    "δ": "66^-1.1 or 50^-1.1, below one over the number of clients",
    "ε": "2, 5, 10, 20: the paper's axis is not readable",
}


def _private_item(
    number: int,
    title: str,
    source: str,
    cohort: float,
    other: str,
    what: str,
    scaled: str,
    continued: bool = False,
    share: int = 4,
    samples: int | None = None,
) -> Item:
    return Item(
        id=f"p3-figure-{number}",
        title=title,
        claim=what,
        two_cores="yes",
        rows=tuple(
            claim(_above(epsilon, other), what, "the claim itself: only the ordering can be read off", low=0.0)
            for epsilon in _EPSILONS
        ),
        compute=_private(source, cohort, other, continued, share, samples),
        settings={**OPEN, **_PRIVATE},
        scaled=scaled,
    )


ITEMS = (
    Item(
        id="p3-section-4-psi",
        title="How ψ moves with and without privacy, FEMNIST",
        claim="ψ falls as AdaPeD runs: clients rely on collaboration more and more. For DP-AdaPeD it first falls and "
        "rises later, as noise accumulates in the common model.",
        two_cores="yes",
        rows=(
            claim(_FALLS, "it decreases", "any fall", high=-1e-6),
            claim(_FALLS_FIRST, "first a decrease", "any fall", high=-1e-6),
            claim(
                _RISES,
                "later the variance estimate increases",
                "any rise",
                low=1e-6,
                explanation="ψ was still falling at the end; in a scaled run that may be too early for it to rise",
            ),
        ),
        compute=_psi_curves,
        settings={
            **OPEN,
            **_PRIVATE,
            "ε": "5; the paper names none",
            "data": "FEMNIST, ξ = .33; the paper names none",
        },
        scaled="a quarter of the rounds, one seed",
    ),
    _private_item(
        1,
        "DP-AdaPeD by ε, FEMNIST",
        "femnist",
        1 / 3,
        "Local",
        "DP-AdaPeD outperforms local training even for low ε",
        "a quarter of the rounds, one seed",
    ),
    _private_item(
        2,
        "DP-AdaPeD whose clients go on training when they are not sampled, by ε, FEMNIST",
        "femnist",
        1 / 3,
        "Local",
        "with local fine-tuning, DP-AdaPeD is above local training at every ε",
        "80 of 240 rounds, one seed",
        continued=True,
        share=3,
    ),
    _private_item(
        3,
        "DP-AdaPeD and DP-FedEM by ε, MNIST",
        "mnist",
        1.0,
        "DP-FedEM",
        "DP-FedEM performs poorly beside DP-AdaPeD",
        "60 of 300 rounds, 120 of 1,200 rows of a client to train on, one seed",
        share=5,
        samples=140,
    ),
)
