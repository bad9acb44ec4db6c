"""What an attack proves about ε: from scores of canaries that took part or not, with Clopper-Pearson bounds.

(ε, δ)-DP allows no test of "did this unit take part?" with false positive rate α and false negative rate β unless
1 − β <= e^ε·α + δ and 1 − α <= e^ε·β + δ (Kairouz, Oh and Viswanath 2015). An attack whose rates are below what ε
allows refutes it. The rates are estimated from independent trials, so they come with confidence bounds, and the ε that
they prove is a lower bound that holds with that confidence.

There are two bounds. ``proven_epsilon`` assumes nothing about the mechanism; it needs e^ε trials and more. The other,
``proven_noise``, is in the spirit of Nasr et al. (2023), who fit the curve of the Gaussian mechanism through one point:
it assumes that the releases are those of the ledger (kinds of noise, sampling, how many) and that only their noise may
be another, the same factor c for all. For each c the accountant knows all pairs (α, β) that are possible; the largest c
that allows the observed pair bounds the noise from above, and its ε is a lower bound. A thousand trials tell half of
the noise from all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unalike.privacy.account import Account
from unalike.privacy.checks import check_delta
from unalike.privacy.mechanisms import AdditiveNoise, DrawsLike, Norm, RandomizedResponse

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class Proof:
    """The ε that an attack proves, and the rates that prove it."""

    epsilon: float  # at least this, with the given confidence
    delta: float
    confidence: float
    trials: int  # canaries that were tested (others chose the threshold)
    false_positives: float  # observed rate among canaries that took no part
    false_negatives: float  # observed rate among those that did
    limit: float  # no attack can prove more with so few canaries, if nothing is assumed about the mechanism
    noise: float = math.inf  # the real noise is at most this share of what the ledger was told, if only it may be wrong
    assumed: float = 0.0  # the ε that this noise has: a lower bound under that assumption

    @property
    def best(self) -> float:
        """The larger of the two lower bounds."""
        return max(self.epsilon, self.assumed)


@dataclass(frozen=True)
class Quieter:
    """Noise that is scaled down by ``factor``, while its event still speaks of the whole: what an audit must find."""

    claimed: AdditiveNoise
    factor: float

    @property
    def norm(self) -> Norm:
        return self.claimed.norm

    def std(self, sensitivity: float) -> float:
        """Of the noise that is really made."""
        return self.claimed.std(self.factor * sensitivity)

    def add(self, value: Tensor, sensitivity: float, draws: DrawsLike, step: float | None = None) -> Tensor:
        return self.claimed.add(value, self.factor * sensitivity, draws, step)

    def event(self) -> DpEvent:
        return self.claimed.event()


@dataclass(frozen=True)
class Truer(RandomizedResponse):
    """Answers that are true as often as ε/``cut`` allows, while the event still speaks of ε."""

    cut: float = 1.0

    @property
    def truth(self) -> float:
        return RandomizedResponse(self.epsilon / self.cut, self.categories).truth

    def respond(self, answer: Tensor, draws: DrawsLike) -> Tensor:
        return RandomizedResponse(self.epsilon / self.cut, self.categories).respond(answer, draws)

    def event(self, answers: int = 1) -> DpEvent:
        return RandomizedResponse(self.epsilon, self.categories).event(answers)


def proven_epsilon(scores: Tensor, member: Tensor, delta: float, confidence: float = 0.95) -> Proof:
    """The ε that these scores prove; a high score says that the canary took part.

    Every second canary chooses the threshold, the others are tested with it: choosing on the tested ones would make
    the bound too good. Both rates are bounded at once, each with half of the error that the confidence leaves.
    """
    check_delta(delta)
    if not 0.5 <= confidence < 1:
        raise ValueError(f"confidence must be from 0.5 to below 1, got {confidence}; take 0.95")
    if scores.shape != member.shape or scores.ndim != 1:
        raise ValueError(f"expected one score for each canary, got {tuple(scores.shape)} and {tuple(member.shape)}")
    ins, outs = scores[member], scores[~member]
    if min(len(ins), len(outs)) < 20:
        raise ValueError(f"{len(ins)} canaries took part and {len(outs)} did not; expected at least 20 of each")
    threshold, positive = _best(ins[::2], outs[::2], delta, confidence)
    tested_in, tested_out, error = ins[1::2], outs[1::2], (1 - confidence) / 2
    fp, fn = _largest_rates(tested_in, tested_out, threshold, error)
    none_out, none_in = upper_bound(0, len(tested_out), error), upper_bound(0, len(tested_in), error)
    return Proof(
        epsilon=max(0.0, _epsilon(fp, fn, delta) if positive else _epsilon(fn, fp, delta)),
        delta=delta,
        confidence=confidence,
        trials=len(tested_in) + len(tested_out),
        false_positives=float((tested_out >= threshold).double().mean()),
        false_negatives=float((tested_in < threshold).double().mean()),
        limit=max(_epsilon(none_out, none_in, delta), _epsilon(none_in, none_out, delta)),
    )


def _largest_rates(ins: Tensor, outs: Tensor, threshold: float, error: float) -> tuple[float, float]:
    """Bounds of the false positive and the false negative rate, each with this error."""
    false_positives, false_negatives = int((outs >= threshold).sum()), int((ins < threshold).sum())
    return upper_bound(false_positives, len(outs), error), upper_bound(false_negatives, len(ins), error)


def proven_noise(scores: Tensor, member: Tensor, released: Account, confidence: float = 0.95) -> float:
    """The largest c for which these scores are possible if all noise of the releases is c times what they say.

    Every second canary chooses the threshold, as in ``proven_epsilon``. From c = 4 on nothing more is distinguished.
    """
    from unalike.privacy import accountant

    ins, outs = scores[member], scores[~member]
    fp, fn = _largest_rates(ins[1::2], outs[1::2], _clearest(ins[::2], outs[::2]), (1 - confidence) / 2)

    def possible(factor: float) -> bool:
        return allows(accountant.scale_noise(released, factor), fp, fn)

    low, high = 1.0, 1.0  # outwards from what was promised: curves of little noise take long
    if possible(1.0):
        while possible(high):
            low, high = high, 1.5 * high
            if high > _MOST_NOISE:
                return _MOST_NOISE
    else:
        while not possible(low):
            low, high = low / 1.5, low
            if low < _LEAST_NOISE:
                return high
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if possible(middle) else (low, middle)
    return high


_LEAST_NOISE, _MOST_NOISE = 1 / 16, 4.0
_LOSSES = tuple(0.02 * 1.12**k for k in range(62))  # 0.02 to 20: where the curve of possible rates is looked at


def allows(released: Account, false_positives: float, false_negatives: float) -> bool:
    """Could a test of these releases have rates as low as these?"""
    import numpy as np

    from unalike.privacy import accountant

    at = np.array((0.0, *_LOSSES))
    delta, grown = accountant.deltas(released, at), np.exp(at)
    one_way = 1.0 - false_negatives - grown * false_positives <= delta
    return bool((one_way & (1.0 - false_positives - grown * false_negatives <= delta)).all())


def _clearest(ins: Tensor, outs: Tensor) -> float:
    """The threshold at which the two rates differ most, in standard errors of their difference."""
    both = torch.sort(torch.cat([ins, outs])).values
    candidates = both[torch.linspace(0, len(both) - 1, min(len(both), 1000)).long()]
    over_in = 1.0 - torch.searchsorted(torch.sort(ins).values, candidates) / len(ins)
    over_out = 1.0 - torch.searchsorted(torch.sort(outs).values, candidates) / len(outs)
    middle = (over_in + over_out + 1.0 / len(both)) / 2
    spread = (middle * (1 - middle)).clamp(min=1.0 / len(both)).sqrt()
    return float(candidates[((over_in - over_out) / spread).argmax()])


def upper_bound(count: int, trials: int, error: float) -> float:
    """Clopper and Pearson's bound: the true rate lies above it with probability at most ``error``."""
    from scipy.stats import beta

    return 1.0 if count >= trials else float(beta.isf(error, count + 1, trials - count))


