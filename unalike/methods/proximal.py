"""The proximal map of a client's loss, P(u) = argmin f(x) + ‖x − u‖²/2η.

Least squares are solved exactly; any other loss takes the steps of local SGD.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from unalike.core.client import Client
from unalike.core.model import Model
from unalike.learn.anderson import weights_of
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, Objective, Params, Supervised, penalised
from unalike.networks.classifiers import Linear

Solver = Literal["auto", "exact", "local"]


@dataclass(frozen=True)
class ProximalMap:
    """P(u), or with ``gradient`` the steps of ``local`` on f alone; without ``penalty``, 1/η is 0.

    ``exact``: f is the quadratic of XᵀX, Xᵀy and yᵀy, and P(u) solves a linear system. ``losses``: f is the client's
    mean loss or the sum of its losses. ``memory``: τ of Anderson acceleration of the local steps.
    """

    model: Model
    local: LocalSGD
    losses: Literal["mean", "sum"]
    exact: bool
    gradient: bool
    penalty: bool
    memory: int = 0

    @classmethod
    def choose(
        cls,
        model: Model,
        local: LocalSGD,
        losses: Literal["mean", "sum"],
        solver: Solver,
        *,
        gradient: bool,
        penalty: bool,
        memory: int,
    ) -> ProximalMap:
        """The map by this ``solver``, with "auto" exact where it can be; refuses settings that do not fit."""
        linear, batches = is_least_squares(model), local.batch is not None
        if solver == "exact" and not linear:
            raise ValueError(
                f"solver='exact' solves a least squares, and {model!r} is no linear model of a number: use the "
                "model `linear` on numeric targets, or solver='local', whose steps serve any network"
            )
        if solver == "exact" and gradient and batches:
            raise ValueError("solver='exact' has the gradient of all of a client's samples; set local.batch=none")
        if memory and (batches or local.steps is None or local.momentum or local.private is not None):
            raise ValueError("inner_memory accelerates full-batch steps: set local.steps and local.batch=none, no more")
        exact = linear and (solver == "exact" or (solver == "auto" and not (gradient and batches)))
        return cls(model, local, losses, exact, gradient, penalty, memory)

    def __call__(
        self,
        client: Client,
        u: Tensor,
        start: Tensor,
        inverse: Tensor,
        rate: Tensor,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """P(u) and the loss on the way. ``inverse``: 1/η."""
        if not self.exact:
            loss = self._loss(client)
            near = penalised(loss, lambda theta: inverse / 2 * (theta - u).square().sum()) if self.penalty else loss
            return self._train(near, start, client, rate, noise)
        q, c, b = self._quadratic(client)
        if not self.gradient:
            ridge = inverse + self.local.weight_decay
            image = torch.linalg.solve(q + ridge * torch.eye(len(u), dtype=u.dtype), c + inverse * u)
            return image, 0.5 * (image @ q @ image + b) - c @ image

        def quadratic(theta: Params, batch: Batch) -> Tensor:
            assert isinstance(theta, Tensor)
            return 0.5 * (theta @ q @ theta + b) - c @ theta

        return self._train(quadratic, start, client, rate)

    def _train(
        self, objective: Objective, start: Tensor, client: Client, rate: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The local steps. Accelerated, each is x ← Σ π_j·G(x_j), G a gradient step (T2 §2.5)."""
        if not self.memory:
            return self.local.train(objective, start, client, rate=rate, noise=noise)
        one_step, x, total = replace(self.local, steps=1), start, torch.zeros(())
        images: list[Tensor] = []
        residuals: list[Tensor] = []
        for _ in range(self.local.steps or 0):
            image, loss = one_step.train(objective, x, client, rate=rate)
            images, residuals = [*images, image][-self.memory - 1 :], [*residuals, x - image][-self.memory - 1 :]
            weights = weights_of(torch.stack(residuals, 1))
            x, total = weights.to(x.dtype) @ torch.stack(images), total + loss
        return x, total / max(1, self.local.steps or 0)

    def _loss(self, client: Client) -> Objective:
        """f on a batch; a sum of losses is scaled to all of the client's samples."""
        mean_loss = Supervised(self.model)
        scale = client.n if self.losses == "sum" else 1.0

        def loss(theta: Params, batch: Batch) -> Tensor:
            return scale * mean_loss(theta, batch)

        return loss

    def _quadratic(self, client: Client) -> tuple[Tensor, Tensor, Tensor]:
        """Q, c and b of f(x) = ½(xᵀQx + b) − cᵀx, in double precision."""
        client = client.with_labels
        x = client.x.flatten(1).to(torch.float64) * client.mask[:, None]
        y = client.y.to(torch.float64) * client.mask
        count = client.n if self.losses == "mean" else 1.0
        return x.T @ x / count, x.T @ y / count, y @ y / count


def is_least_squares(model: Model) -> bool:
    """Is the model linear with one output, so that its squared loss is a quadratic?"""
    module = model.module(model.init(0))
    return isinstance(module, Linear) and module.outputs == 1
