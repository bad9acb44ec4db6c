"""``unalike estimate``: personal estimates that borrow strength from other clients (Ozkara et al., 2022)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from unalike.commands import options
from unalike.commands.console import (
    bar,
    check_free,
    errors_told,
    guarantee,
    print_files,
    say,
    spinner,
    workers_told,
    write_figure,
)
from unalike.commands.options import columns_from, command, examples, flag

if TYPE_CHECKING:
    from unalike.analytics.estimation.problem import Problem
    from unalike.analytics.estimation.shared import Channel, Estimates
    from unalike.analytics.estimation.study import Maker
    from unalike.studio.cluster.analyses import Place

_FIRST = 5  # clients whose estimates are printed
_data, _model, _privacy, _output = (partial(flag, panel=one) for one in ("Data", "Model", "Privacy", "Output"))

Data = Annotated[str, _data("A name of `unalike datasets`, or your own file.")]
Mu = Annotated[float | None, _model("Known mean of the prior, the same in each coordinate.")]
SigmaTheta = Annotated[float | None, _model("σθ, deviation among clients.")]
SigmaX = Annotated[float | None, _model("σx, deviation of a sample.")]
Rounds = Annotated[int, _model("Rounds of learning the prior.", min=1)]
Components = Annotated[int, _model("Components of a mixture prior.", min=1)]
Solver = Annotated[str, _model("em, or gd: the paper's alternating gradient steps.")]
Rate = Annotated[float, _model("Of gd, for θ.")]
RateOfMean = Annotated[float, _model("Of gd, for μ.")]
RateOfVariance = Annotated[float, _model("Of gd, for the variances.")]
Bits = Annotated[int | None, _privacy("Round messages to so many bits a number.")]
Epsilon = Annotated[float | None, _privacy("ε₀ of a client, by noise of its own.")]
Radius = Annotated[float | None, _privacy("Or the largest magnitude of the prior's mean.")]


@dataclass(frozen=True)
class Reading:
    """Which clients to read."""

    clients: options.ClientCount = None
    client_column: options.ClientColumn = None
    label_column: options.LabelColumn = None
    test: Annotated[float, _data("Share of each client's rows to score by, where no truth is known.")] = 0.0
    seed: Annotated[int, _data("Of data and noise.")] = 0

    def problem(
        self,
        place: Place,
        data: str,
        truth: str = "theta",
        check: Literal["flips", "linear", "logistic"] | None = None,
        counts: Path | None = None,
    ) -> Problem:
        """The clients of a data set, or of a file of counts, whose rows are checked."""
        columns = columns_from(self.client_column, self.label_column)
        how: dict[str, Any] = {"seed": self.seed, "clients": self.clients, "test": self.test, "columns": columns}
        file = None if counts is None else str(counts)
        found: Problem = place.read("problem", data=data, truth=truth, check=check, counts=file, **how)
        return found


@dataclass(frozen=True)
class Sending:
    """How a client's message reaches the server."""

    bits: Bits = None
    epsilon: Epsilon = None
    delta: options.Delta = None
    bound: Annotated[float | None, _privacy("Bound of what is sent, known beforehand.")] = None
    simulate_noise: options.SimulateNoise = False

    def channel(self, problem: Problem) -> Channel:
        from unalike.analytics.estimation.shared import Channel

        return Channel(self.bits, self.epsilon, _delta(problem) if self.delta is None else self.delta)


@dataclass(frozen=True)
class Prior:
    """Where the coefficients of a regression come from."""

    mu: Mu = None
    sigma_theta: SigmaTheta = None
    rounds: Rounds = 100
    components: Components = 1
    local_steps: Annotated[int, _model("Of a mixture prior, in a round.")] = 20


@dataclass(frozen=True)
class Output:
    """What is written and printed."""

    plot: Annotated[Path | None, _output("A new file for the figures: .html, .pdf, .png, .svg.")] = None
    out: Annotated[Path | None, _output("Write the estimates to this new CSV file.")] = None
    as_json: options.Json = False

    def check(self) -> None:
        check_free(plot=self.plot, out=self.out)


