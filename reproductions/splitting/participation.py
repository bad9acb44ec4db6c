"""T2 Figures B.1 and B.2: clients that are absent, and mini-batches at the clients. Only their captions survive."""

from __future__ import annotations

from typing import Any

from reproductions.item import Found, Item, Row, Work, claim
from reproductions.splitting.charts import Line, panels
from reproductions.splitting.training import CHOSEN, LEAST_SQUARES, LOGISTIC, convex, records, usual

_LOST = "only the caption survives: the text and the numbers are lost"
_SHARES = (0.5, 0.7)
_RULES = {"latest": "everybody's latest z", "left-out": "participants alone"}
_LABELS = ("FedAvg", "FedProx", "FedSplit", "FedPi", "FedRP")
_PROBLEMS = {LEAST_SQUARES: 300, LOGISTIC: 150}  # rounds of a scaled run
_ROUNDS = {LEAST_SQUARES: 605, LOGISTIC: 805}
_ETA = {LEAST_SQUARES: 1e-4, LOGISTIC: 1e-2}


def _absent_name(problem: str, label: str, share: float, rule: str) -> str:
    return f"{problem}, p = {share:g}, {label}, mean over {_RULES[rule]}: largest gap of the last 50 rounds"


def _absent_runs() -> list[tuple[str, str, float, str]]:
    """Least squares with both rules; logistic regression, which takes long, with ours."""
    return [
        (problem, label, share, rule)
        for problem in _PROBLEMS
        for share in _SHARES
        for label in _LABELS
        for rule in (_RULES if problem == LEAST_SQUARES else ("latest",))
        if problem == LEAST_SQUARES or (share == 0.5 and label in ("FedProx", "FedSplit", "FedPi"))
    ]


def _shown(name: str) -> Row:
    return claim(name, "lost", "none: nothing is left to compare with", not_comparable=_LOST)


def _absent(work: Work) -> Found:
    values: dict[str, list[float]] = {}
    table: list[dict[str, Any]] = []
    contents: dict[str, list[Line]] = {}
    for problem, label, share, rule in _absent_runs():
        run = usual(label, problem, _ETA[problem], absentees=rule)
        run["hyperparameters"]["cohort"] = share
        name = f"{problem}, p = {share:g}, {label}, {rule}"
        rounds = work.choose(f"rounds of {problem}", _ROUNDS[problem], _PROBLEMS[problem])
        found = work.part(name, convex, problem=problem, rounds=rounds, seed=0, **run)
        values[_absent_name(problem, label, share, rule)] = [max(found["gaps"][-50:])]
        table += [{**row, "share": share, "rule": rule} for row in records(problem, label, 0, found)]
        contents.setdefault(f"{problem}, p = {share:g}", []).append(Line(label, found["gaps"], rule == "left-out"))
    chart = panels(
        "Some clients are absent", contents, "optimality gap", dashed="the mean over participants alone", columns=2
    )
    return Found(values, table, chart)


_BATCHES = {LEAST_SQUARES: 1000, LOGISTIC: 200}  # a fifth of a client's rows


def _batch_name(problem: str, label: str) -> str:
    return f"{problem}, {label}: end gap with mini-batches"


def _batches(work: Work) -> Found:
    values: dict[str, list[float]] = {}
    table: list[dict[str, Any]] = []
    contents: dict[str, list[Line]] = {}
    for problem, size in _BATCHES.items():
        rounds = work.choose("rounds", 605, 40)
        for label in _LABELS:
            rate = 1e-5 if problem == LEAST_SQUARES else 1 / 600
            local = {"steps": "none", "epochs": 1, "batch": size, "lr": rate}
            more: dict[str, Any] = {"local": local}
            if label != "FedAvg":
                more |= {"solver": "local", "warm": "last"}
            run = usual(label, problem, _ETA[problem], **more)
            if problem == LEAST_SQUARES:
                run["hyperparameters"]["local"] = local
            found = work.part(f"{problem}, {label}", convex, problem=problem, rounds=rounds, seed=0, raw=True, **run)
            values[_batch_name(problem, label)] = [found["gaps"][-1]]
            table += records(problem, label, 0, found)
            contents.setdefault(problem, []).append(Line(label, found["gaps"]))
    return Found(values, table, panels("Five mini-batches at a client in a round", contents, "optimality gap"))


ITEMS = (
    Item(
        id="t2-figure-b.1",
        title="Client sampling",
        claim="Least squares and logistic regression where a client takes part with probability p = .5 and .7.",
        two_cores="yes",
        rows=tuple(_shown(_absent_name(*run)) for run in _absent_runs()),
        compute=_absent,
        settings={
            **CHOSEN,
            "rules": "everybody's latest z, which keeps the fixed point, and participants alone, the author's",
            "cohorts": "of fixed size, p·m clients",
        },
    ),
    Item(
        id="t2-figure-b.2",
        title="Mini-batches at the clients",
        claim="Local data sets are divided into five mini-batches: least squares with B = 1000, logistic regression "
        "with B = 200.",
        two_cores="yes",
        rows=tuple(_shown(_batch_name(problem, label)) for problem in _BATCHES for label in _LABELS),
        compute=_batches,
        settings={
            "local solver": "one pass over the five batches in a round, at rate 1e-5 (least squares) and 1/600",
            "CNN": "the bottom panel is left out",
        },
    ),
)