def canaries_for(epsilon: float) -> int:
    """Enough canaries to tell half of the noise from all of it by ``proven_noise``: more where ε is small."""
    return int(min(60_000, max(4_000, 6_000 / epsilon**2)))


def _epsilon(false_positives: float, false_negatives: float, delta: float) -> float:
    return math.log(max(1.0 - false_negatives - delta, 1e-12) / max(false_positives, 1e-12))


def _best(ins: Tensor, outs: Tensor, delta: float, confidence: float) -> tuple[float, bool]:
    """The threshold with the largest proven ε on these scores, and in which of the two directions.

    Of so many thresholds one in the tails would look good by luck; a stricter error keeps it from being chosen.
    """
    error = (1 - confidence) / 200
    high, low = torch.sort(ins).values, torch.sort(outs).values
    candidates = torch.quantile(
        torch.cat([ins, outs]).to(torch.float64), torch.linspace(0, 1, 201, dtype=torch.float64)
    )
    candidates = torch.cat([candidates, high[:: max(1, len(high) // 50)], low[-50:], low.max()[None] + 1e-9, high[:50]])
    best, chosen, direction = -math.inf, float(candidates[100]), True
    for candidate in candidates.tolist():
        fp = upper_bound(len(low) - int(torch.searchsorted(low, candidate)), len(low), error)
        fn = upper_bound(int(torch.searchsorted(high, candidate)), len(high), error)
        for positive, value in ((True, _epsilon(fp, fn, delta)), (False, _epsilon(fn, fp, delta))):
            if value > best:
                best, chosen, direction = value, candidate, positive
    return chosen, direction
