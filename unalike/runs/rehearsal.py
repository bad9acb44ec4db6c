"""Choosing hyperparameters on simulated clients, so that the real ones train once (T1 §3.4).

The real clients give one thing: a mixture of Dirichlet-multinomials of their label histograms, with noise where an ε is
stated. The server deals its own rows out by it, and searches there as often as it likes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from unalike.analytics.mdm.counts import histogram_clients
from unalike.analytics.mdm.study import Histograms, MixturePrivacy, fit_mixture
from unalike.core.disk import write_whole
from unalike.data import load
from unalike.data.population import Population
from unalike.runs.errors import FLAG, UserError
from unalike.runs.recipe.recipe import Recipe
from unalike.runs.simulate import simulate

MIXTURE, _RECORD = "clients.json", "rehearsal.json"
_SURE = 0.95  # of the server's rows: clients of random sizes may want more than their mean


@dataclass(frozen=True)
class Rehearsal:
    """The server's own data, which are public, and what the real clients' histograms may cost.

    - ``server``: a named source or file with the same inputs and classes as the real clients' data.
    - ``epsilon``, ``delta``, ``unit``: of the mixture; None: it is fitted without noise.
    - ``largest``: with unit "client", the most rows that a client may have: a public number.
    - ``components``: of the mixture; of several the one is taken that held-out clients are likeliest under.
    - ``clients``: how many to simulate; None: as many as there are real ones, or as the server has rows for.
    """

    server: str
    epsilon: float | None = None
    delta: float | None = None
    unit: Literal["client", "point"] = "client"
    largest: int | None = None
    components: Sequence[int] = (1, 2, 3, 4)
    clients: int | None = None

    def prepare(self, recipe: Recipe, population: Population, out: Path) -> tuple[Recipe, dict[str, Any]]:
        """The recipe on simulated clients, and what the real ones' mixture cost; it is fitted once for a folder."""
        if population.classes is None or not population.has_labels:
            raise UserError(f"{population.name}: clients are simulated by their classes, of which there are none")
        asked = {**asdict(self), "components": list(self.components), "seed": recipe.seed}
        asked["data"] = recipe.data.model_dump(mode="json")
        if (out / _RECORD).exists():
            record: dict[str, Any] = json.loads((out / _RECORD).read_text())
            if record["asked"] != asked:
                raise UserError(
                    f"{out} holds a rehearsal of other data or with another budget: repeat the same command to go on "
                    f"with it, or choose another folder{FLAG}",
                    "out",
                )
        else:
            out.mkdir(parents=True, exist_ok=True)
            cost, mean_size = self._fit(recipe, population, out / MIXTURE)
            options: dict[str, Any] = {"partition": "iid", "clients": 1, "test": 0.0, "unseen": 0, "normalize": False}
            rows = int(load(self.server, **options, **recipe.data.options).sizes.sum())
            enough = self.clients or max(1, min(len(population), int(_SURE * rows / mean_size)))
            record = {"asked": asked, "cost": cost, "clients": enough}
            write_whole(out / _RECORD, json.dumps(record, indent=1).encode())
        return self._simulated(recipe, record["clients"], out / MIXTURE), record["cost"]

    def _fit(self, recipe: Recipe, population: Population, file: Path) -> tuple[dict[str, Any], float]:
        """Fit the mixture of the training clients' histograms and save it: what it cost, and a client's mean size."""
        train, validation = population.histogram(population.train), population.histogram(population.validation)
        own = (train + validation)[population.seen]  # test rows choose nothing
        counts = own[own.sum(1) > 0]
        privacy = None
        if self.epsilon is not None:
            privacy = MixturePrivacy(self.epsilon, self.delta, self.unit)
        federate = partial(simulate, noise="seeded" if privacy is None else "system")
        names = None if population.class_names is None else [str(name) for name in population.class_names]
        given = Histograms(histogram_clients(counts), names=names, most=int(counts.sum(1).max()))
        how: dict[str, Any] = {"components": list(self.components), "privacy": privacy, "largest": self.largest}
        found = fit_mixture(given, federate, seed=recipe.seed, **how)
        found.mixture.save(file, names)
        cost: dict[str, Any] = {"epsilon": None if math.isinf(found.epsilon) else found.epsilon, "unit": self.unit}
        delta = None if found.privacy is None else found.privacy.delta
        cost = {**cost, "delta": delta, "clients": len(counts), "components": found.mixture.components}
        return cost, found.mixture.mean_size

    def _simulated(self, recipe: Recipe, clients: int, file: Path) -> Recipe:
        """The same recipe, with the server's rows dealt out by the mixture."""
        if recipe.data.samples is not None:
            raise UserError(f"sizes of simulated clients are the mixture's: leave samples{FLAG} out", "data.samples")
        dealt = {"name": self.server, "partition": f"mdm:{file}", "clients": clients, "test": 0.0}
        return recipe.model_copy(update={"data": recipe.data.model_copy(update=dealt)})
