"""The estimators of scikit-learn: its own checks, models of clients, and rows that keep their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import check_estimator

import unalike as ua

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(240, 3))
CLIENTS = np.array(["Berlin", "Wien", "Graz", "Bonn"])[np.arange(240) % 4]
SIGN = np.where(np.isin(CLIENTS, ["Berlin", "Graz"]), 1, -1)
Y = np.where(SIGN * X[:, 0] > 0, "yes", "no")  # one model for all is as good as a coin
FAST: dict[str, Any] = {"rounds": 5, "model": "logistic"}


@pytest.mark.parametrize("estimator", [ua.Unalike, pytest.param(ua.UnalikeRegressor, marks=pytest.mark.long)])
@pytest.mark.long
def test_it_passes_the_checks_of_scikit_learn(estimator: Any) -> None:
    results = check_estimator(estimator(rounds=6, model="logistic"), on_skip=None)
    assert len(results) > 45 and {one["status"] for one in results} <= {"passed", "skipped"}


def test_every_client_is_predicted_by_its_own_model() -> None:
    local = ua.Unalike("local", rounds=30, model="logistic").fit(X, Y, clients=CLIENTS)
    new = RANDOM.normal(size=(100, 3))
    for client, sign in (("Berlin", 1), ("Wien", -1)):
        wanted = np.where(sign * new[:, 0] > 0, "yes", "no")
        assert (local.predict(new, client=client) == wanted).mean() > 0.85
        assert local.predict_proba(new, client=client).sum(1) == pytest.approx(np.ones(100))
    owners = np.where(new[:, 1] > 0, "Berlin", "Wien")
    mixed = local.predict_proba(new, client=owners)
    for client in ("Berlin", "Wien"):
        of_one = local.predict_proba(new, client=client)
        np.testing.assert_array_equal(mixed[owners == client], of_one[owners == client])
    with pytest.raises(ValueError, match="whose each of the 100 rows is, but there are 2"):
        local.predict(new, client=["Berlin", "Wien"])
    with pytest.raises(ua.UserError, match="name a client of fit"):
        local.predict(new)
    with pytest.raises(ua.UserError, match="no training client 'Rom'"):
        local.predict(new, client="Rom")


def test_a_newcomer_gets_a_model_and_rows_keep_their_order() -> None:
    tuned = ua.Unalike("fedavg-finetune", **FAST).fit(X, Y, clients=CLIENTS)
    rows = RANDOM.normal(size=(60, 3))
    labels = np.where(rows[:, 0] > 0, "yes", "no")
    model = tuned.personalize(rows, labels)
    one, other = tuned.predict_proba(rows, client=model), tuned.predict_proba(rows[::-1], client=model)
    np.testing.assert_allclose(one, other[::-1], rtol=1e-5)
    assert (tuned.predict(rows, client=model) == labels).mean() > 0.6


def test_a_regression_of_each_client() -> None:
    y = 1000 + 50 * SIGN * X[:, 0]
    local = ua.UnalikeRegressor("local", rounds=30, model="logistic").fit(X, y, clients=CLIENTS)
    own = CLIENTS == "Wien"
    assert np.abs(local.predict(X[own], client="Wien") - y[own]).mean() < 10


@pytest.mark.long
def test_it_can_be_searched_and_has_a_private_form() -> None:
    found = GridSearchCV(ua.Unalike(**FAST), {"rounds": [1, 3]}, cv=2).fit(X, (X[:, 0] > 0).astype(int))
    assert found.best_params_["rounds"] in (1, 3)
    settings = {"clip": 1.0, "delta": 1e-3, "cohort": 0.5, "simulate_noise": "simulated", "normalize": False}
    binary, many = (X[:, 0] > 0).astype(int), np.repeat(np.arange(24), 10)
    private = ua.Unalike("fedavg", epsilon=8.0, classes=[0, 1], **FAST, settings=settings)
    assert private.fit(X, binary, clients=many).result_.privacy.epsilon == pytest.approx(8.0, rel=0.02)
    with pytest.raises(ValueError, match="name the classes"):
        ua.Unalike("fedavg", epsilon=8.0, **FAST, settings=settings).fit(X, binary, clients=many)
