import json
import math
import statistics
from dataclasses import replace

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
        (near("a", 10, 1, "±1", not_comparable="searched"), [10.0], "", "not comparable"),
        (near("a", 10, 1, "±1", full_only=True), [10.0], "fewer rounds", "not comparable"),
        (near("a", 10, 1, "±1", full_only=True), [10.0], "", "holds"),
        (near("a", 10, 1, "±1"), None, "", "not comparable"),
        (claim("a", "below 1", "any", high=1, exact=True), [0.5, 1.5], "", "differs"),  # each value counts
        (claim("a", "below 1", "any", high=1, exact=True), [0.5], "", "holds"),
        (claim("a", "above 0", "any", low=0), [5.0], "", "not decided"),  # however large, one seed says little,
        (claim("a", "above 0", "any", low=0), [5.0, 5.1], "", "not decided"),  # and two no more,
        (claim("a", "above 0", "any", low=0), [-5.0, -5.1], "", "not decided"),  # in either direction
        (claim("a", "above 0", "any", low=0), [0.02, 0.41, -0.37], "", "not decided"),
        (claim("a", "above 0", "any", low=0), [0.9, 1.0, 1.1], "", "holds"),
        (claim("a", "above 0", "any", low=0), [-0.9, -1.0, -1.1], "", "differs"),
        (claim("a", "the same", "any", low=-1, high=1), [0.8, 0.85, 0.75], "", "holds"),
        (claim("a", "the same", "any", low=-1, high=1), [0.9, 1.3, 0.5], "", "not decided"),
        (claim("a", "below 1", "any", high=1), [0.5, 0.5, math.nan], "", "differs"),
        (claim("a", "above 1", "any", low=1), [math.inf], "", "differs"),
    ],
)
def test_a_row_is_judged_by_its_own_bounds(row, values, scaled, expected):
    found = row.compare(values, scaled)
    assert found["verdict"] == expected
    assert bool(found.get("why")) == (expected in ("not decided", "not comparable")) or expected == "differs"
    json.dumps(found, allow_nan=False)


def test_the_margin_is_two_standard_errors_of_the_mean():
    def verdict(shift):
        values = [shift + one for one in (-1.0, 0.0, 1.0)]  # deviation 1, so two standard errors are 2/√3 = 1.1547
        return claim("a", "above 0", "any", low=0).compare(values, "")["verdict"]

    assert [verdict(shift) for shift in (-1.16, -1.15, 1.15, 1.16)] == [
        "differs",
        "not decided",
        "not decided",
        "holds",
    ]


def of(*words, main=()):
    return [{"verdict": word, **({"main": True} if i in main else {})} for i, word in enumerate(words)]


def test_an_item_holds_only_with_its_main_claim():
    assert overall(of("holds", "differs", "not comparable")) == "differs"
    assert overall(of("not comparable", "holds")) == "holds"
    assert overall(of("not comparable")) == "not comparable"
    assert overall(of("holds", "not decided")) == "not decided"
    assert overall(of("holds", "not decided", main=[0])) == "holds"
    assert overall(of("holds", "not comparable", main=[1])) == "not comparable"
    assert overall(of("holds", "not decided", main=[1])) == "not decided"
    assert overall(of("holds", "differs", main=[0])) == "differs"


def test_the_scale_is_that_of_what_was_run(tmp_path):
    def compute(work):
        work.choose("rounds", 200, 10)
        work.choose("methods", ("a", "b"), ("a",))
        work.choose("network", "CNN", "MLP")
        work.choose("clients", 20, 20)
        return Found({"a": [10.0] * len(work.choose("seeds", (0, 1, 2), (0,)))}, [])

    rows = (near("a", 10, 1, "any"),)
    item = Item("x-table-1", "t", "c", "yes", rows, compute, seeds=(0, 1, 2))
    small = runner.reproduce(item, tmp_path / "small")
    assert small["scale"] == "scaled" and small["seeds"] == [0]
    assert small["scaled"] == "10 of 200 rounds; 1 of 2 methods; MLP for CNN; 1 of 3 seeds"
    whole = runner.reproduce(item, tmp_path / "whole", full=True)
    assert whole["scale"] == "paper" and "scaled" not in whole and whole["seeds"] == [0, 1, 2]
    lacking = runner.reproduce(replace(item, lacks=("no CNN",)), tmp_path / "lacking", full=True)
    assert (lacking["scale"], lacking["scaled"]) == ("scaled", "no CNN")


