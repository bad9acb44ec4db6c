"""How good predictions are: the usual numbers of scikit-learn, of each client and pooled, beside a baseline.

``Predictions`` hold the test rows of clients with what was predicted for them. A metric is named as people call it; of
errors the smaller is the better, so a score is minus the error, and its name begins with "negative".
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

Array = np.ndarray
MOST_CLIENTS = 300  # whose own scores are computed: of a larger group every k-th client
_RESAMPLES, _LEVEL = 1000, 0.95  # of the bootstrap
_RESAMPLED_ROWS = 10_000_000  # in all draws together: of many rows there are fewer draws
RARE = 0.1  # of the rows are of all classes but the largest: then accuracy says little
NEGATIVE = "negative "  # before the name of an error, as a score


@dataclass(frozen=True)
class Predictions:
    """Rows of one group of clients, client after client: classes with a probability each, or numbers."""

    client: Array  # [rows] whose a row is: 0, 1, ... in the order of the group
    row: Array  # [rows] its number among the rows of the data
    truth: Array  # [rows] class or number; NaN: unknown
    outputs: Array  # [rows, classes] logits, or [rows, 1] numbers
    classes: int | None
    base: Array  # [rows, outputs] what the client's training labels alone predict: shares of classes, or their mean
    threshold: float | None = None  # of the second of two classes; None: the likelier one is predicted

    @cached_property
    def chances(self) -> Array:
        """[rows, classes] probabilities; NaN in a row whose logits are not finite."""
        return torch.from_numpy(self.outputs).softmax(1).numpy()

    @cached_property
    def answer(self) -> Array:
        """[rows] the class or number that is predicted."""
        if self.classes is None:
            numbers: Array = self.outputs[:, 0]
            return numbers
        if self.threshold is not None and self.classes == 2:
            return np.where(self.chances[:, 1] >= self.threshold, 1, 0)
        return np.asarray(self.outputs.argmax(1))

    def where(self, rows: Array) -> Predictions:
        arrays = {name: getattr(self, name)[rows] for name in ("client", "row", "truth", "outputs", "base")}
        return replace(self, **arrays)

    def known(self) -> Predictions:
        """The rows that have a label."""
        return self.where(~np.isnan(self.truth))

    def baseline(self) -> Predictions:
        """What the client's own training labels predict: the largest class, or the mean."""
        outputs = self.base if self.classes is None else np.log(self.base.clip(1e-12))
        return replace(self, outputs=outputs, threshold=None)


Metric = Callable[[Predictions], float]


def _sk() -> Any:
    """scikit-learn's metrics, which take two seconds to import."""
    import sklearn.metrics

    return sklearn.metrics


def _of_answers(name: str, p: Predictions) -> float:
    """A metric of scikit-learn that takes true and predicted classes."""
    return float(getattr(_sk(), name)(p.truth.astype(np.int64), p.answer))


def _of_ranks(name: str, p: Predictions) -> float:
    """Of the second of two classes, or the mean over every class against the rest; NaN where nothing can be ranked."""
    present = np.unique(p.truth.astype(np.int64))
    if len(present) < 2:
        return float("nan")
    which, metric = [1] if p.classes == 2 else present, getattr(_sk(), name)
    return float(np.mean([metric(p.truth == one, p.chances[:, one]) for one in which]))


def _f1(p: Predictions) -> float:
    """Of the second of two classes, or the mean over classes."""
    average = "binary" if p.classes == 2 else "macro"
    return float(_sk().f1_score(p.truth.astype(np.int64), p.answer, average=average, zero_division=0))


def _sensitivity(specificity: float, p: Predictions) -> float:
    """The largest share of the second class that is found where at least so much of the first is told from it."""
    if p.classes != 2 or len(np.unique(p.truth)) < 2:
        return float("nan")
    false, true, _ = _sk().roc_curve(p.truth, p.chances[:, 1])
    return float(true[false <= 1 - specificity + 1e-12].max())


def _log_loss(p: Predictions) -> float:
    return float(_sk().log_loss(p.truth.astype(np.int64), p.chances, labels=range(p.classes or 2)))


