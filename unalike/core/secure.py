"""Secure sums on top of ``ask``: the five exchanges of ``unalike.privacy.masks.protocol`` as tasks, so on any runtime.

A release with ``secure=True`` first has every client run the task, clip its array and keep it back. Then come the
exchanges *advertise*, *share*, *mask*, *confirm* and *unmask* among those who did. A client that drops out before
*confirm* is left out of the sum; if more drop out than the threshold allows, the sum stays closed and nothing is
revealed.

The array is put on a grid of whole numbers before it is masked; a client's array moves by at most half a step in each
coordinate, and noise on the opened sum is scaled to the clip plus that. Where nobody is trusted, each client adds a
share of the noise before it masks, so large that the fewest clients that can open a sum bring the whole noise.

The size of a Poisson cohort is a secret from whoever sees the result. Ring and shares then follow from the smallest and
the largest size possible, and the server adds the shares of absent clients: the noise is always that of the largest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unalike.core.bits import round_randomly
from unalike.core.client import Client
from unalike.core.failure import Failure
from unalike.core.release import SECURE_ARRAY, SECURE_NOISE, Release, Sum
from unalike.core.task import Sent, Task, send
from unalike.privacy.discrete import gaussian_noise, grid, rounding
from unalike.privacy.masks.protocol import ProtocolError, SecureClient, SecureServer
from unalike.privacy.masks.session import WIDEST, Message, Ring, SecureSession
from unalike.privacy.mechanisms import DrawsLike, Gaussian, clip, is_exact
from unalike.privacy.sampling import Poisson

if TYPE_CHECKING:
    from unalike.core.federation import Cohort

_PREFIX = "secure."
_STATE = "secure.state"
_ABSENT = -1  # fills up lists of peers, so that all clients' messages have one shape
_LEAST_EXPECTED = 36  # a Poisson cohort of this size has fewer than 3 clients with probability below 1e-12
_MANY = 128  # with more clients each has this many peers, not all others: the cost then grows no further

# The clients' side. These work on bytes, so they run client by client.


def advertise(client: Client, identity: Tensor, **session: Tensor) -> Sent:
    """Exchange 1: two new public keys, for a session that the client holds the server to from here on."""
    agreed = SecureSession.from_message(session)
    _check_session(client, agreed)
    own = SecureClient(agreed, int(identity))
    return _send(own, own.advertise())


def _check_session(client: Client, session: SecureSession) -> None:
    """Refuse a session that differs from what the client knows itself: by its array, the release and the recipe.

    The noise that the client adds is the whole noise over the root of ``session.least``, so a server that counts more
    clients than there are would get the sum with less noise.
    """
    length = len(_kept(client, SECURE_ARRAY))
    if session.length != length:
        raise ProtocolError(f"the sum is of {session.length} numbers, but the client keeps {length}")
    if session.neighbours != _neighbours(len(session.identities)):
        raise ProtocolError(
            f"{session.neighbours} peers for each of {len(session.identities)} clients; the rule gives "
            f"{_neighbours(len(session.identities))}"
        )
    if not _has(client, SECURE_NOISE):
        return
    if session.width != WIDEST:
        raise ProtocolError(f"numbers of {session.width} bytes are too coarse for the noise that clients add")
    std, bound, fewest, most = _kept(client, SECURE_NOISE).tolist()
    if (session.bound, session.noise) != (bound, std):
        raise ProtocolError(
            f"the sum has a bound of {session.bound:g} and noise of {session.noise:g}; the client agreed to {bound:g} "
            f"and {std:g}"
        )
    planned = session.planned or (len(session.identities),) * 2
    if most and (planned[0] > max(3, fewest) or planned[1] > most):
        raise ProtocolError(
            f"the server plans the noise for {planned[0]} to {planned[1]} clients; by the recipe there are at most "
            f"{most:.0f}, and {max(3, fewest):.0f} must be enough"
        )


def share(
    client: Client,
    identity: Tensor,
    peers: Tensor,
    seal_keys: Tensor,
    mask_keys: Tensor,
    signatures: Tensor,
    **session: Tensor,
) -> Sent:
    """Exchange 2: sealed shares of the client's two secrets, a letter for each peer."""
    own = _restore(client, identity, session)
    keys = {"peers": peers, "seal_keys": seal_keys, "mask_keys": mask_keys, "signatures": signatures}
    return _send(own, own.share(_unpad(keys)))


def mask(client: Client, identity: Tensor, senders: Tensor, letters: Tensor, **session: Tensor) -> Sent:
    """Exchange 3: the array that the client kept back, with its share of noise, under its masks; then it is gone."""
    own = _restore(client, identity, session)
    value = _kept(client, SECURE_ARRAY)
    inbox = _unpad({"senders": senders, "letters": letters})
    if not _has(client, SECURE_NOISE):
        step, narrow = own.session.ring.step, own.session.width < WIDEST
        rounded = step * round_randomly(value.to(torch.float64) / step, client.noise) if narrow else value
        message = own.mask(rounded, inbox)
    else:
        std, bound = _kept(client, SECURE_NOISE).tolist()[:2]
        step, share = own.session.ring.step, std / math.sqrt(own.session.least)
        message = own.mask(
            clip(value, bound - rounding(len(value), step)), inbox, _noise_steps(share / step, len(value), client.noise)
        )
    sent = _send(own, message)
    return send(keep={**sent.keep, SECURE_ARRAY: torch.zeros_like(value)}, **sent.arrays)


