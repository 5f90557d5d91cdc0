"""Rules of torch.distributed's functions, for all tensor subclasses here; every other collective is refused.

Functional collectives (DTensor, compiled graphs) are refused: their results are memory that has not arrived yet, and a
rule derived by computing on decoded values would read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload

from .._torch_versions import get_reduction_name
from ._composite_tensor import list_plain_tensors
from ._rule_table import Rule

# Operators in which processes meet. Those of c10d write into their arguments; of the others torch.compile, DTensor and
# torch.distributed._functional_collectives make use.
COLLECTIVE_NAMESPACES = {
    *("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem")
}

# What is said too where tensor parallel begins, before any parameter is a DTensor.
_TENSOR_PARALLEL_TEXT = (
    ". Parameters: parallelize_module begins by this, and its layers add and scatter plain tensors. Use "
    "DistributedDataParallel, or give the plan plain parameters"
)


def is_collective(operator: OpOverload) -> bool:
    """Return whether an operator is a collective."""
    return operator.namespace in COLLECTIVE_NAMESPACES


def refuse_collective(operator: OpOverload, text: str, *arguments: Any, **options: Any) -> NoReturn:
    """Raise NotImplementedError for a collective without a rule; the text says of what, and what to do."""
    more = _TENSOR_PARALLEL_TEXT if operator._schema.name == "c10d::scatter_" else ""
    raise NotImplementedError(f"{operator} {text}{more}")


def run_collective_and_wait(name: str, message: Tensor, *arguments: Any) -> Tensor:
    """Run a functional collective on a plain tensor, and return what has arrived."""
    functional = torch.ops._c10d_functional
    arrived: Tensor = functional.wait_tensor.default(getattr(functional, name).default(message, *arguments))
    return arrived


def register_collectives(
    implements: Callable[[Any], Callable[[Rule], Rule]],
    write: Callable[[Tensor, Tensor], Any],
    reduce: Rule | None = None,
    gather: Rule | None = None,
) -> None:
    """Register a class's rules of c10d's operators, which write into their arguments, and finish before they return."""
    # `write` writes a value into a tensor of the class; `reduce` takes a tensor, "sum", "avg", "max" or "min" and the
    # group's name; `gather` returns the ranks' values one after another.
    if not torch.distributed.is_available():
        return
    c10d = torch.ops.c10d

    @implements(c10d.broadcast_.default)
    def broadcast_(tensors: list[Tensor], group: Any, root: int, *rest: Any, **options: Any) -> Any:
        for x in tensors:
            write(x, _broadcast_parts(x, root, _get_group_name(group)))
        return tensors, _make_finished_work()

    @implements(c10d.allgather_.default)
    def allgather_(outs: Any, inputs: list[Tensor], group: Any, *rest: Any, **options: Any) -> Any:
        # One rank after another, so that each value keeps its own scale.
        for targets, x in zip(outs, inputs):
            for rank, target in enumerate(targets):
                write(target, _broadcast_parts(x, rank, _get_group_name(group)))
        return outs, _make_finished_work()

    if reduce is not None:

        @implements(c10d.allreduce_.default)
        def allreduce_(tensors: list[Tensor], group: Any, op: Any, *rest: Any, **options: Any) -> Any:
            for x in tensors:
                write(x, reduce(x, get_reduction_name(op).lower(), _get_group_name(group)))
            return tensors, _make_finished_work()

        @implements(c10d.reduce_.default)
        def reduce_(tensors: list[Tensor], group: Any, op: Any, root: int, *rest: Any, **options: Any) -> Any:
            for x in tensors:
                value = reduce(x, get_reduction_name(op).lower(), _get_group_name(group))
                if torch.distributed.ProcessGroup.unbox(group).rank() == root:
                    write(x, value)
            return _make_finished_work()

    if gather is not None:

        @implements(c10d._allgather_base_.default)
        def allgather_base_(out: Tensor, x: Tensor, group: Any, *rest: Any, **options: Any) -> Any:
            write(out, gather(x.reshape(-1), _get_group_name(group)).reshape(out.shape))
            return out, _make_finished_work()


def _broadcast_parts(x: Any, source: int, group: str) -> Tensor:
    """Return one rank's value: all plain tensors that hold it travel as one byte tensor."""
    inner = list_plain_tensors(x)
    message = torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in inner])
    pieces = run_collective_and_wait("broadcast", message, source, group).split([part.nbytes for part in inner])
    # A clone: a piece may start anywhere, and a view of another dtype may not.
    arrived = [piece.clone().view(part.dtype).reshape(part.shape) for piece, part in zip(pieces, inner)]
    made: Tensor = x._rebuild_like(arrived, False)
    return made


def _get_group_name(group: Any) -> str:
    name: str = torch.distributed.ProcessGroup.unbox(group).group_name
    return name


def _make_finished_work() -> Any:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future).boxed()


def get_group_size(group: Any) -> int:
    """Return the number of ranks in a group, given by its name."""
    return torch.distributed.distributed_c10d._resolve_process_group(group).size()
