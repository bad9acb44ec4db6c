"""``--preset paper``: what the documents print, in place of the defaults; what is set by hand still counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from tests.runs.helpers import FLAGS
from unalike import run, simulate, train
from unalike.commands.main import app
from unalike.core.client import Clients
from unalike.core.model import Model
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.learn.local import LocalSGD
from unalike.learn.server import ServerOptimizer
from unalike.methods import METHODS
from unalike.methods.local import Local
from unalike.methods.odpfl import ODPFL
from unalike.methods.pefll import PeFLL
from unalike.methods.pfedhn import PFedHN
from unalike.methods.problem import Problem
from unalike.networks.architectures import build as network
from unalike.networks.sets import set_encoder
from unalike.runs.errors import UserError
from unalike.runs.prepare import build
from unalike.runs.recipe.recipe import read_recipe, to_recipe
from unalike.runs.recipe.settings import plan_for
from unalike.runs.simulate import gather_models

PRESETS = [name for name, entry in METHODS.items() if "paper" in entry.presets]
ROWS = Schema((6,), kind="features", target="class", classes=10)


def built(name: str, clients: int = 90, model: str = "mlp", preset: str = "paper", **given: Any) -> Any:
    """A method as a run would build it."""
    roster = Roster(torch.arange(clients), torch.full((clients,), 500), torch.ones(clients, dtype=torch.bool), ROWS)
    return build(
        to_recipe({"method": name, "preset": preset, "model": {"name": model}, "hyperparameters": given}, "test"),
        roster,
    )[1]


def test_pefll_is_that_of_the_thesis() -> None:
    """T1 §4.4, B.1.2, Table B.3 and (B.76): figures typed from the pages."""
    method = built("pefll")
    assert isinstance(method, PeFLL)
    assert method.length == 22, "a quarter of the 90 training clients"
    hidden = [shape for name, shape in method.hypernet.shapes.items() if name.startswith("trunk") and len(shape) == 2]
    assert hidden == [(100, 22), (100, 100), (100, 100), (100, 100)]
    assert method.describe_rows == method.newcomer_rows == 32 and method.describe_share == 1
    assert method.steady == 1 and method.server == ServerOptimizer("adam", lr=2e-4)
    assert method.local == LocalSGD(steps=50, batch=32, lr=2e-3, momentum=0.9, clip=50.0)
    assert method.lambda_theta == 0 and method.lambda_h == method.lambda_v == 1e-3
    assert built("pefll-unlabeled").serves_unlabeled


def test_its_decay_is_that_of_the_analysis() -> None:
    """η ← (1 − 2βkλ)η with the clients' β = 2e-3 and k = 50 (T1 B.76): 2e-4 a round, as the gradients here are 0."""
    x, y = torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64)
    clients = Clients.from_sizes(x, y, torch.tensor([4, 4]))
    problem = Problem(Model(network("logistic", (3,), 2)), (3,), 2, 2)
    still = LocalSGD(steps=50, batch=4, lr=2e-3, momentum=0.9)
    method = PeFLL(
        problem, cohort=2, local=still, server=ServerOptimizer("sgd", lr=1e-30), decay="clients", descriptor=2
    )
    state = method.start(0).replace(scale=torch.ones(()))
    after = train(method, simulate(clients), 1, state)
    for name in ("hypernet", "embedding"):
        torch.testing.assert_close(after[name], state[name] * (1 - 2e-4), rtol=1e-6, atol=1e-20)
    with pytest.raises(ValueError, match=r"give local\.steps"):
        PeFLL(problem, local=LocalSGD(epochs=1), decay="clients")


