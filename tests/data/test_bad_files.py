from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.test_files import CLIENT, X, Y, picture, write
from unalike.commands.console import with_flags
from unalike.data import DataError, from_arrays, load


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"client": CLIENT}, "holds the arrays client; expected x and, where there are some, client and y"),
        ({"x": X, "client": CLIENT, "label": Y}, "rename or remove 'label'"),
        (
            {"x": X},
            "nothing says which client a row belongs to; give client ids .*client_column.* partition='iid'",
        ),
        ({"x": X, "client": CLIENT[:5]}, r"`client` must hold one value for each of the 12 rows of x, .* \(5,\)"),
        ({"x": X, "client": CLIENT, "y": np.zeros((12, 3))}, r"`y` must hold one value .* shape is \(12, 3\)"),
        ({"x": X, "client": CLIENT + 0.5}, "client ids must be whole numbers or strings, but one is 0.5"),
        (
            {"x": X, "client": np.where(CLIENT == 1, np.nan, CLIENT)},
            "4 rows have no client id, the first is data row 5",
        ),
        ({"x": X, "client": np.where(CLIENT == 1, "", "a")}, "4 rows have no client id"),
        (
            {"x": np.where(X == 5, np.nan, X), "client": CLIENT},
            r"missing \(NaN\), .* e.g. at data row 3, position \(1,\)",
        ),
        ({"x": np.where(X == 5, np.inf, X), "client": CLIENT}, "infinite or too large for float32"),
        ({"x": np.where(X == 5, 1e300, X), "client": CLIENT}, "too large for float32"),
        ({"x": X.astype(str), "client": CLIENT}, "x must be an array of numbers, but its type is <U"),
        ({"x": np.zeros((0, 2)), "client": np.zeros(0)}, r"one row for each sample, but its shape is \(0, 2\)"),
        ({"x": np.zeros((12, 0)), "client": CLIENT}, "a sample of x holds no numbers"),
        ({"x": np.array(3.0), "client": CLIENT}, "one row for each sample"),
        (
            {"x": X, "client": CLIENT, "y": np.zeros(12, dtype=int)},
            "all labels are '0'; there is nothing to tell apart",
        ),
        ({"x": X, "client": CLIENT, "y": np.full(12, np.nan)}, "every label is missing; leave y out"),
        ({"x": X, "client": CLIENT, "y": np.where(X[:, 0] == 4, np.inf, Y)}, "a label is infinite"),
    ],
)
def test_bad_arrays_are_explained(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load(npz(tmp_path / "my.npz", **arrays))


def test_python_objects_are_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "my.npz", x=np.array([{"a": 1}, None], dtype=object), client=[0, 1])
    with pytest.raises(
        DataError, match=r"the array 'x' holds Python objects, which are never loaded; .*x.astype\(str\)"
    ):
        load(tmp_path / "my.npz")


