"""A communication hook for DistributedDataParallel that sends gradients as narrow payloads."""

from __future__ import annotations

import functools
import typing
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from .. import _powers_of_two as _powers
from .._operands import encode_values
from .._payloads import rms_scale, to_storage
from .._registry import check_storage
from ..rules._collectives import agreed_scales


def payload_hook(
    storage: torch.dtype | tuple[torch.dtype, dist.ProcessGroup], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Average gradients over ranks as payloads of a narrow dtype: a communication hook for DistributedDataParallel.

    `model.register_comm_hook(torch.float16, payload_hook)` installs it, for plain and for scaled parameters; for a
    model with a process group of its own `model.register_comm_hook((torch.float16, group), payload_hook)`.
    Every gradient takes the largest of the scales that the ranks measure for it, one message for a bucket, and room
    for the sum; then the payloads are added. float32 payloads give what DistributedDataParallel gives without a hook,
    float16 half the traffic.

    Args:
        storage: the payload's dtype: float16, bfloat16 or float32; or a pair of it and the model's process group.
        bucket: what DistributedDataParallel hands over: plain gradients side by side.

    Returns:
        A future of the bucket's averages.

    Raises:
        ValueError: another dtype; eight-bit payloads cannot be added on the wire.
    """
    kind, group = storage if isinstance(storage, tuple) else (storage, dist.group.WORLD)
    if check_storage(kind).itemsize < 2:
        raise ValueError(f"storage={kind}: eight-bit payloads cannot be added on the wire, give torch.float16")
    size = dist.get_world_size(group)
    gradients = bucket.gradients()
    mine = [encode_values(gradient, torch.float32, rms_scale(gradient, kind)) for gradient in gradients]
    scales = agreed_scales(mine, functools.partial(_largest, group), size, kind)
    payloads = [_powers.times(x._payload, _powers.ratio(x._scale, scale)) for x, scale in zip(mine, scales)]
    message = torch.cat([to_storage(payload.reshape(-1), kind) for payload in payloads])
    finished = dist.all_reduce(message, group=group, async_op=True).get_future()
    counts = [gradient.numel() for gradient in gradients]

    def averaged(future: torch.futures.Future[Any]) -> Tensor:
        received = future.value()[0] if isinstance(future.value(), list) else future.value()
        for gradient, piece, scale in zip(gradients, received.split(counts), scales):
            gradient.copy_((piece.to(torch.float32) / size * scale).view_as(gradient))
        return bucket.buffer()

    result: torch.futures.Future[Tensor] = finished.then(averaged)
    return result


if dist.is_available():
    # torch compares annotations, and knows no strings.
    payload_hook.__annotations__ = typing.get_type_hints(payload_hook)


def _largest(group: dist.ProcessGroup | None, x: Tensor) -> Tensor:
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x
