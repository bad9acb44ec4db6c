"""PFL-sampled, -nearest, -ensemble: newcomers borrow models of clients that were trained, and of nobody else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.covariance import oas
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from tests.core.helpers import population
from tests.methods.test_pefll import FULL_STEP, clients_of, problem_of
from unalike import simulate
from unalike.core.client import Clients
from unalike.core.method import State, train
from unalike.learn.evaluation import evaluate
from unalike.learn.local import LocalSGD
from unalike.methods.borrowed import Borrowed, of_separators
from unalike.methods.pfedhn import PFedHN

CHOICES = ("sampled", "nearest", "ensemble")


def _twins() -> Clients:
    """Four training clients around four far-apart centres, and newcomers 4..7, each around one of the same centres."""
    random = torch.Generator().manual_seed(0)
    centres = 5 * torch.randn(4, 6, generator=random)
    order = [0, 1, 2, 3, 2, 0, 3, 1]
    x = torch.cat([centres[i] + torch.randn(15, 6, generator=random) for i in order])
    return Clients.from_sizes(x, torch.randint(3, (120,), generator=random), torch.full((8,), 15))


def _method(choice: str, cohort: int = 4) -> Borrowed:
    return Borrowed(problem_of((6,)), choice=choice, cohort=cohort, local=LocalSGD(steps=5, lr=0.1), descriptor=4)  # type: ignore[arg-type]


def _trained(choice: str, labeled: int = 4) -> tuple[Borrowed, Clients, State, Tensor]:
    """A method trained on the first four twins, of whom so many have labels; and the models of their own."""
    clients = _twins()
    clients = replace(clients, labeled=(torch.arange(8) < labeled) | (torch.arange(8) >= 4))
    method, seen = _method(choice, labeled), simulate(clients.select(range(4)))
    state = train(method, seen, 3)
    return method, clients, state, method.trainer.personalize(state, seen.aside().everyone())


def _personalized(method: Borrowed, state: State, clients: Clients, which: Sequence[int]) -> Tensor:
    return method.personalize(state, simulate(clients.select(which).without_labels()).everyone())


def test_nearest_borrows_from_the_client_with_the_same_centre() -> None:
    method, clients, state, own = _trained("nearest")
    torch.testing.assert_close(_personalized(method, state, clients, range(4, 8)), own[[2, 0, 3, 1]])
    torch.testing.assert_close(_personalized(method, state, clients, range(4)), own)


def test_sampled_borrows_one_of_the_trained_models() -> None:
    method, clients, state, own = _trained("sampled")
    gaps = torch.cdist(_personalized(method, state, clients, range(4, 8)), own)
    assert bool((gaps.min(1).values < 1e-4).all())


def test_what_is_sampled_depends_on_the_newcomer_and_the_seed_alone() -> None:
    clients = clients_of((6,), sizes=[3] * 44)
    method = Borrowed(problem_of((6,)), choice="sampled", descriptor=4)
    state = method.start(0).replace(ids=torch.arange(4))

    def borrowed(positions: range, seed: int = 0) -> Tensor:
        return method.personalize(state, simulate(clients.select(positions), seed).everyone())

    together = borrowed(range(4, 44))
    torch.testing.assert_close(torch.cat([borrowed(range(4, 24)), borrowed(range(24, 44))]), together)
    assert not torch.equal(together[:20], together[20:]) and not torch.equal(borrowed(range(4, 44), 1), together)


def test_newcomers_who_are_served_draw_for_themselves_though_all_have_one_id() -> None:
    method, clients, state, own = _trained("sampled")
    drawn = set()
    for _ in range(60):  # nobody draws one of the four in vain 60 times, but once in ten million
        served = simulate(clients.select([4]).without_labels(), purpose="serve")
        drawn.add(int(torch.cdist(method.personalize(state, served.everyone()), own).argmin()))
        assert not served.traffic.up, "the draw needs nothing of the newcomer"
    assert drawn == {0, 1, 2, 3}


def test_ensemble_averages_the_outputs_of_all_models() -> None:
    method, clients, state, own = _trained("ensemble")
    theta = _personalized(method, state, clients, [4, 5])
    x = torch.randn(7, 6)
    expected = torch.stack([method.trainer.model(member, x) for member in own]).mean(0)
    torch.testing.assert_close(method.model(theta[1], x), expected, atol=1e-6, rtol=1e-5)


def test_borrowing_trains_exactly_as_pfedhn() -> None:
    clients = clients_of((6,))
    options = {"cohort": 2, "local": FULL_STEP, "descriptor": 3}
    plain = train(PFedHN(problem_of((6,)), **options), simulate(clients), 2)  # type: ignore[arg-type]
    borrowed = train(Borrowed(problem_of((6,)), choice="sampled", **options), simulate(clients), 2)  # type: ignore[arg-type]
    assert torch.equal(plain.hypernet, borrowed.hypernet) and torch.equal(plain.descriptors, borrowed.descriptors)


# Who lends


@pytest.mark.parametrize("choice", ["sampled", "nearest"])
def test_a_client_without_labels_lends_nothing_and_borrows_itself(choice: str) -> None:
    """Client 3 has no labels, so its row is noise; newcomer 6 is its twin, and would be nearest to it."""
    method, clients, state, own = _trained(choice, labeled=3)
    which = [3, *range(4, 8)] if choice == "nearest" else [3, *range(4, 8)] * 8
    crowd = clients.select(which)
    crowd = replace(crowd, ids=torch.where(torch.arange(len(which)) == 0, 3, torch.arange(len(which)) + 4))
    theta = method.personalize(state, simulate(crowd).everyone())
    gaps = torch.cdist(theta, own, compute_mode="donot_use_mm_for_euclid_dist")  # exact
    assert bool((gaps[:, :3].min(1).values < 1e-4).all()) and float(gaps[:, 3].min()) > 1e-2
    torch.testing.assert_close(_personalized(method, state, clients, range(3)), own[:3])


def test_an_ensemble_counts_trained_members_alone() -> None:
    method, clients, state, own = _trained("ensemble", labeled=3)
    theta = _personalized(method, state, clients, [4])[0]
    x = torch.randn(7, 6)
    expected = torch.stack([method.trainer.model(member, x) for member in own[:3]]).mean(0)
    torch.testing.assert_close(method.model(theta, x), expected, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(method.model.module(theta)(x), expected, atol=1e-6, rtol=1e-5)
    tensors = method.model.tensors(theta)
    assert [float(tensors[f"{i}.weight"]) for i in range(4)] == [1, 1, 1, 0]
    assert sum(value.numel() for value in tensors.values()) == method.model.size


@pytest.mark.parametrize("choice", ["sampled", "nearest"])
def test_after_one_round_of_one_client_everybody_has_its_model(choice: str) -> None:
    clients = _twins()
    method = _method(choice, cohort=1)
    state = train(method, simulate(clients.select(range(4))), 1)
    row = state.trained.nonzero().flatten()
    assert len(row) == 1
    own = method.trainer.personalize(state, simulate(clients.select(row)).everyone())
    torch.testing.assert_close(_personalized(method, state, clients, range(8)), own.expand(8, -1))


@pytest.mark.parametrize("choice", CHOICES)
def test_before_the_first_round_there_is_a_model_too(choice: str) -> None:
    method = _method(choice)
    theta = _personalized(method, method.start(0), _twins(), range(8))
    assert theta.shape == (8, method.model.size) and bool(theta.isfinite().all())
    assert bool(method.model(theta[0], torch.randn(5, 6)).isfinite().all())


# PFL-nearest: who can be compared, and how


@pytest.mark.parametrize("lost", [range(99), range(1, 99), range(1, 99, 2)], ids=["all", "after the first", "summary"])
def test_training_goes_on_without_the_summary_of_an_absent_client(lost: range) -> None:
    """Client 3 does not answer these asks; with a summary of its own it would lend to newcomer 6."""
    clients, asks = _twins(), itertools.count()
    method = _method("nearest")
    federation = simulate(clients.select(range(4)), drop=lambda client, _: client == 3 and next(asks) in lost)
    state = train(method, federation, 4)
    assert state.summarised.tolist() == [True, True, True, False]
    assert state.trained.tolist() == [True, True, True, 0 not in lost]
    own = method.trainer.personalize(state, simulate(clients.select(range(4))).everyone())
    gaps = torch.cdist(_personalized(method, state, clients, range(4, 8)), own)
    assert bool((gaps[:, :3].min(1).values < 1e-4).all())


def test_a_newcomer_whose_summary_fails_gets_nobodys_model() -> None:
    method, clients, state, _ = _trained("nearest")
    poisoned = clients.x.clone()
    poisoned[int(clients.start[4])] = torch.inf
    federation = simulate(population(replace(clients, x=poisoned), clients, seen=4))
    two = federation.runtime.roster.select([4, 5])
    scores = evaluate(method.model, lambda cohort: method.personalize(state, cohort), federation, two)
    assert scores.score.isnan().tolist() == [True, False]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("sizes", "inputs", "sigmas", "scale"),
    [
        ([10, 1000, 10], 48, 5.0, 1.0),  # 10 rows leave most of 32 directions without spread
        ([10, 1000, 10], 48, 5.0, 1e-3),
        ([10, 1000, 10], 48, 3.0, 1.0),  # and put two means of one distribution 2.5σ apart
        ([1000, 10, 10], 48, 5.0, 1.0),
        ([1000, 5, 100], 6, 1.5, 1.0),  # of 6 inputs, 32 projections would be no 32 directions
    ],
)
def test_nearest_is_who_is_near_whatever_its_number_of_rows(
    sizes: list[int], inputs: int, sigmas: float, scale: float, seed: int
) -> None:
    """The newcomer, last, has the first client's distribution; the second is some σ away."""
    clients = clients_of((inputs,), sizes=sizes, seed=seed)
    away = torch.randn(inputs, generator=torch.Generator().manual_seed(100 + seed))
    clients.x[sizes[0] : sizes[0] + sizes[1]] += sigmas * away / away.norm()
    clients = replace(clients, x=scale * clients.x)
    method = Borrowed(problem_of((inputs,), clients=2), cohort=2, local=LocalSGD(steps=0), descriptor=2)
    state = train(method, simulate(clients.select([0, 1]), seed), 1)
    own = method.trainer.personalize(state, simulate(clients.select([0, 1])).everyone())
    torch.testing.assert_close(_personalized(method, state, clients, [2]), own[:1])


