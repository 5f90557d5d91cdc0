"""Comparison by value and what is made of it: extremes, clamp, rounding to integers, sorting, medians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...arithmetic import Parts, compare, pointwise
from ...arithmetic._exact_sums import normalize_dims
from ...subclass._derivation import aten, parse_operators
from ...subclass._in_backward import COMPONENTS_GRADIENTS_MODE, wants_plain_result, wants_plain_result_from
from .._mctensor import MCTensor, decode_to_plain, implements, implements_each, round_to_plain, wrap_components
from .._result_type import ResultType, make_result, result_type, run_pointwise_function, to_components, unify_components


def compare_three_way(a: Any, b: Any) -> Tensor:
    """Return the sign of a - b as int8, 2 where either is NaN."""
    device = a.device if isinstance(a, Tensor) else b.device
    return compare(to_components(a, device), to_components(b, device))


_ORDER_TEST_BY_NAME = {
    "eq": lambda order: order == 0,
    "ne": lambda order: order != 0,
    "lt": lambda order: order == -1,
    "le": lambda order: order <= 0,
    "gt": lambda order: order == 1,
    "ge": lambda order: (order == 0) | (order == 1),
}

for _name, _test in _ORDER_TEST_BY_NAME.items():
    _packet = getattr(aten, _name)
    implements(_packet.Tensor, _packet.Scalar)(lambda a, b, test=_test: test(compare_three_way(a, b)))
implements(aten.equal.default)(lambda a, b: a.shape == b.shape and bool((compare_three_way(a, b) == 0).all()))
implements(aten.allclose.default)(lambda *given, **options: bool(torch.isclose(*given, **options).all()))


def apply_per_component(function: Callable, operands: Sequence[Any], form: ResultType) -> Tensor:
    """Run a function that copies elements of its operands on one component of each after the other."""
    if wants_plain_result(form.gradients, form.has_gradient):
        return function(*(_round_operand_to_plain(x, form) for x in operands))
    parts, scale = unify_components(operands, form)
    return wrap_components(tuple(function(*some) for some in zip(*parts, strict=True)), scale, form.gradients)


def select_elements(mask: Tensor, a: Any, b: Any, form: ResultType | None = None) -> Tensor:
    """Return a where the mask holds, b elsewhere, as a result of both."""
    return apply_per_component(lambda x, y: torch.where(mask, x, y), (a, b), form or result_type((a, b)))


def _round_operand_to_plain(x: Any, form: ResultType) -> Any:
    """Return an operand rounded to one plain tensor of a result type's dtype."""
    if isinstance(x, MCTensor):
        return decode_to_plain(x, form.dtype)
    return x.to(form.dtype) if isinstance(x, Tensor) else x


def _read_mask(mask: Tensor) -> Tensor:
    return mask._parts[0] != 0 if isinstance(mask, MCTensor) else mask


implements(aten.where.self)(lambda mask, a, b: select_elements(_read_mask(mask), a, b))
implements(aten.masked_fill.Scalar, aten.masked_fill.Tensor)(
    lambda x, mask, value: select_elements(_read_mask(mask), value, x, result_type((x, value)))
)


def _make_elementwise_extreme_rule(order_of_first: int, keeps_nan: bool) -> Callable:
    """Return the rule of the larger (1) or smaller (-1) value; where one is NaN that one, or the other."""

    def choose(a: Any, b: Any) -> Tensor:
        order = compare_three_way(a, b)
        nan = find_nans(a) if keeps_nan else ~find_nans(a)
        return select_elements((order == order_of_first) | ((order == 2) & nan), a, b)

    return choose


implements(aten.maximum.default)(_make_elementwise_extreme_rule(1, keeps_nan=True))
implements(aten.minimum.default)(_make_elementwise_extreme_rule(-1, keeps_nan=True))
implements(aten.fmax.default)(_make_elementwise_extreme_rule(1, keeps_nan=False))
implements(aten.fmin.default)(_make_elementwise_extreme_rule(-1, keeps_nan=False))


