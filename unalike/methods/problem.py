"""The problem that a method is built for: what is known before training, and nothing of the clients' data."""

from __future__ import annotations

from dataclasses import dataclass

from unalike.core.model import Model


@dataclass(frozen=True)
class Problem:
    """A method with networks of its own (an embedding, a hypernetwork) has a field ``problem: Problem`` in the place of
    ``model: Model``, and makes them from it.
    """

    model: Model  # the personal model's architecture
    input_shape: tuple[int, ...]  # of one sample, as the model gets it
    classes: int | None  # None: real-valued targets
    clients: int  # how many take part in training
    kind: str = "features"  # "image", "features" or "tokens"
