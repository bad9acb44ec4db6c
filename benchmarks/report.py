"""Numbers of a run: ratios taken within one repetition, their median and spread, as a table and as JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Ratio:
    """The same quantity in every repetition: median, lowest, highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        if not values:
            raise ValueError("no repetition was measured, so there is no median")
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class Row:
    """One line of the table. ``target`` is (sign, bound): ("≥", 20.0) wants the median at 20 or above."""

    work: str
    what: str
    value: Ratio
    unit: str = "×"
    target: tuple[str, float] | None = None

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        sign, bound = self.target
        return self.value.median >= bound if sign == "≥" else self.value.median <= bound

    def cells(self) -> tuple[str, str, str, str]:
        wanted = "" if self.target is None else f"{self.target[0]} {self.target[1]:g}"
        verdict = {None: "", True: " met", False: " MISSED"}[self.met]
        return self.work, self.what, f"{self.value} {self.unit}", wanted + verdict

    def as_json(self) -> dict[str, Any]:
        value = {"median": self.value.median, "low": self.value.low, "high": self.value.high}
        target = None if self.target is None else f"{self.target[0]} {self.target[1]:g}"
        return {"work": self.work, "what": self.what, **value, "unit": self.unit, "target": target, "met": self.met}


def table(rows: Sequence[Row]) -> str:
    lines = [("work", "what", "median (low to high)", "target"), *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers; no name of a host or a person."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e9, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "unalike": version("unalike"),
        "load_before": None if load is None else [round(value, 2) for value in load],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
