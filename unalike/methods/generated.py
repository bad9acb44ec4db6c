"""What methods share whose server makes clients' models by a hypernetwork: their exchange, and the server's step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from unalike.core.federation import Cohort, Federation, Replies, each
from unalike.core.method import State
from unalike.core.model import Model
from unalike.core.release import Each, Mean
from unalike.core.task import Task
from unalike.learn.server import ServerOptimizer


def calibrated(state: State, federation: Federation, clients: int, describe: Task, **network: Any) -> State:
    """The state with the descriptors' ``shift`` and ``scale``, from a few clients; they stay what they are.

    A fresh network gives all clients nearly the same descriptor. Centred and with a deviation of 1, clients differ
    enough for h to tell them apart from the first round.
    """
    count = max(1, min(clients, int(federation.roster.labeled.sum())))
    v = federation.sample(count, labeled=True).ask(describe, **network)["descriptor"]
    spread = (v - v.mean(0)).square().mean().sqrt()
    return state.replace(shift=v.mean(0), scale=1 / spread if float(spread) > 0 else torch.ones(()))


def exchanged(hypernet: Model, state: State, cohort: Cohort, v: Tensor, fit: Task) -> tuple[Tensor, Tensor, Replies]:
    """Models h(v) out, updates back: the gradients of η_h [p] and of each client's v [C, l], and the replies.

    They are of the mean loss over the clients that answered, with Δθ in the place of −∂L/∂θ; that of v is 0 for who did
    not answer.
    """
    shift, scale = state.get("shift", 0.0), state.get("scale", 1.0)
    theta, pull = vjp(lambda eta, v: hypernet(eta, (v - shift) * scale), state.hypernet, v)[:2]
    replies = cohort.ask(fit, theta=each(theta), into=[Each("update"), Mean("loss")])
    delta = torch.zeros_like(theta).index_copy_(0, replies.answered, replies["update"])
    g_h, g_v = pull(-delta / len(replies.answered))
    return g_h, g_v, replies


def descend(
    state: State,
    gradients: Mapping[str, Tensor],
    server: ServerOptimizer,
    clip: float,
    decay: Mapping[str, float],
    rates: Mapping[str, float] | None = None,
    *,
    beta: float | None = None,
    weight_decay: float = 0.0,
) -> State:
    """A step of the named networks down their gradients, clipped together to the norm ``clip``.

    The gradient of λ‖η‖² enters as decay, η ← (1 − 2βλ)η (T1 Alg. 8, lines 17-18), with the network's step size as β,
    for which with plain SGD it is the same as adding it, or with another ``beta``. ``weight_decay``: w·η is added to
    every clipped gradient, and so to momentum, as PyTorch's SGD does. ``rates`` gives a network a step size of its
    own. Moments are in the state as ``server.NAME.…``; ``server.begin`` puts them there.
    """
    norm = math.hypot(*(float(torch.linalg.vector_norm(gradient)) for gradient in gradients.values()))
    factor = -min(1.0, clip / max(norm, 1e-12))
    for name, gradient in gradients.items():
        optimizer = replace(server, lr=(rates or {}).get(name, server.lr))
        kept = 1 - 2 * (optimizer.lr if beta is None else beta) * decay.get(name, 0.0)
        direction = gradient * factor if weight_decay == 0 else gradient * factor - weight_decay * state[name]
        state = optimizer.move(state if kept == 1 else state.replace(**{name: state[name] * kept}), name, direction)
    return state
