"""A private newcomer: what one of its rows can change, and what it is told about the noise."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.newcomers.test_file import SHOPS, archive, sales, written
from tests.newcomers.test_serve import run_command
from unalike import simulate
from unalike.methods.generated import SENSITIVITY
from unalike.methods.odpfl import ODPFL
from unalike.newcomers.file import read_newcomer
from unalike.newcomers.serve import serve
from unalike.privacy import Gaussian
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.recipe.recipe import to_recipe
from unalike.runs.run import run_recipe


def trained(folder: Path, data: Path, unseen: float, options: dict[str, str], **more: Any) -> FinishedRun:
    recipe = {
        "method": "odpfl",
        "rounds": 1,
        "data": {"name": str(data), "unseen": unseen, "options": options},
        "model": {"name": "logistic"},
        "hyperparameters": {"cohort": 1, "descriptor": 4, "local": {"steps": 2}, "encoder": "sphere", **more},
    }
    run_recipe(to_recipe(recipe, "test"), folder / "run")
    return FinishedRun.open(folder / "run")


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("shops")
    table = sales(8, 0)
    table.loc[3, "price"] = np.nan
    return trained(folder, written(folder, table), 0.25, {**SHOPS, "missing": "mean"})


def descriptor(run: FinishedRun, file: Path) -> torch.Tensor:
    """Without noise."""
    assert isinstance(run.method, ODPFL)
    clients = read_newcomer(run, file).clients
    return run.method.descriptors(run.state, simulate(clients).everyone())[0]


def test_one_row_moves_a_descriptor_by_its_sensitivity_at_most_where_cells_are_missing(
    shops: FinishedRun, tmp_path: Path
) -> None:
    mine = sales(1, 7)
    mine.loc[1:, "price"] = np.nan
    found = []
    for price in (-1e4, 1e4):  # of the only row that has one; a mean of its own would move all rows
        mine.loc[0, "price"] = price
        found.append(descriptor(shops, written(tmp_path, mine)))
    assert 0.1 * SENSITIVITY / 12 < float((found[0] - found[1]).norm()) <= SENSITIVITY / 12 * (1 + 1e-5)


def test_no_row_is_left_out_of_a_private_newcomer(shops: FinishedRun, tmp_path: Path) -> None:
    mine = sales(2, 7)
    mine.loc[0, "price"] = np.nan
    file, words = written(tmp_path, mine), ("--set", "data.options.missing=drop", "--unlabeled")
    with pytest.raises(UserError, match=r"1 row would be left out for lack of a value.*--missing mean"):
        run_command(shops.path, "--data", file, "--client", "s00", "--epsilon", 1, *words)
    run_command(shops.path, "--data", file, "--client", "s01", "--epsilon", 1, *words)  # no row of its own is missing
    run_command(shops.path, "--data", file, "--client", "s00", *words, "--out", tmp_path / "not-private")
    run_command(shops.path, "--data", file, "--client", "s00", "--epsilon", 1, "--out", tmp_path / "filled")


def test_a_run_that_protects_newcomers_leaves_none_of_their_rows_out(tmp_path: Path) -> None:
    run = trained(tmp_path, written(tmp_path, sales(8, 0), "all.csv"), 0.25, SHOPS, newcomer_epsilon=1.0)
    file = written(tmp_path, sales(1, 7).assign(returned=["", *["yes", "no"] * 5, "yes"]))
    came = read_newcomer(run, file, {"partial_labels": "drop"})
    with pytest.raises(UserError, match=r"1 row would be left out.*with --unlabeled"):
        serve(run, came.clients, "mine", left_out=came.left_out)
    came = read_newcomer(run, file, unlabeled=True)
    assert serve(run, came.clients, "mine", left_out=came.left_out).samples == 12


def some_labels(folder: Path, unseen: float) -> FinishedRun:
    """20 clients of 8 rows, of which five have labels."""
    x = np.random.default_rng(0).normal(size=(160, 3))
    client = np.arange(160) // 8
    y = np.where(client % 4 == 0, (x[:, 0] > 0).astype(float), np.nan)
    np.savez(folder / "all.npz", x=x, y=y, client=client)
    return trained(folder, folder / "all.npz", unseen, {})


def test_only_clients_with_labels_say_what_to_expect(tmp_path: Path) -> None:
    run = some_labels(tmp_path, 0.5)
    population = run.prepared.population
    labeled = population.test.labeled[population.unseen]
    assert 0 < int(labeled.sum()) < 0.5 * len(labeled)  # below the quorum, if all were asked
    came = read_newcomer(run, archive(tmp_path, x=np.ones((6, 3)))).clients
    assert (
        "the unseen clients of this run, with 6 samples each, score" in serve(run, came, "mine", epsilon=9.0).notes[-1]
    )
    none = replace(population, unseen=population.unseen[~labeled])
    vars(run)["prepared"] = replace(run.prepared, population=none)
    assert "no unseen clients with labels to test" in serve(run, came, "mine", epsilon=9.0).notes[-1]


@pytest.mark.parametrize(("epsilon", "too_much"), [(0.5, True), (50.0, False)])
def test_the_size_of_the_noise_is_told_without_any_unseen_client(
    epsilon: float, too_much: bool, tmp_path: Path
) -> None:
    run = some_labels(tmp_path, 0.0)
    came = read_newcomer(run, archive(tmp_path, x=np.ones((6, 3)))).clients
    noise, expected = serve(run, came, "mine", epsilon=epsilon).notes
    std = Gaussian.for_budget(epsilon, 0.01).noise_multiplier * 2 / 6
    assert (std > 1) == too_much
    assert f"has standard deviation {std:.3g}, and the descriptor is at most 1 long" in noise
    assert ("hardly anything of the data is left in it" in noise) == too_much
    assert "no unseen clients with labels to test" in expected


def test_the_noise_is_made_for_the_newcomers_own_number_of_rows(tmp_path: Path) -> None:
    """The clients that trained have 8 rows each, the newcomers 3 and 50; the noise itself is measured."""
    run = some_labels(tmp_path, 0.0)
    assert isinstance(run.method, ODPFL)
    for rows in (3, 50):
        came = read_newcomer(run, archive(tmp_path, x=np.random.default_rng(rows).normal(size=(rows, 3)))).clients
        exact = run.method.descriptors(run.state, simulate(came).everyone())[0]
        found = [serve(run, came, "mine", epsilon=1.0, expect=False).descriptor for _ in range(60)]
        noise = torch.stack([one - exact for one in found if one is not None])
        expected = Gaussian.for_budget(1.0, 0.01).noise_multiplier * 2 / rows
        assert float(noise.std()) == pytest.approx(expected, rel=0.25), rows  # 240 numbers: known to 4.6 %


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return some_labels(tmp_path_factory.mktemp("plain"), 0.0)


def paid(run: FinishedRun, folder: Path, x: np.ndarray, *words: object) -> dict[str, Any]:
    """What a private call on these rows tells; its model is removed, so that the next call may write one."""
    told = json.loads(str(run_command(run.path, "--data", archive(folder, x=x), "--epsilon", 0.5, *words, "--json")))
    Path(told["model"]).unlink()
    return dict(told)


def test_calls_on_the_same_rows_add_up_and_those_on_other_rows_do_not(plain: FinishedRun, tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(12, 3))
    first = paid(plain, tmp_path, x[:6])
    assert first["epsilon"] == first["epsilon_of_this_call"] == pytest.approx(0.5, rel=1e-3)
    assert first["ledger"] == str(tmp_path / "mine.ledger.json")
    (tmp_path / "elsewhere").mkdir()
    again = paid(plain, tmp_path, x[3:9][::-1], "--out", tmp_path / "elsewhere" / "model")  # three rows come again
    z = Gaussian.for_budget(0.5, first["delta"]).noise_multiplier
    twice = Gaussian.for_budget(again["epsilon"], first["delta"]).noise_multiplier
    assert twice == pytest.approx(z / math.sqrt(2), rel=1e-3)  # two releases with z are one with z/√2
    assert again["epsilon_of_this_call"] == first["epsilon"]
    assert paid(plain, tmp_path, x[9:])["epsilon"] == first["epsilon"]  # never given before
    thrice = paid(plain, tmp_path, np.concatenate([x[4:5]] * 6))["epsilon"]  # once, however often a call holds it
    assert Gaussian.for_budget(thrice, first["delta"]).noise_multiplier == pytest.approx(z / math.sqrt(3), rel=1e-3)
    output = str(run_command(plain.path, "--data", archive(tmp_path, x=x[:6]), "--epsilon", 0.5))
    assert "(this call alone: 0.5), for all calls on it in" in " ".join(output.split())


def test_rows_have_the_same_names_in_every_type(plain: FinishedRun, tmp_path: Path) -> None:
    x = np.arange(18).reshape(6, 3) % 3
    alone = paid(plain, tmp_path, x.astype(np.float64))["epsilon"]
    assert paid(plain, tmp_path, x.astype(np.int32))["epsilon"] > alone


def test_rows_with_gaps_are_known_again_by_a_run_with_other_means(shops: FinishedRun, tmp_path: Path) -> None:
    """Each run fills the gaps by means of its own; whatever they are, the row is the same."""
    options = {**SHOPS, "missing": "mean"}
    other = trained(tmp_path, written(tmp_path, sales(8, 3).assign(price=1.5), "other.csv"), 0.25, options)
    assert shops.schema.shift is not None and not torch.equal(shops.schema.shift, other.schema.shift)
    mine = sales(1, 7)
    mine.loc[::2, "price"] = np.nan
    whole, gaps = mine.drop(index=range(0, 12, 2)), mine.iloc[::2]
    for rows, name in ((mine, "mine"), (gaps, "gaps"), (whole, "whole")):
        file, found = written(tmp_path, rows, f"{name}.csv"), []
        for number, run in enumerate((shops, other, other)):
            words = ("--data", file, "--epsilon", 0.5, "--out", tmp_path / f"{name}{number}", "--json")
            found.append(json.loads(str(run_command(run.path, *words))))
        z = [Gaussian.for_budget(one["epsilon"], found[0]["delta"]).noise_multiplier for one in found]
        assert z[1:] == pytest.approx([z[0] / math.sqrt(2), z[0] / math.sqrt(3)], rel=1e-3), name
        rows = rows.drop_duplicates(["price", "colour", "days"])
        assert len(read_newcomer(other, file).row_names) == len(rows)  # a gap is as good a value as any


def test_a_call_is_entered_before_its_model_is_written(
    plain: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    file, x = tmp_path / "mine.ledger.json", np.ones((6, 3))
    with monkeypatch.context() as patch:
        patch.setattr("unalike.newcomers.serve.PersonalModel.save", full)
        with pytest.raises(UserError, match="the disk is full"):
            paid(plain, tmp_path, x)
    assert file.is_file()
    before = file.read_text()
    with monkeypatch.context() as patch:
        patch.setattr("unalike.runs.folder.os.fsync", full)
        with pytest.raises(UserError, match=r"the disk is full.*--ledger FILE"):
            paid(plain, tmp_path, x)
    assert file.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.ledger.json", "mine.npz"]  # no model
    assert paid(plain, tmp_path, x)["epsilon"] > 0.6  # with the one that was lost


def test_a_call_without_noise_counts_in_a_ledger_that_is_there(plain: FinishedRun, tmp_path: Path) -> None:
    mine = archive(tmp_path, x=np.ones((6, 3)))

    def call(*words: object) -> dict[str, Any]:
        out = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        return dict(json.loads(str(run_command(plain.path, "--data", mine, "--out", out, "--json", *words))))

    first = call("--epsilon", 1)
    assert first["epsilon"] == pytest.approx(1, abs=0.01)
    again = call("--epsilon", 1, "--delta", 0.1)  # at the smaller δ of the two, so the total grows
    assert again["delta"] == first["delta"] and again["epsilon"] > 1.2
    assert call()["epsilon"] is None
    last = call("--epsilon", 1)
    assert last["epsilon"] is None and last["epsilon_of_this_call"] == pytest.approx(1, abs=0.01)
    shown = str(run_command(plain.path, "--data", mine, "--out", tmp_path / "last", "--epsilon", 1))
    assert "because a call without noise is in" in " ".join(shown.split())
    assert (tmp_path / "mine.ledger.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", ["rows", "[]", "{}", '{"unit": 1}', '{"events": [{"kind": "magic"}]}'])
def test_a_file_that_is_no_ledger_is_refused_and_kept(plain: FinishedRun, tmp_path: Path, content: str) -> None:
    (tmp_path / "mine.ledger.json").write_text(content)
    with pytest.raises(UserError, match=r"mine.ledger.json(: expected a ledger .*nothing of what was spent| is dam)"):
        paid(plain, tmp_path, np.ones((6, 3)))
    assert (tmp_path / "mine.ledger.json").read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.ledger.json", "mine.npz"]
    other = tmp_path / "new" / "other.json"
    assert paid(plain, tmp_path, np.ones((6, 3)), "--ledger", other)["ledger"] == str(other)


def test_a_ledger_is_begun_by_private_calls_or_by_name_and_is_a_file_of_its_own(
    plain: FinishedRun, tmp_path: Path
) -> None:
    mine = archive(tmp_path, x=np.ones((6, 3)))
    words = (plain.path, "--data", mine, "--out", tmp_path / "model")
    with pytest.raises(UserError, match="--out and --ledger are both"):
        run_command(*words, "--epsilon", 1, "--ledger", tmp_path / "model")
    told = json.loads(str(run_command(*words, "--json")))
    assert told["ledger"] is told["epsilon"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.npz", "model"]
    (tmp_path / "model").unlink()
    told = json.loads(str(run_command(*words, "--json", "--ledger", tmp_path / "named.json")))
    assert told["epsilon"] is None and told["ledger"] == str(tmp_path / "named.json")
    assert (tmp_path / "named.json").exists()


def spheres(folder: Path, **more: Any) -> FinishedRun:
    """PeFLL on the unit sphere: eight shops, whose labels enter their descriptors."""
    recipe = {
        "method": "pefll",
        "rounds": 1,
        "data": {"name": str(written(folder, sales(8, 0), "all.csv")), "unseen": 0.25, "options": SHOPS},
        "model": {"name": "logistic"},
        "hyperparameters": {"cohort": 1, "descriptor": 4, "local": {"steps": 2}, "sphere": True, **more},
    }
    run_recipe(to_recipe(recipe, "test"), folder / "run")
    return FinishedRun.open(folder / "run")


def test_a_private_newcomer_of_pefll_is_charged_in_its_own_ledger(tmp_path: Path) -> None:
    run, file = spheres(tmp_path), written(tmp_path, sales(1, 7))
    told = json.loads(run_command(run.path, "--data", file, "--epsilon", 1, "--json", "--out", tmp_path / "a"))
    assert told["epsilon"] == pytest.approx(1, rel=1e-3) and list(told["sent"]) == ["descriptor"]
    assert any("standard deviation" in note for note in told["notes"])
    again = json.loads(run_command(run.path, "--data", file, "--epsilon", 1, "--json", "--out", tmp_path / "b"))
    assert 1.2 < again["epsilon"] < 2, "both calls are in the newcomer's ledger"
    came = read_newcomer(run, file)
    exact = serve(run, came.clients, "mine").descriptor
    noisy = torch.stack([serve_private(run, came.clients) for _ in range(60)])
    assert exact is not None
    wanted = Gaussian.for_budget(1.0, run.newcomer_delta(12)).std(2 / 12)
    assert float((noisy - exact).std()) == pytest.approx(wanted, rel=0.25)


def serve_private(run: FinishedRun, clients: Any) -> torch.Tensor:
    found = serve(run, clients, "mine", epsilon=1.0, expect=False).descriptor
    assert found is not None
    return found


def test_a_run_of_pefll_without_the_sphere_says_how_to_get_one(tmp_path: Path) -> None:
    run = spheres(tmp_path, sphere=False)
    came = read_newcomer(run, written(tmp_path, sales(1, 7)))
    with pytest.raises(UserError, match=r"unalike run pefll --set sphere=true"):
        serve(run, came.clients, "mine", epsilon=1.0)


def test_a_private_newcomer_masks_its_model_by_its_labels_all_the_same(tmp_path: Path) -> None:
    run = spheres(tmp_path, mask_labels=True)
    mine = sales(1, 7).assign(returned="no")
    came = read_newcomer(run, written(tmp_path, mine)).clients
    assert set(serve(run, came, "mine", epsilon=1.0, expect=False).predict(came)) == {"no"}
