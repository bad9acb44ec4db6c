"""Fits the constants of the cost model in ``benchmarks/plan.py`` to measured rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks.plan import Costs, most


def fit(measured: Sequence[Mapping[str, Any]]) -> Costs:
    """The constants of the cost model that fit these rounds best, in relative terms; the bandwidth is not fitted.

    Each has ``cohort``, ``workers``, ``client`` (seconds), ``asks``, and ``median``, the seconds that a round took.
    """
    rows, wanted = [], []
    plain = Costs()
    for one in measured:
        sending = (one["bytes_down"] + one["bytes_up"]) / plain.bandwidth
        rows.append([one["asks"] * one["workers"], most(one["cohort"], one["workers"]) * one["client"]])
        wanted.append(one["median"] - sending)
    scale = np.array([one["median"] for one in measured])[:, None]
    found, _ = nnls(np.array(rows) / scale, np.array(wanted) / scale[:, 0])
    exchange, slower = (float(value) for value in found)
    return Costs(exchange, slower, plain.bandwidth)
