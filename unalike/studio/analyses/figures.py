"""What the papers on models on demand look at beside accuracy: descriptors, unlike newcomers, size and ε, bytes.

All of it is simulation only: it looks at labels and test rows that no server would have, and is charged to no ledger.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.federation import Federation
from unalike.core.method import Describes, Method, ProtectsNewcomers, State
from unalike.data.partition.shift import rotate
from unalike.data.population import Population
from unalike.learn.evaluation import Scores, evaluate
from unalike.studio.analyses.file import CurvePoint, SameClasses
from unalike.studio.runs.folder import METRICS, read_metrics
from unalike.studio.simulate import simulate


class TooFewRows(ValueError):
    """There is not enough data to make newcomers of."""


class NoRounds(ValueError):
    """No round of a run was evaluated."""


def descriptors_of(method: Describes, state: State, federation: Federation, clients: Clients) -> Tensor:
    """[C, l], asked aside."""
    with simulate(clients, federation.seed, round=federation.round).aside() as own:
        return method.descriptors(state, own.everyone())


def descriptor_map(descriptors: Tensor, kind: Literal["pca", "t-sne"] = "pca", seed: int = 0) -> Tensor:
    """Places [C, 2] for a map of clients (P2 Fig. 7)."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    rows = descriptors.detach().to(torch.float64).numpy()
    if len(rows) < 3:
        raise ValueError(f"a map needs at least 3 clients, got {len(rows)}")
    if kind == "pca":
        places = PCA(min(2, rows.shape[1]), random_state=seed).fit_transform(rows)
        places = np.pad(places, ((0, 0), (0, 2 - places.shape[1])))
    elif kind == "t-sne":
        perplexity = min(30.0, (len(rows) - 1) / 3)
        places = TSNE(2, perplexity=perplexity, init="random", random_state=seed).fit_transform(rows)
    else:
        raise ValueError(f"kind={kind!r}; expected 'pca' or 't-sne'")
    return torch.from_numpy(np.ascontiguousarray(places))


def rank_correlation(descriptors: Tensor, label_shares: Tensor, of: Tensor | None = None) -> Tensor:
    """Spearman's correlation, for each client ``of`` these rows, of ‖v_i − v_j‖ and ‖π_i − π_j‖ over all other j.

    The mean over unseen clients is T1 Fig. 4.1. NaN for a client from which all others are equally far.
    """
    if len(descriptors) != len(label_shares) or len(descriptors) < 4:
        raise ValueError(
            f"expected descriptors and label shares of the same 4 or more clients, got {len(descriptors)} and "
            f"{len(label_shares)}"
        )
    of = torch.arange(len(descriptors)) if of is None else of
    far_v = torch.cdist(descriptors[of].double(), descriptors.double()).numpy()
    far_p = torch.cdist(label_shares[of].double(), label_shares.double()).numpy()
    found = []
    for row, client in enumerate(of.tolist()):
        others = np.arange(len(descriptors)) != client
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", scipy.stats.ConstantInputWarning)  # the NaN says it
            found.append(float(scipy.stats.spearmanr(far_v[row, others], far_p[row, others]).statistic))
    return torch.tensor(found, dtype=torch.float64).clamp(-1, 1)  # rounding may leave the range


def same_classes(scores: Tensor, counts: Tensor, unseen: Tensor) -> SameClasses | None:
    """Like with like: a few unseen clients may just have got easier or harder classes than the others.

    scores [C] (NaN: has none) and class counts [C, classes] of all clients, and which of them are unseen. None where no
    unseen client has the classes of a training client.
    """
    sets: dict[tuple[bool, ...], list[float]] = {}
    late = set(unseen.tolist())
    pairs: list[tuple[float, tuple[bool, ...]]] = []
    for client, (score, has) in enumerate(zip(scores.tolist(), (counts > 0).tolist(), strict=True)):
        if math.isnan(score):
            continue
        if client in late:
            pairs.append((score, tuple(has)))
        else:
            sets.setdefault(tuple(has), []).append(score)
    known = [(score, fmean(sets[has])) for score, has in pairs if has in sets]
    novel = [score for score, has in pairs if has not in sets]
    if not known:
        return None
    own, others = zip(*known, strict=True)
    return SameClasses(
        unseen=fmean(own),
        seen=fmean(others),
        clients=len(known),
        novel=fmean(novel) if novel else None,
        novel_clients=len(novel),
    )


