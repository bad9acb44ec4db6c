"""Personal adapters: a small vision transformer is pretrained and frozen, and clients who turn their paper adapt it.

    python examples/adapters.py             # digits
    python examples/adapters.py femnist 100 # 62 characters by writer, 100 rounds

One half of the people pretrain it, upright. The others are clients of a federation, each turned by an angle of its own;
a quarter of them arrive after training.
"""

import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unalike as ua

ADAPTER = "lora:r=4,targets=all"


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Squares of an image as tokens; attention among them is written out, so that a block of clients can compute it."""

    def __init__(self, input_shape: Sequence[int], classes: int, white: float, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        channels, side, _ = input_shape
        self.white = white  # the brightest pixel
        patch = 4 if side > 16 else 2
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x / self.white - 0.5).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def people(data: str) -> tuple[Tensor, Tensor, Tensor]:
    """All rows, and whose they are."""
    division = {"partition": "natural"} if data == "femnist" else {"clients": 80}
    found = ua.data.load(data, unseen=0, seed=0, **division)
    # a client's rows lie together, those for training first
    sizes = found.train.size + found.test.size
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    rows = torch.cat([torch.arange(start, start + size) for start, size in zip(found.train.start, sizes, strict=True)])
    return found.train.x[rows], found.train.y[rows], owner


def pretrain(network: nn.Module, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """Ordinary training, on rows in one place."""
    steps = epochs * (len(x) // 64)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(network(x[rows].float()), y[rows]).backward()
        optimizer.step()
        schedule.step()
    return network.eval()


METHODS = ("local", "fedavg", "fedavg-finetune", "flowdup", "pefll-unlabeled")


def main(data: str = "digits", rounds: int = 30, seed: int = 0, out: str | None = None) -> ua.Comparison:
    x, y, owner = people(data)
    first = owner % 2 == 0
    torch.manual_seed(0)
    network = ViT(x.shape[1:], int(y.max()) + 1, float(x.max()))
    pretrain(network, x[first], y[first], epochs=5 if data == "femnist" else 20)
    print(
        f"{sum(one.numel() for one in network.parameters()):,} parameters, of which an adapter has "
        f"{ua.Model(network, trainable=ADAPTER).size:,}"
    )
    clients = {"x": x[~first], "y": y[~first], "client": owner[~first]}
    compared = ua.compare(
        *METHODS,
        data=clients,
        model=network,
        adapter=ADAPTER,
        rotate=list(range(-90, 91, 15)),
        normalize=False,
        unseen=0.25,
        rounds=rounds,
        eval_every=rounds,
        seed=seed,
        out=out,
    )
    print(compared)
    return compared


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:4]), *sys.argv[4:5])