def test_the_whole_client_may_be_described_in_training() -> None:
    """A client of 8 rows and a batch of 32: φ averages 4 rows by default, and with the paper's settings all 8."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    clients = Clients.from_sizes(x, torch.zeros(8, dtype=torch.int64), torch.tensor([8]))
    problem = Problem(Model(network("logistic", (3,), 2)), (3,), 2, 2)
    found = []
    for share in (0.5, 1.0):
        method = PeFLL(problem, labels="ignored", descriptor=2, describe_share=share)
        eta = method.embedding.init(0)
        v = simulate(clients).everyone().ask(method.describe, embedding=eta)["descriptor"][0]
        found.append(torch.allclose(v, method.embedding(eta, x).mean(0), atol=1e-6))
    assert found == [False, True]


def test_pfedhn_is_that_of_its_authors() -> None:
    method = built("pfedhn")
    assert isinstance(method, PFedHN)
    assert method.server == ServerOptimizer("momentum", lr=1e-2) and method.descriptor_lr == 1e-2
    assert method.local == LocalSGD(
        steps=50, epochs=None, batch=64, lr=5e-3, momentum=0.9, weight_decay=5e-5, clip=50.0
    )
    assert method.weight_decay == 1e-3 and method.lambda_h == 0 and method.newcomer_rounds == 20
    assert sum(name.startswith("trunk") for name in method.hypernet.shapes) == 2 * 4


def test_its_steps_are_those_of_pytorchs_sgd() -> None:
    """Two rounds of h and v under momentum and weight decay, beside torch.optim.SGD on the same gradients."""
    random = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 3, generator=random), torch.randint(2, (12,), generator=random)
    clients = Clients.from_sizes(x, y, torch.tensor([6, 6]))
    model = Model(network("logistic", (3,), 2))
    method = PFedHN(
        Problem(model, (3,), 2, 2), cohort=2, local=LocalSGD(steps=1, batch=None, lr=1.0), descriptor=2, layers=2,
        server=ServerOptimizer("momentum", lr=0.3), descriptor_lr=0.05, lambda_h=0.0, weight_decay=0.1,
    )  # fmt: skip
    state, federation = method.start(0), simulate(clients)
    h, v = (state[name].clone().requires_grad_(True) for name in ("hypernet", "descriptors"))
    torch_sgd = torch.optim.SGD([{"params": [h]}, {"params": [v], "lr": 0.05}], lr=0.3, momentum=0.9, weight_decay=0.1)
    for _ in range(2):
        state = train(method, federation, 1, state)
        torch_sgd.zero_grad()
        theta = method.hypernet(h, v)
        sum(
            F.cross_entropy(model(theta[i], x[6 * i : 6 * i + 6]), y[6 * i : 6 * i + 6]) / 2 for i in range(2)
        ).backward()  # type: ignore[union-attr]
        torch_sgd.step()
    torch.testing.assert_close(state.hypernet, h.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(state.descriptors, v.detach(), atol=1e-6, rtol=1e-5)


def test_odpfl_is_that_of_its_appendix() -> None:
    method = built("odpfl")
    assert isinstance(method, ODPFL)
    assert method.cohort == 0.1 and method.encoder == "deepset-once" and method.calibration == 0
    assert sum(name.startswith("trunk") for name in method.hypernet.shapes) == 2 * 3, "three hidden layers"
    assert method.local.epochs == 5 and method.local.steps is None and method.local.momentum == 0.9
    assert method.server == ServerOptimizer("momentum", lr=1e-2) and method.newcomer_epsilon is None


def test_the_deep_sets_of_the_paper_pool_where_it_says() -> None:
    """P2 App. C for vectors, and §6.3 for images, as forward passes that are written out."""
    random = torch.Generator().manual_seed(2)
    own = torch.tensor([True, True, True, False])
    encoder = set_encoder("deepset-once", (6,), 3)
    eta, x = encoder.init(0), torch.randn(4, 6, generator=random)
    t = encoder.tensors(eta)
    first = (x[:3] @ t["phi.weight"].T + t["phi.bias"]).relu()
    assert first.shape == (3, 500)
    value = torch.cat([first[:, :250].mean(0), first[:, 250:].amax(0)])
    for layer in range(3):
        value = t[f"psi.layers.{layer}.weight"] @ value + t[f"psi.layers.{layer}.bias"]
        value = value if layer == 2 else value.relu()
    torch.testing.assert_close(encoder(eta, x, own), value)

    encoder = set_encoder("deepset-every", (1, 20, 20), 3)
    eta, x = encoder.init(0), torch.randn(4, 1, 20, 20, generator=random)
    t = encoder.tensors(eta)
    maps, pieces = x[:3], []
    for number in (1, 2):
        maps = F.max_pool2d(F.conv2d(maps, t[f"conv{number}.weight"], t[f"conv{number}.bias"]), 2).relu()
        units = (maps.flatten(1) @ t[f"flat{number}.weight"].T + t[f"flat{number}.bias"]).relu()
        pieces += [units[:, :100].mean(0), units[:, 100:].amax(0)]
    value = torch.cat(pieces)
    for layer in range(3):
        value = t[f"psi.layers.{layer}.weight"] @ value + t[f"psi.layers.{layer}.bias"]
        value = value if layer == 2 else value.relu()
    torch.testing.assert_close(encoder(eta, x, own), value, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="take 'deepset-once'"):
        set_encoder("deepset-every", (6,), 3)


def test_local_newcomers_train_as_many_epochs_as_the_paper_says() -> None:
    """Three calls in all: five rounds are no more than three, and a newcomer after one round has made three, too."""
    random = torch.Generator().manual_seed(3)
    x, y = torch.randn(10, 3, generator=random), torch.randint(2, (10,), generator=random)
    clients = Clients.from_sizes(x, y, torch.tensor([5, 5]))
    model = Model(network("logistic", (3,), 2))
    method = Local(model, LocalSGD(epochs=1, batch=None, lr=0.1), calls=3)

    def trained(which: int, calls: int) -> torch.Tensor:
        theta, (inputs, labels) = method.first.clone(), clients.rows(which)
        for _ in range(calls):
            theta = theta - 0.1 * torch.func.grad(lambda t: F.cross_entropy(model(t, inputs), labels))(theta)
        return theta

    for rounds, seen in ((1, 1), (5, 3)):
        home = simulate(clients)
        training = type(home)(home.runtime, 0, home.roster.select([0]))
        state = train(method, training, rounds, method.start(0))
        with training.aside(home.roster) as own:
            theta = gather_models(own.everyone(), method.personalize(state, own.everyone()))
        torch.testing.assert_close(theta[0], trained(0, seen), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(theta[1], trained(1, 3), atol=1e-6, rtol=1e-5)
    assert built("local").calls == 200 and built("local").local.epochs == 1


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_fits_its_method(name: str) -> None:
    assert built(name).start(0)
    changed = built(name, local={"lr": 0.125})
    assert changed.local.lr == 0.125 and changed.local.momentum == built(name).local.momentum


def test_the_settings_of_the_documents() -> None:
    steps = {"batch": 10, "lr": 0.01, "momentum": 0.5}  # FedRep, authors' code
    assert built("fedrep").local == LocalSGD(epochs=1, **steps)
    assert built("fedrep").local_head == LocalSGD(epochs=10, **steps) and built("fedrep").newcomer.epochs == 20
    assert built("pfedme").local == LocalSGD(steps=20, batch=20, lr=0.005) and built("pfedme").lambda_ == 15
    assert built("pfedme").inner_steps == 5 and built("pfedme").inner_lr == 0.1 and built("pfedme").server.lr == 1
    assert built("perfedavg").local.lr == 0.001 and built("perfedavg").alpha == 0.02
    assert built("knnper").local.lr == 0.05 and built("knnper").neighbours == tuple(range(1, 11))
    assert {built(name).cohort for name in ("fedavg", "pefll")} == {0.05}  # T1 §4.4
    assert built("pfl-nearest").trainer.weight_decay == 1e-3 and built("pfl-nearest").cohort == 0.1
    assert built("fedem").components == 3 and built("fedem").local == LocalSGD(epochs=1, batch=128, lr=0.03)
    assert built("fedma").local == LocalSGD(epochs=20, batch=64, lr=0.01)
    assert built("fml").local == LocalSGD(epochs=5, lr=0.01, momentum=0.9) and built("fml").alpha == 0.5
    for name in ("adaped", "adaped-continue", "quped"):  # P3 §4.1
        assert built(name).local == LocalSGD(steps=10, batch=1 / 60, lr=0.1, weight_decay=1e-4)
    assert built("adaped").psi == 4 and built("adaped").psi_lr == 0.03 and built("quped").weight == 0.25


def test_the_settings_of_t2() -> None:
    """Chapters 2 to 4, typed from the pages: clip and δ count where a run is private and sets none of its own."""
    split = built("fedsplit", model="mlp")
    assert (split.cohort, split.losses, split.eta, split.alpha, split.beta) == (1.0, "sum", 1e-4, 2.0, 2.0)
    assert built("robust-hdp").blocks == 1 and built("robust-hdp").local == LocalSGD(epochs=1, batch=128, lr=0.1)
    roster = Roster(torch.arange(20), torch.full((20,), 100), torch.ones(20, dtype=torch.bool), ROWS)
    for name, batch in (("robust-hdp", 128), ("weiavg", 128), ("rdpcfl", 32)):
        given = {"method": name, "preset": "paper", "model": {"name": "mlp"}, "rounds": 3}
        assert build(to_recipe(given, "test"), roster)[0].privacy.clip is None
        recipe, method = build(to_recipe({**given, "privacy": {"unit": "point", "epsilon": 5.0}}, "test"), roster)
        assert (recipe.privacy.clip, recipe.privacy.delta) == (3.0, 1e-4)
        private: Any = method
        assert private.local.batch == batch and private.local.private.clip == 3.0
        assert private.local.private.delta == 1e-4
        mine = {"unit": "point", "epsilon": 5.0, "clip": 1.5, "delta": 1e-5}
        recipe, _ = build(to_recipe({**given, "privacy": mine}, "test"), roster)
        assert (recipe.privacy.clip, recipe.privacy.delta) == (1.5, 1e-5)


def test_the_baselines_of_adaped_have_the_values_that_its_paper_gives_them() -> None:
    """P3 §4.1: figures typed from the page."""
    rates = {"fedavg": 0.1, "fedavg-finetune": 0.1, "pfedme": 0.2, "perfedavg": 0.075, "fml": 0.1, "fedem": 0.2}
    for name, rate in (rates | {"quped": 0.1, "adaped": 0.1}).items():
        one = built(name, preset="ozkara2022")
        assert one.local == LocalSGD(steps=10, batch=1 / 60, lr=rate, weight_decay=1e-4), name
        assert [one.schedule(number) for number in (1, 6, 7, 13)] == pytest.approx([1, 1, 0.99, 0.99**2]), name
    assert built("perfedavg", preset="ozkara2022").alpha == 0.001
    assert built("pfedme", preset="ozkara2022").inner_steps == 3 and built("pfedme", preset="ozkara2022").lambda_ == 0.5
    assert built("fml", preset="ozkara2022").alpha == built("fml", preset="ozkara2022").beta == 0.25
    assert built("fedem", preset="ozkara2022").components == 2 and built("quped", preset="ozkara2022").weight == 0.25
    with pytest.raises(UserError, match=r"pefll has no preset 'ozkara2022'; fedavg, "):
        built("pefll", preset="ozkara2022")


def test_from_the_command_line_and_from_python(tmp_path: Path) -> None:
    flags = [*FLAGS, "--rounds=1", "--preset=paper", "--set=steady=2", f"--out={tmp_path / 'run'}"]
    assert CliRunner().invoke(app, ["run", "pefll", *flags, "--quiet"]).exit_code == 0
    recipe = read_recipe(tmp_path / "run" / "recipe.toml")
    assert recipe.preset == "paper" and recipe.hyperparameters["layers"] == 4
    assert recipe.hyperparameters["steady"] == 2, "what is set by hand counts"
    made = run("pfedhn", data="digits", clients=6, rounds=0, preset="paper", model="logistic")
    assert made.method == "pfedhn" and on_preset("pfedhn", "paper")[0].hyperparameters["weight_decay"] == 1e-3


def test_what_is_no_preset_is_refused() -> None:
    with pytest.raises(UserError, match=r"expected one of paper: the settings of the method's paper; ozkara2022: "):
        on_preset("pefll", "thesis")
    with pytest.raises(UserError, match=r"mr-mtl has no preset 'paper'; local, fedavg"):
        on_preset("mr-mtl", "paper")


def on_preset(name: str, preset: str) -> Any:
    (_, recipe), *_ = plan_for([name], {"preset": preset}).runs
    roster = Roster(torch.arange(4), torch.full((4,), 9), torch.ones(4, dtype=torch.bool), ROWS)
    return build(recipe, roster)
