"""Analyses of models on demand: each against a case whose answer is known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from unalike import simulate
from unalike.core.model import Model
from unalike.data import load
from unalike.data.population import Population
from unalike.learn.local import LocalSGD
from unalike.methods.odpfl import ODPFL
from unalike.methods.pefll import PeFLL
from unalike.methods.problem import Problem
from unalike.networks.architectures import build
from unalike.report.analyses import measures as analyses
from unalike.report.analyses.measures import Newcomers


@pytest.fixture(scope="module")
def population() -> Population:
    return load("digits", partition="pathological:2", clients=20, unseen=0.25, seed=0)


@pytest.fixture(scope="module")
def problem(population: Population) -> Problem:
    model = Model(build("mlp", population.input_shape, 10, hidden=(16,)))
    return Problem(model, population.input_shape, 10, len(population.seen), "image")


def test_unseen_clients_are_compared_with_training_clients_of_the_same_classes() -> None:
    one, two = [3, 1, 0], [0, 2, 2]
    counts = torch.tensor([one, two, [1, 9, 0], one, [5, 0, 0], two, [0, 1, 0]])
    scores = torch.tensor([0.9, 0.5, 0.7, 0.6, 0.1, 0.4, float("nan")])
    found = analyses.same_classes(scores, counts, torch.tensor([3, 4, 5, 6]))
    assert (found.clients, found.novel_clients) == (2, 1)
    assert found.unseen == pytest.approx((0.6 + 0.4) / 2)
    assert found.seen == pytest.approx(((0.9 + 0.7) / 2 + 0.5) / 2)
    assert found.novel == pytest.approx(0.1)
    with pytest.raises(analyses.DoesNotApply, match="no unseen client has just the classes of a training client"):
        analyses.same_classes(scores[[0, 4]], counts[[0, 4]], torch.tensor([1]))


def test_a_twin_has_a_training_clients_classes_and_unseen_clients_rows(population: Population) -> None:
    some = population.seen[:7]
    made, having = analyses.twins(population, some)
    assert len(having) and len(made) == len(having)
    unseen = set(population.unseen.tolist())
    assert not unseen & set(some.tolist()) and int(made.train.ids.min()) > int(population.train.ids.max())
    for part, own in ((population.train, made.train), (population.test, made.test)):
        late = [part.rows(i) for i in unseen]
        pool = {x.numpy().tobytes() for rows, _ in late for x in rows}
        labels = torch.cat([y for _, y in late if y is not None])
        there = torch.bincount(labels, minlength=10)
        counts = population.histogram(part)[some[having]]
        for twin, wanted in enumerate(counts):
            x, y = own.rows(twin)
            assert y is not None and all(row.numpy().tobytes() in pool for row in x)
            assert torch.bincount(y, minlength=10).tolist() == torch.minimum(wanted, there).tolist()
    with pytest.raises(analyses.DoesNotApply, match="no client has only classes of which unseen clients have rows"):
        untested = replace(population.test, size=torch.zeros_like(population.test.size))
        analyses.twins(replace(population, test=untested), some)


def test_rank_correlation_is_one_for_the_shares_themselves_and_minus_one_for_their_opposite() -> None:
    shares = torch.distributions.Dirichlet(torch.full((5,), 0.3)).sample((30,))
    assert float(analyses.rank_correlation(3 * shares, shares).min()) > 0.999
    v = torch.arange(12.0)[:, None]
    opposite = torch.cat([torch.zeros(1), torch.arange(11.0, 0, -1)])[:, None]  # from client 0 the nearest is farthest
    found = analyses.rank_correlation(v, opposite, torch.tensor([0, 11]))
    assert float(found[0]) == pytest.approx(-1) and float(found[1]) > 0  # from the last one it is not
    noise = analyses.rank_correlation(
        torch.randn(200, 4, generator=torch.Generator().manual_seed(0)), torch.rand(200, 3)
    )
    assert abs(float(noise.mean())) < 0.1


def test_maps_keep_clusters_apart() -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.randn(20, 6, generator=random), 30 + torch.randn(20, 6, generator=random)])
    for kind in ("pca", "t-sne"):
        places = analyses.descriptor_map(rows, kind)  # type: ignore[arg-type]
        assert places.shape == (40, 2)
        gap = (places[:20].mean(0) - places[20:].mean(0)).norm()
        assert gap > 2 * places[:20].std(0).norm()


def test_newcomers_are_dealt_from_unseen_rows_alone_and_are_never_tested_on_what_they_used(
    population: Population,
) -> None:
    assert population.train.y is not None
    newcomers = analyses.redraw_classes(population, 0.5, clients=6, samples=40, seed=1)
    allowed = set()
    for part in (population.train, population.test):
        for i in population.unseen.tolist():
            allowed |= {row.numpy().tobytes() for row in part.rows(i)[0]}
    for i in range(len(newcomers)):
        own = [row.numpy().tobytes() for row in newcomers.train.rows(i)[0]]
        held = [row.numpy().tobytes() for row in newcomers.test.rows(i)[0]]
        assert set(own) <= allowed and set(held) <= allowed and not set(own) & set(held)
    assert not set(newcomers.train.ids.tolist()) & set(population.train.ids.tolist())


def test_a_small_alpha_gives_newcomers_of_few_classes(population: Population) -> None:
    def largest_share(alpha: float) -> float:
        newcomers = analyses.redraw_classes(population, alpha, clients=20, samples=20)
        shares = []
        for i in range(len(newcomers)):
            y = newcomers.train.rows(i)[1]
            assert y is not None
            shares.append(float(torch.bincount(y).max() / len(y)))
        return sum(shares) / len(shares)

    assert largest_share(0.05) > largest_share(50.0) + 0.2


def test_turning_and_blurring_touch_unseen_images_only(population: Population) -> None:
    raw = population.train
    for newcomers in (analyses.rotate_images(population, 90), analyses.blur_images(population, 1.0)):
        for i in population.seen.tolist():
            rows = raw.rows(i)[0]
            assert torch.equal(replace(raw, x=newcomers.train.x).rows(i)[0], rows)
    turned = analyses.rotate_images(population, 90).train.rows(0)[0]
    original = Newcomers.unseen(population).train.rows(0)[0]
    assert torch.equal(turned, torch.rot90(original, 1, (-2, -1)))
    assert torch.equal(analyses.blur_images(population, 0).train.x, raw.x)
    blurred = analyses.blur_images(population, 1.0).train.rows(0)[0].double()
    assert blurred.std() < 0.8 * original.double().std()
    assert float(blurred.mean()) == pytest.approx(float(original.double().mean()), rel=0.15)


def test_curves_have_a_point_for_each_place(population: Population, problem: Problem) -> None:
    method = PeFLL(problem, descriptor=4, local=LocalSGD(steps=1))
    state = method.start(0).replace(scale=torch.ones(()))
    federation = simulate(population.train.select(population.seen))
    for change, places in (
        (lambda alpha: analyses.redraw_classes(population, alpha, clients=4, samples=20), [0.1, 1]),
        (lambda angle: analyses.rotate_images(population, angle), [0, 45]),
        (lambda sigma: analyses.blur_images(population, sigma), [0, 1]),
    ):
        scores = [change(place).score(method, state, federation).score for place in places]
        points = analyses.curve(places, scores.__getitem__)
        assert [point.at for point in points] == places
        assert all(0 <= point.mean <= 1 and point.error is not None and point.error >= 0 for point in points)
    assert not federation.ledger.state()["shared"]  # nothing was charged


def test_the_standard_error_is_that_of_a_sample_and_one_client_has_none() -> None:
    scores = [torch.tensor(row) for row in ([0.0, torch.nan, 1.0, 0.5], [0.5, torch.nan], [torch.nan])]
    some, alone = analyses.curve([1, 2, 3], scores.__getitem__)
    assert some.at == 1 and some.mean == 0.5 and some.error == pytest.approx(0.5 / 3**0.5)
    assert alone.at == 2 and alone.mean == 0.5 and alone.error is None
    with pytest.raises(analyses.DoesNotApply, match="no newcomer could be scored"):
        analyses.curve([3], lambda _: scores[2])


def test_noise_moves_small_newcomers_more_than_large_ones(population: Population, problem: Problem) -> None:
    method = ODPFL(problem, encoder="sphere", descriptor=8)
    state = method.start(0)
    federation = simulate(population.train.select(population.seen))
    newcomers = Newcomers.unseen(population)

    def gap(size: int) -> float:
        theirs = simulate(newcomers.only_first(size).train.without_labels())
        private = replace(method, newcomer_epsilon=0.5)
        noisy = private.descriptors(state, theirs.aside().everyone())
        return float((noisy - method.descriptors(state, theirs.aside().everyone())).norm())

    assert gap(4) > 2 * gap(40)
    curves = analyses.accuracy_by_size_and_epsilon(
        method, state, federation, newcomers, [4, 40], [0.5, None], lambda n: 0.1 / n
    )
    assert set(curves) == {0.5, None} and [point.at for point in curves[None]] == [4, 40]
    assert [point.delta for point in curves[0.5]] == [0.025, 0.0025]
    assert [point.delta for point in curves[None]] == [None, None]


def test_accuracy_per_byte_reads_a_run(tmp_path: Path) -> None:
    lines = [
        {"round": 1, "bytes_up": 10**9, "bytes_down": 10**9, "seen": {"mean": 0.5}, "unseen": None},
        {"round": 2, "bytes_up": 2 * 10**9, "bytes_down": 2 * 10**9},
        {"round": 3, "bytes_up": 3 * 10**9, "bytes_down": 3 * 10**9, "seen": {"mean": 0.7}, "unseen": {"mean": 0.6}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [(row.gigabytes, row.seen, row.unseen) for row in analyses.accuracy_per_byte(tmp_path)]
    assert found == [(2.0, 0.5, None), (6.0, 0.7, 0.6)]
    with pytest.raises(ValueError, match="no evaluated rounds"):
        analyses.accuracy_per_byte(tmp_path / "absent")


def test_the_divergence_from_the_nearest_client_is_that_of_its_class_shares() -> None:
    """P2 §6.7: KL of (3, 1, 0) and (0, 0, 4) rows from two clients, with half a row more of every class."""
    counts, others = torch.tensor([[3, 1, 0], [0, 0, 4]]), torch.tensor([[6, 2, 0], [1, 1, 7]])

    def kl(mine: list[int], other: list[int]) -> float:
        p, q = (np.array([one + 0.5 for one in rows]) / (sum(rows) + 1.5) for rows in (mine, other))
        return float((p * np.log(p / q)).sum())

    wanted = [min(kl(one, other) for other in others.tolist()) for one in counts.tolist()]
    found = analyses.divergence_from_nearest(counts, others)
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    assert 0.001 < found[0] != found[1] > 0.001
    scores = torch.tensor([0.9, 0.5, math.nan, 0.7, 0.1])
    points = analyses.over_divergence(scores, torch.tensor([0.1, 2.0, 9.0, 0.3, 4.0]), groups=2)
    assert [(point.at, point.mean) for point in points] == [(pytest.approx(0.2), pytest.approx(0.8)),
                                                            (pytest.approx(3.0), pytest.approx(0.3))]  # fmt: skip
    assert points[1].error == pytest.approx(0.2)
