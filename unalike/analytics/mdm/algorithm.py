"""MDM: how clients differ, as a mixture of Dirichlet-multinomials learned from sums alone (T1 ch. 3 and App. A).

Algorithm 5 starts the parameters, Algorithm 6 improves them by one generalised EM step a round, and A.1 chooses the
number of components by the likelihood of clients that were not fitted on. Clients are those of ``histogram_clients``.

Where this departs from the pages, and why:
- *Breaking the symmetry.* Algorithm 5 has each client join a component at random; in a large cohort all components
  then start nearly equal, and EM may end in a poor optimum (high-3 of Table A.1). Here a client joins by how
  concentrated it is: the server first gets the cohort's histogram of Σ_j p_j² (a sum), broadcasts its k/K quantiles as
  thresholds, and each client compares its own Σ_j p_j² with them. ``start="random"`` is Algorithm 5 as printed.
- *Moment matching* takes each component's category with the largest mean in place of category 1, whose moments may be
  all zero; moments and the precision α_0 are clamped.
- *What is sent.* α·(ψ(c+α)−ψ(α)) and α_0·(ψ(m+α_0)−ψ(α_0)) in place of (3.13) and (3.14): the server computes the same
  (3.19), but a small α no longer makes a client's share huge, which matters when it is clipped.
- *The end.* The result is the mean of the last quarter of the rounds (geometric for A): one cohort's step is noisy.
- *Empty components* restart beside the heaviest one in the first half of the rounds; one that is empty at the end is
  merged away, and a note says so. Zeros in τ and Π are smoothed by a hundredth of a client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from unalike.core.client import Client
from unalike.core.federation import Federation, Replies
from unalike.core.release import Release, Sum
from unalike.core.roster import Roster
from unalike.core.task import Sent, send, task
from unalike.data.partition.mixture import MDMError, Mixture, joint, rise_table, size_edges, with_total
from unalike.privacy.mechanisms import AdditiveNoise

SMOOTHING = 0.01  # clients added to every component, so that no weight and no size has probability 0
EMPTY = 1e-3  # a component with a smaller share of the cohort is empty
LEAST_ALPHA, LEAST_PRECISION, MOST_PRECISION = 1e-4, 1e-2, 1e4
TIE = 2.0  # standard errors: a difference in likelihood that is no larger does not count
CONCENTRATION_BINS = 64  # between Σp² = 1/C (all categories alike) and 1 (one category only), in equal ratios


@dataclass(frozen=True)
class Fitted:
    """A mixture with the record of how it was found."""

    mixture: Mixture
    log_likelihood: list[float] = field(default_factory=list)  # of each round's cohort, per client; empty with noise
    notes: list[str] = field(default_factory=list)  # what was out of the ordinary


@dataclass(frozen=True)
class MDM:
    """Settings and both sides of the algorithm.

    With ``noise`` (client-level privacy) cohorts are Poisson samples, every client's share is clipped (only ``clip``,
    on the statistics of A, ever binds) and no likelihood is released. ``largest`` is the bound M on a client's number
    of samples; it must be known beforehand, because the data's own maximum would be a release.
    """

    categories: int
    largest: int
    components: int = 2
    rounds: int = 100
    cohort: int | float = 1000
    start: Literal["concentration", "random"] = "concentration"
    clip: float = 20.0
    gain_clip: float = 10.0
    noise: AdditiveNoise | None = None
    size_bins: int = 256

    def __post_init__(self) -> None:
        least = {"categories": 2, "largest": 1, "components": 1, "rounds": 1, "size_bins": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise MDMError(f"{name}={getattr(self, name)}; expected at least {bound}")
        if self.start not in ("concentration", "random"):
            raise MDMError(f"start={self.start!r}; expected 'concentration' or 'random'")
        if not self.clip > 0 or not self.gain_clip > 0:
            raise MDMError(f"clip={self.clip} and gain_clip={self.gain_clip}; expected numbers above 0")

    @property
    def edges(self) -> Tensor:
        return size_edges(self.largest, self.size_bins)

    # The client's side

    @task
    def spread(self, client: Client) -> Sent:
        """Into which bin of concentration Σ_j p_j² the client falls, one-hot."""
        place = _concentration_place(client.x[0], self.categories)
        found = (place * CONCENTRATION_BINS).long().clamp(0, CONCENTRATION_BINS - 1)
        return send(spread=_one_hot(found, CONCENTRATION_BINS))

    @spread.into
    def _spread_sum(self) -> list[Release]:
        return [self._sum("spread", 1.0)]

    @task
    def moments(self, client: Client, thresholds: Tensor) -> Sent:
        """Algorithm 5, lines 3 to 6: the client's component k_i, and 1, E^i, P^i, Q^i in its row, side by side.

        K − 1 thresholds divide the clients into K components; with a random start only their number counts.
        """
        counts, components = client.x[0], len(thresholds) + 1
        p = counts / counts.sum()
        if self.start == "random":
            component = client.draws.integers(components, 1)[0]
        else:
            component = (_concentration_place(counts, self.categories) > thresholds).sum()
        size = _one_hot(torch.bucketize(counts.sum(), self.edges, right=True) - 1, len(self.edges) - 1)
        row = torch.cat([torch.ones(1), size, p, p * p])
        return send(moments=self._within_bound(counts, _one_hot(component, components)[:, None] * row))

    @moments.into
    def _moments_sum(self) -> list[Release]:
        return [self._sum("moments", 2.0)]

    @task
    def expectation(self, client: Client, tau: Tensor, alpha: Tensor, pi: Tensor) -> Sent:
        """Algorithm 6, lines 6 to 9. ``membership`` is ω^i beside E^i; ``growth`` is α·u^i beside α_0·v^i."""
        counts = client.x[0]
        edges, precise = self.edges, with_total(alpha)
        # Inside the simulator alpha is the same for the whole block, so the table is made once for all its clients.
        table = rise_table(precise, self.largest)
        log_joint, slopes = joint(counts, table, tau.log(), _log_density(pi, edges), edges)
        evidence = torch.logsumexp(log_joint, 0)
        omega = (log_joint - evidence).exp()
        size = _one_hot(torch.bucketize(counts.sum(), edges, right=True) - 1, len(edges) - 1)
        membership = omega[:, None].to(torch.float32) * torch.cat([torch.ones(1), size])  # single precision: E is large
        return send(membership=membership, growth=omega[:, None] * precise * slopes.T, log_likelihood=evidence)

    @expectation.into
    def _expectation_sums(self) -> list[Release]:
        sums = [self._sum("membership", math.sqrt(2)), self._sum("growth", self.clip)]
        return sums if self.noise is not None else [*sums, Sum("log_likelihood")]

    @task
    def validation(self, client: Client, tau: Tensor, alpha: Tensor, pi: Tensor) -> Sent:
        """ln q of several mixtures at once: tau [J, K], alpha [J, K, C], pi [J, K, bins], padded with weights of 0.

        ``gain`` [J] is over the first mixture, ``square`` [J, J] its products: they give variances of differences.
        """
        edges = self.edges
        evidences = []
        for j in range(len(tau)):
            table = rise_table(with_total(alpha[j]), self.largest)
            log_joint, _ = joint(client.x[0], table, tau[j].log(), _log_density(pi[j], edges), edges)
            evidences.append(torch.logsumexp(log_joint, 0))
        evidence = torch.stack(evidences)
        gain = evidence - evidence[0]
        return send(log_likelihood=evidence, gain=gain, square=gain[:, None] * gain)

    @validation.into
    def _validation_sums(self) -> list[Release]:
        if self.noise is not None:
            return [self._sum("gain", self.gain_clip)]
        return [Sum("log_likelihood"), Sum("gain"), Sum("square")]

    def _sum(self, name: str, clip: float) -> Release:
        """A sum, with noise if there is any, and then clipped.

        ω and every row of E, P and Q have a norm of at most 1, so only the clip on ``growth`` shortens anything.
        """
        return Sum(name) if self.noise is None else Sum(name, clip=clip, noise=self.noise)

    def _within_bound(self, counts: Tensor, value: Tensor) -> Tensor:
        """NaN, so that the client does not answer, where it has more samples than the bound M."""
        return torch.where(counts.sum() <= self.largest, value, torch.nan)

    # The server's side

    def fit(self, federation: Federation, after_round: Callable[[int], None] | None = None) -> Fitted:
        """Algorithms 5 and 6. ``after_round(number)`` may watch."""
        self.check(federation.roster)
        cohort = min(self.cohort, len(federation.roster)) if isinstance(self.cohort, int) else self.cohort
        notes: list[str] = []
        mixture = self._initial(federation.begin_round(federation.round + 1), cohort, notes)
        trace: list[float] = []
        tail = max(1, self.rounds // 4)
        log_alpha, tau, pi = (torch.zeros_like(value) for value in (mixture.alpha, mixture.tau, mixture.pi))
        for t in range(self.rounds):
            sample = federation.begin_round(federation.round + 1).sample(cohort, poisson=self.noise is not None)
            replies = sample.ask(self.expectation, tau=mixture.tau, alpha=mixture.alpha, pi=mixture.pi)
            if "membership" in replies:  # a Poisson cohort may be empty
                mixture = self._maximised(mixture, replies, notes, may_restart=t < self.rounds // 2)
            if "log_likelihood" in replies:
                trace.append(float(replies["log_likelihood"]) / len(replies.answered))
                federation.report(log_likelihood=trace[-1])
            if t >= self.rounds - tail:
                log_alpha += mixture.alpha.log() / tail
                tau += mixture.tau / tail
                pi += mixture.pi / tail
            if after_round is not None:
                after_round(t + 1)
        found = _merged(Mixture(tau / tau.sum(), log_alpha.exp(), pi / pi.sum(1, keepdim=True), self.edges), notes)
        for k in (found.alpha.sum(1) > 0.9 * MOST_PRECISION).nonzero().flatten().tolist():
            notes.append(
                f"component {k}: its clients differ no more than samples of one distribution would; the precision α_0, "
                f"whose best value is infinite, was stopped at {MOST_PRECISION:g}"
            )
        return Fitted(found, trace, notes)

    def choose(
        self,
        federation: Federation,
        unseen: Federation,
        candidates: Sequence[int],
        after_round: Callable[[int], None] | None = None,
    ) -> Choice:
        """Fit every number of components and keep the best on ``unseen`` clients (T1 A.1.1).

        Approximate ties go to the smaller K: it wins if its mean likelihood is within two standard errors of the best
        (of the paired difference; with noise, two standard deviations of the noise).
        """
        candidates = sorted(set(candidates))
        if not candidates:
            raise MDMError("there is no number of components to choose from; give at least one, e.g. 1, 2, 3")
        settings = [replace(self, components=components) for components in candidates]
        for each in settings:
            each.check(federation.roster)
        self.check(unseen.roster, components=1)
        fits = [each.fit(federation, after_round) for each in settings]
        score = self.score(unseen, [fitted.mixture for fitted in fits])
        best = int(score.gain.argmax())
        below = score.gain[best] - score.gain
        chosen = int((below <= TIE * score.error[best]).nonzero()[0])
        return Choice(fits[chosen], candidates, score.log_likelihood, below.tolist(), score.error[best].tolist())

    def score(self, federation: Federation, mixtures: Sequence[Mixture]) -> Score:
        """How likely all clients of a federation are under each mixture, from one ask."""
        most = max(mixture.components for mixture in mixtures)
        padded = [_padded(mixture, most) for mixture in mixtures]
        cohort = federation.begin_round(federation.round + 1).everyone()
        replies = cohort.ask(
            self.validation,
            tau=torch.stack([mixture.tau for mixture in padded]),
            alpha=torch.stack([mixture.alpha for mixture in padded]),
            pi=torch.stack([mixture.pi for mixture in padded]),
        )
        count = len(replies.answered)
        gain = replies["gain"] / count
        if self.noise is not None:
            deviation = math.sqrt(2) * self.noise.std(cohort.sampling.sensitivity(self.gain_clip)) / count
            return Score(gain, torch.full((len(gain), len(gain)), deviation, dtype=gain.dtype), None)
        square = replies["square"] / count - gain[:, None] * gain
        variance = square.diagonal()[:, None] + square.diagonal() - 2 * square
        return Score(gain, (variance.clamp(min=0) / count).sqrt(), (replies["log_likelihood"] / count).tolist())

    def check(self, roster: Roster, components: int | None = None) -> None:
        """Refuse clients that this mixture cannot be fitted on, before anything is asked of them.

        That no client has more samples than ``largest`` is checked where histograms are made (``histogram_clients``).
        """
        components = self.components if components is None else components
        schema = roster.schema
        if len(schema.shape) != 1 or schema.dtype.is_floating_point or not bool((roster.bound == 1).all()):
            raise MDMError("MDM is fitted on histograms, one for each client; make them with histogram_clients(counts)")
        if schema.shape[0] != self.categories:
            raise MDMError(f"the histograms have {schema.shape[0]} categories, but categories={self.categories}")
        if components > len(roster):
            raise MDMError(
                f"{components} mixture components for {len(roster)} clients; a component needs at least one client: "
                f"use at most {len(roster)}"
            )

    def _initial(self, federation: Federation, size: int | float, notes: list[str]) -> Mixture:
        """Algorithm 5 (with one more sum before it, for the thresholds)."""
        cohort = federation.sample(size, poisson=self.noise is not None)
        thresholds = torch.full((self.components - 1,), torch.inf, dtype=torch.float64)
        if self.start == "concentration" and self.components > 1:
            replies = cohort.ask(self.spread)
            if "spread" in replies:
                thresholds = _quantiles(replies["spread"].double(), self.components)
        replies = cohort.ask(self.moments, thresholds=thresholds)
        if "moments" not in replies:
            raise MDMError("the first Poisson cohort was empty, so there is nothing to start from; use a larger cohort")
        sums, bins = replies["moments"].double(), len(self.edges) - 1
        everybody = sums.sum(0)
        rows = []
        for k in range(self.components):
            row = sums[k]
            if row[0] < max(1.0, EMPTY * float(everybody[0])):  # nobody is here
                notes.append(f"component {k} had no client to start from; it started from the moments of all of them")
                rows.append((everybody, 2.0 ** (k + 1)))  # and not quite as another one did
            else:
                rows.append((row, 1.0))
        alpha = torch.stack([_matched(row[1 + bins :] / row[0].clamp(min=1), stretch) for row, stretch in rows])
        pi = torch.stack([_smoothed(row[1 : 1 + bins]) for row, _ in rows])
        tau = torch.full((self.components,), 1 / self.components, dtype=torch.float64)
        return Mixture(tau, alpha, pi, self.edges)

    def _maximised(self, now: Mixture, replies: Replies, notes: list[str], may_restart: bool) -> Mixture:
        """Algorithm 6, lines 13 to 15."""
        membership, growth = replies["membership"].double(), replies["growth"]
        weight = membership[:, 0].clamp(min=0)
        tau = _smoothed(weight)
        pi = torch.stack([_smoothed(row) for row in membership[:, 1:]])
        precision = now.alpha.sum(1, keepdim=True)
        alpha = precision * growth[:, :-1].clamp(min=0) / growth[:, -1:].clamp(min=1e-12)
        filled = (weight > EMPTY * weight.sum()) & (growth[:, -1] > 0)
        alpha = _clamped(torch.where(filled[:, None], alpha, now.alpha))
        if may_restart and not bool(filled.all()) and bool(filled.any()):
            heaviest = int(weight.argmax())
            for k in (~filled).nonzero().flatten().tolist():
                alpha[k], pi[k] = alpha[heaviest] / 2, pi[heaviest]
                tau[k] = tau[heaviest] = (tau[k] + tau[heaviest]) / 2
                note = f"component {k} became empty and restarted beside component {heaviest}"
                if note not in notes:
                    notes.append(note)
        return Mixture(tau, alpha, pi, now.edges)


@dataclass(frozen=True)
class Score:
    """Mean log-likelihoods per client of several mixtures."""

    gain: Tensor  # [J] over the first mixture
    error: Tensor  # [J, J] standard errors of the differences
    log_likelihood: list[float] | None  # [J]; None where it was not released


@dataclass(frozen=True)
class Choice:
    """The mixture that was chosen, and for every candidate how far below the best one it was, with a standard error."""

    fitted: Fitted
    components: list[int]
    log_likelihood: list[float] | None
    below_best: list[float]
    error: list[float]


def _one_hot(index: Tensor, count: int) -> Tensor:
    return (torch.arange(count) == index).to(torch.float32)


def _log_density(pi: Tensor, edges: Tensor) -> Tensor:
    """ln π_k,m: a bin's probability is spread evenly over its sizes."""
    return torch.log(pi / (edges[1:] - edges[:-1]))


