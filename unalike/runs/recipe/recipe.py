"""Recipes: everything that decides a run, in one TOML file that is checked before anything starts."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from unalike.core import outside
from unalike.core.notes import did_you_mean, join_notes
from unalike.data.spec import literal
from unalike.runs.errors import FLAG, Note, UserError
from unalike.runs.recipe.keys import PARTITION_OPTIONS, flatten, merge, nest

PRETRAINED = "pretrained"  # its own link to, or copy of, the folder of a pretrained network
CODE = "code.json"  # the file of a run folder that has the digests of code from outside
RECIPE = "recipe.toml"  # the file of a run folder that holds its recipe


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, serialize_by_alias=True)


class Data(_Section):
    """Which data, and how it is dealt out to clients; the fields are the arguments of ``unalike.data.load``."""

    name: str = "digits"  # a named source, a file or a folder
    partition: str | None = None  # e.g. "dirichlet:0.3", "pathological:2"; None: the source's own clients, else iid
    clients: int | None = Field(None, ge=1)
    samples: int | None = Field(None, ge=1)  # at most so many rows for each client
    min_samples: int | None = Field(None, ge=1)
    test: float | Literal["source"] | None = None
    validation: float = Field(0.0, ge=0, lt=1)
    unseen: int | float | list[int] | None = None  # share (or number, or positions) of clients that arrive afterwards
    labeled: float = Field(1.0, ge=0, le=1)  # share of the training clients that have labels
    rotate: list[float] | None = None
    normalize: bool | Literal["private"] = True  # "private": by noisy sums, where no constants are public
    schema_: str | None = Field(None, alias="schema")  # a file that says what rows look like, and is public
    class_weights: str | None = None  # "balanced", or numbers by class: "yes=10,no=1"
    seed: int | None = Field(None, ge=0)  # None: the run's seed
    options: dict[str, Any] = {}  # of the source or file reader, e.g. client_column


class Network(_Section):
    """The personal model's architecture."""

    name: str | None = None  # None: chosen by the shape of the inputs
    options: dict[str, Any] = {}
    trainable: str | None = None  # what is not frozen, e.g. "lora:r=4+head" (``networks/adapters.py``); None: all
    digest: str | None = None  # of what is frozen; another one is refused


