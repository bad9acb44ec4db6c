"""The report in words: the finding in one line, what one would ask next, the transcript in plain English."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from unalike.studio.report.read import Run, Sight
from unalike.studio.runs.result import GROUPS
from unalike.studio.words import counted, listed, share, size, stated

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


def served(runs: Sequence[Run], group: str) -> list[Run]:
    """The runs with a score for a group, best first."""
    return sorted((run for run in runs if run.result.accuracy.of(group)), key=lambda run: -mean_of(run, group))


def present(runs: Sequence[Run]) -> list[str]:
    """The groups of clients that exist in at least one run."""
    known = {row.group for run in runs for row in run.clients}
    known |= {name for run in runs if run.map for name in run.map.group}
    return [group for group in GROUPS if group in known or served(runs, group)]


def unlike(a: Run, b: Run) -> str:
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


def over_same_clients(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs, sorted into those that are over the same clients."""
    groups: list[list[Run]] = []
    for run in runs:
        same = next((group for group in groups if not unlike(group[0], run)), None)
        if same is None:
            groups.append(same := [])
        same.append(run)
    return groups


def differences(a: Run, b: Run, group: str) -> list[float]:
    """a's score minus b's, for every client that both served; none if their clients are not the same."""
    mine, theirs = a.scores(group), {} if unlike(a, b) else b.scores(group)
    return [score - theirs[client] for client, score in mine.items() if client in theirs]


def level(a: Run, b: Run, group: str) -> bool:
    """Is the mean difference between two runs, client by client, within two standard errors, or is that unknown?"""
    gaps = differences(a, b, group)
    if len(gaps) < 2:
        return True
    return abs(statistics.fmean(gaps)) <= 2 * statistics.stdev(gaps) / math.sqrt(len(gaps))


def leaders(runs: Sequence[Run], group: str) -> list[Run]:
    """The best run on a group and those that are level with it; none if nobody serves the group."""
    ranked = served(runs, group)
    if len(over_same_clients(runs)) > 1:
        return ranked
    return [run for run in ranked if run is ranked[0] or level(ranked[0], run, group)]


NO_SCORES = "Scores were not handed on with this run: no noise protects them"


def finding(runs: Sequence[Run], scale: Scale) -> str:
    """The outcome in one line: of the first group of clients that anybody serves; ``details`` has the others."""
    group = next((group for group in GROUPS if served(runs, group)), None)
    if group is None:
        return NO_SCORES if any(run.withheld for run in runs) else "No client got a score"
    if len(runs) == 1:
        return f"{runs[0].label} reaches {scale(mean_of(runs[0], group))} on {GROUP_NAMES[group]}"
    if repeated := _over_repetitions(runs, group, scale):
        return repeated
    if len(over_same_clients(runs)) > 1:
        return "No lead is claimed: these runs are over different clients"
    return _standing(runs, group, scale)


def _standing(runs: Sequence[Run], group: str, scale: Scale) -> str:
    """Who is ahead on a group of clients."""
    best, everybody = leaders(runs, group), served(runs, group)
    names, where = listed([run.label for run in best], 3), GROUP_NAMES[group]
    score = scale(mean_of(best[0], group))
    if len(everybody) == 1:
        return f"Only {names} serves {where}: {score}"
    if len(best) == 1:
        return f"{names} is best on {where}: {score}"
    if len(best) < len(everybody):
        scores = listed([f"{run.label} ({scale(mean_of(run, group))})" for run in best], 2)
        return f"{scores} share the lead on {where}"
    return f"No run is clearly ahead on {where}: {best[0].label} has {score}"


def _over_repetitions(runs: Sequence[Run], group: str, scale: Scale) -> str:
    """Who leads each time, where the same methods were run several times, over other clients each; else nothing."""
    times = over_same_clients(runs)
    methods = [sorted(run.result.method for run in same) for same in times]
    if len(times) < 2 or len(set(methods[0])) < 2 or any(names != sorted(set(methods[0])) for names in methods):
        return ""
    first = {tuple(run.result.method for run in leaders(same, group)) for same in times}
    best = first.pop()
    if first or len(best) != 1:
        return f"No method leads on {GROUP_NAMES[group]} in all {len(times)} repetitions"
    mean = statistics.fmean(mean_of(run, group) for run in served(runs, group) if run.result.method == best[0])
    return f"{best[0]} is best on {GROUP_NAMES[group]} in all {len(times)} repetitions: {scale(mean)}"


