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


def flag(text: str, *names: str, default: Any = None, panel: str | None = None, **more: Any) -> Any:
    """What a command's parameter, or a field of a group, is set to where it has a flag.

    text: what --help says. names: the flags, if they cannot be told from the parameter. default: ... if it must be
    given. panel: of --help.
    """
    names = names or (("--NAME",) if default is False else ())  # --no-NAME would have nothing to switch off
    option = partial(typer.Option, help=text, rich_help_panel=panel, **more)
    return dataclasses.field(default=default, metadata={"names": names, "option": option})


_data, _training, _privacy, _running = (partial(flag, panel=one) for one in ("Data", "Training", "Privacy", "Running"))

partition_flag = partial(
    _data,
    "How rows are dealt out: iid, dirichlet, pathological, shards, ... (default: the data's own clients; iid "
    "for a data set by name that has none)",
)
range_flag = partial(_data, "NAME=LOW:HIGH, public: warn of what is found outside. (default: none)", "--range")
client_count_flag = partial(_data, "How many clients. (default: all of the data's own, else 100, or fewer of 40 rows)")
seed_flag = partial(_training, "Of data, cohorts, batches and noise.")
epsilon_flag = partial(_privacy, "The ε that the run may cost.")
delta_flag = partial(_privacy, "δ. (default: n^-1.1 for n clients or points)")
simulate_noise_flag = partial(
    _privacy,
    "Seed the noise, so that a run can be repeated: it then protects nobody.",
    "--simulate-noise",
    default=False,
)
out_flag = partial(_running, "New folder for all results. (default: runs/...)")
quiet_flag = partial(_running, "No progress.", "--quiet", "-q", default=False)
json_flag = partial(_running, "Print the result as JSON and nothing else.", "--json", default=False)
set_flag = partial(_training, "Any key of a recipe, e.g. local.momentum=0.9.", "--set", metavar="KEY=VALUE")
runtime_name_flag = partial(
    _running, "Where clients are: simulate (in this process), ray (on workers), network (at sites). (default: simulate)"
)
worker_count_flag = partial(
    _running, "With --runtime ray: how many (default: one for each processor); with network: sites to wait for."
)
address_flag = partial(_running, "Of a Ray cluster that runs already. (default: one is started here)")
network_flag = partial(_running, "With --runtime network: the folder of its hub.")
deadline_flag = partial(_running, "Seconds that a worker or site may take for one request. (default: no limit)")
Run = Annotated[Path, typer.Argument(metavar="RUN", hidden=True)]
plot_flag = partial(flag, "A new file for the figure: .html, .pdf, .png or .svg.")


