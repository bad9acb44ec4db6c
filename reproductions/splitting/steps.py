"""T2 Figures 2.5 and 2.6: step-size schedules and ergodic averages of FedProx and FedRP."""

from __future__ import annotations

from typing import Any

from reproductions.item import Found, Item, Row, Work, claim
from reproductions.splitting.charts import Line, panels
from reproductions.splitting.training import (
    CHOSEN_HERE,
    LEAST_SQUARES,
    ROUNDS,
    SEEDS,
    convex,
    records,
    scheme,
)
from unalike.learn.schedules import Schedule

_ETA, _ROUNDS = 1e-4, ROUNDS
_SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {"kind": "constant"},
    "1/t": {"kind": "1/t"},
    "1/√t": {"kind": "1/sqrt(t)"},
    "1/log t": {"kind": "1/log10(t)"},
    "halved": {"kind": "exponential", "decay": 0.5, "period": 500},
}
_FLAT = "the gap of a constant η, from half-way to the end (ratio)"
_LOWER = "end gap of 1/t relative to a constant η"
_FALLS = "1/√t: end gap relative to half-way"
_AVERAGE = "1/t: end gap of the ergodic average relative to the last iterate"
_SHARED = "end gap of FedRP relative to FedProx, constant η, minus 1"
_TRACKS = (
    "with a slowly falling η_t the iterates follow the minimum of the regularized problem at η_t, whose gap falls like "
    "η_t²; on a strongly convex problem 1/√t converges, too, although Ση_t² is infinite. Theorem 3 is sufficient, not "
    "necessary"
)
_REMEMBERS = (
    "the average keeps the first iterates with the largest weights η_s, and their error shrinks only like 1/log² t, "
    "while the last iterate is close to the optimum"
)


def _rows(method: str) -> tuple[Row, ...]:
    rows = [
        claim(_FLAT, "converges fast to a suboptimal solution", "it has converged: within 1 %", low=0.99),
        claim(_LOWER, "slower, but to a better solution", "any: only the order is said", high=1),
        claim(
            _FALLS,
            "only the schedules of Theorem 3 converge, so this does not",
            "a gap that still falls by more than 10 % in the second half has not stalled",
            low=0.9,
            explanation=_TRACKS,
        ),
        claim(
            _AVERAGE,
            "averaging has no noticeable effect",
            "a factor of 2 would be seen in the figure's logarithmic axis",
            low=0.5,
            high=2,
            explanation=_REMEMBERS,
        ),
    ]
    if method == "FedRP":
        same = "Theorem 8: FedRP's fixed points are those of FedProx"
        rows.append(claim(_SHARED, same, "rounding and 605 rounds: four digits", low=-1e-4, high=1e-4, exact=True))
    return tuple(rows)


def _first(schedule: dict[str, Any]) -> float:
    """η_1, such that the steps of all rounds together are as long as those of the constant η."""
    factor = Schedule(**schedule)
    return _ETA * _ROUNDS / sum(factor(t) for t in range(1, _ROUNDS + 1))


def _compute(work: Work, method: str) -> Found:
    values: dict[str, list[float]] = {}
    table: list[dict[str, Any]] = []
    lines: list[Line] = []
    for seed in SEEDS:
        settings = {"problem": LEAST_SQUARES, "rounds": _ROUNDS, "seed": seed}
        found = {}
        for label, schedule in _SCHEDULES.items():
            run = scheme(method, LEAST_SQUARES, _first(schedule), schedule=schedule, ergodic=True)
            found[label] = work.part(f"{label}, seed {seed}", convex, **settings, **run)
            table += records(LEAST_SQUARES, label, seed, found[label])
        ends = {label: one["gaps"][-1] for label, one in found.items()}
        half = {label: one["gaps"][_ROUNDS // 2] for label, one in found.items()}
        numbers = {
            _FLAT: ends["constant"] / half["constant"],
            _LOWER: ends["1/t"] / ends["constant"],
            _FALLS: ends["1/√t"] / half["1/√t"],
            _AVERAGE: found["1/t"]["averages"][-1] / ends["1/t"],
        }
        if method == "FedRP":
            other = work.part(f"FedProx, seed {seed}", convex, **settings, **scheme("FedProx", LEAST_SQUARES, _ETA))
            numbers[_SHARED] = ends["constant"] / other["gaps"][-1] - 1
        for what, value in numbers.items():
            values.setdefault(what, []).append(value)
        if seed == 0:
            lines += [Line(label, one["gaps"]) for label, one in found.items()]
            lines += [Line(label, one["averages"], dashed=True) for label, one in found.items()]
    title = f"{method}: step-size schedules"
    chart = panels(title, {LEAST_SQUARES: lines}, "optimality gap", dashed="ergodic averages")
    return Found(values, table, chart)


_LOGISTIC = (
    "least squares alone: on logistic regression proximal maps are local steps whose rate shrinks with the schedule, "
    "too, so that 1/t leaves them unsolved"
)


def _item(number: str, method: str, claimed: str, *lacks: str) -> Item:
    return Item(
        id=f"t2-figure-{number}",
        title=f"{method}: step-size schedules and ergodic averages",
        claim=claimed,
        two_cores="yes",
        rows=_rows(method),
        compute=lambda work: _compute(work, method),
        seeds=SEEDS,
        settings={
            **CHOSEN_HERE,
            "constant η": "1e-4, the author's",
            "first η of a schedule": "such that Ση_t over the run is that of the constant η, by the same rule for all; "
            "the document says only that it is larger",
            "1/log t": "1/(1 + log₁₀ t), as the author has it; halved: every 500 rounds",
        },
        lacks=lacks,
    )


ITEMS = (
    _item(
        "2.5",
        "FedProx",
        "A fixed η converges fast to a suboptimal solution, a diminishing one slower to a better one; only under the "
        "conditions of Theorem 3, for example 1/t, to a solution of the original problem. Ergodic averaging does not "
        "affect convergence noticeably.",
        _LOGISTIC,
        "not the panel of a CNN",
    ),
    _item(
        "2.6",
        "FedRP",
        "FedRP behaves as FedProx does: a fixed η is faster at first and ends suboptimal, a diminishing one ends "
        "better, 1/t converges, and ergodic averaging hardly matters.",
        _LOGISTIC,
    ),
)
