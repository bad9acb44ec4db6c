"""Accounts: what has been released, as different events and how often.

dp_accounting takes a second to import. A run without noise never needs it: its one event, ``BARE``, is made here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from dp_accounting import DpEvent


class Unaccountable(ValueError):
    """A release that the ledger cannot account, so it must not be made."""


@dataclass(frozen=True)
class NonPrivate:
    """Something was released without protection. In an account it stands for dp_accounting's NonPrivateDpEvent."""


BARE = NonPrivate()
"""The event of an ask without noise: ε = ∞, on purpose."""

Event: TypeAlias = "DpEvent | NonPrivate"
Account: TypeAlias = "frozenset[tuple[Event, int]]"
"""What has been released: each different event, and how often."""

NOTHING: Account = frozenset()


def leaves(event: Event, count: int = 1) -> Iterator[tuple[Event, int]]:
    """The event's parts that are no composition, each with how often it happens; the order does not matter to ε."""
    if isinstance(event, NonPrivate):
        yield event, count
        return
    from unalike.privacy import events

    yield from events.leaves(event, count)


def account(parts: Iterable[tuple[Event, int]]) -> Account:
    """Gather equal events into counts; refuses an event that cannot be accounted."""
    counts: dict[Event, int] = {}
    for event, count in parts:
        for leaf, times in leaves(event, count):
            if not isinstance(leaf, NonPrivate):
                from unalike.privacy.losses import largest_loss

                largest_loss(leaf)  # refuses an unknown event
            counts[leaf] = counts.get(leaf, 0) + times
    return frozenset((event, count) for event, count in counts.items() if count > 0)


def combine(*accounts: Account) -> Account:
    """The composition of several accounts."""
    return account(part for each in accounts for part in each)


def is_bare(released: Account) -> bool:
    """Was anything released without protection?"""
    return any(isinstance(event, NonPrivate) for event, _ in released)
