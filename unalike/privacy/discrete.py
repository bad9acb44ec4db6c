"""Exact noise: discrete Gaussian and discrete Laplace on the integers, from the operating system's bits.

Noise that is drawn and added in floating point gives the input away: some outputs can be reached from one data set and
not from its neighbour (Mironov 2012). So a value is rounded to a grid, and what is added is a whole number of grid
steps, drawn by the algorithms of Canonne, Kamath and Steinke (2020): every decision compares integers, and no
probability is ever a floating-point number. They are written for arrays here, with 64-bit integers.

What the discrete Gaussian costs is what the continuous one costs, plus a slack that ``slack`` proves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from unalike.privacy.checks import check_at_least, check_positive
from unalike.privacy.system import RANDOM

Integers = Any  # a numpy array of int64
LARGEST = 1 << 40  # of σ and of Laplace's scale, so that no product below overflows
_MOST = (1 << 63) - 1
_LOW = (1 << 32) - 1
_PIECE = 1 << 15  # draws at once
_FINE = 1 << 13  # grid steps in a clip, for each √d: rounding then moves a clipped value by less than 1/16,384 of it
_FEWEST = {"l2": 1 << 14, "l1": 1 << 7}  # an array with fewer numbers has the grid of one with so many
_FLOAT32 = {"l2": 1 << 20, "l1": 1 << 10}  # up to so many numbers, clipped values on the grid are exact in float32


# The grid


def grid(clip: float, std: float, d: int, norm: str = "l2") -> float:
    """The grid's step γ for d numbers that are bounded by ``clip`` together and get noise of deviation ``std``.

    A power of two, so that multiples are exact in floating point: up to the clip in float32 (for d up to a million),
    and their sums over 2^28 clients in float64. There are at least 2^13·√d steps in the clip (2^13·d in L1). So
    rounding hardly moves a value, and the noise is so many steps wide that discrete and continuous Gaussian are nearly
    the same (``slack``). The step depends on public numbers only.
    """
    check_positive(clip, "the clip bound", "give the bound on one unit's share")
    check_positive(std, "std", "give the standard deviation of the noise")
    check_at_least(d, 0, "d", "give how many numbers are released")
    many = max(d, _FEWEST[norm])
    step = 2.0 ** math.floor(math.log2(clip / (_FINE * (math.sqrt(many) if norm == "l2" else many))))
    if not std / step < LARGEST:
        raise ValueError(
            f"noise of deviation {std:g} on values of at most {clip:g} is {std / step:.3g} grid steps wide, and "
            f"exact sampling ends at {LARGEST}; expected noise of at most {LARGEST * step:.3g}: raise ε or the clip"
        )
    return step


def to_grid(value: Tensor, step: float, norm: str = "l2") -> Tensor:
    """The nearest multiples of the step (a power of two); what is on the grid stays as it is.

    An array that is too long for its grid to be exact in float32 comes back in float64.
    """
    rounded = torch.round(value.to(torch.float64) / step) * step
    return rounded if value.numel() > _FLOAT32[norm] else rounded.to(value.dtype)


def rounding(d: int, step: float, norm: str = "l2") -> float:
    """By how much rounding to the grid can lengthen an array of d numbers: clip to this much less before it."""
    return 0.5 * step * (math.sqrt(d) if norm == "l2" else float(d))


# Accounting


def slack(noise: float, epsilon: float, delta: float) -> tuple[float, float]:
    """What discrete Gaussian noise costs above continuous noise: (η, δ₁) such that ε at δ₁, plus η, is ε at δ.

    ``noise`` is Σ 1/z² over all Gaussian releases of a run (z: noise multiplier). A release of d numbers has noise of
    σ >= z·2^13·√d steps of its ``grid``; so Σ 1/σ² over all numbers of the run is at most s = 2^−26·Σ 1/z².

    1. The *rounded* Gaussian, with pmf R(k) = ∫_{k−½}^{k+½} φ_σ, added to integers is the continuous Gaussian
       mechanism with its output rounded. Whatever is proven for the continuous mechanism (also sampled, also composed)
       holds for it.
    2. The discrete Gaussian's pmf is G(k) = e^{−k²/2σ²}/Z, so R(k)/G(k) is Z/σ√2π times the integral of
       e^{−t²/2σ²}·cosh(kt/σ²) over t from −½ to ½. By Poisson summation 1 <= Z/σ√2π <= 1 + 3·e^{−2π²σ²} <= e^{1/24σ²}
       (σ >= 1). By Jensen's inequality and cosh >= 1 the integral is at least e^{−1/24σ²}; by cosh x <= e^{x²/2} it is
       at most e^{k²/8σ⁴}. So G(k) <= e^{1/24σ²}·R(k) for all k, and R(k) <= e^{(r²/8 + 1/24)/σ²}·G(k) for |k| <= r·σ.
    3. Both bounds hold point by point. So they survive mixtures (sampling of clients or points) and multiply along an
       adaptive composition. Let P be the discrete mechanism's transcript on one data set, Q on its neighbour, P′ and Q′
       those of the rounded mechanism, η₀ = s/24 and η₁ = (r²/8 + 1/24)·s. Then P(S) <= e^{η₀}·P′(S) for every set S,
       and Q′(S) <= e^{η₁}·Q(S) + τ, where τ is the probability that some number of Q′ has noise beyond r·σ: below
       e^{−(r−½)²/2} for each of them.
    4. Therefore P(S) <= e^{η₀}·(e^ε·Q′(S) + δ₁) <= e^{ε+η₀+η₁}·Q(S) + e^{η₀}·(δ₁ + e^ε·τ).

    Here r is such that e^ε·τ is below δ/10^7 for up to 2^60 numbers, and δ₁ leaves room for that and for e^{η₀}. The
    same holds for a sum of n shares of discrete Gaussian noise: it is within e^{±τ'} of the discrete Gaussian of their
    joint variance, τ' = 10·Σ_{k<n} e^{−2π²σ²k/(k+1)} (Kairouz, Liu and Steinke 2021), which is zero to hundreds of
    digits on this grid.
    """
    s = 2.0**-26 * noise
    r = 0.5 + math.sqrt(2.0 * (max(0.0, epsilon) + 60.0 * math.log(2.0) + math.log(1e7 / delta)))
    return (r * r / 8.0 + 1.0 / 12.0) * s, delta * (math.exp(-s / 24.0) - 1e-7)


# Sampling


def discrete_gaussian(sigma: int, count: int) -> Integers:
    """``count`` integers with probability ∝ exp(−k²/2σ²), exactly (Canonne, Kamath, Steinke 2020, Alg. 3, t = σ)."""
    return _fill(_gaussian_candidates, _whole(sigma, "sigma"), count, 0.47)


def discrete_laplace(scale: int, count: int) -> Integers:
    """``count`` integers with probability ∝ exp(−|k|/scale), exactly (Canonne, Kamath, Steinke 2020, Alg. 2)."""
    return _fill(_laplace_candidates, _whole(scale, "scale"), count, 0.62)


def bernoulli_exp(numerator: Integers, denominator: int | Integers) -> Integers:
    """Coins that are true with probability exp(−a/b) exactly, for integers a >= 0 and b > 0 (Alg. 1).

    exp(−a/b) = exp(−1)^⌊a/b⌋ · exp(−(a mod b)/b): all the coins on the right must be true.
    """
    numerator = np.asarray(numerator, dtype=np.int64)
    denominator = np.broadcast_to(np.asarray(denominator, dtype=np.int64), numerator.shape)
    return _exp_of(numerator // denominator, numerator % denominator, denominator)


def uniform_below(bound: int | Integers, count: int) -> Integers:
    """``count`` uniform integers in [0, bound), without bias."""
    bounds = np.asarray(bound, dtype=np.int64)
    if bounds.size and bounds.max() < 1 << 31:
        return _small_below(bounds, count)
    limit = _MOST - (_MOST % bounds + 1) % bounds  # the last word of a whole number of ranges
    words, places = _words(count), np.arange(count)
    while len(places):
        top = limit if limit.ndim == 0 else limit[places]
        places = places[words[places] > top]
        words[places] = _words(len(places))
    return words % bounds


def _small_below(bounds: Integers, count: int) -> Integers:
    """The same for bounds below 2^31: the upper half of bound times a word of 32 bits (Lemire 2019), no division.

    A product whose lower half is below 2^32 mod bound is drawn again, so that every result has as many words.
    """
    product = _short_words(count) * bounds
    places = np.flatnonzero((product & _LOW) < bounds)  # only then is the exact remainder, which is smaller, needed
    while len(places):
        own = bounds if bounds.ndim == 0 else bounds[places]
        again = (product[places] & _LOW) < (1 << 32) % own
        places, own = places[again], own if own.ndim == 0 else own[again]
        product[places] = _short_words(len(places)) * own
    return product >> 32


def _words(count: int) -> Integers:
    """Uniform integers of 63 bits."""
    return np.frombuffer(os.urandom(8 * count), dtype=np.int64) & _MOST


def _short_words(count: int) -> Integers:
    """Uniform integers of 32 bits."""
    return np.frombuffer(os.urandom(4 * count), dtype=np.uint32).astype(np.int64)


def _whole(scale: int, name: str) -> int:
    if not isinstance(scale, int):
        raise TypeError(f"{name} must be a whole number, got {scale}; round it up to a number of grid steps")
    if not 1 <= scale <= LARGEST:
        raise ValueError(f"{name} must be from 1 to {LARGEST}, got {scale}; take a grid of another step")
    return scale


def _fill(candidates: Callable[[int, int], Integers], scale: int, count: int, share: float) -> Integers:
    """Draw until every place has an accepted candidate; ``share`` of them is accepted, about.

    In pieces that the processor's cache holds. More candidates than places are drawn at once; they fill the places in
    the order in which they were drawn, which does not depend on their values.
    """
    made, filled = np.empty(count, dtype=np.int64), 0
    while filled < count:
        values = candidates(scale, min(_PIECE, int((count - filled) / share) + 16))[: count - filled]
        made[filled : filled + len(values)] = values
        filled += len(values)
    return made


def _laplace_candidates(scale: int, count: int) -> Integers:
    """What is accepted of ``count`` tries: U + t·V with a sign, U uniform below t and kept with probability exp(−U/t),
    V the number of coins of probability exp(−1) before the first that fails.
    """
    low = uniform_below(scale, count)
    low = low[_exp_of_product((low,), scale)]
    size = low + scale * _successes(len(low))
    negative = _bits(len(low))
    once = ~(negative & (size == 0))  # or zero would come twice as often
    return np.where(negative, -size, size)[once]


def _gaussian_candidates(sigma: int, count: int) -> Integers:
    """Discrete Laplace of scale σ, accepted with probability exp(−(|y| − σ)²/2σ²)."""
    y = _laplace_candidates(sigma, count)
    # With ||y| − σ| = u + σ·w, 0 <= u < σ, the exponent is u²/2σ² + w·u/σ + w²/2.
    # Taken apart like this, nothing overflows however large w is, and every coin has a small denominator.
    w, u = np.divmod(np.abs(np.abs(y) - sigma), sigma)
    kept = _exp_of_product((u, u), sigma, 2)  # exp(−u²/2σ²)
    far = np.flatnonzero(kept & (w > 0))
    u, w = u[far], w[far]
    turns = w * u
    fraction = 2 * (turns % sigma) + sigma * (w * w % 2)  # of 2σ
    whole = w * w // 2 + turns // sigma + fraction // (2 * sigma)
    kept[far] = _exp_of(whole, fraction % (2 * sigma), 2 * sigma)
    return y[kept]


def _exp_of(whole: Integers, numerator: Integers, denominator: int | Integers) -> Integers:
    """True with probability exp(−whole − a/b), 0 <= a < b."""
    result = _exp_of_product((numerator,), denominator)
    more = np.flatnonzero(result & (whole > 0))
    result[more] = _successes(len(more)) >= whole[more]
    return result


def _exp_of_product(numerators: tuple[Integers, ...], denominator: int | Integers, divisor: int = 1) -> Integers:
    """True with probability exp(−x), x = Π (a/b) / divisor at most 1: the first K whose coin of probability x/K fails
    is odd (Alg. 1). The coin is one of 1/(divisor·K) and one for every factor a/b, so that no number gets large.
    """
    count = len(numerators[0])
    result = np.ones(count, dtype=bool)
    active, k = np.arange(count), 1
    while len(active):
        if k * divisor > 1:
            active = active[uniform_below(k * divisor, len(active)) == 0]
        for numerator in numerators:
            bound = denominator if isinstance(denominator, int) else denominator[active]
            active = active[uniform_below(bound, len(active)) < numerator[active]]
        k += 1
        result[active] = k % 2 == 1
    return result


def _successes(count: int) -> Integers:
    """How many coins of probability exp(−1) come up true before the first false one."""
    made = np.zeros(count, dtype=np.int64)
    active = np.arange(count)
    while len(active):
        active = active[_below_constant(_words(len(active)))]
        made[active] += 1
    return made


def _bits(count: int) -> Integers:
    packed = np.frombuffer(os.urandom((count + 7) // 8), dtype=np.uint8)
    return np.unpackbits(packed, count=count).astype(bool)


def _below_constant(words: Integers) -> Integers:
    """True with probability exp(−1): is the uniform number with these first 63 bits below it?

    The binary digits of exp(−1) are worked out with integers. A word equal to its first digits (once in 2^63) is
    decided by the digits that follow.
    """
    result = words < _DIGITS
    for place in np.flatnonzero(words == _DIGITS):
        result[place] = _decide_tie()
    return result


def _decide_tie() -> bool:
    taken = 63
    while True:
        digit = _digits_of_inverse_e(taken + 63) & _MOST
        word = int(_words(1)[0])
        if word != digit:
            return word < digit
        taken += 63


def _digits_of_inverse_e(bits: int) -> int:
    """⌊2^bits · exp(−1)⌋: the series Σ (−1)^k/k!, with spare digits for the rounding of its terms."""
    spare = bits + 64
    total, term, k = 0, 1 << spare, 0
    while term:
        total += -term if k % 2 else term
        k += 1
        term //= k
    return total >> 64


_DIGITS = _digits_of_inverse_e(63)


# The same as operations of PyTorch. A Python function is called once for a block of clients under ``vmap``, and all of
# them would get the same noise; an operation has a rule that draws for each. ``like`` differs between the clients.


def gaussian_noise(sigma: int | Tensor, shape: Sequence[int], like: Tensor | None = None) -> Tensor:
    """Discrete Gaussian noise of this shape (int64). Inside ``vmap``, ``like`` must be a tensor of the client's own."""
    return cast(Tensor, _noise_op(_like_or_nothing(like), torch.as_tensor(sigma), list(shape), True))


def laplace_noise(scale: int | Tensor, shape: Sequence[int], like: Tensor | None = None) -> Tensor:
    """Discrete Laplace noise of this shape (int64), likewise."""
    return cast(Tensor, _noise_op(_like_or_nothing(like), torch.as_tensor(scale), list(shape), False))


def exponential_choice(scores: Tensor, scale: int | Tensor, like: Tensor | None = None) -> Tensor:
    """An index of the last dimension with probability ∝ exp(score/scale), exactly; integer scores, at most 2^62 apart.

    A candidate is drawn uniformly and accepted with probability exp(−(largest − score)/scale), until one is. ``scale``
    is one number, or one for each row of scores.
    """
    return cast(Tensor, _choice_op(_like_or_nothing(like), scores, torch.as_tensor(scale)))


def _like_or_nothing(like: Tensor | None) -> Tensor:
    return torch.zeros(0) if like is None else like


@torch.library.custom_op("unalike::discrete_noise", mutates_args=(), tags=RANDOM)
def _noise_op(like: Tensor, scale: Tensor, shape: Sequence[int], gaussian: bool) -> Tensor:
    sample = discrete_gaussian if gaussian else discrete_laplace
    scales = scale.reshape(-1).tolist()  # one, or one for each client of a block
    made = [sample(each, math.prod(shape) // len(scales)) for each in scales]
    return torch.from_numpy(np.concatenate(made)).reshape(tuple(shape))


@_noise_op.register_fake
def _(like: Tensor, scale: Tensor, shape: Sequence[int], gaussian: bool) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.int64)


@_noise_op.register_vmap
def _(info: Any, in_dims: Any, like: Tensor, scale: Tensor, shape: Sequence[int], gaussian: bool) -> tuple[Tensor, int]:
    return _noise_op(like, scale, [info.batch_size, *shape], gaussian), 0


@torch.library.custom_op("unalike::exponential_choice", mutates_args=(), tags=RANDOM)
def _choice_op(like: Tensor, scores: Tensor, scale: Tensor) -> Tensor:
    rows = scores.reshape(-1, scores.shape[-1]).numpy()
    scales = scale.to(torch.int64).expand(scores.shape[:-1]).reshape(-1).numpy()
    gaps = rows.max(axis=1, keepdims=True) - rows
    made, places = np.empty(len(rows), dtype=np.int64), np.arange(len(rows))
    while len(places):
        proposed = uniform_below(rows.shape[1], len(places))
        accepted = bernoulli_exp(gaps[places, proposed], scales[places])
        made[places[accepted]] = proposed[accepted]
        places = places[~accepted]
    return torch.from_numpy(made).reshape(scores.shape[:-1])


@_choice_op.register_fake
def _(like: Tensor, scores: Tensor, scale: Tensor) -> Tensor:
    return torch.empty(scores.shape[:-1], dtype=torch.int64)


@_choice_op.register_vmap
def _(info: Any, in_dims: Any, like: Tensor, scores: Tensor, scale: Tensor) -> tuple[Tensor, int]:
    _, of_scores, of_scale = in_dims
    scores = scores.movedim(of_scores, 0) if of_scores is not None else scores.expand(info.batch_size, *scores.shape)
    if of_scale is not None:  # one scale for each client; a scale for each of its rows has these dimensions already
        scale = scale.movedim(of_scale, 0)
        scale = scale.reshape(*scale.shape, *[1] * (scores.ndim - 1 - scale.ndim))
    return _choice_op(like, scores.contiguous(), scale), 0
