"""What a run came to, and the table in which several runs stand side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from unalike.privacy.ledger import Ledger, epsilon_together
from unalike.runs.errors import UserError
from unalike.runs.folder import LEDGER, RESULT, WORKERS, check_format, read_json, write_json
from unalike.runs.recipe.recipe import Recipe
from unalike.runs.words import duration, guarantees, large_delta, share, size, stated

NEGATIVE = "negative "  # before the name of an error: its score is minus the error
GROUPS = ("seen", "unseen", "unlabeled")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, validate_by_name=True, validate_by_alias=True)


Part = TypeVar("Part", bound=_Part)


class Summary(_Part):
    """Scores of one group of clients: mean, standard deviation, 10th percentile and worst of those that have one."""

    mean: float
    std: float
    p10: float
    worst: float | None = None  # None: the run was made before it was noted
    clients: int = 0
    scored: int = 0
    failed: int = 0  # clients that should have a score and have none


class ByGroup(_Part):
    """A summary for each group of clients; None: there is no such client, or the method does not serve them."""

    seen: Summary | None = None
    unseen: Summary | None = None
    unlabeled: Summary | None = None

    def of(self, group: str) -> Summary | None:
        found: Summary | None = getattr(self, group)
        return found


class Bytes(_Part):
    """Bytes from the clients to the server, and from it to them: the totals of ``Traffic``."""

    up: int
    down: int


class OwnBudget(_Part):
    """The ε that a client has declared, what the run has cost it, and the δ of both: public, as they hold no data."""

    declared: float
    spent: float
    delta: float


class Privacy(_Part):
    """The guarantee of the whole run. Without one, ε, δ and all else are None.

    - ``private``: what was released is protected; not with simulated noise, whatever the ε.
    - ``epsilon``: for whoever sees the model and the published files; the sampling of clients amplifies it.
    - ``epsilon_server``: against the server, which knows who was drawn; None with ``why_server`` where it is infinite.
    - ``noise``: "system", or "simulated" where it was seeded and so protects nobody.
    - ``trust``: who saw sums before they had their noise: "server" or "nobody".
    - ``accepted_delta``: δ is 1/n or more, which the recipe accepts.
    - ``clients``: by name, where each has a budget of its own; ``epsilon`` is then the largest of what they spent.
    """

    private: bool = False
    epsilon: float | None = None
    epsilon_server: float | None = None
    why_server: str | None = None
    delta: float | None = None
    accepted_delta: bool = False
    unit: str | None = None
    noise: str | None = None
    trust: str | None = None
    clients: dict[str, OwnBudget] = {}

    def words(self) -> list[str]:
        """What stands beside its ε."""
        return guarantees(self.epsilon, self.epsilon_server, self.noise, self.trust, self.accepted_delta)


class Worker(_Part):
    """What one worker of a cluster, or site of a network, did in a run; ``rate`` is clients per second of its work."""

    worker: int
    name: str = ""  # as messages call it
    clients: int
    asks: int
    answered: int
    failed: int
    seconds: float
    waited: float
    rate: float
    restarts: int
    missed: int
    bytes_down: int
    bytes_up: int


class Result(_Part):
    """A finished run, as in its ``result.json``. ``scored`` says which models were scored, and when."""

    method: str
    label: str = ""
    data: str
    seed: int
    round_count: int = Field(alias="rounds")
    seconds: float  # of training
    measuring: float = 0.0  # seconds that the models were measured besides
    metric: str
    scored: str = ""
    accuracy: ByGroup  # not in the file of a run with an ε, because no noise protects it
    scores: Literal["simulation/accuracy.json"] | None = None  # the file in which it then is
    validation: float | None = None  # mean score of seen clients on validation rows, of the models that were scored
    selected: int | None = None  # the round that these models are of, where it was chosen on validation rows
    diverged: str = ""  # why there is no score
    serves_unlabeled: bool = False
    bytes: Bytes
    privacy: Privacy
    expected: dict[str, float | None] = {}
    stopped: str | None = None  # why it ended before its last round
    failures: int = 0  # replies that clients failed to give
    partition: str = ""  # by which rows came to clients; empty: unknown
    client_count: int = Field(0, alias="clients")
    unseen: int = 0  # of the clients
    workers: list[Worker] = []  # of a cluster; not in the file of a run with an ε: they tell how large cohorts were
    folder: Path | None = Field(None, exclude=True)
    memory: Any = Field(None, exclude=True, repr=False)  # a ``finished.Memory``, where there is no folder

    @classmethod
    def of_diverged(cls, recipe: Recipe, label: str, data: str, metric: str, why: str) -> Result:
        """A run of a comparison that has no score, because its training diverged."""
        told: dict[str, Any] = {"method": recipe.method, "label": label, "data": data, "metric": metric}
        told |= {"seed": recipe.seed, "rounds": recipe.rounds, "seconds": 0.0, "diverged": why.partition("\n")[0]}
        return cls(**told, accuracy=ByGroup(), bytes=Bytes(up=0, down=0), privacy=Privacy())

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True)

    def save(self, folder: Path) -> None:
        """Write ``result.json``."""
        told = self
        if self.scores is not None:
            write_json(folder / self.scores, self.accuracy.model_dump())
            if self.workers:
                write_json(folder / WORKERS, [one.model_dump() for one in self.workers])
            told = self.model_copy(update={"accuracy": ByGroup(), "workers": [], "validation": None})
        write_json(folder / RESULT, told.to_json())

    def placed(self, folder: Path) -> Self:
        """As read from a folder: with the scores that lie apart, if they were handed on with it."""
        update: dict[str, Any] = {"folder": folder}
        if self.scores is not None and (folder / self.scores).exists():
            update["accuracy"] = _checked(ByGroup, folder / self.scores)
        if self.scores is not None and (folder / WORKERS).exists():
            update["workers"] = [Worker.model_validate(one) for one in read_json(folder / WORKERS)]
        return self.model_copy(update=update)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The result of a finished run."""
        folder = Path(folder)
        check_format(folder)
        return _checked(cls, folder / RESULT).placed(folder)

    def __str__(self) -> str:
        return as_text(table([[self]]))

    def read_ledger(self) -> Ledger | None:
        """What the run has released; None where it has no folder."""
        if self.folder is None or not (self.folder / LEDGER).is_file():
            return None
        return Ledger.from_state(read_json(self.folder / LEDGER))


