"""Pooling, interpolation and batch normalization."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...arithmetic import MOST
from ...kernels import torch_operators
from ...subclass._in_backward import COMPONENTS, disable_result_rounding
from .._derivation import fall_back_to_float64, implements_beyond_float64
from .._mctensor import MCTensor, implements
from .._result_type import encode_plain_operands, result_type, run_function
from .._write import write_value
from ._pointwise import round_to_type
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


# Keys' kernel with this parameter, as in torch: "Cubic convolution interpolation for digital image processing" (1981).
_CUBIC_SLOPE = -0.75


class _InterpolatedAxis(NamedTuple):
    """A dimension, its length before and after, align_corners, and the requested scale factor."""

    dim: int
    inside: int
    outside: int
    align_corners: bool
    factor: float | None


def _find_source_positions(axis: _InterpolatedAxis, device: torch.device) -> Any:
    """Return the position of each new element among the old ones."""
    places = torch.arange(axis.outside, dtype=torch.float64, device=device)
    at: Any = MCTensor.encode(places, MOST, gradients=COMPONENTS)
    if axis.align_corners:
        return at * (axis.inside - 1) / max(axis.outside - 1, 1)
    if axis.factor is not None and axis.factor > 0:
        return (at + 0.5) / axis.factor - 0.5
    return (at + 0.5) * axis.inside / axis.outside - 0.5


def _find_linear_weights(axis: _InterpolatedAxis, device: torch.device) -> list[tuple[Tensor, MCTensor]]:
    """Return the two neighbours of each new element, and their weights."""
    at: Any = _find_source_positions(axis, device)
    if axis.inside == axis.outside:  # torch copies, whatever factor was asked for
        at = _find_source_positions(axis._replace(align_corners=True), device)
    at = torch.maximum(at, torch.zeros_like(at))
    left = at.floor().decode().long().clamp(max=axis.inside - 1)
    right = (left + 1).clamp(max=axis.inside - 1)
    share: Any = torch.minimum(at - left, torch.ones_like(at))
    return [(left, 1 - share), (right, share)]


def _find_cubic_weights(axis: _InterpolatedAxis, device: torch.device) -> list[tuple[Tensor, MCTensor]]:
    """Return the four neighbours of each new element, and their weights."""
    at: Any = _find_source_positions(axis, device)
    first = at.floor().decode().long()
    t: Any = at - first
    near = [((_CUBIC_SLOPE + 2) * x - (_CUBIC_SLOPE + 3)) * x * x + 1 for x in (t, 1 - t)]
    far = [
        ((_CUBIC_SLOPE * x - 5 * _CUBIC_SLOPE) * x + 8 * _CUBIC_SLOPE) * x - 4 * _CUBIC_SLOPE for x in (t + 1, 2 - t)
    ]
    weights = (far[0], near[0], near[1], far[1])
    return [((first + k - 1).clamp(0, axis.inside - 1), weight) for k, weight in enumerate(weights)]


def _multiply_by_weight(x: Any, values: Any, weight: MCTensor, dim: int) -> Tensor:
    own = round_to_type(weight, result_type((x,))._replace(gradients=COMPONENTS, scaled=False))
    return values * own.reshape([-1 if i == dim else 1 for i in range(x.dim())])


def _resample_axis(x: Any, axis: _InterpolatedAxis, taps: Callable) -> Tensor:
    """Compute each new element as the weighted sum of its neighbours along one axis."""
    found: Any = None
    for index, weight in taps(axis, x.device):
        term = _multiply_by_weight(x, x.index_select(axis.dim, index), weight, axis.dim)
        found = term if found is None else found + term
    return found


def _resample_gradient(gradient: Any, axis: _InterpolatedAxis, taps: Callable) -> Tensor:
    """Return the derivative of `_resample_axis`: each new element's gradient, weighted, added to its neighbours."""
    pairs = taps(axis, gradient.device)
    shape = [axis.inside if i == axis.dim else size for i, size in enumerate(gradient.shape)]
    values = torch.cat([_multiply_by_weight(gradient, gradient, weight, axis.dim) for _, weight in pairs], axis.dim)
    return values.new_zeros(shape).index_add(axis.dim, torch.cat([index for index, _ in pairs]), values)


def _make_axes(
    inside: Sequence[int], outside: Sequence[int], align: bool, factors: Sequence
) -> list[_InterpolatedAxis]:
    every = itertools.zip_longest(inside, outside, factors)
    return [_InterpolatedAxis(2 + i, before, after, align, factor) for i, (before, after, factor) in enumerate(every)]


def _make_interpolation_rule(step: Callable, taps: Callable) -> Callable:
    """Return a rule that takes one axis after another: `_resample_axis` the result, `_resample_gradient` the gradient.

    Its arguments are torch's: the size after, of the gradient the shape before, whether corners fall together, factors.
    """

    def interpolate(x: Any, size: Sequence[int], *arguments: Any, **named: Any) -> Tensor:
        shape, align_corners, *factors = (x.shape, *arguments) if step is _resample_axis else arguments
        for axis in _make_axes(shape[2:], size, align_corners, (*factors, *named.values())):
            x = step(x, axis, taps)
        return x

    return interpolate


def _make_interpolation_by_factors(taps: Callable) -> Callable:
    """Return the rule of the overload that takes a size or factors."""
    interpolate = _make_interpolation_rule(_resample_axis, taps)

    def by_factors(x: Any, size: Sequence[int] | None, align_corners: bool, factors: Sequence[float] | None) -> Tensor:
        factors = None if size is not None else factors
        size = size if factors is None else [int(n * factor) for n, factor in zip(x.shape[2:], factors)]
        return interpolate(x, size, align_corners, *(factors or ()))

    return by_factors


INTERPOLATION_RULES: dict[OpOverload, Callable] = {}
INTERPOLATION_RULES_BY_FACTORS: dict[OpOverload, Callable] = {}
_INTERPOLATION_GRADIENT_RULES: dict[OpOverload, Callable] = {}
for _name, _taps in (
    ("linear1d", _find_linear_weights),
    ("bilinear2d", _find_linear_weights),
    ("trilinear3d", _find_linear_weights),
    ("bicubic2d", _find_cubic_weights),
):
    INTERPOLATION_RULES[getattr(aten, f"upsample_{_name}").default] = _make_interpolation_rule(_resample_axis, _taps)
    INTERPOLATION_RULES_BY_FACTORS[getattr(aten, f"upsample_{_name}").vec] = _make_interpolation_by_factors(_taps)
    _INTERPOLATION_GRADIENT_RULES[getattr(aten, f"upsample_{_name}_backward").default] = _make_interpolation_rule(
        _resample_gradient, _taps
    )
for _operator, _rule in (INTERPOLATION_RULES | _INTERPOLATION_GRADIENT_RULES).items():
    implements_beyond_float64(_operator)(_rule)


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
