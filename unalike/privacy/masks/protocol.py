"""Secure sum (Bonawitz et al. 2017): the server learns the sum of the clients' vectors and nothing else of them.

Four exchanges. *advertise*: every client sends two public keys. *share*: it splits its mask key and the seed of a mask
of its own into shares and seals one for each peer. *mask*: it adds to its vector, in the ring of integers modulo 2^32,
its own mask and for each peer a mask that the two have in common, with opposite signs. *unmask*: those who are left
give the server, for each peer, one share: of the own mask's seed if the peer's vector arrived (that mask is still in
the sum), else of its mask key (the common masks did not cancel). Never both, so a vector that arrived stays masked.

Peers are all others, or with ``neighbours`` the nearest on a ring of random order (Bell et al. 2020), so that the cost
grows with the neighbours and not with the cohort. What is assumed: server and clients follow the protocol; the server
may look at all it gets and collude with at most half of the peers of a client. A client that lies about its own
vector is not found out. Keys, sealing and masks are X25519, HKDF, AES-GCM and AES-CTR of the ``cryptography`` package.
Messages are dicts of tensors, so any transport will do.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from unalike.privacy.masks import shamir
from unalike.privacy.masks.session import (
    KEY_BYTES,
    Message,
    Session,
    add_common_mask,
    agree,
    derive,
    expand,
    from_tensor,
    identity_bytes,
    to_tensor,
)

_NONCE = 12
_LETTER = _NONCE + 2 * shamir.SHARE_BYTES + 16  # nonce, two shares, AES-GCM's tag


class SecureSumAborted(RuntimeError):
    """The sum cannot be opened; no client's vector was revealed."""


class ProtocolError(RuntimeError):
    """A message that the protocol does not allow at this point; it is refused and nothing is answered."""


