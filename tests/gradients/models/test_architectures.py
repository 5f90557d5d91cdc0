"""Every case of the zoo is alive, and the same twice: what is shown on it is shown on all of it."""

import warnings

import pytest
import torch

from halfulp.kernels import same_bits

from .architectures import ARCHITECTURES, HF, build

NAMES = [*ARCHITECTURES, *(f"hf-{name}" for name in HF)]


def gradients(case):
    case.model.zero_grad()
    loss = case.run()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in case.model.named_parameters() if p.requires_grad}


def made(name, seed):
    with warnings.catch_warnings():
        if name.startswith("hf-"):
            pytest.importorskip("transformers")
            warnings.simplefilter("ignore")  # of transformers, about kernels that are not installed
        return build(name, seed)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_reached(name, seed):
    case = made(name, seed)
    assert all(p.all() for p in case.model.parameters())
    assert case.model.training
    assert case.family
    loss, reached = gradients(case)
    assert loss.isfinite()
    assert loss.shape == ()
    for parameter, gradient in reached.items():
        assert gradient is not None, parameter
        assert gradient.isfinite().all(), parameter
        assert gradient.any(), parameter


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_and_the_same_model_give_the_same_bits(name, seed):
    case = made(name, seed)
    loss, first = gradients(case)
    first = {key: gradient.clone() for key, gradient in first.items()}
    for again in (case, made(name, seed)):
        repeated, second = gradients(again)
        assert torch.equal(repeated, loss)
        for key, gradient in first.items():
            assert same_bits(second[key], gradient), key


def test_the_zoo_is_large():
    assert len(ARCHITECTURES) >= 34
    assert len(HF) == 12
