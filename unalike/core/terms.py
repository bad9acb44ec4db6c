"""On what terms clients answer: where the noise comes from, who adds it, and between which neighbours it protects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from unalike.privacy.sampling import Relation

Noise = Literal["seeded", "system"]
Trust = Literal["server", "nobody"]
_KNOWN = {"noise": get_args(Noise), "trust": get_args(Trust), "relation": get_args(Relation)}


@dataclass(frozen=True)
class Terms:
    """Both sides know them from the recipe; a request cannot change them.

    - ``noise``: "system" draws cohorts, batches, rounding and noise from the operating system, so that nobody can make
      them again. "seeded" repeats them from the seed, for experiments: whoever has the seed can take the noise off.
    - ``trust``: "server" has the noise added once, by a server that sees the sums. With "nobody" it is added before an
      array leaves its shard, or in shares by the clients of a secure sum.
    - ``relation``: what one unit does to a sum; a shard that adds noise scales it by that.
    """

    noise: Noise = "seeded"
    trust: Trust = "server"
    relation: Relation = "add_remove"

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; expected one of: {', '.join(known)}")

    @property
    def system(self) -> bool:
        """Does the noise come from the operating system?"""
        return self.noise == "system"

    @property
    def at_shard(self) -> bool:
        """Is the noise on a sum added before it leaves its shard?"""
        return self.trust == "nobody"

    def cover(self, other: Terms) -> bool:
        """Do a shard's terms agree with the server's? Where the server adds the noise, only it needs the relation."""
        alike = (self.noise, self.trust) == (other.noise, other.trust)
        return alike and (not self.at_shard or self.relation == other.relation)
