"""Folders of transformers: the numbers of transformers itself, in blocks; and PEFT reads and writes their adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor
from torch.func import grad, vmap

from unalike import Model, read_peft, write_peft
from unalike.networks import architectures

# PEFT reads a name of transformers that will go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CASES = {  # folder: shape of a row, classes, kind, task
    "bert": ((10,), 3, "tokens", "classification"),
    "gpt2": ((10,), 50, "tokens", "next"),
    "llama": ((10,), 50, "tokens", "next"),
    "gpt2-classes": ((10,), 3, "tokens", "classification"),
    "llama-classes": ((10,), 3, "tokens", "classification"),
    "vit": ((1, 8, 8), 3, "image", None),
}


def model(folders: dict[str, Path], case: str, trainable: str = "lora:r=2") -> Model:
    shape, classes, kind, _ = CASES[case]
    return Model(architectures.build(f"hf:{folders[case.partition('-')[0]]}", shape, classes, kind), trainable)


def rows(case: str, count: int = 4) -> Tensor:
    shape, _, kind, _ = CASES[case]
    generator = torch.Generator().manual_seed(1)
    if kind == "image":
        return torch.rand(count, *shape, generator=generator)
    x = torch.randint(1, 50, (count, *shape), generator=generator)
    if case != "gpt2" and case != "llama":
        x[1, 6:] = 0  # a shorter text, padded
    return x


def thetas(one: Model, count: int = 3) -> Tensor:
    noise = torch.randn(count, one.size, generator=torch.Generator().manual_seed(2))
    return torch.stack([one.init(seed) for seed in range(count)]) + 0.2 * noise


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_transformers_and_a_block_is_a_loop(case: str, folders: dict[str, Path]) -> None:
    mine, x = model(folders, case), rows(case)
    network = mine._module.network
    with torch.no_grad():
        if CASES[case][2] == "image":
            expected = network(pixel_values=x.expand(-1, 3, -1, -1)).logits
        else:
            expected = network(input_ids=x, attention_mask=(x != 0).long()).logits
        expected = expected[:, -1] if CASES[case][3] == "next" else expected
        assert torch.allclose(mine(mine.init(0), x), expected, atol=1e-5)

    def loss(theta: Tensor, x: Tensor) -> Tensor:
        return F.cross_entropy(mine(theta, x), torch.tensor([0, 1, 2, 0]))

    block, each = torch.stack([x, x, x.flip(0)]), thetas(mine)
    made = vmap(grad(loss))(each, block)
    for one, theta, batch in zip(made, each, block, strict=True):
        assert torch.allclose(one, grad(loss)(theta, batch), atol=1e-5)


def test_padding_changes_nothing(folders: dict[str, Path]) -> None:
    for case in ("bert", "gpt2-classes", "llama-classes"):
        mine, x = model(folders, case), rows(case)
        short = mine(mine.init(0), x[1:2, :6])
        assert torch.allclose(mine(mine.init(0), x)[1:2], short, atol=1e-5), case


@pytest.mark.parametrize("case", ["bert", "gpt2-classes", "llama", "vit"])
@pytest.mark.parametrize("trainable", ["lora:r=3,alpha=6", "lora:r=2,targets=all+head"])
def test_peft_loads_what_is_written_and_the_reverse(
    case: str, trainable: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    mine, x = model(folders, case, trainable), rows(case)
    theta = thetas(mine)[1]
    write_peft(mine, theta, tmp_path / "a")
    base = model(folders, case, trainable="norm")._module  # the network without adapters
    theirs = peft.PeftModel.from_pretrained(base.network, tmp_path / "a").eval()
    assert theirs.peft_config["default"].peft_type == "LORA"
    base.network = theirs
    with torch.no_grad():
        assert torch.allclose(base(x), mine(theta, x), atol=1e-5)
        assert not torch.allclose(mine(mine.init(0), x), mine(theta, x), atol=1e-3)
    theirs.save_pretrained(tmp_path / "b")
    assert torch.equal(read_peft(mine, tmp_path / "b"), theta) and torch.equal(read_peft(mine, tmp_path / "a"), theta)


def test_an_adapter_that_does_not_fit_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    mine = model(folders, "bert")
    write_peft(mine, mine.init(0), tmp_path)
    with pytest.raises(ValueError, match=r"has r = 2 and alpha = 2\.0, but the model r = 4"):
        read_peft(model(folders, "bert", "lora:r=4,alpha=8"), tmp_path)
    with pytest.raises(ValueError, match=r"does not fit the model: .* is in one of them only"):
        read_peft(model(folders, "bert", "lora:r=2,targets=all"), tmp_path)
    write_peft(mine, thetas(mine)[0], tmp_path / "other")
    with pytest.raises(ValueError, match="has another A than the one that is frozen"):
        read_peft(model(folders, "bert", "ffa-lora:r=2"), tmp_path / "other")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(ValueError, match="LORA with use_dora"):
        read_peft(mine, tmp_path)
    with pytest.raises(ValueError, match="this model has no LoRA"):
        write_peft(model(folders, "bert", "head"), torch.zeros(51), tmp_path / "c")
    with pytest.raises(ValueError, match="only some parameters are trained; leave bias out"):
        both = model(folders, "bert", "lora:r=2+bias")
        write_peft(both, both.init(0), tmp_path / "c")


def _unreachable(*_: object, **__: object) -> None:
    raise OSError("unreachable")


def test_a_folder_that_cannot_be_used_is_refused_with_what_to_do(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(name: str, shape: tuple[int, ...] = (10,), kind: str = "tokens", **more: Any) -> Any:
        return architectures.build(name, shape, 3, kind, **more)

    for arguments, message in [
        ((str(tmp_path / "no"),), "there is no folder .*/no with a config.json.*save_pretrained"),
        ((str(folders["bert"]), (99,)), "reads up to 32 tokens, but one row has 99"),
        (
            (str(folders["vit"]), (1, 28, 28), "image"),
            r"reads pictures of 3×8×8, but one row has the shape \(1, 28, 28\)",
        ),
        ((str(folders["bert"]), (1, 8, 8), "image"), "reads no pictures"),
    ]:
        with pytest.raises(ValueError, match=message):
            build(f"hf:{arguments[0]}", *arguments[1:])
    with pytest.raises(ValueError, match=r"its options are: task"):
        build(f"hf:{folders['bert']}", layers=3)
    (tmp_path / "config.json").write_text((folders["bert"] / "config.json").read_text())
    with pytest.raises(ValueError, match=r"no weights in a .safetensors file"):
        build(f"hf:{tmp_path}")
    with pytest.raises(ValueError, match=r"there is no folder some/name here, and no hub gave it: unreachable"):
        monkeypatch.setattr("huggingface_hub.snapshot_download", _unreachable)
        build("hf:some/name")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folders[name.split("/")[1]]))
    assert build("hf:some/bert").task == "classification"
    monkeypatch.setenv("UNALIKE_PRETRAINED", str(folders["bert"].parent))
    assert build(f"hf:/elsewhere/{folders['bert'].name}").task == "classification"
    assert tf.utils.logging.get_verbosity() == tf.utils.logging.WARNING
