"""A network with one hidden layer and its gradient, written out in NumPy for the rounds that tests write out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

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


# Networks of any number of layers, ReLU between them


def layers(theta: Array, widths: tuple[int, ...]) -> list[tuple[Array, Array]]:
    """Weights [out, in] and biases, as they follow each other in θ."""
    found, place = [], 0
    for before, after in itertools.pairwise(widths):
        w = theta[place : place + before * after].reshape(after, before)
        place += before * after
        found.append((w, theta[place : place + after]))
        place += after
    assert place == len(theta)
    return found


def activations(theta: Array, x: Array, widths: tuple[int, ...]) -> list[Array]:
    """x, what each hidden layer makes of it, and the outputs."""
    found = [x]
    for w, b in layers(theta, widths):
        found.append((relu(found[-1]) if len(found) > 1 else x) @ w.T + b)
    return found


def relu(values: Array) -> Array:
    """Also of complex values, for ``slopes``."""
    return values * (values.real > 0)


def outputs(theta: Array, x: Array, widths: tuple[int, ...]) -> Array:
    return activations(theta, x, widths)[-1]


def pulled(theta: Array, x: Array, widths: tuple[int, ...], cotangent: Array) -> tuple[Array, Array]:
    """The gradients of Σ cotangent·outputs in θ and in x."""
    values, parts = activations(theta, x, widths), []
    for place, (w, _) in reversed(list(enumerate(layers(theta, widths)))):
        before = relu(values[place]) if place else x
        parts = [(cotangent.T @ before).ravel(), cotangent.sum(0), *parts]
        cotangent = cotangent @ w
        if place:
            cotangent = cotangent * (values[place].real > 0)
    return np.concatenate(parts), cotangent


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.real.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def slopes(f: Callable[[Array], Any], at: Array) -> Array:
    """The gradient of f, by steps along the imaginary axis: exact but for rounding."""
    found = np.empty(len(at))
    for place in range(len(at)):
        aside = at.astype(complex)
        aside[place] += 1e-30j
        found[place] = f(aside).imag / 1e-30
    return found
