"""A newcomer says which classes it has: its model predicts no other, and no label is needed for that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.newcomers.test_serve import run_command
from unalike.newcomers.file import NewcomerFile, read_newcomer
from unalike.newcomers.predict import predict_client
from unalike.newcomers.serve import serve
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.recipe.recipe import to_recipe
from unalike.runs.run import run_recipe

ANIMALS = np.array(["cat", "cow", "dog", "hen"])
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(80, 3))
Y = ANIMALS[(X[:, 0] > 0) * 2 + (X[:, 1] > 0)]


def trained(folder: Path, method: str, **hyperparameters: Any) -> FinishedRun:
    np.savez(folder / "all.npz", x=X, y=Y, client=np.arange(80) // 10)
    recipe = {
        "method": method,
        "rounds": 1,
        "data": {"name": str(folder / "all.npz"), "unseen": 1},
        "model": {"name": "logistic"},
        "hyperparameters": {"cohort": 2, **hyperparameters},
    }
    run_recipe(to_recipe(recipe, "test"), folder / "run")
    return FinishedRun.open(folder / "run")


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """PeFLL that reads no labels in its descriptors and masks by labels in training."""
    options = {"labels": "ignored", "mask_labels": True, "descriptor": 3, "local": {"steps": 2}}
    return trained(tmp_path_factory.mktemp("masked"), "pefll", **options)


def mine(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "mine.npz", x=X[:30], **arrays)
    return folder / "mine.npz"


def test_masking_and_unlabeled_service_go_together(masked: FinishedRun, tmp_path: Path) -> None:
    came = read_newcomer(masked, mine(tmp_path)).clients
    with pytest.raises(UserError, match="cannot personalize for a client without labels"):
        serve(masked, came, "mine")
    served = serve(masked, came, "mine", classes=["dog", "cat"])
    free = masked.method.model(_unmasked(masked, came), came.block(torch.arange(1)).x[0])
    wanted = [("cat", "dog")[place] for place in free[:, [0, 2]].argmax(1).tolist()]
    assert served.predict(came) == wanted and set(free.argmax(1).tolist()) - {0, 2}, "without it others are predicted"
    chances = torch.softmax(served.answers(came), 1)
    assert float(chances[:, [1, 3]].max()) == 0
    assert list(served.sent) == ["descriptor"], "what it says stays with it"
    assert any("predicts cat and dog only" in note for note in served.notes)


def _unmasked(run: FinishedRun, came: Any) -> torch.Tensor:
    from unalike import simulate

    theta = run.method.with_masking(False).personalize(run.state, simulate(came).everyone())  # type: ignore[attr-defined]
    return theta[0]


def test_any_method_whose_model_ends_in_a_bias_a_class(tmp_path: Path) -> None:
    run = trained(tmp_path, "fedavg")
    file = NewcomerFile.read(run, mine(tmp_path, y=Y[:30]))
    free = predict_client(file, "", unlabeled=True).answers
    one = predict_client(file, "", unlabeled=True, classes=["cow", "hen"])
    torch.testing.assert_close(one.answers[:, [1, 3]], free[:, [1, 3]])
    assert bool((one.answers[:, [0, 2]] < -9e3).all())


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["cat", "dgo"], "'dgo' is no class of the run; did you mean 'dog'"),
        ([], "name at least one of the classes, cat, cow, dog and hen"),
        (["cat", "dog"], "but a row is labeled 'cow'; name it, too"),
    ],
)
def test_what_makes_no_sense_is_refused(masked: FinishedRun, tmp_path: Path, classes: list[str], message: str) -> None:
    came = read_newcomer(masked, mine(tmp_path, y=Y[:30])).clients
    with pytest.raises(UserError, match=message):
        serve(masked, came, "mine", classes=classes)


def test_a_model_without_a_bias_a_class_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path, "fedem")
    with pytest.raises(UserError, match="--classes: label masking needs a classifier that ends in a bias"):
        serve(run, read_newcomer(run, mine(tmp_path, y=Y[:30])).clients, "mine", classes=list(ANIMALS))


def test_a_newcomer_is_told_how_far_it_is_from_those_who_trained(tmp_path: Path) -> None:
    """Rows far from all of training give a descriptor far from all of training's."""
    run = trained(tmp_path, "odpfl", descriptor=3, cohort=7, local={"steps": 2})
    near, far = (read_newcomer(run, mine(tmp_path) if shift == 0 else _moved(tmp_path, shift)) for shift in (0, 8))
    one, other = serve(run, near.clients, "near"), serve(run, far.clients, "far")
    assert one.distance is not None and other.distance is not None
    assert one.distance.nearest < other.distance.nearest and other.distance.nearest > other.distance.largest
    assert any("unlike those of training" in note for note in other.notes)
    assert one.distance.text.startswith("the nearest training client is at a distance of")


def _moved(folder: Path, shift: float) -> Path:
    np.savez(folder / "moved.npz", x=X[:30] + shift)
    return folder / "moved.npz"


def test_from_the_command_line(masked: FinishedRun, tmp_path: Path) -> None:
    told = json.loads(
        run_command(
            masked.path,
            "--data",
            mine(tmp_path),
            "--classes",
            "cat, dog",
            "--predictions",
            tmp_path / "p.csv",
            "--json",
        )
    )
    assert list(told["sent"]) == ["descriptor"] and told["distance"]["nearest"] >= 0
    lines = (tmp_path / "p.csv").read_text().splitlines()[1:]
    assert {line.split(",")[2] for line in lines} <= {"cat", "dog"}
