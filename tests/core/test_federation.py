"""Asking a cohort: what is checked before, what comes back, what is recorded, and how clients fail."""

import itertools
import math
import re

import pytest
import torch
from torch import Tensor

from tests.core.helpers import clients, kept, scaled, total
from unalike import Client, Each, Federation, Mean, Sum, each, send, simulate, task
from unalike.core.federation import QuorumError
from unalike.core.release import Stays
from unalike.core.request import Purpose
from unalike.core.task import Sent
from unalike.privacy import Budget, BudgetExceeded, Gaussian
from unalike.privacy.sampling import Poisson
from unalike.runtime.simulate import Simulation


def test_each_sum_and_mean_release_what_they_say() -> None:
    store = clients([2, 5, 3])
    federation = simulate(store)
    everyone = federation.everyone()
    own = torch.stack([store.rows(i)[0].sum(0) for i in range(3)])
    n = torch.tensor([2.0, 5.0, 3.0])
    assert torch.allclose(everyone.ask(total)["total"], own)
    assert torch.equal(everyone.ask(total)["n"], n)
    assert set(everyone.ask(total, into=Each("n"))) == {"n"}
    assert torch.allclose(everyone.ask(total, into=Sum("total"))["total"], own.sum(0))
    assert torch.allclose(everyone.ask(total, into=Mean("total"))["total"], own.mean(0))
    weighted = everyone.ask(total, into=[Mean("total", weight="n"), Sum("n")])
    assert torch.allclose(weighted["total"], (n[:, None] * own).sum(0) / 10, atol=1e-5)
    assert float(weighted["n"]) == 10


def test_inputs_shared_and_each() -> None:
    store = clients([4, 4, 6])
    federation = simulate(store)
    means = torch.stack([store.rows(i)[0].mean(0) for i in range(3)])
    cohort = federation.cohort([2, 0])
    assert torch.allclose(cohort.ask(scaled, factor=2.0, shift=1.0)["value"], 2 * means[[2, 0]] + 1, atol=1e-6)
    factors = torch.tensor([10.0, -1.0])
    assert torch.allclose(
        cohort.ask(scaled, factor=each(factors))["value"], factors[:, None] * means[[2, 0]], atol=1e-5
    )
    # one row repeated for everybody is the same as a shared input
    repeated = torch.tensor(3.0).expand(2)
    assert torch.allclose(cohort.ask(scaled, factor=each(repeated))["value"], 3 * means[[2, 0]], atol=1e-5)


