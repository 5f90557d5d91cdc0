"""Sums and dot products that are rounded once: the same bits in any order, sharding and number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...kernels import define_operator, under_transform
from . import _run as kernels
from ._accumulator import LAYOUTS, WORDS

Dim = int | Sequence[int] | None


def exact_sum(
    x: torch.Tensor, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the sum of x over `dim`, correctly rounded: the number of `dtype` nearest to the exact sum, ties to even.

    Since nothing is rounded before the end, the result does not depend on the order of the elements, on how they are
    spread over processes (`exact_partial`), or on the number of threads, and no cancellation hurts it. Terms are added
    up in a fixed-point accumulator that spans every float (Kulisch); blocks of neighbours are first reduced, without
    an error, by cutting each element at one place: q = (s + x) - s, r = x - q (Rump, Ogita, Oishi).

    A sum beyond the largest number rounds to infinity as one addition does; partial sums cannot overflow. Any NaN, or
    infinities of both signs, give NaN, infinities of one sign that infinity. An exact sum of zero is +0, unless there
    are terms and all of them are -0. The sum of nothing is +0.

    Args:
        x: float16, bfloat16, float32 or float64 tensor, any shape, strides and device; or an MCTensor, whose
            components all count, and whose sum is an MCTensor, each component correctly rounded.
        dim: one dimension or several; None or () for all.
        keepdim: whether those dimensions stay, with size 1.
        dtype: of the result, one of the four; None for x's. float64 sums of float32 keep more of the same exact value.

    Returns:
        The sums. Their gradient is that of torch.sum.

    Raises:
        TypeError: integer, complex or other elements, or such a `dtype`; scaled tensors.
        ValueError: a dimension is given twice.
        IndexError: there is no such dimension.

    >>> x = torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64)
    >>> float(x.sum()), float(exact_sum(x)), float(exact_sum(x.flip(0)))
    (0.0, 1.0, 1.0)
    """
    _check(x, "exact_sum")
    return _differentiable_sum(x, _dims(x.dim(), dim), keepdim, _result_dtype(dtype, x.dtype))