@dataclass(frozen=True)
class Newcomers:
    """Clients that arrive after training: what they personalize with, and what they are tested on."""

    train: Clients
    test: Clients

    @classmethod
    def unseen(cls, population: Population) -> Newcomers:
        return cls(population.train.select(population.unseen), population.test.select(population.unseen))

    def __len__(self) -> int:
        return len(self.train)

    def score(self, method: Method, state: State, federation: Federation, labeled: bool = True) -> Scores:
        """Their scores; ``labeled=False`` hides their labels from the method."""
        theirs = simulate({"train": self.train, "test": self.test}, federation.seed, round=federation.round)
        return evaluate(
            method.model, lambda cohort: method.personalize(state, cohort), theirs, theirs.roster, labels=labeled
        )

    def only_first(self, samples: int) -> Newcomers:
        """The same newcomers with at most so many samples each to personalize with."""
        return Newcomers(replace(self.train, size=self.train.size.clamp(max=samples)), self.test)


def dealt_anew(
    population: Population, alpha: float, clients: int = 20, samples: int = 100, test: float = 0.2, seed: int = 0
) -> Newcomers:
    """Newcomers with class shares from a Dirichlet(α, …, α), made of the unseen clients' rows alone (T1 Fig. B.1).

    A row is in one newcomer at most once but may be in several newcomers, who never meet. Classes of which too few rows
    are left give what they have.
    """
    if not alpha > 0:
        raise ValueError(f"alpha={alpha}; expected a number above 0")
    y = population.train.y
    if y is None or population.classes is None:
        raise ValueError(f"{population.name!r} has no classes to deal by")
    pool = torch.cat([_rows(part.select(population.unseen)) for part in (population.train, population.test)])
    of_class = [pool[y[pool] == c].numpy() for c in range(population.classes)]
    random = np.random.default_rng([seed, round(1e6 * alpha)])
    taken: list[np.ndarray] = []
    for _ in range(clients):
        counts = random.multinomial(samples, random.dirichlet(np.full(population.classes, alpha)))
        parts = [random.permutation(rows)[:n] for rows, n in zip(of_class, counts, strict=True)]
        taken.append(random.permutation(np.concatenate(parts)))
    taken = [rows for rows in taken if len(rows) >= 2]
    if not taken:
        raise TooFewRows(f"the {len(population.unseen)} unseen clients have too few rows to make newcomers of")
    whole = _made_of(population.train, taken)
    tested = (whole.size * test).round().to(torch.int64).clamp(min=1)
    return Newcomers(
        replace(whole, size=whole.size - tested),
        replace(whole, start=whole.start + whole.size - tested, size=tested),
    )


def twins(population: Population, of: Tensor, seed: int = 0) -> tuple[Newcomers, Tensor]:
    """Newcomers with as many rows of each class as the clients ``of`` have, made of the unseen clients' rows alone.

    A twin personalizes with and is tested on rows with which unseen clients do the same. A row may be in several twins,
    who never meet; of a class that has too few rows a twin gets all. Without a twin are clients with a class that no
    unseen client has, or without rows to train with or to test. Also gives the positions in ``of`` of those with one.
    """
    y = population.train.y
    if y is None or population.classes is None:
        raise ValueError(f"{population.name!r} has no classes, so clients have no twins")
    random = np.random.default_rng(seed)
    parts = (population.train, population.test)
    pools = [_rows(part.select(population.unseen)) for part in parts]
    of_class = [[pool[y[pool] == c].numpy() for c in range(population.classes)] for pool in pools]
    counts = torch.stack([population.histogram(part)[of] for part in parts])  # [part, client, class]
    there = torch.tensor([[len(rows) for rows in pool] for pool in of_class])
    kept = ((counts == 0) | (there[:, None] > 0)).all((0, 2)) & (counts.sum(2) > 0).all(0)
    if not bool(kept.any()):
        raise TooFewRows("no client has only classes of which unseen clients have rows to train with and to test")

    def made(pool: list[np.ndarray], wanted: Tensor) -> Clients:
        taken = [
            np.concatenate([random.permutation(rows)[:n] for rows, n in zip(pool, each, strict=True)])
            for each in wanted.tolist()
        ]
        return _made_of(population.train, taken)

    train, test = (made(pool, wanted[kept]) for pool, wanted in zip(of_class, counts, strict=True))
    return Newcomers(train, test), kept.nonzero().flatten()


def _made_of(source: Clients, taken: Sequence[np.ndarray]) -> Clients:
    """Clients with these rows of others; their ids are nobody's, so none is taken for a training client."""
    assert source.y is not None
    order, sizes = torch.from_numpy(np.concatenate(taken)), torch.tensor([len(rows) for rows in taken])
    made = Clients.from_sizes(source.x[order], source.y[order], sizes, shift=source.shift, scale=source.scale)
    return replace(made, ids=made.ids + int(source.ids.max()) + 1)