def test_a_wrong_call_is_refused_before_anything_is_sent() -> None:
    federation = simulate(clients([2, 2]))
    cohort = federation.everyone()
    with pytest.raises(TypeError, match=r"no input 'facter'; did you mean 'factor'\?"):
        cohort.ask(scaled, facter=1.0)
    with pytest.raises(TypeError, match="needs the input factor"):
        cohort.ask(scaled)
    with pytest.raises(ValueError, match=r"each\(factor\) has 3 rows for a cohort of 2"):
        cohort.ask(scaled, factor=each(torch.ones(3)))
    with pytest.raises(TypeError, match="'factor' is a str; tasks take tensors and numbers only"):
        cohort.ask(scaled, factor="2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="marked with @task"):
        cohort.ask(print)  # type: ignore[arg-type]
    assert not federation.transcript.entries and federation.traffic.total_down == 0


def test_a_release_of_an_array_that_the_task_does_not_send_is_said() -> None:
    with pytest.raises(QuorumError, match="release wants 'totl', which the task does not send; did you mean 'total'"):
        simulate(clients([2])).everyone().ask(total, into=Sum("totl"))


def test_a_name_that_was_not_released_is_said() -> None:
    with pytest.raises(KeyError, match="no array 'mean' was released by this ask; there are: total, n"):
        simulate(clients([2])).everyone().ask(total)["mean"]


def test_sampling_is_a_function_of_seed_and_round() -> None:
    store = clients([1] * 50)

    def chosen(seed: int, number: int) -> list[int]:
        return simulate(store, seed=seed).begin_round(number).sample(10).positions.tolist()

    assert chosen(0, 1) == chosen(0, 1)
    assert chosen(0, 1) != chosen(0, 2) != chosen(1, 2)
    assert len(set(chosen(0, 1))) == 10
    assert len(simulate(store).sample(0.2)) == 10
    with pytest.raises(ValueError, match="cannot sample 51 of 50 clients"):
        simulate(store).sample(51)


def test_poisson_cohorts_have_the_binomial_mean_and_spread() -> None:
    federation = simulate(clients([1] * 100))
    sizes = torch.tensor([float(len(federation.begin_round(r).sample(10, poisson=True))) for r in range(1000)])
    assert abs(float(sizes.mean()) - 10) < 0.4
    assert abs(float(sizes.var()) - 9) < 1.5


def test_only_labeled_clients_are_sampled_when_asked() -> None:
    store = clients([2] * 10)
    store.labeled[:7] = False
    federation = simulate(store)
    assert set(federation.sample(3, labeled=True).positions.tolist()) == {7, 8, 9}
    assert set(federation.sample(7, labeled=False).positions.tolist()) == set(range(7))
    with pytest.raises(ValueError, match="no client has labels"):
        simulate(store.without_labels()).sample(1, labeled=True)


def test_draws_of_the_server_never_repeat_within_a_round_and_always_do_under_the_same_seed() -> None:
    first, again = simulate(clients([1] * 3), seed=4, round=2), simulate(clients([1] * 3), seed=4, round=2)
    drawn = [first.draws().uniform(5) for _ in range(3)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
    assert all(torch.equal(again.draws().uniform(5), one) for one in drawn)


def test_a_share_of_the_labeled_is_no_share_of_all() -> None:
    """Of 40 clients 10 have labels: a Poisson sample of 4 draws each of these with probability 0.4, and no other."""
    store = clients([2] * 40)
    store.labeled[10:] = False
    federation = simulate(store)
    cohort = federation.sample(4, poisson=True, labeled=True)
    assert isinstance(cohort.sampling, Poisson) and cohort.sampling.rate == 0.4 and cohort.expected == 4
    sizes = [len(federation.begin_round(t).sample(0.4, poisson=True, labeled=True)) for t in range(1, 401)]
    assert abs(sum(sizes) / 400 - 4) < 0.25
    assert len(federation.sample(0.4, labeled=True)) == 4
    with pytest.raises(ValueError, match="cannot sample 11 of 10 clients"):
        federation.sample(11, labeled=True)


@task
def reads_labels(client: Client) -> Sent:
    return send(y=client.sum(client.y))


def test_reading_labels_that_are_not_there_is_that_clients_failure() -> None:
    store = clients([3, 3, 3])
    store.labeled[1] = False
    replies = simulate(store).everyone().ask(reads_labels)
    assert replies.answered.tolist() == [0, 2]
    assert "client 1, round 0, task reads_labels: NoLabels" in str(replies.failures[0])
    with pytest.raises(QuorumError, match="only 0 of 3 clients answered reads_labels"):
        simulate(store.without_labels()).everyone().ask(reads_labels)


@task
def picky(client: Client) -> Sent:
    """Raises for clients whose first feature is above 5, sends NaN below -5 (only known when run alone)."""
    first = client.x[0, 0]
    if float(first) > 5:
        raise RuntimeError("the sensor is broken")
    return send(value=torch.where(first < -5, torch.nan, first))


@pytest.mark.filterwarnings("ignore::unalike.runtime.shard.simulator.LoopInstead")
def test_errors_and_nans_become_failures_that_name_task_round_and_client() -> None:
    store = clients([2] * 6)
    store.x[0, 0], store.x[4, 0] = 9.0, -9.0  # clients 0 and 2
    federation = simulate(store).begin_round(7)
    replies = federation.everyone().ask(picky)
    assert replies.answered.tolist() == [1, 3, 4, 5]
    assert replies["value"].shape == (4,)
    texts = {failure.client: str(failure) for failure in replies.failures}
    first, where = texts["0"].splitlines()
    assert first == "client 0, round 7, task picky: RuntimeError: the sensor is broken"
    assert re.fullmatch(r'    test_federation\.py:\d+, in picky: raise RuntimeError\("the sensor is broken"\)', where)
    assert texts["2"] == "client 2, round 7, task picky: the array 'value' is not finite (NaN or infinite)"
    assert federation.failures == replies.failures
    assert {failure.client: failure.diverged for failure in replies.failures} == {"0": False, "2": True}


@pytest.mark.filterwarnings("ignore::unalike.runtime.shard.simulator.LoopInstead")
def test_below_the_quorum_the_run_stops_with_the_reasons() -> None:
    store = clients([2] * 4)
    store.x[[0, 2, 4], 0] = 9.0
    with pytest.raises(QuorumError, match=r"only 1 of 4 clients answered picky.*quorum is 50%.*\n.*sensor is broken"):
        simulate(store).everyone().ask(picky)
    assert len(simulate(store, quorum=0.25).everyone().ask(picky).answered) == 1


@task
def uneven(client: Client) -> Sent:
    return send(value=torch.zeros(2 if float(client.x[0, 0]) > 5 else 3))


@pytest.mark.filterwarnings("ignore::unalike.runtime.shard.simulator.LoopInstead")
@pytest.mark.parametrize("block", [1, 2, 4])
def test_a_reply_of_another_shape_is_a_failure(block: int) -> None:
    store = clients([2] * 4)
    store.x[2, 0] = 9.0
    replies = simulate(store, block=block).everyone().ask(uneven)
    assert replies["value"].shape == (3, 3)
    assert "shapes [{'value': (2,)}], but others sent [{'value': (3,)}]" in str(replies.failures[0])


@task
def not_sent(client: Client) -> Sent:
    return client.n  # type: ignore[return-value]


def test_a_task_must_send() -> None:
    with pytest.raises(QuorumError, match=r"must return send\(...\), but it returned Tensor"):
        simulate(clients([1, 1])).everyone().ask(not_sent)


def test_drop_outs_are_failures_and_sums_go_on_without_them() -> None:
    federation = simulate(clients([1] * 40), drop=0.3, quorum=0.2)
    replies = federation.everyone().ask(total, into=Sum("n"))
    assert 0 < len(replies.failures) < 40
    assert float(replies["n"]) == 40 - len(replies.failures) == len(replies.answered)
    some = simulate(clients([1] * 4), drop=lambda client, _: client == 2)
    assert some.everyone().ask(total).answered.tolist() == [0, 1, 3]


@task
def counts_up(client: Client) -> Sent:
    times = client.kept.get("times", torch.zeros(())) + 1
    return send(times=times, keep={"times": times})


def test_kept_state_is_each_clients_own_and_asides_do_not_change_it() -> None:
    federation = simulate(clients([1] * 5))
    federation.cohort([1, 3]).ask(counts_up)
    federation.cohort([3, 4]).ask(counts_up)
    aside = federation.aside()
    assert aside.everyone().ask(counts_up)["times"].tolist() == [1, 2, 1, 3, 2]
    assert aside.everyone().ask(counts_up)["times"].tolist() == [2, 3, 2, 4, 3]
    state = kept(federation).state()
    assert state["times.ids"].tolist() == [1, 3, 4] and state["times.values"].tolist() == [1, 2, 1]
    assert federation.everyone().ask(counts_up)["times"].tolist() == [1, 2, 1, 3, 2]


def test_kept_state_survives_a_checkpoint() -> None:
    federation = simulate(clients([1] * 5))
    federation.cohort([1, 3]).ask(counts_up)
    restored = simulate(clients([1] * 5))
    assert isinstance(restored.runtime, Simulation)
    restored.runtime.shards[0].restore(restored.run, kept(federation).state())
    assert restored.everyone().ask(counts_up)["times"].tolist() == [1, 2, 1, 2, 1]


def test_traffic_and_transcript_say_what_crossed() -> None:
    federation = simulate(clients([2] * 4)).begin_round(1)
    federation.everyone().ask(scaled, factor=torch.ones(3), into=Mean("value", clip=1.0))
    federation.begin_round(2).cohort([0]).ask(scaled, factor=each(torch.ones(1, 3)))
    assert federation.traffic.down["factor"] == 4 * 12 + 12
    assert federation.traffic.up["value"] == 5 * 12
    rows = federation.transcript.rows()
    assert [(r["array"], r["seen_as"], r["replies"], r["bytes"], r["shape"]) for r in rows] == [
        ("value", "mean", 4, 48, [3]),
        ("value", "individual", 1, 12, [3]),
    ]
    assert type(federation.transcript).from_rows(rows).rows() == rows


def test_the_transcript_does_not_grow_with_the_rounds() -> None:
    federation = simulate(clients([2] * 4))
    for number in range(1, 20):
        federation.begin_round(number).everyone().ask(total, into=Sum("n"))
    (row,) = federation.transcript.rows()
    assert (row["first"], row["last"], row["times"], row["replies"]) == (1, 19, 19, 76)


def test_a_bare_ask_is_not_private_and_noise_is_recorded() -> None:
    noise = Gaussian(2.0)
    federation = simulate(clients([2] * 4))
    federation.everyone().ask(total, into=Sum("total", clip=1.0, noise=noise))
    assert federation.ledger.epsilon(1e-5) == pytest.approx(_epsilon(noise), abs=1e-6)
    federation.everyone().ask(total, into=[])
    assert federation.ledger.epsilon(1e-5) == pytest.approx(_epsilon(noise), abs=1e-6)
    federation.everyone().ask(total)
    assert federation.ledger.epsilon(1e-5) == float("inf")


def test_measuring_aside_costs_nothing_and_is_marked() -> None:
    federation = simulate(clients([2] * 4))
    aside = federation.aside()
    aside.everyone().ask(total)
    assert federation.ledger.epsilon(1e-5) == 0
    assert not federation.transcript.entries
    assert aside.transcript.rows()[0]["note"] == "simulation only"


def test_a_budget_stops_an_ask_before_it_is_sent() -> None:
    federation = simulate(clients([2] * 4), budget=Budget(1.0, 1e-5))
    private = Sum("total", clip=1.0, noise=Gaussian(8.0))
    federation.everyone().ask(total, into=private)
    sent = federation.traffic.total_up
    with pytest.raises(BudgetExceeded, match="nothing was sent"):
        federation.everyone().ask(total)
    with pytest.raises(BudgetExceeded):
        for _ in range(100):
            federation.everyone().ask(total, into=private)
    assert federation.ledger.epsilon(1e-5) <= 1.0
    assert federation.traffic.total_up == sent * (1 + _asks(federation))


def _asks(federation: Federation) -> int:
    return sum(row["times"] for row in federation.transcript.rows()) - 1


def _epsilon(noise: Gaussian) -> float:
    import dp_accounting

    return float(dp_accounting.get_epsilon_gaussian(noise.noise_multiplier, 1e-5))


def test_two_asks_of_one_poisson_cohort_are_composed_inside_its_sampling() -> None:
    federation = simulate(clients([2] * 100)).begin_round(1)
    cohort = federation.sample(10, poisson=True)
    for _ in range(2):
        cohort.ask(total, into=Sum("total", clip=1.0, noise=Gaussian(2.0)))
    once = simulate(clients([2] * 100)).begin_round(1)
    once.sample(10, poisson=True).ask(total, into=Sum("total", clip=1.0, noise=Gaussian(2.0**0.5)))
    assert federation.ledger.epsilon(1e-5) == pytest.approx(once.ledger.epsilon(1e-5), rel=1e-6)


def test_a_cohort_of_an_earlier_round_is_refused() -> None:
    federation = simulate(clients([2] * 4)).begin_round(1)
    cohort = federation.sample(2)
    federation.begin_round(2)
    with pytest.raises(ValueError, match="earlier round"):
        cohort.ask(total)


def test_empty_federations_and_empty_clients_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one client"):
        simulate(clients([2]).select([]))
    with pytest.raises(ValueError, match=r"1 clients have no samples \(1"):
        simulate(clients([2, 0, 3]))


@task
def weighted(client: Client, w: Tensor) -> Sent:
    return send(value=client.mean(client.x), w=w)


@pytest.mark.parametrize("weights", [[1.0, -1.0, 3.0], [1.0, math.nan, 3.0], [1.0, math.inf, 3.0]])
@pytest.mark.parametrize("block", [1, 3])
def test_a_weight_that_makes_no_sense_costs_its_own_client_and_nobody_else(weights: list[float], block: int) -> None:
    store = clients([2, 2, 2])
    replies = (
        simulate(store, block=block)
        .everyone()
        .ask(weighted, w=each(torch.tensor(weights)), into=Mean("value", weight="w"))
    )
    first, _, last = (store.rows(i)[0].mean(0) for i in range(3))
    assert torch.allclose(replies["value"], (first + 3 * last) / 4, atol=1e-6)
    assert replies.answered.tolist() == [0, 2]
    [failure] = replies.failures
    assert "the weight 'w' is not one number of 0 or more" in failure.reason or "'w' is not finite" in failure.reason


def test_weights_that_are_several_numbers_or_all_zero_are_refused() -> None:
    cohort = simulate(clients([2, 2])).everyone()
    with pytest.raises(QuorumError, match="the weight 'w' is not one number of 0 or more"):
        cohort.ask(weighted, w=torch.ones(2), into=Mean("value", weight="w"))
    with pytest.raises(ValueError, match="of all 2 replies are 0"):
        cohort.ask(weighted, w=0.0, into=Mean("value", weight="w"))


@pytest.mark.parametrize("purpose", ["train", "serve"])
def test_what_stays_at_a_client_costs_nothing_and_what_leaves_it_does_whatever_for(purpose: Purpose) -> None:
    federation = simulate(clients([3, 4]), purpose=purpose)
    federation.everyone().ask(total, into=Stays("total"))
    assert federation.ledger.epsilon(1e-5) == 0 and not federation.traffic.up and not federation.transcript.entries
    federation.everyone().ask(total, into=Each("total"))
    assert federation.ledger.epsilon(1e-5) == math.inf and federation.traffic.up["total"] == 24
