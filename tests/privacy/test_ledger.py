"""The ledger: its ε is dp_accounting's for the same events, over cohorts, clients, checkpoints and repeated runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import dp_accounting as dp
import pytest
from dp_accounting import DpEvent, NeighboringRelation
from hypothesis import given, settings
from hypothesis import strategies as st

from unalike.privacy import (
    BARE,
    Budget,
    BudgetExceeded,
    Charge,
    Everyone,
    Exponential,
    FixedSize,
    Gaussian,
    Laplace,
    Ledger,
    Local,
    Poisson,
    RandomizedResponse,
    Sampling,
    Unaccountable,
    losses,
)
from unalike.privacy.account import account

DELTA = 1e-5
SLACK = 1e-5  # discrete noise is charged a few millionths more than continuous noise (tests/privacy/test_discrete.py)


def pld_epsilon(*parts: tuple[DpEvent, int], relation: str = "ADD_OR_REMOVE_ONE") -> float:
    accountant = dp.pld.PLDAccountant(NeighboringRelation[relation])
    for event, count in parts:
        accountant.compose(event, count)
    return float(accountant.get_epsilon(DELTA))


def through_json(ledger: Ledger) -> Ledger:
    return Ledger.from_state(json.loads(json.dumps(ledger.state())))


def test_full_participation_equals_dp_accounting() -> None:
    ledger = Ledger()
    for _ in range(7):
        ledger.record(Gaussian(3.0).event())
    assert ledger.method == "analytic Gaussian"
    assert ledger.epsilon(DELTA) == pytest.approx(pld_epsilon((dp.GaussianDpEvent(3.0), 7)), abs=SLACK)
    ledger.record(Laplace(0.5).event())
    ledger.record(Laplace(0.5).event())
    expected = pld_epsilon((dp.GaussianDpEvent(3.0), 7), (dp.LaplaceDpEvent(2.0), 2))
    assert ledger.method == "PLD"
    assert ledger.epsilon(DELTA) == pytest.approx(expected, abs=SLACK)
    assert ledger.delta(ledger.epsilon(DELTA)) == pytest.approx(DELTA, rel=1e-3)


def test_poisson_rounds_equal_dp_accounting() -> None:
    ledger = Ledger()
    for round_number in range(30):
        ledger.record(Gaussian(1.5).event(), sampling=Poisson(0.05), cohort=round_number)
    expected = pld_epsilon((dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(1.5)), 30))
    assert ledger.epsilon(DELTA) == pytest.approx(expected, abs=SLACK)


def test_two_asks_of_one_cohort_share_its_sampling() -> None:
    together, apart = Ledger(), Ledger()
    for cohort in range(20):
        for z in (2.0, 4.0):
            together.record(Gaussian(z).event(), sampling=Poisson(0.1), cohort=cohort)
            apart.record(Gaussian(z).event(), sampling=Poisson(0.1))
    both = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent((1 / 4 + 1 / 16) ** -0.5))
    assert together.epsilon(DELTA) == pytest.approx(pld_epsilon((both, 20)), abs=SLACK)
    assert together.epsilon(DELTA) > 1.02 * apart.epsilon(DELTA)  # treating them as fresh samples understates ε


def test_asks_of_interleaved_cohorts_are_grouped_by_cohort() -> None:
    in_turn, mixed = Ledger(), Ledger()
    asks = [("a", 1.0), ("a", 2.0), ("b", 1.0), ("b", 2.0)]
    for ledger, order in ((in_turn, asks), (mixed, [asks[2], asks[1], asks[3], asks[0]])):
        for cohort, z in order:
            ledger.record(Gaussian(z).event(), sampling=Poisson(0.1), cohort=cohort)
    assert in_turn.event() == mixed.event()


@pytest.mark.parametrize(
    ("inner", "rate"), [(dp.GaussianDpEvent(2.0), 0.1), (dp.LaplaceDpEvent(1.0), 0.1), (dp.GaussianDpEvent(4.0), 0.5)]
)
def test_amplification_of_any_composition_equals_dp_accounting_where_that_knows_it(inner: DpEvent, rate: float) -> None:
    released = account([(inner, 1)])
    generic = losses._sampled_pld(rate, released, 1e-4)
    expected = pld_epsilon((dp.PoissonSampledDpEvent(rate, inner), 1))
    assert generic.get_epsilon_for_delta(DELTA) == pytest.approx(expected, abs=1e-6)
    ten = pld_epsilon((dp.PoissonSampledDpEvent(rate, inner), 10))
    assert ten - 1e-9 <= generic.self_compose(10).get_epsilon_for_delta(DELTA) <= ten + 1e-3


def test_different_mechanisms_in_one_sample_are_amplified_together() -> None:
    ledger = Ledger()
    for event in (Gaussian(2.0).event(), Laplace(0.5).event()):
        ledger.record(event, sampling=Poisson(0.1), cohort=0)
    unamplified = pld_epsilon((dp.GaussianDpEvent(2.0), 1), (dp.LaplaceDpEvent(2.0), 1))
    # Sampling turns (ε, δ) into (log(1 + q(e^ε − 1)), qδ); at another δ it can only be better than this bound.
    bound = math.log1p(0.1 * math.expm1(pld_epsilon_at(DELTA / 0.1)))
    assert ledger.epsilon(DELTA) == pytest.approx(bound, abs=1e-4)
    assert ledger.epsilon(DELTA) < unamplified / 3


def pld_epsilon_at(delta: float) -> float:
    accountant = dp.pld.PLDAccountant().compose(dp.GaussianDpEvent(2.0)).compose(dp.LaplaceDpEvent(2.0))
    return float(accountant.get_epsilon(delta))


def test_fixed_size_cohorts_use_renyi_accounting_between_replace_one_neighbours() -> None:
    ledger = Ledger()
    sampling = FixedSize(20, 1000)
    assert sampling.sensitivity(1.5) == 3.0
    for cohort in range(25):
        ledger.record(Gaussian(1.2).event(), sampling=sampling, cohort=cohort)
    ledger.record(Gaussian(10.0).event(), sampling=Everyone("replace_one"))
    expected = (
        dp.rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
        .compose(dp.SampledWithoutReplacementDpEvent(1000, 20, dp.GaussianDpEvent(1.2)), 25)
        .compose(dp.GaussianDpEvent(10.0))
    )
    assert (ledger.method, ledger.relation) == ("RDP", "replace_one")
    assert ledger.epsilon(DELTA) == pytest.approx(expected.get_epsilon(DELTA), abs=SLACK)
    assert ledger.delta(2.0) == pytest.approx(expected.get_delta(2.0), rel=1e-6)
    assert ledger.notes == []


def test_no_amplification_is_claimed_where_none_is_proven_and_the_ledger_says_so() -> None:
    ledger = Ledger()
    ledger.record(Laplace(0.5).event(), sampling=FixedSize(10, 1000), cohort=0)
    assert ledger.epsilon(DELTA) == pytest.approx(pld_epsilon((dp.LaplaceDpEvent(2.0), 1)), abs=1e-6)
    assert len(ledger.notes) == 1
    assert "no amplification is claimed for Laplace" in ledger.notes[0]


@pytest.mark.parametrize("sampling", [Poisson(0.01), FixedSize(10, 1000)])
def test_sampling_clients_does_not_amplify_the_privacy_of_their_points(sampling: Sampling) -> None:
    """Without its client the sum may look quite different, so who sees it knows whether the point was at risk."""
    ledger = Ledger()
    ledger.record(Gaussian(2.0).event(), unit="point", sampling=sampling, cohort=0)
    ledger.record(Gaussian(2.0).event(), unit="point", sampling=Everyone())
    assert ledger.epsilon(DELTA) == pytest.approx(dp.get_epsilon_gaussian(2.0 / math.sqrt(2), DELTA), abs=SLACK)
    assert "no amplification is claimed for points" in ledger.notes[0]


def test_gaussian_between_replace_one_neighbours_counts_the_doubled_sensitivity_once() -> None:
    """Noise of std 3 on clip 1 is z = 1.5 for sensitivity 2; dp_accounting's loss accountant takes std / clip = 3."""
    ledger = Ledger()
    ledger.record(Gaussian(1.5).event(), sampling=Everyone("replace_one"))
    theirs = pld_epsilon((dp.GaussianDpEvent(3.0), 1), relation="REPLACE_ONE")
    assert ledger.epsilon(DELTA) == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("categories", [2, 4])