app = typer.Typer(
    name="estimate",
    no_args_is_help=True,
    help="Personal estimates that borrow strength from other clients (Ozkara et al., 2022).",
    epilog=examples("unalike estimate gaussian --sigma-theta 0.1 --sigma-x 0.5 --seed 0"),
)


@command(
    app,
    "unalike estimate gaussian --sigma-theta 0.1 --sigma-x 0.5 --seed 0 --json",
    "unalike estimate gaussian --sigma-theta 0.1 --sigma-x 0.5 --radius 0.1 --epsilon 1 --plot gaussian.html",
)
def gaussian(
    reading: Reading,
    sending: Sending,
    output: Output,
    where: options.Where,
    data: Data = "gaussian-means",
    mu: Mu = None,
    sigma_theta: SigmaTheta = None,
    sigma_x: SigmaX = None,
    calibration: Annotated[str, _privacy("Of the noise: analytic or paper.")] = "analytic",
    radius: Radius = None,
) -> None:
    """Personal means with a Gaussian prior, known or unknown; in k bits or locally private.

    Theorems 1 and 2 of Ozkara et al., 2022.
    """
    output.check()
    from unalike.analytics.estimation.means import GaussianMeans
    from unalike.analytics.estimation.problem import score_means
    from unalike.analytics.estimation.study import closed_form_mse, run, summary
    from unalike.studio.errors import UserError

    if calibration not in ("analytic", "paper"):
        raise UserError(f"--calibration {calibration}: expected analytic or paper")
    with errors_told(), where.place(sending.epsilon, sending.simulate_noise) as place:
        problem = reading.problem(place, data)
        channel = replace(sending.channel(problem), calibration=calibration)  # type: ignore[arg-type]  # checked above

        def made(bits: int | None = None, epsilon: float | None = None) -> GaussianMeans:
            sent = replace(channel, bits=bits, epsilon=epsilon)
            return GaussianMeans(mu, sigma_theta, sigma_x, sent, radius, sending.bound)

        estimator = made(sending.bits, sending.epsilon)
        if output.plot is not None:
            made(bits=1)  # what the sweep needs, said before anything runs
        with spinner("estimating", output.as_json, place):
            done = run(problem, estimator.estimate, reading.seed, place.federate)
        score = score_means(problem, done.federation)
        result = summary("gaussian", data, problem, done, score, reading.seed, channel.delta)
        result |= {"closed_form_mse": closed_form_mse(problem, done.found), "bits": sending.bits}
        _tell_noise(result, sending.epsilon, sending.simulate_noise)
        title = f"{data}: personal means"
        _write_sweep(output, title, f", δ = {channel.delta:.2g}", made, problem, reading.seed, place, closed_form_mse)
    _finish({**result, **place.told()}, problem, done.found, output)


