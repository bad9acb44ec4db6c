"""One run: start it or restore it, train round by round, measure, save, and finish with a result."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from unalike.core.federation import Federation, QuorumError
from unalike.core.method import DistinguishesClients, State, TrainsLocally, check_state, first_state
from unalike.data.population import Population
from unalike.learn.local import LocalSGD
from unalike.learn.metrics import score_name
from unalike.privacy import BudgetExceeded
from unalike.runs import checkpoint, fingerprint, folder, predictions
from unalike.runs.absent import Absent
from unalike.runs.data_ledger import DataLedger
from unalike.runs.errors import FLAG, Diverged, Interrupted, Note, UserError, explain_disk_errors
from unalike.runs.finished import FinishedRun, Memory
from unalike.runs.folder import RunFolder
from unalike.runs.gap import Gap
from unalike.runs.map_data import descriptors, map_data, treatment
from unalike.runs.measure import Measured, headline, measure, serves_unlabeled, validation_score
from unalike.runs.prepare import Prepared, Workers, prepare
from unalike.runs.privacy import noise_of, spent, spent_by_each
from unalike.runs.recipe.recipe import Recipe
from unalike.runs.result import ByGroup, Bytes, Result, Worker
from unalike.runs.watcher import Watcher, describe_workers
from unalike.runtime.simulate import Simulation

LR = "hyperparameters.local.lr"
MEASURING_FREE = 5.0  # seconds of measuring that nobody minds
LARGEST_LOSS = 1e4  # a training loss above it has run away: cross-entropy of a sane model is below 100


@dataclass
class Stop:
    """Whether a run was asked to stop, and by which signal."""

    by: int | None = None

    @contextlib.contextmanager
    def on_signals(self, watcher: Watcher) -> Iterator[None]:
        """Ctrl-C and SIGTERM let the round finish, because half a round cannot be saved; a second one does not wait."""

        def ask(number: int, _: object) -> None:
            if self.by is not None:
                raise KeyboardInterrupt
            self.by = number
            again = "press Ctrl-C again" if number == signal.SIGINT else "send SIGTERM again"
            watcher.note(f"stopping after this round; {again} to stop at once")

        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers
            return
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, previous in before.items():
                signal.signal(number, previous)


@dataclass(frozen=True)
class Context:
    """What a run is called, who watches it, and who may stop it."""

    label: str  # in tables
    name: str  # while it runs: the label, with the seed where there are several
    watcher: Watcher = field(default_factory=Watcher)
    folder: Path | None = None  # to resume: of the whole comparison, where the run is part of one
    stop: Stop = field(default_factory=Stop)
    keep: bool = False  # the result keeps models and data, where there is no folder


def train(
    recipe: Recipe, population: Population, out: Path | None, context: Context, workers: Workers | None = None
) -> Result:
    """Run a recipe on its data. With ``out`` everything is saved there, and a run goes on from its checkpoint."""
    if out is not None and (out / folder.CHECKPOINT).exists():
        fingerprint.check(out, population)
    prepared = prepare(recipe, population)
    if out is None:
        return Training.start(prepared, context, None, workers).run()
    with explain_disk_errors(context.folder or out):
        new = not (out / folder.RECIPE).exists()
        if new:
            folder.create(out, prepared.recipe, context.label)
        with RunFolder(out, new, private=recipe.privacy.promises) as files:
            return Training.start(prepared, context, files, workers).run()


class Training:
    """A run between two rounds: the server's state, its federation, the files that it writes, and its clock."""

    def __init__(
        self,
        prepared: Prepared,
        context: Context,
        files: RunFolder | None,
        federation: Federation,
        state: State,
        clock: Clock,
        data_ledger: DataLedger | None = None,
    ) -> None:
        self.prepared, self.recipe, self.method = prepared, prepared.recipe, prepared.method
        self.context, self.watcher, self.files = context, context.watcher, files
        self.federation, self.state, self.clock = federation, state, clock
        self._data_ledger = data_ledger  # beside the data, of what all runs on them cost
        self.validation: float | None = None
        self.failures = 0  # replies that clients failed to give
        self.measured: list[Measured] | None = None
        self.stopped: str | None = None  # why it ends before its last round
        self._resumed = federation.round > 0
        self.records: list[dict[str, Any]] = []  # of each round, where no file has them
        population = prepared.population
        self.gap = Gap(self.method, federation, not (isinstance(population, Absent) and population.nodes))
        self.by, self._why_by = headline(population, self.recipe.metric, self.recipe.privacy.promises)
        self._here = isinstance(federation.runtime, Simulation)  # so are the rows
        self._validates = self._here and bool(population.validation.size.any())
        self.best: checkpoint.Best | None = None
        if self.recipe.select == "best":
            self._check_selection()
        self._first_loss: float | None = None  # of squares, which may begin above any bound
        self._ran_away = self._measured_less = False
        self._workers = federation.runtime if isinstance(federation.runtime, checkpoint.OnWorkers) else None
        if self._workers is not None:
            self._workers.waiting = self._show_workers

    @classmethod
    def start(cls, prepared: Prepared, context: Context, files: RunFolder | None, workers: Workers | None) -> Training:
        """The run before its first round, or as its folder's last checkpoint has it."""
        beside = DataLedger.of(prepared, None if files is None else files.path, context.watcher.note)
        if files is None:
            federation = prepared.federation(workers, journal=beside)
            state = first_state(prepared.method, federation.seed)
            return cls(prepared, context, None, federation, state, Clock(), beside)
        path, saved = files.path, checkpoint.load(files.path)
        charges: dict[str, Any] = {}
        if noise_of(prepared.recipe) == "system":  # what is asked before there is a checkpoint counts, too
            charges = {"journal": checkpoint.journal(path, beside), **checkpoint.recall_charges(path)}
        if saved is None:
            federation = prepared.federation(workers, path, **charges)
            state, clock = first_state(prepared.method, federation.seed), Clock()
        else:
            federation = prepared.federation(workers, path, schema=folder.load_roster(path).schema)
            saved.restore(federation)
            for name, value in charges.items():
                setattr(federation, name, value)
            state, clock = saved.state, Clock(saved.about.seconds, saved.about.measuring)
        made = cls(prepared, context, files, federation, state, clock, beside)
        made.best = None if saved is None else saved.best
        made.failures = sum(int(record["failures"]) for record in files.keep_metrics(federation.round))
        if saved is None:  # the checkpoint comes last: where there is one, nobody is asked for scaling again
            fingerprint.save(path, prepared.population)
            folder.save_roster(path, federation.roster)
            checkpoint.save(path, state, federation)
        return made

    def run(self) -> Result:
        """All rounds that are left, and the result."""
        recipe = self.recipe
        self.watcher.begin(self.context.name, recipe.rounds, self.federation.round, self._score_name)
        if self._why_by:
            self.watcher.note(Note(f"{self.context.name}: {self._why_by}", "metric"))
        self._warn_of_idle_training()
        try:
            with _explain_divergence(self.gap), self.context.stop.on_signals(self.watcher):
                for number in range(self.federation.round + 1, recipe.rounds + 1):
                    try:
                        self.round(number)
                    except BudgetExceeded as error:
                        if not self._resumed or number == 1:
                            raise
                        self._end_after(number - 1, error)
                        break
            if self.best is not None and self.best.round != self.federation.round:
                self._take_best(self.best)
            if self.measured is None:  # no round was left
                self.measure(last=True)
        finally:
            self.watcher.end()
        return self.finish()

    def round(self, number: int) -> None:
        """Train, measure where it is due, save and report; raises ``Interrupted`` where the run was asked to stop."""
        if isinstance(self.federation.runtime, Simulation):
            self.federation.runtime.expect(number, self.recipe.rounds - number)
        with self.federation.train_in(number):
            trained = self.method.round(self.state, self.federation)
        self.state = check_state(trained, self.method.round)
        last = number == self.recipe.rounds
        scores: dict[str, Any] = {}
        if last or (number % self.recipe.evaluate_every == 0 and not self._measures_too_long()):
            scores = self.measure(last)
        record = self._record(exact=bool(scores))
        self.failures += len(self.federation.failures)
        stopping = self.context.stop.by is not None
        self._save(record, scores, checkpoint_due=last or stopping or number % self.recipe.checkpoint_every == 0)
        self._show_workers()
        self.watcher.round({**record, **scores})
        self._warn_of_runaway(record)
        if stopping and not last:
            within = self.files is not None and self.context.folder != self.files.path
            of = f" of {self.context.name}" if within else ""
            raise Interrupted(f"round {number} of {self.recipe.rounds}{of}", self.context.folder, self.context.stop.by)

    def _end_after(self, number: int, error: BudgetExceeded) -> None:
        """What came after the last checkpoint is charged again, so the budget may end before the rounds do."""
        self.federation.round, self.measured = number, None
        self.stopped = (
            f"the result is that of round {number} of {self.recipe.rounds}: rounds that a stop took away were charged "
            f"again, and the budget allows no more. {error}"
        )
        self.watcher.note(f"{self.context.name}: {self.stopped}")

    def measure(self, last: bool) -> dict[str, Any]:
        """Score the models of the present state: a simulation's own view, and what a round's line says of it."""
        by = replace(self.by, look=self._here and (last or self._validates or not self.by.made_at_clients))
        with self.clock.measuring():
            population = self.prepared.population
            self.measured = measure(self.method, self.state, self.federation, population, newcomers=last, by=by)
            gap = self.gap.measure(self.state) if self.federation.round else {}
            self.validation = validation_score(self.measured, by)
        found = {} if self.validation is None else {"validation": self.validation}
        best = math.nan if self.validation is None or self.recipe.select == "last" else self.validation
        if best > (-math.inf if self.best is None else self.best.score):
            self.best = checkpoint.Best(self.federation.round, best, self.state, self._kept())
        return {**_finite(gap), **_by_group(self.measured).model_dump(), **found}

    def _measures_too_long(self) -> bool:
        """Has measuring become dearer than half the training, where nobody said how often to measure? Then it waits."""
        spent = self.clock.read()
        if self.recipe.eval_every is not None or self.recipe.select == "best":
            return False
        if spent["measuring"] <= max(MEASURING_FREE, spent["seconds"] / 2):
            return False
        if not self._measured_less:
            self._measured_less = True
            self.watcher.note(
                Note(
                    f"{self.context.name}: it takes long to make a model for everybody, so scores are measured less "
                    f"often; set eval_every = {self.recipe.evaluate_every}{FLAG} to measure as often as before",
                    "eval_every",
                )
            )
        return True

    def _check_selection(self) -> None:
        """Refuse a choice of the round that nothing can be chosen by, or that no noise would protect."""
        if self.recipe.privacy.promises:
            raise UserError(
                f"select = 'best'{FLAG}: exact scores on validation rows would choose what is published, and no ε "
                "counts that; take the last round",
                "select",
            )
        if not self._validates:
            raise UserError(
                f"select = 'best'{FLAG}: the best round is chosen on validation rows of clients in this process; set "
                f"some aside with validation = 0.2{FLAG}",
                "select",
                "data.validation",
            )

    def _kept(self) -> dict[str, Tensor]:
        """A copy of what clients keep, as far as it is in this process."""
        runtime = self.federation.runtime
        kept = runtime.kept(self.federation.run) if isinstance(runtime, Simulation) else {}
        return {name: value.clone() for name, value in kept.items()}

    def _take_best(self, best: checkpoint.Best) -> None:
        """Take the models of the best round in place of the last one's, and measure them as they were then."""
        self.state = best.state
        if isinstance(self.federation.runtime, Simulation):
            self.federation.runtime.restore(self.federation.run, best.kept)
        with self._in_round(best.round):
            self.measure(last=True)

    @contextlib.contextmanager
    def _in_round(self, number: int) -> Iterator[None]:
        """Ask clients as in an earlier round: their draws depend on it."""
        last, self.federation.round = self.federation.round, number
        try:
            yield
        finally:
            self.federation.round = last

    @property
    def _served_round(self) -> int:
        """Of which the result's models are."""
        return self.federation.round if self.best is None else self.best.round

    @property
    def _score_name(self) -> str:
        return score_name(self.by.name)

    def finish(self) -> Result:
        """The result; with a folder also the files of a finished run."""
        assert self.measured is not None
        result = self._result(self.measured)
        if self.files is not None:
            if self.federation.round == 0:  # no round was asked for: the start is all there is
                self.files.add_metrics(self._record(exact=True), _by_group(self.measured).model_dump())
            self.files.sync_metrics()
            self._write_outcome(self.files.path, self.measured, result)
        for line in [] if self._data_ledger is None else self._data_ledger.words():
            self.watcher.note(line)
        return result

    def _record(self, exact: bool) -> dict[str, Any]:
        """What a server knows after a round; bytes and seconds are totals since the start of the run."""
        federation, cost = self.federation, spent(self.federation, self.prepared.delta, exact)
        return {
            "round": federation.round,
            **self.clock.read(),
            "loss": None,
            **_finite(federation.metrics),
            "bytes_up": federation.traffic.total_up,
            "bytes_down": federation.traffic.total_down,
            "failures": len(federation.failures),
            **{"private": cost.private, "epsilon": cost.epsilon, "noise": cost.noise},
        }

    def _save(self, record: Mapping[str, Any], scores: Mapping[str, Any], checkpoint_due: bool) -> None:
        if self.files is None:
            self.records.append({**record, **scores})
            return
        self.files.add_metrics(record, scores)
        if checkpoint_due:
            self.files.sync_metrics()
            checkpoint.save(self.files.path, self.state, self.federation, self.clock.read(), self.best)

    def _result(self, measured: Sequence[Measured]) -> Result:
        recipe, population, federation = self.recipe, self.prepared.population, self.federation
        return Result(
            method=recipe.method,
            label=self.context.label,
            data=population.name,
            partition=recipe.data.partition or population.partition,
            client_count=len(population),
            unseen=len(population.unseen),
            seed=recipe.seed,
            round_count=recipe.rounds,
            **self.clock.read(),
            metric=self._score_name,
            validation=self.validation,
            selected=None if self.best is None else self.best.round,
            scored=f"the models that `personalize` gives after round "
            f"{self._served_round}, on each client's test rows "
            "(simulation only: no score leaves a client, and none is in ε)",
            accuracy=_by_group(measured),
            scores=folder.ACCURACY if recipe.privacy.promises else None,
            serves_unlabeled=serves_unlabeled(self.method),
            bytes=Bytes(up=federation.traffic.total_up, down=federation.traffic.total_down),
            privacy=spent(federation, self.prepared.delta).model_copy(update={"clients": spent_by_each(federation)}),
            expected=recipe.expected.model_dump(),
            failures=self.failures,
            stopped=self.stopped,
            workers=[] if self._workers is None else [Worker(**one) for one in self._workers.report()],
            folder=None if self.files is None else self.files.path,
            memory=self._memory(measured),
        )

    def _memory(self, measured: Sequence[Measured]) -> Memory | None:
        if not self.context.keep or self.files is not None or self._workers is not None:
            return None
        run = FinishedRun.in_memory(self.prepared, self.state, self.federation, self._served_round)
        clients = [row for one in measured for row in one.by_client()]
        rows = predictions.made_in(measured, self.prepared.population), predictions.baseline_in(measured)
        return Memory(run, self.records, clients, *rows)

    def _write_outcome(self, path: Path, measured: Sequence[Measured], result: Result) -> None:
        """The files of a finished run; ``result.json`` comes last, because it says that the run is whole."""
        federation, population = self.federation, self.prepared.population
        (path / folder.SIMULATION).mkdir(exist_ok=True)
        folder.write_table(path / folder.SCORES, [row for one in measured for row in one.by_client()])
        predictions.write(path, measured, population)
        with self._in_round(self._served_round):
            known = descriptors(self.method, self.state, federation, population)
        # with all plans that the run has used
        times = {"seconds": result.seconds, "measuring": result.measuring}
        checkpoint.save(path, self.state, federation, times, self.best, self._served_round)
        folder.write_json(path / folder.CLIENT_MAP, map_data(population, known))
        if isinstance(self.method, DistinguishesClients):
            content = treatment(self.method, self.state, federation.roster).model_dump()
            folder.write_json(path / folder.TREATMENT, content)
        folder.write_json(path / folder.TRANSCRIPT, federation.transcript.rows())
        folder.write_json(path / folder.LEDGER, federation.ledger.state())
        result.save(path)
        (path / folder.JOURNAL).unlink(missing_ok=True)

    def _show_workers(self, late: Sequence[int] = (), seconds: float = 0.0) -> None:
        if self._workers is not None:
            self.watcher.workers(describe_workers(self._workers.report(), late, seconds))

    def _warn_of_idle_training(self) -> None:
        """Warn where a setting is 0, so that nothing is trained."""
        local, key = self.method.local if isinstance(self.method, TrainsLocally) else None, ""
        if not self.recipe.rounds:
            key = "rounds"
        elif isinstance(local, LocalSGD):
            rates = local.lr.values() if isinstance(local.lr, Mapping) else [local.lr]
            length = "epochs" if local.steps is None else "steps"
            key = LR if not any(rates) else "" if getattr(local, length) else f"hyperparameters.local.{length}"
        if key:
            setting = key.removeprefix("hyperparameters.")
            self.watcher.note(Note(f"{self.context.name}: nothing is trained: {setting} = 0{FLAG}", key))

    def _warn_of_runaway(self, record: Mapping[str, Any]) -> None:
        """Warn once of a loss that nobody can want."""
        loss = record["loss"]
        if self._first_loss is None and self.federation.roster.schema.target == "number":
            self._first_loss = loss
        if not self._ran_away and (loss or 0) > max(LARGEST_LOSS, self._first_loss or 0):
            self._ran_away = True
            told = f"{self.context.name}: the loss is {loss:.3g} in round {record['round']}: training runs away"
            self.watcher.note(Note(f"{told}; try a smaller learning rate{FLAG}", LR))


class Clock:
    """How long a run has trained, and how long its models were measured besides; it goes on after a resume."""

    def __init__(self, seconds: float = 0.0, measuring: float = 0.0) -> None:
        self._began, self._measuring = time.perf_counter() - seconds - measuring, measuring

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._measuring += time.perf_counter() - begin

    def read(self) -> dict[str, float]:
        trained = time.perf_counter() - self._began - self._measuring
        return {"seconds": round(trained, 3), "measuring": round(self._measuring, 3)}


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _by_group(measured: Sequence[Measured]) -> ByGroup:
    return ByGroup(**{one.group: one.summary() for one in measured})


@contextlib.contextmanager
def _explain_divergence(gap: Gap) -> Iterator[None]:
    """Say what to do where clients failed because their numbers ran away."""
    try:
        yield
    except QuorumError as error:
        if not error.diverged:
            raise
        first = error.failures[0]
        raise Diverged(
            f"training diverged in round {first.round}: {len(error.failures)} clients have numbers that are not "
            f"finite; {gap.why_diverged() or 'try a smaller learning rate'}{FLAG}\nThe first: {first}",
            LR,
        ) from error
