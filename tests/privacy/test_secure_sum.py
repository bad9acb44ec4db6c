"""Secure sums: exact on the grid, uniform on the wire, open after some drop-outs and closed after too many."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import dp_accounting
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from unalike.core.wire import decode, encode
from unalike.privacy import (
    Everyone,
    Gaussian,
    Ledger,
    ProtocolError,
    Ring,
    SecureClient,
    SecureServer,
    SecureSumAborted,
    Session,
    SystemDraws,
)
from unalike.privacy.masks import shamir

SECRET = bytes(range(100, 132))


def over_the_wire(message: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in decode(encode(message)).items() if isinstance(value, Tensor)}


def secure_sum(
    session: Session,
    vectors: dict[int, Tensor],
    never_share: Iterable[int] = (),
    never_send: Iterable[int] = (),
    never_help: Iterable[int] = (),
) -> Tensor:
    """The whole protocol; every client is rebuilt from what it kept between two exchanges."""
    server = SecureServer(session)
    kept: dict[int, dict[str, Tensor]] = {}

    def client(identity: int) -> SecureClient:
        return SecureClient.from_state(Session.from_message(session.message()), identity, over_the_wire(kept[identity]))

    advertised = {}
    for identity in vectors:
        new = SecureClient(session, identity)
        advertised[identity] = over_the_wire(new.advertise())
        kept[identity] = new.state()
    keys = server.keys(advertised)
    shared = {}
    for identity in set(vectors) - set(never_share):
        one = client(identity)
        shared[identity] = over_the_wire(one.share(keys[identity]))
        kept[identity] = one.state()
    letters = server.letters(shared)
    for identity in set(shared) - set(never_send):
        one = client(identity)
        server.receive(identity, over_the_wire(one.mask(vectors[identity], letters[identity])))
        kept[identity] = one.state()
    survivors = server.survivors()
    helpers = set(survivors["survivors"].tolist()) - set(never_help)
    return server.open({identity: over_the_wire(client(identity).unmask(survivors)) for identity in helpers})


def vectors(identities: Iterable[int], length: int = 50) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {identity: 2 * torch.rand(length, generator=generator) - 1 for identity in identities}


def grid_sum(session: Session, values: Iterable[Tensor]) -> Tensor:
    whole = sum(torch.from_numpy(session.ring.encode(value).view(np.int32).astype(np.int64)) for value in values)
    assert isinstance(whole, Tensor)
    return whole.double() * session.ring.step


@pytest.mark.parametrize(("neighbours", "never_send"), [(None, [2, 23]), (8, [2])])
def test_the_sum_is_exact_on_the_grid_with_drop_outs_at_every_exchange(
    neighbours: int | None, never_send: list[int]
) -> None:
    session = Session((2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31), 50, 1.0, neighbours=neighbours)
    given_vectors = vectors(session.identities)
    total = secure_sum(session, given_vectors, never_share=[5], never_send=never_send, never_help=[31])
    there = [value for identity, value in given_vectors.items() if identity not in (5, *never_send)]
    assert torch.equal(total, grid_sum(session, there))
    exact = torch.stack(there).double().sum(0)
    assert float((total - exact).abs().max()) <= len(there) * session.ring.step / 2


def test_nobody_missing_and_extreme_values_do_not_overflow() -> None:
    session = Session(tuple(range(8)), 3, 2.5)
    total = secure_sum(session, {identity: torch.tensor([2.5, -2.5, 99.0]) for identity in range(8)})
    torch.testing.assert_close(total, torch.tensor([20.0, -20.0, 20.0], dtype=torch.float64), rtol=1e-9, atol=0.0)


@settings(max_examples=10)
@given(st.integers(4, 9), st.data())
def test_any_drop_outs_within_the_threshold_are_tolerated_and_any_beyond_abort(count: int, data: st.DataObject) -> None:
    session = Session(tuple(range(count)), 4, 1.0)
    missing = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    given_vectors = vectors(range(count), 4)
    # A missing client's key is put together by all the survivors, a survivor's seed by the other survivors.
    holders = count - len(missing) - 1 if len(missing) < count else 0
    if holders >= session.needed:
        total = secure_sum(session, given_vectors, never_send=missing)
        assert torch.equal(total, grid_sum(session, [v for i, v in given_vectors.items() if i not in missing]))
    else:
        with pytest.raises(SecureSumAborted, match="are needed"):
            secure_sum(session, given_vectors, never_send=missing)


def test_too_few_helpers_at_the_end_abort_before_any_secret_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(tuple(range(7)), 4, 1.0)

    def never(*_: object) -> bytes:
        raise AssertionError("a secret was put together")

    monkeypatch.setattr(shamir, "join", never)
    with pytest.raises(SecureSumAborted, match=r"only 3 .* 4 are needed"):
        secure_sum(session, vectors(range(7), 4), never_help=[0, 1, 2])


def masked_message(value: Tensor, session: Session) -> Tensor:
    clients = {identity: SecureClient(session, identity) for identity in session.identities}
    server = SecureServer(session)
    keys = server.keys({identity: client.advertise() for identity, client in clients.items()})
    letters = server.letters({identity: client.share(keys[identity]) for identity, client in clients.items()})
    return clients[0].mask(value, letters[0])["masked"]


def test_a_masked_message_is_uniform_whatever_is_in_it() -> None:
    session = Session((0, 1, 2), 200_000, 1.0)
    values = torch.full((session.length,), 0.5)
    residues = masked_message(values, session).numpy().view(np.uint32)
    assert stats.kstest(residues / 2**32, "uniform").pvalue > 1e-6
    low_bytes = np.bincount(residues & 0xFF, minlength=256)
    assert stats.chisquare(low_bytes).pvalue > 1e-6
    assert not np.array_equal(residues, masked_message(values, session).numpy().view(np.uint32))


def test_a_client_gives_one_share_of_each_peer_and_answers_once() -> None:
    session = Session(tuple(range(5)), 2, 1.0)
    clients = {identity: SecureClient(session, identity) for identity in range(5)}
    server = SecureServer(session)
    keys = server.keys({identity: client.advertise() for identity, client in clients.items()})
    with pytest.raises(ProtocolError, match="client 0 is asked to unmask, but its next step is share"):
        clients[0].unmask({"survivors": torch.arange(5)})
    letters = server.letters({identity: client.share(keys[identity]) for identity, client in clients.items()})
    masked = {identity: client.mask(torch.zeros(2), letters[identity]) for identity, client in clients.items()}
    with pytest.raises(SecureSumAborted, match="2 peers survived, 3 are needed; no share is given"):
        SecureClient.from_state(session, 0, clients[0].state()).unmask({"survivors": torch.tensor([0, 1, 2])})
    with pytest.raises(ProtocolError, match="is not among the survivors"):
        SecureClient.from_state(session, 0, clients[0].state()).unmask({"survivors": torch.tensor([1, 2, 3, 4])})
    answer = clients[0].unmask({"survivors": torch.tensor([0, 1, 2, 3])})
    assert answer["owners"].tolist() == [1, 2, 3, 4]
    assert answer["shares"].shape == (4, shamir.SHARE_BYTES)
    with pytest.raises(ProtocolError, match="nothing more"):
        clients[0].unmask({"survivors": torch.arange(5)})
    server.receive(1, masked[1])
    with pytest.raises(ProtocolError, match="came twice"):
        server.receive(1, masked[1])
    with pytest.raises(ProtocolError, match="expected 2 int32 numbers from client 2"):
        server.receive(2, {"masked": torch.zeros(3, dtype=torch.int32)})


def test_an_altered_letter_or_share_closes_the_sum() -> None:
    session = Session(tuple(range(5)), 2, 1.0)
    clients = {identity: SecureClient(session, identity) for identity in range(5)}
    server = SecureServer(session)
    keys = server.keys({identity: client.advertise() for identity, client in clients.items()})
    letters = server.letters({identity: client.share(keys[identity]) for identity, client in clients.items()})
    letters[4]["letters"][0, 20] ^= 1
    for identity, client in clients.items():
        server.receive(identity, client.mask(torch.zeros(2), letters[identity]))
    survivors = server.survivors()
    answers = {identity: clients[identity].unmask(survivors) for identity in range(4)}
    with pytest.raises(ProtocolError, match="letter of client 0 to client 4 was altered"):
        clients[4].unmask(survivors)
    answers[0]["shares"][0, -1] ^= 1
    with pytest.raises((SecureSumAborted, ValueError), match="altered"):
        server.open(answers)


def test_noise_shares_of_the_survivors_carry_at_least_what_the_ledger_was_told() -> None:
    """Clients add noise before masking, enough for the fewest who may be left; the sum's noise is then never less."""
    session = Session(tuple(range(6)), 20_000, 40.0)
    whole, fewest = Gaussian(1.5), session.needed + 1
    clip = 1.0
    sensitivity = session.ring.sensitivity(clip, session.length)
    assert clip < sensitivity < clip + 1e-3
    noisy = {
        identity: whole.share(fewest).add(torch.zeros(session.length), sensitivity, SystemDraws())
        for identity in session.identities
    }
    total = secure_sum(session, noisy, never_send=[1, 4])
    assert float(total.std()) == pytest.approx(whole.std(sensitivity), rel=0.03)
    ledger = Ledger()
    ledger.record(whole.event(), sampling=Everyone())
    measured = dp_accounting.get_epsilon_gaussian(float(total.std()) / sensitivity, 1e-5)
    assert ledger.epsilon(1e-5) == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize("threshold", [1, 2, 5, 8])
