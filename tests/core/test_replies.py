"""A shard that answers nonsense: its clients are failures with the reason, and the others' result is right."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.core.helpers import clients, total
from unalike import Client, Clients, Each, Federation, Mean, Sum, send, simulate, task
from unalike.core.federation import Replies
from unalike.core.release import SIZE, Release
from unalike.core.request import Program, Reply, Request
from unalike.core.task import Sent
from unalike.privacy import Gaussian
from unalike.runs.simulate import simulation
from unalike.runtime.simulate import Simulation

SIZES = [2, 5, 3, 4, 1, 6]
STORE = clients(SIZES)
LIAR = 1  # of three shards: clients 1 and 4
OWN = torch.stack([STORE.rows(i)[0].sum(0) for i in range(6)])
HONEST = [0, 2, 3, 5]
Lie = Callable[[list[Reply]], list[Reply]]


class Lying(Simulation):
    """One shard's replies go through a lie."""

    lie: Lie

    def deliver(self, request: Request) -> Iterator[Reply]:
        said = list(super().deliver(request))
        yield from (reply for reply in said if reply.shard != LIAR)
        yield from self.lie([reply for reply in said if reply.shard == LIAR])


def asked(lie: Lie, *into: Release) -> tuple[Replies, Federation]:
    usual = simulation(STORE, shards=3, block=1)
    runtime = Lying(usual.shards, usual.program)
    runtime.lie = lie
    federation = Federation(runtime)
    return federation.everyone().ask(total, into=into), federation


def summed(change: Callable[[Reply], Reply]) -> Lie:
    """A lie about the sums."""
    return lambda said: [change(reply) if reply.partials else reply for reply in said]


def with_sum(place: int, **changes: object) -> Lie:
    def change(reply: Reply) -> Reply:
        return replace(
            reply,
            partials={**reply.partials, place: replace(reply.partials[place], **changes)},  # type: ignore[arg-type]
        )

    return summed(change)


def without(place: int) -> Lie:
    return summed(lambda r: replace(r, partials={p: one for p, one in r.partials.items() if p != place}))


