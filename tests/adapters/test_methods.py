"""Every method on an adapter of each kind of network runs, or says in a sentence why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

import unalike as ua
from tests.adapters.test_pretrained import CASES
from unalike.methods import METHODS
from unalike.newcomers.bundle import write_bundle
from unalike.newcomers.graphs import scale_inputs
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun

REFUSED = {
    "fedma": "FedMA matches the neurons of chains of linear and convolutional layers",
    "ifca": "every adapter begins as the network that it adapts, so that all clients would choose the same",
}
REFUSED_FOR_TOKENS = {"pfl-nearest": "tokens cannot be projected and compared"}
SHORT: dict[str, Any] = {name: {"local": {"steps": 1}} for name in METHODS}
SHORT["pfedhn"] = {"local": {"steps": 1}, "newcomer_rounds": 1}


def people(case: str) -> ua.data.Population:
    """Eight clients of twelve rows, two of whom arrive later."""
    shape, classes, kind, _ = CASES[case]
    generator = torch.Generator().manual_seed(0)
    size = (96, *shape)
    x = torch.rand(size, generator=generator) if kind == "image" else torch.randint(3, 50, size, generator=generator)
    y = torch.arange(96) % classes
    return ua.data.from_arrays(x, y, torch.arange(96) // 12, unseen=2, kind=kind, name=case, seed=0)


def settings(case: str, folders: dict[str, Path], **more: Any) -> dict[str, Any]:
    adapter = "lora:r=2" if case == "gpt2" else "lora:r=2+head"  # its head is the embedding of its words
    return {"model": f"hf:{folders[case]}", "adapter": adapter, "rounds": 1, "block": 3, "threads": 1, **more}


@pytest.mark.parametrize("case", ["bert", "gpt2", "llama", "vit"])
def test_every_method_runs_or_says_why_not(case: str, folders: dict[str, Path]) -> None:
    data, told = people(case), {}
    refused = REFUSED if CASES[case][2] == "image" else REFUSED | REFUSED_FOR_TOKENS
    for name in METHODS:
        try:
            result = ua.run(name, data=data, **settings(case, folders, hyperparameters=SHORT[name]))
        except UserError as error:
            told[name] = str(error)
            continue
        assert result.failures == 0 and result.accuracy.seen is not None, name
        assert 0 <= result.accuracy.seen.mean <= 1, name
    assert told.keys() == refused.keys(), told
    assert all(refused[name] in sentence for name, sentence in told.items()), told


@pytest.mark.parametrize(("case", "method"), [("bert", "FedRep"), ("vit", "PeFLL"), ("llama", "ODPFL")])
def test_a_block_of_clients_ends_where_a_loop_over_them_does(case: str, method: str, folders: dict[str, Path]) -> None:
    data, known = people(case), settings(case, folders)
    model = ua.Model.named(known["model"], data, trainable=known["adapter"])
    schema, sgd = data.schema, ua.LocalSGD(steps=2, epochs=None, batch=4, lr=0.1)
    given = model if method == "FedRep" else ua.Problem(model, schema.shape, schema.classes, 6, schema.kind)
    made = getattr(ua, method)(given, cohort=4, local=sgd)
    block, loop = (ua.train(made, ua.simulate(data, seed=0, block=size, threads=1), rounds=2) for size in (3, 1))
    assert block.keys() == loop.keys()
    for name, value in block.items():
        assert torch.allclose(value.to(torch.float64), loop[name].to(torch.float64), atol=1e-4), name


@pytest.mark.parametrize("method", ["fedavg", "pefll-unlabeled"])
def test_a_bundle_and_a_personal_graph_answer_as_the_model_does(
    method: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The frozen part is in a graph once: more would be a model of each client."""
    result = ua.run(method, data=people("vit"), out=tmp_path / "run", **settings("vit", folders))
    generator = np.random.default_rng(0)
    mine = {"x": generator.random((9, 1, 8, 8), dtype=np.float32), "client": np.zeros(9, dtype=np.int64)}
    np.savez(tmp_path / "mine.npz", **mine)
    own = result.personalize(tmp_path / "mine.npz")
    answers = torch.from_numpy(mine["x"])
    expected = own.run.method.model(own.theta, scale_inputs(answers, own.run.schema)).numpy()

    own.save_onnx(tmp_path / "own.onnx")
    (alone,) = ort.InferenceSession(tmp_path / "own.onnx").run(None, {"x": mine["x"]})
    assert np.allclose(alone, expected, atol=1e-4)

    bundle = tmp_path / "bundle"
    card = write_bundle(FinishedRun.open(tmp_path / "run"), bundle)
    assert card["frozen"] == own.run.method.model.digest and card["parameters"] == own.run.method.model.size
    inputs = {"x": mine["x"]}
    if method != "fedavg":
        (v,) = ort.InferenceSession(bundle / "describe.onnx").run(None, {"x": mine["x"]})
        (inputs["theta"],) = ort.InferenceSession(bundle / "make.onnx").run(None, {"v": v})
    (served,) = ort.InferenceSession(bundle / "model.onnx").run(None, inputs)
    assert np.allclose(served, expected, atol=1e-4)
    numbers = sum(one.numel() for one in own.run.method.model._module.parameters())
    assert (bundle / "model.onnx").stat().st_size < 1.5 * 4 * numbers + 100_000
