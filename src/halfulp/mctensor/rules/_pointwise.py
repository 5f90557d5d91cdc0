"""Element-wise functions: those that arithmetic.pointwise has, and those composed of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...arithmetic import MAX_COMPONENTS, pointwise
from ...arithmetic._constants import compute_log, split_into_floats
from ...subclass._derivation import aten, parse_operators
from ...subclass._in_backward import COMPONENTS_GRADIENTS_MODE
from .._derivation import fall_back_to_float64, implements_beyond_exact_float64, prefer_float64, run_in_float64
from .._mctensor import MCTensor, implements, implements_each
from .._result_type import (
    FUNCTIONS_WITH_NONZERO_RESULTS,
    clamp_results_of_outliers,
    convert_operands,
    count_float64_components,
    is_plain_floating,
    result_type,
    run_pointwise_function,
)
from .._write import can_write_directly, check_not_integer, choose_write_type, write_components, write_value


@implements(aten.pow.Tensor_Scalar)
def pow_scalar(x: MCTensor, exponent: Any) -> Tensor:
    """x to a number: a product, a root or a reciprocal where it is one."""
    form = result_type((x,))
    if exponent == 2:
        return run_pointwise_function("mul", x, x)
    if exponent == 1:
        return x.clone()
    if exponent in (0.5, -0.5):
        return x.sqrt() if exponent > 0 else x.rsqrt()
    if exponent == -1:
        return x.reciprocal()
    if form.fits_float64:
        return run_in_float64(aten.pow.Tensor_Scalar, (x, exponent), {})
    return run_pointwise_function("pow", x, exponent, form=form)


implements_beyond_exact_float64(aten.pow.Tensor_Tensor, aten.pow.Scalar)(
    lambda x, y: run_pointwise_function("pow", x, y)
)


def _make_logarithm_rule(base: int) -> Callable:
    """Return the rule of log(x) / log(base)."""

    def log(x: MCTensor) -> Tensor:
        form = result_type((x,))
        # One component more, up to the most, as errors grow.
        logarithm = run_pointwise_function(
            "log", x, form=form._replace(components=min(form.components + 1, MAX_COMPONENTS))
        )
        terms = split_into_floats(compute_log(base), MAX_COMPONENTS)
        number = MCTensor.from_components([torch.scalar_tensor(t, dtype=torch.float64, device=x.device) for t in terms])
        return run_pointwise_function("div", logarithm, number, form=form)

    return log


implements_beyond_exact_float64(aten.log2.default)(_make_logarithm_rule(2))
implements_beyond_exact_float64(aten.log10.default)(_make_logarithm_rule(10))


# What a last bit of the operands may change at all: counted where float64 does not hold these.
for _operator in parse_operators("""
    floor_divide floor_divide.Scalar fmod.Tensor fmod.Scalar remainder.Tensor remainder.Scalar remainder.Scalar_Tensor
    acosh atanh round tan asin acos atan2 median.dim nanmedian.dim kthvalue put copysign.Tensor copysign.Scalar
"""):
    implements_beyond_exact_float64(_operator)(functools.partial(fall_back_to_float64, _operator))
_divide_to_integers = prefer_float64(
    aten.div.Tensor_mode, functools.partial(fall_back_to_float64, aten.div.Tensor_mode), requires_exact=True
)


@implements(aten.nan_to_num.default)
def nan_to_num(x: MCTensor, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Tensor:
    """Replace NaN and infinities by numbers, by default 0 and the ends of the components' range."""
    ends = torch.finfo(x.dtype)
    y = x.masked_fill(x.isnan(), nan or 0.0)
    y = y.masked_fill(x == torch.inf, ends.max if posinf is None else posinf)
    return y.masked_fill(x == -torch.inf, ends.min if neginf is None else neginf)


implements(aten.div.Tensor_mode, aten.div.Scalar_mode)(
    lambda a, b, *, rounding_mode: (
        run_pointwise_function("div", a, b)
        if rounding_mode is None
        else _divide_to_integers(a, b, rounding_mode=rounding_mode)
    )
)
_TENSOR_OVERLOAD_BY_NUMBER_OVERLOAD = {
    **dict.fromkeys((aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other), aten.xlogy.Tensor),
    aten.special_xlog1py.self_scalar: aten.special_xlog1py.default,
    aten.special_xlog1py.other_scalar: aten.special_xlog1py.default,
}


@implements_each(*_TENSOR_OVERLOAD_BY_NUMBER_OVERLOAD)
def run_tensor_overload(operator: OpOverload, *operands: Any) -> Tensor:
    """Run an overload with a number for a tensor, which keeps its digits: torch would round it."""
    device = next(x for x in operands if isinstance(x, Tensor)).device
    return _TENSOR_OVERLOAD_BY_NUMBER_OVERLOAD[operator](
        *(x if isinstance(x, Tensor) else torch.scalar_tensor(x, dtype=torch.float64, device=device) for x in operands)
    )


def _update_in_place(name: str, x: Tensor, *operands: Any, addend: Callable[[], Tensor] | None = None) -> Tensor:
    """Write f(operands) into x; `addend` computes the plain product among them, which may stand for infinity."""
    if not isinstance(x, MCTensor):
        check_not_integer(x)
        return write_value(
            x,
            run_pointwise_function(
                name, *operands, form=result_type(operands)._replace(gradients=COMPONENTS_GRADIENTS_MODE)
            ),
        )
    parts = convert_operands(name, operands, x.dtype, len(x._parts), x.device)
    if x._scale is None and x.dtype != torch.float16 and can_write_directly(x, parts):
        pointwise(name, *parts, components=len(x._parts), dtype=x.dtype, out=x._parts)
        return x
    form = choose_write_type(x)
    result = pointwise(name, *parts, components=form.components, dtype=form.dtype)
    if x._scale is not None:
        result = clamp_results_of_outliers(result, name, operands if addend is None else (addend(),))
    exact = lambda: pointwise(name, *parts, components=1, dtype=torch.float64)[0]  # noqa: E731
    return write_components(x, result, exact, keeps_nonzero=name in FUNCTIONS_WITH_NONZERO_RESULTS)


