"""Image sources: digits (embedded), MNIST, Fashion-MNIST, CIFAR-10 and -100, FEMNIST by writer."""

from __future__ import annotations

import functools
import gzip
import tarfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from unalike.data.files.archive import open_npz, reading
from unalike.data.source import Array, DataError, Names, Source
from unalike.data.sources.folder import File, data_folder, locate, present

_IDX = [f"{part}-{what}-ubyte.gz" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")]


def _idx_files(folder: str, url: str, *sums: str) -> tuple[File, ...]:
    return tuple(File(f"{folder}/{name}", sha256, url + name) for name, sha256 in zip(_IDX, sums, strict=True))


MNIST_FILES = _idx_files(
    "mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
FASHION_FILES = _idx_files(
    "fashion-mnist",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
# The archive of the authors (binary version, so that nothing has to be unpickled) ...
CIFAR_ARCHIVE = File(
    "cifar-10/cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
)
# ... or the same pixels as differences between neighbours, a lossless form that is smaller.
CIFAR_FILES = (
    File("cifar-10/cifar10_train_1.npz", "6e4e9b2d13a18598eaffe568debab174bdfe348e5ac973e88c1e7bd014f32b6e"),
    File("cifar-10/cifar10_train_2.npz", "ec111bec93c953b0159f47db3012a2dc1c3dde1ec421b76a3041fcaac96f835e"),
    File("cifar-10/cifar10_train_3.npz", "c8370bed30f75e096fdd45e86737356b1dbc8e7befccbecd5eb61c6511e8fbb7"),
    File("cifar-10/cifar10_train_4.npz", "17c070b270a0e53477a62c648343ea53529263343e72cc465453f5bad7a806fb"),
    File("cifar-10/cifar10_train_5.npz", "b499de498204efaa0dbd20512fc326775383df429278e4b884ce3737d58cc026"),
    File("cifar-10/cifar10_test.npz", "9406f80e6e819cfac24f875b0de05a59a49ccb239aff70c23d56455e38643b74"),
)
CIFAR100_ARCHIVE = File(
    "cifar-100/cifar-100-binary.tar.gz",
    "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
)
FEMNIST_FILE = File("femnist/femnist_writers.npz", "6e86a2dfbc7875a675c516921b1ad6cb105fd068e201afce8ca9f55c8fd25cfb")
FEMNIST_EXTRA = File(
    "femnist/femnist_extra_writers_testpart.npz", "d47ea543bc485fba045cfc2ce90f65a01863bedc19a10d20ff520502d6c2274e"
)

_FASHION_CLASSES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"
]  # fmt: skip
CIFAR_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CIFAR_SCALE = 255 * np.array([[0.491400, 0.482158, 0.446531], [0.247032, 0.243485, 0.261588]])  # mean, deviation
_CIFAR100_SCALE = 255 * np.array([[0.507076, 0.486550, 0.440919], [0.267334, 0.256438, 0.276151]])
_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def digits() -> Source:
    """1,797 handwritten digits of 8×8 pixels (values 0–16), inside scikit-learn: needs no file and no network."""
    x, y = _digits()
    return image_source("digits", x.copy(), y, _CHARACTERS[:10], [4.8842], [6.0168])


@functools.cache  # a text file, whose reading takes longer than a small run's round
def _digits() -> tuple[Array, Array]:
    package = find_spec("sklearn")  # without importing it, which takes longer than a small run's round
    assert package is not None and package.origin is not None
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.int64)
    return rows[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8), rows[:, -1]


def image_source(
    name: str,
    x: Array,
    y: Array,
    classes: Sequence[str],
    mean: Sequence[float] | Array,
    std: Sequence[float] | Array,
    **more: Any,
) -> Source:
    """Images with published means and deviations of their channels, in units of ``x``."""
    return Source(
        name, "image", x, y.astype(np.int64), len(classes), list(classes), normalize="published",
        mean=np.asarray(mean, np.float32).reshape(-1, 1, 1), std=np.asarray(std, np.float32).reshape(-1, 1, 1), **more,
    )  # fmt: skip


def mnist() -> Source:
    """70,000 handwritten digits of 28×28 pixels; LeCun and Cortes."""
    return _idx_source("mnist", MNIST_FILES, _CHARACTERS[:10], 0.130660, 0.308108)


def fashion_mnist() -> Source:
    """70,000 pictures of clothes of 28×28 pixels; Xiao et al. 2017."""
    return _idx_source("fashion-mnist", FASHION_FILES, _FASHION_CLASSES, 0.286041, 0.353024)


def _idx_source(name: str, files: tuple[File, ...], classes: Sequence[str], mean: float, std: float) -> Source:
    paths = [locate(file, name) for file in files]
    arrays = [read_idx(path, file.sha256) for path, file in zip(paths, files, strict=True)]
    x, y = np.concatenate([arrays[0], arrays[2]])[:, None], np.concatenate([arrays[1], arrays[3]])
    is_test = np.arange(len(x)) >= len(arrays[0])
    return image_source(name, x, y, classes, [255 * mean], [255 * std], is_test=is_test)


def read_idx(path: Path, sha256: str | None = None) -> Array:
    """A gzipped idx file of unsigned bytes: two zero bytes, type 8, the number of dimensions, the dimensions."""
    with reading(path, sha256):
        raw = gzip.decompress(path.read_bytes())
        if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
            raise ValueError("not an idx file of unsigned bytes")
        shape = np.frombuffer(raw, ">u4", raw[3], 4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape.astype(int))


def cifar10() -> Source:
    """60,000 colour pictures of 32×32 pixels in 10 classes; Krizhevsky 2009."""
    if present(*CIFAR_FILES):
        parts = [_read_differences(data_folder() / file.path, file.sha256) for file in CIFAR_FILES]
    else:
        parts = read_cifar_archive(locate(CIFAR_ARCHIVE, "cifar-10"), CIFAR_ARCHIVE.sha256)
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    is_test = np.arange(len(x)) >= len(x) - len(parts[-1][0])
    return image_source("cifar-10", x, y, CIFAR_CLASSES, *CIFAR_SCALE, is_test=is_test)


def _read_differences(path: Path, sha256: str | None) -> tuple[Array, Array]:
    """Undo (G, R−G, B−G) and the differences along both image axes; all of it modulo 256, so exactly."""
    with open_npz(path, sha256) as arrays:
        planes = arrays["r"]
        for i in range(1, planes.shape[-1]):  # running sums in place, three times faster than numpy's on bytes
            planes[..., i] += planes[..., i - 1]
        for i in range(1, planes.shape[-2]):
            planes[..., i, :] += planes[..., i - 1, :]
        green = planes[0]
        return np.stack([planes[1] + green, green, planes[2] + green], axis=1), arrays["y"]


def read_cifar_archive(path: Path, sha256: str | None = None) -> list[tuple[Array, Array]]:
    """The binary archive: files of records of one label byte and 3·1024 pixel bytes, red, green, blue."""
    names = [f"cifar-10-batches-bin/{part}.bin" for part in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]]
    with reading(path, sha256):
        return [_split_records(raw, 1, 0) for raw in read_members(path, names)]


