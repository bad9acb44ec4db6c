"""FedMA: an average of networks whose neurons were matched first (Wang et al., ICLR 2020, Algorithm 1)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from unalike.core.checks import at_least
from unalike.core.release import Each, Mean, Release
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Replies, Sent, State, each, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Supervised
from unalike.methods import Presets
from unalike.methods.averaging import ONE_PASS
from unalike.methods.problem import Problem


@dataclass(frozen=True)
class FedMA:
    """Layer by layer: the server matches the neurons of the clients' layers and averages them, clients freeze what is
    done and train the rest, until the last layer, which is averaged class by class with the clients' class counts.

    The common network has the clients' widths, so that all models are vectors of one length: neurons are matched one to
    one and none are added (the paper's γ). Then the paper's matching (BBP-MAP) is the assignment that maximises the sum
    of inner products of a client's neurons with the sums of those already matched. ``passes`` goes over the clients
    again. A model is a chain of linear or convolutional layers with biases: MLP, LeNet, CNN.

    Every layer of a round is one exchange with one run of ``local``. Every client gets the common model.
    """

    problem: Problem
    cohort: int | float = 10
    local: LocalSGD = ONE_PASS
    passes: int = 3
    serves_unlabeled: ClassVar[bool] = True
    presets: ClassVar[Presets] = {"paper": {"local": {"epochs": 20, "batch": 64, "lr": 0.01}}}  # the authors' code
    asks_unlabeled: ClassVar[bool] = False
    not_client_private: ClassVar[str] = (
        "the neurons of each client's own model are matched, so the server sees every model by itself"
    )

    def __post_init__(self) -> None:
        at_least(self, passes=1)
        if self.problem.classes is None:
            raise ValueError("FedMA weighs the last layer by class counts, but the targets are numbers")
        _ = self.layers

    @property
    def model(self) -> Model:
        return self.problem.model

    @cached_property
    def layers(self) -> list[tuple[int, int, int]]:
        """(begin in theta, neurons, weights of a neuron) of each layer; its biases follow its weights."""
        shapes = list(self.model.shapes.items())
        found: list[tuple[int, int, int]] = []
        for (name, weight), (_, bias) in itertools.zip_longest(shapes[::2], shapes[1::2], fillvalue=("", torch.Size())):
            inputs = weight[1] if len(weight) > 1 else 0
            follows = not found or (inputs > 0 and inputs % found[-1][1] == 0)
            if len(weight) not in (2, 4) or bias != weight[:1] or not follows:
                raise ValueError(
                    f"FedMA matches the neurons of chains of linear and convolutional layers with biases, but {name!r} "
                    f"of {self.model} does not follow in one; use mlp, lenet or cnn"
                )
            found.append((self.model.span(name).start, weight[0], weight[1:].numel()))
        return found

    # The clients' side

    @task
    def fit(self, client: Client, frozen: Tensor, free: Tensor) -> Sent:
        """Local training of the layers that are not done yet."""
        objective = Supervised(self.model).at(lambda own: torch.cat([frozen, own]))
        fitted, loss = self.local.train(objective, free, client)
        assert self.problem.classes is not None
        client = client.with_labels
        counts = client.sum(F.one_hot(client.y, self.problem.classes).to(torch.float32))
        return send(theta=fitted, loss=loss, counts=counts)

    # The server's side

    def start(self, seed: int) -> State:
        return State(theta=self.model.init(seed))

    def round(self, state: State, federation: Federation) -> State:
        cohort = federation.sample(self.cohort, labeled=True)
        shown: list[Release] = [Each("theta"), Each("counts"), Mean("loss")]
        replies = cohort.ask(self.fit, into=shown, frozen=state.theta[:0], free=state.theta)
        federation.report(loss=replies["loss"])
        done = state.theta[:0]
        for layer in range(len(self.layers) - 1):
            cohort = cohort.only(replies.answered)
            matched, rest = self._match(layer, replies["theta"])
            share = cohort.sizes.to(matched.dtype) / cohort.sizes.sum()
            done = torch.cat([done, share @ matched])
            replies = cohort.ask(self.fit, into=shown, frozen=done, free=each(rest))
        return state.replace(theta=torch.cat([done, self._last(replies)]))

    def personalize(self, state: State, cohort: Cohort) -> Models:
        return state.theta.expand(len(cohort), -1)

    def _match(self, layer: int, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The layer [C, weights and biases] with its neurons in common order, and the rest, its inputs likewise."""
        _, neurons, width = self.layers[layer]
        _, after, inputs = self.layers[layer + 1]
        size = neurons * (width + 1)
        weights, biases = theta[:, : size - neurons].view(-1, neurons, width), theta[:, size - neurons : size]
        order = matching(torch.cat([weights, biases[..., None]], 2), self.passes)
        weights = weights.gather(1, order[..., None].expand_as(weights))
        matched = torch.cat([weights.flatten(1), biases.gather(1, order)], 1)
        rest = theta[:, size:].clone()
        block = rest[:, : after * inputs].view(len(theta), after, neurons, inputs // neurons)
        block.copy_(block.gather(2, order[:, None, :, None].expand_as(block)))
        return matched, rest

    def _last(self, replies: Replies) -> Tensor:
        """The last layer: every class's weights are averaged by the clients' numbers of samples of the class."""
        _, neurons, width = self.layers[-1]
        share = replies["counts"] + 1e-6  # of a class that nobody has, all clients count the same
        share = share / share.sum(0)
        theta = replies["theta"]
        weights = (share[..., None] * theta[:, : neurons * width].view(-1, neurons, width)).sum(0)
        return torch.cat([weights.flatten(), (share * theta[:, neurons * width :]).sum(0)])


def matching(neurons: Tensor, passes: int) -> Tensor:
    """[C, n] for neurons [C, n, features]: which of each client's neurons goes to which common place.

    The first client's order is the common one; every other is assigned to the sums of the rest.
    """
    places = neurons.to(torch.float64).clone()
    order = torch.arange(neurons.shape[1]).repeat(len(neurons), 1)
    for turn in range(passes):
        for client in range(1, len(neurons)):
            rest = places[:client].sum(0) if turn == 0 else places.sum(0) - places[client]
            _, chosen = linear_sum_assignment((rest @ neurons[client].to(torch.float64).T).numpy(), maximize=True)
            order[client] = torch.from_numpy(chosen)
            places[client] = neurons[client][order[client]]
    return order
