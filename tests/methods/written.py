"""A network with one hidden layer and its gradient, written out in NumPy for the rounds that tests write out."""

from __future__ import annotations

import numpy as np

from tests.methods.small import CLASSES, FEATURES

HIDDEN = 8
Array = np.ndarray


def parts(theta: Array) -> tuple[Array, Array, Array, Array]:
    ends = np.cumsum([HIDDEN * FEATURES, HIDDEN, CLASSES * HIDDEN])
    w1, b1, w2, b2 = np.split(theta, ends)
    return w1.reshape(HIDDEN, FEATURES), b1, w2.reshape(CLASSES, HIDDEN), b2


def hidden(theta: Array, x: Array) -> Array:
    w1, b1, _, _ = parts(theta)
    return np.maximum(x @ w1.T + b1, 0)


def probabilities(theta: Array, x: Array) -> Array:
    _, _, w2, b2 = parts(theta)
    scores = hidden(theta, x) @ w2.T + b2
    scores = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(scores / scores.sum(1, keepdims=True))


def losses(theta: Array, x: Array, y: Array) -> Array:
    return np.asarray(-np.log(probabilities(theta, x)[np.arange(len(y)), y]))


def gradient(theta: Array, x: Array, y: Array, weights: Array | None = None) -> Array:
    """Of the mean loss; of Σ weights·loss where there are weights."""
    _, _, w2, _ = parts(theta)
    h = hidden(theta, x)
    away = probabilities(theta, x) - np.eye(CLASSES)[y]
    away = away * (np.full(len(y), 1 / len(y)) if weights is None else weights)[:, None]
    back = away @ w2 * (h > 0)
    return np.concatenate([(back.T @ x).ravel(), back.sum(0), (away.T @ h).ravel(), away.sum(0)])
