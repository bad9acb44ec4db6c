"""The audit of MDM and of estimates: the promise holds, and half of the noise is found out."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from unalike.audit.analytics import audit_estimate, audit_mdm
from unalike.commands.main import app

_CHANCE = 0.85  # one honest audit in twenty finds less than all of the noise, by chance, but hardly one so little


def test_mdm() -> None:
    honest = audit_mdm(4.0, 1e-4, rounds=2, rate=1.0, canaries=1_500)
    assert honest.promised == pytest.approx(4.0, rel=1e-2) and honest.proof.noise > _CHANCE
    assert honest.proof.best > 0.3 * honest.promised
    assert not audit_mdm(4.0, 1e-4, rounds=2, rate=1.0, canaries=1_000, cut_noise=0.5).holds


@pytest.mark.parametrize(("kind", "epsilon"), [("gaussian", 2.0), ("bernoulli", 1.0)])
def test_estimates(kind: str, epsilon: float) -> None:
    honest = audit_estimate(kind, epsilon, 1e-5, canaries=4_000)
    assert honest.promised == pytest.approx(epsilon, rel=1e-3) and honest.proof.noise > _CHANCE
    assert honest.proof.best > 0.3 * honest.promised
    assert not audit_estimate(kind, epsilon, 1e-5, canaries=4_000, cut_noise=0.5).holds


def test_the_command_takes_an_analysis() -> None:
    told = CliRunner().invoke(app, ["privacy", "audit", "bernoulli", "--epsilon=1", "--json", "--canaries=4000"])
    assert json.loads(told.stdout)["proof"]["noise"] > _CHANCE
    caught = CliRunner().invoke(app, ["privacy", "audit", "bernoulli", "--epsilon=1", "--cut-noise=0.5"])
    assert caught.exit_code == 1 and "cut to 0.5 on purpose" in caught.output
