"""A model is a function of one flat vector."""

import pytest
import torch
from torch import nn

from unalike import Model


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def test_the_function_equals_the_module() -> None:
    module = net()
    model = Model(module)
    theta = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    x = torch.randn(4, 3)
    assert model.size == 3 * 5 + 5 + 5 * 2 + 2
    assert torch.equal(model(theta, x), module(x))
    assert torch.equal(model.flatten(model.tensors(theta)), theta)
    assert torch.equal(theta[model.span("2.bias")], module[2].bias.detach())
    assert torch.equal(model.module(theta)(x), module(x))


def test_init_is_a_function_of_the_seed_and_leaves_the_global_generator_alone() -> None:
    model = Model(net())
    before = torch.random.get_rng_state()
    assert torch.equal(model.init(1), model.init(1))
    assert not torch.equal(model.init(1), model.init(2))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_constant_buffers_are_part_of_the_function() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("factor", torch.tensor(3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factor

    model = Model(Scaled())
    theta = model.init(0)
    assert model.size == 6
    assert torch.allclose(model(theta, torch.zeros(1, 2))[0], 3 * theta[4:])


def test_batch_norm_is_refused_and_the_way_out_is_named() -> None:
    with pytest.raises(ValueError, match=r"BatchNorm1d \(1\) keeps running statistics.*GroupNorm.*resnet18"):
        Model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    Model(nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2)))


def test_modules_without_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameters"):
        Model(nn.Flatten())
