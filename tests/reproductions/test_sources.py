"""Loaders of data that cannot be had here, on small files of the real formats, made here byte by byte."""

from __future__ import annotations

import gzip
import json
import sqlite3
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reproductions.sources.questions import parse_example, stack_overflow, yahoo_answers
from reproductions.sources.splits import inaturalist, landmarks
from reproductions.sources.stl10 import stl10
from tests.data.conftest import empty_folder
from tests.data.test_real_formats import archive
from unalike.data import DataError, Population, load
from unalike.data.source import Source

__all__ = ["empty_folder"]  # the fixture


def described(source: Source, **options: object) -> Population:
    return load(source, unseen=0, **options)  # type: ignore[arg-type]


# iNaturalist and Landmarks


def split(path: Path, name: str, rows: list[tuple[str, str, int]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "user_id,image_id,class\n" + "".join(f"{user},{image},{label}\n" for user, image, label in rows)
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(f"{path.stem}/{name}", lines)
        made.writestr(f"{path.stem}/test.csv", "image_id,class\nnobody,3\n")


ROWS = [("18", "0aab", 4), ("7", "0bcd", 1202), ("18", "0bce", 0), ("7", "f00d", 4)]


def test_inaturalist_with_features(empty_folder: Path) -> None:
    split(empty_folder / "inaturalist" / "inaturalist-user-120k.zip", "federated_train_user_120k.csv", ROWS)
    order = [2, 0, 3, 1]
    x = np.arange(20, dtype=np.float64).reshape(4, 5)
    ids = np.array([ROWS[i][1] for i in order])
    np.savez(empty_folder / "inaturalist" / "mobilenet.npz", image_id=ids, x=x[order])
    source = inaturalist(features="mobilenet.npz")
    assert source.y is not None and source.client is not None and source.client_names is not None
    assert (source.x == x).all() and source.x.dtype == np.float32 and source.y.tolist() == [4, 1202, 0, 4]
    assert [source.client_names[i] for i in source.client] == ["18", "7", "18", "7"]
    assert source.classes == 1203 and source.network == "dense"
    assert len(described(source)) == 2
    np.savez(empty_folder / "inaturalist" / "few.npz", image_id=ids[:2], x=x[:2])
    with pytest.raises(DataError, match=r"no features of 2 of 4 images, such as 0bcd"):
        inaturalist(features="few.npz")


def test_inaturalist_by_place_and_from_images(empty_folder: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="image files need the extra `data`")
    split(empty_folder / "inaturalist" / "inaturalist-geo.zip", "federated_train_geo_300.csv", ROWS)
    with pytest.raises(DataError, match=r"no federated_train_geo_1k.csv; it has federated_train_geo_300.csv"):
        inaturalist("geo-1k")
    with pytest.raises(DataError, match=r"4 of 4 images are not below .*first 0aab.jpg.*features=FILE.npz"):
        inaturalist("geo-300")
    for number, (_, name, label) in enumerate(ROWS):
        folder = empty_folder / "inaturalist" / "train_val_images" / "Aves" / f"species {label}"
        folder.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (30 + number, 20), (50 * number, 10, 200)).save(folder / f"{name}.jpg", quality=95)
    source = inaturalist("geo-300", size=8)
    assert source.x.shape == (4, 3, 8, 8) and source.x.dtype == np.uint8
    assert np.abs(source.x[:, 0].mean((1, 2)) - [0, 50, 100, 150]).max() < 4


def test_landmarks_are_found_by_the_first_letters_of_their_names(empty_folder: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="image files need the extra `data`")
    split(empty_folder / "landmarks" / "landmarks-user-160k.zip", "federated_train.csv", ROWS)
    for _, name, _ in ROWS:
        folder = empty_folder / "landmarks" / "train" / name[0] / name[1] / name[2]
        folder.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (12, 12), (9, 99, 199)).save(folder / f"{name}.jpg")
    source = landmarks(size=6)
    assert source.x.shape == (4, 3, 6, 6) and source.classes == 2028 and source.clients == 2
    split(empty_folder / "landmarks" / "landmarks-user-160k.zip", "federated_train.csv", [("1", "abc", 2028)])
    with pytest.raises(DataError, match="classes are 0 to 2027, but the split has 0 to 2028"):
        landmarks()


# Stack Overflow


def varint(number: int) -> bytes:
    out = b""
    while number >= 0x80:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(**features: str) -> bytes:
    """A tf.Example of byte features, with a number and a float among them as TFF has the score."""
    entries = b"".join(
        field(1, field(1, name.encode()) + field(2, field(1, field(1, text.encode()))))
        for name, text in features.items()
    )
    score = field(1, field(1, b"score") + field(2, field(3, field(1, varint(300)))))
    weight = field(1, field(1, b"weight") + field(2, field(2, b"\x0d" + struct.pack("<f", 0.5))))
    return field(1, score + entries + weight)


def test_a_message_is_read_as_protocol_buffers_are_written() -> None:
    long = "x" * 300
    assert parse_example(example(tags="a|b", title=long)) == {
        "score": [],
        "tags": [b"a|b"],
        "title": [long.encode()],
        "weight": [],
    }
    with pytest.raises(ValueError, match="cut off"):
        parse_example(example(tags="a|b")[:-3])


