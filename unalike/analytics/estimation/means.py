"""Personal means (P3 §2.1, Theorems 1 and 2) and personal rates of coins (§2.2, Theorems 3 and 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from unalike.analytics.estimation.shared import (
    AfterRound,
    Channel,
    Estimates,
    EstimationError,
    Estimator,
    PriorFit,
    check_roster,
    ignore_round,
)
from unalike.core.checks import above, at_least, one_of
from unalike.core.release import Each, Release, Sum
from unalike.core.vocabulary import Client, Federation, Replies, Sent, each, send, task
from unalike.privacy.mechanisms import Quantizer, RandomizedResponse

Form = Literal["exact", "moments", "plug-in"]
_ALIKE = "the clients' means do not differ more than chance explains: everybody's estimate is the common mean"


def gaussian_mse(
    dim: int, samples: float, clients: int, sigma_theta: float, sigma_x: float, sigma_q: float = 0
) -> float:
    """Closed form of Theorems 1 and 2: (dσx²/n)·((1−a)/m + a)."""
    a = gaussian_weight(samples, clients, sigma_theta, sigma_x, sigma_q)
    return dim * sigma_x**2 / samples * ((1 - a) / clients + a)


def gaussian_weight(samples: float, clients: int, sigma_theta: float, sigma_x: float, sigma_q: float = 0.0) -> float:
    """a, the weight of a client's own mean (Theorem 2; Theorem 1 with σ_q = 0)."""
    spread = sigma_theta**2 + sigma_q**2 / max(1, clients - 1)
    return spread / (spread + sigma_x**2 / samples)


