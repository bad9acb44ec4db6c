"""``unalike estimate``: personal estimates that borrow strength from other clients (P3 §2–3)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from unalike.commands import options
from unalike.commands.console import bar, check_free, errors_told, guarantee, print_files, printed, write_figure
from unalike.commands.options import columns_from, examples

if TYPE_CHECKING:
    from unalike.analytics.estimation.problem import Problem
    from unalike.analytics.estimation.shared import Estimates
    from unalike.analytics.estimation.study import Maker

_DATA, _MODEL, _PRIVACY, _OUT = "Data", "Model", "Privacy", "Output"
_FIRST = 5  # clients whose estimates are printed

Seed = Annotated[int, typer.Option(help="Of data and noise.", rich_help_panel=_DATA)]
Test = Annotated[
    float, typer.Option(help="Share of each client's rows to score by, where no truth is known.", rich_help_panel=_DATA)
]
SigmaX = Annotated[float | None, typer.Option(help="σx, deviation of a sample.", rich_help_panel=_MODEL)]
SigmaTheta = Annotated[float | None, typer.Option(help="σθ, deviation among clients.", rich_help_panel=_MODEL)]
Mu = Annotated[float | None, typer.Option(help="Known mean of the prior, the same in each coordinate.")]
Bits = Annotated[int | None, typer.Option(help="Round messages to so many bits a number.", rich_help_panel=_PRIVACY)]
Epsilon = Annotated[float | None, typer.Option(help="ε₀ of a client, by noise of its own.", rich_help_panel=_PRIVACY)]
Bound = Annotated[float | None, typer.Option(help="Bound of what is sent, known beforehand.", rich_help_panel=_PRIVACY)]
Radius = Annotated[
    float | None, typer.Option(help="Or the largest magnitude of the prior's mean.", rich_help_panel=_PRIVACY)
]
Rounds = Annotated[int, typer.Option(help="Rounds of learning the prior.", min=1, rich_help_panel=_MODEL)]
Components = Annotated[int, typer.Option(help="Components of a mixture prior.", min=1, rich_help_panel=_MODEL)]
Plot = Annotated[
    Path | None, typer.Option(help="A new file for the figures: .html, .pdf, .png, .svg.", rich_help_panel=_OUT)
]
Out = Annotated[Path | None, typer.Option(help="Write the estimates to this new CSV file.", rich_help_panel=_OUT)]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Personal estimates that borrow strength.",
    epilog=examples("unalike estimate gaussian --sigma-theta 0.1 --sigma-x 0.5 --seed 0"),
)


@app.command(
    epilog=examples(
        "unalike estimate gaussian --sigma-theta 0.1 --sigma-x 0.5 --seed 0 --json",
        "unalike estimate gaussian --sigma-theta 0.1 --sigma-x 0.5 --radius 0.1 --epsilon 1 --plot gaussian.html",
    )
)
def gaussian(
    data: Annotated[str, typer.Option(help="A name of `unalike datasets`, or your own file.")] = "gaussian-means",
    mu: Mu = None,
    sigma_theta: SigmaTheta = None,
    sigma_x: SigmaX = None,
    bits: Bits = None,
    epsilon: Epsilon = None,
    delta: options.Delta = None,
    calibration: Annotated[str, typer.Option(help="Of the noise: analytic or paper.")] = "analytic",
    radius: Radius = None,
    bound: Bound = None,
    clients: options.ClientCount = None,
    client_column: options.ClientColumn = None,
    label_column: options.LabelColumn = None,
    test: Test = 0.0,
    seed: Seed = 0,
    plot: Plot = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Personal means with a Gaussian prior, known or unknown; in k bits or locally private (Theorems 1 and 2)."""
    check_free(plot=plot, out=out)
    from unalike import simulate
    from unalike.analytics.estimation.means import GaussianMeans
    from unalike.analytics.estimation.problem import read_problem, score_means
    from unalike.analytics.estimation.shared import Channel
    from unalike.analytics.estimation.study import closed_form_mse, run, summary
    from unalike.studio.errors import UserError

    if calibration not in ("analytic", "paper"):
        raise UserError(f"--calibration {calibration}: expected analytic or paper")
    with errors_told():
        columns = columns_from(client_column, label_column)
        problem = read_problem(data, "theta", seed=seed, clients=clients, test=test, columns=columns)
        delta = len(problem.clients) ** -1.1 if delta is None else delta

        def made(bits: int | None = None, epsilon: float | None = None) -> GaussianMeans:
            channel = Channel(bits, epsilon, delta, calibration)  # type: ignore[arg-type]  # checked above
            return GaussianMeans(mu, sigma_theta, sigma_x, channel, radius, bound)

        estimator = made(bits, epsilon)
        if plot is not None:
            made(bits=1)  # what the sweep needs, said before anything runs
        done = run(problem, estimator.estimate, seed, simulate)
        result = summary("gaussian", data, problem, done, score_means(problem), seed, delta)
        result |= {"closed_form_mse": closed_form_mse(problem, done.found), "bits": bits}
        if plot is not None:
            title = f"{data}: personal means"
            _write_sweep(plot, title, f", δ = {delta:.2g}", made, problem, seed, as_json, closed_form_mse)
    _finish(result, problem, done.found, out, as_json)