class SecureClient:
    """One client's side; each exchange may happen once."""

    def __init__(self, session: Session, identity: int) -> None:
        if identity not in session.identities:
            raise ValueError(f"client {identity} is not one of the session's clients")
        self.session, self.identity = session, identity
        self.peers = session.peers(identity)
        self._seal_key = X25519PrivateKey.generate()
        self._mask_key = X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(KEY_BYTES)
        self._public: dict[int, tuple[bytes, bytes]] = {}  # peer -> its public keys for sealing and for masks
        self._inbox: dict[int, bytes] = {}  # peer -> sealed shares of its secrets
        self._agreed: dict[int, bytes] = {}  # peer -> the secret in common from which letters are sealed
        self._stage = 0

    def advertise(self) -> Message:
        """The two public keys, new for every session."""
        self._enter(0)
        keys = self._seal_key.public_key().public_bytes_raw(), self._mask_key.public_key().public_bytes_raw()
        return {"seal_key": to_tensor(keys[0]), "mask_key": to_tensor(keys[1])}

    def share(self, keys: Message) -> Message:
        """For each peer whose keys came: sealed shares of this client's mask key and of its own mask's seed."""
        self._enter(1)
        for peer, seal, mask in zip(keys["peers"].tolist(), keys["seal_keys"], keys["mask_keys"], strict=True):
            if peer in self.peers:
                self._public[peer] = (from_tensor(seal), from_tensor(mask))
        if len(self._public) < self.session.needed:
            raise SecureSumAborted(
                f"{len(self._public)} peers are there, {self.session.needed} are needed; nothing was sent"
            )
        points = {peer: peer + 1 for peer in self._public}
        of_key = shamir.split(self._mask_key.private_bytes_raw(), self.session.needed, list(points.values()))
        of_seed = shamir.split(self._seed, self.session.needed, list(points.values()))
        sealed = [self._seal(peer, of_key[point] + of_seed[point]) for peer, point in points.items()]
        return {
            "to": torch.tensor(list(points)),
            "sealed": torch.stack([to_tensor(letter) for letter in sealed]),
            "seed_digest": to_tensor(hashlib.sha256(self._seed).digest()),
        }

    def mask(self, value: Tensor, inbox: Message, noise: Tensor | None = None) -> Message:
        """The vector under its masks: alone it is uniformly random. ``noise`` is added to it, in steps of the grid."""
        self._enter(2)
        if value.shape != (self.session.length,):
            raise ValueError(f"expected a flat vector of {self.session.length} numbers, got shape {tuple(value.shape)}")
        for peer, letter in zip(inbox["senders"].tolist(), inbox["letters"], strict=True):
            if peer in self._public:
                self._inbox[peer] = from_tensor(letter)
        if len(self._inbox) < self.session.needed:
            raise SecureSumAborted(
                f"{len(self._inbox)} peers are left, {self.session.needed} are needed; nothing was sent"
            )
        total = self.session.ring.encode(value).copy()
        if noise is not None:
            total += noise.numpy().astype(np.uint32)  # modulo 2^32, as all in the ring
        total += expand(self._seed, self.session)
        for peer in self._inbox:
            add_common_mask(total, self._mask_key, self._public[peer][1], self.identity, peer, self.session)
        return {"masked": torch.from_numpy(total.view(np.int32))}

    def unmask(self, survivors: Message) -> Message:
        """One share for each peer: of its seed if its vector arrived, else of its mask key. Answered once."""
        self._enter(3)
        arrived = set(survivors["survivors"].tolist())
        if self.identity not in arrived:
            raise ProtocolError(
                f"client {self.identity} sent its vector but is not among the survivors; no share is given"
            )
        if len(arrived & set(self.session.identities)) < self.session.least:
            raise SecureSumAborted(
                f"{len(arrived)} clients survived, {self.session.least} are needed for the noise that they bring; no "
                "share is given"
            )
        if len(arrived & set(self._inbox)) < self.session.needed:
            raise SecureSumAborted(
                f"{len(arrived & set(self._inbox))} peers survived, {self.session.needed} are needed; no share is given"
            )
        shares = []
        for peer, letter in self._inbox.items():
            opened = self._open(peer, letter)
            shares.append(opened[shamir.SHARE_BYTES :] if peer in arrived else opened[: shamir.SHARE_BYTES])
        return {
            "owners": torch.tensor(list(self._inbox)),
            "shares": torch.stack([to_tensor(share) for share in shares]),
        }

    def state(self) -> Message:
        """Everything the client must keep between two exchanges, as tensors. A secret: it never leaves the client."""
        keys, letters = list(self._public), list(self._inbox)
        secret = self._seal_key.private_bytes_raw() + self._mask_key.private_bytes_raw() + self._seed
        public = b"".join(seal + mask for seal, mask in self._public.values())
        return {
            "stage": torch.tensor(self._stage),
            "number": to_tensor(self.session.number),
            "secret": to_tensor(secret),
            "public_of": torch.tensor(keys, dtype=torch.int64),
            "public": to_tensor(public).reshape(len(keys), 2 * KEY_BYTES),
            "inbox_of": torch.tensor(letters, dtype=torch.int64),
            "inbox": to_tensor(b"".join(self._inbox.values())).reshape(len(letters), _LETTER),
        }

    @classmethod
    def from_state(cls, session: Session, identity: int, state: Message) -> SecureClient:
        """The client that ``state`` was taken of; ``ProtocolError`` if it was in another session."""
        if from_tensor(state["number"]) != session.number:
            raise ProtocolError(f"client {identity} is asked to go on in a session that it has not begun")
        client = cls(session, identity)
        secret = from_tensor(state["secret"])
        client._seal_key = X25519PrivateKey.from_private_bytes(secret[:KEY_BYTES])
        client._mask_key = X25519PrivateKey.from_private_bytes(secret[KEY_BYTES : 2 * KEY_BYTES])
        client._seed = secret[2 * KEY_BYTES :]
        rows = [from_tensor(row) for row in state["public"]]
        client._public = {
            peer: (row[:KEY_BYTES], row[KEY_BYTES:])
            for peer, row in zip(state["public_of"].tolist(), rows, strict=True)
        }
        letters = [from_tensor(row) for row in state["inbox"]]
        client._inbox = dict(zip(state["inbox_of"].tolist(), letters, strict=True))
        client._stage = int(state["stage"])
        return client

    def _enter(self, stage: int) -> None:
        if self._stage != stage:
            names = ("advertise", "share", "mask", "unmask", "nothing more")
            raise ProtocolError(
                f"client {self.identity} is asked to {names[stage]}, but its next step is {names[self._stage]}"
            )
        self._stage += 1

    def _letter_key(self, peer: int, sender: int, receiver: int) -> tuple[AESGCM, bytes]:
        label = b"letter" + identity_bytes(sender) + identity_bytes(receiver)
        if peer not in self._agreed:  # once for the letter written and the letter read
            self._agreed[peer] = agree(self._seal_key, self._public[peer][0])
        return AESGCM(derive(self._agreed[peer], label, self.session)), label

    def _seal(self, peer: int, plain: bytes) -> bytes:
        cipher, label = self._letter_key(peer, self.identity, peer)
        nonce = secrets.token_bytes(_NONCE)
        return nonce + cipher.encrypt(nonce, plain, label)

    def _open(self, peer: int, letter: bytes) -> bytes:
        cipher, label = self._letter_key(peer, peer, self.identity)
        try:
            return cipher.decrypt(letter[:_NONCE], letter[_NONCE:], label)
        except InvalidTag as error:
            raise ProtocolError(f"the letter of client {peer} to client {self.identity} was altered") from error