def _checked(kind: type[Part], file: Path) -> Part:
    content = read_json(file)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{file} is damaged: {where}: {first['msg']}; restore the file, or repeat the run") from None


def as_text(what: Table) -> str:
    console = Console(width=110, color_system=None, force_jupyter=False, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(what)
    return captured.get().rstrip()


def table(groups: Sequence[Sequence[Result]], title: str = "") -> Table:
    """One line for each group of results that differ in the seed only.

    A single seed shows the mean over clients and, in brackets, their 10th percentile; several show mean ± std over
    seeds. Below it stands what the results are about.
    """
    caption = "\n".join(_about(groups))
    made = Table(
        title=title or None, caption=caption, caption_justify="left", title_justify="left", box=box.SIMPLE_HEAD
    )
    for column in ("method", *GROUPS, "up", "down", "ε", "time"):
        made.add_column(column, justify="left" if column == "method" else "right", overflow="fold")
    for results in groups:
        spent = [result.privacy.epsilon for result in results]
        made.add_row(
            results[0].label,
            *(_score(results, group) for group in GROUPS),
            size(statistics.fmean(result.bytes.up for result in results)),
            size(statistics.fmean(result.bytes.down for result in results)),
            stated(_largest(spent), results[0].privacy.noise),
            duration(statistics.fmean(result.seconds for result in results)),
        )
    return made


def _largest(spent: Sequence[float | None]) -> float | None:
    known = [one for one in spent if one is not None]
    return max(known) if len(known) == len(spent) else None


def _about(groups: Sequence[Sequence[Result]]) -> list[str]:
    """What is measured, over which clients, at which δ, and who is missing in the means."""
    results = [result for group in groups for result in group]
    many = max(map(len, groups)) > 1
    what = f"mean ± std over {len(groups[0])} seeds" if many else "mean over clients (10th percentile of clients)"
    measuring = sum(result.measuring for result in results)
    name = results[0].metric.removeprefix(NEGATIVE)
    lines = [f"{name}, {what}; time of training alone (measuring took {duration(measuring)} more)"]
    lines += dict.fromkeys(
        f"{result.data}, partition {result.partition or 'not named'}, "
        f"{result.client_count} clients, {result.unseen} of them unseen"
        for result in results
    )
    lines += dict.fromkeys(
        f"ε at δ = {result.privacy.delta:.3g} for each {result.privacy.unit}"
        for result in results
        if result.privacy.epsilon
    )
    lines += dict.fromkeys(line for one in results for line in one.privacy.words())
    lines += [line for group in groups if (line := _together(group))]
    lines += dict.fromkeys(filter(None, (large_delta(one.privacy.delta) for one in results if one.privacy.epsilon)))
    for result in results:
        name = f"{result.label}, seed {result.seed}" if many else result.label
        if result.diverged:
            lines.append(f"{name}: {result.diverged}")
        if result.selected is not None:
            lines.append(f"{name}: the models of round {result.selected}, which are best on validation rows")
        for group in GROUPS:
            summary = result.accuracy.of(group)
            if summary is not None and summary.failed:
                lines.append(
                    f"{name}: {summary.failed} of {summary.clients} {group} clients have no finite score "
                    "and are left out of the mean; a smaller learning rate may help"
                )
        if result.failures:
            lines.append(f"{name}: {result.failures} replies of clients failed to come in training")
    return lines


def _together(results: Sequence[Result]) -> str:
    """What the seeds of one method cost the clients together; empty where there is one, or no ε."""
    spent = [one.privacy.epsilon for one in results]
    delta, noise = results[0].privacy.delta, results[0].privacy.noise
    if len(results) < 2 or delta is None or not all(spent):
        return ""
    ledgers = [found for one in results if (found := one.read_ledger()) is not None]
    if len(ledgers) == len(results):
        total = f"ε = {stated(epsilon_together(ledgers, delta), noise)} at the same δ"
    else:  # nothing is known but what each has cost
        total = f"at most ε = {stated(sum(one or 0.0 for one in spent), noise)} at δ = {len(results) * delta:.3g}"
    return f"{results[0].label}: its {len(results)} seeds are as many runs on the same data; together they cost {total}"


def _score(results: Sequence[Result], group: str) -> str:
    found = [summary for result in results if (summary := result.accuracy.of(group)) is not None]
    if not found and all(result.diverged for result in results):
        return "diverged"
    if not found:
        return "not served" if group == "unlabeled" and not results[0].serves_unlabeled else "–"
    means = [summary.mean for summary in found]
    metric = results[0].metric
    if len(results) > 1:
        spread = score(statistics.pstdev(means), metric.removeprefix(NEGATIVE))
        text = f"{score(statistics.fmean(means), metric)} ± {spread}"
    else:
        text = f"{score(means[0], metric)} ({score(found[0].p10, metric)})"
    wanted = results[0].expected.get(group)
    return text if wanted is None else f"{text} [expected {score(wanted, metric)}]"


def score(value: float, metric: str = "accuracy") -> str:
    """A score as a person reads it: an accuracy in percent, an error as a positive number."""
    if metric.startswith(NEGATIVE):
        return f"{-value:.4g}"
    return share(value) if metric == "accuracy" else f"{value:.4g}"
