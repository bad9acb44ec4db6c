"""Every architecture: its size by hand, its shapes, and that a block of clients computes what each client would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from unalike.core.model import Model
from unalike.networks import architectures, convolutions
from unalike.networks.architectures import build, default_for, names
from unalike.networks.classifiers import LeNetEmbedding
from unalike.networks.convolutions import max_pool_by_slices
from unalike.networks.lstm import LSTMLayer
from unalike.networks.resnets import ResNet20


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def lenet_size(channels: int, features: int, outputs: int) -> int:
    """Table B.1 with biases, layer by layer."""
    conv1 = channels * 5 * 5 * 16 + 16
    conv2 = 16 * 5 * 5 * 32 + 32
    return conv1 + conv2 + (features * 120 + 120) + (120 * 84 + 84) + (84 * outputs + outputs)


# Name, shape of one input, classes, options. ResNet18 is narrow here to be quick; its full size is counted below.
CASES = [
    ("logistic", (64,), 10, {}),
    ("logistic", (1, 28, 28), 10, {}),
    ("linear", (64,), 2, {}),
    ("mlp", (64,), 10, {}),
    ("mlp", (1, 8, 8), 3, {"hidden": (7, 5)}),
    ("dense", (20,), 4, {"hidden": (9, 5)}),
    ("small-cnn", (1, 8, 8), 10, {}),
    ("cnn1d", (40,), 3, {}),
    ("cnn1d", (2, 33), 3, {"widths": (3, 5), "kernel": 4}),
    ("lenet", (1, 28, 28), 62, {}),
    ("lenet", (3, 32, 32), 10, {}),
    ("lenet-5", (1, 28, 28), 10, {}),
    ("cnn", (1, 28, 28), 10, {}),
    ("cnn", (3, 32, 32), 10, {"hidden": 16}),
    ("resnet20", (3, 16, 16), 10, {}),
    ("resnet18", (3, 16, 16), 10, {"width": 8, "groups": 2}),
    ("resnet18", (3, 66, 66), 10, {"width": 4, "groups": 2}),
    ("resnet34", (3, 8, 8), 10, {"width": 4, "groups": 2}),
    ("lstm", (9,), 80, {"hidden": 12}),
]
CASE_NAMES = [f"{name}-{'x'.join(map(str, shape))}" for name, shape, _, _ in CASES]


def inputs(name: str, shape: tuple[int, ...], classes: int, *count: int) -> Tensor:
    if name == "lstm":
        return torch.randint(classes, (*count, *shape))
    return torch.randn(*count, *shape)


@pytest.mark.parametrize(("name", "shape", "classes", "options"), CASES, ids=CASE_NAMES)
def test_a_block_of_clients_computes_what_each_client_would(name, shape, classes, options):
    torch.manual_seed(0)
    module = build(name, shape, classes, **options).double().eval()  # without dropout, whose masks are the clients'
    clients, batch = 3, 4
    stacked = {key: torch.randn(clients, *p.shape, dtype=p.dtype) * 0.1 for key, p in module.named_parameters()}
    x, y = inputs(name, shape, classes, clients, batch), torch.randint(classes, (clients, batch))
    if x.is_floating_point():
        x = x.double()

    def loss(theta: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, theta, (x,)), y)

    together = vmap(grad(loss))(stacked, x, y)
    for client in range(clients):
        own = {key: value[client].clone().requires_grad_() for key, value in stacked.items()}
        scores = functional_call(module, own, (x[client],))
        assert scores.shape == (batch, classes)
        F.cross_entropy(scores, y[client]).backward()
        for key, value in own.items():
            torch.testing.assert_close(together[key][client], value.grad, rtol=1e-9, atol=1e-12)
    assert all(value.abs().sum() > 0 for value in together.values()), "a parameter has no influence"


def test_every_built_in_is_in_the_cases_above():
    tested = {name for name, *_ in CASES} | {"lenet-embedding"}
    assert tested == set(names())


@pytest.mark.parametrize(
    ("shape", "classes", "features", "by_hand"),
    [((3, 32, 32), 10, 800, 121_182), ((3, 32, 32), 100, 800, 128_832), ((1, 28, 28), 62, 512, 90_242)],
)
def test_lenet_has_the_layers_of_table_b1(shape, classes, features, by_hand):
    module = build("lenet", shape, classes)
    assert parameters(module) == by_hand == lenet_size(shape[0], features, classes)
    assert tuple(module.fc1.weight.shape) == (120, features)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "by_hand"),
    [
        ("logistic", (64,), 10, {}, 650),
        ("linear", (64,), 2, {}, 64),
        ("mlp", (64,), 10, {}, 64 * 64 + 64 + 64 * 10 + 10),
        ("small-cnn", (1, 8, 8), 10, {}, (9 * 16 + 16) + (16 * 9 * 32 + 32) + (128 * 10 + 10)),
        ("cnn1d", (40,), 3, {}, (7 * 16 + 16) + (16 * 7 * 32 + 32) + (2 * 32 * 3 + 3)),
        ("lenet-5", (1, 28, 28), 10, {}, 156 + 2_416 + 30_840 + 10_164 + 850),
        ("lenet-embedding", (3, 32, 32), 10, {"descriptor": 25}, lenet_size(3 + 10, 800, 25)),
        ("lenet-embedding", (3, 32, 32), 10, {"descriptor": 25, "labels": False}, lenet_size(3, 800, 25)),
        ("cnn", (1, 28, 28), 10, {}, 832 + 51_264 + (1024 * 96 + 96) + (96 * 10 + 10)),
        ("cnn", (3, 32, 32), 10, {}, 2_432 + 51_264 + (1600 * 61 + 61) + (61 * 10 + 10)),
        # the published sizes: 0.27 M less batch norm's share, and the 11.17 M of the small-stem ResNet18
        ("resnet20", (3, 32, 32), 10, {}, 270_906),
        ("resnet18", (3, 32, 32), 10, {}, 11_173_962),
        ("resnet34", (3, 32, 32), 10, {}, 21_282_122),  # T2: p is about 2e7
        ("lstm", (80,), 80, {}, 80 * 8 + 4 * 256 * (8 + 256 + 1) + 4 * 256 * (256 + 256 + 1) + 256 * 80 + 80),
    ],
)
def test_sizes_by_hand(name, shape, classes, options, by_hand):
    assert parameters(build(name, shape, classes, **options)) == by_hand


@pytest.mark.parametrize("side", [8, 9])
def test_lenet_5_pools_alike_with_and_without_a_gradient(side):
    x = torch.randn(2, 3, side, side)
    assert torch.equal(max_pool_by_slices(x), F.max_pool2d(x, 2))


def lenet_5_by_hand(model, theta, x):
    """The scores of one client, written out."""
    weights = {name: theta[model.span(name)].view(shape) for name, shape in model.shapes.items()}
    for layer in ("conv1", "conv2"):
        x = F.max_pool2d(F.conv2d(x, weights[f"{layer}.weight"], weights[f"{layer}.bias"]).relu(), 2)
    x = x.flatten(1)
    for layer in ("fc1", "fc2"):
        x = F.linear(x, weights[f"{layer}.weight"], weights[f"{layer}.bias"]).relu()
    return F.linear(x, weights["fc3.weight"], weights["fc3.bias"])


@pytest.mark.parametrize("room", [convolutions._ROOM, 0], ids=["by patches", "by groups"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("own", [(0, 0), (0, None), (None, 0)], ids=["both", "models", "images"])
def test_lenet_5_of_a_block_is_that_of_each_client(monkeypatch, room, channels, own):
    monkeypatch.setattr(convolutions, "_ROOM", room)
    model = Model(build("lenet-5", (channels, 20, 18), 4))
    theta = torch.stack([model.init(seed) for seed in range(3)])
    x = torch.randn(3, 5, channels, 20, 18, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 3, 0])
    given = [value if dim == 0 else value[0] for value, dim in zip((theta, x), own, strict=True)]

    def loss(scores):
        return F.cross_entropy(scores, y)

    scores = vmap(model, own)(*given)
    gradients = vmap(grad(lambda theta, x: loss(model(theta, x)), argnums=(0, 1)), own)(*given)
    at_once = [value.clone().requires_grad_() for value in given]  # PyTorch's own gradients, of the whole block
    sum(loss(one) for one in vmap(model, own)(*at_once)).backward()
    summed = [torch.zeros_like(value) for value in given]
    for client in range(3):
        one = [value[client] if dim == 0 else value for value, dim in zip(given, own, strict=True)]
        one = [value.clone().requires_grad_() for value in one]
        by_hand = lenet_5_by_hand(model, *one)
        torch.testing.assert_close(scores[client], by_hand)
        loss(by_hand).backward()
        for place, dim, gradient, value in zip(summed, own, gradients, one, strict=True):
            torch.testing.assert_close(gradient[client], value.grad, atol=1e-6, rtol=1e-4)
            (place[client] if dim == 0 else place).add_(value.grad)
    for value, expected in zip(at_once, summed, strict=True):
        torch.testing.assert_close(value.grad, expected, atol=1e-6, rtol=1e-4)


def test_a_gradient_of_a_gradient_of_lenet_5_in_a_block():
    model = Model(build("lenet-5", (1, 16, 16), 3))
    theta = torch.stack([model.init(seed) for seed in range(2)])
    x, y = torch.randn(2, 4, 1, 16, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0])

    def after_a_step(network, theta, x):
        def loss(theta):
            return F.cross_entropy(network(theta, x), y)

        return loss(theta - 0.1 * grad(loss)(theta))

    found = vmap(grad(lambda theta, x: after_a_step(model, theta, x)))(theta, x)
    for client in range(2):
        by_hand = grad(lambda theta, x: after_a_step(lambda t, x: lenet_5_by_hand(model, t, x), theta, x))
        torch.testing.assert_close(found[client], by_hand(theta[client], x[client]), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_the_cnn_is_fifteen_times_the_subspace_of_flowdup(shape):
    assert round(parameters(build("cnn", shape, 10)) / 10_000) == 15


def test_the_embedding_network_sees_the_label_as_one_hot_planes():
    torch.manual_seed(0)
    network = LeNetEmbedding((3, 32, 32), 10, descriptor=7)
    x, y = torch.randn(5, 3, 32, 32), torch.tensor([0, 9, 3, 3, 1])
    planes = F.one_hot(y, 10).to(x.dtype)[:, :, None, None].expand(5, 10, 32, 32)
    literal = network.after_first(network.conv1(torch.cat([x, planes], dim=1)))
    torch.testing.assert_close(network(x, y), literal, rtol=1e-5, atol=1e-6)
    assert network(x, y).shape == (5, 7)
    assert not torch.allclose(network(x, y), network(x, (y + 1) % 10))


def test_the_embedding_network_runs_for_a_block_of_clients():
    torch.manual_seed(0)
    network = LeNetEmbedding((1, 28, 28), 10, descriptor=7).double()
    stacked = {key: torch.randn(3, *p.shape, dtype=p.dtype) * 0.1 for key, p in network.named_parameters()}
    x, y = torch.randn(3, 4, 1, 28, 28, dtype=torch.float64), torch.randint(10, (3, 4))

    def energy(theta: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional_call(network, theta, (x, y)).square().sum()

    together = vmap(grad(energy))(stacked, x, y)
    for client in range(3):
        alone = grad(energy)({key: value[client] for key, value in stacked.items()}, x[client], y[client])
        for key, value in alone.items():
            torch.testing.assert_close(together[key][client], value, rtol=1e-9, atol=1e-12)


def test_an_embedding_network_without_labels_needs_none_and_one_with_labels_asks_for_them():
    x = torch.randn(2, 1, 28, 28)
    assert LeNetEmbedding((1, 28, 28), 10, descriptor=7, labels=False)(x).shape == (2, 7)
    with pytest.raises(ValueError, match="labels=False"):
        LeNetEmbedding((1, 28, 28), 10, descriptor=7)(x)


def test_the_lstm_layer_equals_the_fused_one():
    torch.manual_seed(0)
    layer, fused = LSTMLayer(5, 6).double(), nn.LSTM(5, 6, batch_first=True).double()

    def reorder(gates: Tensor) -> Tensor:
        i, f, o, g = gates.chunk(4)
        return torch.cat([i, f, g, o])  # the fused LSTM's order

    with torch.no_grad():
        fused.weight_ih_l0.copy_(reorder(layer.inward.weight))
        fused.weight_hh_l0.copy_(reorder(layer.recurrent.weight))
        fused.bias_ih_l0.copy_(reorder(layer.inward.bias))
        fused.bias_hh_l0.zero_()
    x = torch.randn(3, 11, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), fused(x)[0])


def test_the_forget_gate_starts_open_under_every_seed():
    model = Model(build("lstm", (9,), 20, hidden=12))
    for seed in (0, 1):
        bias = model.tensors(model.init(seed))["layers.0.inward.bias"]
        assert bias.tolist() == [0.0] * 12 + [1.0] * 12 + [0.0] * 24


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_activations_keep_their_size_through_resnet20(seed):
    model = Model(ResNet20((3, 32, 32), 10))
    network = model.module(model.init(seed))
    first = network.stem(torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(seed))).relu()
    ratio = network.blocks(first).square().mean() / first.square().mean()
    assert 0.1 < ratio < 10


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ((64,), "features", "mlp"),
        ((1, 8, 8), "image", "small-cnn"),
        ((1, 28, 28), "image", "lenet"),
        ((3, 32, 32), None, "lenet"),
        ((1, 3, 3), "image", "mlp"),
        ((80,), "tokens", "lstm"),
    ],
)
def test_the_default_fits_the_inputs(shape, kind, expected):
    assert default_for(shape, kind) == expected
    assert isinstance(build(expected, shape, 10, kind=kind), nn.Module)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lenett", (1, 28, 28), 10), "no architecture 'lenett'; did you mean 'lenet'"),
        (("zzz", (1, 28, 28), 10), "there are: logistic, linear, mlp"),
        (("lenet", (64,), 10), r"reads images .* shape \(64,\); use 'mlp'"),
        (("lenet", (1, 8, 8), 10), "at least 16x16, got 8x8; use 'small-cnn'"),
        (("cnn", (1, 3, 3), 10), "use 'mlp'"),
        (("linear", (64,), 3), "a number or one of two classes, not 3; use 'logistic'"),
        (("mlp", (64,), 0), "at least one output, got classes=0"),
        (("mlp", (0,), 2), "positive sizes"),
        (("lstm", (1, 8, 8), 10), "sequences of tokens"),
        (("mlp", (80,), 80, "tokens"), "mlp reads numbers, but the inputs are tokens; use 'lstm'"),
        (("lstm", (80,), 80, "features"), "lstm reads tokens, but the inputs are features; use 'mlp'"),
    ],
)
def test_a_wrong_request_says_what_to_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(*arguments)


def test_wrong_options_are_named_with_the_right_ones():
    with pytest.raises(ValueError, match=r"mlp: .*'hiden'; its options are: hidden"):
        build("mlp", (4,), 2, hiden=(3,))
    with pytest.raises(ValueError, match="'descriptor'"):
        build("lenet-embedding", (1, 28, 28), 10)
    with pytest.raises(ValueError, match="groups must divide width"):
        build("resnet18", (3, 32, 32), 10, width=8, groups=3)


def test_names_are_found_in_any_case_and_with_underscores():
    assert type(build("Small_CNN", (1, 8, 8), 10)) is architectures.SmallCNN


OUTSIDE = """
from torch import nn

