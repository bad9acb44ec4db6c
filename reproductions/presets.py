"""A method with the settings of a preset, which has them in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from unalike.core.method import Method
from unalike.methods import METHODS
from unalike.methods.problem import Problem
from unalike.runs.recipe.hyperparameters import PAPER, Hyperparameters


def paper_method(name: str, problem: Problem, changes: Mapping[str, Any], preset: str = PAPER) -> Method:
    """A method with its preset, where it has one, and some changes, nested as in a recipe."""
    entry = METHODS[name]
    arguments = Hyperparameters.of(name, preset if preset in entry.presets else None).read(changes)
    given = {"model": problem.model, "problem": problem}
    wanted = {field.name: given[field.name] for field in dataclasses.fields(entry.cls) if field.name in given}
    return cast(Method, entry.cls(**wanted, **arguments))