class Privacy(_Section):
    """What the run may cost; all empty: nothing is promised. See ``unalike.runs.privacy``."""

    epsilon: float | None = Field(None, gt=0)
    epsilons: str | None = None  # each client's own, for its points; see ``unalike.runs.declared``
    delta: float | None = Field(None, gt=0, lt=1)
    noise_multiplier: float | None = Field(None, gt=0)
    clip: float | None = Field(None, gt=0)
    unit: Literal["client", "point"] = "client"
    trust: Literal["server", "nobody"] = "server"  # who sees a sum before it has its noise
    noise: Literal["system", "simulated"] | None = None  # None: the operating system's, where anything is promised
    accept_delta: bool = False  # also a δ of 1/n or more
    total_epsilon: float | None = Field(
        None, gt=0
    )  # of all runs on the data together; see ``unalike.runs.data_ledger``
    scaling: float | None = Field(None, gt=0, lt=1)  # share of ε for private statistics of the inputs; None: 0.2

    @property
    def promises(self) -> bool:
        """Does the run state an ε?"""
        return any(one is not None for one in (self.epsilon, self.epsilons, self.noise_multiplier))

    @model_validator(mode="before")
    @classmethod
    def _own_budgets_protect_points(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("epsilons") is not None:
            for name in ("epsilon", "noise_multiplier"):
                if values.get(name) is not None:
                    raise ValueError(f"give epsilons (each client's own) or {name} (the same for all), not both")
            if values.setdefault("unit", "point") != "point":
                raise ValueError("epsilons are each client's own, for its points: leave unit out, or say point")
        return values


class Runtime(_Section):
    """How and where clients are simulated. Only ``drop``, and losses of workers, change a result by more than rounding;
    ``quorum`` can stop a run."""

    name: Literal["simulate", "ray", "network"] = "simulate"  # in this process, on a cluster, or at sites
    workers: int | None = Field(None, ge=1)  # None: one for each processor of the cluster, or all nodes that are there
    address: str | None = None  # of a cluster that runs already; None: one is started on this machine
    network: str | None = None  # the folder of the network's hub
    nodes: list[str] | None = None  # of the network; None: those that are there when the run begins
    deadline: float | None = Field(None, gt=0)  # seconds that a worker may take for a request; None: it may take long
    lost: Literal["again", "failed"] = "again"  # clients of a worker that dies: asked again, or failures of that ask
    folder: str | None = None  # where workers save what their clients keep; None: in the run's own folder
    block: int | None = Field(None, ge=1)  # clients at once; None: measured
    threads: int | None = Field(None, ge=1)
    device: Literal["auto", "cpu", "cuda", "mps"] = "cpu"  # the CPU, so that a recipe gives the same bits everywhere
    strict: bool = False  # every message through the wire codec, as on a network
    drop: float = Field(0.0, ge=0, le=1)  # share of clients that fail to answer, to rehearse failures
    quorum: float = Field(0.5, ge=0, le=1)  # share of a cohort that must answer, else the run stops

    def simulator_options(self) -> dict[str, Any]:
        """What ``unalike.simulate`` takes."""
        return self.model_dump(exclude={"name", *_OF_WORKERS})

    @model_validator(mode="after")
    def _for_workers_alone(self) -> Runtime:
        given = [name for name in _OF_WORKERS if getattr(self, name) != Runtime.model_fields[name].default]
        if self.name != "network" and (self.network or self.nodes):
            raise ValueError("network and nodes are for a network of sites: set runtime.name to network")
        if self.name == "simulate" and given:
            raise ValueError(f"{given[0]} is for workers of a cluster: set runtime.name to ray")
        if self.name == "network" and (self.network is None or self.address or self.folder):
            raise ValueError(
                "a network is named by its hub's folder (runtime.network); address and folder are for a cluster"
            )
        if self.name != "simulate" and self.strict:
            raise ValueError("strict is for a simulation in this process: elsewhere every message is encoded anyway")
        return self


_OF_WORKERS = ("workers", "address", "network", "nodes", "deadline", "lost", "folder")


class Expected(_Section):
    """The mean scores that the run is to reach, for example those of a paper's table."""

    seen: float | None = None
    unseen: float | None = None
    unlabeled: float | None = None


class Recipe(_Section):
    """One run."""

    title: str = ""
    method: str  # a name of `unalike methods`, or path/to/file.py:Class
    rounds: int = Field(50, ge=0)
    seed: int = Field(0, ge=0)
    eval_every: int | None = Field(None, ge=1)  # None: about ten times in a run
    checkpoint_every: int = Field(10, ge=1)
    metric: str | None = None  # that scores are by; None: accuracy, RMSE, or what rare classes call for
    select: Literal["last", "best"] = "last"  # which round's models the run ends with; best: on validation rows
    data: Data = Data()
    model: Network = Network()
    preset: str | None = None  # "paper": the method's paper says what nobody sets, in place of the defaults
    hyperparameters: dict[str, Any] = {}  # the fields of the method; see `unalike methods NAME`
    privacy: Privacy = Privacy()
    runtime: Runtime = Runtime()
    expected: Expected = Expected()

    @property
    def evaluate_every(self) -> int:
        return self.eval_every or max(1, self.rounds // 10)

    def to_toml(self) -> str:
        """The recipe as text; what is empty is left out."""
        return tomli_w.dumps(_without_empty(self.model_dump(exclude_none=True)))


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    filled = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in filled.items() if value not in ({}, "")}


class Plan(BaseModel):
    """What one command does: a run, or several over the same data that are compared."""

    model_config = ConfigDict(frozen=True)

    title: str = ""
    runs: list[tuple[str, Recipe]]  # label and recipe
    seeds: int = 1  # every run once for each of so many seeds
    notes: list[str] = []  # what the user should know before it runs

    def with_seeds(self) -> list[tuple[str, Recipe]]:
        return [
            (label, recipe.model_copy(update={"seed": recipe.seed + extra}))
            for label, recipe in self.runs
            for extra in range(self.seeds)
        ]


PLAN_KEYS = ("seeds", "compare")


def to_recipe(values: Mapping[str, Any], where: str) -> Recipe:
    """A recipe from plain values; an unknown key is answered with the nearest one that exists."""
    try:
        return Recipe.model_validate(dict(values))
    except ValidationError as error:
        told = [_explain_mistake(path, value, problems) for path, value, problems in mistakes(error, values)]
        raise UserError(join_notes("", [f"{where}: ", join_notes("; ", told)])) from error


def mistakes(error: ValidationError, values: Any) -> list[tuple[list[str], Any, list[ErrorDetails]]]:
    """What pydantic says by place: the path of a key, its value, and why none of the types that it may have fits."""
    by_path: dict[tuple[str, ...], tuple[Any, list[ErrorDetails]]] = {}
    for problem in error.errors():
        path, value = [], values
        for part in problem["loc"]:  # beyond the keys it tells which type of a union was tried
            if not isinstance(value, Mapping) or part not in value:
                break
            path.append(str(part))
            value = value[part]
        if problem["type"] == "missing":
            path.append(str(problem["loc"][-1]))
        by_path.setdefault(tuple(path), (value, []))[1].append(problem)
    return [(list(path), value, problems) for path, (value, problems) in by_path.items()]


_WANTED = {  # by the beginning of pydantic's name of a mistake
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "dict": "a table of keys with values",
    "model": "a table of keys with values",
    "dataclass": "a table of keys with values",
    "literal_error": "{expected}",
    "greater_than_equal": "{ge:g} or more",
    "greater_than": "a number above {gt:g}",
    "less_than_equal": "{le:g} or less",
    "less_than": "a number below {lt:g}",
}


def wrong_value(key: str, value: Any, problems: Sequence[ErrorDetails]) -> Note:
    """One mistake, told: the key, what came, the flag that sets it, and what was expected."""
    wanted = []
    for problem in problems:
        words = next((told for kind, told in _WANTED.items() if problem["type"].startswith(kind)), "")
        wanted.append(words.format(**problem.get("ctx", {})) or problem["msg"].removeprefix("Value error, "))
    told = " or ".join(one for one in dict.fromkeys(wanted) if one != "a whole number" or "a number" not in wanted)
    found = f"{key.removeprefix('hyperparameters.')} = {value!r}{FLAG}"
    return Note(f"{found}: {told}" if problems[0]["type"] == "value_error" else f"{found}: expected {told}", key)


def _explain_mistake(path: list[str], value: Any, problems: list[ErrorDetails]) -> str:
    key = ".".join(path)
    if problems[0]["type"] == "missing":
        return f"the key {key!r} is missing"
    if problems[0]["type"] != "extra_forbidden":
        table = Note(f"; to leave columns of a table out, say drop_columns{FLAG}", "data.options.drop")
        names = key == "runtime.drop" and isinstance(value, str | list | tuple)
        return join_notes("", [wrong_value(key, value, problems), *([table] if names else [])])
    section = "".join(part + "." for part in path[:-1])
    known = dict.fromkeys(".".join(one.split(".")[: len(path)]) for one in all_keys() if one.startswith(section))
    meant = get_close_matches(path[-1], PARTITION_OPTIONS, 1)
    if meant and not get_close_matches(path[-1], [one.removeprefix(section) for one in known], 1):
        partition, option = PARTITION_OPTIONS[meant[0]]
        return (
            f"unknown key {key!r}; {meant[0]} is an option of a partition: set {meant[0]}, or "
            f'data.partition = "{partition}:{option}=..."'
        )
    return f"unknown key {key!r}{did_you_mean(key, known)}"


def all_keys() -> list[str]:
    """Every key of a recipe, dotted."""
    return [*PLAN_KEYS, *flatten(Recipe(method="").model_dump())]


def plan_of(values: Mapping[str, Any], where: str) -> Plan:
    """A plan from plain values: ``[[compare]]`` entries are laid over the rest, one run each."""
    base = {key: value for key, value in values.items() if key not in PLAN_KEYS}
    seeds = values.get("seeds", 1)
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise UserError(f"{where}: seeds = {seeds!r}{FLAG}: expected a whole number of at least 1", "seeds")
    entries = values.get("compare", [{}])
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{where}: `compare` is a list of tables; write [[compare]] above each")
    runs: list[tuple[str, Recipe]] = []
    for entry in entries:
        own = {key: value for key, value in entry.items() if key != "label"}
        recipe = to_recipe(merge(base, own), where)
        runs.append((str(entry.get("label", recipe.method)), recipe))
    labels = [label for label, _ in runs]
    doubled = sorted({label for label in labels if labels.count(label) > 1})
    if doubled:
        raise UserError(f"{where}: two runs are called {doubled[0]!r}; give each [[compare]] a `label` of its own")
    return Plan(title=str(values.get("title", "")), runs=runs, seeds=seeds)


def read_toml(file: Path) -> dict[str, Any]:
    """A TOML file as plain values."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no recipe {file}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not a text file in UTF-8: {error.reason} at byte {error.start}") from error


def read_recipe(file: Path) -> Recipe:
    """A single run's recipe from a file of the user."""
    return to_recipe(read_toml(file), str(file))


def read_run_recipe(folder: Path) -> Recipe:
    """The recipe of a run folder; refused where it names code that the user has not named."""
    recipe = read_recipe(folder / RECIPE)
    check_code(folder, recipe.model_dump())
    own, network = folder / PRETRAINED, recipe.model
    if own.is_dir() and network.name is not None and not Path(network.name.removeprefix("hf:")).is_dir():
        recipe = recipe.model_copy(update={"model": network.model_copy(update={"name": f"hf:{own.resolve()}"})})
    return recipe


def code_paths(values: Mapping[str, Any]) -> list[str]:
    """What a recipe names that may be code from outside."""
    model = values.get("model")
    named = [values.get("method"), model.get("name") if isinstance(model, Mapping) else model]
    return [name for name in named if isinstance(name, str)]


def check_code(folder: Path, values: Mapping[str, Any]) -> None:
    """Refuse a recipe of a run folder that names code which the user has not named."""
    try:
        recorded = json.loads((folder / CODE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        recorded = {}
    compared = values.get("compare")
    for one in [values, *(compared if isinstance(compared, list) else [])]:
        paths, method = (code_paths(one), one.get("method")) if isinstance(one, Mapping) else ([], None)
        if isinstance(method, str) and outside.is_installed(method):
            paths.remove(method)  # what is no method is refused later; a model may be any function, with arguments
        outside.check_trusted(paths, recorded if isinstance(recorded, dict) else {}, folder)


def apply_overrides(values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """``key=value`` overrides with dotted keys. A key that is none of a recipe's is one of the method's own:
    ``local.lr=0.05`` means ``hyperparameters.local.lr=0.05``.
    """
    result = dict(values)
    for setting in settings:
        key, equals, text = setting.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            raise UserError(f"set {setting!r}: expected key=value, for example local.lr=0.05")
        if path[0] not in (*Recipe.model_fields, *PLAN_KEYS):
            path = ["hyperparameters", *path]
        result = merge(result, nest({".".join(path): _value(text)}))
    return result


def _value(text: str) -> Any:
    """A TOML value if the text reads like one (numbers, lists, tables, quoted words), else the plain word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = literal(text)
        return "none" if value is None else value


def shipped(what: Literal["recipes", "examples"] = "recipes") -> dict[str, Path]:
    """What comes with Unalike, by name: inside an installed package, or beside the package in a clone."""
    package = Path(__file__).parents[2]
    folder = package / what if (package / what).is_dir() else package.parent / what
    kinds = (".toml",) if what == "recipes" else (".py", ".ipynb")
    return {file.stem: file for file in sorted(folder.rglob("*")) if file.suffix in kinds}
