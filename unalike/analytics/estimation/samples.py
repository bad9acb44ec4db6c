"""Data for personal estimation: populations, files of counts, their checks, and samples kept apart to score by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from unalike.analytics.estimation.shared import Estimates, EstimationError, check_roster, mse
from unalike.analytics.reading import Ranges, check_ranges, coordinate_names, read_population
from unalike.core.client import Clients
from unalike.core.release import Sum
from unalike.core.request import Part
from unalike.core.vocabulary import Client, Federation, Sent, each, send, task
from unalike.data import Population
from unalike.data.entry import is_named
from unalike.data.files.frames import read_table
from unalike.data.files.layout import Layout
from unalike.data.lazy import LazyPopulation

Check = Literal["flips", "linear", "logistic"]  # of rows: 0 or 1, or those of a regression
_BLOCK_NUMBERS = 1 << 23  # numbers that one block of clients may hold


@dataclass(frozen=True)
class Samples:
    """The clients with their samples, and what their estimates are measured by."""

    clients: Clients
    truth: Tensor | None = None  # [clients, d]
    held_out: Clients | None = None  # the same clients' test rows
    notes: list[str] = field(default_factory=list)
    name: str = ""
    columns: list[str] | None = None  # of a table: what each coordinate of a row is called,
    target: str | None = None  # and the column to regress on
    ranges: Ranges = field(default_factory=dict)

    @property
    def parts(self) -> dict[Part, Clients]:
        """The rows to learn from, and those to measure by."""
        parts: dict[Part, Clients] = {"train": self.clients}
        return parts if self.held_out is None else {**parts, "test": self.held_out}

    def measure(self, kind: str = "") -> str:
        """What the errors of this kind of estimates mean."""
        if self.truth is not None:
            return "squared error of the true parameter"
        if self.held_out is None:
            return "none"
        return "log loss of held-out samples" if kind == "logistic" else "squared error of held-out samples"


def read_samples(data: str, check: Check | None = None, **how: Any) -> Samples:
    """The samples in a named source, file or folder; ``check``: what its rows must be.

    With "linear" the label column of your own data holds numbers, also where they are whole; with "logistic" two
    classes; with "flips" it is the column of 0 and 1, unless ``features`` names that one.

    ``how``: ``seed``, ``clients``, ``test`` (a share of rows to measure by) and options of a table, as in
    ``unalike.data.load``; and ``ranges``, public ones of some columns, outside which a mean is warned of.
    """
    return open_samples(data, check, **how)[0]


def open_samples(
    data: str,
    check: Check | None = None,
    *,
    pieces: bool = False,
    ranges: Ranges = MappingProxyType({}),
    **how: Any,
) -> tuple[Samples, LazyPopulation | None]:
    """The same; with ``pieces`` sizes and names alone, and where to have the rows of some clients."""
    how = _options(data, check, {name: value for name, value in how.items() if value is not None})
    population, groups, lazy = read_population(data, pieces, **how)
    known = next((population.per_client[one] for one in ("theta", "p") if one in population.per_client), None)
    notes = []
    if population.dropped:
        names = ", ".join(population.dropped[:5])
        notes.append(f"{len(population.dropped)} clients without a sample to learn from were left out ({names})")
    if check in ("linear", "logistic") and not is_named(data) and not how.get("intercept"):
        notes.append("the model passes through 0, where all features are 0; say intercept if it need not")
    if check == "logistic":
        notes += _two_classes(population, data)
    measured = known is None and how.get("test", 0.0) > 0 and bool((population.test.size > 0).all())
    samples = Samples(population.train, known, population.test if measured else None, notes, data, ranges=ranges)
    if population.columns is not None:
        target = None if population.train.y is None else how.get("label_column") or "y"
        samples = replace(samples, columns=coordinate_names(population.columns), target=target)
    check_ranges(data, ranges, samples.columns)
    for group in groups:
        check_rows(group["train"], check, samples.columns)
    return samples, lazy


def _options(data: str, check: Check | None, given: dict[str, Any]) -> dict[str, Any]:
    """How rows are read that must be what ``check`` says."""
    how, label = {"min_samples": 1, **given}, given.get("label_column")
    if is_named(data):
        return how
    if check == "flips" and label and "features" not in given:
        return how | {"features": [label], "label_column": ""}
    kinds = {"linear": "regression", "logistic": "classification"}
    return {"task": kinds[check], **how} if check in ("linear", "logistic") else how


def _two_classes(population: Population, name: str) -> list[str]:
    """Which class is 1, where 0 and 1 have other names; refuses another number of classes than two."""
    names, count = population.class_names, population.classes
    if count is not None and count != 2:
        some = "" if names is None else f" ({', '.join(names[:3])}{', ...' if count > 3 else ''})"
        raise EstimationError(
            f"{name}: logistic regression needs two classes, but the label column has {count}{some}; name another one "
            "(label_column), or use linear for numbers"
        )
    return [] if names is None else [f"class 1 is {names[1]!r}, class 0 is {names[0]!r}"]


def range_notes(samples: Samples, found: Estimates, private: bool) -> list[str]:
    """Warnings about means outside the range of their column: the public one, or without an ε that of the rows.

    Only a simulation sees the clients' estimates and rows.
    """
    if samples.columns is None:
        return []
    notes, common = [], found.prior.get("mu")
    for k, name in enumerate(samples.columns):
        low, high = samples.ranges.get(name, (-math.inf, math.inf))
        if name not in samples.ranges and not private and len(samples.clients.x):
            low, high = (float(one) for one in samples.clients.x[:, k].aminmax())
        values = found.estimate[:, k]
        outside = int(((values < low) | (values > high)).sum())
        where = f"its range, {low:g} to {high:g}"
        if isinstance(common, list) and not low <= common[k] <= high:
            notes.append(f"the common mean of {name}, {common[k]:.4g}, lies outside {where}")
        if outside:
            notes.append(f"{outside} of {len(values)} estimates of {name} lie outside {where}")
    return notes


def read_counts(file: Path) -> Clients:
    """Clients of 0/1 samples from a CSV file with the columns successes and trials, one row for each client."""
    try:
        table = read_table(file, Layout())
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
    rows, owner = clients.pool_rows()
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


def check_rows(clients: Clients, check: Check | None = None, columns: Sequence[str] | None = None) -> None:
    """Refuse rows that are not what they must be; all of them are numbers. ``columns``: what coordinates are called."""
    if check == "flips":
        _check_flips(clients, columns)
    elif check is not None:
        check_roster(clients.roster(), check)
    for what, column in (("inputs", clients.x), ("targets", clients.y)):
        if column is not None and column.is_floating_point():
            _refuse(clients, column, torch.isfinite, f"{what} must not be NaN or infinite", "remove or fill them first")
    if check == "logistic" and clients.y is not None:
        advice = "name another target column, or make it 0 and 1"
        _refuse(clients, clients.y, _is_flip, "logistic regression needs targets 0 and 1", advice)


def _check_flips(clients: Clients, columns: Sequence[str] | None) -> None:
    """Every sample must be one number, 0 or 1."""
    if columns is not None and len(columns) > 1:
        titles = list(dict.fromkeys(title.partition("=")[0] for title in columns))
        if len(titles) == 1:
            raise EstimationError(
                f"a rate is of a column of 0 and 1, but {titles[0]!r} holds text ({', '.join(columns)}); write 0 and 1"
            )
        rows = clients.x[clients.pool_rows()[0]]
        fits = [title for k, title in enumerate(columns) if bool(_is_flip(rows[:, k]).all()) and "=" not in title]
        best = (fits or titles)[0]
        raise EstimationError(
            f"a rate is of one column of 0 and 1, but {len(titles)} columns are features ({', '.join(titles)}); name "
            f"one of them, for example label_column={best}"
        )
    check_roster(clients.roster(), width=1)
    advice = "give one row for each trial, or a file of counts (successes, trials)"
    _refuse(clients, clients.x, _is_flip, "a Bernoulli sample is 0 or 1", advice)


def folds(clients: Clients, seed: int | None) -> list[Samples]:
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
        found.append(Samples(part, None, replace(part, start=start + n - 1, size=torch.ones_like(start))))
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


def measure_error(
    samples: Samples, loss: str, federation: Federation, estimate: Tensor, positions: Tensor
) -> float | None:
    """The error of estimates [C, d] of the clients at these positions: against the truth, or by one of ``LOSSES`` on
    held-out samples, where they are; None: there is nothing to measure by."""
    if samples.truth is not None:
        return mse(estimate, samples.truth[positions].reshape(estimate.shape))
    return None if samples.held_out is None else HeldOut(loss).measure(federation, estimate, positions)


def block_of(clients: Clients) -> int:
    """How many clients to simulate at once: as many as memory allows. Measuring would take longer than the work."""
    width = clients.x.shape[1:].numel()
    numbers = int(clients.size.max()) * width + width**2
    return max(16, min(4096, _BLOCK_NUMBERS // max(1, numbers)))
