"""What one row of data looks like: all that a server, a newcomer or a node needs to read data the same way."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Kind = Literal["image", "features", "tokens"]
Target = Literal["class", "number", "none"]
_STORED = {"uint8": torch.uint8, "float32": torch.float32, "int64": torch.int64, "float64": torch.float64}


SCALING = ("shift", "scale", "target_center", "target_deviation")  # what may change while the rows stay the same


@dataclass(frozen=True)
class Schema:
    """The inputs' shape and kind, the labels' meaning, and the public constants that scale the inputs.

    columns: of a table, its features in order; one that holds words has its categories. shift, scale: inputs reach a
    model as (x − shift)·scale; they are public constants, or were released and paid for.
    """

    shape: tuple[int, ...]
    kind: Kind = "features"
    stored: str = "float32"  # the dtype of raw inputs
    target: Target = "none"
    classes: int | None = None
    class_names: tuple[str, ...] | None = None
    columns: Mapping[str, tuple[str, ...] | None] | None = None
    shift: Tensor | None = None
    scale: Tensor | None = None
    gaps: bool = False  # inputs may be missing (NaN), and then count as ``shift``
    target_center: float | None = None  # a number y to predict reaches a task as (y − center) / deviation
    target_deviation: float | None = None

    def __post_init__(self) -> None:
        if self.stored not in _STORED:
            raise ValueError(f"schema: inputs are stored as {self.stored!r}; expected one of {', '.join(_STORED)}")
        if (self.shift is None) != (self.scale is None):
            raise ValueError("schema: give shift and scale together, or neither")
        if (self.target_center is None) != (self.target_deviation is None):
            raise ValueError("schema: give target_center and target_deviation together, or neither")
        if self.target_deviation is not None and not 0 < self.target_deviation < math.inf:
            raise ValueError(f"schema: target_deviation={self.target_deviation}; expected a number above 0")
        for name in ("shift", "scale"):
            value = getattr(self, name)
            if value is not None and value.dtype != torch.float32:
                raise ValueError(f"schema: {name} is {value.dtype}; expected torch.float32")
        for name, known in (("kind", get_args(Kind)), ("target", get_args(Target))):
            if getattr(self, name) not in known:
                raise ValueError(f"schema: {name}={getattr(self, name)!r}; expected one of {', '.join(known)}")
        if not all(type(side) is int and side >= 0 for side in self.shape):
            raise ValueError(f"schema: shape={self.shape}; expected whole numbers of 0 or more")
        for name in ("shift", "scale"):  # for each feature: with numbers for each row it would tell how many there are
            value = getattr(self, name)
            if value is not None and not _fits(tuple(value.shape), self.shape):
                raise ValueError(
                    f"schema: its {name} is of shape {list(value.shape)}, which does not fit rows of "
                    f"{list(self.shape)}; give one number for each feature, or [channels, 1, 1] for images"
                )
        if self.classes is not None and (type(self.classes) is not int or self.classes < 1):
            raise ValueError(f"schema: classes={self.classes}; expected 1 or more")

    @property
    def dtype(self) -> torch.dtype:
        return _STORED[self.stored]

    @property
    def outputs(self) -> int:
        """How many numbers a model must give for one row: one for each class, or one."""
        return self.classes or 1

    @property
    def class_labels(self) -> tuple[str, ...]:
        """What the classes are called: by their numbers where they have no names."""
        return tuple(str(i) for i in range(self.classes or 0)) if self.class_names is None else self.class_names

    def in_units(self, outputs: Tensor) -> Tensor:
        """A model's outputs as predictions: numbers in the units of the data; scores of classes as they are."""
        if self.target_center is None or self.target_deviation is None:
            return outputs
        return outputs * self.target_deviation + self.target_center

    def to_json(self) -> str:
        """Plain values, for a run folder or a wire."""
        values = {name: value for name, value in vars(self).items() if value is not None and value is not False}
        for name in ("shift", "scale"):
            if name in values:
                values[name] = {"shape": list(values[name].shape), "values": values[name].flatten().tolist()}
        return json.dumps(values, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """The schema in this text; ``ValueError`` says what is wrong with it."""
        try:
            values: dict[str, Any] = json.loads(text)
            for name in ("shift", "scale"):
                if name in values:
                    values[name] = torch.tensor(values[name]["values"], dtype=torch.float32).reshape(
                        values[name]["shape"]
                    )
            for name in ("shape", "class_names"):
                if name in values:
                    values[name] = tuple(values[name])
            if "columns" in values:
                values["columns"] = {k: None if v is None else tuple(v) for k, v in values["columns"].items()}
            return cls(**values)
        except (TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a schema: {error}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())


def _fits(own: tuple[int, ...], row: tuple[int, ...]) -> bool:
    """Are numbers of this shape some for each feature of a row, or for several together?"""
    sides = zip(reversed(own), reversed(row), strict=False)
    return len(own) <= len(row) and all(side in (1, other) for side, other in sides)


def as_words(values: Sequence[object] | None) -> tuple[str, ...] | None:
    """Names as plain words."""
    return None if values is None else tuple(str(value) for value in values)
