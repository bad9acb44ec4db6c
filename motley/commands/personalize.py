"""``motley personalize``: a finished run gives a newcomer its own model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from motley.commands.options import Json, examples, printed
from motley.studio.errors import UserError
from motley.studio.folder import disk_errors_told
from motley.studio.newcomer import FinishedRun, Served, onnx_is_there, read_newcomer, serve


def personalize(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    data: Annotated[Path, typer.Option(help="The newcomer's rows: NPZ with x (and y), CSV or Parquet.")],
    unlabeled: Annotated[bool, typer.Option("--unlabeled", help="Do not use labels, even if there are some.")] = False,
    epsilon: Annotated[float | None, typer.Option(help="Protect each row: noise on what is sent.")] = None,
    delta: Annotated[float, typer.Option(help="δ that ε is stated at.")] = 0.01,
    out: Annotated[Path | None, typer.Option(help="The model's file.  [default: DATA.model.safetensors]")] = None,
    predictions: Annotated[Path | None, typer.Option(help="Also write the model's answers for the rows.")] = None,
    as_json: Json = False,
) -> None:
    """Give a newcomer the model that fits its data: what is sent, what comes back, and what it costs in privacy.

    The model is written as safetensors, and as ONNX if the extra is there: pip install 'motley-fl[onnx]'.
    """
    target = out or data.with_name(data.name.split(".")[0] + ".model.safetensors")
    graph = target.with_name(target.name.removesuffix(".safetensors") + ".onnx") if onnx_is_there() else None
    for file in (target, graph):
        if file is not None and file.exists() and out is None:
            raise UserError(f"{file} exists already; name another file with --out")
    finished = FinishedRun.open(run)
    newcomer = read_newcomer(data, finished.population, unlabeled=unlabeled)
    served = serve(finished, newcomer, data.name, epsilon=epsilon, delta=delta)
    with disk_errors_told(target.parent):
        served.save(target)
        if predictions is not None:
            predictions.write_text("prediction\n" + "".join(f"{word}\n" for word in served.predict(newcomer)))
        if graph is not None:
            try:
                served.save_onnx(graph)
            except OSError:
                raise
            except Exception as error:  # whatever the exporter does not know of a network of the user's own
                served.notes.append(f"no ONNX graph: the exporter does not know this network ({type(error).__name__})")
                graph = None
    if as_json:
        typer.echo(json.dumps(_plain(served, target, graph, predictions), indent=2))
    else:
        _show(served, target, graph, predictions)


def _plain(served: Served, target: Path, graph: Path | None, predictions: Path | None) -> dict[str, object]:
    return {
        "run": str(served.run.path),
        "samples": served.samples,
        "sent": served.sent,
        "received": served.received,
        "descriptor": None if served.descriptor is None else served.descriptor.tolist(),
        "epsilon": served.epsilon if math.isfinite(served.epsilon) else None,
        "delta": served.delta,
        "model": str(target),
        "onnx": None if graph is None else str(graph),
        "predictions": None if predictions is None else str(predictions),
        "notes": served.notes,
    }


def _show(served: Served, target: Path, graph: Path | None, predictions: Path | None) -> None:
    console = printed()
    table = Table("", "what", "bytes", title=f"{served.name}: {served.samples} samples", title_justify="left")
    for direction, arrays in (("sent", served.sent), ("received", served.received)):
        for name, size in arrays.items():
            table.add_row(direction, name, f"{size:,}")
    console.print(table)
    if served.descriptor is not None:
        numbers = ", ".join(f"{value:.3f}" for value in served.descriptor[:8].tolist())
        more = ", ..." if len(served.descriptor) > 8 else ""
        console.print(f"descriptor ({len(served.descriptor)} numbers): {numbers}{more}", markup=False)
    if math.isfinite(served.epsilon):
        console.print(f"privacy of each row: ε = {served.epsilon:.3g} at δ = {served.delta:g}")
    else:
        console.print("privacy: none was asked for (ε = ∞); what was sent depends on the data without noise")
    for note in served.notes:
        console.print(f"note: {note}", markup=False)
    console.print(f"model: {target}", soft_wrap=True, markup=False)
    if graph is not None:
        console.print(f"the same for any ONNX runtime: {graph}", soft_wrap=True, markup=False)
    if predictions is not None:
        console.print(f"predictions: {predictions}", soft_wrap=True, markup=False)


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "motley run pefll --data digits --partition pathological --rounds 50 --out runs/pefll",
            "motley personalize runs/pefll --data mine.npz --predictions answers.csv",
        )
    )(personalize)