@command(
    app,
    "unalike estimate bernoulli --data bernoulli:normal --seed 0 --json",
    "unalike estimate bernoulli --data bernoulli:beta --epsilon 2 --plot bernoulli.html",
    "unalike estimate bernoulli --data elections --form moments --cross-validate --in-order",
)
def bernoulli(
    reading: Reading,
    output: Output,
    where: options.Where,
    data: Data = "bernoulli",
    counts: Annotated[Path | None, _data("Or a CSV file with the columns successes and trials.")] = None,
    alpha: Annotated[float | None, _model("Known Beta(α, β): α.")] = None,
    beta: Annotated[float | None, _model("Known Beta(α, β): β.")] = None,
    form: Annotated[str, _model("Of the weight: exact, moments or plug-in.")] = "exact",
    bits: Bits = None,
    epsilon: Epsilon = None,
    simulate_noise: options.SimulateNoise = False,
    cross_validate: Annotated[bool, _data("Leave out each sample once, score by it.", "--cross-validate")] = False,
    in_order: Annotated[bool, _data("Leave out everybody's first, second, ...", "--in-order")] = False,
) -> None:
    """Personal rates of 0/1 samples with a Beta prior, known or unknown; in k bits or locally private.

    Theorems 3 and 4 of Ozkara et al., 2022.
    """
    output.check()
    from unalike.analytics.estimation.means import BernoulliRates
    from unalike.analytics.estimation.problem import score_means
    from unalike.analytics.estimation.study import cross_validated, run, summary
    from unalike.studio.errors import UserError

    if cross_validate and (output.plot is not None or output.out is not None):
        raise UserError("--cross-validate makes several estimates of a client: leave out --plot and --out")
    where.refuse(cross_validate=cross_validate)
    with errors_told(), where.place(epsilon, simulate_noise) as place:
        problem = reading.problem(place, data, "p", "flips", counts)

        def made(bits: int | None = None, epsilon: float | None = None) -> BernoulliRates:
            return BernoulliRates(alpha, beta, form, bits, epsilon)  # type: ignore[arg-type]  # it checks the form

        estimator = made(bits, epsilon)
        source = str(counts or data)
        if cross_validate:
            result = cross_validated(source, problem, estimator, reading.seed, in_order, place.federate)
            typer.echo(json.dumps(result)) if output.as_json else _print_folds(result)
            return
        with spinner("estimating", output.as_json, place):
            done = run(problem, estimator.estimate, reading.seed, place.federate)
        score = score_means(problem, done.federation)
        result = summary("bernoulli", source, problem, done, score, reading.seed, _delta(problem))
        result |= {"form": form, "bits": bits}
        _tell_noise(result, epsilon, simulate_noise)
        _write_sweep(output, f"{source}: personal rates", "", made, problem, reading.seed, place)
    _finish(
        {**result, **place.told()},
        problem,
        done.found,
        output,
        measuring="--cross-validate leaves each sample out once",
    )


@command(
    app,
    "unalike estimate mixture --data gaussian-means:dim=5,candidates=4,sigma_theta=0.5,sigma_x=1 --components 4 "
    "--sigma-x 1 --json",
    "unalike estimate mixture --kind linear --data linear-prior:dim=5,points=20,components=3,center=1,prior=1e-8,"
    "design=1,clients=2000 --components 3 --sigma-x 0.224",
)
def mixture(
    reading: Reading,
    sending: Sending,
    output: Output,
    where: options.Where,
    data: Data = "gaussian-means:dim=5,candidates=4,sigma_theta=0.5,sigma_x=1",
    components: Components = 4,
    sigma_x: Annotated[float, _model("σx, deviation of a sample.")] = 1.0,
    kind: Annotated[str, _model("means, or linear models.")] = "means",
    alternate: Annotated[bool, _model("In rounds, exactly as the paper prints it.", "--alternate")] = False,
    central: Annotated[bool, _privacy("With --epsilon: noise on sums, not on each message.", "--central")] = False,
    secure: Annotated[bool, _privacy("With --central: sums under masks.", "--secure")] = False,
    rounds: Rounds = 10,
    radius: Radius = None,
) -> None:
    """Personal means or linear models that are one of a few candidates.

    Algorithms 1 and 7 of Ozkara et al., 2022.
    """
    output.check()
    from unalike.analytics.estimation.mixture import DiscreteMixture
    from unalike.analytics.estimation.private import Central
    from unalike.analytics.estimation.problem import score_models
    from unalike.analytics.estimation.shared import Channel
    from unalike.analytics.estimation.study import run, summary

    with errors_told(), where.place(sending.epsilon, sending.simulate_noise) as place:
        problem = reading.problem(place, data)
        channel = sending.channel(problem)
        noise = None
        if central or secure:
            noise = Central(_needed(sending.epsilon), channel.delta, secure)
            channel = Channel(delta=channel.delta)
        estimator = DiscreteMixture(
            components=components,
            sigma_x=sigma_x,
            kind=kind,  # type: ignore[arg-type]  # checked there
            rounds=rounds,
            once=not alternate,
            channel=channel,
            radius=radius,
            bound=sending.bound,
            central=noise,
        )
        with bar(rounds, output.as_json or not (alternate or central), place) as advance:
            done = run(problem, partial(estimator.estimate, after_round=advance), reading.seed, place.federate)
        score = score_models(problem, "mean" if kind == "means" else "linear", done.federation)
        result = summary("mixture", data, problem, done, score, reading.seed, channel.delta)
        result |= {"components": components, "kind": kind, "bits": sending.bits}
        _tell_noise(result, sending.epsilon, sending.simulate_noise, "nobody" if noise is None else "server")
    _finish({**result, **place.told()}, problem, done.found, output, estimates=True)