def _brier(p: Predictions) -> float:
    """Mean squared distance of the probabilities from the truth; of two classes, of the second alone."""
    truth = p.truth[:, None] == np.arange(p.classes or 2)
    squares = ((p.chances - truth) ** 2).sum(1).mean()
    return float(squares / 2 if p.classes == 2 else squares)  # of two classes both are as far off


def _calibration(p: Predictions) -> float:
    """Expected calibration error: how far confidence is from accuracy, in ten bins of confidence."""
    confidence, right = p.chances.max(1), p.outputs.argmax(1) == p.truth
    gap = np.bincount(np.minimum((confidence * 10).astype(np.int64), 9), confidence - right)
    return float(np.abs(gap).sum() / len(right))


_CLASSES: dict[str, Metric] = {
    "accuracy": partial(_of_answers, "accuracy_score"),
    "balanced accuracy": partial(_of_answers, "balanced_accuracy_score"),
    "AUROC": partial(_of_ranks, "roc_auc_score"),
    "AUPRC": partial(_of_ranks, "average_precision_score"),
    "F1": _f1,
    "sensitivity@0.9": partial(_sensitivity, 0.9),
    "log loss": _log_loss,
    "Brier": _brier,
    "calibration error": _calibration,
}
_NUMBERS: dict[str, Metric] = {
    "RMSE": lambda p: float(_sk().root_mean_squared_error(p.truth, p.answer)),
    "MAE": lambda p: float(_sk().mean_absolute_error(p.truth, p.answer)),
    "R2": lambda p: float(_sk().r2_score(p.truth, p.answer)) if len(p.truth) > 1 else float("nan"),
}
ERRORS = ("log loss", "Brier", "calibration error", "RMSE", "MAE")


def metrics_for(classes: int | None) -> Mapping[str, Metric]:
    """All metrics of a task by name."""
    return _NUMBERS if classes is None else _CLASSES


def metric_named(name: str, classes: int | None) -> tuple[str, Metric]:
    """A metric by its name in any spelling, as in "auroc", "balanced_accuracy" and "sensitivity@0.95"."""
    known = metrics_for(classes)
    spelled = {_plain(one): one for one in known}
    begin, _, level = _plain(name).partition("@")
    if begin == "sensitivity" and classes == 2 and re.fullmatch(r"0?\.\d+", level) and float(level) > 0:
        return f"sensitivity@{float(level):g}", partial(_sensitivity, float(level))
    if _plain(name) not in spelled:
        task = "numbers" if classes is None else f"{classes} classes"
        raise ValueError(f"metric = {name!r}: for {task} there are {', '.join(known)}")
    return spelled[_plain(name)], known[spelled[_plain(name)]]


def _plain(name: str) -> str:
    return name.removeprefix(NEGATIVE).lower().replace("_", " ").replace("-", " ").replace("²", "2").strip()


def score_name(metric: str) -> str:
    """What a score by this metric is called: the larger, the better."""
    return NEGATIVE + metric if metric in ERRORS else metric


def usual_metric(counts: Array | None) -> str:
    """What scores are by where nobody says: rows of these classes, or (None) numbers.

    Where one class has nine rows in ten or more, accuracy is the score of a model that knows no other class.
    """
    if counts is None:
        return "RMSE"
    if not counts.max() > (1 - RARE) * counts.sum():
        return "accuracy"
    return "AUROC" if len(counts) == 2 else "balanced accuracy"


def value_of(metric: Metric, predictions: Predictions) -> float:
    """A metric of all rows together; NaN where they do not define it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class without rows, say
        return metric(predictions)


def score_clients(metric: Metric, name: str, predictions: Predictions, clients: int) -> Array:
    """[clients] each client's score: NaN where it has no labeled row, or its rows do not define the metric."""
    p = predictions.known()
    sign = -1.0 if name in ERRORS else 1.0
    scores = np.full(clients, np.nan)
    begins = np.searchsorted(p.client, np.arange(clients + 1))
    for number in range(clients):
        rows = np.arange(begins[number], begins[number + 1])
        if len(rows):
            scores[number] = sign * value_of(metric, p.where(rows))
    return scores


