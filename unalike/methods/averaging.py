"""What methods that average updates share: what the server sees of an update, and what it does with the mean."""

from __future__ import annotations

from torch import Tensor

from unalike.core.federation import Federation, Replies
from unalike.core.method import State
from unalike.core.release import Mean, Release
from unalike.learn.local import LocalSGD
from unalike.learn.server import ServerOptimizer
from unalike.privacy.mechanisms import AdditiveNoise


def check_averaging(
    clip: float | None, noise: AdditiveNoise | None, secure: bool, local: LocalSGD, points: bool = False
) -> None:
    """Refuse sums that cannot be bounded, and DP-SGD where its cost would not be charged (else ``points``)."""
    if local.private is not None and not points:
        raise ValueError("this method has no point-level privacy: leave local.private out (fedavg has it)")
    if local.private is not None and noise is not None:
        raise ValueError(
            "noise (which protects clients) and local.private (which protects points) at once: a ledger speaks about "
            "one of them; choose one"
        )
    if (secure or noise is not None) and clip is None:
        raise ValueError("noise and secure sums need a bound; set clip=..., the most that an update may be long")


def averaged(clip: float | None, noise: AdditiveNoise | None, secure: bool, weight: str | None = None) -> list[Release]:
    """The mean of ``update``. The mean ``loss`` is shown too, unless something is to be protected."""
    if noise is not None or secure:
        return [Mean("update", clip=clip, noise=noise, secure=secure)]
    return [Mean("update", clip=clip, weight=weight), Mean("loss", weight=weight)]


def moved(state: State, name: str, replies: Replies, server: ServerOptimizer, federation: Federation) -> State:
    """The state with ``name`` moved by the mean update, and the loss reported where there is one."""
    if "loss" in replies:
        federation.report(loss=replies["loss"])
    if "update" not in replies:
        return state  # the very first Poisson cohort was empty
    value, moments = server.step(state[name], replies["update"].reshape(state[name].shape), state.part("server"))
    return state.replace(**{name: value}).with_part("server", moments)


def begun(name: str, value: Tensor, server: ServerOptimizer) -> State:
    """The state before the first round."""
    return State({name: value}).with_part("server", server.start(value))
