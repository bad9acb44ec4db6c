"""``unalike estimate``: personal estimates that borrow strength from other clients (Ozkara et al., 2022)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.table import Table

from unalike.commands import options
from unalike.commands.console import (
    bar,
    check_free,
    guarantee,
    print_files,
    say,
    spinner,
    worker_lines,
    write,
    write_figure,
)
from unalike.commands.options import command, examples, flag
from unalike.runs.errors import UserError

if TYPE_CHECKING:
    from unalike.analytics.estimation.regression import OneForAll
    from unalike.analytics.estimation.samples import Samples
    from unalike.analytics.estimation.shared import Channel, Estimator
    from unalike.analytics.estimation.study import EstimationResult
    from unalike.deploy.session import Place

_FIRST = 5  # clients whose estimates are printed
_NAMED = 20  # columns whose names are printed
_data, _model, _privacy, _output = (partial(flag, panel=one) for one in ("Data", "Model", "Privacy", "Output"))

data_flag = partial(flag, "A name of `unalike datasets`, or your own file.", panel="Data")
mu_flag = partial(flag, "Known mean of the prior, the same in each coordinate.", panel="Model")
sigma_theta_flag = partial(flag, "σθ, deviation among clients.", panel="Model")
sigma_x_flag = partial(flag, "σx, deviation of a sample.", panel="Model")
rounds_flag = partial(flag, "Rounds of learning the prior.", min=1, panel="Model")
radius_flag = partial(flag, "Or the largest magnitude of the prior's mean.", panel="Privacy")


@dataclass(frozen=True)
class Job(options.TableFlags, options.Where):
    """Which clients to read, where they are, and what to write and print."""

    clients: int | None = options.client_count_flag()
    test: float = _data("Share of each client's rows to score by, where no truth is known.", default=0.0)
    seed: int = _data("Of data and noise.", default=0)
    range_: list[str] | None = options.range_flag()
    plot: Path | None = _output("A new file for the figures: .html, .pdf, .png, .svg.")
    out: Path | None = _output("Write the estimates to this new CSV file.")
    as_json: bool = options.json_flag()

    def samples(
        self, place: Place, data: str, check: str | None, counts: Path | None = None, intercept: bool = False
    ) -> Samples:
        """The clients of a data set, or of a file of counts."""
        how: dict[str, Any] = {"seed": self.seed, "clients": self.clients, "test": self.test, "check": check}
        if intercept:
            how["intercept"] = True
        if self.range_:
            how["ranges"] = options.ranges_of(self.range_)
        file = None if counts is None else str(counts)
        found: Samples = place.read("samples", data=data, counts=file, **how, **self.options())
        return found


@dataclass(frozen=True)
class Message:
    """How a client's message reaches the server."""

    bits: int | None = _privacy("Round each number of a message to this many bits.")
    epsilon: float | None = _privacy("ε₀ of a client, by noise of its own.")
    delta: float | None = options.delta_flag()
    simulate_noise: bool = options.simulate_noise_flag()

    def channel(self, samples: Samples, calibration: str = "analytic") -> Channel:
        from unalike.analytics.estimation.shared import Channel

        delta = len(samples.clients) ** -1.1 if self.delta is None else self.delta
        return Channel(self.bits, self.epsilon, delta, calibration)  # type: ignore[arg-type]  # it checks this


@dataclass(frozen=True)
class BoundedMessage(Message):
    """The same, of numbers that have no natural bound."""

    bound: float | None = _privacy("Bound of what is sent, known beforehand.")


