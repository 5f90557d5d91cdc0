"""Element-wise functions that arithmetic.pointwise has: a table, and those with a factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....arithmetic import pointwise
from ....kernels import torch_operators
from ....subclass._in_backward import COMPONENTS
from ..._derivation import beyond_float64
from ..._mctensor import MCTensor
from ..._registry import implements
from ..._result_type import SUMS, evaluate, operand_parts, result_type
from ..._stand_ins import saturated
from ..._write import check_takes_fractions, computing_type, write, write_value, writes_directly
from ._powers import PI, constant

aten = torch_operators("aten")

UNARY = {
    "sqrt": aten.sqrt.default,
    "exp": aten.exp.default,
    "log": aten.log.default,
    "log1p": aten.log1p.default,
    "expm1": aten.expm1.default,
    "sin": aten.sin.default,
    "cos": aten.cos.default,
    "tanh": aten.tanh.default,
    "sinh": aten.sinh.default,
    "cosh": aten.cosh.default,
    "asinh": aten.asinh.default,
    "acosh": aten.acosh.default,
    "atan": aten.atan.default,
    "erf": aten.erf.default,
    "sigmoid": aten.sigmoid.default,
}
BINARY = {
    "mul": (aten.mul.Tensor, aten.mul.Scalar),
    "div": (aten.div.Tensor, aten.div.Scalar),
}


def _unary(name: str) -> Callable:
    def function(x: MCTensor) -> Tensor:
        return evaluate(name, x)

    return function


def _binary(name: str) -> Callable:
    def function(a: Any, b: Any) -> Tensor:
        return evaluate(name, a, b)

    return function


def _binary_in_place(name: str) -> Callable:
    def function(x: Tensor, other: Any) -> Tensor:
        return _update(name, x, x, other)

    return function


def _update(name: str, x: Tensor, *operands: Any, given: tuple[str, tuple] | None = None) -> Tensor:
    """Write f(operands) into x; `given` is the function and the operands of which they were made."""
    if not isinstance(x, MCTensor):
        check_takes_fractions(x)
        return write_value(x, evaluate(name, *operands, form=result_type(operands)._replace(gradients=COMPONENTS)))
    parts = operand_parts(name, operands, x.dtype, len(x._parts), x.device)
    if x._scale is None and x.dtype != torch.float16 and writes_directly(x, parts):
        pointwise(name, *parts, components=len(x._parts), dtype=x.dtype, out=x._parts)
        return x
    form = computing_type(x)
    result = pointwise(name, *parts, components=form.components, dtype=form.dtype)
    if x._scale is not None:
        result = saturated(result, *(given or (name, operands)))
    exact = lambda: pointwise(name, *parts, components=1, dtype=torch.float64)[0]  # noqa: E731
    return write(x, result, exact, is_sum=name in SUMS)


for _name, _operator in UNARY.items():
    implements(_operator)(_unary(_name))
for _name, _operators in BINARY.items():
    implements(*_operators)(_binary(_name))
implements(aten.mul_.Tensor, aten.mul_.Scalar)(_binary_in_place("mul"))
implements(aten.div_.Tensor, aten.div_.Scalar)(_binary_in_place("div"))


@implements(aten.add.Tensor, aten.add.Scalar)
def add(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    """a + alpha b."""
    return evaluate("add", a, b) if alpha == 1 else evaluate("addcmul", a, b, alpha, form=result_type((a, b)))


@implements(aten.sub.Tensor, aten.sub.Scalar)
def sub(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    """a - alpha b."""
    return evaluate("sub", a, b) if alpha == 1 else evaluate("addcmul", a, b, -alpha, form=result_type((a, b)))


@implements(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    """b - alpha a."""
    return sub(b, a, alpha)


@implements(aten.add_.Tensor, aten.add_.Scalar)
def add_(x: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    """x + alpha other, into x."""
    return _update("add", x, x, other) if alpha == 1 else _update("addcmul", x, x, other, alpha)


@implements(aten.sub_.Tensor, aten.sub_.Scalar)
def sub_(x: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    """x - alpha other, into x."""
    return _update("sub", x, x, other) if alpha == 1 else _update("addcmul", x, x, other, -alpha)


def _intermediate_type(*operands: Any) -> Any:
    """Return the result type of an intermediate step, which keeps all components."""
    return result_type(operands)._replace(gradients=COMPONENTS)


@implements(aten.addcmul.default)
def addcmul(a: Any, b: Any, c: Any, *, value: Any = 1) -> Tensor:
    """a + value b c."""
    return _accumulated(a, b, c, value, divide=False)


@implements(aten.addcdiv.default)
def addcdiv(a: Any, b: Any, c: Any, *, value: Any = 1) -> Tensor:
    """a + value b / c."""
    return _accumulated(a, b, c, value, divide=True)


def _accumulated(a: Any, b: Any, c: Any, value: Any, divide: bool) -> Tensor:
    form = result_type((a, b, c))
    return evaluate("addcmul", a, *_plain_product(b, c, value, divide, form), form=form)


def _plain_product(b: Any, c: Any, value: Any, divide: bool, form: Any) -> tuple[Any, Any]:
    whole = form._replace(gradients=COMPONENTS)
    if divide:
        return evaluate("div", b, c, form=whole), value
    return (b, c) if value == 1 else (evaluate("mul", b, c, form=whole), value)


@implements(aten.addcmul_.default)
def addcmul_(x: Tensor, b: Any, c: Any, *, value: Any = 1) -> Tensor:
    """x + value b c, into x."""
    factors = _plain_product(b, c, value, False, result_type((x, b, c)))
    return _update("addcmul", x, x, *factors, given=("addcmul", (x, b, c, value)))


@implements(aten.addcdiv_.default)
def addcdiv_(x: Tensor, b: Any, c: Any, *, value: Any = 1) -> Tensor:
    """x + value b / c, into x."""
    factors = _plain_product(b, c, value, True, result_type((x, b, c)))
    return _update("addcmul", x, x, *factors, given=("addcdiv", (x, b, c, value)))


@implements(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(a: Any, b: Any, weight: Any) -> Tensor:
    """a + weight (b - a)."""
    form = result_type((a, b, weight))
    return evaluate("addcmul", a, evaluate("sub", b, a, form=form._replace(gradients=COMPONENTS)), weight, form=form)


@implements(aten.lerp_.Scalar, aten.lerp_.Tensor)
def lerp_(x: Tensor, b: Any, weight: Any) -> Tensor:
    """x + weight (b - x), into x."""
    return _update("addcmul", x, x, evaluate("sub", b, x, form=_intermediate_type(x, b, weight)), weight)


@implements(aten.rsqrt.default)
def rsqrt(x: MCTensor) -> Tensor:
    """1 / sqrt(x)."""
    form = result_type((x,))
    return evaluate("div", 1.0, evaluate("sqrt", x, form=form._replace(gradients=COMPONENTS)), form=form)


@implements(aten.reciprocal.default)
def reciprocal(x: MCTensor) -> Tensor:
    """1 / x."""
    return evaluate("div", 1.0, x)


_CUBE = 0.044715


def _half_root(x: Tensor) -> Tensor:
    """1 / sqrt(2)."""
    return constant("0.5", x).sqrt()


@beyond_float64(aten.gelu.default)
def gelu(x: Any, *, approximate: str = "none") -> Tensor:
    """x Phi(x), or its approximation by tanh."""
    if approximate == "tanh":
        return x * (1 + torch.tanh(_inner(x)[0])) * 0.5
    return x * _normal(x) * 0.5


@beyond_float64(aten.gelu_backward.default)
def gelu_backward(gradient: Any, x: Any, *, approximate: str = "none") -> Tensor:
    """The gradient times Phi(x) + x phi(x), or times the derivative of the approximation by tanh."""
    if approximate == "tanh":
        inner, slope = _inner(x)
        bent = torch.tanh(inner)
        return gradient * ((1 + bent) + x * (1 - bent * bent) * slope) * 0.5
    density = (x * x * -0.5).exp() * (constant(PI, x) * 2).rsqrt()
    return gradient * (_normal(x) * 0.5 + x * density)


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


def _normal(x: Any) -> Tensor:
    """2 Phi(x) = 1 + erf(x / sqrt(2))."""
    return 1 + torch.erf(x * _half_root(x))


def _inner(x: Any) -> tuple[Tensor, Tensor]:
    """sqrt(2 / pi) (x + 0.044715 x^3), and its slope."""
    factor = (constant("2", x) / constant(PI, x)).sqrt()
    square = x * x
    return factor * (x + x * square * _CUBE), factor * (1 + square * _CUBE * 3)
