"""A node's own will: what its policy refuses, what it lets the server know, and what its ledger says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.deploy.nodes import Here, make_site, open_site, use
from unalike.api import UserError, compare, resume, run
from unalike.commands.main import app
from unalike.core.federation import QuorumError
from unalike.core.request import ReleaseName, Reply, Request
from unalike.data.schema_file import schema_text
from unalike.deploy import open_session, plain
from unalike.deploy.node.explain import Explanation, explain
from unalike.deploy.node.host import CALLS, NodeHost, local_recipe
from unalike.deploy.node.ledger import SiteLedger, _hash
from unalike.deploy.node.policy import Policy, approve, approved, digest_of
from unalike.runs import checkpoint
from unalike.runs.load import load_data
from unalike.runs.recipe.recipe import Recipe, Runtime, to_recipe
from unalike.runs.recipe.settings import plan_for
from unalike.runs.run import run_plan
from unalike.runtime.shard.host import result
from unalike.runtime.shard.journal import unpack
from unalike.runtime.shard.shard import Refused

BUNDLE_KEYS = ("name", "network", "address", "certificate", "authority")
Patch = pytest.MonkeyPatch
Changes = dict[str, Any]
AT_SITES = {"runtime": "network", "network": "/nowhere", "unseen": 0, "rounds": 1, "block": 4, "model": "mlp"}
RUN = "0" * 32
PRIVATE = {"epsilon": 4.0, "delta": 1e-5, "normalize": False, "trust": "nobody", "accept_delta": True}
# a policy for runs with noise that reaches each site's sums before they leave
GUARDED = {
    "individual": "never", "sums": "noise", "trust": ["nobody"], "epsilon": 20.0, "epsilon_run": 10.0, "delta": 1e-5,
    "purposes": ["train"], "largest_network": 12,
}  # fmt: skip


def recipe(**more: Any) -> dict[str, Any]:
    made = Recipe(method="fedavg", rounds=1, model={"name": "mlp"}, data={"unseen": 0})
    return {**made.model_dump(mode="json", exclude_none=True), **more}


def load(host: NodeHost, values: dict[str, Any] | None = None, run: str = RUN, schema: str | None = None) -> bytes:
    told = {"run": run, "recipe": recipe() if values is None else values, "schema": schema}
    return result(host.call("load", json.dumps(told).encode()), "node a")


def settled(folder: Path, **policy: Any) -> NodeHost:
    """The host of a site that is alone in its network."""
    host = NodeHost(make_site(folder, policy=policy))
    result(host.call("settle", load(host)), "node a")
    return host


def model_size(host: NodeHost) -> int:
    return int(host.journal.shard.program.task("FedAvg.fit").owner.model.size)  # type: ignore[union-attr]


def ask(host: NodeHost, **fields: Any) -> list[Reply]:
    theta = torch.zeros(model_size(host))
    given: dict[str, Any] = {
        "run": "run", "serial": 1, "task": "FedAvg.fit", "ids": torch.arange(3), "part": "train", "labels": True,
        "purpose": "train", "key": 7, "wanted": (ReleaseName("mean", ("update",)),),
        "shared": {"theta": theta, "rate": torch.tensor(0.1)},
        "each": {},
    }  # fmt: skip
    given |= fields
    releases = host.journal.shard.program.task("FedAvg.fit").releases()
    if "wanted" not in fields:
        given["wanted"] = tuple(map(ReleaseName.of, releases))
    request = Request(**given)
    return [Reply.decode(one) for one in unpack(result(host.call("answer", request.encode()), "node a"))[1:]]


# What nobody can have it do


def test_only_listed_calls_are_known(tmp_path: Path) -> None:
    host = NodeHost(make_site(tmp_path))
    for name in ("__class__", "call", "view", "_load", "journal"):
        with pytest.raises(Refused, match="a node does not know"):
            result(host.call(name), "node a")
    assert set(CALLS) == {
        "version", "load", "settle", "learn", "answer", "use", "forget", "commit", "rollback", "plans",
    }  # fmt: skip
    with pytest.raises(Refused, match="the program of a run is that of its recipe"):
        result(settled(tmp_path / "other").call("learn", b""), "node a")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"method": "subprocess:getoutput"}, "may name code"),
        ({"method": "../evil.py"}, "may name code"),
        ({"model": {"name": "os:system"}}, "may name code"),
        ({"hyperparameters": {"local": {"lr": "x:y"}}}, "may name code"),
        ({"hyperparameters": {"a:b": 1}}, "may name code"),
        ({"data": {"options": {"label_column": "/etc/passwd"}}}, "may name code or a file"),
        ({"data": {"partition": "dirichlet"}}, "leave partition"),
        ({"privacy": {"epsilons": "uniform:1,2"}}, "rule closed"),
        ({"method": 3}, "the recipe is none"),
        ({"unknown": 3}, "the recipe is none"),
    ],
)
def test_a_recipe_names_neither_code_nor_files(changed: dict[str, Any], told: str, tmp_path: Path) -> None:
    host = NodeHost(make_site(tmp_path, policy={"methods": ["fedavg", str(changed.get("method"))]}))
    with pytest.raises(Refused, match=told):
        load(host, recipe(**changed))


def test_a_site_trains_the_adapter_that_a_recipe_names(tmp_path: Path) -> None:
    whole, host = settled(tmp_path / "whole"), NodeHost(make_site(tmp_path))
    values = recipe(model={"name": "mlp", "trainable": "lora:r=2,targets=all+head"})
    result(host.call("settle", load(host, values)), "node a")
    assert model_size(host) < model_size(whole)
    assert not any(reply.failed for reply in ask(host))


def test_a_run_names_no_folder(tmp_path: Path) -> None:
    host = NodeHost(make_site(tmp_path))
    for name in ("../../evil", "a", "/tmp", RUN + "/x"):
        with pytest.raises(Refused, match="32 hexadecimal digits"):
            load(host, run=name)
    host = settled(tmp_path / "other")
    before = sorted(tmp_path.rglob("*"))
    for name in ("../x", "..", "a/../../b"):
        with pytest.raises(Refused):
            result(host.call("commit", json.dumps([name, 1]).encode()), "node a")
        assert all(reply.failed for reply in ask(host, run=name))
    assert [
        file
        for file in sorted(tmp_path.rglob("*"))
        if file not in before and file.name not in ("ledger.jsonl", "log", "sent")
    ] == []


def test_what_is_made_of_bytes_is_on_a_short_list(tmp_path: Path) -> None:
    host = NodeHost(make_site(tmp_path))
    load(host)
    evil = plain.encode(Policy.read(tmp_path / "a").model_dump())
    with pytest.raises(Refused, match="settles with what is known"):
        result(host.call("settle", evil), "node a")
    recipe_like = plain.encode(torch.zeros(2))
    with pytest.raises(Refused):
        result(host.call("settle", recipe_like), "node a")


# Its policy


def test_without_a_policy_nothing_is_allowed(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    (site.folder / "policy.toml").unlink()
    with pytest.raises(Refused, match="rule network: this site works for nobody"):
        load(NodeHost(site))


@pytest.mark.parametrize(
    ("policy", "changed", "rule"),
    [
        ({"network": "others"}, {}, "network"),
        ({"methods": ["pefll"]}, {}, "methods"),
        ({"purposes": ["serve"]}, {}, "purposes"),
        ({"versions": ["0.0.1"]}, {}, "versions"),
        ({"rounds": 5}, {"rounds": 6}, "rounds"),
        ({"trust": ["nobody"]}, {"privacy": {"epsilon": 1.0, "trust": "server"}}, "trust"),
        ({"sums": "noise"}, {"privacy": {"epsilon": 1.0, "trust": "server", "noise": "simulated"}}, "trust"),
        ({"approve": True}, {}, "approve"),
    ],
)
def test_a_recipe_that_a_rule_forbids(
    policy: dict[str, Any], changed: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    site = make_site(tmp_path, policy=policy)
    with pytest.raises(Refused, match=f"rule {rule}: "):
        load(NodeHost(site), recipe(**changed))
    assert [line["rule"] for line in SiteLedger(site.folder).lines()] == [rule]


def test_a_model_that_a_rule_forbids(tmp_path: Path) -> None:
    host = NodeHost(make_site(tmp_path, policy={"models": ["linear"]}))
    with pytest.raises(Refused, match="rule models: mlp is not listed"):
        result(host.call("settle", load(host)), "node a")


@pytest.mark.parametrize(
    ("policy", "fields", "rule"),
    [
        ({"sums": "never"}, {}, "sums"),
        ({"sums": "noise"}, {}, "sums"),
        ({"fewest": 4, "individual": "never"}, {}, "individual"),  # a sum over three clients shows too much of each
        ({"fewest": 2, "individual": "never"}, {"ids": torch.tensor([1])}, "individual"),
        ({"purposes": ["train"]}, {"purpose": "measure", "run": "run/1"}, "purposes"),
        ({"purposes": ["train"]}, {"purpose": "serve"}, "purposes"),
        ({"purposes": ["train"]}, {"task": "Scorer.score"}, "purposes"),  # whatever it is said to be for
        ({"purposes": ["train"]}, {"task": "Scaling.totals"}, "purposes"),
        ({"tasks": ["PeFLL.fit"]}, {}, "tasks"),
        ({"hours": 0}, {}, "hours"),
        ({"epsilon": 3.0}, {}, "epsilon"),
    ],
)
def test_a_request_that_a_rule_forbids(
    policy: dict[str, Any], fields: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    host = settled(tmp_path, **policy)
    (reply,) = ask(host, **fields)
    assert not len(reply.rows) and not reply.partials
    assert all(f"rule {rule}: " in why for why in reply.failed.values()) and reply.failed
    ledger = SiteLedger(tmp_path / "a")
    assert [line["rule"] for line in ledger.lines()] == [rule] and not ledger.total


def test_more_asks_than_a_run_of_so_many_rounds_needs(tmp_path: Path) -> None:
    host = settled(tmp_path, rounds=1, asks=1)
    for serial in (1, 2):
        assert not any(reply.failed for reply in ask(host, serial=serial))
    assert "rule asks: " in str(ask(host, serial=3)[0].failed)
    assert not any(reply.failed for reply in ask(host, serial=2))  # the same again is no other ask


def test_more_bytes_than_may_leave(tmp_path: Path) -> None:
    host = settled(tmp_path, megabytes=0)
    with pytest.raises(Refused, match="rule megabytes: more than 0 MB"):
        ask(host)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e10])
def test_inputs_that_are_not_finite_are_refused(bad: float, tmp_path: Path) -> None:
    host = settled(tmp_path)
    (reply,) = ask(host, shared={"theta": torch.full((model_size(host),), bad), "rate": torch.ones(())})
    assert all("not one of this run" in why for why in reply.failed.values()) and len(reply.failed) == 3
    assert not SiteLedger(tmp_path / "a").total


def test_mis_shaped_inputs_fail_without_a_word_about_rows(tmp_path: Path) -> None:
    host = settled(tmp_path)
    (reply,) = ask(host, shared={"theta": torch.zeros(3), "rate": torch.ones(())})
    assert set(reply.failed.values()) == {"its task failed"}


# What the server learns


def test_failures_hold_no_path_and_no_row(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    (site.folder / "rows.csv").write_text("client,a,y\nsecret-name,12345,0\nsecret-name,oops-67890,1\n,,\n")
    with pytest.raises(Refused) as told:
        load(NodeHost(site), recipe(data={"options": {"features": "nothing"}}))
    for word in ("secret", "12345", "67890", str(tmp_path), "rows.csv", "Traceback"):
        assert word not in str(told.value)
    assert "the reason is in the node's own log" in str(told.value)


def test_sizes_are_rounded_up_and_names_stay(tmp_path: Path) -> None:
    host = NodeHost(make_site(tmp_path, policy={"round_sizes": 50}))
    told = plain.decode(load(host))
    assert told.train.size.tolist() == [50] * 3 and told.test.size.tolist() == [50] * 3
    assert [told.train.name(i) for i in range(3)] == ["a/1", "a/2", "a/3"] and not told.fingerprint
    assert len(told.train.x) == len(told.train.y) == 0 and told.counts is None and not told.key
    unmeasured = NodeHost(make_site(tmp_path, "b", policy={"purposes": ["train"]}))
    told = plain.decode(load(unmeasured))
    assert not told.test.labeled.any() and not told.test.size.any()


def test_answers_tell_no_times_and_no_plans(tmp_path: Path) -> None:
    host = settled(tmp_path)
    ask(host)
    assert result(host.call("commit", b'["run", 1]'), "") == b"{}"
    files = [file for file in (tmp_path / "a" / "runs").rglob("*") if file.is_file()]
    assert files and all(file.stat().st_mode & 0o077 == 0 for file in files if file.suffix in (".reply", ".charged"))


def test_changed_rows_are_refused_by_the_site_itself(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    load(NodeHost(site))
    load(NodeHost(site))
    text = (site.folder / "rows.csv").read_text()
    (site.folder / "rows.csv").write_text(text.replace("s0c0,0", "s0c0,1"))
    with pytest.raises(Refused, match="have changed since the run began"):
        load(NodeHost(site))


def test_a_run_that_goes_on_is_what_it_began_as(tmp_path: Path) -> None:
    host = NodeHost(make_site(tmp_path))
    load(host)
    other = recipe(rounds=3, hyperparameters={"local": {"lr": 0.5}})
    load(host, other)
    assert host._recipe is not None and host._recipe.rounds == 1 and not host._recipe.hyperparameters


# Approval


def test_a_recipe_waits_for_approval_with_its_schema_and_this_code(tmp_path: Path, monkeypatch: Patch) -> None:
    site = make_site(tmp_path, policy={"approve": True})
    host = NodeHost(site)
    with pytest.raises(Refused, match="waits for approval"):
        load(host)
    (waiting,) = (site.folder / "pending").iterdir()
    assert waiting.stem == digest_of(to_recipe(recipe(), ""), None)
    approve(site.folder, waiting.stem)
    load(host)
    assert approved(site.folder) == {waiting.stem} and not list((site.folder / "pending").iterdir())
    with pytest.raises(Refused, match="waits for approval"):
        load(NodeHost(site), recipe(seed=1), run="1" * 32)
    with pytest.raises(Refused, match="waits for approval"):
        load(NodeHost(site), schema="{}", run="2" * 32)
    monkeypatch.setattr("unalike.deploy.node.policy.version", lambda: "another")
    with pytest.raises(Refused, match="waits for approval"):
        load(NodeHost(site), run="3" * 32)


def test_a_recipe_that_the_policy_lists_needs_no_other_approval(tmp_path: Path) -> None:
    digest = digest_of(to_recipe(recipe(), ""), None)
    load(NodeHost(make_site(tmp_path, policy={"approve": True, "recipes": [digest]})))


# What it says before it joins


def explained(
    folder: Path, changes: dict[str, Any], clients: int | None = None, schema: Path | None = None
) -> Explanation:
    (folder / "bundle.json").write_text(json.dumps(dict.fromkeys(BUNDLE_KEYS, "tests")))
    return explain(folder, to_recipe(recipe(**changes), ""), schema, clients)


def test_what_a_recipe_would_ask_is_explained_with_the_rules_it_meets(tmp_path: Path) -> None:
    site = make_site(tmp_path, policy={"sums": "never", "models": ["linear"], "rounds": 0})
    found = explained(site.folder, {})
    assert [one.split(":")[0] for one in found.refusals] == ["rule rounds", "rule models"]
    fit = next(one for one in found.asked if one.task == "FedAvg.fit")
    assert fit.leaves == "mean(update, size)" and fit.protected == "no noise" and fit.refused.startswith("rule sums")
    assert found.epsilon is None and found.approved and found.clients == 3
    (site.folder / "rows.csv").write_text("client,a\n1,2\n")
    assert "cannot do what the recipe asks of its data" in explained(site.folder, {}).refusals[-1]


def test_the_epsilon_that_is_explained_is_the_one_that_is_charged(tmp_path: Path, monkeypatch: Patch) -> None:
    sites = private_sites(tmp_path)
    use(monkeypatch, sites)
    private_run(tmp_path / "run", cohort=12, rounds=2)
    (begun,) = (sites[0].folder / "runs").glob("*/recipe.json")
    changes = json.loads(begun.read_bytes())["recipe"]
    found = explained(sites[0].folder, changes, 12)
    assert not found.refusals and found.epsilon is not None
    assert found.epsilon == pytest.approx(SiteLedger(sites[0].folder).total["client"].worst(1e-5), rel=0.02)
    assert "ε = 10 at δ = 1e-05" in found.most
    policy = sites[0].folder / "policy.toml"
    policy.write_text(policy.read_text().replace("epsilon_run = 10.0", f"epsilon_run = {found.epsilon * 0.9}"))
    (met,) = explained(sites[0].folder, changes, 12).refusals
    assert met.startswith("rule epsilon_run: the whole run costs")
    told = CliRunner().invoke(app, ["node", "ledger", str(sites[0].folder), "--replay"])
    assert told.exit_code == 0, told.output
    assert [line.split()[0] for line in told.stdout.splitlines()[:2]] == ["1", "2"] and "is signed" in told.stdout


# Its ledger


def test_the_ledger_charges_once_and_notices_every_change(tmp_path: Path) -> None:
    host = settled(tmp_path)
    first = ask(host)
    again = ask(host)  # asked twice, as after a broken line: the same bytes
    assert torch.equal(first[-1].partials[0].total, again[-1].partials[0].total)
    host = NodeHost(open_site(tmp_path / "a"))  # the node was started again
    result(host.call("settle", load(host)), "")
    assert torch.equal(ask(host)[-1].partials[0].total, first[-1].partials[0].total)
    file = tmp_path / "a" / "ledger.jsonl"
    (line,) = file.read_text().splitlines()
    entry = json.loads(line)
    assert (entry["task"], entry["clients"], entry["purpose"]) == ("FedAvg.fit", 3, "train")
    ask(host, serial=2)
    whole = file.read_text()
    for broken in (whole.replace('"clients": 3', '"clients": 2', 1), whole[whole.index("\n") + 1 :], whole + whole):
        file.write_text(broken)
        with pytest.raises(UserError, match="has been changed or is damaged"):
            SiteLedger(tmp_path / "a")
    forged = json.loads(whole.splitlines()[1]) | {"clients": 2}
    del forged["hash"], forged["signature"]
    forged |= {"hash": _hash(forged), "signature": json.loads(whole.splitlines()[1])["signature"]}
    file.write_text(whole.splitlines()[0] + "\n" + json.dumps(forged) + "\n")
    ledger = SiteLedger(tmp_path / "a")  # the chain holds, and who has no key cannot sign it
    with pytest.raises(UserError, match="it is not signed by this site's key"):
        list(ledger.lines(signed=True))
    file.write_text(whole + '{"half a li')
    assert len(list(SiteLedger(tmp_path / "a").lines())) == 2  # a power cut: what it was to say had not left
    assert file.read_text() == whole


def private_run(folder: Path | None = None, **more: Any) -> Any:
    """A run with an ε at sites; how many classes there are is public."""
    plan = plan_for(["fedavg"], {**AT_SITES, **PRIVATE, "data": "rows.csv", **more}, ["data.options.classes=3"])
    return run_plan(plan, folder, start_workers=open_session).results[0]


def private_sites(tmp_path: Path, **policy: Any) -> list[Any]:
    return [
        make_site(tmp_path, name, number, {**GUARDED, **policy}, clients=4, per_client=10)
        for number, name in enumerate("abc")
    ]


def test_a_private_run_by_the_sites_own_count(tmp_path: Path, monkeypatch: Patch) -> None:
    sites = private_sites(tmp_path)
    use(monkeypatch, sites)
    done = private_run(tmp_path / "run", cohort=12, rounds=2)
    assert done.privacy.epsilon is not None and done.accuracy.seen is None  # no site shows scores
    for site in sites:
        ledger = SiteLedger(site.folder)
        own = ledger.total["client"].epsilon(1e-5)
        assert own == pytest.approx(done.privacy.epsilon_server, rel=0.02)  # unsampled, as against the server
        assert all(line["trust"] == "nobody" for line in ledger.lines() if line["kind"] == "charge")


def test_the_most_epsilon_for_ever_ends_the_next_run(tmp_path: Path, monkeypatch: Patch) -> None:
    sites = private_sites(tmp_path, epsilon=5.0)
    use(monkeypatch, sites)
    private_run(cohort=12, rounds=2)
    with pytest.raises(QuorumError) as told:
        private_run(cohort=12, rounds=2)
    assert "rule epsilon: the cost would be" in told.value.failures[0].reason
    after = SiteLedger(sites[0].folder).total["client"].epsilon(1e-5)
    assert after <= 5.0


@pytest.mark.parametrize(
    ("policy", "rule"),
    [({"epsilon_run": 1.0}, "epsilon_run"), ({"noise": 50.0}, "noise"), ({"delta": 1e-9}, "epsilon_run")],
)
def test_a_private_run_that_costs_too_much(
    policy: dict[str, Any], rule: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    sites = private_sites(tmp_path, **({"epsilon_run": 4.0} | policy))
    use(monkeypatch, sites)
    with pytest.raises(QuorumError) as told:
        private_run(cohort=12, rounds=2)
    assert f"rule {rule}: " in told.value.failures[0].reason
    assert f"refused by its site, rule {rule} (unalike network status" in str(told.value)


def test_a_schema_that_still_has_its_note_is_told_before_any_site(tmp_path: Path, monkeypatch: Patch) -> None:
    sites = private_sites(tmp_path)
    use(monkeypatch, sites)
    file = tmp_path / "schema.json"
    file.write_text(schema_text(load_data(local_recipe(to_recipe(recipe(), ""), sites[0].data, None))))
    with pytest.raises(UserError, match="still has its note"):
        private_run(cohort=12, schema=str(file), normalize=True)
    assert not any(True for site in sites for _ in SiteLedger(site.folder).lines())
    told = explained(sites[0].folder, {"privacy": {"epsilon": 4.0, "trust": "nobody"}}, None, file)
    assert "schema.json was given, but it still has its note" in told.refusals[-1]


def test_noise_for_points_does_not_protect_clients(tmp_path: Path, monkeypatch: Patch) -> None:
    use(monkeypatch, private_sites(tmp_path))
    with pytest.raises(QuorumError, match="rule unit: "):
        private_run(cohort=12, unit="point")


def test_simulated_noise_counts_as_none(tmp_path: Path, monkeypatch: Patch) -> None:
    use(monkeypatch, private_sites(tmp_path))
    with pytest.raises(UserError, match="rule sums: simulated noise protects nobody"):
        private_run(cohort=12, simulate_noise=True)


# Whole runs


def three(tmp_path: Path) -> list[Any]:
    return [make_site(tmp_path, name, number) for number, name in enumerate("abc")]


def test_a_site_without_consent_to_measuring_is_not_measured(tmp_path: Path, monkeypatch: Patch) -> None:
    sites = [make_site(tmp_path, name, number, {"purposes": ["train", "scale"]}) for number, name in enumerate("ab")]
    use(monkeypatch, sites)
    for method in ("fedavg", "pefll"):
        done = run(method, data="rows.csv", **AT_SITES, out=tmp_path / method)
        assert done.accuracy.seen is None
    notes = open_session(Runtime(name="network", network="hub")).load(to_recipe(recipe(), ""), b"").notes
    assert notes == [
        'no scores from a and b: their policy does not list the purpose "measure", or there are no test rows'
    ]
    assert {line["purpose"] for site in sites for line in SiteLedger(site.folder).lines()} == {"train"}


def test_a_comparison_asks_the_sites_for_one_method_after_the_other(tmp_path: Path, monkeypatch: Patch) -> None:
    use(monkeypatch, sites := three(tmp_path))
    found = compare("fedavg", "local", data="rows.csv", **AT_SITES, out=tmp_path / "both")
    assert [one.method for one in found.results] == ["fedavg", "local"]
    assert all(one.accuracy.seen is not None and not one.failures for one in found.results)
    for site in sites:  # each is a run of its own
        tasks = {(line["run"], line["task"]) for line in SiteLedger(site.folder).lines() if line["purpose"] == "train"}
        assert len({run for run, _ in tasks}) == 2 and {"FedAvg.fit", "Local.fit"} <= {task for _, task in tasks}


def test_a_site_that_refuses_is_a_failure_of_its_own_clients(tmp_path: Path, monkeypatch: Patch) -> None:
    sites = [*three(tmp_path)[:2], make_site(tmp_path, "d", 3, {"sums": "never"})]
    use(monkeypatch, sites)
    done = run("fedavg", data="rows.csv", **{**AT_SITES, "cohort": 9})
    assert done.failures == 3


def test_sites_that_read_other_rows_are_told_apart(tmp_path: Path, monkeypatch: Patch) -> None:
    sites = three(tmp_path)[:2]
    file = sites[1].folder / "rows.csv"
    file.write_text(file.read_text().replace("a,b,c,d,e", "a,b,c,d,weight"))
    use(monkeypatch, sites)
    with pytest.raises(UserError, match=r"the rows of b are not as those of a: give all the same schema"):
        run("fedavg", data="rows.csv", **AT_SITES)


def test_a_run_that_is_stopped_goes_on(tmp_path: Path, monkeypatch: Patch) -> None:
    from tests.cluster.test_runs import Stop

    sites = three(tmp_path)
    how = {**AT_SITES, "rounds": 4, "checkpoint_every": 2}
    use(monkeypatch, sites)
    run("local", data="rows.csv", **how, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run("local", data="rows.csv", **how, out=tmp_path / "run", watcher=Stop(3))
    use(monkeypatch, [open_site(site.folder) for site in sites])  # the nodes were started again, too
    resume(tmp_path / "run")
    ends = [checkpoint.load(tmp_path / name) for name in ("whole", "run")]
    assert ends[0] is not None and ends[1] is not None
    assert all(torch.equal(value, ends[1].state[name]) for name, value in ends[0].state.items())
    shutil.rmtree(tmp_path / "a" / "runs")
    use(monkeypatch, [open_site(site.folder) for site in sites])
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(Refused, match="nothing was kept"):
        resume(tmp_path / "run")


def test_the_engine_of_these_tests_is_an_engine(tmp_path: Path) -> None:
    engine = Here([make_site(tmp_path)])
    assert json.loads(result(engine.begin(0, "version").result(), "a"))["version"]


# What a private run keeps from a server that lies about its recipe, its clients or its purpose


def private(**data: Any) -> dict[str, Any]:
    given = {"unseen": 0, "normalize": False, "options": {"classes": 3}, **data}
    privacy = {"epsilon": 4.0, "delta": 1e-5, "trust": "nobody", "accept_delta": True}
    return recipe(data=given, privacy=privacy)


def test_weights_of_rows_stay_at_the_site(tmp_path: Path) -> None:
    """By balanced weights each row's class was told, before anything was asked."""
    host = NodeHost(make_site(tmp_path, policy=GUARDED))
    told = plain.decode(load(host, private(class_weights="balanced")))
    for part in told.parts.values():
        assert part.weight is not None and part.weight.numel() == 0 and part.known is None
    assert host._population is not None and host._population.train.weight is not None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"options": {"classes": 3, "missing": "client"}}, "one row changes others"),
        ({"class_weights": "balanced"}, "DP-SGD counts all rows the same"),
        ({"options": {}}, "the number of classes"),
        ({"normalize": True}, "the scaling of the inputs"),
    ],
)
def test_what_no_noise_protects_is_refused_by_the_site_before_it_tells_anything(
    data: Changes, why: str, tmp_path: Path
) -> None:
    """The server has its own check, of what sites tell it; a hostile one has none."""
    host = NodeHost(make_site(tmp_path, policy=GUARDED))
    values = private(**data)
    values["privacy"]["unit"] = "point"
    with pytest.raises(Refused, match="cannot do what the recipe asks"):
        load(host, values)
    assert why in (tmp_path / "a" / "log").read_text()


