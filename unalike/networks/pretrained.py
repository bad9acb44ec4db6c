"""Networks of the package transformers, from a folder that ``save_pretrained`` wrote: ``--model hf:FOLDER``.

No code of the folder is run, and its weights are read from safetensors alone. Attention is computed by its formula
("eager"): the other ways have no rule for a block of clients.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

PREFIX = "hf:"
FOLDERS = "UNALIKE_PRETRAINED"  # where a worker has its own copies of the folders that a recipe names

Task = Literal["classification", "next"]


class Pretrained(nn.Module):
    """A network of transformers as a function of one tensor, pictures or tokens, to scores."""

    config_bytes: Tensor
    network: Any

    def __init__(self, network: nn.Module, config: bytes, task: Task | None, pad: int | None, outputs: int) -> None:
        super().__init__()
        self.network, self.task, self.pad, self.outputs = network, task, pad, outputs
        self.sees_ahead = task is not None and _sees_ahead(network)
        # among the constants, so that a digest is of the configuration, too
        self.register_buffer("config_bytes", torch.frombuffer(bytearray(config), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        if self.task is None:
            return self.network(pixel_values=x.expand(-1, self.network.config.num_channels, -1, -1)).logits
        seen = torch.ones_like(x) if self.pad is None else (x != self.pad).to(x.dtype)
        if self.sees_ahead:  # numbers to add to scores: transformers looks at a mask of ones, which no block can
            seen = (1.0 - seen[:, None, None].to(torch.float32)) * torch.finfo(torch.float32).min
        if self.task == "next":
            last = self.network(input_ids=x, attention_mask=seen, use_cache=False).logits[:, -1]
            return last[:, : self.outputs] if last.shape[1] == self.network.config.vocab_size else last  # or features
        return self.network(input_ids=x, attention_mask=seen).logits


def _sees_ahead(network: Any) -> bool:
    """Does what a text begins with depend on how it ends, as in BERT and not in GPT-2?"""
    tokens = torch.tensor([[1, 1, 1], [1, 1, 0]])
    with torch.no_grad():
        first, other = network.eval().base_model(input_ids=tokens).last_hidden_state[:, 0]
    return not torch.equal(first, other)


def find_folder(name: str) -> Path:
    """The folder of ``hf:NAME``: itself, or the one under ``$UNALIKE_PRETRAINED``, or from a hub that is reached."""
    path = Path(name.removeprefix(PREFIX)).expanduser()
    own = os.environ.get(FOLDERS)
    for found in (path, *([Path(own).expanduser() / path.name] if own else [])):
        if (found / "config.json").is_file():
            return found
    if path.is_absolute() or path.exists() or str(path).count("/") != 1:
        raise ValueError(
            f"there is no folder {path} with a config.json{f', nor {own}/{path.name}' if own else ''}; save a network "
            f"of transformers there with save_pretrained, or name the folder that has it in {FOLDERS}"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # of the network or the hub, each in a class of its own
        raise ValueError(f"there is no folder {path} here, and no hub gave it: {str(error).splitlines()[0]}") from error


def load(name: str, input_shape: Sequence[int], classes: int, kind: str | None, task: Task | None = None) -> Pretrained:
    """The network in the folder of ``hf:NAME`` for rows of this shape, with so many outputs.

    task: of tokens; None: the next token, where the folder holds a causal language model and there are as many classes
    as tokens; else classification. A head that the folder does not have is drawn.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"{name} is read by transformers: pip install 'unalike[transformers]'") from error
    folder = find_folder(name)
    if not list(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} has no weights in a .safetensors file; save it anew with save_pretrained")
    content = (folder / "config.json").read_bytes()
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.num_labels = classes
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder with a decoder, which has no scores for a row; use one of the two")
    if kind == "tokens":
        causal = any(
            one.endswith(("LMHeadModel", "ForCausalLM")) for one in json.loads(content).get("architectures") or []
        )
        if task is None:
            task = "next" if causal and classes == config.vocab_size else "classification"
        if task not in ("classification", "next"):
            raise ValueError(f"{name}: task={task!r}; expected classification or next")
        if task == "next" and classes > config.vocab_size:
            raise ValueError(
                f"{name} knows {config.vocab_size} tokens, but the rows have {classes} classes to come next"
            )
        auto = transformers.AutoModelForCausalLM if task == "next" else transformers.AutoModelForSequenceClassification
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and input_shape[0] > longest:
            raise ValueError(f"{name} reads up to {longest} tokens, but one row has {input_shape[0]}")
    else:
        auto, task = transformers.AutoModelForImageClassification, None
        _check_pictures(name, config, tuple(input_shape))
    told: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True, "attn_implementation": "eager"}
    try:
        with _quietly(transformers):
            network = auto.from_pretrained(
                folder, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, **told
            )
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{folder} cannot be used here: {str(error).splitlines()[0]}") from error
    pad = config.pad_token_id if task is not None else None
    return Pretrained(network, content, task, pad, classes)


def _check_pictures(name: str, config: Any, shape: tuple[int, ...]) -> None:
    side, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if side is None or channels is None:
        raise ValueError(
            f"{name} reads no pictures, but the rows are not tokens; give rows of whole numbers for tokens"
        )
    sides = (side, side) if isinstance(side, int) else tuple(side)
    if len(shape) != 3 or shape[1:] != sides or shape[0] not in (1, channels):
        raise ValueError(
            f"{name} reads pictures of {channels}×{sides[0]}×{sides[1]}, but one row has the shape {shape}; for a "
            f"folder of pictures say data.options.size={sides[0]}"
        )


class _quietly:
    """No progress bars and no table of weights that were drawn: the page on adapters says which these are."""

    def __init__(self, transformers: Any) -> None:
        self.logging = transformers.utils.logging

    def __enter__(self) -> None:
        self.before = self.logging.get_verbosity()
        self.bar = self.logging.is_progress_bar_enabled()
        self.logging.set_verbosity_error()
        self.logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        self.logging.set_verbosity(self.before)
        if self.bar:
            self.logging.enable_progress_bar()
