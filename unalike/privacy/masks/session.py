"""What the two sides of a secure sum agree on: the ring of integers, who is whose peer, keys and masks."""

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

from unalike.privacy.checks import check_at_least, check_positive

Message = dict[str, Tensor]
KEY_BYTES = 32
WIDEST = 4  # bytes of a number


@dataclass(frozen=True)
class Ring:
    """Numbers in [−bound, bound] as integers of ``width`` bytes of which ``clients`` can be added without overflow.

    Sums are computed modulo 2^32, of which any smaller power of two is a divisor; only what is sent has the width.
    """

    bound: float
    clients: int
    room: float = 0.0  # beyond the sum of bounds, for noise
    width: int = WIDEST

    def __post_init__(self) -> None:
        check_positive(self.bound, "bound", "give the largest magnitude of a coordinate, for example the clip")
        check_at_least(self.clients, 2, "clients", "a sum of one client is that client's data")
        if self.clients > 1 << 20:
            raise ValueError(f"at most {1 << 20} clients fit the ring, got {self.clients}; sum in groups")
        if not 1 <= self.width <= WIDEST or self.largest < 1:
            raise ValueError(f"{self.width} bytes hold no sum of {self.clients} clients; expected up to {WIDEST}")

    @property
    def largest(self) -> int:
        """The integer that stands for ``bound``."""
        return int((2 ** (8 * self.width - 1) - 1) / (self.clients + self.room / self.bound))

    @property
    def step(self) -> float:
        return self.bound / self.largest

    def encode(self, value: Tensor) -> NDArray[np.uint32]:
        """The nearest grid points of a flat vector, as residues; refuses a coordinate beyond the bound."""
        if not bool(torch.isfinite(value).all()):
            raise ValueError(
                "the vector has NaN or infinite entries, which no sum survives; clip it before it is masked"
            )
        grid = torch.round(value.detach().to(torch.float64) / self.step)
        if value.numel() and float(grid.abs().max()) > self.largest:
            raise ValueError(
                f"the vector has a coordinate beyond the bound of {self.bound:g}, which the sum has no room for; clip "
                "it before it is masked"
            )
        return grid.to(torch.int32).numpy().view(np.uint32)

    def decode(self, total: NDArray[np.uint32]) -> Tensor:
        """The sum of encoded vectors as float64."""
        unused = 8 * (WIDEST - self.width)
        signed = (total << np.uint32(unused)).view(np.int32) >> np.int32(unused)
        return torch.from_numpy(signed).to(torch.float64) * self.step

    def form(self, length: int) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of so many numbers as they are sent."""
        return (torch.int32, (length,)) if self.width == WIDEST else (torch.uint8, (length, self.width))

    def pack(self, residues: NDArray[np.uint32]) -> Tensor:
        """Residues as they are sent: integers, or their lowest bytes [n, width]."""
        if self.width == WIDEST:
            return torch.from_numpy(residues.view(np.int32))
        parts = residues.astype("<u4").view(np.uint8).reshape(-1, WIDEST)[:, : self.width]
        return torch.from_numpy(parts.copy())

    def unpack(self, sent: Tensor) -> NDArray[np.uint32]:
        """The inverse, but for the bytes that were not sent."""
        if self.width == WIDEST:
            return sent.contiguous().numpy().view(np.uint32)
        whole = np.zeros((len(sent), WIDEST), dtype=np.uint8)
        whole[:, : self.width] = sent.numpy()
        return whole.reshape(-1).view("<u4").astype(np.uint32)

    @classmethod
    def width_for(cls, bits: int, clients: int) -> int:
        """The fewest bytes in which each client's numbers have so many bits."""
        return min(WIDEST, math.ceil((bits + math.log2(clients)) / 8))


