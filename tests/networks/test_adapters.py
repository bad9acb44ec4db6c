"""θ holds what is trainable alone; LoRA, written out with matrices, is what the adapted network computes."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from unalike import Client, Clients, Each, LocalSGD, Model, PointPrivacy, send, simulate, task
from unalike.core.task import Sent
from unalike.learn.ghost import GhostNorms
from unalike.networks.heads import with_outputs, without_head


class Attention(nn.Module):
    """One head, with one matrix for queries, keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ v)


class Conv1D(nn.Module):
    """As GPT-2 has it: the weight is [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Net(nn.Module):
    """Images [2, 4, 4] by a convolution and attention over its 9 places to 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.attn = nn.Conv2d(2, 6, 2), nn.LayerNorm(6), Attention(6)
        self.wide, self.head = Conv1D(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.wide(x + self.attn(x)).mean(1))


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 2, 4, 4, generator=torch.Generator().manual_seed(1))


def random_theta(model: Model) -> Tensor:
    return torch.randn(model.size, generator=torch.Generator().manual_seed(2)) / 3.0


@pytest.mark.parametrize(
    ("trainable", "names"),
    [
        ("lora:r=2", ["attn.qkv.lora_A", "attn.qkv.lora_B", "attn.out.lora_A", "attn.out.lora_B"]),
        ("ffa-lora:r=2", ["attn.qkv.lora_B", "attn.out.lora_B"]),
        ("lora:r=1,targets=qkv/wide", ["attn.qkv.lora_A", "attn.qkv.lora_B", "wide.lora_A", "wide.lora_B"]),
        ("lora:targets=out+head", ["attn.out.lora_A", "attn.out.lora_B", "head.weight", "head.bias"]),
        ("head", ["head.weight", "head.bias"]),
        ("norm", ["norm.weight", "norm.bias"]),
        ("bias", ["patches.bias", "norm.bias", "attn.qkv.bias", "attn.out.bias", "wide.bias", "head.bias"]),
        ("bias+norm", ["patches.bias", "norm.weight", "norm.bias", *(f"attn.{one}.bias" for one in ("qkv", "out"))]),
        (lambda name, value: name.startswith("wide") and value.ndim == 1, ["wide.bias"]),
    ],
)
def test_theta_holds_what_is_trainable_and_nothing_else(trainable: object, names: list[str]) -> None:
    model = Model(net(), trainable=trainable)  # type: ignore[arg-type]
    if trainable == "bias+norm":
        names = [*names, "wide.bias", "head.bias"]
    assert list(model.shapes) == names
    assert model.size == sum(shape.numel() for shape in model.shapes.values())


@pytest.mark.parametrize("trainable", ["lora:r=2,targets=all+head", "ffa-lora", "head", "norm+bias"])
def test_it_begins_as_the_network_that_was_given_and_leaves_that_alone(trainable: str) -> None:
    module = net()
    before = copy.deepcopy(module.state_dict())
    model = Model(module, trainable=trainable)
    for seed in (0, 1):
        assert torch.equal(model(model.init(seed), images()), module(images()))
    assert type(module.attn.qkv) is nn.Linear and all(one.requires_grad for one in module.parameters())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert torch.equal(model.init(1), model.init(1))
    assert torch.equal(model.init(0), model.init(1)) == (not trainable.startswith("lora"))


def test_lora_is_the_frozen_layer_plus_a_product_of_two_matrices() -> None:
    module = net()
    model = Model(module, trainable="lora:r=2,alpha=6,targets=all")
    theta = random_theta(model)
    part = model.tensors(theta)

    def product(name: str) -> Tensor:
        return 3.0 * part[f"{name}.lora_B"].flatten(1) @ part[f"{name}.lora_A"].flatten(1)

    plain = copy.deepcopy(module)  # with each product added to its weight
    with torch.no_grad():
        plain.patches.weight += product("patches").view_as(plain.patches.weight)
        plain.attn.qkv.weight += product("attn.qkv")
        plain.attn.out.weight += product("attn.out")
        plain.wide.weight += product("wide").T
    assert torch.allclose(model(theta, images()), plain(images()), atol=1e-5)
    assert torch.allclose(model.module(theta)(images()), plain(images()), atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch computes such attention client by client
def test_attention_and_layers_of_pytorch_that_read_weights_without_calling_them() -> None:
    torch.manual_seed(0)
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)
    model = Model(module, trainable="lora:r=2,targets=self_attn/linear1")
    assert len(model.shapes) == 6 and all(".lora_" in name or "0.lora_" in name for name in model.shapes)
    theta, x = random_theta(model), torch.randn(3, 5, 8)
    part = model.tensors(theta)
    plain = copy.deepcopy(module).eval()
    layer, at = plain.layers[0], "layers.0.self_attn"
    names = {
        "in_proj_weight": f"{at}.parametrizations.in_proj_weight",
        "weight": f"{at}.out_proj.parametrizations.weight",
    }
    with torch.no_grad():
        for owner, name in ((layer.self_attn, "in_proj_weight"), (layer.self_attn.out_proj, "weight")):
            getattr(owner, name).add_(part[f"{names[name]}.0.lora_B"] @ part[f"{names[name]}.0.lora_A"])
        layer.linear1.weight += part["layers.0.linear1.lora_B"] @ part["layers.0.linear1.lora_A"]
        expected = plain(x)
        assert torch.allclose(model(theta, x), expected, atol=1e-5)
        assert torch.allclose(vmap(model, (0, None))(theta.expand(2, -1), x)[1], expected, atol=1e-5)
        assert torch.allclose(model(theta, x), expected, atol=1e-5) and not torch.allclose(module.eval()(x), expected)


