"""The architectures of the papers, as plain modules that ``torch.func.vmap`` can run for a block of clients at once.

Hence no batch norm (``unalike.Model`` refuses it), and an LSTM written out in linear maps, because the
fused one has no batching rule. "Thesis" is J. Scott, *Data Heterogeneity and Personalization in Federated Learning*,
2026. Everything that draws initial values does so in ``reset_parameters``, which ``Model.init`` calls under its seed.

Pooling comes before the ReLU. Both orders give the same result, as both are monotone, but this one rectifies a quarter
of the values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.overrides import _get_current_function_mode_stack

_modes: Callable[[], list[Any]] = _get_current_function_mode_stack


def _image(input_shape: Sequence[int], name: str, smallest: int) -> tuple[int, int, int]:
    """(channels, height, width), or an error that names an architecture which would fit."""
    if len(input_shape) != 3:
        raise ValueError(
            f"{name} reads images of shape (channels, height, width), but one input has shape {tuple(input_shape)}; "
            "use 'mlp' or 'logistic'"
        )
    channels, height, width = input_shape
    if min(height, width) < smallest:
        fits = "small-cnn" if min(height, width) >= SmallCNN.smallest else "mlp"
        raise ValueError(f"{name} needs images of at least {smallest}x{smallest}, got {height}x{width}; use {fits!r}")
    return channels, height, width


def _gradient_within_a_gradient() -> bool:
    """Whether this computes a gradient, for a block of clients, that will be differentiated itself, as in FedTTA."""
    transforms = [interpreter.key() for interpreter in retrieve_all_functorch_interpreters()]
    return transforms.count(TransformType.Grad) > 1 and TransformType.Vmap in transforms


def _differentiated(x: Tensor) -> bool:
    """Whether a gradient of what is computed from x is wanted."""
    return x.requires_grad or any(one.key() == TransformType.Grad for one in retrieve_all_functorch_interpreters())


def _in_blocks() -> bool:
    """Whether this runs for a block of clients, and at most one gradient of it is wanted.

    Not so where a mode has to see every layer, as that of ``learn.ghost`` has.
    """
    if any(getattr(mode, "sees_layers", False) for mode in _modes()):
        return False
    transforms = [interpreter.key() for interpreter in retrieve_all_functorch_interpreters()]
    others = [transform for transform in transforms if transform != TransformType.Vmap]
    return len(others) < len(transforms) and others in ([], [TransformType.Grad])


def channels_last(x: Tensor) -> Tensor:
    """The same tensor, laid out with channels last."""
    if _gradient_within_a_gradient():  # for pooling in this layout, second derivatives have no batching rule
        return x
    if x.shape[1] == 1:  # no copy, but strides that say so: PyTorch takes the layout of its results from them
        return x[:, 0, :, :, None].permute(0, 3, 1, 2)
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def convolved(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """An unpadded convolution whose result has channels last: a third less time where clients are computed singly."""
    return F.conv2d(x, channels_last(layer.weight), layer.bias)


_ROOM = 1 << 26  # bytes that patches may take


def _patches(x: Tensor, kernel: Sequence[int]) -> Tensor | None:
    """[K, h, w, B, H, W] what each weight of a kernel [h, w] meets in images [K, B, 1, ., .]; None: too many."""
    if x.shape[2] > 1:
        return None  # several channels
    found = x[:, :, 0].unfold(2, kernel[0], 1).unfold(3, kernel[1], 1).permute(0, 4, 5, 1, 2, 3)
    return found if found.numel() * x.element_size() <= _ROOM else None


def _gradient(g: Tensor, x: Tensor, weight: Tensor, of: Literal[0, 1]) -> Tensor:
    """Of an unpadded convolution in its images (0) or in its weight (1), as PyTorch has it."""
    wanted = [of == 0, of == 1, False]
    made = torch.ops.aten.convolution_backward(g, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted)
    found: Tensor = made[of]
    return found


class _OfEachClient(torch.autograd.Function):
    """An unpadded convolution without bias, for blocks of clients that have weights of their own.

    Images of one channel become patches, and the convolution one product of matrices for each client; all others have
    the clients' channels side by side, and last. PyTorch's own rule leaves them as they lie, which takes twice as long.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, channels_last(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        of_x = _gradient(g, x, weight, 0) if ctx.needs_input_grad[0] else None
        return of_x, _weight_gradient(g, x, weight)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        of_x, of_weight = in_dims
        if of_x is None or of_weight is None:
            return torch.vmap(_OfEachClient.forward, in_dims)(x, weight), 0
        x, weight = x.movedim(of_x, 0), weight.movedim(of_weight, 0)
        clients, filters, _, *kernel = weight.shape
        patches = _patches(x, kernel)
        if patches is not None:
            out = weight.flatten(2) @ patches.flatten(3).flatten(1, 2)
            return out.view(clients, filters, *patches.shape[3:]).transpose(1, 2), 0
        images = x.permute(1, 3, 4, 0, 2).flatten(3).permute(0, 3, 1, 2)
        weights = weight.permute(0, 1, 3, 4, 2).flatten(0, 1).permute(0, 3, 1, 2)
        out = F.conv2d(images, weights, groups=clients)
        return out.view(len(out), clients, filters, *out.shape[2:]), 1


class _WeightGradient(torch.autograd.Function):
    """The gradient of such a convolution in its weight, from that in its result; by the same patches."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _gradient(g, x, weight, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None, int | None], g: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor, int]:
        of_g, of_x, of_weight = in_dims
        shape = weight.shape if of_weight is None else weight.select(of_weight, 0).shape
        patches = None if of_g is None or of_x is None else _patches(x.movedim(of_x, 0), shape[2:])
        if of_g is None or patches is None:
            return torch.vmap(_WeightGradient.forward, in_dims)(g, x, weight), 0
        by_filter = g.movedim(of_g, 0).transpose(1, 2).flatten(2)
        return (by_filter @ patches.flatten(3).flatten(1, 2).mT).view(-1, *shape), 0


_of_each_client: Callable[[Tensor, Tensor], Tensor] = _OfEachClient.apply
_weight_gradient: Callable[[Tensor, Tensor, Tensor], Tensor] = _WeightGradient.apply


def pooled(x: Tensor) -> Tensor:
    """2x2 max pooling. PyTorch does it several times as fast where channels come last, which repays a copy."""
    return F.max_pool2d(channels_last(x), 2)


def pooled_by_slices(x: Tensor) -> Tensor:
    """The same numbers, in less time where no gradient of them is wanted; rows or columns left over are dropped."""
    height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    rows = torch.maximum(x[:, :, 0:height:2], x[:, :, 1:height:2])
    return torch.maximum(rows[..., 0:width:2], rows[..., 1:width:2])


class Logistic(nn.Module):
    """One linear map of the flattened input: logistic (softmax) regression, or linear regression with one output."""

    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(math.prod(input_shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x.flatten(1))
        return scores


class Linear(nn.Module):
    """⟨w, x⟩ in double precision, from w = 0: linear regression, or logistic regression of two classes.

    The least-squares and logistic problems of Malekmohammadi (thesis, ch. 2), which are solved to rounding.
    The first of two classes has the score 0, so that the softmax is the logistic function and w is all there is.
    """

    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        if classes > 2:
            raise ValueError(f"linear predicts a number or one of two classes, not {classes}; use 'logistic'")
        self.outputs = classes
        self.weight = nn.Parameter(torch.zeros(math.prod(input_shape), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scores = x.flatten(1).to(self.weight.dtype) @ self.weight
        return scores[:, None] if self.outputs == 1 else torch.stack([torch.zeros_like(scores), scores], 1)


class MLP(nn.Module):
    """Linear layers with a ReLU after each but the last, on the flattened input.

    ``dropout``: the share of the last hidden units that is dropped in training.
    """

    def __init__(
        self, input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (64,), dropout: float = 0.0
    ) -> None:
        super().__init__()
        widths = [math.prod(input_shape), *hidden, classes]
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(widths)])
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        scores: Tensor = self.layers[-1](self.dropout(x))
        return scores


class Dense(MLP):
    """Client model of ODPFL-HN for feature vectors (P2 App. C): two layers of 500, then dropout of a fifth."""

    def __init__(
        self, input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (500, 500), dropout: float = 0.2
    ) -> None:
        super().__init__(input_shape, classes, hidden, dropout)


def lenet_reads(input_shape: Sequence[int]) -> bool:
    """Are these images that are large enough for LeNet?"""
    return len(input_shape) == 3 and min(input_shape[1:]) >= LeNet.smallest


class SmallCNN(nn.Module):
    """Two padded 3x3 convolutions with pooling and one linear layer: for images too small for LeNet, such as digits."""

    smallest = 4

    def __init__(self, input_shape: Sequence[int], classes: int, widths: tuple[int, int] = (16, 32)) -> None:
        super().__init__()
        channels, height, width = _image(input_shape, "small-cnn", self.smallest)
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.conv2 = nn.Conv2d(widths[0], widths[1], 3, padding=1)
        self.head = nn.Linear(widths[1] * (height // 4) * (width // 4), classes)

    def forward(self, x: Tensor) -> Tensor:
        x = pooled(self.conv1(x)).relu()
        x = pooled(self.conv2(x)).relu()
        scores: Tensor = self.head(x.flatten(1))
        return scores


def side_after_two(side: int) -> int:
    """What two rounds of an unpadded 5x5 convolution and 2x2 pooling leave of an image's side."""
    return ((side - 4) // 2 - 4) // 2


class LeNet(nn.Module):
    """Client model of PeFLL (thesis Table B.1): 5x5 convolutions to 16 and 32 channels, no padding, then 120-84-C.

    FC1 has the table's 800 inputs for 32x32 images and 512 for 28x28 ones.
    """

    smallest = 16
    widths = (16, 32)

    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        channels, height, width = _image(input_shape, "lenet", self.smallest)
        first, second = self.widths
        self.conv1 = nn.Conv2d(channels, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.fc1 = nn.Linear(second * side_after_two(height) * side_after_two(width), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.after_first(convolved(x, self.conv1))

    def after_first(self, x: Tensor) -> Tensor:
        """The rest of the network, from what the first convolution gave."""
        x = self.pool(x).relu()
        return self.after_convolutions(self.pool(convolved(x, self.conv2)).relu())

    def after_convolutions(self, x: Tensor) -> Tensor:
        """The linear layers."""
        x = self.fc2(self.fc1(x.flatten(1)).relu()).relu()
        scores: Tensor = self.fc3(x)
        return scores

    def pool(self, x: Tensor) -> Tensor:
        return pooled(x)


class LeNet5(LeNet):
    """Client model of AdaPeD (P3 §4.1), with LeNet-5's widths: convolutions to 6 and 16 channels, then 120-84-C.

    It has 44,426 parameters on 28x28 images of ten classes.
    """

    widths = (6, 16)

    def forward(self, x: Tensor) -> Tensor:
        if not _in_blocks():
            return super().forward(x)
        x = self.rectified(_of_each_client(x, self.conv1.weight), self.conv1)
        if _differentiated(x):
            x = F.conv2d(x, channels_last(self.conv2.weight))
        else:
            x = _of_each_client(x, self.conv2.weight)
        return self.after_convolutions(self.rectified(x, self.conv2))

    def rectified(self, x: Tensor, layer: nn.Conv2d) -> Tensor:
        """Pooled before the bias is added: the same numbers, a quarter of the additions."""
        assert layer.bias is not None
        return (self.pool(x) + layer.bias[:, None, None]).relu()

    def pool(self, x: Tensor) -> Tensor:
        return pooled(x) if _differentiated(x) else pooled_by_slices(x)


class LeNetEmbedding(LeNet):
    """Embedding network of PeFLL (thesis Table B.2): LeNet with l linear outputs that also sees the label.

    The label enters as C one-hot planes behind the image's channels. ``labels=False`` is the variant for unlabeled
    clients (thesis Table 4.2), which has no such planes.
    """

    def __init__(self, input_shape: Sequence[int], classes: int, *, descriptor: int, labels: bool = True) -> None:
        channels, height, width = _image(input_shape, "lenet-embedding", self.smallest)
        super().__init__((channels + classes if labels else channels, height, width), descriptor)
        self.channels = channels
        self.classes = classes if labels else 0

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if not self.classes:
            return super().forward(x)
        if y is None:
            raise ValueError("this embedding network reads labels: give them, or build it with labels=False")
        # A one-hot plane is 0 or 1 everywhere, and there is no padding, so its convolution is the kernel's sum: the C
        # planes need not be made at all.
        weight = self.conv1.weight
        image = F.conv2d(x, channels_last(weight[:, : self.channels]), self.conv1.bias)
        one_hot = (y[:, None] == torch.arange(self.classes, device=y.device)).to(x.dtype)
        label = one_hot @ weight[:, self.channels :].sum((2, 3)).T
        return self.after_first(image + label[:, :, None, None])


class CNN(nn.Module):
    """Client model of FLowDUP with about 150,000 parameters, so that k = 10,000 is its "15x reduction" (thesis ch. 5).

    The layers are those of McMahan et al. (2017), 5x5 convolutions to 32 and 64 channels and one hidden layer. By
    default the hidden layer's weights number about 98,000, whatever the image's size (width 96 on 28x28, 61 on 32x32).
    """

    smallest = 16

    def __init__(self, input_shape: Sequence[int], classes: int, hidden: int | None = None) -> None:
        super().__init__()
        channels, height, width = _image(input_shape, "cnn", self.smallest)
        features = 64 * side_after_two(height) * side_after_two(width)
        hidden = hidden or max(1, 98_304 // features)
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = pooled(convolved(x, self.conv1)).relu()
        x = pooled(convolved(x, self.conv2)).relu()
        scores: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return scores


class HeConv2d(nn.Conv2d):
    """A convolution without bias that starts as He et al. (2015) propose for ReLU networks."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut. ``groups=0`` means no normalisation; then ``scale`` tames the branch."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        self.conv1 = HeConv2d(inputs, outputs, 3, stride)
        self.norm1 = _norm(groups, outputs)
        self.conv2 = HeConv2d(outputs, outputs, 3)
        self.norm2 = _norm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(HeConv2d(inputs, outputs, 1, stride), _norm(groups, outputs))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        total: Tensor = self.shortcut(x) + self.scale * branch
        return total.relu()


def _norm(groups: int, channels: int) -> nn.Module:
    return nn.GroupNorm(groups, channels) if groups else nn.Identity()


def _stages(widths: Sequence[int], depth: int, groups: int = 0, scale: float = 1.0) -> nn.Sequential:
    """``depth`` residual blocks of each width; every width but the first begins by halving the image."""
    outputs = [width for width in widths for _ in range(depth)]
    pairs = zip([widths[0], *outputs], outputs, strict=False)
    return nn.Sequential(*[ResidualBlock(a, b, 1 if a == b else 2, groups, scale) for a, b in pairs])


class ResNet20(nn.Module):
    """ResNet20 for CIFAR without batch norm (thesis B.1.3, Fig. B.4): 3 stages of 3 blocks, 16-32-64 channels.

    With nothing to normalise them, nine full-size branches raise the activations' mean square about a hundredfold at
    the start. So each branch is multiplied by the constant 1/√9, and it stays of order one. The constant belongs to the
    function and not to the initial values, so it also serves parameters that a hypernetwork makes. ``branch_scale=1``
    leaves it out.
    """

    smallest = 8

    def __init__(self, input_shape: Sequence[int], classes: int, branch_scale: float = 1 / 3) -> None:
        super().__init__()
        channels, _, _ = _image(input_shape, "resnet20", self.smallest)
        self.stem = HeConv2d(channels, 16, 3)
        self.blocks = _stages((16, 32, 64), 3, scale=branch_scale)
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x).relu())
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class ResNet18(nn.Module):
    """ResNet18 (He et al. 2016) with group norm in the place of batch norm; the larger client model of FLowDUP.

    Images of up to 64 pixels a side get the usual small stem, one 3x3 convolution; larger ones the original 7x7
    convolution and pooling.
    """

    smallest = 8

    def __init__(self, input_shape: Sequence[int], classes: int, width: int = 64, groups: int = 32) -> None:
        super().__init__()
        channels, height, image_width = _image(input_shape, "resnet18", self.smallest)
        if groups < 1 or width % groups:
            raise ValueError(f"groups must divide width, got groups={groups} and width={width}")
        self.large = max(height, image_width) > 64
        self.stem = HeConv2d(channels, width, 7, 2) if self.large else HeConv2d(channels, width, 3)
        self.norm = _norm(groups, width)
        self.blocks = _stages((width, 2 * width, 4 * width, 8 * width), 2, groups)
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        if self.large:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        scores: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return scores


class GateLinear(nn.Linear):
    """The input half of an LSTM's gates; the forget gate's bias starts at 1, so that a new cell remembers."""

    def reset_parameters(self) -> None:
        hidden = self.out_features // 4
        nn.init.uniform_(self.weight, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))
        with torch.no_grad():
            self.bias.zero_()
            self.bias[hidden : 2 * hidden] = 1.0


class LSTMLayer(nn.Module):
    """One LSTM layer in linear maps; gates lie in the order input, forget, output, candidate."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.inward = GateLinear(inputs, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, inputs] to the hidden states [batch, length, hidden]."""
        inward: Tensor = self.inward(x)  # all steps in one product; only the recurrent half must wait for its turn
        h = c = torch.zeros_like(inward[:, 0, : self.hidden])
        states = []
        # unbind and split, not slices: the gradient of a slice is a full-size tensor of zeros at every step
        for step in inward.unbind(1):
            gates, candidate = torch.split(step + self.recurrent(h), [3 * self.hidden, self.hidden], dim=1)
            i, f, o = gates.sigmoid().chunk(3, dim=1)
            c = f * c + i * candidate.tanh()
            h = o * c.tanh()
            states.append(h)
        return torch.stack(states, dim=1)


class CharLSTM(nn.Module):
    """Next-character model of LEAF (Caldas et al. 2018), used for Shakespeare in thesis B.1.3.

    Tokens [batch, length] go through an embedding of 8 numbers and two layers of 256 units; the last state gives the
    scores of the next character. ``classes`` is the size of the alphabet, the same for inputs and outputs unless
    ``alphabet`` says otherwise.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        hidden: int = 256,
        layers: int = 2,
        embedding: int = 8,
        alphabet: int | None = None,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise ValueError(f"lstm reads sequences of tokens, shape (length,), but one input has shape {input_shape}")
        self.embedding = nn.Embedding(alphabet or classes, embedding)
        widths = [embedding] + [hidden] * layers
        self.layers = nn.Sequential(*[LSTMLayer(a, b) for a, b in itertools.pairwise(widths)])
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        states = self.layers(self.embedding(x))
        scores: Tensor = self.head(states[:, -1])
        return scores