@dataclass(frozen=True)
class MetricSummary:
    """One metric over a group of clients, in its own sign: mean with its interval, 10th percentile, worst, pooled."""

    mean: float | None
    low: float | None  # a bootstrap over clients: 95 % of the means of as many clients drawn from these
    high: float | None
    p10: float | None  # a tenth of the clients are no better
    worst: float | None
    pooled: float | None  # of all rows together
    baseline: float | None  # mean of what the clients' training labels alone predict
    clients: int  # with a score


def summarise(predictions: Predictions, clients: int) -> dict[str, MetricSummary]:
    """Every metric of a group of so many clients."""
    step = max(1, -(-clients // MOST_CLIENTS))
    p = predictions.known()
    some = p.where(p.client % step == 0)
    some = replace(some, client=some.client // step)
    pooled, base, count = replace(p, client=np.zeros_like(p.client)), some.baseline(), -(-clients // step)
    found = {}
    for name, metric in metrics_for(p.classes).items():
        sign = -1.0 if name in ERRORS else 1.0
        scores = score_clients(metric, name, some, count)
        scores = scores[~np.isnan(scores)]
        numbers = {
            **dict(zip(("low", "high") if sign > 0 else ("high", "low"), interval(scores), strict=True)),
            "mean": _mean(scores),
            "p10": np.quantile(scores, 0.1) if len(scores) else np.nan,
            "worst": scores.min() if len(scores) else np.nan,
            "pooled": score_clients(metric, name, pooled, 1)[0],
            "baseline": _mean(score_clients(metric, name, base, count)),
        }
        defined = {key: None if np.isnan(value) else float(sign * value) for key, value in numbers.items()}
        found[name] = MetricSummary(**defined, clients=len(scores))
    return found


def _mean(values: Array) -> float:
    """The mean of what is no NaN."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def interval(values: Array) -> tuple[float, float]:
    """95 % of the means of as many values drawn from these, with replacement; always the same draws."""
    if len(values) < 2:
        return float("nan"), float("nan")
    return interval_of(np.random.default_rng(0).choice(values, (_RESAMPLES, len(values))).mean(1))


def interval_of(draws: Array) -> tuple[float, float]:
    """What 95 % of these lie between."""
    low, high = np.quantile(draws, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2]) if len(draws) else (np.nan, np.nan)
    return float(low), float(high)


def bootstrap(metric: Metric, predictions: Predictions) -> tuple[float, float]:
    """95 % of what a metric of all rows would be for as many clients drawn from these, or rows of a single client."""
    p = predictions.known()
    rows, random = np.arange(len(p.truth)), np.random.default_rng(0)
    clients = np.split(rows, np.flatnonzero(np.diff(p.client)) + 1)
    found = []
    for _ in range(max(100, min(_RESAMPLES, _RESAMPLED_ROWS // max(1, len(rows))))):
        if len(clients) > 1:
            drawn = np.concatenate([clients[one] for one in random.integers(len(clients), size=len(clients))])
        else:
            drawn = random.integers(len(rows), size=len(rows))
        found.append(value_of(metric, p.where(drawn)))
    values = np.array(found)
    return interval_of(values[~np.isnan(values)])


def temperature(predictions: Predictions) -> float:
    """By how much logits are to be divided, so that these rows are the most probable (Guo et al., 2017)."""
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    p = predictions.known()
    truth = p.truth.astype(np.int64)

    def loss(log_t: float) -> float:
        return float(-log_softmax(p.outputs / np.exp(log_t), axis=1)[np.arange(len(truth)), truth].mean())

    return float(np.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded").x))


def best_threshold(predictions: Predictions) -> float:
    """The probability of the second class from which it is predicted, with the largest balanced accuracy."""
    p = predictions.known()
    false, true, levels = _sk().roc_curve(p.truth, p.chances[:, 1])
    return float(min(1.0, levels[np.argmax(true - false)]))