def test_a_site_does_not_settle_with_clients_that_are_not_as_its_own(tmp_path: Path) -> None:
    """With two classes a client that has the third would fail, and show; a declared ε would set its noise."""
    host = NodeHost(make_site(tmp_path, policy=GUARDED))
    told = plain.decode(load(host, private()))
    with pytest.raises(Refused, match="cannot do what the recipe asks"):
        result(host.call("settle", plain.encode(replace(told, classes=2))), "node a")
    declared = {"epsilon": torch.full((3,), 1e6).double(), "delta": torch.full((3,), 1e-5).double()}
    with pytest.raises(Refused, match="who declare no ε"):
        result(host.call("settle", plain.encode(replace(told, declared=declared))), "node a")
    assert result(host.call("settle", plain.encode(told)), "node a")


@pytest.mark.parametrize("wanted", [(), (ReleaseName("stays", ("loss",)),)])
def test_measuring_does_not_tell_of_failures_in_a_private_run(wanted: Any, tmp_path: Path) -> None:
    host = NodeHost(make_site(tmp_path, policy={**GUARDED, "purposes": ["train", "measure"]}))
    result(host.call("settle", load(host, private())), "node a")
    (reply,) = ask(host, task="Scorer.score", purpose="measure", wanted=wanted, shared={"theta": torch.zeros(4)})
    assert set(reply.failed.values()) == {"refused by its site: the request is not one of this run"}


