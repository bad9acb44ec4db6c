"""The gap to the optimum, where a run's problem is convex (the model `linear`). A simulation's own view."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor

from unalike.core.federation import Federation
from unalike.core.method import Method, State, TrainsLocally
from unalike.learn.local import LocalSGD
from unalike.learn.optimum import Optimum
from unalike.networks.classifiers import Linear


class Gap:
    """How far a run's common model is from the best one; the minimum is found once, when it is first asked for."""

    def __init__(self, method: Method, federation: Federation, simulated: bool = True) -> None:
        self._method, self._federation = method, federation
        model = method.model
        self._convex = simulated and issubclass(model.kind, Linear) and bool(federation.roster.labeled.any())

    def measure(self, state: State) -> dict[str, float]:
        """For a round's metrics: the gap and the heterogeneity H; empty where there is no such thing."""
        if not self._convex:
            return {}
        with self._federation.aside() as aside:
            models = self._method.personalize(state, aside.everyone())
        if not isinstance(models, Tensor) or (len(models) > 1 and models.stride(0) != 0):
            return {}  # clients have models of their own
        gap = self._optimum.gap(models[0], self._federation)
        return {"gap": gap, "heterogeneity": self._optimum.heterogeneity}

    def why_diverged(self) -> str:
        """Which step was too long, if that can be told; empty otherwise."""
        local = self._local
        if not self._convex or local is None or not isinstance(local.lr, float | int):
            return ""
        curvature = self._optimum.curvature / (1 if self._sums else int(self._federation.roster.bound.max()))
        curvature += local.weight_decay + getattr(self._method, "proximal_curvature", 0.0)
        if not local.lr * curvature > 2:
            return ""
        return (
            f"η·λ_max = {local.lr:g} · {curvature:.3g} = {local.lr * curvature:.3g}, and a gradient step runs away "
            f"where that is above 2; use a rate below {2 / curvature:.2g}"
        )

    @cached_property
    def _optimum(self) -> Optimum:
        decay = 0.0 if self._local is None else self._local.weight_decay
        roster = self._federation.roster
        clients = int(roster.labeled.sum())
        weight = clients if self._sums else int(roster.bound[roster.labeled].sum())  # in units of F, a sum
        return Optimum.find(self._federation, self._method.model.size, decay * weight)

    @property
    def _sums(self) -> bool:
        return getattr(self._method, "losses", "mean") == "sum"

    @property
    def _local(self) -> LocalSGD | None:
        local: Any = self._method.local if isinstance(self._method, TrainsLocally) else None
        return local if isinstance(local, LocalSGD) else None
