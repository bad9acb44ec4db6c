"""Requests, replies, rosters and schemas come out of bytes as they went in; nonsense is a ``WireError``, never another
error; and a closed program runs and lets out only what it agreed to."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.extra.numpy import array_shapes, arrays
from torch import Tensor

from tests.core.helpers import clients
from unalike import Client, Each, Mean, Sum, send, task
from unalike.core.failure import Diverged
from unalike.core.release import Partial, Release
from unalike.core.request import Program, ReleaseName, Reply, Request
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.core.task import Sent
from unalike.core.wire import WireError, decode, encode
from unalike.privacy import Gaussian

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NAMES = st.text("abc.xyz_", min_size=1, max_size=8)


def floats(*shape: int) -> st.SearchStrategy[Tensor]:
    return arrays(np.float32, shape, elements=st.floats(width=32)).map(torch.from_numpy)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    shape = draw(array_shapes(max_dims=3, max_side=4))
    scaled = draw(st.booleans())
    constants = floats(*shape).map(lambda one: torch.where(one.isnan(), 0.0, one))  # text has one NaN, bits have many
    columns = draw(st.none() | st.dictionaries(WORDS, st.none() | st.lists(WORDS, max_size=3).map(tuple), max_size=3))
    return Schema(
        shape,
        kind=draw(st.sampled_from(["image", "features", "tokens"])),
        stored=draw(st.sampled_from(["uint8", "float32", "float64", "int64"])),
        target=draw(st.sampled_from(["class", "number", "none"])),
        classes=draw(st.none() | st.integers(1, 100)),
        class_names=draw(st.none() | st.lists(WORDS, max_size=4).map(tuple)),
        columns=columns,
        shift=draw(constants) if scaled else None,
        scale=draw(constants) if scaled else None,
    )


@st.composite
def rosters(draw: st.DrawFn) -> Roster:
    ids = draw(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=6, unique=True))
    bound = draw(st.lists(st.integers(1, 2**27), min_size=len(ids), max_size=len(ids)))
    labeled = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    return Roster(torch.tensor(ids), torch.tensor(bound), torch.tensor(labeled), draw(schemas()))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    ids = torch.tensor(draw(st.lists(st.integers(0, 2**40), max_size=5, unique=True)), dtype=torch.int64)
    wanted = st.builds(ReleaseName, WORDS, st.lists(WORDS, max_size=3).map(tuple))
    return Request(
        run=draw(WORDS),
        serial=draw(st.integers(0, 2**40)),
        task=draw(WORDS),
        ids=ids,
        part=draw(st.sampled_from(["train", "validation", "test"])),
        labels=draw(st.booleans()),
        purpose=draw(st.sampled_from(["train", "serve", "measure"])),
        key=draw(st.integers(-(2**63), 2**63 - 1)),
        wanted=tuple(draw(st.lists(wanted, max_size=3))),
        shared=draw(st.dictionaries(NAMES, floats(2), max_size=3)),
        each=draw(st.dictionaries(NAMES, floats(len(ids), 2), max_size=3)),
        held=draw(st.dictionaries(NAMES, WORDS, max_size=2)),
    )


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    rows = torch.tensor(draw(st.lists(st.integers(0, 99), max_size=5, unique=True)), dtype=torch.int64)
    total = floats(3).map(lambda value: value.to(torch.float64))
    partial = st.builds(Partial, total, st.floats(), st.integers(), st.sampled_from(["float32", "float64"]))
    return Reply(
        rows,
        draw(st.lists(st.dictionaries(NAMES, floats(len(rows), 2), max_size=3), max_size=3)),
        draw(st.dictionaries(st.integers(0, 99), WORDS | WORDS.map(Diverged), max_size=3)),
        draw(st.dictionaries(st.integers(0, 9), partial, max_size=2)),
        draw(WORDS),
        draw(st.integers(0, 2**40)),
    )


def same(mine: object, theirs: object) -> bool:
    """Equal, arrays bit for bit, so that NaN is NaN."""
    if isinstance(mine, Tensor):
        assert isinstance(theirs, Tensor)
        return (
            mine.dtype == theirs.dtype
            and mine.shape == theirs.shape
            and mine.numpy().tobytes() == theirs.numpy().tobytes()
        )
    if isinstance(mine, dict):
        assert isinstance(theirs, dict)
        return mine.keys() == theirs.keys() and all(same(mine[name], theirs[name]) for name in mine)
    if isinstance(mine, list | tuple):
        assert isinstance(theirs, list | tuple)
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    if isinstance(mine, Request | Reply | Partial):
        return type(mine) is type(theirs) and same(vars(mine), vars(theirs))
    if isinstance(mine, Diverged) != isinstance(theirs, Diverged):
        return False
    return mine == theirs or (mine != mine and theirs != theirs)


@given(requests())
def test_a_request_comes_back(request: Request) -> None:
    assert same(Request.decode(request.encode()), request)


@given(replies())
def test_a_reply_comes_back(reply: Reply) -> None:
    assert same(Reply.decode(reply.encode()), reply)


@given(schemas())
def test_a_schema_comes_back(schema: Schema) -> None:
    back = Schema.from_json(schema.to_json())
    assert back == schema and hash(back) == hash(schema)
    assert same(vars(back), vars(schema))


@given(rosters(), st.booleans())
def test_a_roster_comes_back(roster: Roster, named: bool) -> None:
    if named:
        ids = range(len(roster))
        roster = replace(roster, ids=torch.tensor(ids), names=[f"client {i}" for i in ids])
    back = Roster.decode(roster.encode())
    for name in ("ids", "bound", "labeled"):
        assert torch.equal(getattr(back, name), getattr(roster, name))
    assert back.schema == roster.schema
    assert [back.name(i) for i in range(len(back))] == [roster.name(i) for i in range(len(roster))]
    assert (back.names is None) == (roster.names is None)


def test_one_row_repeated_for_everybody_is_sent_once_and_stays_that() -> None:
    theta = torch.arange(1000.0)
    request = replace(GOOD, ids=torch.arange(50), each={"theta": theta.expand(50, -1), "own": torch.ones(50)})
    data = request.encode()
    assert len(data) < 2 * theta.nbytes
    back = Request.decode(data).each
    assert torch.equal(back["theta"], theta.expand(50, -1)) and back["theta"].stride(0) == 0
    assert torch.equal(back["own"], torch.ones(50)) and back["own"].stride(0) == 1


def test_the_names_of_very_many_clients_fit() -> None:
    store = replace(clients([1] * 60_000), names=[f"hospital ward {i:06}" for i in range(60_000)])
    assert Roster.decode(store.roster().encode()).name(59_999) == "hospital ward 059999"
    reply = Reply(torch.arange(0), (), dict.fromkeys(range(60000), "the connection broke off"))
    assert len(Reply.decode(reply.encode()).failed) == 60_000


# Nonsense

GOOD = Request("run", 1, "fit", torch.arange(2), "train", True, "train", 7, (ReleaseName("each", ("a",)),), {}, {})
SAID = Reply(
    torch.arange(2),
    [{"a": torch.zeros(2)}],
    {3: "no", 4: Diverged("NaN")},
    {0: Partial(torch.zeros(2).double(), 1.0, 2)},
)
MESSAGES: list[tuple[bytes, Callable[[bytes], object]]] = [
    (GOOD.encode(), Request.decode),
    (SAID.encode(), Reply.decode),
    (clients([3, 2]).roster().encode(), Roster.decode),
]


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_bytes_are_a_wire_error_and_nothing_else(message: tuple[bytes, Callable], data: st.DataObject) -> None:  # type: ignore[type-arg]
    good, read = bytearray(message[0]), message[1]
    for _ in range(data.draw(st.integers(0, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        read(bytes(good[: data.draw(st.integers(0, len(good)))]))


_WILD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), _WILD.map(json.dumps),
    floats(2), floats(), st.just(torch.zeros(2, dtype=torch.int64)), st.just("[" * 100_000),
)  # fmt: skip


@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_other_values_is_a_wire_error_and_nothing_else(
    message: tuple[bytes, Callable],  # type: ignore[type-arg]
    data: st.DataObject,
) -> None:
    values, read = decode(message[0]), message[1]
    names = [*values, "0.a", "sum.0", "sum.0.weight", "sum.٣", "9999999.a", "each.x", "repeated.x", "shared", "schema"]
    for name in data.draw(st.lists(st.sampled_from(names), max_size=3)):
        values[name] = data.draw(_VALUES)
    for name in data.draw(st.lists(st.sampled_from(names), max_size=1)):
        values.pop(name, None)
    with contextlib.suppress(WireError):
        read(encode(values))


@given(_WILD.map(json.dumps))
def test_a_text_that_is_no_schema_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Schema.from_json(text)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"part": "all"}, "part 'all'"),
        ({"purpose": "fun"}, "purpose 'fun'"),
        ({"key": 1 << 63}, "64-bit integer"),
        ({"labels": 1}, "'labels' is 1; expected bool"),
        ({"ids": torch.zeros(2)}, "ids of its clients"),
        ({"each.x": torch.zeros(3)}, r"each\(x\) has shape \(3,\) for 2 clients"),
        ({"wanted": "{}"}, "'wanted' is not a list"),
        ({"wanted": "[1]"}, "malformed"),
        ({"held": "[" * 100_000}, "'held' is not JSON"),
    ],
)
def test_a_request_says_what_is_wrong_with_it(changed: dict[str, object], expected: str) -> None:
    with pytest.raises(WireError, match=expected):
        Request.decode(encode({**decode(GOOD.encode()), **changed}))  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kind": "sound"}, "kind='sound'; expected one of image, features, tokens"),
        ({"target": "both"}, "target='both'"),
        ({"stored": "float8"}, "stored as 'float8'"),
        ({"shape": (2, -1)}, r"shape=\(2, -1\)"),
        ({"classes": 0}, "classes=0; expected 1 or more"),
        ({"shift": torch.zeros(2)}, "shift and scale together"),
        ({"shift": torch.zeros(2).double(), "scale": torch.ones(2)}, r"shift is torch\.float64"),
    ],
)
def test_a_schema_says_what_is_wrong_with_it(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Schema(**{"shape": (2,), **fields})  # type: ignore[arg-type]


def test_rosters_of_shards_are_joined_in_the_order_of_ids_or_refused() -> None:
    store = replace(clients([3, 1, 4, 2]), names=["d", "c", "b", "a"])
    whole = store.roster()
    joined = Roster.join([whole.select([3, 1]), whole.select([0, 2])])
    assert torch.equal(joined.ids, whole.ids) and torch.equal(joined.bound, whole.bound)
    assert [joined.name(i) for i in range(4)] == ["d", "c", "b", "a"]
    with pytest.raises(ValueError, match="client 1 is in two shards"):
        Roster.join([whole.select([0, 1]), whole.select([1])])
    other = clients([2], features=5).roster()
    with pytest.raises(ValueError, match="different schemas"):
        Roster.join([whole, other])
    with pytest.raises(ValueError, match="the same id"):
        whole.select([0, 0])


# Programs


@dataclass(frozen=True)
class Agreed:
    @task
    def fit(self, client: Client, theta: Tensor) -> Sent:
        return send(update=theta, loss=theta.sum())

    @fit.into
    def sums(self) -> list[Release]:
        return [Mean("update", clip=2.0, noise=Gaussian(1.0)), Sum("loss")]

    @task
    def free(self, client: Client) -> Sent:
        return send(update=client.mean(client.x))


def asked(task: str, *wanted: ReleaseName) -> Request:
    return replace(GOOD, task=task, wanted=wanted)


def test_a_closed_program_gives_a_declared_release_its_own_bounds() -> None:
    program = Program([Agreed().fit, Agreed().free])
    mean, loss = program.releases(asked("Agreed.fit", ReleaseName("mean", ("update",)), ReleaseName("sum", ("loss",))))
    assert (mean, loss) == (Mean("update", clip=2.0, noise=Gaussian(1.0)), Sum("loss"))
    assert program.releases(asked("Agreed.fit")) == []  # nothing is let out
    each, weighted = program.releases(asked("Agreed.free", ReleaseName("each", ()), ReleaseName("mean", ("a", "w"))))
    assert isinstance(each, Each) and weighted == Mean("a", weight="w")


@pytest.mark.parametrize(
    ("task", "wanted", "expected"),
    [
        (
            "Agreed.fit",
            ReleaseName("each", ("update",)),
            r"lets out mean\(update\), sum\(loss\), but was asked for each",
        ),
        ("Agreed.fit", ReleaseName("sum", ("update",)), r"asked for sum\(update\)"),
        ("Agreed.fit", ReleaseName("mean", ("loss",)), r"asked for mean\(loss\)"),
        ("Agreed.fit", ReleaseName("stays", ("update",)), r"asked for stays\(update\)"),
        ("Agreed.free", ReleaseName("gift", ("update",)), "no release is called 'gift'"),
        ("Agreed.free", ReleaseName("sum", ()), "no plain release"),
        ("Agreed.free", ReleaseName("sum", ("update", "clip")), "no plain release"),
        ("Agreed.free", ReleaseName("mean", ("a", "b", "c")), "no plain release"),
        ("Agreed.free", ReleaseName("stays", ()), "no plain release"),
        ("Agreed.steal", ReleaseName("each", ()), "no task 'Agreed.steal' is in the program"),
    ],
)
def test_a_closed_program_refuses_what_it_did_not_agree_to(task: str, wanted: ReleaseName, expected: str) -> None:
    program = Program([Agreed().fit, Agreed().free])
    with pytest.raises(WireError, match=expected):
        program.releases(asked(task, wanted))


def test_a_closed_program_cannot_be_taught() -> None:
    with pytest.raises(ValueError, match=r"Agreed\.free is not in the program that the clients agreed to"):
        Program([Agreed().fit]).teach(Agreed().free, [Each()])
    program = Program([Agreed().fit])
    program.teach(Agreed().fit, [Each("update")])
    with pytest.raises(WireError, match="asked for each"):
        program.releases(asked("Agreed.fit", ReleaseName("each", ("update",))))
