"""The audit of FedDP-KMeans: the promise holds, and less noise or a missing clip is found out."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from unalike.analytics.kmeans import algorithm as kmeans
from unalike.analytics.kmeans.budget import KMeansPrivacy
from unalike.api import UserError
from unalike.audit.kmeans import audit_kmeans
from unalike.commands.main import app
from unalike.core.client import Client
from unalike.core.federation import QuorumError
from unalike.core.release import Unit


@pytest.mark.parametrize(("unit", "steps"), [("point", 1), ("client", 0)])
@pytest.mark.long
def test_the_promise_holds_and_a_cut_is_found_out(unit: Unit, steps: int) -> None:
    privacy = KMeansPrivacy(3.0, 1e-4, unit)
    honest = audit_kmeans(privacy, steps=steps, canaries=1024)
    assert honest.unit == unit and honest.canaries == 1024
    assert 0.99 * 3.0 < honest.promised <= 3.0
    assert honest.proof.noise > 0.85  # one honest audit in twenty finds less than all, by chance; hardly one so little
    assert 0.2 * honest.promised < honest.proof.best  # a weak attack would prove nothing
    cut = audit_kmeans(privacy, steps=steps, canaries=1024, cut_noise=0.5)
    assert cut.promised == honest.promised
    assert not cut.holds


@pytest.mark.long
def test_a_lloyd_step_of_the_client_level_is_attacked_too() -> None:
    assert not audit_kmeans(KMeansPrivacy(6.0, 1e-4, "client"), steps=1, canaries=192, cut_noise=0.2).holds


def test_points_that_are_not_clipped_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_they_are(client: Client, origin: Tensor, *_: Tensor | None) -> Tensor:
        return torch.where(client.mask[:, None], client.x - origin, 0.0)

    def beyond_the_radius(client: Client, origin: Tensor, radius: Tensor, moves: Tensor | None) -> Tensor:
        return clipped(client, origin, 5.0 * radius, moves)

    clipped, privacy = kmeans.clipped_points, KMeansPrivacy(1.0, 1e-4, "point")
    assert audit_kmeans(privacy, canaries=512).holds
    monkeypatch.setattr(kmeans, "clipped_points", beyond_the_radius)
    assert not audit_kmeans(privacy, canaries=512).holds
    monkeypatch.setattr(kmeans, "clipped_points", as_they_are)
    with pytest.raises(
        QuorumError, match=r"a sum of 'gram' of norm .* beyond 158 rows of 1"
    ):  # and nothing is released
        audit_kmeans(privacy, canaries=512)


def test_the_command_tells_and_fails_where_it_must() -> None:
    def told(*flags: str, code: int) -> str:
        result = CliRunner().invoke(app, ["privacy", "audit", "kmeans", *flags])
        assert result.exit_code == code, result.output
        return result.stdout if code == 0 else result.output

    common = ("--epsilon=1", "--delta=1e-4", "--canaries=512")
    answer = json.loads(told(*common, "--json", code=0))
    assert answer["holds"] and answer["unit"] == "point" and answer["promised"] == pytest.approx(1.0, rel=1e-2)
    caught = told(*common, "--cut-noise=0.1", code=1)
    assert "the attack proves more than the ledger promises" in caught
    assert "promises no privacy" in told(code=1)
    assert "means nothing here" in told("--epsilon=1", "--clients=9", code=1)
    with pytest.raises(UserError, match="expected above 0 and at most 1"):
        audit_kmeans(KMeansPrivacy(1.0, 1e-4), cut_noise=2.0)
