"""What a method is: hyperparameters, tasks, its first state, one round of training, and models for clients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from torch import Tensor

from unalike.core.federation import Cohort, Federation, Models
from unalike.core.model import Model
from unalike.core.outside import WrongReturn, first_line_of
from unalike.core.task import Task
from unalike.privacy.mechanisms import AdditiveNoise


class State(Mapping[str, Tensor]):
    """The server's state between rounds: named tensors and nothing else, so it can be saved and restored by anyone."""

    _tensors: dict[str, Tensor]

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, /, **named: Tensor) -> None:
        merged = {**(tensors or {}), **named}
        for name, value in merged.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"state {name!r} is a {type(value).__name__}; a state holds tensors only")
        self.__dict__["_tensors"] = merged

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __getattr__(self, name: str) -> Tensor:
        tensors: dict[str, Tensor] = self.__dict__.get("_tensors", {})
        if name not in tensors:
            raise AttributeError(f"the state has no {name!r}; it has {', '.join(tensors)}")
        return tensors[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a state does not change; use state.replace(name=value)")

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def replace(self, **named: Tensor) -> State:
        """The state with some tensors exchanged or added."""
        return State(self._tensors, **named)

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors named ``prefix.…``, without the prefix: for example an optimizer's moments."""
        own = prefix + "."
        return {name.removeprefix(own): value for name, value in self._tensors.items() if name.startswith(own)}

    def with_part(self, prefix: str, tensors: Mapping[str, Tensor]) -> State:
        return State(self._tensors, **{f"{prefix}.{name}": value for name, value in tensors.items()})


class Method(Protocol):
    """A frozen dataclass with hyperparameters as fields, ``@task`` functions, and these."""

    @property
    def model(self) -> Model:
        """What the personal models are parameters of."""

    def start(self, seed: int) -> State:
        """The state before the first round."""

    def round(self, state: State, federation: Federation) -> State:
        """One round of training."""

    def personalize(self, state: State, cohort: Cohort) -> Models:
        """A model for every client of the cohort; the clients may be newcomers.

        [C, d] where the server makes the models. What a client makes stays there: ``replies.held(name)``.
        """


def first_state(method: Method, seed: int) -> State:
    """The method's state before the first round."""
    return check_state(method.start(seed), method.start, "State(...)")


def next_state(method: Method, state: State, federation: Federation, number: int | None = None) -> State:
    """The method's state after one more round, which the federation begins; ``number``: of the round, if not the next.

    >>> state = next_state(method, state, federation)
    """
    with federation.train_in(federation.round + 1 if number is None else number):
        return check_state(method.round(state, federation), method.round)


def check_state(found: object, made_by: Callable[..., Any], example: str = "state.replace(...)") -> State:
    """What a method returned as its state, refused if it is none."""
    if not isinstance(found, State):
        returned = f"it returned {type(found).__name__}{first_line_of(made_by)}"
        raise WrongReturn(f"{made_by.__qualname__} must return a State, as in `return {example}`, but {returned}")
    return found


def tasks_of(thing: object) -> list[Task]:
    """All tasks of a method: those of its class, and those of what it delegates to.

    It delegates to a dataclass that is one of its fields or cached properties, as PFL-sampled does to pFedHN.
    """
    tasks: list[Task] = []
    others: list[object] = [value for value in vars(thing).values() if is_dataclass(value)]
    for name in dir(type(thing)):
        found = inspect.getattr_static(type(thing), name)
        if isinstance(found, Task):
            tasks.append(getattr(thing, name))
        elif isinstance(found, cached_property) and is_dataclass(value := getattr(thing, name)):
            others.append(value)
    owners = {id(other): other for other in others}
    return [*tasks, *(task for other in owners.values() for task in tasks_of(other))]


def train(
    method: Method,
    federation: Federation,
    rounds: int,
    state: State | None = None,
    after_round: Callable[[int, State], None] | None = None,
) -> State:
    """Run a method's rounds, from the start or from a state; ``after_round(number, state)`` may watch or save.

    Rounds are numbered from 1; a federation that has finished round r goes on with r + 1.
    """
    if rounds < 0:
        raise ValueError(f"rounds={rounds}; expected 0 or more")
    if state is None:
        state = first_state(method, federation.seed)
    for number in range(federation.round + 1, federation.round + 1 + rounds):
        state = next_state(method, state, federation, number)
        if after_round is not None:
            after_round(number, state)
    return state


# Capabilities: what callers ask of a method before they rely on it. All are optional.


@runtime_checkable
class LearnsFromLabels(Protocol):
    """Training needs clients with labels; ``asks_unlabeled``: do its cohorts hold others, too?"""

    asks_unlabeled: ClassVar[bool]


@runtime_checkable
class ClientPrivate(Protocol):
    """Protects clients where its field ``noise`` is set: every round a Poisson sample of ``cohort`` clients, their
    updates clipped to ``clip``, noise on the sum.
    """

    client_private: ClassVar[Literal[True]]

    @property
    def cohort(self) -> int | float: ...

    @property
    def noise(self) -> AdditiveNoise | None: ...


@runtime_checkable
class PointPrivate(Protocol):
    """Protects points where ``local.private`` of its field ``local`` is set: the clients train by DP-SGD."""

    point_private: ClassVar[Literal[True]]

    @property
    def cohort(self) -> int | float: ...

    @property
    def local(self) -> Any: ...


@runtime_checkable
class TrainsInStages(Protocol):
    """A client takes more steps of DP-SGD in a round than those of ``local``; its points pay for all of them."""

    @property
    def charged(self) -> Any:
        """All steps of a round as one ``LocalSGD``."""


def charged_training(method: Any) -> Any:
    """The steps of DP-SGD that a round charges a client's points with."""
    return method.charged if isinstance(method, TrainsInStages) else method.local


@runtime_checkable
class NeedsRounds(Protocol):
    """With fewer rounds than ``least_rounds`` a part of it would never begin."""

    @property
    def least_rounds(self) -> int: ...


@runtime_checkable
class ServesUnlabeled(Protocol):
    """Says whether ``personalize`` serves clients without labels; a method that lacks this serves none."""

    @property
    def serves_unlabeled(self) -> bool: ...


@runtime_checkable
class TrainsNewcomers(Protocol):
    """A newcomer trains as long as all others did to get its model, so it is measured after the last round only."""

    trains_newcomers: ClassVar[Literal[True]]


@runtime_checkable
class TrainsLocally(Protocol):
    """Its clients train with a ``LocalSGD``."""

    @property
    def local(self) -> Any: ...


@runtime_checkable
class DistinguishesClients(Protocol):
    """Weighs clients or divides them into clusters by what the server has found out about each."""

    def distinctions(self, state: State) -> dict[str, Tensor]:
        """For the clients ``ids`` [C] those that it has of ``weight`` [C] in the last round, ``cluster`` [C] (−1: none
        yet) and ``place`` [C, 2] in the plane in which clusters were found.
        """


@runtime_checkable
class Describes(Protocol):
    """Has a vector [l] for every client that describes how it differs from others."""

    def descriptors(self, state: State, cohort: Cohort) -> Tensor: ...


@runtime_checkable
class DescribesData(Describes, Protocol):
    """Reads a descriptor off a client's data, a newcomer's too, by the task ``introduce``."""

    @property
    def introduce(self) -> Any: ...


@runtime_checkable
class ProtectsNewcomers(Method, DescribesData, Protocol):
    """Can add noise to the descriptor, which is all that a newcomer sends, to protect each of its samples."""

    @property
    def newcomer_epsilon(self) -> float | None: ...

    @property
    def newcomer_delta(self) -> float: ...

    @property
    def protection(self) -> AdditiveNoise | None: ...

    def with_protection(self, epsilon: float | None, delta: float) -> ProtectsNewcomers: ...

    def sensitivity(self, samples: int) -> float | None:
        """The most that one of ``samples`` rows can move the descriptor; None: not known."""

    def models(self, state: State, v: Tensor) -> Tensor:
        """What the server makes of descriptors."""


@runtime_checkable
class TellsDistance(Protocol):
    """Measures how far a newcomer is from the training clients, by what the newcomer sent (P2 Theorem 1)."""

    def nearest(self, state: State, sent: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Of newcomers, by the arrays [C, ...] that they sent: how far the nearest training client is [C]; and how far
        each of some training clients is from the nearest of the others. None: nothing is known.
        """


@runtime_checkable
class OnDemand(Protocol):
    """Makes the model of anybody who describes its rows, in one pass and without training.

    So the model can be made elsewhere: by a service, or in a browser. ``made_at``: who makes it. Where the newcomer
    does, its descriptor never leaves it.
    """

    made_at: ClassVar[Literal["server", "newcomer"]]

    @property
    def why_not_on_demand(self) -> str | None:
        """Why these settings need more than a descriptor; None: they do not."""

    @property
    def reads_labels(self) -> bool:
        """Does ``descriptor_of`` read labels?"""

    @property
    def newcomer_rows(self) -> int | None:
        """Of how many random rows a descriptor is made; None: of all."""

    def descriptor_of(self, state: State, x: Tensor, y: Tensor | None) -> Tensor:
        """v [l]: the descriptor of rows x [n, ...] with labels y [n] (−1: none)."""

    def model_of(self, state: State, v: Tensor) -> Tensor:
        """θ [d]: the model for a descriptor."""

    def common_model(self, state: State) -> Tensor:
        """θ [d]: the model for a client that nothing is known about."""


@runtime_checkable
class MasksClasses(Protocol):
    """Can keep a client from predicting classes that it does not have."""

    @property
    def mask_labels(self) -> bool:
        """Does it, by the client's labels?"""

    def with_masking(self, masked: bool) -> Method: ...


@runtime_checkable
class Auditable(Method, ClientPrivate, PointPrivate, TrainsLocally, Protocol):
    """Can repeat its private rounds on canaries: one clipped and noisy mean of updates a round."""

    @property
    def clip(self) -> float | None: ...

    def for_audit(self, model: Model, cohort: int | float, local: Any, noise: AdditiveNoise | None) -> Method: ...


DECLARATIONS = (
    "serves_unlabeled",
    "asks_unlabeled",
    "client_private",
    "point_private",
    "not_client_private",
    "trains_newcomers",
    "presets",
)  # declared by a class; not hyperparameters
