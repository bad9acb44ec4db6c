"""Ways around the ledger that were open once. Each test takes one, as an attacker would, and finds it shut.

The attackers: a reader of a run's folder, a server that reads all that it is sent and chooses what it asks, and a
client that lies.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from safetensors.torch import save
from scipy.stats import binom
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.core.helpers import clients, linear, total
from tests.runs.helpers import At, Crash, crash
from unalike import Client, Clients, Each, Federation, Mean, Model, Sum, simulate, train
from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.budget import KMeansPrivacy
from unalike.api import resume, run
from unalike.core import secure, wire
from unalike.core.client import Kept
from unalike.core.federation import QuorumError, each
from unalike.core.release import Terms, Trust
from unalike.core.request import Program, ReleaseName, Request
from unalike.core.task import Sent, send, task
from unalike.deploy.program import program_of, program_of_run
from unalike.learn.dpsgd import PrivateGradient
from unalike.learn.ghost import GhostNorms
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, Supervised
from unalike.methods.adaped import AdaPeD
from unalike.methods.fedavg import FedAvg
from unalike.privacy import Budget, Everyone, FixedSize, Gaussian, Ledger, Poisson, SystemDraws
from unalike.privacy.dpsgd import LocalCost, PointPrivacy
from unalike.privacy.masks.protocol import SecureClient, SecureServer, SecureSumAborted
from unalike.privacy.masks.session import SecureSession
from unalike.runs.errors import UserError
from unalike.runs.prepare import prepare
from unalike.runs.recipe.settings import plan_for
from unalike.runs.result import Result
from unalike.runtime.shard.shard import PrivateFailure, Refused, Shard
from unalike.runtime.shard.simulator import Simulator
from unalike.runtime.simulate import Simulation

SMALL: dict[str, Any] = {
    "data": "digits", "partition": "iid", "clients": 40, "unseen": 4, "cohort": 0.5, "model": "logistic", "rounds": 2,
    "noise_multiplier": 1.5, "clip": 0.5, "delta": 1e-3, "checkpoint_every": 1, "block": 8, "threads": 1,
}  # fmt: skip


def shards_of(federation: Federation) -> Any:
    assert isinstance(federation.runtime, Simulation)
    return federation.runtime.shards


def noisy(**more: Any) -> Sum:
    return Sum("total", clip=1.0, noise=Gaussian(1.0), **more)


# Seeded noise: what a seed in the folder, or the server that chose it, gives away


@task
def batches(client: Client) -> Sent:
    """What DP-SGD draws its batches and its noise from, and what other training draws from."""
    return send(private=client.noise.bits(2), plain=client.draws.bits(2))


def test_noise_cohorts_and_batches_cannot_be_made_again_from_the_seed_and_the_requests_bytes() -> None:
    def released() -> tuple[Tensor, Tensor, Tensor]:
        federation = simulate(clients([3] * 30), seed=7, noise="system", strict=True)
        cohort = federation.begin_round(1).sample(10)
        replies = federation.everyone().ask(batches)
        return cohort.positions, replies["private"], federation.everyone().ask(total, into=noisy())["total"]

    for one, other in zip(released(), released(), strict=True):
        assert not torch.equal(one, other)
    seeded = [simulate(clients([3] * 30), seed=7).begin_round(1).sample(10).positions for _ in range(2)]
    assert torch.equal(*seeded)  # which is what an attacker with the seed could do


def test_a_server_that_sends_the_same_key_twice_gets_other_draws() -> None:
    federation = simulate(clients([3] * 4), noise="system")
    federation.everyone().ask(batches)
    wanted = tuple(federation.runtime.program.releases(_request([0, 1])))
    assert wanted
    (shard,) = shards_of(federation)
    first, second = ([one.arrays[0] for one in shard.answer(_request([0, 1]))] for _ in range(2))
    for name in ("private", "plain"):
        assert not torch.equal(first[0][name], second[0][name])


def _request(ids: list[int], task_name: str = "batches", **more: Any) -> Request:
    fields: dict[str, Any] = {
        "run": "run", "serial": 99, "task": task_name, "ids": torch.tensor(ids), "part": "train", "labels": True,
        "purpose": "train", "key": 5, "wanted": (ReleaseName("each", ()),), "shared": {}, "each": {},
    }  # fmt: skip
    return Request(**{**fields, **more})


def test_the_operating_systems_draws_differ_in_a_block_and_in_every_play_back() -> None:
    """They were constants under vmap, so that all clients of a block had the same noise."""
    federation = simulate(clients([3] * 8), noise="system", block=8, threads=1)
    method = Drawing()
    rows = [federation.begin_round(n).everyone().ask(method.draw)["bits"] for n in range(1, 4)]
    drawn = torch.cat(rows).flatten().tolist()
    assert len(set(drawn)) == len(drawn)

    keys = torch.arange(4)
    recorded = make_fx(lambda k: torch.func.vmap(lambda one: SystemDraws(one).bits(2))(k), tracing_mode="fake")(keys)
    played = torch.cat([recorded(keys), recorded(keys)]).flatten().tolist()
    assert len(set(played)) == len(played)


@dataclass(frozen=True)
class Drawing:
    @task
    def draw(self, client: Client) -> Sent:
        return send(bits=client.noise.bits(3))


def test_a_private_runs_folder_holds_nothing_to_make_its_draws_again_from(tmp_path: Path) -> None:
    runs = [run("fedavg", **SMALL, out=tmp_path / str(n)) for n in range(2)]
    assert [one.privacy.noise for one in runs] == ["system", "system"]
    states = [(tmp_path / str(n) / "checkpoint.safetensors").read_bytes() for n in range(2)]
    assert states[0] != states[1]  # the same recipe and seed
    public = [file for file in (tmp_path / "0").iterdir() if file.is_file() and file.suffix in (".json", ".jsonl")]
    texts = {file.name: file.read_text() for file in public}
    stated = json.loads(texts["result.json"])["privacy"]
    assert (stated["private"], stated["trust"], stated["noise"]) == (True, "server", "system")
    assert stated["epsilon"] > 0 and stated["epsilon_server"] is None and "trust" in stated["why_server"]
    ledger = json.loads(texts["ledger.json"])
    assert ledger["clients"] == [] and "positions" not in str(ledger)
    records = [json.loads(line) for line in texts["metrics.jsonl"].splitlines()]
    sent = [records[0]["bytes_up"], records[1]["bytes_up"] - records[0]["bytes_up"]]
    assert sent[0] == sent[1]  # though the cohorts' sizes differ, most likely
    assert json.loads(texts["transcript.json"])[0]["replies"] == 2 * 18

    simulated = run("fedavg", **SMALL, simulate_noise=True)
    assert simulated.privacy.noise == "simulated" and "simulated" in str(simulated)
    assert runs[0].privacy.epsilon == pytest.approx(simulated.privacy.epsilon, rel=1e-6)


# Who adds the noise, and the two ε


def test_a_client_that_is_drawn_ten_times_pays_in_full_towards_the_server() -> None:
    ledger = Ledger()
    for number in range(1000):
        who = ["often"] if number < 10 else [f"{number}"]
        ledger.record(Gaussian(1.1).event(), sampling=Poisson(0.01), cohort=number, members=who)
    assert ledger.epsilon(1e-5) == pytest.approx(1.5, abs=0.05)
    assert ledger.server_epsilon(1e-5) == pytest.approx(15.8, abs=0.05)
    assert ledger.server_epsilon(1e-5, client="often") == ledger.server_epsilon(1e-5)
    assert ledger.server_epsilon(1e-5, client="11") < 6
    saved = json.loads(json.dumps(ledger.state()))
    assert "often" not in json.dumps(saved)
    again = Ledger.from_state(saved)
    assert again.server_epsilon(1e-5) == pytest.approx(ledger.server_epsilon(1e-5))
    again.record(Gaussian(1.1).event(), sampling=Poisson(0.01), cohort="new", members=["anybody"])
    assert again.server_epsilon(1e-5) > ledger.server_epsilon(1e-5)  # it may be the one that was drawn most


def test_a_server_that_adds_the_noise_itself_is_promised_nothing() -> None:
    federation = simulate(clients([3] * 20), noise="seeded")
    federation.begin_round(1).sample(0.5, poisson=True).ask(total, into=noisy())
    assert federation.ledger.epsilon(1e-3) < math.inf
    assert federation.ledger.server_epsilon(1e-3) == math.inf
    local = simulate(clients([3] * 20), noise="seeded")
    local.everyone().ask(total, into=Each("total", clip=1.0, noise=Gaussian(1.0)))
    assert local.ledger.server_epsilon(1e-3) == pytest.approx(local.ledger.epsilon(1e-3))


@pytest.mark.parametrize("shards", [1, 3])
def test_where_nobody_is_trusted_noise_is_there_before_a_sum_leaves_its_shard(shards: int) -> None:
    store = clients([3] * 12, features=300)
    federation = simulate(store, trust="nobody", noise="system", shards=shards)
    raw = simulate(store, noise="seeded", shards=shards)
    seen: list[Tensor] = []
    deliver = federation.runtime.deliver

    def watched(request: Request) -> Any:
        for reply in deliver(request):
            seen.extend(partial.total for partial in reply.partials.values())
            yield reply

    federation.runtime.deliver = watched  # type: ignore[method-assign]
    for number in range(1, 21):
        federation.begin_round(number).everyone().ask(total, into=noisy())
    plain = raw.everyone().ask(total, into=Sum("total", clip=1.0))["total"]
    parts = torch.stack(seen).reshape(20, shards, 300)
    spread = parts.var(0).mean(-1).sqrt()
    assert spread.tolist() == pytest.approx([1.0] * shards, rel=0.15)  # each part has the whole noise
    gap = parts.sum(1).mean(0).float() - plain  # the noise of a mean of 20
    assert float(gap.square().mean().sqrt()) == pytest.approx(math.sqrt(shards / 20), rel=0.2)
    assert federation.ledger.server_epsilon(1e-3) == pytest.approx(federation.ledger.epsilon(1e-3))


def test_how_much_noise_there_is_does_not_tell_whose_shards_were_drawn() -> None:
    """The server adds the noise of shards of which nobody was drawn."""
    federation = simulate(clients([3] * 9), trust="nobody", noise="system", shards=3)
    zero = Sum("zero", clip=1.0, noise=Gaussian(1.0))
    drawn = federation.begin_round(1).cohort([0]).ask(many_zeros, into=zero)["zero"]
    assert float(drawn.std()) == pytest.approx(math.sqrt(3), rel=0.1)


def test_shares_of_noise_under_a_secure_sum_are_planned_for_the_worst_drop_out() -> None:
    federation = simulate(clients([1] * 9), trust="nobody", noise="system")
    zero = Sum("zero", clip=1.0, noise=Gaussian(1.0), secure=True)
    spread = float(federation.begin_round(1).everyone().ask(many_zeros, into=zero)["zero"].std())
    assert spread == pytest.approx(math.sqrt(9 / 5), rel=0.1)  # nine shares, of which five would be enough
    assert federation.ledger.server_epsilon(1e-3) < math.inf


def test_a_closed_program_does_not_go_by_the_servers_word() -> None:
    program = Program([total], terms=Terms("system", "nobody"))
    program.teach(total, [Sum("total")], Terms())  # without noise, there is nothing to agree on
    with pytest.raises(ValueError, match=r"the clients agreed to .*trust='nobody'"):
        program.teach(total, [noisy()], Terms("seeded", "server"))


def test_a_curious_server_is_given_no_exact_sum_in_a_run_with_an_epsilon() -> None:
    """It asks one client for the sum of its rows, which scaling and scoring are made of, and for the raw update."""
    method = FedAvg(Model(nn.Linear(3, 2)), cohort=1.0, clip=0.5, noise=Gaussian(1.0))
    store = clients([3] * 5, features=3)
    schema = store.roster().schema
    for terms in (Terms("system", "nobody"), Terms("system", "server")):
        shard = Shard({"train": store}, store.roster(), program_of(method, schema, terms=terms), Simulator(block=4))
        for purpose in ("train", "serve", "measure"):
            wanted = (ReleaseName.of(Sum("total")), ReleaseName.of(Sum("rows")))
            sums = _request([0], "Scaling.totals", wanted=wanted, purpose=purpose)
            with pytest.raises(wire.WireError, match="without noise: nothing is sent"):
                list(shard.answer(sums))
            with pytest.raises(wire.WireError, match="lets out mean"):
                program_of(method, schema, terms=terms).releases(_request([0], "FedAvg.fit", purpose=purpose))
    shard.program = program_of(method, schema)  # without an ε it answers
    assert list(shard.answer(replace(_request([0], "Scaling.totals"), wanted=wanted)))


def test_a_simulation_measures_by_some_tasks_only() -> None:
    """Under the purpose "measure" a worker tells what those tasks say, and of all others nothing without noise."""
    program = Program([total, batches], terms=Terms("system", "server"), private=True, measured=[total])
    wanted = ReleaseName.of(Sum("total"))
    assert program.releases(_request([0], total.name, wanted=(wanted,), purpose="measure"))
    for name, purpose in ((total.name, "train"), (batches.name, "measure")):
        with pytest.raises(wire.WireError, match="without noise: nothing is sent"):
            program.releases(_request([0], name, wanted=(wanted,), purpose=purpose))


# The doors, in the order in which they were found


def test_one_client_fifty_times_in_a_cohort_is_refused() -> None:
    federation = simulate(clients([3] * 5))
    with pytest.raises(ValueError, match="a client is in a cohort once"):
        federation.cohort([0] * 5)
    with pytest.raises(ValueError, match="a client is in a cohort once"):
        federation.everyone().only(torch.zeros(50, dtype=torch.int64))
    (shard,) = shards_of(federation)
    federation.everyone().ask(batches)
    with pytest.raises(Refused, match="names a client twice"):
        list(shard.answer(_request([0] * 50)))


def test_a_secure_sum_is_not_masked_twice_and_forgets_its_secrets() -> None:
    """With the same masks on two arrays, their difference would be in the clear."""
    federation = simulate(clients([2] * 4))
    session = SecureSession(tuple(range(4)), 3, 1.0)
    exchange = _Exchange(federation, session)
    keys = exchange.server.keys(exchange.ask(secure.ADVERTISE, {}))
    letters = exchange.server.letters(exchange.ask(secure.SHARE, keys))
    exchange.ask(secure.MASK, letters)
    (shard,) = shards_of(federation)
    kept = shard.kept(federation.run)
    ids = torch.arange(4)
    kept.write(ids, {secure.SECURE_ARRAY: torch.ones(4, 3)})  # the task was asked again, with other inputs
    with pytest.raises(QuorumError, match="its next step is confirm"):
        exchange.ask(secure.MASK, letters)
    survivors = torch.arange(4)
    words = exchange.server.confirmations(exchange.ask(secure.CONFIRM, {}, survivors=survivors))
    exchange.ask(secure.UNMASK, words, survivors=survivors)
    about = 1 + 8 + 32 + 32  # exchange, least number of clients, digests of the session and of the survivors
    assert kept.column("secure.state", ids)[0].any() and not kept.column("secure.state", ids)[0][:, about:].any()
    with pytest.raises(QuorumError, match=r"session that it has not begun|its next step is nothing more"):
        exchange.ask(secure.UNMASK, words, survivors=survivors[:3])


class _Exchange:
    """A server that asks for the exchanges of a secure sum as it likes."""

    def __init__(self, federation: Federation, session: Any) -> None:
        self.federation, self.session, self.server = federation, session, SecureServer(session)
        (shard,) = shards_of(federation)
        shard.kept(federation.run).write(torch.arange(4), {secure.SECURE_ARRAY: torch.zeros(4, 3)})

    def ask(self, exchange: Any, told: Any, **same: Tensor) -> dict[int, dict[str, Tensor]]:
        rows = self.session.peer_count
        padded = [secure._pad(told[who], rows) for who in range(4)] if told else []
        given = {name: each(torch.stack([one[name] for one in padded])) for name in (padded[0] if padded else ())}
        cohort = self.federation.everyone()
        inputs = {**self.session.message(), **same, **given, "identity": each(torch.arange(4))}
        replies = cohort.ask(exchange, into=Each(), **inputs)
        return {who: {name: replies[name][who] for name in replies} for who in range(4)}


def test_a_client_helps_to_open_no_sum_with_less_noise_than_was_planned() -> None:
    session = SecureSession(tuple(range(6)), 2, 1.0, neighbours=2)
    parties = {who: SecureClient(session, who) for who in session.identities}
    server = SecureServer(session)
    keys = server.keys({who: one.advertise() for who, one in parties.items()})
    letters = server.letters({who: one.share(keys[who]) for who, one in parties.items()})
    for who, one in parties.items():
        one.mask(torch.zeros(2), letters[who])
    few = torch.tensor([0, *session.peers(0)])  # enough to know its secrets, but only three of six shares of noise
    with pytest.raises(SecureSumAborted, match="needed for the noise"):
        parties[0].confirm({"survivors": few})


@pytest.mark.parametrize(
    ("session", "message"),
    [
        (
            SecureSession(tuple(range(4)), 3, 1.0, noise=2.0, planned=((1 << 20) - 1, 1 << 20)),
            "by the recipe there are",
        ),
        (SecureSession(tuple(range(60)), 3, 1.0, noise=2.0), "by the recipe there are at most 50"),
        (SecureSession(tuple(range(4)), 3, 1.0, noise=0.5), "the client agreed to 1 and 2"),
        (SecureSession(tuple(range(4)), 3, 9.0, noise=2.0), "the client agreed to 1 and 2"),
        (SecureSession(tuple(range(4)), 2, 1.0, noise=2.0), "the client keeps 3"),
        (SecureSession(tuple(range(40)), 3, 1.0, neighbours=2, noise=2.0), "2 peers for each of 40 clients"),
    ],
)
def test_a_client_begins_no_session_with_less_noise_than_the_recipe_says(session: Any, message: str) -> None:
    """The client adds the noise over the root of the fewest clients; a server that plans for 2^20 got it nearly off."""
    federation = simulate(clients([2] * 4))
    exchange = _Exchange(federation, SecureSession(tuple(range(4)), 3, 1.0))
    (shard,) = shards_of(federation)
    agreed = torch.tensor([[2.0, 1.0, 4.0, 50.0]] * 4, dtype=torch.float64)  # the noise, the clip, fewest and most
    shard.kept(federation.run).write(torch.arange(4), {secure.SECURE_NOISE: agreed})
    exchange.session = session
    with pytest.raises(QuorumError, match=message):
        exchange.ask(secure.ADVERTISE, {})


def test_a_shard_of_a_recipe_knows_how_many_clients_share_the_noise() -> None:
    ready = prepare(plan_for(["fedavg"], {**SMALL, "trust": "nobody"}).runs[0][1])
    assert isinstance(ready.method, FedAvg)
    labeled = int(ready.roster.labeled.sum())
    rate = float(ready.method.cohort)
    expected = (int(binom.ppf(1e-12, labeled, rate)), int(binom.isf(1e-12, labeled, rate)))
    assert program_of_run(ready).terms.cohort == expected


def test_runs_beside_a_run_neither_see_the_secrets_of_its_secure_sum_nor_make_exchanges() -> None:
    """Each of "run/1", "run/2" would answer UNMASK once, from the same secrets: for other survivors the other half."""
    store = clients([2] * 4)
    program = Program([total], terms=Terms("system", "nobody"), exchanges=secure.EXCHANGES, private=True)
    shard = Shard({"train": store}, store.roster(), program, Simulator(block=4))
    shard.kept("run").write(torch.arange(4), {"secure.state": torch.ones(4, 96), "own": torch.ones(4, 1)})
    assert "secure.state" in shard.kept("run").read(torch.arange(4)).values
    assert set(shard.kept("run/1").read(torch.arange(4)).values) == {"own"}
    for name in ("advertise", "share", "mask", "confirm", "unmask"):
        for run_name, purpose in (("run/1", "train"), ("run", "measure"), ("run", "serve")):
            request = replace(_request([0, 1, 2, 3], name, purpose=purpose), run=run_name)
            with pytest.raises(Refused, match="while it trains only"):
                list(shard.answer(request))


@task
def trained(client: Client) -> Sent:
    return send(total=client.sum(client.x) + client.noise.normal(1), n=client.n)


def test_two_trainings_that_cost_the_same_are_charged_twice() -> None:
    event = Gaussian(2.0).event()

    def costs(shared: bool) -> float:
        federation = simulate(clients([3, 3, 3]), noise="seeded")
        one = LocalCost((event,) * 3, 1.0)
        other = one if shared else replace(one)
        assert one == other
        federation.everyone().ask(trained, into=[Mean("total", cost=one), Mean("n", cost=other)])
        return federation.ledger.epsilon(1e-3)

    assert costs(shared=False) == pytest.approx(_gaussian_epsilon(2.0 / math.sqrt(2)), rel=1e-6)
    assert costs(shared=True) == pytest.approx(_gaussian_epsilon(2.0), rel=1e-6)  # two arrays of one training


def _gaussian_epsilon(z: float) -> float:
    return float(dp_accounting.get_epsilon_gaussian(z, 1e-3))


def test_sensitivity_follows_the_neighbouring_relation_and_the_clip() -> None:
    bounded = Sum("total", noise=Gaussian(1.0), sensitivity=0.5)
    assert bounded.change(Everyone()) == 0.5
    assert bounded.change(FixedSize(2, 4)) == 1.0  # a client is replaced: it takes its share away and brings another
    with pytest.raises(ValueError, match="give one"):
        Sum("total", clip=1.0, sensitivity=1e-3, noise=Gaussian(1.0))
    with pytest.raises(ValueError, match="more than any array clipped"):
        Sum("total", clip=1.0, sensitivity=5.0, unit="point", noise=Gaussian(1.0))


class MinusTheMean(nn.Module):
    """A network whose samples are not independent: a poor man's batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(50.0 * (x - x.mean(0)))
        return out