def write_stack_overflow(folder: Path, questions: list[tuple[str, dict[str, str]]]) -> None:
    (folder / "stack-overflow").mkdir(parents=True, exist_ok=True)
    base = sqlite3.connect(folder / "stack-overflow" / "stackoverflow.sqlite")
    with base:
        base.execute(
            "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, "
            "serialized_example_proto BLOB NOT NULL)"
        )
        base.execute(
            "CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL, "
            "num_examples INTEGER NOT NULL)"
        )
        for user, features in questions:
            base.execute("INSERT INTO examples VALUES ('train', ?, ?)", (user, example(**features)))
        base.execute("INSERT INTO examples VALUES ('test', '1', ?)", (example(type="question", title="no"),))
        users = {user for user, _ in questions}
        base.executemany("INSERT INTO client_metadata VALUES (?, 'train', 1)", [(user,) for user in sorted(users)])
    base.close()
    (folder / "stack-overflow" / "stackoverflow.word_count").write_text("the 900\npython 50\nlist 40\nrare 1\n")
    counts = {"c#": 20, "python": 90, "list": 5, "java": 60}
    (folder / "stack-overflow" / "stackoverflow.tag_count").write_text(json.dumps(counts))


QUESTIONS: list[tuple[str, dict[str, str]]] = [
    ("22", {"type": "question", "title": "The list", "tokens": "the python list the end", "tags": "list|python"}),
    ("22", {"type": "answer", "title": "The list", "tokens": "the the", "tags": "python"}),
    ("1", {"type": "question", "title": "rare", "tokens": "rare words", "tags": "c#|java"}),
    ("1", {"type": "question", "title": "unknown", "tokens": "the", "tags": "cobol"}),
]


def test_stack_overflow_counts_public_words_and_names_public_tags(empty_folder: Path) -> None:
    write_stack_overflow(empty_folder, QUESTIONS)
    source = stack_overflow(seed=0, task="tags", features="counts", words=3, tags=3)
    assert source.y is not None and source.client is not None and source.client_names is not None
    assert source.class_names == ["python", "java", "c#"], "by how much they are used"
    assert source.x.tolist() == [[0, 0, 0], [3, 1, 2]], "the, python, list; answers, other parts and words do not count"
    assert [source.class_names[label] for label in source.y] == ["java", "python"] and source.incomplete == 1
    assert [source.client_names[i] for i in source.client] == ["1", "22"]
    first = stack_overflow(seed=0, task="tags", features="counts", users=1)
    assert first.clients == 1 and first.class_names == ["python", "java", "c#", "list"]
    assert len(described(source, min_samples=1)) == 2
    (empty_folder / "stack-overflow" / "stackoverflow.sqlite").write_bytes(b"not a base" * 100)
    with pytest.raises(DataError, match=r"cannot read .*stackoverflow.sqlite.*expected the SQLite file of TensorFlow"):
        stack_overflow(seed=0, task="tags", features="counts")


def test_stack_overflow_as_a_clustering_problem(empty_folder: Path) -> None:
    """T1 D.7.1: users have the questions of two topics, the server ten of each and others; no question is both's."""
    count = 90
    tags = np.array(["github|git", "pdf", "java"] * 30)
    x = np.arange(count, dtype=np.float32)[:, None] * np.ones((1, 4), np.float32)
    (empty_folder / "stack-overflow").mkdir()
    user = np.array([f"user-{i % 7}" for i in range(count)])
    np.savez(empty_folder / "stack-overflow" / "embeddings.npz", x=x, user=user, tags=tags)
    source = stack_overflow(seed=3)
    assert source.client is not None and source.client_names is not None and source.whole
    mine, server = source.x[:, 0].astype(int), source.shared["server"][:, 0].astype(int)
    assert len(mine) == 60 - 20 and len(server) == 20 + 30
    assert set(mine) | set(server) == set(range(count)) and not set(mine) & set(server)
    assert [str(tags[i]) for i in server[:20]] == ["github|git"] * 10 + ["pdf"] * 10
    assert all(tags[i] == "java" for i in server[20:])
    assert [source.client_names[i] for i in source.client] == [str(user[i]) for i in mine]
    assert len(described(source)) == 7
    for topics, message in (("github", "two tags such as"), ("github+cobol", "0 questions have the tag 'cobol'")):
        with pytest.raises(DataError, match=message):
            stack_overflow(seed=0, topics=topics)


def test_stack_overflow_without_embeddings_says_how_to_get_them(empty_folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"stackoverflow.sqlite is not there. Fetch https://.*stackoverflow.sqlite.lzma"
    ):
        stack_overflow(seed=0)
    write_stack_overflow(empty_folder, QUESTIONS)
    with pytest.raises(DataError, match=r"no embeddings in .*embeddings.npz. Make them from .*features=co"):
        stack_overflow(seed=0)


# Yahoo! Answers