def test_any_threshold_shares_give_the_secret(threshold: int) -> None:
    shares = shamir.split(SECRET, threshold, range(1, 9))
    for holders in itertools.islice(itertools.combinations(shares, threshold), 30):
        assert shamir.join({point: shares[point] for point in holders}, threshold) == SECRET
    assert shamir.join(shares, threshold) == SECRET


def test_one_share_too_few_fits_every_secret() -> None:
    """Whatever secret one supposes, some polynomial through it has the t − 1 known shares: they exclude nothing."""
    shares = shamir.split(SECRET, 3, [1, 2, 3])
    known = {point: int.from_bytes(shares[point], "big") for point in (1, 2)}
    for supposed in (bytes(32), bytes([255] * 32), SECRET):
        at_three = 3 * known[2] - 3 * known[1] + int.from_bytes(supposed, "big")  # the parabola through 0, 1, 2 at 3
        third = (at_three % shamir.PRIME).to_bytes(shamir.SHARE_BYTES, "big")
        assert shamir.join({1: shares[1], 2: shares[2], 3: third}, 3) == supposed
    with pytest.raises(shamir.NotEnoughShares, match="3 shares are needed, 2 came"):
        shamir.join({1: shares[1], 2: shares[2]}, 3)


def test_a_single_share_is_uniform_in_the_field() -> None:
    draws = [int.from_bytes(shamir.split(SECRET, 2, [1, 2])[1], "big") / shamir.PRIME for _ in range(4000)]
    assert stats.kstest(draws, "uniform").pvalue > 1e-6


