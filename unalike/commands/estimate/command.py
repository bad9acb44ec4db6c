"""``unalike estimate``: personal estimates that borrow strength from other clients (P3 §2–3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from unalike.analytics.estimation.means import BernoulliRates, GaussianMeans, gaussian_mse
from unalike.analytics.estimation.mixture import DiscreteMixture, MixturePrior
from unalike.analytics.estimation.posterior import Family
from unalike.analytics.estimation.problem import Problem, read_counts, read_problem, score_means, score_models
from unalike.analytics.estimation.regression import GaussianPrior, expected_mse, one_for_all
from unalike.analytics.estimation.shared import Channel, Estimates, gain
from unalike.commands import options
from unalike.commands.estimate.show import (
    check_free,
    cross_validated,
    finish,
    print_folds,
    progress,
    run,
    summary,
    told,
    write_sweep,
)
from unalike.commands.options import examples
from unalike.studio.errors import UserError

_DATA, _MODEL, _PRIVACY, _OUT = "Data", "Model", "Privacy", "Output"

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
Plot = Annotated[Path | None, typer.Option(help="Write figures to this new HTML file.", rich_help_panel=_OUT)]
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
    check_free(plot, out)
    with told():
        columns = {"client_column": client_column, "label_column": label_column}
        problem = read_problem(data, "theta", seed=seed, clients=clients, test=test, columns=columns)
        count = len(problem.clients)
        delta = count**-1.1 if delta is None else delta

        def made(bits: int | None = None, epsilon: float | None = None) -> GaussianMeans:
            if calibration not in ("analytic", "paper"):
                raise UserError(f"--calibration {calibration}: expected analytic or paper")
            channel = Channel(bits, epsilon, delta, calibration)  # type: ignore[arg-type]  # it checks this
            return GaussianMeans(mu, sigma_theta, sigma_x, channel, radius, bound)

        estimator = made(bits, epsilon)
        if plot is not None:
            made(bits=1)  # what the sweep needs, said before anything runs
        found, federation, seconds = run(problem, estimator.estimate, seed)
        score = score_means(problem)
        result = summary("gaussian", data, problem, found, federation, score, seconds, seed, delta)
        n, dim = problem.clients.size.double().mean().item(), found.estimate.shape[1]
        used = found.prior
        theory = gaussian_mse(dim, n, count, used["sigma_theta"], used["sigma_x"], used["sigma_q"])
        result["closed_form_mse"] = theory
        result["bits"] = bits
        if plot is not None:

            def closed_form(one: Estimates) -> float:
                return gaussian_mse(dim, n, count, *(one.prior[k] for k in ("sigma_theta", "sigma_x", "sigma_q")))

            write_sweep(
                plot, f"{data}: personal means", made, problem, score, seed, as_json, f", δ = {delta:.2g}", closed_form
            )
    finish(result, problem, found, out, as_json)


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
    check_free(plot, out)
    with told():
        if counts is not None:
            problem = Problem(read_counts(counts))
        else:
            columns = {"client_column": client_column, "label_column": label_column}
            problem = read_problem(data, "p", seed=seed, clients=clients, test=test, columns=columns)

        def made(bits: int | None = None, epsilon: float | None = None) -> BernoulliRates:
            return BernoulliRates(alpha, beta, form, bits, epsilon)  # type: ignore[arg-type]  # it checks the form

        estimator = made(bits, epsilon)
        source = str(counts or data)
        if cross_validate:
            if plot is not None or out is not None:
                raise UserError("--cross-validate makes several estimates of a client: leave out --plot and --out")
            result = cross_validated(source, problem, estimator, seed, in_order)
            typer.echo(json.dumps(result)) if as_json else print_folds(result)
            return
        found, federation, seconds = run(problem, estimator.estimate, seed)
        score = score_means(problem)
        result = summary(
            "bernoulli", source, problem, found, federation, score, seconds, seed, len(problem.clients) ** -1.1
        )
        result |= {"form": form, "bits": bits}
        if plot is not None:
            write_sweep(plot, f"{source}: personal rates", made, problem, score, seed, as_json, "")
    finish(result, problem, found, out, as_json, measuring="--cross-validate leaves each sample out once")


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
    check_free(plot, out)
    with told():
        columns = {"client_column": client_column, "label_column": label_column}
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
        with progress(rounds, as_json or not alternate) as advance:
            found, federation, seconds = run(problem, lambda f: estimator.estimate(f, advance), seed)
        score = score_means(problem) if kind == "means" else score_models(problem, "linear")
        result = summary("mixture", data, problem, found, federation, score, seconds, seed, delta)
        result |= {"components": components, "kind": kind, "bits": bits}
    finish(result, problem, found, out, as_json, plot)


def _regression(
    family: Family,
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
    check_free(plot, out)
    with told():
        problem = read_problem(data, "theta", seed=seed, **loading)
        bits, epsilon, given = channel
        delta = len(problem.clients) ** -1.1 if given is None else given
        rounds = settings["rounds"]
        if components > 1:
            if bits is not None or epsilon is not None or settings["mu"] is not None:
                raise UserError("--components above 1 goes with an unknown prior and messages as they are")
            sigma_x = settings.get("sigma_x")
            estimator: MixturePrior | GaussianPrior = MixturePrior(
                components,
                family,
                sigma_x,
                rounds,
                local_steps,
            )
        else:
            estimator = GaussianPrior(family=family, channel=Channel(bits, epsilon, delta), **settings)
        with progress(rounds, as_json) as advance:
            found, federation, seconds = run(problem, lambda f: estimator.estimate(f, advance), seed)
        score = score_models(problem, family)
        result = summary(family, data, problem, found, federation, score, seconds, seed, delta)
        if problem.truth is None and family == "logistic" and score is not None:
            result["measure"] = "log loss of held-out samples"
        if score is not None:
            model = one_for_all(federation.aside(), family, *fedavg)
            error = score(model.expand_as(found.estimate), found.positions)
            result["mse"]["fedavg"] = error
            result["gain"]["over_fedavg"] = gain(result["mse"]["personal"], error)
        if isinstance(estimator, GaussianPrior) and estimator.mu is not None:
            result["expected_mse"] = expected_mse(federation)
    finish(result, problem, found, out, as_json, plot)


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
    columns = {"client_column": client_column, "label_column": label_column}
    return {"clients": clients, "test": test, "columns": columns}


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="estimate")
