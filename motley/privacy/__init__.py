"""Privacy: mechanisms, the ledger and the budget. Only this package imports dp_accounting."""

from motley.privacy.events import Unaccountable
from motley.privacy.ledger import BARE, Budget, BudgetExceeded, Charge, Ledger
from motley.privacy.mechanisms import AdditiveNoise, Exponential, Gaussian, Laplace, Quantizer, RandomizedResponse, clip
from motley.privacy.sampling import Everyone, FixedSize, Local, Poisson, Sampling
from motley.privacy.secure_session import Ring, Session
from motley.privacy.secure_sum import ProtocolError, SecureClient, SecureServer, SecureSumAborted
from motley.privacy.system import SystemDraws

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
