import json
import math

import pytest
from typer.testing import CliRunner

from reproductions import catalog, runner
from reproductions.__main__ import app
from reproductions.item import Found, Item, Planned, Row, claim, near, overall
from reproductions.splitting.training import LEAST_SQUARES, convex, rounds_to, scheme, worst_step
from unalike.runs.errors import UserError


def made(rows, values, **more):
    return Item("x-table-1", "title", "claim", "yes", rows, lambda work: Found(values, [{"a": 1}]), **more)


@pytest.mark.parametrize(
    ("row", "values", "scaled", "expected"),
    [
        (near("a", 10, 1, "±1"), [9.2, 11.6], "", "holds"),  # the mean counts
        (near("a", 10, 1, "±1"), [12.0], "", "differs"),
        (claim("a", "below 1", "any", high=1), [0.5, 1.5], "", "differs"),  # each seed counts
        (claim("a", "below 1", "any", high=1), [0.5, 0.9], "", "holds"),
        (claim("a", "below 1", "any", high=1), [math.nan], "", "differs"),
        (claim("a", "above 1", "any", low=1), [math.inf], "", "differs"),
        (near("a", 10, 1, "±1", not_comparable="searched"), [10.0], "", "not comparable"),
        (near("a", 10, 1, "±1", full_only=True), [10.0], "fewer rounds", "not comparable"),
        (near("a", 10, 1, "±1", full_only=True), [10.0], "", "holds"),
        (near("a", 10, 1, "±1"), None, "", "not comparable"),
    ],
)
def test_a_row_is_judged_by_its_own_bounds(row, values, scaled, expected):
    found = row.compare(values, scaled)
    assert found["verdict"] == expected
    assert bool(found.get("why")) == (expected == "not comparable") or expected == "differs"
    json.dumps(found, allow_nan=False)


def test_an_item_differs_if_a_row_does_and_holds_if_one_does():
    words = ["holds", "differs", "not comparable"]
    assert overall([{"verdict": word} for word in words]) == "differs"
    assert overall([{"verdict": word} for word in ("not comparable", "holds")]) == "holds"
    assert overall([{"verdict": "not comparable"}]) == "not comparable"


def test_a_tolerance_without_a_reason_and_rows_of_one_name_are_refused():
    with pytest.raises(ValueError, match="where it comes from"):
        near("a", 1, 1, "")
    with pytest.raises(ValueError, match="nothing lies between"):
        Row("a", 1, 2, 1, "any")
    with pytest.raises(ValueError, match="a name of its own"):
        made((near("a", 1, 1, "any"), near("a", 2, 1, "any")), {})


def test_tolerances_are_on_disk_before_anything_is_computed(tmp_path):
    rows = (near("a", 10, 1, "±1 of the paper"),)

    def compute(work):
        declared = json.loads((tmp_path / "declared.json").read_text())
        assert declared["rows"][0]["tolerance"] == {"low": 9, "high": 11, "because": "±1 of the paper"}
        assert not (tmp_path / "verdict.json").exists()
        return Found({"a": [10.5]}, [{"seed": 0, "a": 10.5}])

    verdict = runner.reproduce(Item("x-table-1", "t", "c", "yes", rows, compute, scaled="half of it"), tmp_path)
    written = json.loads((tmp_path / "verdict.json").read_text())
    assert written == verdict and verdict["verdict"] == "holds" and verdict["scale"] == "scaled"
    declared = json.loads((tmp_path / "declared.json").read_text())
    assert [row["tolerance"] for row in verdict["rows"]] == [row["tolerance"] for row in declared["rows"]]
    assert (tmp_path / "numbers.csv").read_text() == "seed,a\n0,10.5\n"


def test_numbers_without_a_row_and_a_folder_of_another_item_are_refused(tmp_path):
    rows = (near("a", 10, 1, "any"),)
    with pytest.raises(ValueError, match="declares no row"):
        runner.reproduce(made(rows, {"b": [1.0]}), tmp_path)
    with pytest.raises(UserError, match="holds x-table-1"):
        runner.reproduce(Planned("x-table-2", "t", "no", "no data"), tmp_path)


def test_parts_are_computed_once_for_each_setting(tmp_path):
    calls = []

    def compute(tick, k):
        calls.append(k)
        tick(1, 2)
        return {"value": k / 3}

    for _ in range(2):
        parts = runner.Parts(tmp_path, False, runner.Unwatched())
        assert [parts.part("p", compute, k=k)["value"] for k in (1, 2)] == [1 / 3, 2 / 3]
    assert calls == [1, 2] and parts.older == 0
    runner.forget(tmp_path)
    runner.Parts(tmp_path, False, runner.Unwatched()).part("p", compute, k=1)
    assert calls == [1, 2, 1]


