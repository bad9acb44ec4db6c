"""From a folder with a network of transformers to a personal adapter that PEFT loads; the folder may move or change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.runs.helpers import At, Crash, crash
from unalike.api import UserError, resume, run
from unalike.commands.main import app
from unalike.runs.finished import FinishedRun

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

RECIPE = """
method = "fedavg"
rounds = 3
checkpoint_every = 1
eval_every = 3
hyperparameters = {{ cohort = 4, local = {{ lr = 0.3, steps = 3 }} }}
data = {{ name = "{data}", unseen = 2, options = {{ kind = "tokens" }} }}
model = {{ name = "hf:{network}", trainable = "lora:r=2+head" }}
runtime = {{ block = 3, threads = 1 }}
"""


def texts(file: Path, clients: int) -> Path:
    """Two classes of texts by their first token."""
    x = np.random.default_rng(0).integers(3, 50, (clients * 12, 6))
    np.savez(file, x=x, y=(x[:, 0] > 25).astype(np.int64), client=np.arange(len(x)) // 12)
    return file


def test_a_run_over_a_folder_resumes_moves_and_gives_adapters_to_peft(folders: dict[str, Path], tmp_path: Path) -> None:
    network = Path(shutil.copytree(folders["bert"], tmp_path / "bert"))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(data=texts(tmp_path / "texts.npz", 8), network=network))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result = run(str(recipe), out=whole)
    with pytest.raises(Crash):
        run(str(recipe), out=broken, watcher=At(2, crash))
    assert resume(broken).accuracy == result.accuracy
    assert (whole / "pretrained" / "model.safetensors").samefile(network / "model.safetensors")  # no second copy

    moved = Path(shutil.copytree(whole, tmp_path / "elsewhere"))
    shutil.rmtree(network)
    shutil.rmtree(whole)
    mine = texts(tmp_path / "mine.npz", 1)
    answers, adapter = tmp_path / "answers.csv", tmp_path / "adapter"
    call = ["personalize", str(moved), "--data", str(mine), "--out", str(tmp_path / "model.safetensors")]
    told = CliRunner().invoke(app, [*call, "--peft", str(adapter), "--predictions", str(answers)])
    assert told.exit_code == 0, told.output

    config = tf.AutoConfig.from_pretrained(moved / "pretrained", num_labels=2)
    base = tf.AutoModelForSequenceClassification.from_pretrained(moved / "pretrained", config=config)
    theirs = peft.PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        found = theirs(input_ids=torch.tensor(np.load(mine)["x"])).logits.softmax(1)
    predicted = [[float(cell) for cell in line.split(",")[-2:]] for line in answers.read_text().splitlines()[1:]]
    assert torch.allclose(torch.tensor(predicted), found, atol=1e-5)
    assert json.loads((adapter / "adapter_config.json").read_text())["modules_to_save"] == ["classifier"]

    own = moved / "pretrained" / "model.safetensors"
    weights = load_file(own)
    weights["embeddings.word_embeddings.weight"][0, 0] += 0.5
    save_file(weights, own, {"format": "pt"})
    with pytest.raises(UserError, match=r"what is frozen of hf:.*pretrained has the digest"):
        FinishedRun.open(moved)


def test_a_folder_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(data=texts(tmp_path / "texts.npz", 4), network=tmp_path / "no"))
    with pytest.raises(UserError, match=r"there is no folder .*/no with a config.json"):
        run(str(recipe), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
