"""What a site allows, in a TOML file that somebody at the site signs for. What it does not mention is not allowed.

A refusal names its rule: the key of the file that forbids it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unalike.core.release import Each, Noise, Release, Stays, Terms
from unalike.core.request import Purpose
from unalike.data.build import Division
from unalike.runs.errors import UserError
from unalike.runs.recipe.recipe import Recipe, read_toml
from unalike.runtime.shard.host import version
from unalike.runtime.shard.shard import Refused
from unalike.version import __version__

FILE, APPROVED, PENDING = "policy.toml", "approved", "pending"
Shows = Literal["never", "noise", "bare"]
# of a recipe: what is the researcher's alone, and where rows are, which each site knows of its own
_OWN: dict[str, Any] = {
    **dict.fromkeys(("runtime", "title", "expected", "checkpoint_every"), True),
    "data": {"name": True, "schema_": True},
}
_FOR: dict[str, str] = {"Scaling": "scale", "Scorer": "measure", "Losses": "measure"}  # purposes of tasks, by owner
_MOST_PENDING = 100  # recipes that wait for approval


class Forbidden(Refused):
    """The policy forbids something; the message begins with the rule."""

    def __init__(self, rule: str, why: str) -> None:
        super().__init__(f"rule {rule}: {why}")
        self.rule = rule


class Analysis(BaseModel):
    """What an analysis reads at every site, and where its noise comes from, as a server tells it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["kmeans", "mdm", "estimate"]
    how: dict[str, Any]  # to read rows
    noise: Noise

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump())


class Policy(BaseModel):
    """The rules of a site."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    network: str = ""  # whose runs; empty: nobody's
    methods: list[str] = []  # kmeans, mdm and estimate among them
    models: list[str] = []  # architectures
    versions: list[str] = []  # of Unalike; empty: whichever is installed here
    tasks: list[str] = []  # empty: all of the listed methods
    purposes: list[Literal["train", "serve", "measure", "scale"]] = []  # scale: exact sums for the scaling of inputs
    trust: list[Literal["server", "nobody"]] = []  # who may see sums before they have noise, in runs with an ε
    individual: Shows = "never"  # arrays of single clients: never, only with noise, or as they are
    sums: Shows = "never"
    fewest: int = Field(5, ge=1)  # clients of this site in a sum without noise or masks; fewer count as individual
    unit: Literal["client", "point"] = "client"  # whom noise has to protect
    delta: float = Field(1e-6, gt=0, lt=1)
    epsilon: float = Field(0.0, ge=0)  # the most that all runs together may cost, by this site's own count
    epsilon_run: float = Field(0.0, ge=0)  # and one run
    noise: float = Field(0.0, ge=0)  # the least noise multiplier of Gaussian noise
    largest_network: int = Field(0, ge=0)  # clients, of which those of a secure sum may share its noise out
    rounds: int = Field(0, ge=0)
    hours: float = Field(0.0, ge=0)  # that one run may last
    asks: int = Field(8, ge=1)  # in a round, for training; as many again before the first
    megabytes: int = Field(0, ge=0)  # that leave in one run, and that one message to this site may have
    round_sizes: int = Field(10, ge=1)  # the server is told numbers of rows rounded up to multiples of this
    approve: bool = True  # every recipe needs `unalike node approve`
    recipes: list[str] = []  # digests that need no other approval

    @classmethod
    def read(cls, folder: Path) -> Policy:
        """The site's policy. Without a file it allows nothing."""
        file = folder / FILE
        if not file.exists():
            return cls()
        try:
            return cls.model_validate(read_toml(file))
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            raise UserError(f"{file}: {key}: {problem['msg']}; the keys are {', '.join(cls.model_fields)}") from error

    def refusals(self, recipe: Recipe | Analysis, network: str) -> Iterator[Forbidden]:
        """Every rule that a recipe or an analysis meets."""
        yield from closed(recipe)
        if network != self.network:
            yield Forbidden("network", f"this site works for {self.network or 'nobody'}, not for {network}")
        if recipe.method not in self.methods:
            yield Forbidden("methods", f"{recipe.method} is not listed")
        if self.versions and __version__ not in self.versions:
            yield Forbidden("versions", f"Unalike {__version__} is installed here, which is not listed")
        if "train" not in self.purposes:
            yield Forbidden("purposes", "train is not listed")
        if isinstance(recipe, Analysis):
            if recipe.noise == "system" and "server" not in self.trust:
                yield Forbidden("trust", 'in an analysis the server adds the noise; trust = "server" is not listed')
            if recipe.noise == "system" and self.unit == "point" and recipe.how.get("missing") == "client":
                yield Forbidden("unit", "missing = client has one row change others, and rows are to be protected")
            return
        if recipe.rounds > self.rounds:
            yield Forbidden("rounds", f"the recipe has {recipe.rounds}, allowed are {self.rounds}")
        if recipe.privacy.promises and recipe.privacy.trust not in self.trust:
            yield Forbidden("trust", f'trust = "{recipe.privacy.trust}" is not listed')
        if recipe.privacy.promises and recipe.privacy.noise == "simulated" and self.sums != "bare":
            yield Forbidden("sums", "simulated noise protects nobody, so it counts as none")

    def late_refusals(self, recipe: Recipe, clients: int) -> Iterator[Forbidden]:
        """The rules that a recipe meets once its model and the number of all clients are known."""
        if recipe.model.name not in self.models:
            yield Forbidden("models", f"{recipe.model.name} is not listed")
        if recipe.privacy.promises and recipe.privacy.trust == "nobody" and clients > self.largest_network:
            told = f"the server tells of {clients} clients, allowed are {self.largest_network}"
            yield Forbidden("largest_network", told)

    def check_task(self, task: str, purpose: Purpose) -> None:
        """Refuse a task, or what it is asked for."""
        for one in (purpose, _FOR.get(task.partition(".")[0], purpose)):
            if one not in self.purposes:
                raise Forbidden("purposes", f"{one} is not listed")
        if self.tasks and task not in self.tasks:
            raise Forbidden("tasks", f"{task} is not listed")

    def check_release(self, release: Release, clients: int, terms: Terms) -> bool:
        """Refuse a release that may not leave; does it leave protected by noise?"""
        if isinstance(release, Stays):
            return True
        protected = (release.noise is not None or release.cost is not None) and terms.system
        noised = protected and (terms.at_shard or release.cost is not None)  # before it leaves
        hidden = noised or bool(getattr(release, "secure", False)) or clients >= self.fewest
        kind = "sums" if hidden and not isinstance(release, Each) else "individual"
        allowed: Shows = getattr(self, kind)
        what = f"{release.kind}({', '.join(release.names) or 'all arrays'})"
        if allowed == "never" or (allowed == "noise" and not protected):
            few = f", over {clients} of its clients" if kind == "individual" and not isinstance(release, Each) else ""
            bare = "" if protected else " without noise"
            raise Forbidden(kind, f"{what}{bare}{few}: {kind} arrays leave {TOLD[allowed]}")
        level = getattr(release.noise, "noise_multiplier", None)
        if protected and isinstance(level, float | int) and level < self.noise:
            raise Forbidden("noise", f"{what} has a noise multiplier of {level:g}, the least is {self.noise:g}")
        return protected