@command(
    app,
    "unalike estimate linear --data linear-prior:dim=50,design=0.22,center=0.0188 --fedavg-rounds 14 --json",
    "unalike estimate linear --data linear-prior:dim=20,clients=500 --mu 0 --sigma-theta 0.1 --sigma-x 0.224",
)
def linear(
    reading: Reading,
    prior: Prior,
    sending: Sending,
    output: Output,
    where: options.Where,
    data: Data = "linear-prior",
    sigma_x: SigmaX = None,
    solver: Solver = "em",
    lr: Rate = 1e-3,
    lr_mean: RateOfMean = 1e-3,
    lr_variance: RateOfVariance = 1e-7,
    fedavg_rounds: Annotated[int | None, flag("Of the baseline, from zero. (default: until it converges)")] = None,
    fedavg_lr: Annotated[float, flag("Of the baseline.")] = 0.1,
) -> None:
    """Personal linear regressions with a Gaussian prior, known or learned, or a Gaussian-mixture prior.

    Theorem 6 and Algorithms 2 and 4 of Ozkara et al., 2022.
    """
    settings = {"sigma_x": sigma_x, "solver": solver, "lr": lr, "lr_mean": lr_mean, "lr_variance": lr_variance}
    _regression("linear", data, prior, settings, (fedavg_rounds, fedavg_lr), reading, sending, output, where)


@command(
    app,
    "unalike estimate logistic --data linear-prior:response=logistic,dim=5,points=20,center=1,prior=0.25,design=1,"
    "clients=1000 --json",
)
def logistic(
    reading: Reading,
    prior: Prior,
    sending: Sending,
    output: Output,
    where: options.Where,
    data: Data = "linear-prior:response=logistic,dim=5,points=20,center=1,prior=0.25,design=1,clients=1000",
    solver: Solver = "em",
    lr: Rate = 0.02,
    lr_mean: RateOfMean = 0.05,
    lr_variance: RateOfVariance = 1e-4,
) -> None:
    """Personal logistic regressions with a Gaussian or Gaussian-mixture prior.

    Algorithms 3 and 4 of Ozkara et al., 2022.
    """
    settings = {"solver": solver, "lr": lr, "lr_mean": lr_mean, "lr_variance": lr_variance}
    _regression("logistic", data, prior, settings, (None, 0.1), reading, sending, output, where)


