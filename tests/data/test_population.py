from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unalike import simulate
from unalike.data import DataError, Population, from_arrays, from_dataset, load
from unalike.data.partition.assignment import rotate
from unalike.data.source import Array


def rows_of(population: Population, part: str) -> list[set[int]]:
    """The source rows in each client's part, when the first feature is the row's number."""
    clients = getattr(population, part)
    return [{int(v) for v in clients.rows(i)[0][:, 0]} for i in range(len(clients))]


def numbered(rows: int, clients: int, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    x = np.stack([np.arange(rows), rng.normal(size=rows)], axis=1).astype(np.float32)
    return x, rng.integers(3, size=rows), rng.integers(clients, size=rows)


@settings(max_examples=40)
@given(
    rows=st.integers(40, 120),
    clients=st.integers(1, 30),
    test=st.sampled_from([0.0, 0.1, 0.5]),
    validation=st.sampled_from([0.0, 0.2, 0.4]),
    samples=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 99),
)
def test_each_row_is_in_one_part_of_its_own_client(
    rows: int, clients: int, test: float, validation: float, samples: int | None, seed: int
) -> None:
    x, y, client = numbered(rows, clients, seed)
    try:
        population = from_arrays(x, y, client, test=test, validation=validation, samples=samples, seed=seed, classes=3)
    except DataError as error:
        assert samples == 1 and test > 0 and "no client has 2 rows" in str(error)
        return
    train, valid, held = (rows_of(population, part) for part in ("train", "validation", "test"))
    names = [int(population.train.name(i)) for i in range(len(population))]
    for i, name in enumerate(names):
        assert not train[i] & held[i] and not train[i] & valid[i] and not valid[i] & held[i]
        mine = train[i] | valid[i] | held[i]
        assert mine <= set(np.flatnonzero(client == name).tolist())
        assert len(mine) == min(samples or rows, int((client == name).sum()))
        assert len(train[i]) >= 1
        if test and len(mine) >= 2:
            assert len(held[i]) == max(1, round(test * len(mine)))
        labels = population.train.rows(i)[1]
        assert labels is not None and sorted(y[sorted(train[i])].tolist()) == sorted(labels.tolist())
    assert set(names) | {int(name) for name in population.dropped} == set(client.tolist())


def test_the_same_seed_gives_the_same_population_and_another_does_not() -> None:
    def made(seed: int, **more: Any) -> Population:
        return load("digits", partition="dirichlet:0.3", clients=20, validation=0.1, seed=seed, **more)

    a, b, c = made(1), made(1), made(2)
    assert torch.equal(a.train.x, b.train.x) and torch.equal(a.seen, b.seen) and torch.equal(a.test.start, b.test.start)
    assert a.train.size.tolist() != c.train.size.tolist()
    fewer = made(1, labeled=0.3)
    assert torch.equal(a.train.x, fewer.train.x) and torch.equal(a.unseen, fewer.unseen), "decisions are independent"


def test_tiny_clients() -> None:
    x = np.arange(7, dtype=np.float32)[:, None]
    client = np.array(["one", "two", "two", "four", "four", "four", "four"])
    population = from_arrays(x, None, client, unseen=0)
    assert population.dropped == ["one"], "a client with one row cannot both train and be tested"
    assert [population.train.name(i) for i in range(2)] == ["four", "two"]
    assert population.train.size.tolist() == [3, 1] and population.test.size.tolist() == [1, 1]
    everyone = from_arrays(x, None, client, unseen=0, test=0)
    assert everyone.dropped == [] and everyone.train.size.tolist() == [4, 1, 2]
    assert from_arrays(x, None, client, unseen=0, min_samples=3).dropped == ["one", "two"]
    assert from_arrays(x, None, client, unseen=0, min_samples=1).train.size.tolist() == [3, 1, 1]
    with pytest.raises(DataError, match=r"no client has 9 rows .*\(3 clients, the largest with 4 rows\)"):
        from_arrays(x, None, client, min_samples=9)


