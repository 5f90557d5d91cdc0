"""Rules of torch.distributed's collectives on scaled tensors, functional ones too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..._torch_versions import ALL_GATHER, REDUCE_SCATTER, name_of_reduction
from ...kernels import torch_operators
from ...subclass import group_size
from ...subclass._collectives import run_and_wait
from .. import _powers_of_two as _powers
from .._operands import first_scaled, make_scaled, operand
from .._payloads import to_float32, to_storage
from .._registry import EIGHT_BITS, implements
from .._scaled_tensor import ScaledTensor, wrap
from .._write import write
from ._vocabulary import sqrt_of_count


def wire_storage(x: ScaledTensor) -> torch.dtype:
    """Return the type in which a payload is sent to be added or compared: float16 for eight bits."""
    return torch.float16 if x._payload.dtype in EIGHT_BITS else x._payload.dtype


def agreed_scales(
    tensors: Sequence[ScaledTensor],
    largest: Callable[[Tensor], Tensor],
    terms: int = 1,
    storage: torch.dtype | None = None,
) -> list[Tensor]:
    """Return scales that all ranks agree on, in one message: the largest of each, with room for a sum over ranks.

    Args:
        tensors: this rank's.
        largest: the elementwise maximum of a tensor over all ranks.
        terms: how many ranks are added; 1 for what is not a sum.
        storage: what the payloads travel as; each one's own by default.
    """
    scales = torch.stack([x._scale for x in tensors])
    amaxes = torch.stack([_amax(x) for x in tensors])
    scales, amaxes = largest(torch.cat([scales, amaxes])).chunk(2)
    limits = [terms / torch.finfo(storage or wire_storage(x)).max for x in tensors]
    needed = torch.stack([amax * limit for amax, limit in zip(amaxes.unbind(), limits)])
    needed = _powers.round_to_power(needed, "up")
    return list(torch.maximum(scales * sqrt_of_count(terms), needed).clamp(max=_powers.LARGEST).unbind())


def _amax(x: ScaledTensor) -> Tensor:
    if not x.numel():
        return x._scale.new_zeros(())
    return torch.nan_to_num(to_float32(x), 0.0, 0.0, 0.0).abs().amax() * x._scale


def payload_to_send(x: ScaledTensor, scale: Tensor) -> Tensor:
    """Return the payload to send, under an agreed scale."""
    return to_storage(_powers.times(to_float32(x), _powers.ratio(x._scale, scale)), wire_storage(x)).contiguous()


def _run_and_wait(collective: Callable, *arguments: Any, group: Any, **options: Any) -> Any:
    """Run a collective on plain tensors and wait for it: callers may read before they wait for its handle."""
    group = dist.ProcessGroup.unbox(group)
    work = collective(*arguments, group=group, async_op=True, **options)
    work.wait()
    return work.boxed()


def _agree_on_scale(tensors: Sequence[ScaledTensor], group: Any, terms: int = 1) -> list[Tensor]:
    def largest(x: Tensor) -> Tensor:
        _run_and_wait(dist.all_reduce, x, op=dist.ReduceOp.MAX, group=group)
        return x

    return agreed_scales(tensors, largest, terms)


def _kind(op: Any, name: str) -> str:
    """Return the name of a reduction from its boxed operator.

    Raises:
        NotImplementedError: none of sum, average, maximum and minimum, or torch does not say which.
    """
    kind = name_of_reduction(op)
    if kind not in ("SUM", "AVG", "MAX", "MIN"):
        raise NotImplementedError(
            f"{name} of scaled tensors by {kind}: allowed are SUM, AVG, MAX and MIN; for others send x.decode()"
        )
    return kind


def _terms(kind: str, group: Any) -> int:
    return dist.ProcessGroup.unbox(group).size() if kind in ("SUM", "AVG") else 1


def _reduction_on_wire(kind: str) -> Any:
    """Return the reduction to request from the backend: some have no average."""
    return getattr(dist.ReduceOp, "SUM" if kind == "AVG" else kind)


def _finish_reduction(payload: Tensor, scale: Tensor, kind: str, terms: int, dtype: torch.dtype) -> ScaledTensor:
    """Return a reduced payload under the agreed scale; averages divide in float32."""
    values = payload.to(torch.float32)
    return wrap(values / terms if kind == "AVG" else values, scale, dtype)


def allreduce_(tensors: Sequence[Tensor], group: Any, op: Any, *rest: Any, **options: Any) -> Any:
    """sum over ranks of payload x (scale / largest scale), under the largest scale."""
    mine = [operand(x, first_scaled(tensors)) for x in tensors]
    kind = _kind(op, "all_reduce")
    terms = _terms(kind, group)
    for target, x, scale in zip(tensors, mine, _agree_on_scale(mine, group, terms)):
        payload = payload_to_send(x, scale)
        work = _run_and_wait(dist.all_reduce, payload, op=_reduction_on_wire(kind), group=group)
        write(target, _finish_reduction(payload, scale, kind, terms, x.dtype))
    return list(tensors), work


def allreduce_coalesced_(tensors: Sequence[Tensor], group: Any, op: Any, *rest: Any, **options: Any) -> Any:
    """Apply `allreduce_` to each tensor."""
    return allreduce_(tensors, group, op)[1]


def reduce_(tensors: Sequence[Tensor], group: Any, op: Any, root: int, *rest: Any, **options: Any) -> Any:
    """Reduce like `allreduce_`, writing on the root only."""
    kept = [x.clone() for x in tensors]
    _, work = allreduce_(kept, group, op)
    if dist.ProcessGroup.unbox(group).rank() == root:
        for target, value in zip(tensors, kept):
            write(target, value)
    return work


def reduce_scatter_base_(output: Tensor, x: Tensor, group: Any, op: Any, *rest: Any, **options: Any) -> Any:
    """Write this rank's piece of the result of `allreduce_`."""
    x = operand(x, first_scaled((output, x)))
    kind = _kind(op, "reduce_scatter")
    terms = _terms(kind, group)
    (scale,) = _agree_on_scale([x], group, terms)
    payload = payload_to_send(x, scale)
    piece = payload.new_empty(output.shape)
    work = _run_and_wait(REDUCE_SCATTER, piece, payload, op=_reduction_on_wire(kind), group=group)
    write(output, _finish_reduction(piece, scale, kind, terms, x.dtype))
    return output, work