def test_ghost_norms_are_not_used_where_one_sample_moves_the_others() -> None:
    model = Model(MinusTheMean())
    assert GhostNorms.of(Model(nn.Linear(3, 2)), torch.zeros(2, 3)) is not None
    assert GhostNorms.of(model, torch.zeros(2, 3)) is None

    store = clients([40])
    block = store.block(torch.arange(1))
    columns = {name: value[0] for name, value in block.columns(torch.tensor(1), torch.tensor([40])).items()}
    client = block.client(columns, Kept())
    private = PointPrivacy(clip=1.0, noise_multiplier=1e-9)
    gradient = PrivateGradient(Supervised(model), private, None, 1, client)
    with_it = Batch(client.x, client.y, torch.ones(40))
    without = Batch(client.x, client.y, torch.ones(40).index_fill(0, torch.tensor([0]), 0.0))
    theta = torch.linspace(-1.0, 1.0, model.size)
    moved = (gradient(theta, with_it)[0] - gradient(theta, without)[0]).norm()
    assert float(moved) <= 1.0 + 1e-4


def test_nothing_tells_that_a_clients_task_failed_in_a_private_ask() -> None:
    def asked(bad: bool) -> tuple[Federation, Any]:
        store = clients([2, 2, 2, 2])
        if bad:
            store.x[2:4] = 99.0
        federation = simulate(store, noise="seeded", block=1, threads=1)
        return federation, federation.everyone().ask(picky, into=noisy())

    federation, replies = asked(bad=False)
    with pytest.warns(PrivateFailure, match="client 1: ValueError: 99 is my secret"):
        other, spoilt = asked(bad=True)
    assert spoilt.answered.tolist() == replies.answered.tolist() and spoilt.failures == []
    assert other.traffic == federation.traffic and other.transcript == federation.transcript
    assert other.failures == [] and spoilt["total"].shape == replies["total"].shape


