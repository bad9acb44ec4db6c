"""The report in words: numbers as people write them, the finding in one sentence, the transcript in plain English."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from unalike.studio.report.read import GROUPS, Run, Sight

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
        return f"{100 * score:.1f}%" if self.percent else f"{score:.3g}"

    def tick(self, score: float) -> str:
        return f"{100 * score:.3g}%" if self.percent else f"{score:.3g}"

    def spread(self, std: float) -> str:
        return f"± {100 * std:.1f}" if self.percent else f"± {std:.2g}"

    def gap(self, difference: float) -> str:
        return f"{100 * difference:.1f} points" if self.percent else f"{difference:.2g}"


def size(count: float) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def duration(seconds: float | None) -> str:
    """Seconds as a clock would tell them."""
    if seconds is None:
        return "—"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def epsilon(value: float | None) -> str:
    """ε as written in tables; infinite means that nothing is guaranteed."""
    if value is None:
        return "not stated"
    return "∞" if math.isinf(value) else f"{value:.3g}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """a, b and c."""
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} others"]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def served(runs: Sequence[Run], group: str) -> list[Run]:
    """The runs with a score for a group, best first."""
    scored = [(summary.mean, run) for run in runs if (summary := run.result.accuracy.of(group))]
    return [run for _, run in sorted(scored, key=lambda pair: -(pair[0] or 0.0))]


def present(runs: Sequence[Run]) -> list[str]:
    """The groups of clients that exist in at least one run."""
    known = {row.group for run in runs for row in run.clients}
    known |= {name for run in runs if run.map for name in run.map.group}
    return [group for group in GROUPS if group in known or served(runs, group)]


def unlike(a: Run, b: Run) -> str:
    """Why the clients of two runs are not the same ones; empty if they are."""
    unknown = [run.label for run in (a, b) if not run.origin]
    if unknown:
        return f"no recipe says how the clients of {listed(unknown)} were made"
    for key in dict.fromkeys([*a.origin, *b.origin]):
        mine, theirs = (run.origin.get(key, "not given") for run in (a, b))
        if mine != theirs:
            return f"{key} is {mine} for {a.label} and {theirs} for {b.label}"
    if a.map and b.map:
        for what in ("names", "group", "n", "label_histogram"):
            if getattr(a.map, what) != getattr(b.map, what):
                return f"the clients of {a.label} and {b.label} differ in their {what.replace('_', ' ')} (clients.json)"
    return ""


def over_unlike_clients(runs: Sequence[Run]) -> str:
    """Why no lead can be claimed among these runs: two are not over the same clients. Empty if all are."""
    return next((why for run in runs[1:] if (why := unlike(runs[0], run))), "")


def differences(a: Run, b: Run, group: str) -> list[float]:
    """a's score minus b's, for every client that both served; none if their clients are not the same."""
    if unlike(a, b):
        return []
    mine, theirs = a.scores(group), b.scores(group)
    return [score - theirs[client] for client, score in mine.items() if client in theirs]


def level(a: Run, b: Run, group: str) -> bool:
    """Is the mean difference between two runs, client by client, within two standard errors, or is that unknown?"""
    gaps = differences(a, b, group)
    if len(gaps) < 2:
        return True
    return abs(statistics.fmean(gaps)) <= 2 * statistics.stdev(gaps) / math.sqrt(len(gaps))


def mean_of(run: Run, group: str) -> float:
    summary = run.result.accuracy.of(group)
    return math.nan if summary is None or summary.mean is None else summary.mean


def leaders(runs: Sequence[Run], group: str) -> list[Run]:
    """The best run on a group and those that are level with it; none if nobody serves the group."""
    ranked = served(runs, group)
    if over_unlike_clients(runs):
        return ranked
    return [run for run in ranked if run is ranked[0] or level(ranked[0], run, group)]


def finding(runs: Sequence[Run], scale: Scale) -> str:
    """The outcome in one sentence."""
    groups = [group for group in GROUPS if served(runs, group)]
    if not groups:
        return f"{listed([run.label for run in runs])}: no client got a score."
    if len(runs) == 1:
        reached = [f"{scale(mean_of(runs[0], group))} on {GROUP_NAMES[group]}" for group in groups]
        return f"{runs[0].label} reaches {listed(reached)}."
    if repeated := _over_repetitions(runs, groups, scale):
        return repeated
    if why := over_unlike_clients(runs):
        return f"No lead is claimed, because these runs are over different clients: {why}."
    first = {group: leaders(runs, group) for group in groups}
    winner = first[groups[0]][0]
    if all(best == [winner] for best in first.values()):
        reached = [f"{scale(mean_of(winner, group))} on {GROUP_NAMES[group]}" for group in groups]
        return f"{winner.label} serves its clients best: {listed(reached)}."
    clauses: dict[str, list[str]] = {}  # who leads how, on which groups
    for group, best in first.items():
        names = listed([run.label for run in best])
        alone = len(served(runs, group)) == 1
        scores = listed([scale(mean_of(run, group)) for run in best])
        if alone:
            says = f"only {names} serves"
        elif len(best) == 1:
            says = f"{names} is best on"
        elif len(best) < len(served(runs, group)):
            says = f"{names} share the lead on"
        else:
            says, scores = "no run is clearly ahead on", f"{best[0].label}: {scale(mean_of(best[0], group))}"
        clauses.setdefault(says, []).append(f"{GROUP_NAMES[group]} ({scores})")
    sentence = "; ".join(f"{says} {listed(where)}" for says, where in clauses.items()) + "."
    return sentence[0].upper() + sentence[1:] if sentence.startswith(("only ", "no run ")) else sentence


def _over_repetitions(runs: Sequence[Run], groups: Sequence[str], scale: Scale) -> str:
    """Who leads each time, where the same methods were run several times, over other clients each; else nothing."""
    times = over_same_clients(runs)
    methods = [sorted(run.result.method for run in same) for same in times]
    if len(times) < 2 or len(set(methods[0])) < 2 or any(names != sorted(set(methods[0])) for names in methods):
        return ""
    clauses = []
    for group in groups:
        first = {tuple(run.result.method for run in leaders(same, group)) for same in times}
        best = first.pop()
        if first or len(best) != 1:
            clauses.append(f"no method leads on {GROUP_NAMES[group]} in all {len(times)} repetitions")
            continue
        mean = statistics.fmean(mean_of(run, group) for run in served(runs, group) if run.result.method == best[0])
        clauses.append(f"{best[0]} is best on {GROUP_NAMES[group]} in all {len(times)} repetitions ({scale(mean)})")
    sentence = "; ".join(clauses) + "."
    return sentence[0].upper() + sentence[1:] if sentence.startswith("no method") else sentence


def details(runs: Sequence[Run], scale: Scale) -> list[str]:
    """What one would ask next: by how much, for how many clients, how bad for the worst, how private."""
    lines = []
    for same in over_same_clients(runs):
        for group in GROUPS:
            ranked = served(same, group)
            if not ranked:
                continue
            best = ranked[0]
            rest = [run for run in ranked[1:] if not level(best, run, group)] or ranked[1:]
            if rest:
                lines.append(_lead(best, rest[0], group, scale))
            summary = best.result.accuracy.of(group)
            if len(runs) == 1 and summary and summary.p10 is not None:
                lines.append(f"The 10th percentile of {GROUP_NAMES[group]} is {scale(summary.p10)}.")
    lines.append(privacy_sentence(runs))
    return lines


def over_same_clients(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs, sorted into those that are over the same clients."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if not unlike(group[0], run):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _lead(best: Run, second: Run, group: str, scale: Scale) -> str:
    """By how much one run is above another, and for how many clients."""
    gaps = differences(best, second, group)
    lead = scale.gap(mean_of(best, group) - mean_of(second, group))
    better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    counted = f"better for {better} of {len(gaps)} clients, worse for {worse}" if gaps else "no client is in both"
    chance = "; that may be chance" if level(best, second, group) else ""
    return f"On {GROUP_NAMES[group]}, {best.label} is {lead} above {second.label}: {counted}{chance}."


def privacy_sentence(runs: Sequence[Run]) -> str:
    """Who is protected, and how well."""
    parts = []
    for run in runs:
        privacy = run.result.privacy
        if privacy.epsilon is not None and math.isfinite(privacy.epsilon):
            if privacy.epsilon == 0:
                parts.append(f"{run.label} releases nothing (ε = 0)")
                continue
            delta = f", δ = {privacy.delta:.2g}" if privacy.delta else ""
            unit = f" for each {'data point' if privacy.unit == 'point' else 'client'}" if privacy.unit else ""
            parts.append(f"{run.label} spends ε = {epsilon(privacy.epsilon)}{delta}{unit}")
    if not parts:
        return "No differential privacy: what clients sent carried no noise."
    open_runs = [run.label for run in runs if run.result.privacy.epsilon in (None, math.inf)]
    ends = f"; {listed(open_runs)} {'gives' if len(open_runs) == 1 else 'give'} no guarantee" if open_runs else ""
    return f"Privacy: {listed(parts, 9)}{ends}."


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
            return found.expand(words)
    return written


SEEN_AS = {
    "individual": ("Each client's own", "open", "The server sees the array of every single client."),
    "sum": ("Sum only", "trusted", "Only the sum is kept; the server is trusted to add without looking."),
    "mean": ("Mean only", "trusted", "Only the mean is kept; the server is trusted to add without looking."),
    "secure sum": (
        "Sum only, masked",
        "hidden",
        "Arrays are masked at the clients; the server can learn only their sum.",
    ),
    "secure mean": (
        "Mean only, masked",
        "hidden",
        "Arrays are masked at the clients; the server can learn only their mean.",
    ),
}


def transcript_summary(run: Run) -> str:
    """What a privacy officer wants to know first."""
    rows = [row for row in run.transcript or () if row.note != "simulation only"]
    if not rows:
        return "Nothing left the clients in this run."
    single = sorted({row.array for row in rows if row.seen_as == "individual"})
    bare = sorted({row.array for row in rows if row.noise is None})
    kinds = len({row.array for row in rows})
    parts = [
        f"Clients sent {kinds} kind{'s' if kinds > 1 else ''} of array, {size(sum(row.bytes for row in rows))} in all."
    ]
    if single:
        parts.append(f"The server saw {listed(single)} of each client individually.")
    else:
        parts.append("The server used no client's array individually, only sums or means.")
    if bare:
        parts.append(f"Sent without noise: {listed(bare)}; so there is no differential privacy guarantee.")
    else:
        parts.append("Everything carried noise.")
    return " ".join(parts)
