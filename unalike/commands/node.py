"""``unalike node``: one site of a network."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from unalike.commands.console import say
from unalike.commands.network import INSTALL, Folder, log
from unalike.commands.options import command, examples, flag, json_flag
from unalike.core.disk import write_whole
from unalike.runs.errors import UserError

schema_flag = partial(flag, "The schema file that comes with the recipe.")
app = typer.Typer()
node = typer.Typer(
    no_args_is_help=True,
    help="Run a site of a network, by its own policy.",
    epilog=examples("unalike node init site --name clinic-a --data rows.csv", "unalike node run site"),
)
app.add_typer(node, name="node")


@command(node, "unalike node init site --name clinic-a --data rows.csv")
def init(
    folder: Folder,
    name: str = flag("Of the site: lower-case letters, digits and -.", default=...),
    data: Path = flag("The file or folder with the rows of its clients.", default=...),
) -> None:
    """Make a site's key and its request to be admitted.

    DIR is the site's folder, which is made.

    The key stays here. Send DIR/request.pem to whoever runs the hub.
    """
    import tomli_w

    from unalike.deploy import keys
    from unalike.deploy.node import host

    key = keys.init_node(folder, name)
    write_whole(folder / host.SETTINGS, tomli_w.dumps({"data": str(data.expanduser().resolve())}).encode())
    say(
        f"site {name} in {folder}; send {folder / keys.REQUEST} to the hub",
        f"fingerprint of its key: {keys.spoken(key)}",
        "(compare it, by telephone, with what `unalike network admit` shows)",
    )


@command(node, "unalike node join site clinic-a.bundle.json")
def join(folder: Folder, bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", hidden=True)]) -> None:
    """Take what the hub sent.

    DIR is the site's folder.
    BUNDLE is the file that `unalike network admit` wrote.
    """
    from unalike.deploy import keys

    facts = keys.join(folder, bundle)
    say(
        f"network {facts['network']}, at {facts['address']}",
        f"fingerprint of its authority: {keys.spoken(facts['fingerprint'])}",
        "(compare it, by telephone, with what `unalike network init` showed)",
    )


@command(node, "unalike node run site")
def run(folder: Folder) -> None:
    """Connect a site to its hub and answer what its policy allows, until stopped.

    DIR is the site's folder.
    """
    import asyncio

    import torch

    from unalike.deploy import keys
    from unalike.deploy.node import host
    from unalike.deploy.node.policy import Policy
    from unalike.runtime.shard.host import version

    try:
        from unalike.runtime.network.dial import Dial
    except ModuleNotFoundError as error:
        raise UserError(INSTALL) from error
    host.private_files()
    facts, pair = keys.bundle_of(folder)
    policy = Policy.read(folder)
    site = host.Site.open(folder, facts["name"], facts["network"], log)
    torch.set_num_threads(1)
    dial = Dial(lambda: host.NodeHost(site).call, version(), max(1, policy.megabytes) << 20, log, site.news)
    authority = facts["authority"].encode()
    asyncio.run(dial.keep(facts["address"], pair.key, pair.certificate, authority))


@command(node, "unalike node approve site", "unalike node approve site recipe.toml")
def approve(
    folder: Folder,
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", hidden=True)] = None,
    schema: Path | None = schema_flag(),
) -> None:
    """Allow a site to run a recipe; without one, list those that wait.

    DIR is the site's folder.
    RECIPE is a file, or the digest of one that waits.

    What is approved is the recipe with its schema and the code that is installed here: after an update of
    Unalike it has to be approved again.
    """
    from unalike.deploy.node import policy
    from unalike.runs.recipe.recipe import read_recipe

    waiting = sorted((folder / policy.PENDING).glob("*.toml"))
    if recipe is None:
        say(*(f"{one.stem[:16]}  {one}" for one in waiting), *([] if waiting else ["no recipe waits for approval"]))
        return
    if Path(recipe).is_file():
        text = None if schema is None else schema.read_text(encoding="utf-8")
        digest = policy.digest_of(read_recipe(Path(recipe)), text)
    else:
        found = [one.stem for one in waiting if len(recipe) >= 8 and one.stem.startswith(recipe)]
        if len(found) != 1:
            raise UserError(f"{recipe} is no file, and {len(found)} recipes that wait begin so")
        digest = found[0]
    policy.approve(folder, digest)
    say(f"approved: {digest}")


@command(node, "unalike node check site", "unalike node check site --recipe recipe.toml --schema schema.json")
def check(
    folder: Folder,
    recipe: Path | None = flag("A recipe that the site is asked to take part in."),
    schema: Path | None = schema_flag(),
) -> None:
    """Look for what would keep a site from taking part, and say what to do about it.

    DIR is the site's folder.

    The exit code is the number of the first check that fails: 10 settings, 11 key, 12 bundle, 13 policy, 14 ledger,
    15 disk, 16 clock, 17 name of the hub, 18 its port, 19 TLS, 20 admission, 21 data, 22 recipe.
    """
    import asyncio

    from rich.table import Table

    from unalike.deploy.node.check import Preflight
    from unalike.runs.errors import UserError
    from unalike.runs.recipe.recipe import read_recipe

    try:
        from unalike.runtime.network.dial import greet
    except ModuleNotFoundError as error:
        raise UserError(INSTALL) from error
    asked = None if recipe is None else read_recipe(recipe)
    table, failed = Table("", "check", "problem", "what to do"), 0
    for line in Preflight(folder, lambda *given: asyncio.run(greet(*given)), asked, schema).lines():
        failed = failed or (line.code if line.problem else 0)
        table.add_row(str(line.code), line.name, line.problem or "none", line.fix)
    say(table)
    raise typer.Exit(failed)


@command(node, "unalike node explain site recipe.toml --clients 60")
def explain(
    folder: Folder,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", hidden=True)],
    schema: Path | None = schema_flag(),
    clients: int | None = flag("How many the whole network has. (default: as many as this site)"),
    as_json: bool = json_flag(),
) -> None:
    """Say what a recipe would ask of a site, what would leave it and at which ε, and which rules it meets.

    DIR is the site's folder.
    RECIPE is the file that the researcher sent.

    Nothing is sent. This is what somebody at the site can sign: the digest names this recipe, its schema and the code
    that is installed here.
    """
    from dataclasses import asdict

    from rich.table import Table

    from unalike.deploy.node.explain import explain as explained
    from unalike.runs.recipe.recipe import read_recipe

    found = explained(folder, read_recipe(recipe), schema, clients)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    say(f"recipe {found.digest}", f"approved: {'yes' if found.approved else 'no'}")
    if found.told:
        say(f"the server is told of {found.told}")
    table = Table("task", "what it does", "what leaves", "protected by", "rule that it meets")
    for one in found.asked:
        table.add_row(one.task, one.what, one.leaves, one.protected, one.refused or "none")
    if found.asked:
        say(table)
    if found.epsilon is not None:
        say(f"ε = {found.epsilon:.4g} at δ = {found.delta:g}, if each is asked once in a round; nobody is sampled")
    if found.most:
        say(f"at most: {found.most}")
    say(*(f"refused: {one}" for one in found.refusals) if found.refusals else ["the recipe as a whole meets no rule"])


@command(node, "unalike node ledger site", "unalike node ledger site --verify", "unalike node ledger site --replay")
def ledger(
    folder: Folder,
    verify: bool = flag("Check that no line was changed and that the site signed each.", default=False),
    replay: bool = flag("Compute ε again, from the lines alone, one after the other.", default=False),
    as_json: bool = json_flag(),
) -> None:
    """Show what has left a site, what was refused, and the ε of it by the site's own count.

    DIR is the site's folder.
    """
    from unalike.deploy.node.ledger import SiteLedger
    from unalike.deploy.node.policy import Policy

    found, policy = SiteLedger(folder), Policy.read(folder)
    entries = list(found.lines(signed=verify or replay))
    spent = {unit: one.worst(policy.delta) for unit, one in found.total.items()}
    if as_json:
        typer.echo(json.dumps({"entries": entries, "epsilon": spent, "delta": policy.delta}, indent=2))
        return
    if replay:
        for one, until in found.replay(policy.delta):
            told = [f"ε = {epsilon:.4g} for each {unit}" for unit, epsilon in until.items()]
            say(f"{one['number']:>5} {one['run'][:8]} {one['task']}: {', '.join(told) or 'nothing that has an ε'}")
    for one in entries if not verify and not replay else ():
        what = f"{one['task']}: {', '.join(one['leaves']) or 'nothing'}" if one["kind"] == "charge" else one["why"]
        say(f"{one['number']:>5} {one['time']} {one['run'][:8] or '-':8} {one['kind']:8} {what}")
    told = [f"ε = {epsilon:.4g} at δ = {policy.delta:.3g} for each {unit}" for unit, epsilon in spent.items()]
    signed = ", and is signed by this site" if verify or replay else ""
    say(f"{len(entries)} lines, each follows from the one before{signed}", *told)
