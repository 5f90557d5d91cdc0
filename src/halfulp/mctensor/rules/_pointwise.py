"""Element-wise functions: those that arithmetic.pointwise has, and those composed of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...arithmetic import MOST, pointwise
from ...arithmetic._constants import compute_log, compute_pi, split_into_floats
from ...kernels import torch_operators
from ...subclass._in_backward import COMPONENTS
from .._derivation import implements_beyond_exact_float64, implements_beyond_float64, run_in_float64
from .._mctensor import MCTensor, implements, implements_each
from .._result_type import (
    SUM_FUNCTION_NAMES,
    ResultType,
    convert_operands,
    is_plain,
    limit_large_elements,
    make_result,
    result_type,
    run_function,
    to_components,
)
from .._write import can_write_directly, check_takes_fractions, choose_computing_type, write_components, write_value
from ._comparison import compare_by_value, is_nan, select_elements

aten = torch_operators("aten")


_split_constant = functools.lru_cache(64)(split_into_floats)


def make_constant(value: Any, like: Tensor) -> MCTensor:
    """Return a number of any precision as a 0-d MCTensor of four float64."""
    terms = _split_constant(value, MOST)
    return MCTensor.from_components([torch.scalar_tensor(x, dtype=torch.float64, device=like.device) for x in terms])


def round_to_type(x: Tensor, form: ResultType) -> Tensor:
    """Round a result that has more digits to a result type."""
    return make_result(to_components(x, form.device), form)


def _add_one_component(form: ResultType) -> ResultType:
    """Return a result type with one component more, up to the most, for steps whose errors grow."""
    return form._replace(components=min(form.components + 1, MOST))


@implements(aten.pow.Tensor_Scalar)
def pow_scalar(x: MCTensor, exponent: Any) -> Tensor:
    """x to a number: a product, a root or a reciprocal where it is one."""
    form = result_type((x,))
    if exponent == 2:
        return run_function("mul", x, x)
    if exponent == 1:
        return x.clone()
    if exponent in (0.5, -0.5):
        return x.sqrt() if exponent > 0 else x.rsqrt()
    if exponent == -1:
        return x.reciprocal()
    if form.fits_float64:
        return run_in_float64(aten.pow.Tensor_Scalar, (x, exponent), {})
    return run_function("pow", x, exponent, form=form)


@implements_beyond_exact_float64(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(x: Any, exponent: Any) -> Tensor:
    """x to a power, or a number to powers."""
    return run_function("pow", x, exponent)


@implements_beyond_exact_float64(aten.exp2.default)
def exp2(x: MCTensor) -> Tensor:
    """2^x."""
    form = result_type((x,))
    run = functools.partial(run_function, form=_add_one_component(form))
    return round_to_type(run("exp", run("mul", x, make_constant(compute_log(2), x))), form)


def _make_logarithm_rule(base: int) -> Callable:
    """Return the rule of log(x) / log(base)."""

    def log(x: MCTensor) -> Tensor:
        form = result_type((x,))
        logarithm = run_function("log", x, form=_add_one_component(form))
        return run_function("div", logarithm, make_constant(compute_log(base), x), form=form)

    return log


implements_beyond_exact_float64(aten.log2.default)(_make_logarithm_rule(2))
implements_beyond_exact_float64(aten.log10.default)(_make_logarithm_rule(10))


@implements_beyond_exact_float64(aten.tan.default)
def tan(x: MCTensor) -> Tensor:
    """sin(x) / cos(x)."""
    form = result_type((x,))
    run = functools.partial(run_function, form=_add_one_component(form))
    return run_function("div", run("sin", x), run("cos", x), form=form)


@implements_beyond_exact_float64(aten.asin.default)
def asin(x: MCTensor) -> Tensor:
    """atan2(x, sqrt((1 - x)(1 + x)))."""
    finer = _add_one_component(result_type((x,)))
    return round_to_type(_compute_angle(x, _compute_root_of_one_minus_square(x, finer), finer), result_type((x,)))


@implements_beyond_exact_float64(aten.acos.default)
def acos(x: MCTensor) -> Tensor:
    """atan2(sqrt((1 - x)(1 + x)), x)."""
    finer = _add_one_component(result_type((x,)))
    return round_to_type(_compute_angle(_compute_root_of_one_minus_square(x, finer), x, finer), result_type((x,)))


def _compute_root_of_one_minus_square(x: MCTensor, form: ResultType) -> Tensor:
    run = functools.partial(run_function, form=form)
    return run("sqrt", run("mul", run("sub", 1.0, x), run("add", 1.0, x)))


@implements_beyond_exact_float64(aten.atan2.default)
def atan2(y: Any, x: Any) -> Tensor:
    """Return the angle of the point (x, y)."""
    form = result_type((y, x))
    return round_to_type(_compute_angle(y, x, _add_one_component(form)), form)


def _compute_angle(y: Any, x: Any, form: ResultType) -> Tensor:
    """Return atan of the smaller coordinate over the larger, moved into the right octant."""
    straight = make_constant(compute_pi(), x)
    high, wide = abs(y), abs(x)
    steep = compare_by_value(high, wide) == 1
    least, most = select_elements(steep, wide, high), select_elements(steep, high, wide)
    same = (most == 0) | (least.isinf() & most.isinf())
    run = functools.partial(run_function, form=form)
    ratio = run("div", select_elements(same, (~(most == 0)).double(), least), select_elements(same, 1.0, most))
    angle = run("atan", ratio)
    angle = select_elements(steep, run("sub", run_function("mul", straight, 0.5), angle), angle)
    angle = select_elements(_is_negative(x), run("sub", straight, angle), angle)
    angle = select_elements(is_nan(x) | is_nan(y), float("nan"), angle)
    return select_elements(_is_negative(y), -angle, angle)


def _is_negative(x: Any) -> Tensor:
    return x._parts[0].signbit() if isinstance(x, MCTensor) else x.signbit()


@implements_beyond_exact_float64(aten.atanh.default)
def atanh(x: MCTensor) -> Tensor:
    """log1p(2x / (1 - x)) / 2, of |x| and with its sign."""
    form, size = result_type((x,)), abs(x)
    run = functools.partial(run_function, form=_add_one_component(form))
    ratio = run("div", run("mul", size, 2.0), run("sub", 1.0, size))
    result = run_function("mul", run("log1p", ratio), 0.5, form=form)
    return select_elements(_is_negative(x), -result, result)


@implements(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(a: Any, b: Any, *, rounding_mode: str | None) -> Tensor:
    """a / b, rounded to an integer: floor or truncation of the exact quotient."""
    if rounding_mode is None:
        return run_function("div", a, b)
    if rounding_mode not in ("floor", "trunc"):
        raise ValueError(f"rounding_mode={rounding_mode!r}: allowed are None, 'trunc' and 'floor'")
    return run_function(f"{rounding_mode}_divide", a, b)


@implements_beyond_exact_float64(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(a: Any, b: Any) -> Tensor:
    """|a| with b's sign."""
    negative = (
        _is_negative(b) if isinstance(b, Tensor) else torch.tensor(b, dtype=torch.float64, device="cpu").signbit()
    )
    return round_to_type(select_elements(_is_negative(a) != negative, -a, a), result_type((a, b)))


