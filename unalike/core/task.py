"""Tasks: the client's side of an algorithm, written for one client.

    @task
    def fit(self, client, theta):
        return send(update=self.local(self.model, theta, client) - theta)

A task takes a client and named arrays and sends named arrays; nothing else ever crosses a wire.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, overload

from torch import Tensor, nn

from unalike.core.notes import did_you_mean
from unalike.core.outside import WrongReturn, first_line_of
from unalike.core.release import Release, Stays
from unalike.core.roster import Declarations, Roster


@dataclass(frozen=True)
class Sent:
    """What a task returns: the arrays it sends, and those it keeps at the client for its next task."""

    arrays: dict[str, Tensor]
    keep: dict[str, Tensor] = field(default_factory=dict)


def send(*, keep: Mapping[str, Tensor] | None = None, **arrays: Tensor) -> Sent:
    """Send named arrays to the server (subject to the release of the ask) and keep others at the client."""
    return Sent(arrays, dict(keep or {}))


class Task:
    """A named client-side function. As a class attribute it binds to its method like an ordinary function does.

    What leaves a client under a bound, noise or masks is declared beside the task, because both sides must know it:

        @fit.into
        def sums(self) -> list[Release]:
            return [Mean("update", clip=self.clip, noise=self.noise)]

    An input that every client derives from what it has declared in public (its own noise level from its size N̄, say)
    is declared in the same way, and is not part of an ask:

        @fit.derive
        def own(self, declared: Declarations) -> dict[str, Tensor]:  # columns [clients] in, [clients, ...] out
            return {"noise": self.local.noise_multipliers(declared)}
    """

    def __init__(
        self,
        function: Callable[..., Sent],
        owner: object | None = None,
        *,
        vectorised: bool = True,
        into: Callable[[Any], Sequence[Release]] | None = None,
        derive: Callable[[Any, Declarations], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.function = function
        self.owner = owner
        self.vectorised = vectorised  # False: works on bytes or Python values, so always client by client
        self._into, self._derive = into, derive
        prefix = "" if owner is None else type(owner).__name__ + "."
        self.name = prefix + function.__name__
        skipped = 2 if _is_method(function) else 1  # self and client, or client
        self._parameters = _parameters(function)[skipped:]
        self.__doc__ = function.__doc__

    def __get__(self, instance: object | None, _: type) -> Task:
        if instance is None:
            return self
        return Task(self.function, instance, vectorised=self.vectorised, into=self._into, derive=self._derive)

    def into(self, declare: Callable[[Any], Sequence[Release]]) -> Callable[[Any], Sequence[Release]]:
        """Declare what leaves a client: a function of the method that gives its releases."""
        self._into = declare
        return declare

    def derive(
        self, declare: Callable[[Any, Declarations], Mapping[str, Tensor]]
    ) -> Callable[..., Mapping[str, Tensor]]:
        """Declare inputs that a client derives from what it declares."""
        self._derive = declare
        return declare

    def releases(self) -> Sequence[Release]:
        """What it declares; empty: any plain release may be asked for."""
        return () if self._into is None or self.owner is None else self._into(self.owner)

    def derive_inputs(self, roster: Roster, positions: Tensor) -> Mapping[str, Tensor]:
        """The inputs that the clients at these positions derive from what they declare."""
        return {} if self._derive is None else self._derive(self.owner, roster.declarations(positions))

    def __call__(self, client: Any, **inputs: Any) -> Sent:
        result = self.function(client, **inputs) if self.owner is None else self.function(self.owner, client, **inputs)
        if not isinstance(result, Sent):
            returned = f"it returned {type(result).__name__}{first_line_of(self.function)}"
            raise WrongReturn(f"task {self.name} must return send(...), but {returned}")
        return result

    @property
    def pure(self) -> bool:
        """Does it depend on nothing but its method's fields and what it is given, and change nothing?

        A plain function may lean on more, and so may a method with an ``nn.Module``, whose parameters can be exchanged.
        """
        return is_frozen(self.owner) and not any(isinstance(value, nn.Module) for value in vars(self.owner).values())

    def check_inputs(self, given: set[str]) -> None:
        """Refuse an ask whose inputs do not fit the task's signature, before anything is sent."""
        if _is_method(self.function) and self.owner is None:
            raise TypeError(f"task {self.name} belongs to a method: ask with an instance's own, as in self.{self.name}")
        named = [p for p in self._parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        known = [p.name for p in named]
        for name in sorted(given - set(known)) if len(named) == len(self._parameters) else ():
            raise TypeError(f"task {self.name} has no input {name!r}{did_you_mean(name, known)}")
        missing = [p.name for p in named if p.default is inspect.Parameter.empty and p.name not in given]
        if missing:
            raise TypeError(f"task {self.name} needs the input{'s' * (len(missing) > 1)} {', '.join(missing)}")


def is_frozen(thing: object | None) -> bool:
    """Is it a dataclass whose fields never change?"""
    return is_dataclass(thing) and bool(getattr(type(thing), "__dataclass_params__").frozen)  # noqa: B009  (untyped)


@functools.lru_cache  # a method's task is bound anew in every round
def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _is_method(function: Callable[..., Any]) -> bool:
    return bool(_parameters(function)) and _parameters(function)[0].name == "self"


@overload
def task(function: Callable[..., Sent], /) -> Task: ...
@overload
def task(*, stays: str) -> Callable[[Callable[..., Sent]], Task]: ...
def task(function: Callable[..., Sent] | None = None, /, *, stays: str = "") -> Any:
    """Mark a client-side function: ``(self, client, **inputs)`` in a method's class, else ``(client, **inputs)``.

    ``@task(stays="theta")`` declares that what it sends under this name, a personal model say, never leaves its client.
    """
    return functools.partial(Task, into=lambda _: [Stays(stays)]) if function is None else Task(function)
