"""The codec gives back what was sent, and refuses everything else with an error."""

import json
import pickle

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.extra.numpy import array_shapes, arrays

from unalike.core.wire import WireError, decode, encode

NAMES = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
ARRAYS = st.one_of(
    arrays(np.float32, array_shapes(min_dims=0, max_dims=3, max_side=4), elements=st.floats(width=32)),
    arrays(np.int64, array_shapes(min_dims=0, max_dims=2, max_side=4)),
    arrays(np.bool_, (3,)),
).map(torch.from_numpy)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False), st.text(max_size=9)
)


@given(st.dictionaries(NAMES, st.one_of(ARRAYS, PLAIN), max_size=5))
def test_round_trip(message: dict[str, torch.Tensor]) -> None:
    back = decode(encode(message))
    assert back.keys() == message.keys()
    for name, value in message.items():
        if isinstance(value, torch.Tensor):
            assert back[name].dtype == value.dtype and back[name].shape == value.shape
            assert back[name].numpy().tobytes() == value.numpy().tobytes()
        else:
            assert back[name] == value


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@given(st.data())
def test_a_damaged_message_is_refused_or_still_only_arrays_and_values(data: st.DataObject) -> None:
    good = bytearray(encode({"theta": torch.arange(6.0), "n": 3}))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    try:
        message = decode(bytes(good[:cut]))
    except WireError:
        return
    assert all(isinstance(v, torch.Tensor | bool | int | float | str | None) for v in message.values())


def test_code_and_objects_never_cross() -> None:
    with pytest.raises(WireError, match="only tensors and plain values"):
        encode({"f": print})  # type: ignore[dict-item]
    with pytest.raises(WireError, match="only tensors and plain values"):
        encode({"l": [1, 2]})  # type: ignore[dict-item]
    with pytest.raises(WireError):
        decode(pickle.dumps({"theta": 1}))
    with pytest.raises(WireError, match="only dense real arrays"):
        encode({"z": torch.zeros(2, dtype=torch.complex64)})


def test_sizes_are_bounded() -> None:
    with pytest.raises(WireError, match="over"):
        encode({"x": torch.zeros(1000)}, max_bytes=100)
    with pytest.raises(WireError, match="over the limit"):
        decode(bytes((1 << 26) + 200), max_bytes=100)
    with pytest.raises(WireError, match="bytes of plain values is over"):
        encode({"text": "x" * (1 << 25)})
    huge = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    with pytest.raises(WireError, match="malformed"):
        decode(len(huge).to_bytes(8, "little") + huge)


def test_views_of_one_tensor_are_sent_like_any_other() -> None:
    base = torch.arange(6.0)
    back = decode(encode({"a": base, "b": base[2:], "c": base.expand(2, 6).T}))
    assert torch.equal(back["b"], base[2:]) and torch.equal(back["c"], base.expand(2, 6).T)
