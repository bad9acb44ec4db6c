"""The steps of DP-SGD inside the one training loop (``learn/local.py``): Poisson batches and private gradients.

What they cost is in ``privacy/dpsgd.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from unalike.core import dropout
from unalike.core.client import Client
from unalike.core.torch_internals import computed_singly
from unalike.learn.ghost import GhostNorms, clip_factors
from unalike.learn.objective import Batch, Objective, Params, Supervised, loss_of, take_rows
from unalike.privacy.dpsgd import PointPrivacy
from unalike.privacy.mechanisms import DrawsLike, add_gaussian, is_exact


@dataclass(frozen=True)
class Drawn(Batch):
    """A Poisson batch, or some rows of one."""

    step: int = 0  # which step of its client it belongs to
    first: int = 0  # the place of its first row in the whole batch

    def split(self, rows: int) -> Iterator[Drawn]:
        """A few rows after the other."""
        for begin in range(0, len(self.x), rows):
            part = slice(begin, begin + rows)
            y, weight = (None if one is None else one[part] for one in (self.y, self.weight))
            yield Drawn(self.x[part], y, weight, step=self.step, first=begin)


class PoissonBatches:
    """Which rows a step of DP-SGD takes; drawn when the step comes: memory does not grow with samples times steps.

    A client that is computed singly takes the rows that were drawn and no others. In a block of clients all have the
    same room for rows, in which those that were not drawn count nothing. The draws are the same. ``batch``: the
    expected size; a tensor is the client's own, out of the ``sizes`` that others of its block may have.
    """

    def __init__(
        self,
        client: Client,
        steps: int | None,
        epochs: int | None,
        batch: int | Tensor | None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        self._client, self._batch, self._singly = client, batch, computed_singly()
        self.active: Tensor | None = None  # [steps]: does the client still train? None: every client of the block does
        capacity, passes = client.capacity, epochs or 0
        least, self._most = (sizes[0], sizes[-1]) if sizes else (batch, batch)
        mine = torch.tensor(passes) if batch is None else passes * ((client.bound + batch - 1) // batch)
        if steps is not None:
            self._steps = steps
        elif self._singly:
            self._steps = int(mine)
        else:
            assert not isinstance(least, Tensor)
            self._steps = passes if least is None else passes * math.ceil(capacity / min(least, capacity))
            if sizes or not (client.full or batch is None):
                self.active = torch.arange(self._steps) < mine
        self.own_steps = torch.as_tensor(self._steps if self.active is None else self.active.sum()).clamp(min=1)

    def batches(self, x: Tensor, y: Tensor | None) -> Iterator[Drawn]:
        """The samples of each step."""
        client = self._client
        for step in range(self._steps):
            if self._batch is None:
                yield Drawn(x, y, client.mask.to(torch.float32), step=step)
                continue
            rate = self._batch / client.bound.to(torch.float64)  # of the declared size: n itself is not public
            if self._singly:
                rows = poisson_rows(client.n, client.capacity, rate, client.noise)
                yield Drawn(x.index_select(0, rows), None if y is None else y.index_select(0, rows), None, step=step)
            else:
                assert isinstance(self._most, int)
                rows, there = poisson_batch(client.n, client.capacity, rate, client.noise, self._most)
                weight = there.to(torch.float32)
                yield Drawn(take_rows(x, rows), None if y is None else y[rows], weight, step=step)


AT_ONCE = 1 << 22  # numbers that are held for the gradients of a few rows, before the next few are computed


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
                raise ValueError(
                    "each client has its own noise here: let it derive that by local.private_inputs(declared)"
                )
            noise = torch.tensor(private.noise_multiplier)
        self._noise, self._bound, self._draws, self._rows = noise, private.clip, client.noise, client.capacity
        expected = client.bound if batch is None else torch.minimum(client.bound, torch.as_tensor(batch))
        self._expected = expected.to(torch.float64 if is_exact(client.noise) else torch.float32)

        def of_one(params: Params, x: Tensor, y: Tensor | None, step: int, place: Tensor) -> Tensor:
            masks = dropout.masks()
            own = None if masks is None else masks.of(step, place)  # each point has a mask of its own
            with dropout.dropout_from(own):
                return objective(params, Batch(x[None], None if y is None else y[None], None))

        self._each = grad_and_value(of_one)
        self._supervised = objective if isinstance(objective, Supervised) else None
        self._ghost = None if self._supervised is None else GhostNorms.of(self._supervised.model, client.x[:2])
        self._by_hand = self._ghost is not None and self._ghost.by_hand

    def __call__(self, params: Params, batch: Batch) -> tuple[Params, Tensor]:
        batch = batch if isinstance(batch, Drawn) else Drawn(batch.x, batch.y, batch.weight)
        # nothing is differentiated by autograd here; to know that saves a tenth of a small step
        with torch.inference_mode() if self._by_hand and computed_singly() else nullcontext():
            total, loss = self._noisy_sum(params, batch)
        gradient = total / self._expected
        if isinstance(params, Tensor):
            return gradient.to(params.dtype), loss
        pieces = zip(params.items(), torch.split(gradient, [part.numel() for part in params.values()]), strict=True)
        return {name: piece.view(old.shape).to(old.dtype) for (name, old), piece in pieces}, loss

    def _noisy_sum(self, params: Params, batch: Drawn) -> tuple[Tensor, Tensor]:
        sizes = [part.numel() for part in ([params] if isinstance(params, Tensor) else params.values())]
        numbers = sum(sizes) if self._ghost is None else self._ghost.numbers
        made = [self._clipped_sum(params, part) for part in batch.split(max(16, AT_ONCE // numbers))]
        total = sum((one for one, _ in made[1:]), made[0][0]) if made else self._nothing(sum(sizes), params)
        losses = [one for _, one in made]
        loss = batch.mean(losses[0] if len(losses) == 1 else torch.cat(losses)) if made else torch.zeros(())
        return noisy(total, self._bound, self._noise, self._draws, self._rows), loss

    def _nothing(self, size: int, params: Params) -> Tensor:
        """The sum of an empty batch, of the type of any other: noise on another type would tell that it was empty."""
        kinds = [params] if isinstance(params, Tensor) else params.values()
        return torch.zeros(size, dtype=torch.float64 if is_exact(self._draws) else next(iter(kinds)).dtype)

    def _clipped_sum(self, params: Params, batch: Drawn) -> tuple[Tensor, Tensor]:
        """Σ of the clipped gradients of these rows, laid end to end, and all rows' losses.

        In double precision where the noise is exact: what rounding does to a sum counts as sensitivity.
        """
        precision = torch.float64 if is_exact(self._draws) else torch.float32
        if self._ghost is not None and self._supervised is not None and batch.y is not None:
            theta = self._supervised.theta(params)
            given = theta, batch.x, batch.y, loss_of, batch.weight, self._bound
            return self._ghost.clipped_sum(*given, precision=precision)
        labels = None if batch.y is None else 0
        places = batch.first + torch.arange(len(batch.x))
        step = batch.step
        gradients, losses = vmap(self._each, in_dims=(None, 0, labels, None, 0))(params, batch.x, batch.y, step, places)
        parts = [gradients] if isinstance(gradients, Tensor) else [gradients[name] for name in params]
        flat = [part.reshape(len(batch.x), -1) for part in parts]
        rows = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
        weight = torch.ones(len(rows)) if batch.weight is None else batch.weight
        return clipped_sum(rows, weight.to(precision), self._bound), losses


def clipped_sum(gradients: Tensor, taken: Tensor, bound: float) -> Tensor:
    """Σ of the taken points' gradients, each clipped to the bound; in double precision if ``taken`` is."""
    gradients = gradients.to(torch.promote_types(gradients.dtype, taken.dtype))
    # one pass for the norms and one for the rows: the gradients of all samples are by far the largest array of a step
    factor = clip_factors(torch.linalg.vector_norm(gradients, dim=-1), bound)
    return (taken.to(factor.dtype) * factor) @ gradients.nan_to_num(0.0, 0.0, 0.0)


