"""The steps of DP-SGD inside the one training loop (``learn/local.py``): Poisson batches and private gradients.

What they cost is in ``privacy/dpsgd.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from unalike.core import dropout
from unalike.core.client import Client
from unalike.learn.ghost import GhostNorms, clip_factors
from unalike.learn.objective import Batch, Objective, Params, Supervised, loss_of
from unalike.privacy.dpsgd import PointPrivacy
from unalike.privacy.mechanisms import DrawsLike, add_gaussian, is_exact


@dataclass(frozen=True)
class OwnBatch:
    """A client's own expected batch size, and all sizes, ascending, that others of its block may have.

    A batch is computed in pieces of the room that the smallest size needs, so that a client with small batches need not
    wait for rows that only others have. ``whole``: in one piece, for steps that must not be taken apart.
    """

    size: Tensor  # of this client
    sizes: tuple[int, ...]
    whole: bool = False

    @property
    def piece(self) -> int:
        """How many rows are computed at once."""
        return batch_capacity(self.sizes[-1 if self.whole else 0])

    def pieces(self) -> Tensor:
        """How many pieces this client's batches have; that depends on no other client."""
        return sum((self.size == one) * self.pieces_of(one) for one in self.sizes) + torch.zeros((), dtype=torch.int64)

    def pieces_of(self, size: int) -> int:
        return math.ceil(batch_capacity(size) / self.piece)


@dataclass(frozen=True)
class Piece(Batch):
    """Some rows of a batch; the gradients of all its pieces are added up before the step."""

    begins: Tensor  # is it the first of its batch?


