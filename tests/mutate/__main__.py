"""Put mistakes into the code, one at a time, and see whether a test fails: ``make mutate``.

Those of ``by_hand.toml``, and others that are drawn at random from a seed, evenly over rooms and operators. Each gets
a process of its own, a fork of one that has PyTorch in memory, in a copy of the tree, and runs the tests that run its
line, until one fails. Which lines a test runs is found out first, and again for each file of tests that has changed.
Both steps resume where they were stopped.

``table.jsonl`` has a line for each mistake; ``equivalent.toml`` says why one that survives is none.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

import pytest

from tests.mutate.cover import Cover, Map
from tests.mutate.live import Place, forget, load, swap
from tests.mutate.operators import OPERATORS, Mutant, mutants, thought_up

Functions = dict[Place, list[FunctionType]]
ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".mutate"
TABLE = Path(__file__).with_name("table.jsonl")  # what is kept of LATEST at the end
LATEST = CACHE / "table.jsonl"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
ROOMS = ("methods", "analytics", "networks", "learn", "privacy", "core", "data", "runs", "newcomers", "runtime")
ELSEWHERE = ("runtime/network", "runtime/ray.py", "newcomers/service.py")  # what tests of their own engines run
ALSO = ("deploy", "commands")  # rooms whose tests are asked, too
# Pytest warns that it cannot rewrite what is in memory already.
QUIET = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
HANGS, HANGING = 1800, -1000  # seconds, and what is told then


def copy_tree(number: int) -> Path:
    """The files that git knows, as they are now; what has not changed is left as it is, with its byte code."""
    tree = CACHE / f"tree-{number}"
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    known = {name for name in names.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
    for name in known:
        target = tree / name
        if not target.exists() or target.read_bytes() != (ROOT / name).read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
    for file in tree.rglob("*.py"):
        if str(file.relative_to(tree)) not in known:
            file.unlink()
    return tree


def in_fork(tree: Path, work: Callable[[], int], cpu: float) -> int | None:
    """What work says in a process of its own; nothing where it takes so many seconds of work.

    One that hangs without working is ended, too: ``HANGING`` is what it says.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _be_child(tree, work, cpu)
    end = time.monotonic() + HANGS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            with contextlib.suppress(ProcessLookupError):  # what a test left behind
                os.killpg(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(status)
            return None if code == -signal.SIGXCPU else code
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return HANGING


def _be_child(tree: Path, work: Callable[[], int], cpu: float) -> NoReturn:
    code = 99
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1, int(cpu) + 30))
        output = os.open(tree / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def test_files(tree: Path) -> list[str]:
    return [
        str(file.relative_to(tree))
        for room in (*ROOMS, *ALSO)
        for file in sorted((tree / "tests" / room).rglob("test_*.py"))
    ]


def map_of(tree: Path, file: str) -> Path:
    """Where it is written which lines this file of tests runs, as it is now."""
    digest = hashlib.sha256((tree / file).read_bytes()).hexdigest()[:12]
    return CACHE / "cover" / f"{file.removeprefix('tests/').removesuffix('.py').replace('/', '-')}-{digest}.json"


def latest_map_of(tree: Path, file: str) -> Path:
    """The same, or where it is not known yet, of an earlier state of the file."""
    now = map_of(tree, file)
    earlier = sorted(now.parent.glob(f"{now.name[:-18]}-????????????.json"), key=lambda one: one.stat().st_mtime)
    return now if now.exists() or not earlier else earlier[-1]


def map_tests(tree: Path, files: list[str]) -> None:
    """What each file of tests runs, where it is not known yet."""
    (CACHE / "cover").mkdir(parents=True, exist_ok=True)
    for file in files:
        found = map_of(tree, file)
        if found.exists():
            continue
        part = found.with_suffix(".part")

        def work(file: str = file, part: Path = part) -> int:
            return int(pytest.main([*QUIET, file], plugins=[Cover(tree, part)]))

        begun = time.monotonic()
        code = in_fork(tree, work, 600)
        print(f"{file}: {code} in {time.monotonic() - begun:.0f} s", flush=True)
        if code in (0, 1, 5):
            part.rename(found)
        else:
            print((tree / "output.txt").read_text()[-2000:], flush=True)


def by_hand(tree: Path) -> Iterator[Mutant]:
    for mistake in tomllib.loads((tree / "tests/mutate/by_hand.toml").read_text())["mistake"]:
        try:
            yield thought_up(tree, mistake)
        except ValueError as error:  # the code has moved on
            print(f"by_hand.toml: {error}", file=sys.stderr)


def draw(tree: Path, seed: int, count: int) -> list[Mutant]:
    """Evenly over rooms, then over operators; a room that has no more leaves its share to the others."""
    chance = random.Random(seed)
    sites: dict[str, dict[str, list[Mutant]]] = {}
    for room in ROOMS:
        of_room: dict[str, list[Mutant]] = defaultdict(list)
        for file in sorted((tree / "unalike" / room).rglob("*.py")):
            if str(file.relative_to(tree / "unalike")).startswith(ELSEWHERE):
                continue
            for mutant in mutants(tree, str(file.relative_to(tree))):
                of_room[mutant.operator].append(mutant)
        sites[room] = {operator: sorted(of_room[operator], key=lambda one: one.id) for operator in OPERATORS}
        for some in sites[room].values():
            chance.shuffle(some)
    drawn: list[Mutant] = []
    while len(drawn) < count:
        for room in ROOMS:
            operators = [operator for operator in OPERATORS if sites[room][operator]]
            if operators:
                drawn.append(sites[room][chance.choice(operators)].pop())
    return drawn[:count]


class Noted:
    """A plugin of pytest that writes down which test failed first, and how."""

    def __init__(self, failure: Path) -> None:
        self.failure = failure

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.failure.exists():
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(crash.message if crash is not None else report.longrepr).strip().splitlines()
            how = message[0].split(":")[0][:40] if crash is not None and message else "ImportError"
            how = "AssertionError" if how.startswith("assert") else how
            self.failure.write_text(json.dumps({"by": report.nodeid, "how": how}))


class Trials(Noted):
    """A plugin of pytest: once the tests are collected, each mistake runs its own in a fork, until one fails."""

    def __init__(self, tree: Path, known: Functions, work: list[tuple[Mutant, list[str], float]]) -> None:
        super().__init__(tree / "failure.json")
        self.tree, self.known, self.work = tree, known, work

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        scratch = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        gc.collect()
        gc.freeze()
        for number, (mutant, tests, seconds) in enumerate(self.work, 1):
            told = self._try_one(mutant, [items[name] for name in tests if name in items], seconds)
            with LATEST.open("a") as file:
                file.write(json.dumps(told, ensure_ascii=False) + "\n")
            what = f"{mutant.path}:{mutant.line} {mutant.operator}: {told.get('by', told['tests'])}"
            print(f"{number} {told['end']} ({told.get('took', 0)} s) {what}", file=sys.__stderr__, flush=True)
            for left in scratch.iterdir():
                shutil.rmtree(left, ignore_errors=True)
        return True

    def _try_one(self, mutant: Mutant, items: list[pytest.Item], seconds: float) -> dict[str, Any]:
        """The mistake's line of the table. ``seconds``: what its tests take without it."""
        file = self.tree / mutant.path
        self.failure.unlink(missing_ok=True)
        source = file.read_text()
        changed = mutant.applied(source)
        told: dict[str, Any] = {**mutant.told(), "tests": len(items)}
        if not items:
            return told | {"end": "not run"}

        def work() -> int:
            if swap(self.tree, mutant, source, changed, self.known):
                for item, after in itertools.zip_longest(items, items[1:]):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                    if self.failure.exists():
                        return 1
                return 0
            forget()
            return int(pytest.main(["-x", *QUIET, *(item.nodeid for item in items)], plugins=[Noted(self.failure)]))

        begun = time.monotonic()
        try:
            file.write_text(changed)  # for what reads it again, and for processes that tests start
            _forget(file)
            code = in_fork(self.tree, work, 20 + 5 * seconds)
        finally:
            file.write_text(source)
            _forget(file)
        told["took"] = round(time.monotonic() - begun, 1)
        if code is None:
            return told | {"end": "killed", "by": "time", "how": "it does not end"}
        if code == 0:
            return told | {"end": "survived"}
        if code in (5, HANGING):
            return told | {"end": "not run"}
        found = {"by": "the process", "how": f"code {code}"}
        return told | {"end": "killed", **(json.loads(self.failure.read_text()) if self.failure.exists() else found)}


def _forget(file: Path) -> None:
    """Byte code is told apart by whole seconds and sizes: two mistakes may share both."""
    for old in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        old.unlink(missing_ok=True)


def table() -> dict[str, dict[str, Any]]:
    """By id, the last word on each."""
    lines = [line for file in (TABLE, LATEST) if file.exists() for line in file.read_text().splitlines()]
    return {line["id"]: line for line in map(json.loads, lines)}


def reasons() -> dict[str, str]:
    return tomllib.loads(EQUIVALENT.read_text())["equivalent"] if EQUIVALENT.exists() else {}


def summary(lines: dict[str, dict[str, Any]]) -> Iterator[str]:
    why = reasons()
    ends: dict[str, Counter[str]] = {"all": Counter()}
    for line in lines.values():
        operator = line["operator"] if line["operator"] in OPERATORS else "by hand"
        end = "equivalent" if line["end"] != "killed" and line["id"] in why else line["end"]
        for row in ("all", line["path"].split("/")[1], operator):
            ends.setdefault(row, Counter())[end] += 1
    yield f"{'':20}{'mistakes':>10}{'killed':>10}{'survived':>10}{'equivalent':>12}{'not run':>10}"
    for row in ("all", *ROOMS, *OPERATORS, "by hand"):
        count = ends.get(row, Counter())
        yield (
            f"{row:20}{sum(count.values()):>10}{count['killed']:>10}{count['survived']:>10}"
            f"{count['equivalent']:>12}{count['not run']:>10}"
        )
    for line in lines.values():
        if line["end"] != "killed" and line["id"] not in why:
            before, after = (" ".join(line[key].split()) for key in ("before", "after"))
            yield f"{line['id']} {line['end']}: {line['path']} {line['function']} ({line['operator']}):"
            yield f"    {before} → {after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.mutate")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of tests for each mistake")
    parser.add_argument("--again", action="store_true", help="try those once more that no test has killed")
    parser.add_argument("--rooms", nargs="*", default=ROOMS, help="mistakes in these rooms alone")
    parser.add_argument("--part", default="0/1", help="as 0/2 and 1/2 where two processes share the work")
    parser.add_argument("--only", choices=["map", "try", "show"], help="one step of the work")
    given = parser.parse_args()
    share, shares = map(int, given.part.split("/"))
    if given.only != "show":
        tree = copy_tree(share)
        known = load(tree, ROOT)
        if given.only != "try":
            map_tests(tree, test_files(tree)[share::shares])
        if given.only != "map":
            _try_all(given, tree, known, share, shares)
    lines = table()
    ordered = sorted(lines.values(), key=lambda line: (line["path"], line["function"], line["operator"], line["id"]))
    TABLE.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in ordered))
    print("\n".join(summary(lines)))
    return int(any(line["end"] != "killed" and line["id"] not in reasons() for line in lines.values()))


def _try_all(given: argparse.Namespace, tree: Path, functions: Functions, share: int, shares: int) -> None:
    known, why, tests = table(), reasons(), Map([latest_map_of(tree, file) for file in test_files(tree)])
    drawn = [*by_hand(tree), *draw(tree, given.seed, given.count)]
    if given.again:
        drawn = [one for one in drawn if one.id in known and known[one.id]["end"] != "killed" and one.id not in why]
    else:
        drawn = [one for one in drawn if one.id not in known]
    drawn = [one for one in drawn if one.path.split("/")[1] in given.rooms][share::shares]
    work = []
    for mutant in drawn:
        chosen = tests.of(mutant, given.budget)
        work.append((mutant, chosen, sum(map(tests.seconds.__getitem__, chosen))))
    files = sorted({name.split("::")[0] for _, chosen, _ in work for name in chosen})
    if files:
        pytest.main(
            ["-s", "-o", "faulthandler_timeout=0", *QUIET, *files],
            plugins=[Trials(tree, functions, work)],
        )


if __name__ == "__main__":
    sys.exit(main())
