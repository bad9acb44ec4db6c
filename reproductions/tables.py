"""A printed table of accuracies: methods by columns, each cell with its spread."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from reproductions.item import Row, near

Printed = Mapping[str, Sequence[tuple[float, float]]]  # by method, in the order of the columns


def cell(method: str, column: str) -> str:
    """What the row of a cell is called."""
    return f"{method}, {column} (%)"


def cells(
    printed: Printed,
    columns: Collection[str],
    least: float,
    because: str,
    explanations: Mapping[str, str] | None = None,
    **more: Any,
) -> list[Row]:
    """A row for each cell: within three times the paper's own spread, and at least so many points."""
    told = explanations or {}
    return [
        near(cell(method, column), value, max(least, 3 * spread), because, explanation=told.get(method, ""), **more)
        for method, values in printed.items()
        for column, (value, spread) in zip(columns, values, strict=True)
    ]


def measured(table: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The accuracies of each cell, a number for each seed; a line of ``table`` has method, column and accuracy."""
    found: dict[str, list[float]] = {}
    for line in table:
        found.setdefault(cell(line["method"], line["column"]), []).append(line["accuracy"])
    return found


def ahead(values: Mapping[str, Sequence[float]], ours: str, others: Collection[str], column: str) -> list[float]:
    """Ours less the best of the others, for each seed."""
    theirs = zip(*(values[cell(method, column)] for method in others if method != ours), strict=True)
    return [own - max(best) for own, best in zip(values[cell(ours, column)], theirs, strict=True)]


def beside(table: Sequence[Mapping[str, Any]], printed: Printed, columns: Collection[str]) -> list[dict[str, Any]]:
    """The lines of ``table`` for ``charts.dots``, with the paper's accuracies in the columns that they have."""
    shown = [{name: line[name] for name in ("method", "column", "accuracy")} for line in table]
    there = {line["column"] for line in shown}
    paper = [
        {"method": method, "column": column, "whose": "paper", "accuracy": value}
        for method, values in printed.items()
        for column, (value, _) in zip(columns, values, strict=True)
        if column in there
    ]
    return [*paper, *shown]
