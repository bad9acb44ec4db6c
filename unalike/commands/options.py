"""Flags that several commands share, in groups: a parameter that is a group stands for all of its flags."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from unalike.commands.console import explain_data_errors
from unalike.runs.errors import UserError

if TYPE_CHECKING:
    from unalike.core.release import Noise
    from unalike.deploy.session import Place
    from unalike.runs.recipe.recipe import Plan

Function = TypeVar("Function", bound=Callable[..., None])


def flag(text: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """An option: what its --help says, its flags if they cannot be told from the parameter, the panel it is in."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


_data, _training, _privacy, _running = (partial(flag, panel=one) for one in ("Data", "Training", "Privacy", "Running"))

Partition = Annotated[
    str | None,
    _data(
        "How rows are dealt out: iid, dirichlet, pathological, shards, ... (default: the data's own clients; iid "
        "for a data set by name that has none)"
    ),
]
Range = Annotated[
    list[str] | None, _data("NAME=LOW:HIGH, public: warn of what is found outside. (default: none)", "--range")
]
ClientCount = Annotated[
    int | None, _data("How many clients. (default: all of the data's own, else 100, or fewer of 40 rows)")
]
Seed = Annotated[int | None, _training("Of data, cohorts, batches and noise.")]
Epsilon = Annotated[float | None, _privacy("The ε that the run may cost.")]
Delta = Annotated[float | None, _privacy("δ. (default: n^-1.1 for n clients or points)")]
SimulateNoise = Annotated[
    bool, _privacy("Seed the noise, so that a run can be repeated: it then protects nobody.", "--simulate-noise")
]
Out = Annotated[Path | None, _running("New folder for all results. (default: runs/...)")]
Quiet = Annotated[bool, _running("No progress.", "--quiet", "-q")]
Json = Annotated[bool, _running("Print the result as JSON and nothing else.", "--json")]
Set = Annotated[
    list[str] | None, _training("Any key of a recipe, e.g. local.momentum=0.9.", "--set", metavar="KEY=VALUE")
]
RuntimeName = Annotated[
    str | None,
    _running(
        "Where clients are: simulate (in this process), ray (on workers), network (at sites). (default: simulate)"
    ),
]
WorkerCount = Annotated[int | None, _running("With --runtime ray: how many. (default: one for each processor)")]
Address = Annotated[str | None, _running("Of a Ray cluster that runs already. (default: one is started here)")]
Network = Annotated[str | None, _running("With --runtime network: the folder of its hub.")]
Deadline = Annotated[float | None, _running("Seconds that a worker may take for one request. (default: no limit)")]
Plot = Annotated[Path | None, flag("A new file for the figure: .html, .pdf, .png or .svg.")]


@dataclass(frozen=True)
class Where:
    """Where the clients of an analysis are."""

    runtime: RuntimeName = None
    workers: WorkerCount = None
    address: Address = None
    deadline: Deadline = None

    @contextmanager
    def place(self, epsilon: float | None, simulated: bool) -> Iterator[Place]:
        """This process or workers; with an ε the noise is the operating system's, unless it is simulated.

        What is wrong with the data or the settings is said without a traceback.
        """
        from unalike.deploy.session import place

        noise: Noise = "system" if epsilon is not None and not simulated else "seeded"
        with (
            explain_data_errors(),
            closing(place(noise, self.runtime, self.workers, self.address, self.deadline)) as found,
        ):
            yield found

    def refuse(self, **flags: bool) -> None:
        """Refuse flags that look at all clients' rows in one place, where these are on workers."""
        given = [f"--{name.replace('_', '-')}" for name, on in flags.items() if on]
        if self.runtime == "ray" and given:
            raise UserError(
                f"{' and '.join(given)} would need the rows of all clients in one process: leave out, or "
                "run without --runtime ray"
            )