@dataclass(frozen=True)
class SecureSession:
    """What server and clients agree on before one secure sum; identities are whole numbers of at least 0.

    A client holds on to the ``digest`` of all of it from its first message on, and every key is derived from that: in a
    session that differs in anything, nothing opens.

    ``neighbours``: how many peers each client has; None: all others. More than half of them are ``needed`` to the end,
    so that no two groups of peers can each give away one of a client's two secrets.
    ``planned``: the fewest and the most clients that there could have been, where how many there are is a secret. The
    ring and the clients' shares of noise then follow from these.
    """

    identities: tuple[int, ...]
    length: int
    bound: float
    neighbours: int | None = None
    noise: float = 0.0  # the deviation of the noise that clients add in shares: the ring has room for it
    planned: tuple[int, int] | None = None
    number: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    purpose: str = ""  # stands for the run, the ask and the task whose arrays are summed
    width: int = WIDEST  # bytes of a number on its way

    def __post_init__(self) -> None:
        if len(set(self.identities)) != len(self.identities) or any(identity < 0 for identity in self.identities):
            raise ValueError(f"the identities must be distinct and at least 0, got {self.identities[:10]}")
        check_at_least(self.length, 1, "length", "give the number of coordinates of the vector")
        if len(self.identities) < 3:
            raise ValueError(
                f"a secure sum needs at least 3 clients, got {len(self.identities)}; of two, each learns the other's "
                "vector from the sum: sample more clients"
            )
        if len(self.identities) > self.most:
            raise ValueError("a sample of a size that is almost impossible: the sum stays closed; draw another")
        _ = self.ring
        most = len(self.identities) - 1
        if self.neighbours is not None and (self.neighbours % 2 or not 2 <= self.neighbours <= most):
            raise ValueError(
                f"neighbours must be even and from 2 to {most}, got {self.neighbours}; None makes everybody a peer"
            )

    def message(self) -> Message:
        """The session as tensors, for the first message to a client; all of it is public."""
        return {
            "identities": torch.tensor(self.identities),
            "length": torch.tensor(self.length),
            "bound": torch.tensor(self.bound, dtype=torch.float64),
            "neighbours": torch.tensor(self.neighbours or 0),
            "noise": torch.tensor(self.noise, dtype=torch.float64),
            "planned": torch.tensor(self.planned or (0, 0)),
            "number": to_tensor(self.number),
            "purpose": to_tensor(self.purpose.encode()),
            "width": torch.tensor(self.width),
        }

    @classmethod
    def from_message(cls, message: Message) -> SecureSession:
        return cls(
            tuple(message["identities"].tolist()),
            int(message["length"]),
            float(message["bound"]),
            int(message["neighbours"]) or None,
            float(message["noise"]),
            (int(message["planned"][0]), int(message["planned"][1])) if bool(message["planned"].any()) else None,
            from_tensor(message["number"]),
            from_tensor(message["purpose"]).decode(),
            int(message["width"]),
        )

    @cached_property
    def digest(self) -> bytes:
        """Of everything that the session says."""
        parts = {name: value.numpy().tobytes() for name, value in self.message().items()}
        framed = b"".join(name.encode() + b":" + identity_bytes(len(part)) + part for name, part in parts.items())
        return hashlib.sha256(framed).digest()

    @property
    def ring(self) -> Ring:
        return Ring(self.bound, self.most, self._room, self.width)

    @property
    def _room(self) -> float:
        """For the noise of all clients together: twelve deviations."""
        return 12.0 * self.noise * math.sqrt(self.most / self.least)

    @property
    def most(self) -> int:
        """As many clients the ring has room for, and as many shares of noise a sum has in the end."""
        return len(self.identities) if self.planned is None else self.planned[1]

    @property
    def least(self) -> int:
        """The fewest clients with whom the sum is opened; a client helps no fewer (``SecureClient.unmask``)."""
        return (len(self.identities) if self.planned is None else self.planned[0]) // 2 + 1

    @property
    def peer_count(self) -> int:
        """How many peers each client has."""
        return self.neighbours if self.neighbours is not None else len(self.identities) - 1

    @property
    def needed(self) -> int:
        """How many of a client's peers must stay to the end."""
        return self.peer_count // 2 + 1

    def peers(self, identity: int) -> tuple[int, ...]:
        """The clients with whom this one shares masks and keys, in rising order."""
        if self.neighbours is None:
            return tuple(sorted(other for other in self.identities if other != identity))
        order = _shuffled(self.identities, self.number)
        place, half = order.index(identity), self.neighbours // 2
        around = [order[(place + step) % len(order)] for step in range(-half, half + 1) if step]
        return tuple(sorted(around))


@lru_cache(maxsize=16)
def _shuffled(identities: tuple[int, ...], number: bytes) -> tuple[int, ...]:
    """An order that nobody chose: by a hash of the session's random number and the identity."""
    return tuple(sorted(identities, key=lambda one: hashlib.sha256(number + identity_bytes(one)).digest()))


def identity_bytes(identity: int) -> bytes:
    return identity.to_bytes(8, "big")


def agree(own: X25519PrivateKey, other: bytes) -> bytes:
    """The secret that the two have in common."""
    return own.exchange(X25519PublicKey.from_public_bytes(other))


def derive(secret: bytes, label: bytes, session: SecureSession) -> bytes:
    """A key from a common secret, for this session and this use only."""
    return HKDF(SHA256(), KEY_BYTES, salt=session.digest, info=b"unalike secure sum " + label).derive(secret)


def expand(seed: bytes, session: SecureSession) -> NDArray[np.uint32]:
    """A seed as a uniform vector of the ring: AES-CTR's key stream (from counter 0, because a seed is used once)."""
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(4 * session.length))
    return np.frombuffer(stream, dtype="<u4")


def add_common_mask(
    total: NDArray[np.uint32], own: X25519PrivateKey, other: bytes, me: int, peer: int, session: SecureSession
) -> None:
    """Add the mask of a pair of clients, in place: the lower identity adds it, the higher subtracts it."""
    label = b"mask" + identity_bytes(min(me, peer)) + identity_bytes(max(me, peer))
    mask = expand(derive(agree(own, other), label, session), session)
    if me < peer:
        total += mask
    else:
        total -= mask


def to_tensor(data: bytes) -> Tensor:
    """Bytes as a uint8 tensor."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def from_tensor(tensor: Tensor) -> bytes:
    """The bytes of a uint8 tensor."""
    return tensor.contiguous().numpy().tobytes()
