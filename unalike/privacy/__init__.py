"""Privacy: mechanisms, the ledger and the budget. Only this package imports dp_accounting, and only
where an event of noise is made or accounted: a run without noise does not wait for it."""

from unalike.privacy.account import BARE, Unaccountable
from unalike.privacy.ledger import Budget, BudgetExceeded, Charge, Ledger
from unalike.privacy.masks.protocol import ProtocolError, SecureClient, SecureServer, SecureSumAborted
from unalike.privacy.masks.session import Ring, Session
from unalike.privacy.mechanisms import (
    AdditiveNoise,
    Exponential,
    Gaussian,
    Laplace,
    Quantizer,
    RandomizedResponse,
    clip,
)
from unalike.privacy.sampling import Everyone, FixedSize, Local, Poisson, Sampling
from unalike.privacy.system import SystemDraws

__all__ = [
    "BARE",
    "AdditiveNoise",
    "Budget",
    "BudgetExceeded",
    "Charge",
    "Everyone",
    "Exponential",
    "FixedSize",
    "Gaussian",
    "Laplace",
    "Ledger",
    "Local",
    "Poisson",
    "ProtocolError",
    "Quantizer",
    "RandomizedResponse",
    "Ring",
    "Sampling",
    "SecureClient",
    "SecureServer",
    "SecureSumAborted",
    "Session",
    "SystemDraws",
    "Unaccountable",
    "clip",
]