@dataclass(frozen=True)
class GaussianMeans(Estimator):
    """θ_i ~ N(μ, σθ²·I), samples N(θ_i, σx²·I): θ̂_i = a·X̄_i + (1−a)·mean_j q(X̄_j).

    Known prior: give ``mu``, ``sigma_theta`` and ``sigma_x``, and no client sends anything. Unknown μ: leave ``mu``
    out. Unknown deviations are estimated too, from moments, where the channel is bare; a channel in k bits or with
    noise needs them (as in the paper), and a ``radius`` r with |μ_k| ≤ r, or the ``bound`` b of a coordinate itself:
    b = r + (σθ + σx/√n)·√log(m²n) for the smallest client's n. Client sizes count as public.
    """

    mu: float | None = None
    sigma_theta: float | None = None
    sigma_x: float | None = None
    channel: Channel = Channel()
    radius: float | None = None
    bound: float | None = None
    kind = "gaussian"
    loss = "mean"

    def __post_init__(self) -> None:
        above(self, sigma_theta=0, sigma_x=0, bound=0)
        at_least(self, radius=0)
        if self.mu is not None and (self.sigma_theta is None or self.sigma_x is None):
            raise EstimationError("a known prior is mu, sigma_theta and sigma_x together; give all three, or no mu")
        if not self.channel.is_bare and self.mu is None:
            if self.sigma_theta is None or self.sigma_x is None:
                raise EstimationError("with bits or epsilon the deviations must be known: give sigma_theta and sigma_x")
            if self.radius is None and self.bound is None:
                raise EstimationError(
                    "with bits or epsilon a bound must be known that is not read from the data: give radius, the "
                    "largest magnitude of the population's mean, or bound, that of a client's mean"
                )

    @property
    def can_sweep(self) -> bool:
        """Are the deviations and a bound known, as messages in bits or with noise need them?"""
        return None not in (self.sigma_theta, self.sigma_x) and (self.radius is not None or self.bound is not None)

    def with_messages(self, bits: int | None = None, epsilon: float | None = None) -> GaussianMeans:
        """The same estimator, whose messages travel in bits, with noise, or as they are."""
        return replace(self, channel=replace(self.channel, bits=bits, epsilon=epsilon))

    def theory(self, federation: Federation, found: Estimates) -> dict[str, float]:
        """The closed form of Theorems 1 and 2 with the prior that was used, for clients of the average size."""
        size = federation.roster.bound.double().mean().item()
        deviations = (found.prior[name] for name in ("sigma_theta", "sigma_x", "sigma_q"))
        dim = found.estimate.shape[1]
        theory = {"closed_form_mse": gaussian_mse(dim, size, len(federation.roster), *deviations)}
        known, own = self.mu is not None, found.prior["sigma_theta"] ** 2
        noise = found.prior["sigma_x"] ** 2
        if own + noise > 0 and self.channel.is_bare:  # (46) of a known prior, (47) of an estimated mean
            more = 0.0 if known else noise**2 / (len(federation.roster) * size)
            theory["lower_bound"] = dim * (own * noise + more) / (size * own + noise)
        return theory

    @task
    def summarize(self, client: Client, unit: Tensor) -> Sent:
        """X̄_i in the channel's unit, and what the deviations are estimated from where they are unknown."""
        mean = client.mean(client.x.to(torch.float64))
        spread = client.sum((client.x - mean).square()).sum()
        n = client.n.to(torch.float64)
        return send(mean=mean / unit, noise=torch.stack([spread, (n - 1) * mean.numel(), 1 / n]))

    @summarize.into
    def _messages(self) -> list[Release]:
        mean = self.channel.release("mean")
        return [mean, Sum("noise")] if self.sigma_x is None or self.sigma_theta is None else [mean]

    @task
    def combine(self, client: Client, mu: Tensor, spread: Tensor, noise: Tensor, doubt: float) -> Sent:
        """θ̂_i from the client's own mean and the prior; it stays here. ``spread``: σθ² + σ_q²/(m−1).

        Its error is that of Theorems 1 and 2 for the client's own n; ``doubt`` is 1/m, and 0 of a known prior.
        """
        local = client.mean(client.x.to(torch.float64))
        both = spread + noise / client.n
        a = torch.where(both > 0, spread / torch.where(both > 0, both, 1.0), 0.0)
        deviation = (noise / client.n * ((1 - a) * doubt + a)).sqrt().expand(local.shape)
        return send(keep={"estimate": a * local + (1 - a) * mu, "local": local, "deviation": deviation})

    def coordinate_bound(self, clients: int, samples: int) -> float | None:
        """b, beyond which a coordinate of X̄ lies with probability at most 2/(mn)."""
        if self.channel.is_bare or self.bound is not None:
            return self.bound
        assert self.radius is not None and self.sigma_theta is not None and self.sigma_x is not None
        reach = math.sqrt(math.log(clients**2 * samples))
        return self.radius + (self.sigma_theta + self.sigma_x / math.sqrt(samples)) * reach

    def fit(self, federation: Federation, after_round: AfterRound = ignore_round) -> PriorFit:
        """One message from every client, one answer to it; nothing at all with a known prior."""
        dim = check_roster(federation.roster, clients=1 if self.mu is not None else 2)
        cohort = federation.everyone()
        if self.mu is not None:
            assert self.sigma_theta is not None and self.sigma_x is not None
            known = torch.full((dim,), self.mu, dtype=torch.float64)
            cohort.ask(self.combine, into=[], mu=known, spread=self.sigma_theta**2, noise=self.sigma_x**2, doubt=0.0)
            prior = {"mu": known.tolist(), "sigma_theta": self.sigma_theta, "sigma_x": self.sigma_x, "sigma_q": 0.0}
            return PriorFit(prior)
        bound = self.coordinate_bound(len(cohort), int(federation.roster.bound.min()))
        unit = torch.tensor(self.channel.unit(bound, dim), dtype=torch.float64)
        replies = cohort.ask(self.summarize, unit=unit)
        messages = replies["mean"] * unit
        mu = messages.mean(0)
        spread, noise = self._deviations(messages, replies)
        channel = self.channel.variance(bound, dim)
        extra = channel / max(1, len(messages) - 1)
        cohort.ask(self.combine, into=[], mu=mu, spread=spread + extra, noise=noise, doubt=1 / len(messages))
        prior = {
            "mu": mu.tolist(),
            "sigma_theta": math.sqrt(spread),
            "sigma_x": math.sqrt(noise),
            "sigma_q": math.sqrt(channel),
            "bound": bound,
        }
        return PriorFit(prior, notes=[_ALIKE] if spread == 0 else [])

    def _deviations(self, messages: Tensor, replies: Replies) -> tuple[float, float]:
        """σθ² and σx², given or estimated: σx² pooled within clients, σθ² the means' variance beyond σx²·mean(1/n)."""
        if self.sigma_theta is not None and self.sigma_x is not None:
            return self.sigma_theta**2, self.sigma_x**2
        within, freedom, inverses = replies["noise"].tolist()
        if self.sigma_x is None and freedom == 0:
            raise EstimationError("every client has a single sample, which says nothing about sigma_x: give sigma_x")
        noise = within / freedom if self.sigma_x is None else self.sigma_x**2
        if self.sigma_theta is not None:
            return self.sigma_theta**2, noise
        return max(0.0, float(messages.var(0).mean()) - noise * inverses / len(messages)), noise


