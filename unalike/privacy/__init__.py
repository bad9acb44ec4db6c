"""Privacy: mechanisms, the ledger, budgets, calibration and the masks of secure sums.

Only this package imports dp_accounting. The import takes a second, so it happens only when a noisy release is made or
accounted for: a run without noise does not pay for it.
"""

from unalike.privacy.account import BARE, Unaccountable
from unalike.privacy.ledger import Budget, BudgetExceeded, Charge, Ledger
from unalike.privacy.masks.protocol import ProtocolError, SecureClient, SecureServer, SecureSumAborted
from unalike.privacy.masks.session import Ring, SecureSession
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
    "SecureSession",
    "SecureSumAborted",
    "SystemDraws",
    "Unaccountable",
    "clip",
]
