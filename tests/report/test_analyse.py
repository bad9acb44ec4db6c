"""``unalike analyse``: a run in, a table, ``analyses.json`` and a report out, and a reason for all that is not."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.runs.helpers import SMALL, At, Crash, crash, metrics
from unalike.api import run
from unalike.commands.main import app
from unalike.data import load
from unalike.newcomers.serve import serve
from unalike.report.analyses import analyse as analyses_run
from unalike.report.analyses import measures as analyses
from unalike.report.analyses.analyse import QUICK, Bench, Extent, analyse, finished_run
from unalike.report.analyses.file import ANALYSES, MOST_BYTES, Analyses, read_analyses, write_analyses
from unalike.runs import folder as folders
from unalike.runs.errors import UserError

TINY: dict[str, Any] = {**SMALL, "rounds": 2, "eval_every": 1}
SHORT = {**TINY, "local_steps": 1}
RUNS: dict[str, dict[str, Any]] = {
    "pefll": {**SHORT, "hyperparameters": {"descriptor": 4}},
    "odpfl": {**SHORT, "hyperparameters": {"descriptor": 4, "encoder": "sphere", "newcomer_epsilon": 2.0}},
    "fedavg": TINY,
    # what a newcomer gets depends on the batches it draws
    "fedavg-finetune": {**TINY, "hyperparameters": {"finetune": {"steps": 3, "batch": 2, "lr": 0.5}}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for method, settings in RUNS.items():
        run(method, out=folder / method, **settings)
    return {method: folder / method for method in RUNS}


def unalike(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(map(str, words)))
    assert "Traceback" not in result.output
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.usefixtures("drawings")
def test_the_command_tells_writes_and_shows_what_it_found(runs: dict[str, Path]) -> None:
    shown = unalike("analyse", runs["pefll"], "--quick")
    for number, one in enumerate(ANALYSES.values(), start=1):
        assert f"{number}/{len(ANALYSES)} {one.name}" in shown  # progress
    found = read_analyses(runs["pefll"])
    assert found is not None and found.round == 2 and found.quick and set(found.left_out) == {"same_classes"}
    assert [place.group for place in found.map].count("unseen") == 3 and len(found.map) == 12
    assert [point.at for point in found.rotation] == [0, 45, 90]
    for point in (*found.alpha, *found.rotation, *found.blur, *found.size[0].points):
        assert f"{100 * point.mean:.1f}%" in shown
    assert found.correlation is not None
    one = found.correlation
    words = f"{one.mean:.2f} ({one.low:.2f} to {one.high:.2f}) over 3 unseen clients; {one.untrained:.2f} before"
    assert words in " ".join(shown.split())
    page = (runs["pefll"] / "report.html").read_text()
    assert '<section id="analyses">' in page and "t-SNE of descriptors, pefll" in page
    assert not list(runs["pefll"].glob(".*.part"))


def test_flowdup_has_a_map_of_its_own_features_by_rotation(tmp_path: Path) -> None:
    fields = {"dimension": 20, "features": 6, "width": 4}
    turned = {**TINY, "partition": "rotation", "labeled": 1.0, "hyperparameters": fields}
    run("flowdup", out=tmp_path / "run", **turned)
    finished = finished_run(tmp_path / "run")
    found = analyse(finished, quick=True)
    angles = finished.prepared.population.per_client["rotation"]
    assert len(found.map) == 12
    assert {place.name: place.rotation for place in found.map} == {str(i): float(a) for i, a in enumerate(angles)}
    weight, bias = finished.state.h1[:384].view(6, 64), finished.state.h1[384:]
    train = finished.prepared.population.train
    r = Bench(finished, QUICK).descriptors(finished.state)
    order = [train.name(int(i)) for i in Bench(finished, QUICK).everybody[0]]
    block = train.block(torch.tensor([0]))
    torch.testing.assert_close(r[order.index("0")], block.x[0, : block.n[0]].flatten(1).mean(0) @ weight.T + bias)


def test_unchanged_newcomers_score_what_the_run_measured(runs: dict[str, Path]) -> None:
    for method in ("pefll", "fedavg-finetune"):
        found = analyse(finished_run(runs[method]), quick=True)
        mean = json.loads((runs[method] / "result.json").read_text())["accuracy"]["unseen"]["mean"]
        assert found.rotation[0].mean == pytest.approx(mean)
        assert found.blur[0].mean == pytest.approx(mean)
        assert found.size[0].points[-1].mean == pytest.approx(mean)


def test_clients_with_the_same_classes_are_compared_in_the_table_and_in_the_report(tmp_path: Path) -> None:
    dealt = {"partition": "pathological:num_classes_per_partition=2,class_assignment_mode=deterministic"}
    run("fedavg", out=tmp_path / "run", **{**TINY, **dealt, "clients": 40, "unseen": 0.5})
    shown = " ".join(unalike("analyse", tmp_path / "run", "--quick").split())
    finished = finished_run(tmp_path / "run")
    found = analyse(finished, quick=True).same_classes
    assert found is not None and found.clients > 10
    assert found.clients + found.novel_clients == len(finished.prepared.population.unseen)
    assert f"{100 * found.unseen:.1f}% of {found.clients} unseen clients, {100 * found.seen:.1f}% of training" in shown
    assert (
        found.twins is not None
        and found.twins_of is not None
        and 1 < found.pairs <= len(finished.prepared.population.seen)
    )
    pairs = f"{100 * found.twins:.1f}%; {100 * found.twins_of:.1f}% of those {found.pairs} clients"
    assert f"made of unseen clients' rows: {pairs}" in shown
    page = (tmp_path / "run" / "report.html").read_text()
    assert "clients with the same classes" in page and f"unseen clients, {100 * found.seen:.1f}% of training" in page
    assert pairs in page


def test_the_label_mask_is_measured_beside_no_mask(runs: dict[str, Path]) -> None:
    shown = " ".join(unalike("analyse", runs["pefll"], "--quick").split())
    finished = finished_run(runs["pefll"])
    found = analyse(finished, quick=True).label_mask
    assert found is not None
    result = json.loads((runs["pefll"] / "result.json").read_text())["accuracy"]
    assert found.seen == pytest.approx(result["seen"]["mean"])
    assert found.unseen == pytest.approx(result["unseen"]["mean"])
    # two rounds leave a model that mostly predicts classes a client of two classes does not have
    assert found.seen_masked > found.seen and found.unseen_masked > found.unseen
    masked = f"{100 * found.seen_masked:.1f}% seen, {100 * found.unseen_masked:.1f}% unseen"
    assert f"{masked}; {100 * found.seen:.1f}% and {100 * found.unseen:.1f}% among all classes" in shown
    page = (runs["pefll"] / "report.html").read_text()
    assert "absent classes ruled out" in page and f"<td>{masked}; " in page


def test_the_correlation_is_the_mean_over_the_unseen_clients(runs: dict[str, Path]) -> None:
    finished = finished_run(runs["pefll"])
    found = analyse(finished, quick=True).correlation
    assert found is not None and found.clients == 3 and found.low <= found.mean <= found.high
    population = finished.prepared.population
    vectors = analyses.descriptors_of(*Bench(finished, Extent()).asked, population.train)
    counts = population.histogram(population.train).to(torch.float64)
    each = analyses.rank_correlation(vectors, counts / counts.sum(1, keepdim=True), population.unseen)
    assert found.mean == pytest.approx(float(each.mean()), abs=1e-6)


def test_before_training_the_correlation_is_that_of_a_run_at_rest(runs: dict[str, Path], tmp_path: Path) -> None:
    for method in ("pefll", "odpfl"):
        still = {**RUNS[method], "hyperparameters": {**RUNS[method]["hyperparameters"], "server": {"lr": 1e-30}}}
        run(method, out=tmp_path / method, **still)
        start, trained = (analyse(finished_run(f / method), quick=True) for f in (tmp_path, runs[method].parent))
        assert start.correlation is not None and trained.correlation is not None
        assert start.correlation.mean == pytest.approx(start.correlation.untrained, abs=1e-3)
        assert trained.correlation.untrained == pytest.approx(start.correlation.untrained, abs=1e-6)


def test_learned_descriptors_have_no_correlation_before_training(tmp_path: Path) -> None:
    run("pfedhn", out=tmp_path / "run", **{**SHORT, "hyperparameters": {"descriptor": 4, "newcomer_rounds": 1}})
    shown = unalike("analyse", tmp_path / "run", "--quick")
    found = read_analyses(tmp_path / "run")
    assert found is not None and found.correlation is not None and found.correlation.untrained is None
    assert "before training" not in shown


@pytest.mark.usefixtures("drawings")
def test_a_private_descriptor_has_a_curve_for_each_epsilon(runs: dict[str, Path]) -> None:
    shown = unalike("analyse", runs["odpfl"], "--quick")
    found = read_analyses(runs["odpfl"])
    assert found is not None
    assert [curve.epsilon for curve in found.size] == [None, 1.0, 2.0]  # 2: the run's own
    for curve in found.size[1:]:
        deltas = [point.delta for point in curve.points]
        assert deltas == [pytest.approx(min(0.01, point.at**-1.1)) for point in curve.points] and deltas[-1] < 0.01
    label = f"δ = 0.01 to {deltas[-1]:.2g}"
    words = " ".join(shown.replace("│", " ").split())
    assert "number of samples, ε = 2" in words and "number of samples, no noise" in words and label in words
    page = (runs["odpfl"] / "report.html").read_text()
    assert ">ε = 2<" in page and ">no noise<" in page and f"number of samples and privacy, {label}" in page


def test_what_does_not_apply_is_named_with_the_reason(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["fedavg"], tmp_path / "mute")
    records = [{**record, "bytes_up": 0, "bytes_down": 0} for record in metrics(tmp_path / "mute")]
    (tmp_path / "mute" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    shown = " ".join(unalike("analyse", tmp_path / "mute", "--quick").split())
    assert "does not apply: fedavg has no descriptors of clients" in shown
    assert "does not apply: fedavg sends nothing in training" in shown
    found = read_analyses(tmp_path / "mute")
    assert found is not None and set(found.left_out) == {"map", "correlation", "same_classes", "label_mask", "bytes"}
    page = (tmp_path / "mute" / "report.html").read_text()
    assert "fedavg, not measured: map of descriptors and rank correlation (fedavg has no descriptors of clients" in page
    assert (
        "absent classes ruled out (only PeFLL can keep a client from predicting classes that it does not have)" in page
    )


def test_data_without_classes_images_or_newcomers(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 4)).astype(np.float32)
    np.savez(tmp_path / "my.npz", x=x, y=x.sum(1) + 0.5, client=np.arange(120) % 8)
    small = {"rounds": 1, "cohort": 3, "model": "mlp", "block": 4, "threads": 1, "data": str(tmp_path / "my.npz")}
    run("fedavg", out=tmp_path / "a", unseen=2, **small)
    found = analyse(finished_run(tmp_path / "a"), quick=True)
    assert found.left_out["alpha"] == "my.npz has no classes" and "no images" in found.left_out["rotation"]
    assert found.size and found.size[0].points[0].mean < 0  # minus a squared error
    run("fedavg", out=tmp_path / "b", unseen=0, **small)
    found = analyse(finished_run(tmp_path / "b"), quick=True)
    assert found.left_out["size"] == "the run has no unseen clients; train with data.unseen above 0"
    assert "bytes" not in found.left_out


def test_json_is_all_there_is(runs: dict[str, Path]) -> None:
    told = json.loads(unalike("analyse", runs["fedavg"], "--quick", "--json"))
    assert told == json.loads((runs["fedavg"] / folders.ANALYSES).read_text())


def test_folders_that_cannot_be_analysed_are_refused(tmp_path: Path) -> None:
    shown = " ".join(unalike("analyse", tmp_path / "nothing", code=1).split())
    assert "is no run folder: it has no recipe.toml; give one that `unalike run` wrote" in shown
    with pytest.raises(Crash):
        run("fedavg", out=tmp_path / "half", watcher=At(5, crash), **SMALL)
    shown = " ".join(unalike("analyse", tmp_path / "half", code=1).split())
    assert "has not ended: it has no result.json; finish it with: unalike resume" in shown
    folders.create(tmp_path / "both")
    (tmp_path / "both" / "comparison.json").write_text('{"runs": [{"folder": "fedavg"}]}')
    shown = " ".join(unalike("analyse", tmp_path / "both", code=1).split())
    assert "holds a comparison; analyse its runs one by one, for example:" in shown
    assert not (tmp_path / "half" / folders.ANALYSES).exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", 'expected "runs", a list of one or more, got []'),
        ('{"title": "x"}', """expected "runs", a list of one or more, got {"title": "x"}"""),
        ('{"runs": []}', """expected "runs", a list of one or more, got {"runs": []}"""),
        ('{"runs": {}}', """expected "runs", a list of one or more, got {"runs": {}}"""),
        ('{"runs": ["a"]}', """expected a run with "folder", the name of one, got "a\""""),
        ('{"runs": [{"folder": 3}]}', """expected a run with "folder", the name of one, got {"folder": 3}"""),
        ('{"runs": [{"folder": "../a"}]}', """expected a run with "folder", the name of one, got {"folder": "../a"}"""),
        ('{"runs": [', "Expecting value"),
        (None, "cannot be read: Is a directory"),
    ],
)
@pytest.mark.parametrize("command", ["analyse", "report"])
def test_a_damaged_comparison_is_told(tmp_path: Path, command: str, text: str | None, says: str) -> None:
    folders.create(tmp_path)
    file = tmp_path / "comparison.json"
    file.mkdir() if text is None else file.write_text(text)
    shown = " ".join(unalike(command, tmp_path, code=1).split())
    assert "comparison.json" in shown and says in shown


