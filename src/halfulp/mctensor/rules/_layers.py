"""Pooling and batch normalization."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...kernels import torch_operators
from ...subclass._in_backward import disable_result_rounding
from .._derivation import fall_back_to_float64, implements_beyond_float64
from .._mctensor import MCTensor, implements
from .._result_type import encode_plain_operands, result_type, run_function
from .._write import write_value
from ._products import fold_windows, pad_borders, repeat_sizes, window_views
from ._reductions import add_rows

aten = torch_operators("aten")


@implements_beyond_float64(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(gradient: Any, x: Any, *rest: Any) -> Tensor:
    """Return the gradient added where the largest values were."""
    indices = rest[-1]
    planes = x.shape[:-2].numel()
    offset = torch.arange(planes, device=x.device, dtype=torch.int64).reshape(-1, 1) * x.shape[-1] * x.shape[-2]
    at = (indices.reshape(planes, -1) + offset).reshape(-1)
    return add_rows(gradient.new_zeros((x.numel(),)), at, gradient.reshape(-1)).reshape(x.shape)


@implements_beyond_float64(aten.max_pool2d_with_indices.default)
def max_pool2d_with_indices(
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the largest value of each window, and where it is in its plane."""
    if ceil_mode:
        given = (x, kernel, stride, padding, dilation, ceil_mode)
        return fall_back_to_float64(aten.max_pool2d_with_indices.default, given, {})
    kernel, padding, dilation = (list(v) * (2 // len(v)) for v in (kernel, padding, dilation))
    stride = list(stride) * (2 // len(stride)) if len(stride) else kernel
    height, width = padding
    frame = (width, width, height, height)
    places = torch.arange(x.shape[-1] * x.shape[-2], device=x.device, dtype=torch.int64).reshape(x.shape[-2:]).double()
    places = aten.constant_pad_nd.default(places, frame, 0.0).expand(*x.shape[:-2], -1, -1).contiguous()
    seen = window_views(aten.constant_pad_nd.default(x, frame, -torch.inf), kernel, stride, dilation).flatten(-2)
    at = seen.argmax(-1, keepdim=True)
    found = window_views(places, kernel, stride, dilation).flatten(-2).gather(-1, at).squeeze(-1).long()
    return seen.gather(-1, at).squeeze(-1), found


def _make_window_setup(spatial: int, kernel: Sequence, stride: Sequence, padding: Sequence) -> dict:
    kernel = repeat_sizes(kernel, spatial)
    stride = repeat_sizes(stride, spatial) if len(stride) else kernel
    return {
        "kernel": kernel,
        "stride": stride,
        "padding": repeat_sizes(padding, spatial),
        "dilation": [1] * spatial,
    }


def _view_windows(x: Any, setup: dict) -> Any:
    padded = pad_borders(x, setup["padding"]).contiguous()
    return window_views(padded, setup["kernel"], setup["stride"], setup["dilation"])


def _find_window_divisors(x: Any, setup: dict, include_pad: bool, divisor: int | None) -> Any:
    """Return the divisor of each window's sum."""
    if divisor or include_pad:
        return divisor or math.prod(setup["kernel"])
    spatial = len(setup["kernel"])
    ones = torch.ones(x.shape[-spatial:], dtype=torch.float64, device=x.device)
    return _view_windows(ones, setup).flatten(-spatial).sum(-1)


def _make_average_pool_rule(operator: OpOverload, spatial: int) -> Callable:
    def avg_pool(
        x: Any,
        kernel: Sequence,
        stride: Sequence = (),
        padding: Sequence = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        if ceil_mode:
            given = (x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
            return fall_back_to_float64(operator, given, {})
        setup = _make_window_setup(spatial, kernel, stride, padding)
        return _view_windows(x, setup).flatten(-spatial).sum(-1) / _find_window_divisors(
            x, setup, count_include_pad, divisor_override
        )

    return avg_pool


def _make_average_pool_gradient_rule(operator: OpOverload, spatial: int) -> Callable:
    def avg_pool_backward(gradient: Any, x: Any, *rest: Any) -> Tensor:
        kernel, stride, padding, ceil_mode, count_include_pad, divisor = rest
        if ceil_mode:
            return fall_back_to_float64(operator, (gradient, x, *rest), {})
        setup = _make_window_setup(spatial, kernel, stride, padding)
        share = gradient / _find_window_divisors(x, setup, count_include_pad, divisor)
        lead, places = x.shape[:-spatial], gradient.shape[-spatial:]
        taps = share.reshape(1, lead.numel(), 1, *places).expand(-1, -1, math.prod(setup["kernel"]), *[-1] * spatial)
        grown = [n + 2 * p for n, p in zip(x.shape[-spatial:], setup["padding"])]
        into = fold_windows(taps, [1, lead.numel(), *grown], places, setup)
        inside = tuple(slice(p, p + n) for n, p in zip(x.shape[-spatial:], setup["padding"]))
        return into[(0, slice(None), *inside)].reshape(x.shape)

    return avg_pool_backward


for _operator, _spatial in ((aten.avg_pool2d.default, 2), (aten.avg_pool3d.default, 3)):
    implements_beyond_float64(_operator)(_make_average_pool_rule(_operator, _spatial))
for _operator, _spatial in ((aten.avg_pool2d_backward.default, 2), (aten.avg_pool3d_backward.default, 3)):
    implements_beyond_float64(_operator)(_make_average_pool_gradient_rule(_operator, _spatial))


def _make_window_matrix(size: int, count: int, device: torch.device) -> Tensor:
    """Return a matrix of 0 and 1: which of `size` elements each of `count` windows holds."""
    at = torch.arange(size, dtype=torch.int64, device=device)
    window = torch.arange(count, dtype=torch.int64, device=device).unsqueeze(1)
    first, last = window * size // count, -((window + 1) * size // -count)
    return ((at >= first) & (at < last)).double()


@implements_beyond_float64(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(x: Any, size: Sequence[int]) -> Tensor:
    """Return the means of windows that divide each side evenly."""
    rows, columns = (_make_window_matrix(n, m, x.device) for n, m in zip(x.shape[-2:], size))
    counts = rows.sum(1, keepdim=True) * columns.sum(1)
    return rows @ x @ columns.mT / counts


@implements_beyond_float64(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(gradient: Any, x: Any) -> Tensor:
    """Spread each mean's gradient over its window."""
    rows, columns = (_make_window_matrix(n, m, x.device) for n, m in zip(x.shape[-2:], gradient.shape[-2:]))
    counts = rows.sum(1, keepdim=True) * columns.sum(1)
    return rows.mT @ (gradient / counts) @ columns


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
    with disable_result_rounding():
        if training:
            dims = [i for i in range(x.dim()) if i != 1]
            variance, mean = torch.var_mean(x, dims, correction=0)
            _update_running_statistic(running_mean, mean, momentum)
            count = x.numel() // max(x.shape[1], 1)
            _update_running_statistic(running_variance, variance * count / max(count - 1, 1), momentum)
        inverse = (variance + eps).rsqrt()
        shape = [1, -1] + [1] * (x.dim() - 2)
        out = (x - mean.reshape(shape)) * inverse.reshape(shape)
        out = out if weight is None else out * weight.reshape(shape)
        out = out if bias is None else out + bias.reshape(shape)
    return (out, mean, inverse) if training else (out, x.new_empty((0,)), x.new_empty((0,)))


def _update_running_statistic(running: Any, now: Any, momentum: float) -> None:
    """Update a running statistic in place: running + momentum (now - running)."""
    if running is None:
        return
    result = run_function("addcmul", running, now - running, momentum, form=result_type((running, now)))
    if isinstance(running, MCTensor) or isinstance(result, MCTensor):
        write_value(running, result)
    else:
        running.copy_(result)
