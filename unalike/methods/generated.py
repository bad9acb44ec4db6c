"""What methods share whose server makes clients' models by a hypernetwork, of descriptors of the clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.func import vjp

from unalike.core.checks import one_of
from unalike.core.release import Each, Mean, Release
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Replies, Sent, State, Task, each, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.server import ServerOptimizer
from unalike.methods.newcomers import NOBODY
from unalike.methods.problem import Problem
from unalike.networks.hypernet import Initial, Size, first_values, hypernetwork
from unalike.privacy.mechanisms import AdditiveNoise, Gaussian, Laplace, clip

MOST_REMEMBERED = 1000  # clients whose descriptors a state has
_REMEMBERED = "kept by the server with the client's id, to tell how far newcomers are from those who trained"
_LEAST_SPREAD = 0.02  # of a coordinate of descriptors on the unit sphere
SENSITIVITY = 2.0  # of a sum of points on the unit sphere when one is replaced; of their mean: 2/n (P2, Lemma 2)


@dataclass(frozen=True)
class GeneratedModels:
    """A hypernetwork h at the server, with parameters η_h, makes a client's model θ = h(v) of its descriptor v.

    - ``descriptor``: length l of v; None: a quarter of the number of training clients.
    - ``size``: hidden layers of h, S 1, M 3 or L 5; ``layers``: another number of them. ``rank``: of h's last layer,
      [d, rank]·[rank, 100] in place of [d, 100]: h has fewer parameters; None: full.
    - ``initial``: h's first values, "near" a usual model or those of "pytorch".
    - ``server``: its optimizer; ``clip``: bound on the norm of the gradients of all networks together.
    - ``lambda_h``: regularisation of h by decay.
    - ``bits``, ``feedback``: of updates and gradients, as in ``ProtectedMean``.

    No exchange of updates can be a secure sum: each passes through h at its own client's v.
    """

    problem: Problem
    cohort: int | float = 5
    local: LocalSGD = LocalSGD(steps=50, batch=32, lr=2e-3, momentum=0.9, weight_decay=5e-5)
    _: KW_ONLY
    server: ServerOptimizer = ServerOptimizer("adam", lr=2e-4, warmup=10)
    descriptor: int | None = None
    size: Size = "M"
    layers: int | None = None
    rank: int | None = None
    initial: Initial = "near"
    clip: float = 50.0
    lambda_h: float = 1e-3
    bits: int | None = None
    feedback: bool = False
    asks_unlabeled: ClassVar[bool] = False

    @property
    def model(self) -> Model:
        return self.problem.model

    @property
    def length(self) -> int:
        """l, the length of a descriptor."""
        return self.descriptor if self.descriptor is not None else max(1, round(self.problem.clients / 4))

    @cached_property
    def hypernet(self) -> Model:
        """h, sized for the problem."""
        return hypernetwork(self.length, self.problem.model, self.size, self.layers, self.initial, self.rank)

    def first_hypernet(self, seed: int) -> Tensor:
        """η_h before the first round."""
        return first_values(self.hypernet, self.problem.model, seed, self.initial)

    @property
    def _few(self) -> dict[str, Any]:
        return {"bits": self.bits, "feedback": self.feedback}

    def exchange(self, state: State, cohort: Cohort, v: Tensor, fit: Task) -> tuple[Tensor, Tensor, Replies]:
        """Send models h(v), receive updates: the gradients of η_h [p] and of each client's v [C, l], and the replies.

        They are of the mean loss over the clients that answered, with Δθ in the place of −∂L/∂θ; that of v is 0 for who
        did not answer.
        """
        shift, scale = state.get("shift", 0.0), state.get("scale", 1.0)
        theta, pull = vjp(lambda eta, v: self.hypernet(eta, (v - shift) * scale), state.hypernet, v)[:2]
        replies = cohort.ask(fit, theta=each(theta), into=[Each("update", **self._few), Mean("loss")])
        delta = torch.zeros_like(theta).index_copy_(0, replies.answered, replies["update"])
        g_h, g_v = pull(-delta / len(replies.answered))
        return g_h, g_v, replies

    def descend(
        self,
        state: State,
        gradients: Mapping[str, Tensor],
        decay: Mapping[str, float],
        rates: Mapping[str, float] | None = None,
        beta: float | None = None,
        weight_decay: float = 0.0,
    ) -> State:
        """A step of the named networks down their gradients, clipped together; ``rates`` gives some their own.

        Where each client's gradients were clipped and have their noise, they are not clipped again.

        The gradient of λ‖η‖² enters as decay, η ← (1 − 2βλ)η (T1 Alg. 8, lines 17-18), with β the network's rate (then
        plain SGD does the same with the gradient) or another ``beta``. ``weight_decay``: w·η is added to every clipped
        gradient, and so to momentum, as PyTorch's SGD does. ``server.begin`` puts moments into the state.
        """
        norm = math.hypot(*(float(torch.linalg.vector_norm(gradient)) for gradient in gradients.values()))
        factor = -1.0 if getattr(self, "noise", None) is not None else -min(1.0, self.clip / max(norm, 1e-12))
        for name, gradient in gradients.items():
            optimizer = replace(self.server, lr=(rates or {}).get(name, self.server.lr))
            kept = 1 - 2 * (optimizer.lr if beta is None else beta) * decay.get(name, 0.0)
            direction = gradient * factor if weight_decay == 0 else gradient * factor - weight_decay * state[name]
            state = optimizer.move(state if kept == 1 else state.replace(**{name: state[name] * kept}), name, direction)
        return state


@dataclass(frozen=True, kw_only=True)
class ClientDescriptors(GeneratedModels):
    """Clients describe their data to the server by the mean of what a network makes of their rows.

    - ``noise``: client-level privacy. A Poisson cohort gets both networks; each client describes itself, makes its
      model and trains it, all by itself, and sends what the three exchanges would have made of it: the gradient of both
      networks as one vector, clipped to ``clip``. The server sees their noisy mean. No descriptor leaves a client in
      training. The first round finds how descriptors are normalised, in the same way, and does not train.
    - ``remember``: the server keeps the latest descriptors of up to 1,000 training clients with their ids, and tells a
      newcomer how far it is from them. The transcript says so. It never does where ``newcomer_epsilon`` is set.
    - ``secure``: the clients' gradients of that network are summed under masks, each clipped to ``gradient_clip``; with
      ``noise`` those of both networks.
    - ``newcomer_epsilon``, ``newcomer_delta``: a newcomer protects each of its rows by noise on its descriptor. On the
      unit sphere one of n rows moves the mean by at most 2/n. ``newcomer_noise``: "gaussian" is made for
      this L2 distance; "laplace" needs the L1 distance, which is up to 2√l/n in l coordinates, and has δ = 0.
    - ``describe_by``: the network reads "rows", or the "features" that a pretrained model gives before its last layer:
      one forward pass of what is frozen, so that less is learned and sent. "auto": features where an adapter is made.
    """

    describe_by: Literal["auto", "rows", "features"] = "auto"
    noise: AdditiveNoise | None = None
    remember: bool = True
    secure: bool = False
    gradient_clip: float | None = None
    newcomer_epsilon: float | None = None
    newcomer_delta: float = 0.01
    newcomer_noise: Literal["gaussian", "laplace"] = "gaussian"
    client_private: ClassVar[Literal[True]] = True
    made_at: ClassVar[Literal["server"]] = "server"

    def check_descriptors(self) -> None:
        """Refuse settings that do not fit together."""
        one_of(self, "newcomer_noise", "describe_by")
        if self.secure and self.gradient_clip is None and self.noise is None:
            raise ValueError("secure sums need a bound; set gradient_clip=..., the most that a gradient may be long")
        _ = self.protection

    @property
    def by_features(self) -> bool:
        """Does the network that describes rows read features?"""
        return self.describe_by == "features" or (self.describe_by == "auto" and self.model.drawn is not None)

    @property
    def protection(self) -> Gaussian | Laplace | None:
        """A newcomer's mechanism."""
        if self.newcomer_epsilon is None:
            return None
        if self.newcomer_noise == "laplace":
            return Laplace(self.newcomer_epsilon)
        return Gaussian.for_budget(self.newcomer_epsilon, self.newcomer_delta)

    def with_protection(self, epsilon: float | None, delta: float) -> Self:
        """The same method for newcomers who protect each of their rows by (ε, δ)."""
        return replace(self, newcomer_epsilon=epsilon, newcomer_delta=delta)

    def distance_by_one_row(self, length: int) -> float:
        """How far one row can move a sum of points with so many coordinates, in the norm that the noise is made for."""
        return SENSITIVITY * (length**0.5 if self.newcomer_noise == "laplace" else 1.0)  # ‖u‖₁ ≤ √l·‖u‖₂

    def noisy_descriptor(self, length: int, rows: int | None) -> list[Release]:
        """How a newcomer's descriptor leaves it: a mean of at most ``rows`` rows; the newcomer knows of how many."""
        if self.protection is None:
            return []
        sensitivity = _OfAMean(self.distance_by_one_row(length), rows)
        return [Each("descriptor", noise=self.protection, sensitivity=sensitivity, unit="point")]

    def training_descriptor(self) -> list[Release]:
        """How a training client's descriptor leaves it."""
        return [Each("descriptor", note=_REMEMBERED if self.remembers else None)]

    def mean_gradient(self) -> list[Release]:
        """How the gradient of the describing network leaves the clients."""
        return [Mean("gradient", clip=self.gradient_clip, secure=self.secure, **self._few)]

    @property
    def remembers(self) -> bool:
        """Does the server keep descriptors?"""
        return self.remember and self.newcomer_epsilon is None and self.noise is None

    def private_gradients(
        self, state: State, federation: Federation, network: str, moments: Task, learn: Task
    ) -> tuple[State, dict[str, Tensor]]:
        """The state, calibrated if it was not, and the noisy mean gradients of h and of the named network, if any."""
        cohort = federation.sample(self.cohort, poisson=True, labeled=True)
        if float(state.scale) == 0:
            found = cohort.ask(moments, network=state[network]).get("moments")
            return (state if found is None else state.replace(**_normaliser(found * math.sqrt(2)))), {}
        sent: dict[str, Any] = {name: state[name] for name in ("hypernet", "shift", "scale")}
        gradient = cohort.ask(learn, network=state[network], **sent).get("gradient")
        if gradient is None:  # the very first Poisson cohort was empty
            return state, {}
        of_h, of_network = torch.split(gradient, [state.hypernet.numel(), state[network].numel()])
        return state, {"hypernet": of_h, network: of_network}

    def first_memory(self, length: int) -> dict[str, Tensor]:
        """The part of a state before anybody has described itself."""
        memory = {"remembered.ids": NOBODY, "remembered.v": torch.zeros(0, length)}
        return {"shift": torch.zeros(length), "scale": torch.zeros(()), **memory}

    def with_memory(self, state: State, cohort: Cohort, v: Tensor) -> State:
        """The state with the descriptors [C, l] that a cohort just sent, in the place of those that it sent before."""
        if not self.remembers:
            return state
        rest = ~torch.isin(state["remembered.ids"], cohort.ids)
        ids = torch.cat([cohort.ids, state["remembered.ids"][rest]])[:MOST_REMEMBERED]
        v = torch.cat([v.detach(), state["remembered.v"][rest]])[:MOST_REMEMBERED]
        return state.with_part("remembered", {"ids": ids, "v": v})

    def nearest(self, state: State, sent: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """How far newcomers are from the nearest training client, and training clients from the nearest of the others,
        in units of the normalised descriptors. None: fewer than two are remembered.
        """
        known = state.part("remembered")["v"]
        if len(known) < 2:
            return None
        among = torch.cdist(known, known).masked_fill(torch.eye(len(known), dtype=torch.bool), torch.inf)
        return torch.cdist(sent["descriptor"], known).amin(1) * state.scale, among.amin(1) * state.scale


@dataclass(frozen=True)
class _OfAMean:
    """How far one of a client's rows moves the mean over all of them, or over at most ``rows``."""

    of_one: float
    rows: int | None

    def __call__(self, client: Client) -> Tensor:
        return self.of_one / (client.n if self.rows is None else client.n.clamp(max=self.rows))


def joint_tasks(
    describe: Callable[[Any, Client, Tensor, Tensor], Tensor], train: Callable[[Any, Client, Tensor], Tensor]
) -> tuple[Task, Task]:
    """``learn`` and ``moments``: what a method's clients do under ``noise``, where each does its round by itself.

    describe: (method, client, parameters of the describing network, random bits) to the client's descriptor. train:
    (method, client, θ) to Δθ, by which the client's loss falls.
    """

    @task
    def learn(self: Any, client: Client, hypernet: Tensor, network: Tensor, shift: Tensor, scale: Tensor) -> Sent:
        """The gradient of the client's loss in η_h and in the describing network's η, laid end to end."""
        bits = client.draws.bits(1)[0]

        def make(eta_h: Tensor, eta: Tensor) -> Tensor:
            return self.hypernet(eta_h, (describe(self, client, eta, bits) - shift)[None] * scale)[0]

        theta, pull = vjp(make, hypernet, network)[:2]
        return send(gradient=torch.cat(pull(-train(self, client, theta))))

    @task
    def moments(self: Any, client: Client, network: Tensor) -> Sent:
        """What descriptors are normalised by: v and ‖v‖², with v no longer than 1, and all no longer than 1."""
        v = clip(describe(self, client, network, client.draws.bits(1)[0]), 1.0)
        return send(moments=torch.cat([v, v.square().sum()[None]]) / math.sqrt(2))

    learn.into(lambda method: [Mean("gradient", clip=method.clip, noise=method.noise, secure=method.secure)])
    moments.into(lambda method: [Mean("moments", clip=1.0, noise=method.noise, secure=method.secure)])
    return learn, moments


def _normaliser(mean: Tensor) -> dict[str, Tensor]:
    """Shift and scale by the mean of v and ‖v‖². Noise may leave no spread to see, which is then taken to be small."""
    shift, square = mean[:-1], mean[-1]
    spread = ((square - shift.square().sum()) / len(shift)).clamp(min=_LEAST_SPREAD**2).sqrt()
    return {"shift": shift, "scale": 1 / spread}


def calibrate(state: State, federation: Federation, clients: int, describe: Task, **network: Any) -> State:
    """The state with the descriptors' ``shift`` and ``scale``, found once from a few clients (0: shift 0, scale 1).

    A fresh network gives all clients nearly the same descriptor. Centred and with a deviation of 1, clients differ
    enough for h to tell them apart from the first round.
    """
    if float(state.scale) != 0:
        return state
    if clients == 0:
        return state.replace(scale=torch.ones(()))
    count = max(1, min(clients, int(federation.roster.labeled.sum())))
    v = federation.sample(count, labeled=True).ask(describe, **network)["descriptor"]
    spread = (v - v.mean(0)).square().mean().sqrt()
    return state.replace(shift=v.mean(0), scale=1 / spread if float(spread) > 0 else torch.ones(()))