def _rows(clients: Clients) -> Tensor:
    return torch.cat(
        [torch.arange(s, s + n) for s, n in zip(clients.start.tolist(), clients.size.tolist(), strict=True)]
    )


def rotated(population: Population, angle: float) -> Newcomers:
    """The unseen clients with all images rotated by ``angle`` degrees (P2 Fig. 4)."""
    return _with_images(population, lambda images: torch.from_numpy(rotate(images.numpy(), angle).copy()))


def blurred(population: Population, sigma: float) -> Newcomers:
    """The unseen clients with all images blurred by a Gaussian of ``sigma`` pixels (P2 Fig. 4); 0 changes nothing."""
    if not sigma >= 0:
        raise ValueError(f"sigma={sigma}; expected 0 or more pixels")

    def blur(images: Tensor) -> Tensor:
        if sigma == 0:
            return images
        reach = max(1, math.ceil(3 * sigma))
        kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
        kernel = kernel / kernel.sum()
        flat = images.reshape(-1, 1, *images.shape[2:]).to(torch.float32)
        flat = F.conv2d(F.pad(flat, (reach, reach, 0, 0), mode="replicate"), kernel.reshape(1, 1, 1, -1))
        flat = F.conv2d(F.pad(flat, (0, 0, reach, reach), mode="replicate"), kernel.reshape(1, 1, -1, 1))
        return (flat.round() if images.dtype == torch.uint8 else flat).reshape(images.shape).to(images.dtype)

    return _with_images(population, blur)


def _with_images(population: Population, change: Callable[[Tensor], Tensor]) -> Newcomers:
    if population.kind != "image":
        raise ValueError(f"{population.name!r} holds {population.kind}, which cannot be rotated or blurred")
    newcomers = Newcomers.unseen(population)
    rows = torch.cat([_rows(newcomers.train), _rows(newcomers.test)])
    x = population.train.x.clone()
    x[rows] = change(x[rows])
    return Newcomers(replace(newcomers.train, x=x), replace(newcomers.test, x=x))


def point_of(at: float, scores: Scores, delta: float | None = None) -> CurvePoint | None:
    """One place of a curve; None where no newcomer has a score."""
    known = scores.score[~scores.score.isnan()]
    if len(known) == 0:
        return None
    error = float(known.std(correction=1)) / math.sqrt(len(known)) if len(known) > 1 else None
    return CurvePoint(at=at, mean=scores.mean, error=error, delta=delta)


def curve(
    places: Sequence[float],
    newcomers: Callable[[float], Newcomers],
    method: Method,
    state: State,
    federation: Federation,
) -> list[CurvePoint]:
    """How newcomers score who are changed more and more: ``curve(angles, lambda a: rotated(population, a), ...)``.

    With ``dealt_anew`` it is T1 Fig. B.1, with ``rotated`` and ``blurred`` P2 Fig. 4, and with ``only_first`` P2 Fig. 5
    without its privacy.
    """
    points = [point_of(at, newcomers(at).score(method, state, federation)) for at in places]
    return [point for point in points if point is not None]


def accuracy_by_size_and_epsilon(
    method: ProtectsNewcomers,
    state: State,
    federation: Federation,
    newcomers: Newcomers,
    sizes: Sequence[int],
    epsilons: Sequence[float | None],
    delta_of: Callable[[int], float],
) -> dict[float | None, list[CurvePoint]]:
    """P2 Fig. 5 and 6: for each ε (None: no noise) the accuracy over a newcomer's number of samples.

    ``delta_of``: δ for a number of samples n. The paper's is 0.01 throughout, which from n = 100 on protects nobody.
    """
    curves: dict[float | None, list[CurvePoint]] = {}
    for epsilon in epsilons:
        points = []
        for size in sizes:
            delta = delta_of(size)
            private = method.protecting(epsilon, delta)
            scores = newcomers.only_first(size).score(private, state, federation, labeled=False)
            points.append(point_of(size, scores, None if epsilon is None else delta))
        curves[epsilon] = [point for point in points if point is not None]
    return curves


def accuracy_per_gigabyte(run: Path) -> list[tuple[float, float | None, float | None]]:
    """(gigabytes sent both ways so far, seen, unseen) at every evaluated round of a run folder (T1 Fig. B.5-B.11)."""
    found = []
    for record in read_metrics(run / METRICS):
        seen, unseen = record.get("seen"), record.get("unseen")
        if seen or unseen:
            sent = (record["bytes_up"] + record["bytes_down"]) / 1e9
            found.append((sent, seen and seen["mean"], unseen and unseen["mean"]))
    if not found:
        raise NoRounds(f"the run has no evaluated rounds in {METRICS}")
    return found