def exact_dot(
    a: torch.Tensor, b: torch.Tensor, dim: Dim = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the sum of a * b over `dim`, correctly rounded; as `exact_sum`, and no product is rounded either.

    Products are exact also where a float's would overflow or underflow: 2^-1074 * 2^-1074 counts.

    Args:
        a: float16, bfloat16, float32 or float64 tensor, or an MCTensor, as in `exact_sum`.
        b: the same; shapes broadcast, and of two dtypes the products are of what torch promotes them to.
        dim: of the broadcast shape, one or several; None or () for all.
        keepdim: whether those dimensions stay, with size 1.
        dtype: of the result; None for the promoted dtype.

    Returns:
        The dot products. The gradient of each operand is the other one times the result's gradient, in one rounding
        to the wider dtype and one to its own.

    Raises:
        TypeError, ValueError, IndexError: as `exact_sum`.
        RuntimeError: the shapes do not broadcast.

    >>> a = torch.tensor([1e200, 1.0, 1e200], dtype=torch.float64)
    >>> b = torch.tensor([1e200, 1e-300, -1e200], dtype=torch.float64)
    >>> float(exact_dot(a, b))
    1e-300
    """
    a, b = _pair(a, b, "exact_dot")
    return _differentiable_dot(a, b, _dims(a.dim(), dim), keepdim, _result_dtype(dtype, a.dtype))


def exact_partial(a: torch.Tensor, b: torch.Tensor | None = None, dim: Dim = None) -> torch.Tensor:
    """Return the unrounded sum as integers; partial sums of shards are merged by adding them.

    Adding is exact, so that any split, in any order, gives the bits of `exact_sum` or `exact_dot` on the whole:

        words = exact_partial(shard)
        torch.distributed.all_reduce(words)
        total = exact_round(words, torch.float32)

    Args:
        a: as in `exact_sum`.
        b: None for the sum of a; else the partial is of `exact_dot(a, b)`.
        dim: what is summed over.

    Returns:
        int64, the shape of the sums and one more dimension of 138: 134 limbs of 32 bits, from 2^-2176 up, the last one
        with the sign; then the counts of +inf, of -inf (a NaN counts as both), of -0 and of all terms. The same
        for any order of the elements. Up to 2^31 partials may be added, and 2^63 terms. It has no gradient.

    Raises:
        TypeError, ValueError, IndexError: as `exact_sum`.

    >>> x = torch.randn(1000)
    >>> words = exact_partial(x[:300]) + exact_partial(x[300:])
    >>> bool(exact_round(words, torch.float32) == exact_sum(x))
    True
    """
    if b is None:
        _check(a, "exact_partial")
    else:
        a, b = _pair(a, b, "exact_partial")
    words: torch.Tensor = _partial(a.detach(), None if b is None else b.detach(), _dims(a.dim(), dim))
    return words


def exact_round(partial: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the correctly rounded sum that a partial, or any sum of partials, stands for.

    Args:
        partial: int64 (..., 138), from `exact_partial`.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        (...), of `dtype`.

    Raises:
        TypeError: not int64, or such a `dtype`.
        ValueError: the last dimension is not 138.

    >>> float(exact_round(exact_partial(torch.tensor([0.1, 0.2], dtype=torch.float64))))
    0.30000000000000004
    """
    if not isinstance(partial, torch.Tensor) or partial.dtype != torch.int64:
        raise TypeError(f"exact_round takes the int64 tensor that exact_partial returns, got {_kind(partial)}")
    if partial.dim() == 0 or partial.shape[-1] != WORDS:
        raise ValueError(
            f"exact_round takes partials of {WORDS} words along the last dimension, got shape {tuple(partial.shape)}: "
            "merge partials by adding them, not by concatenating"
        )
    rounded: torch.Tensor = _round(partial, _result_dtype(dtype, torch.float64))
    return rounded


def _kind(x: object) -> str:
    return f"a {x.dtype} tensor" if isinstance(x, torch.Tensor) else type(x).__name__


def _check(x: torch.Tensor, name: str) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in LAYOUTS:
        raise TypeError(
            f"{name} takes float16, bfloat16, float32 and float64 tensors, got {_kind(x)}: integers need no rounding "
            "(torch.sum), complex numbers are summed as view_as_real(x)"
        )
    # Of tensor classes of higher layers only sums of components have room for a result that is not rounded again.
    if hasattr(type(x), "decode") and not hasattr(type(x), "components"):
        raise TypeError(
            f"{name} takes plain tensors and MCTensors, got {type(x).__name__}: give x.decode(torch.float64), which is "
            "exact for payload times scale"
        )


def _result_dtype(dtype: torch.dtype | None, default: torch.dtype) -> torch.dtype:
    dtype = default if dtype is None else dtype
    if dtype not in LAYOUTS:
        raise TypeError(f"an exact sum is rounded to float16, bfloat16, float32 or float64, got {dtype}")
    return dtype


def _pair(a: torch.Tensor, b: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both operands with one dtype and shape."""
    _check(a, name)
    _check(b, name)
    common = torch.promote_types(a.dtype, b.dtype)
    a, b = torch.broadcast_tensors(a.to(common), b.to(common))
    return a, b


def _dims(count: int, dim: Dim) -> list[int]:
    """Return the dimensions that are summed, from 0 up; none of a tensor without dimensions."""
    given = [] if dim is None else list(dim) if isinstance(dim, list | tuple) else [dim]
    if not all(isinstance(d, int) for d in given):
        raise TypeError(f"dim={dim!r}: give a whole number, several in a tuple, or None for all dimensions")
    for d in given:
        if not -max(count, 1) <= d < max(count, 1):
            raise IndexError(f"dimension {d} of a tensor with {count}: allowed are {-count} to {count - 1}")
    found = sorted(d % max(count, 1) for d in given)
    if len(set(found)) < len(found):
        raise ValueError(f"dim {tuple(given)} names a dimension twice: give each one once")
    return (found or list(range(count))) if count else []


def _rows(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """(rows, columns) with neighbours in memory along the columns, which are summed."""
    kept = [d for d in range(x.dim()) if d not in dims]
    shape = (math.prod(x.shape[d] for d in kept), math.prod(x.shape[d] for d in dims))
    flat = x.permute([*kept, *dims]).reshape(shape)
    return flat.contiguous() if shape[1] > 1 and flat.stride(1) != 1 else flat


def _shape(shape: torch.Size, dims: list[int], keepdim: bool = False) -> list[int]:
    return [1 if d in dims else size for d, size in enumerate(shape) if keepdim or d not in dims]


def _run_sum(x: torch.Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
    return kernels.summed(_rows(x, dim), None, dtype).view(_shape(x.shape, dim, keepdim))


def _run_dot(a: torch.Tensor, b: torch.Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
    return kernels.summed(_rows(a, dim), _rows(b, dim), dtype).view(_shape(a.shape, dim, keepdim))


def _run_partial(a: torch.Tensor, b: torch.Tensor | None, dim: list[int]) -> torch.Tensor:
    words = kernels.partial(_rows(a, dim), None if b is None else _rows(b, dim))
    return words.view([*_shape(a.shape, dim), WORDS])


def _run_round(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return kernels.rounded(partial.reshape(-1, WORDS), dtype).view(partial.shape[:-1])


_sum = define_operator(
    "exact_sum(Tensor x, int[] dim, bool keepdim, ScalarType dtype) -> Tensor",
    _run_sum,
    lambda x, dim, keepdim, dtype: x.new_empty(_shape(x.shape, dim, keepdim), dtype=dtype),
)
_dot = define_operator(
    "exact_dot(Tensor a, Tensor b, int[] dim, bool keepdim, ScalarType dtype) -> Tensor",
    _run_dot,
    lambda a, b, dim, keepdim, dtype: a.new_empty(_shape(a.shape, dim, keepdim), dtype=dtype),
)
_partial = define_operator(
    "exact_partial(Tensor a, Tensor? b, int[] dim) -> Tensor",
    _run_partial,
    lambda a, b, dim: a.new_empty([*_shape(a.shape, dim), WORDS], dtype=torch.int64),
)
_round = define_operator(
    "exact_round(Tensor words, ScalarType dtype) -> Tensor",
    _run_round,
    lambda words, dtype: words.new_empty(words.shape[:-1], dtype=dtype),
)


def _expand_gradient(gradient: torch.Tensor, shape: torch.Size, dims: list[int], keepdim: bool) -> torch.Tensor:
    """Return a sum's gradient in the shape of the summed tensor."""
    if not keepdim:
        gradient = gradient.reshape(_shape(shape, dims, True))
    return gradient.expand(shape)


def _remember_sum(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.dims, ctx.keepdim, ctx.result_dtype = inputs
    ctx.shape, ctx.dtype = x.shape, x.dtype


def _sum_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _expand_gradient(gradient.to(ctx.dtype), ctx.shape, ctx.dims, ctx.keepdim), None, None, None


def _remember_dot(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, ctx.dims, ctx.keepdim, ctx.result_dtype = inputs
    ctx.save_for_backward(a, b)
    if hasattr(ctx, "save_for_forward"):  # not the context of an operator
        ctx.save_for_forward(a, b)


def _dot_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    a, b = ctx.saved_tensors
    gradient = _expand_gradient(gradient, a.shape, ctx.dims, ctx.keepdim)
    for_a = (gradient * b).to(a.dtype) if ctx.needs_input_grad[0] else None
    for_b = (gradient * a).to(b.dtype) if ctx.needs_input_grad[1] else None
    return for_a, for_b, None, None, None


torch.library.register_autograd("halfulp::exact_sum", _sum_backward, setup_context=_remember_sum)
torch.library.register_autograd("halfulp::exact_dot", _dot_backward, setup_context=_remember_dot)


def _front(x: torch.Tensor, place: int | None, size: int) -> torch.Tensor:
    """Return a batch's dimension first, made where there is none."""
    return x.expand(size, *x.shape) if place is None else x.movedim(place, 0)


def _sum_of_batch(
    info: Any, places: Any, x: torch.Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, int]:
    return _sum(_front(x, places[0], info.batch_size), [d + 1 for d in dim], keepdim, dtype), 0


def _dot_of_batch(
    info: Any, places: Any, a: torch.Tensor, b: torch.Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, int]:
    a, b = (_front(x, place, info.batch_size) for x, place in zip((a, b), places))
    return _dot(a, b, [d + 1 for d in dim], keepdim, dtype), 0


torch.library.register_vmap("halfulp::exact_sum", _sum_of_batch)
torch.library.register_vmap("halfulp::exact_dot", _dot_of_batch)


class _Sum(torch.autograd.Function):
    """The sum as an autograd Function, for transforms of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
        total: torch.Tensor = _sum(x, dims, keepdim, dtype)
        return total

    setup_context = staticmethod(_remember_sum)
    backward = staticmethod(_sum_backward)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *rest: object) -> torch.Tensor:
        """Return the sum of the tangent, rounded once."""
        return _differentiable_sum(tangent, ctx.dims, ctx.keepdim, ctx.result_dtype)


class _Dot(torch.autograd.Function):
    """The dot product as an autograd Function, for transforms of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
        total: torch.Tensor = _dot(a, b, dims, keepdim, dtype)
        return total

    setup_context = staticmethod(_remember_dot)
    backward = staticmethod(_dot_backward)

    @staticmethod
    def jvp(ctx: Any, for_a: torch.Tensor | None, for_b: torch.Tensor | None, *rest: object) -> torch.Tensor:
        """Return the products of each tangent with the other operand, each sum of them rounded once."""
        a, b = ctx.saved_tensors
        parts = [
            _differentiable_dot(tangent, other, ctx.dims, ctx.keepdim, ctx.result_dtype)
            for tangent, other in ((for_a, b), (for_b, a))
            if tangent is not None
        ]
        return sum(parts[1:], parts[0])


def _differentiable_sum(x: torch.Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
    summed: Callable[..., torch.Tensor] = _Sum.apply if under_transform() else _sum
    return summed(x, dims, keepdim, dtype)


def _differentiable_dot(
    a: torch.Tensor, b: torch.Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype
) -> torch.Tensor:
    summed: Callable[..., torch.Tensor] = _Dot.apply if under_transform() else _dot
    return summed(a, b, dims, keepdim, dtype)
