"""Federated learning as operator splitting: FedProx, FedSplit, FedPi and FedRP as one scheme, with acceleration.

S. Malekmohammadi (T2), chapter 2: equations 2.15-2.17 and Table 2.1. FedProx: Li et al., MLSys 2020. FedSplit: Pathak
and Wainwright, NeurIPS 2020. Client i has a point u_i, the loss f_i and P_i(u) = argmin f_i(x) + ‖x − u‖²/2η.

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
from unalike.core.release import SIZE, Mean, Release
from unalike.core.roster import Declarations
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Replies, Sent, State, each, send, task
from unalike.learn.anderson import Anderson, client_weights, next_point
from unalike.learn.local import LocalSGD
from unalike.learn.schedules import Schedule
from unalike.learn.server import ServerOptimizer
from unalike.methods import Presets
from unalike.methods.averaging import ONE_PASS, Averaging
from unalike.methods.proximal import ProximalMap, Solver
from unalike.methods.relaxation import Relaxation, Schedules, mean_of_latest, point_at_server
from unalike.privacy.mechanisms import AdditiveNoise, Norm
from unalike.privacy.mechanisms import clip as clipped

_ETA = 10.0  # FedProx's μ = 0.1


@dataclass(frozen=True)
class Splitting(Averaging):
    """The scheme above for any (α, β, γ): FedProx (1, 1, 1), FedSplit (2, 2, 1), FedPi (2, 2, ½), FedRP (2, 1, 1).

    z̄ goes down (where β = 1 the common u), the change of z_i comes up, and u_i and z_i stay at the client. Only β = 2
    with α = 2 ends at the minimum of Σ f_i; every other choice ends where FedProx with η·c does, c = 1 − α(β − 1)/β.

    - ``eta`` is η. ``mu`` = 1/η is FedProx's name for it. With ``mu_step``, ``mu`` is only the first μ: it grows by the
      step when the clients' loss has risen, and falls by it after five falls in a row (Li et al. §5.3).
    - ``schedule`` is the factor of η and of ``local.lr`` alike, so that a step that was short enough stays so.
      ``schedules`` has one for the local rate alone, and those of α_t, β_t and γ_t. ``ergodic`` serves the average
      Σ η_t·z̄_t / Σ η_t in the place of the last z̄.
    - ``losses``: f_i is the client's ``mean`` loss, and clients weigh as much as they have samples, or the ``sum`` of
      its losses, and they weigh the same. Both have one minimum.
    - ``solver``: ``exact`` solves for P_i (least squares, the model `linear`), ``local`` takes the steps of ``local``
      on f_i + ‖· − u‖²/2η; ``auto`` is exact where it can be. ``warm``: the steps begin at z̄ (``center``) or at the
      last proximal point (``last``); from u, a few steps would not do.
    - ``step="gradient"`` has the steps of ``local`` on f_i alone, from u, in the place of P_i: with (1, 1, 1) FedAvg.
    - ``absentees``: those who are not in a cohort count with their ``latest`` z, so that the fixed point stays where it
      is, or are ``left-out`` of the mean, as in the author's experiments, which moves it. Either way an absentee stands
      still and takes one step with the newest z̄ when it is back (in the author's, its u goes on moving without it).
    - ``server``: what is done with the participants' mean update where absentees are left out.
    - ``anderson``: acceleration, with a memory of τ rounds. ``inner_memory``: the same within the local steps for P_i,
      with a memory of τ full-batch steps.
    - ``personal`` gives every client P_i(z̄), a model of its own, in the place of z̄.
    - ``noise`` (client-level privacy), ``local.private`` (point-level) and ``secure`` are those of FedAvg. A client
      keeps z_i as it was clipped, so that it and the server's mean stay together.

    Not here: the variants of §2.5 in which the server has every u_i, or in which there is none, as a method here asks a
    server for sums; and dual variables u_i that clients choose (§2.4.4), for which there is no rule.
    """

    model: Model
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0
    cohort: int | float = 10
    local: LocalSGD = ONE_PASS
    eta: float = _ETA
    mu: float | None = None
    mu_step: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)
    schedules: Schedules = field(default_factory=Schedules)
    ergodic: bool = False
    losses: Literal["mean", "sum"] = "mean"
    step: Literal["proximal", "gradient"] = "proximal"
    solver: Solver = "auto"
    warm: Literal["center", "last"] = "center"
    absentees: Literal["latest", "left-out"] = "latest"
    anderson: Anderson = field(default_factory=Anderson)
    inner_memory: int = 0
    personal: bool = False
    point_private: ClassVar[Literal[True]] = True
    presets: ClassVar[Presets] = {
        # T2 (2.1) and §2.4: sums of losses, all clients in every round; η of its author's least squares
        "paper": {"cohort": 1.0, "losses": "sum", "eta": 1e-4}
    }

    def __post_init__(self) -> None:
        for name, least, most in (("alpha", 0, 2), ("beta", 0, 2), ("gamma", 0, 1)):
            if not least < getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)}; expected above {least} and at most {most}")
        if self.eta != _ETA and self.mu is not None:
            raise ValueError(f"eta={self.eta} and mu={self.mu} are two names for one number, mu = 1/eta: give one")
        if not 0 < self.eta < math.inf:
            raise ValueError(f"eta={self.eta}; expected a step size above 0 (no proximal term at all: mu=0)")
        at_least(self, mu=0, mu_step=0, inner_memory=0)
        if self.step == "gradient" and (self.eta != _ETA or self.mu is not None):
            raise ValueError("step='gradient' has no proximal term: its step size is local.lr; leave eta and mu out")
        if self.absentees == "latest" and self.server != ServerOptimizer():
            raise ValueError(
                "a server optimizer goes with absentees='left-out': everybody's latest z have a mean as is"
            )
        _ = self.proximal_map  # made here, because a vectorised task must not draw initial values
        self._check_privacy()

    def _check_privacy(self) -> None:
        self.check_privacy(self.local, points=True)
        if self.local.private is not None and (self.proximal_map.exact or self.losses == "sum"):
            raise ValueError("local.private protects the steps of solver='local' on losses='mean'; set both")
        if not self._loss_is_released:
            if self.mu_step:
                raise ValueError(
                    f"mu_step={self.mu_step} follows the clients' loss, which noise, secure and local.private keep "
                    "back; set mu_step=0 for a fixed mu"
                )
            if self._own_weights and self.anderson.over != "mean":
                raise ValueError(
                    f"anderson.over={self.anderson.over!r} shows the server more than the sum that noise, secure and "
                    "local.private protect; use 'mean', which asks for nothing"
                )

    # What the fields mean

    @cached_property
    def proximal_map(self) -> ProximalMap:
        gradient = self.step == "gradient"
        penalty = not gradient and (self.mu != 0 or self.mu_step > 0)
        given = self.model, self.local, self.losses, self.solver
        return ProximalMap.choose(*given, gradient=gradient, penalty=penalty, memory=self.inner_memory)

    @property
    def _loss_is_released(self) -> bool:
        return self.noise is None and not self.secure and self.local.private is None

    @property
    def weight(self) -> str | None:
        """The weights λ of (2.1): those that make Σ λ_i·f_i the mean over all samples, unless something forbids it."""
        return SIZE if self.losses == "mean" and self._loss_is_released else None

    @cached_property
    def relaxation(self) -> Relaxation:
        return Relaxation(self.alpha, self.beta, self.gamma, self.schedules, self.anderson.memory)

    @property
    def _own_weights(self) -> bool:
        """Do clients have a history of their own, which the server's weights are for?"""
        return not self.relaxation.common and self.anderson.memory > 0

    @property
    def _compares(self) -> bool:
        return self._own_weights and self.anderson.over == "gram"

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

    # The clients' side

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
        coefficients: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Sent:
        """One step (2.15) of the client, after what z̄ tells about its last one (2.16, 2.17); sends the change of z.

        center: z̄, or the common u. inverse: 1/η. number: of the round. first: z of a client that was never asked (else
        it joins at z̄). counted: the last round in which the server got the client's z. weights: of the last images,
        for acceleration. coefficients: α_t, β_{t−1} and γ_{t−1} where they have schedules.
        """
        alpha = self.alpha if coefficients is None else coefficients[0]
        point, keep = self._point(client, center, weights, coefficients)
        start = point if self.step == "gradient" else center if self.warm == "center" else client.kept.get("p", center)
        image, loss = self.proximal_map(client, point, start, inverse, rate, noise)
        new = (1 - alpha) * point + alpha * image
        if self.warm == "last":
            keep["p"] = image
        before = center if self.absentees == "left-out" else point_at_server(client, center, first, counted)
        update = new - before
        # as the release will clip it, so that the client's z and the server's mean stay together
        norm: Norm = "l2" if self.noise is None else self.noise.norm
        bounded = update if self.clip is None else clipped(update, self.clip, norm)
        # differences in the place of points that both sides know: what a client keeps has never been sent
        common, relaxes = self.relaxation.common, self.relaxation.relaxes
        if not common or self.absentees == "latest":
            keep["z"] = before + bounded
        if not common and (relaxes or "residuals" in keep):
            keep["u"] = point - keep["z"]
        if counted is not None:
            keep |= {"back": before - keep["z"], "at": number}
        return send(update=update, loss=loss, keep=keep)

    @fit.into
    def releases(self) -> list[Release]:
        return self.mean_update(self.local, weight=self.weight)

    @fit.derive
    def privacy_inputs(self, declared: Declarations) -> dict[str, Tensor]:
        """DP-SGD's noise multiplier, which each client finds from what it declares."""
        return {} if self.local.private is None else {"noise": self.local.noise_multipliers(declared)}

    @task
    def compare(self, client: Client, center: Tensor, coefficients: Tensor | None = None) -> Sent:
        """For acceleration: the inner products of the client's last residuals u − T(u)."""
        residuals = self.relaxation.history(client, center, coefficients)["residuals"]
        return send(gram=residuals @ residuals.T)

    @compare.into
    def gram(self) -> list[Release]:
        return [Mean("gram", weight=self.weight)]

    @task(stays="theta")
    def personal_model(self, client: Client, center: Tensor, inverse: Tensor) -> Sent:
        """The personal model P_i(z̄)."""
        plain = replace(self.proximal_map, local=replace(self.local, private=None))
        return send(theta=plain(client, center, center, inverse, torch.ones(()))[0])

    def _point(
        self, client: Client, center: Tensor, weights: Tensor | None, coefficients: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The client's u for this round, and what it keeps of the way there."""
        relaxation = self.relaxation
        if relaxation.common:
            return center, {}
        if weights is None:
            return relaxation.image(*relaxation.last(client, center), center, coefficients), {}
        history = relaxation.history(client, center, coefficients)
        keep = {name: history[name] for name in ("images", "residuals") if name == "images" or self._compares}
        return weights.to(center.dtype) @ history["images"], keep

    # The server's side

    def start(self, seed: int) -> State:
        theta = self.model.init(seed)
        state = self.first_state("theta", theta)
        if self.mu_step:
            first = {"mu": torch.tensor(self._inverse), "loss": torch.tensor(torch.nan), "falls": torch.zeros(())}
            state = state.with_part("prox", first)
        if self.noise is not None and self.absentees == "latest":
            state = state.replace(first=theta)
        if self.ergodic:
            state = state.replace(average=theta, total=torch.zeros((), dtype=torch.float64))
        if self.relaxation.common and (self.relaxation.relaxes or self.anderson.memory):
            state = state.replace(u=theta)
        return state.with_part("anderson", self.anderson.start()) if self.anderson.memory else state

    @property
    def _inverse(self) -> float:
        """1/η before any schedule."""
        return 1 / self.eta if self.mu is None else float(self.mu)

    def round(self, state: State, federation: Federation) -> State:
        state = self.with_table(state, federation)
        cohort = self.sample(federation, self.cohort)
        prox, (inverse, rate) = state.part("prox"), self.step_sizes(state, federation.round)
        inputs: dict[str, Any] = {
            "center": self._center(state),
            "inverse": torch.tensor(inverse, dtype=state.theta.dtype),
            "rate": torch.tensor(rate, dtype=state.theta.dtype),
            "number": federation.round,
        }
        if "counted" in state:
            inputs["counted"] = each(state.counted[cohort.positions])
        if "first" in state:
            inputs["first"] = state.first
        coefficients = self.relaxation.coefficients(federation.round)
        if coefficients is not None:
            inputs["coefficients"] = coefficients
        if self._own_weights:
            inputs["weights"], state = self._image_weights(state, cohort, federation, coefficients)
        replies = cohort.ask(self.fit, **inputs)
        if "loss" in replies:
            federation.report(loss=replies["loss"])
            if prox:
                state = state.with_part("prox", self._next_mu(prox, replies["loss"]))
        if "update" in replies:  # the very first Poisson cohort may be empty
            state = self._mean(state, cohort, replies, federation)
        if self.ergodic:
            eta = 1 / inverse if inverse else 1.0
            total = state.total + eta
            state = state.replace(average=state.average + eta / total * (state.theta - state.average), total=total)
        return state

    def _center(self, state: State) -> Tensor:
        """What goes to clients: z̄, or the common u."""
        return state.get("u", state.theta) if self.relaxation.common else state.theta

    def step_sizes(self, state: State, number: int) -> tuple[float, float]:
        """1/η and the factor of the local rate in a round."""
        factor = self.schedule(number)
        inverse = float(state.part("prox").get("mu", self._inverse)) / factor
        return inverse, factor if self.schedules.local is None else self.schedules.local(number)

    def with_table(self, state: State, federation: Federation) -> State:
        """The state with its table of clients: the last round in which each client's z came."""
        # with noise nobody who reads the state may learn who was in a cohort
        if self.absentees == "latest" and self.noise is None and "counted" not in state:
            state = state.replace(counted=torch.zeros(len(federation.roster), dtype=torch.int64))
        return state

    def _mean(self, state: State, cohort: Cohort, replies: Replies, federation: Federation) -> State:
        """z̄ from the mean of what came, and the next u where it is common to all."""
        center, update, roster = self._center(state), replies["update"], federation.roster
        if self.absentees == "left-out":
            theta, moments = self.server.step(center, update, state.part("server"))
            state = state.with_part("server", moments)
        elif self.noise is not None:  # divided by public numbers alone
            theta = state.theta + update * (cohort.expected / int(roster.labeled.sum()))
        else:
            came, weights = cohort.positions[replies.answered], self.weights_of(federation)
            theta = mean_of_latest(state.theta, center, update, came, state.counted, weights)
            state = state.replace(counted=state.counted.index_fill(0, came, federation.round))
        if "u" in state:
            gamma = self.relaxation.gamma_of(federation.round)
            image = (1 - gamma) * center + gamma * theta
            point, state = next_point(state, self.anderson, center, image, federation)
            state = state.replace(u=point)
        return state.replace(theta=theta)

    def weights_of(self, federation: Federation) -> Tensor:
        """[clients] how much each counts."""
        bound = federation.roster.bound.to(torch.float64)
        return bound if self.weight else torch.ones_like(bound)

    def _image_weights(
        self, state: State, cohort: Cohort, federation: Federation, coefficients: Tensor | None
    ) -> tuple[Tensor, State]:
        """The weights that clients give their own last images, of which T(u) of the last round is the newest."""
        gram = None
        if self._compares and "mean" in state:
            given = {} if coefficients is None else {"coefficients": coefficients}
            gram = cohort.ask(self.compare, None, center=state.theta, **given)["gram"]
        gamma = self.relaxation.gamma_of(max(1, federation.round - 1))
        return client_weights(state, self.anderson, gamma, gram, federation)

    def _next_mu(self, prox: Mapping[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
        falls = prox["falls"] + 1 if loss < prox["loss"] else torch.zeros(())
        step = self.mu_step * (float(loss > prox["loss"]) - float(falls == 5))
        return {"mu": (prox["mu"] + step).clamp(min=0), "loss": loss, "falls": falls % 5}

    def for_audit(self, model: Model, cohort: int | float, local: LocalSGD, noise: AdditiveNoise | None) -> Splitting:
        """For an audit: the same rounds on another model, with nothing but the mean of the updates in the state."""
        plain = Splitting(model, cohort=cohort, local=local, mu=0.0, losses=self.losses, absentees="left-out")
        return replace(plain, solver="local", clip=self.clip, noise=noise, secure=self.secure)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        theta = state.average if self.ergodic else state.theta
        if not self.personal:
            return theta.expand(len(cohort), -1)
        inverse = state.part("prox").get("mu", torch.tensor(self._inverse))
        return cohort.ask(self.personal_model, center=theta, inverse=inverse).held("theta")
