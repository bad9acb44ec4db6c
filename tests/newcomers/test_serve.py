"""``unalike personalize``: a newcomer's file in, a model out, and a clear word where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.child import in_child
from tests.newcomers.onnx_files import assert_plain
from unalike.commands import personalize
from unalike.commands.main import app
from unalike.data import load
from unalike.methods import METHODS
from unalike.methods.odpfl import ODPFL
from unalike.newcomers.file import read_newcomer
from unalike.newcomers.model import PersonalModel
from unalike.newcomers.serve import _expectation, serve
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.measure import serves_unlabeled
from unalike.runs.prepare import prepare
from unalike.runs.recipe.recipe import to_recipe
from unalike.runs.recipe.settings import plan_for
from unalike.runs.run import run_recipe

SMALL = {"cohort": 4, "descriptor": 4, "local": {"steps": 2}}
DATA = {"name": "digits", "partition": "pathological:2", "clients": 12, "unseen": 0.25}


def trained(folder: Path, method: str, **hyperparameters: object) -> Path:
    recipe = {"method": method, "rounds": 2, "data": DATA, "hyperparameters": {**SMALL, **hyperparameters}}
    run_recipe(to_recipe({**recipe, "model": {"name": "mlp"}}, "test"), folder / method)
    return folder / method


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {"pefll": trained(folder, "pefll"), "odpfl": trained(folder, "odpfl", encoder="sphere")}


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    population = load("digits", partition="iid", clients=1, unseen=0, test=0)
    assert population.train.y is not None
    keep = torch.isin(population.train.y, torch.tensor([3, 7]))
    return population.train.x[keep][:50].numpy(), population.train.y[keep][:50].numpy()


def newcomer(tmp_path: Path, **arrays: np.ndarray) -> Path:
    file = tmp_path / "mine.npz"
    np.savez(file, **arrays)
    return file


def run_command(*arguments: object) -> object:
    import typer

    app = typer.Typer()
    app.add_typer(personalize.app)
    app.callback()(lambda: None)
    result = CliRunner().invoke(app, ["personalize", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_the_model_is_also_an_onnx_graph_that_reads_raw_rows(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    file = newcomer(tmp_path, x=rows[0], y=rows[1])
    told = json.loads(str(run_command(runs["pefll"], "--data", file, "--onnx", "--json")))
    scores = onnxruntime.InferenceSession(told["onnx"]).run(["scores"], {"x": rows[0]})[0]
    finished = FinishedRun.open(runs["pefll"])
    client = read_newcomer(finished, file).clients
    served = serve(finished, client, "mine")
    expected = finished.method.model(served.theta, client.block(torch.arange(1)).x[0])
    np.testing.assert_allclose(scores, expected.numpy(), atol=1e-4)
    assert len(scores) == 50
    assert_plain(Path(told["onnx"]), schema=True)
    assert told["onnx_input"] == "uint8 [rows, 1, 8, 8]" and told["epsilon"] is told["delta"] is None


def test_an_ensemble_is_written_with_all_its_members(tmp_path: Path, rows: tuple[np.ndarray, np.ndarray]) -> None:
    recipe = {"method": "pfl-ensemble", "rounds": 2, "data": DATA, "model": {"name": "mlp"}}
    run_recipe(to_recipe({**recipe, "hyperparameters": {"cohort": 4, "local": {"steps": 2}}}, "test"), tmp_path / "run")
    file = newcomer(tmp_path, x=rows[0])
    told = json.loads(str(run_command(tmp_path / "run", "--data", file, "--json")))
    finished = FinishedRun.open(tmp_path / "run")
    client = read_newcomer(finished, file).clients
    served, model = serve(finished, client, "mine"), finished.method.model
    x = client.block(torch.arange(1)).x[0]
    with torch.no_grad():
        torch.testing.assert_close(model.module(served.theta)(x), model(served.theta, x))
    assert sum(value.numel() for name, value in load_file(told["model"]).items() if name[0].isdigit()) == model.size


def test_a_newcomer_gets_the_model_that_the_method_makes(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    file = newcomer(tmp_path, x=rows[0], y=rows[1])
    output = run_command(runs["pefll"], "--data", file, "--predictions", tmp_path / "answers.csv", "--json")
    told = json.loads(str(output))
    assert told["samples"] == 50 and told["epsilon"] is None and len(told["descriptor"]) == 4
    assert told["sent"] == {"descriptor": 16}
    run = FinishedRun.open(runs["pefll"])
    tensors = load_file(told["model"])
    served = serve(run, read_newcomer(run, file).clients, "mine")
    for name, value in run.method.model.tensors(served.theta).items():
        torch.testing.assert_close(tensors[name], value)
    assert told["received"]["theta"] == 4 * run.method.model.size
    module = run.method.model.module(served.theta)
    scores = module((torch.from_numpy(rows[0]).float() - tensors["input.shift"]) * tensors["input.scale"])
    expected = [run.schema.class_labels[c] for c in scores.argmax(1).tolist()]
    lines = [line.split(",") for line in (tmp_path / "answers.csv").read_text().splitlines()]
    assert lines[0][:3] == ["id", "client", "prediction"]
    assert [line[0] for line in lines[1:]] == [str(number) for number in range(1, 51)]
    assert [line[2] for line in lines[1:]] == expected


def test_epsilon_is_paid_by_the_newcomer_and_told(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    file = newcomer(tmp_path, x=rows[0])
    output = str(run_command(runs["odpfl"], "--data", file, "--unlabeled", "--epsilon", "0.5", "--delta", "0.01"))
    assert f"ε = 0.5 at δ = 0.01, for all calls on it in {tmp_path / 'mine.ledger.json'}" in output
    assert "unseen clients of this run" in output
    run = FinishedRun.open(runs["odpfl"])
    clients = read_newcomer(run, file, unlabeled=True).clients
    first = serve(run, clients, "mine", epsilon=0.5)
    second = serve(run, clients, "mine", epsilon=0.5)
    assert first.descriptor is not None and second.descriptor is not None
    assert not torch.equal(first.descriptor, second.descriptor)  # the noise is the operating system's
    assert first.epsilon == second.epsilon == pytest.approx(0.5, rel=1e-3)  # no file, so nothing to add it to


def test_a_run_that_protects_newcomers_does_so_with_noise_that_nobody_can_repeat(
    rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    run = FinishedRun.open(trained(tmp_path, "odpfl", encoder="sphere", newcomer_epsilon=0.5, newcomer_delta=0.02))
    clients = read_newcomer(run, newcomer(tmp_path, x=rows[0]), unlabeled=True).clients
    first, second = serve(run, clients, "mine"), serve(run, clients, "mine")
    assert first.descriptor is not None and second.descriptor is not None
    assert not torch.equal(first.descriptor, second.descriptor) and not torch.equal(first.theta, second.theta)
    assert first.epsilon == pytest.approx(0.5, rel=1e-3) and first.delta == 0.01
    assert run.newcomer_delta(100) == pytest.approx(100**-1.1)  # not 1/100, which protects nothing


def test_without_labels_a_method_that_needs_them_says_so(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    file = newcomer(tmp_path, x=rows[0])
    with pytest.raises(UserError, match="cannot personalize for a client without labels") as told:
        run_command(runs["pefll"], "--data", file)
    settings = {"data": "digits", "partition": "iid", "clients": 12, "model": "mlp"}
    methods = {name: prepare(plan_for([name], settings).runs[0][1]).method for name in METHODS}
    able = ", ".join(name for name, method in methods.items() if serves_unlabeled(method))
    assert str(told.value).endswith(f"a method that needs none: {able}")
    with pytest.raises(UserError, match="encoder=sphere"):
        run_command(runs["pefll"], "--data", newcomer(tmp_path, x=rows[0], y=rows[1]), "--epsilon", "1")


def test_data_that_does_not_fit_is_refused_with_the_reason(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    run = FinishedRun.open(runs["pefll"])
    x, y = rows
    wanted = r"trained on images of shape \(1, 8, 8\); give x of \[rows, 1, 8, 8\]"
    with pytest.raises(UserError, match=rf"shape \(1, 9, 9\), but .* {wanted}: resize or crop the images, or train"):
        read_newcomer(run, newcomer(tmp_path, x=np.zeros((5, 1, 9, 9), np.uint8)))
    with pytest.raises(UserError, match=rf"shape \(64,\), but .* {wanted}: reshape it, or train a run on such data"):
        read_newcomer(run, newcomer(tmp_path, x=x.reshape(50, 64)))
    with pytest.raises(UserError, match="class '12' was not in training") as told:
        read_newcomer(run, newcomer(tmp_path, x=x, y=y + 5))
    assert str(told.value).endswith("Name the classes as in training, or leave out the rows of others")
    with pytest.raises(UserError, match=r"rows of others; or add --unlabeled, because this run needs no labels"):
        read_newcomer(FinishedRun.open(runs["odpfl"]), newcomer(tmp_path, x=x, y=y + 5))
    with pytest.raises(UserError, match=r"mine.npz has no rows, but a newcomer needs at least one; give a file"):
        read_newcomer(run, newcomer(tmp_path, x=x[:0]))
    with pytest.raises(UserError, match="50 rows of x but 3 labels"):
        read_newcomer(run, newcomer(tmp_path, x=x, y=y[:3]))
    with pytest.raises(UserError, match="there is no file or folder"):
        read_newcomer(run, tmp_path / "nowhere.npz")


def test_one_class_and_named_classes_are_understood(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    run = FinishedRun.open(runs["pefll"])
    only = read_newcomer(run, newcomer(tmp_path, x=rows[0][:5], y=np.full(5, 7))).clients
    assert only.y is not None and only.y.tolist() == [7] * 5
    words = np.array([str(v) for v in rows[1]])
    named = read_newcomer(run, newcomer(tmp_path, x=rows[0], y=words)).clients
    assert named.y is not None and named.y.tolist() == rows[1].tolist()


@pytest.mark.parametrize(("method", "rows_at_once"), [("pefll", {"newcomer_rows": 3}), ("odpfl", {"rows": 7})])
def test_the_descriptor_that_is_told_is_the_one_that_made_the_model(
    method: str, rows_at_once: dict[str, int], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    run = FinishedRun.open(trained(tmp_path, method, **rows_at_once))  # which rows, or parts, is drawn at random
    served = serve(run, read_newcomer(run, newcomer(tmp_path, x=rows[0], y=rows[1])).clients, "mine")
    assert served.descriptor is not None
    made = run.method.models(run.state, served.descriptor[None])[0]  # type: ignore[attr-defined]
    torch.testing.assert_close(made, served.theta)


def test_an_untrained_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        FinishedRun.open(tmp_path)


def test_nothing_is_overwritten_and_folders_are_made(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    file = newcomer(tmp_path, x=rows[0], y=rows[1])
    before, answers, graph = file.read_bytes(), tmp_path / "answers.csv", tmp_path / "model.onnx"
    answers.write_text("mine")
    graph.write_text("mine")
    for flags in (
        ("--out", file),
        ("--predictions", file),
        ("--predictions", answers),
        ("--out", graph),
        ("--out", tmp_path / "model.safetensors", "--onnx"),
    ):
        with pytest.raises(UserError, match="exists already, and nothing is overwritten: choose another file with --"):
            run_command(runs["pefll"], "--data", file, *flags)
    with pytest.raises(UserError, match="--out and --predictions are both"):
        run_command(runs["pefll"], "--data", file, "--out", tmp_path / "a", "--predictions", tmp_path / "a")
    with pytest.raises(UserError, match="cannot use"):
        run_command(runs["pefll"], "--data", file, "--predictions", answers / "p.csv")
    assert file.read_bytes() == before and answers.read_text() == graph.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.csv", "mine.npz", "model.onnx"]
    run_command(runs["pefll"], "--data", file, "--out", tmp_path / "a" / "m", "--predictions", tmp_path / "b" / "p.csv")
    assert (tmp_path / "a" / "m").is_file() and (tmp_path / "b" / "p.csv").is_file()
    assert not list(tmp_path.glob("a/*.onnx"))  # only on request
    run_command(runs["pefll"], "--data", file)
    with pytest.raises(UserError, match=r"mine.model.safetensors exists already"):
        run_command(runs["pefll"], "--data", file)


def test_an_onnx_graph_alone_and_without_the_exporters_own_warnings(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    file = newcomer(tmp_path, x=rows[0], y=rows[1])
    monkeypatch.chdir(tmp_path)
    done = in_child("personalize", runs["pefll"], "--data", file, "--out", "deep/my.onnx", "--json")
    assert done.code == 0 and done.err == ""
    told = json.loads(done.out)
    assert told["model"] == told["onnx"] == "deep/my.onnx" and Path("deep/my.onnx").is_file()
    assert [path.name for path in Path("deep").iterdir()] == ["my.onnx"]
    monkeypatch.setattr("unalike.newcomers.graphs.can_write_onnx", lambda: False)
    with pytest.raises(UserError, match=r"needs onnx and onnxscript: pip install 'unalike\[onnx\]'"):
        run_command(runs["pefll"], "--data", file, "--onnx")


def test_a_network_that_the_exporter_does_not_know_leaves_nothing_behind(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(PersonalModel, "save_onnx", fail)
    monkeypatch.setattr("unalike.newcomers.graphs.can_write_onnx", lambda: True)
    file = newcomer(tmp_path, x=rows[0], y=rows[1])
    with pytest.raises(UserError, match=r"does not know this network \(RuntimeError: no such operator\)"):
        run_command(runs["pefll"], "--data", file, "--onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.npz"]


@pytest.mark.parametrize("folder", [".", "..", "/"])
def test_data_must_have_a_name(runs: dict[str, Path], folder: str) -> None:
    with pytest.raises(UserError, match=rf"--data {folder}: expected the newcomer's file"):
        run_command(runs["pefll"], "--data", folder)


def test_set_reaches_the_reading_of_the_file_only(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--set: expected data.options.KEY=VALUE"):
        run_command(runs["pefll"], "--data", tmp_path / "mine.npz", "--set", "local.lr=1")
    with pytest.raises(UserError, match=r"data.options.task cannot be set"):
        run_command(runs["pefll"], "--data", tmp_path / "mine.npz", "--set", "data.options.task=regression")


def test_help_shows_what_is_in_brackets() -> None:
    shown = " ".join(CliRunner().invoke(app, ["personalize", "--help"], env={"COLUMNS": "200"}).output.split())
    assert "'unalike[onnx]'" in shown and "(default: DATA.model.safetensors, CLIENT" in shown


def test_delta_is_about_rows(runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    run = FinishedRun.open(runs["odpfl"])
    assert run.newcomer_delta(50) == 0.01 and run.newcomer_delta(2400) == pytest.approx(2400**-1.1)
    assert run.newcomer_delta(1) == 0.01 and run.newcomer_delta(50, 0.019) == 0.019
    for wrong in ("0", "0.02", "1", "nan"):
        with pytest.raises(UserError, match=r"below 1/n = 0.02 for the newcomer's n = 50 rows"):
            run_command(
                runs["odpfl"], "--data", newcomer(tmp_path, x=rows[0]), "--unlabeled", "--epsilon", 1, "--delta", wrong
            )


def test_options_that_would_do_nothing_are_refused(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    file = newcomer(tmp_path, x=rows[0], y=rows[1])
    with pytest.raises(UserError, match=r"--delta 0.001 is for an ε, but no privacy was asked for: add --epsilon"):
        run_command(runs["odpfl"], "--data", file, "--delta", 0.001)
    with pytest.raises(UserError, match=r"holds arrays, which have no columns \(--label-column\)"):
        run_command(runs["odpfl"], "--data", file, "--label-column", "kind")


def test_a_missing_run_is_told_before_a_file_that_is_in_the_way(
    rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    file = newcomer(tmp_path, x=rows[0])
    (tmp_path / "mine.model.safetensors").touch()
    with pytest.raises(UserError, match="is no run folder"):
        run_command(tmp_path / "nowhere", "--data", file)


def test_a_table_for_a_run_on_images_is_told_what_to_give(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"is a table, but .* on images: give an NPZ with x of \[rows, 1, 8, 8\]"):
        run_command(runs["odpfl"], "--data", tmp_path / "mine.csv")


@pytest.mark.parametrize("epsilon", ["0", "-1", "nan"])
def test_a_plain_mistake_is_told_without_a_hint_at_the_traceback(
    epsilon: str, runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    words = ["personalize", runs["odpfl"], "--data", newcomer(tmp_path, x=rows[0]), "--epsilon", epsilon]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 1 and "--epsilon must be a finite number above 0" in result.output
    assert "UNALIKE_TRACEBACK" not in result.output


def test_the_expectation_says_how_many_samples_those_clients_had(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FinishedRun.open(runs["odpfl"])
    population = run.prepared.population
    sizes = population.train.size[population.unseen].tolist()
    many = read_newcomer(run, newcomer(tmp_path, x=np.tile(rows[0], (50, 1, 1, 1)))).clients
    note = serve(run, many, "mine", epsilon=1000.0).notes[-1]
    assert f"the unseen clients of this run, with {min(sizes)} to {max(sizes)} samples each, score" in note
    few = read_newcomer(run, newcomer(tmp_path, x=rows[0][:1])).clients
    note = serve(run, few, "mine", epsilon=1000.0).notes[-1]
    assert "with 1 sample each" in note
    output = str(run_command(runs["odpfl"], "--data", newcomer(tmp_path, x=rows[0][:1])))
    assert output.splitlines()[0].strip() == "mine.npz: 1 sample"
    monkeypatch.setattr("unalike.newcomers.serve.NOTICEABLE", -1.0)  # any loss, for this run has learned little
    note = _expectation(run, cast(ODPFL, run.method), 2500, 1e-3)
    assert f"that on your 2500 is at least {2500 / max(sizes):.2g} times smaller than theirs" in note
    assert "too few" not in note
    assert "1 sample is too few for this ε" in _expectation(run, cast(ODPFL, run.method), 1, 1e-3)


def test_a_newcomer_that_sends_nothing_is_told_so(
    rows: tuple[np.ndarray, np.ndarray], tmp_path: Path, runs: dict[str, Path]
) -> None:
    run = tmp_path / "flowdup"
    recipe = {"method": "flowdup", "rounds": 1, "data": DATA, "model": {"name": "logistic"}}
    run_recipe(to_recipe({**recipe, "hyperparameters": {"cohort": 4}}, "test"), run)
    output = str(run_command(run, "--data", newcomer(tmp_path, x=rows[0])))
    assert "privacy: nothing was sent, so nothing is revealed" in output and "│ sent" not in output
    output = str(run_command(runs["odpfl"], "--data", newcomer(tmp_path, x=rows[0]), "--out", tmp_path / "m"))
    assert "sent" in output and "ε = ∞" in output
