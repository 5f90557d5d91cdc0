"""Matrix products, through arithmetic.matmul."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .... import arithmetic
from ....arithmetic import Parts
from ....kernels import define_operator, torch_operators
from ....subclass._in_backward import COMPONENTS, gives_plain_gradient
from ..._derivation import beyond_float64
from ..._mctensor import MCTensor, wrap
from ..._registry import implements
from ..._result_type import ResultType, are_alike, evaluate, float64_count, make_result, parts_of, result_type
from ..._scale import HEADROOM, TOP, divide_by_scale, magnitude, scale_for

aten = torch_operators("aten")

# float32 carries a product to two float16 components; more need float64.
_SINGLE_COMPONENTS = 2


def product(a: Any, b: Any, form: ResultType) -> Tensor:
    """Return a @ b as a result of a type; batch dimensions are broadcast."""
    if form.scaled or _has_scale(a) or _has_scale(b):
        return _scaled_product(a, b, form)
    count = 1 if gives_plain_gradient(form.gradients, form.has_gradient) else form.components
    parts = arithmetic.matmul(parts_of(a, form.device), parts_of(b, form.device), count, form.dtype)
    return parts[0] if gives_plain_gradient(form.gradients, form.has_gradient) else wrap(parts, None, form.gradients)


def _has_scale(x: Any) -> bool:
    return isinstance(x, MCTensor) and x._scale is not None


def _scaled_product(a: Any, b: Any, form: ResultType) -> Tensor:
    """Scales are factors: the payloads' product, times both."""
    payloads = _payload(a, form.device), _payload(b, form.device)
    scales = [x._scale for x in (a, b) if _has_scale(x)]
    if (
        form.scaled
        and form.components <= _SINGLE_COMPONENTS
        and not gives_plain_gradient(form.gradients, form.has_gradient)
        and _are_half(*payloads)
    ):
        flat = [*payloads[0], *payloads[1]]
        call = _half_product if all(type(part) is Tensor for part in flat) else _half_operator
        *parts, scale = call(flat, len(payloads[0]), scales, form.components)
        return wrap(tuple(parts), scale, form.gradients)
    return make_result(_wide_product(payloads, scales, 1 if form.fits_float64 else form.components), form)


def _wide_product(payloads: tuple[Parts, Parts], scales: list[Tensor], count: int) -> Parts:
    wide = arithmetic.matmul(*payloads, count, torch.float64)
    for scale in scales:
        wide = tuple(part * scale for part in wide)
    return wide


def _are_half(a: Parts, b: Parts) -> bool:
    """float16 on the CPU, whose products float32 holds without overflow or underflow; matrices or as many of them."""
    x, y = a[0], b[0]
    half = x.dtype == y.dtype == torch.float16 and x.device.type == "cpu"
    return half and x.dim() <= 3 and x.shape[:-2] == y.shape[:-2] and bool(x.numel() and y.numel())


def _half_product(flat: list[Tensor], left: int, scales: list[Tensor], components: int) -> list[Tensor]:
    """float16 components of a product and their scale: a float32 product, cut in two passes where it is finite."""
    payloads = tuple(flat[:left]), tuple(flat[left:])
    with arithmetic.single_product(*payloads) as product:
        largest = arithmetic.largest_magnitude(product)
        if 0 < largest < math.inf:
            factor = math.prod([float(scale) for scale in scales])
            power = max(math.ldexp(factor, math.frexp(largest)[1] - (TOP[torch.float16] - HEADROOM)), 2.0**-126)
            if power <= 2.0**127:
                parts = arithmetic.half_components(product, factor / power, components)
                return [*parts, torch.tensor(power, dtype=torch.float32, device="cpu")]
    wide = _wide_product(payloads, scales, 1)
    scale = scale_for(magnitude(wide[0]), torch.float16)
    return [*divide_by_scale(wide, scale, components, torch.float16), scale]


def _half_fake(flat: list[Tensor], left: int, scales: list[Tensor], components: int) -> list[Tensor]:
    product = torch.matmul(flat[0], flat[left])
    parts = [product.new_empty(product.shape) for _ in range(components)]
    return [*parts, product.new_empty((), dtype=torch.float32)]


