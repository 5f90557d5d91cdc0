"""Products in float32: the exact product rounded once, forward and backward; torch's own within the order of sums."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from halfulp.arithmetic._float32_products import NAME_BY_PRODUCT_FUNCTION, call_product_in_float32
from halfulp.environment._narrow_products import (
    SIXTEEN_BIT_DTYPES,
    find_natively_multiplied_dtypes,
    force_float32_products,
)
from halfulp.kernels import count_fallbacks, same_bits

from .product_cases import CALLS, Call, lstm

BY_NAME = pytest.mark.parametrize("call", CALLS, ids=[call.name for call in CALLS])
# torch adds rounded products up.
ROUNDED_ON_THE_WAY = ("addbmm", "bilinear")
DTYPES = pytest.mark.parametrize("dtype", SIXTEEN_BIT_DTYPES, ids=["bf16", "fp16"])


@pytest.fixture(autouse=True)
def _seeded(seed):
    torch.manual_seed(seed)


def widened(call: Call, operands: list[Tensor], cotangent: Tensor | None = None) -> list[Tensor]:
    """The product and, with a gradient of it, the operands' gradients."""
    leaves = [x.detach().requires_grad_(cotangent is not None) for x in operands]
    with force_float32_products(*SIXTEEN_BIT_DTYPES):
        out = _through(call, leaves)
    return _results(out, leaves, cotangent)


def plain(call: Call, operands: list[Tensor], cotangent: Tensor | None = None) -> list[Tensor]:
    """The same by torch's kernels of the operands' dtype."""
    leaves = [x.detach().requires_grad_(cotangent is not None) for x in operands]
    return _results(_called(call, leaves), leaves, cotangent)


def _through(call: Call, leaves: list[Tensor]) -> Tensor:
    if call.function in NAME_BY_PRODUCT_FUNCTION:
        return call_product_in_float32(call.function, tuple(leaves), dict(call.kwargs))
    # Written as a user's function: what it calls is widened by the model's mode.
    assert call.name == "einsum"
    return call_product_in_float32(torch.einsum, ("bij,bkj->bik", *leaves), {})


def _called(call: Call, leaves: list[Tensor]) -> Tensor:
    return call.function(*leaves, **call.kwargs)


def _results(out: Tensor, leaves: list[Tensor], cotangent: Tensor | None) -> list[Tensor]:
    if cotangent is None:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance of neighbours of a dtype around x (float64)."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp_min(info.smallest_normal))
    return torch.ldexp(torch.full_like(x, info.eps / 4), exponent)


@BY_NAME
@DTYPES
def test_is_the_exact_product_rounded_once(call, dtype):
    operands = call.operands(dtype)
    cotangent = torch.randn_like(_called(call, [x.float() for x in operands])).to(dtype)
    got = widened(call, operands, cotangent)
    assert all(x.dtype == dtype for x in got)
    if not call.linear:
        # Another algorithm in float64 may sum otherwise: the definition is float32's kernel, rounded once.
        wanted = plain(call, [x.float() for x in operands], cotangent.float())
        assert all(same_bits(a, b.to(dtype)) for a, b in zip(got, wanted))
        return
    exact = plain(call, [x.double() for x in operands], cotangent.double())
    magnitudes = plain(call, [x.double().abs() for x in operands], cotangent.double().abs())
    for mine, value, magnitude in zip(got, exact, magnitudes):
        sums = call.terms * 2.0**-24 * magnitude
        error = (mine.double() - value).abs()
        assert (error <= half_ulp(value.abs() + sums, dtype) + sums).all()


@BY_NAME
@DTYPES
def test_differs_from_torchs_narrow_kernels_by_the_order_of_sums(call, dtype, needs_torch):
    if dtype not in find_natively_multiplied_dtypes() or not call.linear or call.name in ROUNDED_ON_THE_WAY:
        pytest.skip("torch has no kernel of instructions for it here, and its loops round their sums on the way")
    if call.name == "addmv":
        needs_torch("addmv of bfloat16 that rounds once")
    if call.name in ("dot", "vdot"):
        needs_torch("dot of bfloat16 that sums in float32")
    operands = call.operands(dtype)
    mine, theirs = widened(call, operands)[0].double(), plain(call, operands)[0].double()
    sums = call.terms * 2.0**-24 * plain(call, [x.double().abs() for x in operands])[0]
    assert ((mine - theirs).abs() <= 2 * half_ulp(theirs.abs() + sums, dtype) + 2 * sums).all()


@DTYPES
def test_a_recurrent_layer_runs_in_float32_as_a_whole(dtype):
    function, arguments = lstm(dtype)
    wide = [x.float() if isinstance(x, Tensor) else x for x in arguments]
    wide[1], wide[2] = tuple(x.float() for x in wide[1]), [x.float() for x in wide[2]]
    with force_float32_products(dtype):
        got = call_product_in_float32(function, arguments, {})
    assert all(same_bits(a, b.to(dtype)) for a, b in zip(got, function(*wide)))