for _name in ("sqrt", "exp", "log", "log1p", "expm1", "tanh", "asinh", "sigmoid"):
    implements(getattr(aten, _name).default)(lambda x, name=_name: run_pointwise_function(name, x))
for _name in ("sin", "cos"):  # by torch where it can be: expansions have no angles beyond 2^20
    implements_beyond_exact_float64(getattr(aten, _name).default)(lambda x, name=_name: run_pointwise_function(name, x))
implements(aten.mul.Tensor, aten.mul.Scalar)(lambda a, b: run_pointwise_function("mul", a, b))
implements(aten.div.Tensor, aten.div.Scalar)(lambda a, b: run_pointwise_function("div", a, b))
implements(aten.mul_.Tensor, aten.mul_.Scalar)(lambda x, other: _update_in_place("mul", x, x, other))
implements(aten.div_.Tensor, aten.div_.Scalar)(lambda x, other: _update_in_place("div", x, x, other))


def _register_sum(name: str, sign: int) -> Callable[..., Tensor]:
    """Register a + alpha b, or a - alpha b, and the same into a; return the first rule."""
    packet, in_place = getattr(aten, name), getattr(aten, f"{name}_")

    @implements(packet.Tensor, packet.Scalar)
    def add(a: Any, b: Any, alpha: Any = 1) -> Tensor:
        if alpha == 1:
            return run_pointwise_function(name, a, b)
        return run_pointwise_function("addcmul", a, b, sign * alpha, form=result_type((a, b)))

    @implements(in_place.Tensor, in_place.Scalar)
    def add_(x: Tensor, other: Any, alpha: Any = 1) -> Tensor:
        if alpha == 1:
            return _update_in_place(name, x, x, other)
        addend = (lambda: other.double() * alpha) if is_plain_floating(other) else None
        return _update_in_place("addcmul", x, x, other, sign * alpha, addend=addend)

    return add


_register_sum("add", 1)
_subtraction_rule = _register_sum("sub", -1)
implements(aten.rsub.Tensor, aten.rsub.Scalar)(lambda a, b, alpha=1: _subtraction_rule(b, a, alpha))


def _register_multiply_add(name: str, divide: bool) -> None:
    """Register a + value b c, or a + value b / c, and the same into a."""

    @implements(getattr(aten, name).default)
    def accumulate(a: Any, b: Any, c: Any, *, value: Any = 1) -> Tensor:
        form = result_type((a, b, c))
        return run_pointwise_function("addcmul", a, *_find_product_factors(b, c, value, divide, form), form=form)

    @implements(getattr(aten, f"{name}_").default)
    def accumulate_(x: Tensor, b: Any, c: Any, *, value: Any = 1) -> Tensor:
        factors, addend = _find_product_factors(b, c, value, divide, result_type((x, b, c))), None
        if is_plain_floating(b) and is_plain_floating(c):
            addend = lambda: (b.double() / c.double() if divide else b.double() * c.double()) * value  # noqa: E731
        return _update_in_place("addcmul", x, x, *factors, addend=addend)


def _find_product_factors(b: Any, c: Any, value: Any, divide: bool, form: Any) -> tuple[Any, Any]:
    whole = form._replace(gradients=COMPONENTS_GRADIENTS_MODE)
    if (
        form.is_scaled
    ):  # under a scale of its own, a square of 2^-19 beside one of 1 would be the 0 that Adam divides by
        whole = whole._replace(dtype=torch.float64, components=count_float64_components(form), is_scaled=False)
    if divide:
        return run_pointwise_function("div", b, c, form=whole), value
    return (b, c) if value == 1 else (run_pointwise_function("mul", b, c, form=whole), value)


_register_multiply_add("addcmul", divide=False)
_register_multiply_add("addcdiv", divide=True)


@implements(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(a: Any, b: Any, weight: Any) -> Tensor:
    """a + weight (b - a)."""
    form = result_type((a, b, weight))
    difference = run_pointwise_function("sub", b, a, form=form._replace(gradients=COMPONENTS_GRADIENTS_MODE))
    return run_pointwise_function("addcmul", a, difference, weight, form=form)


@implements(aten.lerp_.Scalar, aten.lerp_.Tensor)
def lerp_(x: Tensor, b: Any, weight: Any) -> Tensor:
    """x + weight (b - x), into x."""
    form = result_type((x, b, weight))._replace(gradients=COMPONENTS_GRADIENTS_MODE)
    return _update_in_place("addcmul", x, x, run_pointwise_function("sub", b, x, form=form), weight)


@implements(aten.rsqrt.default)
def rsqrt(x: MCTensor) -> Tensor:
    """1 / sqrt(x)."""
    form = result_type((x,))
    return run_pointwise_function(
        "div",
        1.0,
        run_pointwise_function("sqrt", x, form=form._replace(gradients=COMPONENTS_GRADIENTS_MODE)),
        form=form,
    )


implements(aten.reciprocal.default)(lambda x: run_pointwise_function("div", 1.0, x))
