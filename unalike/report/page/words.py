"""The report in words: the finding in one line, and what one would ask next."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unalike.report.page.read import Run
from unalike.runs.result import GROUPS
from unalike.runs.words import counted, listed, share, stated

GROUP_NAMES = {"seen": "seen clients", "unseen": "unseen clients", "unlabeled": "clients without labels"}
GROUP_MEANING = {
    "seen": "took part in training",
    "unseen": "arrived after training",
    "unlabeled": "are the unseen ones again, with their labels withheld",
}


@dataclass(frozen=True)
class Scale:
    """How scores are written: an accuracy as a percentage, any other score as a plain number."""

    metric: str
    lower_is_better: bool = False

    @property
    def tail(self) -> str:
        """What the score of the clients is called that a tenth of them do not reach."""
        return f"{90 if self.lower_is_better else 10}th percentile"

    @property
    def percent(self) -> bool:
        return self.metric == "accuracy"

    def __call__(self, score: float) -> str:
        return share(score) if self.percent else f"{score:.3g}"

    @property
    def format(self) -> str:
        """How an axis writes it, in d3's language."""
        return "~%" if self.percent else "~g"

    def spread(self, std: float) -> str:
        return f"± {100 * std:.1f}" if self.percent else f"± {std:.2g}"

    def gap(self, difference: float) -> str:
        return f"{100 * difference:.1f} points" if self.percent else f"{difference:.2g}"


def runs_serving(runs: Sequence[Run], group: str) -> list[Run]:
    """The runs with a score for a group, best first."""
    means = [(one.mean, run) for run in runs if (one := run.result.accuracy.of(group)) is not None]
    return [run for _, run in sorted(means, key=lambda one: one[0] if one[1].lower_is_better else -one[0])]


def groups_present(runs: Sequence[Run]) -> list[str]:
    """The groups of clients that exist in at least one run."""
    known = {row.group for run in runs for row in run.clients}
    known |= {name for run in runs if run.map for name in run.map.group}
    return [group for group in GROUPS if group in known or runs_serving(runs, group)]


def difference_in_clients(a: Run, b: Run) -> str:
    """Why the clients of two runs are not the same ones; empty if they are."""
    if unknown := [run.label for run in (a, b) if not run.origin]:
        return f"no recipe says how the clients of {listed(unknown)} were made"
    for key in dict.fromkeys([*a.origin, *b.origin]):
        mine, theirs = (run.origin.get(key, "not given") for run in (a, b))
        if mine != theirs:
            return f"{key} is {mine} for {a.label} and {theirs} for {b.label}"
    if a.map and b.map:
        for what in ("names", "group", "n", "label_histogram"):
            if getattr(a.map, what) != getattr(b.map, what):
                return f"the clients of {a.label} and {b.label} differ in their {what.replace('_', ' ')} (map.json)"
    return ""


def comparable(runs: Sequence[Run]) -> bool:
    """Are all runs over the same clients?"""
    return not any(difference_in_clients(runs[0], run) for run in runs[1:])


class Lead(NamedTuple):
    """How much better a run is than another with each seed, for every client that both served."""

    gaps: list[list[float]]

    @classmethod
    def of(cls, a: Run, b: Run, group: str) -> Lead:
        """Of ``a`` over ``b``; without any gap if their clients are not the same ones."""
        mine, theirs = a.scores(group), {} if difference_in_clients(a, b) else b.scores(group)
        sign, gaps = -1 if a.lower_is_better else 1, dict[int, list[float]]()
        for (client, seed), score in mine.items():
            if (client, seed) in theirs:
                gaps.setdefault(seed, []).append(sign * (score - theirs[client, seed]))
        return cls(list(gaps.values()))

    @property
    def by_client(self) -> list[float]:
        return [gap for of_seed in self.gaps for gap in of_seed]

    @property
    def seeds_ahead(self) -> int:
        return sum(statistics.fmean(of_seed) > 0 for of_seed in self.gaps)

    @property
    def clear(self) -> bool:
        """Is one better on average with every seed, and by more than two standard errors over all clients?"""
        gaps = self.by_client
        if len(gaps) < 2 or self.seeds_ahead not in (0, len(self.gaps)):
            return False
        return abs(statistics.fmean(gaps)) > 2 * statistics.stdev(gaps) / math.sqrt(len(gaps))


def leaders(runs: Sequence[Run], group: str) -> list[Run]:
    """The best run on a group and those that are level with it; none if nobody serves the group."""
    ranked = runs_serving(runs, group)
    if not comparable(runs):
        return ranked
    return [run for run in ranked if run is ranked[0] or not Lead.of(ranked[0], run, group).clear]


NO_SCORES = "Scores were not handed on with this run: no noise protects them"


def finding(runs: Sequence[Run], scale: Scale) -> str:
    """The outcome in one line: of the first group of clients that anybody serves; ``details`` has the others."""
    group = next((group for group in GROUPS if runs_serving(runs, group)), None)
    if group is None:
        return NO_SCORES if any(run.withheld for run in runs) else "No client got a score"
    if len(runs) == 1:
        return f"{runs[0].label} reaches {mean_and_spread(runs[0], group, scale)} on {GROUP_NAMES[group]}"
    if not comparable(runs):
        return "No lead is claimed: these runs are over different clients"
    return _standing(runs, group, scale)


