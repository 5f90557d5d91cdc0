"""What rules are derived from, for all tensor subclasses here: functional forms, torch's loops, operators by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from ..kernels import find_operator_namespace
from ._collectives import is_collective, refuse_collective
from ._composite_tensor import CompositeTensor
from ._rule_table import Rule

aten = find_operator_namespace("aten")


def list_functional_overloads(*packets: OpOverloadPacket) -> list[OpOverload]:
    """Return the overloads of operators that are neither views, nor composites, and write no argument."""
    found = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return [
        operator
        for operator in found
        if torch._C._dispatch_has_kernel(operator.name())  # not so for TorchScript's own, of lists of tensors say
        and not operator._schema.is_mutable
        and not operator.is_view
        and any("Tensor" in str(argument.type) for argument in operator._schema.arguments)
        and not operator._can_decompose()
    ]


def parse_operators(names: str) -> list[OpOverload]:
    """Return aten's operators of a text of names."""
    # "name" is an operator's default overload, "name.overload" another, "name.*" the functional ones.
    found: list[OpOverload] = []
    for name, _, overload in (one.partition(".") for one in names.split()):
        packet = getattr(aten, name)
        found += list_functional_overloads(packet) if overload == "*" else [getattr(packet, overload or "default")]
    return found


def is_written_argument(argument: Any) -> bool:
    """Return whether an operator writes into this argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def map_arguments_by_name(operator: OpOverload, arguments: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call of an operator by their names, defaults too."""
    schema = operator._schema.arguments
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return given | dict(zip((argument.name for argument in schema), arguments)) | options


def find_functional_form(operator: OpOverload) -> OpOverload | None:
    """Return the overload of an in-place or out operator that writes none of its arguments; None without one."""
    name = operator._schema.name.removeprefix("aten::")
    is_out = any(argument.is_out for argument in operator._schema.arguments)
    packet = getattr(torch.ops.aten, name if is_out else name.removesuffix("_"), None)
    if packet is None or operator.namespace != "aten" or not (is_out or name.endswith("_")):
        return None
    wanted = sorted((a.name, str(a.type)) for a in operator._schema.arguments if not a.is_out)
    for overload in packet.overloads():
        candidate: OpOverload = getattr(packet, overload)
        taken = sorted((a.name, str(a.type)) for a in candidate._schema.arguments)
        if taken == wanted and not candidate._schema.is_mutable:
            return candidate
    return None


def make_writing_rule(
    operator: OpOverload,
    functional: OpOverload,
    write: Callable[[dict[str, Any], list[Any], list[Any]], None],
    run_plainly: Callable[..., Any] | None = None,
) -> Rule:
    """Return the rule of an operator that writes: its functional form, whose results `write` puts into the targets."""
    # `write` takes the arguments by name, the tensors to write into, and the results. `run_plainly` takes the operator
    # and its arguments where all targets are plain tensors.
    names = [argument.name for argument in operator._schema.arguments]
    written_names = [argument.name for argument in operator._schema.arguments if is_written_argument(argument)]
    taken = [argument.name for argument in functional._schema.arguments]

    def run(*arguments: Any, **options: Any) -> Any:
        given = dict(zip(names, arguments)) | options
        written = [given[name] for name in written_names]
        targets = tree_leaves(written)
        if run_plainly is not None and not any(isinstance(target, CompositeTensor) for target in targets):
            return run_plainly(operator, *arguments, **options)
        results = tree_leaves(functional(**{name: given[name] for name in taken if name in given}))
        for target, result in zip(targets, results, strict=True):
            if type(target) is Tensor and not target.numel():
                target.resize_(result.shape)  # as torch does
            if result.shape != target.shape:
                raise RuntimeError(
                    f"{operator}: a result of shape {list(result.shape)} for an output of shape {list(target.shape)}, "
                    "which is not resized as its memory is its views' too: give one of the result's shape"
                )
        write(given, targets, results)
        if not operator._schema.returns:
            return None
        return written[0] if len(written) == 1 else tuple(written)

    return run


def make_foreach_rule(operator: OpOverload) -> Rule | None:
    """Return torch's loop over lists, which every operator on lists has; None for other operators."""
    name = operator._schema.name

    def sum_powers(tensors: list[Tensor], order: Any = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
        return [torch.linalg.vector_norm(x, order, dtype=dtype) ** order for x in tensors]

    def loop(*arguments: Any, **options: Any) -> Any:
        return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *arguments, **options)

    if name == "aten::_foreach_powsum":  # whose operator of one tensor has no rule
        return sum_powers
    return loop if name.startswith("aten::_foreach_") else None


def refuse_operator(kind: str, operator: OpOverload, why: str, *arguments: Any, **options: Any) -> NoReturn:
    """Raise NotImplementedError for an operator that a class has no rule for, and for a reason can have none."""
    raise NotImplementedError(
        f"{operator} {why} and has no rule for {kind}s: register one by {kind}.implements, or use x.decode()"
    )


_FUSED_OPTIMIZER_NAMES = tuple(f"_fused_{name}" for name in ("adam", "adagrad", "sgd"))


def derive_common_rule(kind: str, operator: OpOverload, collectives_text: str) -> Rule | None:
    """Return the rule of an operator for which all classes derive the same: a refusal, or a view in place."""
    name = operator._schema.name.removeprefix("aten::")
    if is_collective(operator):
        return functools.partial(refuse_collective, operator, collectives_text)
    if name.startswith(_FUSED_OPTIMIZER_NAMES):
        why = "reads memory as plain numbers (make the optimizer with fused=False, or take one of halfulp.optim)"
        return functools.partial(refuse_operator, kind, operator, why)
    if name in ("resize_", "resize_as_", "set_"):
        return functools.partial(refuse_operator, kind, operator, "changes memory that views share")
    if torch.Tag.inplace_view in operator.tags and (functional := find_functional_form(operator)) is not None:
        return functools.partial(_run_view_in_place, operator, functional)
    return None


def _run_view_in_place(operator: OpOverload, functional: OpOverload, x: CompositeTensor, *arguments: Any) -> Any:
    """Run squeeze_ or transpose_: the tensor becomes a view of itself, and so do the plain tensors that hold it."""
    x._replace_by_views(lambda part: functional(part, *arguments))
    with no_dispatch():  # the shape that the wrapper itself reports
        return operator(x, *arguments)