def test_a_tolerance_without_a_reason_and_rows_of_one_name_are_refused():
    with pytest.raises(ValueError, match="where it comes from"):
        near("a", 1, 1, "")
    with pytest.raises(ValueError, match="nothing lies between"):
        Row("a", 1, 2, 1, "any")
    with pytest.raises(ValueError, match="tests nothing"):
        claim("a", "anything", "any")
    with pytest.raises(ValueError, match="a name of its own"):
        made((near("a", 1, 1, "any"), near("a", 2, 1, "any")), {})


def test_tolerances_are_on_disk_before_anything_is_computed(tmp_path):
    rows = (near("a", 10, 1, "±1 of the paper"),)

    def compute(work):
        declared = json.loads((tmp_path / "declared.json").read_text())
        assert declared["rows"][0]["tolerance"] == {"low": 9, "high": 11, "because": "±1 of the paper"}
        assert not (tmp_path / "verdict.json").exists()
        work.choose("rounds", 2, 1)
        return Found({"a": [10.5]}, [{"seed": 0, "a": 10.5}])

    verdict = runner.reproduce(Item("x-table-1", "t", "c", "yes", rows, compute), tmp_path)
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


def seeds_with(mean, spread, count):
    """So many numbers with this mean and deviation."""
    if not spread:
        return [mean] * count
    shape = [1.0, -1.0, *[0.0] * (count - 2)]
    return [mean + spread * one / statistics.stdev(shape) for one in shape]


def test_every_stored_verdict_is_of_the_item_as_it_stands_and_obeys_the_rules():
    known = catalog.items()
    for file in runner.STORED.glob("*.json"):
        verdict, item = json.loads(file.read_text()), known[file.stem]
        assert isinstance(item, Item) and verdict["verdict"] == overall(verdict["rows"])
        assert verdict["commit"] and (verdict["scale"] == "scaled") == bool(verdict.get("scaled"))
        assert not item.lacks or verdict["scale"] == "scaled"
        for row, stored in zip(item.rows, verdict["rows"], strict=True):
            declared = row.declared()
            assert declared == {key: stored.get(key) for key in declared}, (
                f"{item.id} changed since its verdict was stored: python -m reproductions {item.id} --store"
            )
            if stored["ours"] is None or row.test == "every":
                continue
            count = 1 if stored["spread"] is None else max(2, len(verdict["seeds"]))
            values = stored.get("values") or seeds_with(stored["ours"], stored["spread"], count)
            assert row.judge(values, verdict.get("scaled", ""))[0] == stored["verdict"], f"{item.id}: {row.what}"


def test_the_list_has_every_item_once_with_a_verdict_or_a_reason():
    entries = json.loads(CliRunner().invoke(app, ["--list", "--json"]).stdout)
    ids = [entry["id"] for entry in entries]
    assert len(set(ids)) == len(ids) and {"t1-table-4.1", "t2-figure-2.1", "p3-section-4-bernoulli"} <= set(ids)
    assert ids.index("t2-figure-4.1") < ids.index("t2-figure-c.1")
    titles = [entry["title"] for entry in entries]
    assert len(set(titles)) == len(titles)
    for entry in entries:
        assert {"id", "title", "two_cores", "verdict", "scale", "command"} <= set(entry)
        assert entry["verdict"] in ("holds", "differs", "not decided", "not comparable") or entry["why"]


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
