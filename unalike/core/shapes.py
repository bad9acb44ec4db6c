"""The shapes that a task sends, found before any client is asked: a dry run on a client made from the schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.core.client import Client, Clients, Kept
from unalike.core.draws import Draws, key
from unalike.core.release import Release
from unalike.core.schema import Schema
from unalike.core.task import Task

Shapes = dict[str, tuple[int, ...] | None]  # None: it follows the number of the client's rows
_ROWS = (2, 3)  # of the clients that are made


@dataclass(frozen=True)
class DryRun:
    """What is known of a task before a client is asked.

    - ``shapes``: for each release, of what leaves a client or is kept for a later ask.
    - ``noisy``: has the task drawn from ``client.noise``?
    """

    shapes: list[Shapes]
    noisy: bool


def dry_run(
    task: Task, releases: Sequence[Release], schema: Schema, bound: Tensor, inputs: Mapping[str, Tensor]
) -> DryRun | None:
    """The task on two clients with different numbers of rows.

    None where it does not run on rows of zeros, or without what an earlier task keeps: then what the first clients send
    must do.
    """
    try:
        (first, noisy), (second, _) = (_run(task, releases, schema, bound, inputs, rows) for rows in _ROWS)
    except Exception:  # whatever it is, the clients' own failures will tell
        return None
    shapes: list[Shapes] = [
        {name: shape if shape == other.get(name) else None for name, shape in one.items()}
        for one, other in zip(first, second, strict=True)
    ]
    return DryRun(shapes, noisy)


def check_private(task: Task, releases: Sequence[Release], dry: DryRun | None) -> None:
    """Refuse rows under a release that is charged as private: whoever sees them sees the data, or how much there is."""
    if dry is None:
        return
    for release, known in zip(releases, dry.shapes, strict=True):
        for name, shape in known.items() if release.cost is not None or release.noise is not None else ():
            if shape is None:
                raise ValueError(
                    f"{task.name} sends {name!r} with a row for each of the client's rows, under {release.kind} with "
                    "noise or cost=...; send something of one shape, such as client.mean(...)"
                )
            if release.cost is not None and not dry.noisy:
                raise ValueError(
                    f"{task.name} sends {name!r} with cost=..., by which it has made it private itself, but it draws "
                    "nothing from client.noise; train by a LocalSGD with private=..., or put the noise in the release"
                )


def dry_output(task: Task, schema: Schema, bound: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """What the task sends, with zeros for numbers; None as for ``dry_run``."""
    try:
        with torch.no_grad():
            sent = task(_blank_client(schema, bound, _ROWS[0]), **inputs).arrays
    except Exception:  # as above
        return None
    return {name: torch.zeros_like(value) for name, value in sent.items()}


def _run(
    task: Task, releases: Sequence[Release], schema: Schema, bound: Tensor, inputs: Mapping[str, Tensor], rows: int
) -> tuple[list[dict[str, tuple[int, ...]]], bool]:
    """The shapes of what leaves a client with so many rows, and whether its task has drawn noise."""
    client, draws = _blank_client(schema, bound, rows), Draws(key(0, 1))
    with torch.no_grad():
        sent = task(client, **inputs).arrays
        noisy = isinstance(client.noise, Draws) and client.noise.used
        left = [{**one.at_client(sent, client, draws), **one.keep_back(sent, draws)} for one in releases]
    return [{name: tuple(value.shape) for name, value in arrays.items()} for arrays in left], noisy


def _blank_client(schema: Schema, bound: Tensor, rows: int) -> Client:
    """A client with rows of zeros."""
    x = torch.zeros(rows, *schema.shape, dtype=schema.dtype)
    kinds = {"class": torch.int64, "number": torch.float32}
    y = None if schema.target == "none" else torch.zeros(rows, dtype=kinds[schema.target])
    block = Clients.from_sizes(x, y, torch.tensor([rows])).using(schema).block(torch.arange(1))
    columns = {name: value[0] for name, value in block.columns(key(0), bound[None]).items()}
    return block.client(columns, Kept())