def test_every_answer_of_randomized_response_counts(categories: int) -> None:
    mechanism = RandomizedResponse(0.3, categories)
    ledger = Ledger()
    ledger.record(mechanism.event(answers=12), sampling=Local())
    single = mechanism.event()
    one_by_one = pld_epsilon(*[(single, 1)] * 12, relation="REPLACE_ONE")
    assert ledger.epsilon(DELTA) == pytest.approx(one_by_one, abs=SLACK)


def test_exponential_mechanism_is_pure_for_one_and_concentrated_for_many() -> None:
    one, many = Ledger(), Ledger()
    one.record(Exponential(0.1).event())
    assert one.epsilon(DELTA) == pytest.approx(0.1, abs=1e-3)
    for _ in range(500):
        many.record(Exponential(0.1).event())
    concentrated = dp.rdp.RdpAccountant().compose(dp.ZCDpEvent(500 * 0.1**2 / 8)).get_epsilon(DELTA)
    assert many.epsilon(DELTA) == pytest.approx(concentrated, abs=SLACK)


def test_a_bare_ask_costs_everything_on_purpose() -> None:
    ledger = Ledger()
    ledger.record(Gaussian(1.0).event(), sampling=Poisson(0.01), cohort=0)
    ledger.record(BARE, sampling=Poisson(0.01), cohort=0)
    assert ledger.epsilon(DELTA) == math.inf
    assert ledger.delta(5.0) == 1.0
    assert ledger.method == "non-private"


