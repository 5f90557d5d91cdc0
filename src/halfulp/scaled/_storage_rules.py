"""The storage of operands and results of tensors with a home, by families of operators, as torch.autocast casts dtypes.

As torch.autocast casts operands before an operator runs, so payloads change storage before a rule does. Operators that
autocast computes in float32 take float32 payloads, and so results have one; products take payloads of the home; all
others take the widest storage that is among their operands.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from ..subclass._rule_table import in_quotient_formula
from . import _fused as fused
from . import _powers_of_two as _powers
from ._payloads import common_storage, quick_rms_scale, rms_scale_float32, to_float32, to_storage
from ._registry import EIGHT_BITS, FAMILIES, FAMILY_OF, Transient, derives_promoted, rule_of
from ._scaled_tensor import ScaledTensor, home_of, with_dtypes, wrap

WideMode = Literal["autocast", "none"]
WIDE_MODES = ("autocast", "none")

Operands = Callable[[tuple, dict], tuple[tuple, dict]]


def home_for(storage: torch.dtype, wide: str) -> torch.dtype | None:
    """Return the home of tensors of a storage: float16 for eight bits, as for products; None if nothing is wider."""
    if wide == "none" or storage == torch.float32:
        return None
    return torch.float16 if storage in EIGHT_BITS else storage


def check_wide(wide: object) -> None:
    """Raise unless `wide` is a way to choose the operators with float32 payloads."""
    if wide not in WIDE_MODES:
        raise ValueError(f"wide={wide!r}: allowed are {', '.join(map(repr, WIDE_MODES))}")


def round_to_home(x: ScaledTensor) -> ScaledTensor:
    """Round the values to the home storage, under a measured scale."""
    payload = to_float32(x)
    home: Any = x._home  # a dtype: of a tensor without one nothing is rounded
    quick = quick_rms_scale(payload)
    level = (
        rms_scale_float32(payload, home) if quick is None else torch.tensor(quick, dtype=torch.float32, device="cpu")
    )
    if fused.engaged(payload):
        made, scale = fused.finish(payload, (x._scale, level), home, "levelled")
        return wrap(made, scale, x.dtype, home)
    scale, rest = _powers.product(x._scale, level)
    payload = _powers.times(_powers.times(payload, _powers.ratio(torch.ones_like(level), level)), rest)
    return wrap(to_storage(payload, home), scale, x.dtype, home)


def is_above_home(x: Any) -> bool:
    """Return whether x is a tensor that products would round to its home."""
    return type(x) is ScaledTensor and x._home is not None and x._payload.dtype == torch.float32


def _is_wide(x: Any) -> bool:
    if type(x) is ScaledTensor or not isinstance(x, Tensor):
        return is_above_home(x)
    return bool(x.dim()) and x.dtype in (torch.float32, torch.float64)


def with_float32_payload(x: Any) -> Any:
    """Return a scaled tensor with a float32 payload, and anything else unchanged."""
    if type(x) is not ScaledTensor or x._payload.dtype == torch.float32:
        return x
    return wrap(to_float32(x), x._scale, x.dtype, x._home)


def _store_at_home(x: Any) -> Any:
    return round_to_home(x) if is_above_home(x) else x


def _map_tensors(change: Callable[[Any], Any], arguments: tuple, options: dict) -> tuple[tuple, dict]:
    def changed(x: Any) -> Any:
        return tree_map(changed, x) if isinstance(x, (list, tuple)) else change(x)

    return tuple(map(changed, arguments)), {name: changed(x) for name, x in options.items()}


def operands_in_float32(arguments: tuple, options: dict) -> tuple[tuple, dict]:
    """Widen every payload to float32."""
    return _map_tensors(with_float32_payload, arguments, options)


def operands_in_home(arguments: tuple, options: dict) -> tuple[tuple, dict]:
    """Round every float32 payload to the home storage."""
    return _map_tensors(_store_at_home, arguments, options)


def operands_in_widest(arguments: tuple, options: dict) -> tuple[tuple, dict]:
    """Widen every payload to float32 if one is, or a plain tensor is; lists are left to their rules.

    autocast promotes a narrow result that meets a plain float32 tensor: its range may be all that holds the result.
    """
    if any(map(_is_wide, arguments)) or any(map(_is_wide, options.values())):
        return tuple(map(with_float32_payload, arguments)), {
            name: with_float32_payload(x) for name, x in options.items()
        }
    return arguments, options


def operands_of_quotient(arguments: tuple, options: dict) -> tuple[tuple, dict]:
    """Widen every payload to float32, unless the second operand is a number."""
    second = arguments[1] if len(arguments) > 1 else options.get("other")
    is_number = not isinstance(second, Tensor) or (type(second) is not ScaledTensor and not second.dim())
    return operands_in_widest(arguments, options) if is_number else operands_in_float32(arguments, options)


def operands_of_sum(arguments: tuple, options: dict) -> tuple[tuple, dict]:
    """Widen payloads in a sum with a plain tensor, float32 for autocast, or in an outer sum; else to the widest."""
    a, b = arguments[0], arguments[1] if len(arguments) > 1 else options.get("other")
    if not isinstance(b, Tensor):
        return arguments, options
    is_plain = any(type(x) is not ScaledTensor and x.dim() for x in (a, b))
    return (operands_in_float32 if is_plain or repeats_both(a, b) else operands_in_widest)(arguments, options)


def repeats_both(a: Tensor, b: Tensor) -> bool:
    """Return whether broadcasting repeats both tensors, as in an outer sum.

    Sizes are compared to 1 alone: a graph whose sizes vary would be compiled again where two of them become equal.
    """
    return _is_repeated(a, b) and _is_repeated(b, a)


def _is_repeated(x: Tensor, y: Tensor) -> bool:
    sizes = zip(reversed(x.shape), reversed(y.shape))
    return x.dim() < y.dim() or any(one == 1 and other != 1 for one, other in sizes)


# By `Family.operands`. Normalisations are left to their rules: they compute in float32 and give results about 1, which
# lose nothing in the operand's storage.
_PREPARATIONS: dict[str, Operands | None] = {
    "float32": operands_in_float32,
    "home": operands_in_home,
    "widest": operands_in_widest,
    "rule": None,
}
# Operators that differ from their family.
_BY_NAME: dict[str, Operands | None] = {
    **dict.fromkeys(("mul", "addcmul", "lerp", "sign", "sgn"), operands_in_widest),
    **dict.fromkeys(("dot", "vdot", "addcdiv", "hypot", "softplus", "log_sigmoid_forward"), operands_in_float32),
    **dict.fromkeys(("embedding", "embedding_dense_backward"), operands_in_home),
    **dict.fromkeys(
        ("_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_dense_backward"), operands_in_home
    ),
    # Differences too: after cancellation an earlier rounding error is most of what is left.
    **dict.fromkeys(("div", "floor_divide", "sub"), operands_of_quotient),
    "add": operands_of_sum,
}


def operands_of(operator: OpOverload) -> Operands | None:
    """Return how an operator changes its operands' storage before its rule runs; None if it does not.

    Nothing for one that writes into an argument, which stays the tensor it is, or runs by the steps it is made of.
    """
    if operator not in FAMILY_OF or operator._schema.is_mutable:
        return None
    name = operator._schema.name.removeprefix("aten::")
    return _BY_NAME[name] if name in _BY_NAME else _PREPARATIONS[FAMILIES[FAMILY_OF[operator]].operands]


@derives_promoted
def make_promoted_rule(operator: OpOverload) -> Callable:
    """Return an operator's rule for operands of which one has a home, which the results then have too.

    Steps of a formula that divides by a sum have float32 operands, with a home and without.
    """
    prepare = operands_of(operator)
    writes = operator._schema.is_mutable
    accumulates = operator._schema.name.removeprefix("aten::") in _OF_ACCUMULATION

    def run(home: Any, arguments: tuple, options: dict) -> Any:
        if in_quotient_formula():
            if type(home) is not torch.dtype:
                return _run_transient(operator, arguments, options)
            arguments, options = (arguments, options) if writes else operands_in_float32(arguments, options)
        elif type(home) is Transient:
            arguments, options = _map_tensors(_from_transient, arguments, options)
            home = home_of(arguments, options)
            if home is None:
                return rule_of(operator)(*arguments, **options)
        if prepare is not None:
            arguments, options = prepare(arguments, options)
        results = rule_of(operator)(*arguments, **options)
        written = {id(x) for x in tree_leaves((arguments, options))} if writes else ()
        results = _with_home(results, home, written)
        return round_to_home(results) if accumulates and is_above_home(results) and _is_accumulating() else results

    return run


def _with_home(results: Any, home: torch.dtype, written: Container[int]) -> Any:
    """Give results the home, except arguments that are written: these keep their own or none."""
    if type(results) is ScaledTensor:
        if id(results) not in written:
            results._home = results._home or home
    elif isinstance(results, (list, tuple)):
        for result in results:
            _with_home(result, home, written)
    return results


def _run_transient(operator: OpOverload, arguments: tuple, options: dict) -> Any:
    """Run a step of a formula that divides by a sum, on float32 payloads, without a home.

    What it makes of nothing but saved values is a step in between; what such a step and others make is a gradient.
    """
    given = [x for x in tree_leaves((arguments, options)) if type(x) is ScaledTensor]
    saved = [x._payload.dtype for x in given if type(x._home) is not Transient]
    if operator._schema.is_mutable or not given:
        return rule_of(operator)(*arguments, **options)
    results = rule_of(operator)(*operands_in_float32(arguments, options)[0], **operands_in_float32((), options)[1])
    storage = common_storage(saved or [x._home.storage for x in given])
    for result in tree_leaves(results):
        if type(result) is ScaledTensor and result._payload.dtype != storage:
            result._home = Transient(storage)
    return tree_map(_from_transient, results) if 0 < len(saved) < len(given) else results


def _from_transient(x: Any) -> Any:
    """Round a result of a step in between to the storage of what the step was given."""
    if type(x) is not ScaledTensor or type(x._home) is not Transient:
        return x
    return with_dtypes(x, x.dtype, x._home.storage)


# Operators that autograd runs as a gradient is stored in, or added to, a parameter's `grad`.
_OF_ACCUMULATION = ("detach", "clone", "new_empty_strided", "add")


def _is_accumulating() -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"
