"""FLowDUP: personal models in a low-dimensional subspace, made from unlabeled data (Scott, 2026: T1 ch. 5, C.1).

Symbols: h = h2(mean h1(x)) with parameters ψ_h = (h1, h2), learned regulariser ψ_r, v = h(X) in R^k, θ = θ0 + P·v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from unalike.core.checks import at_least
from unalike.core.draws import key
from unalike.core.dropout import dropout_from
from unalike.core.release import Mean, Release, Sum
from unalike.core.torch_internals import to_device_of
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, Params, loss_of
from unalike.learn.schedules import Schedule
from unalike.learn.server import ServerOptimizer
from unalike.methods.averaging import ProtectedMean
from unalike.methods.problem import Problem
from unalike.networks.architectures import build
from unalike.networks.heads import with_outputs
from unalike.networks.subspace import Kind, Subspace, subspace

_DOMAIN = 5_1  # so that the start of h has nothing to do with other draws of the seed
_DOWN, _UP = torch.float16, torch.bfloat16  # ψ wants the digits of the one, its small changes the range of the other
PARTS = ("h1", "hidden", "last", "bias", "prior")  # ψ: h1, the three tensors of h2, and ψ_r


class Lift:
    """v to θ = θ0 + P·v (eq. 5.2). Both sides make θ0 and P from a seed they agreed on, so neither is ever sent."""

    def __init__(self, model: Model, kind: Kind, dimension: int | None, seed: int) -> None:
        self.p: Subspace = subspace(kind, model.size, dimension, seed)
        self.theta0 = model.init(seed)
        self.k = self.p.columns

    def __call__(self, v: Tensor) -> Tensor:
        return to_device_of(self.theta0, v) + self.p(v)


@dataclass(frozen=True)
class FLowDUP(ProtectedMean):
    """A hypernetwork at the client makes its model from unlabeled data (Scott, 2026, Alg. 9-10).

    The objective (5.4) is loss + λ·‖v − ψ_r‖². Every other row of a batch makes v, the others measure the loss of
    θ0 + P·v; unlabeled clients have the regulariser only. The loss is a mean over the half batch where Scott has a
    sum, which scales ``local.lr`` and ``penalty`` alike; a row that lacks its label helps to make v and adds 0 to it.
    With ``local.batch=None`` the halves are always the same; where ``local.steps`` draws rows anew they overlap.

    - ``cohort``: clients per round, a share ``labeled_share`` (α) of them labeled; where one kind is missing, all are
      of the other.
    - ``subspace``, ``dimension``, ``agreed_seed``: P, its k (None: 10,000, or d/2 if less) and the seed of P and θ0.
    - ``features``: outputs of h1, which is the client model with another head, or with ``extractor`` the network of
      that name (Table 5.3). The choice of f costs no communication, that of h1 does. ``problem``: the shape of what
      ``extractor`` reads.
    - ``width``: hidden units of h2; h2's last layer has width · k weights and is most of what is sent. ``rank``: with
      one it is the product [k, rank]·[rank, width]. ``begin``: the factor of its initial values.
    - ``half``: ψ and its changes travel in half precision, which halves what is sent; not with noise or masks, which
      have a grid of their own. Changes travel in ``bits`` where those are set.
    - ``penalty``: λ. ``learn_prior``: False is Table C.4's variant with ψ_r = 0.
    - ``schedule``: factor of the server's rate. ``rates``: more such factors, for parts of ψ by name (h1, hidden, last,
      bias, prior).
    - ``clip``, ``noise``, ``secure``, ``bits``, ``feedback``: those of ``ProtectedMean``, of the change of ψ as one
      vector. With ``noise`` unlabeled clients are not asked: they move ψ by the regulariser alone, and their sum would
      need noise of its own. Without it labeled and unlabeled clients are two sums, so the server learns both.
    """

    model: Model
    cohort: int | float = 100
    labeled_share: float = 0.9
    local: LocalSGD = LocalSGD(epochs=1, batch=50, lr=0.1)
    server: ServerOptimizer = ServerOptimizer("adam", lr=5e-3, adaptivity=1e-10)
    schedule: Schedule = field(default_factory=Schedule)
    rates: Mapping[str, float] = field(default_factory=lambda: {"h1": 0.25, "hidden": 0.25})
    subspace: Kind = "signs"
    dimension: int | None = None
    agreed_seed: int = 0
    features: int = 256
    width: int = 64
    rank: int | None = None
    half: bool = False
    begin: float = 0.1
    penalty: float = 1e-5
    learn_prior: bool = True
    extractor: str | None = None
    problem: Problem | None = None
    serves_unlabeled: ClassVar[bool] = True
    asks_unlabeled: ClassVar[bool] = True
    made_at: ClassVar[Literal["newcomer"]] = "newcomer"
    why_not_on_demand: ClassVar[None] = None
    reads_labels: ClassVar[bool] = False
    newcomer_rows: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not 0 < self.labeled_share <= 1:
            raise ValueError(f"labeled_share={self.labeled_share}; expected a share above 0, up to 1")
        at_least(self, features=1, width=1, rank=1, penalty=0)
        if self.half and (self.secure or self.noise is not None):
            raise ValueError("half=true does not go with noise or secure sums, which round by a grid; leave half out")
        self.check_privacy(self.local)
        for name, factor in self.rates.items():
            if name not in PARTS or not factor > 0:
                raise ValueError(f"rates: {name}={factor}; expected factors above 0 for some of {', '.join(PARTS)}")
        if self.local.batch == 1 or isinstance(self.local.batch, float):
            raise ValueError(
                f"local.batch={self.local.batch} cannot be halved: one half makes the model, the other measures it; "
                "give 2 samples or more"
            )
        _ = self.lift, self.h1, self.hidden  # made here, because a vectorised task must not draw initial values

    @cached_property
    def lift(self) -> Lift:
        return Lift(self.model, self.subspace, self.dimension, self.agreed_seed)

    @cached_property
    def h1(self) -> Model:
        """Features of one sample."""
        if self.extractor is None:
            return with_outputs(self.model, self.features)
        if self.problem is None:
            raise ValueError(f"extractor={self.extractor!r} reads inputs of a shape that problem must name")
        shape, kind = self.problem.input_shape, self.problem.kind
        if kind == "tokens":
            raise ValueError("extractor: a network that reads tokens gives scores of characters; leave extractor out")
        return Model(build(self.extractor, shape, self.features, kind))

    @cached_property
    def hidden(self) -> Model:
        """h2 but for its last layer, of the mean features of a data set."""
        narrow = [] if self.rank is None else [nn.Linear(self.width, self.rank, bias=False)]
        return Model(nn.Sequential(nn.Linear(self.features, self.width), nn.ReLU(), *narrow))

    # On demand: the same for somebody who holds the state, such as a page in a newcomer's browser

    def descriptor_of(self, state: State, x: Tensor, y: Tensor | None) -> Tensor:
        """r(X) (5.9), which never leaves the newcomer."""
        return self.h1(state.h1, x).mean(0)

    def model_of(self, state: State, v: Tensor) -> Tensor:
        return self.lift(self.v_of(state, v))

    def common_model(self, state: State) -> Tensor:
        return self.lift(state.prior if self.learn_prior else torch.zeros_like(state.prior))

    # The clients' side

    @task
    def fit(self, client: Client, h1: Tensor, hidden: Tensor, last: Tensor, bias: Tensor, prior: Tensor) -> Sent:
        """ClientUpdate (Alg. 10) of a labeled client; sends ψ − ψ_start."""
        psi = {"h1": h1, "hidden": hidden, "last": last, "bias": bias, "prior": prior}
        return self._update(client, psi, labels=True)

    @fit.into
    def releases(self) -> list[Release]:
        if self.noise is not None:
            return self.mean_update(self.local)
        return [*self._sum(), *([] if self.secure else [Mean("loss")])]

    @task
    def regularize(self, client: Client, h1: Tensor, hidden: Tensor, last: Tensor, bias: Tensor, prior: Tensor) -> Sent:
        """ClientUpdate (Alg. 10) of an unlabeled client, whose loss is 0."""
        psi = {"h1": h1, "hidden": hidden, "last": last, "bias": bias, "prior": prior}
        return self._update(client, psi, labels=False)

    @regularize.into
    def _sum(self) -> list[Release]:
        return [Sum("update", clip=self.clip, secure=self.secure, bits=self.bits, feedback=self.feedback)]

    @task(stays="theta")
    def generate(self, client: Client, h1: Tensor, hidden: Tensor, last: Tensor, bias: Tensor) -> Sent:
        """A client's own model (§5.4.3), which stays there."""
        psi = {"hidden": hidden, "last": last, "bias": bias}
        return send(theta=self.lift(self.v_of(psi, client.mean(self.h1(h1, client.x)))))

    def v_of(self, psi: Mapping[str, Tensor], r: Tensor) -> Tensor:
        """h2: from a data set's mean features r to v."""
        return psi["last"] @ self.hidden(psi["hidden"], r) + psi["bias"]

    def _update(self, client: Client, start: dict[str, Tensor], labels: bool) -> Sent:
        start = {name: value.to(torch.float32) for name, value in start.items()}
        fitted, loss = self.local.minimise(self.objective, start, client, labels=labels, lacking=True)
        assert isinstance(fitted, dict)
        update = torch.cat([(fitted[name] - start[name]).flatten() for name in PARTS])
        return send(update=update.to(_UP) if self.half and self.bits is None else update, loss=loss)

    def objective(self, psi: Params, batch: Batch) -> Tensor:
        """Alg. 10, lines 6-12."""
        assert isinstance(psi, dict)
        first, second = batch.part(slice(0, None, 2)), batch.part(slice(1, None, 2))
        with dropout_from(None):  # of the client model, not of what describes its data
            features = self.h1(psi["h1"], first.x)
        weight = first.weight
        r = features.mean(0) if weight is None else (weight[:, None] * features).sum(0) / weight.sum().clamp(min=1)
        v = self.v_of(psi, r)
        prior = psi["prior"] if self.learn_prior else torch.zeros(())
        omega = self.penalty * (v - prior).square().sum()
        if second.y is None or len(second.x) == 0:  # no labels, or a last batch without a second half
            return omega
        losses = loss_of(self.model(self.lift(v), second.x), second.y)
        return second.mean(losses if second.known is None else losses * second.known) + omega

    # The server's side

    def start(self, seed: int) -> State:
        k = self.lift.k
        # hashed, because θ0 comes from a plain seed too, and h1 must not begin as its copy
        first, second, third = (int(key(seed, _DOMAIN, part)) >> 1 & 0x7FFFFFFF for part in range(3))
        last = Model(nn.Linear(self.rank or self.width, k))
        start = last.tensors(self.begin * last.init(third))
        state = State(
            h1=self.h1.init(first),
            hidden=self.hidden.init(second),
            last=start["weight"],
            bias=start["bias"],
            prior=torch.zeros(k),
        )
        return self.server.begin(state, *PARTS)

    def round(self, state: State, federation: Federation) -> State:
        psi: dict[str, Any] = {name: state[name].to(_DOWN) if self.half else state[name] for name in PARTS}
        if self.noise is not None:
            replies = self.sample(federation, self.cohort).ask(self.fit, **psi)
            return self._step(state, replies["update"], federation) if "update" in replies else state
        labeled, unlabeled = self._split(federation)
        replies = federation.sample(labeled, labeled=True).ask(self.fit, **psi)
        if "loss" in replies:
            federation.report(loss=replies["loss"])
        total, count = replies["update"], len(replies.answered)
        if unlabeled:
            replies = federation.sample(unlabeled, labeled=False).ask(self.regularize, **psi)
            total, count = total + replies["update"], count + len(replies.answered)
        return self._step(state, total / count, federation)

    def _step(self, state: State, update: Tensor, federation: Federation) -> State:
        """The server's step of each part of ψ along its piece of the mean change."""
        rate = self.server.lr * max(1e-6, self.schedule(federation.round))
        pieces = torch.split(update, [state[name].numel() for name in PARTS])
        for name, piece in zip(PARTS, pieces, strict=True):
            server = replace(self.server, lr=rate * self.rates.get(name, 1.0))
            state = server.move(state, name, piece.reshape(state[name].shape))
        return state

    def _split(self, federation: Federation) -> tuple[int, int]:
        """How many labeled and unlabeled clients this round: a share α of the cohort, as far as there are enough."""
        with_labels = int(federation.roster.labeled.sum())
        without = len(federation.roster) - with_labels
        if with_labels == 0:
            raise ValueError("FLowDUP learns from labeled clients, but no client has labels: set data.labeled")
        cohort = self.cohort if isinstance(self.cohort, int) else max(1, round(self.cohort * len(federation.roster)))
        unlabeled = min(without, cohort - max(1, round(self.labeled_share * cohort)))
        return min(with_labels, cohort - unlabeled), unlabeled

    def descriptors(self, state: State, cohort: Cohort) -> Tensor:
        """[C, features] r(X) (5.9), the input of h2. For a look at a simulation: nothing else takes it off a client."""
        return cohort.ask(Representation(self.h1).read, h1=state.h1)["r"]

    def personalize(self, state: State, cohort: Cohort) -> Models:
        psi: dict[str, Any] = {name: state[name] for name in ("h1", "hidden", "last", "bias")}
        return cohort.ask(self.generate, **psi).held("theta")


@dataclass(frozen=True)
class Representation:
    """r(X) = mean h1(x) (eq. 5.9). No task of FLowDUP, so a shard that lives elsewhere refuses it."""

    h1: Model

    @task
    def read(self, client: Client, h1: Tensor) -> Sent:
        return send(r=client.mean(self.h1(h1, client.x)))