def noisy(total: Tensor, bound: float, noise_multiplier: float | Tensor, draws: DrawsLike, rows: int) -> Tensor:
    """The clipped sum over at most ``rows`` with its noise.

    Noise from the operating system is exact: the sum is rounded to a grid, which counts as sensitivity, and so does
    what rounding did while the sum was made.
    """
    if is_exact(draws):
        return add_gaussian(total, bound * (1.0 + rounding(rows)), noise_multiplier, draws)
    noise = draws.normal(*total.shape).to(total.dtype)
    scale = torch.as_tensor(noise_multiplier * bound, dtype=total.dtype, device=total.device)
    return torch.addcmul(total, noise, scale)


def rounding(rows: int) -> float:
    """How much further apart, in clips, two sums of clipped gradients can be because they are made in float64.

    A product of factor, gradient and input has two roundings, and a sum of n numbers in any order at most n on the way
    of each (2n, if it is made in pieces). So the computed sum is off by at most (2n + 2)·2^−53 of Σ|x|, whose norm is
    at most n clips, and two of them by twice that. Norms that come out too small are covered by ``clip_factors``.
    """
    return 2.0**-51 * rows * (rows + 1.0)


@lru_cache(maxsize=256)
def batch_capacity(expected: int) -> int:
    """Room for a Poisson batch of this expected size: it is too small with probability below 1e-12 in a step.

    The size is binomial with mean ``expected``, whose upper tail lies below the Poisson distribution's. In the rare
    case some points are left out at random; this can be told apart with that probability only, which is in every δ
    (``privacy/accountant.py``).
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
    smallest, rows = torch.topk(_numbers(n, capacity, draws), room, largest=False, sorted=True)
    return rows, smallest < _at_most_1(rate)


def poisson_rows(n: Tensor | int, capacity: int, rate: Tensor | float, draws: DrawsLike) -> Tensor:
    """The rows that ``poisson_batch`` takes, in its order, and no others: how many there are is only known now."""
    bits = draws.bits(capacity)[: int(n)]
    u = bits.cpu().numpy().view(np.uint64) >> np.uint64(11)  # 53 bits, exact as a float
    # a whole number is below another number where it is below that rounded up
    rows = np.flatnonzero(u < np.uint64(math.ceil(min(1.0, float(rate)) * 2.0**53)))
    return torch.from_numpy(rows[u[rows].argsort(kind="stable")]).to(bits.device)


def _numbers(n: Tensor | int, capacity: int, draws: DrawsLike) -> Tensor:
    """Uniform numbers of the first n rows; 2 for the others."""
    u = ((draws.bits(capacity) >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
    return torch.where(torch.arange(capacity) < n, u, 2.0)


def _at_most_1(rate: Tensor | float) -> Tensor:
    return torch.as_tensor(rate, dtype=torch.float64).clamp(max=1.0)
