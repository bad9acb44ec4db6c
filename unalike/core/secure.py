"""Secure sums on top of ``ask``: the four exchanges of ``unalike.privacy.masks.protocol`` as tasks, so on any runtime.

A release with ``secure=True`` first has every client run the task, clip its array and keep it back. Then come the
exchanges *advertise*, *share*, *mask* and *unmask* among those who did. A client that drops out before *unmask* is left
out of the sum; if more drop out than the threshold allows, the sum stays closed and nothing is revealed.

The array is put on a grid of whole numbers before it is masked; a client's array moves by at most half a step in each
coordinate, and noise on the opened sum is scaled to the clip plus that. Where nobody is trusted, each client adds a
share of the noise before it masks: so large that the fewest clients with whom a sum is opened bring the whole noise.

How many there are in a Poisson cohort is a secret to those who see the result. Ring and shares then follow from the
fewest and the most that there could be, and the server adds the shares of all who are not there, each drawn as a client
draws it: the noise is that of the most clients, whoever came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unalike.core.client import Client
from unalike.core.release import SECURE_ARRAY, SECURE_NOISE, Each, Release, Sum
from unalike.core.request import Failure
from unalike.core.task import Sent, Task, send
from unalike.privacy.discrete import gaussian_noise, grid, rounding
from unalike.privacy.masks.protocol import ProtocolError, SecureClient, SecureServer
from unalike.privacy.masks.session import Message, Session
from unalike.privacy.mechanisms import DrawsLike, Gaussian, clip, is_exact
from unalike.privacy.sampling import Poisson

if TYPE_CHECKING:
    from unalike.core.federation import Cohort

_PREFIX = "secure."
_ABSENT = -1  # fills up lists of peers, so that all clients' messages have one shape
_LEAST_EXPECTED = 36  # a Poisson cohort of so many has fewer than 3 with probability below 1e-12
_MANY = 128  # with more clients each has this many peers, not all others: the cost then grows no further

# The clients' side. These work on bytes, so they run client by client.


def advertise(client: Client, identity: Tensor, **session: Tensor) -> Sent:
    """Exchange 1: two new public keys."""
    own = SecureClient(Session.from_message(session), int(identity))
    return _sent(own, own.advertise())


def share(
    client: Client, identity: Tensor, peers: Tensor, seal_keys: Tensor, mask_keys: Tensor, **session: Tensor
) -> Sent:
    """Exchange 2: sealed shares of the client's two secrets, a letter for each peer."""
    own = _restored(client, identity, session)
    return _sent(own, own.share(_present({"peers": peers, "seal_keys": seal_keys, "mask_keys": mask_keys})))


def mask(client: Client, identity: Tensor, senders: Tensor, letters: Tensor, **session: Tensor) -> Sent:
    """Exchange 3: the array that the client kept back, with its share of noise, under its masks; then it is gone."""
    own = _restored(client, identity, session)
    value = _kept(client, SECURE_ARRAY)
    inbox = _present({"senders": senders, "letters": letters})
    if SECURE_NOISE not in client.kept.values or not bool(client.kept.present[SECURE_NOISE]):
        message = own.mask(value, inbox)
    else:
        std, bound = client.kept.values[SECURE_NOISE].tolist()
        step, share = own.session.ring.step, std / math.sqrt(own.session.least)
        message = own.mask(
            clip(value, bound - rounding(len(value), step)), inbox, _steps(share / step, len(value), client.noise)
        )
    sent = _sent(own, message)
    return send(keep={**sent.keep, SECURE_ARRAY: torch.zeros_like(value)}, **sent.arrays)


def _steps(deviation: float, count: int, draws: DrawsLike) -> Tensor:
    """Noise of this deviation as whole numbers."""
    if is_exact(draws):
        return gaussian_noise(math.ceil(deviation), [count])
    return torch.round(deviation * draws.normal(count).to(torch.float64)).to(torch.int64)


def _shares(deviation: float, absent: int, count: int, draws: DrawsLike) -> Tensor:
    """The shares of so many clients, added up."""
    total = torch.zeros(count, dtype=torch.int64)
    for _ in range(absent):
        total += _steps(deviation, count, draws)
    return total


def unmask(client: Client, identity: Tensor, survivors: Tensor, **session: Tensor) -> Sent:
    """Exchange 4: a share for each peer; afterwards the client forgets its secrets."""
    own = _restored(client, identity, session)
    message = own.unmask({"survivors": survivors})
    over = {_name(name): torch.zeros_like(_kept(client, _name(name))) for name in _STATE if name != "stage"}
    return send(keep={**over, _name("stage"): own.state()["stage"]}, **_padded(message, own.session.peer_count))


