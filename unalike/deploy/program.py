"""What a shard elsewhere agrees to run: an explicit list of tasks, made by the installed code. All else is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from unalike.analytics.estimation.regression import read_risk
from unalike.analytics.estimation.shared import read_estimate
from unalike.analytics.kmeans.client import squared_distances
from unalike.analytics.mdm.algorithm import MDM
from unalike.core.method import ClientPrivate, Method, tasks_of
from unalike.core.release import Release, Terms
from unalike.core.request import Program
from unalike.core.schema import Schema
from unalike.core.secure import EXCHANGES
from unalike.core.task import Task
from unalike.deploy import plain
from unalike.learn.evaluation import Scorer
from unalike.learn.optimum import Losses
from unalike.learn.scaling import PrivateScaling, Scaling
from unalike.privacy.sampling import Poisson
from unalike.runs.prepare import Prepared
from unalike.runs.privacy import noise_of, sampling_rate

_MEASURES = (squared_distances, read_estimate, read_risk)  # of analyses: a simulation's own view
READING = {read_estimate.name, read_risk.name}  # what clients keep
_MEASURED = {task.function for task in (*_MEASURES, MDM.validation)}


def program_of(
    method: Method,
    schema: Schema,
    *,
    terms: Terms = Terms(),
    simulated: bool = False,
    scaling: PrivateScaling | None = None,
) -> Program:
    """The method's tasks, scoring, scaling, and the exchanges of a secure sum.

    scaling: where inputs are scaled by noisy statistics; then nobody gives exact ones.
    simulated: the clients are a simulation's, which may also measure how far a convex problem is from its minimum.
    """
    owners = (
        method,
        Scorer(method.model),
        scaling or Scaling(schema.kind, schema.gaps),
        *([Losses()] if simulated else []),
    )
    tasks = [task for owner in owners for task in tasks_of(owner)]
    return Program(tasks, terms=terms, exchanges=EXCHANGES, private=terms.system, measured=tasks if simulated else ())


def program_of_run(prepared: Prepared, simulated: bool = True) -> Program:
    """What both sides know from the recipe: the tasks that clients run, and where the noise comes from."""
    trust = prepared.recipe.privacy.trust
    terms = Terms(noise_of(prepared.recipe), trust, cohort=_cohort_sizes(prepared) if trust == "nobody" else None)
    return program_of(
        prepared.method, prepared.roster.schema, terms=terms, simulated=simulated, scaling=prepared.scaling
    )


def _cohort_sizes(prepared: Prepared) -> tuple[int, int] | None:
    """The fewest and the most clients that a round's Poisson cohort has, so that no server can claim more."""
    if not isinstance(prepared.method, ClientPrivate):
        return None
    rate = sampling_rate(prepared.method.cohort, prepared.roster)
    return Poisson(rate).sizes(int(prepared.roster.labeled.sum()))


def program_of_analysis(terms: Terms, algorithms: Iterable[object] = (), measures: bool = True) -> Program:
    """The tasks of some algorithms. With an ε nothing leaves a shard without noise but what a simulation measures.

    measures: what only a simulation, or a site that consents to it, lets out.
    """
    tasks = [*(task for one in algorithms for task in tasks_of(one)), *(_MEASURES if measures else ())]
    measured = [task for task in tasks if measures and task.function in _MEASURED]
    return Program(tasks, terms=terms, exchanges=EXCHANGES, private=terms.system, measured=measured)


class TaughtProgram(Program):
    """The program of workers, as this process knows it.

    Before it asks for a task of an algorithm that the workers do not know, it tells them its class and settings.
    """

    def __init__(self, tell: Callable[[bytes], object], terms: Terms) -> None:
        super().__init__(_MEASURES, terms=terms, exchanges=EXCHANGES)
        self._tell, self._last = tell, object()
        self._owners: dict[str, object] = {}  # by class: one of its settings is known at a time

    def teach(self, task: Task, releases: Sequence[Release], terms: Terms = Terms()) -> None:
        if task.owner is not None and task.owner is not self._last:
            self._learn(task.owner)
        super().teach(task, releases, terms)

    def _learn(self, owner: object) -> None:
        before = plain.encode(list(self._owners.values()))
        self._owners[type(owner).__name__] = self._last = owner
        data = plain.encode(list(self._owners.values()))
        if data != before:
            self._tasks |= {one.name: one for one in tasks_of(owner)}
            self.dry_runs.clear()  # of tasks of the same names with other settings
            self._tell(data)
