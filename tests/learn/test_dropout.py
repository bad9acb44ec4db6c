"""Dropout: against training with masks written out, in every block, with DP-SGD, and off where nobody trains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike import Client, Clients, Each, LocalSGD, Model, send, simulate, task
from unalike.core.draws import Draws, key
from unalike.core.dropout import Masks, dropout_from
from unalike.core.task import Sent
from unalike.learn import dpsgd as private_steps
from unalike.learn.evaluation import Scorer
from unalike.learn.ghost import GhostNorms
from unalike.methods.flowdup import FLowDUP
from unalike.methods.pfedme import PFedMe
from unalike.networks.architectures import build
from unalike.privacy.dpsgd import PointPrivacy
from unalike.runtime.shard import recording

P, LR = 0.4, 0.3


class Functional(nn.Module):
    """A user's network that calls the function and has no module for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x).relu(), P, self.training)
        scores: Tensor = self.second(hidden)
        return scores


def modular(p: float = P) -> Model:
    return Model(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(p), nn.Linear(6, 3)))


@dataclass(frozen=True)
class Trains:
    model: Model
    local: LocalSGD

    @task
    def fit(self, client: Client, theta: Tensor) -> Sent:
        return send(theta=self.local(self.model, theta, client), key=client.draws._key)


def people(sizes: list[int], features: int = 4) -> Clients:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), features, generator=generator)
    return Clients.from_sizes(x, torch.randint(3, (sum(sizes),), generator=generator), torch.tensor(sizes))


def splitmix(state: int) -> int:
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def kept(client: int, call: int, rows: int, width: int) -> np.ndarray:
    """The mask written out in whole numbers: stream 3 of the client's key, the call-th draw, 24 high bits of 64."""
    golden = 0x9E3779B97F4A7C15
    stream = int(key(torch.tensor(client), 3)) % 2**64
    begin = splitmix((stream + call * golden) % 2**64)
    bits = [splitmix((begin + j * golden) % 2**64) >> 40 for j in range(1, rows * width + 1)]
    return np.array([bit >= P * 2**24 for bit in bits]).reshape(rows, width)


@pytest.mark.parametrize("model", [modular(), Model(Functional())], ids=["module", "function"])
def test_steps_are_those_with_the_masks_written_out(model: Model) -> None:
    clients = people([5, 3])
    trains = Trains(model, LocalSGD(epochs=3, batch=None, lr=LR))
    theta = model.init(0)
    replies = simulate(clients).everyone().ask(trains.fit, theta=theta, into=Each("theta", "key"))
    for i, n in enumerate([5, 3]):
        x, y = clients.rows(i)
        assert y is not None
        w1, b1, w2, b2 = (part.clone() for part in model.tensors(theta).values())
        for step in (1, 2, 3):
            mask = torch.from_numpy(kept(int(replies["key"][i]), step, n, 6)).float() / (1 - P)
            before = x @ w1.T + b1
            hidden = before.relu() * mask
            error = ((hidden @ w2.T + b2).softmax(1) - F.one_hot(y, 3)) / n
            back = (error @ w2) * mask * (before > 0)
            w2, b2 = w2 - LR * error.T @ hidden, b2 - LR * error.sum(0)
            w1, b1 = w1 - LR * back.T @ x, b1 - LR * back.sum(0)
        expected = torch.cat([part.reshape(-1) for part in (w1, b1, w2, b2)])
        assert torch.allclose(replies["theta"][i], expected, atol=1e-6)


@pytest.mark.parametrize("local", [{"epochs": 2, "batch": 2}, {"steps": 2, "epochs": None, "batch": 4}], ids=str)
def test_masks_do_not_change_with_the_block(local: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "SPENT", 0.0)
    monkeypatch.setattr(recording, "AFTER", 2)
    clients = people([5, 2, 3, 1])
    trains = Trains(modular(), LocalSGD(**local, lr=LR))
    theta = trains.model.init(0)

    def trained(block: int, asks: int = 1) -> Tensor:
        federation = simulate(clients, block=block)
        for _ in range(asks):
            replies = federation.everyone().ask(trains.fit, theta=theta, into=Each("theta"))
        return replies["theta"]

    alone = trained(1)
    for block in (2, 5):
        assert torch.allclose(trained(block), alone, atol=1e-6)
    assert torch.allclose(trained(5, asks=4), trained(1, asks=4), atol=1e-6), "recorded, and one by one"
    assert not torch.allclose(trained(5, asks=4), alone, atol=1e-3), "another ask has other masks"


def test_batches_are_those_of_the_network_without_dropout() -> None:
    """A mask is drawn apart: a step whose gradient no mask changes is the same bits."""
    clients = people([6, 4])
    plain, dropped = (Model(nn.Sequential(nn.Linear(4, 3), layer)) for layer in (nn.Identity(), nn.Dropout(1e-9)))
    local = LocalSGD(epochs=2, batch=2, lr=LR)
    asked = [
        simulate(clients).everyone().ask(Trains(model, local).fit, theta=plain.init(0), into=Each("theta"))
        for model in (plain, dropped)
    ]
    assert torch.equal(asked[0]["theta"], asked[1]["theta"])