@implements_beyond_exact_float64(aten.nan_to_num.default)
def nan_to_num(x: MCTensor, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Tensor:
    """Replace NaN and infinities by numbers."""
    ends = torch.finfo(x.dtype)
    y: Any = select_elements(x._parts[0].isposinf(), ends.max if posinf is None else posinf, x)
    y = select_elements(y._parts[0].isneginf(), ends.min if neginf is None else neginf, y)
    return select_elements(is_nan(y), nan or 0.0, y)


@implements_beyond_float64(aten.softshrink_backward.default, aten.hardshrink_backward.default)
def shrink_backward(gradient: Any, x: Any, bound: Any) -> Tensor:
    """Return the gradient outside the bounds."""
    return select_elements(abs(x) <= bound, 0.0, gradient)


@implements_beyond_float64(aten._cdist_forward.default)
def cdist_forward(a: Any, b: Any, p: float, mode: int | None) -> Tensor:
    """Return the norms of all differences of rows."""
    return torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, dim=-1)


@implements_beyond_float64(aten._cdist_backward.default)
def cdist_backward(gradient: Any, a: Any, b: Any, p: float, distance: Any) -> Tensor:
    """Return the gradient of the first rows: gradient sign(d) |d|^(p-1) / distance^(p-1), 0 where the distance is."""
    difference = a.unsqueeze(-2) - b.unsqueeze(-3)
    zero = distance == 0
    reach = select_elements(zero, 1.0, distance)
    if p == 0:  # a count of differences
        return difference.sum(-2) * 0
    if p == 2:
        slope = difference / reach.unsqueeze(-1)
    else:
        less = run_function("sub", make_constant(Fraction(p), a), 1.0) if math.isfinite(p) else p
        slope = difference.sign() * torch.pow(difference.abs() / reach.unsqueeze(-1), less)
    return (slope * select_elements(zero, 0.0, gradient).unsqueeze(-1)).sum(-2)