@DTYPES
def test_special_values_are_those_of_the_plain_product(dtype):
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    rows = torch.tensor(
        [
            [torch.nan, 1.0],
            [torch.inf, 1.0],
            [torch.inf, -torch.inf],
            [0.0, -0.0],
            [largest, largest],
            [tiny / 4, tiny],
        ],
        dtype=dtype,
    )
    columns = torch.eye(2, dtype=dtype)
    with force_float32_products(dtype):
        got = call_product_in_float32(torch.mm, (rows, columns), {})
        far = call_product_in_float32(torch.mm, (rows[4:5], rows[4:5].t()), {})
    wanted = (rows.double() @ columns.double()).to(dtype)
    assert same_bits(got, wanted)
    assert far.isinf().all()


@DTYPES
def test_views_empty_sums_and_scalars(dtype):
    x = torch.randn(8, 12).to(dtype)
    transposed, strided, expanded = x.t(), x[:, ::2], x[:1].expand(6, 12)
    with force_float32_products(dtype):
        for a, b in ((x, transposed), (strided, x[:6]), (expanded, transposed), (x[:, :0], x[:0]), (x[:0], transposed)):
            a = a.detach().requires_grad_()
            got = call_product_in_float32(torch.matmul, (a, b), {})
            assert same_bits(got, (a.float() @ b.float()).to(dtype))
            (gradient,) = torch.autograd.grad(got, a, torch.ones_like(got))
            assert same_bits(gradient, (torch.ones_like(got).float() @ b.float().mT).to(dtype))
        assert call_product_in_float32(torch.dot, (x[0], x[1]), {}).shape == ()


@DTYPES
def test_the_backward_pass_keeps_narrow_operands(dtype):
    """As torch's own: no float32 copy outlives the product."""
    x, w = torch.randn(64, 64).to(dtype), torch.randn(64, 64).to(dtype).requires_grad_()
    copies = []
    widen = Tensor.float

    def counted(x: Tensor) -> Tensor:
        wide = widen(x)
        copies.append(weakref.ref(wide))
        return wide

    with force_float32_products(dtype), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", counted)
        out = call_product_in_float32(torch.mm, (x, w), {})
    gc.collect()
    assert len(copies) == 2
    assert not any(copy() is not None for copy in copies)
    out.sum().backward()
    assert w.grad.dtype == dtype


@DTYPES
def test_an_operand_that_was_written_since_is_an_error(dtype):
    x, w = torch.randn(4, 4).to(dtype), torch.randn(4, 4).to(dtype).requires_grad_()
    with force_float32_products(dtype):
        out = call_product_in_float32(torch.mm, (x, w), {})
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@DTYPES
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own rules for jvp
def test_second_derivatives_and_transforms(dtype):
    x, w = torch.randn(3, 4).to(dtype), torch.randn(4, 2).to(dtype)

    def loss(w):
        return call_product_in_float32(torch.mm, (x, w), {}).float().square().sum()

    def wide_loss(w):
        return (x.float() @ w).square().sum()

    with force_float32_products(dtype):
        w.requires_grad_()
        (first,) = torch.autograd.grad(loss(w), w, create_graph=True)
        (second,) = torch.autograd.grad(first.float().sum(), w)
        by_function = torch.func.grad(loss)(w.detach())
        mapped = torch.func.vmap(lambda row: call_product_in_float32(torch.mv, (w.detach().mT, row), {}))(x)
        _, tangent = torch.func.jvp(
            lambda w: call_product_in_float32(torch.mm, (x, w), {}), (w.detach(),), (w.detach(),)
        )
        plain = call_product_in_float32(torch.mm, (x, w.detach()), {})
    wide = w.detach().float().requires_grad_()
    (wide_first,) = torch.autograd.grad(wide_loss(wide), wide, create_graph=True)
    (wide_second,) = torch.autograd.grad(wide_first.sum(), wide)
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(first.float(), wide_first, **close)
    torch.testing.assert_close(second.float(), wide_second, **close)
    assert same_bits(by_function, first.detach())
    torch.testing.assert_close(mapped, plain, **close)
    assert same_bits(tangent, plain)


def test_other_operands_are_left_to_torch():
    x = torch.randn(3, 3)
    with force_float32_products(torch.float16):
        before = count_fallbacks()
        call_product_in_float32(torch.mm, (x, x), {})
        call_product_in_float32(torch.mm, (x.bfloat16(), x.bfloat16()), {})
        call_product_in_float32(torch.mm, (x.half().to("meta"), x.half().to("meta")), {})
        call_product_in_float32(torch.mm, (x.half(), x.half()), {"out": torch.empty(3, 3, dtype=torch.float16)})
        with pytest.raises(RuntimeError, match="dtype"):
            call_product_in_float32(torch.mm, (x.half(), x), {})
        assert count_fallbacks() == before
        call_product_in_float32(torch.mm, (x.half(), x.half()), {})
        assert (
            count_fallbacks()["float32 products: mm of float16"] == before.get("float32 products: mm of float16", 0) + 1
        )


def test_autocast_decides_the_dtype():
    x, w = torch.randn(3, 5), torch.randn(2, 5, requires_grad=True)
    with force_float32_products(torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        got = call_product_in_float32(torch.nn.functional.linear, (x, w), {})
        kept = call_product_in_float32(torch.mv, (x, x[0]), {})
    assert kept.dtype == torch.float32  # mv is none of those that autocast lowers
    wanted = (x.bfloat16().float() @ w.detach().bfloat16().float().mT).bfloat16()
    assert same_bits(got.detach(), wanted)
    got.sum().backward()
    assert w.grad.dtype == torch.float32
    assert same_bits(w.grad, w.grad.bfloat16().float())