@dataclass(frozen=True)
class BernoulliRates(Estimator):
    """p_i from a prior on [0, 1], samples 0 or 1: p̂_i = a_i·X̄_i + (1−a_i)·μ̂_i with leave-one-out moments μ̂_i, σ̂_i².

    Known Beta(``alpha``, ``beta``): a = n/(α+β+n), the posterior mean, and no client sends anything. Unknown:

    - ``form="plug-in"``, as on the page (6): a_i = n/(μ̂(1−μ̂)/σ̂² + n), with σ̂² the variance of the messages.
    - ``form="moments"``: a_i = n/(μ̂(1−μ̂)/σ̂² − 1 + n), the α+β of a Beta with these moments; the page lost the −1.
    - ``form="exact"``: α+β = μ(1−μ)/σ² − 1, with σ² the variance of the p_i themselves: the clients also send
      s(s−1)/(n(n−1)) of their s ones, which is unbiased for p². Needs two samples of every client.

    With ``epsilon`` a client sends one two-valued report, ε0-private. Two values have no variance beyond that of their
    mean, so the page's private weight (Theorem 4) is at least n/(n+1) whatever the clients are; "exact" has every
    second client report the pair moment instead of the rate. What the noise leaves in doubt (the variance of μ̂, one
    standard error of σ̂²) is added to σ̂², so that strong noise leads back to the client's own rate.
    """

    alpha: float | None = None
    beta: float | None = None
    form: Form = "exact"
    bits: int | None = None
    epsilon: float | None = None
    kind = "bernoulli"
    loss = "mean"

    def __post_init__(self) -> None:
        if (self.alpha is None) != (self.beta is None):
            raise EstimationError("a known prior is alpha and beta together; give both or neither")
        above(self, alpha=0, beta=0)
        one_of(self, "form")
        Channel(self.bits, self.epsilon)

    can_sweep = True

    def with_messages(self, bits: int | None = None, epsilon: float | None = None) -> BernoulliRates:
        """The same estimator, whose messages travel in bits, as two-valued reports, or as they are."""
        return replace(self, bits=bits, epsilon=epsilon)

    def theory(self, federation: Federation, found: Estimates) -> dict[str, float]:
        """Of a Beta prior: the risk of §5.2 where it is known, else the bound of Theorem 3, or 4 with ``epsilon``.

        For clients of the average size, with the moments and the weight that were used.
        """
        mu, precision = float(found.prior["mu"]), found.prior["precision"]
        n, m = federation.roster.bound.double().mean().item(), len(federation.roster)
        inside, a = mu * (1 - mu), 0.0 if precision is None else n / (precision + n)
        noise = inside / n * (1.0 if precision is None else precision / (precision + 1))
        spread = 0.0 if precision is None else inside / (precision + 1)
        if self.alpha is not None:
            return {"expected_mse": a**2 * noise + (1 - a) ** 2 * spread}
        if self.bits is not None:
            return {}
        doubt, name = 3 * math.log(4 * m**2 * n) / (m - 1), "theorem_3_bound"
        if self.epsilon is not None:
            factor = ((math.exp(self.epsilon) + 1) / (math.exp(self.epsilon) - 1)) ** 2
            doubt, name = factor * doubt / 9, "theorem_4_bound"
        return {name: a**2 * noise + (1 - a) ** 2 * (spread + doubt)}

    @task
    def moments(self, client: Client) -> Sent:
        """X̄_i, and of s ones the pair moment s(s−1)/(n(n−1)), which is unbiased for p²."""
        flips, n = _flips(client), client.n.to(torch.float64)
        ones = client.sum(flips)
        return send(rate=client.mean(flips) - self._origin, pair=ones * (ones - 1) / (n * (n - 1)) - self._origin)

    @moments.into
    def _reports(self) -> list[Release]:
        return [Each("rate", noise=self._message), Each("pair", noise=self._message)]

    @property
    def _message(self) -> RandomizedResponse | Quantizer | None:
        """How a number in [0, 1], measured from ``_origin``, is reported."""
        if self.epsilon is not None:
            return RandomizedResponse(self.epsilon)
        return None if self.bits is None else Quantizer(self.bits, bound=0.5)

    @property
    def _origin(self) -> float:
        return 0.5 if self.epsilon is None else 0.0  # k bits cover [−½, ½], randomized response [0, 1]

    @task
    def combine(self, client: Client, mu: Tensor, precision: Tensor) -> Sent:
        """p̂_i; ``precision`` is α+β, infinite where clients do not differ."""
        local = client.mean(_flips(client)).reshape(1)
        a = client.n / (precision + client.n)
        estimate = a * local + (1 - a) * mu
        deviation = (estimate * (1 - estimate) / (precision + client.n + 1)).sqrt()  # of a Beta posterior
        return send(keep={"estimate": estimate, "local": local, "deviation": deviation})

    def fit(self, federation: Federation, after_round: AfterRound = ignore_round) -> PriorFit:
        """One message from every client, one answer to it; nothing at all with a known prior."""
        check_roster(federation.roster, width=1, clients=3 if self.alpha is None else 1)  # leaving one out leaves two
        cohort = federation.everyone()
        if self.alpha is not None and self.beta is not None:
            total = self.alpha + self.beta
            cohort.ask(self.combine, into=[], mu=self.alpha / total, precision=total)
            return PriorFit({"mu": self.alpha / total, "precision": total})
        sizes = federation.roster.bound
        if self.form == "exact" and int(sizes.min()) < 2:
            name = federation.roster.name(int(sizes.argmin()))
            raise EstimationError(
                f"client {name} has a single sample, which says nothing about how p² is spread; leave it out, or use "
                "form='plug-in'"
            )
        rate, pair = self._gather_reports(federation)
        mu, variance = _leave_one_out(rate), _variance_without(rate)
        if self.form != "exact":
            precision = _ratio(mu * (1 - mu), variance) - (1 if self.form == "moments" else 0)
        else:
            of_mean = variance / rate.isfinite().sum()  # variance of μ̂
            spread = _leave_one_out(pair) - (mu.square() - of_mean)  # unbiased for σ²
            precision = _ratio(mu * (1 - mu), spread) - 1
            if self.epsilon is not None:
                of_pair = _variance_without(pair) / pair.isfinite().sum()
                doubt = of_mean + torch.sqrt(of_pair + 4 * mu.square() * of_mean)
                spread = torch.minimum(spread.clamp(min=0.0), mu * (1 - mu))
                precision = _ratio(mu * (1 - mu) - spread, spread + doubt)
        mu, precision = mu.clamp(0.0, 1.0), precision.clamp(min=0.0)
        cohort.ask(self.combine, into=[], mu=each(mu), precision=each(precision))
        notes = [_ALIKE] if bool(precision.isinf().all()) else []
        middle = float(precision.median())
        prior = {"mu": float(mu.mean()), "precision": None if math.isinf(middle) else middle}
        return PriorFit(prior, notes=notes)

    def _gather_reports(self, federation: Federation) -> tuple[Tensor, Tensor]:
        """[clients] rates and pair moments as they arrived; NaN from a client that did not send one."""
        everyone = torch.arange(len(federation.roster))
        rate, pair = self._reports()
        if self.form != "exact":
            asks = [(everyone, [rate])]
        elif self.epsilon is None:
            asks = [(everyone, [rate, pair])]
        else:
            asks = [(everyone[::2], [rate]), (everyone[1::2], [pair])]
        found = torch.full((2, len(everyone)), torch.nan, dtype=torch.float64)
        for who, wanted in asks:
            replies = federation.cohort(who).ask(self.moments, into=wanted)
            for name, values in replies.items():
                found[int(name == "pair"), who[replies.answered]] = values.to(torch.float64) + self._origin
        return found[0], found[1]


