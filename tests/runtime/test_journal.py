"""Exactly once: a shard that is asked twice, killed, or out of disk neither trains nor spends twice."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.core.helpers import clients
from unalike import send, task
from unalike.core.client import Client
from unalike.core.disk import part_file
from unalike.core.request import Program, ReleaseName, Reply, Request
from unalike.core.task import Sent
from unalike.runtime.shard import journal as module
from unalike.runtime.shard.journal import Journal, join_replies
from unalike.runtime.shard.shard import Refused, Shard

SIZES = [2, 3, 4]


@dataclass(frozen=True)
class Counting:
    """Every run of the task leaves a trace: the client counts how often it was asked."""

    keeps: bool = True

    @task
    def count(self, client: Client, step: Tensor) -> Sent:
        now = client.kept.get("count", torch.zeros(())) + step
        return send(count=now, keep={"count": now} if self.keeps else {})


def shard(keeps: bool = True) -> Shard:
    people = clients(SIZES)
    return Shard({"train": people}, people.roster(), Program([Counting(keeps).count]))


def request(serial: int, step: float = 1.0, run: str = "run") -> bytes:
    return Request(
        run=run,
        serial=serial,
        task="Counting.count",
        ids=torch.arange(3),
        part="train",
        labels=True,
        purpose="train",
        key=serial,
        wanted=(ReleaseName("sum", ("count",)),),
        shared={"step": torch.tensor(step)},
        each={},
    ).encode()


def total(answer: list[bytes]) -> float:
    [partial] = [one for data in answer for one in Reply.decode(data).partials.values()]
    return float(partial.total)


def test_the_same_serial_a_hundred_times_gives_the_same_bytes_and_runs_once(tmp_path: Path) -> None:
    here = Journal(shard(), tmp_path)
    first = list(here.answer(request(1)))
    assert total(first) == 3.0
    assert all(list(here.answer(request(1))) == first for _ in range(100))
    assert total(list(here.answer(request(2)))) == 6.0  # every client has counted to 2


def test_another_request_under_a_known_serial_is_refused(tmp_path: Path) -> None:
    here = Journal(shard(), tmp_path)
    list(here.answer(request(1)))
    with pytest.raises(Refused, match="serial 1 of run 'run' was another request; it runs only once"):
        list(here.answer(request(1, step=5.0)))


def test_a_shard_that_starts_again_goes_on_where_it_was(tmp_path: Path) -> None:
    first = Journal(shard(), tmp_path)
    list(first.answer(request(1)))
    first.commit("run", 1)
    second = list(first.answer(request(2)))
    again = Journal(shard(), tmp_path)  # the process was killed and started again
    assert list(again.answer(request(2))) == second
    assert total(list(again.answer(request(3)))) == 9.0


def test_killed_between_charge_and_store_it_fails_and_never_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Journal(shard(), tmp_path)
    write = module.write_whole

    def killed(file: Path, content: bytes, **how: bool) -> None:
        if file.suffix == ".reply":
            part_file(file).write_bytes(content[: len(content) // 2])  # a kill leaves what it was at
            raise KeyboardInterrupt
        write(file, content, **how)

    monkeypatch.setattr(module, "write_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        list(here.answer(request(1)))
    monkeypatch.setattr(module, "write_whole", write)
    for journal in (here, Journal(shard(), tmp_path)):
        [reply] = [Reply.decode(data) for data in journal.answer(request(1))]
        assert len(reply.rows) == 0 and set(reply.failed) == {0, 1, 2}
        assert "interrupted in this ask" in reply.failed[0]
        assert total(list(journal.answer(request(2)))) == 3.0  # nobody has counted before


def test_killed_between_store_and_send_it_sends_what_it_stored(tmp_path: Path) -> None:
    here = Journal(shard(), tmp_path)
    answer = here.answer(request(1))
    next(answer)  # the first reply is on its way, and all is stored by then
    answer.close()
    assert total(list(Journal(shard(), tmp_path).answer(request(1)))) == 3.0
    assert total(list(Journal(shard(), tmp_path).answer(request(2)))) == 6.0


def test_only_what_could_not_be_made_again_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut a file may be empty or cut short: an ask of seeded draws that kept nothing then runs again."""
    waited: list[int] = []
    monkeypatch.setattr(os, "fsync", waited.append)
    for again, keeps, waits in ((False, False, 4), (False, True, 4), (True, True, 2), (True, False, 0)):
        folder = tmp_path / f"{again} {keeps}"
        first = total(list(Journal(shard(keeps), folder, again=again).answer(request(1))))
        assert len(waited) == waits, (again, keeps)
        waited.clear()
        if again and not keeps:
            for left in (0, 5, 20, 200):
                for file in (folder / "run").iterdir():
                    file.write_bytes(file.read_bytes()[:left])
                assert total(list(Journal(shard(keeps), folder, again=True).answer(request(1)))) == first, left
            waited.clear()