def test_clients_that_differ_have_their_own_epsilon() -> None:
    ledger = Ledger()
    ledger.record(Gaussian(4.0).event())
    ledger.record(Gaussian(2.0).event(), sampling=Local(), clients=[3, 5])
    ledger.record(Gaussian(2.0).event(), sampling=Local(), clients=[5])
    shared = dp.get_epsilon_gaussian(4.0, DELTA)
    three = dp.get_epsilon_gaussian((1 / 16 + 1 / 4) ** -0.5, DELTA)
    five = dp.get_epsilon_gaussian((1 / 16 + 2 / 4) ** -0.5, DELTA)
    assert ledger.epsilon(DELTA, client=0) == pytest.approx(shared, abs=SLACK)
    assert ledger.epsilons(DELTA) == {3: pytest.approx(three, abs=SLACK), 5: pytest.approx(five, abs=SLACK)}
    assert ledger.epsilon(DELTA) == pytest.approx(five, abs=SLACK)


def test_a_newcomer_pays_for_its_own_releases_only() -> None:
    ledger = Ledger()
    ledger.record(Gaussian(1.0).event())
    ledger.record(Gaussian(5.0).event(), sampling=Local(), newcomers=["ward 7"])
    before = ledger.epsilon(DELTA)
    own = dp.get_epsilon_gaussian(5.0, DELTA)
    assert ledger.epsilon(DELTA, newcomer="ward 7") == pytest.approx(own, abs=SLACK)
    ledger.record(BARE, newcomers=["ward 8"])
    assert ledger.epsilon(DELTA, newcomer="ward 8") == math.inf
    assert ledger.epsilon(DELTA) == before
    assert ledger.epsilon(DELTA, newcomer="never asked") == 0.0


