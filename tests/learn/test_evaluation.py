"""Evaluation: every client that can get a model is scored, and nobody else's trouble changes its score."""

import pytest
import torch
from torch import Tensor

from tests.core.helpers import clients, linear, population
from unalike import Clients, LocalSGD, simulate
from unalike.core.method import Method
from unalike.learn.evaluation import Scores, evaluate
from unalike.methods.fedavg import FedAvg
from unalike.methods.local import Local

SIZES = [6, 9, 4, 8, 7]
LOCAL = LocalSGD(steps=3, batch=4, lr=0.1)
METHODS: list[Method] = [FedAvg(linear(), cohort=5, finetune=LOCAL), Local(linear(), LOCAL)]


def scores(method: Method, store: Clients, drop: float = 0.0) -> Scores:
    federation = simulate(population(store, clients(SIZES)), drop=drop)
    state = method.start(0)
    if isinstance(method, Local):
        state = state.replace(rounds=torch.tensor(1))  # which all clients missed, so that they train when asked
    return evaluate(method.model, lambda cohort: method.personalize(state, cohort), federation, federation.roster)


@pytest.mark.parametrize("method", METHODS)
def test_a_client_that_gets_no_model_has_no_score_and_changes_nobody_elses(method: Method) -> None:
    sound, broken = clients(SIZES), clients(SIZES)
    rows = slice(int(broken.start[2]), int(broken.start[2] + broken.size[2]))
    broken.x[rows] = 1e38  # its training diverges
    expected, came = scores(method, sound), scores(method, broken)
    assert came.score.isnan().tolist() == [False, False, True, False, False]
    others = torch.tensor([0, 1, 3, 4])
    assert torch.allclose(came.score[others], expected.score[others])
    assert torch.allclose(came.loss[others], expected.loss[others])


@pytest.mark.parametrize("method", METHODS)
def test_rehearsed_drop_outs_do_not_hide_scores(method: Method) -> None:
    store = clients(SIZES)
    assert torch.equal(scores(method, store, drop=0.9).score, scores(method, store).score)


def test_a_personalize_that_forgets_clients_is_told() -> None:
    store = clients(SIZES)

    def too_few(_: object) -> Tensor:
        return linear().init(0).expand(3, -1)

    with pytest.raises(TypeError, match=r"personalize gave a tensor \[3, \d+\] for 5 clients; expected a matrix"):
        federation = simulate(population(store, store))
        evaluate(linear(), too_few, federation, federation.roster)


def test_numbers_are_scored_by_minus_their_squared_error_and_classes_by_the_share_that_is_right() -> None:
    model = linear(features=3, classes=1)
    theta, store = model.init(3), clients([4, 7])
    numbers = Clients.from_sizes(store.x, 2 * store.x[:, 0] + 1, store.size)
    federation = simulate(population(numbers, numbers))
    found = evaluate(model, lambda cohort: theta.expand(len(cohort), -1), federation, federation.roster)
    for i in range(2):
        x, y = numbers.rows(i)
        assert y is not None
        squared = (model(theta, x)[:, 0] - y).square().mean()
        assert float(found.score[i]) == pytest.approx(-float(squared), rel=1e-5)
        assert float(found.loss[i]) == pytest.approx(float(squared) / 2, rel=1e-5)
