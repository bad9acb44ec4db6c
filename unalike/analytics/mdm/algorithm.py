"""MDM: how clients differ, as a mixture of Dirichlet-multinomials learned from sums alone (T1 ch. 3 and App. A).

Algorithm 5 starts the parameters, Algorithm 6 improves them by one generalised EM step a round, and A.1 chooses the
number of components by the likelihood of clients that were not fitted on. Clients are those of ``histogram_clients``.

Where this departs from the pages, and why:
- *Breaking the symmetry.* Algorithm 5 has each client join a component at random; in a large cohort all components
  then start nearly equal, and EM may end in a poor optimum (high-3 of Table A.1). Here a client joins by how
  concentrated it is: the server first gets the cohort's histogram of Σ_j p_j² (a sum), broadcasts its k/K quantiles as
  thresholds, and each client compares its own Σ_j p_j² with them. And moment matching takes each component's category
  with the largest mean in place of category 1, whose moments may be all zero. ``start="random"`` is Algorithm 5 as
  printed in both. Moments and the precision α_0 are clamped.
- *What is sent.* α·(ψ(c+α)−ψ(α)) and α_0·(ψ(m+α_0)−ψ(α_0)) in place of (3.13) and (3.14): the server computes the same
  (3.19), but a small α no longer makes a client's share huge, which matters when it is clipped.
- *The end.* The result is the mean of the last quarter of the rounds (geometric for A): one cohort's step is noisy.
- *All K in one shot* (A.1.1). Every round's cohort answers for all candidate numbers of components at once, so that
  choosing among them takes no more rounds than fitting one. A client's shares for J candidates are sent as one array,
  over √J, so that its norm, and with noise its cost, is that of one: the noise on each is √J larger instead.
- *Empty components* restart beside the heaviest one in the first half of the rounds; one that is empty at the end is
  merged away, and a note says so. Zeros in τ and Π are smoothed by a hundredth of a client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from unalike.analytics.mdm.steps import MOST_PRECISION, drop_empty, maximize, quantiles, stack, start_mixture
from unalike.analytics.reading import bad_rows
from unalike.core.release import Each, Release, Sum
from unalike.core.roster import Roster
from unalike.core.vocabulary import Client, Cohort, Federation, Replies, Sent, Task, send, task
from unalike.data.partition.mixture import MDMError, Mixture, joint, log_density, rise_table, size_edges, with_total
from unalike.privacy.mechanisms import AdditiveNoise

Start = Literal["concentration", "random"]
TIE = 2.0  # standard errors: a difference in likelihood that is no larger does not count
CONCENTRATION_BINS = 64  # between Σp² = 1/C (all categories alike) and 1 (one category only), in equal ratios


@dataclass(frozen=True)
class MixtureFit:
    """A mixture with the record of how it was found."""

    mixture: Mixture
    log_likelihood: list[float] = field(default_factory=list)  # of each round's cohort, per client; empty with noise
    notes: list[str] = field(default_factory=list)  # what was out of the ordinary
    path: list[Mixture] = field(default_factory=list)  # after the start and after each round, before any averaging


@dataclass(frozen=True)
class Likelihoods:
    """Mean log-likelihoods per client of several mixtures."""

    gain: Tensor  # [J] over the first mixture
    error: Tensor  # [J, J] standard errors of the differences
    log_likelihood: list[float] | None  # [J]; None where it was not released


@dataclass(frozen=True)
class Choice:
    """The mixture that was chosen, and for every candidate how far below the best one it was, with a standard error."""

    fitted: MixtureFit
    components: list[int]
    log_likelihood: list[float] | None
    below_best: list[float]
    error: list[float]

    def rows(self) -> list[dict[str, float]]:
        """One for each candidate."""
        columns = {"components": self.components, "below_best": self.below_best, "standard_error": self.error}
        columns |= {} if self.log_likelihood is None else {"log_likelihood": self.log_likelihood}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@dataclass(frozen=True)
class MDM:
    """Settings and both sides of the algorithm.

    With ``noise`` (client-level privacy) cohorts are Poisson samples, every client's share is clipped (only ``clip``,
    on the statistics of A, ever binds) and no likelihood is released. ``largest`` is the bound M on a client's number
    of samples; it must be known beforehand, because the data's own maximum would be a release.

    - ``local``: each client adds the noise to its own share before it leaves (T1 §3.5), so it need not trust the
      server. It then answers in one round only, so that it pays for no more than two releases.
    - ``secure``: sums under masks. Without noise a client's share is clipped all the same, to the most it can be; no
      likelihood is released, and candidates are compared by gains that are clipped to ``gain_clip``.
    """

    categories: int
    largest: int
    components: int = 2
    rounds: int = 100
    cohort: int | float = 1000
    start: Start = "concentration"
    clip: float = 20.0
    gain_clip: float = 10.0
    noise: AdditiveNoise | None = None
    local: bool = False
    secure: bool = False
    size_bins: int = 256

    def __post_init__(self) -> None:
        if self.local and (self.noise is None or self.secure):
            raise MDMError("local=True is about noise that clients add: give noise=..., and leave secure out")
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
        counts, sound = self._histogram(client)
        place = _concentration_place(counts, self.categories)
        found = (place * CONCENTRATION_BINS).long().clamp(0, CONCENTRATION_BINS - 1)
        return send(spread=sound * _one_hot(found, CONCENTRATION_BINS))

    @spread.into
    def _spread_sum(self) -> list[Release]:
        return [self._sum("spread", 1.0)]

    @task
    def moments(self, client: Client, thresholds: Tensor, components: Tensor) -> Sent:
        """Algorithm 5, lines 3 to 6: the client's component k_i, and 1, E^i, P^i, Q^i in its row, side by side.

        For candidate j, K_j − 1 of ``thresholds[j]`` divide the clients into ``components[j]`` = K_j components (the
        others are beyond all places); with a random start only K_j counts.
        """
        (counts, sound), (candidates, cuts) = self._histogram(client), thresholds.shape
        p = counts / counts.sum()
        if self.start == "random":
            component = (client.draws.uniform(candidates) * components).long()
        else:
            component = (_concentration_place(counts, self.categories) > thresholds).sum(1)
        size = _one_hot(torch.bucketize(counts.sum(), self.edges, right=True) - 1, len(self.edges) - 1)
        row = torch.cat([torch.ones(1), size, p, p * p])
        own = (torch.arange(cuts + 1) == component[:, None]).to(torch.float32)
        return send(moments=sound * own[:, :, None] * row / math.sqrt(candidates))

    @moments.into
    def _moments_sum(self) -> list[Release]:
        return [self._sum("moments", 2.0)]

    @task
    def expectation(self, client: Client, tau: Tensor, alpha: Tensor, pi: Tensor) -> Sent:
        """Algorithm 6, lines 6 to 9, for several candidates: tau [J, K], alpha [J, K, C], pi [J, K, bins], filled up
        with components of weight 0. ``membership`` is ω^i beside E^i; ``growth`` is α·u^i beside α_0·v^i.
        """
        counts, sound = self._histogram(client)
        (candidates, most), edges, precise = tau.shape, self.edges, with_total(alpha.flatten(0, 1))
        # Inside the simulator alpha is the same for the whole block, so the table is made once for all its clients.
        table = rise_table(precise, self.largest)
        density = log_density(pi.flatten(0, 1), edges)
        log_joint, slopes = joint(counts, table, tau.flatten().log(), density, edges)
        log_joint = log_joint.reshape(candidates, most)
        evidence = sound * torch.logsumexp(log_joint, 1)
        omega = (log_joint - evidence[:, None]).exp()
        size = _one_hot(torch.bucketize(counts.sum(), edges, right=True) - 1, len(edges) - 1)
        membership = omega[:, :, None].to(torch.float32) * torch.cat([torch.ones(1), size])  # E is large
        growth = omega[:, :, None] * (precise * slopes.T).reshape(candidates, most, -1)
        if self.noise is not None:  # each candidate's share by itself, so that one cannot crowd out the others
            length = torch.linalg.vector_norm(growth.flatten(1), dim=1).clamp(min=1e-30)
            growth = growth * (self.clip / length).clamp(max=1.0)[:, None, None]
        scale = math.sqrt(candidates)
        return send(membership=membership / scale, growth=growth / scale, log_likelihood=evidence)

    @expectation.into
    def _expectation_sums(self) -> list[Release]:
        # α·(ψ(c+α)−ψ(α)) is at most c, so that a whole row of growth is no longer than (m, m)
        most = self.clip if self.noise is not None else math.sqrt(2) * self.largest
        sums = [self._sum("membership", math.sqrt(2)), self._sum("growth", most)]
        return sums if self.hidden else [*sums, Sum("log_likelihood")]

    @task
    def validation(self, client: Client, tau: Tensor, alpha: Tensor, pi: Tensor) -> Sent:
        """ln q of several mixtures at once: tau [J, K], alpha [J, K, C], pi [J, K, bins], padded with weights of 0.

        ``gain`` [J] is over the first mixture, ``square`` [J, J] its products: they give variances of differences.
        """
        edges, (counts, sound) = self.edges, self._histogram(client)
        evidences = []
        for j in range(len(tau)):
            table = rise_table(with_total(alpha[j]), self.largest)
            log_joint, _ = joint(counts, table, tau[j].log(), log_density(pi[j], edges), edges)
            evidences.append(torch.logsumexp(log_joint, 0))
        evidence = sound * torch.stack(evidences)
        gain = evidence - evidence[0]
        return send(log_likelihood=evidence, gain=gain, square=gain[:, None] * gain)

    @validation.into
    def _validation_sums(self) -> list[Release]:
        if self.noise is not None:
            return [self._sum("gain", self.gain_clip, signed=True)]
        if self.secure:  # clipped, a gain and its products stay those of one vector
            return [self._sum("gain", self.gain_clip), self._sum("square", self.gain_clip**2)]
        return [Sum("log_likelihood"), Sum("gain"), Sum("square")]

    @property
    def hidden(self) -> bool:
        """Are likelihoods kept from the server?"""
        return self.noise is not None or self.secure

    def _sum(self, name: str, clip: float, signed: bool = False) -> Release:
        """A sum, with noise if there is any, and then clipped.

        ω and every row of E, P and Q have a norm of at most 1, so only the clip on ``growth`` shortens anything. Two
        arrays that are nowhere negative differ by at most √2 times their longest norm, any two by twice.
        """
        if self.noise is None:
            return Sum(name, clip=clip, secure=True) if self.secure else Sum(name)
        if self.local:
            return Each(name, clip=clip, noise=self.noise, sensitivity=(2.0 if signed else math.sqrt(2)) * clip)
        return Sum(name, clip=clip, noise=self.noise, secure=self.secure)

    def _ask(self, cohort: Cohort, question: Task, **inputs: Any) -> Replies:
        """What a cohort's shares add up to; one by one where they are masked, as an ask has one secure sum."""
        if self.secure:
            several = [cohort.ask(question, into=one, **inputs) for one in question.releases()]
            for more in several[1:]:
                several[0].update(more)
            return several[0]
        replies = cohort.ask(question, **inputs)
        if self.local:
            replies.update({name: value.sum(0) for name, value in replies.items()})
        return replies

    def _histogram(self, client: Client) -> tuple[Tensor, Tensor]:
        """The client's counts and 1; or, where they are no histogram of 1 to M samples, some counts and NaN, so that it
        does not answer: what it sends is a multiple of that.
        """
        counts = client.x[0]
        sound = (counts >= 0).all() & (counts.sum() >= 1) & (counts.sum() <= self.largest)
        return torch.where(sound, counts, torch.arange(self.categories) == 0), torch.where(sound, 1.0, torch.nan)

    # The server's side

    def fit(self, federation: Federation, after_round: Callable[[int], None] | None = None) -> MixtureFit:
        """Algorithms 5 and 6. ``after_round(number)`` may watch."""
        return self.fit_all(federation, [self.components], after_round)[0]

    def fit_all(
        self, federation: Federation, candidates: Sequence[int], after_round: Callable[[int], None] | None = None
    ) -> list[MixtureFit]:
        """The same for several numbers of components at once, in as many rounds as for one (A.1.1)."""
        for components in candidates:
            self.check(federation.roster, components)
        cohorts = self._cohorts(federation)
        notes: list[list[str]] = [[] for _ in candidates]
        now = self._initialize(next(cohorts), candidates, notes)
        traces: list[list[float]] = [[] for _ in candidates]
        failed = [*federation.failures]
        paths = [[one] for one in now]
        for number in range(1, self.rounds + 1):
            cohort = next(cohorts)
            replies = self._ask(cohort, self.expectation, **stack(now))
            if "membership" in replies:  # a Poisson cohort may be empty
                scale = math.sqrt(len(now))
                for j, one in enumerate(now):
                    sums = [scale * replies[name][j, : one.components].double() for name in ("membership", "growth")]
                    now[j] = maximize(one, sums[0], sums[1], notes[j], may_restart=number <= self.rounds // 2)
            if "log_likelihood" in replies:
                for trace, value in zip(traces, replies["log_likelihood"].tolist(), strict=True):
                    trace.append(value / len(replies.answered))
                federation.report(log_likelihood=traces[0][-1])
            for path, one in zip(paths, now, strict=True):
                path.append(one)
            failed += federation.failures
            if after_round is not None:
                after_round(number)
        advice = f"counts are whole numbers from 0 on, 1 to {self.largest} (largest) in all"
        strange = [] if self.noise is not None else bad_rows(failed, advice)
        return [
            self._finish(path, trace, [*noted, *strange])
            for path, trace, noted in zip(paths, traces, notes, strict=True)
        ]

    def _cohorts(self, federation: Federation) -> Iterator[Cohort]:
        """Whom to ask in each round, first for the start. With local noise nobody is asked in two of them."""
        clients, rounds = len(federation.roster), self.rounds + 1
        if self.local:
            if clients < rounds:
                raise MDMError(
                    f"with local noise a client answers in one round only, but there are {clients} clients for "
                    f"{rounds} rounds (one to start); use at most {clients - 1} rounds"
                )
            order = torch.argsort(federation.draws().uniform(clients))
            for part in torch.tensor_split(order, rounds):
                yield federation.begin_round(federation.round + 1).cohort(part)
            return
        size = min(self.cohort, clients) if isinstance(self.cohort, int) else self.cohort
        while True:
            yield federation.begin_round(federation.round + 1).sample(size, poisson=self.noise is not None)

    def _finish(self, path: list[Mixture], trace: list[float], notes: list[str]) -> MixtureFit:
        """The mean of the last quarter of the rounds, geometric for A."""
        tail = max(1, self.rounds // 4)
        log_alpha, tau, pi = (torch.zeros_like(value) for value in (path[0].alpha, path[0].tau, path[0].pi))
        for one in path[-tail:]:
            log_alpha += one.alpha.log() / tail
            tau += one.tau / tail
            pi += one.pi / tail
        found = drop_empty(Mixture(tau / tau.sum(), log_alpha.exp(), pi / pi.sum(1, keepdim=True), self.edges), notes)
        for k in (found.alpha.sum(1) > 0.9 * MOST_PRECISION).nonzero().flatten().tolist():
            notes.append(
                f"component {k}: its clients differ no more than samples of one distribution would; the precision α_0, "
                f"whose best value is infinite, was stopped at {MOST_PRECISION:g}"
            )
        return MixtureFit(found, trace, notes, path)

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
        self.check(unseen.roster, components=1)
        fits = self.fit_all(federation, candidates, after_round)
        score = self.score(unseen, [fitted.mixture for fitted in fits])
        best = int(score.gain.argmax())
        below = score.gain[best] - score.gain
        chosen = int((below <= TIE * score.error[best]).nonzero()[0])
        return Choice(fits[chosen], candidates, score.log_likelihood, below.tolist(), score.error[best].tolist())

    def score(self, federation: Federation, mixtures: Sequence[Mixture]) -> Likelihoods:
        """How likely all clients of a federation are under each mixture, from one ask."""
        cohort = federation.begin_round(federation.round + 1).everyone()
        replies = self._ask(cohort, self.validation, **stack(mixtures))
        count = len(replies.answered) if self.noise is None else round(cohort.expected)  # which no client changes
        gain = replies["gain"].double() / count
        if self.noise is not None:
            unit = 2.0 * math.sqrt(count) if self.local else cohort.sampling.sensitivity(1.0)
            deviation = math.sqrt(2) * self.noise.std(unit * self.gain_clip) / count
            return Likelihoods(gain, torch.full((len(gain), len(gain)), deviation, dtype=gain.dtype), None)
        square = replies["square"].double() / count - gain[:, None] * gain
        variance = square.diagonal()[:, None] + square.diagonal() - 2 * square
        likelihood = None if self.secure else (replies["log_likelihood"] / count).tolist()
        return Likelihoods(gain, (variance.clamp(min=0) / count).sqrt(), likelihood)

    def check(self, roster: Roster, components: int | None = None) -> None:
        """Refuse clients that this mixture cannot be fitted on, before anything is asked of them.

        ``histogram_clients`` says what is wrong with counts; here a client whose counts are wrong fails.
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

    def _initialize(self, cohort: Cohort, candidates: Sequence[int], notes: list[list[str]]) -> list[Mixture]:
        """Algorithm 5 (with one more sum before it, for the thresholds), for each candidate number of components."""
        most = max(candidates)
        thresholds = torch.full((len(candidates), most - 1), torch.finfo(torch.float32).max, dtype=torch.float64)
        if self.start == "concentration" and most > 1:
            replies = self._ask(cohort, self.spread)
            if "spread" in replies:
                for j, components in enumerate(candidates):
                    thresholds[j, : components - 1] = quantiles(replies["spread"].double(), components)
        replies = self._ask(cohort, self.moments, thresholds=thresholds, components=torch.tensor(list(candidates)))
        if "moments" not in replies:
            raise MDMError("the first Poisson cohort was empty, so there is nothing to start from; use a larger cohort")
        sums = math.sqrt(len(candidates)) * replies["moments"].double()
        category = 0 if self.start == "random" else None
        return [
            start_mixture(sums[j, :components], self.edges, notes[j], category)
            for j, components in enumerate(candidates)
        ]


def _one_hot(index: Tensor, count: int) -> Tensor:
    return (torch.arange(count) == index).to(torch.float32)


def _concentration_place(counts: Tensor, categories: int) -> Tensor:
    """Where Σ_j p_j² lies between its least value 1/C (gives 0) and its most, 1 (gives 1), in logarithms."""
    p = counts / counts.sum().to(torch.float64)
    return 1 + (p * p).sum().log() / math.log(categories)
