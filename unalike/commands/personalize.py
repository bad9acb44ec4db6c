"""``unalike personalize``: a finished run gives a newcomer its own model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table

from unalike.commands.console import check_free, print_files, printed
from unalike.commands.options import Json, examples

if TYPE_CHECKING:
    from unalike.studio.newcomer.serve import Served

_OTHER_LEDGER = "unalike personalize, with --ledger FILE for another place"  # where the disk refuses this one


def personalize(
    run: Annotated[Path, typer.Argument(metavar="RUN", hidden=True)],
    data: Annotated[Path | None, typer.Option(help="The newcomer's rows: NPZ with x (and y), CSV or Parquet.")] = None,
    client: Annotated[
        str | None, typer.Option(help="Which of several clients of the file; without --data: of the training clients.")
    ] = None,
    unlabeled: Annotated[bool, typer.Option("--unlabeled", help="Do not use labels, even if there are some.")] = False,
    label_column: Annotated[str | None, typer.Option(help="Of a CSV or Parquet file. (default: the run's)")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="How to read the file, e.g. data.options.missing=drop."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Protect each row: noise on what is sent. Costs add up over calls.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="δ that ε is stated at. (default: n^-1.1 for n rows, at most 0.01)")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The model's file. (default: DATA.model.safetensors, CLIENT.model.safetensors)")
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write the model as an ONNX graph.")] = False,
    predictions: Annotated[Path | None, typer.Option(help="Also write the model's answers for the rows.")] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Where to keep what ε has cost each row so far. (default: DATA.ledger.json)")
    ] = None,
    as_json: Json = False,
) -> None:
    r"""Give a client the model that fits its data: what is sent, what comes back, and what it costs in privacy.

    RUN is the folder of a finished run. It needs nothing else: it may be copied to
    where the training data are not.

    With --data the client is a newcomer. Its file is read by the run's schema: columns
    are matched by name, and numbers are scaled as in training. The model is written as
    safetensors; with --onnx, or if --out ends in .onnx, as an ONNX graph (pip install
    'unalike\[onnx]'). Both say which columns they read and what their classes are called.

    Without --data, --client names a training client, and its own model is taken from
    the folder.

    With an ε, each call is entered in the newcomer's ledger, and the ε that is told is that of all calls in there on
    the same rows, to runs that read the same columns. Keep the ledger with the data, and as private.
    """
    from unalike.studio.newcomer.file import read_newcomer
    from unalike.studio.newcomer.ledger import beside, enter
    from unalike.studio.newcomer.serve import serve
    from unalike.studio.runs.finished import FinishedRun
    from unalike.studio.runs.folder import disk_errors_told

    if data is None:
        flags: dict[str, object] = {"--label-column": label_column, "--set": set_, "--epsilon": epsilon}
        flags |= {"--delta": delta, "--unlabeled": unlabeled or None}
        flags |= {"--predictions": predictions, "--ledger": ledger}
        _own(run, client, [flag for flag, value in flags.items() if value is not None], out, onnx, as_json)
        return
    target = out or beside(data, ".model.safetensors")
    graph = target if target.suffix == ".onnx" else target.with_suffix(".onnx") if onnx else None
    finished = FinishedRun.open(run)
    private = epsilon is not None or finished.newcomer_epsilon is not None
    usual = beside(data, ".ledger.json")
    if ledger is None and (private or usual.exists()):  # in a ledger that is there, what has no noise counts, too
        ledger = usual
    _check_outputs(target, graph, predictions, ledger)
    given = {**file_options(set_ or []), **({} if label_column is None else {"label_column": label_column})}
    newcomer = read_newcomer(finished, data, given, client=client, unlabeled=unlabeled)
    served = serve(finished, newcomer.clients, newcomer.name, epsilon=epsilon, delta=delta, left_out=newcomer.left_out)
    served.notes.extend(newcomer.notes)
    spent, delta = served.epsilon, served.delta
    if ledger is not None and served.rows:  # before the model: what was sent counts, even if nothing comes of it
        with disk_errors_told(ledger.parent, again=_OTHER_LEDGER):
            spent, delta = enter(ledger, served.ledger, served.rows, served.delta)
    else:
        ledger = None
    _write_model(served, target, graph)
    if predictions is not None:
        with disk_errors_told(predictions.parent):
            words = served.predict(newcomer.clients)
            predictions.write_text("prediction\n" + "".join(f"{word}\n" for word in words), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(_plain(_Result(served, spent, delta, ledger, target, graph, predictions)), indent=2))
    else:
        _show(_Result(served, spent, delta, ledger, target, graph, predictions))


def _own(run: Path, client: str | None, flags: list[str], out: Path | None, onnx: bool, as_json: bool) -> None:
    """A training client's model, from the folder alone."""
    from unalike.studio.errors import UserError
    from unalike.studio.newcomer.own import own_model
    from unalike.studio.runs.finished import FinishedRun

    if client is None:
        raise UserError("give a newcomer's rows with --data FILE, or name a training client with --client NAME")
    if flags:
        raise UserError(f"{flags[0]} is about a newcomer's rows: give them with --data, or leave it out")
    finished = FinishedRun.open(run)
    served = own_model(finished, client)
    word = "".join(sign if sign.isalnum() or sign in "-_." else "_" for sign in client).lstrip(".")
    target = out or Path(f"{word or 'client'}.model.safetensors")
    graph = target if target.suffix == ".onnx" else target.with_suffix(".onnx") if onnx else None
    _check_outputs(target, graph, None, None)
    _write_model(served, target, graph)
    if as_json:
        typer.echo(json.dumps(_plain(_Result(served, 0.0, served.delta, None, target, graph, None)), indent=2))
        return
    console = printed()
    origin = "made from the server's state" if served.received else "kept by the client"
    told = f"{client} took part in training; its model after round {finished.round} was {origin}"
    console.print(told, soft_wrap=True, markup=False)
    _show_files(served, target, graph, None)


