"""Rules of operators that have none: from their functional form, torch's decomposition, or float64 (counted)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from ..arithmetic import PRECISION_BY_DTYPE
from ..kernels._plain_memory import is_floating
from ..subclass import _rule_table as _fallback
from ..subclass._derivation import (
    aten,
    derive_common_rule,
    find_functional_form,
    make_foreach_rule,
    make_writing_rule,
    refuse_operator,
)
from ..subclass._in_backward import disable_result_rounding, wants_plain_result
from ._mctensor import MCTensor, decode_to_plain, implements, register_derivation, wrap_components
from ._result_type import (
    ResultType,
    clamp_written_outliers,
    encode_plain_operands,
    has_plain_operand,
    make_result,
    result_type,
    to_components,
)
from ._write import check_not_integer, write_value

refuse_mctensor_operator = functools.partial(refuse_operator, "MCTensor")
_COLLECTIVES_TEXT = (
    "of MCTensors: every component rounded apart would lose digits. Gradients are plain tensors with "
    "gradients='first'; send other values as x.decode(torch.float64), or gather x.components one by one"
)


@register_derivation
def derive_rule(operator: OpOverload) -> Callable:
    """Make the rule of an operator that has none: a loop, its functional form and a copy, torch's steps, or float64."""
    if (rule := derive_common_rule("MCTensor", operator, _COLLECTIVES_TEXT)) is not None:
        return rule
    if (rule := make_foreach_rule(operator)) is not None:
        return rule
    if operator._can_decompose():
        return functools.partial(_run_decomposition_or_derived_rule, operator)
    return _derive_primitive_rule(operator)


