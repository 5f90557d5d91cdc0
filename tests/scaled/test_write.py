"""Writes into scaled tensors."""

import pytest
import torch

from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor


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
