"""Releases: what the server may see of what a task sends.

A release has two halves. The client half (select, clip, weigh, local noise) is written for one client and runs where
the client lives; sums are added up there too. The server half merges what comes, so memory does not grow with the
cohort unless ``Each`` is asked for.
A release that makes no sense is refused when it is made, not when it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeGuard, get_args

import torch
from torch import Tensor

from unalike.core.bits import check_bits
from unalike.core.failure import Diverged
from unalike.core.notes import did_you_mean
from unalike.core.roster import Declarations
from unalike.privacy.discrete import grid, rounding, to_grid
from unalike.privacy.dpsgd import LocalCost
from unalike.privacy.mechanisms import AdditiveNoise, DrawsLike, Gaussian, Laplace, Norm, Randomizer, is_exact
from unalike.privacy.mechanisms import clip as clipped
from unalike.privacy.sampling import Everyone, Local, Relation, Sampling
from unalike.privacy.system import SystemDraws

if TYPE_CHECKING:
    from unalike.core.client import Client

Noise = Literal["seeded", "system"]
Trust = Literal["server", "nobody"]
_KNOWN = {"noise": get_args(Noise), "trust": get_args(Trust), "relation": get_args(Relation)}


@dataclass(frozen=True)
class Terms:
    """Both sides know them from the recipe; a request cannot change them.

    - ``noise``: "system" draws cohorts, batches, rounding and noise from the operating system, so that nobody can make
      them again. "seeded" repeats them from the seed, for experiments: whoever has the seed can take the noise off.
    - ``trust``: "server" has the noise added once, by a server that sees the sums. With "nobody" it is added before an
      array leaves its shard, or in shares by the clients of a secure sum.
    - ``relation``: what one unit does to a sum; a shard that adds noise scales it by that.
    - ``cohort``: the fewest and the most clients that are asked at once, where the recipe says so. Clients of a secure
      sum share the noise out among no more.
    """

    noise: Noise = "seeded"
    trust: Trust = "server"
    relation: Relation = "add_remove"
    cohort: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; expected one of: {', '.join(known)}")

    @property
    def system(self) -> bool:
        """Does the noise come from the operating system?"""
        return self.noise == "system"

    @property
    def at_shard(self) -> bool:
        """Is the noise on a sum added before it leaves its shard?"""
        return self.trust == "nobody"

    def cover(self, other: Terms) -> bool:
        """Do a shard's terms agree with the server's? Where the server adds the noise, only it needs the relation."""
        alike = (self.noise, self.trust) == (other.noise, other.trust)
        return alike and (not self.at_shard or self.relation == other.relation)


_TRIED, _LEAST_NOISE = 4000, 0.9  # draws of a release's noise; the chance that so many seem that small is below 1e-7
Unit = Literal["client", "point"]
SIZE = "size"  # as a weight: a client's declared size N̄, which both sides know, so that it is not sent
SECURE_SHAPE = "secure.shape"  # the shape of its array, which a client sends before a secure sum
SECURE_ARRAY = "secure.array"  # under this name the client keeps the array itself for the exchanges
SECURE_NOISE = "secure.noise"  # and under this the deviation of the noise that the sum is to have
BOUND = "declared.bound"  # beside the inputs of an ask: N̄ of its clients [C], for a sensitivity that depends on it
Inputs = Mapping[str, Tensor]
Cost = LocalCost | Callable[[Declarations], LocalCost]  # of clients by what they declare


class Release(Protocol):
    """What ``Cohort.ask(into=...)`` takes. ``Each``, ``Sum``, ``Mean`` and ``Stays`` are the ones there are."""

    kind: ClassVar[str]

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays that the task must send for this release; empty: all it sends."""

    @property
    def noise(self) -> AdditiveNoise | Randomizer | None: ...

    @property
    def unit(self) -> Unit: ...

    @property
    def cost(self) -> Cost | None:
        """What the task itself has spent on these arrays, by making them private (local DP-SGD)."""

    @property
    def bits(self) -> int | None:
        """Of each number in a client's message (``unalike.core.bits``); None: the number as it is."""

    @property
    def feedback(self) -> bool:
        """Does a client add what rounding took off to its next message?"""

    def resolve(self, inputs: Inputs, declared: Declarations) -> Release:
        """The release with numbers in place of functions of the ask's inputs and of what its clients declare."""

    def at_client(self, arrays: Mapping[str, Tensor], client: Client, draws: DrawsLike) -> dict[str, Tensor]:
        """The client half: what leaves this client, by itself or in a sum."""

    def keep_back(self, arrays: Mapping[str, Tensor], draws: DrawsLike) -> dict[str, Tensor]:
        """What the client keeps for a later ask."""

    @property
    def visible(self) -> tuple[str, ...] | None:
        """The arrays that the server sees of each client; None: all that the task sends."""


