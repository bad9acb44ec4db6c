"""The ledger records every release and says what it has cost; a budget stops an ask before it is sent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from unalike.privacy.account import (
    BARE,
    NOTHING,
    Account,
    Event,
    NonPrivate,
    Unaccountable,
    account,
    combine,
    is_bare,
    leaves,
)
from unalike.privacy.checks import check_delta, check_epsilon
from unalike.privacy.sampling import (
    Everyone,
    FixedSize,
    Local,
    Poisson,
    Relation,
    Sampling,
    decode_sampling,
    encode_sampling,
)

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Unit = Literal["client", "point"]
ClientId = int | str
CohortId = int | str

_SAVED_BARE = {"kind": "non_private"}  # in a checkpoint

# If the sampled sum shows that a client took part, whoever sees it is as sure of one of its points as without sampling.
_POINTS_OF_A_SAMPLE = (
    "no amplification is claimed for points by the sampling of clients: a client that takes part may be recognised by "
    "its other points; accounted as if every client had taken part"
)


@dataclass(frozen=True)
class Charge:
    """One release as the ledger sees it.

    ``cohort`` names the sample that it was made of: all releases of one cohort are composed inside its one sampling;
    without a name the sample counts as fresh. ``clients``: the release depends on the data of these clients alone, each
    on its own (local DP-SGD, local noise). ``newcomers``: likewise, for clients that took no part in the run before.
    ``members``: who is in the sample, where the noise was added before the server saw anything; "all" is everybody.
    None: the server saw the array without its noise.
    """

    event: Event
    unit: Unit = "client"
    sampling: Sampling = Everyone()
    cohort: CohortId | None = None
    clients: tuple[ClientId, ...] | None = None
    newcomers: tuple[ClientId, ...] | None = None
    members: tuple[ClientId, ...] | Literal["all"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.event, NonPrivate):
            from dp_accounting import DpEvent

            if not isinstance(self.event, DpEvent):
                raise TypeError(f"expected a DpEvent, got {self.event!r}; ask the mechanism for its event()")
        if self.unit not in ("client", "point"):
            raise ValueError(f"unit must be 'client' or 'point', got {self.unit!r}; say whom the noise protects")
        if self.is_own and not isinstance(self.sampling, Everyone | Local):
            raise Unaccountable(
                f"a release of named clients is not hidden in a sample, got {self.sampling}; use sampling=Local()"
            )

    @property
    def is_own(self) -> bool:
        """Does it touch named clients only?"""
        return self.clients is not None or self.newcomers is not None

    @property
    def relation(self) -> Relation | None:
        """The neighbours that the sampling implies; between points it is those that the sensitivity was made for."""
        return self.sampling.relation if self.unit == "client" else None

    @property
    def is_bare(self) -> bool:
        """Does it release something without protection?"""
        return any(isinstance(leaf, NonPrivate) for leaf, _ in leaves(self.event))


class Ledger:
    """What a run has released so far, and the ε of it.

    A ledger speaks about one unit (a client's whole data or one data point) and one neighbouring relation; the first
    private release fixes both unless they are given. Releases that touch everybody are shared; releases of named
    clients (``clients=``) are kept for those alone, and those of newcomers, whose data was in no earlier release, apart
    from both. Its size grows with the different events, the cohorts and the named clients, not with the population.

    There are two accounts. ``epsilon`` is for whoever sees what was released: the sampling of clients amplifies it.
    ``server_epsilon`` is for a server that knows who was drawn: each client pays for every release that it was in, in
    full. How often each was drawn is in memory only, because it would tell a reader of a saved ledger who was; what is
    saved is the most that anybody was drawn.
    """

    def __init__(self, unit: Unit | None = None, relation: Relation | None = None) -> None:
        if unit not in (None, "client", "point"):
            raise ValueError(f"unit must be 'client' or 'point', got {unit!r}; say whom the guarantee is for")
        self.unit = unit
        self.relation = relation
        self.notes: list[str] = []  # what was accounted more carefully than one might expect, and why
        self._shared: Account = NOTHING
        self._cohorts: dict[CohortId, tuple[Sampling, Account]] = {}  # what one and the same sample was asked
        self._clients: dict[ClientId, Account] = {}
        self._newcomers: dict[ClientId, Account] = {}
        self._seen = False  # did the server see something without its noise?
        self._of_all: Account = NOTHING  # against the server, of everybody
        self._drawn: dict[Event, Counter[ClientId]] = {}  # against the server: in how many such releases each was

    def record(self, event: Event, **about: Any) -> None:
        """Add one release; ``about`` is what a ``Charge`` says besides its event, with any iterable of clients."""
        for name in ("clients", "newcomers", "members"):
            if about.get(name) not in (None, "all"):
                about[name] = tuple(about[name])
        self._record(Charge(event, **about))

    def charge(
        self, charges: Iterable[Charge], budget: Budget | None = None, own: Mapping[ClientId, Budget] | None = None
    ) -> None:
        """Add the releases of one ask, all or none: ``BudgetExceeded`` if together they cost more than the budget, or a
        client more than its ``own``.
        """
        after = self.after(charges)
        if budget is not None:
            budget.compare(self, after)
        for client, limit in (own or {}).items():
            limit.compare(self, after, client)
        vars(self).update(vars(after))

    def after(self, charges: Iterable[Charge]) -> Ledger:
        """The ledger as it would be after these releases; this one stays as it is."""
        planned = Ledger()
        vars(planned).update({name: copy(value) for name, value in vars(self).items()})
        for charge in charges:
            planned._record(charge)
        return planned

    def close_cohorts(self) -> None:
        """Forget which samples are open: none of them is asked again, so the ledger need not grow with the rounds."""
        self._cohorts.clear()

    def epsilon(self, delta: float, *, client: ClientId | None = None, newcomer: ClientId | None = None) -> float:
        """ε so far: the largest over all clients of the run, or that of one client or newcomer."""
        return _largest_epsilon(self._of(client, newcomer), delta)

    def delta(self, epsilon: float, *, client: ClientId | None = None, newcomer: ClientId | None = None) -> float:
        """δ at this ε: the largest over all clients of the run, or that of one client or newcomer."""
        from unalike.privacy import accountant

        return max(accountant.delta(each, epsilon) for each in self._of(client, newcomer))

    def epsilons(self, delta: float) -> dict[ClientId, float]:
        """ε of every client that has releases of its own; all others have ``epsilon(delta, client=...)`` alike."""
        return {client: self.epsilon(delta, client=client) for client in self._clients}

    def worst(self, delta: float, coarseness: int = 1) -> float:
        """The largest ε of anybody, newcomers included; a ``coarseness`` above 1 is faster and errs upwards."""
        return _largest_epsilon(self._everybody(), delta, coarseness)

    def worst_off(self, delta: float) -> Ledger:
        """What somebody has paid who is the worst off, as a ledger that names nobody."""
        from unalike.privacy import accountant

        found = Ledger(self.unit, self.relation)
        found._shared = max(self._everybody(), key=lambda spent: accountant.quick_bound(spent, delta))
        return found

    def server_epsilon(self, delta: float, *, client: ClientId | None = None) -> float:
        """ε against a server that knows who was drawn: the largest over all clients, or that of one.

        Infinite where the server saw something without its noise, as it does where it adds the noise itself.
        """
        if self._seen:
            return math.inf
        return _largest_epsilon(self._against_server(client), delta)

    def event(self, *, client: ClientId | None = None) -> DpEvent:
        """Everything shared (and one client's own) as one dp_accounting event, to check ε elsewhere."""
        from unalike.privacy.events import compose

        own = NOTHING if client is None else self._clients.get(client, NOTHING)
        return compose(tuple(combine(self._shared, own)))

    @property
    def method(self) -> str:
        """How ε is computed for what is shared: analytic Gaussian, PLD, RDP, or non-private."""
        if not self._shared:
            return "nothing released"
        if is_bare(self._shared):
            return "non-private"
        from unalike.privacy import accountant

        return accountant.method(self._shared)

    def __add__(self, other: Ledger) -> Ledger:
        """Two runs on the same population, composed; a sample of one run is independent of those of the other."""
        total = Ledger.from_state(self.state())
        for name in ("unit", "relation"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine and theirs and mine != theirs:
                raise Unaccountable(
                    f"cannot compose a ledger of {name} {mine!r} with one of {theirs!r}; use one {name} in both"
                )
            setattr(total, name, mine or theirs)
        total._shared = combine(self._shared, other._shared)
        total._seen, total._of_all = self._seen or other._seen, combine(self._of_all, other._of_all)
        for event in {**self._drawn, **other._drawn}:
            total._drawn[event] = self._drawn.get(event, Counter()) + other._drawn.get(event, Counter())
        total.notes += [note for note in other.notes if note not in total.notes]
        for mine, theirs in ((total._clients, other._clients), (total._newcomers, other._newcomers)):
            for identity, own in theirs.items():
                mine[identity] = combine(mine.get(identity, NOTHING), own)
        return total

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and vars(self) == vars(other)

    # What a record does

    def _record(self, charge: Charge) -> None:
        self._refuse_other_meaning(charge)
        if charge.is_own:
            _add_to(self._clients, charge.clients or (), charge.event)
            _add_to(self._newcomers, charge.newcomers or (), charge.event)
        elif charge.unit == "point" and _amplifies(charge.sampling):
            self._share(charge.event, Everyone(), None, [_POINTS_OF_A_SAMPLE])
        else:
            self._share(charge.event, charge.sampling, charge.cohort, [])
        if not charge.is_own:
            self._show_server(charge)
        if not charge.is_bare:
            self.unit = self.unit or charge.unit
            self.relation = self.relation or charge.relation

    def _share(self, event: Event, sampling: Sampling, cohort: CohortId | None, notes: list[str]) -> None:
        """Add a release that touches everybody."""
        if cohort is None or not _amplifies(sampling):
            made, more = _sampled(_within(NOTHING, event), sampling)
            self._shared = combine(self._shared, made)
        else:
            known, asked = self._cohorts.get(cohort, (sampling, NOTHING))
            if known != sampling:
                raise Unaccountable(
                    f"cohort {cohort!r} was drawn by {known}, now came {sampling}; give each cohort its own name"
                )
            before, _ = _sampled(asked, sampling)
            self._cohorts[cohort] = sampling, _within(asked, event)
            after, more = _sampled(_within(asked, event), sampling)
            counts = dict(self._shared)
            for part, count in before:
                counts[part] -= count
            self._shared = combine(account((part, count) for part, count in counts.items() if count), after)
        self.notes += [note for note in [*notes, *more] if note not in self.notes]

    def _show_server(self, charge: Charge) -> None:
        """Add what the server got to see, whose sample is no secret to it."""
        if charge.members is None or charge.is_bare:
            self._seen = True
        elif charge.members == "all":
            self._of_all = _within(self._of_all, charge.event)
        else:
            drawn = Counter(self._drawn.get(charge.event))  # a copy: the ledger before this release stays as it was
            drawn.update(charge.members)
            self._drawn[charge.event] = drawn

    def _against_server(self, client: ClientId | None = None) -> set[Account]:
        who = {client} if client is not None else {one for drawn in self._drawn.values() for one in drawn}
        who |= set(self._clients) if client is None else set()
        kinds = {
            (self._clients.get(one, NOTHING), tuple((event, drawn[one]) for event, drawn in self._drawn.items()))
            for one in who
        }
        accounts = {combine(self._of_all, own, account(part for part in parts if part[1])) for own, parts in kinds}
        return accounts | ({self._of_all} if client is None else set())

    def _most_drawn(self) -> Account:
        """What nobody was in more often, to be saved: it names no client."""
        most = account((event, max(drawn.values())) for event, drawn in self._drawn.items() if drawn)
        return combine(self._of_all, most)

    def _of(self, client: ClientId | None, newcomer: ClientId | None) -> set[Account]:
        if client is not None and newcomer is not None:
            raise ValueError(f"give a client or a newcomer, got both ({client!r}, {newcomer!r})")
        if newcomer is not None:
            return {self._newcomers.get(newcomer, NOTHING)}
        if client is not None:
            return {combine(self._shared, self._clients.get(client, NOTHING))}
        return {combine(self._shared, own) for own in {NOTHING, *self._clients.values()}}

    def _everybody(self) -> set[Account]:
        return {*self._of(None, None), *self._newcomers.values()}

    def _refuse_other_meaning(self, charge: Charge) -> None:
        """Refuse noise that protects another unit, or between other neighbours, than the ledger speaks about."""
        if charge.is_bare:
            return  # it reveals everything: unit and relation make no difference
        unit, relation = charge.unit, charge.relation
        if self.unit is not None and unit != self.unit:
            raise Unaccountable(
                f"this ledger protects one {self.unit}, but the release bounds the effect of one {unit}; noise for one "
                "says nothing about the other: use the same unit in every release, or a ledger for each"
            )
        if self.relation is not None and relation not in (None, self.relation):
            raise Unaccountable(
                f"this ledger's neighbours are {self.relation!r}, but {charge.sampling} is {relation!r}; a "
                "sensitivity of one does not hold for the other: use Poisson cohorts with Everyone('add_remove'), or "
                "fixed-size cohorts with Everyone('replace_one')"
            )

    # Checkpoint

    def state(self) -> dict[str, Any]:
        """The ledger as plain dicts, lists, strings and numbers, for a checkpoint."""
        table: dict[Event, int] = {}

        def plain(released: Account) -> list[list[int]]:
            return sorted([table.setdefault(event, len(table)), count] for event, count in sorted(released, key=repr))

        def grouped(owners: dict[ClientId, Account]) -> list[Any]:
            groups: dict[Account, list[ClientId]] = {}
            for identity, released in owners.items():
                groups.setdefault(released, []).append(identity)
            return [[plain(released), identities] for released, identities in groups.items()]

        state: dict[str, Any] = {
            "unit": self.unit,
            "relation": self.relation,
            "notes": list(self.notes),
            "shared": plain(self._shared),
            "cohorts": [[name, encode_sampling(how), plain(asked)] for name, (how, asked) in self._cohorts.items()],
            "clients": grouped(self._clients),
            "newcomers": grouped(self._newcomers),
            "server": {"seen": self._seen, "most": plain(self._most_drawn())},
        }
        return {**state, "events": [_encode(event) for event in table]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Ledger:
        """The ledger that ``state`` was taken of; what is recorded from here on composes with it."""
        table = [_decode(plain) for plain in state["events"]]

        def released(plain: list[list[int]]) -> Account:
            return account((table[index], count) for index, count in plain)

        ledger = cls(state["unit"], state["relation"])
        ledger.notes = list(state["notes"])
        ledger._shared = released(state["shared"])
        ledger._cohorts = {name: (decode_sampling(how), released(asked)) for name, how, asked in state["cohorts"]}
        for owners, saved in ((ledger._clients, state["clients"]), (ledger._newcomers, state["newcomers"])):
            for plain, identities in saved:
                own = released(plain)
                owners.update(dict.fromkeys(identities, own))
        against = state.get("server")  # a ledger of before there was one: the server had seen all
        ledger._seen = bool(ledger._shared) if against is None else bool(against["seen"])
        ledger._of_all = NOTHING if against is None else released(against["most"])
        return ledger


def epsilon_together(ledgers: Sequence[Ledger], delta: float) -> float:
    """ε of several runs on the same data, for somebody who is the worst off in each of them."""
    from unalike.privacy import accountant

    return accountant.epsilon(combine(*(one.worst_off(delta)._shared for one in ledgers)), delta)


@dataclass(frozen=True)
class Budget:
    """The most that a run may cost: ε at this δ."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)

    def check(self, ledger: Ledger, *planned: Charge) -> None:
        """Raise ``BudgetExceeded`` if the planned releases would cost too much; nothing is recorded."""
        self.compare(ledger, ledger.after(planned))

    def compare(self, before: Ledger, after: Ledger, client: ClientId | None = None) -> None:
        """Raise ``BudgetExceeded`` if ``after`` costs more than the budget: anybody, or this client."""
        if not self.allows(after, client):
            whose = "" if client is None else f" of client {client}"
            raise BudgetExceeded(self, self._cost(before, client), self._cost(after, client), whose)

    def allows(self, ledger: Ledger, client: ClientId | None = None) -> bool:
        """Does all that is in the ledger cost no more than this: anybody, or this client?"""
        of = ledger._everybody() if client is None else ledger._of(client, None)
        return not any(is_bare(one) for one in of) and all(_fits(one, self.epsilon, self.delta) for one in of if one)

    def _cost(self, ledger: Ledger, client: ClientId | None) -> float:
        return ledger.worst(self.delta) if client is None else ledger.epsilon(self.delta, client=client)

    def remaining(self, ledger: Ledger) -> float:
        """Budgeted ε minus spent ε, at least 0; not additive, so only a measure of how far one is."""
        return max(0.0, self.epsilon - ledger.worst(self.delta))


def _fits(released: Account, epsilon: float, delta: float) -> bool:
    """Does this cost at most ε at δ? The bounds come in the order of their speed; only the last is tight."""
    from unalike.privacy import accountant

    return (
        accountant.quick_bound(released, delta) <= epsilon
        or accountant.epsilon(released, delta, 16) <= epsilon
        or accountant.epsilon(released, delta) <= epsilon
    )


class BudgetExceeded(RuntimeError):
    """The next release would cost more than the budget; it was not sent."""

    def __init__(self, budget: Budget, spent: float, after: float, whose: str = "") -> None:
        advice = (
            "the ask has no noise, so give it a release with clip and noise"
            if math.isinf(after)
            else "stop here, raise the noise, or plan fewer rounds"
        )
        super().__init__(
            f"the budget{whose} is ε = {budget.epsilon:g} at δ = {budget.delta:g}; {spent:.4g} is spent and the next "
            f"ask would make it {after:.4g}; nothing was sent: {advice}"
        )
        self.budget, self.spent, self.after = budget, spent, after


def _largest_epsilon(accounts: set[Account], delta: float, coarseness: int = 1) -> float:
    check_delta(delta)
    if any(is_bare(one) for one in accounts):
        return math.inf
    if not any(accounts):
        return 0.0
    from unalike.privacy import accountant

    return accountant.largest(accounts, delta, coarseness)


def _encode(event: Event) -> dict[str, Any]:
    if isinstance(event, NonPrivate):
        return dict(_SAVED_BARE)
    from unalike.privacy.events import encode_event

    return encode_event(event)


def _decode(plain: dict[str, Any]) -> Event:
    if plain == _SAVED_BARE:
        return BARE
    from unalike.privacy.events import decode_event

    return decode_event(plain)


def _amplifies(sampling: Sampling) -> bool:
    return isinstance(sampling, Poisson | FixedSize)


def _within(asked: Account, event: Event) -> Account:
    return combine(asked, account([(event, 1)]))


def _add_to(owners: dict[ClientId, Account], identities: Iterable[ClientId], event: Event) -> None:
    after: dict[Account, Account] = {}  # clients with the same history share one account
    for identity in identities:
        before = owners.get(identity, NOTHING)
        if before not in after:
            after[before] = _within(before, event)
        owners[identity] = after[before]


def _sampled(asked: Account, sampling: Sampling) -> tuple[Account, list[str]]:
    """What one sample was asked, as events of the whole population, and a note where amplification is not claimed."""
    parts = tuple(asked)
    if not parts or not _amplifies(sampling):
        return asked, []
    if is_bare(asked):
        return account([(BARE, 1)]), []
    import dp_accounting

    from unalike.privacy.events import merge_gaussians, poisson_sampled

    match sampling:
        case Poisson(rate) if not any(
            isinstance(e, dp_accounting.PoissonSampledDpEvent | dp_accounting.ZCDpEvent) for e, _ in parts
        ):
            return account([(poisson_sampled(rate, parts), 1)]), []
        case FixedSize(size, population) if size == population:
            return asked, []
        case FixedSize(size, population):
            gaussian = merge_gaussians(parts)
            if gaussian is not None:
                sampled = dp_accounting.SampledWithoutReplacementDpEvent(population, size, gaussian)
                return account([(sampled, 1)]), []
    names = sorted({type(event).__name__.removesuffix("DpEvent") for event, _ in parts})
    note = (
        f"no amplification is claimed for {' + '.join(names)} in a sample drawn by {sampling}: accounted as if "
        "everybody had taken part (Poisson cohorts amplify every mechanism, fixed-size cohorts only Gaussian noise)"
    )
    return asked, [note]
