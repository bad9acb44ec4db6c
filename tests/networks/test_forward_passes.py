"""Every network written out a second time, from its paper's table, in plain tensor operations and NumPy.

None of them calls the network's own functions. Sizes, channels and numbers of rows all differ, so that no two can be
taken for each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unalike.core.model import Model
from unalike.methods.fedtta import FedTTA
from unalike.methods.flowdup import FLowDUP
from unalike.methods.problem import Problem
from unalike.networks.architectures import build
from unalike.networks.classifiers import LeNetEmbedding
from unalike.networks.embeddings import embedding_network
from unalike.networks.hypernet import first_values, hypernetwork
from unalike.networks.resnets import ResidualBlock
from unalike.networks.sets import _MAKERS, Attention

Array = Any  # a NumPy array
ROWS = 3


def random_parameters(model: Model) -> tuple[Tensor, dict[str, Array]]:
    """θ, and the same numbers by name; none is at a place where a missing ReLU or root would not show."""
    theta = torch.randn(model.size, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 0.3
    return theta, {name: value.numpy() for name, value in model.tensors(theta).items()}


def random_inputs(*shape: int) -> tuple[Tensor, Array]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return x, x.numpy()


def same(found: Tensor, expected: Array) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-9, atol=1e-9)
    assert np.ptp(expected) > 1e-3


def relu(x: Array) -> Array:
    return np.where(x > 0, x, 0.0)


def linear(x: Array, p: Mapping[str, Array], name: str) -> Array:
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0.0)


def convolution(x: Array, p: Mapping[str, Array], name: str, padding: int = 0, stride: int = 1) -> Array:
    """Σ over channels and kernel places, place by place of the result."""
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias", np.zeros(len(p[f"{name}.weight"])))
    kernel = weight.shape[2]
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    sides = [(side - kernel) // stride + 1 for side in x.shape[2:]]
    out = np.zeros((len(x), len(weight), *sides))
    for down in range(sides[0]):
        for right in range(sides[1]):
            patch = x[:, :, down * stride : down * stride + kernel, right * stride : right * stride + kernel]
            out[:, :, down, right] = np.einsum("bchw,ochw->bo", patch, weight) + bias
    return out


def pool(x: Array) -> Array:
    """The largest of each 2 by 2 places; what is left over is dropped."""
    height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    return x[:, :, :height, :width].reshape(*x.shape[:2], height // 2, 2, width // 2, 2).max((3, 5))


def lenet(x: Array, p: Mapping[str, Array]) -> Array:
    """T1 Table B.1: convolution, ReLU, pool, twice; then three linear layers with ReLU between."""
    x = pool(relu(convolution(x, p, "conv1")))
    x = pool(relu(convolution(x, p, "conv2")))
    x = relu(linear(x.reshape(len(x), -1), p, "fc1"))
    return linear(relu(linear(x, p, "fc2")), p, "fc3")


def small_cnn(x: Array, p: Mapping[str, Array]) -> Array:
    x = pool(relu(convolution(x, p, "conv1", padding=1)))
    x = pool(relu(convolution(x, p, "conv2", padding=1)))
    return linear(x.reshape(len(x), -1), p, "head")


def cnn1d(x: Array, p: Mapping[str, Array]) -> Array:
    """Twice: every output is a weighted sum of a window of zero-padded inputs; ReLU; means of four."""
    x = x.reshape(len(x), -1, x.shape[-1])
    for name in ("conv1", "conv2"):
        w, b = p[f"{name}.weight"][:, :, 0], p[f"{name}.bias"]
        padded = np.pad(x, [(0, 0), (0, 0), (w.shape[2] // 2,) * 2])
        windows = np.lib.stride_tricks.sliding_window_view(padded, w.shape[2], axis=2)
        y = relu(np.einsum("nclk,ock->nol", windows, w) + b[:, None])
        x = y[:, :, : y.shape[2] // 4 * 4].reshape(*y.shape[:2], -1, 4).mean(3)
    return linear(x.reshape(len(x), -1), p, "head")


def cnn(x: Array, p: Mapping[str, Array]) -> Array:
    """McMahan et al. 2017: two convolutions, each with ReLU and pooling, and one hidden layer."""
    x = pool(relu(convolution(x, p, "conv1")))
    x = pool(relu(convolution(x, p, "conv2")))
    return linear(relu(linear(x.reshape(len(x), -1), p, "fc1")), p, "fc2")


def mlp(x: Array, p: Mapping[str, Array], layers: int, prefix: str = "layers.") -> Array:
    x = x.reshape(len(x), -1)
    for layer in range(layers - 1):
        x = relu(linear(x, p, f"{prefix}{layer}"))
    return linear(x, p, f"{prefix}{layers - 1}")


def group_norm(x: Array, p: Mapping[str, Array], name: str, groups: int) -> Array:
    if f"{name}.weight" not in p:
        return x
    grouped = x.reshape(len(x), groups, -1)
    grouped = (grouped - grouped.mean(2, keepdims=True)) / np.sqrt(grouped.var(2, keepdims=True) + 1e-5)
    return grouped.reshape(x.shape) * p[f"{name}.weight"][:, None, None] + p[f"{name}.bias"][:, None, None]


def residual_block(x: Array, p: Mapping[str, Array], name: str, stride: int, groups: int, scale: float) -> Array:
    """He et al. 2016, Fig. 2: ReLU after the first convolution, and after the sum with the shortcut."""
    branch = group_norm(convolution(x, p, f"{name}.conv1", 1, stride), p, f"{name}.norm1", groups)
    branch = group_norm(convolution(relu(branch), p, f"{name}.conv2", 1), p, f"{name}.norm2", groups)
    if f"{name}.shortcut.0.weight" in p:
        x = group_norm(convolution(x, p, f"{name}.shortcut.0", 0, stride), p, f"{name}.shortcut.1", groups)
    return relu(x + scale * branch)


def resnet(x: Array, p: Mapping[str, Array], depths: tuple[int, ...], groups: int = 0, scale: float = 1.0) -> Array:
    x = relu(group_norm(convolution(x, p, "stem", 1), p, "norm", groups))
    block = 0
    for stage, depth in enumerate(depths):
        for place in range(depth):
            x = residual_block(x, p, f"blocks.{block}", 2 if stage and not place else 1, groups, scale)
            block += 1
    return linear(x.mean((2, 3)), p, "head")


CLASSIFIERS: dict[str, tuple[tuple[int, ...], dict[str, Any], Any]] = {
    "logistic": ((7,), {}, lambda x, p: linear(x, p, "linear")),
    "mlp": ((2, 3), {"hidden": (8, 5)}, lambda x, p: mlp(x, p, 3)),
    "dense": ((7,), {"hidden": (6, 5)}, lambda x, p: mlp(x, p, 3)),
    "small-cnn": ((2, 9, 8), {"widths": (3, 5)}, small_cnn),
    "cnn1d": ((2, 33), {"widths": (3, 5), "kernel": 4}, cnn1d),
    "lenet": ((2, 17, 16), {}, lenet),
    "lenet-5": ((1, 16, 19), {}, lenet),
    "cnn": ((2, 16, 17), {"hidden": 6}, cnn),
    "resnet20": ((2, 8, 9), {}, lambda x, p: resnet(x, p, (3, 3, 3), scale=1 / 3)),
    "resnet18": ((2, 9, 8), {"width": 4, "groups": 2}, lambda x, p: resnet(x, p, (2, 2, 2, 2), 2)),
    "resnet34": ((2, 8, 8), {"width": 4, "groups": 2}, lambda x, p: resnet(x, p, (3, 4, 6, 3), 2)),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_is_that_of_its_table(name: str) -> None:
    shape, options, written_out = CLASSIFIERS[name]
    model = Model(build(name, shape, 4, **options).double())
    theta, p = random_parameters(model)
    x, rows = random_inputs(ROWS, *shape)
    same(model(theta, x), written_out(rows, p))
    together = torch.vmap(model)(torch.stack([theta, -theta]), torch.stack([x, x]))  # as in a block of clients
    same(together[0], written_out(rows, p))


def test_linear_gives_the_first_of_two_classes_a_score_of_zero() -> None:
    model = Model(build("linear", (7,), 2))
    theta, p = random_parameters(model)
    x, rows = random_inputs(ROWS, 7)
    same(model(theta, x), np.stack([np.zeros(ROWS), rows @ p["weight"]], 1))


@pytest.mark.parametrize(("inputs", "outputs", "stride", "groups"), [(4, 4, 1, 0), (4, 6, 2, 2)])
def test_a_residual_block_adds_its_branch_to_the_shortcut(inputs: int, outputs: int, stride: int, groups: int) -> None:
    model = Model(ResidualBlock(inputs, outputs, stride, groups, scale=0.7).double())
    theta, p = random_parameters(model)
    x, rows = random_inputs(ROWS, inputs, 6, 5)
    named = {f"block.{name}": value for name, value in p.items()}
    same(model(theta, x), residual_block(rows, named, "block", stride, groups, 0.7))


def test_a_large_image_goes_through_the_large_stem_and_is_pooled() -> None:
    model = Model(build("resnet18", (1, 65, 66), 3, width=2, groups=1).double())
    theta, p = random_parameters(model)
    x, rows = random_inputs(1, 1, 65, 66)
    stem = relu(group_norm(convolution(rows, p, "stem", 3, 2), p, "norm", 1))
    padded = np.pad(stem, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))[:, :, ::2, ::2].max((4, 5))
    out, block = windows, 0
    for stage in range(4):
        for place in range(2):
            out = residual_block(out, p, f"blocks.{block}", 2 if stage and not place else 1, 1, 1.0)
            block += 1
    same(model(theta, x), linear(out.mean((2, 3)), p, "head"))


def test_the_lstm_is_two_layers_of_gates() -> None:
    model = Model(build("lstm", (6,), 9, hidden=5, embedding=4).double())
    theta, p = random_parameters(model)
    tokens = torch.tensor([[0, 3, 8, 1, 1, 5], [2, 2, 7, 4, 0, 6]])
    x = p["embedding.weight"][tokens.numpy()]
    for layer in (0, 1):
        h = c = np.zeros((2, 5))
        states = []
        for step in range(6):
            gates = linear(x[:, step], p, f"layers.{layer}.inward") + h @ p[f"layers.{layer}.recurrent.weight"].T
            i, f, o = (1 / (1 + np.exp(-gates[:, 5 * k : 5 * k + 5])) for k in range(3))
            c = f * c + i * np.tanh(gates[:, 15:])
            h = o * np.tanh(c)
            states.append(h)
        x = np.stack(states, 1)
    same(model(theta, tokens), linear(x[:, -1], p, "head"))


def test_the_embedding_reads_the_label_as_planes_behind_the_image() -> None:
    """T1 Table B.2: C one-hot planes, and then LeNet with l outputs."""
    model = Model(LeNetEmbedding((2, 16, 17), 4, descriptor=5).double())
    theta, p = random_parameters(model)
    x, rows = random_inputs(ROWS, 2, 16, 17)
    y = torch.tensor([3, 0, 2])
    planes = np.zeros((ROWS, 4, 16, 17))
    planes[np.arange(ROWS), y.numpy()] = 1.0
    same(model(theta, x, y), lenet(np.concatenate([rows, planes], 1), p))


@pytest.mark.parametrize("labels", ["planes", "ignored"])
def test_a_descriptor_of_images_has_the_length_that_is_asked_for(labels: Any) -> None:
    model = embedding_network((1, 16, 16), "image", 4, 7, labels)
    theta = torch.zeros(model.size)
    inputs = (torch.zeros(ROWS, 1, 16, 16), torch.zeros(ROWS, dtype=torch.int64))
    assert model(theta, *inputs[: 1 + (labels == "planes")]).shape == (ROWS, 7)


def test_a_label_joins_features_linearly() -> None:
    model = embedding_network((7,), "features", 4, 5, "linear")
    theta = torch.randn(model.size, generator=torch.Generator().manual_seed(5)) * 0.3
    p = {name: value.double().numpy() for name, value in model.tensors(theta).items()}
    x = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(6))
    y = torch.tensor([3, 0, 2])
    joined = np.concatenate([x.double().numpy(), linear(np.eye(4)[y.numpy()], p, "label")], 1)
    expected = mlp(joined, p, 3, "network.layers.")
    np.testing.assert_allclose(model(theta, x, y).numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "layers"), [("S", 1), ("M", 3), ("L", 5)])
def test_the_hypernetwork_has_a_relu_after_every_hidden_layer(size: Any, layers: int) -> None:
    model = hypernetwork(6, Model(build("logistic", (4,), 3)), size)
    theta = torch.randn(model.size, generator=torch.Generator().manual_seed(5)) * 0.1
    p = {name: value.double().numpy() for name, value in model.tensors(theta).items()}
    v = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(6))
    hidden = v.double().numpy()
    for layer in range(layers):
        hidden = relu(linear(hidden, p, f"trunk.{layer}"))
    np.testing.assert_allclose(model(theta, v).numpy(), linear(hidden, p, "head"), rtol=1e-4, atol=1e-5)


def test_a_head_of_low_rank_is_a_product_of_two_matrices() -> None:
    plain = Model(build("logistic", (4,), 3))
    model = hypernetwork(6, plain, "S", rank=2)
    assert model.size == 100 * 6 + 100 + 2 * 100 + 15 * 2 + 15
    theta = torch.randn(model.size, generator=torch.Generator().manual_seed(5)) * 0.1
    p = {name: value.double().numpy() for name, value in model.tensors(theta).items()}
    v = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(6))
    hidden = relu(linear(v.double().numpy(), p, "trunk.0"))
    expected = hidden @ (p["head.weight"] @ p["narrow.weight"]).T + p["head.bias"]
    np.testing.assert_allclose(model(theta, v).numpy(), expected, rtol=1e-4, atol=1e-5)
    first = model.tensors(first_values(model, plain, seed=3))
    torch.testing.assert_close(first["head.bias"], plain.init(3))  # models start near a usual one
    with pytest.raises(ValueError, match="rank=0; expected at least 1"):
        hypernetwork(6, plain, rank=0)


# Sets: rows that only fill up must change nothing, so each has two of them


OWN = torch.tensor([True, True, False, True, True, False])
KEPT = OWN.numpy()


def mean_and_max(points: Array) -> Array:
    """P2 App. C: the mean of the first half of the units, the largest of the second."""
    half = points.shape[1] // 2
    return np.concatenate([points[:, :half].mean(0), points[:, half:].max(0)])


def attention(queries: Array, keys: Array, p: Mapping[str, Array], name: str, heads: int = 4) -> Array:
    """Lee et al. 2019: H = LN(Q + softmax(QKᵀ/√d)V), then LN(H + ReLU(H·W)); √d is of one head."""
    q, k, v = (linear(x, p, f"{name}.{part}") for x, part in ((queries, "query"), (keys, "key"), (keys, "value")))
    seen, each = np.zeros_like(q), q.shape[1] // heads
    for head in range(heads):
        part = slice(head * each, (head + 1) * each)
        scores = q[:, part] @ k[:, part].T / math.sqrt(each)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        seen[:, part] = weights / weights.sum(1, keepdims=True) @ v[:, part]
    hidden = layer_norm(queries + seen, p, f"{name}.norm1")
    return layer_norm(hidden + relu(linear(hidden, p, f"{name}.mix")), p, f"{name}.norm2")


def layer_norm(x: Array, p: Mapping[str, Array], name: str) -> Array:
    x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def test_attention_has_a_residual_and_divides_by_the_root_of_a_heads_width() -> None:
    model = Model(Attention(8).double())
    theta, p = random_parameters(model)
    q, queries = random_inputs(2, 8)
    k, keys = random_inputs(len(OWN), 8)
    named = {f"block.{name}": value for name, value in p.items()}
    same(model(theta, q, k, OWN), attention(queries, keys[KEPT], named, "block"))


def of_features(encoder: str, x: Array, p: Mapping[str, Array]) -> Array:
    """A set encoder on feature vectors; ``x`` holds the own rows alone."""
    if encoder == "deepset":
        points = relu(mlp(x, p, 2, "phi.layers."))
        return mlp(mean_and_max(points)[None], p, 2, "psi.layers.")[0]
    if encoder == "deepset-once":
        points = relu(linear(x, p, "phi"))
        return mlp(mean_and_max(points)[None], p, 3, "psi.layers.")[0]
    if encoder == "dss":
        for own, of_set in (("own3", "set3"), ("own4", "set4")):
            x = relu(linear(x, p, own) + linear(x.mean(0, keepdims=True), p, of_set))
        return linear(mean_and_max(x), p, "psi")
    points = mlp(x, p, 2, "phi.layers.")
    if encoder == "sphere":
        return (points / np.linalg.norm(points, axis=1, keepdims=True)).mean(0)
    points = relu(points)
    points = attention(points, points, p, "among")
    return linear(attention(p["question.weight"].T, points, p, "pool")[0], p, "psi")


@pytest.mark.parametrize("encoder", ["deepset", "deepset-once", "dss", "set-transformer", "sphere"])
def test_a_set_encoder_of_features_is_written_out(encoder: Any) -> None:
    model = Model(_MAKERS[encoder]((7,), 5).double())
    theta, p = random_parameters(model)
    x, rows = random_inputs(len(OWN), 7)
    same(model(theta, x, OWN), of_features(encoder, rows[KEPT], p))


@pytest.mark.parametrize("encoder", ["deepset", "deepset-every", "dss"])
def test_a_set_encoder_of_images_is_written_out(encoder: Any) -> None:
    model = Model(_MAKERS[encoder]((2, 16, 17), 5).double())
    theta, p = random_parameters(model)
    x, rows = random_inputs(len(OWN), 2, 16, 17)
    own = rows[KEPT]
    if encoder == "deepset":
        named = {name.removeprefix("phi."): value for name, value in p.items()}
        expected = mlp(mean_and_max(relu(lenet(own, named)))[None], p, 1, "psi.layers.")[0]
    elif encoder == "deepset-every":
        first = pool(relu(convolution(own, p, "conv1")))
        second = pool(relu(convolution(first, p, "conv2")))
        pairs = (("flat1", first), ("flat2", second))
        pooled = [mean_and_max(relu(linear(maps.reshape(len(maps), -1), p, name))) for name, maps in pairs]
        expected = mlp(np.concatenate(pooled)[None], p, 3, "psi.layers.")[0]
    else:
        h = own
        for number in (1, 2):
            both = convolution(h, p, f"own{number}") + convolution(h.mean(0, keepdims=True), p, f"set{number}")
            h = pool(relu(both))
        h = h.reshape(len(h), -1)
        for number in (3, 4):
            h = relu(linear(h, p, f"own{number}") + linear(h.mean(0, keepdims=True), p, f"set{number}"))
        expected = linear(mean_and_max(h), p, "psi")
    same(model(theta, x, OWN), expected)


# Networks that belong to one method


def single_precision(model: Model) -> tuple[Tensor, dict[str, Array]]:
    theta = torch.randn(model.size, generator=torch.Generator().manual_seed(5)) * 0.3
    return theta, {name: value.double().numpy() for name, value in model.tensors(theta).items()}


def test_fedttas_adaptation_network_has_three_hidden_layers() -> None:
    method = FedTTA(Problem(Model(build("logistic", (7,), 4)), (7,), 4, 10, "features"))
    theta, p = single_precision(method.adaptation)
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(6))
    assert [p[f"layers.{layer}.weight"].shape[0] for layer in range(4)] == [32, 32, 32, 1]
    np.testing.assert_allclose(method.adaptation(theta, x).numpy(), mlp(x.double().numpy(), p, 4), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [None, 2])
def test_flowdups_h2_has_one_hidden_layer_and_may_have_a_last_one_of_low_rank(rank: int | None) -> None:
    method = FLowDUP(Model(build("logistic", (4,), 3)), features=7, width=5, rank=rank, dimension=6)
    state = method.start(0)
    theta, p = single_precision(method.hidden)
    last, bias = state["last"], torch.randn(6, generator=torch.Generator().manual_seed(7))
    assert last.shape == (6, rank or 5)
    r = torch.randn(7, generator=torch.Generator().manual_seed(6))
    hidden = p["0.weight"] @ r.double().numpy() + p["0.bias"]
    assert (hidden < 0).any() and (hidden > 0).any()
    factor = last.double().numpy() if rank is None else last.double().numpy() @ p["2.weight"]
    expected = factor @ np.maximum(hidden, 0) + bias.double().numpy()
    found = method.v_of({"hidden": theta, "last": last, "bias": bias}, r)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)