def mean_and_spread(run: Run, group: str, scale: Scale) -> str:
    """The mean score of a group; over several seeds with its deviation."""
    summary, seeds = run.result.accuracy.of(group), len(run.seeds)
    if summary is None:
        return "not served"
    spread = f" {scale.spread(summary.std)} over {seeds} seeds" if seeds > 1 else ""
    return f"{scale(summary.mean)}{spread}"


def _standing(runs: Sequence[Run], group: str, scale: Scale) -> str:
    """Who is ahead on a group of clients."""
    best, everybody = leaders(runs, group), runs_serving(runs, group)
    names, where = listed([run.label for run in best], 3), GROUP_NAMES[group]
    score = mean_and_spread(best[0], group, scale)
    if len(everybody) == 1:
        return f"Only {names} serves {where}: {score}"
    if len(best) == 1:
        return f"{names} is best on {where}: {score}"
    if len(best) < len(everybody):
        scores = listed(
            [f"{run.label} ({scale(one.mean)})" for run in best if (one := run.result.accuracy.of(group))], 2
        )
        return f"{scores} share the lead on {where}"
    return f"No run is clearly ahead on {where}: {best[0].label} has {score}"


def details(runs: Sequence[Run], scale: Scale) -> list[str]:
    """What one would ask next: the other groups, by how much, for how many clients, how private."""
    groups = [group for group in GROUPS if runs_serving(runs, group)]
    if len(runs) == 1:
        lines = []
        for group in groups:
            if summary := runs[0].result.accuracy.of(group):
                reached = (
                    f"{mean_and_spread(runs[0], group, scale)} on average, {scale(summary.p10)} at the {scale.tail}"
                )
                lines.append(f"{GROUP_NAMES[group].capitalize()}: {reached}.")
    elif comparable(runs):
        lines = [f"On {GROUP_NAMES[group]}, {lead}." for group in groups[:1] if (lead := _lead(runs, group, scale))]
        for group in groups[1:]:
            lines.append("; ".join(filter(None, (_standing(runs, group, scale), _lead(runs, group, scale)))) + ".")
    else:
        why = next(filter(None, (difference_in_clients(runs[0], run) for run in runs[1:])))
        lines = [f"{why[0].upper()}{why[1:]}."]
    return [*lines, privacy_sentence(runs)]


def _lead(runs: Sequence[Run], group: str, scale: Scale) -> str:
    """By how much the best run is better than the next that is not level with it, and for how many clients."""
    best, *others = runs_serving(runs, group)
    if not others:
        return ""
    second = next((run for run in others if Lead.of(best, run, group).clear), others[0])
    lead, means = Lead.of(best, second, group), [run.result.accuracy.of(group) for run in (best, second)]
    first, next_best = (math.nan if one is None else one.mean for one in means)
    gaps = lead.by_client
    better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    of = f"better for {better} of {counted(len(gaps), 'client')}, worse for {worse}"
    if len(lead.gaps) > 1:
        of = f"better with {lead.seeds_ahead} of {len(lead.gaps)} seeds"
    of = of if gaps else "no client has a score in both"
    chance = "" if lead.clear else "; that may be chance"
    way = "below" if best.lower_is_better else "above"
    return f"{best.label} is {scale.gap(abs(first - next_best))} {way} {second.label}: {of}{chance}"


MOST_NAMED = 50  # clients in the table of clients


def client_table(runs: Sequence[Run], scale: Scale) -> list[list[str]]:
    """Name, group, rows and score by every run (mean over seeds) of every client; none if they are many."""
    scores = [run.mean_scores() for run in runs]
    sizes = {(row.client, row.group): row.n_train for run in runs for row in run.clients}
    if len({client for client, _ in sizes}) > MOST_NAMED:
        return []
    places = sorted(sizes, key=lambda place: (GROUPS.index(place[1]) if place[1] in GROUPS else 9, place[0]))
    return [
        [*place, "—" if sizes[place] is None else f"{sizes[place]:,}"]
        + [scale(own[place]) if place in own else "—" for own in scores]
        for place in places
    ]


def privacy_sentence(runs: Sequence[Run]) -> str:
    """Who is protected, and how well."""
    parts = []
    for run in runs:
        privacy = run.result.privacy
        if privacy.epsilon == 0:
            parts.append(f"{run.label} releases nothing (ε = 0)")
        elif is_bounded(run):
            delta = f", δ = {privacy.delta:.2g}" if privacy.delta else ""
            unit = f" for each {'data point' if privacy.unit == 'point' else 'client'}" if privacy.unit else ""
            server = stated(privacy.epsilon_server, privacy.noise)
            against = f"; against the server ε = {server}, trust: {privacy.trust}" if privacy.trust else ""
            spends = f"ε = {stated(privacy.epsilon, privacy.noise)}{delta}{unit} against readers of the model{against}"
            accepted = "; δ is 1/n or more, which was accepted" if privacy.accepted_delta else ""
            parts.append(f"{run.label} spends {spends}{accepted}")
    if not parts:
        return "No differential privacy: what clients sent carried no noise."
    rest = [run.label for run in runs if not is_bounded(run)]
    ends = f"; {listed(rest)} {'gives' if len(rest) == 1 else 'give'} no guarantee" if rest else ""
    return f"Privacy: {listed(parts, 9)}{ends}."


def is_bounded(run: Run) -> bool:
    """Is there a finite ε?"""
    return run.result.privacy.epsilon is not None and math.isfinite(run.result.privacy.epsilon)