def test_nothing_is_dropped_where_nobody_trains() -> None:
    clients, model = people([40]), modular(0.9)
    theta = model.init(0)
    (x, y), (w1, b1, w2, b2) = clients.rows(0), model.tensors(theta).values()
    outputs = (x @ w1.T + b1).relu() @ w2.T + b2
    assert torch.allclose(model(theta, x), outputs, atol=1e-6)
    score = simulate(clients).everyone().ask(Scorer(model).score, theta=theta, into=Each("score"))["score"]
    assert float(score) == pytest.approx(float((outputs.argmax(1) == y).float().mean()))
    assert any(isinstance(part, nn.Dropout) for part in model.module(theta).modules()), "an export has its dropout"


def test_channels_are_dropped_together_and_the_mean_is_kept() -> None:
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.drop = nn.Parameter(torch.zeros(1)), nn.Dropout2d(P)

        def forward(self, x: Tensor) -> Tensor:
            dropped: Tensor = self.drop(x) + self.weight
            return dropped

    model, x = Model(Probe()), torch.ones(300, 20, 2, 2)
    with dropout_from(Masks(Draws(key(5)))):
        out = model(torch.zeros(1), x)
    assert torch.equal(out, out[:, :, :1, :1].expand_as(out))
    assert out.unique().tolist() == pytest.approx([0.0, 1 / (1 - P)])
    assert float(out.mean()) == pytest.approx(1.0, abs=4 * (P / (1 - P) / 6000) ** 0.5)


def test_every_point_of_dp_sgd_has_a_mask_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipped sums by ghost norms, of the rows together, are those of the points' own gradients, one by one."""
    clients = people([6, 6])
    private = LocalSGD(steps=2, epochs=None, batch=None, lr=LR, private=PointPrivacy(0.3, 1e-9))
    trains = Trains(modular(), private)
    theta = trains.model.init(0)

    def trained() -> Tensor:
        return simulate(clients).everyone().ask(trains.fit, theta=theta, into=Each("theta"))["theta"]

    together = trained()
    monkeypatch.setattr(GhostNorms, "of", lambda *_: None)
    assert torch.allclose(trained(), together, atol=1e-6)
    assert private_steps.GhostNorms is GhostNorms
    everything = Trains(modular(1 - 2**-20), private)
    moved = simulate(clients).everyone().ask(everything.fit, theta=theta, into=Each("theta"))["theta"] - theta
    assert float(moved[:, :30].abs().max()) < 1e-6 < float(moved[:, -3:].abs().min()), "only the last bias learns"


def test_gradients_inside_of_gradients_draw_their_masks() -> None:
    """pFedMe's inner steps are under a gradient that is gone when the outer one draws."""
    method, clients = PFedMe(modular(), local=LocalSGD(steps=2, epochs=None, batch=4, lr=LR)), people([6, 6])
    block, singly = (
        simulate(clients, block=size).everyone().ask(method.fit, w=modular().init(0), rate=torch.tensor(1.0))["update"]
        for size in (2, 1)
    )
    assert torch.allclose(block, singly, atol=1e-6) and float(block.abs().max()) > 0


def test_a_descriptor_has_no_dropout() -> None:
    """FLowDUP's h1 has the architecture of the client model, but what describes data is not dropped."""
    method = FLowDUP(modular(1.0), dimension=8, features=5, width=4, local=LocalSGD(epochs=1, batch=4))
    clients = people([8])
    state = method.start(0)
    psi = {name: state[name] for name in ("h1", "hidden", "last", "bias", "prior")}
    update = simulate(clients).everyone().ask(method.regularize, into=Each("update"), **psi)["update"][0]
    of_h1 = update[: state["h1"].numel()]
    assert float(of_h1[-30:].abs().max()) > 0, "with everything dropped, h1's last layer would not learn"


def test_masks_of_other_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"AlphaDropout \(1\) draws from a global generator.*use nn.Dropout"):
        Model(nn.Sequential(nn.Linear(2, 2), nn.AlphaDropout(0.5)))
    shapeless = Model(nn.Sequential(nn.Linear(4, 3), nn.Dropout1d(0.5)))
    failed = simulate(people([4])).everyone()
    with pytest.raises(Exception, match="dropout of channels reads"):
        failed.ask(Trains(shapeless, LocalSGD()).fit, theta=shapeless.init(0), into=Each("theta"))


def test_the_network_of_the_paper() -> None:
    module = build("dense", (1280,), 1203)
    assert sum(p.numel() for p in module.parameters()) == 1281 * 500 + 501 * 500 + 501 * 1203
    assert [part.p for part in module.modules() if isinstance(part, nn.Dropout)] == [0.2]
