"""Shamir's secret sharing (1979) of 32-byte keys: any ``threshold`` shares give the key, fewer say nothing about it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

from unalike.privacy.checks import check_at_least

PRIME = 2**257 - 93  # the largest prime of 257 bits: every 32-byte key is an element of its field
SECRET_BYTES = 32
SHARE_BYTES = 33


class NotEnoughShares(RuntimeError):
    """Fewer shares than the threshold: the secret cannot be known."""


def split(secret: bytes, threshold: int, points: Sequence[int]) -> dict[int, bytes]:
    """One share for every point (distinct, above 0): values of a random polynomial of degree threshold − 1."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the secret must be {SECRET_BYTES} bytes, got {len(secret)}; share a key, not the data")
    check_at_least(threshold, 1, "threshold", "give how many shares must come together")
    if len(set(points)) != len(points) or any(not 0 < point < PRIME for point in points):
        raise ValueError(f"the points must be distinct and above 0, got {list(points)}; at 0 lies the secret itself")
    if threshold > len(points):
        raise ValueError(f"{len(points)} shares cannot reach a threshold of {threshold}; lower it")
    # Every coefficient is uniform, the leading one included: were it never 0, a share less would exclude a secret.
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {point: _value(coefficients, point).to_bytes(SHARE_BYTES, "big") for point in points}


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, from at least ``threshold`` shares by their points."""
    if len(shares) < threshold:
        raise NotEnoughShares(f"{threshold} shares are needed, {len(shares)} came; too many clients dropped out")
    points = tuple(sorted(shares)[:threshold])
    weights = _weights_at_zero(points)
    secret = sum(w * int.from_bytes(shares[x], "big") for w, x in zip(weights, points, strict=True)) % PRIME
    if secret >> (8 * SECRET_BYTES):
        raise ValueError("the shares do not belong together: their secret is no 32-byte key; a share was altered")
    return secret.to_bytes(SECRET_BYTES, "big")


def _value(coefficients: Sequence[int], point: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * point + coefficient) % PRIME
    return total


@lru_cache(maxsize=256)  # one set of survivors holds the shares of many secrets
def _weights_at_zero(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights: the secret is Σ weight·share."""
    weights = []
    for x in points:
        above, below = 1, 1
        for other in points:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