def _split_records(raw: bytes, labels: int, label: int) -> tuple[Array, Array]:
    """Pictures, and one of the labels that stand before each."""
    records = np.frombuffer(raw, np.uint8).reshape(-1, labels + 3 * 32 * 32)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, label]


def read_members(path: Path, names: Sequence[str]) -> list[bytes]:
    """Files of a gzipped archive, read in one pass; nothing is unpacked to the disk."""
    found: dict[str, bytes] = {}
    with tarfile.open(path, "r|gz") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if name in names and (file := archive.extractfile(member)) is not None:
                found[name] = file.read()
            if len(found) == len(names):
                break
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"the archive has no file {missing[0]}")
    return [found[name] for name in names]


def cifar100(labels: str = "fine") -> Source:
    """60,000 colour pictures of 32×32 pixels in 100 classes; Krizhevsky 2009. ``labels="coarse"``: 20 superclasses.

    The archive is the binary one: the one for Python is a pickle, which could run code.
    """
    if labels not in ("fine", "coarse"):
        raise DataError(f"cifar-100: labels must be 'fine' or 'coarse', got {labels!r}")
    path = locate(CIFAR100_ARCHIVE, "cifar-100")
    parts, names = read_cifar100_archive(path, labels, CIFAR100_ARCHIVE.sha256)
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return image_source("cifar-100", x, y, names, *_CIFAR100_SCALE, is_test=np.arange(len(x)) >= len(parts[0][0]))


def read_cifar100_archive(
    path: Path, labels: str, sha256: str | None = None
) -> tuple[list[tuple[Array, Array]], list[str]]:
    """Training and test part, and the classes' names: records of a coarse label, a fine label and 3·1024 pixels."""
    files = ["train.bin", "test.bin", f"{labels}_label_names.txt"]
    with reading(path, sha256):
        *raw, words = read_members(path, [f"cifar-100-binary/{name}" for name in files])
        return [_split_records(part, 2, int(labels == "fine")) for part in raw], words.decode().split()


def femnist(task: str = "characters", extra_writers: bool = False, writers: int = 0) -> Source:
    """Handwritten characters by writer (LEAF), 28×28 pixels, ink on white paper.

    ``task``: ``characters`` (62 classes: digits, capitals, small letters) or ``digits`` (10 classes, digits only).
    ``extra_writers`` adds writers of whom only LEAF's test tenth is there; they can be left unseen, not trained on.
    ``writers``: N takes the first N of them, and −N all others, as server data apart from the clients' (Scott, 2026).
    """
    if task not in ("characters", "digits"):
        raise DataError(f"femnist: task must be 'characters' or 'digits', got {task!r}")
    how = "FEMNIST has no single official file: make it with LEAF, leaf.cmu.edu (arrays x, y, writer, split, writers)."
    pieces = []
    for file in (FEMNIST_FILE, FEMNIST_EXTRA) if extra_writers else (FEMNIST_FILE,):
        path = locate(file, "femnist", how)
        with open_npz(path, file.sha256) as arrays:
            pieces.append({key: arrays[key] for key in ("x", "y", "writer", "split", "writers")})
    offsets = np.cumsum([0] + [len(piece["writers"]) for piece in pieces])
    x = np.concatenate([piece["x"] for piece in pieces])[:, None]
    y = np.concatenate([piece["y"] for piece in pieces])
    writer = np.concatenate([piece["writer"].astype(np.int64) + at for piece, at in zip(pieces, offsets, strict=False)])
    is_test = np.concatenate([piece["split"] for piece in pieces]) == 1
    if task == "digits":
        keep = y < 10
        x, y, writer, is_test = x[keep], y[keep], writer[keep], is_test[keep]
    names = np.concatenate([piece["writers"] for piece in pieces])
    if writers:
        if abs(writers) >= len(names):
            raise DataError(f"femnist: writers must be below the {len(names)} that there are, got {abs(writers)}")
        keep = writer < writers if writers > 0 else writer >= -writers
        x, y, writer, is_test = x[keep], y[keep], writer[keep] - max(0, -writers), is_test[keep]
        names = names[:writers] if writers > 0 else names[-writers:]
    classes = _CHARACTERS[: 10 if task == "digits" else 62]
    who = {"client": writer, "client_names": Names(names)}
    return image_source("femnist", x, y, classes, [245.2158], [41.7769], is_test=is_test, **who)
