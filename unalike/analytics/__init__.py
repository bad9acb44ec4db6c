"""Federated analytics: private clustering, models of how clients differ, per-client estimates.

The papers that docstrings cite as T1 and P3 are listed in ``docs/sources.md``.
"""
