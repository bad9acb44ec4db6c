"""What averaging methods share: one clipped and noisy mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.methods.small import LOCAL, MODEL, PROBLEM, clients_of
from unalike import run, simulate
from unalike.core.method import train
from unalike.methods.fedem import FedEM
from unalike.methods.fedrep import FedRep
from unalike.methods.knnper import KNNPer
from unalike.methods.perfedavg import PerFedAvg
from unalike.methods.pfedme import PFedMe
from unalike.privacy import Gaussian


@pytest.mark.parametrize("method", [PerFedAvg, FedRep, PFedMe, FedEM, KNNPer])
def test_client_level_noise_releases_one_clipped_mean(method: Any) -> None:
    problem = PROBLEM if "problem" in method.__dataclass_fields__ else MODEL
    private = method(problem, 0.5, LOCAL, clip=0.1, noise=Gaussian(1.0))
    federation = simulate(clients_of())
    train(private, federation, 2)
    assert {entry.array for entry in federation.transcript.entries} <= {"update"}
    assert 0 < federation.ledger.epsilon(1e-3) < 100
    with pytest.raises(ValueError, match="set clip"):
        method(problem, secure=True)


def test_a_method_of_ones_own_gets_privacy_secure_sums_and_server_optimizers_by_inheriting(tmp_path: Path) -> None:
    """The class of docs/writing-a-method.md, as it stands there, is FedAvg whose clients count the same."""
    page = (Path(__file__).parents[2] / "docs" / "writing-a-method.md").read_text()
    code = page[page.index("@dataclass(frozen=True)\nclass Mine(Averaging)") :].partition("```")[0]
    file = tmp_path / "mine.py"
    names = "Averaging, LocalSGD, Model, send, task"
    file.write_text(f"from dataclasses import dataclass\nfrom unalike import {names}\n\n\n{code}")
    settings: dict[str, Any] = {"data": "digits", "clients": 12, "unseen": 0, "rounds": 2, "seed": 3, "out": None}
    private = run(f"{file}:Mine", **settings, epsilon=8.0, clip=0.3, simulate_noise=True)
    assert private.privacy.unit == "client" and private.privacy.epsilon == pytest.approx(8.0, rel=0.02)
    hyper = {"server": {"kind": "adam", "lr": 0.01}, "clip": 0.3, "secure": True, "local": {"batch": 10, "lr": 0.1}}
    mine, fedavg, plain = (
        run(method, **settings, hyperparameters={**hyper, **more}).accuracy
        for method, more in ((f"{file}:Mine", {}), ("fedavg", {}), ("fedavg", {"server": {}}))
    )
    assert mine == fedavg != plain
