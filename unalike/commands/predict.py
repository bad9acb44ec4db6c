"""``unalike predict``: a finished run predicts the rows of a file, each client by its own model."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from unalike.commands.console import check_free, check_places, print_files, say
from unalike.commands.options import RowFlags, Run, command, flag, json_flag
from unalike.core.disk import write_whole
from unalike.runs.errors import UserError, explain_disk_errors
from unalike.runs.words import counted, listed

if TYPE_CHECKING:
    from unalike.newcomers.predict import Predicted
    from unalike.runs.finished import FinishedRun

_SHOWN = 20  # clients in the printed table
_AGAIN = "unalike predict, with --out FILE for another place"  # where the disk refuses one


app = typer.Typer()


@command(
    app,
    "unalike run pefll --data shops.csv --client-column shop --label-column returned --out runs/shops",
    "unalike predict runs/shops --data new.csv --out predictions.csv",
    "unalike predict runs/shops --data new.csv --client s12 --id-column order --json",
    "unalike predict runs/shops --data new.csv --missing mean",
)
def predict(
    run: Run,
    rows: RowFlags,
    data: Path = flag("The rows: CSV, Parquet, NPZ with x, or a folder of such files.", default=...),
    out: Path | None = flag("The CSV to write. (default: DATA.predictions.csv)"),
    seen: bool = flag("The clients took part in training: use the models that they have.", default=False),
    metric: str | None = flag("By what to score: auroc, f1, ... (default: the run's, or what rare classes call for)"),
    as_json: bool = json_flag(),
) -> None:
    """Predict the rows of a file with a finished run: every client of it by a model of its own.

    RUN is the folder of the run. It needs nothing else: it may be copied to where the
    training data are not.

    The file is read by the run's schema: columns are matched by name, and numbers are
    scaled as in training. A client of the file is a newcomer, who gets the model that
    `unalike personalize` would give; with --seen it is the training client of that
    name, whose model is taken from the folder or made again from the run's data.

    The CSV has a line for each row, in the file's order: its id, its client, the
    predicted class and a probability p_CLASS for each (or the predicted number). If the
    file has the right answers, scores are printed, one with an interval: 95 % of what
    it is for as many clients drawn from these, or rows of a single client. Labels that
    helped to make a model flatter its score: with --unlabeled they only score, if the
    method can do without.
    """
    from unalike.newcomers.file import NewcomerFile
    from unalike.newcomers.ledger import add, path_beside, read_ledger
    from unalike.newcomers.predict import as_csv, find_metric, predict_client
    from unalike.runs.finished import FinishedRun

    target, ledger = out or path_beside(data, ".predictions.csv"), path_beside(data, ".ledger.json")
    finished = FinishedRun.open(run)
    if metric is not None:
        find_metric(finished, metric)
    check_free(out=target)
    check_places(target, again=_AGAIN)
    counted = finished.newcomer_epsilon is not None or ledger.exists()
    if counted:
        read_ledger(ledger)
        check_places(ledger, again=_AGAIN)
    file = NewcomerFile.read(finished, data, rows.options(), id_column=rows.id_column)
    names = list(file.clients) if rows.client is None else [file.only(rows.client)]
    if seen:
        _check_trained(finished, data, names, rows)
    predicted: list[Predicted] = []
    spent: dict[str, dict[str, float | None]] = {}
    for name in names:
        one = predict_client(file, name, unlabeled=rows.unlabeled, seen=seen, classes=rows.declared)
        if counted and one.served.rows:  # before the next: what was sent counts, even if nothing comes of it
            with explain_disk_errors(ledger.parent, again=_AGAIN):
                epsilon, delta = add(ledger, one.served.ledger, one.served.rows, one.served.delta)
            spent[one.name] = {"epsilon": epsilon if math.isfinite(epsilon) else None, "delta": delta}
        predicted.append(one)
    with explain_disk_errors(target.parent, again=_AGAIN):
        write_whole(target, as_csv(predicted, finished.schema).encode())
    notes = file.notes if seen else file.notes + _known(finished, names)
    result = _result(finished, predicted, notes, metric)
    result |= {"run": str(run), "predictions": str(target), "ledger": str(ledger) if spent else None}
    for line in result["clients"]:
        line |= spent.get(line["client"], {})
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        _show(result, target)


def _check_trained(run: FinishedRun, data: Path, names: list[str], rows: RowFlags) -> None:
    """Refuse clients of ``--seen`` that did not train, and what is said of newcomers alone."""
    if names == [""]:
        raise UserError(f"{data} does not say whose a row is, which --seen needs; name the column with --client-column")
    if rows.classes is not None:
        raise UserError("--classes is for newcomers; the clients of --seen have their models already")
    trained = [run.roster.name(i) for i in range(len(run.roster))]
    there = set(trained)
    strangers, known = [name for name in names if name not in there], [name for name in names if name in there]
    if not strangers:
        return
    them = "it gets its model" if len(strangers) == 1 else "they get their models"
    instead = f"the training clients are {listed(trained, 10)}"
    if known:
        instead = f"or predict one client that did: --client {shlex.quote(known[0])} --seen"
    raise UserError(
        f"{data}: {listed(strangers, 10)} took no part in training, so --seen has no model for "
        f"{'it' if len(strangers) == 1 else 'them'}. Leave --seen out: then {them} as "
        f"{'a newcomer' if len(strangers) == 1 else 'newcomers'}; {instead}"
    )


def _known(run: FinishedRun, names: list[str]) -> list[str]:
    """A note where newcomers are called like training clients; numbers are no names."""
    trained = set() if run.roster.names is None else {run.roster.name(i) for i in range(len(run.roster))}
    both = [name for name in names if name in trained]
    if not both:
        return []
    return [f"{listed(both, 5)} also took part in training; as newcomers they get models by these rows (or add --seen)"]


def _result(run: FinishedRun, predicted: list[Predicted], notes: list[str], metric: str | None) -> dict[str, Any]:
    from unalike.newcomers.client_model import asks_clients
    from unalike.newcomers.predict import score_rows

    score = score_rows(predicted, run, metric)
    own = [None] * len(predicted) if score is None else [_finite(one) for one in score.clients]
    told = list(notes)
    for one in predicted:
        label = f"{one.name}: " if len(predicted) > 1 else ""
        told += [note if note in one.served.run.notes else f"{label}{note}" for note in one.served.notes]
    if score is not None and any(one.learned for one in predicted) and asks_clients(run):
        told.append(
            "the labels that score the models also helped to make them, so expect less on new rows; --unlabeled keeps "
            "them apart, if the method can do without"
        )
    return {
        "rows": sum(len(one.newcomer.ids) for one in predicted),
        "metric": None if score is None else score.metric,
        "score": None if score is None else _finite(score.value),
        "interval": None if score is None else [_finite(end) for end in score.interval],
        "metrics": {} if score is None else {name: _finite(value) for name, value in score.all.items()},
        "clients": [
            {"client": one.name, "rows": len(one.newcomer.ids), "score": value, "sent": dict(one.served.sent)}
            for one, value in zip(predicted, own, strict=True)
        ],
        "notes": list(dict.fromkeys(told)),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _show(result: dict[str, Any], target: Path) -> None:
    from unalike.runs.result import score as shown

    clients, score, metric = result["clients"], result["score"], result["metric"]
    title = f"{counted(result['rows'], 'row')} of {counted(len(clients), 'client')}"
    table = Table("client", "rows", *([] if metric is None else [metric]), title=title, title_justify="left")
    for line in clients[:_SHOWN]:
        own = "-" if line["score"] is None else shown(line["score"], metric)
        table.add_row(line["client"], f"{line['rows']:,}", *([] if metric is None else [own]))
    if len(clients) > _SHOWN:
        table.add_row(f"and {len(clients) - _SHOWN:,} more", "", *([] if metric is None else [""]))
    say(table)
    if metric is not None:
        low, high = ("–" if end is None else shown(end, metric) for end in result["interval"])
        drawn = "clients" if len(clients) > 1 else "rows"
        value = "–" if score is None else shown(score, metric)
        say(f"{metric} over all rows with a label: {value} (95 % interval over {drawn}: {low} to {high})")
        others = {name: one for name, one in result["metrics"].items() if name != metric and one is not None}
        say(", ".join(f"{name} {shown(one, name)}" for name, one in others.items()))
    if result["ledger"] is not None:
        finite = [line["epsilon"] for line in clients if "epsilon" in line]
        worst = "∞" if None in finite else f"{max(finite):.3g}"
        say(f"privacy of each row: ε = {worst} at most, for all calls on it in {result['ledger']}")
    elif any(line["sent"] for line in clients):
        say("privacy: none was asked for (ε = ∞); what clients sent depends on their rows without noise")
    else:
        say("privacy: nothing was sent, so nothing is revealed")
    say(*(f"note: {note}" for note in result["notes"]))
    print_files(predictions=target)
