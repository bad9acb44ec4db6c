"""Operator splitting whose points u_i all lie at the server, so that acceleration weighs the residuals of all clients.

The figures of T2 are made in this way. The package keeps points at their clients; with all clients in every round its
``anderson.over = "gram"`` gives the same points.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from unalike.core.client import Client
from unalike.core.federation import Federation, each
from unalike.core.method import State
from unalike.core.release import Each, Mean, Release
from unalike.core.task import Sent, send, task
from unalike.learn.anderson import next_point
from unalike.methods.splitting import Splitting


@dataclass(frozen=True)
class PointsAtServer(Splitting):
    """``Splitting`` with a constant μ and no ergodic average, where the server sees every client's z."""

    @classmethod
    def of(cls, method: Splitting) -> PointsAtServer:
        return cls(**{field.name: getattr(method, field.name) for field in fields(method)})

    @task
    def fit_at(self, client: Client, center: Tensor, u: Tensor, inverse: Tensor, rate: Tensor) -> Sent:
        """z_i (2.15) from the u_i that the server has."""
        start = u if self.step == "gradient" else center
        image, loss = self.proximal_map(client, u, start, inverse, rate)
        return send(z=(1 - self.alpha) * u + self.alpha * image, loss=loss)

    @fit_at.into
    def points(self) -> list[Release]:
        return [Each("z"), Mean("loss", weight=self.weight)]

    def round(self, state: State, federation: Federation) -> State:
        state = self.with_table(state, federation)
        if "each.u" not in state:
            points = state.theta.expand(len(federation.roster), -1).clone()
            state = state.with_part("each", {"u": points, "z": points})
        cohort = federation.sample(self.cohort, labeled=True)
        inverse, rate = (torch.tensor(one, dtype=state.theta.dtype) for one in self.step_sizes(state, federation.round))
        u = each(state["each.u"][cohort.positions])
        replies = cohort.ask(self.fit_at, center=state.theta, u=u, inverse=inverse, rate=rate)
        federation.report(loss=replies["loss"])
        came = cohort.positions[replies.answered]
        points, z = state["each.u"], state["each.z"].index_copy(0, came, replies["z"])
        there = torch.zeros(len(points), dtype=torch.bool).index_fill(0, came, True)
        if "counted" in state:
            state = state.replace(counted=state.counted.index_fill(0, came, federation.round))
            there = state.counted > 0
        weights = self.weights_of(federation) * there
        weights = (weights / weights.sum()).to(points.dtype)
        theta = weights @ z
        image = points.index_copy(0, came, self.relaxation.image(points, z, theta)[came])
        point, state = next_point(state, self.anderson, points, image, federation, weights.sqrt()[:, None])
        return state.with_part("each", {"u": point, "z": z}).replace(theta=theta)
