"""Averages of narrow parameters, of every kind: what follows float32's, and what is lost and told."""

import copy
import warnings

import pytest
import torch
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)

import halfulp as hu
from halfulp.kernels import _engine as _engines
from halfulp.scaled import ScaledTensor, unscalify

STEPS, DECAY = 300, 0.999
# Where an exponential average arrives of the way to where the weights are.
WAY = 1 - DECAY**STEPS
EMA = {
    "avg_fn": lambda: {"avg_fn": get_ema_avg_fn(DECAY)},
    "multi_avg_fn": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)},
}
MEANS = {
    "mean": lambda: {},
    "swa_avg_fn": lambda: {"avg_fn": get_swa_avg_fn()},
    "swa_multi_avg_fn": lambda: {"multi_avg_fn": get_swa_multi_avg_fn()},
}
BY_HAND = {
    "lerp_": lambda mean, w: mean.lerp_(w, 1 - DECAY),
    "mul_ add_": lambda mean, w: mean.mul_(DECAY).add_(w, alpha=1 - DECAY),
    "sub_": lambda mean, w: mean.sub_((1 - DECAY) * (mean - w)),
    "copy_": lambda mean, w: mean.copy_(DECAY * mean + (1 - DECAY) * w),
    "foreach": lambda mean, w: torch._foreach_lerp_([mean], [w], 1 - DECAY),
}
NARROW = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _untold(monkeypatch):
    """What has been told in this process may be told again."""
    monkeypatch.setattr(_engines, "_fallback_counts", type(_engines._fallback_counts)())


def stepped(dtype):
    """A model of narrow parameters that an optimizer of hu.optim has stepped."""
    model = torch.nn.Linear(32, 32, bias=False)
    optimizer = hu.optim.AdamW(model.parameters(), lr=1e-3, param_dtype=dtype)
    model(torch.randn(4, 32, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


@torch.no_grad()
def moved(model):
    """Weights a little off."""
    other = copy.deepcopy(model)
    for p in other.parameters():
        p.copy_(p * (1 + 0.05 * torch.randn(p.shape, dtype=p.dtype)))
    return other


def values(x):
    x = x.detach()
    return x.decode(torch.float64) if isinstance(x, ScaledTensor) else x.double()


def share(start, end, mean):
    """How far along the way an average has come."""
    way = values(end.weight) - values(start.weight)
    return float(((values(mean) - values(start.weight)) * way).sum() / (way * way).sum())


def averaged(averages, start, end, steps=STEPS):
    averages.update_parameters(start)
    for _ in range(steps):
        averages.update_parameters(end)
    return share(start, end, averages.module.weight)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("kind", [*EMA, *MEANS])
def test_averaged_models_of_narrow_parameters_lose_and_are_told(kind, dtype, seed):
    model, _ = stepped(dtype)
    with pytest.warns(RuntimeWarning, match=rf"AveragedModel keeps its averages in {dtype}.*halfulp.optim.EMA\(model"):
        averages = AveragedModel(model, **(EMA | MEANS)[kind]())
    found = averaged(averages, model, moved(model))
    if dtype == torch.bfloat16:
        wanted = WAY if kind in EMA else STEPS / (STEPS + 1)
        assert abs(found / wanted - 1) > 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AveragedModel(model)  # once is enough


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("kind", ["avg_fn", "swa_avg_fn", "halfulp.optim.EMA"])
def test_what_the_warning_names_follows(kind, dtype, seed):
    model, optimizer = stepped(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        end = moved(model)
        if kind == "halfulp.optim.EMA":
            ema, start = hu.optim.EMA(model, DECAY, optimizer=optimizer), copy.deepcopy(model)
            with torch.no_grad():
                model.weight.copy_(end.weight)
            for _ in range(STEPS):
                ema.update()
            found = share(start, end, ema.float32_state_dict()["weight"])
        else:
            wide = AveragedModel(copy.deepcopy(model).float(), **(EMA | MEANS)[kind]())
            found = averaged(wide, model, end)
    assert abs(found / (STEPS / (STEPS + 1) if kind in MEANS else WAY) - 1) < 0.02


@pytest.mark.parametrize("kind", BY_HAND)
def test_averages_by_hand_into_bfloat16_are_lost_and_into_float32_are_not(kind, seed):
    """Plain tensors are torch's alone: nobody can tell here."""
    model, _ = stepped(torch.bfloat16)
    end = moved(model)
    narrow, wide = model.weight.detach().clone(), model.weight.detach().float()
    for _ in range(STEPS):
        BY_HAND[kind](narrow, end.weight.detach())
        BY_HAND[kind](wide, end.weight.detach().float())
    assert share(model, end, narrow) < 0.5 * WAY
    assert abs(share(model, end, wide) / WAY - 1) < 0.02


@pytest.mark.parametrize("kind", [*EMA, *MEANS])
def test_averaged_models_of_scaled_parameters_are_told_and_follow_in_float32(kind, seed):
    model = hu.scalify(torch.nn.Linear(32, 32, bias=False))
    with pytest.warns(RuntimeWarning, match=r"averages in torch.float16.*unscalify\(copy.deepcopy\(model\)\)"):
        AveragedModel(model, **(EMA | MEANS)[kind]())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        averages = AveragedModel(unscalify(copy.deepcopy(model)), **(EMA | MEANS)[kind]())
        found = averaged(averages, model, moved(model), 50)
    assert abs(found / (50 / 51 if kind in MEANS else 1 - DECAY**50) - 1) < 0.02


def test_wide_models_and_several_components_are_not_told(seed):
    stepped(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AveragedModel(torch.nn.Linear(3, 2))
        AveragedModel(hu.scalify(torch.nn.Linear(3, 2), torch.float32))
        AveragedModel(hu.multicomponent(torch.nn.Linear(3, 2), 2, torch.bfloat16))