def test_too_many_whole_numbers_must_be_explained() -> None:
    x = np.zeros((1500, 1))
    with pytest.raises(DataError, match=r"1500 different whole numbers as labels: say task='regression'"):
        from_arrays(x, np.arange(1500), np.arange(1500) % 3)
    assert from_arrays(x, np.arange(1500), np.arange(1500) % 3, task="classification").classes == 1500


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (Y, {"classes": 1}, "labels must be 0 … 0 for classes=1, but there is a label 1"),
        (Y - 1, {"classes": 2}, "there is a label -1"),
        (["a", "b", "c"] * 4, {"classes": 2}, "classes=2, but there are 3 different labels"),
        (["a", "b", "c"] * 4, {"task": "regression"}, "a regression needs numbers, but a label is 'a'"),
        (Y + 0.5, {"task": "classification"}, "classes must be whole numbers or strings, but a label is 0.5"),
        (Y, {"task": "ranking"}, "task must be 'classification' or 'regression', got 'ranking'"),
        (Y, {"kind": "sound"}, "kind must be one of image, features, tokens, got 'sound'"),
        (Y, {"kind": "image"}, r"images must be \[rows, height, width\].* the shape of x is \(12, 2\)"),
        (Y, {"kind": "tokens"}, "tokens must be whole numbers, but the type of x is float64"),
        (np.where(Y, np.nan, 1.0), {"partial_labels": "mean"}, "must be 'keep', 'drop' or 'error', got 'mean'"),
        (
            np.where(X[:, 0] < 3, np.nan, Y),
            {"partial_labels": "error"},
            "client 0 lacks 2 of 4 labels, and partial_labels='error' asks for all or none: .*partial_labels='drop'",
        ),
        (
            np.where(X[:, 0] < 3, np.nan, Y),
            {"partition": "dirichlet:1"},
            "some rows have no label, so rows cannot be dealt out by class; use partition 'iid'",
        ),
    ],
)
def test_labels_that_do_not_fit(labels: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(X, labels, CLIENT, **options)


def test_mixed_client_ids() -> None:
    with pytest.raises(DataError, match=r"client ids must all be of one type, but there are int and str"):
        from_arrays(X, Y, np.array([0, "a"] * 6, dtype=object))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "client,a,b\n0,1,\n0,2,3\n",
            {},
            "column 'b' lacks 1 of 2 values, .*data row 1; .* say missing='drop'",
        ),
        (
            "client,a\n0,inf\n0,2\n",
            {},
            "column 'a' holds a number that is infinite or too large .*, the first in data row 1",
        ),
        ("client,a\n0,1\n0,x\n1,3\n", {}, "column 'a' should hold numbers, but data row 2 holds 'x'"),
        ("client,a\n,1\n0,2\n", {}, "1 row has no client id, the first is data row 1"),
        ("who,a\n0,1\n", {}, "nothing says which client a row belongs to"),
        ("who,a\n0,1\n", {"client_column": "shop"}, r"no column 'shop' \(client_column\); the columns are who, a"),
        ("client,a\n0,1\n", {"label_column": "z"}, r"no column 'z' \(label_column\); the columns are client, a"),
        ("client,a,label\n0,1,1\n", {}, "the column 'label' looks like labels; say label_column='label'"),
        (
            "client,y\n0,1\n0,2\n",
            {},
            "there is no feature column beside client, y, .*; add one, or say which column is the client",
        ),
        ("client,a,a\n0,1,2\n", {}, "the column 'a' occurs more than once"),
        (",client,a\n0,0,1\n", {}, "a column has no name .* a saved row number"),
        ("client;a\n0;1\n", {}, "only one column was found, 'client;a'; .* delimiter=';'"),
        ("client,a\n", {}, "the table has no rows"),
        ("", {}, "cannot read .*my.csv: No columns to parse"),
        ("client,a\n0,1\n0,1\n0,1,2,3,4,5\n", {}, "cannot read .*my.csv: .* line 4, saw 6"),
        (
            "client,a,b\n0,,1\n0,1,\n",
            {"missing": "drop"},
            "every row lacks a feature, so missing='drop' leaves nothing",
        ),
        (
            'client,a\n0,"2,5"\n0,"3,25"\n1,7\n',
            {},
            "column 'a' holds numbers with a comma, such as '2,5'; say decimal=','",
        ),
        ("client,a\n0,\n0,\n", {"missing": "mean"}, "the column 'a' is empty; remove it"),
        ("client,a\n0,1\n", {"missing": "guess"}, "missing must be 'error', 'drop', 'mean' or 'client', got 'guess'"),
        ("client,a\n0,1,2\n1,3,4\n", {}, "line 2 has 3 cells, but the header names 2 columns, .* or remove the cell"),
        ("client,a,b\n0,1,2,3\n", {}, "line 2 has 4 cells"),
        (
            "client,a\n0,1\n0,x\n0,123456789012345678901\n1,4\n",
            {},
            "should hold numbers, but data row 2 holds 'x'",
        ),
    ],
)
def test_bad_tables_are_explained(text: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load(write(tmp_path / "my.csv", text), **options)


def test_text_with_too_many_values(tmp_path: Path) -> None:
    lines = "".join(f"0,name{i}\n" for i in range(60))
    with pytest.raises(
        DataError, match=r"column 'a' holds text with more than 50 different values, e.g. 'name0'; at most 50"
    ):
        load(write(tmp_path / "my.csv", "client,a\n" + lines))


def test_a_label_column_called_label_can_be_a_feature(tmp_path: Path) -> None:
    path = write(tmp_path / "my.csv", "client,a,label\n0,1,1\n0,2,5\n")
    assert load(path, label_column="").input_shape == (2,)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected a file ending in .csv, .*, .npz, or a folder"):
        load(write(tmp_path / "my.xlsx", "x"))
    with pytest.raises(DataError, match=r"it is truncated or not an NPZ archive; save it again with numpy.savez$"):
        np.save(tmp_path / "a.npy", X)
        load((tmp_path / "a.npy").rename(tmp_path / "a.npz"))
    with pytest.raises(DataError, match=r"cannot read .*broken.npz"):
        load(write(tmp_path / "broken.npz", "PK\x03\x04 not really"))
    with pytest.raises(DataError, match=r"it is truncated or not an NPZ archive; save it again with numpy.savez$"):
        load(write(tmp_path / "garbage.npz", "0123456789" * 50))
    with pytest.raises(DataError, match=r"cannot read .*broken.parquet"):
        load(write(tmp_path / "broken.parquet", "PAR1"))
    with pytest.raises(DataError, match=r"cannot read .*latin.csv: it is not UTF-8 text .*; save it as UTF-8"):
        (tmp_path / "latin.csv").write_bytes(b"client,a\n0,\xe9\n")
        load(tmp_path / "latin.csv")


def test_bad_folders_are_explained(tmp_path: Path) -> None:
    def folder(name: str, **files: str) -> Path:
        for file, text in files.items():
            write(tmp_path / name / file.replace("_", "."), text)
        (tmp_path / name).mkdir(exist_ok=True)
        return tmp_path / name

    with pytest.raises(DataError, match=r"the folder .* is empty"):
        load(folder("nothing"))
    with pytest.raises(DataError, match=r"notes.doc is not a data file"):
        load(folder("other", a_csv="x\n1\n", notes_doc="hi"))
    with pytest.raises(DataError, match=r"the client 'a' has more than one file"):
        load(folder("twice", a_csv="x\n1\n", a_tsv="x\n1\n"))
    with pytest.raises(DataError, match=r"the column 'z' is in b.csv but not in a.csv"):
        load(folder("columns", a_csv="x\n1\n", b_csv="x,z\n1,2\n"))
    with pytest.raises(DataError, match=r"the table has no rows"):
        load(folder("empty", a_csv="x\n", b_csv="x\n"))
    with pytest.raises(DataError, match=r"there is no column 'who' \(client_column\)"):
        load(folder("parts", a_csv="x\n1\n", b_csv="x\n1\n"), client_column="who")
    mixed = folder("mixed", a_csv="x\n1\n")
    np.savez(mixed / "b.npz", x=X)
    with pytest.raises(DataError, match=r"some clients have NPZ files and some have tables"):
        load(mixed)
    (folder("both", a_csv="x\n1\n") / "sub").mkdir()
    with pytest.raises(DataError, match=r"holds both files and folders"):
        load(tmp_path / "both")
    shapes = folder("shapes")
    np.savez(shapes / "a.npz", x=X)
    np.savez(shapes / "b.npz", x=X[:, :1])
    with pytest.raises(
        DataError, match=r"b.npz: its samples have shape \(1,\) .* those of client 'a' have shape \(2,\)"
    ):
        load(shapes)
    np.savez(shapes / "b.npz", x=X, y=Y[:3])
    with pytest.raises(DataError, match=r"b.npz: 12 rows of x but 3 labels"):
        load(shapes)


def test_bad_images_are_explained(tmp_path: Path) -> None:
    picture(tmp_path / "one" / "anna" / "cat" / "1.png", 1)
    picture(tmp_path / "one" / "anna" / "dog" / "2.png", 1, (5, 5))
    with pytest.raises(DataError, match=r"2.png is 5×5 pixels, .*1.png is 3×4; give a common size, e.g. size=3"):
        load(tmp_path / "one")
    with pytest.raises(DataError, match=r"size must be one number or height and width in pixels, got 0"):
        load(tmp_path / "one", size=0)
    picture(tmp_path / "two" / "anna" / "cat" / "1.png", 1)
    picture(tmp_path / "two" / "anna" / "2.png", 1)
    with pytest.raises(DataError, match=r"client anna lacks 1 of 2 labels"):
        load(tmp_path / "two", partial_labels="error")
    write(tmp_path / "three" / "anna" / "cat" / "1.png", "not an image")
    with pytest.raises(DataError, match=r"cannot read the image .*1.png"):
        load(tmp_path / "three")
    write(tmp_path / "four" / "anna" / "cat" / "notes.txt", "hi")
    with pytest.raises(DataError, match=r"notes.txt is not an image; expected client/class/image"):
        load(tmp_path / "four")
    (tmp_path / "five" / "anna").mkdir(parents=True)
    with pytest.raises(DataError, match=r"no image was found"):
        load(tmp_path / "five")
    Image.fromarray(np.zeros((4, 4), dtype=np.uint16)).save(_made(tmp_path / "six" / "anna" / "1.png"))
    with pytest.raises(DataError, match=r"has more than 8 bits a pixel"):
        load(tmp_path / "six")
    whole = tmp_path / "seven" / "anna" / "1.png"
    _made(whole)
    Image.fromarray(np.random.default_rng(0).integers(256, size=(64, 64), dtype=np.uint8)).save(whole)
    whole.write_bytes(whole.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"cannot read the image .*1.png"):
        load(tmp_path / "seven")


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    return path


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(tmp_path / "all" / "anna" / "cat" / "1.png", 1)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"reading image files needs Pillow: pip install 'unalike\[data\]'"):
        load(tmp_path / "all")


