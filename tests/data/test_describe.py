from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unalike.data import describe, from_arrays, load


def test_numbers_by_hand() -> None:
    x = np.zeros((12, 1), dtype=np.float32)
    y = np.array([0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1])
    description = describe(from_arrays(x, y, np.repeat(["a", "b", "c"], 4), unseen=0))
    assert description.header == ["client", "train", "validation", "test", "classes", "entropy", "distance", "shift"]
    assert description.columns["entropy"].tolist() == [0, 0, 1]
    assert description.columns["distance"].tolist() == [0.5, 0.5, 0]
    assert description.columns["classes"].tolist() == [1, 1, 2]
    assert description.rows() == [
        ["a", "3", "0", "1", "1", "0.00", "0.50", "0.00"],
        ["b", "3", "0", "1", "1", "0.00", "0.50", "0.00"],
        ["c", "3", "0", "1", "2", "1.00", "0.00", "0.00"],
    ]
    assert len(description.rows(limit=2)) == 2
    assert description.summary["clients"] == "3 (3 seen, 0 unseen)"
    assert description.summary["rows"] == "9 train, 0 validation, 3 test"


def test_input_shift_tells_rotated_clients_from_random_ones() -> None:
    def typical(partition: str) -> float:
        return float(describe(load("digits", partition=partition, clients=20)).columns["shift"].median())

    same, turned = typical("iid"), typical("rotation")
    # 90 rows each: what chance gives is the root of the mean variance of a pixel, in units of the one common deviation.
    assert same == pytest.approx(0.72 / np.sqrt(1797 / 20), rel=0.15)
    assert turned > 2 * same


def test_input_shift_by_hand_and_what_chance_gives() -> None:
    x = np.array([[0.0], [2.0], [10.0], [12.0]])
    description = describe(from_arrays(x, None, [0, 0, 1, 1], unseen=0, test=0, normalize=False))
    assert description.columns["shift"].tolist() == [5, 5]
    assert "by chance about 3.61" in description.summary["input shift"], "√26 / √2"


def test_clients_without_labels_are_not_counted() -> None:
    y = np.array([0.0, 1, 0, 1, np.nan, np.nan])
    description = describe(from_arrays(np.zeros((6, 1)), y, [0, 0, 1, 1, 2, 2], unseen=0))
    assert description.rows()[2][6] == "–" and description.summary["classes of a client"] == "median 2, from 2 to 2"
    assert description.summary["labeled seen clients"] == "2"


def test_clients_left_out_are_told() -> None:
    description = describe(from_arrays(np.zeros((5, 1)), None, [0, 0, 1, 1, 2], unseen=0))
    assert description.summary["left out"].startswith("1 client with too few rows: ")
    assert "left out" not in describe(load("digits")).summary


def test_targets_of_a_regression_and_labels_that_are_not_there() -> None:
    client = [0, 0, 1, 1, 2, 2]
    targets = np.array([2.5, 7, 3, 4, np.nan, np.nan])
    summary = describe(from_arrays(np.zeros((6, 1)), targets, client, unseen=0)).summary
    assert summary["targets"] == "real numbers from 2.5 to 7", "the client without any does not count as 0"
    assert "labels" not in summary
    summary = describe(from_arrays(np.zeros((6, 1)), None, client, unseen=0)).summary
    assert summary["labels"] == "no labels" and "targets" not in summary


def test_text_columns_of_a_file_for_each_client(tmp_path: Path) -> None:
    (tmp_path / "anna.csv").write_text("size,colour\n1,red\n2,blue\n")
    (tmp_path / "bert.csv").write_text("size,colour\n1,red\n2,green\n")
    (tmp_path / "carl.csv").write_text("size,colour\n1,red\n")
    summary = describe(load(tmp_path, unseen=0)).summary
    features = [one for one in describe(load(tmp_path, unseen=0)).column_reports if one.role == "feature"]
    assert [(one.name, one.content) for one in features] == [
        ("size", "numbers from 1 to 2"),
        ("colour", "text with 3 values: blue, green, red"),
    ]
    assert summary["labels"] == "no labels: name their column (label_column)"
    assert summary["left out"].startswith("1 client with too few rows: ")