@given(st.integers(2, 5000), st.floats(1e-3, 1e3), st.data())
def test_the_ring_neither_overflows_nor_errs_by_more_than_half_a_step(
    clients: int, bound: float, data: st.DataObject
) -> None:
    ring = Ring(bound, clients)
    assert clients * ring.largest < 2**31
    value = torch.tensor(data.draw(st.lists(st.floats(-bound, bound), min_size=1, max_size=5)), dtype=torch.float64)
    assert float((ring.decode(ring.encode(value)) - value).abs().max()) <= 0.5001 * ring.step


def test_neighbours_are_mutual() -> None:
    session = Session(tuple(range(50)), 1, 1.0, neighbours=10)
    for one in range(50):
        peers = session.peers(one)
        assert len(set(peers)) == 10
        assert all(one in session.peers(peer) for peer in peers)


@pytest.mark.parametrize(
    ("settings_given", "message"),
    [
        ({"identities": (1, 2)}, "at least 3 clients, got 2"),
        ({"identities": (1, 1, 2)}, "distinct"),
        ({"neighbours": 3}, "neighbours must be even"),
        ({"length": 0}, "length must be a whole number of at least 1"),
        ({"bound": 0.0}, "bound must be"),
    ],
)
def test_nonsense_is_refused(settings_given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Session(**{"identities": tuple(range(5)), "length": 4, "bound": 1.0, **settings_given})  # type: ignore[arg-type]


def test_a_vector_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        Ring(1.0, 3).encode(torch.tensor([float("nan")]))
