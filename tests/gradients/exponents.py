"""What the tests of the scaler share: exponents set at random, and gradients to compare."""

import random
import warnings

import pytest
import torch
from torch import nn

from halfulp.kernels import same_bits

from .models.architectures import ARCHITECTURES, HF, build

ALL = [*ARCHITECTURES, *(f"hf-{name}" for name in HF)]
WIDTH = 8


def case_of(name, seed):
    with warnings.catch_warnings():
        if name.startswith("hf-"):
            pytest.importorskip("transformers")
            warnings.simplefilter("ignore")  # of transformers, about kernels that are not installed
        return build(name, seed)


def mlp(layers=3, width=WIDTH):
    pairs = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*pairs[:-1])


class Spiked(nn.Module):
    """Passes its input on, and ``spike`` times the gradient back."""

    spike = 1.0

    def forward(self, x):
        return x.detach() + (x - x.detach()) * self.spike


def batch(rows=4, width=WIDTH):
    return torch.randn(rows, width)


def mean_square(y):
    return y.square().mean()


def scramble(scaler, low=-12, high=24):
    """A random exponent for every site, no two alike as long as there are enough, and a random size to follow."""
    scaler._controller.sites.set_reference_binade(random.randint(-12, 12))
    every, numbers = list(scaler._controller.sites.values()), []
    while len(numbers) < len(every):
        numbers += random.sample(range(low, high + 1), high + 1 - low)
    for site, number in zip(every, numbers):
        site.exponent = number


def equalise(scaler, exponent):
    for site in scaler._controller.sites.values():
        site.exponent = exponent


def sites(scaler):
    return {site.key: site.exponent for site in scaler._controller.sites.values()}


def own(scaler):
    """The same without the global one."""
    return {key: exponent for key, exponent in sites(scaler).items() if key != "global"}


def gradients(*models):
    found = {}
    for number, model in enumerate(models):
        for name, p in model.named_parameters():
            if p.grad is not None:
                found[number, name] = p.grad.to_dense().clone()
    return found


def clear(*models):
    for model in models:
        model.zero_grad()


def plainly(seed, run, *models):
    """The gradients of ``run()``'s loss, by plain autograd."""
    clear(*models)
    torch.manual_seed(seed)
    run().backward()
    found = gradients(*models)
    clear(*models)
    return found


def scrambled(seed, scaler, backward, *models):
    """The gradients after ``backward()``, unscaled, under random exponents."""
    torch.manual_seed(seed)
    backward()  # sites exist from here on
    clear(*models)
    scramble(scaler)
    scaler._controller.backward.end_iteration()
    torch.manual_seed(seed)
    backward()
    # torch 2.6 divides complex numbers by real ones with several roundings.
    found = {key: gradient * (1 / scaler.get_scale()) for key, gradient in gradients(*models).items()}
    clear(*models)
    return found


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert same_bits(found[key], gradient), key


def stepped(scaler, model, loss, lr=0.0, infinite=False):
    clear(model)
    scaler.scale(loss()).backward()
    if infinite:
        model[0].weight.grad[0, 0] = torch.inf
    scaler.step(torch.optim.SGD(model.parameters(), lr=lr))
    scaler.update()
    return scaler.last_step.applied
