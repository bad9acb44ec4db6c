"""Which lines each test runs, and what it takes: what ``make mutate`` chooses tests by."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.mutate.operators import Mutant, places

WHOLE_FILE = "*"  # as a test's name: what fixtures ran before it may serve the other tests of its file


class Cover:
    """A plugin of pytest that follows each test through the package's functions."""

    def __init__(self, root: Path, file: Path) -> None:
        self.package, self.root, self.file = str(root / "unalike") + "/", root, file
        self.found: dict[str, dict[str, Any]] = {}
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.passed: set[str] = set()

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self.package):
            return None
        lines = self.lines[name]

        def line(frame: FrameType, event: str, argument: object) -> Any:
            lines.add(frame.f_lineno)
            return line

        lines.add(frame.f_lineno)
        return line

    def _follow(self, name: str) -> Iterator[None]:
        self.lines = defaultdict(set)
        begun = time.process_time()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            known = self.found.setdefault(name, {"seconds": 0.0, "lines": defaultdict(set)})
            known["seconds"] += time.process_time() - begun
            for path, lines in self.lines.items():
                known["lines"][path] |= lines

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        yield from self._follow(WHOLE_FILE)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield from self._follow(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        where: dict[str, dict[int, tuple[str, int]]] = {}
        tests = {}
        for name, known in self.found.items():
            if name != WHOLE_FILE and name not in self.passed:
                continue
            reached: dict[str, dict[str, list[int]]] = {}
            for path, lines in known["lines"].items():
                if path not in where:
                    where[path] = places(Path(path).read_text())
                functions: dict[str, list[int]] = defaultdict(list)
                for place in sorted(where[path][line] for line in lines if line in where[path]):
                    functions[place[0]].append(place[1])
                if functions:
                    reached[str(Path(path).relative_to(self.root))] = functions
            tests[name] = {"seconds": round(known["seconds"], 3), "lines": reached}
        self.file.write_text(json.dumps(tests, separators=(",", ":")))


class Map:
    """The tests that run a line, those of its own room first, then the cheapest."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.seconds: dict[str, float] = {}
        self.tests: dict[str, dict[str, dict[str, set[int]]]] = defaultdict(lambda: defaultdict(dict))
        for file in files:
            if not file.exists():
                continue
            known = json.loads(file.read_text())
            everywhere = known.pop(WHOLE_FILE, {"lines": {}})["lines"]
            for name, test in known.items():
                self.seconds[name] = test["seconds"]
                for lines in (test["lines"], everywhere):
                    for path, functions in lines.items():
                        for function, offsets in functions.items():
                            self.tests[path][function].setdefault(name, set()).update(offsets)

    def of(self, mutant: Mutant, budget: float) -> list[str]:
        """As many as take the budget's seconds together, at least two."""
        functions = self.tests[mutant.path]
        if mutant.inside:
            found = functions.get(mutant.function, {})
            tests = {name for name, offsets in found.items() if mutant.offset in offsets} or set(found)
        else:  # a default or a constant: read when the module is imported, used by its functions
            below = [name for name in functions if name.startswith(mutant.function)] or list(functions)
            tests = {name for function in below for name in functions[function]}
        room, stem = f"tests/{mutant.path.split('/')[1]}/", Path(mutant.path).stem

        def first(name: str) -> tuple[bool, bool, float]:
            return stem not in name.split("::")[0], not name.startswith(room), self.seconds[name]

        chosen: list[str] = []
        for name in sorted(tests, key=first):
            if len(chosen) < 2 or self.seconds[name] <= budget:
                chosen.append(name)
                budget -= self.seconds[name]
        return chosen
