"""Secure sum (Bonawitz et al. 2017): the server learns the sum of the clients' vectors and nothing else of them.

Five exchanges. *advertise*: every client sends two public keys. *share*: it splits its mask key and the seed of a mask
of its own into shares and seals one for each peer. *mask*: it adds to its vector, in the ring of integers modulo 2^32,
its own mask and for each peer a mask that the two have in common, with opposite signs. *confirm*: those who are left
are told who is left, and vouch for it to each peer. *unmask*: with enough of its peers vouching for the same, each
gives the server, for each peer, one share: of the own mask's seed if the peer's vector arrived (that mask is still in
the sum), else of its mask key (the common masks did not cancel). Never both, so a vector that arrived stays masked.

Peers are all others, or with ``neighbours`` the nearest on a ring of random order (Bell et al. 2020), so that the cost
grows with the neighbours and not with the cohort.

The server may do as it likes, together with fewer than half of the peers of a client, as long as it passes public keys
on as they are. Where that is not to be assumed, clients sign their keys and hold ``pinned`` keys of their peers. A
client whose shares are not what their owner committed itself to is named; one that lies about its own vector is not
found out. Keys, sealing and masks are X25519, HKDF, AES-GCM and AES-CTR of the ``cryptography`` package.
Messages are dicts of tensors, so any transport will do.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import secrets
from collections.abc import Collection, Mapping

import numpy as np
import torch
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from unalike.privacy.masks import shamir
from unalike.privacy.masks.session import (
    KEY_BYTES,
    Message,
    SecureSession,
    add_common_mask,
    agree,
    derive,
    expand,
    from_tensor,
    identity_bytes,
    to_tensor,
)

_NONCE = 12
_SIGNATURE = 64
_LETTER = _NONCE + 2 * shamir.SHARE_BYTES + 16  # nonce, two shares, AES-GCM's tag
_NO_KEYS = bytes(KEY_BYTES), bytes(KEY_BYTES)
_EXCHANGES = ("advertise", "share", "mask", "confirm", "unmask")


class SecureSumAborted(RuntimeError):
    """The sum cannot be opened; no client's vector was revealed."""


class ProtocolError(RuntimeError):
    """A message that the protocol does not allow at this point; it is refused and nothing is answered."""


