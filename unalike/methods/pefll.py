"""PeFLL: a hypernetwork that makes any client's model from a descriptor of its data (Scott et al., ICLR 2024; T1 §4).

Symbols: descriptor v(S) = mean of φ(x, y) over S, embedding network φ with parameters η_v, hypernetwork h with η_h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp

from unalike.core.checks import above, at_least, one_of
from unalike.core.draws import Draws
from unalike.core.release import Release
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Sent, State, each, send, task
from unalike.learn.objective import Batch, Objective, Params, Supervised
from unalike.methods import Presets
from unalike.methods.generated import ClientDescriptors, calibrate, joint_tasks
from unalike.networks.embeddings import Labels, embedding_network, over_features
from unalike.networks.heads import class_bias, only_classes
from unalike.networks.hypernet import Size, generate

NETWORKS = ("hypernet", "embedding")  # η_h and η_v in the state


@dataclass(frozen=True)
class PeFLL(ClientDescriptors):
    """Personalized models θ = h(v) from a hypernetwork fed with client descriptors.

    A round (Alg. 8) is three exchanges: clients describe themselves, fit the model that the server makes of it, and
    backpropagate what the server makes of their updates. Together they are one step on the objective (4.1),
    λ_h‖η_h‖² + λ_v‖η_v‖² + mean_i [L(θ_i; S_i) + λ_θ‖θ_i‖²], with Δθ of local SGD in the place of −∂L/∂θ. Adam, its
    rate, ``clip`` and momentum are those of the authors' code. ``server.warmup`` is not: without it Adam's first whole
    steps threw the generated models off (on CIFAR-10 a loss of hundreds in round 2).

    - ``labels``: how they enter φ: as "planes" of an image, "linear"ly beside the features, "alone" (one linear map of
      the label, which Scott (2026) takes for CIFAR-100), or "ignored", which serves unlabeled clients too; "auto" takes
      planes for images from 16×16 on, else "linear".
    - ``embedding_width``: φ is a network with one hidden layer of this width (Table B.7), which labels join linearly;
      None: a LeNet for images, a network of two layers for features.
    - ``size``, ``layers``: the paper has M, drawn with four layers (Table B.3), which after as many rounds serves
      newcomers with a new combination of classes worse.
    - ``describe_rows``: rows of the batch that φ averages in training, at most ``describe_share`` of a client's: by
      default half, so that its descriptor differs from round to round and h does not memorise it. The paper has no such
      share. ``newcomer_rows``: rows in ``personalize``, where the paper has 32 again; None: all rows.
    - ``calibration``: this many clients' descriptors give, before the first round, the mean of each coordinate and the
      one scale by which descriptors are normalised; the authors' code takes two numbers from the first client for that.
    - ``sphere``: φ's points are put on the unit sphere, which a private descriptor needs (§4.3).
    - ``mask_labels``: a client gives classes that it does not have a score of −∞, in training too (Scott 2026,
      B.1.3: afterwards).
    - ``steady``: newcomers are served by the running mean of (η_h, η_v) over about this many rounds, because a round of
      a few clients moves them a lot; 1 is the paper's, the last round alone.
    - ``lambda_h``, ``lambda_v``: regularisation by decay, η ← (1 − 2βλ)η (Alg. 8, lines 17-18). ``decay``: β is the
      rate of the "server", or as in the paper's analysis (B.54, B.76, B.87) that of the "clients" times their k steps,
      which makes the decay of a round 2e-4 in place of 4e-7. ``lambda_theta`` is λ_θ; the default
      ``local.weight_decay`` acts as λ_θ = 2.5e-5.

    Theorem 2 (convergence) is no number of a run: its constants bound gradients and smoothness over all parameters.
    """

    labels: Labels = "auto"
    embedding_width: int | None = None
    size: Size = field(default="S", kw_only=True)
    describe_rows: int | None = 32
    describe_share: float = 0.5
    newcomer_rows: int | None = None
    calibration: int = 20
    sphere: bool = False
    mask_labels: bool = False
    steady: int = 10
    lambda_v: float = 1e-3
    lambda_theta: float = 0.0
    decay: Literal["server", "clients"] = "server"
    presets: ClassVar[Presets] = {
        "paper": {
            "cohort": 0.05,  # T1 §4.4, for CIFAR-10 and CIFAR-100; five clients for FEMNIST
            "layers": 4,  # Table B.3
            "initial": "pytorch",  # T1 names no other
            "steady": 1,  # Alg. 7: the networks as training left them
            "describe_share": 1.0,  # Alg. 8, line 6
            "newcomer_rows": 32,  # T1 §4.4: one batch, as in training
            "decay": "clients",  # (B.54), (B.76)
            "server": {"warmup": 1},  # none
            "local": {"weight_decay": 0.0, "clip": 50.0},  # T1 §4.4; the bound is that of the authors' code
        }
    }

    def __post_init__(self) -> None:
        above(self, clip=0, calibration=0)
        at_least(self, steady=1, lambda_h=0, lambda_v=0, lambda_theta=0)
        at_least(self, describe_rows=1, newcomer_rows=1, embedding_width=1)
        one_of(self, "decay")
        self.check_descriptors()
        if self.newcomer_epsilon is not None and not self.sphere:
            raise ValueError(
                "a private descriptor needs sphere=true, because only on the unit sphere one row is known to move it "
                "by at most 2/n"
            )
        if not 0 < self.describe_share <= 1:
            raise ValueError(f"describe_share={self.describe_share}; expected a share above 0, up to 1")
        if self.decay == "clients" and (self.local.steps is None or isinstance(self.local.lr, Mapping)):
            raise ValueError(
                "decay='clients' takes the rate and the number of local steps: give local.steps and one lr"
            )
        if self.mask_labels:
            class_bias(self.model, self.problem.classes)  # refuses a model that has none
        _ = self.embedding, self.hypernet  # made here, because a vectorised task must not draw initial values

    @cached_property
    def embedding(self) -> Model:
        """φ, sized for the problem."""
        problem, sizes = self.problem, (self.length, self.labels, self.embedding_width)
        if self.by_features:
            return over_features(
                self.model, lambda width: embedding_network((width,), "features", problem.classes, *sizes)
            )
        return embedding_network(problem.input_shape, problem.kind, problem.classes, *sizes)

    @property
    def serves_unlabeled(self) -> bool:
        return self.labels == "ignored" and not self.mask_labels

    def sensitivity(self, samples: int) -> float | None:
        """How far one of so many rows can move a descriptor, in the norm that the noise is made for."""
        if not self.sphere:
            return None
        return self.distance_by_one_row(self.length) / min(samples, self.newcomer_rows or samples)

    def with_masking(self, masked: bool) -> PeFLL:
        """The same method with or without ``mask_labels``."""
        return replace(self, mask_labels=masked)

    # On demand: the same for somebody who holds the state, such as a service

    @property
    def why_not_on_demand(self) -> str | None:
        return "each client rules out the classes that it lacks (mask_labels)" if self.mask_labels else None

    @property
    def reads_labels(self) -> bool:
        return self.labels != "ignored"

    def descriptor_of(self, state: State, x: Tensor, y: Tensor | None) -> Tensor:
        """Alg. 7, lines 2-4."""
        return self._points(state["steady.embedding"], x, [] if y is None else [y]).mean(0)

    def model_of(self, state: State, v: Tensor) -> Tensor:
        return self.models(state, v[None])[0]

    def common_model(self, state: State) -> Tensor:
        return self.model_of(state, state.shift)

    # The clients' side

    @task
    def describe(self, client: Client, embedding: Tensor) -> Sent:
        """Alg. 8, lines 5-7: v of a batch of the client's data; the client remembers which batch."""
        batch = client.draws.bits(1)[0]
        return send(descriptor=self._describe_batch(client, embedding, batch), keep={"batch": batch})

    describe.into(ClientDescriptors.training_descriptor)

    @task
    def introduce(self, client: Client, embedding: Tensor) -> Sent:
        """Alg. 7, lines 2-4: the descriptor of a client that only wants a model."""
        return send(descriptor=self._describe(client, embedding, client.draws.bits(1)[0], self.newcomer_rows))

    @introduce.into
    def newcomer_release(self) -> list[Release]:
        return self.noisy_descriptor(self.length, self.newcomer_rows)

    @task
    def fit(self, client: Client, theta: Tensor) -> Sent:
        """Alg. 8, lines 10-11: local SGD on f_i from the generated θ; sends Δθ = θ_new − θ."""
        update, loss = self._fit(client, theta)
        return send(update=update, loss=loss)

    @task
    def backpropagate(self, client: Client, embedding: Tensor, cotangent: Tensor) -> Sent:
        """Alg. 8, lines 14-15: the gradient of η_v, from that of the descriptor the client sent before."""
        batch = client.kept.get("batch", torch.zeros((), dtype=torch.int64))
        _, back = vjp(lambda eta: self._describe_batch(client, eta, batch), embedding)[:2]
        return send(gradient=back(cotangent)[0])

    backpropagate.into(ClientDescriptors.mean_gradient)

    def _fit(self, client: Client, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Δθ and the mean loss."""
        # the gradient of λ_θ‖θ‖² is 2·λ_θ·θ, which is what weight decay adds
        local = replace(self.local, weight_decay=self.local.weight_decay + 2 * self.lambda_theta)
        objective = self._masked_loss(client) if self.mask_labels else Supervised(self.model)
        fitted, loss = local.train(objective, theta, client)
        assert isinstance(fitted, Tensor)
        return fitted - theta, loss

    @task(stays="theta")
    def mask(self, client: Client, theta: Tensor) -> Sent:
        """Label masking at the client, where the result stays."""
        return send(theta=only_classes(self.model, theta, self._present_classes(client)))

    def _describe_batch(self, client: Client, embedding: Tensor, batch: Tensor) -> Tensor:
        """v of a training batch."""
        share = 1.0 if self.describe_rows is None else self.describe_share
        return self._describe(client, embedding, batch, self.describe_rows, share)

    def _describe(
        self, client: Client, embedding: Tensor, batch: Tensor, rows: int | None, share: float = 1.0
    ) -> Tensor:
        """v(B; η_v): the mean of φ over a random batch without replacement (at most a share of the rows), or of all."""
        index = torch.arange(client.capacity)
        if rows is not None:
            index = Draws(batch).permutation(client.n, client.capacity)[:rows]
        real = torch.arange(len(index)) < torch.ceil(client.n.to(torch.float64) * share)
        labels = []
        if self.labels != "ignored":  # a row that lacks its label has no class, in whichever way labels enter
            y = client.labels(-1 if self.problem.classes else 0) if client.partly_labeled else client.y
            labels = [y[index]]
        points = self._points(embedding, client.x[index], labels)
        return client.tame(torch.where(real[:, None], points, 0)).sum(0) / real.sum()

    def _points(self, embedding: Tensor, x: Tensor, labels: list[Tensor]) -> Tensor:
        """[n, l] φ(x, y), on the unit sphere where a descriptor is to be private."""
        points = self.embedding(embedding, x, *labels)
        if self.sphere:
            points = points / torch.linalg.vector_norm(points, dim=1, keepdim=True).clamp(min=1e-12)
        return points

    learn, moments = joint_tasks(_describe_batch, lambda self, client, theta: self._fit(client, theta)[0])

    def _masked_loss(self, client: Client) -> Objective:
        present = self._present_classes(client)

        def objective(theta: Params, batch: Batch) -> Tensor:
            assert isinstance(theta, Tensor) and batch.y is not None
            scores = torch.where(present, self.model(theta, batch.x), -torch.inf)
            return batch.mean(F.cross_entropy(scores, batch.y, reduction="none"))

        return objective

    def _present_classes(self, client: Client) -> Tensor:
        """[classes] which classes the client has."""
        assert self.problem.classes is not None
        client = client.with_labels
        return client.sum((client.y[:, None] == torch.arange(self.problem.classes)).to(torch.float32)) > 0

    # The server's side

    def start(self, seed: int) -> State:
        hypernet, embedding = self.first_hypernet(seed), self.embedding.init(seed + 1)
        state = State(hypernet=hypernet, embedding=embedding, **self.first_memory(self.length))
        state = state.replace(rounds=torch.zeros(()), **{f"steady.{name}": state[name] for name in NETWORKS})
        return self.server.begin(state, *NETWORKS)

    def round(self, state: State, federation: Federation) -> State:
        if self.noise is not None:
            state, gradients = self.private_gradients(state, federation, "embedding", self.moments, self.learn)
        else:
            state, gradients = self._gradients(state, federation)
        if not gradients:
            return state
        decay = {"hypernet": self.lambda_h, "embedding": self.lambda_v}
        beta = None  # the server's rate
        if self.decay == "clients":
            assert self.local.steps is not None and not isinstance(self.local.lr, Mapping)
            beta = self.local.lr * self.local.steps
        state = self.descend(state, gradients, decay, beta=beta)
        rounds = state.rounds + 1
        share = 1 / min(float(rounds), self.steady)  # running means: of all rounds at first
        means = {name: torch.lerp(state[f"steady.{name}"], state[name], share) for name in NETWORKS}
        return state.replace(rounds=rounds).with_part("steady", means)

    def _gradients(self, state: State, federation: Federation) -> tuple[State, dict[str, Tensor]]:
        """The three exchanges."""
        state = calibrate(state, federation, self.calibration, self.describe, embedding=state.embedding)
        cohort = federation.sample(self.cohort, labeled=True)
        described = cohort.ask(self.describe, embedding=state.embedding)
        cohort, v = cohort.only(described.answered), described["descriptor"]
        state = self.with_memory(state, cohort, v)
        g_h, g_v, fitted = self.exchange(state, cohort, v, self.fit)
        federation.report(loss=fitted["loss"])
        cohort, g_v = cohort.only(fitted.answered), g_v[fitted.answered] * len(fitted.answered)
        backward = cohort.ask(self.backpropagate, embedding=state.embedding, cotangent=each(g_v))
        return state, {"hypernet": g_h, "embedding": backward["gradient"]}

    def personalize(self, state: State, cohort: Cohort) -> Models:
        theta = self.models(state, self.descriptors(state, cohort))
        if not self.mask_labels:
            return theta
        return cohort.ask(self.mask, theta=each(theta)).held("theta")

    def descriptors(self, state: State, cohort: Cohort) -> Tensor:
        """The clients' descriptors [C, l], as they come from φ."""
        return cohort.ask(self.introduce, embedding=state["steady.embedding"])["descriptor"]

    def learned(self) -> dict[str, str]:
        """Where the state has η_h and η_v, by which newcomers are served, and where those that it began with."""
        return {f"steady.{name}": name for name in NETWORKS}

    def models(self, state: State, v: Tensor) -> Tensor:
        """θ [C, d] = h(v): what the server makes of descriptors."""
        return generate(self.hypernet, state["steady.hypernet"], v, state.shift, state.scale)
