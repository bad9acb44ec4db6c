"""The transcript in plain English: which arrays left the clients, and how the server saw them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from unalike.report.page.read import Run, Sight
from unalike.runs.words import counted, listed, size, stated

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


class View(NamedTuple):
    """How the server saw an array: in a few words, how open that is, and in a sentence."""

    says: str
    kind: str
    meaning: str


def rows(run: Run) -> list[dict[str, Any]]:
    """What the page writes of each line of the transcript."""
    found = []
    for one in run.transcript or ():
        senders = one.replies / max(one.times, 1)
        rounds = f"round {one.first}" if one.first == one.last else f"rounds {one.first}–{one.last}"
        noise, epsilon = "none", "∞"
        if one.noise is not None:
            protects = f" (protects one {'data point' if one.unit == 'point' else 'client'})"
            noise = describe(one.noise) + (protects if one.unit else "")
            epsilon = f"in the total of {stated(run.result.privacy.epsilon, run.result.privacy.noise)}"
        form = f" ({' × '.join(map(str, one.shape))})" if len(one.shape) > 1 else ""
        found.append(
            {
                "array": one.array,
                "task": one.task,
                "numbers": f"{math.prod(one.shape):,}{form}",  # that one client sends
                "senders": f"{senders:,.0f}" if senders == int(senders) else f"{senders:,.1f} on average",
                "sampling": "" if one.sampling is None else describe(one.sampling),
                "rounds": "before round 1" if one.last == 0 else rounds,
                "often": {1: "once", 2: "twice"}.get(one.times, f"{one.times:,} times"),
                "view": view_of(one, run.result.privacy.trust),
                "clip": "no limit" if one.clip is None else f"length {one.clip:g}",
                "noise": noise,
                "epsilon": "none" if one.note == "simulation only" else epsilon,
                "bytes": size(one.bytes),
                "note": one.note or "—",
            }
        )
    return found


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


def view_of(sight: Sight, trust: str | None = None) -> View:
    """How the server saw an array in a run with this ``trust``."""
    kind = sight.seen_as.removeprefix("secure ")
    if kind == "individual":
        return View("Each client's own", "open", "The server sees the array of every single client.")
    if kind not in ("sum", "mean"):
        return View(kind, "trusted", "As the run's own code names it.")
    only = f"{kind.capitalize()} only"
    if kind != sight.seen_as:
        return View(
            f"{only}, masked", "hidden", f"Arrays are masked at the clients; the server can learn only their {kind}."
        )
    if sight.noise is not None and trust == "nobody":
        return View(
            f"{only}, with noise",
            "hidden",
            f"Noise is added before the {kind} reaches the server, which never sees it without.",
        )
    return View(only, "trusted", f"Only the {kind} is kept; the server is trusted to add without looking.")


def meanings(runs: Sequence[Run]) -> list[View]:
    """What ``view_of`` says of these runs, each once."""
    return sorted({view_of(row, run.result.privacy.trust) for run in runs for row in run.transcript or ()})


def summary(run: Run) -> str:
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
