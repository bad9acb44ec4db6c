"""Flags that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

_DATA, _TRAINING, _PRIVACY, _RUNNING = "Data", "Training", "Privacy", "Running"

Data = Annotated[
    str | None,
    typer.Option(
        help="A name of `unalike datasets`, or your own file or folder. (default: digits)", rich_help_panel=_DATA
    ),
]
Partition = Annotated[
    str | None,
    typer.Option(
        help="How rows are dealt out: iid, dirichlet, pathological, shards, ... (default: the data's own clients; "
        "iid for a data set by name that has none)",
        rich_help_panel=_DATA,
    ),
]
Alpha = Annotated[
    float | None, typer.Option(help="Of the dirichlet partition: small makes clients unlike.", rich_help_panel=_DATA)
]
Classes = Annotated[
    int | None, typer.Option(help="Of the pathological partition: classes per client.", rich_help_panel=_DATA)
]
ClientCount = Annotated[
    int | None,
    typer.Option(
        "--clients", help="How many clients. (default: all of the data's own, else 100)", rich_help_panel=_DATA
    ),
]
Samples = Annotated[int | None, typer.Option(help="At most so many rows per client.", rich_help_panel=_DATA)]
Unseen = Annotated[
    float | None,
    typer.Option(
        help="Share of clients that arrive after training (from 1 on: number). (default: 0.1)", rich_help_panel=_DATA
    ),
]
Labeled = Annotated[float | None, typer.Option(help="Share of training clients with labels.", rich_help_panel=_DATA)]
ClientColumn = Annotated[
    str | None, typer.Option(help="Of a CSV or Parquet file. (default: client)", rich_help_panel=_DATA)
]
LabelColumn = Annotated[str | None, typer.Option(help="Of a CSV or Parquet file. (default: y)", rich_help_panel=_DATA)]

ModelName = Annotated[
    str | None, typer.Option("--model", help="mlp, lenet, cnn, ..., or file.py:Class.", rich_help_panel=_TRAINING)
]
Rounds = Annotated[int | None, typer.Option(help="Rounds of training. (default: 50)", rich_help_panel=_TRAINING)]
CohortSize = Annotated[
    float | None,
    typer.Option(
        "--cohort",
        help="Clients per round; below 1: their share. (default: as in `unalike methods TARGET`)",
        rich_help_panel=_TRAINING,
    ),
]
LocalEpochs = Annotated[int | None, typer.Option(help="Epochs at a client in a round.", rich_help_panel=_TRAINING)]
LocalSteps = Annotated[int | None, typer.Option(help="Or steps in place of epochs.", rich_help_panel=_TRAINING)]
BatchSize = Annotated[int | None, typer.Option("--batch", help="Batch size at a client.", rich_help_panel=_TRAINING)]
Rate = Annotated[float | None, typer.Option("--lr", help="Learning rate at a client.", rich_help_panel=_TRAINING)]
Seed = Annotated[int | None, typer.Option(help="Of data, cohorts, batches and noise.", rich_help_panel=_TRAINING)]
Seeds = Annotated[int | None, typer.Option(help="Repeat with so many seeds: mean ± std.", rich_help_panel=_TRAINING)]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any key of a recipe, e.g. local.momentum=0.9.", rich_help_panel=_TRAINING
    ),
]

Epsilon = Annotated[float | None, typer.Option(help="The ε that the run may cost.", rich_help_panel=_PRIVACY)]
Delta = Annotated[
    float | None, typer.Option(help="δ. (default: n^-1.1 for n clients or points)", rich_help_panel=_PRIVACY)
]
NoiseMultiplier = Annotated[float | None, typer.Option(help="Noise / clip.", rich_help_panel=_PRIVACY)]
Clip = Annotated[
    float | None, typer.Option(help="Bound on an update (client) or gradient (point).", rich_help_panel=_PRIVACY)
]
Unit = Annotated[str | None, typer.Option(help="Who is protected: client or point.", rich_help_panel=_PRIVACY)]

EvalEvery = Annotated[int | None, typer.Option(help="Rounds between evaluations.", rich_help_panel=_RUNNING)]
CheckpointEvery = Annotated[
    int | None, typer.Option(help="Rounds between checkpoints. (default: 10)", rich_help_panel=_RUNNING)
]
BlockSize = Annotated[
    int | None, typer.Option("--block", help="Clients computed at once. (default: measured)", rich_help_panel=_RUNNING)
]
Threads = Annotated[
    int | None, typer.Option(help="Threads of PyTorch. (default: its own; small samples: 1)", rich_help_panel=_RUNNING)
]
Device = Annotated[
    str | None,
    typer.Option(help="Where clients are computed: cpu, cuda, mps or auto. (default: cpu)", rich_help_panel=_RUNNING),
]
Out = Annotated[
    Path | None, typer.Option(help="New folder for all results. (default: runs/...)", rich_help_panel=_RUNNING)
]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=_RUNNING)]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON and nothing else.", rich_help_panel=_RUNNING)
]


def columns_from(client_column: str | None, label_column: str | None) -> dict[str, str]:
    """Those columns of the user's file that were named."""
    columns = {"client_column": client_column, "label_column": label_column}
    return {name: value for name, value in columns.items() if value is not None}


def settings_from(given: Mapping[str, Any]) -> dict[str, Any]:
    """A command's parameters that are settings of a run."""
    from unalike.studio.recipe.keys import KEYS, PARTITION_OPTIONS

    values = {name: value for name, value in given.items() if name in KEYS or name in PARTITION_OPTIONS}
    for name in ("cohort", "unseen"):  # 10 is a number of clients, 0.1 a share
        value = values.get(name)
        if isinstance(value, float) and value >= 1 and value.is_integer():
            values[name] = int(value)
    return values


def examples(*lines: str) -> str:
    """The end of a --help: commands that work as typed."""
    return "\n\n".join(["[bold]Examples[/bold]", *(f"  {line}" for line in lines)])
