"""The table of audits: no private method is forgotten."""

from __future__ import annotations

import pytest

from benchmarks.audits import AUDITS, table
from unalike.methods import METHODS


@pytest.mark.parametrize(("unit", "mark"), [("client", "client_private"), ("point", "point_private")])
def test_every_private_method_has_a_row(unit: str, mark: str) -> None:
    private = {one.cls for one in METHODS.values() if hasattr(one.cls, mark)}
    named = [words.split()[0] for words in AUDITS.values() if f"--unit {unit}" in words]
    if unit == "point":
        private.remove(METHODS["adaped"].cls)  # sends no gradients of its rows' losses, so no canary would be heard
    assert private and private == {METHODS[name].cls for name in named if name in METHODS}


def test_the_table_says_when_a_run_was_shortened() -> None:
    one = {"promised": 3.0, "proven": 2.0, "noise": 1.25, "seconds": 4.0, "rounds": 8, "of_rounds": 10, "holds": True}
    half = {**one, "proven": 6.0, "noise": 0.55, "holds": False}
    assert table({"FedAvg": [one, half]}).splitlines()[-1] == (
        "| FedAvg (8 of 10 rounds) | 3.00 | 2.00 | 125% | 6.00 | 55% | 4 + 4 |"
    )