def test_covariances_are_shrunk_as_by_scikit_learn() -> None:
    sizes = [2, 10, 40, 300]
    clients = clients_of((40,), sizes=sizes)
    clients = replace(clients, x=clients.x * torch.linspace(0.1, 3, 40))
    method = Borrowed(problem_of((40,)))
    projection = method.start(0).projection
    federation = simulate(clients, block=4)
    covariances = federation.everyone().ask(method.summarise, projection=projection)["covariance"]
    for i in range(len(sizes)):
        expected = torch.from_numpy(oas((clients.rows(i)[0] @ projection).numpy())[0])
        torch.testing.assert_close(covariances[i], expected, atol=1e-5, rtol=1e-4)


def test_clients_of_one_row_can_be_compared() -> None:
    """Without any spread the nearest mean is the nearest client."""
    x = torch.tensor([0.0, 1.0, 5.0, 9.0, 4.0])[:, None] * torch.ones(6)
    clients = Clients.from_sizes(x, torch.zeros(5, dtype=torch.int64), torch.ones(5))
    method = _method("nearest")
    state = train(method, simulate(clients.select(range(4))), 1)
    own = method.trainer.personalize(state, simulate(clients.select(range(4))).everyone())
    torch.testing.assert_close(_personalized(method, state, clients, [4]), own[[2]])


