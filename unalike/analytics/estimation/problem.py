"""Data for personal estimation: populations, files of counts, their checks, and samples kept apart to score by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from unalike.analytics.estimation.posterior import Family
from unalike.analytics.estimation.shared import Estimates, EstimationError, check_targets, features, mse
from unalike.core.client import Client, Clients
from unalike.core.federation import Federation, each
from unalike.core.release import Sum
from unalike.core.request import Part
from unalike.core.task import Sent, send, task
from unalike.data import Population, in_pieces, load
from unalike.data.build import LaidOut

Check = Literal["flips", "linear", "logistic"]  # of rows: 0 or 1, or those of a regression
_PIECE = 1 << 14  # rows that are looked at together
_BLOCK_NUMBERS = 1 << 23  # numbers that one block of clients may hold
Score = Callable[[Tensor, Tensor], float]
"""(estimates [C, d], positions [C]) -> error."""


@dataclass(frozen=True)
class Problem:
    """The clients, and what their estimates are measured by."""

    clients: Clients
    truth: Tensor | None = None  # [clients, d]
    held_out: Clients | None = None  # the same clients' test rows
    notes: list[str] = field(default_factory=list)

    @property
    def parts(self) -> dict[Part, Clients]:
        """The rows to learn from, and those to measure by."""
        parts: dict[Part, Clients] = {"train": self.clients}
        return parts if self.held_out is None else {**parts, "test": self.held_out}

    @property
    def measure(self) -> str:
        """What the errors mean."""
        if self.truth is not None:
            return "squared error of the true parameter"
        return "squared error of held-out samples" if self.held_out is not None else "none"


def read_problem(data: str, truth: str, check: Check | None = None, **how: Any) -> Problem:
    """A named source, file or folder; ``truth`` names the true parameter where the source has one.

    check: what its rows must be. ``how``: as ``problem_in_pieces`` takes it.
    """
    problem = _problem(load(data, **_options(**how)), truth, how["test"])
    check_rows(problem.clients, check)
    return problem


def problem_in_pieces(data: str, truth: str, check: Check | None = None, **how: Any) -> tuple[Problem, LaidOut]:
    """The same with sizes and names alone, and where to have the rows of some clients: ``seed``, ``clients`` and
    ``test`` as in ``unalike.data.load``, and ``columns``, its options of a table."""
    laid_out = in_pieces(data, **_options(**how))
    for group in laid_out.groups(_PIECE):
        check_rows(group["train"], check)
    return _problem(laid_out.facts, truth, how["test"]), laid_out


def _options(*, columns: dict[str, Any], **how: Any) -> dict[str, Any]:
    given = {name: value for name, value in columns.items() if value is not None}
    return {"normalize": False, "unseen": 0.0, "min_samples": 1, **how, **given}


def _problem(population: Population, truth: str, test: float) -> Problem:
    known = population.per_client.get(truth)
    notes = []
    if population.dropped:
        names = ", ".join(population.dropped[:5])
        notes.append(f"{len(population.dropped)} clients without a sample to learn from were left out ({names})")
    held_out = population.test if test > 0 and bool((population.test.size > 0).all()) else None
    return Problem(population.train, known, held_out if known is None else None, notes)


def read_counts(file: Path) -> Clients:
    """Clients of 0/1 samples from a CSV file with the columns successes and trials, one row for each client."""
    try:
        table = pd.read_csv(file)
    except (OSError, ValueError) as error:
        raise EstimationError(f"cannot read the counts in {file}: {error}") from error
    lacking = [name for name in ("successes", "trials") if name not in table.columns]
    if lacking:
        raise EstimationError(f"{file} has no column {lacking[0]!r}; expected successes and trials (and client)")
    names = [str(name) for name in table["client"]] if "client" in table.columns else None
    return counts_clients(table["successes"].to_numpy(), table["trials"].to_numpy(), names)


def counts_clients(successes: Any, trials: Any, names: list[str] | None = None) -> Clients:
    """Clients of 0/1 samples from how many there are, and how many of them are ones."""
    ones, all_ = np.asarray(successes), np.asarray(trials)
    if ones.ndim != 1 or ones.shape != all_.shape or len(ones) == 0:
        raise EstimationError(f"expected successes and trials of the same clients, got {ones.shape} and {all_.shape}")

    def refuse(bad: Any, what: str) -> None:
        if bool(np.any(bad)):
            row = int(np.argmax(bad))
            raise EstimationError(
                f"client {names[row] if names else row} has {ones[row]} successes in {all_[row]} trials: {what}"
            )

    try:
        numbers = np.stack([ones, all_]).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise EstimationError("counts must be numbers; remove text and empty cells") from error
    refuse(~np.isfinite(numbers).all(0), "a count is missing or infinite")
    refuse((numbers != np.floor(numbers)).any(0), "counts must be whole numbers")
    refuse((numbers < 0).any(0), "counts must not be negative")
    refuse(numbers[1] == 0, "a client without data has nothing to estimate from; leave it out")
    refuse(numbers[0] > numbers[1], "there cannot be more successes than trials")
    ones, all_ = numbers.astype(np.int64)
    position = np.arange(all_.sum()) - np.repeat(np.cumsum(all_) - all_, all_)
    x = (position < np.repeat(ones, all_)).astype(np.float32)[:, None]
    return Clients.from_sizes(torch.from_numpy(x), None, torch.from_numpy(all_), names=names)


def _refuse(clients: Clients, column: Tensor, allowed: Callable[[Tensor], Tensor], what: str, advice: str) -> None:
    """Say where the first value is that is not allowed, how many rows have one, and what to do."""
    rows, owner = clients.pooled()
    values = column[rows].reshape(len(rows), -1)
    wrong = ~allowed(values)
    if bool(wrong.any()):
        row, place = wrong.nonzero()[0].tolist()
        who = int(owner[row])
        where = f", column {place + 1}" if values.shape[1] > 1 else ""
        count = int(wrong.any(1).sum())
        others = f" ({count} such rows at least)" if count > 1 else ""  # there may be more clients
        raise EstimationError(
            f"{what}, but client {clients.name(who)} has {float(values[row, place]):g} in row "
            f"{int(rows[row] - clients.start[who]) + 1} of its {int(clients.size[who])}{where}{others}; {advice}"
        )


def _is_flip(values: Tensor) -> Tensor:
    return (values == 0) | (values == 1)


def check_rows(clients: Clients, check: Check | None) -> None:
    """Refuse rows that are not what they must be; all of them are numbers."""
    if check == "flips":
        check_flips(clients)
    elif check is not None:
        check_regression(clients, check)
    check_finite(clients)


def check_finite(clients: Clients) -> None:
    """Every client's inputs (and targets) must be numbers."""
    for what, column in (("inputs", clients.x), ("targets", clients.y)):
        if column is not None and column.is_floating_point():
            _refuse(clients, column, torch.isfinite, f"{what} must not be NaN or infinite", "remove or fill them first")


