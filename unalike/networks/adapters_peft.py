"""LoRA in PEFT's files, ``adapter_config.json`` and ``adapter_model.safetensors``, which other servers read, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from unalike.core.model import Model
from unalike.networks.adapters import Adapter, LoRALayer, is_transposed
from unalike.networks.pretrained import Pretrained

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ROOT = "base_model.model."
_OTHERWISE = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "lora_bias", "layers_to_transform")


def write_peft(model: Model, theta: Tensor, folder: str | Path) -> None:
    """Write the adapter θ [d] of a model with LoRA, for ``peft.PeftModel.from_pretrained(network, folder)``.

    What is trained besides, such as the head, must be whole layers; they are written as ``modules_to_save``.
    """
    config, tensors = _as_peft(model, theta)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_peft(model: Model) -> None:
    """Raise where PEFT's files cannot hold what is trained of this model."""
    _as_peft(model, model.init(0))


def read_peft(model: Model, folder: str | Path) -> Tensor:
    """The θ [d] of an adapter that PEFT wrote; the model must have LoRA of the same rank, scaling and layers."""
    config: dict[str, Any] = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
    start = model.init(0)
    ours, tensors = _as_peft(model, start)
    odd = [key for key in _OTHERWISE if config.get(key)] + ["bias"] * (config.get("bias", "none") != "none")
    if config.get("peft_type") != "LORA" or odd:
        raise ValueError(
            f"{folder} holds {' with '.join([str(config.get('peft_type')), *odd])}; expected LORA with nothing else"
        )
    if config["lora_alpha"] / config["r"] != ours["lora_alpha"] / ours["r"]:
        raise ValueError(
            f"{folder} has r = {config['r']} and alpha = {config['lora_alpha']}, but the model r = {ours['r']} and "
            f"alpha = {ours['lora_alpha']:g}: say trainable='lora:r={config['r']},alpha={config['lora_alpha']},…'"
        )
    found = load_file(Path(folder) / WEIGHTS)
    other = sorted(found.keys() ^ tensors.keys())
    other += [name for name in found.keys() & tensors.keys() if found[name].shape != tensors[name].shape]
    if other:
        raise ValueError(
            f"{folder} does not fit the model: {other[0]} is in one of them only or has another shape there; its "
            f"layers are {config.get('target_modules')}, those of the model {ours['target_modules']}"
        )
    named = {_our_name(model, name): value for name, value in found.items()}
    fixed = {name: value for name, value in model.module(start).state_dict().items() if name not in model.shapes}
    if any(name in fixed and not bool((fixed[name] == value).all()) for name, value in named.items()):
        raise ValueError(
            f"{folder} has another A than the one that is frozen in the model: use lora in place of ffa-lora"
        )
    return model.flatten({name: named[name].to(dtype=start.dtype) for name in model.shapes})


def _prefix(model: Model) -> str:
    """Where the network that PEFT knows lies in the model's module."""
    return "network." if isinstance(model._module, Pretrained) else ""


def _our_name(model: Model, name: str) -> str:
    inner = name.removeprefix(_ROOT)
    return _prefix(model) + (inner.removesuffix(".weight") if ".lora_" in inner else inner)


def _as_peft(model: Model, theta: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    module, prefix = model.module(theta), _prefix(model)
    layers = {name: part for name, part in module.named_modules() if isinstance(part, Adapter)}
    low = [part for part in layers.values() if isinstance(part, LoRALayer)]
    if not layers or len(low) < len(layers):
        what = "nn.MultiheadAttention's weights" if layers else "no LoRA"
        raise ValueError(f"PEFT's adapters hold LoRA of layers, and this model has {what}; save θ by its names instead")
    whole = dict.fromkeys(name.rpartition(".")[0] for name in model.shapes if ".lora_" not in name)
    for name in whole:
        parts = [f"{name}.{key}" for key, _ in module.get_submodule(name).named_parameters()]
        if not set(parts) <= set(model.shapes):
            raise ValueError(
                f"PEFT saves whole layers, but of {name!r} only some parameters are trained; leave bias out"
            )
    settings = low[0].low_rank
    tensors: dict[str, Tensor] = {}
    for name, part in layers.items():
        inner = _ROOT + name.removeprefix(prefix)
        tensors |= {f"{inner}.lora_A.weight": part.lora_A.detach(), f"{inner}.lora_B.weight": part.lora_B.detach()}
    for name in whole:
        for key, value in module.get_submodule(name).named_parameters():
            tensors[f"{_ROOT}{name.removeprefix(prefix)}.{key}"] = value.detach()
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "r": settings.r,
        "lora_alpha": settings.scaling * settings.r,
        "lora_dropout": 0.0,
        "target_modules": [name.removeprefix(prefix) for name in layers],
        "modules_to_save": [name.removeprefix(prefix) for name in whole] or None,
        "fan_in_fan_out": any(is_transposed(part) for part in low),
        "bias": "none",
        "inference_mode": True,
    }
    return config, tensors
