"""What ``unalike analyse`` measures, after the papers: descriptors, unlike newcomers, size and ε, bytes. Draws nothing.

All of it is simulation only: it looks at labels and test rows that no server would have, and is charged to no ledger.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import scipy.stats
import torch
from scipy import ndimage
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.federation import Federation
from unalike.core.method import Describes, Method, ProtectsNewcomers, ServesUnlabeled, State
from unalike.data.partition.assignment import rotate
from unalike.data.population import Population
from unalike.learn.evaluation import Scores
from unalike.report.analyses.file import AtBytes, CurvePoint, SameClasses
from unalike.runs.folder import METRICS, read_rounds
from unalike.runs.measure import score_newcomers
from unalike.runs.simulate import simulate


class DoesNotApply(ValueError):
    """An analysis has nothing to say about a run or its clients; the message says why."""


def descriptors_of(method: Describes, state: State, federation: Federation, clients: Clients) -> Tensor:
    """[C, l], asked aside."""
    with simulate(clients, federation.seed, round=federation.round).aside() as own:
        return method.descriptors(state, own.everyone())


def descriptor_map(descriptors: Tensor, kind: Literal["pca", "t-sne"] = "pca") -> Tensor:
    """Places [C, 2] for a map of 3 or more clients (P2 Fig. 7)."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    rows = descriptors.detach().to(torch.float64).numpy()
    if kind == "t-sne":
        near = min(30.0, (len(rows) - 1) / 3)
        return torch.from_numpy(TSNE(2, perplexity=near, init="random", random_state=0).fit_transform(rows))
    places = torch.from_numpy(PCA(min(2, rows.shape[1]), random_state=0).fit_transform(rows))
    return torch.nn.functional.pad(places, (0, 2 - places.shape[1]))


def rank_correlation(descriptors: Tensor, label_shares: Tensor, of: Tensor | None = None) -> Tensor:
    """Spearman's correlation, for each client ``of`` these rows, of ‖v_i − v_j‖ and ‖π_i − π_j‖ over all other j.

    The mean over unseen clients is T1 Fig. 4.1. NaN for a client from which all others are equally far.
    """
    if not 4 <= len(descriptors) == len(label_shares):
        got = f"{len(descriptors)} and {len(label_shares)}"
        raise ValueError(f"expected descriptors and label shares of the same 4 or more clients, got {got}")
    of = torch.arange(len(descriptors)) if of is None else of
    far_v, far_p = (torch.cdist(rows[of].double(), rows.double()).numpy() for rows in (descriptors, label_shares))
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.stats.ConstantInputWarning)  # the NaN says it
        for row, client in enumerate(of.tolist()):
            others = np.arange(len(descriptors)) != client
            found.append(float(scipy.stats.spearmanr(far_v[row, others], far_p[row, others]).statistic))
    return torch.tensor(found, dtype=torch.float64).clamp(-1, 1)  # rounding may leave the range


def same_classes(scores: Tensor, counts: Tensor, unseen: Tensor) -> SameClasses:
    """Like with like: a few unseen clients may just have got easier or harder classes than the others.

    scores [C] (NaN: has none) and class counts [C, classes] of all clients, and which of them are unseen.
    """
    scored, has, late = ~scores.isnan(), counts > 0, torch.zeros(len(scores), dtype=torch.bool)
    late[unseen] = True
    own, others = scores[scored & late].double(), scores[scored & ~late].double()
    same = (has[scored & late][:, None] == has[scored & ~late]).all(-1).double()  # [unseen, seen]
    like = same.any(1)
    if not bool(like.any()):
        raise DoesNotApply("no unseen client has just the classes of a training client")
    return SameClasses(
        unseen=float(own[like].mean()),
        seen=float((same @ others / same.sum(1))[like].mean()),
        clients=int(like.sum()),
        novel=None if bool(like.all()) else float(own[~like].mean()),
        novel_clients=int((~like).sum()),
    )


def divergence_from_nearest(counts: Tensor, others: Tensor) -> Tensor:
    """[n] KL divergence of each client's class shares from those of the nearest of ``others`` (P2 §6.7).

    Both are class counts [·, classes]. Half a row is added to every class: else a class that the other client lacks
    makes the divergence infinite.
    """
    p, q = ((one.double() + 0.5) / (one.double() + 0.5).sum(1, keepdim=True) for one in (counts, others))
    return ((p * p.log()).sum(1)[:, None] - p @ q.log().T).amin(1)


