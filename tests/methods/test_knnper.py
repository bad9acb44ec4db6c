"""kNN-Per against FedAvg and its mixture written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.methods import written
from tests.methods.small import CLASSES, LOCAL, MODEL, PROBLEM, clients_of, models, rows_of
from unalike import simulate
from unalike.core.method import State, train
from unalike.methods.fedavg import FedAvg
from unalike.methods.knnper import KNNPer
from unalike.runs.simulate import gather_models


def test_knnper_without_neighbours_is_fedavg_and_with_one_alone_remembers() -> None:
    clients = clients_of()
    method = KNNPer(PROBLEM, 3, LOCAL, neighbours=(1,), rows=8)
    state, wanted = (train(one, simulate(clients), 2) for one in (method, FedAvg(MODEL, 3, LOCAL)))
    torch.testing.assert_close(state.theta, wanted.theta, atol=1e-6, rtol=0)
    for own, i in zip(models(method, state, clients), range(4), strict=True):
        x, y = clients.rows(i)
        plain = method.model(torch.cat([own[:-2], torch.tensor([0.0, 1.0])]), x)
        torch.testing.assert_close(plain, F.log_softmax(MODEL(state.theta, x), -1), atol=1e-5, rtol=0)
        remembered = method.model(torch.cat([own[:-2], torch.tensor([1.0, 1.0])]), x)
        assert torch.equal(remembered.argmax(-1), y)


def test_knnper_mixes_as_written_out_and_chooses_on_validation_rows() -> None:
    """Labels that the common model cannot know, but the neighbours do: λ is 1. Shuffled labels: λ is 0."""
    train_part = clients_of((20,), seed=1)
    x, _ = train_part.rows(0)
    y = (x[:, 0] * 10).long() % 2  # stripes
    method = KNNPer(PROBLEM, 1, LOCAL, neighbours=(3,), rows=24, scale=2.0)
    state = State(theta=MODEL.init(3))
    memory = replace(train_part, y=y)
    known = F.softmax(MODEL(state.theta, x), -1)
    for labels, expected in ((y, None), (known.argmax(-1), 0.0)):
        parts = {"train": memory, "validation": replace(memory, y=labels)}
        cohort = simulate(parts).everyone()  # type: ignore[arg-type]
        own = gather_models(cohort, method.personalize(state, cohort))[0]
        phi = torch.relu(F.linear(x, *list(MODEL.tensors(state.theta).values())[:2]))
        squared = torch.cdist(phi, phi).square()
        near, which = squared.topk(3, largest=False)
        weight = torch.exp(-near / (8 * 2.0))
        votes = torch.zeros(20, CLASSES)
        for column in range(3):
            votes[torch.arange(20), y[which[:, column]]] += weight[:, column]
        votes = votes / votes.sum(1, keepdim=True)
        grid = torch.linspace(0, 1, 11)
        right = [int(((g * votes + (1 - g) * known).argmax(-1) == labels).sum()) for g in grid]
        best = right.index(max(right))
        assert float(own[-2]) == pytest.approx(float(grid[best]))
        assert expected is None or best == 0
        mixed = grid[best] * votes + (1 - grid[best]) * known
        torch.testing.assert_close(method.model(own, x).exp(), mixed, atol=1e-4, rtol=0)
        torch.testing.assert_close(method.model.module(own)(x).exp(), mixed, atol=1e-4, rtol=0)


def test_knnper_gives_a_client_without_labels_the_common_model() -> None:
    clients = clients_of()
    method = KNNPer(PROBLEM, 3, LOCAL, neighbours=(2,), rows=8)
    state = method.start(0)
    x, _ = clients.rows(0)
    own = models(method, state, clients.without_labels())[0]
    torch.testing.assert_close(method.model(own, x), F.log_softmax(MODEL(state.theta, x), -1), atol=1e-6, rtol=0)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="from 1 to rows"):
        KNNPer(PROBLEM, neighbours=(600,))


def test_weight_and_number_of_neighbours_are_chosen_by_samples_that_do_not_see_themselves() -> None:
    """Without validation rows: every pair (λ, k) is scored on the training rows, each left out of the memory.

    Labels are noise, so neighbours know nothing; a sample that saw itself would be right with λ = 1 and k = 1.
    """
    clients, scale, candidates = clients_of((13, 9), seed=4), 3.0, (1, 4)
    method = KNNPer(PROBLEM, 1, LOCAL, neighbours=candidates, rows=15, scale=scale)
    state = State(theta=MODEL.init(2))
    theta, chosen = state.theta.double().numpy(), []
    for i, found in enumerate(models(method, state, clients)):
        x, y = rows_of(clients)[i]
        phi, known = written.hidden(theta, x), written.probabilities(theta, x)
        squared = ((phi[:, None] - phi) ** 2).sum(2)
        np.fill_diagonal(squared, np.inf)
        scores = {}
        for k in candidates:
            votes = np.zeros((len(y), CLASSES))
            for row in range(len(y)):
                for other in np.argsort(squared[row])[:k]:
                    votes[row, y[other]] += np.exp(-squared[row, other] / (8 * scale))
            votes /= votes.sum(1, keepdims=True)
            for step in range(11):
                mixed = step / 10 * votes + (1 - step / 10) * known
                scores[step / 10, k] = int((mixed.argmax(1) == y).sum())
        best = max(scores.values())
        weight, k = round(float(found[-2]), 6), int(found[-1])
        assert scores[weight, k] == best < len(y)
        assert weight == min(one for one, number in scores if number == k and scores[one, number] == best)
        chosen.append((weight, k))
    assert (1.0, 1) not in chosen
