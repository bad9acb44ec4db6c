"""Tables and data sets of other libraries are read as a file of the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import unalike
from unalike.data import DataError, Population, from_dataset, load

HOW: dict[str, Any] = {"client_column": "shop", "label_column": "sold", "id_column": "id", "missing": "mean", "seed": 4}
COLUMNS = {"price": None, "pieces": None, "new": None, "town": ["Graz", "Linz", "Wien"], "day": None}


def table() -> pd.DataFrame:
    random, rows = np.random.default_rng(0), 60
    frame = pd.DataFrame({"id": [f"r{i}" for i in range(rows)], "shop": [f"s{i % 6}" for i in range(rows)]})
    frame["price"] = random.normal(50, 10, rows).round(2)
    frame["pieces"] = pd.array([None if i % 7 == 0 else i % 5 for i in range(rows)], dtype="Int64")
    frame["new"] = random.random(rows) < 0.5
    frame["town"] = [None if i % 11 == 3 else one for i, one in enumerate(random.choice(COLUMNS["town"] or [], rows))]
    frame["day"] = pd.date_range("2024-03-01", periods=rows).strftime("%Y-%m-%d")
    frame["sold"] = random.choice(["no", "yes"], rows)
    return frame


def of_pandas(file: Path) -> Any:
    return pd.read_csv(file, parse_dates=["day"]).astype({"pieces": "Int64", "town": "category"})


def of_polars(file: Path) -> Any:
    import polars

    return polars.read_csv(file, try_parse_dates=True).with_columns(polars.col("town").cast(polars.Categorical))


def of_arrow(file: Path) -> Any:
    from pyarrow import csv

    return csv.read_csv(file, convert_options=csv.ConvertOptions(strings_can_be_null=True))


def of_hugging_face(file: Path) -> Any:
    from datasets import Dataset

    return Dataset.from_pandas(pd.read_csv(file), preserve_index=False)


def check_same(one: Population, other: Population) -> None:
    assert one.columns == other.columns == COLUMNS and list(one.columns or {}) == list(COLUMNS)
    torch.testing.assert_close(one.train.x, other.train.x, rtol=0, atol=0, equal_nan=True)
    assert one.train.y is not None and other.train.y is not None and torch.equal(one.train.y, other.train.y)
    assert one.class_names == other.class_names == ["no", "yes"]
    assert list(one.train.names or ()) == list(other.train.names or ()) == [f"s{i}" for i in range(6)]
    assert one.row_ids is not None and other.row_ids is not None and list(one.row_ids) == list(other.row_ids)
    assert torch.equal(one.unseen, other.unseen) and one.train.gaps and other.train.gaps


@pytest.mark.parametrize("read", [of_pandas, of_polars, of_arrow, of_hugging_face])
def test_a_table_in_memory_is_read_as_its_file(read: Any, tmp_path: Path) -> None:
    file = tmp_path / "sales.csv"
    table().to_csv(file, index=False)
    check_same(load(read(file), **HOW), load(file, **HOW))


@pytest.mark.parametrize("read", [of_polars, of_hugging_face])
def test_a_run_takes_tables_of_other_libraries(read: Any, tmp_path: Path) -> None:
    file = tmp_path / "sales.csv"
    table().to_csv(file, index=False)
    how = {**HOW, "rounds": 1, "model": "logistic"}
    ours, theirs = (unalike.run("fedavg", data=data, **how) for data in (pd.read_csv(file), read(file)))
    pd.testing.assert_frame_equal(ours.clients, theirs.clients)


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int | None]]):
    """A data set as people write them: a picture and its class, if it has one."""

    def __init__(self, count: int) -> None:
        self.pixels = torch.randint(256, (count, 3, 8, 6), generator=torch.manual_seed(0)).to(torch.uint8)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, row: int) -> tuple[Tensor, int | None]:
        return self.pixels[row], None if row % 5 == 0 else row % 2


def test_a_pytorch_data_set_of_pictures_some_without_a_class() -> None:
    pictures, owner = Pictures(40), [f"phone {row % 4}" for row in range(40)]
    population = from_dataset(pictures, owner, test=0, unseen=0)
    assert population.kind == "image" and population.input_shape == (3, 8, 6) and population.classes == 2
    assert list(population.train.names or ()) == [f"phone {i}" for i in range(4)]
    rows, labels = population.train.rows(3)
    assert torch.equal(rows, pictures.pixels[3::4]) and rows.dtype == torch.uint8
    assert labels is not None and population.train.known is not None
    assert [int(one) for one in population.train.label_counts()] == [8, 8, 8, 8]
    result = unalike.run("fedavg", data=from_dataset(pictures, owner), rounds=1, model="logistic")
    assert result.round_count == 1


def test_what_is_no_table_is_told() -> None:
    with pytest.raises(DataError, match="data is a dict; expected a name, a path, a pandas table"):
        load({"train": table()})  # type: ignore[arg-type]