_DIVIDES = {one.name for one in fields(Division)} - {"seed", "test"}  # who is a client, of which rows
TOLD = {"never": "never", "noise": "with noise alone", "bare": "as they are"}


def closed(recipe: Recipe | Analysis) -> Iterator[Forbidden]:
    """What no policy can allow, because the code and the data of a site are its own."""
    values = _values(recipe)
    for key, text in _texts(values):
        if key == "model.trainable":
            continue  # such as "lora:r=4": what it may say is in ``networks/adapters.py``
        if ":" in text or "/" in text or "\\" in text or text.endswith(".py"):
            yield Forbidden("closed", f"{key} = {text!r} may name code or a file; a site runs what is installed there")
    if isinstance(recipe, Analysis):
        if divided := _DIVIDES & recipe.how.keys():
            yield Forbidden("closed", f"a site's rows are its clients' own; leave {', '.join(sorted(divided))} out")
        return
    data = recipe.data
    if data.partition not in (None, "natural") or data.rotate is not None or data.clients is not None:
        yield Forbidden("closed", "a site's rows are its clients' own; leave partition, clients and rotate out")
    if recipe.privacy.epsilons is not None:
        yield Forbidden("closed", "clients of a site declare no ε of their own")


def _values(recipe: Recipe | Analysis) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude=_OWN if isinstance(recipe, Recipe) else None)


def _texts(values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(values, str):
        yield path, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _texts(str(key), path)
            yield from _texts(value, f"{path}.{key}".strip("."))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _texts(value, path)


def digest_of(recipe: Recipe | Analysis, schema: str | None) -> str:
    """What somebody approves: a recipe, the schema that it reads rows by, and the code that would run it here."""
    content = {"recipe": _values(recipe), "schema": None if schema is None else json.loads(schema), "code": version()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_approved(folder: Path, policy: Policy, recipe: Recipe | Analysis, schema: str | None) -> None:
    """Refuse a recipe that nobody here has approved, and note that it waits for that."""
    digest = digest_of(recipe, schema)
    if not policy.approve or digest in approved(folder) or digest in policy.recipes:
        return
    waiting = folder / PENDING
    waiting.mkdir(exist_ok=True)
    if len(list(waiting.iterdir())) < _MOST_PENDING:
        (waiting / f"{digest}.toml").write_text(recipe.to_toml(), encoding="utf-8")
    raise Forbidden("approve", f"recipe {digest[:16]} waits for approval at this site (unalike node approve)")


def approved(folder: Path) -> set[str]:
    """The digests of approved recipes."""
    file = folder / APPROVED
    return {line.split()[0] for line in file.read_text().splitlines() if line.strip()} if file.exists() else set()


def approve(folder: Path, digest: str) -> None:
    """Approve a recipe by its digest."""
    with (folder / APPROVED).open("a") as file:
        file.write(f"{digest}\n")
    (folder / PENDING / f"{digest}.toml").unlink(missing_ok=True)