def test_validation_never_takes_the_last_training_row() -> None:
    x = np.zeros((4, 1), dtype=np.float32)
    population = from_arrays(x, None, [0, 0, 1, 1], test=0.5, validation=0.4, unseen=0, normalize=False)
    assert population.train.size.tolist() == [1, 1] and population.validation.size.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("unseen", "count"), [(0.1, 2), (0, 0), (0.0, 0), (5, 5), (0.001, 1), (0.99, 19), ([3, 7], 2), (0.26, 5)]
)
def test_unseen_clients(unseen: Any, count: int) -> None:
    population = load("digits", clients=20, unseen=unseen)
    assert len(population.unseen) == count and len(population.seen) == 20 - count
    assert sorted(population.seen.tolist() + population.unseen.tolist()) == list(range(20))
    if isinstance(unseen, list):
        assert population.unseen.tolist() == unseen


def test_a_single_client_is_seen() -> None:
    assert len(load("digits", clients=1).seen) == 1


def test_fraction_of_labeled_clients() -> None:
    population = load("digits", clients=50, unseen=0.2, labeled=0.25)
    assert int(population.labeled[population.seen].sum()) == 10
    assert population.labeled[population.unseen].all(), "newcomers have labels; an evaluation hides them if it wants"
    assert population.test.labeled.all(), "scores need labels"
    assert torch.equal(population.validation.labeled, population.train.labeled)
    assert int(load("digits", clients=50, labeled=0.0).labeled.sum()) == 5
    assert int(load("digits", clients=50, labeled=0.001, unseen=0).labeled.sum()) == 1


def test_clients_that_came_without_labels() -> None:
    x = np.random.default_rng(0).normal(size=(60, 2))
    client = np.arange(60) // 6
    y = np.where(client % 2 == 0, np.arange(60) % 3, np.nan)
    population = from_arrays(x, y, client, unseen=0)
    assert population.labeled.tolist() == [True, False] * 5
    assert population.test.labeled.tolist() == [True, False] * 5
    assert population.histogram().sum(1).tolist() == [6, 0] * 5
    half = from_arrays(x, y, client, unseen=0, labeled=0.4)
    assert int(half.labeled.sum()) == 2, "40 % of the five that have labels"
    with pytest.raises(DataError, match=r"some clients have no labels, so rows cannot be dealt out anew"):
        from_arrays(x, y, client, partition="iid")


def test_histogram_counts_every_row_once() -> None:
    population = load("digits", partition="pathological:2", clients=30, validation=0.2)
    total = population.histogram()
    assert torch.equal(total.sum(1), population.sizes) and int(total.sum()) <= 1797
    assert (total > 0).sum(1).unique().tolist() == [2]
    parts = [population.histogram(part) for part in (population.train, population.validation, population.test)]
    assert torch.equal(parts[0] + parts[1] + parts[2], total)
    assert torch.equal(parts[2].sum(1), population.test.size)
    with pytest.raises(ValueError, match=r"'bernoulli' has no classes"):
        load("bernoulli:beta,clients=5").histogram()


def test_the_sources_own_test_rows_are_the_test() -> None:
    x, y, client = numbered(200, 10)
    from unalike.data import Source

    is_test = np.arange(200) % 5 == 0
    source = Source("own", "features", x, y.astype(np.int64), 3, client=client, is_test=is_test)
    for partition in ("natural", "iid", "dirichlet:1"):
        population = load(source, partition=partition, clients=10, validation=0.2, unseen=0)
        held = set().union(*rows_of(population, "test"))
        assert held == set(np.flatnonzero(is_test).tolist())
        assert not held & set().union(*rows_of(population, "train"), *rows_of(population, "validation"))
    redrawn = load(source, test=0.3)
    assert set().union(*rows_of(redrawn, "test")) != set(np.flatnonzero(is_test).tolist())
    with pytest.raises(DataError, match=r"digits has no test rows of its own"):
        load("digits", test="source")


def pooled(population: Population) -> Array:
    """The training rows of all seen clients in double precision: what no server ever has."""
    rows = [population.train.rows(int(client))[0].numpy() for client in population.seen]
    return np.concatenate(rows).astype(np.float64)


