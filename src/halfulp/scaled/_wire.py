"""Gradients of DistributedDataParallel as narrow payloads on the wire."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ._bilinear import root_of_count
from ._form import check_storage, measured_scale, narrowed


def payload_hook(storage: torch.dtype, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average gradients over ranks as payloads of a narrow dtype: a communication hook for DistributedDataParallel.

    `model.register_comm_hook(torch.float16, payload_hook)` installs it, for plain and for scaled parameters.
    Every gradient takes the largest of the scales that the ranks measure for it, one message for a bucket; then the
    payloads p / c are added, with c the power of two below the root of the number of ranks, so that the sum does not
    overflow. float32 payloads give what DistributedDataParallel gives without a hook, float16 half the traffic.

    Args:
        storage: the payload's dtype: float16, bfloat16 or float32.
        bucket: what DistributedDataParallel hands over: plain gradients side by side.

    Returns:
        A future of the bucket's averages.

    Raises:
        ValueError: another dtype; eight-bit payloads cannot be added on the wire.
    """
    if check_storage(storage).itemsize < 2:
        raise ValueError(f"storage={storage}: eight-bit payloads cannot be added on the wire, give torch.float16")
    gradients = bucket.gradients()
    size = dist.get_world_size()
    scales = torch.stack([measured_scale(gradient, storage) for gradient in gradients])
    dist.all_reduce(scales, op=dist.ReduceOp.MAX)
    spread = root_of_count(size)
    values = [g.to(torch.float32) / scale / spread for g, scale in zip(gradients, scales.unbind())]
    message = torch.cat([narrowed(v, storage).reshape(-1) for v in values])
    finished = dist.all_reduce(message, async_op=True).get_future()
    counts = [gradient.numel() for gradient in gradients]

    def averaged(future: torch.futures.Future) -> Tensor:
        received = future.value()[0] if isinstance(future.value(), list) else future.value()
        for gradient, piece, scale in zip(gradients, received.split(counts), scales.unbind()):
            mean = piece.to(torch.float32) / (size / spread) * scale
            gradient.copy_(mean.view_as(gradient))
        return bucket.buffer()

    return finished.then(averaged)