@dataclass(frozen=True)
class Regression:
    """Where the coefficients of a regression come from, and how that is learned."""

    intercept: bool = _model("Add a column of ones to a table, so that lines need not pass through 0.", default=False)
    mu: float | None = mu_flag()
    sigma_theta: float | None = sigma_theta_flag()
    rounds: int = rounds_flag(default=100)
    components: int = _model("Components of a mixture prior.", default=1, min=1)
    local_steps: int = _model("Of a mixture prior, in a round.", default=20)
    solver: str = _model("em, or gd: the paper's alternating gradient steps.", default="em")
    lr: float = _model("Of gd, for θ.", default=1e-3)
    lr_mean: float = _model("Of gd, for μ.", default=1e-3)
    lr_variance: float = _model("Of gd, for the variances.", default=1e-7)

    @property
    def trust(self) -> str:
        return "server" if self.components > 1 else "nobody"

    def build(
        self, family: Literal["linear", "logistic"], sigma_x: float | None, message: BoundedMessage, samples: Samples
    ) -> Estimator:
        """The estimator that these settings describe."""
        from unalike.analytics.estimation.mixture import MixturePrior
        from unalike.analytics.estimation.private import Central
        from unalike.analytics.estimation.regression import GaussianPrior

        channel = message.channel(samples)
        how: dict[str, Any] = {"sigma_x": sigma_x, "rounds": self.rounds, "bound": message.bound}
        gd = {name: getattr(self, name) for name in ("solver", "lr", "lr_mean", "lr_variance")}
        if self.components == 1:
            return GaussianPrior(family, self.mu, self.sigma_theta, channel=channel, **how, **gd)
        if message.bits is not None or self.mu is not None:
            raise UserError(
                "--components above 1 goes with an unknown prior and messages as they are, or in noisy sums"
            )
        how["central"] = None if message.epsilon is None else Central(message.epsilon, channel.delta)
        how |= {"local_steps": self.local_steps, **(gd if self.solver != "em" else {})}
        return MixturePrior(self.components, family, **how)


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
    job: Job,
    message: BoundedMessage,
    data: str = data_flag(default="gaussian-means"),
    mu: float | None = mu_flag(),
    sigma_theta: float | None = sigma_theta_flag(),
    sigma_x: float | None = sigma_x_flag(),
    calibration: str = _privacy("Of the noise: analytic or paper.", default="analytic"),
    radius: float | None = radius_flag(),
) -> None:
    """Personal means with a Gaussian prior, known or unknown; in k bits or locally private.

    Theorems 1 and 2 of Ozkara et al., 2022.
    """

    def build(samples: Samples) -> Estimator:
        from unalike.analytics.estimation.means import GaussianMeans

        channel = message.channel(samples, calibration)
        return GaussianMeans(mu, sigma_theta, sigma_x, channel, radius, message.bound)

    _refuse_label(job)
    _run(job, message, data, build, bits=message.bits)


@command(
    app,
    "unalike estimate bernoulli --data bernoulli:normal --seed 0 --json",
    "unalike estimate bernoulli --data bernoulli:beta --epsilon 2 --plot bernoulli.html",
    "unalike estimate bernoulli --data elections --form moments --cross-validate --in-order",
)
def bernoulli(
    job: Job,
    message: Message,
    data: str = data_flag(default="bernoulli"),
    counts: Path | None = _data("Or a CSV file with the columns successes and trials."),
    alpha: float | None = _model("Known Beta(α, β): α."),
    beta: float | None = _model("Known Beta(α, β): β."),
    form: str = _model("Of the weight: exact, moments or plug-in.", default="exact"),
    cross_validate: bool = _data("Leave out each sample once, score by it.", default=False),
    in_order: bool = _data("Leave out everybody's first, second, ...", default=False),
) -> None:
    """Personal rates of 0/1 samples with a Beta prior, known or unknown; in k bits or locally private.

    Theorems 3 and 4 of Ozkara et al., 2022.
    """
    from unalike.analytics.estimation.means import BernoulliRates

    def build(samples: Samples) -> BernoulliRates:
        return BernoulliRates(alpha, beta, form, message.bits, message.epsilon)  # type: ignore[arg-type]  # it checks

    if not cross_validate:
        if job.label_column and job.features:
            raise UserError(
                f"rates are of one column of 0 and 1: give --label-column {job.label_column} or "
                f"--features {job.features}, not both"
            )
        _run(job, message, data, build, "flips", counts, form=form, bits=message.bits)
        return
    if job.plot is not None or job.out is not None:
        raise UserError("--cross-validate makes several estimates of a client: leave out --plot and --out")
    job.refuse(cross_validate=True)
    from unalike.analytics.estimation import study

    with job.place(message.epsilon, message.simulate_noise) as place:
        samples = job.samples(place, data, "flips", counts)
        result = study.cross_validate(samples, build(samples), job.seed, in_order, place.federate)
    typer.echo(json.dumps(result)) if job.as_json else _print_folds(result)