def test_the_comparison_of_a_run_is_named_as_it_can_be_typed(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(runs["fedavg"], tmp_path / "both" / "fedavg")
    (tmp_path / "both" / "comparison.json").write_text('{"runs": [{"folder": "fedavg"}]}')
    monkeypatch.chdir(tmp_path)
    assert "comparison: unalike report both\n" in unalike("analyse", "both/fedavg", "--quick")
    monkeypatch.chdir(tmp_path / "both" / "fedavg")
    assert f"comparison: unalike report {tmp_path / 'both'}\n" in unalike("analyse", ".", "--quick")


@pytest.mark.parametrize("name", [folders.ANALYSES, "report.html", "simulation/.analyses.json.part"])
def test_a_folder_that_cannot_be_written_is_noticed_before_the_work(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shutil.copytree(runs["fedavg"], tmp_path / "run")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).mkdir()
    monkeypatch.setattr("unalike.report.analyses.analyse.analyse", lambda *_, **__: pytest.fail("too late"))
    shown = " ".join(unalike("analyse", tmp_path / "run", code=1).split())
    assert "cannot use" in shown and f"{name}: Is a directory" in shown


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC])
def test_advice_about_the_disk_fits_the_command(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(file: Path) -> None:
        raise OSError(number, "no", str(file))

    monkeypatch.setattr("unalike.core.disk.check_writable", refuse)
    shown = " ".join(unalike("analyse", runs["fedavg"], "--quick", code=1).split())
    assert f"unalike analyse {runs['fedavg']} --quick" in shown
    assert "--out" not in shown and "resume" not in shown


def test_a_run_that_was_never_evaluated_is_told_without_its_place(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["fedavg"], tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"round": 1}\n')
    found = analyse(finished_run(tmp_path / "run"), quick=True)
    assert found.left_out["bytes"] == "the run has no evaluated rounds in metrics.jsonl"


def test_only_what_does_not_apply_is_taken_for_it(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(_: Path) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(analyses, "accuracy_per_byte", wrong)
    with pytest.raises(ValueError, match="a mistake of ours"):
        analyse(finished_run(runs["fedavg"]), quick=True)


def test_the_page_about_the_report_names_how_many_newcomers_are_taken() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reading-the-report.md").read_text()
    assert f"than {Extent().newcomers} ({QUICK.newcomers} with `--quick`)" in page


def test_a_method_that_makes_no_personal_models_is_refused(tmp_path: Path) -> None:
    run("fedavg", out=tmp_path / "run", **{**TINY, "rounds": 1})
    (tmp_path / "own.py").write_text("class Sums:\n    def start(self): ...\n    def round(self): ...\n")
    recipe = tmp_path / "run" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('method = "fedavg"', f'method = "{tmp_path / "own.py"}:Sums"'))
    shown = " ".join(unalike("--trust-code", tmp_path / "own.py", "analyse", tmp_path / "run", code=1).split())
    assert "Sums has no personalize(...); a method has start, round and personalize" in shown


OWN = """
from dataclasses import dataclass

import torch

from unalike import Federation, Model, State, send, task


@dataclass(frozen=True)
class Still:
    model: Model

    @task
    def describe(self, client):
        return send(v=client.mean(client.x.flatten(1).float()))

    def start(self, seed):
        return State(theta=self.model.init(seed))

    def round(self, state, federation):
        federation.everyone().ask(self.describe)
        return state

    def personalize(self, state, cohort):
        return state.theta.expand(len(cohort), -1)

    def descriptors(self, state, cohort):
        return cohort.ask(self.describe)["v"]

    def introduce(self):
        ...
"""


@pytest.mark.parametrize("labeled", [1.0, 0.5])
def test_an_own_method_need_not_say_whether_it_serves_clients_without_labels(tmp_path: Path, labeled: float) -> None:
    (tmp_path / "own.py").write_text(OWN)
    settings = {name: value for name, value in TINY.items() if name != "cohort"}
    run(f"{tmp_path / 'own.py'}:Still", out=tmp_path / "run", labeled=labeled, **settings)
    found = analyse(finished_run(tmp_path / "run"), quick=True)
    assert set(found.left_out) == {"same_classes", "label_mask"}
    assert len(found.map) == (12 if labeled == 1 else 3 + round(9 * labeled))
    finished = finished_run(tmp_path / "run")
    without = finished.prepared.population.train.select(torch.arange(1)).without_labels()
    with pytest.raises(UserError, match="cannot personalize for a client without labels"):
        serve(finished, without, "nobody")


def test_at_most_so_many_clients_are_taken_evenly() -> None:
    which = torch.arange(100, 200)
    taken = analyses_run._sample_evenly(which, 10)
    assert len(taken) == 10 and taken[0] == 100 and taken[-1] == 199 and len(set(taken.tolist())) == 10
    assert torch.equal(analyses_run._sample_evenly(which, 100), which)


def test_clients_of_equal_shares_have_no_correlation() -> None:
    shares = torch.full((5, 3), 1 / 3)
    assert analyses.rank_correlation(torch.randn(5, 2), shares).isnan().all()


def test_too_few_rows_for_newcomers_are_told_apart_from_a_wrong_argument() -> None:
    population = load("digits", partition="pathological:2", clients=12, unseen=3, seed=0)
    one = replace(population.train, size=torch.ones_like(population.train.size))
    none = replace(population.test, size=torch.zeros_like(population.test.size))
    with pytest.raises(analyses.DoesNotApply, match="1 unseen clients have too few rows"):
        analyses.redraw_classes(replace(population, train=one, test=none, unseen=population.unseen[:1]), 1.0)


GOOD = Analyses(round=3, quick=True, left_out={"map": "because"})


def test_the_file_holds_what_was_written(tmp_path: Path) -> None:
    write_analyses(tmp_path, GOOD)
    assert read_analyses(tmp_path) == GOOD
    assert read_analyses(tmp_path / "elsewhere") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"round": 3, "qui', "Invalid JSON"),
        ('{"round": 3}', "quick: Field required"),
        ('{"round": 3, "quick": true, "alpha": [{"at": 1, "mean": NaN, "error": 0}]}', "alpha.0.mean"),
        ('{"round": 3, "quick": true, "alpha": [' + '{"at":1,"mean":1,"error":0},' * 200 + "1]}", "alpha"),
        (
            '{"round": 3, "quick": true, "alpha": [{"at": 0, "mean": 1, "error": 0}]}',
            "alpha: Value error, at = 0, but a logarithmic axis has no 0",
        ),
        ('{"round": 3, "quick": true, "blur": [{"at": 0, "mean": 1e99, "error": 0}]}', "blur.0.mean"),
        ('{"round": 1000000000000000, "quick": true}', "round"),
        ('{"round": -1, "quick": true}', "round"),
        (
            '{"round": 3, "quick": true, "correlation": {"mean": 1.5, "low": 0, "high": 1, "clients": 3}}',
            "correlation.mean",
        ),
        (
            '{"round": 3, "quick": true, "correlation": {"mean": 1, "low": 0, "high": 1, "clients": -3}}',
            "correlation.clients",
        ),
        ('{"round": 3, "quick": true, "left_out": {"magic": "x"}}', "left_out"),
        ('{"round": 3, "quick": true, "left_out": {"map": "' + "x" * 2000 + '"}}', "left_out.map"),
        (
            '{"round": 3, "quick": true, "map": [{"name": "a", "group": "late", "main_class": null, "pca": [0, 1], '
            '"t_sne": [0, 1]}]}',
            "map.0.group: Input should be 'seen' or 'unseen'",
        ),
        (" " * (MOST_BYTES + 1), "more than 8,000,000 bytes"),
        (b"\xff\xfe", "Invalid JSON"),
    ],
)
def test_a_broken_file_is_named_with_the_fault_and_the_way_out(tmp_path: Path, text: str | bytes, says: str) -> None:
    (tmp_path / "simulation").mkdir()
    (tmp_path / folders.ANALYSES).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        read_analyses(tmp_path)
    assert says in str(caught.value) and "analyses.json" in str(caught.value)
    assert "unalike analyse" in str(caught.value)


def test_a_file_that_cannot_be_opened_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / folders.ANALYSES).mkdir(parents=True)
    with pytest.raises(UserError, match=r"analyses.json cannot be read: Is a directory; remove it, .*unalike analyse"):
        read_analyses(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"analyses.json cannot be read: Permission denied"):
        read_analyses(tmp_path)


def test_classes_that_a_client_lacks_by_chance_are_not_compared(tmp_path: Path) -> None:
    run("fedavg", out=tmp_path / "run", **{**TINY, "partition": "iid"})
    found = analyse(finished_run(tmp_path / "run"), quick=True)
    assert found.left_out["same_classes"].startswith("most clients have most of the classes")