def _run_decomposition_or_derived_rule(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
    """Run torch's own decomposition of a composite operator, or treat it as one that has none."""
    results = operator.decompose(*arguments, **options)
    return _derive_primitive_rule(operator)(*arguments, **options) if results is NotImplemented else results


def _derive_primitive_rule(operator: OpOverload) -> Callable:
    if operator._schema.is_mutable:
        if (functional := find_functional_form(operator)) is None:
            return functools.partial(refuse_mctensor_operator, operator, "writes into its argument")
        return make_unrounded_writing_rule(operator, functional)
    if operator.is_view:
        return functools.partial(refuse_mctensor_operator, operator, "is a view")
    return functools.partial(_run_decomposed_or_in_float64, operator)


def run_in_float64(operator: Callable[..., Any], arguments: tuple, options: dict) -> Any:
    """Run an operator on the values in float64 and return its floating results as components."""
    leaves = [x for x in tree_leaves((arguments, options)) if isinstance(x, (Tensor, torch.dtype))]
    wanted = [x for x in leaves if isinstance(x, torch.dtype) and x in PRECISION_BY_DTYPE]
    form = result_type(leaves, dtype=wanted[0] if wanted else None)
    arguments, options = tree_map(_convert_to_float64, (arguments, options))
    results = operator(*arguments, **options)
    if form.is_scaled:
        results = tree_map(lambda x: clamp_written_outliers((x,), leaves)[0] if is_floating(x) else x, results)
    return tree_map(lambda x: make_result((x,), form) if is_floating(x) else x, results)


def _convert_to_float64(x: Any) -> Any:
    if isinstance(x, MCTensor):
        return decode_to_plain(x, torch.float64)
    if isinstance(x, torch.dtype):
        return torch.float64 if x in PRECISION_BY_DTYPE else x
    return x.double() if is_floating(x) else x


def _run_decomposed_or_in_float64(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
    form = result_type(x for x in tree_leaves((arguments, options)) if isinstance(x, Tensor))
    if form.fits_float64:
        return run_in_float64(operator, arguments, options)
    decomposition, results = _collect_decompositions().get(operator), NotImplemented
    if decomposition is not None:
        results = run_rule_and_round_once(decomposition, form, arguments, options)
    return fall_back_to_float64(operator, *arguments, **options) if results is NotImplemented else results


def fall_back_to_float64(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
    """Run an operator in float64, and count that as a fallback."""
    form = result_type(x for x in tree_leaves((arguments, options)) if isinstance(x, Tensor))
    note_float64_fallback(operator, form)
    return run_in_float64(operator, arguments, options)


def note_float64_fallback(operator: OpOverload, form: ResultType) -> None:
    """Count that an operator runs in float64, which does not hold the digits of its operands."""
    _fallback.note_fallback(
        operator,
        f"{form.components} components of {form.dtype}",
        "register one by MCTensor.implements",
        "It ran in float64 and lost the digits beyond it",
    )


def implements_beyond_float64(*operators: OpOverload, requires_exact: bool = False) -> Callable[[Callable], Callable]:
    """Register a rule for operands whose digits float64 does not hold; others run the operator itself in float64."""
    # requires_exact: also for those that it does not hold exactly, as gaps between components may be wider than it.

    def register(rule: Callable) -> Callable:
        for operator in operators:
            implements(operator)(prefer_float64(operator, rule, requires_exact))
        return rule

    return register


implements_beyond_exact_float64 = functools.partial(implements_beyond_float64, requires_exact=True)


def _is_exact_in_float64(x: Any) -> bool:
    """Return whether float64 holds the sum of all components, element by element; infinities and NaN it does."""
    if not isinstance(x, MCTensor) or x.dtype == torch.float16:
        return True
    if any(type(part) is not Tensor for part in x._parts):
        return False
    total = x._parts[0].double()
    for part in x._parts[1:]:
        grown = total + part
        if bool((((grown - total) != part) & grown.isfinite()).any()):
            return False
        total = grown
    return True


def prefer_float64(operator: OpOverload, rule: Callable, requires_exact: bool = False) -> Callable:
    """Return a rule that runs the operator in float64 where that holds the operands, and `rule` elsewhere."""

    def run_either(*arguments: Any, **options: Any) -> Any:
        leaves = [x for x in tree_leaves((arguments, options)) if isinstance(x, Tensor)]
        form = result_type(leaves)
        if form.fits_float64 and not (requires_exact and not all(map(_is_exact_in_float64, leaves))):
            return run_in_float64(operator, arguments, options)
        return run_rule_and_round_once(rule, form, arguments, options)

    return run_either


def run_rule_and_round_once(rule: Callable, form: ResultType, arguments: tuple, options: dict) -> Any:
    """Run a rule of several operators with every operand as an MCTensor, and round its results once, at the end."""
    if has_plain_operand(arguments, options) and not wants_plain_result(form.gradients, form.has_gradient):
        arguments, options = encode_plain_operands((arguments, options), form)
    with disable_result_rounding():
        results = rule(*arguments, **options)
    if wants_plain_result(form.gradients, form.has_gradient):
        return tree_map(lambda x: decode_to_plain(x, x.dtype) if isinstance(x, MCTensor) else x, results)
    return results


@functools.cache
def _collect_decompositions() -> dict[OpOverload, Callable]:
    """Return torch's decompositions, by operator."""
    from torch._decomp import core_aten_decompositions, decomposition_table

    return {**decomposition_table, **core_aten_decompositions()}


def make_unrounded_writing_rule(operator: OpOverload, functional: OpOverload) -> Callable:
    """Return the rule of an operator that writes: its functional form, no step of which is rounded to a gradient."""
    run = make_writing_rule(operator, functional, functools.partial(_write_results, operator))

    def run_unrounded(*arguments: Any, **options: Any) -> Any:
        with disable_result_rounding():
            return run(*arguments, **options)

    return run_unrounded


def _write_results(operator: OpOverload, given: dict[str, Any], targets: list[Any], results: list[Any]) -> None:
    """Copy the results of an operator's functional form into the arguments that it writes."""
    for target, result in zip(targets, results):
        # torch's masked_fill_ truncates a number to the target's integer type.
        if isinstance(result, MCTensor) and operator not in (aten.masked_fill_.Tensor, aten.masked_fill_.Scalar):
            check_not_integer(target)
    for target, result in zip(targets, results):
        if isinstance(target, MCTensor) and target._scale is not None and isinstance(result, Tensor):
            wide = tuple(part.double() for part in to_components(result, target.device))
            parts = clamp_written_outliers(wide, tree_leaves(given))
            write_value(target, result if parts is wide else wrap_components(parts, None, target._gradients))
        elif isinstance(target, MCTensor) or isinstance(result, MCTensor):
            write_value(target, result)
        else:
            target.copy_(result)
