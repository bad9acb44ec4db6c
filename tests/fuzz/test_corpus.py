"""What once broke a reader, and some damage done to what it accepts: it is refused with a clear error."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_strangers_bytes_are_read_or_refused(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    assert all(target(seed) for seed in seeds), "a seed is to be accepted"
    for one in sorted((CORPUS / name).glob("*")):
        target(one.read_bytes())
    chance = random.Random(0)
    for _ in range(40):
        target(damaged(chance.choice(seeds), chance))


def damaged(data: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, a piece left out, repeated or cut off."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        begin = chance.randrange(len(made) or 1)
        end = min(len(made), begin + chance.randint(1, 16))
        match chance.randrange(4):
            case 0:
                made[begin:end] = chance.randbytes(end - begin)
            case 1:
                del made[begin:end]
            case 2:
                made[begin:begin] = made[begin:end]
            case 3:
                del made[end:]
    return bytes(made)


def test_what_is_no_clear_error_is_a_fault() -> None:
    def fails(data: bytes) -> None:
        raise KeyError(data)

    def writes(data: bytes) -> None:
        Path("elsewhere").write_bytes(data)

    for read in (fails, writes):
        with pytest.raises((KeyError, AssertionError)):
            Target(read, list)(b"x")
    assert not Path("elsewhere").exists()
