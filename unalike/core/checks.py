"""Checks of a dataclass's fields (None is always allowed)."""

from __future__ import annotations

import functools
import math
from typing import Any, get_args, get_type_hints

from unalike.privacy.checks import SettingError


def at_least(owner: object, **least: float) -> None:
    """Fields that must be so large or more."""
    for name, bound in least.items():
        value = getattr(owner, name)
        if value is not None and not value >= bound:
            raise SettingError(f"{name}={value}; expected {bound} or more")


def above(owner: object, **bounds: float) -> None:
    """Fields that must be finite and larger than this."""
    for name, bound in bounds.items():
        value = getattr(owner, name)
        if value is not None and not bound < value < math.inf:
            raise SettingError(f"{name}={value}; expected a number above {bound}")


def one_of(owner: object, *names: str) -> None:
    """Fields whose type is a ``Literal``."""
    kind: Any = type(owner)
    for name in names:
        if getattr(owner, name) not in _choices(kind, name):
            raise SettingError(f"{name}={getattr(owner, name)!r}; expected one of {', '.join(_choices(kind, name))}")


@functools.cache  # it is slow, and optimizers are made anew in every round
def _choices(kind: Any, name: str) -> tuple[str, ...]:
    return get_args(get_type_hints(kind)[name])
