"""Text sources: Shakespeare's roles, next character."""

from __future__ import annotations

import gzip
import json

import numpy as np

from unalike.data.files.archive import reading
from unalike.data.source import DataError, Names, Source
from unalike.data.sources.folder import File, locate

SHAKESPEARE_FILE = File(
    "shakespeare/shakespeare_roles.json.gz", "1859032a514df350a7991af7d37ff7a0a27f807860bee900ec12edb1c2d11503"
)
_TEST_SHARE = 0.2


def shakespeare(length: int = 80, stride: int = 10) -> Source:
    """The plays by speaking role: predict the character that follows ``length`` characters.

    A role's speeches are joined and cut into windows that begin every ``stride`` characters (1 gives all of LEAF's
    kind, and ten times the memory). The last fifth of a role's text is its test part, and no window reaches across the
    border, because windows overlap and a random division would put training text into the test. Roles too short for a
    training window are left out.
    """
    if length < 1 or stride < 1:
        raise DataError(f"shakespeare: length and stride must be at least 1, got {length} and {stride}")
    how = "Make it from any edition as gzipped JSON: a list of {play, role, speeches}."
    path = locate(SHAKESPEARE_FILE, "shakespeare", how)
    with reading(path, SHAKESPEARE_FILE.sha256):
        roles = json.loads(gzip.decompress(path.read_bytes()))
        texts = ["\n".join(role["speeches"]) for role in roles]
        names = [f"{role['play']}: {role['role']}" for role in roles]
    characters = sorted(set().union(*texts))
    code = np.zeros(max(map(ord, characters)) + 1, dtype=np.int64)
    code[[ord(c) for c in characters]] = np.arange(len(characters))
    windows, clients, test = [], [], []
    kept: list[str] = []
    dropped: list[str] = []
    for name, text in zip(names, texts, strict=True):
        tokens = code[np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)]
        border = int(len(tokens) * (1 - _TEST_SHARE))
        if border <= length:
            dropped.append(name)
            continue
        for part, is_test in ((tokens[:border], False), (tokens[border:], True)):
            if len(part) > length:
                cut = np.lib.stride_tricks.sliding_window_view(part, length + 1)[::stride]
                windows.append(cut)
                clients.append(np.full(len(cut), len(kept)))
                test.append(np.full(len(cut), is_test))
        kept.append(name)
    joined = np.concatenate(windows)
    return Source(
        name="shakespeare",
        kind="tokens",
        x=np.ascontiguousarray(joined[:, :-1]),
        y=joined[:, -1].copy(),
        classes=len(characters),
        class_names=characters,
        client=np.concatenate(clients),
        client_names=Names(np.array(kept)),
        is_test=np.concatenate(test),
        normalize="none",
        dropped=dropped,
    )