def _concentration_place(counts: Tensor, categories: int) -> Tensor:
    """Where Σ_j p_j² lies between its least value 1/C (gives 0) and its most, 1 (gives 1), in logarithms."""
    p = counts / counts.sum().to(torch.float64)
    return 1 + (p * p).sum().log() / math.log(categories)


def _quantiles(histogram: Tensor, components: int) -> Tensor:
    """[K − 1] places that divide a histogram over [0, 1] into K equal parts."""
    mass = histogram.clamp(min=0) + 1e-9  # a noisy bin may be negative
    below = torch.cat([torch.zeros(1, dtype=mass.dtype), mass.cumsum(0) / mass.sum()])
    wanted = torch.arange(1, components, dtype=mass.dtype) / components
    right = torch.searchsorted(below, wanted).clamp(1, len(mass))
    inside = (wanted - below[right - 1]) / (below[right] - below[right - 1])
    return (right - 1 + inside) / len(mass)


def _matched(moments: Tensor, stretch: float) -> Tensor:
    """Equation (3.9) with the category of the largest mean; ``stretch`` multiplies the precision."""
    first, second = moments.chunk(2)
    first = first.clamp(0, 1)
    first = (first + 1e-6) / (first + 1e-6).sum()
    j = int(first.argmax())
    variance = (second[j] - first[j] ** 2).clamp(min=1e-9)
    precision = ((first[j] - second[j]) / variance).clamp(LEAST_PRECISION, MOST_PRECISION)
    return _clamped((stretch * precision * first)[None])[0]


