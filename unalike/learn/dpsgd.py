"""The steps of DP-SGD inside the one training loop (``learn/local.py``): Poisson batches and private gradients.

What they cost is in ``privacy/dpsgd.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from unalike.core.client import Client
from unalike.learn.ghost import GhostNorms
from unalike.learn.objective import Batch, Objective, Params, Supervised, loss_of
from unalike.privacy.checks import check_positive
from unalike.privacy.dpsgd import PointPrivacy
from unalike.privacy.mechanisms import DrawsLike


class PoissonBatches:
    """Which rows a step of DP-SGD takes; drawn when the step comes: memory does not grow with samples times steps."""

    def __init__(self, client: Client, steps: int | None, epochs: int | None, batch: int | None) -> None:
        self._client, self._batch = client, batch
        size = client.capacity if batch is None else min(batch, client.capacity)
        self.active: Tensor | None = None
        if steps is not None:
            self._steps = steps
        else:
            passes = epochs or 0
            self._steps = passes * math.ceil(client.capacity / size)
            if not client.full and batch is not None:
                self.active = torch.arange(self._steps) < passes * ((client.n + batch - 1) // batch)
        self.own_steps = torch.as_tensor(self._steps if self.active is None else self.active.sum()).clamp(min=1)

    def batches(self, x: Tensor, y: Tensor | None) -> Iterator[Batch]:
        """The samples of each step."""
        client, expected = self._client, self._batch
        for _ in range(self._steps):
            if expected is None:
                yield Batch(x, y, client.mask.to(torch.float32))
            else:
                rows, taken = poisson_batch(client.n, client.capacity, expected, client.noise)
                yield Batch(x[rows], None if y is None else y[rows], taken.to(torch.float32))


class PrivateGradient:
    """The gradient of a DP-SGD step, and the (unprotected) mean loss of its batch."""

    def __init__(
        self, objective: Objective, private: PointPrivacy, noise: Tensor | None, batch: int | None, client: Client
    ) -> None:
        if noise is None:
            if private.noise_multiplier is None:
                raise ValueError("each client has its own noise here: pass noise=each(local.multipliers(cohort.sizes))")
            noise = torch.tensor(private.noise_multiplier)
        self._noise, self._bound, self._draws = noise, private.clip, client.noise
        self._expected = client.n if batch is None else torch.clamp(client.n, max=batch)

        def of_one(params: Params, x: Tensor, y: Tensor | None) -> Tensor:
            return objective(params, Batch(x[None], None if y is None else y[None], None))

        self._each = grad_and_value(of_one)
        self._ghost = GhostNorms.of(objective.model, client.x[:2]) if isinstance(objective, Supervised) else None

    def __call__(self, params: Params, batch: Batch) -> tuple[Params, Tensor]:
        assert batch.weight is not None
        if self._ghost is not None and isinstance(params, Tensor) and batch.y is not None:
            total, losses = self._ghost.clipped_sum(params, batch.x, batch.y, loss_of, batch.weight, self._bound)
            made = noisy_mean(total, self._bound, self._noise, self._expected, self._draws)
            return made, batch.mean(losses)
        labels = None if batch.y is None else 0
        gradients, losses = vmap(self._each, in_dims=(None, 0, labels))(params, batch.x, batch.y)
        parts = {"": gradients} if isinstance(gradients, Tensor) else gradients
        flat = [part.reshape(len(batch.weight), -1) for part in parts.values()]
        rows = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
        made = private_gradient(rows, batch.weight, self._bound, self._noise, self._expected, self._draws)
        loss = batch.mean(losses)
        if isinstance(gradients, Tensor):
            return made, loss
        pieces = torch.split(made, [part.shape[1] for part in flat])
        return {name: piece.view(params[name].shape) for name, piece in zip(parts, pieces, strict=True)}, loss


def clip_per_sample(gradients: Tensor, bound: float) -> Tensor:
    """Scale every row of [batch, d] down to L2 norm at most ``bound``; a row that is not finite becomes zero."""
    safe, factor = _bounded(gradients, bound)
    return safe * factor.unsqueeze(-1)


def _bounded(gradients: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Rows with those that are not finite set to zero, and the factor that brings each within the bound.

    One pass for the norms and one for the rows: the gradients of all samples are by far the largest array of a step.
    """
    check_positive(bound, "the clip bound", "give the largest norm that one point's gradient may have, e.g. 1.0")
    norms = torch.linalg.vector_norm(gradients, dim=-1)
    # a hair below, more than the error of a norm in the gradient's own precision; a tensor, because a number divided by
    # a tensor is its reciprocal times the number, which is not exactly 1 where it should be
    limit = torch.as_tensor((1.0 - 2.0**-16) * bound, dtype=norms.dtype)
    factor = limit / norms.nan_to_num(nan=torch.inf, posinf=torch.inf).clamp(min=limit)  # 0 where a row is not finite
    return gradients.nan_to_num(0.0, 0.0, 0.0), factor


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
    safe, factor = _bounded(gradients, bound)
    total = (taken.to(factor.dtype) * factor) @ safe
    return noisy_mean(total, bound, noise_multiplier, expected, draws)


def noisy_mean(
    total: Tensor, bound: float, noise_multiplier: float | Tensor, expected: float | Tensor, draws: DrawsLike
) -> Tensor:
    """The step's gradient from the sum of clipped gradients: add noise, divide by the expected batch size."""
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


def poisson_batch(n: Tensor | int, capacity: int, batch: int, draws: DrawsLike) -> tuple[Tensor, Tensor]:
    """A Poisson batch at rate batch/n: rows [room] of 0..capacity−1, and which of them are really taken.

    The rows with the smallest of n uniform numbers are candidates, and those with a number below the rate are taken.
    """
    room = min(batch_capacity(batch), capacity)
    u = ((draws.bits(capacity) >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
    u = torch.where(torch.arange(capacity) < n, u, 2.0)
    smallest, rows = torch.topk(u, room, largest=False, sorted=True)
    return rows, smallest < batch / torch.as_tensor(n, dtype=torch.float64)
