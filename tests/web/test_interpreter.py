"""The page's interpreter of ONNX: every operator, and whole graphs, against ONNX Runtime."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from unalike.core.model import Model
from unalike.networks import architectures
from unalike.newcomers.graphs import write_graph

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

Array = np.ndarray[Any, np.dtype[Any]]
rng = np.random.default_rng(0)


def real(*shape: int) -> Array:
    return rng.normal(size=shape).astype(np.float32)


def whole(*values: Any) -> Array:
    return np.array(values, dtype=np.int64)


ODD = np.float32([-2.5, -1.0, -0.0, 0.0, 0.3, 1.0, 7.25, 40.0, np.nan, np.inf, -np.inf])
BITS = np.array([True, False, True, False])

# operator → calls of it: inputs, then attributes
CASES: dict[str, list[tuple[Sequence[Array | None], dict[str, Any]]]] = {
    **{op: [([real(2, 3, 4), real(4)], {}), ([real(3, 1), real(1, 5)], {}), ([real(), real(2, 2)], {})]
       for op in ("Add", "Sub", "Mul", "Div")},
    "Pow": [([np.abs(real(2, 3)), real(3)], {}), ([real(4), np.float32(2)], {})],
    **{op: [([real(2, 3), real(3)], {}), ([real(4), real(4), real(1)], {}), ([ODD, np.float32(1)], {})]
       for op in ("Max", "Min")},
    **{op: [([ODD, ODD[::-1].copy()], {}), ([real(2, 1), real(3)], {}), ([whole(1, 2, 3), whole(3, 2, 1)], {})]
       for op in ("Equal", "Less", "Greater")},
    "And": [([BITS, BITS[::-1].copy()], {})],
    "Not": [([BITS], {})],
    "IsNaN": [([ODD], {})],
    **{op: [([ODD], {}), ([real(2, 5)], {})]
       for op in ("Relu", "Tanh", "Sigmoid", "Exp", "Abs", "Neg", "Reciprocal", "Erf", "Identity")},
    **{op: [([np.abs(ODD)], {})] for op in ("Log", "Sqrt")},
    **{op: [([3 * real(2, 5)], {})] for op in ("Sin", "Cos")},
    "LeakyRelu": [([ODD], {}), ([real(3, 3)], {"alpha": 0.2})],
    "Clip": [([real(9), np.float32(-0.5), np.float32(0.5)], {}), ([real(9), None, np.float32(0.1)], {})],
    "Cast": [
        ([np.float32([-2.7, -0.2, 0.0, 0.9, 3.6])], {"to": TensorProto.INT64}),
        ([np.float32([0.0, 0.5, -3.0])], {"to": TensorProto.BOOL}),
        ([whole(1, -2, 7)], {"to": TensorProto.FLOAT}),
        ([np.uint8([0, 9, 255])], {"to": TensorProto.FLOAT}),
        ([np.float64([0.1, 1e-9])], {"to": TensorProto.FLOAT}),
        ([BITS], {"to": TensorProto.FLOAT}),
    ],
    "MatMul": [
        ([real(3, 4), real(4, 2)], {}),
        ([real(2, 3, 4), real(4, 5)], {}),
        ([real(2, 3, 4), real(2, 4, 5)], {}),
        ([real(2, 1, 3, 4), real(5, 4, 2)], {}),
        ([real(4), real(4, 2)], {}),
        ([real(3, 4), real(4)], {}),
        ([np.float32([[0, 1]]), np.float32([[np.inf], [1]])], {}),
    ],
    "Gemm": [
        ([real(3, 4), real(4, 2)], {}),
        ([real(3, 4), real(2, 4), real(2)], {"transB": 1}),
        ([real(4, 3), real(4, 2), real(3, 2)], {"transA": 1, "alpha": 0.5, "beta": 2.0}),
        ([real(3, 4), real(4, 2), real(3, 1)], {"beta": 0.0}),
    ],
    "Conv": [
        ([real(2, 3, 7, 6), real(4, 3, 3, 3), real(4)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
        ([real(1, 2, 8, 8), real(3, 2, 2, 3)], {"kernel_shape": [2, 3], "strides": [2, 1], "pads": [1, 0, 0, 2]}),
        ([real(2, 4, 9, 9), real(6, 2, 3, 3), real(6)], {"kernel_shape": [3, 3], "group": 2, "dilations": [2, 2]}),
        ([real(2, 3, 9), real(4, 3, 3), real(4)], {"kernel_shape": [3], "pads": [1, 2], "strides": [2]}),
    ],
    "MaxPool": [
        ([real(2, 3, 6, 6)], {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ([real(1, 2, 7, 5)], {"kernel_shape": [3, 2], "pads": [1, 1, 0, 0]}),
        ([real(1, 2, 7, 7)], {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
        ([real(1, 2, 9)], {"kernel_shape": [3], "strides": [3]}),
    ],
    "AveragePool": [
        ([real(2, 3, 6, 6)], {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ([real(1, 2, 5, 5)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
        ([real(1, 2, 5, 5)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ],
    "GlobalAveragePool": [([real(2, 3, 4, 5)], {})],
    **{op: [([real(2, 3, 4)], {}), ([real(2, 3, 4), whole(1)], {}), ([real(2, 3, 4), whole(-1, 0)], {"keepdims": 0}),
            ([real(2, 3), whole()], {"noop_with_empty_axes": 1})]
       for op in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare")},
    **{op: [([5 * real(2, 3, 4)], {}), ([real(2, 3, 4)], {"axis": 1}), ([real(4, 5) + 500], {"axis": 0})]
       for op in ("Softmax", "LogSoftmax")},
    "InstanceNormalization": [
        ([real(2, 3, 4, 5), real(3), real(3)], {}),
        ([real(2, 3, 6), real(3), real(3)], {"epsilon": 0.1}),
    ],
    "LayerNormalization": [
        ([real(2, 3, 4), real(4), real(4)], {}),
        ([real(2, 3, 4), real(3, 4)], {"axis": 1, "epsilon": 0.1}),
    ],
    "Transpose": [([real(2, 3, 4)], {}), ([real(2, 3, 4)], {"perm": [2, 0, 1]})],
    "Reshape": [
        ([real(2, 3, 4), whole(4, -1)], {}),
        ([real(2, 3, 4), whole(0, 12)], {}),
        ([real(0, 3), whole(3, 0)], {"allowzero": 1}),
    ],
    "Unsqueeze": [([real(2, 3), whole(0, -1)], {})],
    "Squeeze": [([real(1, 2, 1), whole(0)], {}), ([real(1, 2, 1)], {}), ([real(1, 2, 1), whole(-1)], {})],
    "Slice": [
        ([real(5, 6), whole(1), whole(4)], {}),
        ([real(5, 6), whole(-2, 1), whole(2**62, 5), whole(1, 0), whole(1, 2)], {}),
        ([real(5, 6), whole(4), whole(-(2**62)), whole(0), whole(-1)], {}),
        ([real(5, 6), whole(3), whole(1), whole(1)], {}),
    ],
    "Gather": [
        ([real(5, 6), whole(0, -1, 2)], {}),
        ([real(5, 6), whole([0, 1], [4, 3])], {"axis": 1}),
        ([whole(7, 8, 9), np.array(1, dtype=np.int64)], {}),
    ],
    "Concat": [([real(2, 3), real(2, 1), real(2, 0)], {"axis": 1}), ([whole(1), whole(2, 3)], {"axis": 0})],
    "Split": [
        ([real(5, 4), whole(1, 4)], {}),
        ([real(4, 5), whole(2, 3)], {"axis": -1}),
        ([real(5, 4)], {"num_outputs": 2}),
    ],
    "Expand": [([real(3, 1), whole(2, 1, 4)], {}), ([real(3), whole(1)], {})],
    "Where": [
        ([BITS, real(4), real(4)], {}),
        ([BITS.reshape(4, 1), real(3), np.float32(0)], {}),
        ([BITS, np.float32(0), real(2, 4)], {}),
        ([BITS, ODD[-4:], real(4)], {}),
        ([BITS, whole(1, 2, 3, 4), whole(9)], {}),
    ],
    "Flatten": [([real(2, 3, 4)], {}), ([real(2, 3, 4)], {"axis": 2}), ([real(2, 3)], {"axis": 0})],
    "Shape": [([real(2, 3, 4)], {}), ([real(2, 3, 4)], {"start": 1, "end": -1})],
    "ConstantOfShape": [
        ([whole(2, 3)], {}),
        ([whole(2)], {"value": helper.make_tensor("v", TensorProto.INT64, [1], [7])}),
    ],
    "Constant": [
        ([], {"value": numpy_helper.from_array(real(2, 2))}),
        ([], {"value_float": 2.5}),
        ([], {"value_int": 3}),
    ],
}  # fmt: skip
CASES["Div"].append(([whole(7, -7, 9), whole(2, 2, -4)], {}))
CASES["Mul"].append(([whole(7, -7), whole(3)], {}))
CASES["ReduceSum"].append(([whole([1, 2], [3, 4]), whole(0)], {"keepdims": 0}))


def graph_of(op: str, inputs: Sequence[Array | None], attributes: dict[str, Any]) -> bytes:
    names = ["" if one is None else f"i{k}" for k, one in enumerate(inputs)]
    given = [(name, one) for name, one in zip(names, inputs, strict=True) if one is not None]
    outputs = [f"o{k}" for k in range(2 if op == "Split" else 1)]
    typed = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(one.dtype), one.shape)
        for name, one in given
    ]
    open_ended = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph([helper.make_node(op, names, outputs, **attributes)], "one", typed, open_ended)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    model = onnx.shape_inference.infer_shapes(model)
    return bytes(model.SerializeToString())


def right(graph: bytes, feeds: dict[str, Array]) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return list(onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"]).run(None, feeds))


IN_PAGE = """async (calls) => {
  const { read, run, tensor } = await import("/page/onnx.js");
  return calls.map(([file, feeds]) => {
    try {
      const graph = read(Uint8Array.from(atob(file), (c) => c.charCodeAt(0)).buffer), given = {};
      for (const [name, [dims, data, type]] of Object.entries(feeds)) {
        given[name] = tensor(dims, type === 1 ? Float32Array.from(data) : Float64Array.from(data), type);
      }
      return Object.values(run(graph, given)).map(({ dims, data, type }) => [dims, [...data], type]);
    } catch (error) { return String(error); }
  });
}"""


def in_page(page: Page, calls: Sequence[tuple[bytes, dict[str, Array]]]) -> list[Any]:
    def packed(one: Array) -> list[Any]:
        return [list(one.shape), one.reshape(-1).astype(float).tolist(), helper.np_dtype_to_tensor_dtype(one.dtype)]

    sent = [[base64.b64encode(graph).decode(), {k: packed(v) for k, v in feeds.items()}] for graph, feeds in calls]
    kinds = helper.tensor_dtype_to_np_dtype
    return [
        one if isinstance(one, str) else [np.array(data, dtype=kinds(type)).reshape(dims) for dims, data, type in one]
        for one in page.evaluate(IN_PAGE, sent)
    ]


def test_every_operator_computes_what_onnx_runtime_does(page: Page) -> None:
    known = page.evaluate("async () => Object.keys((await import('/page/onnx.js')).OPERATORS)")
    assert set(known) == set(CASES)  # an operator that the page claims to know is tested
    calls, names = [], []
    for op, cases in CASES.items():
        for inputs, attributes in cases:
            feeds = {f"i{k}": np.asarray(one) for k, one in enumerate(inputs) if one is not None}
            calls.append((graph_of(op, inputs, attributes), feeds))
            names.append(f"{op} of {[np.shape(one) for one in inputs]} with {attributes}")
    wrong = []
    for name, (graph, feeds), came in zip(names, calls, in_page(page, calls), strict=True):
        if isinstance(came, str):
            wrong.append(f"{name}: {came}")
            continue
        for one, expected in zip(came, right(graph, feeds), strict=True):
            try:
                assert one.dtype == expected.dtype, (one.dtype, expected.dtype)
                np.testing.assert_allclose(one, expected, rtol=2e-5, atol=2e-6)
                assert one.shape == expected.shape
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["logistic", "mlp", "lenet", "resnet20"])
def test_whole_networks_give_the_scores_of_pytorch(page: Page, name: str, tmp_path: Path) -> None:
    shape = (3, 32, 32) if name in ("lenet", "resnet20") else (1, 8, 8)
    torch.manual_seed(0)
    model = Model(architectures.build(name, shape, 5))
    theta, x = model.init(0), torch.randn(3, *shape)
    write_graph(tmp_path / "m.onnx", model, {"theta": theta, "x": x}, "scores", rows=["x"])
    ((came,),) = in_page(page, [((tmp_path / "m.onnx").read_bytes(), {"theta": theta.numpy(), "x": x[:2].numpy()})])
    np.testing.assert_allclose(came, model(theta, x[:2]).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (b"\x3a\xff\xff\xff\xff\x7f", "the ONNX file is damaged"),
        (b"\x0f", "the ONNX file is damaged"),
        (graph_of("Sinh", [real(2)], {}), "this page cannot compute the operator Sinh; open the model in ONNX Runtime"),
        (b"\x08" + b"\xff" * 11, "the ONNX file is damaged"),
    ],
)
def test_a_file_that_it_cannot_compute_is_refused(page: Page, file: bytes, words: str) -> None:
    said = page.evaluate(IN_PAGE, [[base64.b64encode(file).decode(), {}]])[0]
    assert isinstance(said, str) and words in said
