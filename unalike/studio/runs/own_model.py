"""A training client's own model, from the run folder alone."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from unalike.core.federation import Federation
from unalike.core.request import Program, Reply, Request
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.privacy import Ledger
from unalike.studio.errors import UserError
from unalike.studio.newcomer.file import near
from unalike.studio.newcomer.serve import Served
from unalike.studio.runs.finished import FinishedRun
from unalike.studio.runs.folder import CLIENTS


class _Asked(Exception):
    """The method asked a client for something."""


class _Nobody:
    """A runtime where nobody is at home: whatever is asked of a client ends the attempt."""

    def __init__(self, roster: Roster) -> None:
        self.roster, self.program = roster, Program(open=True)

    def deliver(self, request: Request) -> Iterator[Reply]:
        raise _Asked(request.task)

    def use(self, schema: Schema) -> None: ...

    def forget(self, run: str, prefix: str = "") -> None: ...


def own_model(run: FinishedRun, client: str) -> Served:
    """The model of a client that took part in training: made from the server's state, or kept by the client."""
    names = [run.roster.name(position) for position in range(len(run.roster))]
    if client not in names:
        raise UserError(
            f"{run.path} has no training client {client!r}{near(client, names)} A client that did not train is a "
            "newcomer: give its rows with --data"
        )
    roster = run.roster.select([names.index(client)])
    federation = Federation(_Nobody(run.roster), run.recipe.seed, round=run.round)
    try:
        models = run.method.personalize(run.state, federation.aside(roster).everyone())
        assert isinstance(models, Tensor), "models that lie at clients were asked for there"
        theta, received = models[0].detach(), {"theta": models[0].numel() * 4}
    except _Asked as asked:
        theta, received = _kept(run, client, int(roster.ids[0]), str(asked)), {}
    return Served(
        run=run,
        name=client,
        samples=int(roster.bound[0]),
        theta=theta,
        sent={},
        received=received,
        descriptor=None,
        ledger=Ledger(),
        epsilon=0.0,
        delta=run.newcomer_delta(int(roster.bound[0])),
        notes=list(run.notes),
    )


def _kept(run: FinishedRun, client: str, number: int, task: str) -> Tensor:
    """What the client itself keeps of its model, if this folder has it."""
    ids, values = run.kept.get("theta.ids"), run.kept.get("theta.values")
    if ids is not None and values is not None and values.shape[1:] == (run.method.model.size,):
        row = (ids == number).nonzero().flatten()
        if len(row):
            return values[int(row[0])]
        raise UserError(f"{client} took part in no round, so it has no model of its own yet; give its rows with --data")
    raise UserError(
        f"{run.recipe.method} makes the model of {client} from the client's rows ({task}), and neither the server's "
        f"state nor {run.path / CLIENTS} holds it; give its rows with --data"
    )
