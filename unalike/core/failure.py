"""A client that did not answer an ask, and why."""

from __future__ import annotations

from dataclasses import dataclass

SITE = "refused by its site"  # a reason that begins so names a rule of the site's policy, and depends on no row


class Diverged(str):
    """The reason of a failure whose cause is a number that is NaN or infinite; every other reason is a plain string."""

    @classmethod
    def array(cls, name: str) -> Diverged:
        return cls(f"the array {name!r} is not finite (NaN or infinite)")


@dataclass(frozen=True)
class Failure:
    """A client that did not answer, or answered nonsense: data for the server, never silence."""

    client: str
    task: str
    round: int
    reason: str

    @property
    def diverged(self) -> bool:
        """Is the cause a number that is not finite?"""
        return isinstance(self.reason, Diverged)

    def __str__(self) -> str:
        return f"client {self.client}, round {self.round}, task {self.task}: {self.reason}"
