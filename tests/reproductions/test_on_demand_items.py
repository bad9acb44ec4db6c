"""Items about models on demand: their arithmetic, on numbers that are put in, and one tiny training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from reproductions.item import Item, Numbers
from reproductions.on_demand import ITEMS, training
from reproductions.on_demand.flowdup import agreement, alike
from unalike.core.client import Clients
from unalike.methods import METHODS

BY_ID = {item.id: item for item in ITEMS}


class Canned:
    """Gives numbers without computing any, and notes what was asked for."""

    def __init__(self, full: bool, numbers: Callable[[str, dict[str, Any]], Numbers]) -> None:
        self.full, self._numbers = full, numbers
        self.asked: dict[str, dict[str, Any]] = {}

    def choose(self, what: str, paper: Any, smaller: Any) -> Any:
        return paper if self.full else smaller

    def part(self, name: str, compute: Callable[..., Numbers], **settings: Any) -> Numbers:
        self.asked[name] = settings
        return self._numbers(name, settings)


def verdicts(item: Item, work: Canned) -> dict[str, str]:
    found = item.compute(work)
    scaled = "" if work.full else "fewer rounds"
    return {row.what: row.compare(found.values.get(row.what), scaled)["verdict"] for row in item.rows}


PAPER = {
    "local": (82.2, 81.6), "fedavg": (47.5, 48.6), "perfedavg": (79.1, 77.6), "fedrep": (84.6, 81.8),
    "pfedme": (83.9, 78.4), "knnper": (84.0, 82.4), "pfedhn": (87.8, 63.3), "pefll": (89.0, 89.3),
    "pefll-unlabeled": (0.0, 84.5),
}  # fmt: skip


def test_the_papers_own_numbers_hold_and_others_differ() -> None:
    def of_paper(name: str, settings: dict[str, Any]) -> Numbers:
        seen, unseen = PAPER[settings["method"]]
        return {"seen": seen, "unseen": unseen}

    for name in ("t1-table-4.1", "t1-table-4.2"):
        assert set(verdicts(BY_ID[name], Canned(True, of_paper)).values()) == {"holds"}
    short = Canned(False, of_paper)
    found = verdicts(BY_ID["t1-table-4.1"], short)
    assert {what for what, verdict in found.items() if verdict != "not comparable"} == {
        "PeFLL minus FedAvg, seen (points)",
        "PeFLL minus FedAvg, unseen (points)",
    }
    assert set(found.values()) == {"not comparable", "not decided"}  # one seed, and not the main claim
    assert len(short.asked) == 8 and short.asked["Local, seed 0"]["rounds"] == 0

    def worse(name: str, settings: dict[str, Any]) -> Numbers:
        return of_paper(name, settings) if settings["method"] != "pefll" else {"seen": 47.0, "unseen": 60.0}

    found = verdicts(BY_ID["t1-table-4.1"], Canned(True, worse))
    for what in ("PeFLL minus FedAvg, seen (points)", "PeFLL, seen minus unseen (points)", "PeFLL, seen (%)"):
        assert found[what] == "differs"
    assert found["PeFLL minus the best other method, unseen (points)"] == "differs"
    assert found["PeFLL minus FedAvg, unseen (points)"] == "holds"


def test_newcomers_of_every_split_are_compared_with_every_baseline() -> None:
    def even(name: str, settings: dict[str, Any]) -> Numbers:
        own = [60.0] * 10 if settings["method"] == "odpfl" else [50.0] * 10
        lent = {f"{choice}: each unseen": [20.0] * 10 for choice in settings.get("choices", ())}
        return lent or {"each unseen": own}

    short, full = Canned(False, even), Canned(True, even)
    found = verdicts(BY_ID["p2-table-1"], short)
    assert {found[what] for what in found if "minus" in what} == {"not decided"}  # one seed
    assert found["FedAvg, pathological (%)"] == "not comparable" and len(short.asked) == 20
    found = verdicts(BY_ID["p2-table-1"], full)
    assert len([what for what in found if "minus" in what]) == 18 and len(full.asked) == 60
    assert {found[what] for what in found if "minus" in what} == {"holds"}
    assert found["PFL-sampled, pathological (%)"] == "differs" and found["FedAvg, pathological (%)"] == "holds"


def test_settings_are_those_of_the_papers_preset() -> None:
    for method in ("local", "fedavg", "perfedavg", "fedrep", "pfedme", "knnper", "pfedhn", "pefll", "odpfl"):
        assert "paper" in METHODS[method].presets


def test_one_training_lends_its_models_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from unalike.data import from_arrays

    random = torch.Generator().manual_seed(0)
    x = torch.randint(256, (36, 3, 32, 32), generator=random).to(torch.uint8).numpy()
    y = torch.randint(10, (36,), generator=random).numpy()
    people = from_arrays(x, y, [i // 6 for i in range(36)], classes=10, unseen=[4, 5], test=0.34)
    assert isinstance(people.train, Clients)
    monkeypatch.setattr(training, "cifar", lambda *_: people)
    settings: dict[str, Any] = {"partition": "shards:2", "rounds": 1, "seed": 0, "unlabeled": True}
    few = {"cohort": 2, "local": {"steps": 1}}
    choices = ["sampled", "nearest", "ensemble"]
    found = training.trained(lambda *_: None, "pfl-nearest", **settings, scored=0, changes=few, choices=choices)
    assert set(found) == {f"{choice}: {what}" for choice in choices for what in ("unseen", "each unseen")}
    assert all(len(found[f"{choice}: each unseen"]) == 2 for choice in choices)
    plain = training.trained(lambda *_: None, "fedavg", **settings, scored=3, changes={"cohort": 2})
    assert set(plain) == {"seen", "unseen", "each unseen"}


def test_rotations_are_told_apart_by_neighbours_and_by_clusters() -> None:
    angles = torch.tensor([0.0, 0.0, 0.0, 90.0, 90.0, 90.0])
    apart = torch.tensor([[0.0, 0], [0.1, 0], [0, 0.1], [9, 9], [9.1, 9], [9, 9.1]])
    assert alike(apart, angles) == 100 and agreement(apart, angles) == 1
    mixed = torch.tensor([[0.0, 0], [9.1, 9], [0, 0.3], [0.1, 0.0], [9, 9], [9.0, 9.3]])
    # nearest: 0 and 3 each other (unlike), 2 to 0 (alike), 1 and 4 each other (unlike), 5 to 4 (alike)
    assert alike(mixed, angles) == pytest.approx(100 * 2 / 6)
    assert agreement(mixed, angles) < 0.2
