"""``unalike bundle``, ``serve`` and ``watch``: a finished run makes models for whoever asks; a live page of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from unalike.commands.console import say
from unalike.commands.options import Run, command, flag, json_flag
from unalike.runs.errors import UserError

app = typer.Typer()


@command(app, "unalike bundle runs/shops --out bundles/shops", "unalike serve bundles/shops")
def bundle(
    run: Run,
    out: Path | None = flag("A new or empty folder. (default: RUN.bundle)"),
    name: str | None = flag("What the service calls it. (default: the run's folder)"),
    as_json: bool = json_flag(),
) -> None:
    """Write what is needed to make models of a finished run for whoever asks.

    RUN is the folder of the run.

    The bundle holds ONNX graphs and says how rows are read: describe.onnx makes a
    descriptor of rows, make.onnx a model of a descriptor, model.onnx uses a model.
    card.json is its model card: method, rounds, the ε of training, scores, and the
    hashes of the files. It holds no descriptor of a training client and no row.

    A method whose newcomers train, or answer with labels, cannot be served so;
    `unalike methods NAME` says how a method is served.
    """
    from unalike.newcomers.bundle import write_bundle
    from unalike.runs.finished import FinishedRun

    out = out or run.with_name(f"{run.resolve().name}.bundle")
    card = write_bundle(FinishedRun.open(run), out, name)
    if as_json:
        typer.echo(json.dumps(card, ensure_ascii=False))
        return
    made = {"server": "sends its descriptor and gets a model", "newcomer": "makes its model by itself"}
    say(f"{out}: a newcomer {made.get(card['made_at'], 'gets the one model for everybody')}")
    for file, about in card["files"].items():
        say(f"  {file:14} {about['bytes']:>12,} bytes")
    say(f"serve it with: unalike serve {out}")


@command(
    app,
    "unalike serve bundles/shops",
    "unalike serve bundles/shops bundles/digits --port 8443 --tls-cert cert.pem --tls-key key.pem --keys keys.txt",
    "unalike serve bundles/digits --export page",
)
def serve(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", hidden=True)],
    host: str = flag("The address to listen at; 0.0.0.0: all of this machine's.", default="127.0.0.1"),
    port: int = flag("The port.", default=8000, min=0, max=65535),
    offline: bool = flag("Give out make.onnx, so that pages can make models themselves.", default=False),
    keys: Path | None = flag("Who may ask: a file of lines NAME KEY, or NAME KEY MODELS_A_MINUTE. (default: all)"),
    limit: float = flag("Models a minute for each key, or each address.", default=600.0, min=1.0),
    tls_cert: Path | None = flag("The certificate for HTTPS (PEM); needs --tls-key."),
    tls_key: Path | None = flag("Its key (PEM)."),
    behind_proxy: bool = flag("Believe a proxy on this machine who a visitor is.", default=False),
    engine: Path | None = flag("Pages compute by ONNX Runtime Web: its folder dist. For large networks."),
    export: Path | None = flag("Write page and bundles as a folder for any web server, and end."),
) -> None:
    """Serve bundles: an interface for programs and a page for people.

    BUNDLE is a folder that `unalike bundle` wrote; there may be several.

    A newcomer's rows never come here. Its page or program makes a descriptor
    of them with describe.onnx, and sends it, with or without noise; the
    service answers with a model. It keeps no descriptor and logs none. With
    --offline, and where the newcomer makes its model, nothing is sent at all.

    The page is at /, the interface is described at /docs, /healthz and
    /metrics are for operators. A browser gives the page what it needs
    (hashes, a store) over HTTPS or on this machine only: use --tls-cert, or a
    proxy. A bundle that is written anew is taken up. See docs/serve.md.
    """
    try:
        from unalike.newcomers.service import export_page, read_keys, run_service, service
    except ImportError as error:
        raise UserError(f"unalike serve needs {error.name}: pip install 'unalike[serve]'") from error
    if (tls_cert is None) != (tls_key is None):
        raise UserError("give --tls-cert and --tls-key together, or neither")
    if export is not None:
        export_page(bundles, export)
        say(f"{export}: put this folder on any web server; models are made in the page, and nothing is sent")
        return
    who = None if keys is None else read_keys(keys, limit)
    app = service(bundles, offline=offline, limit=limit, keys=who, engine=engine)
    run_service(
        app, host, port, tls_cert, tls_key, behind_proxy, ready=lambda at: say(f"serving at {at}; Ctrl-C ends it")
    )


@command(app, "unalike run pefll --data digits --rounds 500 --out runs/pefll &", "unalike watch runs/pefll")
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", hidden=True)],
    host: str = flag("The address to listen at.", default="127.0.0.1"),
    port: int = flag("The port.", default=8001, min=0, max=65535),
) -> None:
    """Show a run in a browser while it goes on: loss, bytes, failures, ε, and scores.

    RUN is the folder of the run.

    The page follows metrics.jsonl. Of a run with an ε it shows no scores, because
    they are measured without noise.
    """
    try:
        from unalike.newcomers.service import run_service
        from unalike.newcomers.watch import watching
    except ImportError as error:
        raise UserError(f"unalike watch needs {error.name}: pip install 'unalike[serve]'") from error
    run_service(watching(run), host, port, ready=lambda at: say(f"the run is at {at}; Ctrl-C ends it"))
