"""Architectures by name: ``build("lenet", (3, 32, 32), 10)``, or any other ``nn.Module`` by its import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from unalike.core.notes import did_you_mean
from unalike.core.outside import is_path, load
from unalike.networks import pretrained
from unalike.networks.classifiers import (
    CNN,
    MLP,
    Dense,
    LeNet,
    LeNet5,
    LeNetEmbedding,
    Linear,
    Logistic,
    SignalCNN,
    SmallCNN,
    lenet_reads,
)
from unalike.networks.lstm import CharLSTM
from unalike.networks.resnets import ResNet18, ResNet20, ResNet34


@dataclass(frozen=True)
class _Entry:
    make: Callable[..., nn.Module]
    about: str
    reads_tokens: bool = False


_CATALOG = {
    "logistic": _Entry(Logistic, "one linear map: logistic or linear regression"),
    "linear": _Entry(Linear, "one weight for each feature and no intercept, for convex problems (Malekmohammadi)"),
    "mlp": _Entry(MLP, "ReLU network, hidden=(64,); for features"),
    "dense": _Entry(Dense, "two layers of 500 and dropout, for features (Amosy et al. 2022, App. C)"),
    "small-cnn": _Entry(SmallCNN, "two 3x3 convolutions; for tiny images such as 8x8 digits"),
    "cnn1d": _Entry(SignalCNN, "two 1-D convolutions; for signals [length] or [channels, length]"),
    "lenet": _Entry(LeNet, "PeFLL's client model (Scott 2026, Table B.1; Amosy et al. 2022, App. C)"),
    "lenet-5": _Entry(LeNet5, "AdaPeD's client model, half as wide as lenet (Ozkara et al. 2022; LeCun et al. 1998)"),
    "lenet-embedding": _Entry(LeNetEmbedding, "PeFLL's embedding network, image and label in (Scott 2026, Table B.2)"),
    "cnn": _Entry(CNN, "FLowDUP's client model, about 150,000 parameters (Scott 2026, C.1.2; McMahan et al. 2017)"),
    "resnet20": _Entry(ResNet20, "ResNet20 without batch norm (Scott 2026, B.1.3; He et al. 2016)"),
    "resnet18": _Entry(ResNet18, "ResNet18 with group norm (Scott 2026, C.1.2; He et al. 2016)"),
    "resnet34": _Entry(ResNet34, "ResNet34 with group norm (Malekmohammadi; He et al. 2016)"),
    "lstm": _Entry(CharLSTM, "next-character LSTM of LEAF (Scott 2026, B.1.3; Caldas et al. 2018)", reads_tokens=True),
}


def names() -> dict[str, str]:
    """Every built-in architecture with one line on what it is and where it comes from."""
    return {name: entry.about for name, entry in _CATALOG.items()}


def default_for(input_shape: Sequence[int], kind: str | None = None) -> str:
    """The architecture to use when nobody chose one; ``kind`` is "image", "features" or "tokens" (see ``build``)."""
    if kind == "tokens":
        return "lstm"
    if lenet_reads(input_shape):
        return "lenet"
    return "small-cnn" if len(input_shape) == 3 and min(input_shape[1:]) >= SmallCNN.smallest else "mlp"


def build(name: str, input_shape: Sequence[int], classes: int, kind: str | None = None, **options: object) -> nn.Module:
    """A fresh module for inputs of this shape (of one sample) and this number of outputs.

    ``name`` is one of ``names()`` or an import path, ``package.module:Class`` or ``file.py:Class``; a class from
    outside is given ``input_shape`` and ``classes`` if its signature names them. ``options`` go to the class.
    ``kind`` guards against feeding tokens to a network of real inputs and the reverse; None takes the shape's word.
    """
    if classes < 1:
        raise ValueError(f"an architecture needs at least one output, got classes={classes}")
    shape = tuple(input_shape)
    if not shape or min(shape) < 1:
        raise ValueError(f"one input must have a shape of positive sizes, got {shape}")
    if name.startswith(pretrained.PREFIX):
        return _call(
            name, partial(pretrained.load, name), {"input_shape": shape, "classes": classes, "kind": kind, **options}
        )
    if is_path(name):
        return _from_outside(name, options, input_shape=shape, classes=classes)
    known = name.lower().replace("_", "-")
    if known not in _CATALOG:
        raise ValueError(
            f"no architecture {name!r}{did_you_mean(known, _CATALOG)} (or give a path, as in 'file.py:Class')"
        )
    entry = _CATALOG[known]
    if kind is not None and (kind == "tokens") != entry.reads_tokens:
        reads = "tokens" if entry.reads_tokens else "numbers"
        raise ValueError(f"{known} reads {reads}, but the inputs are {kind}; use {default_for(shape, kind)!r}")
    return _call(known, entry.make, {"input_shape": shape, "classes": classes, **options})


def _from_outside(path: str, options: dict[str, object], **sizes: object) -> nn.Module:
    make = load(path)
    if not callable(make):
        raise ValueError(f"{path} is no class or function that makes a module, but {make!r}")
    accepted = inspect.signature(make).parameters
    module = _call(path, make, {key: value for key, value in sizes.items() if key in accepted} | options)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{path} must make a torch.nn.Module, but made {type(module).__name__}")
    return module


def _call(name: str, make: Callable[..., nn.Module], arguments: dict[str, object]) -> nn.Module:
    """Call the class; an option that it does not know, or one that it misses, is named with those it has."""
    signature = inspect.signature(make)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        options = [key for key in signature.parameters if key not in ("input_shape", "classes", "kind")]
        raise ValueError(f"{name}: {error}; its options are: {', '.join(options) or 'none'}") from error
    # A parameter that no reset_parameters sets keeps what it is made with, so that must be the same in every process.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(**arguments)
