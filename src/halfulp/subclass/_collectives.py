"""Rules of torch.distributed's collectives, for all tensor subclasses here: from their functional form, or refused.

A class registers rules for the plain forms of `PLAIN_FORMS`; the forms on lists, in place and with out=, and those of
torch.distributed's own functions, follow from these, and all other operators of `NAMESPACES` are refused. Nothing else
may run on them: their results are memory that has not arrived yet, and a rule derived by computing on decoded values
would read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload

from .._torch_versions import name_of_reduction
from ..kernels import torch_operators
from ._rule_table import Rule

# Operators in which processes meet. Those of c10d write into their arguments; of the others torch.compile, DTensor and
# torch.distributed._functional_collectives make use.
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem")
PLAIN_FORMS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "broadcast")
# The identity on a result that is waited for; torch defines it as it imports torch.distributed._functional_collectives,
# which may be after the rules are registered.
_WAITED_MARK_OPERATOR = "_c10d_functional::_wrap_tensor_autograd"

# What is said too where tensor parallel begins, before any parameter is a DTensor.
_TENSOR_PARALLEL_TEXT = (
    ". Parameters: parallelize_module begins by this, and its layers add and scatter plain tensors. Use "
    "DistributedDataParallel, or give the plan plain parameters"
)

Write = Callable[[Tensor, Tensor], Any]


def run_and_wait(name: str, message: Tensor, *arguments: Any) -> Tensor:
    """Run a functional collective on a plain tensor, and return what has arrived."""
    functional = torch.ops._c10d_functional
    arrived: Tensor = functional.wait_tensor.default(getattr(functional, name).default(message, *arguments))
    return arrived


def is_collective(operator: OpOverload) -> bool:
    """Return whether an operator is a collective."""
    return operator.namespace in NAMESPACES


def derive_collective_rule(
    operator: OpOverload, rules: Mapping[OpOverload, Rule], write: Write, refuse: Callable[[OpOverload], NoReturn]
) -> Rule:
    """Return the rule of a collective, derived from the registered ones, or a function that refuses it.

    `write` copies a value into a tensor, `refuse` raises NotImplementedError in words.
    """

    def refused(*arguments: Any, **options: Any) -> NoReturn:
        try:
            refuse(operator)
        except NotImplementedError as error:
            more = _TENSOR_PARALLEL_TEXT if operator._schema.name == "c10d::scatter_" else ""
            raise NotImplementedError(f"{error}{more}") from None

    if operator.namespace == "c10d_functional" and operator._can_decompose():
        return operator.decompose  # older names, which give way to the operators of _c10d_functional
    if operator._schema.name == _WAITED_MARK_OPERATOR:
        return rules[torch.ops._c10d_functional.wait_tensor.default]
    name = operator._schema.name.partition("::")[2].removesuffix("_").removesuffix("_out").removesuffix("_coalesced")
    if operator.namespace not in ("_c10d_functional", "_c10d_functional_autograd") or name not in PLAIN_FORMS:
        return refused
    plain = getattr(torch.ops._c10d_functional, name).default
    if plain not in rules:
        return refused
    if plain._schema.name == operator._schema.name or operator.namespace == "_c10d_functional_autograd":
        return rules[plain]
    run = _make_waiting_call(plain)

    def run_in_place(x: Tensor, *rest: Any) -> Tensor:
        write(x, run(x, *rest))
        return x

    def run_with_out(x: Tensor, *rest: Any, out: Tensor) -> Tensor:
        write(out, run(x, *rest))
        return out

    if any(argument.is_out for argument in operator._schema.arguments):
        return run_with_out
    name = operator._schema.name
    if "_coalesced" in name:
        run_one: Rule = run_in_place if name.endswith("_") else run
        return lambda inputs, *rest: [run_one(x, *rest) for x in inputs]
    if name.endswith("_"):
        return run_in_place
    return refused


def _make_waiting_call(plain: OpOverload) -> Rule:
    """Return a function that runs the functional form and waits; plain tensors may stand in a list beside others."""

    def run(x: Tensor, *rest: Any) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor.default(plain(x, *rest))

    return run


def register_collectives(
    implements: Callable[[Any], Callable[[Rule], Rule]],
    functional_rules: Mapping[str, Rule],
    rules: Mapping[OpOverload, Rule],
    write: Write,
) -> None:
    """Register a class's rules of collectives: of the functional forms, and of c10d's operators, which follow.

    Args:
        implements: the class's decorator, by operator.
        functional_rules: by the name of the form, as of `PLAIN_FORMS`, and of its wait.
        rules: all of the class, in which c10d's operators look up their functional forms.
        write: writes a value into a tensor of the class.
    """
    functional = torch_operators("_c10d_functional")
    for name, rule in functional_rules.items() if torch.distributed.is_available() else ():
        implements(getattr(functional, name).default)(rule)
    for operator, rule in _make_eager_rules(rules, write).items():
        implements(operator)(rule)


def _make_eager_rules(rules: Mapping[OpOverload, Rule], write: Write) -> dict[OpOverload, Rule]:
    """Return rules of c10d's operators, which write into their arguments, made of their functional forms' rules.

    They are synchronous: callers may read before they wait for a handle.
    """
    if not torch.distributed.is_available():
        return {}
    c10d, functional = torch.ops.c10d, torch.ops._c10d_functional

    def reduced(plain: OpOverload, x: Tensor, group: Any, op: Any, *size: int) -> Tensor:
        return _make_waiting_call(plain)(x, name_of_reduction(op).lower(), *size, _get_group_name(group))

    def allreduce_(tensors: list[Tensor], group: Any, op: Any, *rest: Any, **options: Any) -> Any:
        for x in tensors:
            write(x, reduced(functional.all_reduce.default, x, group, op))
        return tensors, _make_finished_work()

    def reduce_(tensors: list[Tensor], group: Any, op: Any, root: int, *rest: Any, **options: Any) -> Any:
        for x in tensors:
            value = reduced(functional.all_reduce.default, x, group, op)
            if torch.distributed.ProcessGroup.unbox(group).rank() == root:
                write(x, value)
        return _make_finished_work()

    def reduce_scatter_base_(out: Tensor, x: Tensor, group: Any, op: Any, *rest: Any, **options: Any) -> Any:
        size = group_size(_get_group_name(group))
        piece = reduced(functional.reduce_scatter_tensor.default, x.reshape(-1), group, op, size)
        write(out, piece.reshape(out.shape))
        return out, _make_finished_work()

    def reduce_scatter_(outs: list[Tensor], inputs: Any, group: Any, op: Any, *rest: Any, **options: Any) -> Any:
        for out, pieces in zip(outs, inputs):
            reduce_scatter_base_(out, torch.cat([piece.reshape(-1) for piece in pieces]), group, op)
        return outs, _make_finished_work()

    def broadcast_(tensors: list[Tensor], group: Any, root: int, *rest: Any, **options: Any) -> Any:
        for x in tensors:
            write(x, _make_waiting_call(functional.broadcast.default)(x, root, _get_group_name(group)))
        return tensors, _make_finished_work()

    def allgather_(outs: Any, inputs: list[Tensor], group: Any, *rest: Any, **options: Any) -> Any:
        # One rank after another, so that each value keeps its own scale.
        for targets, x in zip(outs, inputs):
            for rank, target in enumerate(targets):
                write(target, _make_waiting_call(functional.broadcast.default)(x, rank, _get_group_name(group)))
        return outs, _make_finished_work()

    def allgather_base_(out: Tensor, x: Tensor, group: Any, *rest: Any, **options: Any) -> Any:
        run = _make_waiting_call(functional.all_gather_into_tensor.default)
        write(out, run(x.reshape(-1), group_size(_get_group_name(group)), _get_group_name(group)).reshape(out.shape))
        return out, _make_finished_work()

    made = (
        (functional.all_reduce, c10d.allreduce_, allreduce_),
        (functional.all_reduce, c10d.reduce_, reduce_),
        (functional.reduce_scatter_tensor, c10d._reduce_scatter_base_, reduce_scatter_base_),
        (functional.reduce_scatter_tensor, c10d.reduce_scatter_, reduce_scatter_),
        (functional.broadcast, c10d.broadcast_, broadcast_),
        (functional.broadcast, c10d.allgather_, allgather_),
        (functional.all_gather_into_tensor, c10d._allgather_base_, allgather_base_),
    )
    return {packet.default: rule for plain, packet, rule in made if plain.default in rules}


def _get_group_name(group: Any) -> str:
    name: str = torch.distributed.ProcessGroup.unbox(group).group_name
    return name


def _make_finished_work() -> Any:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future).boxed()


def group_size(group: Any) -> int:
    """Return the number of ranks in a group, given by its name or as an object."""
    return torch.distributed.distributed_c10d._resolve_process_group(group).size()