def test_training_clients_are_asked_for_the_scaling_of_inputs() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(5, 3, size=(400, 4))
    x[:, 1] += 1e4  # a feature far from 0, where squares lose their digits
    x[:, 3] = 7
    client = np.arange(400) // 20
    x[client == 4] += 1000  # a newcomer that must not change the scale
    population = from_arrays(x, None, client, unseen=[4])
    assert population.scaling == "asked" and population.train.shift is None, "no constant is computed at the server"
    federation = simulate(population)
    schema, rows = federation.roster.schema, pooled(population)
    assert schema.shift is not None and schema.scale is not None
    np.testing.assert_allclose(schema.shift.numpy(), rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(schema.scale[:3].numpy(), 1 / rows.std(0)[:3], rtol=1e-6)
    assert schema.scale[3] == 1, "a constant feature is only centred"
    assert {row["array"] for row in federation.transcript.rows()} == {"total", "rows", "square"}
    assert federation.ledger.worst(1e-5) == np.inf, "sums without noise are not private"
    again = simulate(population, schema=schema)
    assert again.roster.schema == schema and not again.transcript.rows() and again.serial == 0, "nobody is asked"
    assert population.using(schema).scaling == "public" and population.using(schema).train.scale is schema.scale
    raw = from_arrays(x, None, client, unseen=[4], normalize=False)
    assert raw.scaling == "none" and not simulate(raw).transcript.rows()
    assert torch.equal(raw.train.block(torch.tensor([0])).x[0], raw.train.rows(0)[0])


def test_scaling_is_the_same_for_any_shards_and_when_clients_drop_out() -> None:
    population = from_arrays(np.random.default_rng(1).normal(2, 5, (300, 3)), None, np.arange(300) % 30, unseen=3)
    one, four = (simulate(population, shards=shards).roster.schema for shards in (1, 4))
    assert one.shift is not None and four.shift is not None and one.scale is not None and four.scale is not None
    assert torch.allclose(one.shift, four.shift, rtol=1e-6) and torch.allclose(one.scale, four.scale, rtol=1e-6)
    lossy = simulate(population, drop=0.3).roster.schema
    assert lossy.scale is not None and torch.allclose(lossy.scale, one.scale, rtol=0.2), "other clients, other rows"


def test_image_scaling() -> None:
    population = load("digits", clients=10)
    x = population.train.block(torch.arange(10)).x
    assert population.train.x.dtype == torch.uint8 and x.dtype == torch.float32
    assert abs(float(x.mean())) < 0.05 and abs(float(x.std()) - 1) < 0.05
    own = np.random.default_rng(0).integers(0, 256, size=(50, 3, 6, 6), dtype=np.uint8)
    own[:, 1] //= 4
    population = from_arrays(own, None, np.arange(50) % 5, unseen=0, test=0)
    schema, rows = simulate(population).roster.schema, pooled(population)
    assert population.kind == "image" and schema.shift is not None and schema.scale is not None
    np.testing.assert_allclose(schema.shift.numpy(), rows.mean((0, 2, 3)).reshape(3, 1, 1), rtol=1e-6)
    np.testing.assert_allclose(schema.scale.numpy(), 1 / rows.std((0, 2, 3)).reshape(3, 1, 1), rtol=1e-6)


def test_rotation_turns_every_image_of_a_client_by_its_angle() -> None:
    plain = load("digits", partition="iid", clients=40, seed=3)
    turned = load("digits", partition="rotation", clients=40, seed=3)
    angles = turned.per_client["rotation"]
    assert set(angles.tolist()) == {0.0, 90.0, 180.0, 270.0}
    for i in range(40):
        expected = torch.rot90(plain.train.rows(i)[0], int(angles[i]) // 90, (-2, -1))
        assert torch.equal(turned.train.rows(i)[0], expected)
    groups = load("digits", partition="rotation:0+90+180+270,counts=3+6+6+6", clients=21)
    assert groups.per_client["rotation"].unique(return_counts=True)[1].tolist() == [3, 6, 6, 6]
    skewed = load("digits", partition="pathological:2", clients=20, rotate=(0, 45))
    assert set(skewed.per_client["rotation"].tolist()) == {0.0, 45.0} and skewed.train.x.dtype == torch.uint8
    with pytest.raises(DataError, match=r"counts must name how many of the 21 clients .* got \[3, 6\] \(sum 9\)"):
        load("digits", partition="rotation:0+90,counts=3+6", clients=21)
    with pytest.raises(DataError, match=r"rotation needs images"):
        load("bernoulli", rotate=(0, 90))


def test_a_concept_shift_moves_the_labels_of_a_cluster_on() -> None:
    plain = load("digits", partition="iid", clients=21, seed=3)
    shifted = load("digits", partition="concept-shift:counts=3+6+6+6", clients=21, seed=3)
    cluster = shifted.per_client["cluster"]
    assert cluster.bincount().tolist() == [3, 6, 6, 6]
    for part in ("train", "test"):
        for i in range(21):
            (x, y), (same, moved) = (getattr(one, part).rows(i) for one in (plain, shifted))
            assert torch.equal(x, same) and torch.equal(moved, (y + cluster[i]) % 10)
    with pytest.raises(DataError, match=r"concept-shift: counts must name how many of the 21 clients .* 4 clusters"):
        load("digits", partition="concept-shift:counts=3+6", clients=21)
    with pytest.raises(DataError, match=r"divides by class"):
        load("least-squares", partition="concept-shift", clients=4)


def test_rotation_by_any_angle_agrees_with_quarter_turns() -> None:
    image = np.zeros((1, 1, 9, 9), dtype=np.uint8)
    image[0, 0, 4, 7] = 200  # to the right of the middle
    assert rotate(image, 90)[0, 0, 1, 4] == 200, "counter-clockwise"
    nearly = rotate(image, 89.9)
    assert np.unravel_index(nearly.argmax(), nearly.shape) == (0, 0, 1, 4)
    wide = np.zeros((1, 1, 4, 6), dtype=np.float32)
    assert rotate(wide, 90).shape == wide.shape


def test_natural_clients_can_be_chosen_and_merged() -> None:
    x, y, client = numbered(300, 30)
    some = from_arrays(x, y, client, clients=7, unseen=0, test=0)
    chosen = [int(some.train.name(i)) for i in range(7)]
    assert len(some) == 7 and [int(n) for n in some.sizes] == [int((client == c).sum()) for c in chosen]
    merged = from_arrays(x, y, client, partition="natural:3", unseen=0, test=0)
    assert len(merged) == 10 and int(merged.sizes.sum()) == 300
    for i, rows in enumerate(rows_of(merged, "train")):
        assert {str(c) for c in client[sorted(rows)]} == set(merged.train.name(i).split("+"))
    with pytest.raises(DataError, match=r"30 natural clients, which gives at most 10 in groups of 3; 11 were"):
        from_arrays(x, y, client, partition="natural:3", clients=11)
    with pytest.raises(DataError, match=r"digits has no client ids; use a partition such as 'iid'"):
        load("digits", partition="natural")


def test_true_parameters_follow_their_client() -> None:
    whole = load("gaussian-means:clients=40,points=200,sigma_x=0.01")
    some = load("gaussian-means:clients=40,points=200,sigma_x=0.01", clients=9, unseen=3)
    for population in (whole, some):
        for i in range(len(population)):
            assert float(population.train.rows(i)[0].mean()) == pytest.approx(
                float(population.per_client["theta"][i]), abs=0.01
            )
    assert len(some) == 9


def test_arrays_are_shared_when_nothing_has_to_move() -> None:
    x = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    client = np.repeat(np.arange(10), 10)
    shared = from_arrays(x, None, client, test=0)
    assert shared.train.x.data_ptr() == x.ctypes.data
    before = x.copy()
    copied = from_arrays(x, None, client)
    assert copied.train.x.data_ptr() != x.ctypes.data and (x == before).all(), "the caller's array is left alone"
    given_up = from_arrays(x, None, client, overwrite=True)
    assert given_up.train.x.data_ptr() == x.ctypes.data and (x != before).any()
    assert torch.equal(given_up.train.x, copied.train.x)


def test_unsorted_arrays_give_the_same_clients() -> None:
    x, y, client = numbered(100, 7)
    order = np.argsort(client, kind="stable")
    mixed = from_arrays(x, y, client, test=0, unseen=0)
    grouped = from_arrays(x[order], y[order], client[order], test=0, unseen=0)
    assert torch.equal(mixed.train.x, grouped.train.x) and torch.equal(mixed.train.size, grouped.train.size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "dirichle"}, r"no partition is called 'dirichle'; did you mean 'dirichlet'\?"),
        ({"partition": "dirichlet:beta=1"}, "partition 'dirichlet' has no option 'beta'; it has alpha"),
        ({"partition": "dirichlet:1,alpha=2"}, "partition 'dirichlet': option 'alpha' is given twice"),
        ({"partition": "dirichlet:,"}, "cannot read 'dirichlet:,'"),
        ({"partition": "mdm"}, "partition 'mdm' needs 'file'"),
        ({"partition": lambda labels, clients, rng: [np.array([0, 0])]}, "give each row index at most once"),
        ({"test": 1.0}, "test must be a fraction of a client's rows, at least 0 and below 1, got 1.0"),
        ({"validation": -0.1}, "validation must be a fraction"),
        ({"test": 0.6, "validation": 0.4}, "together must leave rows to train on"),
        ({"unseen": 1.0}, "unseen must be a fraction below 1 or a number of clients below the 44"),
        ({"unseen": 44}, "unseen must be a fraction below 1 or a number of clients below the 44"),
        ({"unseen": float("nan")}, "unseen must be a fraction below 1 or a number of clients below the 44 .* got nan"),
        ({"unseen": [1, 1]}, "unseen must list different positions below 44"),
        ({"unseen": True}, "not a truth value"),
        ({"labeled": 1.5}, "labeled must be the fraction of training clients with labels, between 0 and 1, got 1.5"),
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"clients": 2000}, "1797 rows cannot give each of 2000 clients 1"),
    ],
)
def test_wrong_arguments_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load("digits", **options)


