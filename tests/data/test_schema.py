"""Rows read by a schema that is given: its columns, values and classes, and nothing that the rows would say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from unalike.core.schema import Schema
from unalike.data import DataError, from_arrays, load, write_schema
from unalike.data.schema_file import schema_text

SCHEMA = Schema(
    shape=(4,),
    target="class",
    classes=3,
    class_names=("no", "perhaps", "yes"),
    columns={"price": None, "colour": ("red", "blue", "green")},
    shift=torch.tensor([50.0, 0.0, 0.0, 0.0]),
    scale=torch.tensor([0.1, 1.0, 1.0, 1.0]),
)


def sales(**changes: Any) -> pd.DataFrame:
    """Six rows of two clients; 'green' and 'perhaps' do not occur, and columns are in another order."""
    columns = {
        "colour": ["red", "blue", "red", "blue", "red", "red"],
        "price": [40.0, 50.0, 60.0, 50.0, 40.0, 30.0],
        "y": ["yes", "no", "no", "yes", "no", "yes"],
        "client": ["a", "a", "a", "b", "b", "b"],
    }
    return pd.DataFrame({name: value for name, value in {**columns, **changes}.items() if value is not None})


def written(folder: Path, schema: Schema = SCHEMA) -> Path:
    (folder / "public.json").write_text(schema.to_json())
    return folder / "public.json"


def test_a_table_is_read_by_its_schema(tmp_path: Path) -> None:
    sales().to_csv(tmp_path / "sales.csv", index=False)
    for data in (tmp_path / "sales.csv", sales()):
        population = load(data, schema=written(tmp_path), test=0, unseen=0)
        assert population.schema == SCHEMA and population.scaling == "public" and not population.pooled
        x, y = population.train.rows(0)
        assert x.tolist() == [[40, 1, 0, 0], [50, 0, 1, 0], [60, 1, 0, 0]] and y is not None and y.tolist() == [2, 0, 0]
        assert population.train.block(torch.tensor([0])).x[0, :, 0].tolist() == [-1, 0, 1]
    unscaled = load(sales(), schema=replace(SCHEMA, shift=None, scale=None), test=0, unseen=0)
    assert unscaled.scaling == "asked" and not unscaled.pooled, "the schema does not say how inputs are scaled"
    assert load(sales(), schema=SCHEMA, normalize=False, test=0, unseen=0).scaling == "none"


def test_classes_have_the_order_of_the_schema_not_that_of_their_names() -> None:
    schema = replace(SCHEMA, class_names=("yes", "no", "perhaps"))
    population = load(sales(), schema=schema, test=0, unseen=0)
    y = population.train.rows(0)[1]
    assert y is not None and y.tolist() == [0, 1, 1] and population.schema.class_names == schema.class_names


def test_without_a_schema_what_is_read_off_all_rows_is_named() -> None:
    gap = sales(price=[40.0, np.nan, 60.0, 50.0, 40.0, 30.0])
    assert load(gap, missing="mean").pooled == [
        "the names of the classes",
        "the values of the text column 'colour'",
    ]
    assert not load(gap, missing="mean", schema=SCHEMA).pooled
    numbers = sales(colour=None, y=[0, 1, 1, 0, 1, 0])
    assert load(numbers).pooled == ["the number of classes (data.options.classes)"]
    assert not load(numbers, classes=2).pooled and not load(sales(colour=None, y=[0.5, 1, 1, 0, 1, 0])).pooled


def test_classes_that_are_named_are_not_read_off_the_rows(tmp_path: Path) -> None:
    table = sales(colour=None)
    table.to_csv(tmp_path / "sales.csv", index=False)
    for data, classes in ((table, ["yes", "perhaps", "no"]), (tmp_path / "sales.csv", "yes, perhaps,no")):
        population = load(data, classes=classes, test=0, unseen=0)
        assert population.classes == 3 and not population.pooled
        assert list(population.class_names or ()) == ["yes", "perhaps", "no"]
        assert population.train.rows(0)[1].tolist() == [0, 2, 2]  # type: ignore[union-attr]
    numbers = load(sales(colour=None, y=[3, 1, 1, 3, 1, 3]), classes="1,3", test=0, unseen=0)
    assert numbers.train.rows(0)[1].tolist() == [1, 0, 0] and not numbers.pooled  # type: ignore[union-attr]
    with pytest.raises(DataError, match="a label is 'yes', which is none of the classes no, perhaps"):
        load(table, classes=["no", "perhaps"])
    for wrong in (["no", "no"], "no"):
        with pytest.raises(DataError, match="expected a number, or two different names or more"):
            load(table, classes=wrong)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"colour": ["red", "pink"] * 3},
            "the column 'colour' holds 'pink' in data row 2, which was not in the schema",
        ),
        ({"y": ["yes", "never"] * 3}, "a label is 'never', which is none of the classes no, perh"),
        ({"price": None}, "must be those of the schema, price, colour; 'price' is missing"),
        ({"size": [1] * 6}, "'size' was not there"),
        ({"price": ["dear"] * 6}, "the column 'price' should hold numbers, but data row 1 holds 'dear'"),
    ],
)
def test_rows_that_do_not_fit_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says.replace("(", r"\(")):
        load(sales(**changes), schema=SCHEMA)


def test_other_data_does_not_fit_the_schema() -> None:
    x, client = np.zeros((6, 4), dtype=np.float32), np.arange(6) // 3
    plain = Schema(shape=(4,), target="class", classes=3)
    population = from_arrays(x, [0, 1, 1, 0, 1, 0], client, schema=plain, unseen=0)
    assert population.classes == 3 and population.class_names is None, "class 2 does not occur"
    with pytest.raises(DataError, match=r"arrays: labels must be 0 … 2 for classes=3, but there is a label 7"):
        from_arrays(x, [0, 1, 7, 0, 1, 0], client, schema=plain)
    with pytest.raises(DataError, match=r"the schema numbers its classes 0 … 2, but a label is 'a'"):
        from_arrays(x, list("abaaba"), client, schema=plain)
    with pytest.raises(DataError, match=r"its shape is \(3,\), but the schema says \(4,\)"):
        from_arrays(x[:, :3], [0, 1, 1, 0, 1, 0], client, schema=plain, unseen=0)
    with pytest.raises(DataError, match=r"digits does not fit the schema: its kind is image, but the schema says feat"):
        load("digits", schema=plain)


def test_clients_without_labels_keep_the_schema_of_those_with_labels() -> None:
    population = load(sales(y=None), schema=SCHEMA, unseen=0)
    assert population.schema == SCHEMA and not population.train.labeled.any() and not population.test.labeled.any()
    with pytest.raises(DataError, match="there are no labels, but the schema says that a label is a class"):
        load(sales(y=None, client=None), schema=SCHEMA, partition="iid", clients=2)


def test_the_own_schema_of_data_fits_it(tmp_path: Path) -> None:
    digits = load("digits", clients=5)
    file = written(tmp_path, digits.schema)
    again = load("digits", clients=5, schema=file)
    assert again.schema == digits.schema and again.scaling == "public"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a schema"),
        ('{"shape": [4], "colour": 3}', "not a schema: .*colour"),
        (None, r"its shift is of shape \[3\], which does not fit rows of \[4\]"),
    ],
)
def test_a_file_that_is_no_schema_is_told(text: str | None, says: str, tmp_path: Path) -> None:
    file = written(tmp_path)
    values = json.loads(file.read_text())
    values["shift"] = {"shape": [3], "values": [0, 0, 0]}
    file.write_text(json.dumps(values) if text is None else text)
    with pytest.raises(DataError, match=says):
        load(sales(), schema=file)
    with pytest.raises(DataError, match=r"the schema .*missing\.json cannot be read: No such file"):
        load(sales(), schema=tmp_path / "missing.json")


def test_centers_and_deviations_are_written_by_column_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "shops.json"
    gaps = sales(price=[40.0, np.nan, 60.0, 50.0, 40.0, 30.0])
    population = load(gaps, missing="mean", test=0, unseen=0)
    write_schema(population, file)
    with pytest.raises(FileExistsError):
        write_schema(population, file)
    values = json.loads(file.read_text())
    assert values["center"] == {"price": 44.0} and values["deviation"] == {"price": 10.2}
    assert load(gaps, missing="mean", schema=file, test=0, unseen=0).scaling == "asked", "nobody said that it is public"
    assert "remove the note" in values.pop("note")
    values["center"]["price"], values["deviation"]["price"] = 50.0, 20.0
    file.write_text(json.dumps(values))
    public = load(gaps, missing="mean", schema=file, test=0, unseen=0)
    assert public.scaling == "public" and not public.pooled
    x = public.train.block(torch.tensor([0])).x[0]
    assert x[:, 2].tolist() == [-0.5, 0.0, 0.5], "what is missing counts as the center"
    assert x[:, :2].tolist() == [[0, 1], [1, 0], [0, 1]], "words are not scaled"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"center": {"prize": 1}}, "center must have a number for each of price"),
        ({"deviation": {"price": 0}}, "the deviation of 'price' is 0; expected a finite number above 0"),
        ({"center": {"price": "low"}}, "the center of 'price' is 'low'"),
        ({"centre": {}}, "expected JSON as `unalike data DATASET --schema FILE` writes it"),
    ],
)
def test_centers_that_cannot_be_meant_are_explained(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = tmp_path / "shops.json"
    file.write_text(json.dumps({**json.loads(schema_text(load(sales(), test=0, unseen=0))), "note": None, **changes}))
    with pytest.raises(DataError, match=says):
        load(sales(), schema=file)