LIES: dict[str, tuple[Lie, str]] = {
    "NaN": (with_sum(1, total=torch.full((3,), torch.nan).double()), "partial sum of 'total' that is not finite"),
    "infinite": (with_sum(1, total=torch.full((3,), torch.inf).double()), "not finite"),
    "too long": (with_sum(0, total=torch.full((), 1e9).double()), "of norm 1e.09, beyond 2 times its clip 10"),
    "shape": (with_sum(1, total=torch.zeros(2).double()), r"'total' of shape \(2,\), expected \(3,\)"),
    "scalar": (with_sum(1, total=torch.zeros(()).double()), r"'total' of shape \(\), expected \(3,\)"),
    "count": (with_sum(1, count=3), "counts 3 clients in a sum, but 2 answered"),
    "negative count": (with_sum(1, count=-2), "counts -2 clients"),
    "weight": (with_sum(2, weight=1e6), "weighs its clients by 1e.06, which is not what they declared"),
    "NaN weight": (with_sum(2, weight=float("nan")), "weighs its clients by nan"),
    "one sum less": (without(2), "sent 2 sums, but 3 were asked for"),
    "no sum": (lambda said: [reply for reply in said if not reply.partials], "its shard sent no sum"),
    "no reply": (lambda said: [], "did not answer"),
    "a sum too many": (
        summed(lambda r: replace(r, partials={**r.partials, 7: r.partials[0]})),
        "sent 4 sums, but 3 were asked for",
    ),
    "other names": (
        lambda said: [replace(r, arrays=[{"n": torch.zeros(1)}, *r.arrays[1:]]) if len(r.rows) else r for r in said],
        "sent the arrays n of each client, but was asked for none",
    ),
    "fewer releases": (
        lambda said: [replace(r, arrays=r.arrays[:1]) if len(r.rows) else r for r in said],
        "answered for 1 releases, but there are 3",
    ),
    "unknown rows": (
        lambda said: [replace(r, rows=r.rows + 90) if len(r.rows) else r for r in said],
        "did not answer",
    ),
    "others' rows": (
        lambda said: [replace(r, rows=torch.zeros_like(r.rows)) if len(r.rows) else r for r in said],
        "did not answer",
    ),
    "another request's serial": (lambda said: [replace(r, serial=r.serial + 1) for r in said], "did not answer"),
    "another run": (lambda said: [replace(r, run="other") for r in said], "did not answer"),
    "failed after it answered": (
        lambda said: [replace(said[0], failed={int(row): "gone" for row in said[0].rows}), *said[1:]],
        "gone|its shard",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_shards_nonsense_costs_its_own_clients_and_nobody_elses(name: str) -> None:
    lie, reason = LIES[name]
    replies, federation = asked(lie, Sum("n", clip=10.0), Sum("total"), Mean("total", weight=SIZE))
    sizes = torch.tensor(SIZES, dtype=torch.float32)
    expected = (sizes[:, None] * OWN)[HONEST].sum(0) / sizes[HONEST].sum()
    assert replies.answered.tolist() == HONEST
    assert float(replies["n"]) == float(sizes[HONEST].sum())  # a good sum of the same shard is not used either
    assert torch.allclose(replies["total"], expected, atol=1e-5)
    assert {failure.client for failure in replies.failures} == {"1", "4"}
    assert all(re.search(reason, failure.reason) for failure in replies.failures), replies.failures
    assert all(failure.diverged == (name in ("NaN", "infinite")) for failure in replies.failures)
    rows = {row["array"]: row["replies"] for row in federation.transcript.rows()}
    assert rows["n"] == 4


def test_the_truth_is_taken() -> None:
    replies, _ = asked(lambda said: said, Sum("n", clip=10.0), Sum("total"), Mean("total", weight=SIZE))
    assert replies.answered.tolist() == list(range(6)) and not replies.failures


def test_what_a_shard_adds_after_its_sums_is_not_counted() -> None:
    replies, _ = asked(lambda said: [*said, *said], Sum("total"))
    assert replies.answered.tolist() == list(range(6)) and not replies.failures
    assert torch.allclose(replies["total"], OWN.sum(0), atol=1e-5)


def test_a_late_reply_to_an_earlier_ask_is_passed_over() -> None:
    def late(said: list[Reply]) -> list[Reply]:
        wrong = [
            replace(r, serial=r.serial - 1, partials={}, failed={int(row): "late" for row in r.rows}) for r in said
        ]
        return [*wrong, *said]

    replies, _ = asked(late, Sum("total"))
    assert replies.answered.tolist() == list(range(6)) and not replies.failures
    assert torch.allclose(replies["total"], OWN.sum(0), atol=1e-5)


def each_row(change: Callable[[Tensor], Tensor]) -> Lie:
    return lambda said: [
        replace(r, arrays=[{name: change(value) for name, value in one.items()} for one in r.arrays]) for r in said
    ]


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (each_row(lambda value: value * torch.nan), r"the array 'total' is not finite"),
        (each_row(lambda value: value[:, :1]), r"sent arrays of shapes \[\{'total': \(1,\)\}\]"),
        (
            lambda said: [replace(r, arrays=[{"x": r.arrays[0]["total"]}]) for r in said],
            "sent the arrays x of each client, but was asked for total",
        ),
        (
            lambda said: [replace(r, arrays=[{**r.arrays[0], "x": r.arrays[0]["total"]}]) for r in said],
            "sent the arrays total, x of each client, but was asked for total",
        ),
    ],
)
def test_rows_that_are_nonsense_are_left_out(lie: Lie, reason: str) -> None:
    replies, _ = asked(lie, Each("total"))
    assert replies.answered.tolist() == HONEST
    assert torch.allclose(replies["total"], OWN[HONEST], atol=1e-5)
    assert {failure.client for failure in replies.failures} == {"1", "4"}
    assert all(re.search(reason, failure.reason) for failure in replies.failures), replies.failures


