"""The problem that a method is built for: what is known before training, and nothing of the clients' data."""

from __future__ import annotations

from dataclasses import dataclass

from unalike.core.model import Model


@dataclass(frozen=True)
class Problem:
    """What the method's networks are sized by. A method that needs more than ``model`` and its own hyperparameters (an
    embedding network, a hypernetwork) has a classmethod ``for_problem(problem, **hyperparameters)``.
    """

    model: Model  # the personal model's architecture
    input_shape: tuple[int, ...]  # of one sample, as the model gets it
    classes: int | None  # None: real-valued targets
    clients: int  # how many take part in training
    kind: str = "features"  # "image", "features" or "tokens"