_STATE = ("stage", "number", "secret", "public_of", "public", "inbox_of", "inbox")


def _sent(own: SecureClient, message: Message) -> Sent:
    """One state for all exchanges: each takes the place of the one before, so that none can be had twice."""
    rows = own.session.peer_count
    state = _padded(own.state(), rows)
    return send(keep={_name(name): value for name, value in state.items()}, **_padded(message, rows))


def _restored(client: Client, identity: Tensor, session: Mapping[str, Tensor]) -> SecureClient:
    state = {name: _kept(client, _name(name)) for name in _STATE}
    for ids, values in (("public_of", "public"), ("inbox_of", "inbox")):
        there = state[ids] != _ABSENT
        state[ids], state[values] = state[ids][there], state[values][there]
    return SecureClient.from_state(Session.from_message(dict(session)), int(identity), state)


def _kept(client: Client, name: str) -> Tensor:
    if name not in client.kept.values or not bool(client.kept.present[name]):
        raise ProtocolError(f"the client holds nothing from the exchange before ({name}); it cannot go on")
    return client.kept.values[name]


def _name(name: str) -> str:
    return f"{_PREFIX}state.{name}"


_LISTS = {  # with a row for each peer
    "peers", "seal_keys", "mask_keys", "to", "sealed", "senders", "letters", "owners", "shares",
    "public_of", "public", "inbox_of", "inbox",
}  # fmt: skip


def _padded(message: Message, rows: int) -> Message:
    """Lists filled up to all peers."""
    full = {}
    for name, value in message.items():
        if name in _LISTS:
            fill = _ABSENT if value.dtype == torch.int64 else 0
            value = torch.cat([value, value.new_full((rows - len(value), *value.shape[1:]), fill)])
        full[name] = value
    return full


def _present(message: Message) -> Message:
    """The inverse: rows that only fill up are taken away again."""
    ids = next(value for value in message.values() if value.ndim == 1)
    return {name: value[ids != _ABSENT] for name, value in message.items()}


EXCHANGES = tuple(Task(one, vectorised=False) for one in (advertise, share, mask, unmask))
ADVERTISE, SHARE, MASK, UNMASK = EXCHANGES

# The server's side


def check_secure(cohort: Cohort, releases: Sequence[Release]) -> Sum | None:
    """The secure release among them, if there is one; refuses what could not be summed before anything is sent."""
    secure = [release for release in releases if isinstance(release, Sum) and release.secure]
    if not secure:
        return None
    if len(secure) > 1:
        names = ", ".join(release.name for release in secure)
        raise ValueError(f"one secure sum for each ask, got {names}; send them as one array, joined by torch.cat")
    one, quorum = secure[0], cohort.federation.quorum
    if one.noise is not None and cohort.federation.trust == "nobody" and not isinstance(one.noise, Gaussian):
        raise ValueError(
            f'{one.noise} cannot be added in shares; under trust = "nobody" a secure sum has Gaussian noise, or leave '
            "secure out: then every shard adds the whole noise"
        )
    if one.noise is not None and isinstance(cohort.sampling, Poisson):
        # whoever was drawn, unless it is everybody: the size of the cohort is nobody's business
        if cohort.sampling.rate < 1 and cohort.expected < _LEAST_EXPECTED:
            raise ValueError(
                f"a secure sum needs 3 clients, and a Poisson cohort of {cohort.expected:g} expected clients may have "
                f"fewer, which would tell its size: sample {_LEAST_EXPECTED} or more"
            )
        if quorum < 0.5:
            raise ValueError(
                "a secure sum needs more than half of the cohort; set the federation's quorum to 0.5 or more"
            )
        return one
    needed = _session(len(cohort), 1, 1.0).needed
    if math.ceil(quorum * len(cohort)) < needed:
        raise ValueError(
            f"the quorum of {quorum:.0%} is {math.ceil(quorum * len(cohort))} of {len(cohort)} clients, but "
            f"a secure sum needs {needed} to be opened; set the federation's quorum to 0.5 or more"
        )
    return one


def _session(
    clients: int, length: int, bound: float, noise: float = 0.0, planned: tuple[int, int] | None = None
) -> Session:
    neighbours = None if clients <= _MANY + 1 else _MANY
    return Session(tuple(range(clients)), length, bound, neighbours=neighbours, noise=noise, planned=planned)