def test_a_block_of_adapters_is_their_loop_and_so_are_gradients() -> None:
    model = Model(net(), trainable="lora:r=2,targets=all+head")
    thetas = torch.stack([random_theta(model), model.init(0), -random_theta(model)])

    def loss(theta: Tensor, x: Tensor) -> Tensor:
        return F.cross_entropy(model(theta, x), torch.tensor([0, 1, 2, 0, 1]))

    x = torch.stack([images(), images() + 1, images() - 1])
    block = vmap(grad(loss))(thetas, x)
    for one, theta, rows in zip(block, thetas, x, strict=True):
        assert torch.allclose(one, grad(loss)(theta, rows), atol=1e-5)


@pytest.mark.parametrize("trainable", ["lora:r=2,targets=all+head", "ffa-lora:r=2", "lora:r=1,targets=patches"])
def test_clipped_sums_of_adapters_are_those_of_each_samples_own_gradient(trainable: str) -> None:
    model = Model(net(), trainable=trainable)
    theta, x, y = random_theta(model), images(), torch.tensor([0, 1, 2, 0, 1])
    ghost = GhostNorms.of(model, x)
    assert ghost is not None, "its structure was not recognised"

    def losses(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="none")

    each = torch.stack(
        [grad(lambda t, i=i: losses(model(t, x[i : i + 1]), y[i : i + 1]).sum())(theta) for i in range(5)]
    )
    norms = each.norm(dim=1)
    bound = float(norms.median())  # some are clipped, and some are not
    expected = (each * (bound / norms).clamp(max=1.0)[:, None]).sum(0)
    made, found = ghost.clipped_sum(theta, x, y, losses, None, bound)
    assert torch.allclose(made, expected, atol=1e-4 * bound) and torch.allclose(found, losses(model(theta, x), y))
    both = vmap(lambda t: ghost.clipped_sum(t, x, y, losses, None, bound)[0])(torch.stack([theta, -theta]))
    assert torch.allclose(both[0], expected, atol=1e-4 * bound)


@dataclass(frozen=True)
class Trains:
    model: Model
    local: LocalSGD

    @task
    def fit(self, client: Client, theta: Tensor) -> Sent:
        return send(theta=self.local(self.model, theta, client))


def test_dp_sgd_trains_adapters_in_blocks_as_by_each_points_own_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    private = LocalSGD(steps=2, epochs=None, batch=None, lr=0.3, private=PointPrivacy(0.3, 1e-9))  # hardly any noise
    trains = Trains(Model(net(), trainable="lora:r=2+head"), private)
    clients = Clients.from_sizes(images(12), torch.arange(12) % 3, torch.tensor([5, 7]))
    theta = trains.model.init(0)

    def trained() -> Tensor:
        return simulate(clients, block=2).everyone().ask(trains.fit, theta=theta, into=Each("theta"))["theta"]

    together = trained()
    monkeypatch.setattr(GhostNorms, "of", lambda *_: None)
    assert torch.allclose(trained(), together, atol=1e-5)
    assert float((together - theta).abs().max()) > 1e-3


class Batchwise(Net):
    """Attention over the samples of a batch, which no norm of a layer would bound."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.attn(x.transpose(0, 1)).transpose(0, 1).mean(1))


def test_a_network_that_mixes_samples_has_no_norms_by_layers() -> None:
    assert GhostNorms.of(Model(Batchwise(), trainable="lora:r=2+head"), images()) is None
    assert GhostNorms.of(Model(net(), trainable="norm+head"), images()) is None  # scales of norms are no layers


class Named(Net):
    """The same network, with the names of dimensions written out."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.patches(x).flatten(2).transpose(dim0=1, dim1=2))
        return self.head(self.wide(x + self.attn(x.permute(dims=(0, 1, 2)))).mean(dim=1))


class NamedBatchwise(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.patches(x).flatten(2).transpose(1, 2)).transpose(dim0=0, dim1=1)
        return self.head(self.attn(x).transpose(0, 1).mean(1))