def check_flips(clients: Clients) -> None:
    """Every sample must be one number, 0 or 1."""
    features(clients.roster(), wanted=1)
    advice = "give one row for each trial, or a file of counts (successes, trials)"
    _refuse(clients, clients.x, _is_flip, "a Bernoulli sample is 0 or 1", advice)


def check_regression(clients: Clients, family: Family) -> None:
    """Numbers as features, a target for every row, and classes 0 and 1 where the model is logistic."""
    check_targets(clients.roster())
    check_finite(clients)
    if family == "logistic" and clients.y is not None:
        advice = "name another target column, or make it 0 and 1"
        _refuse(clients, clients.y, _is_flip, "logistic regression needs targets 0 and 1", advice)


def folds(clients: Clients, seed: int | None) -> list[Problem]:
    """Leave out every client's j-th sample, for each j: as many problems as a client has samples.

    With a seed every client's samples are shuffled first, so that a fold does not single out, say, one year.
    """
    n, most = int(clients.size.min()), int(clients.size.max())
    if n != most or n < 2:
        raise EstimationError(
            "cross-validation leaves out one sample of every client at a time, so all clients must have the same "
            f"number of them, at least 2; here they have {n} to {most}"
        )
    place = torch.arange(n).repeat(len(clients), 1)
    if seed is not None:
        place = torch.from_numpy(np.random.default_rng([seed, 11]).permuted(place.numpy(), axis=1))
    rows = clients.start[:, None] + place
    found = []
    for left_out in range(n):
        order = torch.cat([torch.arange(left_out), torch.arange(left_out + 1, n), torch.tensor([left_out])])
        taken = rows[:, order].reshape(-1)
        x, y = clients.x[taken], None if clients.y is None else clients.y[taken]
        start = torch.arange(len(clients)) * n
        part = replace(clients, x=x, y=y, start=start, size=torch.full_like(start, n - 1))
        found.append(Problem(part, None, replace(part, start=start + n - 1, size=torch.ones_like(start))))
    return found


