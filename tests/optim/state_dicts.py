"""Steps of an optimizer, and comparison of state dicts leaf by leaf, for tests."""

import torch

from halfulp.kernels import same_bits


def take_steps(parameters, optimizer, first, count):
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def leaves(value, at=""):
    """Every leaf of nested plain data, by its path."""
    if isinstance(value, dict):
        return {k: v for key, entry in value.items() for k, v in leaves(entry, f"{at}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for key, entry in enumerate(value) for k, v in leaves(entry, f"{at}/{key}").items()}
    return {at: value}


def assert_same(one, two):
    one, two = leaves(one), leaves(two)
    assert one.keys() == two.keys()
    for key, value in one.items():
        same = same_bits(value, two[key]) if isinstance(value, torch.Tensor) else value == two[key]
        assert same, (key, value, two[key])