FLOATS = ("float16", "bfloat16", "float32", "float64")  # types of what clients add up
_TAIL = 10.0  # noise is longer than this many times its usual length with probability below 1e-20


@dataclass(frozen=True)
class Partial:
    """What one shard adds to a sum: Σ w·a and Σ w in double precision, over ``count`` clients."""

    total: Tensor
    weight: float
    count: int
    dtype: str = "float32"  # of what the clients sent


def _check_bound(what: str, clip: float | None, sensitivity: Any, noise: AdditiveNoise | None, unit: Unit) -> None:
    for name, bound in (("clip", clip), ("sensitivity", sensitivity)):
        if bound is not None and not callable(bound) and not bound > 0:
            raise ValueError(f"{what}: {name}={bound}; expected a number above 0")
    if unit not in ("client", "point"):
        raise ValueError(f"{what}: unit={unit!r}; expected 'client' or 'point'")
    number = None if callable(sensitivity) else sensitivity
    if clip is not None and number is not None and number > 2 * clip:
        raise ValueError(
            f"{what}: sensitivity={number} is more than any array clipped to {clip} can change; expected at most "
            f"{2 * clip}"
        )
    if noise is None:
        return
    if clip is None and sensitivity is None:
        raise ValueError(
            f"{what}: noise without a bound protects nobody; set clip=... (the release then clips every client's "
            "array), or sensitivity=... (if the task itself bounds what one unit can change)"
        )
    if unit == "point" and sensitivity is None:
        raise ValueError(
            f"{what}: a clip bounds what a client sends, not what one of its points changes; give sensitivity=..., "
            "the most that one point can change the array"
        )
    if unit == "point" or clip is None or sensitivity is None:
        return
    # what a client sends alone may differ by less than two clipped arrays do: by √2·clip where none is negative
    if what != "Each":
        raise ValueError(
            f"{what}: clip={clip} bounds what one client changes, so sensitivity=... would say something else; give one"
        )
    if number is not None and number < clip:  # arrays from 0 to the clip differ by that
        raise ValueError(
            f"{what}: sensitivity={number} is less than arrays clipped to {clip} can differ by; set clip to what "
            "the task bounds its array by"
        )


def _check_cost(what: str, cost: Cost | None, noise: object | None, weight: str | None = None) -> None:
    if cost is not None and (noise is not None or weight is not None):
        raise ValueError(
            f"{what}: the task has made its array private itself (cost=...); noise on top would be accounted twice, "
            "and a weight would leave the client unprotected: leave both out"
        )


