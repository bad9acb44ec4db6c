"""The steps of DP-SGD inside the one training loop (``learn/local.py``): Poisson batches and private gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from unalike.core.client import Client
from unalike.learn.ghost import GhostNorms
from unalike.learn.objective import Batch, Objective, Params, Supervised, loss_of
from unalike.privacy import dpsgd
from unalike.privacy.dpsgd import PointPrivacy


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
                rows, taken = dpsgd.poisson_batch(client.n, client.capacity, expected, client.noise)
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
            made = dpsgd.noisy_mean(total, self._bound, self._noise, self._expected, self._draws)
            return made, batch.mean(losses)
        labels = None if batch.y is None else 0
        gradients, losses = vmap(self._each, in_dims=(None, 0, labels))(params, batch.x, batch.y)
        parts = {"": gradients} if isinstance(gradients, Tensor) else gradients
        flat = [part.reshape(len(batch.weight), -1) for part in parts.values()]
        rows = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
        made = dpsgd.private_gradient(rows, batch.weight, self._bound, self._noise, self._expected, self._draws)
        loss = batch.mean(losses)
        if isinstance(gradients, Tensor):
            return made, loss
        pieces = torch.split(made, [part.shape[1] for part in flat])
        return {name: piece.view(params[name].shape) for name, piece in zip(parts, pieces, strict=True)}, loss
