"""Matrix products of tensors with scales, and under every setting of torch's float32 products."""

import contextlib
import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfulp.kernels import engine, same_bits
from halfulp.mctensor import MCTensor
from halfulp.mctensor._convert_model import multicomponent
from halfulp.subclass import strict

from ..exact_values import exact

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


KINDS = {
    "rows": ((7, 5), (3, 5, 4)),
    "columns": ((3, 6, 5), (5, 7)),
    "inner": ((6, 7), (7, 4)),
    "batch": 2 * ((3, 5, 5),),
}
FORMS = [(2, torch.bfloat16), (2, torch.float16), (2, torch.float32), (2, torch.float64), (3, torch.float32)]
ENDS = [2, 2, 6]  # an empty group, and one element behind the last


def by_groups(a: MCTensor, b: MCTensor, kind: str) -> MCTensor:
    """The definition: one product for each group, zeros behind the last."""
    if kind == "batch":
        return torch.stack([x @ y for x, y in zip(a, b)])
    slices = [slice(start, end) for start, end in zip([0, *ENDS], ENDS)]
    if kind == "inner":
        return torch.stack([a[:, at] @ b[at] for at in slices])
    if kind == "rows":
        return torch.cat([*(a[at] @ b[g] for g, at in enumerate(slices)), torch.zeros(1, 4, dtype=a.dtype)])
    return torch.cat([*(a[g] @ b[:, at] for g, at in enumerate(slices)), torch.zeros(6, 1, dtype=a.dtype)], 1)


def grouped(a: MCTensor, b: MCTensor, kind: str) -> MCTensor:
    return F.grouped_mm(a, b, offs=None if kind == "batch" else torch.tensor(ENDS, dtype=torch.int32))


def operands(kind: str, components: int, dtype: torch.dtype) -> list[MCTensor]:
    wide = (torch.randn(shape, dtype=torch.float64) for shape in KINDS[kind])
    made = [MCTensor.encode(x, components, dtype, gradients="components") for x in wide]
    return [x.requires_grad_() for x in made]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("components", "dtype"), FORMS)
def test_each_group_is_its_own_product(kind, components, dtype, seed):
    a, b = operands(kind, components, dtype)
    with strict():
        got = grouped(a, b, kind)
        wanted = by_groups(a, b, kind)
        factor = torch.randn(wanted.shape, dtype=torch.float64).to(dtype)
        ours = torch.autograd.grad((got * factor).sum(), (a, b))
        theirs = torch.autograd.grad((wanted * factor).sum(), (a, b))
    assert got.shape == wanted.shape
    for x, y in zip((got, *ours), (wanted, *theirs)):
        assert float((x - y).detach().abs().max()) <= 2**8 * (torch.finfo(dtype).eps / 2) ** components


def test_plain_operands_keep_the_digits(seed):
    weight = torch.randn(3, 5, 4)
    x = MCTensor.encode(torch.randn(7, 5, dtype=torch.float64), 2, torch.float32)
    assert torch.equal(grouped(x, weight, "rows"), by_groups(x, MCTensor.encode(weight, 2), "rows"))


def test_what_does_not_fit_is_named():
    x, experts = MCTensor.encode(torch.ones(7, 5)), MCTensor.encode(torch.ones(3, 5, 4))
    for offsets in ([2, 1, 6], [2, 3, 8]):
        with pytest.raises(ValueError, match="never decrease, from 0 to 7"):
            F.grouped_mm(x, experts, offs=torch.tensor(offsets, dtype=torch.int32))
    with pytest.raises(ValueError, match="one for each group"):
        F.grouped_mm(x, experts, offs=torch.tensor([2, 7], dtype=torch.int32))
    with pytest.raises(ValueError, match="grouped_mm takes"):
        F.grouped_mm(x, experts)
    compiled = torch.compile(lambda x, w, ends: F.grouped_mm(x, w, offs=ends), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"reads its offsets: call it outside of torch\.compile"):
        compiled(x, experts, torch.tensor(ENDS, dtype=torch.int32))


class Mixture(nn.Module):
    """A layer of four experts, of which each token takes two."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 8, 12) * 0.3)
        self.down = nn.Parameter(torch.randn(4, 12, 8) * 0.3)

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=4).cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(x[order // 2], self.up, offs=ends)
        out = F.grouped_mm(F.silu(hidden), self.down, offs=ends) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // 2, out)


@pytest.mark.parametrize(("components", "dtype", "bound"), [(2, torch.bfloat16, 0.02), (2, torch.float32, 1e-5)])
def test_a_mixture_of_experts_trains(components, dtype, bound, seed):
    start, x = Mixture(), torch.randn(20, 8)
    losses = []
    for model in (multicomponent(copy.deepcopy(start), components, dtype, gradients="components"), start):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] < 2
    assert losses[0] == pytest.approx(losses[1], rel=bound)


SUMS_OF_PRODUCTS = {
    "addmm": (torch.addmm, (3, 2), (3, 4), (4, 2)),
    "addmm of a row": (torch.addmm, (2,), (3, 4), (4, 2)),
    "addmv": (torch.addmv, (3,), (3, 4), (4,)),
    "addr": (torch.addr, (3, 2), (3,), (2,)),
    "baddbmm": (torch.baddbmm, (5, 3, 2), (5, 3, 4), (5, 4, 2)),
    "addbmm": (torch.addbmm, (3, 2), (5, 3, 4), (5, 4, 2)),
}


@pytest.mark.parametrize("gradients", ["first", "components"])
@pytest.mark.parametrize("alpha", [1, -0.7])
@pytest.mark.parametrize("beta", [0, 1, 0.3])
@pytest.mark.parametrize("name", SUMS_OF_PRODUCTS)
def test_factors_of_a_sum_of_products(name, beta, alpha, gradients, seed):
    """By exact rationals; a start that is not finite does not count beside a factor 0."""
    function, *shapes = SUMS_OF_PRODUCTS[name]
    values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    start, a, b = (MCTensor.encode(x, 2, gradients=gradients) / 3 for x in values)
    if beta == 0:
        start = start * math.inf
    found = function(start, a, b, beta=beta, alpha=alpha)
    assert found.gradients == gradients
    exactly = [np.array(exact(x), dtype=object).reshape(x.shape) for x in (a, b)]
    product = np.multiply.outer(*exactly) if name == "addr" else exactly[0] @ exactly[1]
    wanted = Fraction(alpha) * (product.sum(0) if name == "addbmm" else product)
    if beta:
        wanted = wanted + Fraction(beta) * np.array(exact(start), dtype=object).reshape(start.shape)
    worst = max(abs(x - y) for x, y in zip(exact(found), wanted.flatten().tolist()))
    assert worst <= 2.0**-98
