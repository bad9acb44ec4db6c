"""AdaPeD, adaptive personalization via distillation (Ozkara, Girgis, Data and Diggavi; P3 §3.4, §3.5, §6.2.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from unalike.core.checks import at_least
from unalike.core.federation import QuorumError
from unalike.core.release import Mean, Release
from unalike.core.vocabulary import Client, Cohort, Federation, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, InTurns, Moves, Params, divergence, loss_of, scores, teacher_gradient
from unalike.learn.schedules import Schedule
from unalike.methods import Presets
from unalike.methods.averaging import ProtectedMean, private_inputs
from unalike.methods.distillation import distillation_loss, student_gradient
from unalike.methods.newcomers import NOBODY, PersonalModels, kept_or, one_rate, with_answered
from unalike.privacy import Gaussian
from unalike.privacy.mechanisms import clip as clipped
from unalike.privacy.sampling import Poisson


@dataclass(frozen=True)
class AdaPeD(ProtectedMean, PersonalModels):
    """Every client has a model θ of its own; a common model μ teaches it, as much as ψ says (Ozkara et al. Alg. 5).

    A client's loss is f(θ) + ½·log 2ψ + KD(θ, μ)/2ψ with KD = KL(p_μ ‖ p_θ), means over a batch. In each of the τ local
    steps θ moves, then μ at the new θ, then ψ at both. θ stays; the server averages what became of μ and ψ.
    ``local`` has τ, the batch and η₁; ``mu_lr`` is η₂ (none: as η₁), ``psi_lr`` η₃, ``psi`` the first ψ, ``least_psi``
    its floor. With ``train_unsampled``, clients that are not sampled go on training θ with μ and ψ as last received
    (Alg. 6), for at most ``most_rounds_alone`` rounds in succession (§6.2.2). A newcomer starts from μ and trains with
    μ and ψ fixed. The other fields are those of ``ProtectedMean`` and ``PersonalModels``.

    With ``noise`` (DP-AdaPeD) the cohort is a Poisson sample, and the whole change of (μ, ψ) is clipped to ``clip`` and
    noised once. ``noisy_steps`` clips and noises each step instead, as the paper does: "apart" (∇μ to ``clip``, ∂ψ to
    ``psi_clip``) or "together" (both as one vector, to ``clip``; ∂ψ is then taken before μ moves). There a client
    trains with its share of the noise but sends the sum of its clipped gradients (so μ decays at clients alone), and
    what the shares of the expected cohort add up to is drawn once, on the sum. The paper has clients send the noise
    that they trained with: later steps can undo it, and a cohort's size shows in it. Theorem 7, which overlooks both,
    is reported as ``theorem_7_epsilon``.

    With ``local.private`` (point-level privacy) a step moves θ, μ and ψ at once, not in turns, by DP-SGD on one batch:
    a sample's gradient of the loss above, in all three, is clipped as one vector. So θ is as private as μ, which it
    will have taught in the rounds after. A newcomer's θ stays, and is trained without noise.
    """

    cohort: int | float = 10
    local: LocalSGD = LocalSGD(steps=10, batch=1 / 60, lr=0.1, weight_decay=1e-4)
    mu_lr: float | None = None
    psi_lr: float = 0.03
    psi: float = 4.0
    least_psi: float = 0.5
    schedule: Schedule = field(default_factory=lambda: Schedule("exponential", 0.99, 6))
    train_unsampled: bool = False
    most_rounds_alone: int | None = None
    newcomer_rounds: int = field(default=6, kw_only=True)
    noisy_steps: Literal["apart", "together"] | None = None
    psi_clip: float = 1.0
    point_private: ClassVar[Literal[True]] = True
    presets: ClassVar[Presets] = {"paper": {}, "ozkara2022": {}}  # the defaults are those of P3 §4.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_privacy(self.local, points=True)
        if self.local.private is not None and self.train_unsampled:
            raise ValueError("train_unsampled trains models that later rounds start from, and charges nobody for it")
        if not 0 < self.least_psi <= self.psi:
            raise ValueError(f"psi={self.psi}, least_psi={self.least_psi}; expected 0 < least_psi <= psi")
        at_least(self, mu_lr=0, psi_lr=0, most_rounds_alone=0)
        _ = self._alternating
        if self.noisy_steps is not None:
            if not isinstance(self.noise, Gaussian) or self.clip is None:
                raise ValueError("noisy_steps says where a private run has its noise: set clip and Gaussian noise, too")
            if self.local.steps is None or self.local.momentum or self.local.clip is not None:
                raise ValueError(
                    "noisy_steps bounds a sum of steps: set local.steps, and leave local.momentum and local.clip out"
                )

    # The clients' side

    @task
    def fit(
        self,
        client: Client,
        mu: Tensor,
        psi: Tensor,
        rate: Tensor,
        jitter: Tensor | None = None,
        noise: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Sent:
        """τ steps (Alg. 5, lines 9-15); sends the change of μ and ψ as one vector."""
        start = {"theta": kept_or(client, self.first), "mu": mu, "psi": psi}
        protect: Callable[..., dict[str, Tensor]] = dict
        if jitter is not None:
            start |= {"mu_sum": torch.zeros_like(mu), "psi_sum": torch.zeros_like(psi)}
            protect = partial(self._protect, client, jitter)
        after, loss = self._alternating.minimise(
            InTurns(partial(self._moves, protect)) if self.local.private is None else self._joint,
            start,
            client,
            labels=True,
            rate=rate,
            noise=noise,
            batch=batch,
            least={"psi": self.least_psi},
            undecayed=("psi", "mu_sum", "psi_sum"),
        )
        assert isinstance(after, dict)
        if jitter is None:
            update = torch.cat([after["mu"] - mu, (after["psi"] - psi)[None]])
        else:
            update = torch.cat([after["mu_sum"], after["psi_sum"][None]]) / rate
        received = {"mu": mu, "psi": psi} if self.train_unsampled else {}
        if self.most_rounds_alone is not None:
            received["alone"] = torch.zeros_like(client.n)
        return send(update=update, loss=loss, keep={"theta": after["theta"], **received})

    @fit.into
    def releases(self) -> list[Release]:
        if self.noisy_steps is None:
            return self.mean_update(self.local)
        bound, bits = self._sum_bound, self.bits
        return [Mean("update", bound, self.noise, secure=self.secure, bits=bits, feedback=self.feedback)]

    fit.derive(private_inputs)

    @task
    def go_on(self, client: Client, rate: Tensor) -> Sent:
        """A client that is not sampled trains θ with what it received last (Alg. 6, lines 9-11).

        In a private run θ stays where it would not be finite: the server is told of tasks that fail, and that this one
        ran at all says that its client was not sampled.
        """
        mu = kept_or(client, self.first, "mu")
        psi = kept_or(client, torch.tensor(self.psi), "psi")
        before = kept_or(client, self.first)
        theta = self.local(distillation_loss(self.model, mu, _mix(psi)), before, client, rate=rate)
        if self.most_rounds_alone is not None:
            alone = client.kept.get("alone", torch.zeros_like(client.n))
            theta = torch.where(alone < self.most_rounds_alone, theta, before)
        if self.noise is not None:
            theta = torch.where(theta.isfinite().all(), theta, before)
        return send(keep={"theta": theta} if self.most_rounds_alone is None else {"theta": theta, "alone": alone + 1})

    @task
    def join(self, client: Client, mu: Tensor, psi: Tensor) -> Sent:
        """The personal model of a newcomer. It was trained without noise, so no later round begins with it."""
        plain = replace(self.local.repeat(self.newcomer_rounds), private=None)
        trained = plain(distillation_loss(self.model, mu, _mix(psi)), mu, client)
        return send(keep={"joined": client.kept.get("joined", trained)})

    def _joint(self, params: Params, batch: Batch) -> Tensor:
        """f(θ) + ½·log 2ψ + KD(θ, μ)/2ψ."""
        assert isinstance(params, dict) and batch.y is not None
        of_theta, of_mu = (scores(self.model(params[name], batch.x), batch.y) for name in ("theta", "mu"))
        apart = divergence(of_mu, of_theta, batch.y) / (2 * params["psi"])
        return batch.mean(loss_of(of_theta, batch.y) + apart) + torch.log(2 * params["psi"]) / 2

    def _moves(self, protect: Callable[..., dict[str, Tensor]], params: dict[str, Tensor], batch: Batch) -> Moves:
        """One step: the forward pass of μ serves θ and μ, that of the new θ serves μ and ψ."""
        psi, x, y = params["psi"], batch.x, batch.y
        assert y is not None
        mu, theta = params["mu"], params["theta"]
        gradient, loss, of_mu, pull_mu = student_gradient(self.model, theta, mu, batch, _mix(psi))
        params = yield {"theta": gradient}
        of_theta = scores(self.model(params["theta"], x), y)
        h = pull_mu(batch.mean_gradient(teacher_gradient(of_mu, of_theta, y)) / (2 * psi))[0]

        def slope(of_mu: Tensor) -> Tensor:  # of ½·log 2ψ + KD/2ψ in ψ
            return (1 - batch.mean(divergence(of_mu, of_theta, y)) / psi) / (2 * psi)

        if self.noisy_steps == "together":
            yield protect(mu=h, psi=slope(of_mu))
        else:
            params = yield protect(mu=h)
            yield protect(psi=slope(scores(self.model(params["mu"], x), y)))
        return loss

    def _protect(self, client: Client, jitter: Tensor, **gradients: Tensor) -> dict[str, Tensor]:
        """Gradients clipped, with the client's share of the noise, and as NAME_sum without it, for the server."""
        bound = self._bounds["mu" if "mu" in gradients else "psi"]
        whole = clipped(torch.cat([value.reshape(-1) for value in gradients.values()]), bound) / bound
        noisy = bound * (whole + jitter * client.noise.normal(len(whole)).to(whole.dtype))
        sizes = [value.numel() for value in gradients.values()]
        protected: dict[str, Tensor] = {}
        for (name, value), one, bare in zip(
            gradients.items(), torch.split(noisy, sizes), torch.split(whole, sizes), strict=True
        ):
            protected |= {name: one.reshape(value.shape), f"{name}_sum": bare.reshape(value.shape)}
        return protected

    @cached_property
    def _alternating(self) -> LocalSGD:
        """The local steps with a rate for each part; what is summed up for the server is not scaled."""
        lr = one_rate(self.local, "θ's: μ has mu_lr and ψ has psi_lr")
        return replace(self.local, lr={"theta": lr, **self._rates, "mu_sum": 1.0, "psi_sum": 1.0})

    @property
    def _rates(self) -> dict[str, float]:
        return {"mu": one_rate(self.local) if self.mu_lr is None else self.mu_lr, "psi": self.psi_lr}

    @property
    def _bounds(self) -> dict[str, float]:
        """The clips of noisy steps."""
        assert self.clip is not None
        return {"mu": self.clip, "psi": self.psi_clip if self.noisy_steps == "apart" else self.clip}

    @property
    def _sum_bound(self) -> float:
        """How long the sum of τ steps is at most, each part in units of its clip."""
        return (self.local.steps or 0) * (math.sqrt(2) if self.noisy_steps == "apart" else 1.0)

    # The server's side

    def start(self, seed: int) -> State:
        return State(mu=self.first, psi=torch.tensor(self.psi), ids=NOBODY)

    def round(self, state: State, federation: Federation) -> State:
        cohort = self.sample(federation, self.cohort).within_budget(self.fit)
        rate, jitter = self.schedule(federation.round), self._shares(cohort)
        replies = cohort.ask(self.fit, mu=state.mu, psi=state.psi, rate=rate, **jitter)
        if self.train_unsampled:
            with suppress(QuorumError):  # they train for themselves: whoever does not answer only misses a round
                _absent_clients(cohort).ask(self.go_on, rate=rate, into=[])
        if "loss" in replies:
            federation.report(loss=replies["loss"])
        state = with_answered(state, cohort, replies)
        if "update" in replies:  # else the very first Poisson cohort was empty
            change = replies["update"]
            if self.noisy_steps is not None:
                scale = {name: rate * lr * self._bounds[name] for name, lr in self._rates.items()}
                change = torch.cat([scale["mu"] * change[:-1], scale["psi"] * change[-1:]])
            psi = (state.psi + change[-1]).clamp(min=self.least_psi)
            state = state.replace(mu=state.mu + change[:-1], psi=psi)
        federation.report(psi=state.psi)
        return state

    def _shares(self, cohort: Cohort) -> dict[str, Any]:
        """The noise of a step at a client, in units of the clip; and what Theorem 7 takes the ε so far to be."""
        if self.noisy_steps is None:
            return {}
        assert isinstance(self.noise, Gaussian) and isinstance(cohort.sampling, Poisson)
        steps, federation = self.local.steps or 0, cohort.federation
        total = self.noise.noise_multiplier * self._sum_bound  # of the sum of all steps of all clients
        share = total / math.sqrt(steps * cohort.expected)
        if federation.budget is not None:
            clips = 2 if self.noisy_steps == "apart" else 1
            z = share * math.sqrt(cohort.expected / clips)
            spent = theorem_7_epsilon(z, cohort.sampling.rate, federation.round, federation.budget.delta)
            federation.report(theorem_7_epsilon=spent)
        return {"jitter": share}

    def personalize(self, state: State, cohort: Cohort) -> Models:
        return self.own_models(state, cohort, self.join, state.mu, mu=state.mu, psi=state.psi)


