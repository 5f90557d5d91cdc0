"""Matrix products through arithmetic.matmul, and convolutions as products over windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import arithmetic
from ...arithmetic import Parts
from ...kernels import define_operator, torch_operators
from ...subclass._in_backward import COMPONENTS, gives_plain_gradient
from .._derivation import beyond_float64
from .._encode import HEADROOM, TOP, divide_by_scale, magnitude, scale_for
from .._mctensor import MCTensor, implements, wrap
from .._result_type import ResultType, are_alike, evaluate, float64_count, make_result, parts_of, result_type

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
    """Multiply payloads, and the result by both scales."""
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
    """Multiply a matrix by a vector."""
    return product(a, b.unsqueeze(-1), result_type((a, b))).squeeze(-1)


@implements(aten.dot.default, aten.vdot.default)
def dot(a: Any, b: Any) -> Tensor:
    """Multiply two vectors."""
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
    """Return the product of three broadcasting tensors, summed over some dimensions: behind torch.bilinear."""
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
    """Return a product for each group of rows or columns; those behind the last group become 0."""
    if bias is not None:
        raise NotImplementedError("grouped_mm takes no bias yet, as in torch: add it to the result")
    form = result_type((a, b), out_dtype)
    left, right = parts_of(a, form.device), parts_of(b, form.device)
    if form.scaled:
        return make_result(arithmetic.grouped_matmul(left, right, offs, float64_count(form), torch.float64), form)
    count = 1 if gives_plain_gradient(form.gradients, form.has_gradient) else form.components
    return make_result(arithmetic.grouped_matmul(left, right, offs, count, form.dtype), form)


def repeat_sizes(value: Sequence[int], count: int) -> list[int]:
    """Return one number per dimension, of one for all or one for each."""
    return list(value) * (count // len(value))


def _pad(x: Any, padding: Sequence[int]) -> Any:
    frame = [p for pad in reversed(padding) for p in (pad, pad)]
    return aten.constant_pad_nd.default(x, frame, 0) if any(frame) else x


def _columns(x: Any, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int) -> Any:
    """Return all windows as matrices: (batch, groups, channels of a group x taps, positions)."""
    seen = window_views(x.contiguous(), kernel, stride, dilation)
    batch, channels, spatial = x.shape[0], x.shape[1], len(kernel)
    places = seen.shape[2 : 2 + spatial]
    order = [0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial)]
    return seen.permute(order).reshape(batch, groups, channels // groups * math.prod(kernel), places.numel())


def _forward(x: Any, weight: Any, setup: dict) -> Any:
    groups, kernel, stride, dilation = (setup[k] for k in ("groups", "kernel", "stride", "dilation"))
    columns = _columns(_pad(x, setup["padding"]), kernel, stride, dilation, groups)
    matrix = weight.reshape(groups, weight.shape[0] // groups, -1)
    out = torch.matmul(matrix, columns)
    sizes = _output_sizes(x.shape[2:], setup)
    return out.reshape([x.shape[0], weight.shape[0], *sizes])


def _output_sizes(sizes: Sequence[int], setup: dict) -> list[int]:
    every = zip(sizes, setup["kernel"], setup["stride"], setup["dilation"], setup["padding"])
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, d, p in every]


def _input_gradient(gradient: Any, weight: Any, sizes: Sequence[int], setup: dict) -> Any:
    """Return the gradient of the input, of these sizes; this is the transposed convolution, too."""
    groups, padding = setup["groups"], setup["padding"]
    batch, channels, places = gradient.shape[0], weight.shape[1] * groups, gradient.shape[2:]
    matrix = weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2)
    columns = torch.matmul(matrix, gradient.reshape(batch, groups, weight.shape[0] // groups, -1))
    grown = [n + 2 * p for n, p in zip(sizes, padding)]
    into = fold_windows(columns, [batch, channels, *grown], places, setup)
    return into[(slice(None), slice(None), *(slice(p, p + n) for n, p in zip(sizes, padding)))]


def _weight_gradient(gradient: Any, x: Any, shape: Sequence[int], setup: dict) -> Any:
    """Return the gradient of the weight: one product over positions and batch together."""
    groups = setup["groups"]
    columns = _columns(_pad(x, setup["padding"]), setup["kernel"], setup["stride"], setup["dilation"], groups)
    rows = gradient.reshape(x.shape[0], groups, shape[0] // groups, -1)
    left = rows.permute(1, 2, 0, 3).reshape(groups, shape[0] // groups, -1)
    right = columns.permute(1, 0, 3, 2).reshape(groups, -1, columns.shape[2])
    return torch.matmul(left, right).reshape(list(shape))


def _setup(weight: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> dict:
    spatial = weight.dim() - 2
    given = {"stride": stride, "padding": padding, "dilation": dilation}
    return {k: repeat_sizes(v, spatial) for k, v in given.items()} | {
        "kernel": list(weight.shape[2:]),
        "groups": groups,
    }


@beyond_float64(aten.convolution.default, aten.convolution_overrideable.default)
def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Tensor:
    """Return a convolution, or a transposed one, with its bias."""
    setup = _setup(weight, stride, padding, dilation, groups)
    if transposed:
        every = zip(x.shape[2:], setup["kernel"], setup["stride"], setup["dilation"], setup["padding"])
        extra = repeat_sizes(output_padding, weight.dim() - 2)
        sizes = [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for (n, k, s, d, p), e in zip(every, extra)]
        out = _input_gradient(x, weight, sizes, setup)
    else:
        out = _forward(x, weight, setup)
    return out if bias is None else out + bias.reshape([-1] + [1] * (weight.dim() - 2))


@beyond_float64(aten.convolution_backward.default, aten.convolution_backward_overrideable.default)
def convolution_backward(
    gradient: Any,
    x: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias, as far as they are wanted."""
    setup = _setup(weight, stride, padding, dilation, groups)
    to_input, to_weight, to_bias = output_mask
    spatial = list(range(2, weight.dim()))
    if transposed:
        first = _forward(gradient, weight, setup) if to_input else None
        second = _weight_gradient(x, gradient, weight.shape, setup) if to_weight else None
    else:
        first = _input_gradient(gradient, weight, x.shape[2:], setup) if to_input else None
        second = _weight_gradient(gradient, x, weight.shape, setup) if to_weight else None
    return first, second, gradient.sum([0, *spatial]) if to_bias else None


