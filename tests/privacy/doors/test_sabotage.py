"""A shard that lies about what its clients send: it costs its own clients, and moves nothing of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from unalike import Client, Clients, Each, Federation, Simulator, Sum, send, task
from unalike.core import wire
from unalike.core.federation import Replies
from unalike.core.release import Partial, Release, Trust
from unalike.core.request import Program, Reply, Request
from unalike.core.roster import MOST_ROWS, Roster
from unalike.core.task import Sent
from unalike.privacy import Gaussian, Laplace
from unalike.runtime.shard.shard import Shard
from unalike.runtime.simulate import Simulation

ROWS = Clients.from_sizes(torch.full((6, 2), 0.1), None, torch.tensor([2, 2, 2]))
LIAR = 1


@dataclass(frozen=True)
class Sums:
    releases: tuple[Release, ...]

    @task
    def look(self, client: Client) -> Sent:
        return send(value=client.sum(client.x))

    @task
    def far(self, client: Client) -> Sent:
        """Starts from a number that has nothing to do with the data."""
        return send(value=100.0 + client.sum(client.x))


class Lying(Simulation):
    """What one of the shards says goes through a lie."""

    lie: Callable[[Reply], Reply]

    def _answers(self, number: int, part: Request) -> Iterator[Reply]:
        replies = super()._answers(number, part)
        return map(self.lie, replies) if number == LIAR else replies


def ask(lie: Callable[[Reply], Reply], into: Release, trust: Trust = "nobody", task_name: str = "look") -> Replies:
    program = Program(open=True)
    shards = [
        Shard({"train": mine}, mine.roster(), program, Simulator(block=1, threads=1))
        for mine in (ROWS.select([number]) for number in range(3))
    ]
    runtime = Lying(shards, program)
    runtime.lie = lie
    federation = Federation(runtime, noise="seeded", trust=trust, quorum=0.1)
    return federation.everyone().ask(getattr(Sums((into,)), task_name), into=into)


def heavier(reply: Reply) -> Reply:
    partials = {place: replace(one, total=one.total + 1e30) for place, one in reply.partials.items()}
    arrays = [{name: value + 1e30 for name, value in one.items()} for one in reply.arrays]
    return replace(reply, partials=partials, arrays=arrays)


BOUNDED: list[Release] = [
    Sum("value", clip=1.0, noise=Gaussian(2.0)),
    Sum("value", clip=1.0, noise=Laplace(1.0)),
    Each("value", clip=1.0),
    Each("value", clip=1.0, noise=Gaussian(2.0)),
    Each("value", clip=1.0, noise=Laplace(1.0), sensitivity=0.5, unit="point"),
]

NAMES = ["sum", "sum, Laplace", "each", "each, noisy", "each, of points"]


@pytest.mark.parametrize("trust", ["server", "nobody"])
@pytest.mark.parametrize("into", BOUNDED, ids=NAMES)
def test_a_shard_that_adds_1e30_is_left_out(into: Release, trust: Trust) -> None:
    replies = ask(heavier, into, trust)
    assert replies.answered.tolist() == [0, 2]
    assert float(replies["value"].abs().max()) < 1e3
    assert "beyond" in replies.failures[0].reason or "longer than" in replies.failures[0].reason


@pytest.mark.parametrize("trust", ["server", "nobody"])
def test_a_sensitivity_bounds_how_far_points_move_a_sum_and_not_where_it_lies(trust: Trust) -> None:
    offset = Sum("value", noise=Gaussian(1.0), sensitivity=1.0, unit="point")
    replies = ask(lambda reply: reply, offset, trust, task_name="far")
    assert replies.answered.tolist() == [0, 1, 2] and not replies.failures
    assert torch.allclose(replies["value"], torch.full((2,), 300.0), atol=20.0)


SUM_OF_POINTS = Sum("value", noise=Gaussian(2.0), sensitivity=0.5, unit="point")
SUM_OF_ROWS = replace(SUM_OF_POINTS, of_rows=True)


@pytest.mark.parametrize("trust", ["server", "nobody"])
def test_declared_rows_bound_a_sum_with_a_term_for_each(trust: Trust) -> None:
    replies = ask(heavier, SUM_OF_ROWS, trust)
    assert replies.answered.tolist() == [0, 2] and "beyond 2 rows of 0.5" in replies.failures[0].reason
    with pytest.raises(ValueError, match="of_rows says that each row adds a term"):
        Sum("value", clip=1.0, noise=Gaussian(1.0), of_rows=True)


@pytest.mark.parametrize("into", [*BOUNDED, SUM_OF_POINTS, SUM_OF_ROWS], ids=[*NAMES, "sum of points", "of rows"])
def test_honest_noise_is_never_taken_for_a_lie(into: Release) -> None:
    for _ in range(20):
        assert ask(lambda reply: reply, into).answered.tolist() == [0, 1, 2]


def test_types_that_nothing_computes_with_do_not_come_in() -> None:
    small = torch.zeros(2, 3).to(torch.float8_e4m3fn)
    with pytest.raises(wire.WireError, match="float8"):
        wire.decode(save({"0.value": small}))
    reply = Reply(
        torch.arange(2), ({},), {}, {0: Partial(torch.zeros(3, dtype=torch.float64), 0.0, 2, "float8_e4m3fn")}
    )
    with pytest.raises(wire.WireError, match="float8"):
        Reply.decode(reply.encode())


def test_a_reply_about_strangers_costs_its_own_shard_only() -> None:
    replies = ask(lambda reply: replace(reply, rows=reply.rows + 7), Each("value"))
    assert replies.answered.tolist() == [0, 2] and "nonsense" in replies.failures[0].reason


def test_an_array_without_numbers_does_not_stop_the_server() -> None:
    def empty(reply: Reply) -> Reply:
        return replace(reply, arrays=[{"value": torch.zeros(len(reply.rows), 0)} for _ in reply.arrays])

    assert ask(empty, Each("value")).answered.tolist() == [0, 2]


@pytest.mark.parametrize("rows", [MOST_ROWS + 1, 2**40, 2**62])
def test_a_declared_size_that_calibration_would_never_end_with_is_refused(rows: int) -> None:
    known: Any = ROWS.roster()
    declared = wire.encode({**wire.decode(known.encode()), "bound": torch.full((3,), rows)})
    with pytest.raises(wire.WireError, match="the most are"):
        Roster.decode(declared)