def yahoo(folder: Path, *, broken: bool = False) -> None:
    train = '"5","why doesn\'t an ""optical"" mouse work","glass\\nor not","the the mouse"\n"10","vote","","yes"\n'
    files = {"train": train, "test": '"1","culture","what","it is"\n' if not broken else '"11","a","b","c"\n'}
    named = {f"yahoo_answers_csv/{name}.csv": text.encode() for name, text in files.items()}
    archive(folder / "yahoo-answers" / "yahoo_answers_csv.tar.gz", **{"yahoo_answers_csv/classes.txt": b""}, **named)


def test_yahoo_answers_count_hashed_words(empty_folder: Path) -> None:
    yahoo(empty_folder)
    source = yahoo_answers(words=64)
    assert source.y is not None and source.is_test is not None and source.class_names is not None
    assert source.y.tolist() == [4, 9, 0] and source.is_test.tolist() == [False, False, True]
    assert source.class_names[4] == "Computers & Internet" and source.x.dtype == np.uint8
    words = ["why", "doesn", "an", "optical", "mouse", "work", "glass", "or", "not", "the", "the", "mouse"]
    assert int(source.x[0].sum()) == len(words) and int(source.x[0].max()) >= 2
    assert len(described(source, partition="iid", clients=1)) == 1
    np.savez(empty_folder / "yahoo-answers" / "bert.npz", x=np.ones((3, 768)))
    assert yahoo_answers(features="bert.npz").x.shape == (3, 768)
    np.savez(empty_folder / "yahoo-answers" / "short.npz", x=np.ones((2, 768)))
    with pytest.raises(DataError, match=r"should hold an array x \[3, d\], a row for each question"):
        yahoo_answers(features="short.npz")
    yahoo(empty_folder, broken=True)
    with pytest.raises(DataError, match=r"test.csv, row 1: expected a class of 1 to 10, title.*got \['11'\]"):
        yahoo_answers()


# STL-10


def write_stl10(folder: Path) -> np.ndarray:
    """[6, 3, 96, 96] as one sees it; written column by column."""
    rng = np.random.default_rng(1)
    x = rng.integers(256, size=(6, 3, 96, 96), dtype=np.uint8)
    turned = x.transpose(0, 1, 3, 2)
    files = {
        "stl10_binary/class_names.txt": b"",
        "stl10_binary/train_X.bin": turned[:4].tobytes(),
        "stl10_binary/train_y.bin": bytes([1, 3, 8, 10]),
        "stl10_binary/test_X.bin": turned[4:].tobytes(),
        "stl10_binary/test_y.bin": bytes([2, 9]),
        "stl10_binary/unlabeled_X.bin": b"never read",
    }
    archive(folder / "stl-10" / "stl10_binary.tar.gz", **files)
    return x


def test_stl_10_upright_and_smaller(empty_folder: Path) -> None:
    x = write_stl10(empty_folder)
    source = stl10()
    assert source.y is not None and source.is_test is not None and source.class_names is not None
    assert (source.x == x).all() and source.is_test.tolist() == [False] * 4 + [True] * 2
    assert [source.class_names[label] for label in source.y] == ["airplane", "car", "monkey", "truck", "bird", "ship"]
    small = stl10(classes="cifar-10", size=32)
    assert small.y is not None and small.class_names is not None
    kept = [0, 1, 3, 4, 5]
    assert [small.class_names[label] for label in small.y] == ["airplane", "automobile", "truck", "bird", "ship"]
    block = x[kept[2], 1, 3:6, 9:12].astype(float).mean()
    assert abs(float(small.x[2, 1, 1, 3]) - block) <= 0.5
    cifar = [255 * 0.491400, 255 * 0.482158, 255 * 0.446531]
    assert small.mean is not None and small.mean.ravel().tolist() == pytest.approx(cifar, rel=1e-6)
    with pytest.raises(DataError, match="size must divide 96"):
        stl10(size=50)


def test_stl_10_with_too_few_labels(empty_folder: Path) -> None:
    write_stl10(empty_folder)
    path = empty_folder / "stl-10" / "stl10_binary.tar.gz"
    pixels = bytes(2 * 3 * 96 * 96)
    parts = {"train_X": pixels, "train_y": bytes([1]), "test_X": pixels, "test_y": bytes([1, 2])}
    archive(path, **{f"stl10_binary/{name}.bin": content for name, content in parts.items()})
    with pytest.raises(DataError, match="2 images have 1 labels"):
        stl10()


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("inaturalist/inaturalist-user-120k.zip", inaturalist),
        ("landmarks/landmarks-user-160k.zip", landmarks),
        ("yahoo-answers/yahoo_answers_csv.tar.gz", yahoo_answers),
        ("stl-10/stl10_binary.tar.gz", stl10),
    ],
)
def test_a_damaged_file_is_named(file: str, read: Callable[[], Source], empty_folder: Path) -> None:
    path = empty_folder / file
    path.parent.mkdir()
    path.write_bytes(gzip.compress(b"not an archive"))
    with pytest.raises(DataError, match=f"cannot read .*{path.name}"):
        read()