@app.command(
    epilog=examples(
        "unalike estimate bernoulli --data bernoulli:normal --seed 0 --json",
        "unalike estimate bernoulli --data bernoulli:beta --epsilon 2 --plot bernoulli.html",
        "unalike estimate bernoulli --data elections --form moments --cross-validate --in-order",
    )
)
def bernoulli(
    data: Annotated[str, typer.Option(help="A name of `unalike datasets`, or your own file.")] = "bernoulli",
    counts: Annotated[
        Path | None, typer.Option(help="Or a CSV file with the columns successes and trials.", rich_help_panel=_DATA)
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Known Beta(α, β): α.", rich_help_panel=_MODEL)] = None,
    beta: Annotated[float | None, typer.Option(help="Known Beta(α, β): β.", rich_help_panel=_MODEL)] = None,
    form: Annotated[
        str, typer.Option(help="Of the weight: exact, moments or plug-in.", rich_help_panel=_MODEL)
    ] = "exact",
    bits: Bits = None,
    epsilon: Epsilon = None,
    cross_validate: Annotated[
        bool,
        typer.Option("--cross-validate", help="Leave out each sample once, score by it.", rich_help_panel=_DATA),
    ] = False,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Leave out everybody's first, second, ...", rich_help_panel=_DATA)
    ] = False,
    clients: options.ClientCount = None,
    client_column: options.ClientColumn = None,
    label_column: options.LabelColumn = None,
    test: Test = 0.0,
    seed: Seed = 0,
    plot: Plot = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Personal rates of 0/1 samples with a Beta prior, known or unknown; in k bits or locally private (Thms 3, 4)."""
    check_free(plot=plot, out=out)
    from unalike import simulate
    from unalike.analytics.estimation.means import BernoulliRates
    from unalike.analytics.estimation.problem import Problem, check_flips, read_counts, read_problem, score_means
    from unalike.analytics.estimation.study import cross_validated, run, summary
    from unalike.studio.errors import UserError

    if cross_validate and (plot is not None or out is not None):
        raise UserError("--cross-validate makes several estimates of a client: leave out --plot and --out")
    with errors_told():
        if counts is not None:
            problem = Problem(read_counts(counts))
        else:
            columns = columns_from(client_column, label_column)
            problem = read_problem(data, "p", seed=seed, clients=clients, test=test, columns=columns)
        check_flips(problem.clients)

        def made(bits: int | None = None, epsilon: float | None = None) -> BernoulliRates:
            return BernoulliRates(alpha, beta, form, bits, epsilon)  # type: ignore[arg-type]  # it checks the form

        estimator = made(bits, epsilon)
        source = str(counts or data)
        if cross_validate:
            result = cross_validated(source, problem, estimator, seed, in_order, simulate)
            typer.echo(json.dumps(result)) if as_json else _print_folds(result)
            return
        done = run(problem, estimator.estimate, seed, simulate)
        delta = len(problem.clients) ** -1.1
        result = summary("bernoulli", source, problem, done, score_means(problem), seed, delta)
        result |= {"form": form, "bits": bits}
        if plot is not None:
            _write_sweep(plot, f"{source}: personal rates", "", made, problem, seed, as_json)
    _finish(result, problem, done.found, out, as_json, measuring="--cross-validate leaves each sample out once")


@app.command(
    epilog=examples(
        "unalike estimate mixture --data gaussian-means:dim=5,candidates=4,sigma_theta=0.5,sigma_x=1 --components 4 "
        "--sigma-x 1 --json",
        "unalike estimate mixture --kind linear --data linear-prior:dim=5,points=20,components=3,center=1,prior=1e-8,"
        "design=1,clients=2000 --components 3 --sigma-x 0.224",
    )
)
def mixture(
    data: Annotated[
        str, typer.Option(help="A name of `unalike datasets`, or your own file.")
    ] = "gaussian-means:dim=5,candidates=4,sigma_theta=0.5,sigma_x=1",
    components: Components = 4,
    sigma_x: Annotated[float, typer.Option(help="σx, deviation of a sample.", rich_help_panel=_MODEL)] = 1.0,
    kind: Annotated[str, typer.Option(help="means, or linear models.", rich_help_panel=_MODEL)] = "means",
    alternate: Annotated[
        bool, typer.Option("--alternate", help="Algorithms 1 and 7 as printed.", rich_help_panel=_MODEL)
    ] = False,
    rounds: Rounds = 10,
    bits: Bits = None,
    epsilon: Epsilon = None,
    delta: options.Delta = None,
    radius: Radius = None,
    bound: Bound = None,
    clients: options.ClientCount = None,
    client_column: options.ClientColumn = None,
    label_column: options.LabelColumn = None,
    test: Test = 0.0,
    seed: Seed = 0,
    plot: Plot = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Personal means or linear models that are one of a few candidates (Algorithms 1 and 7)."""
    check_free(plot=plot, out=out)
    from unalike import simulate
    from unalike.analytics.estimation.mixture import DiscreteMixture
    from unalike.analytics.estimation.problem import read_problem, score_means, score_models
    from unalike.analytics.estimation.shared import Channel
    from unalike.analytics.estimation.study import run, summary

    with errors_told():
        columns = columns_from(client_column, label_column)
        problem = read_problem(data, "theta", seed=seed, clients=clients, test=test, columns=columns)
        delta = len(problem.clients) ** -1.1 if delta is None else delta
        estimator = DiscreteMixture(
            components=components,
            sigma_x=sigma_x,
            kind=kind,  # type: ignore[arg-type]  # checked there
            rounds=rounds,
            once=not alternate,
            channel=Channel(bits, epsilon, delta),
            radius=radius,
            bound=bound,
        )
        with bar(rounds, as_json or not alternate) as advance:
            done = run(problem, lambda federation: estimator.estimate(federation, advance), seed, simulate)
        score = score_means(problem) if kind == "means" else score_models(problem, "linear")
        result = summary("mixture", data, problem, done, score, seed, delta)
        result |= {"components": components, "kind": kind, "bits": bits}
    _finish(result, problem, done.found, out, as_json, plot)


def _regression(
    family: Literal["linear", "logistic"],
    data: str,
    settings: dict[str, Any],
    components: int,
    local_steps: int,
    fedavg: tuple[int | None, float],
    channel: tuple[int | None, float | None, float | None],
    loading: dict[str, Any],
    seed: int,
    plot: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    check_free(plot=plot, out=out)
    from unalike import simulate
    from unalike.analytics.estimation.mixture import MixturePrior
    from unalike.analytics.estimation.problem import check_regression, read_problem
    from unalike.analytics.estimation.regression import GaussianPrior
    from unalike.analytics.estimation.shared import Channel
    from unalike.analytics.estimation.study import regression_summary, run
    from unalike.studio.errors import UserError

    bits, epsilon, delta = channel
    if components > 1 and (bits is not None or epsilon is not None or settings["mu"] is not None):
        raise UserError("--components above 1 goes with an unknown prior and messages as they are")
    with errors_told():
        problem = read_problem(data, "theta", seed=seed, **loading)
        check_regression(problem.clients, family)
        delta = len(problem.clients) ** -1.1 if delta is None else delta
        rounds = settings["rounds"]
        estimator: MixturePrior | GaussianPrior
        if components > 1:
            estimator = MixturePrior(components, family, settings.get("sigma_x"), rounds, local_steps)
        else:
            estimator = GaussianPrior(family=family, channel=Channel(bits, epsilon, delta), **settings)
        with bar(rounds, as_json) as advance:
            done = run(problem, lambda federation: estimator.estimate(federation, advance), seed, simulate)
        known = components == 1 and settings["mu"] is not None
        result = regression_summary(family, data, problem, done, seed, delta, fedavg, known)
    _finish(result, problem, done.found, out, as_json, plot)


@app.command(
    epilog=examples(
        "unalike estimate linear --data linear-prior:dim=50,design=0.22,center=0.0188 --fedavg-rounds 14 --json",
        "unalike estimate linear --data linear-prior:dim=20,clients=500 --mu 0 --sigma-theta 0.1 --sigma-x 0.224",
    )
)
def linear(
    data: Annotated[str, typer.Option(help="A name of `unalike datasets`, or your own file.")] = "linear-prior",
    mu: Mu = None,
    sigma_theta: SigmaTheta = None,
    sigma_x: SigmaX = None,
    solver: Annotated[str, typer.Option(help="em, or gd: Algorithm 2 as printed.", rich_help_panel=_MODEL)] = "em",
    rounds: Rounds = 100,
    lr: Annotated[float, typer.Option(help="Of gd, for θ.", rich_help_panel=_MODEL)] = 1e-3,
    lr_mean: Annotated[float, typer.Option(help="Of gd, for μ.", rich_help_panel=_MODEL)] = 1e-3,
    lr_variance: Annotated[float, typer.Option(help="Of gd, for σθ² and σx².", rich_help_panel=_MODEL)] = 1e-7,
    components: Components = 1,
    local_steps: Annotated[int, typer.Option(help="Of a mixture prior, in a round.", rich_help_panel=_MODEL)] = 20,
    fedavg_rounds: Annotated[
        int | None, typer.Option(help="Of the baseline, from zero.  [default: until it converges]")
    ] = None,
    fedavg_lr: Annotated[float, typer.Option(help="Of the baseline.")] = 0.1,
    bits: Bits = None,
    epsilon: Epsilon = None,
    delta: options.Delta = None,
    bound: Bound = None,
    clients: options.ClientCount = None,
    client_column: options.ClientColumn = None,
    label_column: options.LabelColumn = None,
    test: Test = 0.0,
    seed: Seed = 0,
    plot: Plot = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Personal linear regressions with a Gaussian (Algorithm 2, Theorem 6) or Gaussian-mixture prior (Algorithm 4)."""
    settings = {"mu": mu, "sigma_theta": sigma_theta, "sigma_x": sigma_x, "solver": solver, "rounds": rounds}
    settings |= {"lr": lr, "lr_mean": lr_mean, "lr_variance": lr_variance, "bound": bound}
    loading = _loading(clients, test, client_column, label_column)
    fedavg, channel = (fedavg_rounds, fedavg_lr), (bits, epsilon, delta)
    _regression("linear", data, settings, components, local_steps, fedavg, channel, loading, seed, plot, out, as_json)


@app.command(
    epilog=examples(
        "unalike estimate logistic --data linear-prior:response=logistic,dim=5,points=20,center=1,prior=0.25,design=1,"
        "clients=1000 --json"
    )
)
def logistic(
    data: Annotated[
        str, typer.Option(help="A name of `unalike datasets`, or your own file.")
    ] = "linear-prior:response=logistic,dim=5,points=20,center=1,prior=0.25,design=1,clients=1000",
    mu: Mu = None,
    sigma_theta: SigmaTheta = None,
    solver: Annotated[str, typer.Option(help="em, or gd: Algorithm 3 as printed.", rich_help_panel=_MODEL)] = "em",
    rounds: Rounds = 100,
    lr: Annotated[float, typer.Option(help="Of gd, for θ.", rich_help_panel=_MODEL)] = 0.02,
    lr_mean: Annotated[float, typer.Option(help="Of gd, for μ.", rich_help_panel=_MODEL)] = 0.05,
    lr_variance: Annotated[float, typer.Option(help="Of gd, for σθ².", rich_help_panel=_MODEL)] = 1e-4,
    components: Components = 1,
    local_steps: Annotated[int, typer.Option(help="Of a mixture prior, in a round.", rich_help_panel=_MODEL)] = 20,
    bits: Bits = None,
    epsilon: Epsilon = None,
    delta: options.Delta = None,
    bound: Bound = None,
    clients: options.ClientCount = None,
    client_column: options.ClientColumn = None,
    label_column: options.LabelColumn = None,
    test: Test = 0.0,
    seed: Seed = 0,
    plot: Plot = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Personal logistic regressions with a Gaussian (Algorithm 3) or Gaussian-mixture prior (Algorithm 4)."""
    settings = {"mu": mu, "sigma_theta": sigma_theta, "solver": solver, "rounds": rounds}
    settings |= {"lr": lr, "lr_mean": lr_mean, "lr_variance": lr_variance, "bound": bound}
    loading = _loading(clients, test, client_column, label_column)
    channel = (bits, epsilon, delta)
    _regression(
        "logistic", data, settings, components, local_steps, (None, 0.1), channel, loading, seed, plot, out, as_json
    )


def _loading(clients: int | None, test: float, client_column: str | None, label_column: str | None) -> dict[str, Any]:
    return {"clients": clients, "test": test, "columns": columns_from(client_column, label_column)}


def _write_sweep(
    file: Path,
    title: str,
    delta: str,
    made: Maker,
    problem: Problem,
    seed: int,
    silent: bool,
    closed_form: Callable[[Problem, Estimates], float] | None = None,
) -> None:
    from unalike import simulate
    from unalike.analytics.estimation.study import SWEPT, sweep

    with bar(SWEPT, silent, "sweep") as progress:
        swept = sweep(made, problem, seed, simulate, closed_form, progress)
    from unalike.studio.figures.estimation import sweep as chart

    write_figure(file, chart(title, swept, delta))
    if not silent:
        print_files(figures=file)


def _finish(
    result: dict[str, Any],
    problem: Problem,
    found: Estimates,
    out: Path | None,
    as_json: bool,
    plot: Path | None = None,
    measuring: str = "--test 0.2 holds some out",
) -> None:
    """Write what was asked for, and print the result. ``measuring``: how it could be measured if it was not."""
    if out is not None:
        from unalike.analytics.estimation.problem import write_estimates
        from unalike.studio.runs.folder import disk_errors_told

        with disk_errors_told(out.parent):
            write_estimates(out, problem.clients, found)
    if plot is not None:
        from unalike.studio.figures.estimation import estimates

        write_figure(plot, estimates(result, problem, found))
    if as_json:
        typer.echo(json.dumps(result))
        return
    console = printed()
    dim = "1 coordinate" if result["dim"] == 1 else f"{result['dim']} coordinates"
    lines = [f"{result['data']}: {result['clients']:,} clients, {dim}, {result['seconds']:.2f} s"]
    if result["mse"]["personal"] is None:
        lines.append(f"no truth is known and no rows were held out, so nothing was measured ({measuring})")
    for name, error in result["mse"].items():
        if error is not None:
            lines.append(f"  {name:9} {error:.6g}   ({result['measure']})")
    for name, value in result["gain"].items():
        if value is not None:
            lines.append(f"gain {name.replace('_', ' ')}: {100 * value:.1f} %")
    for name in ("closed_form_mse", "expected_mse"):
        if name in result:
            lines.append(f"{name.replace('_', ' ')}: {result[name]:.6g}")
    privacy = result["privacy"]
    if privacy is None:
        lines.append("not private: the server saw messages as they are or rounded")
    elif privacy["epsilon"] == 0:
        lines.append("nothing left the clients: the prior is known")
    else:
        lines.append(f"{guarantee(privacy)}, by its own noise")
    lines.append(f"prior: {', '.join(f'{name} = {_short(value)}' for name, value in result['prior'].items())}")
    for line in [*lines, *(f"note: {note}" for note in result["notes"])]:
        console.print(line, markup=False, soft_wrap=True)
    console.print(_first_estimates(problem, found))
    if out is None:
        console.print("--out FILE.csv writes the estimates of all clients, all coordinates", style="dim")
    print_files(estimates=out, figures=plot)


def _first_estimates(problem: Problem, found: Estimates) -> Table:
    """What a few clients found alone, and their estimates."""
    dim = found.estimate.shape[1]
    title = "the first clients" if dim == 1 else f"the first clients, coordinate 0 of {dim}"
    table = Table("client", "samples", "local", "estimate", title=title, title_justify="left")
    for row, position in enumerate(found.positions[:_FIRST].tolist()):
        local, personal = float(found.local[row, 0]), float(found.estimate[row, 0])
        samples = str(int(problem.clients.size[position]))
        table.add_row(problem.clients.name(position), samples, f"{local:.4g}", f"{personal:.4g}")
    return table


def _short(value: Any) -> str:
    """A number of the prior; of a long list its first ones."""
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_short, value[:4]))
        return f"[{inner}, ... {len(value)} in all]" if len(value) > 4 else f"[{inner}]"
    return "infinite" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_folds(result: dict[str, Any]) -> None:
    """One line for each sample left out, then the mean."""
    console = printed()
    for number, row in enumerate(result["folds"], start=1):
        share = "-" if row["gain"] is None else f"{100 * row['gain']:.1f} %"
        console.print(f"sample {number} left out: personal {row['personal']:.5f}, local {row['local']:.5f}, {share}")
    measures = {
        "over_local": "gain over local",
        "of_rate": "gain in the error of the rate itself",
        "against_label": "gain in the error against the left-out sample's label",
    }
    for name, what in measures.items():
        if result["gain"][name] is not None:
            mean, std = (100 * result["gain"][name][key] for key in ("mean", "std"))
            console.print(f"{what}: {mean:.1f} ± {std:.1f} %")


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="estimate")