def _regression(
    family: Literal["linear", "logistic"],
    data: str,
    prior: Prior,
    settings: dict[str, Any],
    fedavg: tuple[int | None, float],
    reading: Reading,
    sending: Sending,
    output: Output,
    where: options.Where,
) -> None:
    output.check()
    from unalike.analytics.estimation.mixture import MixturePrior
    from unalike.analytics.estimation.private import Central
    from unalike.analytics.estimation.regression import GaussianPrior
    from unalike.analytics.estimation.study import regression_summary, run
    from unalike.studio.errors import UserError

    many = prior.components > 1
    if many and (sending.bits is not None or prior.mu is not None):
        raise UserError("--components above 1 goes with an unknown prior and messages as they are, or in noisy sums")
    with errors_told(), where.place(sending.epsilon, sending.simulate_noise) as place:
        problem = reading.problem(place, data, check=family)
        channel = sending.channel(problem)
        estimator: MixturePrior | GaussianPrior
        if many:
            sigma_x = settings.get("sigma_x")
            noise = None if sending.epsilon is None else Central(sending.epsilon, channel.delta)
            how: dict[str, Any] = {"rounds": prior.rounds, "local_steps": prior.local_steps, "central": noise}
            if settings["solver"] != "em":
                how |= {name: settings[name] for name in ("solver", "lr", "lr_mean", "lr_variance")}
            estimator = MixturePrior(prior.components, family, sigma_x, bound=sending.bound, **how)
        else:
            settings |= {"mu": prior.mu, "sigma_theta": prior.sigma_theta, "rounds": prior.rounds}
            estimator = GaussianPrior(family=family, channel=channel, bound=sending.bound, **settings)
        with bar(prior.rounds, output.as_json, place) as advance:
            done = run(problem, partial(estimator.estimate, after_round=advance), reading.seed, place.federate)
        known = not many and prior.mu is not None
        result = regression_summary(family, data, problem, done, reading.seed, channel.delta, fedavg, known)
        _tell_noise(result, sending.epsilon, sending.simulate_noise, "server" if many else "nobody")
    _finish({**result, **place.told()}, problem, done.found, output, estimates=True)


def _needed(epsilon: float | None) -> float:
    if epsilon is None:
        from unalike.studio.errors import UserError

        raise UserError("--central and --secure are about noise on sums: give --epsilon")
    return epsilon


def _tell_noise(result: dict[str, Any], epsilon: float | None, simulated: bool, trust: str = "nobody") -> None:
    if result["privacy"] is not None:
        result["privacy"] |= {**options.noise_told(epsilon, simulated), "trust": trust}


def _delta(problem: Problem) -> float:
    return float(len(problem.clients) ** -1.1)


def _write_sweep(
    output: Output,
    title: str,
    delta: str,
    made: Maker,
    problem: Problem,
    seed: int,
    place: Place,
    closed_form: Callable[[Problem, Estimates], float] | None = None,
) -> None:
    if output.plot is None:
        return
    from unalike.analytics.estimation.study import SWEPT, sweep
    from unalike.studio.figures.estimation import sweep as chart

    with bar(SWEPT, output.as_json, place, "sweep") as progress:
        swept = sweep(made, problem, seed, partial(place.federate, noise="seeded"), closed_form, progress)
    write_figure(output.plot, chart(title, swept, delta))


def _finish(
    result: dict[str, Any],
    problem: Problem,
    found: Estimates,
    output: Output,
    estimates: bool = False,
    measuring: str = "--test 0.2 holds some out",
) -> None:
    """Write what was asked for, and print the result.

    ``estimates``: the figure shows them. ``measuring``: how it could be measured if it was not.
    """
    if output.out is not None:
        from unalike.analytics.estimation.problem import write_estimates
        from unalike.studio.runs.folder import disk_errors_told

        with disk_errors_told(output.out.parent):
            write_estimates(output.out, problem.clients, found)
    if output.plot is not None and estimates:
        from unalike.studio.figures.estimation import estimates as chart

        write_figure(output.plot, chart(result, problem, found))
    if output.as_json:
        typer.echo(json.dumps(result))
        return
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
    say(*lines, *workers_told(result), *(f"note: {note}" for note in result["notes"]))
    say(_first_estimates(problem, found))
    if output.out is None:
        say("--out FILE.csv writes the estimates of all clients, all coordinates")
    print_files(estimates=output.out, figures=output.plot)


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
    for number, row in enumerate(result["folds"], start=1):
        share = "-" if row["gain"] is None else f"{100 * row['gain']:.1f} %"
        say(f"sample {number} left out: personal {row['personal']:.5f}, local {row['local']:.5f}, {share}")
    measures = {
        "over_local": "gain over local",
        "of_rate": "gain in the error of the rate itself",
        "against_label": "gain in the error against the left-out sample's label",
    }
    for name, what in measures.items():
        if result["gain"][name] is not None:
            mean, std = (100 * result["gain"][name][key] for key in ("mean", "std"))
            say(f"{what}: {mean:.1f} ± {std:.1f} %")
