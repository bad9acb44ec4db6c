"""Who has a personal model at its client already, and who is new, and how far a newcomer is from those who trained."""

from __future__ import annotations

import torch
from torch import Tensor

from unalike.core.federation import Cohort, Replies
from unalike.core.method import State
from unalike.privacy.sampling import Poisson

NOBODY = torch.zeros(0, dtype=torch.int64)  # the first ``ids``


def with_answered(state: State, cohort: Cohort, replies: Replies) -> State:
    """The state with those who answered among its ``ids``; who is in a Poisson sample protects, so it is not told."""
    if isinstance(cohort.sampling, Poisson):
        return state
    return state.replace(ids=torch.unique(torch.cat([state.ids, cohort.ids[replies.answered]])))


def newcomers(state: State, cohort: Cohort) -> Cohort:
    """Those of the cohort that have labels to train with and are not among the state's ``ids``."""
    federation = cohort.federation
    labeled = federation.roster.labeled[cohort.positions] & federation.labels
    return cohort.only((labeled & ~torch.isin(cohort.ids, state.ids)).nonzero().flatten())


# What training clients looked like to the server: their latest descriptors, with which a newcomer's is compared

MOST_MET = 1000  # clients whose descriptors a state remembers


def nobody_met(length: int) -> dict[str, Tensor]:
    """The part of a state before anybody has described itself."""
    return {"met.ids": NOBODY, "met.v": torch.zeros(0, length)}


def with_met(state: State, cohort: Cohort, v: Tensor) -> State:
    """The state with the descriptors [C, l] that a cohort just sent, in the place of those that it sent before."""
    others = ~torch.isin(state["met.ids"], cohort.ids)
    ids = torch.cat([cohort.ids, state["met.ids"][others]])[:MOST_MET]
    return state.with_part("met", {"ids": ids, "v": torch.cat([v.detach(), state["met.v"][others]])[:MOST_MET]})


def nearest_met(state: State, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """How far descriptors [C, l] are from that of the nearest training client, and how far each of these is from the
    nearest of the others, in units of the normalised descriptors. None: fewer than two have described themselves.
    """
    known = state.part("met").get("v")
    if known is None or len(known) < 2:
        return None
    return torch.cdist(v, known).amin(1) * state.scale, _apart(torch.cdist(known, known)) * state.scale


def _apart(distances: Tensor) -> Tensor:
    """[n] how far each is from the nearest of the others."""
    return distances.masked_fill(torch.eye(len(distances), dtype=torch.bool), torch.inf).amin(1)
