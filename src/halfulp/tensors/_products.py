"""Matrix products, through arithmetic.matmul."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import arithmetic
from ..arithmetic import Parts
from ..kernels import define_operator
from ._backward import COMPONENTS, rounds
from ._form import Form, evaluate, form_of, made, parts_of
from ._mctensor import MCTensor, wrap
from ._registry import implements
from ._scale import HEADROOM, TOP, magnitude, scale_for, scaled

aten = torch.ops.aten

# float32 carries two float16 components; more need float64.
_SINGLE_BITS = 24


def product(a: Any, b: Any, form: Form) -> Tensor:
    """a @ b, batch dimensions broadcast, as a result of that form."""
    if form.scaled or any(isinstance(x, MCTensor) and x._scale is not None for x in (a, b)):
        return _scaled_product(a, b, form)
    count = 1 if rounds(form.gradients) else form.components
    parts = arithmetic.matmul(parts_of(a, form.device), parts_of(b, form.device), count, form.dtype)
    return parts[0] if rounds(form.gradients) else wrap(parts, None, form.gradients)


def _scaled_product(a: Any, b: Any, form: Form) -> Tensor:
    """Scales are factors: the payloads' product, times both."""
    dtype = torch.float32 if form.components * arithmetic.PRECISION[form.dtype] <= _SINGLE_BITS else torch.float64
    payloads = _payload(a, form.device), _payload(b, form.device)
    scales = [x._scale for x in (a, b) if isinstance(x, MCTensor) and x._scale is not None]
    if form.scaled and dtype == torch.float32 and not rounds(form.gradients) and _are_narrow(payloads):
        flat = [part for parts in payloads for part in parts]
        call = _narrow_product if all(type(part) is Tensor for part in flat) else _narrow_operator
        *parts, scale = call(flat, len(payloads[0]), scales, form.components, form.dtype)
        return wrap(tuple(parts), scale, form.gradients)
    return made(_wide_product(payloads, scales, 1 if form.is_wide else form.components, dtype), form)


def _wide_product(payloads: tuple[Parts, Parts], scales: list[Tensor], count: int, dtype: torch.dtype) -> Parts:
    wide = tuple(part.double() for part in arithmetic.matmul(*payloads, count, dtype))
    for scale in scales:
        wide = tuple(part * scale for part in wide)
    return wide


def _are_narrow(payloads: tuple[Parts, Parts]) -> bool:
    """16-bit components on the CPU, and float32 products are in float32."""
    parts = [part for parts in payloads for part in parts]
    plain = all(p.device.type == "cpu" and p.dtype.itemsize == 2 and p.numel() for p in parts)
    return plain and torch.get_float32_matmul_precision() == "highest"


def _narrow_product(
    flat: list[Tensor], left: int, scales: list[Tensor], components: int, dtype: torch.dtype
) -> list[Tensor]:
    """Components of the product and their scale: a float32 product, cut in two passes where it is finite."""
    payloads = tuple(flat[:left]), tuple(flat[left:])
    product = arithmetic.single_product(*payloads)
    largest = float(torch.linalg.vector_norm(product, math.inf)) if product.numel() else 0.0
    if not 0 < largest < math.inf:
        wide = _wide_product(payloads, scales, 1, torch.float32)
        scale = scale_for(magnitude(wide[0]), dtype)
        return [*scaled(wide, scale, components, dtype), scale]
    factor = math.prod(float(scale) for scale in scales)
    power = math.ldexp(factor, math.frexp(largest)[1] - (TOP[dtype] - HEADROOM))
    power = min(max(power, 2.0**-126), 2.0**127)
    return [*arithmetic.cut(product, factor / power, components, dtype), torch.tensor(power)]


def _narrow_fake(
    flat: list[Tensor], left: int, scales: list[Tensor], components: int, dtype: torch.dtype
) -> list[Tensor]:
    product = torch.matmul(flat[0], flat[left])
    parts = [product.new_empty(product.shape, dtype=dtype) for _ in range(components)]
    return [*parts, product.new_empty((), dtype=torch.float32)]


# The same code for eager calls and for compiled graphs, where it is one operator: the same bits.
_narrow_operator = define_operator(
    "narrow_product(Tensor[] flat, int left, Tensor[] scales, int components, ScalarType dtype) -> Tensor[]",
    _narrow_product,
    _narrow_fake,
)


def _payload(x: Any, device: torch.device) -> Parts:
    return x._parts if isinstance(x, MCTensor) else parts_of(x, device)


def _sum_of(start: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Tensor:
    """beta start + alpha (a @ b)."""
    form = form_of((start, a, b))
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
    """Matrices, one or a batch."""
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise RuntimeError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied")
    return product(a, b, form_of((a, b)))


@implements(aten.mv.default)
def mv(a: Any, b: Any) -> Tensor:
    """A matrix and a vector."""
    return product(a, b.unsqueeze(-1), form_of((a, b))).squeeze(-1)


@implements(aten.dot.default, aten.vdot.default)
def dot(a: Any, b: Any) -> Tensor:
    """Two vectors."""
    if a.shape != b.shape:
        raise RuntimeError(f"dot of vectors of {a.numel()} and {b.numel()} elements")
    return product(a.unsqueeze(0), b.unsqueeze(-1), form_of((a, b))).reshape(())


@implements(aten.addmm.default, aten.baddbmm.default)
def addmm(start: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta start + alpha (a @ b)."""
    return _sum_of(start, a, b, beta, alpha)


@implements(aten.addmv.default)
def addmv(start: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta start + alpha (a @ b), b a vector."""
    return _sum_of(start.unsqueeze(-1), a, b.unsqueeze(-1), beta, alpha).squeeze(-1)


@implements(aten.addbmm.default)
def addbmm(start: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta start + alpha times the sum of a batch's products: one product of the matrices side by side."""
    rows, columns = a.shape[1], b.shape[2]
    return _sum_of(start, a.transpose(0, 1).reshape(rows, -1), b.reshape(-1, columns), beta, alpha)


@implements(aten.addr.default)
def addr(start: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta start + alpha times the outer product."""
    return _sum_of(start, a.unsqueeze(1), b.unsqueeze(0), beta, alpha)