def test_a_partition_may_be_a_function() -> None:
    def halves(labels: Any, clients: int, rng: np.random.Generator) -> list[Any]:
        return np.array_split(np.argsort(labels, kind="stable"), clients)

    population = load("digits", partition=halves, clients=2, unseen=0, test=0)
    assert population.histogram()[0, 9] == 0 and population.histogram()[1, 0] == 0


def test_class_partitions_need_classes() -> None:
    with pytest.raises(DataError, match=r"bernoulli has no labels; partition 'dirichlet' divides by class"):
        load("bernoulli", partition="dirichlet:1")
    with pytest.raises(DataError, match=r"least-squares has numbers as targets, not classes"):
        load("least-squares:clients=5,points=10,dim=3", partition="pathological:2")
    assert len(load("bernoulli", partition="size-skew", clients=10)) == 10


def test_a_hundred_thousand_clients_are_built_without_a_loop_over_them() -> None:
    x = np.zeros((300_000, 2), dtype=np.float32)
    x[:, 0] = np.arange(300_000)
    population = from_arrays(x, None, np.repeat(np.arange(100_000), 3))
    assert len(population) == 100_000 and population.train.names is None
    assert population.train.size.unique().tolist() == [2] and population.test.size.unique().tolist() == [1]
    owner = population.test.x[population.test.start, 0].long() // 3
    assert torch.equal(owner, torch.arange(100_000))