def reduce_scatter_(
    outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], group: Any, op: Any, *rest: Any, **options: Any
) -> Any:
    """Reduce lists of one tensor per rank, and keep this rank's (torch.distributed.reduce_scatter)."""
    for output, pieces in zip(outputs, inputs):
        _, work = reduce_scatter_base_(output, torch.cat([piece.reshape(-1) for piece in pieces]), group, op)
    return list(outputs), work


def allgather_(
    outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], group: Any, *rest: Any, **options: Any
) -> Any:
    """Gather every rank's payload and scale, unchanged."""
    for targets, x in zip(outputs, inputs):
        x = operand(x, first_scaled((*targets, x)))
        payload = x._payload.contiguous().view(torch.uint8) if x.dim() else x._payload.reshape(1).view(torch.uint8)
        payloads = [torch.empty_like(payload) for _ in targets]
        scales = [torch.empty_like(x._scale) for _ in targets]
        _run_and_wait(dist.all_gather, payloads, payload, group=group)
        work = _run_and_wait(dist.all_gather, scales, x._scale.contiguous(), group=group)
        for target, bits, scale in zip(targets, payloads, scales):
            write(target, wrap(bits.view(x._payload.dtype).reshape(x.shape), scale, x.dtype))
    return [list(targets) for targets in outputs], work


def allgather_base_(output: Tensor, x: Tensor, group: Any, *rest: Any, **options: Any) -> Any:
    """Gather every rank's payload under the largest scale, side by side."""
    x = operand(x, first_scaled((output, x)))
    (scale,) = _agree_on_scale([x], group)
    payload = payload_to_send(x, scale)
    gathered = payload.new_empty(output.shape)
    work = _run_and_wait(ALL_GATHER, gathered, payload, group=group)
    write(output, wrap(gathered, scale, x.dtype))
    return output, work


def broadcast_(tensors: Sequence[Tensor], group: Any, root: int, place: int, *rest: Any, **options: Any) -> Any:
    """Send payload and scale from one rank to the others."""
    for x in tensors:
        if not isinstance(x, ScaledTensor):
            work = _run_and_wait(dist.broadcast, x, group_src=root, group=group)
            continue
        payload = x._payload.contiguous().reshape(-1).view(torch.uint8).clone()
        scale = x._scale.clone()
        _run_and_wait(dist.broadcast, payload, group_src=root, group=group)
        work = _run_and_wait(dist.broadcast, scale, group_src=root, group=group)
        write(x, wrap(payload.view(x._payload.dtype).reshape(x.shape), scale, x.dtype))
    return list(tensors), work


