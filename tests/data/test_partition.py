from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unalike.data import DataError, list_partitions, load
from unalike.data.partition.assignment import short_form
from unalike.data.partition.schemes import PARTITIONS, dirichlet, inner_dirichlet, pathological, shards, size_skew

LABELS = np.random.default_rng(5).integers(10, size=600)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(set(PARTITIONS) - {"mdm", "conditional"})),  # these need a file
    clients=st.integers(1, 25),
    classes=st.integers(3, 8),
    rows=st.integers(300, 500),
    seed=st.integers(0, 1000),
)
def test_every_partition_gives_a_row_at_most_once_and_repeats(
    name: str, clients: int, classes: int, rows: int, seed: int
) -> None:
    labels = rng(seed).permutation(np.arange(rows) % classes)
    parts = PARTITIONS[name](labels, clients, rng(seed))
    assert len(parts) == clients and all(len(part) >= 1 for part in parts)
    joined = np.concatenate(parts)
    assert joined.min() >= 0 and joined.max() < rows and len(np.unique(joined)) == len(joined)
    again = PARTITIONS[name](labels, clients, rng(seed))
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))
    if clients > 1:
        other = np.concatenate(PARTITIONS[name](labels, clients, rng(seed + 1)))
        assert len(other) != len(joined) or (other != joined).any(), "another seed gives another partition"


@settings(max_examples=40, deadline=None)
@given(
    alpha=st.sampled_from([0.001, 0.01, 0.1, 1.0, 100.0]),
    clients=st.integers(1, 60),
    least=st.integers(0, 10),
    seed=st.integers(0, 1000),
)
def test_dirichlet_honours_the_least_size_and_uses_every_row(alpha: float, clients: int, least: int, seed: int) -> None:
    parts = dirichlet(LABELS, clients, rng(seed), alpha=alpha, min_partition_size=least)
    assert min(len(part) for part in parts) >= least
    assert sorted(np.concatenate(parts).tolist()) == list(range(600))


def test_dirichlet_alpha_sets_the_heterogeneity() -> None:
    def classes_of_a_client(alpha: float) -> float:
        return float(np.mean([len(np.unique(LABELS[part])) for part in dirichlet(LABELS, 20, rng(), alpha)]))

    assert classes_of_a_client(0.05) < 6 < 9 < classes_of_a_client(100)


@settings(max_examples=30, deadline=None)
@given(least=st.integers(1, 10), kind=st.sampled_from(["lognormal", "exponential", "linear", "square"]))
def test_size_skew_honours_the_least_size(least: int, kind: str) -> None:
    parts = size_skew(LABELS, 60, rng(), kind, min_partition_size=least)  # type: ignore[arg-type]
    assert min(len(part) for part in parts) >= least and sum(len(part) for part in parts) == 600


def test_size_skew_follows_its_distribution() -> None:
    sizes = np.array([len(part) for part in size_skew(np.zeros(5050), 100, rng(), "linear")])
    assert sizes.tolist() == list(range(1, 101))
    flat = [len(part) for part in size_skew(LABELS, 60, rng(), sigma=0.0)]
    assert flat == [10] * 60
    skewed = [len(part) for part in size_skew(LABELS, 60, rng(), sigma=2.0)]
    assert max(skewed) > 100


@pytest.mark.parametrize("mode", ["random", "balanced", "deterministic", "first-deterministic"])
def test_pathological_gives_each_client_its_number_of_classes(mode: str) -> None:
    parts = pathological(LABELS, 30, rng(), 2, mode)  # type: ignore[arg-type]
    assert all(len(np.unique(LABELS[part])) == 2 for part in parts)
    if mode == "deterministic":
        assert [np.unique(LABELS[part]).tolist() for part in parts[:3]] == [[0, 1], [1, 2], [2, 3]]
    if mode == "balanced":
        held = [np.concatenate([np.unique(LABELS[part]) for part in parts[i : i + 5]]) for i in range(0, 30, 5)]
        assert all(sorted(five) == list(range(10)) for five in held), "five clients in a row hold every class once"
        assert len({tuple(five) for five in held}) > 1, "in another order each time"
    if mode != "random":
        assert sum(len(part) for part in parts) == 600, "no class is left out"
    by_class = [np.array([np.sum(LABELS[part] == c) for part in parts]) for c in range(10)]
    for counts in by_class:
        held = counts[counts > 0]
        assert len(held) == 0 or held.max() - held.min() <= 1, "a class is divided evenly"


