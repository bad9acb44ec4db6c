"""Questions of people: Stack Overflow by user, and Yahoo! Answers by topic.

The documents turn a question into numbers by a pretrained model of sentences. Whoever has such numbers gives them as a
file; otherwise a question is the counts of its words.
"""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import default_rng

from unalike.data.arrays import encode_clients
from unalike.data.files.archive import open_npz, reading
from unalike.data.source import Array, DataError, Source
from unalike.data.sources.folder import File, data_folder, locate

_TFF = "https://storage.googleapis.com/tff-datasets-public"
STACK_OVERFLOW_FILE = File("stack-overflow/stackoverflow.sqlite")
EMBEDDINGS = File("stack-overflow/embeddings.npz")
WORD_COUNTS = File("stack-overflow/stackoverflow.word_count")
TAG_COUNTS = File("stack-overflow/stackoverflow.tag_count")
YAHOO_ARCHIVE = File("yahoo-answers/yahoo_answers_csv.tar.gz", md5="f3f9899b997a42beb24157e62e3eea8d")

_SERVER_SAME, _SERVER_OTHER = 10, 1000  # points of the server: of each topic, and of others (T1 D.7.1)
_TOPICS = [
    "Society & Culture", "Science & Mathematics", "Health", "Education & Reference", "Computers & Internet", "Sports",
    "Business & Finance", "Entertainment & Music", "Family & Relationships", "Politics & Government",
]  # fmt: skip


@dataclass(frozen=True)
class Questions:
    """Questions with who asked them and their tags."""

    x: Array  # [rows, features]
    user: Array  # [rows] names
    tags: list[frozenset[str]]


def stack_overflow(
    seed: int,
    task: str = "clusters",
    features: str = "embeddings",
    topics: str = "github+pdf",
    words: int = 1000,
    tags: int = 50,
    users: int | None = None,
) -> Source:
    """Questions on stackoverflow.com by user, as TensorFlow Federated has them.

    Tasks: ``clusters`` (no labels; of each user the questions with one of two ``topics``, and for the server 10
    questions of each and 1,000 with neither; T1 D.7.1) and ``tags`` (a question's class is the most used of its tags
    among the first ``tags`` of ``stackoverflow.tag_count``; questions with none are left out).

    Features: ``embeddings`` are those of ``stack-overflow/embeddings.npz``: arrays ``x`` [n, d], ``user`` [n] and
    ``tags`` [n], tags of a question joined by ``|``. ``counts`` counts the first ``words`` of
    ``stackoverflow.word_count`` in titles and texts of ``stackoverflow.sqlite``. Both lists are public files of TFF, so
    no word or class is read off the users. ``users``: only so many, the first by id.
    """
    if task not in ("clusters", "tags"):
        raise DataError(f"stack-overflow: task must be 'clusters' or 'tags', got {task!r}")
    if features not in ("embeddings", "counts"):
        raise DataError(f"stack-overflow: features must be 'embeddings' or 'counts', got {features!r}")
    for name, value in (("words", words), ("tags", tags), ("users", users)):
        if value is not None and value < 1:
            raise DataError(f"stack-overflow: {name} must be at least 1, got {value}")
    questions = _embedded(users) if features == "embeddings" else _counted(words, users)
    if task == "clusters":
        return _clusters(questions, topics, seed)
    known = _first_tags(tags)
    rank = [min((known[tag] for tag in own if tag in known), default=-1) for own in questions.tags]
    y = np.array(rank, dtype=np.int64)
    keep = y >= 0
    if not keep.any():
        raise DataError(f"stack-overflow: no question has one of the first {tags} tags")
    client, names = encode_clients(questions.user[keep], "stack-overflow")
    return Source(
        "stack-overflow", "features", questions.x[keep], y[keep], len(known), list(known), client=client,
        client_names=names, incomplete=int((~keep).sum()), network="dense",
    )  # fmt: skip


def _clusters(questions: Questions, topics: str, seed: int) -> Source:
    chosen = topics.split("+")
    if len(chosen) != 2 or not all(chosen) or chosen[0] == chosen[1]:
        raise DataError(f"stack-overflow: topics are two tags such as 'github+pdf', got {topics!r}")
    of_topic = np.array([[topic in own for topic in chosen] for own in questions.tags])
    rng = default_rng([seed, 7002])
    other = np.flatnonzero(~of_topic.any(1))
    given: list[int] = []
    for number, topic in enumerate(chosen):
        own = np.setdiff1d(np.flatnonzero(of_topic[:, number]), given)
        if len(own) <= _SERVER_SAME:
            raise DataError(
                f"stack-overflow: {len(own)} questions have the tag {topic!r}; more than {_SERVER_SAME} are needed, "
                "which are the server's (topics=ONE+OTHER)"
            )
        given += rng.choice(own, _SERVER_SAME, replace=False).tolist()
    away = rng.choice(other, min(_SERVER_OTHER, len(other)), replace=False)
    rows = np.setdiff1d(np.flatnonzero(of_topic.any(1)), given)  # the server's own points are nobody else's
    client, names = encode_clients(questions.user[rows], "stack-overflow")
    server = questions.x[np.concatenate([np.array(given), away]).astype(np.int64)].astype(np.float32)
    return Source(
        f"stack-overflow:{topics}", "features", questions.x[rows], client=client, client_names=names, normalize="none",
        shared={"server": server}, whole=True,
    )  # fmt: skip


