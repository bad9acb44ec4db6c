"""``unalike personalize``: a finished run gives a newcomer its own model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.table import Table

from unalike.commands.console import check_free, check_places, print_files, say
from unalike.commands.options import RowFlags, Run, command, flag, json_flag
from unalike.runs.errors import UserError, explain_disk_errors
from unalike.runs.words import counted

if TYPE_CHECKING:
    from unalike.newcomers.model import PersonalModel
    from unalike.runs.finished import FinishedRun

_OTHER_LEDGER = "unalike personalize, with --ledger FILE for another place"  # where the disk refuses this one


app = typer.Typer()


@command(
    app,
    "unalike run pefll --data digits --partition pathological --rounds 50 --out runs/pefll",
    "unalike personalize runs/pefll --data mine.npz --predictions answers.csv",
    "unalike run fedavg --data shops.csv --client-column shop --label-column returned --out runs/shops",
    "unalike personalize runs/shops --client s07",
)
def personalize(
    run: Run,
    rows: RowFlags,
    data: Path | None = flag("The newcomer's rows: NPZ with x (and y), CSV or Parquet."),
    client: str | None = flag("Which of several clients of the file; without --data: of the training clients."),
    epsilon: float | None = flag("Protect each row: noise on what is sent. Costs add up over calls."),
    delta: float | None = flag("δ that ε is stated at. (default: n^-1.1 for n rows, at most 0.01)"),
    out: Path | None = flag(
        "The model's file. (default: DATA.model.safetensors, CLIENT.model..., DATA.CLIENT.model...)"
    ),
    onnx: bool = flag("Also write the model as an ONNX graph.", default=False),
    peft: Path | None = flag("Also write an adapter into this new folder, in the files of PEFT."),
    predictions: Path | None = flag("Also write the model's answers: a CSV as `unalike predict` writes it."),
    ledger: Path | None = flag("Where to keep what ε has cost each row so far. (default: DATA.ledger.json)"),
    as_json: bool = json_flag(),
) -> None:
    r"""Give a client the model that fits its data: what is sent, what comes back, and what it costs in privacy.

    RUN is the folder of a finished run. It needs nothing else: it may be copied to
    where the training data are not.

    With --data the client is a newcomer. Its file is read by the run's schema: columns
    are matched by name, and numbers are scaled as in training. The model is written as
    safetensors; with --onnx, or if --out ends in .onnx, as an ONNX graph (pip install
    'unalike\[onnx]'). Both say which columns they read and what their classes are called.

    Without --data, --client names a training client. Its model is taken from the folder
    or, where the method needs the client's rows, made again from the run's data.

    With --classes the model never predicts another class. The client rules them out for itself: this needs no labels,
    and nothing of it is sent.

    With an ε, each call is entered in the newcomer's ledger, and the ε that is told is that of all calls in there on
    the same rows, to runs that read the same columns. Keep the ledger with the data, and as private.
    """
    from unalike.newcomers.file import read_newcomer
    from unalike.newcomers.ledger import add, file_word, path_beside
    from unalike.newcomers.predict import Predicted, as_csv
    from unalike.newcomers.serve import serve
    from unalike.runs.finished import FinishedRun

    if data is None:
        more = {"epsilon": epsilon, "delta": delta, "predictions": predictions, "ledger": ledger}
        _check_alone(client, {**vars(rows), **more, "client": None})
        _give_trained(FinishedRun.open(run), str(client), out, onnx, peft, as_json)
        return
    finished = FinishedRun.open(run)
    _check_peft(finished, peft)
    private = epsilon is not None or finished.newcomer_epsilon is not None
    usual = path_beside(data, ".ledger.json")
    if ledger is None and (private or usual.exists()):  # in a ledger that is there, what has no noise counts, too
        ledger = usual
    whose = "" if client is None else f".{file_word(client)}"
    files = _files(out or path_beside(data, f"{whose}.model.safetensors"), onnx, predictions, ledger)
    newcomer = read_newcomer(
        finished, data, rows.options(), client=client, unlabeled=rows.unlabeled, id_column=rows.id_column
    )
    about: Any = {"classes": rows.declared, "left_out": newcomer.left_out, "names": newcomer.row_names}
    served = serve(finished, newcomer.clients, newcomer.name, epsilon=epsilon, delta=delta, **about)
    served.notes.extend(newcomer.notes)
    spent, delta = served.epsilon, served.delta
    if ledger is not None and served.rows:  # before the model: what was sent counts, even if nothing comes of it
        with explain_disk_errors(ledger.parent, again=_OTHER_LEDGER):
            spent, delta = add(ledger, served.ledger, served.rows, served.delta)
    else:
        files = files._replace(ledger=None)
    _write_model(served, files, peft)
    if predictions is not None:
        with explain_disk_errors(predictions.parent):
            answered = Predicted(newcomer, served, served.answers(newcomer.clients))
            predictions.write_text(as_csv([answered], finished.schema), encoding="utf-8")
    if as_json:
        _print_json(served, spent, delta, files)
    else:
        _show(served, spent, delta, files)


def _check_alone(client: str | None, flags: Mapping[str, object]) -> None:
    """A training client has its model already: nothing is said of rows."""
    if client is None:
        raise UserError("give a newcomer's rows with --data FILE, or name a training client with --client NAME")
    for name, value in flags.items():
        if value not in (None, False):
            shown = {"set_": "set"}.get(name, name).replace("_", "-")
            raise UserError(f"--{shown} is about a newcomer's rows: give them with --data, or leave it out")


def _give_trained(
    run: FinishedRun, client: str, out: Path | None, onnx: bool, peft: Path | None, as_json: bool
) -> None:
    """Write the model of a training client."""
    from unalike.newcomers.client_model import client_model
    from unalike.newcomers.ledger import file_word

    _check_peft(run, peft)
    served = client_model(run, client)
    files = _files(out or Path(f"{file_word(client)}.model.safetensors"), onnx, None, None)
    _write_model(served, files, peft)
    if as_json:
        _print_json(served, served.epsilon, served.delta, files)
        return
    say(f"{client} took part in training; this is its model after round {run.round}")
    _show_files(served, files)


class _Files(NamedTuple):
    """What is written: the model, its ONNX graph (which may be all of it), its answers, and what rows have spent."""

    model: Path
    graph: Path | None = None
    predictions: Path | None = None
    ledger: Path | None = None


def _files(model: Path, onnx: bool, predictions: Path | None, ledger: Path | None) -> _Files:
    """The files to be written; all that could go wrong with them is said before any work."""
    from unalike.newcomers.graphs import can_write_onnx
    from unalike.newcomers.ledger import read_ledger

    graph = model if model.suffix == ".onnx" else model.with_suffix(".onnx") if onnx else None
    if graph is not None and not can_write_onnx():
        raise UserError("writing an ONNX graph needs onnx and onnxscript: pip install 'unalike[onnx]'")
    for file, name, others in (
        (predictions, "--predictions", {model: "--out", graph: "--out"}),
        (ledger, "--ledger", {model: "--out", graph: "--out", predictions: "--predictions"}),
    ):
        if file is not None and file in others:
            raise UserError(f"{others[file]} and {name} are both {file}; choose another file for one of them")
    check_free(out=model)
    check_free(out=graph, predictions=predictions)
    if ledger is not None:
        read_ledger(ledger)
    check_places(model, graph, predictions)
    check_places(ledger, again=_OTHER_LEDGER)
    return _Files(model, graph, predictions, ledger)


def _check_peft(run: FinishedRun, peft: Path | None) -> None:
    """Refuse, before anything is sent, a model that PEFT has no files for."""
    from unalike.networks.adapters_peft import check_peft

    if peft is not None:
        check_free(peft=peft)
        try:
            check_peft(run.method.model)
        except ValueError as error:
            raise UserError(f"--peft: {error}") from error


def _write_model(served: PersonalModel, files: _Files, peft: Path | None) -> None:
    with explain_disk_errors(files.model.parent):
        try:
            if files.graph is not None:
                served.save_onnx(files.graph)
        except OSError:
            raise
        except Exception as error:  # whatever the exporter does not know of a network of the user's own
            raise UserError(
                "no ONNX graph could be made: the exporter does not know this network "
                f"({type(error).__name__}: {error}). No model was written; leave out --onnx, or let --out end in "
                ".safetensors"
            ) from error
        if files.model != files.graph:
            served.save(files.model)
        if peft is not None:
            served.save_peft(peft)


def _print_json(served: PersonalModel, spent: float, delta: float, files: _Files) -> None:
    """The service, and (ε, δ) of all calls in the ledger."""
    paths = {name: None if file is None else str(file) for name, file in files._asdict().items()}
    result = {
        "run": str(served.run.path),
        "samples": served.samples,
        "sent": served.sent,
        "received": served.received,
        "descriptor": None if served.descriptor is None else served.descriptor.tolist(),
        "epsilon": spent if math.isfinite(spent) else None,
        "epsilon_of_this_call": served.epsilon if math.isfinite(served.epsilon) else None,
        "delta": delta if math.isfinite(spent) else None,
        "ledger": paths["ledger"],
        "model": paths["model"],
        "onnx": paths["graph"],
        "onnx_input": None if files.graph is None else served.onnx_input,
        "predictions": paths["predictions"],
        "distance": None if served.distance is None else asdict(served.distance),
        "notes": served.notes,
    }
    typer.echo(json.dumps(result, indent=2))


def _show(served: PersonalModel, spent: float, delta: float, files: _Files) -> None:
    title = f"{served.name}: {counted(served.samples, 'sample')}"
    table = Table("", "what", "bytes", title=title, title_justify="left")
    for direction, arrays in (("sent", served.sent), ("received", served.received)):
        for name, size in arrays.items():
            table.add_row(direction, name, f"{size:,}")
    say(table)
    if served.descriptor is not None:
        numbers = ", ".join(f"{value:.3f}" for value in served.descriptor[:8].tolist())
        more = ", ..." if len(served.descriptor) > 8 else ""
        say(f"descriptor ({len(served.descriptor)} numbers): {numbers}{more}")
    if served.distance is not None and not served.distance.is_unusual:  # else it is a note
        say(served.distance.text)
    if not served.sent:
        say("privacy: nothing was sent, so nothing is revealed")
    elif files.ledger is not None and math.isfinite(spent):
        more = "" if spent == served.epsilon else f" (this call alone: {served.epsilon:.3g})"
        say(f"privacy of each row: ε = {spent:.3g} at δ = {delta:g}{more}, for all calls on it in {files.ledger}")
    elif math.isfinite(served.epsilon):
        alone = f"ε = {served.epsilon:.3g} at δ = {served.delta:g} for this call alone"
        none = f"have none (ε = ∞), because a call without noise is in {files.ledger}"
        say(f"privacy of each row: {alone}; all together {none}")
    else:
        entered = "" if files.ledger is None else f"; entered in {files.ledger}"
        say(f"privacy: none was asked for (ε = ∞); what was sent depends on the data without noise{entered}")
    _show_files(served, files)


def _show_files(served: PersonalModel, files: _Files) -> None:
    """What there is to note, and what was written where."""
    say(*(f"note: {note}" for note in served.notes))
    print_files(model=files.model)
    if files.graph is not None:
        what = "" if files.graph == files.model else f"the same for any ONNX runtime: {files.graph}, "
        say(f"{what}its input x is {served.onnx_input}")
    print_files(predictions=files.predictions)
