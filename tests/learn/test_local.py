"""The one inner loop against plain PyTorch loops, and its corner cases."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad

from tests.core.helpers import clients, linear
from unalike import Client, LocalSGD, Model, send, simulate, task
from unalike.core.draws import Draws, key
from unalike.core.task import Sent
from unalike.learn.objective import (
    Batch,
    InTurns,
    Moves,
    Params,
    divergence,
    expected,
    loss_of,
    scores,
    target,
    teacher_gradient,
)
from unalike.privacy.dpsgd import PointPrivacy


class Fit:
    """Runs a LocalSGD at clients and sends the result."""

    def __init__(self, local: LocalSGD, model: Model) -> None:
        self.local, self.model = local, model

    @task
    def fit(self, client: Client, theta: Tensor) -> Sent:
        fitted, loss = self.local.train(self.model, theta, client)
        return send(theta=fitted, loss=loss)


def fitted(local: LocalSGD, sizes: list[int], block: int = 100, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    federation = simulate(clients(sizes), block=block, seed=seed)
    model = linear()
    start = model.init(0)
    replies = federation.everyone().ask(Fit(local, model).fit, theta=start)
    return start, replies["theta"], replies["loss"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_full_batch_steps_equal_torch_sgd(momentum: float) -> None:
    sizes = [4, 9, 2]
    local = LocalSGD(epochs=3, batch=None, lr=0.3, momentum=momentum, weight_decay=0.1)
    start, theta, loss = fitted(local, sizes)
    store, model = clients(sizes), linear()
    for i in range(3):
        module = model.module(start)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=momentum, weight_decay=0.1)
        losses = []
        for parameter in module.parameters():
            parameter.requires_grad_(True)
        for _ in range(3):
            x, y = store.rows(i)
            value = F.cross_entropy(module(x), y)
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(value.item())
        assert torch.allclose(theta[i], nn.utils.parameters_to_vector(module.parameters()), atol=1e-5)
        assert float(loss[i]) == pytest.approx(sum(losses) / 3, abs=1e-5)


@pytest.mark.parametrize("block", [1, 4])
def test_an_epoch_takes_every_sample_once_and_averages_a_partial_batch_over_itself(block: int) -> None:
    """With an objective that is linear in theta, a step adds lr · mean(x of the batch): the sum tells the batches."""

    class Track:
        @task
        def track(self, client: Client) -> Sent:
            def objective(theta: Params, batch: Batch) -> Tensor:
                assert isinstance(theta, Tensor)
                return -(theta * batch.mean(batch.x[:, 0])).sum()

            local = LocalSGD(epochs=2, batch=4, lr=1.0)
            moved, _ = local.minimise(objective, torch.zeros(1), client, labels=False)
            assert isinstance(moved, Tensor)
            return send(moved=moved, orders=client.draws.uniform(1))

    sizes = [4, 10, 7, 1]
    store = clients(sizes)
    federation = simulate(store, block=block, seed=9)
    moved = federation.everyone().ask(Track().track)["moved"]
    for i, n in enumerate(sizes):
        draws = Draws(key(key(9, 2, 0, 1), i))  # the client's own draws in the first ask of round 0
        expected = 0.0
        for _ in range(2):
            order = draws.permutation(n, n)
            x = store.rows(i)[0][order, 0]
            expected += sum(float(part.mean()) for part in x.split(4))  # type: ignore[no-untyped-call]
        assert float(moved[i]) == pytest.approx(expected, abs=1e-5)


def test_clients_of_a_block_with_fewer_steps_stop_early() -> None:
    local = LocalSGD(epochs=3, batch=4, lr=0.2, momentum=0.9)
    together = fitted(local, [4, 30, 11], block=3)[1]
    alone = fitted(local, [4, 30, 11], block=1)[1]
    assert torch.allclose(together, alone, atol=1e-5)


def test_fresh_batches_are_drawn_with_replacement_and_steps_are_counted() -> None:
    local = LocalSGD(steps=5, batch=8, lr=0.1)
    start, theta, _ = fitted(local, [3, 50])
    assert not torch.allclose(theta[0], start) and not torch.allclose(theta[1], start)
    assert torch.allclose(fitted(local, [3, 50], block=1)[1], theta, atol=1e-6)


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("local", [LocalSGD(steps=3, batch=0.25, lr=1.0), LocalSGD(epochs=2, batch=0.25, lr=1.0)])
def test_a_batch_may_be_a_share_of_the_samples_rounded_up(local: LocalSGD, block: int) -> None:
    """The first number adds up the batches' sizes, the second their samples."""

    class Track:
        @task
        def track(self, client: Client) -> Sent:
            def objective(theta: Params, batch: Batch) -> Tensor:
                assert isinstance(theta, Tensor)
                weight = torch.ones(len(batch.x)) if batch.weight is None else batch.weight
                return -(theta * torch.stack([weight.sum(), (batch.x[:, 0] * weight).sum()])).sum()

            moved, _ = local.minimise(objective, torch.zeros(2), client, labels=False)
            assert isinstance(moved, Tensor)
            return send(moved=moved)

    sizes = [8, 10, 1]
    store = clients(sizes)
    moved = simulate(store, block=block, seed=9).everyone().ask(Track().track)["moved"]
    for i, (n, size) in enumerate(zip(sizes, (2, 3, 1), strict=True)):
        x = store.rows(i)[0][:, 0]
        if local.steps is None:
            expected = [2.0 * n, 2 * float(x.sum())]
        else:
            draws = Draws(key(key(9, 2, 0, 1), i))  # the client's own draws in the first ask of round 0
            expected = [3.0 * size, float(x[draws.integers(n, size, 3)].sum())]
        assert moved[i].tolist() == pytest.approx(expected, abs=1e-5)