@implements(aten.clamp.default, aten.clamp.Tensor)
def clamp(x: Any, min: Any = None, max: Any = None) -> Tensor:
    """Clamp between two bounds, by value; a NaN stays one."""
    if min is None and max is None:
        raise ValueError("clamp takes at least one of min and max")
    form = result_type((x, *(bound for bound in (min, max) if isinstance(bound, Tensor))))
    whole = form._replace(gradients=COMPONENTS_GRADIENTS_MODE) if min is not None and max is not None else form
    if min is not None:
        x = select_elements(_is_beyond(x, min, -1), min, x, whole)
    return x if max is None else select_elements(_is_beyond(x, max, 1), max, x, form)


def _is_beyond(x: Any, bound: Any, side: int) -> Tensor:
    order = compare_three_way(x, bound)
    return (order == side) | ((order == 2) & ~find_nans(x))


implements(aten.clamp_min.default, aten.clamp_min.Tensor)(lambda x, min: clamp(x, min=min))
implements(aten.clamp_max.default, aten.clamp_max.Tensor)(lambda x, max: clamp(x, max=max))


def find_nans(x: Any) -> Tensor:
    """Return where values are NaN."""
    if isinstance(x, MCTensor):
        return x._parts[0].isnan()
    return x.isnan() if isinstance(x, Tensor) else torch.tensor(x != x, dtype=torch.bool, device="cpu")


@implements_each(
    *parse_operators("""
        isnan isinf isposinf isneginf isfinite signbit logical_not nonzero any all any.dim all.dim any.dims all.dims
        count_nonzero count_nonzero.dim_IntList
    """)
)
def run_on_first_component(operator: OpOverload, x: MCTensor, *arguments: Any, **options: Any) -> Tensor:
    """Ask the first component: the others never change a sign, nor what is zero, infinite or NaN."""
    return operator(x._parts[0], *arguments, **options)