@command(
    app,
    "unalike estimate mixture --data gaussian-means:dim=5,candidates=4,sigma_theta=0.5,sigma_x=1 --components 4 "
    "--sigma-x 1 --json",
    "unalike estimate mixture --kind linear --data linear-prior:dim=5,points=20,components=3,center=1,prior=1e-8,"
    "design=1,clients=2000 --components 3 --sigma-x 0.224",
)
def mixture(
    job: Job,
    message: BoundedMessage,
    data: str = data_flag(default="gaussian-means:dim=5,candidates=4,sigma_theta=0.5,sigma_x=1"),
    components: int = _model("Components of a mixture prior.", default=4, min=1),
    sigma_x: float = _model("σx, deviation of a sample.", default=1.0),
    kind: str = _model("means, or linear models.", default="means"),
    alternate: bool = _model("In rounds, exactly as the paper prints it.", default=False),
    central: bool = _privacy("With --epsilon: noise on sums, not on each message.", default=False),
    secure: bool = _privacy("With --central: sums under masks.", default=False),
    rounds: int = rounds_flag(default=10),
    radius: float | None = radius_flag(),
) -> None:
    """Personal means or linear models that are one of a few candidates.

    Algorithms 1 and 7 of Ozkara et al., 2022.
    """
    central = central or secure
    if central and message.epsilon is None:
        raise UserError("--central and --secure are about noise on sums: give --epsilon")

    def build(samples: Samples) -> Estimator:
        from unalike.analytics.estimation.candidates import DiscreteMixture
        from unalike.analytics.estimation.private import Central
        from unalike.analytics.estimation.shared import Channel

        how: dict[str, Any] = {"channel": message.channel(samples)}
        if central and message.epsilon is not None:
            delta = how["channel"].delta
            how = {"channel": Channel(delta=delta), "central": Central(message.epsilon, delta, secure)}
        how |= {"rounds": rounds, "once": not alternate, "radius": radius, "bound": message.bound}
        return DiscreteMixture(components, sigma_x, kind, **how)  # type: ignore[arg-type]  # it checks the kind

    if kind != "linear":
        _refuse_label(job)
    how: dict[str, Any] = {"rounds": rounds if alternate or central else None}
    how["trust"] = "server" if central else "nobody"
    check = "linear" if kind == "linear" else None
    _run(job, message, data, build, check, **how, components=components, kind=kind, bits=message.bits)


@command(
    app,
    "unalike estimate linear --data linear-prior:dim=50,design=0.22,center=0.0188 --fedavg-rounds 14 --json",
    "unalike estimate linear --data linear-prior:dim=20,clients=500 --mu 0 --sigma-theta 0.1 --sigma-x 0.224",
)
def linear(
    job: Job,
    regression: Regression,
    message: BoundedMessage,
    data: str = data_flag(default="linear-prior"),
    sigma_x: float | None = sigma_x_flag(),
    fedavg_rounds: int | None = flag("Of the baseline, from zero. (default: until it converges)"),
    fedavg_lr: float = flag("Of the baseline.", default=0.1),
) -> None:
    """Personal linear regressions with a Gaussian prior, known or learned, or a Gaussian-mixture prior.

    Theorem 6 and Algorithms 2 and 4 of Ozkara et al., 2022.
    """
    from unalike.analytics.estimation.regression import OneForAll

    build = partial(regression.build, "linear", sigma_x, message)
    how: dict[str, Any] = {"rounds": regression.rounds, "trust": regression.trust, "intercept": regression.intercept}
    _run(job, message, data, build, "linear", one_for_all=OneForAll("linear", fedavg_rounds, fedavg_lr), **how)


@command(
    app,
    "unalike estimate logistic --data linear-prior:response=logistic,dim=5,points=20,center=1,prior=0.25,design=1,"
    "clients=1000 --json",
)
def logistic(
    job: Job,
    regression: Regression,
    message: BoundedMessage,
    data: str = data_flag(
        default="linear-prior:response=logistic,dim=5,points=20,center=1,prior=0.25,design=1,clients=1000"
    ),
    lr: float = _model("Of gd, for θ.", default=0.02),
    lr_mean: float = _model("Of gd, for μ.", default=0.05),
    lr_variance: float = _model("Of gd, for the variances.", default=1e-4),
) -> None:
    """Personal logistic regressions with a Gaussian or Gaussian-mixture prior.

    Algorithms 3 and 4 of Ozkara et al., 2022.
    """
    rates = replace(regression, lr=lr, lr_mean=lr_mean, lr_variance=lr_variance)
    build = partial(rates.build, "logistic", None, message)
    how: dict[str, Any] = {"rounds": regression.rounds, "trust": regression.trust, "intercept": regression.intercept}
    _run(job, message, data, build, "logistic", **how)


def _refuse_label(job: Job) -> None:
    """Means are of the features, so a label column that was named would silently be left out of them."""
    if job.label_column:
        raise UserError(
            f"means are of the feature columns, and {job.label_column!r} was named as the label, which is none of "
            "them; give --label-column '' to have it among the features"
        )


