"""Tasks: the client's side of an algorithm, written for one client.

    @task
    def fit(self, client, theta):
        return send(update=self.local(self.model, theta, client) - theta)

A task takes a client and named arrays and sends named arrays; nothing else ever crosses a wire.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from torch import Tensor, nn

from unalike.core.suggest import nearest


@dataclass(frozen=True)
class Sent:
    """What a task returns: the arrays it sends, and those it keeps at the client for its next task."""

    arrays: dict[str, Tensor]
    keep: dict[str, Tensor] = field(default_factory=dict)


def send(*, keep: Mapping[str, Tensor] | None = None, **arrays: Tensor) -> Sent:
    """Send named arrays to the server (subject to the release of the ask) and keep others at the client."""
    return Sent(arrays, dict(keep or {}))


class Task:
    """A named client-side function. As a class attribute it binds to its method like an ordinary function does."""

    def __init__(self, function: Callable[..., Sent], owner: object | None = None, *, vectorised: bool = True) -> None:
        self.function = function
        self.owner = owner
        self.vectorised = vectorised  # False: works on bytes or Python values, so always client by client
        prefix = "" if owner is None else type(owner).__name__ + "."
        self.name = prefix + function.__name__
        skipped = 2 if _is_method(function) else 1  # self and client, or client
        self._parameters = _parameters(function)[skipped:]
        self.__doc__ = function.__doc__

    def __get__(self, instance: object | None, _: type) -> Task:
        return self if instance is None else Task(self.function, instance, vectorised=self.vectorised)

    def __call__(self, client: Any, **inputs: Any) -> Sent:
        result = self.function(client, **inputs) if self.owner is None else self.function(self.owner, client, **inputs)
        if not isinstance(result, Sent):
            raise TypeError(f"task {self.name} must return send(...), but it returned {type(result).__name__}")
        return result

    @property
    def pure(self) -> bool:
        """Does it depend on nothing but its method's fields and what it is given, and change nothing?

        A plain function may lean on more, and so may a method with an ``nn.Module``, whose parameters can be exchanged.
        """
        return frozen(self.owner) and not any(isinstance(value, nn.Module) for value in vars(self.owner).values())

    def check_inputs(self, given: set[str]) -> None:
        """Refuse an ask whose inputs do not fit the task's signature, before anything is sent."""
        if _is_method(self.function) and self.owner is None:
            raise TypeError(f"task {self.name} belongs to a method: ask with an instance's own, as in self.{self.name}")
        known = [p.name for p in self._parameters]
        for name in sorted(given - set(known)):
            raise TypeError(f"task {self.name} has no input {name!r}{nearest(name, known)}")
        missing = [p.name for p in self._parameters if p.default is inspect.Parameter.empty and p.name not in given]
        if missing:
            raise TypeError(f"task {self.name} needs the input{'s' * (len(missing) > 1)} {', '.join(missing)}")


def frozen(thing: object | None) -> bool:
    """Is it a dataclass whose fields never change?"""
    return is_dataclass(thing) and bool(getattr(type(thing), "__dataclass_params__").frozen)  # noqa: B009  (untyped)


@functools.lru_cache  # a method's task is bound anew in every round
def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _is_method(function: Callable[..., Any]) -> bool:
    return bool(_parameters(function)) and _parameters(function)[0].name == "self"


def task(function: Callable[..., Sent]) -> Task:
    """Mark a client-side function: ``(self, client, **inputs)`` in a method's class, else ``(client, **inputs)``."""
    return Task(function)
