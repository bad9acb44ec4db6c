"""``unalike mdm``: fit a mixture of Dirichlet-multinomials to clients' histograms, by sums alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from unalike.commands import options
from unalike.commands.console import bar, check_free, errors_told, guarantee, print_files, printed, write_figure
from unalike.commands.options import columns_from, examples


def mdm(
    data: Annotated[
        str | None,
        typer.Option(help="A name of `unalike datasets`, or your own file or folder.", rich_help_panel="Data"),
    ] = None,
    counts: Annotated[
        Path | None, typer.Option(help="Or ready histograms: a CSV, NPZ or NPY file, one row for each client.")
    ] = None,
    components: Annotated[str, typer.Option(help="How many; a range (1-6) or list (1,2,4) chooses one.")] = "2",
    rounds: Annotated[int, typer.Option(help="EM steps.", min=1)] = 100,
    cohort: Annotated[int, typer.Option(help="Clients asked in a round.", min=1)] = 1000,
    start: Annotated[
        str, typer.Option(help="How clients choose their first component: concentration or random.")
    ] = "concentration",
    validation: Annotated[
        float | None, typer.Option(help="Clients kept apart to choose by: a number or share.  [default: 0.2]")
    ] = None,
    partition: options.Partition = None,
    clients: options.ClientCount = None,
    client_column: options.ClientColumn = None,
    label_column: options.LabelColumn = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    clip: Annotated[float, typer.Option(help="Of a client's share in the sums for A, with --epsilon.")] = 20.0,
    largest: Annotated[
        int | None, typer.Option(help="The most samples a client may have; needed with --epsilon.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of data, cohorts and noise.")] = 0,
    compared: Annotated[
        bool, typer.Option("--compare", help="Measure how near simulated clients are to the true ones.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="A new file for the figure: .html, .pdf, .png or .svg.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the mixture to this new file (--partition mdm:FILE).")] = None,
    as_json: options.Json = False,
) -> None:
    """Learn how clients' label histograms differ, and simulate clients like them (T1 ch. 3)."""
    check_free(plot=plot, out=out)
    from unalike import simulate
    from unalike.analytics.mdm.study import histograms, histograms_in, study
    from unalike.studio.errors import UserError
    from unalike.studio.runs.folder import disk_errors_told

    candidates = _candidates(components)
    with errors_told():
        if counts is not None and data is None:
            given = histograms_in(counts)
        elif data is not None and counts is None:
            columns = columns_from(client_column, label_column)
            given = histograms(data, partition=partition, clients=clients, seed=seed, **columns)
        else:
            raise UserError("give the clients' data with --data, or ready histograms with --counts (one of the two)")
        with bar(rounds * len(candidates), silent=as_json) as progress:
            done = study(
                given,
                simulate,
                components=candidates,
                rounds=rounds,
                cohort=cohort,
                start=start,  # type: ignore[arg-type]  # it checks this
                validation=validation,
                epsilon=epsilon,
                delta=delta,
                clip=clip,
                largest=largest,
                compared=compared or plot is not None,
                seed=seed,
                progress=progress,
            )
    result = {"data": str(data or counts), **done.values}
    title = f"{result['data']}: {result['components']} component{'' if result['components'] == 1 else 's'}"
    if out is not None:
        with disk_errors_told(out.parent):
            done.fitted.mixture.save(out, given.names)
    if plot is not None:
        from unalike.studio.figures.mdm import mixture

        write_figure(plot, mixture(done.fitted, done.groups, given.names, title, seed))
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(result, given.names, title)
        print_files(mixture=out, figures=plot)


def _candidates(text: str) -> list[int]:
    """``3``, ``1-6`` or ``1,2,4``."""
    try:
        if "-" in text:
            low, high = (int(part) for part in text.split("-"))
            found = list(range(low, high + 1))
        else:
            found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        from unalike.studio.errors import UserError

        raise UserError(f"--components {text}: expected a number from 1 on, a range like 1-6, or a list like 1,2,4")
    return found


def _print(result: dict[str, Any], names: list[str] | None, title: str) -> None:
    console = printed()
    table = Table(title=title, title_justify="left")
    table.add_column("weight", justify="right")
    table.add_column("precision α₀", justify="right")
    table.add_column("largest mean shares")
    for weight, alpha in zip(result["tau"], result["alpha"], strict=True):
        total = sum(alpha)
        order = sorted(range(len(alpha)), key=lambda j: -alpha[j])[:4]
        shares = ", ".join(f"{names[j] if names else j}: {alpha[j] / total:.2f}" for j in order)
        table.add_row(f"{weight:.3f}", f"{total:.4g}", shares)
    console.print(table)
    lines = [f"log-likelihood per client {result['log_likelihood']:.4f}, {result['seconds']:.2f} s"]
    if result["relative_error"] is not None:
        errors = result["relative_error"]
        lines.append(f"relative error of α {errors['alpha']:.4f}, of τ {errors['tau']:.4f}")
    for row in result["selection"] or []:
        lines.append(f"K={row['components']}: {row['below_best']:.4f} ± {row['standard_error']:.4f} below the best")
    if "distance" in result:
        d = result["distance"]
        lines.append(
            f"distance from the true clients: MDM {d['mdm']:.4f}, fully IID {d['iid']:.4f} "
            f"(halves of the true ones: {d['halves_of_true']:.4f})"
        )
    if result["privacy"] is not None:
        lines.append(guarantee(result["privacy"]))
    for line in [*lines, *(f"note: {note}" for note in result["notes"])]:
        console.print(line, markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "unalike mdm --data mdm:medium-2 --components 2 --rounds 100 --cohort 1000 --seed 0 --json",
            "unalike mdm --data digits --partition dirichlet:0.3 --clients 60 --components 1-4 --out digits.json",
            "unalike run fedavg --data digits --partition mdm:digits.json --clients 40",
        )
    )(mdm)
