"""The house rules that a reader relies on: how much there is to read, and who may know whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "motley"
COMMAND_LINE = {"cli.py", "__main__.py"}


def core() -> list[Path]:
    """What the author of a method may want to read: the files in motley/ itself, the simulator, local learning."""
    own = [file for file in PACKAGE.glob("*.py") if file.name not in COMMAND_LINE]
    return [*own, *(PACKAGE / "runtime").glob("*.py"), *(PACKAGE / "learn").glob("*.py")]


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def test_the_core_can_be_read_in_an_hour() -> None:
    lines = [line for file in core() for line in file.read_text().splitlines() if line.strip()]
    assert len(lines) < 2_500


def test_files_stay_short() -> None:
    long = {file.name: n for file in PACKAGE.rglob("*.py") if (n := len(file.read_text().splitlines())) > 410}
    assert not long


@pytest.mark.parametrize(
    ("room", "stranger"),
    [
        ("methods", "motley.runtime"),
        ("methods", "motley.studio"),
        ("runtime", "motley.methods"),
        ("learn", "motley.methods"),
        ("learn", "motley.runtime"),
        ("networks", "motley.methods"),
        ("privacy", "motley.methods"),
        ("data", "motley.studio"),
        ("studio", "motley.commands"),
    ],
)
def test_rooms_do_not_know_those_above_them(room: str, stranger: str) -> None:
    for file in (PACKAGE / room).glob("*.py"):
        assert not any(name == stranger or name.startswith(stranger + ".") for name in imports(file)), file