def test_the_distance_to_the_nearest_is_told() -> None:
    """2(1 − 2Φ(−Δ/2)) with Mahalanobis' Δ² less r(1/n + 1/m), written out; a twin is near, other centres are not."""
    method, clients, state, _ = _trained("nearest")
    cohort = simulate(clients.select(range(4, 8))).everyone()
    replies = cohort.ask(method.summarise, projection=state.projection)
    sent = {name: replies[name] for name in ("mean", "covariance", "rows")}
    far, among = method.nearest(state, sent) or (torch.zeros(0), torch.zeros(0))

    def apart(mean: Tensor, covariance: Tensor, other: int) -> float:
        gap = (mean - state["summary.mean"][other]).double()
        squared = (
            gap @ torch.linalg.inv((covariance + state["summary.covariance"][other]).double() / 2) @ gap - 6 * 2 / 15
        )
        return float(2 - 4 * torch.distributions.Normal(0.0, 1.0).cdf(-squared.clamp(min=0).sqrt() / 2))

    for i, twin in enumerate([2, 0, 3, 1]):
        wanted = [apart(sent["mean"][i], sent["covariance"][i], other) for other in range(4)]
        assert wanted.index(min(wanted)) == twin
        assert float(far[i]) == pytest.approx(min(wanted), abs=1e-3)
    assert float(far.max()) < 1 < float(among.min()) <= 2
    assert _trained("sampled")[0].nearest(state, sent) is None