def test_shards_have_equal_sizes_and_few_classes() -> None:
    parts = shards(LABELS, 20, rng(), 2)
    assert {len(part) for part in parts} == {30}
    assert max(len(np.unique(LABELS[part])) for part in parts) <= 4
    leftover = shards(LABELS, 7, rng(), 2, keep_incomplete_shard=True)
    assert sum(len(part) for part in shards(LABELS, 7, rng(), 2)) == 588 and sum(map(len, leftover)) == 600


def test_inner_dirichlet_gives_equal_sizes_and_follows_each_clients_alpha() -> None:
    parts = inner_dirichlet(LABELS, 10, rng(), alpha=[0.01] * 5 + [1000.0] * 5, partition_size=20)
    assert {len(part) for part in parts} == {20}
    classes = [len(np.unique(LABELS[part])) for part in parts]
    assert max(classes[:5]) <= 3 and min(classes[5:]) >= 6
    everything = inner_dirichlet(LABELS, 60, rng(), alpha=0.01)
    assert len(np.unique(np.concatenate(everything))) == 600, "it ends also when classes run out"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dirichlet(LABELS, 10, rng(), alpha=0), "alpha must be a positive number, got 0"),
        (lambda: dirichlet(LABELS, 100, rng()), "600 rows cannot give each of 100 clients 10: use at most 60 clients"),
        (lambda: pathological(LABELS, 10, rng(), 11), "num_classes_per_partition must be between 1 and the 10 classes"),
        (lambda: pathological(LABELS, 900, rng(), 2), "clients drew a class that has only .* rows; use fewer clients"),
        (lambda: pathological(LABELS, 9, rng(), 2, "odd"), "class_assignment_mode must be 'random'"),  # type: ignore[arg-type]
        (lambda: size_skew(LABELS, 9, rng(), "odd"), "the distribution must be 'lognormal'"),  # type: ignore[arg-type]
        (lambda: shards(LABELS, 400, rng(), 2), "cannot give each of 400 clients"),
        (lambda: PARTITIONS["iid"](LABELS, 0, rng()), "the number of clients must be at least 1, got 0"),
        (lambda: inner_dirichlet(LABELS, 10, rng(), alpha=-1), "alpha must be positive"),
    ],
)
def test_impossible_partitions_are_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(DataError, match=message):
        call()


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("dirichlet:abc", "alpha must be a number, got 'abc'"),
        ("dirichlet:true", "alpha must be a number, got True"),
        ("dirichlet:0.5,min_partition_size=2.5", "min_partition_size must be a whole number, got 2.5"),
        ("inner-dirichlet:abc", "alpha must be a number or a number for each, as in 0\\+90, got 'abc'"),
        ("inner-dirichlet:0.1,abc", "partition_size must be a whole number or none, got 'abc'"),
        ("pathological:two", "num_classes_per_partition must be a whole number, got 'two'"),
        ("shards:2,keep_incomplete_shard=maybe", "keep_incomplete_shard must be true or false, got 'maybe'"),
        ("shards:2,shard_size=0", "shard_size must be at least 1, got 0"),
        ("size-skew:lognormal,big", "sigma must be a number, got 'big'"),
        ("natural:some", "group_size must be a whole number, got 'some'"),
        ("rotation:left", "angles must be a number for each, as in 0\\+90, got 'left'"),
        ("rotation:0+90,counts=x", "counts must be a whole number for each, as in 0\\+90 or none, got 'x'"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused(partition: str, message: str) -> None:
    with pytest.raises(DataError, match=f"^{message}$"):
        load("digits", partition=partition)


def test_the_short_form_names_options_that_are_no_defaults() -> None:
    assert short_form("pathological:2") == short_form("pathological") == "pathological"
    assert short_form("pathological:3") == "pathological:num_classes_per_partition=3"
    assert short_form("rotation:0+90") == "rotation:angles=0+90"
    assert short_form("shards:keep_incomplete_shard=true") == "shards:keep_incomplete_shard=true"


def test_partitions_are_listed() -> None:
    assert set(list_partitions()) == {"natural", "rotation", "concept-shift", *PARTITIONS}
    assert all(list_partitions().values())
