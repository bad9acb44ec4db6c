"""All of analytics by the contract: any number of shards, clients in another process who have built the algorithm from
its settings themselves, and no row of data at the server."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.analytics import algorithms
from tests.analytics.algorithms import CASES, DROP, HISTOGRAMS, MEANS, Found, drop_of, method_of, outcome, seed_of
from tests.analytics.test_estimation import uneven
from tests.analytics.test_estimation_models import regressions
from tests.analytics.test_mdm import population
from tests.runtime.pipe import Pipe, Remote, crossed, unopened
from unalike import simulate
from unalike.analytics.estimation.samples import counts_clients
from unalike.analytics.mdm.counts import histogram_clients
from unalike.core.client import Clients
from unalike.core.method import tasks_of
from unalike.core.secure import EXCHANGES

SIZES = [3, 8, 5, 4, 9, 6, 7, 5, 6, 4]


@functools.cache
def stores() -> dict[str, Clients]:
    random = np.random.default_rng(0)
    sizes = torch.tensor([12, 20, 7, 30, 23, 9, 16, 11])
    points = MEANS[random.integers(4, size=128)] + random.standard_normal((128, 6))
    trials = random.integers(2, 9, 12)
    return {
        "points": Clients.from_sizes(torch.from_numpy(points.astype(np.float32)), None, sizes),
        "histograms": histogram_clients(population("medium-2", HISTOGRAMS)[0], largest=100),
        "gaussian": uneven(clients=12, dim=4),
        "flips": counts_clients(random.binomial(trials, random.beta(2, 3, 12)), trials),
        "linear": regressions(SIZES, dim=4),
        "logistic": regressions(SIZES, dim=4, classes=True),
    }


def found(name: str, **how: Any) -> Found:
    """What comes of it in this process."""
    case = method_of(name)
    return outcome(case, simulate(stores()[case.clients], seed_of(name), block=8, threads=1, drop=drop_of(name), **how))


def assert_alike(one: Found, other: Found) -> None:
    assert one.keys() == other.keys()
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-5)


def assert_same_bits(one: Found, other: Found) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("name", list(CASES))
def test_any_number_of_shards_finds_the_same(name: str) -> None:
    one, two, five = (found(name, shards=count) for count in (1, 2, 5))
    assert_alike(two, one)
    assert_alike(five, one)
    assert_same_bits(two, found(name, shards=2, strict=True))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("analytics") / "rows.npz"
    algorithms.write(file, stores())
    return file


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    made = Remote()
    yield made
    made.close()


def check_conforms(name: str, data: Path, remote: Remote) -> None:
    """Its clients agreed to a closed program: what they let out, clip and account follows from their own settings.

    The server may not open the data, and no row, kept array or raw array of a private release is among what came.
    """
    expected = found(name)
    with unopened(data):
        federation = algorithms.federation([remote], name, data)
        came = outcome(method_of(name), federation)
    assert_alike(came, expected)
    own = crossed([remote], algorithms.SHOWN.get(name))
    assert not own, f"{', '.join(own)} has crossed"
    if "secure" in name and drop_of(name):
        assert isinstance(federation.runtime, Pipe)
        assert all(federation.runtime.failed[exchange.name] for exchange in EXCHANGES), "an exchange lost nobody"


@pytest.mark.parametrize("name", [name + DROP for name in CASES])
def test_another_process_finds_the_same_and_the_server_sees_no_row(name: str, data: Path, remote: Remote) -> None:
    check_conforms(name, data, remote)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("reads", "no attribute 'parts'"), ("sends", "a row of a client"), ("bares", "raw mean of a client")],
)
def test_an_algorithm_that_shows_what_is_a_clients_own_is_found_out(
    name: str, wrong: str, data: Path, remote: Remote
) -> None:
    found(name)  # in this process nothing stands against it
    with pytest.raises((AssertionError, AttributeError), match=wrong):
        check_conforms(name, data, remote)


def test_the_noise_is_a_function_of_the_settings_alone() -> None:
    """Two that were built apart declare equal releases, and a shard that has only the roster could have built both."""
    for case in CASES.values():
        one, other = case.build(), case.build()
        for mine, theirs in zip(tasks_of(one), tasks_of(other), strict=True):
            declared = [(type(release), vars(release)) for release in mine.releases()]
            assert declared == [(type(release), vars(release)) for release in theirs.releases()], mine.name
