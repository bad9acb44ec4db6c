"""The report in words: the finding in one line, what one would ask next, the transcript in plain English."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from unalike.report.page.read import Run, Sight
from unalike.runs.result import GROUPS
from unalike.runs.words import counted, listed, share, size, stated

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


def mean_of(run: Run, group: str) -> float:
    summary = run.result.accuracy.of(group)
    return math.nan if summary is None else summary.mean


def runs_serving(runs: Sequence[Run], group: str) -> list[Run]:
    """The runs with a score for a group, best first."""
    known = [run for run in runs if run.result.accuracy.of(group)]
    return sorted(known, key=lambda run: mean_of(run, group) * (1 if run.lower_is_better else -1))


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


def differences(a: Run, b: Run, group: str) -> list[list[float]]:
    """How much better a is than b, for each seed and every client that both served; none if the clients differ."""
    mine, theirs = a.scores(group), {} if difference_in_clients(a, b) else b.scores(group)
    sign = -1 if a.lower_is_better else 1
    gaps: dict[int, list[float]] = {}
    for (client, seed), score in mine.items():
        if (client, seed) in theirs:
            gaps.setdefault(seed, []).append(sign * (score - theirs[client, seed]))
    return list(gaps.values())


def is_level(a: Run, b: Run, group: str) -> bool:
    """Is neither of two runs clearly better?

    One is, if it is better on average with every seed, and by more than two standard errors over all clients.
    """
    by_seed = differences(a, b, group)
    gaps = [gap for of_seed in by_seed for gap in of_seed]
    if len(gaps) < 2 or len({statistics.fmean(of_seed) > 0 for of_seed in by_seed}) > 1:
        return True
    return abs(statistics.fmean(gaps)) <= 2 * statistics.stdev(gaps) / math.sqrt(len(gaps))


def leaders(runs: Sequence[Run], group: str) -> list[Run]:
    """The best run on a group and those that are level with it; none if nobody serves the group."""
    ranked = runs_serving(runs, group)
    if not comparable(runs):
        return ranked
    return [run for run in ranked if run is ranked[0] or is_level(ranked[0], run, group)]


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
        scores = listed([f"{run.label} ({scale(mean_of(run, group))})" for run in best], 2)
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
    ranked = runs_serving(runs, group)
    rest = [run for run in ranked[1:] if not is_level(ranked[0], run, group)] or ranked[1:]
    if not rest:
        return ""
    best, second = ranked[0], rest[0]
    by_seed = differences(best, second, group)
    gaps = [gap for of_seed in by_seed for gap in of_seed]
    lead = scale.gap(abs(mean_of(best, group) - mean_of(second, group)))
    better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    of = f"better for {better} of {counted(len(gaps), 'client')}, worse for {worse}"
    if len(by_seed) > 1:
        ahead = sum(statistics.fmean(one) > 0 for one in by_seed)
        of = f"better with {ahead} of {len(by_seed)} seeds"
    of = of if gaps else "no client has a score in both"
    chance = "; that may be chance" if is_level(best, second, group) else ""
    way = "below" if best.lower_is_better else "above"
    return f"{best.label} is {lead} {way} {second.label}: {of}{chance}"


MOST_NAMED = 50  # clients in the table of clients


class ClientRow(NamedTuple):
    """A client's line in the table of clients."""

    client: str
    group: str
    rows: str
    scores: list[str]


