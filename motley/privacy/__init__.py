"""Privacy: mechanisms, the ledger and the budget. Only this package imports dp_accounting."""

from motley.privacy.events import Unaccountable
from motley.privacy.ledger import BARE, Budget, BudgetExceeded, Charge, Ledger
from motley.privacy.mechanisms import AdditiveNoise, Exponential, Gaussian, Laplace, Quantizer, RandomizedResponse, clip
from motley.privacy.sampling import Everyone, FixedSize, Local, Poisson, Sampling
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
    "Quantizer",
    "RandomizedResponse",
    "Sampling",
    "SystemDraws",
    "Unaccountable",
    "clip",
]