def test_rows_that_came_before_the_connection_broke_count_alone_but_not_in_a_sum() -> None:
    def broken(said: list[Reply]) -> list[Reply]:
        lost = {4 if int(said[0].rows) == 1 else 1: "broke"}
        return [said[0], replace(said[0], rows=said[0].rows[:0], arrays=(), failed=lost)]

    replies, _ = asked(broken, Each("total"))
    assert len(replies.answered) == 5 and [failure.reason for failure in replies.failures] == ["broke"]
    replies, _ = asked(broken, Sum("total"))
    assert replies.answered.tolist() == HONEST
    assert sorted(failure.reason for failure in replies.failures) == ["broke", "its shard sent no sum"]


@task
def uneven(client: Client) -> Sent:
    return send(value=torch.ones(1 if float(client.x[0, 0]) > 5 else 3))


@pytest.mark.filterwarnings("ignore::unalike.runtime.shard.simulator.LoopInstead")
@pytest.mark.parametrize("block", [1, 2])
def test_an_array_of_another_shape_is_not_added_to_a_sum(block: int) -> None:
    store = clients([2] * 4)
    store.x[2, 0] = 9.0
    replies = simulate(store, block=block).everyone().ask(uneven, into=Sum("value"))
    assert replies["value"].tolist() == [3.0] * 3 and replies.answered.tolist() == [0, 2, 3]


# Shards elsewhere: a dry run tells the shapes, so that not even the first one that answers can set them


@dataclass(frozen=True)
class Totals:
    @task
    def both(self, client: Client, theta: Tensor) -> Sent:
        return send(total=client.sum(client.x), product=theta @ client.mean(client.x), rows=client.x)


class FirstLies(Simulation):
    """All that the first shard says has another shape; the program is closed, as that of shards elsewhere."""

    def deliver(self, request: Request) -> Iterator[Reply]:
        for reply in super().deliver(request):
            if reply.shard == 0:
                arrays = [{name: value[:, :2] for name, value in one.items()} for one in reply.arrays]
                partials = {p: replace(one, total=one.total[:2]) for p, one in reply.partials.items()}
                reply = replace(reply, arrays=arrays, partials=partials)
            yield reply


@pytest.mark.parametrize("into", [Each("total", "product"), Sum("total"), Mean("product", weight=SIZE)])
def test_the_first_shard_that_answers_does_not_set_the_shapes(into: Release) -> None:
    usual = simulation(STORE, shards=3, block=1)
    runtime = FirstLies(usual.shards, Program([Totals().both]))
    for shard in runtime.shards:
        shard.program = runtime.program
    replies = Federation(runtime).everyone().ask(Totals().both, theta=torch.ones(4, 3), into=into)
    assert replies.answered.tolist() == [1, 2, 4, 5]
    assert {failure.client for failure in replies.failures} == {"0", "3"}
    assert all(re.search(r"of shapes? .*2.*, expected .*\(3,\)|\(4,\)", one.reason) for one in replies.failures)


def test_arrays_that_follow_the_number_of_rows_are_known_by_those_who_sent_them() -> None:
    store = clients([4, 4, 4])
    usual = simulation(store)
    runtime = Simulation(usual.shards, Program([Totals().both]))
    runtime.shards[0].program = runtime.program
    replies = Federation(runtime).everyone().ask(Totals().both, theta=torch.ones(4, 3))
    assert replies["rows"].shape == (3, 4, 3) and replies["product"].shape == (3, 4)


def test_an_empty_private_cohort_whose_noise_has_no_known_shape_stops() -> None:
    """To release nothing would tell that nobody was drawn."""

    @task
    def needs_its_past(client: Client) -> Sent:
        return send(value=client.kept.values["past"])

    federation = simulate(Clients.from_sizes(torch.ones(4, 2), None, torch.tensor([2, 2]))).begin_round(1)
    nobody = federation.cohort([])
    with pytest.raises(ValueError, match="nobody was drawn"):
        nobody.ask(needs_its_past, into=Mean("value", clip=1.0, noise=Gaussian(1.0)))
