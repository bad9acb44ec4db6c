"""``unalike tune``: a search for hyperparameters on validation rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from unalike.commands.console import explain_data_errors, guarantee, print_files, progress_console, say
from unalike.commands.options import Dealing, Running, Training, command, flag, plan_from_flags, quiet_flag
from unalike.runs.errors import UserError

if TYPE_CHECKING:
    from unalike.runs.rehearsal import Rehearsal

app = typer.Typer()
_rehearsal = partial(flag, panel="Simulated clients")


@dataclass(frozen=True)
class Simulating:
    """Clients to search on in place of the real ones."""

    on: str | None = _rehearsal(
        "mdm: clients like the real ones, by a mixture of their label histograms. (default: the real ones)"
    )
    server_data: str | None = _rehearsal("With --on mdm: the server's own rows, which are dealt out: a name or a file.")
    mdm_epsilon: float | None = _rehearsal("What the mixture may cost the real clients.")
    mdm_delta: float | None = _rehearsal("δ of the mixture. (default: n^-1.1 for n clients)")
    mdm_unit: str = _rehearsal("Whom its noise protects: client, or point (one of its rows).", default="client")
    largest: int | None = _rehearsal("The most rows that a client may have; for --mdm-unit client.")
    simulated: int | None = _rehearsal("How many to simulate. (default: as many as real ones)", min=2)

    def rehearsal(self) -> Rehearsal | None:
        from unalike.runs.rehearsal import Rehearsal

        if self.on is None:
            if self != Simulating():
                raise UserError("--server-data, --mdm-..., --largest and --simulated go with --on mdm")
            return None
        if self.on != "mdm" or self.server_data is None:
            raise UserError(f"--on {self.on}: expected --on mdm and --server-data, whose rows the clients are made of")
        how: dict[str, Any] = {"unit": self.mdm_unit, "largest": self.largest, "clients": self.simulated}
        return Rehearsal(self.server_data, self.mdm_epsilon, self.mdm_delta, **how)


@command(
    app,
    "unalike tune fedavg --trials 3 --rounds 2 --clients 8 --out runs/search",
    "unalike tune fedavg local --trials 2 --rounds 2 --clients 8 --search local.lr=0.01:1 --out runs/two",
    "unalike tune fedavg --data femnist:writers=200 --on mdm --server-data femnist:writers=-200 --mdm-epsilon 2 "
    "--largest 500 --out runs/rehearsed",
)
def tune(
    targets: Annotated[list[str], typer.Argument(metavar="METHODS...", hidden=True)],
    dealing: Dealing,
    training: Training,
    running: Running,
    simulating: Simulating,
    out: Path = flag("A folder for the search; where it holds one already, that goes on.", default=...),
    trials: int = flag("How many for each method.", default=20, min=1),
    search: list[str] | None = flag(
        "What to search: KEY=LOW:HIGH, as in local.lr=0.01:1. (default: all learning rates)"
    ),
    quiet: bool = quiet_flag(),
) -> None:
    """Search for hyperparameters on validation rows, with as many trials for every method.

    METHODS are methods (names or file.py:Class), or one recipe that compares some.

    Trials that lag behind end early. The search ends in a recipe, tuned.toml in its
    folder, that `unalike compare` runs; test rows choose nothing. A search before a
    private run would look at exact scores, so one with an ε is refused, unless it is on
    clients that are simulated (--on mdm): then the real ones give a mixture of their
    label histograms, and train once. Needs Optuna: pip install 'unalike\\[tune]'.
    """
    from unalike.commands.progress import Lines
    from unalike.runs.tune import RECIPE
    from unalike.runs.tune import tune as run_search
    from unalike.runs.watcher import Watcher

    ranges = {}
    for wanted in search or []:
        key, _, ends = wanted.partition("=")
        try:
            low, high = (float(end) for end in ends.split(":"))
            if not 0 < low < high:
                raise ValueError
        except ValueError:
            raise UserError(f"--search {wanted}: expected KEY=LOW:HIGH with two numbers above 0") from None
        ranges[key] = (low, high)
    watcher = Watcher() if quiet else Lines(progress_console())
    plan = plan_from_flags(targets, dealing, training, running)
    with explain_data_errors():
        found = run_search(plan, trials, out, ranges, watcher, simulating.rehearsal())
    table = Table("method", "validation", "found", "trials", "ended early")
    for one in found:
        values = ", ".join(f"{key} = {value:.3g}" for key, value in one.values.items())
        table.add_row(one.label, f"{one.score:.4g}", values, str(one.trials), str(one.pruned))
    say(table)
    if (cost := found[0].cost) is not None:
        clients = f"{cost['clients']:,} clients, a mixture of {cost['components']}"
        what = "each client" if cost["unit"] == "client" else "each row of a client"
        told = "not private" if cost["epsilon"] is None else guarantee(cost).replace("each client", what)
        say(f"searched on clients like the real ones ({clients}): {told}")
    print_files(recipe=out / RECIPE)