def test_it_says_what_it_is() -> None:
    text = repr(load("digits", clients=20))
    assert text.startswith(
        "Population('digits': 18 seen and 2 unseen clients, 1,797 rows of image (1, 8, 8), 10 classes"
    )
    assert "numeric targets" in repr(load("least-squares:clients=5,points=10,dim=3"))
    regression = load("least-squares:clients=5,points=10,dim=3")
    assert load("digits").schema.outputs == 10 and regression.schema.outputs == 1


def test_a_population_knows_how_its_rows_were_dealt_out() -> None:
    assert load("digits", clients=5).partition == "iid"
    assert load("digits", partition="pathological:2", clients=5).partition == "pathological:2"
    assert load("least-squares:clients=5,points=10,dim=3").partition == "natural"


def test_a_pytorch_data_set_with_client_ids() -> None:
    x, y = torch.arange(24.0).view(12, 2), torch.arange(12) % 2
    for data in (torch.utils.data.TensorDataset(x, y), [(row, int(label)) for row, label in zip(x, y, strict=True)]):
        population = from_dataset(data, [0, 1, 2] * 4, test=0, unseen=0)
        rows, labels = population.train.rows(1)
        assert rows.tolist() == x[1::3].tolist() and labels is not None and labels.tolist() == y[1::3].tolist()
    with pytest.raises(DataError, match=r"expected rows that are pairs \(x, y\)"):
        from_dataset([(1, 2, 3)], [0])
