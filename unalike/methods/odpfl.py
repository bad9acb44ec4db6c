"""ODPFL-HN: personal models on demand for newcomers without labels (Amosy, Eyal and Chechik, 2022; P2).

g_γ is the set encoder, h_θ the hypernetwork. Algorithm 1 prints the steps with the sign of ascent; here Δw = new − old
is followed downhill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vjp, vmap

from unalike.core.checks import at_least
from unalike.core.draws import Draws, key
from unalike.core.release import Mean, Release
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Sent, State, each, send, task
from unalike.methods import Presets
from unalike.methods.generated import ClientDescriptors, calibrate, joint_tasks
from unalike.methods.pfedhn import PFedHN, no_ids, only_rows, rows_of, with_ids
from unalike.networks.embeddings import over_features
from unalike.networks.hypernet import generate
from unalike.networks.sets import Encoder, set_encoder

_TABLE = 1  # domain of the seed


@dataclass(frozen=True)
class ODPFL(ClientDescriptors):
    """A set encoder describes a client by its unlabeled samples, a hypernetwork makes its model (Amosy et al., Alg. 1).

    - ``encoder``: "deepset" (for images that of App. C), "deepset-once" (App. C for feature vectors, too),
      "deepset-every" (pooling after every convolution, as a sentence of §6.3 can be read), "dss", "set-transformer", or
      "sphere" (a deep set on the unit sphere; privacy needs it). ``encoder_lr``: its rate; None: the server's.
    - ``rows``: samples that are encoded together; None: all of a client's. With fewer, a client's samples are split at
      random and its descriptor is the mean over the parts (App. B.1), each counting by its rows.
    - ``two_phase``: None trains end to end. A number of rounds: first h learns with a descriptor for each client, as
      pFedHN does, while g learns to predict those; after that many rounds g is frozen and h learns with what g says
      (App. B.2). Clients of the federation are served by the h of the first phase and their own descriptors, because
      fine-tuning h for newcomers makes their models worse. ``descriptor_lr``: the rate of these descriptors.
    - ``lambda_g``: decay of g. ``weight_decay``: of h, g and v, added to their gradients.
    - ``calibration``: as in PeFLL; 0 leaves descriptors as g gives them.

    Newcomers protect samples as in §7. Not in the paper: ``server.warmup``, ``calibration`` and ``clip`` (see PeFLL),
    and 50 batches drawn afresh where Alg. 1 has epochs. In the first of two phases g takes one step a round at the
    server, by the gradients that clients send, where App. B.2 trains it at them. Theorem 1 is no number of a run: it
    needs the capacity of h and g; newcomers are told how far they are from training clients in its place.
    """

    cohort: int | float = 0.1
    encoder: Encoder = "deepset"
    rows: int | None = None
    two_phase: int | None = None
    descriptor_lr: float = 1e-2
    calibration: int = 20
    lambda_g: float = 1e-3
    weight_decay: float = 0.0
    encoder_lr: float | None = None
    presets: ClassVar[Presets] = {
        "paper": {
            **PFedHN.presets["paper"],  # P2 App. C names the grids that were searched, not what was found in them
            "cohort": 0.1,  # App. C
            "layers": 3,  # App. C
            "encoder": "deepset-once",  # App. C
            "encoder_lr": 1e-2,  # App. C searches it
            "lambda_g": 0.0,
            "calibration": 0,
            # Alg. 1 has K epochs; App. C searches K and the weight decay
            "local": {"steps": "none", "epochs": 5, "batch": 64, "lr": 5e-3}
            | {"momentum": 0.9, "weight_decay": 1e-4, "clip": 50.0},
        }
    }
    serves_unlabeled: ClassVar[bool] = True
    reads_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least(self, rows=1, two_phase=1)
        self.check_descriptors()
        if self.newcomer_epsilon is not None and self.sensitivity(1) is None:
            raise ValueError(
                f"a private descriptor needs encoder='sphere' and all rows at once, because only there one sample "
                f"is known to move it by at most 2/n; got encoder={self.encoder!r} and rows={self.rows}"
            )
        if self.noise is not None and self.two_phase is not None:
            raise ValueError(
                "noise protects clients by the mean gradient of end-to-end training; in two_phase the server learns a "
                "descriptor of each client: leave one of them out"
            )
        if self.problem.kind == "tokens" and not self.by_features:
            raise ValueError("the set encoders read images and features, not tokens; use 'pefll' with labels='ignored'")
        _ = self.network, self.hypernet

    @cached_property
    def network(self) -> Model:
        """g, sized for the problem."""
        if self.by_features:
            return over_features(self.model, lambda width: set_encoder(self.encoder, (width,), self.length))
        return set_encoder(self.encoder, self.problem.input_shape, self.length)

    def sensitivity(self, samples: int) -> float | None:
        """How far one sample can move a descriptor, if that is known: on the sphere, with all samples at once."""
        known = self.encoder == "sphere" and self.rows is None
        return self.distance_by_one_row(self.length) / samples if known else None

    # On demand: the same for somebody who holds the state, such as a service

    @property
    def why_not_on_demand(self) -> str | None:
        return None if self.rows is None else "its encoder reads random parts of a client's rows (rows)"

    @property
    def newcomer_rows(self) -> int | None:
        return self.rows

    def descriptor_of(self, state: State, x: Tensor, y: Tensor | None) -> Tensor:
        return self.network(state.encoder, x, torch.ones(x.shape[0], dtype=torch.bool))

    def model_of(self, state: State, v: Tensor) -> Tensor:
        return self.models(state, v[None])[0]

    def common_model(self, state: State) -> Tensor:
        return self.model_of(state, state.shift)

    # The clients' side

    @task
    def describe(self, client: Client, encoder: Tensor) -> Sent:
        """ClientEncoding; the client remembers how it split its samples."""
        split = client.draws.bits(1)[0]
        return send(descriptor=self._encode(client, encoder, split), keep={"split": split})

    describe.into(ClientDescriptors.training_descriptor)

    @task
    def introduce(self, client: Client, encoder: Tensor) -> Sent:
        """A newcomer's descriptor; all that ever leaves it."""
        if self.protection is not None:  # sample by sample: one that the encoder makes NaN takes no other with it
            own = torch.ones(1, dtype=torch.bool)
            return send(descriptor=client.mean(vmap(lambda row: self.network(encoder, row[None], own))(client.x)))
        return send(descriptor=self._encode(client, encoder, client.draws.bits(1)[0]))

    @introduce.into
    def newcomer_release(self) -> list[Release]:
        return self.noisy_descriptor(self.length, None)

    @task
    def fit(self, client: Client, theta: Tensor) -> Sent:
        """ClientUpdate: local SGD from the generated model; sends Δw."""
        fitted, loss = self.local.train(self.model, theta, client)
        return send(update=fitted - theta, loss=loss)

    @task
    def backpropagate(self, client: Client, encoder: Tensor, cotangent: Tensor) -> Sent:
        """ClientBackprop: the gradient of γ from that of the descriptor the client sent before."""
        split = client.kept.get("split", torch.zeros((), dtype=torch.int64))
        _, back = vjp(lambda gamma: self._encode(client, gamma, split), encoder)[:2]
        return send(gradient=back(cotangent)[0])

    backpropagate.into(ClientDescriptors.mean_gradient)

    @task
    def imitate(self, client: Client, encoder: Tensor, target: Tensor) -> Sent:
        """Two phases: the gradient of ‖g(x) − e‖², by which the encoder learns the client's descriptor e (eq. 10)."""
        split = client.draws.bits(1)[0]
        v, back = vjp(lambda gamma: self._encode(client, gamma, split), encoder)[:2]
        return send(gradient=back(2 * (v - target))[0], gap=(v - target).square().mean())

    @imitate.into
    def imitation_release(self) -> list[Release]:
        gap = [] if self.secure else [Mean("gap")]  # a number for the display alone, which has no mask
        return [*self.mean_gradient(), *gap]

    def _encode(self, client: Client, encoder: Tensor, split: Tensor) -> Tensor:
        """g of the client's samples, all together or as the mean over random parts of ``rows`` samples."""
        if self.rows is None or self.rows >= client.capacity:
            return self.network(encoder, client.x, client.mask)
        parts = -(-client.capacity // self.rows)
        order = Draws(split).permutation(client.n, client.capacity)
        place = torch.arange(parts * self.rows)
        real = (place < client.n).reshape(parts, self.rows)
        index = order[torch.where(place < client.n, place, 0)].reshape(parts, self.rows)
        encoded = vmap(lambda index, real: self.network(encoder, client.x[index], real))(index, real)
        return (encoded * real.sum(1, keepdim=True)).sum(0) / client.n

    def _update(self, client: Client, theta: Tensor) -> Tensor:
        return self.local.train(self.model, theta, client)[0] - theta

    learn, moments = joint_tasks(_encode, _update)

    # The server's side

    def start(self, seed: int) -> State:
        hypernet, encoder = self.first_hypernet(seed), self.network.init(seed + 1)
        state = State(hypernet=hypernet, encoder=encoder, **self.first_memory(self.length))
        names = ["hypernet", "encoder"]
        if self.two_phase is not None:
            table = Draws(key(seed, _TABLE)).normal(self.problem.clients, self.length)
            state = state.replace(descriptors=table, **no_ids(self.problem.clients))
            state = state.replace(first=state.hypernet.clone(), learned=torch.zeros(len(table), dtype=torch.bool))
            names.append("descriptors")
        return self.server.begin(state, *names)

    def round(self, state: State, federation: Federation) -> State:
        if self.two_phase is not None and federation.round <= self.two_phase:
            return self._first_phase(state, federation)
        if self.noise is not None:
            state, gradients = self.private_gradients(state, federation, "encoder", self.moments, self.learn)
            return self._step(state, gradients) if gradients else state
        state = calibrate(state, federation, self.calibration, self.describe, encoder=state.encoder)
        cohort = federation.sample(self.cohort, labeled=True)
        described = cohort.ask(self.describe, encoder=state.encoder)
        cohort, v = cohort.only(described.answered), described["descriptor"]
        state = self.with_memory(state, cohort, v)
        g_h, g_v, fitted = self.exchange(state, cohort, v, self.fit)
        federation.report(loss=fitted["loss"])
        gradients = {"hypernet": g_h}
        if self.two_phase is None:
            cohort, g_v = cohort.only(fitted.answered), g_v[fitted.answered] * len(fitted.answered)
            backward = cohort.ask(self.backpropagate, encoder=state.encoder, cotangent=each(g_v))
            gradients["encoder"] = backward["gradient"]
        return self._step(state, gradients)

    def personalize(self, state: State, cohort: Cohort) -> Tensor:
        if self.two_phase is None:
            return self.models(state, self.descriptors(state, cohort))
        rows, known = rows_of(state, cohort)
        known = known & state.learned[rows]  # they have descriptors of their own
        theta = generate(self.hypernet, state.first, state.descriptors[rows])
        new = (~known).nonzero().flatten()
        if len(new):
            theta[new] = self.models(state, self.descriptors(state, cohort.only(new)))
        return theta

    def learned(self) -> dict[str, str]:
        """Where the state has h and g, by which newcomers are served, and where those that it began with."""
        return {"hypernet": "hypernet", "encoder": "encoder"}

    def models(self, state: State, v: Tensor) -> Tensor:
        """w [C, d] = h(e): what the server makes of descriptors."""
        return generate(self.hypernet, state.hypernet, v, state.shift, state.scale)

    def descriptors(self, state: State, cohort: Cohort) -> Tensor:
        """Descriptors [C, l], private if ``newcomer_epsilon`` is set."""
        return cohort.ask(self.introduce, encoder=state.encoder)["descriptor"]

    def _first_phase(self, state: State, federation: Federation) -> State:
        """App. B.2: h and the clients' descriptors learn as in pFedHN, and the encoder learns to predict those."""
        state = with_ids(state, federation).replace(scale=torch.ones(()))  # learned descriptors need no normalisation
        cohort = federation.sample(self.cohort, labeled=True)
        rows, _ = rows_of(state, cohort)
        v = state.descriptors[rows]
        g_h, g_v, fitted = self.exchange(state, cohort, v, self.fit)
        federation.report(loss=fitted["loss"])
        taught = cohort.ask(self.imitate, encoder=state.encoder, target=each(v))
        if not self.secure:
            federation.report(encoder_gap=taught["gap"])
        g_table = torch.zeros_like(state.descriptors).index_copy_(0, rows, g_v)
        gradients = {"hypernet": g_h, "descriptors": g_table, "encoder": taught["gradient"]}
        moved_rows = rows[fitted.answered]
        after = only_rows(moved_rows, state, self._step(state, gradients))
        learned = state.learned.index_fill(0, moved_rows, True)
        return after.replace(first=after.hypernet.clone(), learned=learned)

    def _step(self, state: State, gradients: Mapping[str, Tensor]) -> State:
        """The state after a step of these networks."""
        rates = {"descriptors": self.descriptor_lr}
        if self.encoder_lr is not None:
            rates["encoder"] = self.encoder_lr
        decay = {"hypernet": self.lambda_h, "encoder": self.lambda_g}
        return self.descend(state, gradients, decay, rates, weight_decay=self.weight_decay)