def _embedded(users: int | None) -> Questions:
    path = data_folder() / EMBEDDINGS.path
    wanted = "expected arrays x [n, d], user [n] and tags [n], tags joined by |"
    if not path.is_file():
        where = locate(STACK_OVERFLOW_FILE, "stack-overflow", _how(STACK_OVERFLOW_FILE))
        raise DataError(
            f"data set 'stack-overflow': there are no embeddings in {path}. Make them from {where} with a model of "
            f"sentences; {wanted}. Or count words (features=counts)"
        )
    with open_npz(path) as arrays:
        if missing := [key for key in ("x", "user", "tags") if key not in arrays]:
            raise DataError(f"{path} has no array {missing[0]!r}; {wanted}")
        x, user, tags = arrays["x"].astype(np.float32), arrays["user"].astype(str), arrays["tags"].astype(str)
    if x.ndim != 2 or user.shape != (len(x),) or tags.shape != (len(x),):
        raise DataError(f"{path}: x has shape {x.shape}, user {user.shape}, tags {tags.shape}; {wanted}")
    if users is not None:
        keep = np.isin(user, np.unique(user)[:users])
        x, user, tags = x[keep], user[keep], tags[keep]
    return Questions(x, user, [frozenset(filter(None, own.split("|"))) for own in tags.tolist()])


def _counted(words: int, users: int | None) -> Questions:
    path = locate(STACK_OVERFLOW_FILE, "stack-overflow", _how(STACK_OVERFLOW_FILE))
    number = {word: place for place, word in enumerate(_first_words(words))}
    user, tags, rows = [], [], []
    for name, example in read_examples(path, users):
        if example.get("type") != [b"question"]:
            continue
        counts = np.zeros(len(number), dtype=np.uint8)
        text = b" ".join(example.get("title", []) + example.get("tokens", []))
        for word in text.decode("utf-8", "replace").lower().split():
            place = number.get(word)
            if place is not None and counts[place] < 255:
                counts[place] += 1
        rows.append(counts)
        user.append(name)
        tags.append(frozenset(b"|".join(example.get("tags", [])).decode("utf-8", "replace").split("|")) - {""})
    if not rows:
        raise DataError(f"{path} has no question in its part 'train'")
    return Questions(np.stack(rows), np.array(user), tags)


def _how(file: File) -> str:
    name = Path(file.path).name
    packed = f"{name}.lzma" if name.endswith("sqlite") else f"{name}.tar.bz2"
    return f"Fetch {_TFF}/{packed} and unpack it."


def _first_words(count: int) -> list[str]:
    """Lines of a word and how often it is used, the most used first."""
    path = locate(WORD_COUNTS, "stack-overflow", _how(WORD_COUNTS))
    with reading(path), path.open(encoding="utf-8") as lines:
        found = [line.split()[0] for _, line in zip(range(count), lines, strict=False)]
    return found


def _first_tags(count: int) -> dict[str, int]:
    """The most used tags, and their places: a JSON object of tags and counts."""
    path = locate(TAG_COUNTS, "stack-overflow", _how(TAG_COUNTS))
    with reading(path):
        counts = json.loads(path.read_text(encoding="utf-8"))
        ordered = sorted(counts, key=lambda tag: (-int(counts[tag]), tag))
    return {tag: place for place, tag in enumerate(ordered[:count])}