def _flips(client: Client) -> Tensor:
    """The client's samples; NaN, so that it does not answer, in place of one that is neither 0 nor 1."""
    values = client.x.to(torch.float64).reshape(client.capacity)
    return torch.where((values == 0) | (values == 1), values, torch.nan)


def _leave_one_out(values: Tensor) -> Tensor:
    """[clients] mean over the other clients' messages; NaN stands for no message."""
    present = values.isfinite()
    own = values.nan_to_num(0.0)
    result: Tensor = (own.sum() - own) / (present.sum() - present.to(values.dtype))
    return result


def _variance_without(values: Tensor) -> Tensor:
    """[clients] variance over the other clients' messages."""
    present = values.isfinite().to(values.dtype)
    centre = values.nanmean()  # sums of squares around it lose no digits
    own = (values - centre).nan_to_num(0.0)
    count = present.sum() - present
    total, squares = own.sum() - own, own.square().sum() - own.square()
    result: Tensor = (squares - total.square() / count) / (count - 1)
    return result


def _ratio(top: Tensor, variance: Tensor) -> Tensor:
    """top / variance; infinite where the variance is nothing (or rounding's dust)."""
    alike = variance <= 1e-12
    return torch.where(alike, torch.inf, top / torch.where(alike, 1.0, variance))
