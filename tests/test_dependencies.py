"""What Unalike imports, it asks for: a package that only comes along with another one may stay away tomorrow."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]


IMPORT = re.compile(r"^ *(?:import (\w+)|from (\w+)[\w.]* import )", re.MULTILINE)  # a parser takes ten times as long


def imported() -> set[str]:
    files = (ROOT / "unalike").rglob("*.py")
    names = {a or b for file in files for a, b in IMPORT.findall(file.read_text())}
    return names - sys.stdlib_module_names - {"unalike"}


def asked_for() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines]
    return {plain(re.split(r"[\[<>=;~! ]", line)[0]) for line in project["dependencies"] + extras}


def plain(name: str) -> str:
    return name.lower().replace("_", "-")


def test_every_imported_package_is_asked_for() -> None:
    belongs = packages_distributions()  # a package that is not installed here, as Ray, goes by its own name
    missing = {name for name in imported() if not set(map(plain, belongs.get(name, [name]))) & asked_for()}
    assert not missing
