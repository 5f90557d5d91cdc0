"""A weight update that is assigned while training is refused where auxiliary tensors of another one would be lost."""

import copy

import pytest
import torch

import halfulp as hu

from ...laws.optim.cases import UPDATES, differing, snapshot

SIZE = 64
COMPENSATED = ("kahan", "kahan-stochastic", "split", "split8", "master")


def _trained(update, half=torch.bfloat16):
    weight = torch.nn.Parameter(torch.randn(SIZE))
    optimizer = hu.optim.AdamW([("weight", weight)], lr=1e-3, weight_update=UPDATES[update], param_dtype=half)
    for _ in range(3):
        _step(weight, optimizer)
    return weight, optimizer


def _step(weight, optimizer):
    weight.grad = torch.randn(SIZE).to(weight.dtype)
    with hu.kernels.engine("reference"):
        optimizer.step()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("before", COMPENSATED)
@pytest.mark.parametrize("after", ["nearest", "stochastic", "components-3"])
def test_another_update_is_refused_before_anything_is_written(seed, before, after, is_copied):
    weight, optimizer = _trained(before)
    if is_copied:
        weight, optimizer = copy.deepcopy((weight, optimizer))
    held, group = snapshot(optimizer), optimizer.param_groups[0]
    mine, group["weight_update"] = group["weight_update"], UPDATES[after]
    with pytest.raises(ValueError, match="to a new optimizer by"):
        _step(weight, optimizer)
    group["weight_update"] = mine
    assert differing(held, snapshot(optimizer)) == []
    _step(weight, optimizer)


@pytest.mark.parametrize(("before", "after"), [("nearest", "kahan"), ("stochastic", "split")])
def test_an_update_may_follow_one_without_auxiliary_tensors(seed, before, after):
    weight, optimizer = _trained(before)
    optimizer.param_groups[0]["weight_update"] = after
    _step(weight, optimizer)
    assert optimizer.state[weight].keys() > {"exp_avg", "exp_avg_sq", "step"}


def test_an_update_that_the_parameter_cannot_have_is_refused_before_anything_is_written(seed):
    weight, optimizer = _trained("kahan", torch.float16)
    before = snapshot(optimizer)
    optimizer.param_groups[0]["weight_update"] = "split"
    with pytest.raises(ValueError, match="use 'kahan'"):
        _step(weight, optimizer)
    assert differing(before, snapshot(optimizer)) == []