def _array(arrays: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in arrays:
        raise KeyError(f"the release wants {name!r}, which the task does not send{did_you_mean(name, arrays)}")
    return arrays[name]


class Each:
    """The server sees every client's own arrays (all of them, or those named), in cohort order.

    With ``noise`` every client adds it before sending (local privacy): two possible inputs of a client differ by at
    most 2·clip, or by ``sensitivity`` where the task bounds it; a function of the client gives each its own. A
    randomizer (randomized response, k-bit rounding) bounds its input by itself and takes neither. ``note``: what the
    transcript says besides. ``bits``, ``feedback``: as for ``Sum``.
    """

    kind: ClassVar[str] = "each"

    def __init__(
        self,
        *names: str,
        clip: float | None = None,
        noise: AdditiveNoise | Randomizer | None = None,
        sensitivity: float | Callable[[Client], Tensor] | None = None,
        unit: Unit = "client",
        cost: Cost | None = None,
        note: str | None = None,
        bits: int | None = None,
        feedback: bool = False,
    ) -> None:
        _check_cost("Each", cost, noise)
        check_bits("Each", bits, feedback)
        if bits is not None and (noise is not None or len(names) != 1):
            raise ValueError("Each: bits=... is for one array without noise of its own; name exactly one")
        if isinstance(noise, Randomizer):
            if clip is not None or sensitivity is not None or unit != "client":
                raise ValueError(f"Each: {noise} bounds its input by itself; leave out clip, sensitivity and unit")
        else:
            _check_bound("Each", clip, sensitivity, noise, unit)
        if noise is not None and len(names) != 1:
            raise ValueError(f"Each: noise is accounted for one array; name exactly one, not {len(names)}")
        self.names, self.note, self.bits, self.feedback = names, note, bits, feedback
        self.clip, self.noise, self.unit, self.cost = clip, noise, unit, cost
        self.sensitivity = sensitivity if sensitivity is not None or clip is None else Local().sensitivity(clip)

    @property
    def bounded(self) -> bool:
        """Is there a bound on what an honest client sends?"""
        return self.clip is not None and not callable(self.sensitivity)

    def resolve(self, inputs: Inputs, declared: Declarations) -> Each:
        if not callable(self.cost):
            return self
        made = copy(self)
        made.cost = self.cost(declared)
        return made

    def at_client(self, arrays: Mapping[str, Tensor], client: Client, draws: DrawsLike) -> dict[str, Tensor]:
        sent = {name: _array(arrays, name) for name in self.names or arrays}
        if isinstance(self.noise, Randomizer):
            return {name: self.noise.randomize(value, draws) for name, value in sent.items()}
        if self.clip is not None:
            norm = "l2" if self.noise is None else self.noise.norm
            sent = {name: clipped(value, self.clip, norm) for name, value in sent.items()}
        noise, bound = self.noise, self.sensitivity
        if noise is not None and callable(bound):
            unit = bound(client)  # a tensor, which the mechanism does not take: noise in units of it
            double = {
                name: noise.add(value.to(torch.float64) / unit, 1.0, draws) * unit for name, value in sent.items()
            }
            sent = {name: value.to(sent[name].dtype) for name, value in double.items()}
        elif noise is not None and isinstance(bound, float | int):
            sent = {name: noise.add(value, bound, draws) for name, value in sent.items()}
        return sent

    def keep_back(self, arrays: Mapping[str, Tensor], draws: DrawsLike) -> dict[str, Tensor]:
        return {}

    @property
    def visible(self) -> tuple[str, ...] | None:
        return self.names or None


class Stays:
    """The arrays do not leave their client: a later ask may take them as inputs there, by ``replies.held(name)``."""

    kind: ClassVar[str] = "stays"
    noise: ClassVar[None] = None
    unit: ClassVar[Unit] = "client"
    cost: ClassVar[None] = None
    visible: ClassVar[tuple[str, ...]] = ()
    bits: ClassVar[None] = None
    feedback: ClassVar[bool] = False

    def __init__(self, *names: str) -> None:
        if not names:
            raise ValueError("Stays: name the arrays that stay at their client")
        self.names = names

    def resolve(self, inputs: Inputs, declared: Declarations) -> Stays:
        return self

    def at_client(self, arrays: Mapping[str, Tensor], client: Client, draws: DrawsLike) -> dict[str, Tensor]:
        return {}

    def keep_back(self, arrays: Mapping[str, Tensor], draws: DrawsLike) -> dict[str, Tensor]:
        return {name: _array(arrays, name) for name in self.names}


@dataclass(frozen=True)
class Sum:
    """The server sees the sum of one array over the cohort: each client's array clipped to ``clip``, noise on the sum.

    ``unit`` says whom the noise protects. For a client, one unit changes the sum by at most ``clip`` (twice that when
    the cohort has a fixed size and a client is replaced). For a point, the task bounds the change: ``sensitivity``, a
    number or a function of the ask's inputs, with N̄ of its clients under ``BOUND``.
    ``secure`` sums under masks (``core/secure.py``): the server learns the sum and no client's own array.
    ``of_rows``: a client's array adds up one term for each of its rows, each no longer than the ``sensitivity``; so the
    server knows how long a sum can be, and leaves out a shard whose sum is longer.
    ``bits``: a client sends so many (4 to 16) for each number, rounded at random, right on average; in a secure sum the
    ring is as small as so many bits allow. ``feedback``: it adds what rounding took off to its next message.
    """

    kind: ClassVar[str] = "sum"

    name: str
    clip: float | None = None
    noise: AdditiveNoise | None = None
    sensitivity: float | Callable[[Inputs], float] | None = None
    unit: Unit = "client"
    secure: bool = False
    cost: Cost | None = None
    of_rows: bool = False
    bits: int | None = None
    feedback: bool = False

    def __post_init__(self) -> None:
        _check_bound(type(self).__name__, self.clip, self.sensitivity, self.noise, self.unit)
        _check_cost(type(self).__name__, self.cost, self.noise)
        check_bits(type(self).__name__, self.bits, self.feedback)
        if self.bits is not None and self.noise is not None and (self.clip is None or self.unit == "point"):
            raise ValueError(
                f"{type(self).__name__}: rounding to few bits moves an array by more than one point does; bits=... "
                "goes with noise for clients and a clip"
            )
        if self.feedback and self.secure:
            raise ValueError(f"{type(self).__name__}: an array under masks is rounded without feedback; leave it out")
        if self.of_rows and self.noise is not None and (self.unit != "point" or self.sensitivity is None):
            raise ValueError(
                f"{type(self).__name__}: of_rows says that each row adds a term; set unit='point', and sensitivity=... "
                "to the most that a term can be long"
            )
        if self.secure and self.clip is None:
            raise ValueError(f"{type(self).__name__}: a secure sum is over bounded integers; set clip=...")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def resolve(self, inputs: Inputs, declared: Declarations) -> Sum:
        known: dict[str, Any] = {}
        if callable(self.sensitivity):
            bound = float(self.sensitivity({**inputs, BOUND: declared.bound}))
            if not 0 < bound < math.inf:
                raise ValueError(f"the inputs bound a change of {self.name!r} by {bound}; expected a number above 0")
            known["sensitivity"] = bound
        if callable(self.cost):
            known["cost"] = self.cost(declared)
        return replace(self, **known) if known else self

    def at_client(self, arrays: Mapping[str, Tensor], client: Client, draws: DrawsLike) -> dict[str, Tensor]:
        value = self._bounded(arrays, is_exact(draws))
        return {SECURE_SHAPE: torch.tensor(value.shape, dtype=torch.int64)} if self.secure else {self.name: value}

    def keep_back(self, arrays: Mapping[str, Tensor], draws: DrawsLike) -> dict[str, Tensor]:
        return {SECURE_ARRAY: self._bounded(arrays, False).reshape(-1)} if self.secure else {}

    def _bounded(self, arrays: Mapping[str, Tensor], exact: bool) -> Tensor:
        """The array as it counts in the sum: clipped, and put on the grid where the noise is exact."""
        value = _array(arrays, self.name)
        if self.clip is None:
            return value
        step = self._step(value.numel()) if exact else None
        if step is None or self.secure:  # a secure sum has a grid of its own
            return clipped(value, self.clip, self.norm)
        bound = self.clip - rounding(value.numel(), step, self.norm)
        return to_grid(clipped(value, bound, self.norm), step, self.norm)

    def _step(self, numbers: int) -> float | None:
        """The step of the grid on which clients' arrays are added exactly; None: they are on no grid."""
        if self.noise is None or self.clip is None or self.unit == "point":
            return None
        return grid(self.clip, self.noise.std(self.clip), numbers, self.norm)

    @property
    def norm(self) -> Norm:
        """The norm of the clip: that in which the noise measures."""
        return "l2" if self.noise is None else self.noise.norm

    def change(self, sampling: Sampling, moved: float = 0.0) -> float:
        """The most that one unit changes the sum, under the neighbouring relation of the sampling.

        ``moved``: by how much a client's array may have moved when it was put on a grid.
        """
        if self.sensitivity is None:
            assert self.clip is not None
            return sampling.sensitivity(self.clip + moved)
        assert not callable(self.sensitivity), "the release is resolved before it is sent"
        if self.unit == "client":  # a bound on what it sends, like a clip
            return sampling.sensitivity(self.sensitivity + moved)
        return self.sensitivity + 2.0 * moved  # the client's array was rounded with the point and without it

    def secret_noise(self, terms: Terms) -> dict[str, Tensor]:
        """What a client of a secure sum keeps to make its share of the noise.

        The whole deviation, its clip, and the fewest and the most clients among which it is shared (0: not known).
        """
        if not (self.secure and terms.at_shard and self.noise is not None):
            return {}
        std = self.noise.std(self.change(Everyone(terms.relation)))
        return {SECURE_NOISE: torch.tensor([std, self.clip, *(terms.cohort or (0, 0))], dtype=torch.float64)}

    def noisy(self, total: Tensor, sampling: Sampling, draws: DrawsLike) -> Tensor:
        """The sum with its noise, where it has some."""
        if self.noise is None:
            return total
        step = self._step(total.numel()) if is_exact(draws) else None
        return self.noise.add(total, self.change(sampling), draws, step)

    def test_noise(self, sampling: Sampling) -> None:
        """Refuse a release whose noise, drawn here for zeros, is clearly less than its event tells the ledger."""
        if not isinstance(self.noise, Gaussian | Laplace):
            return
        zeros = torch.zeros(_TRIED, dtype=torch.float64)
        told = self.noise.event().noise_multiplier * self.change(sampling)  # of Laplace noise its scale
        told *= math.sqrt(2.0) if isinstance(self.noise, Laplace) else 1.0
        made = float(self.noisy(zeros, sampling, SystemDraws()).std())
        if not made > _LEAST_NOISE * told:
            raise RuntimeError(
                f"the noise of {self.name!r} is to have a deviation of {told:.4g}, but {_TRIED} draws have {made:.4g}: "
                "something in this installation takes it away, so nothing is sent. Install Unalike anew"
            )

    @property
    def visible(self) -> tuple[str, ...]:
        return (SECURE_SHAPE,) if self.secure else ()

    def divisor(self, answered: int, weight: float, expected: float) -> float:
        """What the sum is divided by before it is shown."""
        return 1.0


@dataclass(frozen=True)
class Mean(Sum):
    """The server sees the mean of one array over the cohort.

    ``weight`` names a second array, a number that the client sends along, or is ``SIZE``, the client's declared size,
    which is not sent: the mean is then Σ w·a / Σ w. Weights break the bound on one client's influence, so noise is
    refused beside them. With noise the sum is divided by the *expected* number of clients, which no client changes.
    """

    kind: ClassVar[str] = "mean"

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

    def at_client(self, arrays: Mapping[str, Tensor], client: Client, draws: DrawsLike) -> dict[str, Tensor]:
        sent = super().at_client(arrays, client, draws)
        return sent if self.weight in (None, SIZE) else {**sent, self.weight: _array(arrays, self.weight)}

    def divisor(self, answered: int, weight: float, expected: float) -> float:
        if self.noise is not None:
            return expected
        return float(answered) if self.weight is None else weight


def protects(releases: Sequence[Release]) -> bool:
    """Is all that they let out private, so that nothing else about a client may show either?"""
    out = [one for one in releases if not isinstance(one, Stays)]
    return bool(out) and all(one.noise is not None or one.cost is not None for one in out)


def check_held(task: str, held: Mapping[str, object], releases: Sequence[Release]) -> None:
    """Refuse inputs that clients hold where one point is protected: they were made from the same points, bare."""
    for one in releases if held else ():
        if one.cost is not None or (one.noise is not None and one.unit == "point"):
            raise ValueError(
                f"{task}: {', '.join(held)} lies at the clients and follows from their points, so noise for one point "
                "would not protect them; send what it starts from, or keep it by a task that protects points, too"
            )


def is_summed(release: Release) -> TypeGuard[Sum]:
    """Do the shards add it up? A secure sum has its own exchanges."""
    return isinstance(release, Sum) and not release.secure


def longest(
    release: Sum | Each, count: int, numbers: int, noised: bool, weight: float = 0.0, rows: float = math.inf
) -> float | None:
    """The longest that an honest array or sum of ``count`` clients can be; None: nothing bounds it.

    A clip bounds it, or the clients' declared ``rows`` where each adds a term. Else a sensitivity says how far a row or
    a client moves a sum, but not from where.
    """
    bound, noise = release.sensitivity, None if isinstance(release.noise, Randomizer) else release.noise
    if callable(bound) and noise is not None and noised:
        return None
    if release.clip is not None:
        change = release.clip if bound is None or callable(bound) else bound
        limit = release.clip * (count if getattr(release, "weight", None) is None else weight)
    elif isinstance(bound, float | int) and getattr(release, "of_rows", False):
        change, limit = bound, bound * rows
    else:
        return None
    if noise is None or not noised:
        return limit
    return limit + _TAIL * noise.std(2.0 * change) * math.sqrt(numbers)  # twice: where neighbours are replaced


class Adder:
    """The sum over a shard's clients, in double precision, so that the order of blocks hardly matters."""

    def __init__(self, release: Sum) -> None:
        self._name, self._weight_name = release.name, getattr(release, "weight", None)
        self._total: Tensor | None = None
        self._weight, self._count, self._dtype = 0.0, 0, "float32"

    def add(self, arrays: Mapping[str, Tensor], bounds: Tensor) -> None:
        value, weight = arrays[self._name], self._weight_name
        value = value if value.is_floating_point() else value.to(torch.float32)
        if weight is None:
            part = value.sum(0, dtype=torch.float64)
        else:
            w = (bounds if weight == SIZE else arrays[weight]).to(torch.float64).reshape(-1)
            self._weight += float(w.sum())
            part = (w.to(value.dtype) @ value.reshape(len(w), -1)).reshape(value.shape[1:]).to(torch.float64)
        self._count, self._dtype = self._count + len(value), str(value.dtype).removeprefix("torch.")
        self._total = part if self._total is None else self._total.add_(part)

    def partial(self) -> Partial | None:
        return None if self._total is None else Partial(self._total, self._weight, self._count, self._dtype)


class Total:
    """The server half of a sum: merges the shards' partial sums.

    noised: the shards have put the noise on their parts already.
    """

    def __init__(self, release: Sum, noised: bool = False) -> None:
        self._release, self.name, self._noised = release, release.name, noised and release.noise is not None
        self._parts = 0
        self.shape: tuple[int, ...] | None = None  # that the sum is to have: by a dry run, or by the first partial
        self._total: Tensor | None = None
        self._weight, self._count, self._dtype = 0.0, 0, torch.float32

    def refuse(self, partial: Partial, rows: float = math.inf) -> str | None:
        """What is wrong with a shard's part of the sum, if anything; ``rows``: as many its clients declare together."""
        name, total = self._release.name, partial.total
        if partial.count < 0 or not 0 <= partial.weight < math.inf:
            return f"sent a partial sum of {name!r} over {partial.count} clients of weight {partial.weight}"
        if not math.isfinite(float(total.sum())):  # a NaN or infinity anywhere survives a sum
            return Diverged(f"sent a partial sum of {name!r} that is not finite")
        limit = longest(self._release, partial.count, total.numel(), self._noised, partial.weight, rows)
        if limit is not None:
            l1 = self._release.norm == "l1" and not self._noised
            length = float(torch.linalg.vector_norm(total, ord=1 if l1 else 2))
            if not length <= limit * (1 + 1e-5):
                if self._release.clip is None:
                    most = f"{rows:.0f} rows of {self._release.sensitivity:g}"
                else:
                    most = f"{partial.count} times its clip {self._release.clip:g}"
                noise = " and noise" if self._noised else ""
                return f"sent a sum of {name!r} of norm {length:.4g}, beyond {most}{noise}"
        if self.shape is not None and self.shape != tuple(total.shape):
            return f"sent {name!r} of shape {tuple(total.shape)}, expected {self.shape}"
        return None

    def merge(self, partial: Partial) -> None:
        """Take a shard's part of the sum, which was not refused."""
        total, self.shape = partial.total, tuple(partial.total.shape)
        self._parts += 1
        self._dtype = torch.float64 if partial.dtype == "float64" else torch.float32  # so are sums of halves
        self._total = total.clone() if self._total is None else self._total.add_(total)
        self._weight, self._count = self._weight + partial.weight, self._count + partial.count

    def like(self, sent: Tensor) -> None:
        """What a client would send, where nobody does: the sum has its type."""
        self._dtype = sent.dtype if sent.is_floating_point() else torch.float32

    def finish(self, expected: float, sampling: Sampling, draws: DrawsLike, parts: int = 1) -> dict[str, Tensor]:
        """The sum or mean, with its noise.

        parts: the number of shards. Where they add the noise, the server adds that of shards without a client in the
        cohort: the amount of noise must not show whose clients are in the sum.
        """
        release, total = self._release, self._total
        if total is None and release.noise is not None and self.shape is not None:
            total = torch.zeros(self.shape, dtype=torch.float64)  # it must not show that nobody was drawn
        if total is None:
            return {}
        for _ in range(max(0, parts - self._parts) if self._noised else 1):
            total = release.noisy(total, sampling, draws)
        divisor = release.divisor(self._count, self._weight, expected)
        if self._count and not divisor > 0:
            raise ValueError(f"Mean({release.name!r}): the weights of all {self._count} replies are 0")
        return {release.name: (total / divisor).to(self._dtype)}


KINDS: dict[str, Callable[..., Release]] = {
    "each": Each,
    "sum": lambda name: Sum(name),
    "mean": lambda name, weight=None: Mean(name, weight=weight),
    "stays": Stays,
}
