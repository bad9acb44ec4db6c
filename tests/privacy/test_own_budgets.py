"""Every client its own (ε, δ) and batch size: noise, accounts and who stops, against closed forms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reproductions.hdp import draws
from unalike import Clients, Federation, Model, simulate
from unalike.core.client import Kept
from unalike.core.draws import key
from unalike.core.method import train
from unalike.core.release import Each
from unalike.core.request import Program
from unalike.core.roster import Roster
from unalike.data.population import Population
from unalike.learn.dpsgd import PoissonBatches, PrivateGradient
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, Supervised, loss_of
from unalike.methods.fedavg import FedAvg
from unalike.methods.rdpcfl import RDPCFL
from unalike.methods.robust_hdp import RobustHDP
from unalike.networks.architectures import build
from unalike.privacy.dpsgd import PointPrivacy
from unalike.privacy.ledger import BudgetExceeded
from unalike.runs.declared import declare
from unalike.runs.errors import UserError
from unalike.runs.load import load_data
from unalike.runs.prepare import build as build_method
from unalike.runs.recipe.recipe import Recipe, to_recipe
from unalike.runtime.shard.shard import Shard
from unalike.runtime.simulate import Simulation


def population(sizes: list[int], **declared: list[float]) -> Population:
    rows = sum(sizes)
    x = torch.randn(rows, 12, generator=torch.Generator().manual_seed(0))
    clients = Clients.from_sizes(x, (x[:, 0] > 0).to(torch.int64), torch.tensor(sizes))
    none = replace(clients, size=torch.zeros_like(clients.size))
    types = {"batch": torch.int64}
    said = {name: torch.tensor(value, dtype=types.get(name, torch.float64)) for name, value in declared.items()}
    everyone = torch.arange(len(sizes))
    return Population("tiny", "features", clients, none, none, everyone, everyone[:0], 2, declared=said)


def model() -> Model:
    return Model(build("logistic", (12,), 2))


def updates(method: FedAvg, data: Population, block: int | None = None) -> Tensor:
    cohort = simulate(data, 1, block=block).everyone()
    return cohort.ask(method.fit, theta=method.model.init(0), rate=1.0, into=Each("update"))["update"]


def test_one_block_holds_clients_of_all_batch_sizes() -> None:
    """Noise of an epoch: n/b steps of (lr·z·C/b)², so its deviation falls as b^-1.5."""
    data = population([64] * 3 + [48], batch=[2, 16, 64, 2])
    local = LocalSGD(epochs=1, batch=None, lr=0.5, private=PointPrivacy(1.0, 100.0, batches=(2, 16, 64)))
    method = FedAvg(model(), 1.0, local)
    wide = replace(method, model=Model(build("mlp", (12,), 2, hidden=(200,))))
    found = updates(wide, data).std(1)
    expected = [0.5 * 100 * (64 / b) ** 0.5 / b for b in (2, 16, 64)] + [0.5 * 100 * 24**0.5 / 2]
    assert found.tolist() == pytest.approx(expected, rel=0.05)
    together, singly = updates(method, data), updates(method, data, block=1)
    assert torch.allclose(together, singly, atol=1e-5 * float(singly.abs().max()))


def test_the_divisor_is_the_expected_batch_and_an_empty_one_keeps_its_noise() -> None:
    data = population([40] * 60, batch=[1] * 60)
    private = PointPrivacy(0.1, 1e-6, batches=(1,))
    method = FedAvg(model(), 1.0, LocalSGD(steps=1, epochs=None, lr=1.0, private=private))
    length = torch.linalg.vector_norm(updates(method, data), dim=1) / 0.1  # how many points were taken, if all agreed
    empty = length < 1e-3
    assert 0.2 < float(empty.double().mean()) < 0.55 and bool((length > 1.2).any())  # e^-1 of them; never divided away
    assert bool((length[empty] > 0).all())


def test_rate_and_divisor_are_those_of_the_declared_size() -> None:
    """A client with half of the rows that it declared takes half as many on average, and divides by as much."""
    data = population([20])
    block = data.train.block(torch.arange(1))
    drawn = []
    for number in range(300):
        columns = {name: one[0] for name, one in block.columns(key(number), torch.tensor([40])).items()}
        client = block.client(columns, Kept())
        batches = PoissonBatches(client, 1, None, 10)
        drawn.append(len(next(batches.batches(client.x, None)).x))
    assert sum(drawn) / 300 == pytest.approx(5.0, abs=4 * (5 * 0.75 / 300) ** 0.5)
    noise = PrivateGradient(Supervised(model()), PointPrivacy(1.0, 1.0), torch.tensor(1e-9), None, client)
    theta = model().init(0)
    made, _ = noise(theta, Batch(client.x, client.y, client.mask.float()))

    def losses(own: Tensor) -> Tensor:
        return loss_of(model()(own, client.x), client.y)

    gradients: Tensor = torch.autograd.functional.jacobian(losses, theta)
    clipped = gradients / gradients.norm(dim=1, keepdim=True).clamp(min=1.0)
    assert torch.allclose(made, clipped.sum(0) / 40, atol=1e-4)


@pytest.mark.parametrize("rows", [9, 8, 3])
def test_the_number_of_steps_is_that_of_the_declared_size(rows: int) -> None:
    """Batches of 8 of at most 9 rows: two steps an epoch, however many rows there are. Else the noise would tell."""
    clients = Clients.from_sizes(torch.zeros(rows, 12), torch.zeros(rows, dtype=torch.int64), torch.tensor([rows]))
    program = Program(open=True)
    shard = Shard({"train": clients}, replace(clients.roster(), bound=torch.tensor([9])), program)
    local = LocalSGD(epochs=5, batch=8, lr=1.0, private=PointPrivacy(1e-3, 10.0))
    method = FedAvg(Model(build("mlp", (12,), 2, hidden=(200,))), 1, local)
    state = method.start(0)
    after = method.round(state, Federation(Simulation([shard], program), 0).begin_round(1))
    spread = float((after.theta - state.theta).std())
    assert spread == pytest.approx(10 * 1e-3 / 8 * 10**0.5, rel=0.06)


@pytest.mark.parametrize("network", ["logistic", "small"])  # with ghost norms, and with every point's gradient
def test_a_batch_beyond_n_takes_every_row_beside_a_client_with_batches_of_one(network: str) -> None:
    """Two steps of clipped gradient descent, written out."""
    data = population([30, 30], batch=[1, 64])
    private = PointPrivacy(0.5, 1e-9, batches=(1, 64))
    net = (
        model() if network == "logistic" else Model(torch.nn.Sequential(torch.nn.Linear(12, 2), torch.nn.LayerNorm(2)))
    )
    method = FedAvg(net, 1.0, LocalSGD(steps=2, epochs=None, lr=0.7, private=private))
    found = updates(method, data)[1]
    x, y = data.train.rows(1)
    theta = net.init(0)
    for _ in range(2):

        def losses(own: Tensor) -> Tensor:
            return loss_of(net(own, x), y)  # type: ignore[arg-type]

        gradients: Tensor = torch.autograd.functional.jacobian(losses, theta)
        theta = theta - 0.7 * (gradients / (gradients.norm(dim=1, keepdim=True) / 0.5).clamp(min=1.0)).sum(0) / 30
    assert torch.allclose(found, theta - net.init(0), atol=1e-4)


def test_every_account_ends_just_below_what_its_client_declares() -> None:
    data = population([16, 24], epsilon=[0.5, 3.0], delta=[1e-3, 1e-2], batch=[4, 8])
    private = PointPrivacy(1.0, rounds=2, per_client=True, batches=(4, 8))
    federation = simulate(data)
    train(FedAvg(model(), 1.0, LocalSGD(epochs=1, private=private)), federation, 2)
    for client, (epsilon, delta) in enumerate([(0.5, 1e-3), (3.0, 1e-2)]):
        assert 0.98 * epsilon < federation.ledger.epsilon(delta, client=client) <= epsilon


def test_who_has_spent_its_budget_stops_and_the_others_go_on() -> None:
    data = population([16] * 3, epsilon=[1.5, 50.0, 1.5], delta=[1e-3] * 3)
    method = FedAvg(model(), 1.0, LocalSGD(steps=1, epochs=None, batch=4, private=PointPrivacy(1.0, 1.0)))
    federation = simulate(data)
    train(method, federation, 12)
    spent = federation.ledger.epsilons(1e-3)
    assert spent[0] == spent[2] <= 1.5 < spent[1] < 50
    with pytest.raises(BudgetExceeded, match=r"the budget of client 0 is ε = 1\.5 at δ = 0\.001"):
        federation.everyone().ask(method.fit, theta=method.model.init(0), rate=1.0)
    bare = replace(method, local=LocalSGD(steps=1, epochs=None))
    with pytest.raises(BudgetExceeded, match="the ask has no noise"):
        simulate(data).everyone().ask(bare.fit, theta=method.model.init(0), rate=1.0)


def test_a_roster_carries_what_clients_declare() -> None:
    roster = population([3, 4, 5], epsilon=[1.0, 2.0, 3.0], delta=[0.1] * 3, batch=[2, 4, 8]).roster()
    halves = [Roster.decode(roster.select(which).encode()) for which in ([0, 2], [1])]
    again = Roster.join(halves)
    for name in ("epsilon", "delta", "batch"):
        assert torch.equal(getattr(again, name), getattr(roster, name))
    assert roster.declarations(torch.tensor([2])).batch.tolist() == [8]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="those of others do not"):
        Roster.join([halves[0], replace(halves[1], batch=None)])
    with pytest.raises(ValueError, match="epsilon has a number between 0 and inf"):
        replace(roster, epsilon=-roster.epsilon)  # type: ignore[operator]
    with pytest.raises(ValueError, match="an epsilon and a delta"):
        replace(roster, delta=None)


def recipe(**privacy: object) -> Recipe:
    return to_recipe({"method": "fedavg", "privacy": privacy}, "a test")


def test_budgets_come_from_a_file_or_a_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = population([2] * 4)
    file = tmp_path / "budgets.csv"
    file.write_text("client,epsilon,batch\n2,3.0,8\n0,1.0,2\n1,2.0,4\n3,4.0,16\n3,4.0,16\n")
    found = declare(recipe(epsilons=str(file)), data, 1e-3).roster()
    assert found.epsilon is not None and found.batch is not None and found.delta is not None
    assert (found.epsilon.tolist(), found.batch.tolist()) == ([1.0, 2.0, 3.0, 4.0], [2, 4, 8, 16])
    assert found.delta.tolist() == [1e-3] * 4
    file.write_text("client,epsilon\n0,1.0\n1,1.0\n2,1.0\n3,1.0\n3,2.0\n")
    with pytest.raises(UserError, match="the rows of client '3' do not agree"):
        declare(recipe(epsilons=str(file)), data, 1e-3)
    file.write_text("client,epsilon\n0,1.0\n")
    with pytest.raises(UserError, match="3 clients have no epsilon there, the first is '1'"):
        declare(recipe(epsilons=str(file)), data, 1e-3)
    table = tmp_path / "shops.csv"
    rows = "\n".join(f"{shop},{i},{i % 2},{1 + len(shop)}" for i in range(12) for shop in ("a", "bb"))
    table.write_text(f"shop,x,y,grants\n{rows}\n")
    own = {"name": str(table), "options": {"client_column": "shop"}, "unseen": 0, "partition": None}
    asked = to_recipe({"method": "fedavg", "privacy": {"epsilons": "column:grants"}, "data": own}, "a test")
    shops = load_data(asked)
    assert shops.input_shape == (1,)  # what a client grants is no feature
    assert declare(asked, shops, 1e-3).declared["epsilon"].tolist() == [2.0, 3.0]
    monkeypatch.setenv("UNALIKE_DATA", str(tmp_path))
    drawn = draws.draw("dist6", 300, 0)
    assert 0.4 < float(drawn["epsilon"].mean()) < 0.7 and set(drawn["batch"].tolist()) == {16, 32, 64, 128}
    (tmp_path / "robust-hdp").mkdir()
    written = {"Dist6": {"4": {"eps": [0.1, 0.2, 0.3, 0.4], "batch": [16] * 4}}}
    (tmp_path / "robust-hdp" / "dists.json").write_text(json.dumps(written))
    authors = draws.authors_draws("dist6", 4)
    assert authors is not None and authors["epsilon"].tolist() == [0.1, 0.2, 0.3, 0.4]
    draws.main("dist6", 4)
    file.write_text(capsys.readouterr().out)
    assert declare(recipe(epsilons=str(file)), data, 1e-3).declared["epsilon"].tolist()[:3] == [0.1, 0.2, 0.3]
    uniform = declare(recipe(epsilons="uniform:0.2,2"), population([2] * 50), 1e-3).declared["epsilon"]
    assert 0.2 <= float(uniform.min()) < float(uniform.max()) <= 2
    for wrong in ("uniform:2", "uniform:0,1", "nowhere.csv"):
        with pytest.raises(UserError, match="epsilons"):
            declare(recipe(epsilons=wrong), data, 1e-3)
    with pytest.raises(UserError, match="not both"):
        recipe(epsilons="uniform:0.2,2", epsilon=1.0)
    assert recipe(epsilons="uniform:0.2,2").privacy.unit == "point"


def test_a_recipe_makes_methods_from_what_clients_declare() -> None:
    roster = population([20] * 3, epsilon=[2.0, 0.5, 1.0], delta=[1e-3] * 3, batch=[4, 8, 16]).roster()

    def built(name: str) -> RobustHDP | RDPCFL:
        values = {"method": name, "rounds": 30, "privacy": {"epsilons": "uniform:0.2,2", "clip": 3.0}}
        method = build_method(to_recipe(values, "a test"), roster)[1]
        assert isinstance(method, RobustHDP | RDPCFL)
        return method

    own = PointPrivacy(3.0, delta=60**-1.1, rounds=30, per_client=True, batches=(4, 8, 16))
    assert built("robust-hdp").local.private == built("rdpcfl").local.private == own
    assert built("minimum-epsilon").local.private == replace(own, per_client=False, epsilon=0.5)
    assert built("rdpcfl").rounds == 30