def read_examples(path: Path, users: int | None = None) -> Iterator[tuple[str, dict[str, list[bytes]]]]:
    """Users and their training examples in a SQLite file of TensorFlow Federated, user by user."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as base:
            limit = -1 if users is None else users
            query = (
                "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = 'train' AND client_id IN "
                "(SELECT DISTINCT client_id FROM client_metadata WHERE split_name = 'train' ORDER BY client_id LIMIT ?)"
                " ORDER BY client_id, rowid"
            )
            for name, message in base.execute(query, (limit,)):
                with reading(path):
                    yield name, parse_example(message)
    except sqlite3.Error as error:
        raise DataError(
            f"cannot read {path} ({error}); expected the SQLite file of TensorFlow Federated, unpacked, with tables "
            "examples and client_metadata"
        ) from error


def parse_example(message: bytes) -> dict[str, list[bytes]]:
    """The byte strings of a tf.Example by the names of their features; numbers are left out.

    A message is Example{features=1{feature=1{key=1, value=2{bytes_list=1{value=1}}}}}, in the wire format of protocol
    buffers, which needs no library for so little.
    """
    found: dict[str, list[bytes]] = {}
    for features in _parts(message, 1):
        for entry in _parts(features, 1):
            key = b"".join(_parts(entry, 1)).decode("utf-8", "replace")
            lists = [one for value in _parts(entry, 2) for one in _parts(value, 1)]
            found[key] = [text for one in lists for text in _parts(one, 1)]
    return found


def _parts(message: bytes, wanted: int) -> list[bytes]:
    """The byte fields of a message with this number."""
    found, at = [], 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            _, at = _varint(message, at)
            continue
        length, at = {1: (8, at), 5: (4, at)}.get(kind) or (_varint(message, at) if kind == 2 else (-1, at))
        if length < 0 or at + length > len(message):
            raise ValueError("an example is cut off or no protocol buffer")
        if number == wanted and kind == 2:
            found.append(message[at : at + length])
        at += length
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        number |= (message[at] & 0x7F) << shift
        at += 1
        if message[at - 1] < 0x80:
            return number, at
    raise ValueError("an example is cut off or no protocol buffer")


def yahoo_answers(features: str | None = None, words: int = 512) -> Source:
    """1,460,000 questions of ten topics (P2 §6.6); Zhang, Zhao and LeCun 2015. Deal them out: ``dirichlet:10``.

    ``features``: an NPZ file in ``yahoo-answers`` with an array ``x`` [rows, d] (P2: 768 numbers of BERT), in the order
    of ``train.csv`` and then ``test.csv``. Otherwise a question is counts of its words, in ``words`` columns: a public
    hash says which column a word has.
    """
    if words < 1:
        raise DataError(f"yahoo-answers: words must be at least 1, got {words}")
    how = (
        "The archive of its authors is on a drive that wants a browser: "
        "https://drive.google.com/uc?export=download&id=0Bz8a_Dbh9Qhbd2JNdDBsQUdocVU "
        f"(md5 {YAHOO_ARCHIVE.md5})."
    )
    y, texts, tests = read_yahoo_archive(locate(YAHOO_ARCHIVE, "yahoo-answers", how))
    if features is not None:
        x = _rows_of(data_folder() / "yahoo-answers" / features, len(y))
    else:
        from sklearn.feature_extraction.text import HashingVectorizer

        counts = HashingVectorizer(n_features=words, norm=None, alternate_sign=False, dtype=np.float32)
        x = np.concatenate([counts.transform(texts[i : i + 4096]).toarray().clip(max=255).astype(np.uint8)
                            for i in range(0, len(texts), 4096)])  # fmt: skip
    is_test = np.arange(len(y)) >= len(y) - tests
    return Source("yahoo-answers", "features", x, y, len(_TOPICS), _TOPICS, is_test=is_test, network="dense")


def _rows_of(path: Path, rows: int) -> Array:
    if not path.is_file():
        raise DataError(f"there is no file {path}; it should hold an array x [{rows}, d]")
    with open_npz(path) as arrays:
        if "x" not in arrays or arrays["x"].ndim != 2 or len(arrays["x"]) != rows:
            raise DataError(f"{path} should hold an array x [{rows}, d], a row for each question of the archive")
        x: Array = arrays["x"].astype(np.float32)
    return x


def read_yahoo_archive(path: Path) -> tuple[Array, list[str], int]:
    """Classes, texts, and how many of the last are test rows. A line: class from 1, title, question, best answer."""
    parts: dict[str, tuple[list[int], list[str]]] = {}
    names = {"yahoo_answers_csv/train.csv": "train", "yahoo_answers_csv/test.csv": "test"}
    with reading(path), tarfile.open(path, "r:gz") as archive:
        for member in archive:
            part = names.get(member.name.removeprefix("./"))
            file = archive.extractfile(member) if part else None
            if part and file is not None:
                parts[part] = _read_lines(io.TextIOWrapper(file, encoding="utf-8", newline=""), f"{path}: {part}.csv")
        if missing := [part for part in ("train", "test") if part not in parts]:
            raise ValueError(f"the archive has no file yahoo_answers_csv/{missing[0]}.csv")
    (y, texts), (test_y, test_texts) = parts["train"], parts["test"]
    return np.array(y + test_y, dtype=np.int64), texts + test_texts, len(test_y)


def _read_lines(lines: io.TextIOBase, where: str) -> tuple[list[int], list[str]]:
    y: list[int] = []
    texts: list[str] = []
    for number, row in enumerate(csv.reader(lines), start=1):
        if len(row) != 4 or not row[0].isdigit() or not 1 <= int(row[0]) <= len(_TOPICS):
            raise DataError(
                f"{where}, row {number}: expected a class of 1 to 10, title, question, answer, got {row[:1]}"
            )
        y.append(int(row[0]) - 1)
        texts.append(" ".join(row[1:]).replace("\\n", " "))
    return y, texts
