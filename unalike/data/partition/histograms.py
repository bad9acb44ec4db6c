"""Files of ready histograms: one for each client."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unalike.data.partition.mixture import MDMError


def read_counts(file: str | Path) -> Tensor:
    """Counts [clients, categories] from a CSV, NPZ or NPY file.

    A CSV file has one line for each client, and maybe a header; an NPZ file holds the array ``counts``.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise MDMError(f"there is no file {path}")
    if path.suffix == ".npy":
        values = np.load(path, allow_pickle=False)
    elif path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            if "counts" not in arrays:
                raise MDMError(f"{path} must hold an array called 'counts', but it has: {', '.join(arrays)}")
            values = arrays["counts"]
    else:
        try:
            first = path.read_text().split("\n", 1)[0].split(",")
            header = not all(re.fullmatch(r"\s*[-+\d.eE]+\s*|\s*nan\s*", cell) for cell in first)
            values = np.loadtxt(path, delimiter=",", ndmin=2, skiprows=int(header))
            if len(first) != values.shape[1]:
                raise ValueError(f"the header has {len(first)} cells, and a line has {values.shape[1]}")
        except ValueError as error:
            wanted = "one line of comma-separated counts for each client"
            raise MDMError(f"{path}: expected {wanted}: {error}") from None
    if values.dtype.kind not in "iuf":
        raise MDMError(f"{path}: counts must be numbers, but their type is {values.dtype}")
    return torch.from_numpy(np.ascontiguousarray(values).astype(np.float64))
