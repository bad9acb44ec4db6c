"""The recipes that come with Unalike."""

from __future__ import annotations

from pathlib import Path

import unalike


def folder() -> Path:
    """Inside an installed package, or beside the package in a clone."""
    package = Path(unalike.__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def names() -> dict[str, Path]:
    """Every shipped recipe by name."""
    return {file.stem: file for file in sorted(folder().rglob("*.toml"))}