def _noise_steps(deviation: float, count: int, draws: DrawsLike) -> Tensor:
    """Noise of this deviation as whole numbers."""
    if is_exact(draws):
        return gaussian_noise(math.ceil(deviation), [count])
    return torch.round(deviation * draws.normal(count).to(torch.float64)).to(torch.int64)


def confirm(client: Client, identity: Tensor, survivors: Tensor, **session: Tensor) -> Sent:
    """Exchange 4: a word for each peer that is left, by which it knows that both were told of the same survivors."""
    own = _restore(client, identity, session)
    return _send(own, own.confirm({"survivors": survivors}))


def unmask(
    client: Client, identity: Tensor, survivors: Tensor, senders: Tensor, confirmations: Tensor, **session: Tensor
) -> Sent:
    """Exchange 5: a share for each peer; afterwards the client forgets its secrets."""
    own = _restore(client, identity, session)
    inbox = _unpad({"senders": senders, "confirmations": confirmations})
    return _send(own, own.unmask({"survivors": survivors}, inbox))


def _send(own: SecureClient, message: Message) -> Sent:
    """One state for all exchanges: each replaces the one before, so that none can be repeated."""
    return send(keep={_STATE: own.state()}, **_pad(message, own.session.peer_count))


def _restore(client: Client, identity: Tensor, session: Mapping[str, Tensor]) -> SecureClient:
    agreed = SecureSession.from_message(dict(session))
    return SecureClient.from_state(agreed, int(identity), _kept(client, _STATE))


def _kept(client: Client, name: str) -> Tensor:
    if not _has(client, name):
        raise ProtocolError(f"the client holds nothing from the exchange before ({name}); it cannot go on")
    return client.kept.values[name]


def _has(client: Client, name: str) -> bool:
    return name in client.kept.values and bool(client.kept.present[name])


_LISTS = {  # with a row for each peer
    "peers", "seal_keys", "mask_keys", "signatures", "to", "sealed", "share_digests", "senders", "letters",
    "confirmations", "owners", "shares",
}  # fmt: skip


def _pad(message: Message, rows: int) -> Message:
    """Lists filled up to all peers."""
    full = {}
    for name, value in message.items():
        if name in _LISTS:
            fill = _ABSENT if value.dtype == torch.int64 else 0
            value = torch.cat([value, value.new_full((rows - len(value), *value.shape[1:]), fill)])
        full[name] = value
    return full


def _unpad(message: Message) -> Message:
    """The inverse: rows that only fill up are taken away again."""
    ids = next(value for value in message.values() if value.ndim == 1)
    return {name: value[ids != _ABSENT] for name, value in message.items()}


EXCHANGES = tuple(Task(one, vectorised=False) for one in (advertise, share, mask, confirm, unmask))
ADVERTISE, SHARE, MASK, CONFIRM, UNMASK = EXCHANGES

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
    if one.bits is not None and one.noise is not None and cohort.federation.trust == "nobody":
        raise ValueError(
            f"bits={one.bits} with noise that clients add in shares: their grid would be too coarse for it; leave bits "
            'out, or let the server add the noise (trust = "server")'
        )
    if one.noise is not None and isinstance(cohort.sampling, Poisson):
        # the size of the cohort is a secret, unless everybody is in it
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
    needed = SecureSession(tuple(range(len(cohort))), 1, 1.0, _neighbours(len(cohort))).needed
    if math.ceil(quorum * len(cohort)) < needed:
        raise ValueError(
            f"the quorum of {quorum:.0%} is {math.ceil(quorum * len(cohort))} of {len(cohort)} clients, but "
            f"a secure sum needs {needed} to be opened; set the federation's quorum to 0.5 or more"
        )
    return one


def _neighbours(clients: int) -> int | None:
    return None if clients <= _MANY + 1 else _MANY


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
    """The sum of what the cohort's clients kept back from ``task``, with the release's noise.

    Also the rows of the cohort that are in it, and the clients that dropped out.
    """
    federation = cohort.federation
    exchanges = _Exchanges(cohort, task, release, shape)
    try:
        total = exchanges.total()
    finally:
        federation.runtime.forget(federation.run, _PREFIX)
    session, survivors = exchanges.session, exchanges.survivors
    length, step = session.length, session.ring.step
    if release.noise is not None and federation.trust == "server":
        moved = rounding(length, step, release.norm) * (1 if release.bits is None else 2)  # at random: a whole step
        total = release.noise.add(total, release.change(cohort.sampling, moved), federation.draws())
    if session.noise and session.planned is not None:  # shares of clients that are absent
        draws, shares = federation.draws(), torch.zeros(length, dtype=torch.int64)
        for _ in range(session.most - len(survivors)):
            shares += _noise_steps(session.noise / math.sqrt(session.least) / step, length, draws)
        total += step * shares
    value = (total / release.divisor(len(survivors), 0.0, cohort.expected)).to(torch.float32).reshape(shape)
    clients = exchanges.expected or len(survivors)
    cohort.write(task, release, release.name, tuple(shape), clients, exchanges.bytes)
    return value, survivors, exchanges.failures


