"""Convolution as matrix products over windows, forward and backward, in any number of dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....kernels import torch_operators
from ..._derivation import beyond_float64

aten = torch_operators("aten")


def _per_dimension(value: Sequence[int], count: int) -> list[int]:
    return list(value) * (count // len(value))


def _padded(x: Any, padding: Sequence[int]) -> Any:
    frame = [p for pad in reversed(padding) for p in (pad, pad)]
    return aten.constant_pad_nd.default(x, frame, 0) if any(frame) else x


def _columns(x: Any, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int) -> Any:
    """All windows as matrices: (batch, groups, channels of a group x taps, places)."""
    seen = window_views(x.contiguous(), kernel, stride, dilation)
    batch, channels, spatial = x.shape[0], x.shape[1], len(kernel)
    places = seen.shape[2 : 2 + spatial]
    order = [0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial)]
    return seen.permute(order).reshape(batch, groups, channels // groups * math.prod(kernel), places.numel())


def _forward(x: Any, weight: Any, setup: dict) -> Any:
    groups, kernel, stride, dilation = (setup[k] for k in ("groups", "kernel", "stride", "dilation"))
    columns = _columns(_padded(x, setup["padding"]), kernel, stride, dilation, groups)
    matrix = weight.reshape(groups, weight.shape[0] // groups, -1)
    out = torch.matmul(matrix, columns)
    sizes = _output_sizes(x.shape[2:], setup)
    return out.reshape([x.shape[0], weight.shape[0], *sizes])


def _output_sizes(sizes: Sequence[int], setup: dict) -> list[int]:
    every = zip(sizes, setup["kernel"], setup["stride"], setup["dilation"], setup["padding"])
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, d, p in every]


def _to_input(gradient: Any, weight: Any, sizes: Sequence[int], setup: dict) -> Any:
    """Return the gradient of the input, of these sizes; this is the transposed convolution, too."""
    groups, padding = setup["groups"], setup["padding"]
    batch, channels, places = gradient.shape[0], weight.shape[1] * groups, gradient.shape[2:]
    matrix = weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2)
    columns = torch.matmul(matrix, gradient.reshape(batch, groups, weight.shape[0] // groups, -1))
    grown = [n + 2 * p for n, p in zip(sizes, padding)]
    into = fold_windows(columns, [batch, channels, *grown], places, setup)
    return into[(slice(None), slice(None), *(slice(p, p + n) for n, p in zip(sizes, padding)))]


def _to_weight(gradient: Any, x: Any, shape: Sequence[int], setup: dict) -> Any:
    """Return the gradient of the weight: one product over positions and batch together."""
    groups = setup["groups"]
    columns = _columns(_padded(x, setup["padding"]), setup["kernel"], setup["stride"], setup["dilation"], groups)
    rows = gradient.reshape(x.shape[0], groups, shape[0] // groups, -1)
    left = rows.permute(1, 2, 0, 3).reshape(groups, shape[0] // groups, -1)
    right = columns.permute(1, 0, 3, 2).reshape(groups, -1, columns.shape[2])
    return torch.matmul(left, right).reshape(list(shape))


def _setup(weight: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> dict:
    spatial = weight.dim() - 2
    given = {"stride": stride, "padding": padding, "dilation": dilation}
    return {k: _per_dimension(v, spatial) for k, v in given.items()} | {
        "kernel": list(weight.shape[2:]),
        "groups": groups,
    }


@beyond_float64(aten.convolution.default, aten.convolution_overrideable.default)
def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Tensor:
    """A convolution, or a transposed one, with its bias."""
    setup = _setup(weight, stride, padding, dilation, groups)
    if transposed:
        every = zip(x.shape[2:], setup["kernel"], setup["stride"], setup["dilation"], setup["padding"])
        extra = _per_dimension(output_padding, weight.dim() - 2)
        sizes = [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for (n, k, s, d, p), e in zip(every, extra)]
        out = _to_input(x, weight, sizes, setup)
    else:
        out = _forward(x, weight, setup)
    return out if bias is None else out + bias.reshape([-1] + [1] * (weight.dim() - 2))


@beyond_float64(aten.convolution_backward.default, aten.convolution_backward_overrideable.default)
def convolution_backward(
    gradient: Any,
    x: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight and bias, as far as they are wanted."""
    setup = _setup(weight, stride, padding, dilation, groups)
    to_input, to_weight, to_bias = output_mask
    spatial = list(range(2, weight.dim()))
    if transposed:
        first = _forward(gradient, weight, setup) if to_input else None
        second = _to_weight(x, gradient, weight.shape, setup) if to_weight else None
    else:
        first = _to_input(gradient, weight, x.shape[2:], setup) if to_input else None
        second = _to_weight(gradient, x, weight.shape, setup) if to_weight else None
    return first, second, gradient.sum([0, *spatial]) if to_bias else None


def window_views(x: Any, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Any:
    """All windows over the last dimensions as a view: (..., out..., kernel...)."""
    spatial = len(kernel)
    lead, sizes = x.shape[:-spatial], x.shape[-spatial:]
    steps, leads = x.stride()[-spatial:], x.stride()[:-spatial]
    counts = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(sizes, kernel, stride, dilation)]
    if min(counts) < 1:
        raise RuntimeError(f"a kernel of {tuple(kernel)} is larger than the padded input of {tuple(sizes)}")
    strides = [*leads, *(a * s for a, s in zip(steps, stride)), *(a * d for a, d in zip(steps, dilation))]
    return x.as_strided([*lead, *counts, *kernel], strides, x.storage_offset())


def fold_windows(columns: Any, size: Sequence[int], places: Sequence[int], setup: dict) -> Any:
    """Windows' values, (batch, channels x taps, places), summed where they overlap: one strided sum per tap."""
    kernel, stride, dilation = setup["kernel"], setup["stride"], setup["dilation"]
    into = columns.new_zeros(list(size))
    columns = columns.reshape([size[0], size[1], math.prod(kernel), *places])
    for tap in range(math.prod(kernel)):
        at = torch.unravel_index(torch.tensor(tap, dtype=torch.int64, device="cpu"), tuple(kernel))
        reach = tuple(
            slice(int(a) * d, int(a) * d + s * (n - 1) + 1, s) for a, d, s, n in zip(at, dilation, stride, places)
        )
        into[(slice(None), slice(None), *reach)] += columns[:, :, tap]
    return into
