"""R-DPCFL, IFCA and MR-MTL: planted clusters, closed forms of separation and selection, and steps written out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from unalike import Clients, Federation, LocalSGD, Model, State, simulate, train
from unalike.core.federation import each
from unalike.methods.fedavg import FedAvg
from unalike.methods.mr_mtl import MRMTL
from unalike.methods.rdpcfl import RDPCFL, mixture_of, principal
from unalike.networks.architectures import build
from unalike.privacy.dpsgd import PointPrivacy
from unalike.studio.simulate import opened

TRUE = torch.tensor([0] * 3 + [1] * 6 + [2] * 6 + [3] * 6)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alike(found: Tensor, true: Tensor) -> bool:
    """The same clusters, whatever they are called?"""
    return torch.equal(found[:, None] == found, true[:, None] == true)


def planted(noise: float) -> Tensor:
    centres = torch.zeros(4, 600, dtype=torch.float64)
    centres[[0, 1, 2, 3], [0, 0, 1, 1]] = torch.tensor([3.0, -3.0, 3.0, -3.0], dtype=torch.float64)
    return centres[TRUE] + noise * normal(21, 600, seed=1)


def test_planted_clusters_are_found_and_counted() -> None:
    found = mixture_of(planted(0.1), None, 6, seed=0)
    assert found.pi.shape == (21, 4) and alike(found.pi.argmax(1), TRUE)
    assert found.mss > 2 and found.mpo < 0.05
    assert mixture_of(planted(2.0), 4, 6, seed=0).mss < found.mss / 2
    assert mixture_of(planted(0.1)[:1], None, 6, seed=0).pi.tolist() == [[1.0]]


def test_separation_and_overlap_are_those_of_the_groups() -> None:
    updates = planted(0.05)[3:15]
    true = TRUE[3:15] - 1
    found, points = mixture_of(updates, 2, 6, seed=0), principal(updates)
    groups = [points[true == m] for m in (0, 1)]
    means = [group.mean(0) for group in groups]
    sigma = [float(((group - mean).square().mean() + 1e-6).sqrt()) for group, mean in zip(groups, means, strict=True)]
    separation = float((means[0] - means[1]).norm()) / (2 * max(sigma))
    assert found.mss == pytest.approx(separation, rel=1e-4)
    assert found.mpo == pytest.approx(math.erfc(separation / math.sqrt(2)), abs=1e-9)


def test_principal_components_keep_distances_of_what_they_span() -> None:
    points = principal(planted(0.0))
    apart = torch.cdist(points, points)
    true = torch.cdist(planted(0.0), planted(0.0))
    assert torch.allclose(apart / apart.max(), true / true.max(), atol=1e-9)


def shifted(sizes: list[int], flips: list[int], features: int = 5) -> Federation:
    """Clients whose labels are (y + flip) mod 2: a concept shift between clusters."""
    x = normal(sum(sizes), features, seed=3).float()
    flip = torch.tensor(flips).repeat_interleave(torch.tensor(sizes))
    y = ((x[:, 0] > 0).long() + flip) % 2
    return simulate(Clients.from_sizes(x, y, torch.tensor(sizes)), seed=1)


LOCAL = LocalSGD(epochs=1, batch=8, lr=0.5)
MODEL = Model(build("logistic", (5,), 2))


@pytest.mark.parametrize("private", [None, PointPrivacy(1.0, 0.3)])
def test_clusters_of_a_concept_shift_are_learned_apart(private: PointPrivacy | None) -> None:
    flips = [0, 0, 0, 1, 1, 1, 1]
    federation = shifted([40] * 7, flips)
    method = RDPCFL(MODEL, local=replace(LOCAL, private=private), clusters=2, rounds=10)
    state = train(method, federation, 10)
    assert alike(state.cluster, torch.tensor(flips)) and float(state.mpo) < 0.5
    with federation.aside() as aside:
        cohort = aside.everyone()
        thetas = opened(cohort, method.personalize(state, cohort))
    for theta, flip in zip(thetas, flips, strict=True):
        x = normal(200, 5, seed=9).float()
        right = (MODEL(theta, x).argmax(1) == ((x[:, 0] > 0).long() + flip) % 2).float().mean()
        assert right > 0.85
    if private is not None:
        assert math.isfinite(federation.ledger.epsilon(1e-3)) and federation.ledger.unit == "point"
        assert {row["task"] for row in federation.transcript.rows()} == {
            f"RDPCFL.{t}" for t in ("begin", "fit", "choose")
        }


def test_stages_follow_each_other() -> None:
    """Round 1: first updates; up to Ec: drawn from π; E/10 rounds of selection; then frozen."""
    federation = shifted([12] * 4, [0, 0, 1, 1])
    method = RDPCFL(MODEL, local=LOCAL, clusters=2, rounds=20)
    sent: list[int] = []  # bytes of selected clusters so far, after each round
    clusters: list[list[int]] = []

    def note(_: int, state: State) -> None:
        sent.append(federation.traffic.up["cluster"])
        clusters.append(state.cluster.tolist())

    state = train(method, federation, 20, after_round=note)
    ec = max(1, math.floor((1 - float(state.mpo)) * 10))
    assert [number for number in range(2, 21) if sent[number - 1] > sent[number - 2]] == [ec + 1, ec + 2]
    assert clusters[0] == [-1] * 4 and clusters[-1] == clusters[ec + 1] and method.selections == 2


def test_a_private_selection_has_the_probabilities_of_the_exponential_mechanism() -> None:
    rows = torch.ones(2000 * 3, 2)
    clients = Clients.from_sizes(rows, torch.zeros(6000, dtype=torch.int64), torch.full((2000,), 3))
    model = Model(build("logistic", (2,), 2))
    right = model.flatten({k: torch.zeros_like(v) for k, v in model.tensors(model.init(0)).items()})
    names = model.tensors(right)
    bias = next(name for name, value in names.items() if value.ndim == 1)
    models = torch.stack([model.flatten({**names, bias: torch.tensor(b)}) for b in ([1.0, -1.0], [-1.0, 1.0])])
    method = RDPCFL(model, local=replace(LOCAL, private=PointPrivacy(1.0, 1.0)), clusters=2, selection=0.5)
    chosen = simulate(clients).everyone().ask(method.choose, models=models)["cluster"]
    expected = 1 / (1 + math.exp(-0.5 * 3 / 2))  # three samples right against none
    assert float((chosen == 0).double().mean()) == pytest.approx(expected, abs=4 * (0.25 / 2000) ** 0.5)


def test_noise_pays_for_first_round_later_rounds_and_selections_together() -> None:
    federation = shifted([24] * 3, [0, 0, 1])
    private = PointPrivacy(1.0, epsilon=4.0, delta=1e-2, rounds=4)
    method = RDPCFL(MODEL, local=replace(LOCAL, private=private), clusters=2, rounds=4, selection=0.1)
    train(method, federation, 4)
    spent = federation.ledger.epsilons(1e-2)
    assert all(0.97 * 4.0 < one <= 4.0 for one in spent.values()), spent


def test_first_updates_of_small_batches_have_the_noise_of_as_many_more_steps() -> None:
    """Σ of N/b steps with noise z·c/b each: the variance of a first update falls as b⁻³ at one z (Lemma 4.1)."""
    found = {}
    for batch in (4, None):
        local = LocalSGD(epochs=1, batch=4, lr=1.0, private=PointPrivacy(1.0, 50.0))
        method = RDPCFL(Model(build("logistic", (400,), 2)), local=local, first_batch=batch)
        federation = shifted([16, 16], [0, 1], features=400).begin_round(1)
        updates = federation.everyone().ask(method.begin, theta=method.model.init(0))["update"]
        found[batch] = float(updates.var())
    assert found[4] / found[None] == pytest.approx((16 / 4) ** 3, rel=0.15)
    assert found[None] == pytest.approx((50 / 16) ** 2, rel=0.15)


def test_one_cluster_is_fedavg_and_known_clusters_are_fedavg_in_each() -> None:
    sizes = [16] * 4
    fedavg = train(FedAvg(MODEL, 1.0, LOCAL), shifted(sizes, [0] * 4), 2).theta
    one = train(RDPCFL(MODEL, local=LOCAL, clustering="one"), shifted(sizes, [0] * 4), 2).models
    assert torch.allclose(one[0], fedavg, atol=1e-6)
    known = RDPCFL(MODEL, local=LOCAL, clustering="known", known=(0, 1, 0, 1))
    found = train(known, shifted(sizes, [0] * 4), 1).models
    federation = shifted(sizes, [0] * 4).begin_round(1)
    cohort = federation.sample(1.0, labeled=True)
    start = MODEL.init(1)
    updates = cohort.ask(known.fit, theta=each(start.expand(4, -1)), rate=1.0)["update"]
    for m in (0, 1):
        members = cohort.positions % 2 == m
        assert torch.allclose(found[m], start + updates[members].mean(0), atol=1e-6)
    apart = train(RDPCFL(MODEL, local=LOCAL, clustering="each"), shifted(sizes, [0] * 4), 1)
    assert apart.models.shape[0] == 4 and apart.cluster.tolist() == [0, 1, 2, 3]


def test_ifca_finds_clusters_from_models_that_begin_unlike_each_other() -> None:
    flips = [0, 1, 0, 1, 0, 1]
    federation = shifted([40] * 6, flips)
    method = RDPCFL(MODEL, local=LOCAL, clustering="selection", clusters=2, rounds=60)
    state = train(method, federation, 8)
    assert alike(state.cluster, torch.tensor(flips))
    with pytest.raises(ValueError, match="give clusters"):
        RDPCFL(MODEL, clustering="selection")


def test_mr_mtl_is_its_update_written_out() -> None:
    federation = shifted([6, 9], [0, 1])
    x = normal(15, 5, seed=3).float()
    y = ((x[:, 0] > 0).long() + torch.tensor([0] * 6 + [1] * 9)) % 2
    local = LocalSGD(steps=2, epochs=None, batch=None, lr=0.3)
    state = train(MRMTL(MODEL, local=local, strength=0.7), federation, 2)
    mean = MODEL.init(1)
    own = [mean, mean]
    for _ in range(2):
        after = []
        for w, rows in zip(own, (slice(0, 6), slice(6, 15)), strict=True):
            for _ in range(2):
                w = w.detach().requires_grad_()
                loss = torch.nn.functional.cross_entropy(MODEL(w, x[rows]), y[rows])
                (gradient,) = torch.autograd.grad(loss, w)
                w = w.detach() - 0.3 * (gradient + 0.7 * (w.detach() - mean))
            after.append(w)
        own, mean = after, torch.stack(after).mean(0)
    assert torch.allclose(state.mean, mean, atol=1e-6)
    with federation.aside() as aside:
        cohort = aside.everyone()
        assert torch.allclose(opened(cohort, MRMTL(MODEL).personalize(state, cohort)), torch.stack(own), atol=1e-6)