def over_divergence(scores: Tensor, divergence: Tensor, groups: int = 5) -> list[CurvePoint]:
    """Mean scores of groups of clients, equally many in each, from the least divergence to the largest."""
    known = (~scores.isnan()).nonzero().flatten()
    order = known[divergence[known].argsort(stable=True)]
    own = order.tensor_split(min(groups, len(order)))
    return curve([round(float(divergence[group].mean()), 3) for group in own], lambda i: scores[own[i]])


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
        return score_newcomers(method, state, self.train, self.test, federation, labeled)

    def only_first(self, samples: int) -> Newcomers:
        """The same newcomers with at most so many samples each to personalize with."""
        return Newcomers(replace(self.train, size=self.train.size.clamp(max=samples)), self.test)


def redraw_classes(
    population: Population, alpha: float, clients: int = 20, samples: int = 100, test: float = 0.2, seed: int = 0
) -> Newcomers:
    """Newcomers with class shares from a Dirichlet(α, …, α), made of the unseen clients' rows alone (T1 Fig. B.1).

    A row is in one newcomer at most once but may be in several newcomers, who never meet. Classes of which too few rows
    are left give what they have.
    """
    of_class = _by_class(population, population.train, population.test)
    random = np.random.default_rng([seed, round(1e6 * alpha)])
    taken: list[np.ndarray] = []
    for _ in range(clients):
        counts = random.multinomial(samples, random.dirichlet(np.full(len(of_class), alpha)))
        taken.append(random.permutation(_sample_rows(of_class, counts.tolist(), random)))
    taken = [rows for rows in taken if len(rows) >= 2]
    if not taken:
        raise DoesNotApply(f"the {len(population.unseen)} unseen clients have too few rows to make newcomers of")
    whole = _clients_of(population.train, taken)
    tested = (whole.size * test).round().to(torch.int64).clamp(min=1)
    test_rows = replace(whole, start=whole.start + whole.size - tested, size=tested)
    return Newcomers(replace(whole, size=whole.size - tested), test_rows)


def twins(population: Population, of: Tensor, seed: int = 0) -> tuple[Newcomers, Tensor]:
    """Newcomers with as many rows of each class as the clients ``of`` have, made of the unseen clients' rows alone.

    A twin personalizes with and is tested on rows with which unseen clients do the same. A row may be in several twins,
    who never meet; of a class that has too few rows a twin gets all. Without a twin are clients with a class that no
    unseen client has, or without rows to train with or to test. Also gives the positions in ``of`` of those with one.
    """
    random = np.random.default_rng(seed)
    parts = (population.train, population.test)
    of_class = [_by_class(population, part) for part in parts]
    counts = torch.stack([population.histogram(part)[of] for part in parts])  # [part, client, class]
    there = torch.tensor([[len(rows) for rows in pool] for pool in of_class])
    kept = ((counts == 0) | (there[:, None] > 0)).all((0, 2)) & (counts.sum(2) > 0).all(0)
    if not bool(kept.any()):
        raise DoesNotApply("no client has only classes of which unseen clients have rows to train with and to test")
    made = []
    for pool, wanted in zip(of_class, counts[:, kept].tolist(), strict=True):
        made.append(_clients_of(population.train, [_sample_rows(pool, each, random) for each in wanted]))
    return Newcomers(*made), kept.nonzero().flatten()


def enlarge(population: Population, samples: int, seed: int = 0) -> Newcomers | None:
    """The unseen clients with up to so many rows to personalize with, in the class shares that each has.

    The rows beyond their own are those that other unseen clients personalize with (P2 Fig. 5 and 6 have newcomers of
    up to 3,000 rows). Of a class that has too few, a newcomer gets all. None: the data have no classes to share by.
    """
    if population.classes is None or population.train.y is None or len(population.unseen) == 0:
        return None
    random = np.random.default_rng(seed)
    pool = _by_class(population, population.train)
    counts = population.histogram(population.train)[population.unseen].to(torch.float64)
    if bool((counts.sum(1) == 0).any()):
        return None
    wanted = torch.ceil(counts * (samples / counts.sum(1, keepdim=True))).to(torch.int64).tolist()
    made = _clients_of(
        population.train, [random.permutation(_sample_rows(pool, one, random))[:samples] for one in wanted]
    )
    test = population.test.select(population.unseen)
    return Newcomers(made, replace(test, ids=made.ids))