@contextmanager
def expect(flag: str, text: str, form: str) -> Iterator[None]:
    """Refuse what was given with a flag where it cannot be read as ``form``."""
    try:
        yield
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{flag} must be {form}, got {text!r}") from error


def ranges_of(texts: Sequence[str]) -> dict[str, tuple[float, float]]:
    """``age=0:120``, by the columns' names."""
    found = {}
    for text in texts:
        name, _, ends = text.partition("=")
        with expect("--range", text, "NAME=LOW:HIGH, for example age=0:120"):
            low, high = (float(end) for end in ends.split(":"))
        found[name] = (low, high)
    return found


def noise_source(epsilon: float | None, simulated: bool) -> dict[str, str | None]:
    """Beside an ε in JSON: where its noise came from, which is nowhere where there is none."""
    return {"noise": None if epsilon is None else "simulated" if simulated else "system"}


@dataclass(frozen=True)
class CellFlags:
    """How the cells of a file are written, and what to do where one is missing."""

    na_values: Annotated[
        str | None, _data("What stands for a missing value, beside an empty cell: ?,-9. (default: also NA, NaN)")
    ] = None
    decimal: Annotated[str | None, _data("Of numbers, . or , (default: .)")] = None
    delimiter: Annotated[str | None, _data("Of cells. (default: a comma; of TSV a tab)")] = None
    missing: Annotated[
        str | None,
        _data("error, drop (such rows), mean (that inputs are scaled by) or client (its own). (default: error)"),
    ] = None

    def options(self) -> dict[str, Any]:
        """Those that were given, as ``unalike.data.load`` takes them."""
        given = {one.name: getattr(self, one.name, None) for one in dataclasses.fields(TableFlags)}
        given["drop"] = given.pop("drop_columns")
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class TableFlags(CellFlags):
    """What the columns of the user's table are."""

    client_column: Annotated[str | None, _data("Whose a row is. (default: client)")] = None
    label_column: Annotated[str | None, _data("What to predict. (default: y)")] = None
    id_column: Annotated[str | None, _data("What a row is called; no feature.")] = None
    features: Annotated[str | None, _data("Columns to learn from: age,weight. (default: all others)")] = None
    drop_columns: Annotated[str | None, _data("Columns to leave out: phone,notes.", "--drop")] = None
    categorical: Annotated[str | None, _data("Columns whose numbers are names: ward,region.")] = None
    indicator: Annotated[
        bool | None, _data("Beside each column that lacks values, a feature that says where.", "--indicator")
    ] = None
    task: Annotated[
        str | None, _data("classification or regression. (default: text and whole numbers are classes)", "--task")
    ] = None


@dataclass(frozen=True)
class RowFlags(CellFlags):
    """Which rows of a file a finished run reads, and how; what is not said is as in training."""

    client: Annotated[str | None, _data("Only this client of the file.")] = None
    client_column: Annotated[str | None, _data("Whose a row is. (default: the run's)")] = None
    label_column: Annotated[
        str | None, _data("The right answers, if known; '': there are none. (default: the run's)")
    ] = None
    id_column: Annotated[str | None, _data("What a row is called. (default: the run's, else its number, from 1)")] = (
        None
    )
    unlabeled: Annotated[bool, _data("Make models without labels, even if there are some.", "--unlabeled")] = False
    classes: Annotated[str | None, _data("The classes that a client has: cat,dog. No other is predicted.")] = None
    set_: Annotated[
        list[str] | None, _data("How to read the file, e.g. data.options.size=28.", "--set", metavar="KEY=VALUE")
    ] = None

    @property
    def declared(self) -> list[str] | None:
        """The classes by name."""
        return None if self.classes is None else [word.strip() for word in self.classes.split(",") if word.strip()]

    def options(self) -> dict[str, Any]:
        """How to read the file, as ``NewcomerFile.read`` takes it; what rows are called is said apart."""
        from unalike.runs.recipe.recipe import apply_overrides

        values = apply_overrides({}, self.set_ or [])
        data = values.get("data", {})
        if set(values) - {"data"} or not isinstance(data, dict) or set(data) - {"options"}:
            raise UserError(
                "--set: expected data.options.KEY=VALUE, how to read the file; all else was decided in training"
            )
        flags = {name: value for name, value in super().options().items() if name != "id_column"}
        return {**data.get("options", {}), **flags}


