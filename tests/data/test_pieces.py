"""Rows of some clients alone: the same as of a population that was loaded as a whole, and little else in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from unalike.data import DataError, load, load_lazily, rows
from unalike.data.files.archive import mapped_npz
from unalike.data.files.frames import of_files
from unalike.data.files.layout import Layout, RawRows
from unalike.data.files.tabular import parse_table
from unalike.runs import fingerprint

ROWS = 300


def table() -> pd.DataFrame:
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"client": random.integers(0, 12, ROWS), "a": random.normal(size=ROWS)})
    frame["town"] = random.choice(["Graz", "Linz", "Wien"], ROWS)
    frame["b"] = random.integers(0, 9, ROWS)
    frame["y"] = random.choice(["no", "yes"], ROWS)
    return frame


def written(kind: str, folder: Path) -> Path:
    file, random = folder / f"own.{kind.split(' ')[0]}", np.random.default_rng(0)
    arrays = {"x": random.normal(size=(ROWS, 3)).astype(np.float32), "client": random.integers(0, 12, ROWS)}
    arrays["y"] = np.where(random.random(ROWS) < 0.3, np.nan, random.integers(0, 2, ROWS))  # labels of some rows
    if kind == "npz":
        np.savez(file, **arrays)  # type: ignore[arg-type]
    elif kind == "npz, compressed":
        file = file.with_suffix(".npz")
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    elif kind == "parquet":
        table().to_parquet(file)
    else:
        table().to_csv(file, index=False)
    return file


CASES: dict[str, dict[str, Any]] = {
    "npz": {},
    "npz, compressed": {"validation": 0.2},
    "csv": {"samples": 15, "min_samples": 3},
    "csv.gz": {"partition": "dirichlet:0.5", "clients": 8},
    "parquet": {"test": 0.3},
    "digits": {"partition": "rotation", "clients": 9, "samples": 20},
    "gaussian-mixture:clients=20,points=5,dim=3": {"clients": 7},
}


@pytest.mark.parametrize("kind", CASES)
def test_the_rows_of_some_clients_are_those_of_the_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "IN_MEMORY", 0)  # as of a table that is too large
    named = kind.startswith(("digits", "gaussian"))
    data = kind if named else str(written(kind, tmp_path))
    whole, lazy = load(data, **CASES[kind], seed=3), load_lazily(data, **CASES[kind], seed=3)
    facts = lazy.facts
    assert torch.equal(torch.from_numpy(np.concatenate(list(lazy.pieces(7)))), whole.train.x)
    key = b"k" * 32
    assert fingerprint.of(facts, key, lazy.pieces(50)) == fingerprint.of(whole, key)
    mine = torch.arange(len(whole))[1::2]
    own = lazy.select(mine)
    assert len(own["train"].x) == int(whole.sizes[mine].sum())
    for name, part in whole.parts.items():
        assert torch.equal(own[name].labeled, part.labeled[mine]) and torch.equal(own[name].ids, part.ids[mine])
        for place, position in enumerate(mine.tolist()):
            for ours, theirs in zip(own[name].rows(place), part.rows(position), strict=True):
                assert (ours is None and theirs is None) or torch.equal(ours, theirs)  # type: ignore[arg-type]
        known = own[name].known
        assert (known is None) == (part.known is None)
        if known is not None:
            assert torch.equal(own[name].label_counts(), part.label_counts()[mine])
    assert (facts.classes, facts.columns, facts.pooled) == (whole.classes, whole.columns, whole.pooled)
    if kind in ("npz", "csv", "csv.gz", "parquet"):
        owner: Any = lazy.source.x
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        assert isinstance(owner, np.memmap)  # so that inputs are in no memory of ours


def parsed(file: Path, layout: Layout, rows: int) -> RawRows | str:
    try:
        return parse_table(of_files([file], layout, rows=rows), file.name, layout)
    except DataError as error:
        return str(error)


def same(one: RawRows | str, other: RawRows | str) -> None:
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
        return
    for name in ("x", "y", "client"):
        a, b = (np.asarray(getattr(rows, name)) for rows in (one, other))
        assert a.dtype.kind == b.dtype.kind
        np.testing.assert_array_equal(a, b)
    assert (one.columns, one.incomplete, one.column_reports) == (other.columns, other.incomplete, other.column_reports)


def test_a_table_in_pieces_is_that_in_one(tmp_path: Path) -> None:
    frame = table()
    frame.loc[[3, 77], "a"] = np.nan
    frame.loc[60:70, "town"] = None
    frame.to_csv(tmp_path / "own.csv", index=False)
    layout = Layout(missing="drop")
    found = parsed(tmp_path / "own.csv", layout, 40)
    assert isinstance(found, RawRows) and found.incomplete == 13
    same(found, parsed(tmp_path / "own.csv", layout, 1000))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("a", ["x"] * 50 + [1.5] * 250),  # numbers where the first pieces have text: read as numbers, one is wrong
        ("a", ["x"] * 200 + [1.5] * 100),  # text where the last pieces have numbers
        ("a", [1.5] * 100 + ["x"] * 200),
        ("town", ["Graz"] * 299 + ["7"]),
        ("a", [np.nan] * 40 + [1.0] * 260),
        ("a", [1.0] * 299 + [np.inf]),
        ("town", [f"town {i}" for i in range(300)]),
        ("y", [1.0] * 50 + ["yes"] * 250),
        ("y", [1] * 60 + [0.5] * 240),
        ("client", ["1"] * 60 + ["shop"] * 240),
    ],
)
def test_pieces_that_differ_in_kind_are_read_alike(column: str, values: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    table().assign(**{column: values}).to_csv(file, index=False)
    for missing in ("error", "mean"):
        layout = Layout(missing=missing)  # type: ignore[arg-type]
        same(parsed(file, layout, 40), parsed(file, layout, 1000))


def test_an_array_is_mapped_only_where_its_bytes_are_in_the_file(tmp_path: Path) -> None:
    x = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    np.savez(tmp_path / "plain.npz", x=x, client=np.arange(8))
    found = mapped_npz(tmp_path / "plain.npz", "x")
    assert found is not None and found.tobytes() == x.tobytes()
    np.savez_compressed(tmp_path / "packed.npz", x=x)
    np.savez(tmp_path / "turned.npz", x=np.asfortranarray(x))
    for name, array in (("packed", "x"), ("turned", "x"), ("plain", "z")):
        assert mapped_npz(tmp_path / f"{name}.npz", array) is None