def test_dimensions_may_be_given_by_name() -> None:
    assert GhostNorms.of(Model(Named(), trainable="lora:r=2+head"), images()) is not None
    assert GhostNorms.of(Model(NamedBatchwise(), trainable="lora:r=2+head"), images()) is None


def test_methods_whose_models_must_begin_apart_say_what_to_do() -> None:
    from unalike import RDPCFL, FedEM, Problem

    head = Model(net(), trainable="head")
    with pytest.raises(ValueError, match=r"its components must begin apart.*add lora"):
        FedEM(Problem(head, (2, 4, 4), 3, 8))
    with pytest.raises(ValueError, match=r"every adapter begins as the network that it adapts.*use rdpcfl or fedem"):
        RDPCFL(Model(net(), trainable="lora"), clustering="selection", clusters=2)


def test_a_frozen_a_is_the_same_in_every_process_and_makes_means_exact() -> None:
    torch.manual_seed(5)
    first = Model(net(), trainable="ffa-lora:r=2")
    torch.manual_seed(6)
    second = Model(net(), trainable="ffa-lora:r=2")
    theta = random_theta(first)
    assert torch.equal(first(theta, images()), second(theta, images())) and first.digest == second.digest
    a = first._module.attn.qkv.lora_A
    before = a.clone()
    first.init(3)
    assert torch.equal(a, before)
    layer, other = first.module(theta).attn.qkv, first.module(-3.0 * theta).attn.qkv
    mean, x = first.module(-theta).attn.qkv, torch.randn(4, 6)
    assert torch.allclose(mean(x), (layer(x) + other(x)) / 2, atol=1e-5)


def test_the_digest_is_of_what_is_frozen() -> None:
    model = Model(net(), trainable="head")
    assert Model(net()).digest is None
    assert model.digest == Model(net(), trainable="head").digest != Model(net(1), trainable="head").digest
    other = net()
    with torch.no_grad():
        other.head.weight.add_(1.0)  # is trained
    assert Model(other, trainable="head").digest == model.digest
    with torch.no_grad():
        other.norm.bias[0] += 1e-6
    assert Model(other, trainable="head").digest != model.digest


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        ("lorra", r"'lorra' is not understood \(did you mean 'lora'\?\)|'lorra' is not understood"),
        ("head:r=2", "'head:r=2' is not understood; expected lora"),
        ("head+head", "'head' is not understood"),
        ("lora:r=x", r"'r=x' is not understood; expected r=WHOLE NUMBER"),
        ("lora:rank=4", "'rank=4' is not understood"),
        ("lora:r=0", "r and alpha are above 0"),
        (
            "lora:targets=q_proj",
            r"no layer for targets=q_proj; say targets=all, or the ends of names: patches, attn, qkv|patches, qkv",
        ),
        (lambda name, _: False, "no trainable parameters: none that trainable"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_is(trainable: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Model(net(), trainable=trainable)  # type: ignore[arg-type]


def test_a_head_that_is_also_the_embedding_is_not_trained() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x).mean(1))

    with pytest.raises(ValueError, match=r"'head' shares its weights with words\.weight"):
        Model(Tied(), trainable="head")


def test_a_last_layer_that_is_taken_off_leaves_the_rest_frozen() -> None:
    for trainable in ("lora:r=2+head", "lora:r=2"):
        model = Model(net(), trainable=trainable)
        features, width = without_head(model)
        assert width == 6 and features.size == Model(net(), trainable="lora:r=2").size
        theta = random_theta(model)
        out = model.module(theta)
        assert torch.allclose(out.head(features(theta[: features.size], images())), model(theta, images()), atol=1e-5)
    other = with_outputs(Model(net(), trainable="lora:r=2+head"), 5)
    assert other(other.init(0), images()).shape == (5, 5) and other.size == features.size + 6 * 5 + 5
    assert torch.equal(other.init(0), other.init(0)) and not torch.equal(other.init(0), other.init(1))


@pytest.mark.parametrize("method", ["PeFLL", "ODPFL"])
def test_descriptors_of_an_adapter_read_features_of_what_is_frozen(method: str) -> None:
    import unalike as ua

    module = net()
    problem = ua.Problem(Model(module, trainable="lora:r=2+head"), (2, 4, 4), 3, 8, "image")
    made = getattr(ua, method)(problem)
    network = made.embedding if method == "PeFLL" else made.network
    assert all(name.startswith("network.") for name in network.shapes)  # nothing of the body is learned or sent
    body = copy.deepcopy(module)
    body.head = nn.Identity()
    found = network._module.body(images())
    assert torch.allclose(found, body(images()), atol=1e-6) and found.shape == (5, 6)
    by_rows = getattr(ua, method)(problem, describe_by="rows")
    assert by_rows.embedding.size > network.size if method == "PeFLL" else by_rows.network.size != network.size
    with pytest.raises(ValueError, match="describe_by='pixels'; expected one of auto, rows, features"):
        getattr(ua, method)(problem, describe_by="pixels")