def test_the_ledger_does_not_grow_with_clients_that_took_no_special_part() -> None:
    ledger = Ledger()
    for cohort in range(5):
        ledger.record(Gaussian(1.0).event(), sampling=Poisson(1e-4), cohort=cohort)
    ledger.record(Gaussian(9.0).event(), sampling=Local(), clients=range(3))
    assert len(json.dumps(ledger.state())) < 1500
    assert len({id(own) for own in ledger._clients.values()}) == 1  # clients with one history share one account


def test_a_ledger_keeps_to_one_unit_and_one_relation() -> None:
    ledger = Ledger()
    ledger.record(BARE, sampling=FixedSize(1, 10))  # fixes neither
    ledger.record(Gaussian(1.0).event(), sampling=Poisson(0.1))
    assert (ledger.unit, ledger.relation) == ("client", "add_remove")
    with pytest.raises(Unaccountable, match="protects one client, but the release bounds the effect of one point"):
        ledger.record(Gaussian(1.0).event(), unit="point")
    with pytest.raises(Unaccountable, match=r"add_remove.*FixedSize\(size=1, population=10\)"):
        ledger.record(Gaussian(1.0).event(), sampling=FixedSize(1, 10))
    ledger.record(Gaussian(1.0).event(), sampling=Local())
    with pytest.raises(Unaccountable, match=r"cohort 'x' was drawn by Poisson\(rate=0.1\)"):
        for rate in (0.1, 0.2):
            ledger.record(Gaussian(1.0).event(), sampling=Poisson(rate), cohort="x")
    with pytest.raises(Unaccountable, match="not hidden in a sample"):
        ledger.record(Gaussian(1.0).event(), sampling=Poisson(0.1), clients=[1])


@pytest.mark.parametrize(
    "event",
    [
        dp.UnsupportedDpEvent(),
        dp.GaussianDpEvent(0.0),
        dp.SingleEpochTreeAggregationDpEvent(1.0, 4),
        dp.SampledWithReplacementDpEvent(100, 10, dp.GaussianDpEvent(1.0)),
    ],
)
def test_what_cannot_be_accounted_is_refused_and_leaves_no_trace(event: DpEvent) -> None:
    ledger = Ledger()
    with pytest.raises(Unaccountable, match="mechanism"):
        ledger.record(event)
    assert ledger == Ledger()


def test_a_resumed_run_composes_as_if_it_had_not_stopped() -> None:
    def rounds(ledger: Ledger, numbers: range) -> None:
        for number in numbers:
            ledger.record(Gaussian(3.0).event(), sampling=Poisson(0.1), cohort=number)
            ledger.record(Laplace(0.2).event(), sampling=Poisson(0.1), cohort=number // 2)

    straight = Ledger()
    rounds(straight, range(6))
    stopped = Ledger()
    rounds(stopped, range(3))
    resumed = through_json(stopped)  # in the middle of what cohort 1 is asked
    rounds(resumed, range(3, 6))
    assert resumed == straight
    assert resumed.epsilon(DELTA) == straight.epsilon(DELTA)


def test_repeated_runs_compose() -> None:
    run = Ledger()
    for cohort in range(10):
        run.record(Gaussian(2.0).event(), sampling=Poisson(0.1), cohort=cohort)
    run.record(Gaussian(2.0).event(), sampling=Local(), clients=[1])
    twice = run + run
    expected = pld_epsilon((dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(2.0)), 20))
    assert twice.epsilon(DELTA, client=0) == pytest.approx(expected, abs=SLACK)
    assert twice.epsilon(DELTA) > expected
    other = Ledger(unit="point")
    with pytest.raises(Unaccountable, match="unit"):
        run + other


