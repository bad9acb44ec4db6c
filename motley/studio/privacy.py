"""From a recipe's ``[privacy]`` to a method's fields, and from the ledger to what a run says it has cost."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from motley.federation import Federation
from motley.privacy import Gaussian
from motley.studio.errors import UserError
from motley.studio.recipe import Recipe


def private_fields(recipe: Recipe, method: type) -> dict[str, Any]:
    """Arguments for the method's constructor that make it keep what ``[privacy]`` says: its ``clip`` and ``noise``."""
    wanted = recipe.privacy
    if wanted.epsilon is None and wanted.noise_multiplier is None and wanted.clip is None:
        return {}
    if wanted.epsilon is not None:
        raise UserError("privacy.epsilon: give privacy.noise_multiplier instead; the run then says which ε it has cost")
    names = {field.name for field in dataclasses.fields(method)}
    missing = [name for name in ("clip", "noise") if name not in names]
    if missing or wanted.unit != "client":
        raise UserError(f"{recipe.method} has no {wanted.unit}-level privacy by clip and noise; fedavg has it")
    fields: dict[str, Any] = {} if wanted.clip is None else {"clip": wanted.clip}
    if wanted.noise_multiplier is not None:
        if wanted.clip is None:
            raise UserError("noise without a bound protects nobody: give privacy.clip beside privacy.noise_multiplier")
        fields["noise"] = Gaussian(wanted.noise_multiplier)
    return fields


def target_delta(recipe: Recipe, clients: int) -> float:
    """δ: the recipe's, or 1 / clients^1.1, the usual choice below one over the population."""
    return recipe.privacy.delta or min(0.5, clients**-1.1)


def spent(federation: Federation, delta: float) -> dict[str, Any]:
    """What the run has cost so far: ``{private, epsilon, delta, unit}``.

    A run that released anything without noise promises nothing: ``private`` is false and the other three are null.
    """
    epsilon = federation.ledger.epsilon(delta)
    if math.isinf(epsilon):
        return {"private": False, "epsilon": None, "delta": None, "unit": None}
    return {"private": True, "epsilon": epsilon, "delta": delta, "unit": federation.ledger.unit or "client"}
