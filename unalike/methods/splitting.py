"""Federated learning as operator splitting: FedProx, FedSplit, FedPi and FedRP as one scheme, with acceleration.

S. Malekmohammadi, thesis (T2), chapter 2: equations 2.15-2.17 and Table 2.1; before that Malekmohammadi et al., 2021.
FedProx: Li et al., MLSys 2020. FedSplit: Pathak and Wainwright, NeurIPS 2020.
Symbols: client i has a point u_i, the loss f_i and the proximal map P_i(u) = argmin f_i(x) + ‖x − u‖²/2η.

    z_i ← (1 − α)·u_i + α·P_i(u_i),    θ_i ← (1 − β)·z_i + β·z̄,    u_i ← (1 − γ)·u_i + γ·θ_i

with z̄ the mean of the z_i, which is the model that is reported and served.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from unalike.core.checks import at_least
from unalike.core.client import Client, Kept
from unalike.core.federation import Cohort, Federation, Models, Replies, each
from unalike.core.method import State
from unalike.core.model import Model
from unalike.core.release import SIZE, Each, Mean, Release
from unalike.core.roster import Declared
from unalike.core.task import Sent, send, task
from unalike.learn.anderson import Anderson, columns_of
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, Objective, Params, Supervised, penalised
from unalike.learn.schedules import Schedule
from unalike.learn.server import ServerOptimizer
from unalike.methods.averaging import averaged, begun, check_averaging
from unalike.networks.classifiers import Linear
from unalike.privacy.dpsgd import PointPrivacy, Steps
from unalike.privacy.mechanisms import AdditiveNoise, Norm
from unalike.privacy.mechanisms import clip as clipped

_ETA = 10.0  # FedProx's μ = 0.1


@dataclass(frozen=True)
class Splitting:
    """The scheme above for any (α, β, γ): FedProx (1, 1, 1), FedSplit (2, 2, 1), FedPi (2, 2, ½), FedRP (2, 1, 1).

    One ask a round: z̄ goes down (where β = 1 the common u), the change of z_i comes up, and u_i and z_i stay at the
    client. Only β = 2 with α = 2 ends at the minimum of Σ f_i; every other choice ends where FedProx with η·c does,
    c = 1 − α(β − 1)/β.

    - ``eta`` is η. ``mu`` = 1/η is FedProx's name for the same number and takes its place. With ``mu_step``, ``mu`` is
      only the first μ: it grows by the step when the clients' loss has risen, and falls by it after five falls of the
      loss in a row (Li et al. §5.3 and Scott 2026, C.1.2: from 1 by 0.1).
    - ``schedule`` is the factor of η and of ``local.lr`` alike, so that a step that was short enough stays so.
      ``ergodic`` serves Σ η_t·z̄_t / Σ η_t in the place of the last z̄.
    - ``losses``: f_i is the client's ``mean`` loss, and clients weigh as much as they have samples, or the ``sum`` of
      its losses, and they weigh the same. Both have one minimum. A batch's loss is scaled to that of all samples.
    - ``solver``: ``exact`` solves for P_i (least squares, the model `linear`), ``local`` takes the steps of ``local``
      on f_i + ‖· − u‖²/2η; ``auto`` is exact where it can be. ``warm``: the steps begin at z̄ (``center``) or at the
      last proximal point (``last``); from u, a few steps would not do.
    - ``step="gradient"`` has the steps of ``local`` on f_i alone, from u, in the place of P_i: with (1, 1, 1) FedAvg.
    - ``absentees``: those who are not in a cohort count with their ``latest`` z, so that the fixed point stays where it
      is, or are ``left-out`` of the mean, as in the author's experiments, which moves it. Either way an absentee stands
      still and takes one step with the newest z̄ when it is back (in the author's, its u goes on moving without it).
    - ``server``: what is done with the participants' mean update where absentees are left out.
    - ``anderson``: acceleration, with a memory of τ rounds.
    - ``personal`` gives every client P_i(z̄), a model of its own, in the place of z̄. At the fixed point of FedSplit and
      FedPi all P_i(u_i) are one model.
    - ``noise`` (client-level privacy), ``local.private`` (point-level) and ``secure`` are those of FedAvg. A client
      keeps z_i as it was clipped, so that it and the server's mean stay together.
    """

    model: Model
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0
    cohort: int | float = 10
    local: LocalSGD = field(default_factory=LocalSGD)
    eta: float = _ETA
    mu: float | None = None
    mu_step: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)
    ergodic: bool = False
    losses: Literal["mean", "sum"] = "mean"
    step: Literal["proximal", "gradient"] = "proximal"
    solver: Literal["auto", "exact", "local"] = "auto"
    warm: Literal["center", "last"] = "center"
    absentees: Literal["latest", "left-out"] = "latest"
    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    anderson: Anderson = field(default_factory=Anderson)
    personal: bool = False
    clip: float | None = None
    noise: AdditiveNoise | None = None
    secure: bool = False
    asks_unlabeled: ClassVar[bool] = False
    client_private: ClassVar[Literal[True]] = True

    def __post_init__(self) -> None:
        for name, least, most in (("alpha", 0, 2), ("beta", 0, 2), ("gamma", 0, 1)):
            if not least < getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)}; expected above {least} and at most {most}")
        if self.eta != _ETA and self.mu is not None:
            raise ValueError(f"eta={self.eta} and mu={self.mu} are two names for one number, mu = 1/eta: give one")
        if not 0 < self.eta < math.inf:
            raise ValueError(f"eta={self.eta}; expected a step size above 0 (no proximal term at all: mu=0)")
        at_least(self, mu=0, mu_step=0)
        if self.solver == "exact" and not self._linear:
            raise ValueError(
                f"solver='exact' solves a least squares, and {self.model!r} is no linear model of a number: use the "
                "model `linear` on numeric targets, or solver='local', whose steps serve any network"
            )
        if self.step == "gradient" and (self.eta != _ETA or self.mu is not None):
            raise ValueError("step='gradient' has no proximal term: its step size is local.lr; leave eta and mu out")
        if self.step == "gradient" and self.solver == "exact" and self.local.batch is not None:
            raise ValueError("solver='exact' has the gradient of all of a client's samples; set local.batch=none")
        if self.absentees == "latest" and self.server != ServerOptimizer():
            raise ValueError(
                "a server optimizer goes with absentees='left-out': everybody's latest z have a mean as is"
            )
        self._check_privacy()

    def _check_privacy(self) -> None:
        check_averaging(self.clip, self.noise, self.secure, self.local, points=True)
        if self.local.private is not None and (self._exact or self.losses == "sum"):
            raise ValueError("local.private protects the steps of solver='local' on losses='mean'; set both")
        if not self._loss_is_released:
            if self.mu_step:
                raise ValueError(
                    f"mu_step={self.mu_step} follows the clients' loss, which noise, secure and local.private keep "
                    "back; set mu_step=0 for a fixed mu"
                )
            if self.beta != 1 and self.anderson.memory and self.anderson.over != "mean":
                raise ValueError(
                    f"anderson.over={self.anderson.over!r} shows the server more than the sum that noise, secure and "
                    "local.private protect; use 'mean', which asks for nothing"
                )

    # What the fields mean

    @cached_property
    def _linear(self) -> bool:
        module = self.model.module(self.model.init(0))
        return isinstance(module, Linear) and module.outputs == 1

    @property
    def _exact(self) -> bool:
        """Do clients work on XᵀX and Xᵀy, which they keep, in the place of their rows?"""
        if self.solver == "auto" and self.step == "gradient" and self.local.batch is not None:
            return False
        return self.solver != "local" and self._linear

    @property
    def _loss_is_released(self) -> bool:
        return self.noise is None and not self.secure and self.local.private is None

    @property
    def _weight(self) -> str | None:
        """The weights λ of (2.1): those that make Σ λ_i·f_i the mean over all samples, unless something forbids it."""
        return SIZE if self.losses == "mean" and self._loss_is_released else None

    @property
    def _of_each(self) -> bool:
        """Do all points u_i lie at the server?"""
        return self.beta != 1 and self.anderson.memory > 0 and self.anderson.over == "each"

    @property
    def _own_weights(self) -> bool:
        """Do clients have a history of their own, which the server's weights are for?"""
        return self.beta != 1 and self.anderson.memory > 0 and self.anderson.over != "each"

    @property
    def _compares(self) -> bool:
        return self._own_weights and self.anderson.over == "gram"

    @property
    def _norm(self) -> Norm:
        return "l2" if self.noise is None else self.noise.norm

    @property
    def serves_unlabeled(self) -> bool:
        return not self.personal  # then everybody gets the same model; a proximal map needs labels

    @property
    def proximal_curvature(self) -> float:
        """What the proximal term adds to the curvature that the steps of ``local`` meet."""
        return self._inverse if self.step == "proximal" else 0.0

    @property
    def least_rounds(self) -> int:
        """With fewer, acceleration would never begin."""
        return self.anderson.memory + 2 if self.anderson.memory else 0

    def dp_sgd(self, size: int) -> tuple[PointPrivacy, Steps] | None:
        return None if self.local.private is None else (self.local.private, self.local.steps_of(size))

    # The clients' side

    @task
    def prepare(self, client: Client) -> Sent:
        """Before anything else, where the least squares are solved: XᵀX, Xᵀy and yᵀy, which stay."""
        return send(keep=_moments(client))

    @task
    def fit(
        self,
        client: Client,
        center: Tensor,
        inverse: Tensor,
        rate: Tensor,
        number: Tensor,
        first: Tensor | None = None,
        counted: Tensor | None = None,
        weights: Tensor | None = None,
        u: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Sent:
        """One step (2.15) of the client, after what z̄ tells about its last one (2.16, 2.17); sends the change of z.

        center: z̄, or the common u. inverse: 1/η. number: of the round. first: z of a client that was never asked (else
        it joins at z̄). counted: the last round in which the server got the client's z. weights: of the last images,
        for acceleration. u: the client's point, where the server has it.
        """
        point, keep = self._point(client, center, weights) if u is None else (u, {})
        start = point if self.step == "gradient" else center if self.warm == "center" else client.kept.get("p", center)
        image, loss = self._image(client, self.local, point, start, inverse, rate, noise)
        new = (1 - self.alpha) * point + self.alpha * image
        if self.warm == "last":
            keep["p"] = image
        if u is not None:
            return send(z=new, loss=loss, keep=keep)
        before = self._before(client, center, first, counted)
        update = new - before
        # as the release will clip it, so that the client's z and the server's mean stay together
        bounded = update if self.clip is None else clipped(update, self.clip, self._norm)
        # differences in the place of points that both sides know: what a client keeps has never been sent
        if self.beta != 1 or self.absentees == "latest":
            keep["z"] = before + bounded
        if self.beta != 1 and (self.gamma != 1 or "residuals" in keep):
            keep["u"] = point - keep["z"]
        if counted is not None:
            keep |= {"back": before - keep["z"], "at": number}
        return send(update=update, loss=loss, keep=keep)

    @fit.into
    def sums(self) -> list[Release]:
        """What the server sees: a mean, weighted by declared sizes where nothing is to be protected."""
        if self._of_each:
            return [Each("z"), Mean("loss", weight=self._weight)]
        if self.local.private is not None:
            return [Mean("update", clip=self.clip, secure=self.secure, cost=self.local.cost)]
        return averaged(self.clip, self.noise, self.secure, weight=self._weight)

    @fit.derive
    def own_noise(self, declared: Declared) -> dict[str, Tensor]:
        """DP-SGD's noise multiplier, which each client finds from what it declares."""
        return {} if self.local.private is None else {"noise": self.local.multipliers(declared)}

    @task
    def compare(self, client: Client, center: Tensor) -> Sent:
        """For acceleration: the inner products of the client's last residuals u − T(u)."""
        residuals = self._history(client, center)["residuals"]
        return send(gram=residuals @ residuals.T)

    @compare.into
    def gram(self) -> list[Release]:
        return [Mean("gram", weight=self._weight)]

    @task(stays="theta")
    def own(self, client: Client, center: Tensor, inverse: Tensor) -> Sent:
        """The personal model P_i(z̄), which stays."""
        local = replace(self.local, private=None)
        return send(theta=self._image(client, local, center, center, inverse, torch.ones(()), None, fresh=True)[0])

    def _point(self, client: Client, center: Tensor, weights: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The client's u for this round, and what it keeps of the way there."""
        if self.beta == 1:
            return center, {}
        if weights is None:
            return self._plain(*self._last(client, center), center), {}
        history = self._history(client, center)
        keep = {name: history[name] for name in ("images", "residuals") if name == "images" or self._compares}
        return weights.to(center.dtype) @ history["images"], keep

    def _before(self, client: Client, center: Tensor, first: Tensor | None, counted: Tensor | None) -> Tensor:
        """The client's z in the server's mean. A newcomer joins it at z̄; an answer that went astray is not in it."""
        if self.absentees == "left-out":
            return center
        z = client.kept.get("z", center if first is None else first)
        if counted is None:
            return z
        lost = client.kept.get("at", counted) > counted  # it was asked later than the server has heard of it
        z = torch.where(lost, z + client.kept.get("back", torch.zeros_like(z)), z)
        return torch.where(counted > 0, z, center)

    def _plain(self, u: Tensor, z: Tensor, center: Tensor) -> Tensor:
        """(2.16) and (2.17): T(u), the image of the last point."""
        return (1 - self.gamma) * u + self.gamma * ((1 - self.beta) * z + self.beta * center)

    def _last(self, client: Client, center: Tensor) -> tuple[Tensor, Tensor]:
        """The client's last u and z; z̄ for both where there is none."""
        z = client.kept.get("z", center)
        return z + client.kept.get("u", torch.zeros_like(z)), z

    def _history(self, client: Client, center: Tensor) -> dict[str, Tensor]:
        """The last τ+1 images and residuals, oldest first, the newest of which z̄ has just made known."""
        u, z = self._last(client, center)
        image = self._plain(u, z, center)
        return self._pushed(client.kept, image, u - image)

    def _pushed(self, past: Mapping[str, Tensor] | Kept, image: Tensor, residual: Tensor) -> dict[str, Tensor]:
        """The last τ+1 images and residuals with these at the end; at first they are all the same."""
        length, pushed = self.anderson.memory + 1, {}
        for name, newest in {"images": image, "residuals": residual}.items():
            before: Tensor = past.get(name, newest.expand(length, *newest.shape))
            pushed[name] = torch.cat([before[1:], newest[None]])
        return pushed

    def _image(
        self,
        client: Client,
        local: LocalSGD,
        u: Tensor,
        start: Tensor,
        inverse: Tensor,
        rate: Tensor,
        noise: Tensor | None,
        fresh: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """P_i(u), and the loss on the way; fresh: the client may not have been prepared."""
        if not self._exact:
            plain = Supervised(self.model)
            scale = client.n if self.losses == "sum" else 1.0

            def batch_loss(theta: Params, batch: Batch) -> Tensor:
                return scale * plain(theta, batch)

            objective: Objective = batch_loss
        else:
            shapes = dict(zip(_MOMENTS, ((len(u), len(u)), (len(u),), ()), strict=True))
            none = {name: torch.full(shape, torch.nan, dtype=u.dtype) for name, shape in shapes.items()}
            moments = _moments(client) if fresh else {name: client.kept.get(name, none[name]) for name in _MOMENTS}
            q, c, b = (moments[name] / (client.n if self.losses == "mean" else 1.0) for name in _MOMENTS)
            if self.step == "proximal":
                ridge = inverse + local.weight_decay
                image = torch.linalg.solve(q + ridge * torch.eye(len(u), dtype=u.dtype), c + inverse * u)
                return image, 0.5 * (image @ q @ image + b) - c @ image

            def quadratic(theta: Params, batch: Batch) -> Tensor:
                assert isinstance(theta, Tensor)
                return 0.5 * (theta @ q @ theta + b) - c @ theta

            objective = quadratic
        return local.train(self._near(objective, u, inverse), start, client, rate=rate, noise=noise)

    def _near(self, objective: Objective, u: Tensor, inverse: Tensor) -> Objective:
        """f + ‖· − u‖²/2η, or f alone where there is no such term."""
        if self.step == "gradient" or (self.mu == 0 and not self.mu_step):
            return objective
        return penalised(objective, lambda theta: inverse / 2 * (theta - u).square().sum())

    # The server's side

    def start(self, seed: int) -> State:
        theta = self.model.init(seed)
        state = begun("theta", theta, self.server)
        if self.mu_step:
            first = {"mu": torch.tensor(self._inverse), "loss": torch.tensor(torch.nan), "falls": torch.zeros(())}
            state = state.with_part("prox", first)
        if self.noise is not None and self.absentees == "latest":
            state = state.replace(first=theta)
        if self.ergodic:
            state = state.replace(average=theta, total=torch.zeros((), dtype=torch.float64))
        if self.beta == 1 and (self.gamma != 1 or self.anderson.memory):
            state = state.replace(u=theta)
        return state if not self.anderson.memory else state.with_part("anderson", self.anderson.start())

    @property
    def _inverse(self) -> float:
        """1/η before any schedule."""
        return 1 / self.eta if self.mu is None else float(self.mu)

    def round(self, state: State, federation: Federation) -> State:
        state = self._with_table(state, federation)
        cohort = federation.sample(self.cohort, poisson=self.noise is not None, labeled=True)
        factor, prox = self.schedule(federation.round), state.part("prox")
        inverse = float(prox.get("mu", self._inverse)) / factor
        inputs: dict[str, Any] = {
            "center": state.get("u", state.theta) if self.beta == 1 else state.theta,
            "inverse": torch.tensor(inverse, dtype=state.theta.dtype),
            "rate": torch.tensor(factor, dtype=state.theta.dtype),
            "number": federation.round,
        }
        if self._of_each:
            inputs["u"] = each(state["each.u"][cohort.positions])
        elif "counted" in state:
            inputs["counted"] = each(state.counted[cohort.positions])
        if "first" in state:
            inputs["first"] = state.first
        if self._own_weights:
            inputs["weights"], state = self._shares(state, cohort, federation)
        replies = cohort.ask(self.fit, **inputs)
        if "loss" in replies:
            federation.report(loss=replies["loss"])
            if prox:
                state = state.with_part("prox", self._next_mu(prox, replies["loss"]))
        if self._of_each:
            state = self._mean_of_each(state, cohort, replies, federation)
        elif "update" in replies:  # the very first Poisson cohort may be empty
            state = self._mean(state, cohort, replies, federation)
        if self.ergodic:
            eta = 1 / inverse if inverse else 1.0
            total = state.total + eta
            state = state.replace(average=state.average + eta / total * (state.theta - state.average), total=total)
        return state

    def _with_table(self, state: State, federation: Federation) -> State:
        """Have everybody prepared, and remember who has told what: the last round in which a client's z came."""
        roster = federation.roster
        if self._exact:
            ready = state.get("prepared", torch.zeros(len(roster), dtype=torch.bool))
            missing = (~ready & roster.labeled).nonzero().flatten()
            if len(missing):
                answered = federation.cohort(missing).ask(self.prepare, into=[]).answered
                ready = ready.clone()
                ready[missing[answered]] = True
            state = state.replace(prepared=ready)
        # with noise nobody who reads the state may learn who was in a cohort
        if self.absentees == "latest" and self.noise is None and "counted" not in state:
            state = state.replace(counted=torch.zeros(len(roster), dtype=torch.int64))
        if self._of_each and "each.u" not in state:
            points = state.theta.expand(len(roster), -1).clone()
            state = state.with_part("each", {"u": points, "z": points})
        return state

    def _mean(self, state: State, cohort: Cohort, replies: Replies, federation: Federation) -> State:
        """z̄ from the mean of what came, and the next u where it is common to all."""
        center = state.get("u", state.theta) if self.beta == 1 else state.theta
        update, roster = replies["update"], federation.roster
        if self.absentees == "left-out":
            theta, moments = self.server.step(center, update, state.part("server"))
            state = state.with_part("server", moments)
        elif self.noise is not None:  # divided by public numbers alone
            theta = state.theta + update * (cohort.expected / int(roster.labeled.sum()))
        else:
            came = cohort.positions[replies.answered]
            weights = self._weights_of(federation)
            joined = weights[came[state.counted[came] == 0]].sum()  # they sent z − center
            counted = state.counted.index_fill(0, came, federation.round)
            share = weights[came].sum() * update.to(torch.float64) + joined * (center - state.theta).to(torch.float64)
            theta = (state.theta + share / weights[counted > 0].sum()).to(state.theta.dtype)
            state = state.replace(counted=counted)
        if "u" in state:
            image = (1 - self.gamma) * center + self.gamma * theta
            point, state = self._accelerated(state, center, image, federation)
            state = state.replace(u=point)
        return state.replace(theta=theta)

    def _weights_of(self, federation: Federation) -> Tensor:
        """[clients] how much each counts."""
        bound = federation.roster.bound.to(torch.float64)
        return bound if self._weight else torch.ones_like(bound)

    def _mean_of_each(self, state: State, cohort: Cohort, replies: Replies, federation: Federation) -> State:
        """The same, where the server has everybody's u and z."""
        came = cohort.positions[replies.answered]
        u, z = state["each.u"], state["each.z"].index_copy(0, came, replies["z"])
        there = torch.zeros(len(u), dtype=torch.bool).index_fill(0, came, True)
        if "counted" in state:
            state = state.replace(counted=state.counted.index_fill(0, came, federation.round))
            there = state.counted > 0
        weights = self._weights_of(federation) * there
        weights = (weights / weights.sum()).to(u.dtype)
        theta = weights @ z
        image = u.index_copy(0, came, self._plain(u, z, theta)[came])
        point, state = self._accelerated(state, u, image, federation, weights.sqrt()[:, None])
        return state.with_part("each", {"u": point, "z": z}).replace(theta=theta)

    def _accelerated(
        self, state: State, u: Tensor, image: Tensor, federation: Federation, scale: Tensor | float = 1.0
    ) -> tuple[Tensor, State]:
        """The point after u, whose image is T(u): that image, or a combination of the last ones."""
        if not self.anderson.memory:
            return image, state
        state = self._remembered(state, image, u - image)
        residuals = (state["history.residuals"] * scale).flatten(1).T
        weights, after, told = self.anderson.weigh(residuals, state.part("anderson"))
        federation.report(**told)
        point = torch.tensordot(weights.to(image.dtype), state["history.images"], 1)
        return point, state.with_part("anderson", after)

    def _remembered(self, state: State, image: Tensor, residual: Tensor) -> State:
        return state.with_part("history", self._pushed(state.part("history"), image, residual))

    def _shares(self, state: State, cohort: Cohort, federation: Federation) -> tuple[Tensor, State]:
        """The weights that clients give their own last images, of which T(u) of the last round is the newest.

        The mean of all T(u_i) is (1 − γ)·ū + γ·z̄, so the server knows the mean residual without asking.
        """
        mean = state.get("mean", state.theta)  # ū of the last round
        if "mean" not in state:  # nobody has taken a step
            weights = torch.zeros(self.anderson.memory + 1, dtype=torch.float64)
            weights[-1] = 1.0
            return weights, state.replace(mean=mean)
        image = (1 - self.gamma) * mean + self.gamma * state.theta
        state = self._remembered(state, image, mean - image)
        if self.anderson.over == "gram":
            columns = columns_of(cohort.ask(self.compare, center=state.theta)["gram"])
        else:
            columns = state["history.residuals"].T
        weights, after, told = self.anderson.weigh(columns, state.part("anderson"))
        federation.report(**told)
        mean = weights.to(mean.dtype) @ state["history.images"]
        return weights, state.with_part("anderson", after).replace(mean=mean)

    def _next_mu(self, prox: Mapping[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
        falls = prox["falls"] + 1 if loss < prox["loss"] else torch.zeros(())
        step = self.mu_step * (float(loss > prox["loss"]) - float(falls == 5))
        return {"mu": (prox["mu"] + step).clamp(min=0), "loss": loss, "falls": falls % 5}

    def attacked(self, model: Model, cohort: int | float, local: LocalSGD, noise: AdditiveNoise | None) -> Splitting:
        """For an audit: the same rounds on another model, with nothing but the mean of the updates in the state."""
        scheme: dict[str, Any] = {"alpha": 1.0, "beta": 1.0, "gamma": 1.0, "eta": _ETA, "mu": 0.0, "mu_step": 0.0}
        scheme |= {"schedule": Schedule(), "server": ServerOptimizer(), "anderson": Anderson(), "absentees": "left-out"}
        scheme |= {"step": "proximal", "solver": "local", "personal": False, "ergodic": False}
        return replace(self, model=model, cohort=cohort, local=local, noise=noise, **scheme)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        theta = state.average if self.ergodic else state.theta
        if not self.personal:
            return theta.expand(len(cohort), -1)
        inverse = state.part("prox").get("mu", torch.tensor(self._inverse))
        return cohort.ask(self.own, center=theta, inverse=inverse).held("theta")


_MOMENTS = ("moments.xx", "moments.xy", "moments.yy")


def _moments(client: Client) -> dict[str, Tensor]:
    """XᵀX, Xᵀy and yᵀy over the client's rows, in double precision."""
    client = client.with_labels
    x = client.x.flatten(1).to(torch.float64) * client.mask[:, None]
    y = client.y.to(torch.float64) * client.mask
    return dict(zip(_MOMENTS, (x.T @ x, x.T @ y, y @ y), strict=True))
