"""A payload's digests: one number per chunk, the same from the compiled step, its kernel and NumPy."""

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.kernels import IndexMap
from halfulp.optim.parameters._payload_digests import compute_digests

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
SHAPES = ((), (1,), (3,), (5, 7), (16_384,), (16_385,), (40_001,), (0,))


def _payload(shape, dtype):
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_and_numpy_agree_and_see_one_bit(seed, dtype):
    for shape in SHAPES:
        payload, index_map = _payload(shape, dtype), IndexMap.whole(shape)
        compiled = compute_digests(payload, index_map)
        with hu.kernels.engine("reference"):
            plain = compute_digests(payload, index_map)
        assert compiled.dtype == plain.dtype == np.uint64
        assert (compiled == plain).all()
        assert len(plain) == len(payload.reshape(-1).split(16_384)) if payload.numel() else len(plain) == 0
        for _ in range(5 if payload.numel() else 0):
            other = payload.clone()
            bytes_ = other.reshape(-1).view(torch.uint8)
            place = int(torch.randint(len(bytes_), ()))
            bytes_[place] ^= 1 << int(torch.randint(8, ()))
            changed = compute_digests(other, index_map) != compiled
            assert changed.nonzero()[0].tolist() == [place // payload.element_size() // 16_384]


@pytest.mark.parametrize("change", ["signs", "order", "swap", "shift"])
def test_changes_of_many_elements_do_not_cancel(seed, change):
    payload = torch.randn(4096).bfloat16()
    other = {
        "signs": lambda: -payload,
        "order": lambda: payload.flip(0),
        "swap": lambda: payload.reshape(-1, 2).flip(1).reshape(-1),
        "shift": lambda: payload.roll(4),
    }[change]()
    whole = IndexMap.whole((4096,))
    assert compute_digests(payload, whole) != compute_digests(other, whole)


def test_views_at_any_address_have_the_digests_of_their_copies(seed):
    held = torch.randn(100).bfloat16()
    for begin in range(5):
        view = held[begin : begin + 90]
        whole = IndexMap.whole((90,))
        assert compute_digests(view, whole) == compute_digests(view.clone(), whole)


@pytest.mark.parametrize("update", ["split8", "split", "kahan", "master"])
def test_a_compiled_step_computes_those_of_what_it_writes(seed, update):
    parameters = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((3, 5), (20_000,), (1,))]
    turned = torch.nn.Parameter(torch.randn(6, 4).bfloat16().t())
    optimizer = hu.optim.AdamW([*parameters, turned], weight_update=update, report_interval=2)
    for _ in range(2):
        for parameter in [*parameters, turned]:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        for parameter in [*parameters, turned]:
            plan = optimizer._plans[parameter]
            held = plan.payload_version
            assert (held.digests == compute_digests(plan.payloads[0], plan.index_map)).all()
