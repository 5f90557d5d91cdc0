"""Whatever draws: other seeds give other bits, the same seed the same, and a copy what the original draws next."""

import copy
import pickle

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.kernels import same_bits


def quantized(seed):
    return hu.quantize(torch.linspace(0.1, 1, 512), "e4m3fn", hu.Stochastic(seed=seed))


def blocks(seed):
    return hu.quantize(torch.linspace(0.1, 1, 512), "mxfp4", hu.Stochastic(seed=seed))


def through_bfloat16(seed):
    return hu.quantize(torch.linspace(0.1, 1, 512), torch.bfloat16, hu.Stochastic(seed=seed))


def stepped(weight_update, **options):
    def run(seed):
        weight = nn.Parameter(torch.linspace(0.1, 1, 512).bfloat16())
        opt = hu.optim.AdamW([weight], lr=1e-3, weight_update=weight_update, seed=seed, **options)
        for _ in range(3):
            weight.grad = torch.linspace(-1, 1, 512).bfloat16()
            opt.step()
        state = [x for x in opt.state[weight].values() if isinstance(x, torch.Tensor)]
        return torch.cat([x.detach().double().flatten() for x in [weight, *state]])

    return run


DRAWING = {
    "quantize": quantized,
    "quantize in blocks": blocks,
    "quantize to bfloat16": through_bfloat16,
    **{name: stepped(name) for name in ("stochastic", "split8", "kahan", "kahan-stochastic", "feedback")},
    "8-bit states": stepped("split", state_dtype="8bit"),
    "bfloat16 states": stepped("split"),
}


@pytest.mark.parametrize("what", DRAWING)
def test_other_seeds_give_other_bits_and_the_same_seed_the_same(what):
    draw = DRAWING[what]
    found = [draw(seed) for seed in (0, 1, 2, 2**40, 2**40 + 1)]
    for i, one in enumerate(found):
        assert same_bits(one, draw((0, 1, 2, 2**40, 2**40 + 1)[i]))
        assert not any(torch.equal(one, other) for other in found[:i])


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda pair: pickle.loads(pickle.dumps(pair))}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("weight_update", ["stochastic", "split8", "kahan", "kahan-stochastic"])
def test_a_copy_of_an_optimizer_draws_what_the_original_draws_next(weight_update, how):
    weight = nn.Parameter(torch.linspace(0.1, 1, 512).bfloat16())
    opt = hu.optim.AdamW([("w", weight)], lr=1e-3, weight_update=weight_update, seed=7)

    def step(optimizer, parameter):
        parameter.grad = torch.linspace(-1, 1, 512).bfloat16()
        optimizer.step()
        return parameter.detach().clone()

    first = step(opt, weight)
    other_weight, other = COPIES[how]((weight, opt))
    assert other.param_groups[0]["params"][0] is other_weight
    second = step(opt, weight)
    assert same_bits(step(other, other_weight), second)
    assert not torch.equal(first, second)
    assert not torch.equal(step(opt, weight) - second, second - first)