class PoissonBatches:
    """Which rows a step of DP-SGD takes; drawn when the step comes: memory does not grow with samples times steps."""

    def __init__(
        self, client: Client, steps: int | None, epochs: int | None, batch: int | None, own: OwnBatch | None = None
    ) -> None:
        self._client, self._batch, self._own = client, batch, own
        self.active: Tensor | None = None
        passes, capacity = epochs or 0, client.capacity
        if own is not None:
            whole = [passes * math.ceil(capacity / min(b, capacity)) if steps is None else steps for b in own.sizes]
            self._steps = max(count * own.pieces_of(b) for count, b in zip(whole, own.sizes, strict=True))
            mine = passes * ((client.bound + own.size - 1) // own.size) if steps is None else torch.tensor(steps)
            pieces, turn = own.pieces(), torch.arange(self._steps)
            self.active = ((turn + 1) % pieces == 0) & (turn // pieces < mine)  # a step is taken after its last piece
        elif steps is not None:
            self._steps = steps
        else:
            size = capacity if batch is None else min(batch, capacity)
            self._steps = passes * math.ceil(capacity / size)
            if not client.full and batch is not None:
                self.active = torch.arange(self._steps) < passes * ((client.bound + batch - 1) // batch)
        self.own_steps = torch.as_tensor(self._steps if self.active is None else self.active.sum()).clamp(min=1)

    def batches(self, x: Tensor, y: Tensor | None) -> Iterator[Batch]:
        """The samples of each step, or of each piece of one."""
        client, expected = self._client, self._batch
        if self._own is not None:
            yield from self._in_pieces(x, y, self._own)
            return
        for _ in range(self._steps):
            if expected is None:
                yield Batch(x, y, client.mask.to(torch.float32))
            else:
                rows, taken = self._drawn(expected, expected)
                yield Batch(x[rows], None if y is None else y[rows], taken.to(torch.float32))

    def _in_pieces(self, x: Tensor, y: Tensor | None, own: OwnBatch) -> Iterator[Piece]:
        pieces, within = own.pieces(), torch.arange(own.piece)
        rows, taken = self._drawn(own.size, own.sizes[-1])
        for turn in range(self._steps):
            number = turn % pieces
            if turn:
                new_rows, new_taken = self._drawn(own.size, own.sizes[-1])
                rows, taken = torch.where(number == 0, new_rows, rows), torch.where(number == 0, new_taken, taken)
            place = number * own.piece + within
            inside = place < len(rows)
            place = torch.where(inside, place, 0)
            chosen, weight = rows[place], (taken[place] & inside).to(torch.float32)
            yield Piece(x[chosen], None if y is None else y[chosen], weight, number == 0)

    def _drawn(self, expected: int | Tensor, most: int) -> tuple[Tensor, Tensor]:
        client = self._client
        rate = expected / client.bound.to(torch.float64)  # of the declared size: n itself is not public
        return poisson_batch(client.n, client.capacity, rate, client.noise, most)


class PrivateGradient:
    """The gradient of a DP-SGD step, and the (unprotected) mean loss of its batch."""

    def __init__(
        self,
        objective: Objective,
        private: PointPrivacy,
        noise: Tensor | None,
        batch: int | Tensor | None,
        client: Client,
    ) -> None:
        if noise is None:
            if private.noise_multiplier is None:
                raise ValueError("each client has its own noise here: let it derive that by local.own(declared)")
            noise = torch.tensor(private.noise_multiplier)
        self._noise, self._bound, self._draws = noise, private.clip, client.noise
        self._expected = client.bound if batch is None else torch.minimum(client.bound, torch.as_tensor(batch))

        def of_one(params: Params, x: Tensor, y: Tensor | None, place: Tensor) -> Tensor:
            masks = dropout.masks()
            with dropout.dropping(None if masks is None else masks.at(place)):  # each point has a mask of its own
                return objective(params, Batch(x[None], None if y is None else y[None], None))

        self._before: Tensor | None = None  # the sum of a batch's earlier pieces
        self._each = grad_and_value(of_one)
        self._ghost = GhostNorms.of(objective.model, client.x[:2]) if isinstance(objective, Supervised) else None

    def __call__(self, params: Params, batch: Batch) -> tuple[Params, Tensor]:
        assert batch.weight is not None
        if self._ghost is not None and isinstance(params, Tensor) and batch.y is not None:
            total, losses = self._ghost.clipped_sum(params, batch.x, batch.y, loss_of, batch.weight, self._bound)
            return self._noisy_mean(total, batch), batch.mean(losses)
        labels = None if batch.y is None else 0
        places = torch.arange(len(batch.x))
        gradients, losses = vmap(self._each, in_dims=(None, 0, labels, 0))(params, batch.x, batch.y, places)
        parts = {"": gradients} if isinstance(gradients, Tensor) else gradients
        flat = [part.reshape(len(batch.weight), -1) for part in parts.values()]
        rows = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
        made = self._noisy_mean(clipped_sum(rows, batch.weight, self._bound), batch)
        loss = batch.mean(losses)
        if isinstance(gradients, Tensor):
            return made, loss
        pieces = torch.split(made, [part.shape[1] for part in flat])
        return {name: piece.view(params[name].shape) for name, piece in zip(parts, pieces, strict=True)}, loss

    def _noisy_mean(self, total: Tensor, batch: Batch) -> Tensor:
        if isinstance(batch, Piece):
            if self._before is not None:
                total = total + torch.where(batch.begins, 0.0, self._before)
            self._before = total
        return noisy_mean(total, self._bound, self._noise, self._expected, self._draws)


def private_gradient(
    gradients: Tensor,
    taken: Tensor,
    bound: float,
    noise_multiplier: float | Tensor,
    expected: float | Tensor,
    draws: DrawsLike,
) -> Tensor:
    """The step's gradient [d] from per-point gradients [capacity, d]: clip, sum over the batch, add noise, divide.

    ``taken`` [capacity] marks the points that the Poisson draw put into the batch. The divisor is the expected batch
    size q·N, not the actual one, which would be a second release. Works inside vmap.
    """
    return noisy_mean(clipped_sum(gradients, taken, bound), bound, noise_multiplier, expected, draws)


def clipped_sum(gradients: Tensor, taken: Tensor, bound: float) -> Tensor:
    """Σ of the taken points' gradients, each clipped to the bound."""
    # one pass for the norms and one for the rows: the gradients of all samples are by far the largest array of a step
    factor = clip_factors(torch.linalg.vector_norm(gradients, dim=-1), bound)
    return (taken.to(factor.dtype) * factor) @ gradients.nan_to_num(0.0, 0.0, 0.0)


def noisy_mean(
    total: Tensor, bound: float, noise_multiplier: float | Tensor, expected: float | Tensor, draws: DrawsLike
) -> Tensor:
    """The step's gradient from the sum of clipped gradients: add noise, divide by the expected batch size.

    Noise from the operating system is exact: the sum is rounded to a grid, which counts as sensitivity.
    """
    if is_exact(draws):
        return add_gaussian(total, bound, noise_multiplier, draws) / expected
    noise = draws.normal(*total.shape).to(total.dtype)
    return (total + noise_multiplier * bound * noise) / expected


@lru_cache(maxsize=256)
def batch_capacity(expected: int) -> int:
    """Room for a Poisson batch of this expected size: it is too small with probability below 1e-12 in a step.

    The size is binomial with mean ``expected``, whose upper tail lies below the Poisson distribution's. In the rare
    case some points are left out at random; this can be told apart with that probability only, so it adds at most
    1e-12 a step to δ.
    """
    from scipy.stats import poisson  # a second to import, and only Poisson batches need it

    return int(poisson.isf(1e-12, expected)) + 1


def poisson_batch(
    n: Tensor | int, capacity: int, rate: Tensor | float, draws: DrawsLike, most: int
) -> tuple[Tensor, Tensor]:
    """A Poisson batch at this rate: rows [room] of 0..capacity−1, and which of them are really taken.

    The rows with the smallest of n uniform numbers are candidates, and those with a number below the rate are taken.
    There is room for a batch of ``most`` rows, the largest that is to be expected of any client of a block.
    """
    room = min(batch_capacity(most), capacity)
    u = ((draws.bits(capacity) >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
    u = torch.where(torch.arange(capacity) < n, u, 2.0)
    smallest, rows = torch.topk(u, room, largest=False, sorted=True)
    return rows, smallest < torch.as_tensor(rate, dtype=torch.float64).clamp(max=1.0)
