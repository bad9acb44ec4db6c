"""Runs of an adapter: what is frozen is named by a digest in the folder, lies in no checkpoint, is never sent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.runs.helpers import SMALL, At, crash
from tests.runs.helpers import Crash as Crashed
from unalike import Model
from unalike.api import UserError, resume, run
from unalike.commands.main import app
from unalike.runs.finished import FinishedRun
from unalike.runs.recipe.settings import plan_for

CODE = """
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn


class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, classes)
        self.load_state_dict(load_file(Path(__file__).with_name("weights.safetensors")))

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())
"""


def pretrained(folder: Path, seed: int = 0) -> str:
    torch.manual_seed(seed)
    (folder / "net.py").write_text(CODE)
    body, head = torch.nn.Linear(64, 8), torch.nn.Linear(8, 10)
    weights = {"body.weight": body.weight, "body.bias": body.bias, "head.weight": head.weight, "head.bias": head.bias}
    save_file({name: value.detach() for name, value in weights.items()}, folder / "weights.safetensors")
    return f"{folder / 'net.py'}:Net"


def test_a_run_of_adapters_resumes_and_serves_with_the_same_network_alone(tmp_path: Path) -> None:
    settings = {**SMALL, "model": pretrained(tmp_path), "adapter": "lora:r=2,targets=all+head"}
    whole = run("fedavg", out=tmp_path / "whole", **settings)
    broken = tmp_path / "broken"
    with pytest.raises(Crashed):
        run("fedavg", out=broken, watcher=At(5, crash), **settings)
    assert resume(broken).accuracy == whole.accuracy

    opened = FinishedRun.open(broken)
    assert opened.recipe.model.digest == opened.method.model.digest is not None
    assert opened.method.model.size == 2 * (64 + 8) + 8 * 10 + 10
    held = load_file(broken / "checkpoint.safetensors")
    assert max(value.numel() for value in held.values()) == opened.method.model.size  # nothing of what is frozen

    again_with_head = plan_for([str(broken / "recipe.toml")], {"adapter": "lora:r=2,targets=all"}).runs[0][1]
    assert again_with_head.model.digest is None  # what is frozen is another part of the network
    assert plan_for([str(broken / "recipe.toml")], {"rounds": 2}).runs[0][1].model.digest is not None

    pretrained(tmp_path, seed=1)
    for again in (FinishedRun.open, resume):
        (broken / "result.json").unlink(missing_ok=True)
        with pytest.raises(
            UserError, match=r"what is frozen of .*net\.py:Net has the digest .*: bring back the pretrain"
        ):
            again(broken)


@pytest.mark.parametrize("method", ["fedavg", "knnper", "fedem"])
@pytest.mark.parametrize("adapter", ["lora:r=2,targets=all+head", None])
def test_a_personal_model_says_which_network_it_adapts(method: str, adapter: str | None, tmp_path: Path) -> None:
    settings = {**SMALL, "model": pretrained(tmp_path), "adapter": adapter, "rounds": 1}
    result = run(method, **settings)
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=generator.integers(0, 17, (12, 8, 8), dtype=np.uint8), y=np.arange(12) % 10)
    own = result.personalize(tmp_path / "mine.npz")
    own.save(tmp_path / "own.safetensors")
    with safe_open(tmp_path / "own.safetensors", "pt") as file:
        assert file.metadata().get("frozen") == own.run.method.model.digest
        names = [name for name in file.keys() if not name.startswith("input.")]  # noqa: SIM118
        assert sum(file.get_tensor(name).numel() for name in names) == own.theta.numel()
    assert (own.run.method.model.digest is None) == (adapter is None)


def test_a_module_handed_over_is_adapted_and_a_model_is_not_adapted_twice() -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Linear(32, 10))
    result = run("fedavg", **{**SMALL, "model": module, "adapter": "head", "rounds": 1, "cohort": 4})
    numbers = result.bytes.up / 4 / 4  # four clients sent numbers of four bytes
    assert 32 * 10 + 10 <= numbers <= 32 * 10 + 12
    with pytest.raises(UserError, match=r"is a Model already: say trainable= where it is made"):
        run("fedavg", **{**SMALL, "model": Model(module), "adapter": "head", "rounds": 1})


def test_what_the_command_line_cannot_read_is_told_with_the_nearest_word() -> None:
    told = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["run", "fedavg", "--adapter", "lorra", "--quiet"])
    assert told.exit_code == 1 and "'lorra' is not understood; did you mean 'lora'?" in told.stderr