def window_views(x: Any, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Any:
    """Return all windows over the last dimensions as a view: (..., out..., kernel...)."""
    spatial = len(kernel)
    lead, sizes = x.shape[:-spatial], x.shape[-spatial:]
    steps, leads = x.stride()[-spatial:], x.stride()[:-spatial]
    counts = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(sizes, kernel, stride, dilation)]
    if min(counts) < 1:
        raise RuntimeError(f"a kernel of {tuple(kernel)} is larger than the padded input of {tuple(sizes)}")
    strides = [*leads, *(a * s for a, s in zip(steps, stride)), *(a * d for a, d in zip(steps, dilation))]
    return x.as_strided([*lead, *counts, *kernel], strides, x.storage_offset())


def fold_windows(columns: Any, size: Sequence[int], places: Sequence[int], setup: dict) -> Any:
    """Sum windows' values (batch, channels x taps, positions) where they overlap: one strided sum per tap."""
    kernel, stride, dilation = setup["kernel"], setup["stride"], setup["dilation"]
    into = columns.new_zeros(list(size))
    columns = columns.reshape([size[0], size[1], math.prod(kernel), *places])
    for tap in range(math.prod(kernel)):
        at = torch.unravel_index(torch.tensor(tap, dtype=torch.int64, device="cpu"), tuple(kernel))
        reach = tuple(
            slice(int(a) * d, int(a) * d + s * (n - 1) + 1, s) for a, d, s, n in zip(at, dilation, stride, places)
        )
        into[(slice(None), slice(None), *reach)] += columns[:, :, tap]
    return into
