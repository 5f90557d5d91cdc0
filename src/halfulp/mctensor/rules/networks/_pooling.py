"""Pooling: the largest value or the mean of windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....kernels import torch_operators
from ..._derivation import beyond_float64, fall_back_to_float64
from ..products._convolution import fold_windows, window_views
from ..reductions._index_add import add_rows

aten = torch_operators("aten")


@beyond_float64(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(gradient: Any, x: Any, *rest: Any) -> Tensor:
    """The gradient added where the largest values were."""
    indices = rest[-1]
    planes = x.shape[:-2].numel()
    offset = torch.arange(planes, device=x.device, dtype=torch.int64).reshape(-1, 1) * x.shape[-1] * x.shape[-2]
    at = (indices.reshape(planes, -1) + offset).reshape(-1)
    return add_rows(gradient.new_zeros((x.numel(),)), at, gradient.reshape(-1)).reshape(x.shape)


@beyond_float64(aten.max_pool2d_with_indices.default)
def max_pool2d_with_indices(
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """The largest value of each window, and where it is in its plane."""
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


def _per_dimension(value: Sequence[int], spatial: int) -> list[int]:
    return list(value) * (spatial // len(value))


def _setup(spatial: int, kernel: Sequence, stride: Sequence, padding: Sequence) -> dict:
    kernel = _per_dimension(kernel, spatial)
    stride = _per_dimension(stride, spatial) if len(stride) else kernel
    return {"kernel": kernel, "stride": stride, "padding": _per_dimension(padding, spatial), "dilation": [1] * spatial}


def _padded(x: Any, setup: dict) -> Any:
    frame = [p for pad in reversed(setup["padding"]) for p in (pad, pad)]
    return aten.constant_pad_nd.default(x, frame, 0).contiguous()


def _windows_of(x: Any, setup: dict) -> Any:
    return window_views(_padded(x, setup), setup["kernel"], setup["stride"], setup["dilation"])


def _divisors(x: Any, setup: dict, include_pad: bool, divisor: int | None) -> Any:
    """Return the divisor of each window's sum."""
    if divisor or include_pad:
        return divisor or math.prod(setup["kernel"])
    spatial = len(setup["kernel"])
    ones = torch.ones(x.shape[-spatial:], dtype=torch.float64, device=x.device)
    return _windows_of(ones, setup).flatten(-spatial).sum(-1)


def _average_pool(operator: OpOverload, spatial: int) -> Callable:
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
        setup = _setup(spatial, kernel, stride, padding)
        return _windows_of(x, setup).flatten(-spatial).sum(-1) / _divisors(
            x, setup, count_include_pad, divisor_override
        )

    return avg_pool


def _mean_backward(operator: OpOverload, spatial: int) -> Callable:
    def avg_pool_backward(gradient: Any, x: Any, *rest: Any) -> Tensor:
        kernel, stride, padding, ceil_mode, count_include_pad, divisor = rest
        if ceil_mode:
            return fall_back_to_float64(operator, (gradient, x, *rest), {})
        setup = _setup(spatial, kernel, stride, padding)
        share = gradient / _divisors(x, setup, count_include_pad, divisor)
        lead, places = x.shape[:-spatial], gradient.shape[-spatial:]
        taps = share.reshape(1, lead.numel(), 1, *places).expand(-1, -1, math.prod(setup["kernel"]), *[-1] * spatial)
        grown = [n + 2 * p for n, p in zip(x.shape[-spatial:], setup["padding"])]
        into = fold_windows(taps, [1, lead.numel(), *grown], places, setup)
        inside = tuple(slice(p, p + n) for n, p in zip(x.shape[-spatial:], setup["padding"]))
        return into[(0, slice(None), *inside)].reshape(x.shape)

    return avg_pool_backward


for _operator, _spatial in ((aten.avg_pool2d.default, 2), (aten.avg_pool3d.default, 3)):
    beyond_float64(_operator)(_average_pool(_operator, _spatial))
for _operator, _spatial in ((aten.avg_pool2d_backward.default, 2), (aten.avg_pool3d_backward.default, 3)):
    beyond_float64(_operator)(_mean_backward(_operator, _spatial))


def _spans(size: int, count: int, device: torch.device) -> Tensor:
    """Return a matrix of 0 and 1: which of `size` elements each of `count` windows holds."""
    at = torch.arange(size, dtype=torch.int64, device=device)
    window = torch.arange(count, dtype=torch.int64, device=device).unsqueeze(1)
    first, last = window * size // count, -((window + 1) * size // -count)
    return ((at >= first) & (at < last)).double()


@beyond_float64(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(x: Any, size: Sequence[int]) -> Tensor:
    """The means of windows that divide each side evenly."""
    rows, columns = (_spans(n, m, x.device) for n, m in zip(x.shape[-2:], size))
    counts = rows.sum(1, keepdim=True) * columns.sum(1)
    return rows @ x @ columns.mT / counts


@beyond_float64(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(gradient: Any, x: Any) -> Tensor:
    """Each mean's gradient shared out over its window."""
    rows, columns = (_spans(n, m, x.device) for n, m in zip(x.shape[-2:], gradient.shape[-2:]))
    counts = rows.sum(1, keepdim=True) * columns.sum(1)
    return rows.mT @ (gradient / counts) @ columns
