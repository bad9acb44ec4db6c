"""A worker's part of the data."""

from __future__ import annotations

import torch

from unalike.core.client import Clients
from unalike.runs.absent import select_rows


def test_a_worker_keeps_its_own_rows_with_the_labels_that_they_have() -> None:
    x, y, known = torch.arange(12.0)[:, None], torch.arange(12), torch.arange(12) % 3 != 0
    everybody = Clients.from_sizes(x, y, torch.tensor([3, 4, 5]), known=known)
    mine = select_rows({"train": everybody}, torch.tensor([0, 2]))["train"]
    assert mine.known is not None and mine.y is not None and len(mine.x) == 8
    rows, _ = mine.pool_rows()
    theirs, _ = everybody.select([0, 2]).pool_rows()
    for ours, all_ in ((mine.x, x), (mine.y, y), (mine.known, known)):
        assert torch.equal(ours[rows], all_[theirs])
    assert torch.equal(mine.label_counts(), everybody.label_counts()[[0, 2]])
