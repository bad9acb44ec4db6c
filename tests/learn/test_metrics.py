"""Metrics of predictions against values that are worked out by hand, or by scikit-learn called directly."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics

from unalike.learn import metrics
from unalike.learn.metrics import Predictions

RANDOM = np.random.default_rng(3)


def predictions(truth: list[float], chances: list[float], client: list[int] | None = None) -> Predictions:
    """Of two classes, with these probabilities of the second."""
    p = np.array(chances)
    outputs = np.log(np.stack([1 - p, p], 1))
    whose = np.zeros(len(p), dtype=np.int64) if client is None else np.array(client)
    return Predictions(whose, np.arange(len(p)), np.array(truth), outputs, 2, np.full((len(p), 2), 0.5))


def value(name: str, p: Predictions) -> float:
    return metrics.metric_named(name, p.classes)[1](p)


def test_numbers_of_two_classes_are_those_worked_out_by_hand() -> None:
    p = predictions([0, 0, 1, 1], [0.1, 0.6, 0.4, 0.9])
    assert value("accuracy", p) == 0.5 and value("balanced_accuracy", p) == 0.5
    assert value("auroc", p) == 0.75  # three of four pairs are in order
    assert value("f1", p) == 0.5
    assert value("sensitivity@0.9", p) == 0.5  # above 0.6 no first class is left, and one of two second ones
    assert value("sensitivity@0.5", p) == 1.0
    assert value("brier", p) == pytest.approx((0.01 + 0.36 + 0.36 + 0.01) / 4)
    assert value("log-loss", p) == pytest.approx(-np.log([0.9, 0.4, 0.4, 0.9]).mean())
    # confidence 0.9 twice and right, 0.6 twice and wrong
    assert value("calibration error", p) == pytest.approx(0.5 * 0.1 + 0.5 * 0.6)


def test_numbers_of_many_classes_are_those_of_scikit_learn() -> None:
    truth, logits = RANDOM.integers(0, 4, 200), RANDOM.normal(size=(200, 4))
    logits[np.arange(200), truth] += 1
    p = Predictions(np.zeros(200, int), np.arange(200), truth.astype(float), logits, 4, np.full((200, 4), 0.25))
    assert np.allclose(p.chances.sum(1), 1)
    auroc = sklearn.metrics.roc_auc_score(truth, p.chances, multi_class="ovr", average="macro")
    assert value("AUROC", p) == pytest.approx(auroc)
    assert value("F1", p) == pytest.approx(sklearn.metrics.f1_score(truth, logits.argmax(1), average="macro"))
    assert value("Brier", p) == pytest.approx(((p.chances - np.eye(4)[truth]) ** 2).sum(1).mean())


def test_a_class_is_the_likeliest_or_the_second_of_two_from_a_threshold_on() -> None:
    chances = np.array([[0.9, 0.1], [0.7, 0.3], [0.45, 0.55]])
    p = Predictions(np.zeros(3, int), np.arange(3), np.zeros(3), np.log(chances), 2, chances)
    assert p.answer.tolist() == [0, 0, 1] and metrics.replace(p, threshold=0.3 - 1e-9).answer.tolist() == [0, 1, 1]


def test_the_log_loss_of_three_classes_is_that_of_their_truth() -> None:
    chances = np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.25, 0.5, 0.25]])
    truth = np.array([1.0, 0.0, 2.0, 0.0])
    p = Predictions(np.zeros(4, int), np.arange(4), truth, np.log(chances), 3, chances)
    assert value("log loss", p) == pytest.approx(-np.log([0.5, 0.6, 0.8, 0.25]).mean())


def test_numbers_of_a_regression_are_those_worked_out_by_hand() -> None:
    truth, answer = np.array([1.0, 2.0, 3.0, np.nan]), np.array([[1.0], [2.0], [5.0], [9.0]])
    p = Predictions(np.zeros(4, int), np.arange(4), truth, answer, None, np.full((4, 1), 2.0)).known()
    assert value("rmse", p) == pytest.approx((4 / 3) ** 0.5)
    assert value("mae", p) == pytest.approx(2 / 3)
    assert value("r2", p) == pytest.approx(1 - 4 / 2)
    assert value("r2", p.baseline()) == pytest.approx(0.0)


def test_a_summary_has_clients_all_rows_and_a_baseline() -> None:
    truth = [0, 0, 0, 1] * 2
    p = predictions(truth, [0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.9, 0.1], [0] * 4 + [1] * 4)
    p = metrics.replace(p, base=np.tile([0.75, 0.25], (8, 1)))
    found = metrics.summarise(p, 3)  # the third client has no rows
    accuracy, loss = found["accuracy"], found["log loss"]
    assert (accuracy.mean, accuracy.worst, accuracy.pooled, accuracy.clients) == (0.5, 0.0, 0.5, 2)
    assert accuracy.baseline == 0.75 and found["AUROC"].baseline == 0.5
    assert (accuracy.low, accuracy.high) == (0.0, 1.0)
    assert loss.worst == pytest.approx(-np.log(0.1))  # of an error the worst is the largest
    assert loss.p10 is not None and loss.mean is not None and loss.p10 > loss.mean
    assert loss.low is not None and loss.high is not None and loss.low < loss.mean < loss.high


def test_a_bootstrap_over_clients_holds_the_mean_about_as_often_as_it_says() -> None:
    held = 0
    for seed in range(200):
        low, high = metrics.interval(np.random.default_rng(seed).normal(1.0, 2.0, 60))
        held += low <= 1.0 <= high
    assert 0.88 <= held / 200 <= 0.99


def test_what_is_undefined_has_no_number() -> None:
    p = predictions([0, 0], [0.2, 0.4])  # one class alone: nothing can be ranked
    found = metrics.summarise(p, 1)
    assert found["AUROC"].mean is None and found["AUROC"].clients == 0 and found["accuracy"].mean == 1.0
    assert found["accuracy"].low is None  # one client has no spread
    with pytest.raises(ValueError, match="for 3 classes there are accuracy"):
        metrics.metric_named("rmse", 3)


def test_temperature_and_threshold_are_the_best_on_their_rows() -> None:
    logits = RANDOM.normal(size=(4000, 3))
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    truth = np.array([RANDOM.choice(3, p=share) for share in shares], dtype=float)
    p = Predictions(np.zeros(4000, int), np.arange(4000), truth, 3 * logits, 3, shares)  # too sure by a factor of 3
    assert metrics.temperature(p) == pytest.approx(3, rel=0.1)
    assert metrics.best_threshold(predictions([0, 0, 0, 1], [0.1, 0.1, 0.2, 0.3])) == pytest.approx(0.3)


def test_a_bootstrap_is_as_wide_as_chance_over_rows_or_over_whole_clients() -> None:
    """The share of 300 in 400 has the deviation √(p(1−p)/400); where a client is all right or all wrong, of clients."""
    truth, zeros = np.ones(400), np.zeros((400, 2))
    outputs = np.zeros((400, 2))
    outputs[:300, 1] = 1
    outputs[300:, 0] = 1
    _, metric = metrics.metric_named("accuracy", 2)
    for client, count in ((np.zeros(400, dtype=int), 400), (np.arange(400) // 4, 100)):
        low, high = metrics.bootstrap(metric, Predictions(client, np.arange(400), truth, outputs, 2, zeros))
        deviation = (0.75 * 0.25 / count) ** 0.5
        assert low == pytest.approx(0.75 - 1.96 * deviation, abs=0.25 * deviation)
        assert high == pytest.approx(0.75 + 1.96 * deviation, abs=0.25 * deviation)