@pytest.mark.parametrize("bad", [False, True])
def test_clients_that_go_on_unsampled_tell_neither_their_number_nor_their_failures(bad: bool) -> None:
    """Where AdaPeD's clients go on training (Alg. 6), the rest of a Poisson sample is asked, too."""
    store = clients([3] * 20)
    store.x[3 * 7] = torch.nan if bad else 0.0
    local = LocalSGD(steps=1, batch=None, lr=0.1)
    method = AdaPeD(linear(), 0.25, local, train_unsampled=True, clip=0.1, noise=Gaussian(1.0))
    down, failed = [], []
    for seed in range(4):  # cohorts of other sizes
        federation = simulate(store, seed, noise="seeded")
        train(method, federation, 1)
        down.append(federation.traffic.total_down)
        failed += federation.failures
    assert set(down) == {5 * (8 + 1 + 1) * 4 + 15 * 4} and failed == []  # μ, ψ and the rate; the rate


@task
def picky(client: Client) -> Sent:
    sums = client.sum(client.x)
    if float(client.x.max()) == 99.0:
        raise ValueError("99 is my secret")
    return send(total=sums)


def test_nan_in_what_a_client_keeps_does_not_show_either() -> None:
    store = clients([2, 2, 2])
    federation = simulate(store, noise="seeded")
    with pytest.warns(PrivateFailure, match="not finite"):
        replies = federation.everyone().ask(keeps_nan, into=noisy())
    assert len(replies.answered) == 3 and replies.failures == []