def test_parts_move_in_turns_each_at_the_newest_values_of_the_others() -> None:
    """a ← a − ½·(∇ + decay·a) with momentum, then b, which has no decay and a floor, at the new a."""

    class Turns:
        @task
        def run(self, client: Client) -> Sent:
            def moves(params: dict[str, Tensor], batch: Batch) -> Moves:
                params = yield {"a": params["b"]}
                params = yield {"b": params["a"]}
                return params["a"] + params["b"]

            local = LocalSGD(steps=3, batch=None, lr={"a": 0.5, "b": 0.25}, momentum=0.5, weight_decay=0.1)
            start = {"a": torch.tensor(2.0), "b": torch.tensor(1.0)}
            after, loss = local.minimise(InTurns(moves), start, client, labels=False, least={"b": 0.4}, undecayed=["b"])
            assert isinstance(after, dict)
            return send(**after, loss=loss)

    found = simulate(clients([2])).everyone().ask(Turns().run)
    a, b, speed, other, losses = 2.0, 1.0, 0.0, 0.0, []
    for _ in range(3):
        speed = 0.5 * speed + b + 0.1 * a
        a -= 0.5 * speed
        other = 0.5 * other + a
        b = max(0.4, b - 0.25 * other)
        losses.append(a + b)
    assert b == 0.4  # the floor was reached
    got = [float(found[name]) for name in ("a", "b", "loss")]
    assert got == pytest.approx([a, b, sum(losses) / 3], abs=1e-5)


def test_zero_steps_change_nothing() -> None:
    start, theta, loss = fitted(LocalSGD(epochs=0), [3, 5])
    assert torch.equal(theta, start.expand(2, -1)) and torch.equal(loss, torch.zeros(2))


def test_the_gradient_is_clipped() -> None:
    start, theta, _ = fitted(LocalSGD(epochs=1, batch=None, lr=1.0, clip=0.01), [20, 3])
    assert torch.allclose((theta - start).norm(dim=1), torch.full((2,), 0.01), rtol=1e-4)


def test_parameters_may_be_a_dict_with_a_rate_each() -> None:
    class Two:
        @task
        def fit(self, client: Client) -> Sent:
            def objective(params: Params, batch: Batch) -> Tensor:
                assert isinstance(params, dict)
                return batch.mean(batch.x[:, 0]) * (params["a"] + params["b"])

            local = LocalSGD(epochs=1, batch=None, lr={"a": 1.0, "b": 0.1})
            zero = torch.zeros(())
            params, _ = local.minimise(objective, {"a": zero, "b": zero}, client, labels=False)
            assert isinstance(params, dict)
            return send(**params)

    store = clients([5, 2])
    replies = simulate(store).everyone().ask(Two().fit)
    means = torch.stack([store.rows(i)[0][:, 0].mean() for i in range(2)])
    assert torch.allclose(replies["a"], -means) and torch.allclose(replies["b"], -0.1 * means)


def test_losses_for_classes_and_for_real_targets() -> None:
    outputs, y = torch.tensor([[2.0], [0.0]]), torch.tensor([1.0, 3.0])
    assert loss_of(outputs, y).tolist() == [0.5, 4.5]
    logits = torch.tensor([[0.0, math.log(3.0)]])
    assert float(loss_of(logits, torch.tensor([1]))) == pytest.approx(math.log(4 / 3))


@pytest.mark.parametrize("y", [torch.tensor([1, 0, 2]), torch.tensor([1.0, -0.5, 2.0])])
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 0.0, 1.0])])
def test_gradients_of_outputs_are_those_of_autograd(y: Tensor, weight: Tensor | None) -> None:
    width = 1 if y.is_floating_point() else 3
    batch = Batch(y, y, weight)
    student, teacher = (torch.randn(3, width, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    of_student, of_teacher = scores(student, y), scores(teacher, y)
    q, p = expected(of_student, y), expected(of_teacher, y)
    of_loss = grad(lambda outputs: batch.mean(loss_of(outputs, y)))(student)
    torch.testing.assert_close(batch.mean_gradient(q - target(of_student, y)), of_loss)

    def taught(teacher: Tensor, student: Tensor) -> Tensor:
        return batch.mean(divergence(scores(teacher, y), scores(student, y), y))

    to_teacher, to_student = grad(taught, argnums=(0, 1))(teacher, student)
    torch.testing.assert_close(batch.mean_gradient(q - p), to_student)
    torch.testing.assert_close(batch.mean_gradient(teacher_gradient(of_teacher, of_student, y)), to_teacher)
    if width == 3:
        kl = torch.distributions.kl_divergence(*map(torch.distributions.Categorical, (p, q)))
        torch.testing.assert_close(divergence(of_teacher, of_student, y), kl)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 3, "steps": 5}, "not both"),
        ({"epochs": -1}, "epochs = -1: local training needs epochs or steps of 0 or more"),
        ({"batch": 0}, "batch = 0: expected at least 1, or none"),
        ({"batch": 1.5}, "or a share of them between 0 and 1"),
        ({"batch": 0.5, "private": PointPrivacy(1.0, 1.0)}, "DP-SGD takes a number of samples"),
        ({"lr": -0.1}, "lr = -0.1: expected 0 or more"),
        ({"momentum": 1.0}, "momentum = 1.0: expected at least 0 and below 1"),
    ],
)
def test_nonsense_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalSGD(**settings)  # type: ignore[arg-type]