def test_bytes_are_counted_over_all_channels_of_a_run(tmp_path: Path) -> None:
    host = settled(tmp_path)
    ask(host)
    sent = tmp_path / "a" / "runs" / RUN / "sent"
    assert int(sent.read_text()) > 0
    sent.write_text(str(100 << 20))  # as if there had been more
    again = NodeHost(open_site(tmp_path / "a"))
    result(again.call("settle", load(again)), "node a")
    with pytest.raises(Refused, match="rule megabytes"):
        ask(again, serial=2)


def test_a_server_that_is_trusted_to_add_the_noise_sees_no_client_alone(tmp_path: Path) -> None:
    """Its sums leave without noise, so the fewest clients of a sum count."""
    policy = {**GUARDED, "trust": ["server"], "fewest": 2}
    host = NodeHost(make_site(tmp_path, policy=policy))
    values = private()
    values["privacy"]["trust"] = "server"
    result(host.call("settle", load(host, values)), "node a")
    (reply,) = ask(host, ids=torch.arange(1))
    assert "rule individual" in reply.failed[0] and "over 1 of its clients" in reply.failed[0]
    assert ask(host, ids=torch.arange(2), serial=2)[0].rows.tolist() == [0, 1]


def test_what_a_server_says_does_not_speak_to_the_sites_terminal(tmp_path: Path) -> None:
    host = settled(tmp_path)
    ask(host, task="\x1b[2J\nrefused: all is well", wanted=())
    log = (tmp_path / "a" / "log").read_text()
    assert "\x1b" not in log and len(log.splitlines()) == 1
    with pytest.raises(Refused):
        load(host, recipe(method="\x1b]0;owned\x07"))
    assert "\x1b" not in (tmp_path / "a" / "log").read_text()
    assert "\x1b" not in CliRunner().invoke(app, ["node", "ledger", str(tmp_path / "a")]).output


def test_an_ask_that_was_charged_does_not_run_again_when_the_folder_of_its_run_is_gone(tmp_path: Path) -> None:
    """A site may remove old runs to make room; a server that kept its requests would get fresh noise for nothing."""
    made = make_site(tmp_path, policy=GUARDED)
    for fresh in (True, False):
        host = NodeHost(open_site(made.folder))
        result(host.call("settle", load(host, private())), "node a")
        (reply, *_) = ask(host)
        assert (not reply.failed) == fresh
        shutil.rmtree(made.folder / "runs")
    assert len(SiteLedger(made.folder)._charged) == 1
