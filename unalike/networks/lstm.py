"""An LSTM written out in linear maps, because the fused one has no batching rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


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
    """Next-character model of LEAF (Caldas et al. 2018), used for Shakespeare in T1 B.1.3.

    The last state gives the scores of the next character. ``classes`` is the size of the alphabet, the same for inputs
    and outputs unless ``alphabet`` says otherwise.
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
        return self.head(states[:, -1])
