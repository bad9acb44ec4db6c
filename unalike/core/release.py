"""Releases: what the server may see of what a task sends.

A release has two halves. The client half (select, clip, weigh, local noise) is written for one client and runs at the
client; the server half adds replies up as they come, so memory does not grow with the cohort unless ``Each`` is asked
for.
A release that makes no sense is refused when it is made, not when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from unalike.core.suggest import nearest
from unalike.privacy.dpsgd import LocalCost
from unalike.privacy.mechanisms import AdditiveNoise, DrawsLike, Norm, Randomizer
from unalike.privacy.mechanisms import clip as clipped
from unalike.privacy.sampling import Local, Sampling

Unit = Literal["client", "point"]
SHAPE, HELD = "shape", "secure.held"  # of a secure sum: what is told before its exchanges, and what is kept for them


class Release(Protocol):
    """What ``Cohort.ask(into=...)`` takes. ``Each``, ``Sum`` and ``Mean`` are the ones there are."""

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays that the task must send for this release; empty: all it sends."""
        ...

    @property
    def noise(self) -> AdditiveNoise | Randomizer | None: ...

    @property
    def unit(self) -> Unit: ...

    @property
    def cost(self) -> LocalCost | None:
        """What the task itself has spent on these arrays, by making them private (local DP-SGD)."""
        ...

    def at_client(self, arrays: Mapping[str, Tensor], draws: DrawsLike) -> dict[str, Tensor]:
        """The client half: what leaves this client."""
        ...

    def held(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the client keeps back for the exchanges of a secure sum."""
        ...

    def collect(self, shapes: dict[str, torch.Size]) -> Collector:
        """A fresh server half; ``shapes`` remembers an array's shape for the day when an empty cohort sends none."""
        ...


class Collector(Protocol):
    """The server half of a release: takes replies block by block, then gives the released values by name."""

    def add(self, positions: Tensor, arrays: Mapping[str, Tensor]) -> None: ...

    def finish(self, answered: int, expected: float, sampling: Sampling, draws: DrawsLike) -> dict[str, Tensor]: ...


def _check_bound(
    what: str, clip: float | None, sensitivity: float | None, noise: AdditiveNoise | None, unit: Unit
) -> None:
    for name, bound in (("clip", clip), ("sensitivity", sensitivity)):
        if bound is not None and not bound > 0:
            raise ValueError(f"{what}: {name}={bound}; expected a number above 0")
    if unit not in ("client", "point"):
        raise ValueError(f"{what}: unit={unit!r}; expected 'client' or 'point'")
    if noise is not None and clip is None and sensitivity is None:
        raise ValueError(
            f"{what}: noise without a bound protects nobody; set clip=... (the release then clips every client's "
            "array), or sensitivity=... (if the task itself bounds what one unit can change)"
        )
    if noise is not None and unit == "point" and sensitivity is None:
        raise ValueError(
            f"{what}: a clip bounds what a client sends, not what one of its points changes; give sensitivity=..., "
            "the most that one point can change the array"
        )


def _check_cost(what: str, cost: LocalCost | None, noise: object | None, weight: str | None = None) -> None:
    if cost is not None and (noise is not None or weight is not None):
        raise ValueError(
            f"{what}: the task has made its array private itself (cost=...); noise on top would be accounted twice, "
            "and a weight would leave the client unprotected: leave both out"
        )


def _array(arrays: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in arrays:
        raise KeyError(f"the release wants {name!r}, which the task does not send{nearest(name, arrays)}")
    return arrays[name]


class Each:
    """The server sees every client's own arrays (all of them, or those named), in cohort order.

    With ``noise`` every client adds it before sending (local privacy): two possible inputs of a client differ by at
    most 2·clip, or by ``sensitivity`` where the task bounds it. A randomizer (randomized response, k-bit rounding)
    bounds its input by itself and takes neither.

    ``simulation_only``: in a deployment the arrays stay at the client, and a simulation looks at them to measure. Where
    newcomers are served (``Federation.serving``) they count as sent in neither the traffic nor the ledger; in training
    they count, because the server could use them.
    """

    def __init__(
        self,
        *names: str,
        clip: float | None = None,
        noise: AdditiveNoise | Randomizer | None = None,
        sensitivity: float | None = None,
        unit: Unit = "client",
        cost: LocalCost | None = None,
        simulation_only: bool = False,
    ) -> None:
        _check_cost("Each", cost, noise)
        if simulation_only and (noise is not None or cost is not None):
            raise ValueError("Each: what is simulation_only leaves no client, so it needs no noise and has no cost")
        if isinstance(noise, Randomizer):
            if clip is not None or sensitivity is not None or unit != "client":
                raise ValueError(f"Each: {noise} bounds its input by itself; leave out clip, sensitivity and unit")
        else:
            _check_bound("Each", clip, sensitivity, noise, unit)
        if noise is not None and len(names) != 1:
            raise ValueError(f"Each: noise is accounted for one array; name exactly one, not {len(names)}")
        self.names = names
        self.clip, self.noise, self.unit, self.cost = clip, noise, unit, cost
        self.simulation_only = simulation_only
        self.sensitivity = sensitivity if sensitivity is not None or clip is None else Local().sensitivity(clip)

    def at_client(self, arrays: Mapping[str, Tensor], draws: DrawsLike) -> dict[str, Tensor]:
        sent = {name: _array(arrays, name) for name in self.names or arrays}
        if isinstance(self.noise, Randomizer):
            return {name: self.noise.randomize(value, draws) for name, value in sent.items()}
        if self.clip is not None:
            norm = "l2" if self.noise is None else self.noise.norm
            sent = {name: clipped(value, self.clip, norm) for name, value in sent.items()}
        if self.noise is not None and self.sensitivity is not None:
            sent = {name: self.noise.add(value, self.sensitivity, draws) for name, value in sent.items()}
        return sent

    def held(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def collect(self, shapes: dict[str, torch.Size]) -> Collector:
        return _Rows()


class _Rows:
    def __init__(self) -> None:
        self._positions: list[Tensor] = []
        self._arrays: list[Mapping[str, Tensor]] = []

    def add(self, positions: Tensor, arrays: Mapping[str, Tensor]) -> None:
        self._positions.append(positions)
        self._arrays.append(arrays)

    def finish(self, answered: int, expected: float, sampling: Sampling, draws: DrawsLike) -> dict[str, Tensor]:
        if not self._arrays:
            return {}
        order = torch.argsort(torch.cat(self._positions))
        return {name: torch.cat([part[name] for part in self._arrays])[order] for name in self._arrays[0]}


@dataclass(frozen=True)
class Sum:
    """The server sees the sum of one array over the cohort: each client's array clipped to ``clip``, noise on the sum.

    ``unit`` says whom the noise protects. For a client, one unit changes the sum by at most ``clip`` (twice that when
    the cohort has a fixed size and a client is replaced). For a point, the task bounds the change: ``sensitivity``.
    ``secure`` sums under masks (``core/secure.py``): the server learns the sum and no client's own array.
    """

    name: str
    clip: float | None = None
    noise: AdditiveNoise | None = None
    sensitivity: float | None = None
    unit: Unit = "client"
    secure: bool = False
    cost: LocalCost | None = None

    def __post_init__(self) -> None:
        _check_bound(type(self).__name__, self.clip, self.sensitivity, self.noise, self.unit)
        _check_cost(type(self).__name__, self.cost, self.noise)
        if self.secure and self.clip is None:
            raise ValueError(f"{type(self).__name__}: a secure sum is over bounded integers; set clip=...")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def at_client(self, arrays: Mapping[str, Tensor], draws: DrawsLike) -> dict[str, Tensor]:
        value = self._bounded(arrays)
        return {SHAPE: torch.tensor(value.shape, dtype=torch.int64)} if self.secure else {self.name: value}

    def held(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {HELD: self._bounded(arrays).reshape(-1)} if self.secure else {}

    def _bounded(self, arrays: Mapping[str, Tensor]) -> Tensor:
        value = _array(arrays, self.name)
        return value if self.clip is None else clipped(value, self.clip, self.norm)

    @property
    def norm(self) -> Norm:
        """The norm of the clip: that in which the noise measures."""
        return "l2" if self.noise is None else self.noise.norm

    def change(self, sampling: Sampling, rounding: float = 0.0) -> float:
        """The most that one unit changes the sum, under the neighbouring relation of the sampling.

        ``rounding``: by how much a client's array may have moved when it was put on a grid.
        """
        if self.sensitivity is not None:
            return self.sensitivity + 2.0 * rounding  # the client's array was rounded with the point and without it
        assert self.clip is not None
        return sampling.sensitivity(self.clip + rounding)

    def collect(self, shapes: dict[str, torch.Size]) -> Collector:
        return _Held(self.name, shapes) if self.secure else _Total(self, shapes)

    def divisor(self, answered: int, expected: float) -> float:
        """What the sum is divided by before it is shown."""
        return 1.0


class _Held:
    """The server half of a secure sum until its exchanges: it learns the shape of what the clients hold."""

    def __init__(self, name: str, shapes: dict[str, torch.Size]) -> None:
        self._name, self._shapes = name, shapes

    def add(self, positions: Tensor, arrays: Mapping[str, Tensor]) -> None:
        self._shapes[self._name] = torch.Size(arrays[SHAPE][0].tolist())

    def finish(self, answered: int, expected: float, sampling: Sampling, draws: DrawsLike) -> dict[str, Tensor]:
        return {}


class _Total:
    """A running sum in double precision, so that the order of blocks hardly matters.

    An empty Poisson cohort still releases noise: that nobody was drawn is nobody's business.
    """

    def __init__(self, release: Sum, shapes: dict[str, torch.Size]) -> None:
        self._release, self._shapes = release, shapes
        self._total: Tensor | None = None
        self._dtype = torch.float32

    def add(self, positions: Tensor, arrays: Mapping[str, Tensor]) -> None:
        value = arrays[self._release.name]
        self._dtype = value.dtype if value.is_floating_point() else torch.float32
        part = value.sum(0, dtype=torch.float64)
        self._total = part if self._total is None else self._total.add_(part)
        self._shapes[self._release.name] = part.shape

    def finish(self, answered: int, expected: float, sampling: Sampling, draws: DrawsLike) -> dict[str, Tensor]:
        release, total = self._release, self._total
        if total is None and release.noise is not None and release.name in self._shapes:
            total = torch.zeros(self._shapes[release.name], dtype=torch.float64)
        if total is None:
            return {}
        if release.noise is not None:
            total = release.noise.add(total, release.change(sampling), draws)
        return {release.name: total.to(self._dtype)}


@dataclass(frozen=True)
class Mean(Sum):
    """The server sees the mean of one array over the cohort.

    ``weight`` names a second array, a number that the client sends along: the mean is then Σ w·a / Σ w. Such weights
    depend on the data, so no bound on one client's influence holds, and noise is refused beside them. With noise the
    sum is divided by the *expected* number of clients, which no client changes.
    """

    weight: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_cost("Mean", self.cost, self.noise, self.weight)
        if self.weight is not None and (self.noise is not None or self.secure):
            raise ValueError(
                f"Mean({self.name!r}): weights from the clients' data break the bound that noise is calibrated to; "
                "leave weight out (every client then counts the same)"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.weight is None else (self.name, self.weight)

    def at_client(self, arrays: Mapping[str, Tensor], draws: DrawsLike) -> dict[str, Tensor]:
        sent = super().at_client(arrays, draws)
        return sent if self.weight is None else {**sent, self.weight: _array(arrays, self.weight)}

    def collect(self, shapes: dict[str, torch.Size]) -> Collector:
        return _Held(self.name, shapes) if self.secure else _Average(self, shapes)

    def divisor(self, answered: int, expected: float) -> float:
        return expected if self.noise is not None else answered


class _Average:
    def __init__(self, release: Mean, shapes: dict[str, torch.Size]) -> None:
        self._release = release
        self._sum = _Total(release, shapes)
        self._weight = 0.0

    def add(self, positions: Tensor, arrays: Mapping[str, Tensor]) -> None:
        name, weight = self._release.name, self._release.weight
        if weight is None:
            self._sum.add(positions, arrays)
            return
        w = arrays[weight].to(torch.float64).reshape(-1)
        if bool((w < 0).any()):
            raise ValueError(f"Mean({name!r}): a client sent a negative weight {weight!r}")
        self._weight += float(w.sum())
        value = arrays[name] if arrays[name].is_floating_point() else arrays[name].to(torch.float32)
        weighted = (w.to(value.dtype) @ value.reshape(len(w), -1)).reshape(value.shape[1:])
        self._sum.add(positions, {name: weighted[None]})

    def finish(self, answered: int, expected: float, sampling: Sampling, draws: DrawsLike) -> dict[str, Tensor]:
        release = self._release
        if release.noise is not None:
            count: float = expected
        else:
            count = answered if release.weight is None else self._weight
        if answered and not count > 0:
            raise ValueError(f"Mean({release.name!r}): the weights {release.weight!r} of all {answered} replies are 0")
        return {name: total / count for name, total in self._sum.finish(answered, expected, sampling, draws).items()}
