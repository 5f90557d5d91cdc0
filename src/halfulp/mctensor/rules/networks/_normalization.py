"""Batch normalization: its running statistics are written beside the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kernels import torch_operators
from ....subclass._in_backward import unrounded_results
from ..._mctensor import MCTensor
from ..._plain_operands import encode_plain_operands
from ..._registry import implements
from ..._result_type import evaluate, result_type
from ..._write import write_value

aten = torch_operators("aten")


@implements(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def native_batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_variance: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) * weight + bias, and the mean and the root's inverse that it took."""
    form = result_type((x, weight, bias, running_mean, running_variance))
    x, weight, bias, mean, variance = encode_plain_operands((x, weight, bias, running_mean, running_variance), form)
    with unrounded_results():
        if training:
            dims = [i for i in range(x.dim()) if i != 1]
            variance, mean = torch.var_mean(x, dims, correction=0)
            _update(running_mean, mean, momentum)
            count = x.numel() // max(x.shape[1], 1)
            _update(running_variance, variance * count / max(count - 1, 1), momentum)
        inverse = (variance + eps).rsqrt()
        shape = [1, -1] + [1] * (x.dim() - 2)
        out = (x - mean.reshape(shape)) * inverse.reshape(shape)
        out = out if weight is None else out * weight.reshape(shape)
        out = out if bias is None else out + bias.reshape(shape)
    return (out, mean, inverse) if training else (out, x.new_empty((0,)), x.new_empty((0,)))


def _update(running: Any, now: Any, momentum: float) -> None:
    """Update a running statistic in place: running + momentum (now - running)."""
    if running is None:
        return
    result = evaluate("addcmul", running, now - running, momentum, form=result_type((running, now)))
    if isinstance(running, MCTensor) or isinstance(result, MCTensor):
        write_value(running, result)
    else:
        running.copy_(result)
