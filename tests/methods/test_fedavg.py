"""Oracles for FedAvg and fine-tuning."""

import pytest
import torch
from torch import Tensor

from tests.core.helpers import clients, linear, population
from tests.methods.small import pooled_step
from unalike import Federation, LocalSGD, simulate, train
from unalike.learn.evaluation import evaluate
from unalike.learn.server import ServerOptimizer
from unalike.methods.fedavg import FedAvg
from unalike.privacy import Gaussian
from unalike.runs.simulate import gather_models

SIZES = [3, 10, 1, 6]


@pytest.mark.parametrize("cohort", [4, 1])
def test_one_full_batch_step_equals_pooled_gradient_descent(cohort: int) -> None:
    """Unequal sizes must weigh right, and a cohort of one is that client's own step."""
    method = FedAvg(linear(), cohort=cohort, local=LocalSGD(epochs=1, batch=None, lr=0.5))
    federation = simulate(clients(SIZES))
    expected = method.start(0).theta
    state = method.start(0)
    for number in range(1, 6):
        chosen = simulate(clients(SIZES), round=number).sample(cohort).positions.tolist()
        expected = pooled_step(expected, chosen, 0.5)
        state = train(method, federation, 1, state)
        assert torch.allclose(state.theta, expected, atol=1e-6)


def test_the_server_rate_scales_the_step() -> None:
    method = FedAvg(
        linear(), cohort=4, local=LocalSGD(epochs=1, batch=None, lr=0.5), server=ServerOptimizer("sgd", lr=0.1)
    )
    start = method.start(0)
    after = train(method, simulate(clients(SIZES)), 1, start)
    assert torch.allclose(after.theta, pooled_step(start.theta, [0, 1, 2, 3], 0.05), atol=1e-6)


def test_fine_tuning_starts_from_the_global_model_and_leaves_it_alone() -> None:
    finetune = LocalSGD(epochs=2, batch=None, lr=0.5)
    method = FedAvg(linear(), cohort=4, finetune=finetune)
    federation = simulate(clients(SIZES))
    state = train(method, federation, 2)
    cohort = federation.aside().everyone()
    personal = gather_models(cohort, method.personalize(state, cohort))
    expected = pooled_step(pooled_step(state.theta, [1], 0.5), [1], 0.5)
    assert torch.allclose(personal[1], expected, atol=1e-5)
    assert not method.serves_unlabeled and FedAvg(linear()).serves_unlabeled


def test_private_averaging_clips_every_client_counts_them_alike_and_is_accounted() -> None:
    def theta(noise: float, lr: float) -> tuple[Tensor, Federation]:
        method = FedAvg(
            linear(),
            cohort=1.0,
            local=LocalSGD(epochs=1, batch=None, lr=lr),
            clip=0.1,
            noise=Gaussian(noise),
        )
        federation = simulate(clients(SIZES))
        return train(method, federation, 1).theta - method.start(0).theta, federation

    moved, federation = theta(1e-9, lr=100.0)  # hardly any noise: four directions of length 0.1, averaged
    assert float(moved.norm()) <= 0.1 + 1e-6
    assert "loss" not in federation.metrics
    noisy, federation = theta(1.0, lr=0.0)
    assert 0 < float(noisy.norm()) < 0.1 * 4
    assert federation.ledger.epsilon(1e-5) == pytest.approx(_gaussian_epsilon(1.0), abs=1e-6)
    assert [row["array"] for row in federation.transcript.rows()] == ["update"]


def _gaussian_epsilon(multiplier: float) -> float:
    import dp_accounting

    return float(dp_accounting.get_epsilon_gaussian(multiplier, 1e-5))


def test_evaluation_scores_every_clients_own_model_on_its_own_test_data() -> None:
    store = clients([5] * 6)
    model = linear()
    thetas = torch.stack([model.init(i) for i in range(6)])
    test = store.select(range(6))
    test.size[3] = 0  # nothing to be tested on
    federation = simulate(population(store, test))
    scores = evaluate(model, lambda cohort: thetas[cohort.ids], federation, federation.roster)
    for i in range(6):
        if i == 3:
            assert scores.score[i].isnan()
            continue
        x, y = store.rows(i)
        assert float(scores.score[i]) == pytest.approx(float((model(thetas[i], x).argmax(1) == y).float().mean()))
    known = scores.score[[0, 1, 2, 4, 5]]
    assert scores.mean == pytest.approx(float(known.mean()))
    assert scores.std == pytest.approx(float(known.std(correction=0)), abs=1e-6)
    assert scores.p10 == pytest.approx(float(known.quantile(0.1)))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds=-1"):
        train(FedAvg(linear()), simulate(clients(SIZES)), -1)
