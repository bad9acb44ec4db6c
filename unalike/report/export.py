"""A report's tables as LaTeX, CSV or JSON, and its figures as files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unalike.core.lazy import pd
from unalike.report.page.read import Run, Sight
from unalike.report.page.words import GROUP_NAMES, Scale, groups_present
from unalike.runs.errors import FLAG, UserError
from unalike.runs.folder import plain_name
from unalike.runs.words import listed, no_formula

FORMATS = ("latex", "csv", "json")


def results(runs: Sequence[Run]) -> pd.DataFrame:
    """A row for each method: mean, deviation (over seeds, else over clients) and tail of each group, and the cost."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        result = run.result
        row: dict[str, Any] = {"method": run.label, "metric": result.metric, "seeds": len(run.seeds)}
        for group in groups_present(runs):
            summary = result.accuracy.of(group)
            for name, field in (("mean", "mean"), ("std", "std"), ("tail", "p10"), ("worst", "worst")):
                row[f"{group}_{name}"] = None if summary is None else getattr(summary, field)
        row |= {"epsilon": result.privacy.epsilon, "delta": result.privacy.delta}
        rows.append(row | {"bytes_up": result.bytes.up, "bytes_down": result.bytes.down, "seconds": result.seconds})
    return pd.DataFrame(rows)


def clients(runs: Sequence[Run]) -> pd.DataFrame:
    """A row for each client, method and seed."""
    rows = [{"method": run.label, **row.model_dump()} for run in runs for row in run.clients]
    return pd.DataFrame(rows, columns=["method", "seed", "client", "group", "n_train", "score"])


def rounds(runs: Sequence[Run]) -> pd.DataFrame:
    """A row for each method and round: loss, ε, and mean and deviation of each group."""
    rows = []
    for run in runs:
        for one in run.rounds:
            row: dict[str, Any] = {"method": run.label, "round": one.round, "loss": one.loss, "epsilon": one.epsilon}
            for group in groups_present(runs):
                summary = one.of(group)
                row |= {f"{group}_{name}": summary and getattr(summary, name) for name in ("mean", "std")}
            rows.append(row)
    return pd.DataFrame(rows)


def transcript(runs: Sequence[Run]) -> pd.DataFrame:
    """A row for each array that left the clients."""
    rows = [{"method": run.label, **row.model_dump()} for run in runs for row in run.transcript or ()]
    return pd.DataFrame(rows, columns=["method", *Sight.model_fields])


def settings(runs: Sequence[Run]) -> pd.DataFrame:
    """A row for each setting of the recipes, a column for each method."""
    return pd.DataFrame({run.label: run.settings for run in runs}).rename_axis("setting").reset_index()


TABLES: dict[str, Callable[[Sequence[Run]], pd.DataFrame]] = {
    one.__name__: one for one in (results, clients, rounds, transcript, settings)
}


def table(runs: Sequence[Run], name: str, form: str) -> str:
    """One of ``TABLES`` as text; LaTeX needs booktabs, and has the results as mean ± deviation."""
    if name not in TABLES:
        raise UserError(f"table = {name!r}{FLAG}: expected {listed(list(TABLES), 9)}", "table")
    frame = TABLES[name](runs)
    if form == "csv":
        return frame.map(no_formula).to_csv(index=False, lineterminator="\n")
    if form == "json":
        return str(frame.to_json(orient="records", indent=2, force_ascii=False))
    if name != "results":
        return str(frame.to_latex(index=False, escape=True, na_rep="--", float_format="%.4g"))
    percent, seeds = Scale(runs[0].result.metric, False).percent, {len(run.seeds) for run in runs}
    over = "clients" if max(seeds) == 1 else "seeds" + " (over clients where there is one)" * (1 in seeds)
    about = f"% {runs[0].result.metric}{' in percent' * percent}: mean and standard deviation over {over}\n"
    return about + str(_for_a_paper(runs).to_latex(index=False, escape=False))


def _for_a_paper(runs: Sequence[Run]) -> pd.DataFrame:
    """The results with \\pm; an accuracy in percent."""
    scale, rows = Scale(runs[0].result.metric, runs[0].lower_is_better), []
    for run in runs:
        row = {"Method": _escaped(run.label)}
        for group in groups_present(runs):
            one, factor = run.result.accuracy.of(group), 100 if scale.percent else 1
            digits = "{:.1f} \\pm {:.1f}" if scale.percent else "{:.3g} \\pm {:.2g}"
            row[GROUP_NAMES[group].capitalize()] = (
                "--" if one is None else f"${digits.format(factor * one.mean, factor * one.std)}$"
            )
        epsilon = run.result.privacy.epsilon
        rows.append(row | {r"$\varepsilon$": r"$\infty$" if epsilon is None else f"${epsilon:.3g}$"})
    return pd.DataFrame(rows)


def _escaped(text: str) -> str:
    return "".join(f"\\{sign}" if sign in "&%$#_{}" else sign for sign in text)


def figures(runs: Sequence[Run], folder: Path, ending: str) -> list[Path]:
    """Write each chart of the report to a file of its own."""
    from unalike.report.figures.file import save
    from unalike.report.page import analyses, charts

    scale = Scale(runs[0].result.metric, runs[0].lower_is_better)
    panels = [*charts.accuracy(runs, scale, True), *charts.distribution(runs, scale), *charts.costs(runs, True)]
    panels += [*charts.treatment(runs), *(one for kind in charts.client_maps(runs, scale) for one in kind)]
    if any(run.analyses for run in runs):
        panels += [*analyses.curves(runs, scale, True), *analyses.maps(runs, scale)]
    written = []
    for panel in panels:
        written.append(folder / f"{plain_name(panel.title)}.{ending}")
        save(panel.chart, written[-1])
    return written
