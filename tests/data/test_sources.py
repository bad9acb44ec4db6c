from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from unalike.data import DataError, list_sources, load
from unalike.data.sources.catalog import CATALOG, open_source
from unalike.data.sources.folder import File, data_folder, download, locate
from unalike.data.sources.images import CIFAR_ARCHIVE, read_cifar_archive, read_idx
from unalike.data.sources.text import shakespeare

Real = Callable[[str], str]


def test_digits_are_embedded(empty_folder: Path) -> None:
    source = open_source("digits", seed=0)
    assert source.x.shape == (1797, 1, 8, 8) and source.x.dtype == np.uint8 and source.x.max() == 16
    assert source.y is not None and np.bincount(source.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert source.mean is not None and source.std is not None
    assert source.mean.item() == pytest.approx(source.x.mean(), abs=1e-4)
    assert source.std.item() == pytest.approx(source.x.std(), abs=1e-4)


def test_the_list_says_what_is_local(empty_folder: Path) -> None:
    listed = {entry.name: entry for entry in list_sources()}
    assert listed["digits"].local and listed["mdm"].local and listed["mdm"].synthetic
    assert not any(listed[name].local for name in ("mnist", "fashion-mnist", "cifar-10", "femnist", "acs", "elections"))
    assert listed["acs"].options == ("task", "by", "worker")
    assert all(entry.description for entry in listed.values())


@pytest.mark.parametrize("name", [name for name, entry in CATALOG.items() if entry.files])
def test_missing_data_says_where_it_was_looked_for(name: str, empty_folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(name)
    message = str(caught.value)
    assert "UNALIKE_DATA" in message and str(empty_folder) in message and CATALOG[name].files[0].path in message
    if CATALOG[name].files[0].url:
        assert str(CATALOG[name].files[0].url) in message and "the network is unreachable" in message
    assert not list(empty_folder.rglob("*.gz*")), "a failed download leaves no file behind"


def test_the_default_folder_is_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNALIKE_DATA", raising=False)
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "data"
    monkeypatch.delenv("UNALIKE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert data_folder() == tmp_path / "home" / ".cache" / "unalike" / "data"
    with pytest.raises(DataError, match=r"UNALIKE_DATA is not set, so the folder .*home/.cache/unalike/data; femnist/"):
        load("femnist")


def test_unknown_names_and_options() -> None:
    with pytest.raises(DataError, match=r"no data set is called 'digit'; did you mean 'digits'\?"):
        load("digit")
    with pytest.raises(DataError, match=r"data set 'bernoulli' has no option 'priors'.*did you mean 'prior'"):
        load("bernoulli", priors="beta")
    with pytest.raises(DataError, match=r"there is no file or folder missing.csv"):
        load("missing.csv")
    with pytest.raises(DataError, match=r"'digits' takes at most 0 values"):
        load("digits:3")


def test_download_keeps_only_what_has_the_right_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNALIKE_DATA", str(tmp_path / "data"))
    served = tmp_path / "served.bin"
    served.write_bytes(b"the official bytes")
    right = hashlib.sha256(b"the official bytes").hexdigest()
    path = locate(File("set/file.bin", right, served.as_uri()), "set")
    assert path == tmp_path / "data" / "set" / "file.bin" and path.read_bytes() == b"the official bytes"
    served.unlink()
    assert locate(File("set/file.bin", right, served.as_uri()), "set") == path, "read from the folder the second time"
    served.write_bytes(b"something else")
    with pytest.raises(DataError, match=f"not the expected file: its sha256 is .*, expected {right}. Nothing was kept"):
        download(served.as_uri(), tmp_path / "data" / "other.bin", right)
    assert [p.name for p in (tmp_path / "data").rglob("*") if p.is_file()] == ["file.bin"]


def _idx(array: np.ndarray) -> bytes:  # type: ignore[type-arg]
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    return gzip.compress(head + array.astype(np.uint8).tobytes())


def test_idx_files(tmp_path: Path) -> None:
    array = np.arange(24).reshape(2, 3, 4)
    path = tmp_path / "images.gz"
    path.write_bytes(_idx(array))
    assert (read_idx(path) == array).all()


@pytest.mark.parametrize("damage", ["cut", "other", "empty"])
def test_a_damaged_file_is_named(damage: str, empty_folder: Path) -> None:
    folder = empty_folder / "mnist"
    folder.mkdir()
    good = _idx(np.zeros((3, 28, 28)))
    bad = {"cut": good[: len(good) // 2], "other": gzip.compress(b"hello"), "empty": b""}[damage]
    for file in CATALOG["mnist"].files:
        (empty_folder / file.path).write_bytes(bad)
    with pytest.raises(DataError, match=r"cannot read .*train-images.*its sha256 is .*, expected 440fcabf.*delete it"):
        load("mnist")


def test_damaged_archives_are_named(empty_folder: Path) -> None:
    for name in ("femnist", "acs", "shakespeare", "elections"):
        path = empty_folder / CATALOG[name].files[0].path
        path.parent.mkdir()
        path.write_bytes(b"PK\x03\x04 not really")
        with pytest.raises(DataError, match=f"cannot read .*{path.name}.*delete it and fetch it again"):
            load(name)


def test_cifar_binary_archive(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "cifar.tar.gz"
    batches = {}
    with tarfile.open(path, "w:gz") as archive:
        for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
            batches[name] = rng.integers(256, size=(4, 3073), dtype=np.uint8)
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            info.size = batches[name].size
            archive.addfile(info, io.BytesIO(batches[name].tobytes()))
    parts = read_cifar_archive(path)
    assert len(parts) == 6
    x, y = parts[5]
    assert x.shape == (4, 3, 32, 32) and (y == batches["test_batch"][:, 0]).all()
    assert x[2, 1, 0, 5] == batches["test_batch"][2, 1 + 1024 + 5], "green plane, first line, sixth pixel"


def test_a_damaged_cifar_archive_is_named(empty_folder: Path) -> None:
    path = empty_folder / CIFAR_ARCHIVE.path
    path.parent.mkdir()
    path.write_bytes(b"not an archive")
    with pytest.raises(DataError, match=r"cannot read .*cifar-10-binary.tar.gz.*delete it"):
        load("cifar-10")


def moments(pixels: np.ndarray) -> tuple[float, float]:  # type: ignore[type-arg]
    """Mean and deviation of bytes, in units of 255, by exact integer sums."""
    total, square = pixels.sum(dtype=np.int64), np.square(pixels, dtype=np.uint16).sum(dtype=np.int64)
    mean = total / pixels.size
    return mean / 255, np.sqrt(square / pixels.size - mean**2) / 255


_PUBLISHED = [("mnist", 0.130660, 0.308108), ("fashion-mnist", 0.286041, 0.353024)]


@pytest.mark.parametrize(("name", "mean", "std"), _PUBLISHED)
def test_mnist_and_fashion(name: str, mean: float, std: float, real: Real) -> None:
    source = open_source(real(name), seed=0)
    assert source.y is not None and source.is_test is not None
    train = source.x[~source.is_test]
    assert train.shape == (60000, 1, 28, 28) and len(source.x) == 70000
    assert moments(train) == pytest.approx((mean, std), abs=1e-6)
    if name == "fashion-mnist":
        assert np.bincount(source.y[source.is_test]).tolist() == [1000] * 10


def test_cifar_is_decoded_exactly(real: Real) -> None:
    source = open_source(real("cifar-10"), seed=0)
    assert source.y is not None and source.is_test is not None
    assert source.x.shape == (60000, 3, 32, 32) and source.x.dtype == np.uint8
    mean, std = np.array([moments(source.x[~source.is_test, c]) for c in range(3)]).T
    assert mean == pytest.approx([0.491400, 0.482158, 0.446531], abs=1e-6)
    assert std == pytest.approx([0.247032, 0.243485, 0.261588], abs=1e-6)
    assert np.bincount(source.y[source.is_test]).tolist() == [1000] * 10


def test_femnist_by_writer(real: Real) -> None:
    population = load(real("femnist"))
    assert len(population) == 396 and population.classes == 62
    assert int(population.train.size.sum()) == 54_109 and int(population.test.size.sum()) == 6_250
    assert population.train.name(0) == "f0424_27"
    first, rest = load(real("femnist"), writers=200), load(real("femnist"), writers=-200)  # T1 A.4.2
    assert len(first) == 200 and len(first) + len(rest) == len(population)
    with pytest.raises(DataError, match="writers must be below the 396 that there are, got 1302"):
        open_source("femnist:writers=1302", seed=0)
    assert first.train.name(199) == population.train.name(199) and rest.train.name(0) == population.train.name(200)
    digits = open_source("femnist:digits", seed=0)
    assert digits.classes == 10 and len(digits.x) == 42_842
    grouped = load("femnist:digits", partition="natural:3", clients=66)
    assert len(grouped) == 66 and all(name.count("+") == 2 for name in grouped.train.names or [])
    everyone = open_source("femnist", seed=0, extra_writers=True)
    assert everyone.clients == 396 + 314 and len(everyone.x) == 60_359 + 9_256


def test_elections(real: Real) -> None:
    population = load(real("elections"))
    assert len(population) == 3150 and population.sizes.unique().tolist() == [6]
    won = population.train.x.reshape(3150, 6).sum(0)
    # Counties that lack a year are left out, so a few less than the 2478 … 2596 of all counties.
    assert won.tolist() == pytest.approx([2478, 2568, 2271, 2445, 2650, 2596], abs=6)
    held_out = load("elections", test_year=2016)
    assert held_out.test.size.unique().tolist() == [1]
    assert float(held_out.test.x[held_out.test.start].sum()) == float(won[4])
    with pytest.raises(DataError, match=r"test_year must be one of 2000, .* got 2001"):
        load("elections:2001")


def test_acs_tasks(real: Real) -> None:
    income = open_source(real("acs"), seed=0)
    assert income.y is not None and income.clients == 1964
    assert income.y.mean() == pytest.approx(0.491, abs=5e-4)
    assert income.x.dtype == np.uint8 and len(income.x) == pytest.approx(1.4e6, rel=0.01)
    race = open_source("acs:race,state", seed=0)
    assert race.y is not None and race.clients == 49 and race.classes == 9 and len(race.x) == 2_300_542
    assert race.x.shape[1] == income.x.shape[1] - 10, "race and Hispanic origin are no features of the race task"
    bins = open_source("acs:income-bins", seed=0)
    assert bins.y is not None and bins.classes == 41 and bins.y.min() == 0 and bins.y.max() == 40
    with pytest.raises(DataError, match=r"task must be one of income, income-bins, race, clusters, got 'age'"):
        load("acs:age")


def test_acs_clustering_points_have_seven_ones(real: Real) -> None:
    population = load(real("acs:clusters"), by="state", worker="federal")
    assert population.train.y is None and population.train.shift is None
    assert population.train.x[:1000].sum(1).unique().tolist() == [7], "so the radius is √7 = 2.65, as in T1 Table D.1"
    assert population.shared["server"].shape == (1020, population.input_shape[0])


def test_shakespeare_windows_follow_the_text(real: Real) -> None:
    source = open_source(real("shakespeare"), seed=0)
    assert source.y is not None and source.is_test is not None and source.client is not None
    assert source.x.shape[1] == 80 and source.classes == 74 and source.x.dtype == np.int64
    text = "".join((source.class_names or [])[i] for i in source.x[0])
    assert text.startswith("Nay, but this dotage of our general's\nO'erflows the measure")
    assert (source.x[1, :70] == source.x[0, 10:]).all() and source.x[1, 70] == source.y[0], "every 10 characters"
    first = source.client == 0
    border = np.flatnonzero(source.is_test[first])[0]
    assert not source.is_test[first][:border].any() and source.is_test[first][border:].all(), "the end is the test part"


def test_shakespeare_checks_its_options() -> None:
    with pytest.raises(DataError, match=r"length and stride must be at least 1"):
        shakespeare(length=0)
