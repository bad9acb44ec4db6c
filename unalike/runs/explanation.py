"""What a finished run promises, in sentences: what is protected from whom, under which assumptions, and what is not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unalike.runs.result import Privacy
from unalike.runs.words import listed, stated


def explain(spent: Privacy, rows: Sequence[Mapping[str, Any]], scaled: bool) -> dict[str, list[str]]:
    """Headings and the sentences under each.

    - ``spent``: the ``privacy`` of a run's result.
    - ``rows``: its transcript, a row for each array that left the clients.
    - ``scaled``: were its inputs scaled by constants?
    """
    bare = list(dict.fromkeys(str(row["array"]) for row in rows if row["noise"] is None))
    protected = [] if spent.epsilon is None else _protected(spent, rows)
    if not protected:
        what = f"{listed(bare)} left the clients without noise" if bare else "nothing states an ε"
        protected = [f"Nobody's data are protected by noise: ε = ∞, because {what}."]
    if any(str(row["seen_as"]).startswith("secure") for row in rows):
        protected.append("Sums under masks hide a client's own array from the server; the sum itself they do not hide.")
    assumed = [] if spent.epsilon is None else _assumed(spent, rows, scaled)
    return {"Protected": protected, "Assumed": assumed, "Not protected": _open(spent)}


def _protected(spent: Privacy, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return ["Nothing left the clients: ε = 0."]
    unit = "one client with all its rows" if spent.unit == "client" else "one row of one client"
    noise, epsilon, delta = spent.noise, spent.epsilon or 0.0, spent.delta
    factor = math.exp(epsilon) if epsilon < 50 else math.inf
    lines = [
        f"Whoever sees the model and the published files (all but simulation/ and clients/) can hardly tell whether "
        f"{unit} took part: ε = {stated(epsilon, noise)} at δ = {delta:.3g}.",
        f"That is: anything that they could see is at most {factor:.3g} times as likely with it as without it, but for "
        f"a probability of {delta:.3g}.",
    ]
    if spent.epsilon_server is not None:
        server = stated(spent.epsilon_server, noise)
        lines.append(f"Against the server, which knows who was drawn in each round, it is ε = {server}.")
    else:
        lines.append(f"Against the server it is ε = ∞: {spent.why_server}.")
    if spent.clients:
        lines.append("Each client declared a budget of its own; the ε above is the largest that one of them spent.")
    return lines


def _assumed(spent: Privacy, rows: Sequence[Mapping[str, Any]], scaled: bool) -> list[str]:
    lines = []
    if spent.noise == "simulated":
        lines.append("The noise is simulated: whoever has the recipe can take it off, so that it protects nobody.")
    if spent.trust == "nobody":
        lines.append("Clients, or the machines where their data are, add the noise as the installed code says.")
    else:
        lines.append("The server is trusted: it adds the noise, and shows nobody the sums before that.")
    if any(row["sampling"] for row in rows):
        lines.append("Who was drawn in a round stays unknown to those who see the model, where sampling amplifies.")
    if any(str(row["seen_as"]).startswith("secure") for row in rows):
        lines.append(
            "In secure sums fewer than half of a client's peers work together with the server, and the server passes "
            "public keys on unchanged; clients that lie about their own arrays are not found out."
        )
    if scaled:
        lines.append("The constants that scale the inputs are public and do not come from these clients' rows.")
    if spent.accepted_delta:
        lines.append("δ is 1/n or more, which was accepted: it would allow to publish somebody's data as it is.")
    return lines


def _open(spent: Privacy) -> list[str]:
    lines = [
        "Who the clients are, their names and declared sizes, and which of them have labels: all of it counts as "
        "public and is in the run's roster, as are the schema, its classes and its columns.",
        "simulation/ (scores, histograms and descriptors of clients) and clients/ (what they kept): no noise protects "
        "them, so do not publish them.",
        "Choices that you made by looking at the data or at scores, such as a learning rate.",
        "Other runs on the same data: their ε add up with this one, also repetitions with other seeds.",
    ]
    if spent.unit == "point":
        lines.append("That a client took part, and what many of its rows have in common: only single rows are hidden.")
    return lines
