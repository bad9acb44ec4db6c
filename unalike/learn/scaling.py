"""The scaling of inputs as a release like any other: mean and deviation of the training clients' rows, from sums."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from unalike.core.release import Release, Sum, Unit
from unalike.core.roster import Roster
from unalike.core.schema import Kind, Schema
from unalike.core.vocabulary import Client, Cohort, Federation, Sent, send, task
from unalike.privacy.mechanisms import Gaussian

_CONSTANT = 1e-7  # a feature that varies less than this, beside its mean, is only shifted


@dataclass(frozen=True)
class Scaling:
    """Two sums in double precision: first the mean, then the squares around it, which keeps them accurate."""

    kind: Kind
    gaps: bool = False  # numbers may be missing: then each feature has a number of rows of its own

    def _sum_rows(self, client: Client, values: Tensor) -> Tensor:
        """Over the client's rows, and over the pixels of an image: one number for each feature or channel."""
        values = values.nan_to_num(nan=0.0) if self.gaps else values
        total = client.sum(values)
        return total.sum(dim=(1, 2), keepdim=True) if self.kind == "image" else total

    def _rows(self, client: Client) -> Tensor:
        """How many rows there are; with gaps, for each feature how many have it."""
        n = client.n.to(torch.float64)
        return n - client.sum(client.x.isnan().to(torch.float64)) if self.gaps else n

    @task
    def totals(self, client: Client) -> Sent:
        return send(total=self._sum_rows(client, client.x.to(torch.float64)), rows=self._rows(client))

    @task
    def squares(self, client: Client, mean: Tensor) -> Sent:
        square = self._sum_rows(client, (client.x.to(torch.float64) - mean).square())
        return send(square=square, rows=self._rows(client))

    @task
    def targets(self, client: Client, mean: Tensor) -> Sent:
        """Of numbers to predict: how far they are from a mean, in sum and in squares."""
        client = client.with_labels
        away = client.y.to(torch.float64) - mean
        return send(total=client.sum(away), square=client.sum(away.square()), rows=client.n.to(torch.float64))


def scale_inputs(federation: Federation) -> Schema:
    """Ask all clients for the mean and the deviation of their inputs, and have everybody use them from now on.

    Per feature, or per channel of images. The sums are in the transcript and the ledger. They have no noise, so a run
    that states an ε takes public constants in their place, or ``scale_privately``.
    """
    schema = federation.roster.schema
    scaling = Scaling(schema.kind, schema.gaps)
    everyone = federation.everyone()
    first = everyone.ask(scaling.totals, into=[Sum("total"), Sum("rows")])
    pixels = schema.shape[1] * schema.shape[2] if schema.kind == "image" else 1
    mean = first["total"] / (first["rows"].clamp(min=1.0) * pixels)
    second = everyone.ask(scaling.squares, mean=mean, into=[Sum("square"), Sum("rows")])  # others may answer now
    variance = second["square"] / (second["rows"].clamp(min=1.0) * pixels)
    federation.use(_scaled_targets(federation, scaling))
    return _use_scaling(federation, mean, variance)


def _scaled_targets(federation: Federation, scaling: Scaling) -> Schema:
    """The schema with the mean and the deviation of the numbers to predict, of the clients that have some."""
    schema = federation.roster.schema
    labeled = federation.roster.labeled.nonzero().flatten()
    if schema.target != "number" or schema.target_center is not None or not len(labeled):
        return schema
    into = [Sum("total"), Sum("square"), Sum("rows")]
    mean = torch.zeros((), dtype=torch.float64)
    for _ in range(2):  # the squares around the mean are the accurate ones
        sums = federation.cohort(labeled).ask(scaling.targets, mean=mean, into=into)
        shift = sums["total"] / sums["rows"].clamp(min=1.0)
        variance = float(sums["square"] / sums["rows"].clamp(min=1.0) - shift.square())
        mean = mean + shift
    constant = variance <= (_CONSTANT * max(1.0, abs(float(mean)))) ** 2
    return replace(schema, target_center=float(mean), target_deviation=1.0 if constant else math.sqrt(variance))


