"""Loaders of data that is not shipped, on small files of the real formats, made here byte by byte."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from unalike.commands.main import app
from unalike.data import DataError, load
from unalike.data.sources.catalog import CATALOG, open_source
from unalike.data.sources.folder import File, download


def archive(path: Path, **files: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as made:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return " ".join(result.output.replace("│", " ").split())


# CIFAR-100


def cifar100(folder: Path, rows: int = 40) -> np.ndarray:
    rng = np.random.default_rng(0)
    records = rng.integers(256, size=(rows + 10, 2 + 3072), dtype=np.uint8)
    records[:, 0], records[:, 1] = rng.integers(20, size=len(records)), rng.integers(100, size=len(records))
    names = {"fine": 100, "coarse": 20}
    files = {
        "cifar-100-binary/coarse_label_names.txt": "".join(f"coarse_{i}\n" for i in range(20)).encode(),
        "cifar-100-binary/test.bin": records[rows:].tobytes(),
        "cifar-100-binary/fine_label_names.txt": "".join(f"fine_{i}\n" for i in range(names["fine"])).encode(),
        "cifar-100-binary/train.bin": records[:rows].tobytes(),
    }
    archive(folder / "cifar-100" / "cifar-100-binary.tar.gz", **files)
    return records


def test_cifar_100_by_fine_and_by_coarse_labels(empty_folder: Path) -> None:
    records = cifar100(empty_folder)
    for labels, column, classes in (("fine", 1, 100), ("coarse", 0, 20)):
        source = open_source(f"cifar-100:{labels}", seed=0)
        assert source.y is not None and source.is_test is not None and source.class_names is not None
        assert (source.y == records[:, column]).all() and source.classes == classes
        assert source.class_names[3] == f"{labels}_3" and source.is_test.tolist() == [False] * 40 + [True] * 10
        assert source.x.shape == (50, 3, 32, 32)
        assert source.x[7, 2, 1, 4] == records[7, 2 + 2 * 1024 + 32 + 4], "blue plane, second line, fifth pixel"
    with pytest.raises(DataError, match="labels must be 'fine' or 'coarse', got 'both'"):
        load("cifar-100:both")
    assert "clients 4" in shown("data", "cifar-100", "--partition", "iid", "--clients", "4")


def test_cifar_100_lacks_a_file(empty_folder: Path) -> None:
    archive(empty_folder / "cifar-100" / "cifar-100-binary.tar.gz", **{"cifar-100-binary/train.bin": b""})
    with pytest.raises(DataError, match=r"no file cifar-100-binary/test.bin\); its sha256 is .*, expected 58a81ae1"):
        load("cifar-100")


# What all share


@pytest.mark.parametrize("name", ["cifar-100"])
def test_a_damaged_file_is_named(name: str, empty_folder: Path) -> None:
    path = empty_folder / CATALOG[name].files[0].path
    path.parent.mkdir()
    path.write_bytes(gzip.compress(b"not an archive"))
    with pytest.raises(DataError, match=f"cannot read .*{path.name}"):
        load(name)


def test_a_file_with_an_md5_alone_is_checked_by_it(tmp_path: Path) -> None:
    served = tmp_path / "served.zip"
    served.write_bytes(b"official")
    right: Any = hashlib.md5(b"official", usedforsecurity=False).hexdigest()
    download(served.as_uri(), tmp_path / "kept.zip", None, right)
    assert (tmp_path / "kept.zip").read_bytes() == b"official"
    with pytest.raises(DataError, match="not the expected file: its md5 is"):
        download(served.as_uri(), tmp_path / "other.zip", None, "0" * 32)
    with pytest.raises(ValueError, match="only if a checksum of it is known"):
        File("a.zip", url="https://example.org/a.zip")
