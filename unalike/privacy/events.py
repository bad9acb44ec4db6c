"""DP events: one of our own, normal forms, and their plain (JSON-able) shape for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import attr
import dp_accounting
from dp_accounting import DpEvent

from unalike.privacy.account import BARE, Event, NonPrivate, Unaccountable


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ExponentialDpEvent(DpEvent):  # type: ignore[misc]  # dp_accounting ships no types
    """One selection by the exponential mechanism: ε-DP, and ε²/8-zCDP because its range is bounded by ε.

    Neither bound alone is good for both one selection and many; so the event says what happened and the accountant
    takes the better one (Cesar and Rogers 2021, Lemma 3.2).
    """

    epsilon: float


# Every event that may be written to a checkpoint. Nothing else is ever built from a file.
_KNOWN: dict[str, type[DpEvent]] = {
    "none": dp_accounting.NoOpDpEvent,
    "non_private": dp_accounting.NonPrivateDpEvent,
    "gaussian": dp_accounting.GaussianDpEvent,
    "laplace": dp_accounting.LaplaceDpEvent,
    "randomized_response": dp_accounting.RandomizedResponseDpEvent,
    "exponential": ExponentialDpEvent,
    "zcdp": dp_accounting.ZCDpEvent,
    "poisson_sampled": dp_accounting.PoissonSampledDpEvent,
    "fixed_size_sampled": dp_accounting.SampledWithoutReplacementDpEvent,
    "composed": dp_accounting.ComposedDpEvent,
    "repeated": dp_accounting.SelfComposedDpEvent,
}
_NAMES = {kind: name for name, kind in _KNOWN.items()}


def encode_event(event: DpEvent) -> dict[str, Any]:
    """The event as plain dicts, lists and numbers."""
    name = _NAMES.get(type(event))
    if name is None:
        raise Unaccountable(
            f"expected one of the events {sorted(_KNOWN)}, got {event}; use a mechanism of unalike.privacy"
        )
    plain: dict[str, Any] = {"kind": name}
    for field in attr.fields(type(event)):
        value = getattr(event, field.name)
        if isinstance(value, DpEvent):
            value = encode_event(value)
        elif isinstance(value, list | tuple):
            value = [encode_event(inner) for inner in value]
        plain[field.name] = value
    return plain


def decode_event(plain: dict[str, Any]) -> DpEvent:
    """The event that ``encode_event`` wrote."""
    kind = _KNOWN.get(str(plain.get("kind")))
    if kind is None:
        raise ValueError(f"expected an event named one of {sorted(_KNOWN)}, got {plain!r}; the saved ledger is damaged")
    fields = {name: value for name, value in plain.items() if name != "kind"}
    for name, value in fields.items():
        if isinstance(value, dict):
            fields[name] = decode_event(value)
        elif isinstance(value, list):
            fields[name] = tuple(decode_event(inner) for inner in value)
    return kind(**fields)


def leaves(event: DpEvent, count: int = 1) -> Iterator[tuple[Event, int]]:
    """See ``unalike.privacy.account.leaves``, which calls this for every event of dp_accounting."""
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
        yield BARE, count
    elif isinstance(event, dp_accounting.SelfComposedDpEvent):
        yield from leaves(event.event, count * event.count)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for inner in event.events:
            yield from leaves(inner, count)
    elif isinstance(event, dp_accounting.PoissonSampledDpEvent):
        merged = poisson_sampled(event.sampling_probability, tuple(leaves(event.event)))
        if isinstance(merged, dp_accounting.PoissonSampledDpEvent | NonPrivate):
            yield merged, count
        else:
            yield from leaves(merged, count)
    else:
        yield event, count


def merge_gaussians(parts: tuple[tuple[Event, int], ...]) -> DpEvent | None:
    """Several Gaussian queries of the same data are one, with multiplier (Σ count/z²)^−½; None for other events."""
    gaussians = [(event, count) for event, count in parts if isinstance(event, dp_accounting.GaussianDpEvent)]
    if not parts or len(gaussians) < len(parts):
        return None
    return dp_accounting.GaussianDpEvent(math.fsum(n / e.noise_multiplier**2 for e, n in gaussians) ** -0.5)


def compose(parts: tuple[tuple[Event, int], ...]) -> DpEvent:
    """One event for the parts, hashable and in a fixed order so that equal compositions compare equal."""
    if not parts:
        return dp_accounting.NoOpDpEvent()
    parts = tuple((dp_accounting.NonPrivateDpEvent() if e == BARE else e, n) for e, n in parts)
    ordered = sorted(parts, key=lambda part: (repr(part[0]), part[1]))
    events = tuple(e if n == 1 else dp_accounting.SelfComposedDpEvent(e, n) for e, n in ordered)
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)


def poisson_sampled(rate: float, parts: tuple[tuple[Event, int], ...]) -> Event:
    """All queries made of one and the same Poisson sample: they are composed *inside* the sampling.

    Amplifying each query on its own would need a fresh sample for each and understates ε.
    """
    if not parts or rate == 0:
        return dp_accounting.NoOpDpEvent()
    if any(isinstance(event, NonPrivate) for event, _ in parts):
        return BARE
    inner = merge_gaussians(parts) or compose(parts)
    return inner if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, inner)