def _use_scaling(federation: Federation, mean: Tensor, variance: Tensor) -> Schema:
    deviation = variance.clamp(min=0).sqrt()
    constant = deviation <= _CONSTANT * mean.abs().clamp(min=1.0)
    scale = torch.where(constant, 1.0, 1.0 / torch.where(constant, 1.0, deviation))
    scaled = replace(federation.roster.schema, shift=mean.to(torch.float32), scale=scale.to(torch.float32))
    federation.use(scaled)
    return scaled


@dataclass(frozen=True)
class PrivateScaling:
    """Mean and deviation from noisy sums of bounded numbers alone, for one client or one point, add or remove.

    Where the values of a feature lie is found by noisy counts: how many are how far from a centre, in powers of two.
    The largest power whose count stands out of the noise is the radius; a clipped mean within it is the next centre
    (two such steps, the first around 0), and with the last one come the squares. So inputs far from 0 are found, too,
    and nobody has to guess a range (Karwa and Vadhan 2018; the two steps as in CoinPress, Biswas et al. 2020).

    A point counts as 1 in each feature. A client counts by its declared size, up to that of the median client: then
    none has more weight than 1, and clients of equal size give the statistics of their pooled rows. Values beyond 1e6
    count as 1e6, as in every private ask.
    """

    kind: Kind
    features: int
    noise: Gaussian
    unit: Unit = "client"

    RELEASES: ClassVar[int] = 4
    _LOWEST: ClassVar[int] = -20  # powers of two that are told apart; what is nearer than the lowest counts nowhere
    _HIGHEST: ClassVar[int] = 20
    _FINE: ClassVar[float] = 2.0**30  # numbers are whole multiples of 1 / this, so that sums of them are exact

    @classmethod
    def of(cls, schema: Schema, noise: Gaussian, unit: Unit) -> PrivateScaling:
        return cls(schema.kind, schema.shape[0] if schema.kind == "image" else math.prod(schema.shape), noise, unit)

    # Each row's vector has at most norm √features (counts, means), or √(2·features) with squares.

    @task
    def counts(self, client: Client, center: Tensor, usual: Tensor) -> Sent:
        """How many values lie in [2^k, 2^(k+1)) around the centre, for each k: [powers, features]."""
        away = self._away(client, center).abs()
        powers = range(self._LOWEST, self._HIGHEST)
        least = [away >= 2.0**power for power in powers] + [torch.zeros_like(away, dtype=torch.bool)]
        inside = [self._row(low & ~high) for low, high in itertools.pairwise(least)]
        return send(counts=torch.stack([self._over_rows(client, one, usual) for one in inside]))

    @counts.into
    def release_counts(self) -> list[Release]:
        return [self._sum("counts", self.features)]

    @task
    def means(self, client: Client, center: Tensor, radius: Tensor, usual: Tensor) -> Sent:
        return send(mean=self._over_rows(client, self._row(self._within(client, center, radius)), usual))

    @means.into
    def release_means(self) -> list[Release]:
        return [self._sum("mean", self.features)]

    @task
    def moments(self, client: Client, center: Tensor, radius: Tensor, usual: Tensor) -> Sent:
        within = self._within(client, center, radius)
        both = [self._over_rows(client, self._row(one), usual) for one in (within, within.square())]
        return send(moments=torch.stack(both))

    @moments.into
    def release_moments(self) -> list[Release]:
        return [self._sum("moments", 2 * self.features)]

    def _sum(self, name: str, numbers: int) -> Sum:
        bound = math.sqrt(numbers)
        if self.unit == "point":
            return Sum(name, sensitivity=bound, noise=self.noise, unit="point", of_rows=True)
        return Sum(name, clip=bound, noise=self.noise)

    def _away(self, client: Client, center: Tensor) -> Tensor:
        """[rows, features, pixels] how far values are from the centre; the inputs of a table have one pixel."""
        flat = client.x.reshape(client.x.shape[0], self.features, -1).to(torch.float64)
        return flat - center.reshape(self.features, 1)

    def _within(self, client: Client, center: Tensor, radius: Tensor) -> Tensor:
        away = self._away(client, center).nan_to_num(nan=0.0)  # what is missing is at the centre
        reach = radius.reshape(self.features, 1)
        return torch.where(reach > 0, away / torch.where(reach > 0, reach, 1.0), 0.0).clamp(-1.0, 1.0)

    def _row(self, values: Tensor) -> Tensor:
        """[rows, features] each row's mean over its pixels, cut to fine steps: never a larger number."""
        return (values.to(torch.float64).mean(2) * self._FINE).trunc() / self._FINE

    def _over_rows(self, client: Client, rows: Tensor, usual: Tensor) -> Tensor:
        if self.unit == "point":
            return client.sum(rows)
        return client.mean(rows) * (client.bound / usual).clamp(max=1.0)

    # The server's side

    def usual(self, roster: Roster) -> float:
        """The declared size of the median client."""
        return float(roster.bound.to(torch.float64).median())

    def weight(self, roster: Roster) -> float:
        """What all rows, or all clients, count together; public, and no answer changes it."""
        bounds = roster.bound.to(torch.float64)
        return float(bounds.sum() if self.unit == "point" else (bounds / self.usual(roster)).clamp(max=1.0).sum())

    def least_share(self, roster: Roster) -> float:
        """The share of all values that must lie in one power of two to stand out of the noise, almost surely."""
        tried = (self._HIGHEST - self._LOWEST) * self.features
        return self._deviation(self.features) * math.sqrt(2.0 * math.log(40.0 * tried)) / self.weight(roster)

    def _deviation(self, numbers: int) -> float:
        return self.noise.std(math.sqrt(numbers))


