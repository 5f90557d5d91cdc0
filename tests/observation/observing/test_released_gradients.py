"""Runs whose gradients are released inside of backward: the record of a step after it, and the same bits."""

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.observation.scripts._watch import ScriptWatch

STEPS = 5


def _model():
    torch.manual_seed(0)
    tied = nn.Linear(16, 16, bias=False)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), tied, nn.Tanh(), tied, nn.Linear(16, 4)).bfloat16()


def _made(parameters):
    return hu.AdamW(parameters, lr=1e-2, weight_update="stochastic")


def _loss(model, step):
    generator = torch.Generator().manual_seed(10 * step)
    return model(torch.randn(4, 8, generator=generator).bfloat16()).float().square().sum()


def _run(releases, watched=True):
    model = _model()
    released = hu.optim.release_gradients(model, _made) if releases else None
    optimizer = released.optimizer if released else _made(model.named_parameters())
    ema = hu.optim.EMA(model, 0.9, optimizer=optimizer)
    seen = hu.observe(model, released or optimizer, interval=2, average=ema)
    if watched:
        seen.start()
    for step in range(STEPS):
        if released:
            released.backward(_loss(model, step))
        else:
            _loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        ema.update()
    return model, seen.stop()


def _plain(seen):
    """What was counted, but for the order in which tensors were first seen."""
    record = seen.to_dict()["record"]
    assert not record["unseen"]
    found = {key: value for key, value in record.items() if key != "tensors"}
    tensors = [{key: value for key, value in one.items() if key != "order"} for one in record["tensors"]]
    return found, sorted(tensors, key=lambda one: (one["role"], one["name"]))


def test_the_record_and_the_bits_are_those_of_a_step_after_backward():
    (plain, before), (model, after) = _run(False), _run(True)
    unwatched, _ = _run(True, watched=False)
    assert after.record.sampled_steps == [0, 2, 4]
    assert after.record.parameters["2.weight"].update.seen
    assert _plain(before) == _plain(after)
    for one, other, third in zip(*(one.parameters() for one in (plain, model, unwatched)), strict=True):
        assert same_bits(one.detach(), other.detach())
        assert same_bits(one.detach(), third.detach())


def test_a_script_is_observed():
    with ScriptWatch(interval=2) as watch:
        _run(True, watched=False)
    (training,) = watch.trainings
    assert training.model == "Sequential"
    assert len(training) == STEPS - 1
    assert training.summary.record.parameters["2.weight"].update.seen


def test_other_hooks_are_refused_before_anything_is_written():
    model = _model()
    released = hu.optim.release_gradients(model, _made)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    handle = released.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match=r"where hooks of step\(\) would see no step"):
        released.backward(_loss(model, 0))
    assert all(same_bits(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
    handle.remove()
    released.backward(_loss(model, 0))