# The same code for eager calls and for compiled graphs, where it is one operator: the same bits.
_half_operator = define_operator(
    "half_product(Tensor[] flat, int left, Tensor[] scales, int components) -> Tensor[]", _half_product, _half_fake
)


def _payload(x: Any, device: torch.device) -> Parts:
    return x._parts if isinstance(x, MCTensor) else parts_of(x, device)


def _add_product(start: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Tensor:
    """beta start + alpha (a @ b)."""
    form = result_type((start, a, b))
    whole = form._replace(gradients=COMPONENTS)
    result = product(a, b, form if beta == 0 and alpha == 1 else whole)
    if alpha != 1:
        result = evaluate("mul", result, alpha, form=form if beta == 0 else whole)
    if beta == 0:
        return result
    return (
        evaluate("add", result, start, form=form) if beta == 1 else evaluate("addcmul", result, start, beta, form=form)
    )


@implements(aten.mm.default, aten.bmm.default)
def mm(a: Any, b: Any) -> Tensor:
    """Return the product of two matrices, or of two batches of matrices."""
    left, right = a.shape, b.shape
    if left[-1] != right[-2] or left[:-2] != right[:-2]:
        raise RuntimeError(f"shapes {tuple(left)} and {tuple(right)} cannot be multiplied")
    if are_alike(a, b):
        return wrap(arithmetic.matmul(a._parts, b._parts, len(a._parts), a._parts[0].dtype), None, a._gradients)
    return product(a, b, result_type((a, b)))


@implements(aten.mv.default)
def mv(a: Any, b: Any) -> Tensor:
    """A matrix and a vector."""
    return product(a, b.unsqueeze(-1), result_type((a, b))).squeeze(-1)


@implements(aten.dot.default, aten.vdot.default)
def dot(a: Any, b: Any) -> Tensor:
    """Two vectors."""
    if a.shape != b.shape:
        raise RuntimeError(f"dot of vectors of {a.numel()} and {b.numel()} elements")
    return product(a.unsqueeze(0), b.unsqueeze(-1), result_type((a, b))).reshape(())


@implements(aten.addmm.default, aten.baddbmm.default)
def addmm(start: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta start + alpha (a @ b)."""
    return _add_product(start, a, b, beta, alpha)


@implements(aten.addmv.default)
def addmv(start: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta start + alpha (a @ b), b a vector."""
    return _add_product(start.unsqueeze(-1), a, b.unsqueeze(-1), beta, alpha).squeeze(-1)


@implements(aten.addbmm.default)
def addbmm(start: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta start + alpha times the sum of a batch's products: one product of the matrices side by side."""
    rows, columns = a.shape[1], b.shape[2]
    return _add_product(start, a.transpose(0, 1).reshape(rows, -1), b.reshape(-1, columns), beta, alpha)


@implements(aten.addr.default)
def addr(start: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta start + alpha times the outer product."""
    return _add_product(start, a.unsqueeze(1), b.unsqueeze(0), beta, alpha)


@beyond_float64(aten._trilinear.default)
def trilinear(a: Any, b: Any, c: Any, *dims: Any) -> Tensor:
    """The product of three tensors that broadcast after new dimensions, summed over some: behind torch.bilinear."""
    operands = []
    for x, new in zip((a, b, c), dims):
        for at in sorted(new):
            x = x.unsqueeze(at)
        operands.append(x)
    first, second, third = operands
    return (first * second * third).sum(dims[3])


@implements(aten._grouped_mm.default)
def grouped_mm(
    a: Any, b: Any, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """A product for each group of rows or columns; those behind the last group become 0."""
    if bias is not None:
        raise NotImplementedError("grouped_mm takes no bias yet, as in torch: add it to the result")
    form = result_type((a, b), out_dtype)
    left, right = parts_of(a, form.device), parts_of(b, form.device)
    if form.scaled:
        return make_result(arithmetic.grouped_matmul(left, right, offs, float64_count(form), torch.float64), form)
    count = 1 if gives_plain_gradient(form.gradients, form.has_gradient) else form.components
    return make_result(arithmetic.grouped_matmul(left, right, offs, count, form.dtype), form)