@task
def keeps_nan(client: Client) -> Sent:
    return send(total=client.sum(client.x), keep={"own": torch.log(-client.x.abs().sum())})


def test_one_row_that_is_not_finite_does_not_take_its_client_away() -> None:
    """At point level one row may move a sum by its own share only, but NaN would have taken all rows of the client."""
    store = clients([20, 20])
    spoilt = replace(store, x=store.x.clone().index_fill(0, torch.tensor([0]), torch.nan))
    point = Sum("total", noise=Gaussian(1e-6), sensitivity=10.0, unit="point")
    one, other = (simulate(each, noise="seeded").everyone().ask(total, into=point)["total"] for each in (store, spoilt))
    assert torch.allclose(one - other, store.x[0], atol=1e-3)


def test_the_message_of_a_missed_quorum_tells_neither_size_nor_reasons() -> None:
    federation = simulate(clients([2] * 40), noise="seeded", drop=0.9)
    with pytest.raises(QuorumError, match="than the quorum of 50%") as told:
        federation.begin_round(1).sample(0.5, poisson=True).ask(total, into=noisy())
    assert " of " not in str(told.value).replace("quorum of", "")


def test_an_empty_first_cohort_releases_noise_and_leaves_the_same_record() -> None:
    federation = simulate(clients([2] * 3), noise="seeded")
    cohort = federation.begin_round(1).sample(0.5, poisson=True)
    empty = replace(cohort, positions=cohort.positions[:0])
    released = empty.ask(total, into=Mean("total", clip=1.0, noise=Gaussian(1.0)))["total"]
    assert released.shape == (3,) and bool(released.any())
    other = simulate(clients([2] * 3), noise="seeded")
    full = replace(other.begin_round(1).sample(0.5, poisson=True), positions=torch.arange(3))
    full.ask(total, into=Mean("total", clip=1.0, noise=Gaussian(1.0)))
    assert other.transcript == federation.transcript and other.traffic == federation.traffic


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_the_noise_of_nobody_has_the_type_that_clients_send(dtype: torch.dtype) -> None:
    @task
    def typed(client: Client) -> Sent:
        return send(total=torch.zeros(3, dtype=dtype))

    federation = simulate(clients([3] * 9), noise="system")
    cohort = federation.begin_round(1).sample(0.5, poisson=True)
    bounded = Sum("total", sensitivity=1.0, noise=Gaussian(1.0))
    some, nobody = (replace(cohort, positions=torch.arange(n)).ask(typed, into=bounded)["total"] for n in (4, 0))
    assert some.dtype == nobody.dtype