@dataclass(frozen=True)
class Where:
    """Where the clients of an analysis are."""

    runtime: str | None = runtime_name_flag()
    workers: int | None = worker_count_flag()
    address: str | None = address_flag()
    deadline: float | None = deadline_flag()
    network: str | None = network_flag()

    @contextmanager
    def place(self, epsilon: float | None, simulated: bool) -> Iterator[Place]:
        """This process or workers; with an ε the noise is the operating system's, unless it is simulated.

        What is wrong with the data or the settings is said without a traceback.
        """
        from unalike.deploy.session import place

        noise: Noise = "system" if epsilon is not None and not simulated else "seeded"
        with (
            explain_data_errors(),
            closing(place(noise, self.runtime, self.workers, self.address, self.deadline, self.network)) as found,
        ):
            yield found

    def refuse(self, **flags: bool) -> None:
        """Refuse flags that look at all clients' rows in one place, where these are elsewhere."""
        given = [f"--{name.replace('_', '-')}" for name, on in flags.items() if on]
        if self.runtime in ("ray", "network") and given:
            raise UserError(
                f"{' and '.join(given)} would need the rows of all clients in one process: leave out, or "
                f"run without --runtime {self.runtime}"
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

    na_values: str | None = _data(
        "What stands for a missing value, beside an empty cell: ?,-9. (default: also NA, NaN)"
    )
    decimal: str | None = _data("Of numbers, . or , (default: .)")
    delimiter: str | None = _data("Of cells. (default: a comma; of TSV a tab)")
    missing: str | None = _data(
        "error, drop (such rows), mean (that inputs are scaled by) or client (its own). (default: error)"
    )

    def options(self) -> dict[str, Any]:
        """Those that were given, as ``unalike.data.load`` takes them."""
        given = {one.name: getattr(self, one.name, None) for one in dataclasses.fields(TableFlags)}
        given["drop"], given["classes"] = given.pop("drop_columns"), given.pop("class_names")
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class TableFlags(CellFlags):
    """What the columns of the user's table are."""

    client_column: str | None = _data("Whose a row is. (default: client)")
    label_column: str | None = _data("What to predict. (default: y)")
    id_column: str | None = _data("What a row is called; no feature.")
    features: str | None = _data("Columns to learn from: age,weight. (default: all others)")
    drop_columns: str | None = _data("Columns to leave out: phone,notes.", "--drop")
    categorical: str | None = _data("Columns whose numbers are names: ward,region.")
    indicator: bool | None = _data("Beside each column that lacks values, a feature that says where.", "--indicator")
    class_names: str | None = _data("All labels that there can be: no,yes. (default: those in the file)")
    task: str | None = _data("classification or regression. (default: text and whole numbers are classes)", "--task")


@dataclass(frozen=True)
class RowFlags(CellFlags):
    """Which rows of a file a finished run reads, and how; what is not said is as in training."""

    client: str | None = _data("Only this client of the file.")
    client_column: str | None = _data("Whose a row is. (default: the run's)")
    label_column: str | None = _data("The right answers, if known; '': there are none. (default: the run's)")
    id_column: str | None = _data("What a row is called. (default: the run's, else its number, from 1)")
    unlabeled: bool = _data("Make models without labels, even if there are some.", default=False)
    classes: str | None = _data("The classes that a client has: cat,dog. No other is predicted.")
    set_: list[str] | None = _data("How to read the file, e.g. data.options.size=28.", "--set", metavar="KEY=VALUE")

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

    data: str | None = _data("A name of `unalike datasets`, or your own file or folder. (default: digits)")
    partition: str | None = partition_flag()
    alpha: float | None = _data("Of the dirichlet partition: small makes clients unlike.")
    classes: int | None = _data("Of the pathological partition: classes per client.")
    clients: int | None = client_count_flag()
    samples: int | None = _data("At most so many rows per client.")
    unseen: float | None = _data(
        "Share of clients that arrive after training (from 1 on: number). (default: 0.1; of fewer than "
        "four clients: none)"
    )
    labeled: float | None = _data("Share of training clients with labels.")
    validation: float | None = _data("Share of a client's training rows that choices are made by. (default: none)")
    weight_column: str | None = _data("How much a row counts in training; no feature.")
    class_weights: str | None = _data(
        "How much rows count in training, by class: balanced at each client, or yes=10,no=1."
    )


@dataclass(frozen=True)
class Dealing(TableFlags, _Division):
    """Which data, what its columns are, and how it is dealt out to clients."""


@dataclass(frozen=True)
class Training:
    """How clients train, and how private it is."""

    model: str | None = _training("logistic, mlp, lenet, ... of `unalike datasets`, or file.py:Class.")
    adapter: str | None = _training(
        "Freeze the model but for lora:r=4, head, norm, bias, ... joined by +. (default: nothing is frozen)"
    )
    rounds: int | None = _training("Rounds of training. (default: 50)")
    preset: str | None = _training(
        "paper: the settings of the method's paper, where nothing else is set; or ozkara2022."
    )
    cohort: float | None = _training(
        "Clients per round; below 1: their share. (default: as in `unalike methods TARGET`)"
    )
    local_epochs: int | None = _training("Epochs at a client in a round.")
    local_steps: int | None = _training("Or steps in place of epochs.")
    batch: int | None = _training("Batch size at a client.")
    lr: float | None = _training("Learning rate at a client.")
    set_: list[str] | None = set_flag()
    epsilon: float | None = epsilon_flag()
    epsilons: str | None = _privacy("Each client's own ε: a file, column:NAME, or uniform:LOW,HIGH.")
    delta: float | None = delta_flag()
    noise_multiplier: float | None = _privacy("Noise / clip.")
    clip: float | None = _privacy("Bound on an update (client) or gradient (point).")
    unit: str | None = _privacy("Who is protected: client or point.")
    trust: str | None = _privacy("Who may see sums before they have noise: server or nobody. (default: server)")
    simulate_noise: bool | None = _privacy(
        "Seed cohorts, batches and noise, to repeat a run: protects nobody.", "--simulate-noise"
    )
    accept_delta: bool | None = _privacy("Allow a δ of 1/n or more, which protects little.", "--accept-delta")
    total_epsilon: float | None = _privacy(
        "The most that all runs on this data file may cost together, for ever; kept in a ledger beside it."
    )


@dataclass(frozen=True)
class Running:
    """How a run is repeated, measured and computed."""

    seed: int | None = seed_flag()
    seeds: int | None = _training("Repeat with so many seeds: mean ± std.")
    metric: str | None = _running(
        "Of the scores: accuracy, balanced_accuracy, auroc, auprc, f1, sensitivity@0.95 (at this specificity), "
        "log_loss, brier, calibration_error; rmse, mae, r2. (default: by the classes; rmse for numbers)"
    )
    select: str | None = _running("Models of the last round, or of the best one on validation rows: last or best.")
    eval_every: int | None = _running("Rounds between evaluations.")
    checkpoint_every: int | None = _running("Rounds between checkpoints. (default: 10)")
    block: int | None = _running("Clients computed at once. (default: measured)")
    threads: int | None = _running("Threads of PyTorch. (default: its own; small samples: 1)")
    device: str | None = _running("Where clients are computed: cpu, cuda, mps or auto. (default: cpu)")
    runtime: str | None = runtime_name_flag()
    workers: int | None = worker_count_flag()
    address: str | None = address_flag()
    network: str | None = network_flag()
    deadline: float | None = deadline_flag()


@dataclass(frozen=True)
class Output:
    """Where the results of a run go."""

    out: Path | None = out_flag()
    quiet: bool = quiet_flag()
    track: str | None = _running("Also log rounds: mlflow, mlflow=URI, tensorboard or tensorboard=FOLDER.")
    as_json: bool = json_flag()


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
        flags = {name: _parameter(name, one.annotation, one.default) for name, one in own.items() if name not in groups}
        for group in groups.values():
            types = get_type_hints(group, include_extras=True)
            for one in dataclasses.fields(group):
                flags.setdefault(one.name, _parameter(one.name, types[one.name], one))

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


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """A parameter as Typer reads it."""
    if isinstance(default, dataclasses.Field):
        if made := default.metadata:
            names = [one.replace("NAME", name.replace("_", "-")) for one in made["names"]]
            kind = Annotated[kind, made["option"](*names)]
        default = default.default
    default = inspect.Parameter.empty if default is ... else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


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