def _write_model(served: Served, target: Path, graph: Path | None) -> None:
    from unalike.studio.runs.folder import disk_errors_told

    with disk_errors_told(target.parent):
        if graph is not None:
            _write_graph(served, graph)
        if target != graph:
            served.save(target)


class _Result(NamedTuple):
    """What to tell: the service, (ε, δ) of all calls in the ledger, and the files written."""

    served: Served
    spent: float
    delta: float
    ledger: Path | None
    model: Path
    graph: Path | None
    predictions: Path | None


def _check_outputs(target: Path, graph: Path | None, predictions: Path | None, ledger: Path | None) -> None:
    """All that could go wrong with the files to be written, before any work."""
    from unalike.studio.errors import UserError
    from unalike.studio.newcomer.ledger import read_ledger
    from unalike.studio.newcomer.serve import onnx_is_there
    from unalike.studio.runs.folder import check_writable, disk_errors_told

    if graph is not None and not onnx_is_there():
        raise UserError("writing an ONNX graph needs onnx and onnxscript: pip install 'unalike[onnx]'")
    for file, flag, others in (
        (predictions, "--predictions", {target: "--out", graph: "--out"}),
        (ledger, "--ledger", {target: "--out", graph: "--out", predictions: "--predictions"}),
    ):
        if file is not None and file in others:
            raise UserError(f"{others[file]} and {flag} are both {file}; choose another file for one of them")
    check_free(out=target)
    check_free(out=graph, predictions=predictions)
    for file in (target, graph, predictions):
        if file is None:
            continue
        with disk_errors_told(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
            check_writable(file)
    if ledger is not None:
        read_ledger(ledger)
        with disk_errors_told(ledger.parent, again=_OTHER_LEDGER):
            ledger.parent.mkdir(parents=True, exist_ok=True)
            check_writable(ledger)


def file_options(settings: list[str]) -> dict[str, Any]:
    """What ``--set data.options.KEY=VALUE`` says."""
    from unalike.studio.errors import UserError
    from unalike.studio.recipe.recipe import overridden

    values = overridden({}, settings)
    data = values.get("data", {})
    if set(values) - {"data"} or not isinstance(data, dict) or set(data) - {"options"}:
        raise UserError(
            "--set: expected data.options.KEY=VALUE, how to read the file; all else was decided in training"
        )
    return dict(data.get("options", {}))


def _write_graph(served: Served, graph: Path) -> None:
    from unalike.studio.errors import UserError

    try:
        served.save_onnx(graph)
    except OSError:
        raise
    except Exception as error:  # whatever the exporter does not know of a network of the user's own
        raise UserError(
            f"no ONNX graph could be made: the exporter does not know this network ({type(error).__name__}: {error}). "
            "No model was written; leave out --onnx, or let --out end in .safetensors"
        ) from error


def _plain(result: _Result) -> dict[str, object]:
    served, spent, delta, ledger, model, graph, predictions = result
    return {
        "run": str(served.run.path),
        "samples": served.samples,
        "sent": served.sent,
        "received": served.received,
        "descriptor": None if served.descriptor is None else served.descriptor.tolist(),
        "epsilon": spent if math.isfinite(spent) else None,
        "epsilon_of_this_call": served.epsilon if math.isfinite(served.epsilon) else None,
        "delta": delta if math.isfinite(spent) else None,
        "ledger": None if ledger is None else str(ledger),
        "model": str(model),
        "onnx": None if graph is None else str(graph),
        "onnx_input": None if graph is None else served.onnx_input,
        "predictions": None if predictions is None else str(predictions),
        "notes": served.notes,
    }


def _show(result: _Result) -> None:
    from unalike.studio.words import counted

    served, spent, delta, ledger, model, graph, predictions = result
    console = printed()
    table = Table(
        "", "what", "bytes", title=f"{served.name}: {counted(served.samples, 'sample')}", title_justify="left"
    )
    for direction, arrays in (("sent", served.sent), ("received", served.received)):
        for name, size in arrays.items():
            table.add_row(direction, name, f"{size:,}")
    console.print(table)
    if served.descriptor is not None:
        numbers = ", ".join(f"{value:.3f}" for value in served.descriptor[:8].tolist())
        more = ", ..." if len(served.descriptor) > 8 else ""
        console.print(f"descriptor ({len(served.descriptor)} numbers): {numbers}{more}", markup=False)
    if not served.sent:
        console.print("privacy: nothing was sent, so nothing is revealed")
    elif ledger is not None and math.isfinite(spent):
        alone = "" if spent == served.epsilon else f" (this call alone: {served.epsilon:.3g})"
        told = f"privacy of each row: ε = {spent:.3g} at δ = {delta:g}{alone}, for all calls on it in {ledger}"
        console.print(told, soft_wrap=True, markup=False)
    elif math.isfinite(served.epsilon):
        told = (
            f"privacy of each row: ε = {served.epsilon:.3g} at δ = {served.delta:g} for this call alone; all together "
        )
        told += f"have none (ε = ∞), because a call without noise is in {ledger}"
        console.print(told, soft_wrap=True, markup=False)
    else:
        entered = "" if ledger is None else f"; entered in {ledger}"
        told = "privacy: none was asked for (ε = ∞); what was sent depends on the data without noise"
        console.print(told + entered, soft_wrap=True, markup=False)
    _show_files(served, model, graph, predictions)


def _show_files(served: Served, model: Path, graph: Path | None, predictions: Path | None) -> None:
    """What there is to note, and what was written where."""
    console = printed()
    for note in served.notes:
        console.print(f"note: {note}", markup=False)
    print_files(model=model)
    if graph is not None:
        what = "" if graph == model else f"the same for any ONNX runtime: {graph}, "
        console.print(f"{what}its input x is {served.onnx_input}", soft_wrap=True, markup=False)
    print_files(predictions=predictions)


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "unalike run pefll --data digits --partition pathological --rounds 50 --out runs/pefll",
            "unalike personalize runs/pefll --data mine.npz --predictions answers.csv",
            "unalike run fedavg --data shops.csv --client-column shop --label-column returned --out runs/shops",
            "unalike personalize runs/shops --client s07",
        )
    )(personalize)