def test_the_divisor_of_a_private_mean_is_no_count_of_clients() -> None:
    federation = simulate(clients([2] * 8), noise="seeded")
    cohort = federation.begin_round(1).sample(0.5, poisson=True)
    only = Mean("total", clip=1.0, noise=Gaussian(1e-9))
    few, many = (
        replace(cohort, positions=torch.tensor(who)).ask(ones, into=only)["total"] for who in ([0], [0, 1, 2, 3])
    )
    assert torch.allclose(4 * few, many, atol=1e-4)


@task
def ones(client: Client) -> Sent:
    return send(total=torch.full((3,), 0.1))


def test_a_round_that_is_begun_again_draws_another_sample() -> None:
    federation = simulate(clients([3] * 100), noise="seeded")
    first = federation.begin_round(1).sample(0.2, poisson=True)
    again = federation.begin_round(1).sample(0.2, poisson=True)
    assert first.positions.tolist() != again.positions.tolist() and first.name != again.name
    with pytest.raises(ValueError, match="of an earlier round"):
        first.ask(total, into=noisy())  # the ledger would have taken it for a fresh sample
    repeated = simulate(clients([3] * 100), noise="seeded").begin_round(1).sample(0.2, poisson=True)
    assert repeated.positions.tolist() == first.positions.tolist()  # the seed still decides