@dataclass(frozen=True)
class _Division:
    """Which data, and how it is dealt out to clients."""

    data: Annotated[
        str | None, _data("A name of `unalike datasets`, or your own file or folder. (default: digits)")
    ] = None
    partition: Partition = None
    alpha: Annotated[float | None, _data("Of the dirichlet partition: small makes clients unlike.")] = None
    classes: Annotated[int | None, _data("Of the pathological partition: classes per client.")] = None
    clients: ClientCount = None
    samples: Annotated[int | None, _data("At most so many rows per client.")] = None
    unseen: Annotated[
        float | None,
        _data(
            "Share of clients that arrive after training (from 1 on: number). (default: 0.1; of fewer than "
            "four clients: none)"
        ),
    ] = None
    labeled: Annotated[float | None, _data("Share of training clients with labels.")] = None
    validation: Annotated[
        float | None, _data("Share of a client's training rows that choices are made by. (default: none)")
    ] = None
    weight_column: Annotated[str | None, _data("How much a row counts in training; no feature.")] = None
    class_weights: Annotated[
        str | None, _data("How much rows count in training, by class: balanced at each client, or yes=10,no=1.")
    ] = None


@dataclass(frozen=True)
class Dealing(TableFlags, _Division):
    """Which data, what its columns are, and how it is dealt out to clients."""


@dataclass(frozen=True)
class Training:
    """How clients train, and how private it is."""

    model: Annotated[str | None, _training("logistic, mlp, lenet, ... of `unalike datasets`, or file.py:Class.")] = None
    rounds: Annotated[int | None, _training("Rounds of training. (default: 50)")] = None
    preset: Annotated[
        str | None, _training("paper: the settings of the method's paper, where nothing else is set; or ozkara2022.")
    ] = None
    cohort: Annotated[
        float | None, _training("Clients per round; below 1: their share. (default: as in `unalike methods TARGET`)")
    ] = None
    local_epochs: Annotated[int | None, _training("Epochs at a client in a round.")] = None
    local_steps: Annotated[int | None, _training("Or steps in place of epochs.")] = None
    batch: Annotated[int | None, _training("Batch size at a client.")] = None
    lr: Annotated[float | None, _training("Learning rate at a client.")] = None
    set_: Set = None
    epsilon: Epsilon = None
    epsilons: Annotated[str | None, _privacy("Each client's own ε: a file, column:NAME, or uniform:LOW,HIGH.")] = None
    delta: Delta = None
    noise_multiplier: Annotated[float | None, _privacy("Noise / clip.")] = None
    clip: Annotated[float | None, _privacy("Bound on an update (client) or gradient (point).")] = None
    unit: Annotated[str | None, _privacy("Who is protected: client or point.")] = None
    trust: Annotated[
        str | None, _privacy("Who may see sums before they have noise: server or nobody. (default: server)")
    ] = None
    simulate_noise: Annotated[
        bool | None, _privacy("Seed cohorts, batches and noise, to repeat a run: protects nobody.", "--simulate-noise")
    ] = None
    accept_delta: Annotated[
        bool | None, _privacy("Allow a δ of 1/n or more, which protects little.", "--accept-delta")
    ] = None
    total_epsilon: Annotated[
        float | None,
        _privacy("The most that all runs on this data file may cost together, for ever; kept in a ledger beside it."),
    ] = None


