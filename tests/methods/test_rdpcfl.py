"""R-DPCFL and IFCA: planted clusters, closed forms of separation and selection, and steps written out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import dp_event, pld
from torch import Tensor

from tests.methods.small import normal, shifted
from unalike import Clients, LocalSGD, Model, State, simulate, train
from unalike.core.federation import each
from unalike.methods.fedavg import FedAvg
from unalike.methods.mixture import mixture_of, principal
from unalike.methods.rdpcfl import RDPCFL
from unalike.networks.architectures import build
from unalike.privacy.dpsgd import PointPrivacy
from unalike.runs.simulate import gather_models

TRUE = torch.tensor([0] * 3 + [1] * 6 + [2] * 6 + [3] * 6)


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
        thetas = gather_models(cohort, method.personalize(state, cohort))
    for theta, flip in zip(thetas, flips, strict=True):
        x = normal(200, 5, seed=9).float()
        right = (MODEL(theta, x).argmax(1) == ((x[:, 0] > 0).long() + flip) % 2).float().mean()
        assert right > 0.85
    if private is not None:
        assert math.isfinite(federation.ledger.epsilon(1e-3)) and federation.ledger.unit == "point"
        assert {row["task"] for row in federation.transcript.rows()} == {
            f"RDPCFL.{t}" for t in ("fit_first", "fit", "select")
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
    chosen = simulate(clients).everyone().ask(method.select, models=models)["cluster"]
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
        federation = shifted([16, 16], [0, 1], features=400)
        updates = federation.everyone().ask(method.fit_first, theta=method.model.init(0))["update"]
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
    federation = shifted(sizes, [0] * 4, round=1)
    cohort = federation.sample(1.0, labeled=True)
    start = MODEL.init(1)
    updates = cohort.ask(known.fit, theta=each(start.expand(4, -1)), rate=1.0)["update"]
    for m in (0, 1):
        members = cohort.positions % 2 == m
        assert torch.allclose(found[m], start + updates[members].mean(0), atol=1e-6)
    apart = train(RDPCFL(MODEL, local=LOCAL, clustering="each"), shifted(sizes, [0] * 4), 1)
    assert apart.models.shape[0] == 4 and apart.cluster.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("classes, lr", [(3, 10.0), (None, 2.0)])
def test_ifca_without_epsilon_selects_the_least_loss_in_every_round(classes: int | None, lr: float) -> None:
    """Ghosh et al., Algorithm 1 with model averaging, written out in NumPy: ŝ_i = argmin_j f_i(θ_j) in every round."""
    sizes, d, rounds = (5, 9, 7), 4, 4
    x = normal(sum(sizes), d, seed=7).float()
    y = torch.arange(sum(sizes)) * 5 % 3 if classes else normal(sum(sizes), seed=8).float()
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    model = Model(build("logistic" if classes else "linear", (d,), classes or 1))
    method = RDPCFL(
        model, local=LocalSGD(steps=1, batch=None, lr=lr), clustering="selection", clusters=2, rounds=rounds
    )
    clients = simulate(Clients.from_sizes(x, y, torch.tensor(sizes)))
    selected: list[list[int]] = []
    state = train(method, clients, rounds, after_round=lambda _, now: selected.append(now.cluster.tolist()))

    def loss_and_gradient(theta: np.ndarray, i: int) -> tuple[float, np.ndarray]:
        inputs, targets = x[rows[i]].double().numpy(), y[rows[i]].numpy()
        if classes is None:
            away = inputs @ theta - targets
            return float((away**2).mean() / 2), inputs.T @ away / len(inputs)
        tensors = model.tensors(torch.from_numpy(theta))
        scores = inputs @ tensors["linear.weight"].numpy().T + tensors["linear.bias"].numpy()
        p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        away = (p - np.eye(classes)[targets]) / len(inputs)
        loss = -np.log(p[np.arange(len(inputs)), targets]).mean()
        return float(loss), np.concatenate([(away.T @ inputs).ravel(), away.sum(0)])

    models = [one.double().numpy() for one in method.start(0).models]
    for number in range(rounds):
        best = [int(np.argmin([loss_and_gradient(theta, i)[0] for theta in models])) for i in range(3)]
        assert selected[number] == best
        for j, theta in enumerate(list(models)):
            steps = [-lr * loss_and_gradient(theta, i)[1] for i in range(3) if best[i] == j]
            models[j] = theta + np.mean(steps, axis=0) if steps else theta
    assert len({tuple(one) for one in selected}) > 1  # a client changes its mind, so that freezing would be seen
    torch.testing.assert_close(state.models.double(), torch.from_numpy(np.stack(models)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("selection_rounds, expected", [(None, 2), (5, 5), (20, 19)])
def test_clients_select_for_as_many_rounds_as_are_set(selection_rounds: int | None, expected: int) -> None:
    method = RDPCFL(MODEL, local=LOCAL, clusters=2, rounds=20, selection_rounds=selection_rounds)
    federation = shifted([12] * 4, [0, 0, 1, 1])
    sent: list[float] = []
    state = train(method, federation, 20, after_round=lambda *_: sent.append(federation.traffic.up["cluster"]))
    ec = max(1, math.floor((1 - float(state.mpo)) * 10))
    found = [number for number in range(2, 21) if sent[number - 1] > sent[number - 2]]
    assert found == list(range(ec + 1, min(20, ec + expected) + 1))
    with pytest.raises(ValueError, match="selection_rounds=0"):
        RDPCFL(MODEL, selection_rounds=0)


def test_a_private_selection_on_numbers_counts_for_how_many_rows_a_model_has_the_least_loss() -> None:
    """Of four rows three are nearer to the first of two constant models: it is selected with odds exp(ε·(3 − 1)/2)."""
    count, epsilon = 4000, 0.8
    y = torch.tensor([0.2, 0.4, 0.3, 12.0]).repeat(count)
    clients = Clients.from_sizes(torch.ones(4 * count, 1), y, torch.full((count,), 4))
    model = Model(build("linear", (1,), 1))
    private = replace(LOCAL, private=PointPrivacy(1.0, 1.0))
    method = RDPCFL(model, local=private, clusters=2, selection=epsilon)
    federation = simulate(clients)
    models = torch.tensor([[0.0], [5.0]])
    selected = federation.everyone().ask(method.select, models=models)["cluster"]
    expected = 1 / (1 + math.exp(-epsilon * (3 - 1) / 2))
    assert float((selected == 0).double().mean()) == pytest.approx(expected, abs=4 * (0.25 / count) ** 0.5)
    assert federation.ledger.epsilon(1e-9) == pytest.approx(epsilon, rel=1e-2)
    # without an ε the outlier decides: the mean loss of the first model is larger
    alone = replace(method, local=LOCAL)
    assert set(simulate(clients).everyone().ask(alone.select, models=models)["cluster"].tolist()) == {1}


def test_noise_pays_for_private_statistics_of_the_inputs_too() -> None:
    """z is larger where a Gaussian sum was released before, and without that ε would be exceeded."""
    private = PointPrivacy(1.0, epsilon=4.0, delta=1e-2, rounds=4, also=(2.0,))
    declared = shifted([24] * 3, [0, 0, 1]).everyone().declarations
    found = {}
    for one in (private, replace(private, also=())):
        method = RDPCFL(MODEL, local=replace(LOCAL, private=one), clusters=2, rounds=4, selection=0.1)
        found[one.also] = float(method.budget.multipliers(declared)[0])
    assert found[(2.0,)] > 1.02 * found[()]

    def training(z: float) -> float:
        account = pld.PLDAccountant()
        steps = [dp_event.PoissonSampledDpEvent(8 / 24, dp_event.GaussianDpEvent(z))] * (3 * 3)
        first, before = dp_event.GaussianDpEvent(z), dp_event.GaussianDpEvent(2.0)
        return float(account.compose(dp_event.ComposedDpEvent([*steps, first, before])).get_epsilon(1e-2))

    assert 3.6 < training(found[(2.0,)]) < 4.0 < training(found[()])  # one selection costs at most 0.4


def test_ifca_finds_clusters_from_models_that_begin_unlike_each_other() -> None:
    flips = [0, 1, 0, 1, 0, 1]
    federation = shifted([40] * 6, flips)
    method = RDPCFL(MODEL, local=LOCAL, clustering="selection", clusters=2, rounds=60)
    state = train(method, federation, 8)
    assert alike(state.cluster, torch.tensor(flips))
    with pytest.raises(ValueError, match="give clusters"):
        RDPCFL(MODEL, clustering="selection")