def _by_class(population: Population, *parts: Clients) -> list[np.ndarray]:
    """The unseen clients' rows of each class, in these parts of their data."""
    y = population.train.y
    if y is None or population.classes is None:
        raise DoesNotApply(f"{population.name} has no classes")
    pool = torch.cat([part.select(population.unseen).pool_rows()[0] for part in parts])
    pool = pool if population.train.known is None else pool[population.train.known[pool]]
    return [pool[y[pool] == c].numpy() for c in range(population.classes)]


def _sample_rows(of_class: list[np.ndarray], counts: list[int], random: np.random.Generator) -> np.ndarray:
    """So many rows of each class, or all that there are, at random."""
    return np.concatenate([random.permutation(rows)[:n] for rows, n in zip(of_class, counts, strict=True)])


def _clients_of(source: Clients, taken: Sequence[np.ndarray]) -> Clients:
    """Clients with these rows of others; their ids are nobody's, so none is taken for a training client."""
    assert source.y is not None
    order, sizes = torch.from_numpy(np.concatenate(taken)), torch.tensor([len(rows) for rows in taken])
    known = None if source.known is None else source.known[order]
    made = Clients.from_sizes(
        source.x[order], source.y[order], sizes, shift=source.shift, scale=source.scale, known=known
    )
    return replace(made, ids=made.ids + int(source.ids.max()) + 1)


def rotate_images(population: Population, angle: float) -> Newcomers:
    """The unseen clients with all images rotated by ``angle`` degrees (P2 Fig. 4)."""
    return _with_images(population, lambda images: rotate(images, angle))


def blur_images(population: Population, sigma: float) -> Newcomers:
    """The unseen clients with all images blurred by a Gaussian of ``sigma`` pixels (P2 Fig. 4); 0 changes nothing."""
    if not sigma >= 0:
        raise ValueError(f"sigma={sigma}; expected 0 or more pixels")

    def blur(images: np.ndarray) -> np.ndarray:
        soft = ndimage.gaussian_filter(images.astype(np.float32), sigma, mode="nearest", truncate=3, axes=(-2, -1))
        result: np.ndarray = (soft.round() if images.dtype == np.uint8 else soft).astype(images.dtype)
        return result

    return _with_images(population, blur)


def _with_images(population: Population, change: Callable[[np.ndarray], np.ndarray]) -> Newcomers:
    if population.kind != "image":
        raise DoesNotApply(f"{population.name} holds {population.kind}, no images")
    newcomers = Newcomers.unseen(population)
    rows = torch.cat([newcomers.train.pool_rows()[0], newcomers.test.pool_rows()[0]])
    x = population.train.x.clone()
    x[rows] = torch.from_numpy(change(x[rows].numpy()).copy())
    return Newcomers(replace(newcomers.train, x=x), replace(newcomers.test, x=x))


def curve(
    places: Sequence[float],
    scores: Callable[[int], Tensor],
    delta: Sequence[float | None] | None = None,
) -> list[CurvePoint]:
    """The mean score at each place where any client has one, with its standard error over clients.

    ``scores(i)`` are the clients' at place i (NaN: has none), and ``delta`` the δ that holds there.
    """
    points = []
    for i, place in enumerate(places):
        known = (found := scores(i).double())[~found.isnan()]
        error = float(known.std(correction=1)) / math.sqrt(len(known)) if len(known) > 1 else None
        if len(known):
            points.append(CurvePoint(at=place, mean=float(known.mean()), error=error, delta=delta and delta[i]))
    if not points:
        raise DoesNotApply("no newcomer could be scored")
    return points


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
    reads = not (isinstance(method, ServesUnlabeled) and method.serves_unlabeled)  # labels, where it needs them
    deltas = [delta_of(size) for size in sizes]

    def scores(epsilon: float | None, i: int) -> Tensor:
        private = method.with_protection(epsilon, deltas[i])
        return newcomers.only_first(sizes[i]).score(private, state, federation, labeled=reads).score

    return {one: curve(sizes, partial(scores, one), None if one is None else deltas) for one in epsilons}


def accuracy_per_byte(run: Path) -> list[AtBytes]:
    """What had been sent both ways, and the scores, at every evaluated round of a run folder (T1 Fig. B.5-B.11)."""
    found = []
    for record in read_rounds(run):
        means = {group: record[group]["mean"] if record.get(group) else None for group in ("seen", "unseen")}
        if any(mean is not None for mean in means.values()):
            found.append(AtBytes(gigabytes=(record["bytes_up"] + record["bytes_down"]) / 1e9, **means))
    if not found:
        raise DoesNotApply(f"the run has no evaluated rounds in {METRICS}")
    return found