def client_table(runs: Sequence[Run], scale: Scale) -> list[ClientRow]:
    """Every client with its score by every run, mean over seeds; nothing where there are more than ``MOST_NAMED``."""
    scores = [run.mean_scores() for run in runs]
    sizes = {(row.client, row.group): row.n_train for run in runs for row in run.clients}
    if len({client for client, _ in sizes}) > MOST_NAMED:
        return []
    places = sorted(sizes, key=lambda place: (GROUPS.index(place[1]) if place[1] in GROUPS else 9, place[0]))
    return [
        ClientRow(
            client,
            group,
            "—" if sizes[client, group] is None else f"{sizes[client, group]:,}",
            [scale(own[client, group]) if (client, group) in own else "—" for own in scores],
        )
        for client, group in places
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


def numbers(sight: Sight) -> str:
    """How many numbers one client sends."""
    count = math.prod(sight.shape)
    form = f" ({' × '.join(map(str, sight.shape))})" if len(sight.shape) > 1 else ""
    return f"{count:,}{form}"


def rounds_of(sight: Sight) -> str:
    """In which rounds."""
    if sight.last == 0:
        return "before round 1"
    return f"round {sight.first}" if sight.first == sight.last else f"rounds {sight.first}–{sight.last}"


def senders(sight: Sight) -> str:
    """From how many clients an ask got answers."""
    each = sight.replies / max(sight.times, 1)
    return f"{each:,.0f}" if each == int(each) else f"{each:,.1f} on average"


def how_often(times: int) -> str:
    return "once" if times == 1 else "twice" if times == 2 else f"{times:,} times"


def epsilon_of(sight: Sight, run: Run) -> str:
    """ε of one line of the transcript."""
    if sight.note == "simulation only":
        return "none"
    return "∞" if sight.noise is None else f"in the total of {_stated(run)}"


def _stated(run: Run) -> str:
    return stated(run.result.privacy.epsilon, run.result.privacy.noise)


def noise_of(sight: Sight) -> str:
    """Which noise, and whom it protects."""
    if sight.noise is None:
        return "none"
    unit = "" if sight.unit is None else f" (protects one {'data point' if sight.unit == 'point' else 'client'})"
    return describe(sight.noise) + unit


_WORDS = {  # by the kind of sampling or noise in the transcript
    "FixedSize": "{size} of {population}, drawn at random",
    "Poisson": "each with probability {rate}",
    "Everyone": "all that were asked",
    "Local": "each for itself",
    "Gaussian": "Gaussian, {noise_multiplier} times the bound",
    "DP-SGD": "DP-SGD, {noise_multiplier} times the clip in each step",
    "Laplace": "Laplace for ε = {epsilon}",
    "RandomizedResponse": "randomized response for ε = {epsilon}",
    "Exponential": "exponential mechanism",
}


def describe(facts: Mapping[str, Any] | str) -> str:
    """A way of sampling or a kind of noise in words; one that has no words is written out."""
    if isinstance(facts, str):  # in the transcript of an older version
        return facts
    values = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in facts.items()}
    kind = values.pop("kind", "unknown")
    if kind == "DP-SGD" and not values:
        return "DP-SGD, each client's own noise"
    with suppress(KeyError):
        return _WORDS[kind].format(**values)
    return f"{kind}({', '.join(f'{name}={value}' for name, value in values.items())})"


def view_of(sight: Sight, trust: str | None = None) -> tuple[str, str, str]:
    """How the server saw an array: in a few words, how open that is, and in a sentence. ``trust``: that of the run."""
    kind = sight.seen_as.removeprefix("secure ")
    if kind not in ("sum", "mean"):
        single = ("Each client's own", "open", "The server sees the array of every single client.")
        return single if kind == "individual" else (kind, "trusted", "As the run's own code names it.")
    if kind != sight.seen_as:
        masked = f"Arrays are masked at the clients; the server can learn only their {kind}."
        return f"{kind.capitalize()} only, masked", "hidden", masked
    if sight.noise is not None and trust == "nobody":
        noisy = f"Noise is added before the {kind} reaches the server, which never sees it without."
        return f"{kind.capitalize()} only, with noise", "hidden", noisy
    trusted = f"Only the {kind} is kept; the server is trusted to add without looking."
    return f"{kind.capitalize()} only", "trusted", trusted


def meanings(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """What ``view_of`` says of these runs, each once."""
    return sorted({view_of(row, run.result.privacy.trust) for run in runs for row in run.transcript or ()})


def transcript_summary(run: Run) -> str:
    """What a privacy officer wants to know first."""
    rows = [row for row in run.transcript or () if row.note != "simulation only"]
    if not rows:
        return "Nothing left the clients in this run."
    single = sorted({row.array for row in rows if row.seen_as == "individual"})
    bare = sorted({row.array for row in rows if row.noise is None})
    kinds = counted(len({row.array for row in rows}), "kind")
    saw, noise = "used no client's array individually, only sums or means", "Everything carried noise."
    if run.result.privacy.trust == "server":
        noise = "Everything carried noise once it was published; the server saw sums before it was added."
    if single:
        saw = f"saw {listed(single)} of each client individually"
    if bare:
        noise = f"Sent without noise: {listed(bare)}; so there is no differential privacy guarantee."
    total = size(sum(row.bytes for row in rows))
    return f"Clients sent {kinds} of array, {total} in all. The server {saw}. {noise}"
