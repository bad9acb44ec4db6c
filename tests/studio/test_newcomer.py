"""``motley personalize``: a newcomer's file in, a model out, and a clear word where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from motley.commands import personalize
from motley.data import load
from motley.studio.errors import UserError
from motley.studio.newcomer import FinishedRun, read_newcomer, serve
from motley.studio.recipe import checked
from motley.studio.run import execute

SMALL = {"cohort": 4, "descriptor": 4, "local": {"steps": 2}}
DATA = {"name": "digits", "partition": "pathological:2", "clients": 12, "unseen": 0.25}


def trained(folder: Path, method: str, **hyperparameters: object) -> Path:
    recipe = {"method": method, "rounds": 2, "data": DATA, "hyperparameters": {**SMALL, **hyperparameters}}
    execute(checked({**recipe, "model": {"name": "mlp"}}, "test"), folder / method)
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
    personalize.register(app)
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
    told = json.loads(str(run_command(runs["pefll"], "--data", file, "--json")))
    scores = onnxruntime.InferenceSession(told["onnx"]).run(["scores"], {"x": rows[0]})[0]
    finished = FinishedRun.open(runs["pefll"])
    client = read_newcomer(file, finished.population)
    served = serve(finished, client, "mine")
    expected = finished.method.model(served.theta, client.block(torch.arange(1)).x[0])
    np.testing.assert_allclose(scores, expected.numpy(), atol=1e-4)
    assert len(scores) == 50


def test_an_ensemble_is_written_with_all_its_members(tmp_path: Path, rows: tuple[np.ndarray, np.ndarray]) -> None:
    recipe = {"method": "pfl-ensemble", "rounds": 2, "data": DATA, "model": {"name": "mlp"}}
    execute(checked({**recipe, "hyperparameters": {"cohort": 4, "local": {"steps": 2}}}, "test"), tmp_path / "run")
    file = newcomer(tmp_path, x=rows[0])
    told = json.loads(str(run_command(tmp_path / "run", "--data", file, "--json")))
    finished = FinishedRun.open(tmp_path / "run")
    client = read_newcomer(file, finished.population)
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
    served = serve(run, read_newcomer(file, run.population), "mine")
    for name, value in run.method.model.tensors(served.theta).items():
        torch.testing.assert_close(tensors[name], value)
    assert told["received"]["theta"] == 4 * run.method.model.size
    shift, scale = run.population.train.shift, run.population.train.scale
    assert shift is not None and scale is not None
    module = run.method.model.module(served.theta)
    scores = module((torch.from_numpy(rows[0]).float() - tensors["input.shift"]) * tensors["input.scale"])
    names = run.population.class_names
    expected = [str(c) if names is None else str(names[c]) for c in scores.argmax(1).tolist()]
    assert (tmp_path / "answers.csv").read_text().split()[1:] == expected


def test_epsilon_is_paid_by_the_newcomer_and_told(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    file = newcomer(tmp_path, x=rows[0])
    output = str(run_command(runs["odpfl"], "--data", file, "--unlabeled", "--epsilon", "0.5", "--delta", "0.01"))
    assert "ε = 0.5 at δ = 0.01" in output and "unseen clients of this run" in output
    run = FinishedRun.open(runs["odpfl"])
    clients = read_newcomer(file, run.population, unlabeled=True)
    first = serve(run, clients, "mine", epsilon=0.5)
    second = serve(run, clients, "mine", epsilon=0.5)
    assert first.descriptor is not None and second.descriptor is not None
    assert not torch.equal(first.descriptor, second.descriptor)  # the noise is the operating system's
    assert first.ledger.epsilon(0.01, newcomer="mine") == pytest.approx(0.5, rel=1e-3)


def test_a_run_that_protects_newcomers_does_so_with_noise_that_nobody_can_repeat(
    rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    run = FinishedRun.open(trained(tmp_path, "odpfl", encoder="sphere", newcomer_epsilon=0.5, newcomer_delta=0.02))
    clients = read_newcomer(newcomer(tmp_path, x=rows[0]), run.population, unlabeled=True)
    first, second = serve(run, clients, "mine"), serve(run, clients, "mine")
    assert first.descriptor is not None and second.descriptor is not None
    assert not torch.equal(first.descriptor, second.descriptor) and not torch.equal(first.theta, second.theta)
    assert first.epsilon == pytest.approx(0.5, rel=1e-3) and first.delta == 0.02


def test_without_labels_a_method_that_needs_them_says_so(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    file = newcomer(tmp_path, x=rows[0])
    with pytest.raises(UserError, match="cannot personalize for a client without labels"):
        run_command(runs["pefll"], "--data", file)
    with pytest.raises(UserError, match="encoder=sphere"):
        run_command(runs["pefll"], "--data", newcomer(tmp_path, x=rows[0], y=rows[1]), "--epsilon", "1")


def test_data_that_does_not_fit_is_refused_with_the_reason(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    population = FinishedRun.open(runs["pefll"]).population
    x, y = rows
    with pytest.raises(UserError, match=r"shape \(1, 9, 9\).*shape \(1, 8, 8\)"):
        read_newcomer(newcomer(tmp_path, x=np.zeros((5, 1, 9, 9), np.uint8)), population)
    with pytest.raises(UserError, match="class '12' was not in training"):
        read_newcomer(newcomer(tmp_path, x=x, y=y + 5), population)
    with pytest.raises(ValueError, match="one row for each sample"):
        read_newcomer(newcomer(tmp_path, x=x[:0]), population)
    flat = load("digits", partition="iid", clients=2, unseen=0)
    broken = x.astype(np.float32)
    broken[3, 0, 0, 0] = np.nan
    with pytest.raises((UserError, ValueError), match=r"(?i)nan|uint8"):
        read_newcomer(newcomer(tmp_path, x=broken, y=y), flat)


def test_one_class_and_named_classes_are_understood(
    runs: dict[str, Path], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    population = FinishedRun.open(runs["pefll"]).population
    only = read_newcomer(newcomer(tmp_path, x=rows[0][:5], y=np.full(5, 7)), population)
    assert only.y is not None and only.y.tolist() == [7] * 5
    words = np.array([str(v) for v in rows[1]])
    named = read_newcomer(newcomer(tmp_path, x=rows[0], y=words), population)
    assert named.y is not None and named.y.tolist() == rows[1].tolist()


def test_an_untrained_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        FinishedRun.open(tmp_path)