MOST_SHARE = 0.25  # a feature has this much of its values in one power of two; if that is not enough, nothing is


def too_noisy(scaling: PrivateScaling, roster: Roster) -> str | None:
    """Why the noise leaves nothing of the statistics, or None. Known before anybody is asked."""
    share = scaling.least_share(roster)
    if share <= MOST_SHARE:
        return None
    total = scaling.weight(roster)
    return (
        f"private statistics for the scaling of {scaling.features} features would drown in their noise: it is that of "
        f"{share * total:,.0f} {scaling.unit}s, and there are {total:,.0f}"
    )


def scale_privately(federation: Federation, scaling: PrivateScaling) -> Schema:
    """``scale_inputs`` by noisy sums, which are in the ledger like any others."""
    roster, everyone = federation.roster, federation.everyone()
    wrong = too_noisy(scaling, roster)
    if wrong is not None:
        raise ValueError(f"{wrong}; give public constants, more of the budget, or features that are fewer")
    usual, total = torch.tensor(scaling.usual(roster), dtype=torch.float64), scaling.weight(roster)
    shape = (scaling.features, 1, 1) if scaling.kind == "image" else roster.schema.shape
    center = torch.zeros(shape, dtype=torch.float64)

    radius = _radius(scaling, everyone, center, usual)
    mean = everyone.ask(scaling.means, center=center, radius=radius, usual=usual)["mean"].double() / total
    center = center + (radius * mean.clamp(-1.0, 1.0)).reshape(shape)
    radius = _radius(scaling, everyone, center, usual)
    moments = everyone.ask(scaling.moments, center=center, radius=radius, usual=usual)["moments"].double() / total
    mean, square = moments[0].clamp(-1.0, 1.0), moments[1].clamp(0.0, 1.0)
    # a variance that does not stand out of its noise could be any up to this, which keeps scaled inputs small
    least = 2.0 * scaling._deviation(2 * scaling.features) / total
    variance = radius.square() * torch.maximum(square - mean.square(), torch.tensor(least, dtype=torch.float64))
    return _use_scaling(federation, center + (radius * mean).reshape(shape), variance.reshape(shape))


def _radius(scaling: PrivateScaling, everyone: Cohort, center: Tensor, usual: Tensor) -> Tensor:
    """[features] the power of two below which the values lie; 0 where none stand out: all are at the centre."""
    counts = everyone.ask(scaling.counts, center=center, usual=usual)["counts"].double()
    roster = everyone.federation.roster
    there = counts > scaling.least_share(roster) * scaling.weight(roster)
    powers = torch.arange(scaling._LOWEST, scaling._HIGHEST, dtype=torch.float64)[:, None]
    return torch.where(there, 2.0 ** (powers + 1.0), 0.0).amax(0)
