"""Plans: chosen by what was measured, not by what disturbed it; remembered, checked, and kept for a run.

The clocks are made of the costs that a test gives to its plans; nothing here depends on how long anything takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.helpers import clients, simulation, total
from tests.runs.helpers import At, Crash, crash
from unalike import Each, Federation, Simulator
from unalike.api import resume, run
from unalike.core.draws import key
from unalike.runs.checkpoint import load as load_checkpoint
from unalike.runtime.shard import tuning
from unalike.runtime.shard.kept import KeptStore
from unalike.runtime.shard.simulator import Plan
from unalike.runtime.shard.tuning import Tuner
from unalike.runtime.shard.work import Work

pytestmark = pytest.mark.usefixtures("measured_blocks")

Cost = Callable[[Plan, int], float]  # of a plan, at its n-th rehearsal: CPU seconds per client


class Machine:
    """A clock that runs only while a plan is rehearsed, for as long as the plan costs.

    asleep: how many times longer several workers take on the wall, as they wait for each other. others: seconds in
    which another program has the processors. sharing: all workers are on one processor.
    """

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.now = self.wall = self.waited = 0.0
        self.asleep, self.others, self.sharing = 1.0, 0.0, False
        self.rehearsed: list[int] = []

    def clock(self) -> float:
        return self.now

    def rehearse(self, plan: Plan, rows: Tensor) -> None:
        self.rehearsed.append(plan.block)
        taken = len(rows) * self.cost(plan, self.rehearsed.count(plan.block))
        self.now += taken
        self.waited += plan.workers * self.others + (taken * (plan.workers - 1) if self.sharing else 0.0)
        at_once = 1 if self.sharing else plan.workers
        self.wall += self.others + taken / at_once * (self.asleep if plan.workers > 1 else 1.0)

    def plan(self, work: Work, tuner: Tuner | None = None, threads: int | None = None) -> Plan:
        return (tuner or Tuner()).plan(work, torch.arange(len(work.positions)), threads, self.rehearse)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Cost], Machine]]:
    """Makes machines; nothing is remembered before the first one, and each is a process of its own."""
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path / "cache"))

    def make(cost: Cost) -> Machine:
        made = Machine(cost)
        monkeypatch.setattr(tuning.time, "thread_time", made.clock)
        monkeypatch.setattr(tuning.time, "process_time", made.clock)
        monkeypatch.setattr(tuning.time, "perf_counter", lambda: made.wall)
        monkeypatch.setattr(tuning, "_waited", lambda: made.waited)
        monkeypatch.setattr(tuning, "_processors", lambda: 64)
        tuning._checked.clear()
        return made

    yield make
    tuning._checked.clear()


def work_of(count: int) -> Work:
    """What a federation of so many clients is asked for."""
    store = clients([4] * count)
    return Work(total, store, torch.arange(count), store.size, {}, {}, [Each()], key(0), KeptStore())


def test_small_work_has_one_thread_unless_more_are_asked_for() -> None:
    assert [Plan.of(work_of(3), threads, 2).threads for threads in (None, 3)] == [1, 3]


def best_at(best: int) -> Cost:
    """Twice the time for a client with a block twice as large or as small as the best."""
    return lambda plan, _: 1e-5 * max(plan.block / best, best / plan.block)


@pytest.mark.parametrize(("best", "chosen"), [(1, 1), (8, 8), (32, 32), (128, 128)])
def test_the_fastest_block_is_chosen(best: int, chosen: int, machine: Callable[[Cost], Machine]) -> None:
    plan = machine(best_at(best)).plan(work_of(256))
    assert plan.block == chosen and plan.seconds == pytest.approx(1e-5)


@pytest.mark.parametrize("spoiled", [1, 2, 8, 32, 128, 256])
@pytest.mark.parametrize("when", [{1}, {2}, {3}, {1, 3}, {2, 4, 6}])
def test_a_disturbance_does_not_change_the_choice(
    spoiled: int, when: set[int], machine: Callable[[Cost], Machine]
) -> None:
    def disturbed(plan: Plan, turn: int) -> float:
        return best_at(32)(plan, turn) * (10 if plan.block == spoiled and turn in when else 1)

    assert machine(disturbed).plan(work_of(256)).block == 32


def test_a_slow_stretch_does_not_change_the_choice(machine: Callable[[Cost], Machine]) -> None:
    made = machine(lambda plan, turn: best_at(128)(plan, turn) * (3 if 10 < len(made.rehearsed) < 20 else 1))
    assert made.plan(work_of(256)).block == 128


def test_candidates_take_turns(machine: Callable[[Cost], Machine]) -> None:
    made = machine(lambda plan, _: 1e-4 / plan.block)
    made.plan(work_of(40))
    assert made.rehearsed[-10:] == [1, 2, 8, 32, 64] * 2
    assert all(made.rehearsed.count(block) > tuning.TURNS for block in (1, 2, 8, 32, 64))


def test_cohorts_alike_have_one_plan_whichever_comes_first_and_equal_blocks(machine: Callable[[Cost], Machine]) -> None:
    for largest, blocks in ((128, (70, 100, 128)), (32, (24, 25, 32))):
        for order in ((70, 100, 128), (128, 100, 70)):
            tuner = Tuner()
            found = {count: machine(best_at(largest)).plan(work_of(count), tuner).block for count in order}
            assert found == dict(zip((70, 100, 128), blocks, strict=True))
            assert [plan.block for plan in tuner.plans.values()] == [largest]
            (tuning.cache_folder() / "tuning.json").unlink()


def test_blocks_much_slower_than_smaller_ones_end_the_growth(machine: Callable[[Cost], Machine]) -> None:
    made = machine(lambda plan, _: 1e-3 * plan.block)
    assert made.plan(work_of(600)).block == 1
    assert max(made.rehearsed) == 8


def test_long_clients_are_rehearsed_only_a_few_times(machine: Callable[[Cost], Machine]) -> None:
    made = machine(lambda plan, _: 60.0)
    assert made.plan(work_of(600)).block == 1
    assert made.rehearsed == [1, 1]


def test_a_loop_that_is_close_is_preferred_and_of_equal_blocks_the_largest(
    machine: Callable[[Cost], Machine],
) -> None:
    assert machine(lambda plan, _: 1.09e-3 if plan.block == 1 else 1e-3).plan(work_of(100)).block == 1
    assert machine(lambda plan, _: 1.2e-3 if plan.block == 1 else 1e-3).plan(work_of(200)).block == 200


def test_the_overhead_is_what_a_block_costs_besides_its_clients(machine: Callable[[Cost], Machine]) -> None:
    plan = machine(lambda plan, _: 1e-3 * (1 + 20 / plan.block)).plan(work_of(100))
    assert plan.block == 100 and plan.overhead == pytest.approx(20)


def test_workers_get_equal_blocks_and_share_the_clock(
    machine: Callable[[Cost], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SMALL", 0)
    work = work_of(50)
    monkeypatch.setattr(type(work.task), "pure", True)
    plan = machine(lambda plan, _: 1e-3 * (1 + 1 / plan.block)).plan(work, threads=2)
    assert (plan.block, plan.workers) == (25, 2)
    assert plan.seconds == pytest.approx(1e-3 * (1 + 1 / 32))  # of CPU: not halved by the second worker


@pytest.mark.parametrize(("asleep", "workers"), [(1.3, 2), (2.5, 1)])
def test_one_worker_where_several_would_wait_for_the_interpreter(
    asleep: float, workers: int, machine: Callable[[Cost], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SMALL", 0)
    work = work_of(50)
    monkeypatch.setattr(type(work.task), "pure", True)
    slow = machine(lambda plan, _: 1e-3)
    slow.asleep, slow.others = asleep, 7.0  # that another program takes changes nothing
    tuner = Tuner()
    plan = slow.plan(work, tuner, threads=2)
    assert (plan.block, plan.workers) == (1, workers)
    assert slow.plan(work, tuner, threads=2) == plan and slow.plan(work, Tuner(), threads=2) == plan


def test_blocks_that_take_long_are_not_rehearsed_for_the_number_of_workers(
    machine: Callable[[Cost], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SMALL", 0)
    work = work_of(50)
    monkeypatch.setattr(type(work.task), "pure", True)
    slow = machine(lambda plan, _: 20.0)
    slow.asleep = 2.5
    assert slow.plan(work, threads=2).workers == 2
    assert slow.now < 200  # ten clients


def test_a_lone_worker_rehearses_as_many_clients_as_one_of_many(
    machine: Callable[[Cost], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SMALL", 0)
    work, wall = work_of(200), dict[int, float]()
    monkeypatch.setattr(type(work.task), "pure", True)
    slow = machine(lambda plan, _: 0.2)

    def rehearse(plan: Plan, rows: Tensor) -> None:
        begin = slow.wall
        slow.rehearse(plan, rows)
        wall[plan.workers] = max(wall.get(plan.workers, 0.0), slow.wall - begin)

    Tuner().plan(work, torch.arange(200), 16, rehearse)
    assert wall[1] <= wall[16]


@pytest.mark.parametrize(("processors", "workers"), [(1, 1), (2, 2)])
def test_workers_that_wait_for_each_other_are_not_excused(
    processors: int, workers: int, machine: Callable[[Cost], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SMALL", 0)
    work = work_of(50)
    monkeypatch.setattr(type(work.task), "pure", True)
    slow = machine(lambda plan, _: 1e-3)
    slow.sharing = True
    monkeypatch.setattr(tuning, "_processors", lambda: processors)
    assert slow.plan(work, threads=2).workers == workers


def test_the_time_that_others_had_the_processors_is_known_here() -> None:
    assert tuning._waited() >= 0


def test_equal_settings_have_equal_plans(machine: Callable[[Cost], Machine]) -> None:
    work = work_of(256)
    first = machine(best_at(32)).plan(work)
    # 128 would be chosen now, but the plan runs as it was measured
    later = machine(lambda plan, _: {32: 1e-5, 128: 0.5e-5}.get(plan.block, 2e-5))
    assert later.plan(work) == first
    assert later.rehearsed == [32]
    assert later.plan(work) == first and later.rehearsed == [32]  # another run in the same process: no check


@pytest.mark.parametrize("factor", [3.0, 0.3])
def test_a_plan_that_runs_far_from_what_was_measured_is_measured_again(
    factor: float, machine: Callable[[Cost], Machine]
) -> None:
    work = work_of(256)
    first = machine(best_at(32)).plan(work)
    changed = machine(lambda plan, turn: factor * 1e-5 if plan.block == 32 else best_at(128)(plan, turn) * factor / 2)
    second = changed.plan(work)
    assert first.block == 32 and second.block == 128
    assert machine(changed.cost).plan(work) == second  # it is remembered in place of the first


def test_a_plan_stays_while_no_other_is_clearly_faster(machine: Callable[[Cost], Machine]) -> None:
    work = work_of(256)
    first = machine(best_at(32)).plan(work)
    slower = machine(lambda plan, turn: 2e-5 if plan.block == 128 else 2.1 * best_at(32)(plan, turn))
    assert slower.plan(work) == replace(first, seconds=pytest.approx(2.1e-5))
    assert len(slower.rehearsed) > 7  # they were measured
    again = machine(slower.cost)
    assert again.plan(work).block == 32 and again.rehearsed == [32]  # and it promises what is true now


def test_a_disturbed_check_looks_again(machine: Callable[[Cost], Machine]) -> None:
    work = work_of(256)
    first = machine(best_at(32)).plan(work)
    disturbed = machine(lambda plan, turn: best_at(32)(plan, turn) * (5 if turn < 4 else 1))
    assert disturbed.plan(work) == first
    assert disturbed.rehearsed == [32] * 4


def test_a_plan_never_changes_inside_a_run(machine: Callable[[Cost], Machine]) -> None:
    work, tuner = work_of(256), Tuner()
    first = machine(best_at(32)).plan(work, tuner)
    changed = machine(best_at(128))
    assert changed.plan(work, tuner) == first and changed.rehearsed == []


FOREIGN = [
    b"",
    b"{",
    b"\xff\xfe\x00",
    b"[]",
    b"3",
    b'{"plans": {}}',
    b'{"format": 0, "plans": {"a": 1}}',
    b'{"format": 1, "plans": []}',
    b'{"format": 1}',
]


@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_that_cannot_be_read_is_replaced(content: bytes, machine: Callable[[Cost], Machine]) -> None:
    file = tuning.cache_folder() / "tuning.json"
    file.parent.mkdir()
    file.write_bytes(content)
    plan = machine(best_at(8)).plan(work_of(64))
    assert plan.block == 8 and machine(best_at(8)).plan(work_of(64)) == plan
    stored = json.loads(file.read_text())
    assert stored["format"] == tuning.FORMAT and len(stored["plans"]) == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        {"block": 0},
        {"block": 2.5},
        {"block": "8"},
        {"workers": -1},
        {"threads": 0},
        {"overhead": float("nan")},
        {"overhead": -1},
        {"seconds": 0},
        {"seconds": None},
        {"unknown": 1},
    ],
)
def test_a_remembered_plan_that_makes_no_sense_is_measured_again(
    nonsense: dict[str, Any], machine: Callable[[Cost], Machine]
) -> None:
    work = work_of(64)
    plan = machine(best_at(8)).plan(work)
    file = tuning.cache_folder() / "tuning.json"
    stored = json.loads(file.read_text())
    stored["plans"] = {kind: {**entry, **nonsense} for kind, entry in stored["plans"].items()} | {"other": 3}
    file.write_text(json.dumps(stored))
    later = machine(best_at(8))
    assert later.plan(work) == plan and len(later.rehearsed) > 1


def test_without_a_place_to_remember_plans_are_measured(
    machine: Callable[[Cost], Machine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path / "file"))  # no folder can be made here
    assert machine(best_at(8)).plan(work_of(64)).block == 8
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(machine: Callable[[Cost], Machine]) -> None:
    (tuning.cache_folder() / "tuning.json").mkdir(parents=True)
    assert machine(best_at(8)).plan(work_of(64)).block == 8
    assert os.listdir(tuning.cache_folder()) == ["tuning.json"]


def test_the_oldest_plans_are_forgotten(machine: Callable[[Cost], Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MOST", 2)
    for count in (32, 64, 128):
        machine(best_at(8)).plan(work_of(count))
    later = machine(best_at(8))
    later.plan(work_of(64))
    later.plan(work_of(128))
    assert later.rehearsed == [8, 8]  # checked only
    later.plan(work_of(32))
    assert len(later.rehearsed) > 3


def test_of_two_processes_that_measure_at_once_both_take_the_first_plan(machine: Callable[[Cost], Machine]) -> None:
    work = work_of(256)

    def overtaken(plan: Plan, turn: int) -> float:
        if len(slow.rehearsed) == 3:
            other = Machine(best_at(8))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tuning.time, "thread_time", other.clock)
                plans.append(other.plan(work))
        return best_at(128)(plan, turn)

    plans: list[Plan] = []
    slow = machine(overtaken)
    tuning_file_is_new = not (tuning.cache_folder() / "tuning.json").exists()
    plans.append(slow.plan(work))
    assert tuning_file_is_new and plans[0].block == 8 and plans[1] == plans[0]


def test_rehearsals_are_not_counted_for_a_recording() -> None:
    simulator = Simulator()
    Federation(simulation(clients([4] * 40), simulator)).everyone().ask(total)
    assert len(simulator.plans()) == 1
    assert len(simulator._recordings._kinds) <= 1  # of the block that was asked


SETTINGS: dict[str, Any] = {
    "data": "digits",
    "clients": 40,
    "cohort": 30,
    "model": "logistic",
    "rounds": 4,
    "eval_every": 4,
    "checkpoint_every": 2,
    "threads": 1,
}


def test_a_finished_run_holds_its_plans_and_a_resumed_one_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[dict[str, Plan]] = []
    find = tuning._find

    def small(kind: str, *_: Any) -> Plan:
        """Blocks of 7, which no measurement would choose."""
        used.append({kind: Plan(7, overhead=3.0, threads=1, seconds=1e-3)})
        return used[-1][kind]

    monkeypatch.setattr(tuning, "_find", small)
    whole = run("fedavg", out=tmp_path / "whole", **SETTINGS)
    saved = load_checkpoint(tmp_path / "whole")
    assert saved is not None and used
    stored = {kind: Plan(**plan) for kind, plan in saved.about.plans.items()}
    assert stored == {kind: plan for one in used for kind, plan in one.items()}
    with pytest.raises(Crash):
        run("fedavg", out=tmp_path / "broken", watcher=At(3, crash), **SETTINGS)

    def none_else(kind: str, *rest: Any) -> Plan:
        assert "fit" not in kind, "the plan of a round was looked for again"
        return find(kind, *rest)

    monkeypatch.setattr(tuning, "_find", none_else)
    assert resume(tmp_path / "broken").accuracy == whole.accuracy
    resumed = load_checkpoint(tmp_path / "broken")
    assert resumed is not None
    assert {k: p for k, p in resumed.about.plans.items() if "fit" in k} == {
        k: p for k, p in saved.about.plans.items() if "fit" in k
    }
