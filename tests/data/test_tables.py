"""Tables as people have them: which columns are learned from, how cells are written, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from tests.data.test_files import write
from unalike.data import DataError, Population, load

HEART = """patient; hospital; age; chest pain; sugar; weight; phone; sick
p1; Basel; 51; typical ; 1; 70,5; 0041; yes
p2; Basel; ?; atypical; 2; 81,25; 0042; no
p3; Graz; 63; typical; 1; -9; 0043; yes\x20
p4; Graz; 47;  atypical; 3; 90,0; 0044; no
p5; Graz; 58; typical; 1; 66,5; 0045; yes
"""
HOW = {
    "client_column": "hospital",
    "label_column": "sick",
    "id_column": "patient",
    "delimiter": ";",
    "decimal": ",",
    "na_values": "?,-9",
    "drop": "phone",
    "missing": "mean",
    "categorical": ["sugar"],
    "test": 0,
    "unseen": 0,
}


def heart(path: Path, **changes: object) -> Population:
    return load(write(path / "heart.csv", HEART), **{**HOW, **changes})  # type: ignore[arg-type]


def test_a_european_table_with_gaps_ids_and_codes(tmp_path: Path) -> None:
    population = heart(tmp_path)
    assert population.columns == {
        "age": None,
        "chest pain": ["atypical", "typical"],
        "sugar": ["1", "2", "3"],
        "weight": None,
    }
    rows, labels = population.train.rows(1)
    assert rows[0, 0] == 63 and rows[0, 1:6].tolist() == [0, 1, 1, 0, 0] and rows[0, 6].isnan()
    assert population.train.rows(0)[0][0].tolist() == [51, 0, 1, 1, 0, 0, 70.5]
    assert population.class_names == ["no", "yes"] and labels is not None and labels.tolist() == [1, 0, 1]
    assert population.row_ids is not None and population.row_ids.tolist() == ["p1", "p2", "p3", "p4", "p5"]
    roles = {one.name: one.role for one in population.column_reports}
    assert roles["patient"] == "id" and roles["phone"] == "left out" and roles["age"] == "feature"
    assert {one.name: one.missing for one in population.column_reports}["weight"] == 1


def test_features_can_be_chosen_and_a_gap_can_have_an_indicator(tmp_path: Path) -> None:
    population = heart(tmp_path, features="age,weight", indicator=True)
    assert list(population.columns or {}) == ["age", "weight", "age is missing", "weight is missing"]
    assert population.train.x[:, 2:].tolist() == [[0, 0], [1, 0], [0, 1], [0, 0], [0, 0]]
    again = heart(tmp_path, features=None, indicator=True, schema=population.schema, drop="phone,sugar,chest pain")
    assert torch.equal(again.train.x.nan_to_num(-1), population.train.x.nan_to_num(-1)), "also by the schema"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"drop": "phones"}, r"no column 'phones' \(drop\); the columns are patient, hospital, age"),
        ({"features": "age,wait"}, r"no column 'wait' \(features\)"),
        ({"na_values": "-9"}, r"'age' should hold numbers, but data row 2 holds '\?'; .*na_values"),
        ({"decimal": ";"}, r"decimal must be '\.' or ','"),
        ({"droop": "phone"}, r"a file has no option 'droop'; did you mean 'drop'\?"),
        ({"colour": 1}, r"a file has no option 'colour'; there are: client_column, .*na_values, .*task"),
        ({"missing": "error"}, r"'age' lacks 1 of 5 values, the first in data row 2"),
    ],
)
def test_what_cannot_be_meant_is_explained(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says):
        heart(tmp_path, **changes)


def test_a_column_that_looks_like_an_id_is_told(tmp_path: Path) -> None:
    frame = pd.DataFrame({"client": [0, 1] * 10, "record": range(100, 120), "order_id": [7 * i for i in range(20)]})
    frame["price"] = [i % 7 for i in range(20)]
    frame.to_csv(tmp_path / "sales.csv", index=False)
    notes = load(tmp_path / "sales.csv").notes
    assert len(notes) == 2 and "'record'" in notes[0] and "id_column='record'" in notes[0] and "'order_id'" in notes[1]
    assert not load(tmp_path / "sales.csv", drop=["record"], id_column="order_id").notes


def test_the_tables_of_a_folder_are_parts_of_one_with_a_client_column(tmp_path: Path) -> None:
    first, second = HEART.splitlines()[:3], [HEART.splitlines()[0], *HEART.splitlines()[3:]]
    for name, lines in (("a", first), ("b", second)):
        write(tmp_path / "parts" / f"{name}.csv", "\n".join(lines) + "\n")
    parts = load(tmp_path / "parts", **HOW)  # type: ignore[arg-type]
    assert torch.equal(parts.train.x.nan_to_num(-1), heart(tmp_path).train.x.nan_to_num(-1))
    with pytest.raises(DataError, match=r"'age' should hold numbers, but data row 1 of b\.csv holds 'old'"):
        write(tmp_path / "parts" / "b.csv", "\n".join(second).replace("63", "old") + "\n")
        load(tmp_path / "parts", **HOW)  # type: ignore[arg-type]


def test_a_table_of_another_library_is_read_by_to_pandas() -> None:
    class Table:
        def to_pandas(self) -> pd.DataFrame:
            return pd.DataFrame({"client": [0, 0, 1, 1], "a": [1.0, 2.0, 3.0, 4.0]})

    assert load(Table(), test=0, unseen=0).train.x.flatten().tolist() == [1, 2, 3, 4]  # type: ignore[arg-type]