_TENSOR_OVERLOADS = {
    **dict.fromkeys((aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other), aten.xlogy.Tensor),
    aten.special_xlog1py.self_scalar: aten.special_xlog1py.default,
    aten.special_xlog1py.other_scalar: aten.special_xlog1py.default,
}


@implements_each(*_TENSOR_OVERLOADS)
def run_with_number(operator: OpOverload, *operands: Any) -> Tensor:
    """Run an overload with a number for a tensor, which keeps its digits: torch would round it."""
    device = next(x for x in operands if isinstance(x, Tensor)).device
    return _TENSOR_OVERLOADS[operator](
        *(x if isinstance(x, Tensor) else torch.scalar_tensor(x, dtype=torch.float64, device=device) for x in operands)
    )


# Functions of `arithmetic.pointwise`, by name; floor_divide, remainder and fmod are exact before their one rounding.
BINARY_OPERATORS = {
    "mul": (aten.mul.Tensor, aten.mul.Scalar),
    "div": (aten.div.Tensor, aten.div.Scalar),
    "hypot": (aten.hypot.default,),
    "floor_divide": (aten.floor_divide.default, aten.floor_divide.Scalar),
    "remainder": (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor),
    "fmod": (aten.fmod.Tensor, aten.fmod.Scalar),
}


def _update_in_place(name: str, x: Tensor, *operands: Any, addend: Callable[[], Tensor] | None = None) -> Tensor:
    """Write f(operands) into x; `addend` computes the plain product among them, which may stand for infinity."""
    if not isinstance(x, MCTensor):
        check_takes_fractions(x)
        return write_value(x, run_function(name, *operands, form=result_type(operands)._replace(gradients=COMPONENTS)))
    parts = convert_operands(name, operands, x.dtype, len(x._parts), x.device)
    if x._scale is None and x.dtype != torch.float16 and can_write_directly(x, parts):
        pointwise(name, *parts, components=len(x._parts), dtype=x.dtype, out=x._parts)
        return x
    form = choose_computing_type(x)
    result = pointwise(name, *parts, components=form.components, dtype=form.dtype)
    if x._scale is not None:
        result = limit_large_elements(result, name, operands if addend is None else (addend(),))
    exact = lambda: pointwise(name, *parts, components=1, dtype=torch.float64)[0]  # noqa: E731
    return write_components(x, result, exact, is_sum=name in SUM_FUNCTION_NAMES)


for _name in (
    *("sqrt", "exp", "log", "log1p", "expm1", "sin", "cos", "tanh", "sinh", "cosh", "asinh", "acosh", "atan", "erf"),
    *("erfc", "sigmoid"),
):
    implements(getattr(aten, _name).default)(lambda x, name=_name: run_function(name, x))
for _name, _overloads in BINARY_OPERATORS.items():
    implements(*_overloads)(lambda a, b, name=_name: run_function(name, a, b))
implements(aten.mul_.Tensor, aten.mul_.Scalar)(lambda x, other: _update_in_place("mul", x, x, other))
implements(aten.div_.Tensor, aten.div_.Scalar)(lambda x, other: _update_in_place("div", x, x, other))


def _register_sum(name: str, sign: int) -> Callable[..., Tensor]:
    """Register a + alpha b, or a - alpha b, and the same into a; return the first rule."""
    packet, in_place = getattr(aten, name), getattr(aten, f"{name}_")

    @implements(packet.Tensor, packet.Scalar)
    def add(a: Any, b: Any, alpha: Any = 1) -> Tensor:
        if alpha == 1:
            return run_function(name, a, b)
        return run_function("addcmul", a, b, sign * alpha, form=result_type((a, b)))

    @implements(in_place.Tensor, in_place.Scalar)
    def add_(x: Tensor, other: Any, alpha: Any = 1) -> Tensor:
        if alpha == 1:
            return _update_in_place(name, x, x, other)
        addend = (lambda: other.double() * alpha) if is_plain(other) else None
        return _update_in_place("addcmul", x, x, other, sign * alpha, addend=addend)

    return add


_register_sum("add", 1)
_subtraction_rule = _register_sum("sub", -1)
implements(aten.rsub.Tensor, aten.rsub.Scalar)(lambda a, b, alpha=1: _subtraction_rule(b, a, alpha))


