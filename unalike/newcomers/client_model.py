"""The model of a client that took part in training: kept in the run folder, or made again from the client's rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from unalike.core.federation import Federation
from unalike.core.method import Method, State
from unalike.core.request import Program, Reply, Request
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.newcomers.file import near
from unalike.newcomers.model import PersonalModel
from unalike.privacy import Ledger
from unalike.runs.errors import FLAG, UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.folder import CLIENTS
from unalike.runs.simulate import gather_models
from unalike.runtime.simulate import Simulation


class Asked(Exception):
    """The method asked a client for something."""


class _Nobody:
    """A runtime where nobody is at home: whatever is asked of a client ends the attempt."""

    def __init__(self, roster: Roster) -> None:
        self.roster, self.program = roster, Program(open=True)

    shard_count = 1

    def deliver(self, request: Request) -> Iterator[Reply]:
        raise Asked(request.task)

    def use(self, schema: Schema) -> None: ...

    def forget(self, run: str, prefix: str = "") -> None: ...


def client_model(run: FinishedRun, client: str) -> PersonalModel:
    """The model of a training client.

    It is made from the server's state, or the client kept it, and both are in the folder. Other methods make it of the
    client's rows: then the data of the run are loaded, and the client personalizes again.
    """
    names = [run.roster.name(position) for position in range(len(run.roster))]
    if client not in names:
        raise UserError(
            f"{run.path} has no training client {client!r}{near(client, names)} A client that did not train is a "
            f"newcomer: give its rows{FLAG}",
            "data.name",
        )
    roster = run.roster.select([names.index(client)])
    sent, received, notes = dict[str, int](), dict[str, int](), list(run.notes)
    try:
        theta = server_models(run.method, run.state, roster, run.recipe.seed, run.round)[0].clone()
        received = {"theta": theta.numel() * 4}
        notes.append(f"the model of {client} was made from the server's state")
    except Asked as asked:
        kept = _kept_model(run, int(roster.ids[0]))
        if kept is None:
            theta, sent, received = _from_rows(run, roster, client, str(asked))
            notes.append(f"the model of {client} was made again from its training rows, in this process")
        else:
            theta = kept
            notes.append(f"the model of {client} was kept by the client")
    return PersonalModel(
        run=run,
        name=client,
        samples=int(roster.bound[0]),
        theta=theta,
        sent=sent,
        received=received,
        descriptor=None,
        ledger=Ledger(),
        epsilon=math.inf if sent else 0.0,
        delta=run.newcomer_delta(int(roster.bound[0])),
        notes=notes,
    )


def asks_clients(run: FinishedRun) -> bool:
    """Does a client's model depend on its rows? Of some methods it is made from the server's state alone."""
    try:
        server_models(run.method, run.state, run.roster.select([0]), run.recipe.seed, run.round)
    except Asked:
        return True
    return False


def server_models(method: Method, state: State, roster: Roster, seed: int = 0, round: int = 0) -> Tensor:
    """The models [C, d] of clients, made of the server's state alone; ``Asked`` where the method asks a client."""
    federation = Federation(_Nobody(roster), seed, round=round)
    models = method.personalize(state, federation.everyone())
    assert isinstance(models, Tensor), "models that lie at clients were asked for there"
    return models.detach()


def _kept_model(run: FinishedRun, number: int) -> Tensor | None:
    """The whole model that the client keeps, if it keeps one and this folder has it."""
    ids, values = run.kept.get("theta.ids"), run.kept.get("theta.values")
    if ids is None or values is None or values.shape[1:] != (run.method.model.size,):
        return None
    row = (ids == number).nonzero().flatten()
    return values[int(row[0])] if len(row) else None


def _from_rows(
    run: FinishedRun, roster: Roster, client: str, task: str
) -> tuple[Tensor, dict[str, int], dict[str, int]]:
    """The model that the client makes of its training rows, as the run measured it; bytes up and down."""
    if run.lacks_kept:
        raise UserError(
            f"{run.recipe.method} makes the model of {client} from what the client keeps ({task}), and "
            f"{run.path / CLIENTS} does not hold it: copy the whole folder, or give the client's rows{FLAG}",
            "data.name",
        )
    try:
        prepared = run.prepared
    except UserError as error:
        raise UserError(
            f"{run.recipe.method} makes the model of {client} from its training rows ({task}), which cannot be "
            f"loaded here ({error.__cause__ or error}); do this where they are, or give rows of "
            f"the client{FLAG}",
            "data.name",
        ) from error
    federation = prepared.federation(round=run.round, schema=run.schema)
    assert isinstance(federation.runtime, Simulation)
    federation.runtime.restore(federation.run, dict(run.kept))
    with federation.aside(roster) as own:
        cohort = own.everyone()
        theta = gather_models(cohort, run.method.personalize(run.state, cohort))[0].detach()
        return theta, dict(own.traffic.up), dict(own.traffic.down)
