"""PyTorch functions as ONNX graphs: plain files of operators and numbers, without a trace of where they were made."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unalike.core.disk import write_whole
from unalike.core.schema import Schema


def can_write_onnx() -> bool:
    """Are the packages installed that ONNX files need?"""
    return all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnxscript"))


def scale_inputs(x: Tensor, schema: Schema) -> Tensor:
    """Rows as they are stored, as a model reads them."""
    if schema.shift is not None and schema.scale is not None:
        x = (x.to(torch.float32) - schema.shift) * schema.scale
        return torch.where(x.isnan(), 0.0, x) if schema.gaps else x  # what is missing counts as the mean
    return x.to(torch.float32) if x.dtype == torch.uint8 else x


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def write_graph(
    file: Path,
    function: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    output: str,
    *,
    rows: Sequence[str] = (),
    defaults: Mapping[str, Tensor] | None = None,
    about: Mapping[str, str] | None = None,
    text: str = "",
) -> None:
    """Write a function of these inputs as an ONNX graph.

    ``rows``: inputs whose first dimension may be anything. ``defaults``: the values of inputs that are not given.
    ``about`` and ``text``: metadata and a description. PyTorch notes the line of code behind every operator, and its
    file's path; that is left out, and so are the shapes between operators.
    """
    import onnx
    from onnx import numpy_helper

    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [log.level for log in logs]
    many = torch.export.Dim("rows")
    shapes: tuple[Any, ...] = tuple({0: many} if name in rows else None for name in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns and logs about itself
        for log in logs:
            log.setLevel(logging.ERROR)
        try:
            program = torch.onnx.export(
                _Function(function).eval(),
                tuple(inputs.values()),
                input_names=list(inputs),
                output_names=[output],
                dynamic_shapes=(shapes,),
                opset_version=20,
                verbose=False,
            )
        finally:
            for log, level in zip(logs, levels, strict=True):
                log.setLevel(level)
    assert program is not None
    graph = program.model_proto
    fixed = [
        one.name for one in graph.graph.input if one.name in rows and not one.type.tensor_type.shape.dim[0].dim_param
    ]
    assert not fixed, f"the graph takes {len(inputs[fixed[0]])} rows only; the function must not ask for len()"
    for node in graph.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for part in (*graph.graph.input, *graph.graph.output, *graph.graph.initializer):
        del part.metadata_props[:]
    del graph.graph.value_info[:], graph.graph.metadata_props[:], graph.metadata_props[:], graph.functions[:]
    for name, value in (defaults or {}).items():
        graph.graph.initializer.append(numpy_helper.from_array(value.numpy(), name))
    graph.producer_name, graph.producer_version, graph.doc_string = "unalike", "", text
    onnx.helper.set_model_props(graph, dict(about or {}))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, graph.SerializeToString(), 0o644)
