"""Tests with real processes that speak over the loopback: `make test-network`, and not part of `make test`."""

from __future__ import annotations

import importlib.util
import os

if not os.environ.get("UNALIKE_TEST_NETWORK") or importlib.util.find_spec("grpc") is None:
    collect_ignore_glob = ["test_*.py"]