class _Exchanges:
    """One session: what the server passes on, exchange by exchange."""

    def __init__(self, cohort: Cohort, task: Task, release: Sum, shape: tuple[int, ...]) -> None:
        assert release.clip is not None
        self.cohort = cohort
        federation, clients, whole = cohort.federation, len(cohort), 0.0
        if release.noise is not None and federation.trust == "nobody":
            whole = release.noise.std(release.change(cohort.sampling))
        about = f"{federation.run}, ask {federation.serial}, {task.name}"
        planned = _planned(cohort, release)
        most = clients if planned is None else planned[1]
        self.session = SecureSession(
            identities=tuple(range(clients)),
            length=math.prod(shape),
            bound=release.clip,
            neighbours=_neighbours(clients),
            noise=whole,
            planned=planned,
            width=WIDEST if release.bits is None else Ring.width_for(release.bits, most),
            purpose=hashlib.sha256(about.encode()).hexdigest(),  # as long whatever the run is called
        )
        if whole and federation.noise == "system":
            needed = grid(release.clip, whole, self.session.length)
            if self.session.ring.step > needed:
                raise ValueError(
                    f"{self.session.most} clients with {self.session.length} numbers each leave no room for exact "
                    "noise in a secure sum's 32 bits; send fewer numbers or sample fewer clients"
                )
        # where the cohort's size is a secret, as in every private ask: the clients to be expected are metered
        hidden = release.noise is not None and isinstance(cohort.sampling, Poisson)
        self.expected = round(cohort.expected) if hidden else None
        self.server = SecureServer(self.session)
        self.failures: list[Failure] = []
        self.bytes = 0
        self.survivors = torch.zeros(0, dtype=torch.int64)

    def total(self) -> Tensor:
        server = self.server
        keys = server.keys(self._ask(ADVERTISE, range(len(self.cohort)), {}))
        letters = server.letters(self._ask(SHARE, list(keys), keys))
        for who, reply in self._ask(MASK, list(letters), letters).items():
            server.receive(who, reply)
        self.survivors = left = server.survivors()["survivors"]
        words = server.confirmations(self._ask(CONFIRM, left.tolist(), {}, survivors=left))
        total = server.open(self._ask(UNMASK, list(words), words, survivors=left))
        federation, positions = self.cohort.federation, self.cohort.positions
        for who, what in server.accused.items():
            name = federation.roster.name(int(positions[who]))
            self.failures.append(Failure(name, UNMASK.name, federation.round, what))
        return total

    def _ask(
        self, task: Task, whom: Sequence[int], messages: Mapping[int, Message], **same: Tensor
    ) -> dict[int, dict[str, Tensor]]:
        """One exchange with the clients of these identities; those that do not answer are failures, not errors."""
        identities = torch.tensor(list(whom))
        messages = {who: _pad(message, self.session.peer_count) for who, message in messages.items()}
        names = next(iter(messages.values())).keys() if messages else ()
        each = {name: torch.stack([messages[who][name] for who in whom]) for name in names}
        part, traffic = self.cohort.only(identities), self.cohort.federation.traffic
        before = traffic.total_up
        shared, own = {**self.session.message(), **same}, {"identity": identities, **each}
        if self.expected is None:
            replies = part.exchange(task, shared, own)
        else:
            replies = part.exchange(task, shared, own, self._metered(shared, own))
            for name, value in replies.items():
                traffic.up[name] += self.expected * self._of_one(name, value).nbytes
        self.bytes += traffic.total_up - before
        self.failures += replies.failures
        answered = identities[replies.answered].tolist()
        return {who: {name: replies[name][i] for name in replies} for i, who in enumerate(answered)}

    def _metered(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[Message, Message]:
        """Inputs as large as they would be in a cohort of the expected size."""
        everybody = torch.arange(self.expected or 0)
        return (
            {name: everybody if name in ("identities", "survivors") else value for name, value in shared.items()},
            {name: self._of_one(name, value)[None] for name, value in own.items()},
        )

    def _of_one(self, name: str, values: Tensor) -> Tensor:
        """An array [C, ...] as one client would send or get it in a cohort of the expected size; without its values."""
        shape = list(values.shape[1:])
        if name in _LISTS:
            clients = self.expected or 0
            shape[0] = _neighbours(clients) or clients - 1
        return values.new_empty(shape)
