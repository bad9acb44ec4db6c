"""What methods that average share: how a mean of updates is protected, and the server's step along it.

Both classes bring fields, which are given by name, and verbs; they call nothing of the class that inherits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor

from unalike.core.bits import check_bits
from unalike.core.federation import Cohort, Federation, Replies
from unalike.core.method import State, charged_training
from unalike.core.release import SIZE, Mean, Release
from unalike.core.roster import Declarations
from unalike.learn.local import LocalSGD
from unalike.learn.server import ServerOptimizer
from unalike.privacy.mechanisms import AdditiveNoise

# One pass in batches of 10, as in McMahan et al.: equal work at a client in every method that trains the model there.
ONE_PASS = LocalSGD(epochs=1, batch=10, lr=0.1)


@dataclass(frozen=True, kw_only=True)
class ProtectedMean:
    """The mean of the clients' updates, as the server sees it.

    - ``clip``: the bound on an update's length.
    - ``noise``: client-level privacy. The cohort is a Poisson sample, updates count the same, and no loss is shown.
    - ``secure``: updates are summed under masks, and no loss is shown.
    - ``bits``: a client sends so many (4 to 16) for each number of its update, rounded at random, right on average.
      ``feedback``: it keeps what rounding took off and adds it to its next update; not with ``secure``.
    """

    clip: float | None = None
    noise: AdditiveNoise | None = None
    secure: bool = False
    bits: int | None = None
    feedback: bool = False
    asks_unlabeled: ClassVar[bool] = False
    client_private: ClassVar[Literal[True]] = True

    def check_privacy(self, local: LocalSGD, points: bool = False) -> None:
        """Refuse sums without a bound, and DP-SGD in a method that does not charge its cost (``points``: it does)."""
        if local.private is not None and not points:
            raise ValueError("this method has no point-level privacy: leave local.private out (fedavg has it)")
        if local.private is not None and self.noise is not None:
            raise ValueError(
                "noise (which protects clients) and local.private (which protects points) at once: a ledger speaks "
                "about one of them; choose one"
            )
        if (self.secure or self.noise is not None) and self.clip is None:
            raise ValueError("noise and secure sums need a bound; set clip=..., the most that an update may be long")
        check_bits(type(self).__name__, self.bits, self.feedback)

    def sample(self, federation: Federation, cohort: int | float) -> Cohort:
        """Labeled clients; a Poisson sample of them where there is noise."""
        return federation.sample(cohort, poisson=self.noise is not None, labeled=True)

    def mean_update(self, local: LocalSGD, weight: str | None = None) -> list[Release]:
        """The mean of ``update``; with the mean ``loss``, and by ``weight``, where nothing is to be protected.

        ``local``: all that a client trains in a round.
        """
        update = partial(Mean, "update", clip=self.clip, secure=self.secure, bits=self.bits, feedback=self.feedback)
        if local.private is not None:
            return [update(cost=local.cost)]
        if self.noise is not None or self.secure:
            return [update(noise=self.noise)]
        return [update(weight=weight), Mean("loss", weight=weight)]


# What a task declares: @fit.into, @fit.derive


def mean(method: Any) -> list[Release]:
    """The mean of ``update``, in which clients count the same."""
    return method.mean_update(charged_training(method))


def mean_by_size(method: Any) -> list[Release]:
    """The mean of ``update``, weighted by sizes where nothing is to be protected."""
    return method.mean_update(method.local, weight=SIZE)


def private_inputs(method: Any, declared: Declarations) -> Mapping[str, Tensor]:
    """DP-SGD's noise multiplier, and where each has its own the batch size, which each client finds for itself.

    A task has them as ``**private`` and gives them to its local training.
    """
    return charged_training(method).private_inputs(declared)


@dataclass(frozen=True, kw_only=True)
class Averaging(ProtectedMean):
    """A ``ProtectedMean``, along which ``server`` takes a step; its default adds the mean update."""

    server: ServerOptimizer = field(default_factory=ServerOptimizer)

    def first_state(self, name: str, value: Tensor) -> State:
        """The state before the first round."""
        return State({name: value}).with_part("server", self.server.start(value))

    def server_step(self, state: State, name: str, replies: Replies, federation: Federation) -> State:
        """The state after the server's step of ``name`` along the mean update; reports the loss where it is shown."""
        if "loss" in replies:
            federation.report(loss=replies["loss"])
        if "update" not in replies:
            return state  # the very first Poisson cohort was empty
        update = replies["update"].reshape(state[name].shape)
        value, moments = self.server.step(state[name], update, state.part("server"))
        return state.replace(**{name: value}).with_part("server", moments)
