from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from unalike.data import DataError, Population, from_arrays, load

X = np.arange(24, dtype=np.float64).reshape(12, 2)
CLIENT = np.repeat([0, 1, 2], 4)
Y = np.tile([0, 1], 6)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def table(path: Path, **columns: Any) -> Path:
    frame = pd.DataFrame({"client": CLIENT, "a": X[:, 0], "b": X[:, 1], **columns})
    frame.to_csv(path, index=False)
    return path


def raw(population: Population) -> list[list[float]]:
    """Every client's rows together, sorted."""
    return [sorted(population.train.rows(i)[0].flatten().tolist()) for i in range(len(population))]


def test_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "my.npz", x=X, y=Y, client=CLIENT)
    population = load(tmp_path / "my.npz", unseen=1)
    assert len(population) == 3 and population.input_shape == (2,) and population.classes == 2
    assert population.name == "my.npz" and population.kind == "features" and population.train.x.dtype == torch.float32
    np.savez(tmp_path / "bare.npz", x=X, client=CLIENT)
    assert load(str(tmp_path / "bare.npz")).train.y is None


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".tsv", ".parquet"])
def test_tables(ending: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"b": X[:, 1], "shop": np.repeat(["x", "007", "z"], 4), "a": X[:, 0], "sold": Y == 1})
    path = tmp_path / f"my{ending}"
    if ending == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if ending == ".tsv" else ",")
    population = load(path, client_column="shop", label_column="sold", test=0, unseen=0)
    assert [population.train.name(i) for i in range(3)] == ["007", "x", "z"], "ids are text: 007 is not 7"
    assert population.classes == 2 and list(population.class_names or []) == ["False", "True"]
    assert population.train.rows(1)[0].tolist() == X[:4, ::-1].tolist(), "features in the order of the columns"


def test_client_and_label_columns_have_default_names(tmp_path: Path) -> None:
    population = load(table(tmp_path / "my.csv", y=np.where(Y, "yes", "no")), test=0, unseen=0)
    assert population.classes == 2 and list(population.class_names or []) == ["no", "yes"]
    assert population.train.y is not None and population.train.y.tolist() == Y.tolist()


def test_whole_number_ids_are_sorted_as_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "my.csv", "client,a\n10,1\n9,2\n10,3\n9,4\n")
    population = load(path, test=0, unseen=0)
    assert [population.train.name(i) for i in range(2)] == ["9", "10"]
    assert raw(population) == [[2, 4], [1, 3]], "rows of a client need not be neighbours"


def test_text_and_truth_columns_become_features(tmp_path: Path) -> None:
    path = table(tmp_path / "my.csv", colour=["red", "blue", "red"] * 4, new=[True, False] * 6)
    population = load(path, test=0, unseen=0)
    assert population.input_shape == (5,)
    assert population.train.rows(0)[0][:2].tolist() == [[0, 1, 0, 1, 1], [2, 3, 1, 0, 0]], "blue, red in sorted order"


def test_features_are_standardised_or_not(tmp_path: Path) -> None:
    path = table(tmp_path / "my.csv")
    assert load(path, unseen=0).scaling == "asked" and load(path, unseen=0, normalize=False).scaling == "none"


def test_missing_features_on_request(tmp_path: Path) -> None:
    values = X[:, 0].copy()
    values[[1, 5]] = np.nan
    path = table(tmp_path / "my.csv", c=values)
    dropped = load(path, missing="drop", test=0, unseen=0)
    assert dropped.sizes.tolist() == [3, 3, 4]
    filled = load(path, missing="client", test=0, unseen=0)
    assert float(filled.train.rows(0)[0][1, 2]) == pytest.approx(np.nanmean(values[:4]))


def test_whole_numbers_as_labels_are_told_and_task_decides(tmp_path: Path) -> None:
    path = table(tmp_path / "my.csv", y=[10, 20, 35, 11, 12, 13, 21, 22, 23, 31, 32, 33])
    (note,) = load(path).notes
    assert "12 different whole numbers from 10 to 35 and are read as 12 classes" in note and "task='regression'" in note
    decided = load(path, task="classification")
    assert decided.classes == 12 and not decided.notes
    quantities = load(path, task="regression")
    assert quantities.classes is None and not quantities.notes
    assert not load(table(tmp_path / "my.csv", y=Y)).notes, "0 and 1 are classes"


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_dates_and_times_are_numbers(ending: str, tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"client": [0, 0, 0], "at": [pd.Timestamp(day) for day in ("2000-01-01", "2000-01-02 12:00", "1999-12-31")]}
    )
    path = tmp_path / f"my.{ending}"
    if ending == "csv":
        frame["hour"] = ["06:30", "0:00", "23:45:36"]
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    rows = load(path, test=0, unseen=0).train.x
    assert rows[:, 0].tolist() == [0, 1.5, -1], "days since 2000"
    assert ending == "parquet" or rows[:, 1].tolist() == pytest.approx([6.5, 0, 23.76])
    with pytest.raises(DataError, match=r"'at' should hold numbers, but data row 2 holds '2000-02-31'"):
        load(write(tmp_path / "bad.csv", "client,at\n0,2000-02-01\n0,2000-02-31\n0,2000-03-01\n"))


def test_whole_numbers_beyond_64_bits_are_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "my.csv", "client,a\n0,1\n0,123456789012345678901\n1,4\n")
    assert load(path, test=0, unseen=0).train.x.flatten().tolist() == pytest.approx([1, 123456789012345678901, 4])