@pytest.mark.parametrize(
    ("rows", "options", "shown"),
    [
        ("a,b\n0,1\n", {}, "client_column (--client-column)) .* partition='iid' (--partition)"),
        ("client,a,b\n0,,1\n1,2,2\n", {}, "(--missing)"),
        ("client,a,label\n0,1,1\n", {}, "(--label-column)"),
        ("client;a\n0;1\n", {}, "(--delimiter)"),
        ("client,a,y\n" + "0,1,\n0,1,1\n" * 3, {"partial_labels": "error"}, "(--set data.options.partial_labels=…)"),
    ],
)
def test_the_command_line_adds_the_flags(rows: str, options: dict[str, Any], shown: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(write(tmp_path / "my.csv", rows), **options)
    assert "--" not in str(caught.value)
    for part in shown.split(" .* "):
        assert part in with_flags(caught.value)


@pytest.mark.parametrize("more", ["0,1,2,0\n0,2,2,1\n", "0,1,0\n0,1,2,1\n", "0,1,0\n" * 70_000 + "0,1,2,0\n"])
def test_a_row_with_more_cells_than_the_header_is_refused_by_its_line(more: str, tmp_path: Path) -> None:
    line = 1 + next(number for number, row in enumerate(more.splitlines(), 1) if row.count(",") == 3)
    for name, sign in (("my.csv", ","), ("my.tsv", "\t")):
        file = write(tmp_path / name, ("client,a,y\n" + more).replace(",", sign))
        with pytest.raises(DataError, match=rf"line {line}( has 4 cells, but the header names 3|, saw 4)"):
            load(file)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            "0,1,1\n0,2,5\n1,3,18446744073709551615\n",
            {},
            r"a label is 1.84467e\+19 in size, .* beyond 64 bits are no classes",
        ),
        ("0,1,1\n0,2,x\n0,3,123456789012345678901\n", {"task": "regression"}, "needs numbers, but a label is 'x'"),
        (f"0,1,1\n0,2,0\n1,{'9' * 60},1\n", {}, r"column 'a' holds a number .* too large .*, the first in data row 3"),
        ("0,1,1\n0,123456789012345678901,0\n1,x,0\n1,5,1\n", {}, "'a' should hold numbers, but data row 3 holds 'x'"),
    ],
)
def test_a_whole_number_beyond_64_bits_is_told_where_it_is(
    rows: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        load(write(tmp_path / "my.csv", "client,a,y\n" + rows), **options)


def test_whole_numbers_beyond_64_bits_are_numbers(tmp_path: Path) -> None:
    rows = "".join(f"{client},{10**20 + client},{-(10**20)}\n" for client in (0, 0, 18446744073709551615, 2))
    population = load(write(tmp_path / "my.csv", "client,a,y\n" + rows), task="regression", test=0, unseen=0)
    assert population.train.y is not None and population.train.y.tolist() == pytest.approx([-1e20] * 4)
    assert list(population.train.names or ()) == ["0", "18446744073709551615", "2"]
