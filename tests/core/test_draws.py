"""Draws are a function of where they are made, and they are distributed as they say."""

import math

import torch
from scipy import stats
from torch.func import vmap

from unalike.core.draws import Draws, key


def test_a_key_depends_on_every_part_and_on_their_order() -> None:
    keys = {int(key(*parts)) for parts in [(0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (2**63,), (2**64 + 5,)]}
    assert len(keys) == 8
    assert torch.equal(key(3, torch.arange(4)), torch.stack([key(3, i) for i in range(4)]))


def test_the_same_call_gives_the_same_draw_whatever_the_length() -> None:
    a, b = Draws(key(1)), Draws(key(1))
    assert torch.equal(a.bits(5), b.bits(50)[:5])
    assert torch.equal(a.uniform(3), b.uniform(7)[:3])
    assert not torch.equal(a.bits(5), Draws(key(2)).bits(5))


def test_draws_inside_vmap_equal_draws_outside() -> None:
    keys = key(7, torch.arange(6))

    def some(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        draws = Draws(k)
        return draws.normal(4), draws.permutation(torch.tensor(5), 8)

    normal, order = vmap(some)(keys)
    for i in range(6):
        alone = some(keys[i])
        assert torch.equal(normal[i], alone[0])
        assert torch.equal(order[i], alone[1])


def test_many_normals_inside_vmap_equal_those_outside() -> None:
    keys = key(9, torch.arange(2))
    for count in (3, 25_450, 140_001):  # the last needs more hashes than there are multiples at hand
        together = vmap(lambda k, count=count: Draws(k).normal(count))(keys)
        assert torch.equal(together, torch.stack([Draws(k).normal(count) for k in keys]))


def test_uniform_normal_and_integers_have_their_distributions() -> None:
    draws = Draws(key(11))
    assert stats.kstest(draws.uniform(50_000).numpy(), "uniform").pvalue > 1e-3
    normal = draws.normal(50_001)
    assert normal.shape == (50_001,)
    assert stats.kstest(normal.numpy(), "norm").pvalue > 1e-3
    # successive normals come in pairs from one hash: they must be uncorrelated all the same
    assert abs(float((normal[:-1:2] * normal[1::2]).mean())) < 4 / math.sqrt(25_000)
    counts = torch.bincount(draws.integers(7, 70_000), minlength=7)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_a_permutation_holds_every_real_row_first_and_all_orders_are_equally_likely() -> None:
    order = Draws(key(3)).permutation(torch.tensor(5), 9)
    assert sorted(order[:5].tolist()) == [0, 1, 2, 3, 4]
    assert order[5:].tolist() == [5, 6, 7, 8]
    assert torch.equal(order[:5], Draws(key(3)).permutation(5, 64)[:5])
    seen = [tuple(Draws(key(4, i)).permutation(3, 3).tolist()) for i in range(3000)]
    counts = [seen.count(p) for p in sorted(set(seen))]
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > 1e-3
