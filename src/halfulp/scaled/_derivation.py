"""Rules derived for operators without one: from the functional form, torch's decomposition, or a counted fallback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..kernels._plain_memory import is_floating
from ..subclass import find_functional_form, note_fallback
from ..subclass._derivation import aten, derive_common_rule, make_writing_rule, refuse_operator
from ._operands import choose_storage, encode_plain_tensor, promote_dtypes, round_second_moment_above_zero
from ._powers_of_two import has_readable_values
from ._registry import RULES_OF_OPERATORS_DEFINED_LATER, find_rule, register_rule_derivation
from ._scaled_tensor import ScaledTensor, decode_if_scaled, decode_values, keep_lazy_conjugates, wrap_payload
from ._write import refuse_vanishing_indexed_write, write_values

_refuse_operator = functools.partial(refuse_operator, "ScaledTensor")
# Primitives that torch's Python formulas call, such as those of forward-mode derivatives.
_ATEN_OPERATOR_BY_PRIMITIVE = {f"prims::{name}": getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")}
# Not decomposed: their own backward needs other results, or the decomposition draws other random numbers.
_UNDECOMPOSED_PREFIXES = ("_scaled_dot_product", "native_dropout", "bernoulli", "rrelu", "uniform", "normal", "rand")


@register_rule_derivation
def derive_rule(operator: OpOverload) -> Callable:
    """Return a rule for an operator that has none."""
    text = "of scaled tensors: send x.payload and x.scale, or x.decode()"
    if (rule := derive_common_rule("ScaledTensor", operator, text)) is not None:
        return rule
    name = operator._schema.name.removeprefix("aten::")
    if name in _ATEN_OPERATOR_BY_PRIMITIVE:
        return find_rule(_ATEN_OPERATOR_BY_PRIMITIVE[name])
    if name in RULES_OF_OPERATORS_DEFINED_LATER:
        return RULES_OF_OPERATORS_DEFINED_LATER[name]
    if operator._schema.is_mutable:
        if (functional := find_functional_form(operator)) is None:
            return functools.partial(_refuse_operator, operator, "writes into its argument")
        write = functools.partial(_write_results, name)
        return make_writing_rule(operator, functional, write, _run_on_plain_targets)
    if operator._can_decompose():
        return functools.partial(_run_composite_formula, operator)
    decomposition = None if name.startswith(_UNDECOMPOSED_PREFIXES) else _load_decompositions().get(operator)
    if decomposition is not None:
        return functools.partial(_run_decomposition, operator, decomposition)
    if operator.is_view:
        return functools.partial(_refuse_operator, operator, "is a view")
    return functools.partial(run_counted_fallback, operator)


@functools.cache
def _load_decompositions() -> dict[OpOverload, Callable]:
    """Return torch's decompositions into core operators; the larger table goes through operators that bypass rules."""
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions())


def _run_decomposition(operator: OpOverload, formula: Callable, *arguments: Any, **options: Any) -> Any:
    """Run torch's formula of an operator, or the operator on values where the formula declines."""
    results = formula(*arguments, **options)
    return run_counted_fallback(operator, *arguments, **options) if results is NotImplemented else results


def _run_composite_formula(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
    """Run torch's own C++ formula of a composite operator, as above autograd."""
    # Results must not depend on the mode: whole operators arrive here in inference mode alone. Some formulas ask for a
    # tensor's mode: they run outside of it.
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    in_native_code = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
    formula = functools.partial(operator._op_dk, key) if in_native_code else operator.decompose
    if not torch.is_inference_mode_enabled():
        return _run_decomposition(operator, formula, *arguments, **options)

    with torch.inference_mode(False), torch.no_grad(), keep_lazy_conjugates():
        arguments, options = tree_map_only(
            ScaledTensor, lambda x: wrap_payload(x._payload, x._scale, x.dtype, x._home), (arguments, options)
        )
        return _run_decomposition(operator, formula, *arguments, **options)


def run_counted_fallback(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
    """Run an operator on decoded values, encode its floating results under measured scales, and count the fallback."""
    note_fallback(
        operator,
        "scaled tensors",
        "register one by ScaledTensor.implements",
        "It ran in the logical dtype, and the scales of its results were measured",
    )
    return run_on_decoded_values(operator, *arguments, **options)


def run_on_decoded_values(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
    """Run an operator on decoded values and encode its floating results under measured scales."""
    leaves = tree_leaves((arguments, options))
    storage, dtype = choose_storage(leaves), promote_dtypes(leaves)
    # In a narrower dtype values would be rounded before the operator; the logical dtype does not ask for that.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    arguments, options = tree_map_only(ScaledTensor, lambda x: decode_values(x, wide), (arguments, options))

    def encode(x: Any) -> Any:
        return encode_plain_tensor(x, storage, dtype=dtype if x.dtype == wide else x.dtype) if is_floating(x) else x

    return tree_map(encode, operator(*arguments, **options))


def _run_on_plain_targets(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
    """Run an operator on decoded values: a plain target keeps its digits, as a running sum of losses."""
    arguments, options = tree_map(decode_if_scaled, (arguments, options))
    return operator(*arguments, **options)


def _write_results(name: str, given: dict[str, Any], targets: list[Any], results: list[Any]) -> None:
    """Copy the results of an operator's functional form into the arguments that it writes."""
    if name == "add_" and all(isinstance(one, ScaledTensor) for one in (targets[0], given["other"], results[0])):
        # A compiled sum of positive numbers does not round to 0, as by the rule of addcmul: before torch 2.12 Dynamo
        # makes x.add_(a * b * value) of x.addcmul_(a, b, value=value), whose squares come in float32.
        added, total = given["other"], results[0]
        if not has_readable_values(total._payload) and added._payload.dtype == torch.float32:
            results = [round_second_moment_above_zero(total, targets[0], added)]
    refuse_vanishing_indexed_write(name, given, targets[0], results[0])
    for target, result in zip(targets, results):
        write_values(target, result)