def test_a_disk_that_fills_up_leaves_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Journal(shard(), tmp_path)
    list(here.answer(request(1)))
    here.commit("run", 1)
    list(here.answer(request(2)))
    write = module.write_whole

    def full(file: Path, content: bytes, **how: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        here.commit("run", 2)
    with pytest.raises(OSError, match="No space left"):
        list(here.answer(request(3)))
    monkeypatch.setattr(module, "write_whole", write)
    again = Journal(shard(), tmp_path)
    again.rollback("run", 1)
    assert total(list(again.answer(request(2)))) == 6.0  # the stored reply, and what was kept with it
    assert total(list(again.answer(request(3)))) == 9.0


def test_rollback_goes_back_to_the_servers_checkpoint_and_replays(tmp_path: Path) -> None:
    here = Journal(shard(), tmp_path)
    list(here.answer(request(1)))
    here.commit("run", 1)
    second = list(here.answer(request(2)))
    list(here.answer(request(3)))
    here.rollback("run", 1)  # the server was killed after serial 3 and resumes from its checkpoint
    assert list(here.answer(request(2))) == second
    assert total(list(here.answer(request(7)))) == 9.0  # a fresh serial: serials 1 and 2 are in, 3 is not
    with pytest.raises(Refused, match="nothing was kept for serial 5"):
        here.rollback("run", 5)


def test_a_serial_before_the_last_commit_is_over(tmp_path: Path) -> None:
    here = Journal(shard(), tmp_path)
    for serial in range(1, 6):
        list(here.answer(request(serial)))
        here.commit("run", serial)
    with pytest.raises(Refused, match="before the last commit"):
        list(here.answer(request(1)))
    assert len(list((tmp_path / "run").iterdir())) < 8  # old replies and commits are gone


def test_asks_that_measure_change_nothing_and_leave_no_file(tmp_path: Path) -> None:
    here = Journal(shard(), tmp_path)
    measuring = replace(Request.decode(request(1)), purpose="measure", run="run/1").encode()
    assert total(list(here.answer(measuring))) == 3.0
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("most", "sizes"), [(48, [3, 3, 1]), (47, [2, 2, 2, 1]), (0, [1] * 7), (10_000, [7])])
def test_replies_of_blocks_are_put_together_up_to_a_size(most: int, sizes: list[int]) -> None:
    """Seven rows of 16 bytes each, one a block."""
    blocks = [Reply(torch.tensor([i]), [{"v": torch.full((1, 4), float(i))}], {}, {}, "run", 3) for i in range(7)]
    joined = list(join_replies(blocks, most))
    assert [len(one.rows) for one in joined] == sizes
    assert torch.cat([one.rows for one in joined]).tolist() == list(range(7))
    assert torch.cat([one.arrays[0]["v"] for one in joined])[:, 0].tolist() == list(range(7))
    assert {(one.run, one.serial) for one in joined} == {("run", 3)}
    failed = Reply(torch.zeros(0, dtype=torch.int64), [], {9: "it did not answer"}, {}, "run", 3)
    (both,) = join_replies([failed, blocks[2]])
    assert both.failed == failed.failed and both.rows.tolist() == [2] and both.arrays[0]["v"].shape == (1, 4)


@pytest.mark.parametrize("name", ["../elsewhere", "", "a b", "x" * 65])
def test_a_run_cannot_be_named_after_another_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="a run is named by letters"):
        list(Journal(shard(), tmp_path / "here").answer(request(1, run=name)))
    assert not (tmp_path / "elsewhere").exists()


def test_a_serial_that_is_over_never_runs_again_whatever_is_rolled_back(tmp_path: Path) -> None:
    """A server that commits twice has what tells of older serials deleted; it then goes back to before all of them."""
    journal = Journal(shard(), tmp_path)
    list(journal.answer(request(1)))
    for again in (journal, Journal(shard(), tmp_path)):
        again.commit("run", 1)
        again.commit("run", 2)
        again.rollback("run", 0)
        with pytest.raises(Refused, match="serial 1 of run 'run' is before the last commit"):
            list(again.answer(request(1)))
    assert total(list(journal.answer(request(3)))) == 3.0  # a fresh serial is another ask