def _register_product(name: str, divide: bool) -> None:
    """Register a + value b c, or a + value b / c, and the same into a."""

    @implements(getattr(aten, name).default)
    def accumulate(a: Any, b: Any, c: Any, *, value: Any = 1) -> Tensor:
        form = result_type((a, b, c))
        return run_function("addcmul", a, *_find_product_factors(b, c, value, divide, form), form=form)

    @implements(getattr(aten, f"{name}_").default)
    def accumulate_(x: Tensor, b: Any, c: Any, *, value: Any = 1) -> Tensor:
        factors = _find_product_factors(b, c, value, divide, result_type((x, b, c)))

        def multiply_plain() -> Tensor:
            return (b.double() / c.double() if divide else b.double() * c.double()) * value

        is_given_plain = is_plain(b) and is_plain(c)
        return _update_in_place("addcmul", x, x, *factors, addend=multiply_plain if is_given_plain else None)


def _find_product_factors(b: Any, c: Any, value: Any, divide: bool, form: Any) -> tuple[Any, Any]:
    whole = form._replace(gradients=COMPONENTS)
    if divide:
        return run_function("div", b, c, form=whole), value
    return (b, c) if value == 1 else (run_function("mul", b, c, form=whole), value)


_register_product("addcmul", divide=False)
_register_product("addcdiv", divide=True)


@implements(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(a: Any, b: Any, weight: Any) -> Tensor:
    """a + weight (b - a)."""
    form = result_type((a, b, weight))
    difference = run_function("sub", b, a, form=form._replace(gradients=COMPONENTS))
    return run_function("addcmul", a, difference, weight, form=form)


@implements(aten.lerp_.Scalar, aten.lerp_.Tensor)
def lerp_(x: Tensor, b: Any, weight: Any) -> Tensor:
    """x + weight (b - x), into x."""
    form = result_type((x, b, weight))._replace(gradients=COMPONENTS)
    return _update_in_place("addcmul", x, x, run_function("sub", b, x, form=form), weight)


@implements(aten.rsqrt.default)
def rsqrt(x: MCTensor) -> Tensor:
    """1 / sqrt(x)."""
    form = result_type((x,))
    return run_function("div", 1.0, run_function("sqrt", x, form=form._replace(gradients=COMPONENTS)), form=form)


implements(aten.reciprocal.default)(lambda x: run_function("div", 1.0, x))


_GELU_CUBIC_COEFFICIENT = 0.044715


def make_root_of_half(x: Tensor) -> Tensor:
    """1 / sqrt(2)."""
    return make_constant(0.5, x).sqrt()


@implements_beyond_float64(aten.gelu.default)
def gelu(x: Any, *, approximate: str = "none") -> Tensor:
    """x Phi(x), or its approximation by tanh."""
    if approximate == "tanh":
        return x * (1 + torch.tanh(_compute_tanh_argument(x)[0])) * 0.5
    return x * _compute_doubled_normal_cdf(x) * 0.5


@implements_beyond_float64(aten.gelu_backward.default)
def gelu_backward(gradient: Any, x: Any, *, approximate: str = "none") -> Tensor:
    """Return the gradient times Phi(x) + x phi(x), or times the derivative of the approximation by tanh."""
    if approximate == "tanh":
        inner, slope = _compute_tanh_argument(x)
        bent = torch.tanh(inner)
        return gradient * ((1 + bent) + x * (1 - bent * bent) * slope) * 0.5
    density = (x * x * -0.5).exp() * (make_constant(compute_pi(), x) * 2).rsqrt()
    return gradient * (_compute_doubled_normal_cdf(x) * 0.5 + x * density)


@implements(aten.rrelu_with_noise.default)
def rrelu_with_noise(
    x: Any, noise: Any, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    """x, below zero times a slope: drawn, and written into the noise, or the middle one."""
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2))
    slopes = torch.empty(x.shape, dtype=torch.float64, device=x.device).uniform_(lower, upper, generator=generator)
    slopes = torch.where(x > 0, 1.0, slopes).to(x.dtype)
    noise.copy_(slopes)
    return x * slopes


@implements(aten.rrelu_with_noise_.default)
def rrelu_with_noise_(x: Any, noise: Any, *arguments: Any, **options: Any) -> Tensor:
    """As `rrelu_with_noise`, in place."""
    return write_value(x, rrelu_with_noise(x, noise, *arguments, **options))


def _compute_doubled_normal_cdf(x: Any) -> Tensor:
    """2 Phi(x) = 1 + erf(x / sqrt(2))."""
    return 1 + torch.erf(x * make_root_of_half(x))


def _compute_tanh_argument(x: Any) -> tuple[Tensor, Tensor]:
    """sqrt(2 / pi) (x + 0.044715 x^3), and its slope."""
    factor = (make_constant(2.0, x) / make_constant(compute_pi(), x)).sqrt()
    square = x * x
    return factor * (x + x * square * _GELU_CUBIC_COEFFICIENT), factor * (1 + square * _GELU_CUBIC_COEFFICIENT * 3)