def _mix(psi: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """f(θ) + KD(θ, μ)/2ψ."""
    return lambda of_data, of_teacher: of_data + of_teacher / (2 * psi)


def _absent_clients(cohort: Cohort) -> Cohort:
    """Labeled clients that are not in the cohort. How many they are is as secret as the size of a Poisson sample."""
    federation, sampling = cohort.federation, cohort.sampling
    labeled = federation.roster.labeled.nonzero().flatten()
    others = federation.cohort(labeled[~torch.isin(labeled, cohort.positions)])
    if not isinstance(sampling, Poisson) or sampling.rate == 1:
        return others
    return replace(others, sampling=Poisson(1 - sampling.rate), expected=len(labeled) - cohort.expected)


def theorem_7_epsilon(noise_multiplier: float, rate: float, rounds: int, delta: float) -> float:
    """ε by Ozkara et al. Theorem 7, with σ√K/C as the noise multiplier; not a guarantee (see ``AdaPeD``).

    RDP of 6·rate²·rounds·α/z² at every order α, turned into (ε, δ) by Ozkara et al. Lemma 2.
    """
    growth = 6 * rate**2 * rounds / noise_multiplier**2
    orders = [1 + 10 ** (k / 50) for k in range(-100, 250)]
    found = (growth * a + (math.log(1 / delta) + (a - 1) * math.log(1 - 1 / a) - math.log(a)) / (a - 1) for a in orders)
    return max(0.0, min(found))
