"""The mixture of Dirichlet-multinomials itself: its likelihood, new clients drawn from it, and its file.

T1 §3.3.1. A client is its histogram c (counts of a categorical feature) with m = Σ c_j samples. Component k has the
weight τ_k, Dirichlet parameters α_k and a distribution π_k over m; equation (3.3) is their mixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.func import vmap

from unalike.data.partition.features import Feature
from unalike.data.source import DataError


class MDMError(DataError):
    """Counts, a mixture or settings are not what was expected; the message says what came and what to do."""


def size_edges(largest: int, bins: int = 256) -> Tensor:
    """Bins for the number of samples m in 1 .. largest: bin b holds ``edges[b] <= m < edges[b + 1]``.

    One bin for each m up to ``bins``; above that bins of equal width, because π has a value for each of them and every
    client sends a share of each.
    """
    width = -(-largest // bins)
    count = -(-largest // width)
    return torch.arange(count + 1) * width + 1


def with_total(values: Tensor) -> Tensor:
    """The values [..., C] with their sum as one more category: α_0 beside the α_j, or m beside the c_j."""
    return torch.cat([values, values.sum(-1, keepdim=True)], -1)


def rise_table(alpha: Tensor, largest: int) -> Tensor:
    """lnΓ(c+α) − lnΓ(α) and ψ(c+α) − ψ(α) for every count c in 0 .. largest, as one table to look up.

    Counts are small integers, so both are running sums: Σ ln(α+s) and Σ 1/(α+s) over s < c. ``alpha`` is [K, C]; row
    (j, c) of the table, [C · (largest+1), 2K], holds the K logarithms and then the K differences of ψ.
    """
    steps = alpha.T[:, None, :] + torch.arange(largest, dtype=alpha.dtype)[None, :, None]  # [C, largest, K]
    sums = torch.cat([steps.log(), steps.reciprocal()], -1).cumsum(1)
    return F.pad(sums, (0, 0, 1, 0)).reshape(-1, 2 * len(alpha))


def look_up(table: Tensor, counts: Tensor) -> Tensor:
    """[C, 2K]: the table's rows for one client's counts [C]."""
    per_category = len(table) // len(counts)
    return F.embedding(counts + torch.arange(len(counts)) * per_category, table)


@dataclass(frozen=True, eq=False)
class Mixture:
    """A fitted or a known mixture; all numbers are float64."""

    tau: Tensor  # [K] weights of the components, adding up to 1
    alpha: Tensor  # [K, C] Dirichlet parameters, above 0
    pi: Tensor  # [K, bins] probabilities of a client's number of samples, rows adding up to 1
    edges: Tensor  # [bins + 1] int64: bin b is edges[b] <= m < edges[b + 1]
    features: tuple[Feature, ...] = ()  # that the categories are of; none: they are the label's classes

    def __post_init__(self) -> None:
        components, categories = self.alpha.shape
        if self.tau.shape != (components,) or self.pi.shape != (components, len(self.edges) - 1):
            raise MDMError(
                f"a mixture of {components} components over {categories} categories needs tau [{components}] and pi "
                f"[{components}, {len(self.edges) - 1}], got {list(self.tau.shape)} and {list(self.pi.shape)}"
            )
        for name, value in (("tau", self.tau), ("alpha", self.alpha), ("pi", self.pi)):
            if not bool(torch.isfinite(value).all()) or bool((value < 0).any()):
                raise MDMError(f"a mixture's {name} must be finite and not negative")
        if bool((self.alpha <= 0).any()):
            raise MDMError("a mixture's alpha must be above 0 everywhere")
        for name, rows in (("tau", self.tau[None]), ("each row of pi", self.pi)):
            if bool(((rows.sum(1) - 1).abs() > 1e-6).any()):
                raise MDMError(f"a mixture's {name} must add up to 1")

    @property
    def components(self) -> int:
        return len(self.tau)

    @property
    def categories(self) -> int:
        return self.alpha.shape[1]

    @property
    def largest(self) -> int:
        """The largest number of samples that a client may have."""
        return int(self.edges[-1]) - 1

    @property
    def mean_size(self) -> float:
        """How many samples a client has on average."""
        middle = (self.edges[:-1] + self.edges[1:] - 1).to(torch.float64) / 2
        return float(self.tau @ (self.pi @ middle))

    def log_likelihood(self, counts: Tensor) -> Tensor:
        """[n] ln q(c, m) of equation (3.3) for histograms [n, C]; −∞ where π gives a client's size no probability."""
        counts = counts.to(torch.int64)
        table = rise_table(with_total(self.alpha), self.largest)
        log_pi = log_density(self.pi, self.edges)
        return vmap(lambda c: torch.logsumexp(joint(c, table, self.tau.log(), log_pi, self.edges)[0], 0))(counts)

    def sample(self, clients: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Histograms [clients, C] of new clients: k ~ τ, m ~ π_k, p ~ Dir(α_k), c ~ Mult(m, p)."""
        sizes, shares = self.draw(clients, rng)
        return rng.multinomial(sizes, shares).astype(np.int64)

    def draw(self, clients: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Sizes m [clients] and category shares p [clients, C] of new clients."""
        tau, pi, edges = self.tau.numpy(), self.pi.numpy(), self.edges.numpy()
        component = rng.choice(len(tau), clients, p=tau / tau.sum())
        sizes = np.empty(clients, dtype=np.int64)
        for k in range(len(tau)):
            mine = np.flatnonzero(component == k)
            bins = rng.choice(pi.shape[1], len(mine), p=pi[k] / pi[k].sum())
            sizes[mine] = rng.integers(edges[bins], edges[bins + 1])
        return sizes, dirichlet(self.alpha.numpy()[component], rng)

    def save(self, file: str | Path, names: list[str] | None = None) -> None:
        """Write the mixture as JSON; ``names`` are the categories'."""
        values = {"tau": self.tau, "alpha": self.alpha, "pi": self.pi, "edges": self.edges}
        numbers: dict[str, Any] = {name: value.tolist() for name, value in values.items()}
        record = _File(format="unalike-mdm", version=1, names=names, features=self.features, **numbers)
        Path(file).write_text(record.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, file: str | Path) -> Mixture:
        """Read a mixture that ``save`` wrote."""
        try:
            record = _File.model_validate_json(Path(file).read_text())
        except FileNotFoundError:
            raise MDMError(f"there is no mixture file {file}; `unalike mdm --out {file}` writes one") from None
        except ValueError as error:
            raise MDMError(f"{file} is not a mixture that `unalike mdm --out` wrote: {error}") from None
        edges = torch.tensor(record.edges)
        if len({len(row) for row in record.alpha}) != 1 or len({len(row) for row in record.pi}) != 1:
            raise MDMError(f"{file}: the rows of alpha, and those of pi, must be equally long")
        if bool((edges[1:] <= edges[:-1]).any()):
            raise MDMError(f"{file}: the edges of the size bins must increase")
        tau, alpha, pi = (torch.tensor(rows, dtype=torch.float64) for rows in (record.tau, record.alpha, record.pi))
        return cls(tau, alpha, pi, edges, record.features)


class _File(BaseModel):
    """The mixture's file: plain numbers."""

    model_config = ConfigDict(extra="forbid")
    format: Literal["unalike-mdm"]
    version: Literal[1]
    names: list[str] | None = None
    tau: Annotated[list[float], Field(min_length=1)]
    alpha: Annotated[list[list[float]], Field(min_length=1)]
    pi: Annotated[list[list[float]], Field(min_length=1)]
    edges: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2)]
    features: tuple[Feature, ...] = ()


