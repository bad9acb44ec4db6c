"""Robust-HDP: robust PCA on planted matrices, weights against the oracle, and what each way of weighing does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from unalike import Clients, Federation, Model, simulate, train
from unalike.core.roster import Declarations
from unalike.learn.local import LocalSGD
from unalike.learn.robust_pca import robust_pca
from unalike.methods.robust_hdp import RobustHDP, large, noise_of, projected
from unalike.networks.architectures import build
from unalike.privacy.dpsgd import PointPrivacy


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(200, 40), (40, 200)])
def test_robust_pca_recovers_a_planted_sum(shape: tuple[int, int]) -> None:
    low = normal(shape[0], 2) @ normal(2, shape[1], seed=1)
    where = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.05
    sparse = torch.where(where, 20 * normal(*shape, seed=3), 0.0)
    found_low, found_sparse = robust_pca(low + sparse)
    assert float((found_low - low).norm() / low.norm()) < 1e-4
    assert float((found_sparse - sparse).norm() / sparse.norm()) < 1e-4


SIGMA = torch.tensor([0.1] * 14 + [1.0, 1.3, 1.6, 2.0, 2.5, 3.0], dtype=torch.float64)  # 6 of 20 have loud noise


def excess(w: Tensor) -> float:
    """Noise of the aggregate Σ w²σ², over the least that there is: that of w ∝ 1/σ²."""
    w = w / w.sum()
    best = SIGMA**-2 / (SIGMA**-2).sum()
    return float((w.square() * SIGMA**2).sum() / (best.square() * SIGMA**2).sum())


@pytest.mark.parametrize(("signal", "raw_is_off"), [(0.0, False), (30.0, True)])
def test_weights_are_those_of_the_oracle_also_where_updates_share_a_strong_signal(
    signal: float, raw_is_off: bool
) -> None:
    p = 4000
    shared = signal * normal(p, seed=5) / p**0.5
    updates = shared + SIGMA[:, None] * normal(20, p, seed=6)
    assert excess(1 / noise_of(updates, p)) < 1.02
    assert (excess(1 / updates.square().sum(1)) > 1.5) == raw_is_off
    assert excess(1 / noise_of(updates, 500)) < 1.1  # blocks of p' rows


def test_blocks_are_those_of_the_thesis() -> None:
    """Q = ⌊p/p'⌋ blocks of p' rows, the last of which ends at p."""
    updates = normal(6, 25)
    parts = [updates[:, 0:10], updates[:, 15:25]]
    expected = torch.stack([robust_pca(part.T)[1].square().sum(0) for part in parts]).mean(0)
    assert torch.equal(noise_of(updates, 10), expected)
    assert torch.equal(noise_of(updates, 10, 1), robust_pca(updates[:, :10].T)[1].square().sum(0))  # Q = 1
    for p, ends in ((30, [10, 20, 30]), (9, [9]), (19, [19])):
        updates = normal(6, p)
        whole = torch.stack([robust_pca(updates[:, max(0, end - 10) : end].T)[1].square().sum(0) for end in ends])
        assert torch.equal(noise_of(updates, 10), whole.mean(0)) and torch.equal(
            noise_of(updates, 10, 7), whole.mean(0)
        )
    weights = method("robust", rows=10, blocks=1).weigh(updates, federation().everyone().declarations)
    inverse = 1 / noise_of(updates, 10, 1)
    torch.testing.assert_close(weights, inverse / inverse.sum())
    with pytest.raises(ValueError, match="blocks=0; expected 1 or more"):
        method("robust", blocks=0)


def method(weights: str, **more: object) -> RobustHDP:
    model = Model(build("logistic", (6,), 2))
    local = LocalSGD(epochs=1, batch=4, lr=0.1, private=PointPrivacy(1.0, 2.0))
    return RobustHDP(model, local=local, weights=weights, **more)  # type: ignore[arg-type]


def test_the_other_weights() -> None:
    updates = normal(4, 14)
    declared = Declarations(
        torch.tensor([10, 20, 30, 40]),
        torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64),
        torch.full((4,), 1e-3, dtype=torch.float64),
        torch.tensor([5, 5, 10, 40]),
    )
    assert method("size").weigh(updates, declared).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert method("epsilon").weigh(updates, declared).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert method("uniform").weigh(updates, declared).tolist() == [0.25] * 4
    oracle = method("oracle")
    private = PointPrivacy(3.0, 2.0, batches=(5, 10, 40))
    found = replace(oracle, local=replace(oracle.local, private=private)).weigh(updates, declared)
    inverse = torch.tensor([25 / 2, 25 / 4, 100 / 3, 1600 / 1])  # b²/steps: all have the same z and clip
    assert torch.allclose(found, (inverse / inverse.sum()).double())
    with pytest.raises(ValueError, match=r"there is none: give local\.private"):
        replace(oracle, local=LocalSGD()).weigh(updates, declared)
    with pytest.raises(ValueError, match="weights='best'; expected one of robust"):
        method("best")


def test_pfa_projects_those_of_small_epsilon() -> None:
    epsilon = torch.tensor([0.2, 5.0, 0.3, 6.0, 0.1])
    assert large(epsilon).tolist() == [False, True, False, True, False]
    assert large(torch.ones(3)).all() and large(torch.ones(1)).all()
    updates = torch.zeros(5, 7, dtype=torch.float64)
    updates[1, 0], updates[3, 0], updates[3, 1] = 2.0, 3.0, 0.01  # the others' direction is nearly the first axis
    updates[0], updates[2] = normal(7), normal(7, seed=1)
    found = projected(updates, epsilon, 1)
    assert torch.equal(found[[1, 3]], updates[[1, 3]])
    assert torch.allclose(found[0, 0], updates[0, 0], atol=0.02) and float(found[0, 2:].abs().max()) == 0
    flat = projected(updates, epsilon, 2)
    assert torch.allclose(flat[0, :2], updates[0, :2]) and float(flat[0, 2:].abs().max()) < 1e-12


def federation(reported: list[float] | None = None, round: int = 0) -> Federation:
    """Twelve clients; the third may tell the server another ε than the one that its noise is made from."""
    x = normal(12 * 16, 6, seed=8).float()
    clients = Clients.from_sizes(x, (x[:, 0] > 0).long(), torch.full((12,), 16))
    made = simulate(clients, seed=4, round=round)
    if reported is not None:
        epsilon = torch.tensor(reported, dtype=torch.float64)
        made.roster = replace(made.roster, epsilon=epsilon, delta=torch.full((12,), 1e-3, dtype=torch.float64))
    return made


@pytest.mark.parametrize("weights", ["robust", "epsilon", "projected", "size", "uniform", "oracle"])
def test_a_client_that_lies_about_its_epsilon_gains_nothing_unless_weights_are_made_of_it(weights: str) -> None:
    """The third client says 5000 in the place of 20; its noise stays what it was."""
    honest = [20.0 if client % 2 == 0 else 50.0 for client in range(12)]
    lie = [*honest[:2], 5000.0, *honest[3:]]
    first, second = (train(method(weights), federation(reported), 2) for reported in (honest, lie))
    assert first.ids.tolist() == second.ids.tolist()
    position, gains = first.ids.tolist().index(2), weights in ("epsilon", "projected")
    assert (float(second.weights[position]) > 5 * float(first.weights[position])) == gains
    assert torch.equal(first.weights, second.weights) != gains  # bit for bit
    assert torch.equal(first.theta, second.theta) != gains
    if weights == "projected":  # whose directions count is decided by ε, too: the liar's alone are left
        assert large(torch.tensor(honest)).tolist() == [client % 2 == 1 for client in range(12)]
        assert large(torch.tensor(lie)).tolist() == [client == 2 for client in range(12)]


def test_a_round_adds_the_weighted_updates() -> None:
    one = method("size", cohort=5)
    made = federation()
    state = train(one, made, 1, one.start(0))
    again = federation(round=1)
    cohort = again.sample(5, labeled=True)
    updates = cohort.ask(one.fit, theta=one.start(0).theta, rate=1.0)["update"]
    assert torch.allclose(state.theta, one.start(0).theta + updates.mean(0), atol=1e-6)
    assert torch.equal(state.ids, cohort.ids)
    assert made.ledger.epsilon(1e-3) < float("inf") and made.ledger.unit == "point"
