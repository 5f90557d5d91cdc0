"""Matrix products of tensors with scales, and under every setting of torch's float32 products."""

import contextlib
import math
from fractions import Fraction

import pytest
import torch

from halfulp.kernels import engine, same_bits
from halfulp.mctensor import MCTensor

from ...exact_values import exact

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
DIGITS = {HALF: 11, BRAIN: 8, SINGLE: 24}


def _rows(x):
    values = iter(exact(x.reshape(-1)))
    return [[next(values) for _ in range(x.shape[1])] for _ in range(x.shape[0])]


def _check(a, b, product):
    """|error| <= K 2^-p |a||b| for the p digits of two components, and two smallest subnormals times the scale."""
    bits = 2 * DIGITS[product.dtype] - 2
    smallest = torch.finfo(product.dtype).smallest_normal * torch.finfo(product.dtype).eps
    tiny = 2 * Fraction(smallest) * Fraction(1 if product.scale is None else float(product.scale))
    columns = list(zip(*_rows(b), strict=True))
    for row, found in zip(_rows(a), _rows(product), strict=True):
        for column, value in zip(columns, found, strict=True):
            terms = [x * y for x, y in zip(row, column, strict=True)]
            limit = Fraction(len(terms) + 4, 2**bits) * sum(map(abs, terms)) + tiny
            assert abs(value - sum(terms)) <= limit


@contextlib.contextmanager
def _fewer_bits(how):
    settings = []
    if hasattr(torch.backends.mkldnn, "matmul"):  # older versions of torch have the one for all alone
        settings = [torch.backends, torch.backends.mkldnn, torch.backends.mkldnn.matmul, torch.backends.cuda.matmul]
    before = [setting.fp32_precision for setting in settings]
    try:
        if how == "medium":
            torch.set_float32_matmul_precision("medium")
        else:
            getattr(torch.backends, how).matmul.fp32_precision = {"mkldnn": "bf16", "cuda": "tf32"}[how]
        inside = [setting.fp32_precision for setting in settings]
        yield
        assert [setting.fp32_precision for setting in settings] == inside
    finally:
        torch.set_float32_matmul_precision("highest")
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


@pytest.mark.parametrize("spread", [0, 12, 60])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
def test_scales_near_the_ends_of_their_range(seed, dtype, spread):
    x, y = torch.randn(6, 9, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    x = x * torch.exp2(-spread * torch.rand_like(x))
    for up, down in ((0, 0), (100, 7), (90, 90), (-100, 30), (-60, -50)):
        a, b = (MCTensor.encode(torch.ldexp(v, torch.tensor(k)), 2, dtype, "auto") for v, k in ((x, up), (y, down)))
        if up + down + 10 < 127 + (16 if dtype == HALF else 120):
            _check(a, b, a @ b)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_payloads_at_the_ends_of_their_range(seed, dtype):
    top = 16 if dtype == HALF else 127
    for high, low in ((top - 1, top - 1), (3 - top, 5 - top), (top - 1, 3 - top)):
        scales = 2.0**7, 2.0**-9
        sizes = high + 7, low - 9
        a, b = (
            MCTensor.encode(torch.ldexp(torch.rand(4, 4, dtype=torch.float64), torch.tensor(size)), 2, dtype, scale)
            for size, scale in zip(sizes, scales, strict=True)
        )
        _check(a, b, a @ b)


def test_a_product_too_large_for_every_scale_is_infinite():
    a = MCTensor.encode(torch.full((2, 2), 2.0**130, dtype=torch.float64), 2, HALF)
    assert (a @ a).decode().isinf().all()
    small = MCTensor.encode(torch.full((2, 2), 2.0**-120, dtype=torch.float64), 2, HALF)
    assert not (small @ small).decode().any()


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_infinities_nans_and_zeros_among_the_factors(seed, dtype):
    x, y = torch.randn(5, 7, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    x[1, 2], x[3, 4], y[0, 3] = math.inf, math.nan, -math.inf
    y[:, 0] = 0
    a, b = (MCTensor.encode(v, 2, dtype, 2.0**-3) for v in (x, y))
    found, wanted = (a @ b).decode(), a.decode() @ b.decode()
    special = ~wanted.isfinite()
    assert same_bits(found[special], wanted[special])
    assert torch.allclose(found[~special], wanted[~special], rtol=2.0**-12, atol=2.0**-10)
    nothing = MCTensor.encode(torch.zeros(3, 3, dtype=torch.float64), 2, dtype, 1.0)
    assert not (nothing @ nothing).decode().any()


@pytest.mark.parametrize("how", ["medium", "mkldnn", "cuda"])
@pytest.mark.parametrize(
    ("dtype", "scale"), [(HALF, None), (HALF, "none"), (BRAIN, None), (BRAIN, "auto"), (SINGLE, None)]
)
def test_settings_of_torch_neither_matter_nor_change(seed, how, dtype, scale, needs_torch):
    if how != "medium":
        needs_torch("settings of precision per backend")
    a, b = (MCTensor.encode(torch.randn(8, 8, dtype=torch.float64), 2, dtype, scale) for _ in range(2))
    with _fewer_bits(how):
        _check(a, b, a @ b)
        _check(a, b, torch.bmm(a[None], b[None])[0])


def test_the_default_dtype_and_device_do_not_matter():
    a = MCTensor.encode(torch.eye(3), 2, HALF)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            product = a @ a
    finally:
        torch.set_default_dtype(torch.float32)
    assert product.scale.dtype == torch.float32
    assert torch.equal(product.decode(torch.float32), torch.eye(3))


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
def test_a_stack_is_its_matrices(seed, dtype):
    a, b = (MCTensor.encode(torch.randn(3, 6, 6, dtype=torch.float64), 2, dtype) for _ in range(2))
    for one, x, y in zip(torch.bmm(a, b), a, b, strict=True):
        _check(x, y, one)


@pytest.mark.parametrize("count", [1, 2])
def test_the_reference_has_the_same_bits(seed, count):
    a, b = (MCTensor.encode(torch.exp2(-20 * torch.rand(40, 40, dtype=torch.float64)), count, HALF) for _ in range(2))
    fast = a @ b
    with engine("reference"):
        slow = a @ b
    for x, y in zip((*fast.components, fast.scale), (*slow.components, slow.scale), strict=True):
        assert torch.equal(x, y)