def log_density(pi: Tensor, edges: Tensor) -> Tensor:
    """ln π_k,m: a bin's probability is spread evenly over its sizes."""
    return torch.log(pi / (edges[1:] - edges[:-1]))


def joint(counts: Tensor, table: Tensor, log_tau: Tensor, log_pi: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """ln(τ_k p(c | m, α_k) π_k,m) [K] for one client's histogram [C], equations (3.1) to (3.3), all in logarithms.

    ``table`` is that of α with α_0 as its last category. Also gives ψ(c+α)−ψ(α) [C + 1, K], (3.13) and (3.14).
    """
    found = look_up(table, with_total(counts))
    rises, slopes = found.chunk(2, -1)
    coefficient = torch.lgamma(counts.sum().double() + 1) - torch.lgamma(counts.double() + 1).sum()
    bin_of = torch.bucketize(counts.sum(), edges, right=True) - 1
    return log_tau + rises[:-1].sum(0) - rises[-1] + coefficient + log_pi.T[bin_of], slopes


def dirichlet(alpha: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """One draw p ~ Dir(α) for each row of α, made in logarithms so that a tiny α gives no 0/0."""
    # A Gamma(α) draw is a Gamma(α+1) draw times U^(1/α); its logarithm does not underflow.
    log_gamma = np.log(rng.standard_gamma(alpha + 1.0)) + np.log1p(-rng.random(alpha.shape)) / alpha
    shares = np.exp(log_gamma - log_gamma.max(1, keepdims=True))
    normalised: NDArray[np.float64] = shares / shares.sum(1, keepdims=True)
    return normalised


def relative_error(found: Mixture, truth: Mixture) -> dict[str, float]:
    """‖Â−A‖/‖A‖ and ‖τ̂−τ‖/‖τ‖ after the components were matched (by the nearest α); for equally many components."""
    if found.alpha.shape != truth.alpha.shape:
        raise MDMError(
            f"the found mixture's alpha is {list(found.alpha.shape)} and the true one's {list(truth.alpha.shape)}; "
            "errors are defined for equally many components and categories"
        )
    cost = torch.cdist(found.alpha, truth.alpha).square().numpy()
    from scipy.optimize import linear_sum_assignment  # here, because it takes long to import

    rows, columns = linear_sum_assignment(cost)
    mine, theirs = torch.from_numpy(rows), torch.from_numpy(columns)
    return {
        "alpha": float((found.alpha[mine] - truth.alpha[theirs]).norm() / truth.alpha.norm()),
        "tau": float((found.tau[mine] - truth.tau[theirs]).norm() / truth.tau.norm()),
    }