@dataclass(frozen=True)
class Running:
    """How a run is repeated, measured and computed."""

    seed: Seed = None
    seeds: Annotated[int | None, _training("Repeat with so many seeds: mean ± std.")] = None
    metric: Annotated[
        str | None,
        _running(
            "Of the scores: accuracy, balanced_accuracy, auroc, auprc, f1, sensitivity@0.95 (at this specificity), "
            "log_loss, brier, calibration_error; rmse, mae, r2. (default: by the classes; rmse for numbers)"
        ),
    ] = None
    select: Annotated[
        str | None, _running("Models of the last round, or of the best one on validation rows: last or best.")
    ] = None
    eval_every: Annotated[int | None, _running("Rounds between evaluations.")] = None
    checkpoint_every: Annotated[int | None, _running("Rounds between checkpoints. (default: 10)")] = None
    block: Annotated[int | None, _running("Clients computed at once. (default: measured)")] = None
    threads: Annotated[int | None, _running("Threads of PyTorch. (default: its own; small samples: 1)")] = None
    device: Annotated[str | None, _running("Where clients are computed: cpu, cuda, mps or auto. (default: cpu)")] = None
    runtime: RuntimeName = None
    workers: WorkerCount = None
    address: Address = None
    network: Network = None
    deadline: Deadline = None


@dataclass(frozen=True)
class Output:
    """Where the results of a run go."""

    out: Out = None
    quiet: Quiet = False
    track: Annotated[
        str | None, _running("Also log rounds: mlflow, mlflow=URI, tensorboard or tensorboard=FOLDER.")
    ] = None
    as_json: Json = False


def command(app: typer.Typer, *lines: str, name: str | None = None) -> Callable[[Function], Function]:
    """Add a function to ``app`` as a command, with these lines as the examples of its --help.

    In the place of a parameter whose type is a dataclass, the command has a flag for each field; a parameter of the
    function's own takes the place of a field of the same name.
    """

    def add(function: Function) -> Function:
        own = inspect.signature(function, eval_str=True).parameters
        groups: dict[str, Any] = {
            name: one.annotation for name, one in own.items() if dataclasses.is_dataclass(one.annotation)
        }
        flags = {name: one.replace(kind=one.KEYWORD_ONLY) for name, one in own.items() if name not in groups}
        for group in groups.values():
            types = get_type_hints(group, include_extras=True)
            for one in dataclasses.fields(group):
                made = inspect.Parameter(
                    one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=types[one.name]
                )
                flags.setdefault(one.name, made)

        def called(**given: Any) -> None:
            made = {
                name: group(**{one.name: given[one.name] for one in dataclasses.fields(group)})
                for name, group in groups.items()
            }
            function(**{name: made[name] if name in made else given[name] for name in own})

        # a line of its own for each line of the source would break anew in a narrow terminal
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        called.__name__, called.__doc__ = function.__name__, "\n\n".join(" ".join(one.split()) for one in paragraphs)
        called.__annotations__ = {name: one.annotation for name, one in flags.items()}
        called.__signature__ = inspect.Signature(list(flags.values()))  # type: ignore[attr-defined]  # Typer reads it
        app.command(name, epilog=examples(*lines))(called)
        return function

    return add


def plan_from_flags(targets: Sequence[str], *groups: object, **more: Any) -> Plan:
    """What flags ask for: the runs of ``targets`` with the settings in these groups, and ``more`` of them."""
    from unalike.runs.recipe.settings import plan_for

    settings = settings_from(*groups, **more)
    overrides = settings.pop("set_", None)
    return plan_for(targets, settings, overrides or [])


def settings_from(*groups: object, **more: Any) -> dict[str, Any]:
    """The settings in groups of flags, by name."""
    values = {name: value for group in groups for name, value in vars(group).items()} | more
    for name in ("cohort", "unseen"):  # 10 is a number of clients, 0.1 a share
        value = values.get(name)
        if isinstance(value, float) and value >= 1 and value.is_integer():
            values[name] = int(value)
    return values


def examples(*lines: str) -> str:
    """The end of a --help: commands that work as typed."""
    return "\n\n".join(["[bold]Examples[/bold]", *(f"  {line}" for line in lines)])