def _run(
    job: Job,
    message: Message,
    data: str,
    build: Callable[[Samples], Estimator],
    check: str | None = None,
    counts: Path | None = None,
    *,
    rounds: int | None = None,
    trust: str = "nobody",
    one_for_all: OneForAll | None = None,
    intercept: bool = False,
    **more: Any,
) -> None:
    """Read the samples, estimate, write what was asked for and print the rest.

    ``rounds``: of the estimator's learning, where it shows them. ``more``: settings that belong in the JSON.
    """
    check_free(plot=job.plot, out=job.out)
    from unalike.analytics.estimation.means import BernoulliRates, GaussianMeans
    from unalike.analytics.estimation.study import SWEPT, estimate, sweep

    with job.place(message.epsilon, message.simulate_noise) as place:
        samples = job.samples(place, data, check, counts, intercept)
        estimator = build(samples)
        how: dict[str, Any] = {"seed": job.seed, "delta": message.channel(samples).delta, "one_for_all": one_for_all}
        if rounds is None:
            with spinner("estimating", job.as_json, place):
                found = estimate(estimator, samples, place.federate, **how)
        else:
            with bar(rounds, job.as_json, place) as advance:
                found = estimate(estimator, samples, place.federate, after_round=advance, **how)
        swept = None
        means = estimator if isinstance(estimator, GaussianMeans | BernoulliRates) else None
        if job.plot is not None and found.errors and means is not None and means.can_sweep:
            with bar(SWEPT, job.as_json, place, "sweep") as advance:
                swept = sweep(means, samples, job.seed, partial(place.federate, noise="seeded"), advance)
    values = {**found.values(), **more, **place.summary()}
    if values["privacy"] is not None:
        values["privacy"] |= {**options.noise_source(message.epsilon, message.simulate_noise), "trust": trust}
    if job.out is not None:
        write(job.out, found.table().to_csv(index=False))
    if job.plot is not None:
        from unalike.report.figures import estimation as figures

        what, noise = ("rates", "") if found.kind == "bernoulli" else ("means", f", δ = {found.delta:.2g}")
        curves = [] if swept is None else [figures.sweep(f"{samples.name}: personal {what}", swept, noise)]
        write_figure(job.plot, figures.estimates(found, curves))
    if job.as_json:
        typer.echo(json.dumps(values))
    else:
        _print(values, found)
        if job.out is None:
            say("--out FILE.csv writes the estimates of all clients, all coordinates")
        print_files(estimates=job.out, figures=job.plot)


def _print(result: Mapping[str, Any], found: EstimationResult) -> None:
    dim = "1 coordinate" if result["dim"] == 1 else f"{result['dim']} coordinates"
    lines = [f"{result['data']}: {result['clients']:,} clients, {dim}, {result['seconds']:.2f} s"]
    if result["columns"] is not None:
        used = "" if result["target"] is None else f"{result['target']} by "
        lines.append(f"columns: {used}{', '.join(result['columns'])}")
    if result["mse"]["personal"] is None:
        how = (
            "--cross-validate leaves each sample out once" if found.kind == "bernoulli" else "--test 0.2 holds some out"
        )
        lines.append(f"no truth is known and no rows were held out, so nothing was measured ({how})")
    lines += [f"  {name:9} {error:.6g}   ({result['measure']})" for name, error in found.errors.items()]
    for name, value in found.gains.items():
        if value is not None:
            lines.append(f"gain {name.replace('_', ' ')}: {100 * value:.1f} %")
    lines += [f"{name.replace('_', ' ')}: {value:.6g}" for name, value in found.theory.items()]
    privacy = result["privacy"]
    if privacy is None:
        lines.append("not private: the server saw messages as they are or rounded")
    elif privacy["epsilon"] == 0:
        lines.append("nothing left the clients: the prior is known")
    else:
        lines.append(f"{guarantee(privacy)}, by its own noise")
    numbers = [f"{name} = {_named(value, result['columns'])}" for name, value in result["prior"].items()]
    lines.append(f"prior: {', '.join(numbers)}")
    say(*lines, *worker_lines(result), *(f"note: {note}" for note in result["notes"]))
    say(_first_estimates(found))


def _first_estimates(result: EstimationResult) -> Table:
    """What a few clients found alone, and their estimates."""
    found, samples = result.estimates, result.samples
    dim = found.estimate.shape[1]
    first = "coordinate 0" if samples.columns is None else samples.columns[0]
    title = "the first clients" if dim == 1 else f"the first clients, {first}, the first of {dim}"
    table = Table("client", "samples", "local", "estimate", "standard error", title=title, title_justify="left")
    for row, position in enumerate(found.positions[:_FIRST].tolist()):
        numbers = [f"{float(one[row, 0]):.4g}" for one in (found.local, found.estimate, found.deviation)]
        table.add_row(samples.clients.name(position), str(int(samples.clients.size[position])), *numbers)
    return table


def _named(value: Any, columns: list[str] | None) -> str:
    """A number of the prior, or one for each column with its name."""
    if columns is None or not isinstance(value, list) or len(value) != len(columns) or len(columns) > _NAMED:
        return _short(value)
    return "{" + ", ".join(f"{name}: {_short(one)}" for name, one in zip(columns, value, strict=True)) + "}"


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