def flip_noise(clients: Clients) -> float:
    """E[p(1 − p)], the squared error that a 0/1 sample has even from its own p; unbiased, of clients of equal size."""
    n = int(clients.size[0])
    rate = clients.x[clients.start[:, None] + torch.arange(n)].to(torch.float64).mean(1)
    return float((rate * (1 - rate)).mean()) * n / (n - 1)


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(inputs [rows, d], labels [rows], estimates [rows, d] of the rows' clients) -> [rows]."""


def _cross_entropy(x: Tensor, y: Tensor, theta: Tensor) -> Tensor:
    score = (x * theta).sum(1)
    return torch.nn.functional.softplus(score) - y * score


LOSSES: dict[str, Loss] = {
    "mean": lambda x, y, theta: (x - theta).square().sum(1),
    "label": lambda x, y, theta: (theta[:, 0] - y).square(),  # a number that tells more than the sample's 0 or 1
    "linear": lambda x, y, theta: ((x * theta).sum(1) - y).square(),
    "logistic": _cross_entropy,
}


@dataclass(frozen=True)
class HeldOut:
    """How well estimates fit rows that nobody learned from; a simulation's own measure, charged to nobody."""

    loss: str

    @task
    def total(self, client: Client, estimate: Tensor) -> Sent:
        x = client.x.to(torch.float64)
        theta = estimate.expand(len(x), *estimate.shape)
        return send(loss=client.sum(LOSSES[self.loss](x, client.labels().to(torch.float64), theta)), rows=client.n)

    def measure(self, federation: Federation, estimate: Tensor, positions: Tensor) -> float:
        """The mean loss of a row."""
        with federation.aside() as own:
            asked = own.cohort(positions).on("test")
            sums = asked.ask(self.total, into=[Sum("loss"), Sum("rows")], estimate=each(estimate))
        return float(sums["loss"] / sums["rows"])


def score_means(problem: Problem, federation: Federation | None = None) -> Score | None:
    """The error of estimated means: against the truth, or against held-out samples."""
    return score_models(problem, "mean", federation)


def score_models(problem: Problem, loss: str, federation: Federation | None = None) -> Score | None:
    """The error of estimates: against the truth, or by one of ``LOSSES`` on held-out samples; None: there are none.

    federation: where the held-out rows are, unless they are here.
    """
    truth, test = problem.truth, problem.held_out
    if truth is not None:
        return lambda estimate, positions: mse(estimate, truth[positions].reshape(estimate.shape))
    if test is None:
        return None
    if not len(test.x):
        if federation is None:
            raise ValueError("the held-out rows are elsewhere: give the federation that reaches them")
        return partial(HeldOut(loss).measure, federation)

    def score(estimate: Tensor, positions: Tensor) -> float:
        rows, owner = (some := test.select(positions)).pooled()
        y = rows if some.y is None else some.y[rows].double()
        return float(LOSSES[loss](some.x[rows].to(torch.float64), y, estimate[owner]).mean())

    return score


def block_of(clients: Clients) -> int:
    """How many clients to simulate at once: as many as memory allows. Measuring would take longer than the work."""
    width = clients.x.shape[1:].numel()
    numbers = int(clients.size.max()) * width + width**2
    return max(16, min(4096, _BLOCK_NUMBERS // max(1, numbers)))


def write_estimates(file: Path, clients: Clients, found: Estimates) -> None:
    """A CSV file: client, samples, then what it found alone and its estimate, coordinate by coordinate."""
    dim = found.estimate.shape[1]
    columns: dict[str, Any] = {
        "client": [clients.name(int(i)) for i in found.positions],
        "samples": clients.size[found.positions].tolist(),
    }
    for name, values in (("local", found.local), ("estimate", found.estimate)):
        for k in range(dim):
            columns[name if dim == 1 else f"{name}_{k}"] = values[:, k].tolist()
    pd.DataFrame(columns).to_csv(file, index=False)