def _clamped(alpha: Tensor) -> Tensor:
    """α within its bounds: every entry above a floor, and the precision below a ceiling."""
    return alpha.clamp(min=LEAST_ALPHA) * (MOST_PRECISION / alpha.sum(1, keepdim=True)).clamp(max=1.0)


def _smoothed(mass: Tensor) -> Tensor:
    """Probabilities from masses that may be zero or, with noise, negative."""
    mass = mass.clamp(min=0) + SMOOTHING / len(mass)
    return mass / mass.sum()


def _merged(mixture: Mixture, notes: list[str]) -> Mixture:
    """The mixture without its empty components."""
    kept = mixture.tau > EMPTY
    if bool(kept.all()):
        return mixture
    notes.append(f"{int((~kept).sum())} of {len(kept)} components ended empty and were merged into the others")
    tau = mixture.tau[kept]
    return Mixture(tau / tau.sum(), mixture.alpha[kept], mixture.pi[kept], mixture.edges)


def _padded(mixture: Mixture, components: int) -> Mixture:
    """The same mixture with further components of weight 0."""
    missing = components - mixture.components
    if missing == 0:
        return mixture
    alpha, pi = (torch.cat([value, value[:1].expand(missing, -1)]) for value in (mixture.alpha, mixture.pi))
    return Mixture(torch.cat([mixture.tau, torch.zeros(missing, dtype=torch.float64)]), alpha, pi, mixture.edges)