def test_budget_stops_an_ask_before_it_is_sent() -> None:
    ledger, budget = Ledger(), Budget(1.0, DELTA)
    charge = Charge(Gaussian(6.0).event())
    sent = 0
    message = r"ε = 1 at δ = 1e-05; 0\.8\d+ is spent and the next ask would make it 1\.0"
    with pytest.raises(BudgetExceeded, match=message) as stop:
        while True:
            ledger.charge([charge], budget)
            sent += 1
    assert sent == next(n for n in range(100) if dp.get_epsilon_gaussian(6.0 / math.sqrt(n + 1), DELTA) > 1.0)
    assert ledger.epsilon(DELTA) == stop.value.spent <= 1.0 < stop.value.after
    assert budget.remaining(ledger) == pytest.approx(1.0 - stop.value.spent)
    with pytest.raises(BudgetExceeded, match=r"would make it inf; nothing was sent: the ask has no noise"):
        budget.check(ledger, Charge(BARE))
    with pytest.raises(BudgetExceeded):
        budget.check(ledger, Charge(BARE, newcomers=(4,)))


def test_the_releases_of_one_ask_are_charged_all_or_none() -> None:
    ledger, budget = Ledger(), Budget(1.0, DELTA)
    before = through_json(ledger)
    with pytest.raises(BudgetExceeded):
        ledger.charge([Charge(Gaussian(6.0).event()), Charge(Gaussian(0.5).event())], budget)
    assert ledger == before
    ledger.charge([Charge(Gaussian(6.0).event())] * 2, budget)
    assert ledger.epsilon(DELTA) == pytest.approx(dp.get_epsilon_gaussian(6.0 / math.sqrt(2), DELTA), abs=SLACK)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Budget(0.0, DELTA), "epsilon"),
        (lambda: Budget(1.0, 1.0), "delta"),
        (lambda: Poisson(0.0), "rate must be above 0 and at most 1, got 0"),
        (lambda: Poisson(1.1), "rate"),
        (lambda: FixedSize(5, 4), "population must be a whole number of at least 5, got 4"),
        (lambda: Everyone("neighbour"), "relation must be"),  # type: ignore[arg-type]
        (lambda: Ledger("person"), "unit must be"),  # type: ignore[arg-type]
        (lambda: Ledger().epsilon(0.0), "delta must be above 0"),
        (lambda: Ledger.from_state({**Ledger().state(), "events": [{"kind": "os.system"}]}), "damaged"),
    ],
)
def test_nonsense_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


events = st.one_of(
    st.floats(2.0, 20.0).map(dp.GaussianDpEvent),
    st.floats(0.5, 20.0).map(dp.LaplaceDpEvent),
    st.floats(0.05, 1.0).map(lambda epsilon: RandomizedResponse(epsilon, 3).event(2)),
    st.floats(0.05, 1.0).map(lambda epsilon: Exponential(epsilon).event()),
)
samplings: st.SearchStrategy[Sampling] = st.one_of(
    st.just(Everyone()), st.just(Local()), st.sampled_from([0.01, 0.1, 1.0]).map(Poisson)
)
records = st.lists(st.tuples(events, samplings, st.sampled_from([0, 1, None]), st.booleans()), max_size=4)


def filled(history: list[tuple[DpEvent, Sampling, int | None, bool]]) -> Ledger:
    ledger = Ledger()
    for event, sampling, cohort, own in history:
        clients = [1, 2] if own and not isinstance(sampling, Poisson) else None
        name = None if cohort is None else f"{cohort} {sampling}"
        ledger.record(event, sampling=sampling, cohort=name, clients=clients)
    return ledger


@settings(max_examples=12)
@given(records, events, samplings)
def test_epsilon_never_falls_when_something_is_released(
    history: list[tuple[DpEvent, Sampling, int | None, bool]], event: DpEvent, sampling: Sampling
) -> None:
    ledger = filled(history)
    before = ledger.epsilon(1e-4)
    ledger.record(event, sampling=sampling)
    assert ledger.epsilon(1e-4) >= before - 1e-9


@given(records)
def test_state_survives_a_checkpoint(history: list[tuple[DpEvent, Sampling, int | None, bool]]) -> None:
    ledger = filled(history)
    assert through_json(ledger) == ledger