class Wide(nn.Linear):
    def __init__(self, input_shape, classes, bias=True):
        super().__init__(input_shape[0], classes, bias)

def fixed():
    return nn.Linear(4, 3)

class NotAModule:
    pass

number = 3
"""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(OUTSIDE)
    return file


def test_a_class_from_a_file_is_given_the_sizes_and_options(outside):
    module = build(f"{outside}:Wide", (4,), 3, bias=False)
    assert tuple(module.weight.shape) == (3, 4)
    assert module.bias is None


def test_a_function_without_sizes_is_called_without_them(outside):
    assert tuple(build(f"{outside}:fixed", (4,), 3).weight.shape) == (3, 4)


def test_a_module_is_made_alike_in_every_process_and_leaves_the_global_generator_alone(outside):
    """A parameter of its own that no reset_parameters sets would otherwise begin differently in each run."""
    outside.write_text(
        "import torch\nfrom torch import nn\n"
        "class Own(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.token = nn.Parameter(torch.randn(5))\n"
    )
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        made.append(build(f"{outside}:Own", (4,), 3).token)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*made)


def test_a_class_from_an_installed_package():
    assert isinstance(build("torch.nn:Flatten", (4,), 3), nn.Flatten)


def test_two_files_of_one_name_stay_apart(outside, tmp_path):
    other = tmp_path / "other" / outside.name
    other.parent.mkdir()
    other.write_text("from torch import nn\nclass Wide(nn.Identity):\n    pass\n")
    assert isinstance(build(f"{outside}:Wide", (4,), 3), nn.Linear)
    assert isinstance(build(f"{other}:Wide", (4,), 3), nn.Identity)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Wyde", "has no 'Wyde'; did you mean 'Wide'"),
        ("NotAModule", "must make a torch.nn.Module, but made NotAModule"),
        ("number", "no class or function"),
    ],
)
def test_a_name_that_does_not_lead_to_a_module(outside, name, message):
    with pytest.raises(ValueError, match=message):
        build(f"{outside}:{name}", (4,), 3)


def test_import_paths_that_lead_nowhere(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    for path, message in [
        (f"{tmp_path / 'none.py'}:Wide", "there is no file"),
        (f"{broken}:Wide", "failed: ZeroDivisionError"),
        ("no_such_package:Wide", "cannot import 'no_such_package'"),
        ("torch.nn:", "expected 'package.module:Name'"),
    ]:
        with pytest.raises(ValueError, match=message):
            build(path, (4,), 3)
