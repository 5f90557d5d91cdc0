"""A weight update that is assigned while training takes over the weight that the one before it held."""

import copy

import pytest
import torch

import halfulp as hu

from ...laws.optim.cases import UPDATES, differing, narrow_updates, snapshot

SIZE = 64
CARRIED = [name for name in narrow_updates() if not UPDATES[name].feeds_back]


def _trained(update):
    weight = torch.nn.Parameter(torch.randn(SIZE))
    optimizer = hu.optim.AdamW([("weight", weight)], lr=1e-3, weight_update=UPDATES[update], param_dtype=torch.bfloat16)
    for _ in range(3):
        _step(weight, optimizer)
    return weight, optimizer


def _step(weight, optimizer):
    weight.grad = torch.randn(SIZE).bfloat16()
    with hu.kernels.engine("reference"):
        optimizer.step()


def _weight(weight, optimizer):
    return optimizer.float32_state_dict(torch.nn.ParameterDict({"weight": weight}))["weight"].clone()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("after", CARRIED)
@pytest.mark.parametrize("before", CARRIED)
def test_the_weight_stays_as_far_as_the_new_update_holds_it(seed, before, after):
    weight, optimizer = _trained(before)
    held = _weight(weight, optimizer)
    optimizer.param_groups[0].update(weight_update=UPDATES[after], lr=0.0)
    assert torch.equal(_weight(weight, optimizer), held), "a look before the next step"
    _step(weight, optimizer)
    plan = optimizer._plans[weight]
    parts = [torch.zeros_like(part) for part in plan.parts]
    plan.spec.update.fill(plan.spec.store, parts, held)
    assert torch.equal(_weight(weight, optimizer), plan.spec.update.read(plan.spec.store, parts))
    names = {name for name, _ in UPDATES[after].auxiliary_tensors(plan.spec.store)}
    assert optimizer.state[weight].keys() == {"exp_avg", "exp_avg_sq", "step", *names}


@pytest.mark.parametrize("saved_before_the_step", [True, False])
@pytest.mark.parametrize("after", ["split", "kahan", "master", "nearest"])
def test_the_file_of_it_is_loaded(seed, after, saved_before_the_step):
    weight, optimizer = _trained("split8")
    optimizer.param_groups[0]["weight_update"] = after
    if not saved_before_the_step:
        _step(weight, optimizer)
    file = copy.deepcopy((weight.detach(), optimizer.state_dict()))
    other = torch.nn.Parameter(file[0])
    resumed = hu.optim.AdamW([("weight", other)], lr=1e-3, weight_update=after)
    resumed.load_state_dict(file[1])
    gradient = torch.randn(SIZE).bfloat16()
    for one, its in ((weight, optimizer), (other, resumed)):
        one.grad = gradient
        with hu.kernels.engine("reference"):
            its.step()
    assert differing(snapshot(optimizer), snapshot(resumed)) == []


def test_an_update_that_the_parameter_cannot_have_is_refused_before_anything_is_written(seed):
    weight = torch.nn.Parameter(torch.randn(SIZE).half())
    optimizer = hu.optim.AdamW([weight], weight_update="kahan")
    weight.grad = torch.randn(SIZE).half()
    with hu.kernels.engine("reference"):
        optimizer.step()
        before = snapshot(optimizer)
        optimizer.param_groups[0]["weight_update"] = "split"
        with pytest.raises(ValueError, match="use 'kahan'"):
            optimizer.step()
    assert differing(before, snapshot(optimizer)) == []
