"""Pictures by the people who took them: iNaturalist and Google Landmarks, divided by Hsu, Qi and Brown (2020).

A split is a table of users and images. The images are those of iNaturalist 2017 and of Google Landmarks v2, which have
terms of their own and come as folders of JPEG files. P2 (§6.4, 6.5) gives its networks 1,280 numbers of a MobileNetV2
for each image; such features are read in the place of the images.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from unalike.data.arrays import encode_clients
from unalike.data.files.archive import open_npz, reading
from unalike.data.files.pictures import read_pictures
from unalike.data.source import Array, DataError, Source
from unalike.data.sources.folder import File, data_folder, locate

_HOME = "https://storage.googleapis.com/gresearch/federated-vision-datasets"
INATURALIST_SPLITS = File("inaturalist/inaturalist-user-120k.zip")
INATURALIST_PLACES = File("inaturalist/inaturalist-geo.zip")
LANDMARKS_SPLITS = File(
    "landmarks/landmarks-user-160k.zip",
    url=f"{_HOME}/landmarks-user-160k.zip",
    md5="53c36bd7d5fc12f927af2820b7e4a57c",
)
_SPECIES, _LANDMARKS = 1203, 2028


def inaturalist(split: str = "user-120k", features: str | None = None, size: int = 64) -> Source:
    """120,300 pictures of 1,203 species by user or by place (P2 §6.4); Van Horn et al. 2018, Hsu et al. 2020.

    ``split``: ``user-120k`` (9,275 users), or a division by place such as ``geo-300`` or ``geo-1k``. ``features``: an
    NPZ file beside the split with arrays ``image_id`` and ``x``, read in the place of images; otherwise images of
    ``size`` × ``size`` pixels are made of ``inaturalist/train_val_images``, the folder of iNaturalist 2017.
    """
    file = INATURALIST_SPLITS if split.startswith("user") else INATURALIST_PLACES
    how = f"Fetch it from {_HOME}/{Path(file.path).name} (no checksum of it is published)."
    wanted = f"federated_train_{split.replace('-', '_')}.csv"
    folder = data_folder() / "inaturalist"
    rows = read_split(locate(file, "inaturalist", how), wanted)
    return _source("inaturalist", rows, _SPECIES, folder, features, size, _found_by_name(folder / "train_val_images"))


def landmarks(features: str | None = None, size: int = 64) -> Source:
    """164,172 pictures of 2,028 landmarks by the 1,262 people who took them (P2 §6.5); Weyand et al. 2020.

    ``features`` and ``size`` as for iNaturalist; images are those of ``landmarks/train/a/b/c/abc….jpg``, the folders of
    Google Landmarks v2.
    """
    folder = data_folder() / "landmarks"
    rows = read_split(locate(LANDMARKS_SPLITS, "landmarks"), "federated_train.csv")

    def place(image: str) -> Path | None:
        return folder / "train" / image[0] / image[1] / image[2] / f"{image}.jpg" if len(image) > 2 else None

    return _source("landmarks", rows, _LANDMARKS, folder, features, size, place)


def read_split(path: Path, name: str) -> pd.DataFrame:
    """A table of an archive of splits: user_id, image_id, class. (The test table names no users, and is not read.)"""
    with reading(path), zipfile.ZipFile(path) as archive:
        tables = [each for each in archive.namelist() if Path(each).name.startswith("federated_train")]
        found = [each for each in tables if Path(each).name == name]
        if len(found) != 1:
            known = ", ".join(sorted(Path(each).name for each in tables))
            raise DataError(f"{path} has no {name}; it has {known or 'no table federated_train*.csv'}")
        frame = pd.read_csv(io.BytesIO(archive.read(found[0])), dtype={"user_id": str, "image_id": str})
        for column in ("user_id", "image_id", "class"):
            if column not in frame:
                raise DataError(f"{path}: {name} has no column {column!r}; it has {', '.join(map(str, frame.columns))}")
        return frame


def _source(
    name: str,
    rows: pd.DataFrame,
    classes: int,
    folder: Path,
    features: str | None,
    size: int,
    place: Callable[[str], Path | None],
) -> Source:
    y = rows["class"].to_numpy(dtype=np.int64)
    low, high = int(y.min(initial=0)), int(y.max(initial=0))
    if low < 0 or high >= classes:
        raise DataError(f"{name}: classes are 0 to {classes - 1}, but the split has {low} to {high}")
    images = rows["image_id"].to_numpy(dtype=str)
    client, names = encode_clients(rows["user_id"].to_numpy(dtype=str), name)
    if features is not None:
        x = _features(folder / features, images)
        return Source(name, "features", x, y, classes, client=client, client_names=names, network="dense")
    if size < 1:
        raise DataError(f"{name}: size must be at least 1 pixel, got {size}")
    x = _pictures(name, images.tolist(), place, size)
    return Source(name, "image", x, y, classes, client=client, client_names=names)


def _features(path: Path, images: Array) -> Array:
    """[rows, features], in the order of the split."""
    wanted = "expected arrays image_id [n] and x [n, features]"
    if not path.is_file():
        raise DataError(f"there is no file {path}; {wanted}")
    with open_npz(path) as arrays:
        if missing := [key for key in ("image_id", "x") if key not in arrays]:
            raise DataError(f"{path} has no array {missing[0]!r}; {wanted}")
        known, x = arrays["image_id"].astype(str), arrays["x"].astype(np.float32)
    if len(known) == 0 or len(known) != len(x) or x.ndim != 2:
        raise DataError(f"{path}: image_id has shape {known.shape} and x {x.shape}; {wanted}")
    order = np.argsort(known)
    rows = order[np.searchsorted(known, images, sorter=order).clip(max=len(known) - 1)]
    strange = known[rows] != images
    if strange.any():
        lacking = f"{int(strange.sum())} of {len(images)} images, such as {images[strange][0]}"
        raise DataError(f"{path} has no features of {lacking}")
    chosen: Array = x[rows]
    return chosen


def _found_by_name(folder: Path) -> Callable[[str], Path | None]:
    """Where an image is, in whatever folder of a species; looked up once."""
    known: dict[str, Path] = {}

    def place(image: str) -> Path | None:
        if not known and folder.is_dir():
            known.update({path.stem: path for path in folder.rglob("*.jpg")})
        return known.get(image)

    return place


def _pictures(name: str, images: list[str], place: Callable[[str], Path | None], size: int) -> Array:
    """[rows, channels, size, size]; heights and widths are scaled apart."""
    paths = [place(image) for image in images]
    missing = [image for image, path in zip(images, paths, strict=True) if path is None or not path.is_file()]
    if missing:
        raise DataError(
            f"data set {name!r}: {len(missing)} of {len(images)} images are not below {data_folder() / name}, first "
            f"{missing[0]}.jpg. Put the images of the source data set there, or name a file of features "
            "(features=FILE.npz)"
        )
    return read_pictures([path for path in paths if path is not None], size)
