"""Writes into scaled tensors, and which updates are lost."""

import copy
import warnings

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfulp as hu
from halfulp.kernels import _engine as _engines
from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor, unscalify


def test_a_whole_tensor_takes_the_scale_and_its_views_see_it(seed):
    x = ScaledTensor.encode(torch.randn(4, 3), torch.float16)
    view = x.view(12)
    new = torch.randn(4, 3) * 1e-12
    x.copy_(new)
    assert torch.allclose(x.decode(), new, rtol=1e-3)
    assert same_bits(view.decode(), x.decode().view(12))


def test_a_part_keeps_the_scale_of_the_rest(seed):
    x = ScaledTensor.encode(torch.randn(4, 3), torch.float16)
    before = x.decode()
    scale = x.scale.clone()
    x[1] = torch.tensor([1.0, 2.0, 3.0])
    assert same_bits(x.scale, scale)
    assert x[1].tolist() == [1.0, 2.0, 3.0]
    assert same_bits(x.decode()[2:], before[2:])


def test_a_value_too_large_for_a_part_is_refused_and_nothing_is_written():
    x = ScaledTensor.encode(torch.tensor([1e-6, 2e-6]), torch.float16)
    before = x.decode()
    with pytest.raises(ValueError, match=r"out of torch.float16's range under the scale .* it is as it was"):
        x[0] = 1e6
    assert same_bits(x.decode(), before)


def test_zeros_take_the_scale_of_what_is_written_first():
    x = torch.zeros_like(ScaledTensor.encode(torch.ones(3), torch.float16))
    x[1] = 3e7
    assert x.decode()[[0, 2]].tolist() == [0.0, 0.0]
    assert abs(x[1].item() / 3e7 - 1) < 1e-3


def test_a_plain_tensor_takes_the_value(seed):
    x = ScaledTensor.encode(torch.randn(3), torch.float16)
    plain = torch.zeros(3)
    plain.copy_(x)
    assert same_bits(plain, x.decode())


def test_sharing_stops_at_what_is_no_view(seed):
    x = ScaledTensor.encode(torch.randn(3), torch.float16)
    before = x.decode()
    for other in (x.clone(), x.relu(), x.abs(), x[[0, 1, 2]], x * 1, x + 0):
        other.copy_(torch.full((3,), 2.0**40))
        assert same_bits(x.decode(), before)


def test_shapes_that_do_not_fit_and_memory_that_is_shared_are_refused():
    x = ScaledTensor.encode(torch.ones(3))
    with pytest.raises(RuntimeError, match="shape"):
        x.copy_(torch.ones(2, 3))
    with pytest.raises(NotImplementedError, match="resize_"):
        x.resize_(5)


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16], ids=str)
def test_a_value_beyond_float32_under_the_scale_of_a_view_is_refused(storage, seed):
    x = ScaledTensor.encode(torch.full((4,), 1e-20), storage)
    start = x.decode()
    for value in (torch.tensor([1e25, 1.0]), torch.tensor([1.0, 1e22]), 1e25):
        with pytest.raises(ValueError, match="out of"):
            x[:2] = value
        assert torch.equal(x.decode(), start)
    x[:2] = 0.0
    assert torch.equal(x.decode()[:2], torch.zeros(2))


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_numbers_that_would_all_be_zero_are_refused_and_nothing_is_written(storage, seed):
    x = ScaledTensor.encode(torch.randn(8) + 3.0, storage)
    start, tiny = x.decode(), 2.0**-140 if storage == torch.bfloat16 else 1e-9
    for write in (
        lambda: x.__setitem__(0, tiny),
        lambda: x[:4].normal_(std=tiny),
        lambda: x[2:].copy_(torch.full((6,), -tiny)),
    ):
        with pytest.raises(ValueError, match=r"is 0 in .* under the scale .* a smaller scale first"):
            write()
        assert same_bits(x.decode(), start)
    x[:2] = torch.tensor([tiny, 2.0])  # rounded beside others, as everywhere
    x[2:4] = 0.0
    assert x.tolist()[:4] == [0.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize("write", ["copy_", "index", "add_"])
def test_a_negative_bit_of_what_is_written_is_resolved(write):
    given = torch.complex(torch.zeros(4), torch.tensor([1.0, -2.0, 4.0, 0.5])).conj().imag
    assert given.is_neg()
    x = ScaledTensor.encode(torch.zeros(2, 4), torch.float32)
    if write == "index":
        x[1] = given
    else:
        getattr(x, write)(given)
    assert x.decode()[1].tolist() == [-1.0, 2.0, -4.0, -0.5]


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
    monkeypatch.setattr(_engines, "_fallback_counts", type(_engines._fallback_counts)())


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("update", UPDATES)
def test_averages_that_stand_still_are_told(update, storage, seed):
    model = hu.scalify(torch.nn.Linear(64, 32, bias=False), storage)
    share, told = _average(update, model)
    if not told:  # in float16 single elements may still move as they should
        assert abs(share / (1 - 0.999**400) - 1) < 0.5
    assert all("keep averages of weights in float32" in text for text in told)
    assert len(told) <= 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_every_way_of_averaging_is_told_where_nothing_moves(storage, seed):
    for update in UPDATES if storage == torch.bfloat16 else ("lerp_", "AveragedModel"):
        _engines._fallback_counts.clear()
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
        monkeypatch.setattr(_lost_updates, "SAMPLE_INTERVAL", interval)
        torch.manual_seed(seed)
        mean, goal = (ScaledTensor.encode(torch.randn(100)) for _ in range(2))
        for _ in range(5):
            mean.mul_(0.9).add_(goal, alpha=0.1).lerp_(goal, 0.1).addcdiv_(goal, goal.abs() + 1)
        found.append(mean.decode())
    assert torch.equal(*found)
    del mean, goal
    assert not [key for key, (reference, _) in _lost_updates._updates_by_scale.items() if reference() is None]