@pytest.mark.parametrize(
    ("labels", "classes", "names", "expected"),
    [
        ([0, 1, 2] * 4, 3, None, [0, 1, 2] * 4),
        ([3, 7, 3] * 4, 2, ["3", "7"], [0, 1, 0] * 4),
        ([-1, 1, 1] * 4, 2, ["-1", "1"], [0, 1, 1] * 4),
        ([1.0, 0.0, 1.0] * 4, 2, None, [1, 0, 1] * 4),
        (["b", "a", "b"] * 4, 2, ["a", "b"], [1, 0, 1] * 4),
        ([True, False, True] * 4, 2, ["False", "True"], [1, 0, 1] * 4),
        ([0.5, 1.0, 2.0] * 4, None, None, [0.5, 1.0, 2.0] * 4),
    ],
)
def test_labels(labels: list[Any], classes: int | None, names: list[str] | None, expected: list[float]) -> None:
    population = from_arrays(X, labels, CLIENT, test=0, unseen=0)
    assert population.classes == classes and population.class_names == names
    assert population.train.y is not None and population.train.y.tolist() == expected
    assert population.train.y.dtype == (torch.float32 if classes is None else torch.int64)


def test_task_and_classes_override_the_guess() -> None:
    quantities = from_arrays(X, np.arange(12), CLIENT, task="regression")
    assert quantities.classes is None and quantities.train.y is not None and quantities.train.y.dtype == torch.float32
    assert from_arrays(X, Y, CLIENT, classes=10).classes == 10, "classes that do not occur yet"


def test_a_client_may_have_no_labels(tmp_path: Path) -> None:
    labels = np.where(CLIENT == 1, "", np.where(Y, "yes", "no"))
    population = load(table(tmp_path / "my.csv", y=labels), unseen=0)
    assert population.labeled.tolist() == [True, False, True] and population.classes == 2
    numbers = load(table(tmp_path / "n.csv", y=np.where(CLIENT == 1, np.nan, Y)), unseen=0)
    assert numbers.labeled.tolist() == [True, False, True] and numbers.classes == 2


def test_rows_without_a_label_can_be_dropped() -> None:
    labels = Y.astype(float)
    labels[[0, 5]] = np.nan
    population = from_arrays(X, labels, CLIENT, partial_labels="drop", test=0, unseen=0)
    assert population.sizes.tolist() == [3, 3, 4] and population.labeled.all()


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ((12, 5, 5), "image", (1, 5, 5)),
        ((12, 5, 6, 3), "image", (3, 5, 6)),
        ((12, 3, 5, 6), "image", (3, 5, 6)),
        ((12, 7), "features", (7,)),
        ((12,), "features", (1,)),
    ],
)
def test_shapes_tell_images(shape: tuple[int, ...], kind: str, expected: tuple[int, ...]) -> None:
    population = from_arrays(np.ones(shape, dtype=np.uint8), Y, CLIENT)
    assert population.kind == kind and population.input_shape == expected and population.train.x.dtype == torch.uint8


def test_tokens_stay_whole_numbers() -> None:
    population = from_arrays(np.arange(36).reshape(12, 3), Y, CLIENT, kind="tokens")
    assert population.train.x.dtype == torch.int64 and population.train.shift is None


def test_torch_tensors_and_lists() -> None:
    tensors = from_arrays(torch.tensor(X), torch.tensor(Y), torch.tensor(CLIENT))
    lists = from_arrays(X.tolist(), Y.tolist(), CLIENT.tolist())
    assert torch.equal(tensors.train.x, lists.train.x)


@pytest.mark.parametrize("ending", ["csv", "npz"])
def test_one_file_for_each_client(ending: str, tmp_path: Path) -> None:
    for number, name in enumerate(["anna", "ben", "cleo"]):
        x, y = X[number == CLIENT], Y[number == CLIENT]
        if ending == "npz":
            np.savez(tmp_path / f"{name}.npz", x=x, **({} if name == "ben" else {"y": y}))
        else:
            frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], **({} if name == "ben" else {"y": y})})
            frame.to_csv(tmp_path / f"{name}.csv", index=False)
    if ending == "npz":
        np.savez(tmp_path / "empty.npz", x=np.zeros((0, 2)))
    else:
        write(tmp_path / "empty.csv", "a,b,y\n")
    write(tmp_path / ".hidden", "not data")
    population = load(tmp_path, unseen=0, test=0)
    assert [population.train.name(i) for i in range(3)] == ["anna", "ben", "cleo"]
    assert population.labeled.tolist() == [True, False, True] and population.dropped == ["empty"]
    assert raw(population)[2] == sorted(X[8:].flatten().tolist())


def picture(path: Path, value: int, size: tuple[int, int] = (4, 3), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(path)


def test_image_folders(tmp_path: Path) -> None:
    for client in ("anna", "ben"):
        for number, kind in enumerate(["cat", "dog"]):
            picture(tmp_path / client / kind / "1.png", 10 + number)
            picture(tmp_path / client / kind / "2.png", 20 + number)
    picture(tmp_path / "cleo" / "1.png", 99)
    picture(tmp_path / "cleo" / "2.png", 99)
    (tmp_path / "dora").mkdir()
    population = load(tmp_path, test=0, unseen=0)
    assert (
        population.input_shape == (1, 3, 4) and population.kind == "image" and population.train.x.dtype == torch.uint8
    )
    assert list(population.class_names or []) == ["cat", "dog"] and population.dropped == ["dora"]
    assert population.labeled.tolist() == [True, True, False]
    assert population.train.rows(0)[0][:, 0, 0, 0].tolist() == [10, 20, 11, 21]
    picture(tmp_path / "ben" / "dog" / "3.png", 200, (8, 6), "RGB")
    assert load(tmp_path, size=2, unseen=0).input_shape == (3, 2, 2), "colours make all images colour images"