def test_a_trained_separator_is_scikit_learns_on_rows_that_it_did_not_see() -> None:
    """Clients of 13, 30 and 8 rows, a little apart: 2(1 − 2ε) with ε the balanced error on the odd rows."""
    random = torch.Generator().manual_seed(5)
    counts, shifts = [13, 30, 8], [0.0, 0.7, 2.0]
    points = torch.randn(3, 30, 4, generator=random) + torch.tensor(shifts)[:, None, None]
    sent = {"points": points, "rows": torch.tensor(counts, dtype=torch.float32)}
    found = of_separators(sent, sent)
    for i, n in enumerate(counts):
        for j, m in enumerate(counts):
            rows = np.concatenate([points[i, :n].double().numpy(), points[j, :m].double().numpy()])
            side = np.array([1] * n + [-1] * m)
            even = np.concatenate([np.arange(n), np.arange(m)]) % 2 == 0
            weight = np.where(side == 1, 0.5 / (even & (side == 1)).sum(), 0.5 / (even & (side == -1)).sum())
            center = np.average(rows[even], axis=0, weights=weight[even])
            spread = np.sqrt(np.average((rows[even] - center) ** 2, axis=0, weights=weight[even]))
            inputs = np.concatenate([(rows - center) / spread, np.ones((n + m, 1))], 1)
            one = LogisticRegression(C=100.0, fit_intercept=False, tol=1e-10, max_iter=1000)
            wrong = one.fit(inputs[even], side[even], weight[even]).predict(inputs) != side
            error = (wrong[~even & (side == 1)].mean() + wrong[~even & (side == -1)].mean()) / 2
            assert float(found[i, j]) == pytest.approx(max(0.0, 2 - 4 * error), abs=1e-6), (i, j)
    assert float(found[0, 2]) > 1.2 > float(found[0, 1]) > 0.2


def test_nearest_by_trained_separators_borrows_from_the_twin() -> None:
    """Rows are drawn without replacement, and a client with fewer than are compared sends all of its rows."""
    clients = _twins()
    method = replace(_method("nearest"), separator="trained", compared_rows=20)
    seen = simulate(clients.select(range(4)))
    state = train(method, seen, 2)
    own = method.trainer.personalize(state, seen.aside().everyone())
    torch.testing.assert_close(_personalized(method, state, clients, range(4, 8)), own[[2, 0, 3, 1]])
    for i in range(4):
        rows = clients.rows(i)[0] @ state.projection
        sent = state["summary.points"][i]
        assert sent.shape == (20, 6) and float(state["summary.rows"][i]) == 15 and not sent[15:].any()
        order = torch.cdist(sent[:15], rows).argmin(1)
        assert sorted(order.tolist()) == list(range(15))
        torch.testing.assert_close(sent[:15], rows[order], atol=1e-5, rtol=1e-5)
    seen_as = {(row["array"], row["seen_as"]) for row in seen.transcript.rows() if row["task"].startswith("Borrowed")}
    assert seen_as == {("points", "individual"), ("rows", "individual")}
    few = replace(method, compared_rows=6)
    short = train(few, simulate(clients.select(range(4))), 1)
    assert short["summary.rows"].tolist() == [6.0] * 4
