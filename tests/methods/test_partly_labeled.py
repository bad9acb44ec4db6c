"""Clients with labels for some of their rows: all rows describe them, the labeled ones are in every loss (T1 §5.3)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.runtime.problems import CLASSES, FEATURES, MODEL, PROBLEM, method_of
from unalike import simulate
from unalike.core.client import Clients, NoLabels
from unalike.core.method import train
from unalike.data import from_arrays, load
from unalike.data.describe import describe
from unalike.learn.evaluation import evaluate
from unalike.learn.local import LocalSGD
from unalike.learn.server import ServerOptimizer
from unalike.methods.flowdup import PARTS, FLowDUP
from unalike.methods.pefll import PeFLL

SIZE, TAUGHT, COUNT = 9, 5, 7  # rows of each client, how many of them have a label, clients
FULL_STEP = LocalSGD(steps=1, batch=None, lr=1.0)


def partly(taught: list[int]) -> Clients:
    """Clients of nine rows, of which so many have a label, scattered among the others."""
    random = torch.Generator().manual_seed(4)
    x = torch.randn(SIZE * len(taught), FEATURES, generator=random)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    known = torch.stack([torch.randperm(SIZE, generator=random) < count for count in taught]).reshape(-1)
    wrong = torch.where(known, y, (y + 1) % CLASSES)  # whoever reads a label that is not there learns nonsense
    return Clients.from_sizes(x, wrong, torch.full((len(taught),), SIZE), known=known)


def taught_part(clients: Clients, client: int) -> tuple[Tensor, Tensor, Tensor]:
    """All inputs of a client, and the inputs and labels of its labeled rows."""
    x, y = clients.rows(client)
    start = int(clients.start[client])
    assert y is not None and clients.known is not None
    own = clients.known[start : start + len(x)]
    return x, x[own], y[own]


LOSSES_ONLY = (
    *("local", "fedavg", "fedavg-finetune", "fedprox", "fedsplit", "perfedavg", "fedrep", "pfedme", "knnper", "fedem"),
    *("fedma", "pfedhn", "adaped", "quped", "fml", "robust-hdp", "ifca", "mr-mtl", "ld-fedavg", "fedavg, secure"),
    "fedavg, client-level noise",
)


@pytest.mark.parametrize("name", LOSSES_ONLY)
def test_training_is_that_of_clients_without_their_unlabeled_rows(name: str) -> None:
    clients = partly([TAUGHT] * COUNT)
    assert clients.known is not None and clients.y is not None
    without = Clients.from_sizes(clients.x[clients.known], clients.y[clients.known], torch.full((COUNT,), TAUGHT))
    method = method_of(name)
    found, wanted = (train(method, simulate(one, 3, block=4), 2) for one in (clients, without))
    assert found.keys() == wanted.keys()
    for part in found:
        torch.testing.assert_close(found[part], wanted[part], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("block", [1, 3])
def test_pefll_describes_by_all_rows_and_learns_from_the_labeled_ones(block: int) -> None:
    clients = partly([5, 9, 1, 3])
    method = PeFLL(
        PROBLEM, cohort=4, local=FULL_STEP, server=ServerOptimizer("sgd", lr=0.3), labels="linear", descriptor=5,
        describe_rows=None, clip=1e9, lambda_h=0.0, lambda_v=0.0,
    )  # fmt: skip
    state = method.start(0).replace(scale=torch.tensor(1.7))
    names = method.embedding.tensors(state.embedding)

    def phi(eta: Tensor, x: Tensor, one_hot: Tensor) -> Tensor:
        """φ written out: a row without a label has zeros in the place of its class."""
        tensors = method.embedding.tensors(eta)
        values = torch.cat([x, one_hot @ tensors["label.weight"].T], 1)
        layers = [name.removesuffix(".weight") for name in names if name.endswith("weight") and name != "label.weight"]
        for layer in layers:
            values = values @ tensors[f"{layer}.weight"].T + tensors[f"{layer}.bias"]
            values = values if layer == layers[-1] else values.relu()
        return values

    def objective(eta_h: Tensor, eta_v: Tensor) -> Tensor:
        total = torch.zeros(())
        for i in range(4):
            (x, y), start = clients.rows(i), int(clients.start[i])
            assert y is not None and clients.known is not None
            one_hot = F.one_hot(y, CLASSES) * clients.known[start : start + SIZE, None]
            theta = method.hypernet(eta_h, 1.7 * phi(eta_v, x, one_hot.float()).mean(0)[None])[0]
            _, some, labels = taught_part(clients, i)
            total = total + F.cross_entropy(MODEL(theta, some), labels) / 4
        return total

    g_h, g_v = torch.func.grad(objective, (0, 1))(state.hypernet, state.embedding)
    after = train(method, simulate(clients, block=block), 1, state)
    torch.testing.assert_close(after.hypernet, state.hypernet - 0.3 * g_h, atol=1e-6, rtol=0)
    torch.testing.assert_close(after.embedding, state.embedding - 0.3 * g_v, atol=1e-6, rtol=0)
    assert float(g_v.abs().max()) > 1e-3


def test_flowdup_makes_v_of_all_rows_and_adds_nothing_for_a_missing_label() -> None:
    """Alg. 10, lines 6-11: the sum over (X', Y') has a term for each row of the second half that has a label."""
    clients = partly([5, 9, 2, 4])
    method = FLowDUP(
        MODEL, cohort=4, labeled_share=1.0, local=FULL_STEP, server=ServerOptimizer("sgd", lr=0.5), rates={},
        dimension=6, features=4, width=3, begin=1.0, penalty=0.03,
    )  # fmt: skip
    state = method.start(0)

    def objective(h1: Tensor, hidden: Tensor, last: Tensor, bias: Tensor, prior: Tensor) -> Tensor:
        total = torch.zeros(())
        for i in range(4):
            (x, y), start = clients.rows(i), int(clients.start[i])
            assert y is not None and clients.known is not None
            known = clients.known[start : start + SIZE]
            order = torch.cat([known.nonzero().flatten(), (~known).nonzero().flatten()])  # labeled rows come first
            x, y, known = x[order], y[order], known[order]
            v = last @ method.hidden(hidden, method.h1(h1, x[0::2]).mean(0)) + bias
            losses = F.cross_entropy(MODEL(method.lift(v), x[1::2]), y[1::2], reduction="none")
            total = total + 0.03 * (v - prior).square().sum() + losses[known[1::2]].sum() / 4  # half of nine rows
        return total / 4

    wanted = torch.func.grad(objective, (0, 1, 2, 3, 4))(*(state[name] for name in PARTS))
    after = train(method, simulate(clients, block=3), 1, state)
    for name, gradient in zip(PARTS, wanted, strict=True):
        torch.testing.assert_close(after[name], state[name] - 0.5 * gradient, atol=1e-5, rtol=1e-4)


def test_a_score_counts_the_labeled_rows_alone() -> None:
    clients = partly([4, 9, 1])
    theta = MODEL.init(2)
    theirs = simulate({"train": clients, "test": clients})
    scores = evaluate(MODEL, lambda cohort: theta.expand(len(cohort), -1), theirs, theirs.roster)
    for i in range(3):
        _, x, y = taught_part(clients, i)
        assert float(scores.score[i]) == pytest.approx(float((MODEL(theta, x).argmax(1) == y).float().mean()))


def test_a_task_that_reads_all_labels_is_told_where_some_are_missing() -> None:
    block = partly([4, 9]).block(torch.arange(2))
    columns = {name: value[0] for name, value in block.columns(torch.tensor(0), torch.tensor([9, 9])).items()}
    client = block.client(columns, None)  # type: ignore[arg-type]
    with pytest.raises(NoLabels, match=r"some rows have none.*client.with_labels"):
        _ = client.y
    assert int(client.with_labels.n) == 4 and int(client.n) == 9
    assert client.known.tolist() == [True] * 4 + [False] * 5
    assert (
        client.labels(-1).tolist()[4:] == [-1] * 5 and client.with_labels.y[:4].tolist() == client.labels()[:4].tolist()
    )


def test_without_missing_labels_a_block_is_as_it_was() -> None:
    full = partly([9, 9])
    block = full.block(torch.arange(2))
    assert block.taught is None and "taught" not in block.columns(torch.tensor(0), torch.tensor([9, 9]))
    assert torch.equal(block.x.reshape(-1, FEATURES), full.x)


def test_a_table_with_empty_label_cells(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lines = ["shop,price,y"]
    for shop in range(4):
        for row in range(40):
            label = ("yes" if row % 3 else "no") if row < [40, 10, 0, 1][shop] else ""
            lines.append(f"s{shop},{random.normal():.3f},{label}")
    (tmp_path / "shops.csv").write_text("\n".join(lines) + "\n")
    population = load(tmp_path / "shops.csv", client_column="shop", unseen=0, test=0.2)
    assert population.train.labeled.tolist() == [True, True, False, True]
    assert population.train.label_counts().tolist() == [32, 8, 0, 1], "each part has its share of the labels"
    assert population.test.label_counts().tolist() == [8, 2, 0, 0]
    assert population.test.labeled.tolist() == [True, True, False, False]
    assert population.histogram().sum(1).tolist() == [40, 10, 0, 1]
    assert "69" in describe(population).summary["rows without a label"]  # 30 + 39: s2 has no label at all


def test_numbers_may_be_missing_too() -> None:
    x = np.arange(12.0)[:, None]
    y = np.where(x[:, 0] < 9, x[:, 0] / 4, np.nan)
    population = from_arrays(x, y, np.arange(12) // 6, test=0, unseen=0, normalize=False)
    assert population.train.label_counts().tolist() == [6, 3] and population.classes is None
    assert "from 0 to 2" in describe(population).summary["targets"]