def _register() -> None:
    c10d = torch_operators("c10d")
    rules: dict[str, Callable[..., Any]] = {
        "allreduce_": allreduce_,
        "allreduce_coalesced_": allreduce_coalesced_,
        "reduce_": reduce_,
        "_reduce_scatter_base_": reduce_scatter_base_,
        "reduce_scatter_": reduce_scatter_,
        "allgather_": allgather_,
        "_allgather_base_": allgather_base_,
        "broadcast_": broadcast_,
    }
    for name, rule in rules.items():
        implements(getattr(c10d, name).default, family="collectives")(rule)


if dist.is_available():
    _register()


_REDUCTIONS = ("sum", "avg", "max", "min")


def _agreed_scale(x: ScaledTensor, group: Any, terms: int = 1) -> Tensor:
    return agreed_scales([x], lambda numbers: run_and_wait("all_reduce", numbers, "max", group), terms)[0]


def _reduce_payloads(name: str, x: ScaledTensor, reduction: str, *arguments: Any) -> ScaledTensor:
    """Return the payloads under an agreed scale, reduced."""
    if reduction not in _REDUCTIONS:
        raise NotImplementedError(f"{name} of scaled tensors by {reduction!r}: allowed are {', '.join(_REDUCTIONS)}")
    adds = reduction in ("sum", "avg")
    size = group_size(arguments[-1]) if adds else 1
    scale = _agreed_scale(x, arguments[-1], size)
    values = run_and_wait(name, payload_to_send(x, scale), "sum" if adds else reduction, *arguments).to(torch.float32)
    return make_scaled(values / size if reduction == "avg" else values, scale, wire_storage(x), x.dtype)


def all_reduce(x: ScaledTensor, reduction: str, group: Any) -> ScaledTensor:
    """Return the reduction over all ranks."""
    return _reduce_payloads("all_reduce", x, reduction, group)


def reduce_scatter(x: ScaledTensor, reduction: str, size: int, group: Any) -> ScaledTensor:
    """Return this rank's piece of the reduction."""
    return _reduce_payloads("reduce_scatter_tensor", x, reduction, size, group)


def all_gather(x: ScaledTensor, size: int, group: Any) -> ScaledTensor:
    """Return every rank's payload under the largest scale, one after another."""
    agreed = _agreed_scale(x, group)
    payload = payload_to_send(x, agreed)
    return wrap(run_and_wait("all_gather_into_tensor", payload, size, group), agreed, x.dtype)


def all_to_all(x: ScaledTensor, output_sizes: Sequence[int], input_sizes: Sequence[int], group: Any) -> ScaledTensor:
    """Send rows of the payload to every rank under the largest scale; return the rows received."""
    agreed = _agreed_scale(x, group)
    payload = run_and_wait("all_to_all_single", payload_to_send(x, agreed), output_sizes, input_sizes, group)
    return wrap(payload, agreed, x.dtype)


def broadcast(x: ScaledTensor, source: int, group: Any) -> ScaledTensor:
    """Return one rank's payload and scale."""
    bits = run_and_wait("broadcast", x._payload.contiguous().reshape(-1).view(torch.uint8).clone(), source, group)
    scale = run_and_wait("broadcast", x._scale.reshape(1).clone(), source, group).reshape(())
    return wrap(bits.view(x._payload.dtype).reshape(x.shape), scale, x.dtype)


def wait_tensor(x: ScaledTensor) -> ScaledTensor:
    """Return the tensor: collectives here are complete when they return."""
    return wrap(x._payload, x._scale, x.dtype)


if dist.is_available():
    _functional = torch_operators("_c10d_functional")
    implements(_functional.all_reduce.default, family="collectives")(all_reduce)
    implements(_functional.reduce_scatter_tensor.default, family="collectives")(reduce_scatter)
    implements(_functional.all_gather_into_tensor.default, family="collectives")(all_gather)
    implements(_functional.all_to_all_single.default, family="collectives")(all_to_all)
    implements(_functional.broadcast.default, family="collectives")(broadcast)
    implements(_functional.wait_tensor.default, family="collectives")(wait_tensor)
