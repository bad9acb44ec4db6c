"""How unlike the clients are: sizes, labels, and how far each is from the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.core.notes import FLAG, Note, join_notes
from unalike.data.files.layout import ColumnReport
from unalike.data.population import Population
from unalike.data.source import Names

_MOST_NUMBERS = 200_000_000  # inputs larger than this are not read only to describe them


@dataclass(frozen=True, eq=False)
class Description:
    """``summary`` is a table of two columns; ``columns`` has one number for each client."""

    title: str
    summary: Mapping[str, str]
    columns: Mapping[str, Tensor]  # train, validation, test; where they make sense classes, entropy, distance, shift
    names: Sequence[str]
    column_reports: Sequence[ColumnReport] = ()  # what was made of the columns of a table

    def rows(self, limit: int | None = None) -> list[list[str]]:
        """A table with a line for each client, at most ``limit``; its head is ``header``."""
        count = len(self.names) if limit is None else min(limit, len(self.names))
        return [
            [self.names[i]]
            + [_number(float(column[i]), column.is_floating_point()) for column in self.columns.values()]
            for i in range(count)
        ]

    @property
    def header(self) -> list[str]:
        return ["client", *self.columns]


def describe(population: Population) -> Description:
    """Sizes and heterogeneity of all clients, over all their rows.

    ``entropy`` is that of a client's labels in bits. ``distance`` is the total variation between a client's label
    distribution and that of all rows: 0 is the same, 1 has no class in common. ``shift`` is the distance of a client's
    mean input from the mean of all, for a typical feature in units of the scaled inputs; the summary says what chance
    alone would give.
    """
    sizes = population.sizes.to(torch.float64)
    columns: dict[str, Tensor] = {name: part.size for name, part in population.parts.items()}
    summary = {
        "clients": f"{len(population):,} ({len(population.seen):,} seen, {len(population.unseen):,} unseen)",
        "labeled seen clients": f"{int(population.labeled[population.seen].sum()):,}",
        "rows": ", ".join(f"{int(sizes.sum()):,} {part}" for part, sizes in columns.items()),
        "rows of a client": _spread(sizes, ".0f"),
        "input": f"{population.kind} {'×'.join(map(str, population.input_shape))}",
    }
    if population.dropped:
        several = "s" * (len(population.dropped) > 1)
        named = ", ".join([*population.dropped[:5], *["…"] * (len(population.dropped) > 5)])
        summary["left out"] = f"{len(population.dropped):,} client{several} with too few rows: {named}"
    if population.incomplete:
        summary["rows left out"] = f"{population.incomplete:,} for lack of a value (missing=drop)"
    if population.notes:
        summary["note"] = join_notes("; ", population.notes)
    lacking = _lacking(population)
    if lacking:
        summary["rows without a label"] = f"{lacking:,} of clients that have some; they describe, and are in no loss"
    if not population.has_labels:
        how = f": name their column (label_column{FLAG})" if population.columns is not None else ""
        summary["labels"] = Note(f"no labels{how}", "data.options.label_column")
    elif population.classes is None:
        summary["targets"] = _target_range(population)
    if population.classes is not None:
        counts = population.histogram().to(torch.float64)
        known = population.test.labeled if population.train.known is None else counts.sum(1) > 0
        share = counts / counts.sum(1, keepdim=True).clamp(min=1)
        overall = counts.sum(0) / counts.sum()
        entropy = torch.where(share > 0, -share * share.clamp(min=1e-300).log2(), 0).sum(1).clamp(min=0)
        columns["classes"] = (counts > 0).sum(1)
        columns["entropy"] = entropy
        columns["distance"] = torch.where(known, 0.5 * (share - overall).abs().sum(1), torch.nan)
        overall_entropy = -float(torch.where(overall > 0, overall * overall.clamp(min=1e-300).log2(), 0).sum())
        summary["classes"] = f"{population.classes}"
        summary["classes of a client"] = _spread(columns["classes"][known].to(torch.float64), ".0f")
        summary["label entropy"] = f"{_spread(entropy[known], '.2f')} bits; all rows together {overall_entropy:.2f}"
        summary["distance to all"] = f"{_spread(columns['distance'][known], '.2f')} (0 the same, 1 nothing in common)"
    shift = _input_shift(population)
    if shift is not None:
        columns["shift"] = shift[0]
        chance = shift[1] * float(sizes.rsqrt().mean())
        summary["input shift"] = f"{_spread(shift[0], '.2f')} (by chance about {chance:.2f})"
    names = population.train.names or Names(population.train.ids.numpy())  # a population's ids are 0, 1, ...
    return Description(population.name, summary, columns, names, population.column_reports)


def _lacking(population: Population) -> int:
    """How many rows of clients with labels have none."""
    if population.train.known is None:
        return 0
    having = torch.stack([part.label_counts() for part in population.parts.values()]).sum(0)
    return int((population.sizes - having)[having > 0].sum())


def _target_range(population: Population) -> str:
    """From where to where the targets of a regression go; rows of clients without any hold a 0 that means nothing."""
    labels, there = population.train.y, population.train.known
    known = torch.arange(len(population)) if there is not None else population.test.labeled.nonzero().flatten()
    if labels is None or not len(known):
        return "none"
    rows = torch.cat([part.select(known).pool_rows()[0] for part in population.parts.values()])
    every = labels[rows if there is None else rows[there[rows]]]
    return f"real numbers from {float(every.min()):.4g} to {float(every.max()):.4g}"


def _spread(values: Tensor, form: str) -> str:
    low, middle, high = (float(values.quantile(q)) for q in (0.0, 0.5, 1.0)) if len(values) else (0.0, 0.0, 0.0)
    return f"median {middle:{form}}, from {low:{form}} to {high:{form}}"


def _number(value: float, decimals: bool) -> str:
    return "–" if value != value else f"{value:.2f}" if decimals else f"{int(value):,}"


def _input_shift(population: Population) -> tuple[Tensor, float] | None:
    """[clients]: root mean square over features of (client's mean − mean of all), in units of the scaled inputs.

    Also the root mean square over features of their standard deviation: divided by √rows it is what chance gives.
    """
    x = population.train.x
    if population.kind == "tokens" or x.numel() > _MOST_NUMBERS:
        return None
    sums = torch.zeros(len(population), x[0].numel(), dtype=torch.float64)
    missing, squares = torch.zeros_like(sums), torch.zeros(x[0].numel(), dtype=torch.float64)
    for part in population.parts.values():
        rows, owner = part.pool_rows()
        for a in range(0, len(rows), 65_536):
            piece = x[rows[a : a + 65_536]].reshape(-1, sums.shape[1]).to(torch.float64)
            if population.train.gaps:
                missing.index_add_(0, owner[a : a + 65_536], piece.isnan().to(torch.float64))
                piece.nan_to_num_(nan=0.0)
            sums.index_add_(0, owner[a : a + 65_536], piece)
            squares += piece.square_().sum(0)
    counts = population.sizes.to(torch.float64)[:, None] - missing
    mean = sums.sum(0) / counts.sum(0)
    difference = torch.where(counts > 0, sums / counts.clamp(min=1) - mean, 0.0)
    deviation = (squares / counts.sum(0) - mean.square()).clamp(min=0).sqrt()
    scale = torch.ones_like(mean)
    if population.train.scale is not None:
        scale = population.train.scale.to(torch.float64).expand(x.shape[1:]).reshape(-1)
    elif population.scaling in ("asked", "private"):  # training would ask for it; who describes data looks at all of it
        spread = _per_channel(deviation, mean, x) if population.kind == "image" else deviation
        scale = torch.where(spread <= 1e-6 * mean.abs().clamp(min=1), 1, 1 / spread)  # 1 for a constant
    return (difference * scale).square().mean(1).sqrt(), float((deviation * scale).square().mean().sqrt())


def _per_channel(deviation: Tensor, mean: Tensor, x: Tensor) -> Tensor:
    """Pixels' deviations and means made into the deviation of their channel, repeated for each of its pixels."""
    channels = x.shape[1]
    square = (deviation.square() + mean.square()).view(channels, -1).mean(1)
    center = mean.view(channels, -1).mean(1)
    whole: Tensor = (square - center.square()).clamp(min=0).sqrt()
    return whole.repeat_interleave(len(mean) // channels)