def map_components(x: MCTensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function that is exact on every component alone: a change of sign, a choice of elements."""
    if wants_plain_result_from(x):
        return function(round_to_plain(x))
    scale = None if x._scale is None else x._scale.clone()
    return wrap_components(tuple(map(function, x._parts)), scale, x._gradients)


implements(aten.neg.default)(lambda x: map_components(x, torch.neg))


@implements(aten.abs.default)
def absolute(x: MCTensor) -> Tensor:
    """|x|: every component changes its sign where the first is negative."""
    negative = x._parts[0].signbit()
    return map_components(x, lambda part: torch.where(negative, -part, part))


@implements(aten.relu.default)
def relu(x: MCTensor) -> Tensor:
    """x where it is positive or NaN, else 0."""
    negative = x._parts[0] < 0
    return map_components(x, lambda part: part.masked_fill(negative, 0))


implements(aten.sign.default, aten.sgn.default)(lambda x: make_result((x._parts[0].sign(),), result_type((x,))))
implements(aten.threshold_backward.default)(
    lambda gradient, x, threshold: select_elements(
        compare_three_way(x, threshold) <= 0, 0.0, gradient, result_type((gradient, x))
    )
)


def _floor_components(parts: Parts) -> Parts:
    """Return the floor of each component while all before it are integers; 0 after the first that is not."""
    floors, whole = [], None
    for part in parts:
        low = part.floor()
        floors.append(low if whole is None else low.where(whole, torch.zeros_like(low)))
        here = low == part
        whole = here if whole is None else whole & here
    return tuple(floors)


@implements(aten.floor.default)
def floor(x: MCTensor) -> Tensor:
    """Return the largest integer not above."""
    parts = to_components(x, x.device)
    return make_result(_sum_integers(_floor_components(parts), parts[0]), result_type((x,)))


def _truncate_components(x: MCTensor) -> Parts:
    negative = x._parts[0].signbit()
    whole = _floor_components(tuple(torch.where(negative, -part, part) for part in to_components(x, x.device)))
    return _sum_integers(tuple(torch.where(negative, -part, part) for part in whole), x._parts[0])


implements(aten.ceil.default)(lambda x: -floor(-x))
implements(aten.trunc.default)(lambda x: make_result(_truncate_components(x), result_type((x,))))
implements(aten.frac.default)(
    lambda x: run_pointwise_function(
        "sub", x, wrap_components(_truncate_components(x), None, COMPONENTS_GRADIENTS_MODE), form=result_type((x,))
    )
)


def _sum_integers(integers: Parts, x: Tensor) -> Parts:
    """Return the sum of integers, largest first; a zero has the sign of x."""
    total = integers[:1]
    for part in integers[1:]:
        total = pointwise("add", total, (part,), components=len(integers), dtype=part.dtype)
    return torch.where(total[0] == 0, torch.copysign(total[0], x), total[0]), *total[1:]


@implements(aten.sort.default, aten.sort.stable)
def sort(x: MCTensor, dim: int = -1, descending: bool = False, *, stable: Any = True) -> tuple[Tensor, Tensor]:
    """Return values in order, and where they were; always stable."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    order: Any = None
    for part in reversed(x._parts):  # by the last component first, and by the first one at last
        seen = part if order is None else part.gather(dim, order)
        step = torch.sort(seen, dim=dim, descending=descending, stable=True).indices
        order = step if order is None else order.gather(dim, step)
    return map_components(x, lambda part: part.gather(dim, order)), order


implements(aten.argsort.stable)(lambda x, **options: sort(x, **options)[1])


@implements(aten.topk.default)
def topk(x: MCTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k largest or smallest, in order."""
    values, order = sort(x, dim=dim, descending=largest)
    if x.dim() == 0:
        return values, order
    if not 0 <= k <= x.shape[dim]:
        raise RuntimeError(f"topk with k={k} of {x.shape[dim]} elements")
    return values.narrow(dim, 0, k).clone(), order.narrow(dim, 0, k)


def _find_extreme(x: MCTensor, dim: int, keepdim: bool, sign: int) -> tuple[Tensor, Tensor]:
    """Return the extreme along a dimension, and its first index; NaN is more extreme than any number."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    if not x.shape[dim]:
        raise IndexError(f"no largest or smallest of no elements along dimension {dim} of {tuple(x.shape)}")
    candidates: Any = None
    for part in x._parts:
        part = part if sign > 0 else torch.where(part.isnan(), part, -part)
        seen = part if candidates is None else part.masked_fill(~candidates, -torch.inf)
        here = (seen == seen.amax(dim, keepdim=True)) | seen.isnan()
        candidates = here if candidates is None else candidates & here
    at = candidates.to(torch.uint8).argmax(dim, keepdim=True)
    values = map_components(x, lambda part: part.gather(dim, at))
    return (values, at) if keepdim else (values.squeeze(dim), at.squeeze(dim))


def _flatten_nonempty(x: MCTensor) -> Any:
    if not x.numel():
        raise RuntimeError("no largest or smallest of no elements: give a dimension that has some")
    return x.reshape(-1)


def _reduce_to_extreme(x: MCTensor, dim: Any, keepdim: bool, sign: int) -> Tensor:
    if not x.dim():
        return x.clone()
    dims = normalize_dims(x.dim(), dim)
    values: Any = x
    for reduced in dims:
        values = _find_extreme(values, reduced, True, sign)[0]
    return values if keepdim else values.squeeze(dims)


def _register_extremes(sign: int, name: str) -> None:
    """Register what gives the largest values (1, "max"), or the smallest (-1, "min")."""
    packet = getattr(aten, name)
    implements(packet.dim)(lambda x, dim, keepdim=False: _find_extreme(x, dim, keepdim, sign))
    implements(packet.default)(lambda x: _find_extreme(_flatten_nonempty(x), 0, False, sign)[0])

    @implements(getattr(aten, f"arg{name}").default)
    def find_index(x: MCTensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        at = _find_extreme(_flatten_nonempty(x) if dim is None else x, dim or 0, keepdim and dim is not None, sign)[1]
        return at.reshape([1] * x.dim()) if keepdim and dim is None else at

    implements(getattr(aten, f"a{name}").default)(
        lambda x, dim=(), keepdim=False: _reduce_to_extreme(x, dim, keepdim, sign)
    )


_register_extremes(1, "max")
_register_extremes(-1, "min")
implements(aten.aminmax.default)(
    lambda x, *, dim=None, keepdim=False: tuple(_reduce_to_extreme(x, dim, keepdim, sign) for sign in (-1, 1))
)