def test_a_private_run_that_resumes_is_charged_again(tmp_path: Path) -> None:
    settings = {**SMALL, "rounds": 4, "checkpoint_every": 3}
    whole = run("fedavg", **settings).privacy.epsilon
    with pytest.raises(Crash):
        run("fedavg", **settings, out=tmp_path / "run", watcher=At(2, crash))
    resumed = resume(tmp_path / "run").privacy.epsilon  # rounds 1 and 2 were after the last checkpoint
    longer = run("fedavg", **{**settings, "rounds": 6}).privacy.epsilon
    assert whole is not None and resumed is not None and longer is not None
    assert resumed == pytest.approx(longer, rel=1e-9) and resumed > whole


# And


def test_a_complex_array_does_not_come_in() -> None:
    with pytest.raises(wire.WireError, match="only dense real arrays"):
        wire.decode(save({"x": torch.zeros(2, dtype=torch.complex64)}, {"values": "{}"}))


def test_a_private_secure_cohort_does_not_tell_its_size() -> None:
    federation = simulate(clients([2] * 50), noise="seeded")
    cohort = federation.begin_round(1).sample(0.1, poisson=True)
    told = []
    for positions in (torch.arange(2), torch.arange(5)):
        with pytest.raises(ValueError, match="may have fewer, which would tell its size") as refused:
            replace(cohort, positions=positions).ask(total, into=noisy(secure=True))
        told.append(str(refused.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("trust", ["server", "nobody"])
def test_the_noise_of_a_secure_sum_does_not_tell_how_many_were_drawn(trust: Trust) -> None:
    """Cohorts of 30 and of 60, of which 45 were expected; the noise is that of the most that there could be."""
    federation = simulate(clients([2] * 90), trust=trust, noise="system")
    zero, spreads = Sum("zero", clip=1.0, noise=Gaussian(1.0), secure=True), []
    fewest, most = (int(binom.ppf(1e-12, 90, 0.5)), int(binom.isf(1e-12, 90, 0.5)))
    for count in (30, 60):
        cohort = federation.begin_round(count).sample(0.5, poisson=True)
        found = replace(cohort, positions=torch.arange(count)).ask(many_zeros, into=zero)["zero"].double()
        spreads.append(float(found.std()))
    expected = 1.0 if trust == "server" else math.sqrt(most / (fewest // 2 + 1))
    assert spreads == pytest.approx([expected, expected], rel=0.1)  # 1,500 numbers: the deviation is known to 1.8 %


@task
def many_zeros(client: Client) -> Sent:
    return send(zero=torch.zeros(1500))


def test_ring_and_shares_follow_from_the_planned_sizes_alone() -> None:
    small, large = (SecureSession(tuple(range(n)), 10, 1.0, noise=2.0, planned=(20, 70)) for n in (25, 60))
    assert (small.ring.step, small.least) == (large.ring.step, large.least) == (small.ring.step, 11)
    assert SecureSession.from_message(small.message()) == small
    with pytest.raises(ValueError, match="almost impossible"):
        SecureSession(tuple(range(71)), 10, 1.0, noise=2.0, planned=(20, 70))


def test_a_secure_sum_without_noise_promises_nothing() -> None:
    """The sums over S and over S without i reveal i."""
    federation = simulate(clients([2] * 5))
    federation.everyone().ask(total, into=Sum("total", clip=1.0, secure=True))
    assert federation.ledger.epsilon(1e-3) == math.inf


def test_delta_of_one_over_n_is_refused_unless_it_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"delta must be below 1/n = 0\.1 for n = 10"):
        simulate(clients([2] * 10), budget=Budget(1.0, 0.3))
    assert simulate(clients([2] * 10), budget=Budget(1.0, 0.3), accept_delta=True).noise == "system"
    large = {**SMALL, "delta": 0.3}
    with pytest.raises(UserError, match="accept_delta"):
        run("fedavg", **large)
    accepted = run("fedavg", **large, accept_delta=True)
    assert accepted.privacy.accepted_delta and "1/n" in str(accepted)


def test_a_whole_block_that_fails_is_told_and_nothing_crashes() -> None:
    store = clients([2] * 6)
    store.x[:] = torch.nan
    federation = simulate(store, block=6, threads=1, strict=True)
    with pytest.raises(QuorumError, match="not finite"):
        federation.everyone().ask(total, into=Sum("total"))


def test_a_gram_matrix_of_many_points_moves_by_no_more_than_one_point() -> None:
    many, features = 100_000, 4
    x = torch.ones(many, features) * torch.linspace(0.2, 0.5, features)
    method = FedDPKMeans(k=2, privacy=KMeansPrivacy(1.0, 1e-6, "point"))
    given = {"origin": torch.zeros(features), "radius": torch.tensor(1.0), "scale": torch.tensor(1.0)}

    def gram(rows: Tensor) -> Tensor:
        store = Clients.from_sizes(rows, None, torch.tensor([len(rows)]))
        block = store.block(torch.arange(1))
        columns = {name: value[0] for name, value in block.columns(torch.tensor(1), torch.tensor([many])).items()}
        return method.outer_product(block.client(columns, Kept()), **given).arrays["gram"].to(torch.float64)

    assert float((gram(x) - gram(x[1:])).norm()) <= float(x[0].square().sum()) * (1 + 1e-6)


def test_dp_sgd_of_a_vectorised_block_has_other_noise_for_every_client() -> None:
    """Equal clients that train alike would end alike if they shared their noise."""
    store = Clients.from_sizes(torch.ones(12, 3), torch.zeros(12, dtype=torch.int64), torch.tensor([3] * 4))
    local = LocalSGD(steps=2, batch=2, lr=0.1, private=PointPrivacy(1.0, 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # also where the block could not be vectorised
        federation = simulate(store, noise="system", block=4, threads=1)
        fits = federation.everyone().ask(Trains(local, Model(nn.Linear(3, 2))).fit, theta=torch.zeros(8))["theta"]
    assert len({tuple(row) for row in fits.tolist()}) == 4
    steps = fits[:, 0] - fits[:, 1]
    assert bool((steps != 0).any())


@dataclass(frozen=True)
class Trains:
    local: LocalSGD
    model: Model

    @task
    def fit(self, client: Client, theta: Tensor) -> Sent:
        return send(theta=self.local.train(self.model, theta, client)[0])


def test_what_workers_did_is_not_published_because_it_tells_how_large_poisson_cohorts_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = {
        "worker": 0,
        "name": "worker 0",
        "clients": 40,
        "asks": 2,
        "answered": 4711,
        "failed": 0,
        "seconds": 1.0,
        "waited": 1.0,
    }
    tally |= {"rate": 4711.0, "restarts": 0, "missed": 0, "bytes_down": 4711, "bytes_up": 4711}
    pretended = {"waiting": None, "report": lambda _: [tally], "commit": lambda *_: [{}], "rollback": lambda *_: None}
    for name, value in pretended.items():
        monkeypatch.setattr(Simulation, name, value, raising=False)
    made = run("fedavg", out=tmp_path / "run", **SMALL)
    assert made.workers[0].answered == 4711  # whoever runs the simulation sees it
    published = [file for file in (tmp_path / "run").iterdir() if file.is_file()]
    assert not any(b"4711" in file.read_bytes() for file in published)
    assert Result.load(tmp_path / "run").workers == made.workers  # from simulation/, while that is there