class SecureClient:
    """One client's side; each exchange may happen once.

    - ``signer``: the client's long-term key, by which it signs the keys of this session.
    - ``pinned``: the public long-term keys of its peers; keys that are not signed by these are refused.
    - ``least``: the client helps to open no sum over fewer, whatever the session says.
    """

    def __init__(
        self,
        session: SecureSession,
        identity: int,
        *,
        signer: Ed25519PrivateKey | None = None,
        pinned: Mapping[int, bytes] | None = None,
        least: int = 3,
    ) -> None:
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
        self._confirmed = bytes(KEY_BYTES)  # the digest of who is left
        self._signer, self._pinned, self._least = signer, pinned, max(least, session.least)

    def advertise(self) -> Message:
        """The two public keys, new for every session, and the signature of them (zeros without a long-term key)."""
        self._enter(0)
        keys = self._seal_key.public_key().public_bytes_raw(), self._mask_key.public_key().public_bytes_raw()
        signed = bytes(_SIGNATURE) if self._signer is None else self._signer.sign(self._signed(self.identity, *keys))
        return {"seal_key": to_tensor(keys[0]), "mask_key": to_tensor(keys[1]), "signature": to_tensor(signed)}

    def _signed(self, identity: int, seal_key: bytes, mask_key: bytes) -> bytes:
        return b"unalike keys" + self.session.digest + identity_bytes(identity) + seal_key + mask_key

    def _check_signature(self, peer: int, keys: tuple[bytes, bytes], signature: bytes) -> None:
        if self._pinned is None:
            return
        try:
            Ed25519PublicKey.from_public_bytes(self._pinned[peer]).verify(signature, self._signed(peer, *keys))
        except (KeyError, InvalidSignature) as error:
            raise ProtocolError(
                f"the keys of client {peer} are not signed by the key that client {self.identity} knows of it; nothing "
                "was sent"
            ) from error

    def share(self, keys: Message) -> Message:
        """For each peer whose keys came: sealed shares of this client's mask key and of its own mask's seed."""
        self._enter(1)
        lists = (keys["peers"].tolist(), keys["seal_keys"], keys["mask_keys"], keys["signatures"])
        for peer, seal, mask, signature in zip(*lists, strict=True):
            if peer in self.peers:
                self._public[peer] = (from_tensor(seal), from_tensor(mask))
                if any(len(key) != KEY_BYTES for key in self._public[peer]):
                    raise ProtocolError(f"the keys of client {peer} do not have {KEY_BYTES} bytes; nothing was sent")
                self._check_signature(peer, self._public[peer], from_tensor(signature))
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
            "share_digests": torch.stack(
                [to_tensor(_digest(of_key[point]) + _digest(of_seed[point])) for point in points.values()]
            ),
        }

    def mask(self, value: Tensor, inbox: Message, noise: Tensor | None = None) -> Message:
        """The vector under its masks: alone it is uniformly random. ``noise`` is added to it, in steps of the grid."""
        self._enter(2)
        if value.shape != (self.session.length,):
            raise ValueError(f"expected a flat vector of {self.session.length} numbers, got shape {tuple(value.shape)}")
        for peer, letter in zip(inbox["senders"].tolist(), inbox["letters"], strict=True):
            if peer in self._public and letter.numel() == _LETTER:
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
        return {"masked": self.session.ring.pack(total)}

    def confirm(self, survivors: Message) -> Message:
        """To each peer that is left: that this client was told the same about who is left."""
        self._enter(3)
        arrived = set(survivors["survivors"].tolist())
        if self.identity not in arrived:
            raise ProtocolError(
                f"client {self.identity} sent its vector but is not among the survivors; no share is given"
            )
        if len(arrived & set(self.session.identities)) < self._least:
            raise SecureSumAborted(
                f"{len(arrived)} clients survived, {self._least} are needed for the noise that they bring; no share is "
                "given"
            )
        if len(arrived & set(self._inbox)) < self.session.needed:
            raise SecureSumAborted(
                f"{len(arrived & set(self._inbox))} peers survived, {self.session.needed} are needed; no share is given"
            )
        self._confirmed = self._digest_of(arrived)
        peers = [peer for peer in self._inbox if peer in arrived]
        return {
            "to": torch.tensor(peers),
            "confirmations": torch.stack([to_tensor(self._confirmation(self.identity, peer)) for peer in peers]),
        }

    def _digest_of(self, arrived: Collection[int]) -> bytes:
        return _digest(self.session.digest + b"".join(map(identity_bytes, sorted(arrived))))

    def _confirmation(self, sender: int, receiver: int) -> bytes:
        """By a key that only the two have."""
        peer = receiver if sender == self.identity else sender
        key = derive(self._common_key(peer), b"confirm", self.session)
        said = identity_bytes(sender) + identity_bytes(receiver) + self._confirmed
        return hmac.digest(key, said, "sha256")

    def unmask(self, survivors: Message, inbox: Message) -> Message:
        """One share for each peer: of its seed if its vector arrived, else of its mask key. Answered once.

        Only with more than half of the peers vouching for the same survivors: a server that says to one part of the
        clients that a vector arrived, and to another that it did not, would get both secrets of its client.
        """
        self._enter(4)
        arrived = set(survivors["survivors"].tolist())
        if self._digest_of(arrived) != self._confirmed:
            raise ProtocolError(
                f"client {self.identity} is told of other survivors than it confirmed; no share is given"
            )
        vouching = {
            peer
            for peer, said in zip(inbox["senders"].tolist(), inbox["confirmations"], strict=True)
            if peer in arrived & set(self._inbox)
            and hmac.compare_digest(from_tensor(said), self._confirmation(peer, self.identity))
        }
        if len(vouching) < self.session.needed:
            raise SecureSumAborted(
                f"{len(vouching)} peers were told of the same survivors as client {self.identity}, and "
                f"{self.session.needed} are needed; no share is given"
            )
        shares = []
        for peer, letter in self._inbox.items():
            opened = self._open(peer, letter)
            shares.append(opened[shamir.SHARE_BYTES :] if peer in arrived else opened[: shamir.SHARE_BYTES])
        return {
            "owners": torch.tensor(list(self._inbox)),
            "shares": torch.stack([to_tensor(share) for share in shares]),
        }

    def state(self) -> Tensor:
        """All that the client keeps between two exchanges, always as many bytes. A secret: it never leaves the client.

        After the last exchange its keys and letters are forgotten.
        """
        about = bytes([self._stage]) + self._least.to_bytes(8, "big") + self.session.digest + self._confirmed
        secret = self._seal_key.private_bytes_raw() + self._mask_key.private_bytes_raw() + self._seed
        for peer in self.peers:
            secret += b"".join(self._public.get(peer, _NO_KEYS)) + self._inbox.get(peer, bytes(_LETTER))
        return to_tensor(about + (bytes(len(secret)) if self._stage == len(_EXCHANGES) else secret))

    @classmethod
    def from_state(
        cls, session: SecureSession, identity: int, state: Tensor, *, pinned: Mapping[int, bytes] | None = None
    ) -> SecureClient:
        """The client that ``state`` was taken of; ``ProtocolError`` if it was in another session."""
        read = io.BytesIO(from_tensor(state)).read
        client = cls(session, identity, pinned=pinned)
        client._stage, client._least = read(1)[0], int.from_bytes(read(8), "big")
        if read(KEY_BYTES) != session.digest:
            raise ProtocolError(f"client {identity} is asked to go on in a session that it has not begun")
        client._confirmed = read(KEY_BYTES)
        client._seal_key = X25519PrivateKey.from_private_bytes(read(KEY_BYTES))
        client._mask_key = X25519PrivateKey.from_private_bytes(read(KEY_BYTES))
        client._seed = read(KEY_BYTES)
        for peer in client.peers:
            keys, letter = (read(KEY_BYTES), read(KEY_BYTES)), read(_LETTER)
            if keys != _NO_KEYS:
                client._public[peer] = keys
            if any(letter):
                client._inbox[peer] = letter
        return client

    def _enter(self, stage: int) -> None:
        if self._stage != stage:
            names = (*_EXCHANGES, "nothing more")
            raise ProtocolError(
                f"client {self.identity} is asked to {names[stage]}, but its next step is {names[self._stage]}"
            )
        self._stage += 1

    def _letter_key(self, peer: int, sender: int, receiver: int) -> tuple[AESGCM, bytes]:
        label = b"letter" + identity_bytes(sender) + identity_bytes(receiver)
        return AESGCM(derive(self._common_key(peer), label, self.session)), label

    def _common_key(self, peer: int) -> bytes:
        if peer not in self._agreed:  # once for all that the two say to each other
            self._agreed[peer] = agree(self._seal_key, self._public[peer][0])
        return self._agreed[peer]

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

    def __init__(self, session: SecureSession) -> None:
        self.session = session
        self.accused: dict[int, str] = {}  # clients that were found to lie, and of what
        self._keys: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._sharers: dict[int, Tensor] = {}  # client -> digest of its seed
        self._promised: dict[tuple[int, int], bytes] = {}  # owner, holder -> digests of the two shares
        self._survivors: set[int] = set()
        self._total = np.zeros(session.length, dtype=np.uint32)

    def keys(self, replies: Mapping[int, Message]) -> dict[int, Message]:
        """From the advertised keys, what each client gets: the keys of its peers."""
        self._keys = {
            identity: (reply["seal_key"], reply["mask_key"], reply["signature"]) for identity, reply in replies.items()
        }
        self._require(len(self._keys) - 1, "advertised keys")
        sent = {}
        for identity in self._keys:
            peers = [peer for peer in self.session.peers(identity) if peer in self._keys]
            self._require(len(peers), f"peers of client {identity} advertised keys")
            seals, masks, signatures = zip(*(self._keys[peer] for peer in peers), strict=True)
            sent[identity] = {
                "peers": torch.tensor(peers),
                "seal_keys": torch.stack(seals),
                "mask_keys": torch.stack(masks),
                "signatures": torch.stack(signatures),
            }
        return sent

    def letters(self, replies: Mapping[int, Message]) -> dict[int, Message]:
        """From the sealed shares, what each client gets: the letters that its peers wrote to it."""
        self._sharers = {identity: reply["seed_digest"] for identity, reply in replies.items()}
        self._require(len(self._sharers) - 1, "shared their keys")
        for sender, reply in replies.items():
            for receiver, digests in zip(reply["to"].tolist(), reply["share_digests"], strict=True):
                self._promised[sender, receiver] = from_tensor(digests)
        return self._pass_on(replies, "sealed", "letters", "shared their keys")

    def confirmations(self, replies: Mapping[int, Message]) -> dict[int, Message]:
        """What each survivor gets of the others: that they were told the same about who is left."""
        return self._pass_on(replies, "confirmations", "confirmations", "confirmed who is left")

    def _pass_on(self, replies: Mapping[int, Message], sent: str, received: str, done: str) -> dict[int, Message]:
        """What clients sent to each other, by receiver."""
        inbox: dict[int, tuple[list[int], list[Tensor]]] = {identity: ([], []) for identity in replies}
        for sender, reply in replies.items():
            for receiver, letter in zip(reply["to"].tolist(), reply[sent], strict=True):
                if receiver in inbox:
                    inbox[receiver][0].append(sender)
                    inbox[receiver][1].append(letter)
        for identity, (senders, _) in inbox.items():
            self._require(len(senders), f"peers of client {identity} {done}")
        return {
            who: {"senders": torch.tensor(senders), received: torch.stack(letters)}
            for who, (senders, letters) in inbox.items()
        }

    def receive(self, identity: int, reply: Message) -> None:
        """Add one masked vector; the server keeps the running sum only."""
        masked = reply["masked"]
        if identity not in self._sharers or identity in self._survivors:
            raise ProtocolError(f"a masked vector of client {identity} came twice, or from one that shared no keys")
        dtype, shape = self.session.ring.form(self.session.length)
        form = f"{' × '.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
        if masked.dtype != dtype or masked.shape != shape:
            raise ProtocolError(
                f"expected {form} numbers from client {identity}, got {masked.dtype} "
                f"{tuple(masked.shape)}; its vector is left out"
            )
        self._total += self.session.ring.unpack(masked)
        self._survivors.add(identity)

    def survivors(self) -> Message:
        """Whose vectors arrived: what every survivor is told; aborts if they are too few for the sum to be opened."""
        for identity in self._sharers:
            left = len(self._survivors & set(self.session.peers(identity)))
            self._require(left, f"peers of client {identity} sent their vectors")
        return {"survivors": torch.tensor(sorted(self._survivors))}

    def open(self, replies: Mapping[int, Message]) -> Tensor:
        """Take the masks off with the survivors' shares: the sum over the survivors, float64."""
        held = self._collect_shares(replies)
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

    def _collect_shares(self, replies: Mapping[int, Message]) -> dict[int, dict[int, bytes]]:
        """The shares of every owner's secret by their points; those that were not promised are left out."""
        held: dict[int, dict[int, bytes]] = {identity: {} for identity in self._sharers}
        wrong: list[tuple[int, int]] = []
        for holder, reply in replies.items():
            for owner, share in zip(reply["owners"].tolist(), reply["shares"], strict=True):
                if owner not in held or holder not in self._survivors:
                    continue
                both, data = self._promised.get((owner, holder), b""), from_tensor(share)
                if _digest(data) == (both[KEY_BYTES:] if owner in self._survivors else both[:KEY_BYTES]):
                    held[owner][holder + 1] = data
                else:
                    wrong.append((owner, holder))
        for owner, holder in wrong:
            # Of the two one lies: the owner if its shares are wrong at others too, else the holder.
            if sum(one == owner for one, _ in wrong) > sum(other == holder for _, other in wrong):
                self.accused[owner] = "gave its peers other shares of its secrets than it promised"
            else:
                self.accused[holder] = f"altered its share of client {owner}'s secret"
        return held

    def _require(self, count: int, what: str) -> None:
        if count < self.session.needed:
            raise SecureSumAborted(
                f"only {count} {what}, {self.session.needed} are needed: too many clients dropped out; no vector was "
                f"revealed: ask again with a new session{self._blame()}"
            )

    def _verify(self, owner: int, found: bytes, promised: Tensor) -> None:
        if found != from_tensor(promised):
            raise SecureSumAborted(
                f"the shares of client {owner} do not give its key: client {owner} shared another; the sum stays closed"
            )

    def _blame(self) -> str:
        return "".join(f"; client {who} {what}" for who, what in sorted(self.accused.items()))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