def _planned(cohort: Cohort, release: Sum) -> tuple[int, int] | None:
    """The fewest and the most clients that the cohort could have, where its size is to stay a secret."""
    sampling = cohort.sampling
    if release.noise is None or not isinstance(sampling, Poisson) or sampling.rate == 1:
        return None
    fewest, most = sampling.sizes(round(cohort.expected / sampling.rate))
    return max(3, fewest), most


def secure_sum(
    cohort: Cohort, task: Task, release: Sum, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, list[Failure]]:
    """The sum of what the clients of the cohort keep back from ``task``, noisy if the release says so.

    With it the rows of the cohort that are in it, and who dropped out on the way.
    """
    federation = cohort.federation
    exchanges = _Exchanges(cohort, release, shape)
    try:
        total = exchanges.total()
    finally:
        federation.runtime.forget(federation.run, _PREFIX)
    length, step = exchanges.session.length, exchanges.session.ring.step
    if release.noise is not None and federation.trust == "server":
        moved = rounding(length, step, release.norm)
        total = release.noise.add(total, release.change(cohort.sampling, moved), federation.draws())
    survivors = exchanges.survivors
    if exchanges.session.noise and exchanges.session.planned is not None:
        absent, share = (
            exchanges.session.most - len(survivors),
            exchanges.session.noise / math.sqrt(exchanges.session.least),
        )
        total += step * _shares(share / step, absent, length, federation.draws())
    value = (total / release.divisor(len(survivors), 0.0, cohort.expected)).to(torch.float32).reshape(shape)
    clients, size = len(survivors), exchanges.bytes
    if release.noise is not None and isinstance(cohort.sampling, Poisson):  # as in every private ask: what is expected
        clients, size = round(cohort.expected), round(size * cohort.expected / max(1, len(cohort)))
    cohort.write(task, release, release.name, tuple(shape), clients, size)
    return value, survivors, exchanges.failures


class _Exchanges:
    """One session: what the server passes on, exchange by exchange."""

    def __init__(self, cohort: Cohort, release: Sum, shape: tuple[int, ...]) -> None:
        assert release.clip is not None
        self.cohort = cohort
        whole = 0.0
        if release.noise is not None and cohort.federation.trust == "nobody":
            whole = release.noise.std(release.change(cohort.sampling))
        planned = _planned(cohort, release)
        self.session = _session(len(cohort), math.prod(shape), release.clip, whole, planned)
        if whole and cohort.federation.noise == "system":
            needed = grid(release.clip, whole, self.session.length)
            if self.session.ring.step > needed:
                raise ValueError(
                    f"{self.session.most} clients with {self.session.length} numbers each leave no room for exact "
                    "noise in a secure sum's 32 bits; send fewer numbers or sample fewer clients"
                )
        self.server = SecureServer(self.session)
        self.failures: list[Failure] = []
        self.bytes = 0
        self.survivors = torch.zeros(0, dtype=torch.int64)

    def total(self) -> Tensor:
        server, rows = self.server, self.session.peer_count
        keys = server.keys(self._ask(ADVERTISE, range(len(self.cohort)), {}))
        told = {who: _padded(message, rows) for who, message in keys.items()}
        letters = server.letters(self._ask(SHARE, list(told), told))
        told = {who: _padded(message, rows) for who, message in letters.items()}
        for who, reply in self._ask(MASK, list(told), told).items():
            server.receive(who, reply)
        self.survivors = server.survivors()["survivors"]
        return server.open(self._ask(UNMASK, self.survivors.tolist(), {}, survivors=self.survivors))

    def _ask(
        self, task: Task, whom: Sequence[int], told: Mapping[int, Message], **same: Tensor
    ) -> dict[int, dict[str, Tensor]]:
        """One exchange with the clients of these identities; those that do not answer are failures, not errors."""
        identities = torch.tensor(list(whom))
        names = next(iter(told.values())).keys() if told else ()
        each = {name: torch.stack([told[who][name] for who in whom]) for name in names}
        part = self.cohort.only(identities)
        before = self.cohort.federation.traffic.total_up
        shared = {**self.session.message(), **same}
        part.federation.runtime.program.teach(task, [Each()], part.federation.terms(part.sampling))
        replies = part._deliver(task, [Each()], shared, {"identity": identities, **each}, protocol=True)
        self.bytes += self.cohort.federation.traffic.total_up - before
        self.failures += replies.failures
        answered = identities[replies.answered].tolist()
        return {who: {name: replies[name][i] for name in replies} for i, who in enumerate(answered)}
