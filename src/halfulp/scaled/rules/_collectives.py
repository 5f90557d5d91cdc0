"""What collectives make of one scaled tensor: reductions, gathered and broadcast values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...subclass._collectives import get_group_size, register_collectives, run_collective_and_wait
from .. import _powers_of_two as _powers
from .._operands import wrap_rounded_payload
from .._registry import EIGHT_BIT_DTYPES, implements
from .._scaled_tensor import ScaledTensor, get_float32_payload, round_to_storage, wrap_payload
from .._write import write_values
from ._vocabulary import round_root_to_power_of_two


def choose_wire_storage(x: ScaledTensor) -> torch.dtype:
    """Return the type in which a payload is sent to be added or compared: float16 for eight bits."""
    return torch.float16 if x._payload.dtype in EIGHT_BIT_DTYPES else x._payload.dtype


def agree_on_scales(
    tensors: Sequence[ScaledTensor],
    find_largest: Callable[[Tensor], Tensor],
    terms: int,
    storage: torch.dtype | None = None,
) -> list[Tensor]:
    """Return scales that all ranks agree on in one message: the largest of each, with room for a sum."""
    # `find_largest` gives the elementwise maximum over all ranks; `terms` ranks are added, 1 for what is no sum;
    # payloads travel in `storage`, each in its own by default.

    def measure_amax(x: ScaledTensor) -> Tensor:
        if not x.numel():
            return x._scale.new_zeros(())
        return torch.nan_to_num(get_float32_payload(x), 0.0, 0.0, 0.0).abs().amax() * x._scale

    sent = torch.stack([*(x._scale for x in tensors), *map(measure_amax, tensors)])
    scales, amaxes = find_largest(sent).chunk(2)
    limits = [terms / torch.finfo(storage or choose_wire_storage(x)).max for x in tensors]
    needed = torch.stack([amax * limit for amax, limit in zip(amaxes.unbind(), limits)])
    needed = _powers.round_to_power(needed, "up")
    return list(
        torch.maximum(scales * round_root_to_power_of_two(terms), needed).clamp(max=_powers.LARGEST_SCALE).unbind()
    )


def _make_payload_under_agreed_scale(x: ScaledTensor, group: str, terms: int = 1) -> tuple[Tensor, Tensor]:
    """Return a scale that all ranks agree on, and the payload to send under it."""
    scale = agree_on_scales([x], lambda numbers: run_collective_and_wait("all_reduce", numbers, "max", group), terms)[0]
    payload = _powers.multiply_by_power(get_float32_payload(x), _powers.divide_scales(x._scale, scale))
    return scale, round_to_storage(payload, choose_wire_storage(x)).contiguous()


_SUPPORTED_REDUCTIONS = ("sum", "avg", "max", "min")


def reduce(x: ScaledTensor, reduction: str, group: str) -> ScaledTensor:
    """Return the reduction over all ranks of payloads under an agreed scale: some backends have no average."""
    if reduction not in _SUPPORTED_REDUCTIONS:
        raise NotImplementedError(
            f"reduction of scaled tensors by {reduction}: allowed are SUM, AVG, MAX and MIN; for others send x.decode()"
        )
    adds = reduction in ("sum", "avg")
    size = get_group_size(group) if adds else 1
    scale, payload = _make_payload_under_agreed_scale(x, group, size)
    values = run_collective_and_wait("all_reduce", payload, "sum" if adds else reduction, group)
    values = values.to(torch.float32) / (size if reduction == "avg" else 1)
    return wrap_rounded_payload(values, scale, choose_wire_storage(x), x.dtype)


def gather(x: ScaledTensor, group: str) -> ScaledTensor:
    """Return every rank's payload under the largest scale, one after another."""
    scale, payload = _make_payload_under_agreed_scale(x, group)
    return wrap_payload(
        run_collective_and_wait("all_gather_into_tensor", payload, get_group_size(group), group), scale, x.dtype
    )


register_collectives(functools.partial(implements, family="collectives"), write_values, reduce, gather)
