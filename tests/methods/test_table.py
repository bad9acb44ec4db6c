"""The table of methods: names, classes, variants and presets."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping

import pytest

from unalike.methods import METHODS
from unalike.runs.recipe.hyperparameters import Hyperparameters


def test_a_list_of_methods_imports_no_method() -> None:
    code = (
        "import sys, unalike.methods; print([name for name in ('torch', 'pydantic', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", METHODS)
def test_a_row_has_a_class_that_documents_itself_and_a_variant_of_its_fields(name: str) -> None:
    row = METHODS[name]
    assert dataclasses.is_dataclass(row.cls) and row.cls.__doc__
    fields = {field.name for field in dataclasses.fields(row.cls)}
    assert set(row.variant) <= fields and all(set(preset) <= fields | {"privacy"} for preset in row.presets.values())


@pytest.mark.parametrize("name", METHODS)
def test_a_name_without_values_of_its_own_has_the_defaults_of_its_class(name: str) -> None:
    row, resolved = METHODS[name], Hyperparameters.of(name).defaults
    for field in dataclasses.fields(row.cls):
        if field.name not in resolved:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        varied = row.variant.get(field.name)
        if not isinstance(varied, Mapping):
            assert resolved[field.name] == (default if varied is None else varied)
