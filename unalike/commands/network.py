"""``unalike network``: the hub of a network of sites, and who is admitted."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Annotated

import typer

from unalike.commands.console import say
from unalike.commands.options import command, examples, flag, json_flag
from unalike.runs.errors import UserError

app = typer.Typer()
network = typer.Typer(
    no_args_is_help=True,
    help="Run the hub of a network of sites, and say which sites are admitted.",
    epilog=examples("unalike network init hub --name clinic --address hub.example.org:8443", "unalike network hub hub"),
)
app.add_typer(network, name="network")
INSTALL = "a network needs gRPC, which is not installed: pip install 'unalike[network]'"
Folder = Annotated[Path, typer.Argument(metavar="DIR", hidden=True)]


def log(text: str) -> None:
    """A line of a daemon's log. One that a full disk has no room for is lost, and the daemon goes on."""
    with contextlib.suppress(OSError):
        say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


@command(network, "unalike network init hub --name clinic --address hub.example.org:8443")
def init(
    folder: Folder,
    name: str = flag("Of the network.", default=...),
    address: str = flag("Where sites dial: HOST:PORT.", default=...),
    listen: str | None = flag("Where the hub listens, HOST:PORT. (default: the address)"),
) -> None:
    """Make the authority and the server key of a new network.

    DIR is its folder, which is made.
    """
    from unalike.deploy import keys

    authority = keys.init_network(folder, name, address, listen)
    say(
        f"network {name} in {folder}; back the folder up, and show it to nobody",
        f"fingerprint of its authority: {keys.spoken(authority)}",
        "(sites compare it, by telephone, with what `unalike node join` shows)",
    )


@command(network, "unalike network admit hub request.pem")
def admit(
    folder: Folder,
    request: Annotated[Path, typer.Argument(metavar="REQUEST", hidden=True)],
    days: float | None = flag("How long its certificate is valid. (default: 730)"),
) -> None:
    """Admit a site to a network, and write the bundle for it.

    DIR is the folder of the network.
    REQUEST is the file that the site sent.

    To revoke a site, delete its line in DIR/admitted; its stream ends within a second.
    """
    from unalike.deploy import keys

    name, key, bundle = keys.admit(folder, request, days)
    say(
        f"site {name} is admitted; its key is {keys.spoken(key)}",
        "(compare that, by telephone, with what `unalike node init` showed; if it differs, delete the line)",
        f"bundle: {bundle} (send it to the site; it holds no secret)",
    )


@command(network, "unalike network renew hub")
def renew(folder: Folder) -> None:
    """Make a new server key and certificate for a hub; start it anew. Sites need nothing.

    DIR is the folder of the network.
    """
    from unalike.deploy import keys

    keys.renew_hub(folder)
    say(f"the hub in {folder} has a new key, from its next start on")


@command(network, "unalike network hub hub")
def hub(folder: Folder) -> None:
    """Serve a network until stopped: sites dial in, and runs on this machine reach them.

    DIR is the folder of the network.
    """
    import asyncio

    from unalike.deploy import keys

    facts = keys.network(folder)
    try:
        from unalike.runtime.network.hub import Hub
    except ModuleNotFoundError as error:
        raise UserError(INSTALL) from error
    served = Hub(folder, lambda: keys.admitted(folder), keys.fingerprint_of, log)
    pair = [(folder / name).read_bytes() for name in ("hub.key", "hub.crt", "authority.crt")]
    try:
        asyncio.run(served.serve(facts["listen"], *pair))
    except RuntimeError as error:
        raise UserError(f"the hub cannot listen on {facts['listen']}: {error}") from error


@command(network, "unalike network status hub")
def status(folder: Folder, as_json: bool = json_flag()) -> None:
    """Say which sites are connected to a hub, since when, with which version, what they do and what they refused.

    DIR is the folder of the network.
    """
    from rich.table import Table

    from unalike.runtime.network.reach import ask_hub
    from unalike.runtime.workers import Unreachable

    try:
        found = ask_hub(folder, do="status")
    except Unreachable as error:
        raise UserError(str(error)) from error
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    table = Table("site", "since", "version", "runs now", "does", "refused last")
    for name in found["admitted"]:
        one = found["nodes"].get(name)
        if one is None:
            table.add_row(name, "", "", "", "not connected", "")
            continue
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["since"]))
        now = one["doing"] or ("at work" if one["busy"] else "waits")
        table.add_row(name, since, one["version"], str(one["runs"]), now, (one["refused"] or [""])[-1])
    say(table)