class SecureServer:
    """The server's side: it passes letters on, adds up masked vectors as they come, and opens the sum."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}
        self._sharers: dict[int, Tensor] = {}  # client -> digest of its seed
        self._survivors: set[int] = set()
        self._total = np.zeros(session.length, dtype=np.uint32)

    def keys(self, replies: Mapping[int, Message]) -> dict[int, Message]:
        """From the advertised keys, what each client gets: the keys of its peers."""
        self._keys = {identity: (reply["seal_key"], reply["mask_key"]) for identity, reply in replies.items()}
        self._require(len(self._keys) - 1, "advertised keys")
        sent = {}
        for identity in self._keys:
            peers = [peer for peer in self.session.peers(identity) if peer in self._keys]
            self._require(len(peers), f"peers of client {identity} advertised keys")
            seals, masks = zip(*(self._keys[peer] for peer in peers), strict=True)
            sent[identity] = {
                "peers": torch.tensor(peers),
                "seal_keys": torch.stack(seals),
                "mask_keys": torch.stack(masks),
            }
        return sent

    def letters(self, replies: Mapping[int, Message]) -> dict[int, Message]:
        """From the sealed shares, what each client gets: the letters that its peers wrote to it."""
        self._sharers = {identity: reply["seed_digest"] for identity, reply in replies.items()}
        self._require(len(self._sharers) - 1, "shared their keys")
        inbox: dict[int, tuple[list[int], list[Tensor]]] = {identity: ([], []) for identity in replies}
        for sender, reply in replies.items():
            for receiver, letter in zip(reply["to"].tolist(), reply["sealed"], strict=True):
                if receiver in inbox:
                    inbox[receiver][0].append(sender)
                    inbox[receiver][1].append(letter)
        for identity, (senders, _) in inbox.items():
            self._require(len(senders), f"peers of client {identity} shared their keys")
        return {
            who: {"senders": torch.tensor(senders), "letters": torch.stack(sealed)}
            for who, (senders, sealed) in inbox.items()
        }

    def receive(self, identity: int, reply: Message) -> None:
        """Add one masked vector; the server keeps the running sum only."""
        masked = reply["masked"]
        if identity not in self._sharers or identity in self._survivors:
            raise ProtocolError(f"a masked vector of client {identity} came twice, or from one that shared no keys")
        if masked.dtype != torch.int32 or masked.shape != (self.session.length,):
            raise ProtocolError(
                f"expected {self.session.length} int32 numbers from client {identity}, got {masked.dtype} "
                f"{tuple(masked.shape)}; its vector is left out"
            )
        self._total += masked.contiguous().numpy().view(np.uint32)
        self._survivors.add(identity)

    def survivors(self) -> Message:
        """Whose vectors arrived: what every survivor is told; aborts if they are too few for the sum to be opened."""
        for identity in self._sharers:
            left = len(self._survivors & set(self.session.peers(identity)))
            self._require(left, f"peers of client {identity} sent their vectors")
        return {"survivors": torch.tensor(sorted(self._survivors))}

    def open(self, replies: Mapping[int, Message]) -> Tensor:
        """Take the masks off with the survivors' shares: the sum over the survivors, float64."""
        held: dict[int, dict[int, bytes]] = {identity: {} for identity in self._sharers}
        for holder, reply in replies.items():
            for owner, share in zip(reply["owners"].tolist(), reply["shares"], strict=True):
                if owner in held and holder in self._survivors:
                    held[owner][holder + 1] = from_tensor(share)
        for owner, shares in held.items():  # before the first secret is put together
            self._require(len(shares), f"peers of client {owner} helped to unmask")
        total = self._total.copy()
        for owner, shares in held.items():
            secret = shamir.join(shares, self.session.needed)
            if owner in self._survivors:
                self._verify(owner, hashlib.sha256(secret).digest(), self._sharers[owner])
                total -= expand(secret, self.session)
            else:
                key = X25519PrivateKey.from_private_bytes(secret)
                self._verify(owner, key.public_key().public_bytes_raw(), self._keys[owner][1])
                for peer in self._survivors & set(self.session.peers(owner)):
                    # What the missing client would have added: the opposite of what its peer added.
                    add_common_mask(total, key, from_tensor(self._keys[peer][1]), owner, peer, self.session)
        return self.session.ring.decode(total)

    def _require(self, count: int, what: str) -> None:
        if count < self.session.needed:
            raise SecureSumAborted(
                f"only {count} {what}, {self.session.needed} are needed: too many clients dropped out; no vector was "
                "revealed: ask again with a new session"
            )

    def _verify(self, owner: int, found: bytes, promised: Tensor) -> None:
        if found != from_tensor(promised):
            raise SecureSumAborted(
                f"the shares of client {owner} do not give its key: one was altered; the sum stays closed"
            )