def test_an_item_that_was_stopped_goes_on_where_it_was(tmp_path):
    begun = []

    def compute(tick, k):
        begun.append(k)
        if begun == [0, 1]:
            raise KeyboardInterrupt  # what is on disk at this moment is all that a kill leaves, too
        return {"value": k}

    def both(work):
        return Found({"a": [work.part("p", compute, k=k)["value"] for k in (0, 1)]}, [])

    item = Item("x-table-1", "t", "c", "yes", (near("a", 0.5, 0.1, "any"),), both, seeds=(0, 1))
    with pytest.raises(KeyboardInterrupt):
        runner.reproduce(item, tmp_path)
    assert not (tmp_path / "verdict.json").exists()
    assert runner.reproduce(item, tmp_path)["verdict"] == "holds" and begun == [0, 1, 1]


def test_every_stored_verdict_is_of_the_item_as_it_stands():
    known = catalog.items()
    for file in runner.STORED.glob("*.json"):
        verdict, item = json.loads(file.read_text()), known[file.stem]
        assert isinstance(item, Item) and verdict["verdict"] == overall(verdict["rows"])
        scaled = verdict.get("scaled", "")
        for row, stored in zip(item.rows, verdict["rows"], strict=True):
            assert {key: row.compare(None, scaled)[key] for key in ("what", "paper", "tolerance")} == {
                key: stored[key] for key in ("what", "paper", "tolerance")
            }, f"{item.id} changed since its verdict was stored: python -m reproductions {item.id} --store"


def test_the_list_has_every_item_once_with_a_verdict_or_a_reason():
    entries = json.loads(CliRunner().invoke(app, ["--list", "--json"]).stdout)
    ids = [entry["id"] for entry in entries]
    assert len(set(ids)) == len(ids) and {"t1-table-4.1", "t2-figure-2.1", "p3-section-4-bernoulli"} <= set(ids)
    assert ids.index("t2-figure-4.1") < ids.index("t2-figure-c.1")
    titles = [entry["title"] for entry in entries]
    assert len(set(titles)) == len(titles)
    for entry in entries:
        assert {"id", "title", "two_cores", "verdict", "scale", "command"} <= set(entry)
        assert entry["verdict"] in ("holds", "differs", "not comparable") or entry["why"]


def test_the_command_writes_and_prints(tmp_path):
    out = tmp_path / "item"
    result = CliRunner().invoke(app, ["t2-figure-2.1", "--out", str(out), "--json"])
    assert json.loads(result.stdout) == json.loads((out / "verdict.json").read_text())
    assert {"id", "title", "scale", "seconds", "seeds", "verdict", "rows"} <= set(json.loads(result.stdout))
    assert (out / "figure.svg").read_text().startswith("<svg") and (out / "numbers.csv").exists()
    result = CliRunner().invoke(app, ["t2-figure-2.1", "--out", str(out), "--quiet"])
    assert "t2-figure-2.1 holds" in result.stdout
    result = CliRunner().invoke(app, ["t1-figure-b.8", "--out", str(tmp_path / "none"), "--json"])
    nothing = json.loads(result.stdout)
    assert nothing["verdict"] is None and nothing["why"]


def test_an_unknown_id_and_no_id_say_what_to_do():
    for arguments, text in ((["t2-figure-2.11"], "t2-figure-2.1"), ([], "--list")):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1 and text in result.stderr


def test_convex_runs_of_the_splitting_items_end_where_theory_says():
    tiny = {"problem": LEAST_SQUARES, "options": "clients=4,points=60,dim=5,noise=2", "rounds": 80, "seed": 0}
    ends = {}
    for label in ("FedSplit", "FedProx", "FedRP"):
        found = convex(lambda done, total: None, **tiny, **scheme(label, LEAST_SQUARES, 1e-2))
        assert len(found["gaps"]) == 80 and found["heterogeneity"] > 0
        ends[label] = found["gaps"][-1]
    assert ends["FedSplit"] < 1e-15 < 1e-6 < ends["FedProx"]
    assert ends["FedRP"] == pytest.approx(ends["FedProx"], rel=1e-6)  # Theorem 8
    assert rounds_to([3.0, 2.0, 1.0], 2.0) == 2 and rounds_to([3.0], 2.0) == 2
    assert worst_step([4.0, 2.0, 3.0]) == 1.5


def test_only_what_is_not_finite_counts_as_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    from reproductions.adaped import training
    from unalike.core.failure import Diverged, Failure
    from unalike.core.federation import QuorumError

    def failing(reason: str) -> None:
        def trained(*_: object, **__: object) -> None:
            raise QuorumError("none answered", [Failure("a", "AdaPeD.fit", 7, reason)])

        monkeypatch.setattr(training, "trained", trained)

    failing(Diverged.array("update"))
    assert training.trained_or_diverged(lambda *_: None)["diverged"] == 7
    failing("TypeError: a bug")
    with pytest.raises(QuorumError):
        training.trained_or_diverged(lambda *_: None)
