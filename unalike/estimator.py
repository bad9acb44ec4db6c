"""Federated methods as estimators of scikit-learn: ``fit`` gets whose each row is, ``predict`` whose model to ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from unalike.api import run
from unalike.core.client import Clients
from unalike.core.lazy import pd
from unalike.data.arrays import Task, array_source
from unalike.newcomers.client_model import client_model
from unalike.newcomers.model import PersonalModel
from unalike.newcomers.serve import serve
from unalike.notebook import Result
from unalike.runs.errors import UserError
from unalike.runs.measure import serves_unlabeled

Array = NDArray[Any]


class _Federated(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What the classifier and the regressor share.

    - ``method``, ``model``, ``epsilon``: as of ``unalike.run``; ``settings`` are its others, by name.
    - ``classes``: all labels that there can be. With an ε they must be given, because labels of rows are not public.
    - ``result_`` is the run's ``Result`` after ``fit``, ``clients_`` the names of its clients.
    """

    _task: ClassVar[Task]
    result_: Result

    def __init__(
        self,
        method: Any = "fedavg",
        *,
        rounds: int = 20,
        model: Any = "mlp",
        epsilon: float | None = None,
        classes: Any = None,
        random_state: int = 0,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.method = method
        self.rounds = rounds
        self.model = model
        self.epsilon = epsilon
        self.classes = classes
        self.random_state = random_state
        self.settings = settings

    def _train(self, X: Array, y: Array, clients: Any, classes: int | None = None) -> Self:
        """Train on rows with their targets as numbers. Without ``clients`` all rows are one client's."""
        owner = np.zeros(len(X), dtype=np.int64) if clients is None else column_or_1d(clients)
        if len(owner) != len(X):
            raise ValueError(f"clients must say whose each of the {len(X)} rows is, but there are {len(owner)} values")
        self.clients_ = np.unique(owner)
        self.result_ = run(
            self.method,
            array_source(X, y, owner.astype(str), name="the rows of fit", task=self._task, classes=classes),
            model=self.model,
            rounds=self.rounds,
            seed=self.random_state,
            **{"unseen": 0, "test": 0.0, "min_samples": 1, "epsilon": self.epsilon, **(self.settings or {})},
        )
        return self

    def _newcomer(self, X: Any, y: Array | None = None) -> PersonalModel:
        check_is_fitted(self, "result_")
        rows = self._rows(validate_data(self, X, reset=False, dtype=np.float32), y)
        return serve(self.result_.run, rows, "a newcomer", expect=False)

    def _answers(self, X: Any, client: Any) -> Tensor:
        """The outputs of a client's model for rows."""
        check_is_fitted(self, "result_")
        finished, rows = self.result_.run, self._rows(validate_data(self, X, reset=False, dtype=np.float32))
        if client is None and len(self.clients_) == 1:
            client = self.clients_[0]
        if isinstance(client, PersonalModel):
            return client.answers(rows)
        if isinstance(client, Sequence | np.ndarray | pd.Series) and not isinstance(client, str):
            return self._answers_of_each(X, column_or_1d(client))
        if client is not None:
            return client_model(finished, str(client)).answers(rows)
        if not serves_unlabeled(finished.method):
            raise UserError(
                f"{self.method} makes no model without labels: name a client of fit, predict(X, client=...), or give "
                "the model of a newcomer, predict(X, client=estimator.personalize(X_labeled, y))"
            )
        return serve(finished, rows, "a newcomer", expect=False).answers(rows)

    def _answers_of_each(self, X: Any, clients: Array) -> Tensor:
        """Every row's outputs by the model of its own client."""
        rows, found = validate_data(self, X, reset=False, dtype=np.float32), dict[int, Tensor]()
        if len(rows) != len(clients):
            raise ValueError(f"client must say whose each of the {len(rows)} rows is, but there are {len(clients)}")
        for one in np.unique(clients):
            places = np.flatnonzero(clients == one)
            found |= zip(places.tolist(), self._answers(rows[places], one), strict=True)
        return torch.stack([found[place] for place in range(len(rows))])

    def _rows(self, X: Array, y: Array | None = None) -> Clients:
        """Rows as those of one client that did not train."""
        finished = self.result_.run
        made = Clients.from_sizes(
            torch.from_numpy(np.ascontiguousarray(X, dtype=np.float32)),
            None if y is None else torch.from_numpy(y),
            torch.tensor([len(X)]),
        ).using(finished.schema)
        return replace(made, ids=made.ids + int(finished.roster.ids.max()) + 1)


class Unalike(ClassifierMixin, _Federated):  # type: ignore[misc]
    """A federated classifier: ``Unalike("pefll").fit(X, y, clients=c).predict(X_new, client="Berlin")``.

    ``client`` is one of those in ``fit``, one of them for each row, or the model that ``personalize`` gave for a
    newcomer. Without it the rows are a newcomer's, whose model the method makes without labels, if it can.
    """

    _task = "classification"

    def fit(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Train; ``clients`` says for each row whose it is."""
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        if self.classes is None and self.epsilon is not None:
            raise ValueError("with an ε, name the classes: which ones the rows have is not public (classes=[...])")
        self.classes_ = np.unique(y if self.classes is None else np.asarray(self.classes))
        if len(self.classes_) < 2:
            raise ValueError(f"there is one class only, {self.classes_[0]!r}: nothing can be told apart")
        return self._train(X, self._targets(y), clients, len(self.classes_))

    def predict(self, X: Any, client: Any = None) -> Array:
        """The class of each row, by the model of a client."""
        codes = self._answers(X, client).argmax(1).numpy()
        found: Array = self.classes_[codes]
        return found

    def predict_proba(self, X: Any, client: Any = None) -> Array:
        """[rows, classes] the probability of each class, by the model of a client."""
        found: Array = torch.softmax(self._answers(X, client).to(torch.float64), 1).numpy()
        return found

    def personalize(self, X: Any, y: Any = None) -> PersonalModel:
        """The model of a newcomer with these rows, and their labels if the method needs them; for ``predict``."""
        return self._newcomer(X, None if y is None else self._targets(y))

    def _targets(self, y: Any) -> Array:
        place = {word: code for code, word in enumerate(self.classes_.tolist())}
        words = np.asarray(y).tolist()
        strange = [word for word in words if word not in place]
        if strange:
            raise ValueError(f"a label is {strange[0]!r}, which is no class of {list(place)}")
        return np.array([place[word] for word in words], dtype=np.int64)


class UnalikeRegressor(RegressorMixin, _Federated):  # type: ignore[misc]
    """A federated regression; ``fit`` and ``predict`` as of ``Unalike``.

    Targets are standardised by their mean and deviation, which the clients are asked for, but not where there is an ε:
    these two numbers would be releases.
    """

    _task = "regression"

    def fit(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Train; ``clients`` says for each row whose it is."""
        X, y = validate_data(self, X, y, dtype=np.float32, y_numeric=True)
        return self._train(X, y.astype(np.float32), clients)

    def predict(self, X: Any, client: Any = None) -> Array:
        """The number predicted for each row, by the model of a client."""
        found: Array = self._answers(X, client)[:, 0].numpy().astype(np.float64)
        return found

    def personalize(self, X: Any, y: Any = None) -> PersonalModel:
        """The model of a newcomer with these rows, and their targets if the method needs them; for ``predict``."""
        return self._newcomer(X, None if y is None else np.asarray(y, dtype=np.float32))