def details(runs: Sequence[Run], scale: Scale) -> list[str]:
    """What one would ask next: the other groups, by how much, for how many clients, how private."""
    groups, times = [group for group in GROUPS if served(runs, group)], over_same_clients(runs)
    if len(runs) == 1:
        lines = []
        for group in groups:
            if summary := runs[0].result.accuracy.of(group):
                reached = f"{scale(summary.mean)} on average, {scale(summary.p10)} at the 10th percentile"
                lines.append(f"{GROUP_NAMES[group].capitalize()}: {reached}.")
    elif len(times) == 1:
        lines = [f"On {GROUP_NAMES[group]}, {lead}." for group in groups[:1] if (lead := _lead(runs, group, scale))]
        for group in groups[1:]:
            lines.append("; ".join(filter(None, (_standing(runs, group, scale), _lead(runs, group, scale)))) + ".")
    else:
        why = unlike(times[0][0], times[1][0])
        repeated = [line for group in groups if (line := _over_repetitions(runs, group, scale))]
        lines = [f"{line}." for line in repeated[1:]] if repeated else [f"{why[0].upper()}{why[1:]}."]
        leads = [(group, _lead(same, group, scale)) for same in times for group in groups]
        lines += [f"On {GROUP_NAMES[group]}, {lead}." for group, lead in leads if lead]
    return [*lines, privacy_sentence(runs)]


def _lead(runs: Sequence[Run], group: str, scale: Scale) -> str:
    """By how much the best run is above the next that is not level with it, and for how many clients."""
    ranked = served(runs, group)
    rest = [run for run in ranked[1:] if not level(ranked[0], run, group)] or ranked[1:]
    if not rest:
        return ""
    best, second = ranked[0], rest[0]
    gaps = differences(best, second, group)
    lead = scale.gap(mean_of(best, group) - mean_of(second, group))
    better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    of = f"better for {better} of {counted(len(gaps), 'client')}, worse for {worse}"
    of = of if gaps else "no client has a score in both"
    chance = "; that may be chance" if level(best, second, group) else ""
    return f"{best.label} is {lead} above {second.label}: {of}{chance}"


def privacy_sentence(runs: Sequence[Run]) -> str:
    """Who is protected, and how well."""
    parts = []
    for run in runs:
        privacy = run.result.privacy
        if privacy.epsilon == 0:
            parts.append(f"{run.label} releases nothing (ε = 0)")
        elif bounded(run):
            delta = f", δ = {privacy.delta:.2g}" if privacy.delta else ""
            unit = f" for each {'data point' if privacy.unit == 'point' else 'client'}" if privacy.unit else ""
            server = stated(privacy.epsilon_server, privacy.noise)
            against = f"; against the server ε = {server}, trust: {privacy.trust}" if privacy.trust else ""
            spends = f"ε = {stated(privacy.epsilon, privacy.noise)}{delta}{unit} against readers of the model{against}"
            accepted = "; δ is 1/n or more, which was accepted" if privacy.accepted_delta else ""
            parts.append(f"{run.label} spends {spends}{accepted}")
    if not parts:
        return "No differential privacy: what clients sent carried no noise."
    rest = [run.label for run in runs if not bounded(run)]
    ends = f"; {listed(rest)} {'gives' if len(rest) == 1 else 'give'} no guarantee" if rest else ""
    return f"Privacy: {listed(parts, 9)}{ends}."


def bounded(run: Run) -> bool:
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


def spent(sight: Sight, run: Run) -> str:
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
    return spoken(sight.noise) + unit


_WORDS = (
    (r"FixedSize\(size=(\d+), population=(\d+)\)", r"\1 of \2, drawn at random"),
    (r"Poisson\(rate=([\d.e+-]+)\)", r"each with probability \1"),
    (r"Everyone\(.*\)", "all that were asked"),
    (r"Local\(.*\)", "each for itself"),
    (r"Gaussian\(noise_multiplier=([\d.e+-]+)\)", r"Gaussian, \1 times the bound"),
    (r"DP-SGD\(noise_multiplier=([\d.e+-]+)\)", r"DP-SGD, \1 times the clip in each step"),
    (r"DP-SGD\(noise by client\)", "DP-SGD, each client's own noise"),
    (r"Laplace\(epsilon=([\d.e+-]+)\)", r"Laplace for ε = \1"),
    (r"RandomizedResponse\(epsilon=([\d.e+-]+), .*\)", r"randomized response for ε = \1"),
)


def spoken(written: str) -> str:
    """A way of sampling or a kind of noise in words; one without words of its own stays as it was written."""
    for pattern, words in _WORDS:
        if found := re.fullmatch(pattern, written):
            return re.sub(r"\d+\.\d{5,}", lambda number: f"{float(number[0]):.4g}", found.expand(words))
    return written


def seen_as(sight: Sight, trust: str | None = None) -> tuple[str, str, str]:
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
    """What ``seen_as`` says of these runs, each once."""
    return sorted({seen_as(row, run.result.privacy.trust) for run in runs for row in run.transcript or ()})


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
