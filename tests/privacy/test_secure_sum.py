"""Secure sums: exact on the grid, uniform on the wire, open after some drop-outs and closed after too many."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
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
    SecureSession,
    SecureSumAborted,
    SystemDraws,
)
from unalike.privacy.masks import shamir

SECRET = bytes(range(100, 132))


def over_the_wire(message: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in decode(encode(message)).items() if isinstance(value, Tensor)}


def secure_sum(
    session: SecureSession,
    vectors: dict[int, Tensor],
    never_share: Iterable[int] = (),
    never_send: Iterable[int] = (),
    never_confirm: Iterable[int] = (),
    never_help: Iterable[int] = (),
) -> Tensor:
    """The whole protocol; every client is rebuilt from what it kept between two exchanges."""
    server = SecureServer(session)
    kept: dict[int, Tensor] = {}

    def client(identity: int) -> SecureClient:
        return SecureClient.from_state(SecureSession.from_message(session.message()), identity, kept[identity])

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
    words = {}
    for identity in set(survivors["survivors"].tolist()) - set(never_confirm):
        one = client(identity)
        words[identity] = over_the_wire(one.confirm(survivors))
        kept[identity] = one.state()
    inboxes = server.confirmations(words)
    helpers = set(words) - set(never_help)
    return server.open({who: over_the_wire(client(who).unmask(survivors, inboxes[who])) for who in helpers})


def vectors(identities: Iterable[int], length: int = 50) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {identity: 2 * torch.rand(length, generator=generator) - 1 for identity in identities}


def grid_sum(session: SecureSession, values: Iterable[Tensor]) -> Tensor:
    whole = sum(torch.from_numpy(session.ring.encode(value).view(np.int32).astype(np.int64)) for value in values)
    assert isinstance(whole, Tensor)
    return whole.double() * session.ring.step


@pytest.mark.parametrize(("neighbours", "never_send"), [(None, [2, 23]), (10, [2])])
def test_the_sum_is_exact_on_the_grid_with_drop_outs_at_every_exchange(
    neighbours: int | None, never_send: list[int]
) -> None:
    session = SecureSession((2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41), 50, 1.0, neighbours=neighbours)
    given_vectors = vectors(session.identities)
    total = secure_sum(
        session, given_vectors, never_share=[5], never_send=never_send, never_confirm=[29], never_help=[31]
    )
    there = [value for identity, value in given_vectors.items() if identity not in (5, *never_send)]
    assert torch.equal(total, grid_sum(session, there))
    exact = torch.stack(there).double().sum(0)
    assert float((total - exact).abs().max()) <= len(there) * session.ring.step / 2


def test_nobody_missing_and_extreme_values_do_not_overflow() -> None:
    session = SecureSession(tuple(range(8)), 3, 2.5)
    total = secure_sum(session, {identity: torch.tensor([2.5, -2.5, 2.5]) for identity in range(8)})
    torch.testing.assert_close(total, torch.tensor([20.0, -20.0, 20.0], dtype=torch.float64), rtol=1e-9, atol=0.0)


def test_a_coordinate_beyond_the_bound_is_refused_and_not_clamped() -> None:
    session = SecureSession(tuple(range(8)), 3, 2.5)
    with pytest.raises(ValueError, match=r"beyond the bound of 2\.5.*clip it before"):
        secure_sum(session, {identity: torch.tensor([0.0, 0.0, 2.6]) for identity in range(8)})


@settings(max_examples=10)
@given(st.integers(4, 9), st.data())
def test_any_drop_outs_within_the_threshold_are_tolerated_and_any_beyond_abort(count: int, data: st.DataObject) -> None:
    session = SecureSession(tuple(range(count)), 4, 1.0)
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
    session = SecureSession(tuple(range(7)), 4, 1.0)

    def never(*_: object) -> bytes:
        raise AssertionError("a secret was put together")

    monkeypatch.setattr(shamir, "join", never)
    with pytest.raises(SecureSumAborted, match=r"only 3 .* 4 are needed"):
        secure_sum(session, vectors(range(7), 4), never_help=[0, 1, 2])


def masked_message(value: Tensor, session: SecureSession) -> Tensor:
    clients = {identity: SecureClient(session, identity) for identity in session.identities}
    server = SecureServer(session)
    keys = server.keys({identity: client.advertise() for identity, client in clients.items()})
    letters = server.letters({identity: client.share(keys[identity]) for identity, client in clients.items()})
    return clients[0].mask(value, letters[0])["masked"]


def test_a_masked_message_is_uniform_whatever_is_in_it() -> None:
    session = SecureSession((0, 1, 2), 200_000, 1.0)
    values = torch.full((session.length,), 0.5)
    residues = masked_message(values, session).numpy().view(np.uint32)
    assert stats.kstest(residues / 2**32, "uniform").pvalue > 1e-6
    low_bytes = np.bincount(residues & 0xFF, minlength=256)
    assert stats.chisquare(low_bytes).pvalue > 1e-6
    assert not np.array_equal(residues, masked_message(values, session).numpy().view(np.uint32))


def test_a_client_gives_one_share_of_each_peer_and_answers_once() -> None:
    session = SecureSession(tuple(range(5)), 2, 1.0)
    clients = {identity: SecureClient(session, identity) for identity in range(5)}
    server = SecureServer(session)
    keys = server.keys({identity: client.advertise() for identity, client in clients.items()})
    with pytest.raises(ProtocolError, match="client 0 is asked to confirm, but its next step is share"):
        clients[0].confirm({"survivors": torch.arange(5)})
    letters = server.letters({identity: client.share(keys[identity]) for identity, client in clients.items()})
    masked = {identity: client.mask(torch.zeros(2), letters[identity]) for identity, client in clients.items()}
    with pytest.raises(SecureSumAborted, match="2 peers survived, 3 are needed; no share is given"):
        SecureClient.from_state(session, 0, clients[0].state()).confirm({"survivors": torch.tensor([0, 1, 2])})
    with pytest.raises(ProtocolError, match="is not among the survivors"):
        SecureClient.from_state(session, 0, clients[0].state()).confirm({"survivors": torch.tensor([1, 2, 3, 4])})
    left = {"survivors": torch.tensor([0, 1, 2, 3])}
    inbox = server.confirmations({identity: clients[identity].confirm(left) for identity in range(4)})[0]
    answer = clients[0].unmask(left, inbox)
    assert answer["owners"].tolist() == [1, 2, 3, 4]
    assert answer["shares"].shape == (4, shamir.SHARE_BYTES)
    with pytest.raises(ProtocolError, match="nothing more"):
        clients[0].unmask(left, inbox)
    server.receive(1, masked[1])
    with pytest.raises(ProtocolError, match="came twice"):
        server.receive(1, masked[1])
    with pytest.raises(ProtocolError, match="expected 2 int32 numbers from client 2"):
        server.receive(2, {"masked": torch.zeros(3, dtype=torch.int32)})


class Adversary:
    """A server that runs the protocol up to the masked vectors, and then does as the test likes."""

    def __init__(self, session: SecureSession, least: int = 3) -> None:
        self.session = session
        self.clients = {identity: SecureClient(session, identity, least=least) for identity in session.identities}
        self.server = SecureServer(session)
        keys = self.server.keys({who: one.advertise() for who, one in self.clients.items()})
        self.shared = {who: one.share(keys[who]) for who, one in self.clients.items()}

    def mask(self) -> None:
        letters = self.server.letters(self.shared)
        for who, one in self.clients.items():
            self.server.receive(who, one.mask(torch.zeros(self.session.length), letters[who]))

    def unmask(self) -> dict[int, dict[str, Tensor]]:
        left = self.server.survivors()
        words = self.server.confirmations({who: one.confirm(left) for who, one in self.clients.items()})
        return {who: one.unmask(left, words[who]) for who, one in self.clients.items()}


def test_an_altered_letter_is_found_by_its_receiver() -> None:
    adversary = Adversary(SecureSession(tuple(range(5)), 2, 1.0))
    adversary.shared[0]["sealed"][3, 20] ^= 1
    adversary.mask()
    with pytest.raises(ProtocolError, match="letter of client 0 to client 4 was altered"):
        adversary.unmask()


def test_a_holder_that_alters_a_share_is_named_and_the_sum_is_opened_without_it() -> None:
    adversary = Adversary(SecureSession(tuple(range(5)), 2, 1.0))
    adversary.mask()
    answers = adversary.unmask()
    answers[3]["shares"][0, -1] ^= 1
    assert not adversary.server.open(answers).any()
    assert adversary.server.accused == {3: "altered its share of client 0's secret"}


def test_an_owner_that_shares_something_else_than_it_promised_is_named() -> None:
    adversary = Adversary(SecureSession(tuple(range(5)), 2, 1.0))
    adversary.shared[2]["share_digests"] ^= 1
    adversary.mask()
    answers = adversary.unmask()
    with pytest.raises(SecureSumAborted, match=r"peers of client 2 .*; client 2 gave its peers other shares"):
        adversary.server.open(answers)


def test_a_server_that_tells_clients_of_different_survivors_gets_no_share() -> None:
    """To 0, 1 and 2 it says that client 5 dropped out, to the others that it did not: with both answers it would have
    both secrets of client 5, and so its vector.
    """
    adversary = Adversary(SecureSession(tuple(range(6)), 2, 1.0))
    adversary.mask()
    stories = [{"survivors": torch.tensor([0, 1, 2, 3, 4])}] * 3 + [{"survivors": torch.arange(6)}] * 3
    told = dict(enumerate(stories))
    said = {who: one.confirm(told[who]) for who, one in adversary.clients.items()}
    for who, one in adversary.clients.items():
        words = {
            peer: word
            for peer, one_said in said.items()
            for to, word in zip(one_said["to"].tolist(), one_said["confirmations"], strict=True)
            if to == who
        }
        inbox = {"senders": torch.tensor(list(words)), "confirmations": torch.stack(list(words.values()))}
        with pytest.raises(SecureSumAborted, match=f"2 peers were told of the same survivors as client {who}"):
            one.unmask(told[who], inbox)


def test_survivors_cannot_change_after_they_were_confirmed() -> None:
    adversary = Adversary(SecureSession(tuple(range(5)), 2, 1.0))
    adversary.mask()
    left = {"survivors": torch.arange(5)}
    words = adversary.server.confirmations({who: one.confirm(left) for who, one in adversary.clients.items()})
    with pytest.raises(ProtocolError, match="told of other survivors than it confirmed"):
        adversary.clients[0].unmask({"survivors": torch.tensor([0, 1, 2, 3])}, words[0])


def test_invented_drop_outs_do_not_get_below_the_least_number_of_clients() -> None:
    session = SecureSession(tuple(range(8)), 2, 1.0, neighbours=4)
    adversary = Adversary(session, least=7)
    adversary.mask()
    few = torch.tensor(sorted({0, *session.peers(0)}))
    with pytest.raises(SecureSumAborted, match=f"{len(few)} clients survived, 7 are needed"):
        SecureClient.from_state(session, 0, adversary.clients[0].state()).confirm({"survivors": few})


def test_keys_of_a_server_in_the_place_of_a_peer_are_refused_where_keys_are_pinned() -> None:
    session = SecureSession(tuple(range(4)), 2, 1.0)
    signers = {who: Ed25519PrivateKey.generate() for who in range(4)}
    pinned = {who: one.public_key().public_bytes_raw() for who, one in signers.items()}
    clients = {who: SecureClient(session, who, signer=signers[who], pinned=pinned) for who in range(4)}
    server = SecureServer(session)
    advertised = {who: one.advertise() for who, one in clients.items()}
    assert clients[0].share(server.keys(advertised)[0])["to"].tolist() == [1, 2, 3]
    advertised[2] = SecureClient(session, 2).advertise()  # the server's own keys, under the name of client 2
    with pytest.raises(ProtocolError, match="keys of client 2 are not signed by the key that client 1 knows"):
        clients[1].share(server.keys(advertised)[1])
    other = SecureSession(tuple(range(4)), 2, 1.0)
    advertised[2] = SecureClient(other, 2, signer=signers[2]).advertise()  # signed, but for another session
    with pytest.raises(ProtocolError, match="keys of client 2 are not signed"):
        clients[3].share(server.keys(advertised)[3])


@pytest.mark.parametrize(
    "change",
    [
        {"planned": (3, 9)}, {"noise": 0.25}, {"bound": 2.0}, {"purpose": "another ask"}, {"length": 3},
        {"identities": (0, 1, 2, 3, 4, 5)}, {"neighbours": 2}, {"number": bytes(16)},
    ],
)  # fmt: skip
def test_a_client_goes_on_in_the_very_session_that_it_began(change: dict[str, Any]) -> None:
    session = SecureSession(tuple(range(5)), 2, 1.0, purpose="ask 1")
    client = SecureClient(session, 0)
    client.advertise()
    assert SecureSession.from_message(over_the_wire(session.message())) == session
    other = SecureSession.from_message(over_the_wire(replace(session, **change).message()))
    with pytest.raises(ProtocolError, match="a session that it has not begun"):
        SecureClient.from_state(other, 0, client.state())


def test_noise_shares_of_the_survivors_carry_at_least_what_the_ledger_was_told() -> None:
    """Clients add noise before masking, enough for the fewest who may be left; the sum's noise is then never less."""
    session = SecureSession(tuple(range(6)), 20_000, 40.0)
    whole, fewest = Gaussian(1.5), session.needed + 1
    clip = 1.0
    sensitivity = clip + 0.5 * session.ring.step * session.length**0.5  # with what rounding adds
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
    session = SecureSession(tuple(range(50)), 1, 1.0, neighbours=10)
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
        SecureSession(**{"identities": tuple(range(5)), "length": 4, "bound": 1.0, **settings_given})  # type: ignore[arg-type]


def test_a_vector_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        Ring(1.0, 3).encode(torch.tensor([float("nan")]))
