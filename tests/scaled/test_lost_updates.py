"""Updates in place that a narrow payload does not take are told; those that it takes are not."""

import copy
import warnings

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfulp as hu
from halfulp.kernels import _engine as _engines
from halfulp.scaled import ScaledTensor, unscalify

UPDATES = {
    "AveragedModel": None,
    "lerp_": lambda mean, w: mean.lerp_(w, 0.001),
    "mul_ add_": lambda mean, w: mean.mul_(0.999).add_(w, alpha=0.001),
    "sub_": lambda mean, w: mean.sub_(0.001 * (mean - w)),
    "foreach": lambda mean, w: torch._foreach_lerp_([mean], [w], 0.001),
}


@pytest.fixture(autouse=True)
def _unwarned(monkeypatch):
    """What has been told in this process may be told again."""
    monkeypatch.setattr(_engines, "_notes", type(_engines._notes)())


def _average(update, model, steps=400, start=None):
    """Move averages of a model's weights towards weights a little off; returns start, averages, and what was told."""
    start = model if start is None else start
    with warnings.catch_warnings():  # of what is told when it is made, see tests/optim/test_averages.py
        warnings.filterwarnings("ignore", "AveragedModel keeps its averages")
        averages = (
            AveragedModel(start, multi_avg_fn=get_ema_multi_avg_fn(0.999))
            if update == "AveragedModel"
            else copy.deepcopy(start)
        )
    before = [_values(a) for a in averages.parameters()]
    generator = torch.Generator().manual_seed(0)
    if update == "AveragedModel":
        averages.update_parameters(model)
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for p in model.parameters():
            p.copy_(_values(p) * (1 + 0.02 * torch.randn(p.shape, generator=generator)))
        for _ in range(steps):
            if update == "AveragedModel":
                averages.update_parameters(model)
                continue
            for mean, w in zip(averages.parameters(), model.parameters()):
                UPDATES[update](mean, w.detach())
    moved = [_values(a) - b for a, b in zip(averages.parameters(), before)]
    wanted = [_values(p) - b for p, b in zip(model.parameters(), before)]
    share = sum((m * w).sum() for m, w in zip(moved, wanted)) / sum((w * w).sum() for w in wanted)
    return share.item(), [str(x.message) for x in told]


def _values(x):
    x = x.detach()
    return x.decode(torch.float64) if isinstance(x, ScaledTensor) else x.double()


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("update", UPDATES)
def test_averages_that_stand_still_are_told(update, storage, seed):
    model = hu.scalify(torch.nn.Linear(64, 32, bias=False), storage)
    share, told = _average(update, model)
    if not told:  # in float16 single elements may still move as they should
        assert abs(share / (1 - 0.999**400) - 1) < 0.5
    assert all("keep averages of weights in float32" in text for text in told)
    assert len(told) <= 1


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_every_way_of_averaging_is_told_where_nothing_moves(storage, seed):
    for update in UPDATES if storage == torch.bfloat16 else ("lerp_", "AveragedModel"):
        _engines._notes.clear()
        share, told = _average(update, hu.scalify(torch.nn.Linear(64, 32, bias=False), storage))
        assert abs(share) < 0.5 * (1 - 0.999**400)
        assert told, update


def test_what_the_message_names_moves(seed):
    model = hu.scalify(torch.nn.Linear(16, 8, bias=False))
    for update in ("AveragedModel", "lerp_"):
        share, told = _average(update, model, start=unscalify(copy.deepcopy(model)))
        assert abs(share / (1 - 0.999**400) - 1) < 0.05
        assert not told


def test_large_moves_wide_payloads_and_small_tensors_are_left_alone(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for storage, shape, weight in (
            (torch.float16, (100,), 0.3),
            (torch.float32, (100,), 1e-4),
            (torch.float16, (3,), 1e-4),
        ):
            mean, goal = (
                ScaledTensor.encode(torch.randn(shape), storage),
                ScaledTensor.encode(torch.randn(shape), storage),
            )
            for _ in range(200):
                mean.lerp_(goal, weight)
                goal = goal * 1.01 + 0.01
        x = ScaledTensor.encode(torch.rand(100) + 1)
        for _ in range(200):
            x.mul_(0.99).add_(1e-9)  # a constant that keeps from 0


def test_a_looked_at_update_has_the_same_result_and_leaves_nothing_behind(seed, monkeypatch):
    from halfulp.scaled import _write as _lost_updates

    found = []
    for interval in (1, 10**9):
        monkeypatch.setattr(_lost_updates, "INTERVAL", interval)
        torch.manual_seed(seed)
        mean, goal = (ScaledTensor.encode(torch.randn(100)) for _ in range(2))
        for _ in range(5):
            mean.mul_(0.9).add_(goal, alpha=0.1).lerp_(goal, 0.1).addcdiv_(goal, goal.abs() + 1)
        found.append(mean.decode())
    assert torch.equal(*found)
    del mean, goal
    assert not [key for key, (reference, _) in _lost_updates._updates.items() if reference() is None]
