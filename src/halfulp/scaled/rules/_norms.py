"""Rules of normalisation: payloads are normalised, eps divided by s^2, so that the result is under the scale 1.

Statistics are kept in the payloads' space: mean under the scale s, reciprocal deviation under 1 / s.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...kernels import torch_operators
from .. import _fused as fused
from .. import _powers_of_two as _powers
from .._operands import first_scaled, logical_of, make_scaled, operand, storage_of
from .._payloads import decode_values, to_float32
from .._registry import implements
from .._scaled_tensor import ScaledTensor, wrap
from .._write import write
from ._results import make_result, payloads_under, power_of_scale, scale_one, sqrt_of_count, value_of, values_under_one

aten = torch_operators("aten")


# From here on eps / s^2 plus squares may leave float32's range.
_LARGEST_EPS = 2.0**100


class NormInput:
    """The data of a normalisation: payloads where the scale is known and eps small beside it, else decoded values."""

    def __init__(self, x: ScaledTensor, eps: float) -> None:
        scale = _powers.concrete_value(x._scale)
        self.x, self.given_eps = x, eps
        own_eps = math.inf if scale is None else eps / scale**2
        self.exact = own_eps < _LARGEST_EPS
        self.data = to_float32(x) if self.exact else decode_values(x, torch.float32)
        self.eps = own_eps if self.exact else eps

    def mean(self, mean: Tensor) -> ScaledTensor:
        """Return a mean of the data under x's scale."""
        if not self.exact and fused.engaged(mean):
            return wrap(*fused.finish(mean, (self.x._scale,), torch.float32, "values"), torch.float32)
        own = self.x._scale.clone()
        return wrap(mean if self.exact else _powers.times(mean, _powers.ratio(scale_one(own), own)), own, torch.float32)

    def deviation(self, deviation: Tensor) -> ScaledTensor:
        """Return a reciprocal standard deviation of the data, under 1 / x's scale, or under eps' root if smaller."""
        if not self.exact and fused.engaged(deviation):
            largest = largest_deviation(self.given_eps)
            return wrap(*fused.finish(deviation, (self.x._scale,), torch.float32, "deviation", largest), torch.float32)
        held = scale_one(deviation) if not self.exact else reciprocal(self.x._scale)
        limit = deviation_scale(self.x, self.given_eps)
        return wrap(_powers.times(deviation, _powers.ratio(held, limit)), limit.clone(), torch.float32)


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / s, for the largest scale the smallest one."""
    return power_of_scale(scale, -1)[0]


def deviation_scale(x: ScaledTensor, eps: float) -> Tensor:
    """Return a scale for 1 / sqrt(var + eps)."""
    inverse = reciprocal(x._scale)
    if not eps > 0:
        return inverse
    return torch.minimum(inverse, torch.full_like(inverse, largest_deviation(eps)))


def largest_deviation(eps: float) -> float:
    """Return the largest scale of 1 / sqrt(var + eps)."""
    return _powers.power_of(eps**-0.5, "down") if eps > 0 else math.inf


def _make_normalised(y: Tensor, *operands: Any) -> ScaledTensor:
    given = [x for x in operands if isinstance(x, Tensor)]
    return values_under_one(y, storage_of(given), logical_of(given))


def _operand_values(*tensors: Any) -> list[Any]:
    return [value_of(x) for x in tensors]


@implements(aten.native_layer_norm.default, family="norm")
def layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(p - mean) / sqrt(var + eps / s^2) weight + bias under the scale 1."""
    given = NormInput(operand(x, first_scaled((x, weight, bias))), eps)
    y, mean, deviation = aten.native_layer_norm.default(given.data, shape, *_operand_values(weight, bias), given.eps)
    return _make_normalised(y, x, weight, bias), given.mean(mean), given.deviation(deviation)


@implements(aten.native_group_norm.default, family="norm")
def group_norm(x: Any, weight: Any, bias: Any, n: int, c: int, hw: int, group: int, eps: float) -> tuple:
    """(p - mean) / sqrt(var + eps / s^2) weight + bias under the scale 1, over groups of channels."""
    given = NormInput(operand(x, first_scaled((x, weight, bias))), eps)
    sizes = (n, c, hw, group)
    y, mean, deviation = aten.native_group_norm.default(given.data, *_operand_values(weight, bias), *sizes, given.eps)
    return _make_normalised(y, x, weight, bias), given.mean(mean), given.deviation(deviation)


@implements(aten._fused_rms_norm.default, family="norm")
def rms_norm(x: Any, shape: Any, weight: Any, eps: float | None) -> tuple[Tensor, Tensor]:
    """p / sqrt(mean(p^2) + eps / s^2) weight under the scale 1."""
    given = NormInput(operand(x, first_scaled((x, weight))), _default_eps(x.dtype) if eps is None else eps)
    dims = list(range(-len(shape), 0))
    deviation = (given.data.square().mean(dims, keepdim=True) + given.eps).rsqrt()
    y = given.data * deviation
    y = y if weight is None else y * value_of(weight)
    return _make_normalised(y, x, weight), given.deviation(deviation)


def _default_eps(dtype: torch.dtype) -> float:
    """Return torch's default eps of the type in which it computes."""
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def _statistics(x: ScaledTensor, mean: Any, deviation: Any) -> list[Tensor]:
    """Return saved statistics in the space of x's payload."""
    found = []
    if fused.engaged(x._payload):
        for saved, mode in ((mean, "ratio"), (deviation, "factor")):
            if saved is not None:
                saved = operand(saved, x)
                found.append(fused.finish(saved._payload, (saved._scale, x._scale), torch.float32, mode)[0])
        return found
    for saved, scale in ((mean, x._scale), (deviation, reciprocal(x._scale))):
        if saved is not None:
            saved = operand(saved, x)
            found.append(_powers.times(to_float32(saved), _powers.ratio(saved._scale, scale)))
    return found


def _gradients(g: ScaledTensor, x: ScaledTensor, results: Any, rows: int, deviation: Tensor, holder: Any) -> tuple:
    """Put x's gradient under gs times the deviation's scale, and the summed gradients of weight and bias under gs c."""
    to_x, *others = results
    if to_x is not None and fused.engaged(to_x):
        storage, dtype = storage_of([holder]), logical_of([holder])
        to_x = wrap(*fused.finish(to_x, (g._scale, deviation, x._scale), storage, "paired"), dtype)
    elif to_x is not None:
        to_x = _powers.times(to_x, _powers.ratio(reciprocal(x._scale), deviation))
        to_x = payloads_under(to_x, [g._scale, deviation], [holder])
    sum_scale = sqrt_of_count(rows)
    return to_x, *(y if y is None else payloads_under(y, [g._scale], [holder], sum_scale) for y in others)


def _scale_of(deviation: Any, x: ScaledTensor) -> Tensor:
    return deviation._scale if isinstance(deviation, ScaledTensor) else reciprocal(x._scale)


def _keep_requested(results: Any, mask: Any) -> list[Any]:
    return [y if wanted else None for y, wanted in zip(results, mask)]


@implements(aten.native_layer_norm_backward.default, family="norm")
def layer_norm_backward(
    gradient: Any, x: Any, shape: Any, mean: Any, deviation: Any, weight: Any, bias: Any, mask: Any
) -> tuple:
    """Return the gradient in payloads: to x under gs / xs."""
    like = first_scaled((gradient, x, weight))
    g, p = operand(gradient, like), operand(x, like)
    saved = _statistics(p, mean, deviation)
    arguments = (to_float32(g), to_float32(p), shape, *saved, *_operand_values(weight, bias), mask)
    results = _keep_requested(aten.native_layer_norm_backward.default(*arguments), mask)
    return _gradients(g, p, results, _rows(x, shape), _scale_of(deviation, p), first_scaled((gradient, like)))


def _rows(x: Tensor, shape: Any) -> int:
    rows = 1
    for size in x.shape[: x.dim() - len(shape)]:
        rows *= size
    return rows


@implements(aten.native_group_norm_backward.default, family="norm")
def group_norm_backward(
    gradient: Any, x: Any, mean: Any, deviation: Any, weight: Any, n: int, c: int, hw: int, group: int, mask: Any
) -> tuple:
    """Return the gradients of group normalisation with respect to its input, weight and bias."""
    like = first_scaled((gradient, x, weight))
    g, p = operand(gradient, like), operand(x, like)
    saved = _statistics(p, mean, deviation)
    arguments = (to_float32(g), to_float32(p), *saved, value_of(weight), n, c, hw, group, mask)
    results = _keep_requested(aten.native_group_norm_backward.default(*arguments), mask)
    return _gradients(g, p, results, n * hw, _scale_of(deviation, p), first_scaled((gradient, like)))


@implements(aten._fused_rms_norm_backward.default, family="norm")
def rms_norm_backward(gradient: Any, x: Any, shape: Any, deviation: Any, weight: Any, mask: Any) -> tuple:
    """d (g w - xhat mean(g w xhat)) with xhat = p d: to x under gs / xs."""
    like = first_scaled((gradient, x, weight))
    g, p = operand(gradient, like), operand(x, like)
    (inverse,) = _statistics(p, None, deviation)
    dims = list(range(-len(shape), 0))
    xhat = to_float32(p) * inverse
    weighted = to_float32(g) if weight is None else to_float32(g) * value_of(weight)
    to_x = inverse * (weighted - xhat * (weighted * xhat).mean(dims, keepdim=True))
    outer = list(range(x.dim() - len(shape)))
    to_weight = None
    if mask[1] and weight is not None:
        to_weight = to_float32(g) * xhat
        to_weight = to_weight.sum(outer) if outer else to_weight
    results = (to_x if mask[0] else None, to_weight)
    return _gradients(g, p, results, _rows(x, shape), _scale_of(deviation, p), first_scaled((gradient, like)))


def _batch_statistics(x: Any, weight: Any, bias: Any, eps: float) -> tuple:
    """Normalised over the batch; the saved statistics; the mean and the unbiased variance of the batch as values."""
    given = NormInput(operand(x, first_scaled((x, weight, bias))), eps)
    channels = x.shape[1]
    zeros = torch.zeros(channels, dtype=torch.float32, device=given.data.device)
    y, mean, deviation, average, variance = aten._native_batch_norm_legit_functional.default(
        given.data, *_operand_values(weight, bias), zeros, zeros.clone(), True, 1.0, given.eps
    )
    scale = given.x._scale.clone() if given.exact else scale_one(y)
    square, rest = _powers.product(scale, scale)
    batch = (wrap(average, scale, torch.float32), wrap(_powers.times(variance, rest), square, torch.float32))
    return _make_normalised(y, x, weight, bias), given.mean(mean), given.deviation(deviation), batch


def _step_average(running: Any, batch: ScaledTensor, momentum: float) -> Any:
    """Return a moving average after one step: scaled if the average is."""
    if not isinstance(running, ScaledTensor):
        return running * (1 - momentum) + decode_values(batch, running.dtype) * momentum
    wide = wrap(to_float32(running), running._scale, running.dtype)
    mean: Any = batch * momentum + wide * (1 - momentum)
    return make_scaled(to_float32(mean), mean._scale, running._payload.dtype, running.dtype)


def _normalise_in_evaluation(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, eps: float) -> tuple:
    values = _operand_values(x, weight, bias, mean, variance)
    y, *_ = aten._native_batch_norm_legit_no_training.default(*values, 0.0, eps)
    empty = torch.empty(0, dtype=torch.float32, device=y.device)
    return _make_normalised(y, x, weight, bias, mean, variance), empty, empty.clone()


@implements(aten.native_batch_norm.default, aten._native_batch_norm_legit.default, family="norm")
def batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> tuple:
    """Normalised over the batch in training, the running statistics moved in place; else by those."""
    if not training:
        return _normalise_in_evaluation(x, weight, bias, mean, variance, eps)
    y, saved, deviation, batch = _batch_statistics(x, weight, bias, eps)
    for running, new in zip((mean, variance), batch):
        if running is not None:
            write(running, _step_average(running, new, momentum))
    return y, saved, deviation


@implements(aten._native_batch_norm_legit.no_stats, family="norm")
def batch_norm_without_running(x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> tuple:
    """Normalise over the batch."""
    return batch_norm(x, weight, bias, None, None, True, momentum, eps)


@implements(aten._native_batch_norm_legit_no_training.default, family="norm")
def batch_norm_of_running(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> tuple:
    """Normalised by running statistics."""
    return _normalise_in_evaluation(x, weight, bias, mean, variance, eps)


@implements(aten._native_batch_norm_legit_functional.default, family="norm")
def batch_norm_functional(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> tuple:
    """Normalise like `native_batch_norm`, returning the moved running statistics as results."""
    if not training:
        return *_normalise_in_evaluation(x, weight, bias, mean, variance, eps), mean.clone(), variance.clone()
    y, saved, deviation, batch = _batch_statistics(x, weight, bias, eps)
    return y, saved, deviation, _step_average(mean, batch[0], momentum), _step_average(variance, batch[1], momentum)


def _reserve(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device)


@implements(aten._batch_norm_with_update.default, family="norm")
def batch_norm_with_update(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> tuple:
    """Normalised over the batch, the running statistics moved in place."""
    return *batch_norm(x, weight, bias, mean, variance, True, momentum, eps), _reserve(x)


@implements(aten._batch_norm_with_update_functional.default, family="norm")
def batch_norm_with_update_functional(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> tuple:
    """Normalise over the batch, returning the moved running statistics as results."""
    results = batch_norm_functional(x, weight, bias, mean, variance, True, momentum, eps)
    return *results[:3], _reserve(x), *results[3:]


@implements(aten._batch_norm_no_update.default, family="norm")
def batch_norm_no_update(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> tuple:
    """Normalised by running statistics."""
    return *_normalise_in_evaluation(x, weight, bias, mean, variance, eps), _reserve(x)


implements(aten.miopen_batch_norm.default, family="norm")(batch_norm)


@implements(aten.cudnn_batch_norm.default, family="norm")
def cudnn_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> tuple:
    """Normalise like `native_batch_norm`."""
    results = batch_norm(x, weight, bias, mean, variance, training, momentum, eps)
    return *results, _reserve(x)


@implements(aten.native_batch_norm_backward.default, family="norm")
def batch_norm_backward(
    gradient: Any,
    x: Any,
    weight: Any,
    mean: Any,
    variance: Any,
    saved: Any,
    deviation: Any,
    train: bool,
    eps: float,
    mask: Any,
) -> tuple:
    """Return the gradient in payloads: to x under gs / xs, to weight and bias under gs c."""
    like = first_scaled((gradient, x, weight, mean, variance))
    g, p = operand(gradient, like), operand(x, like)
    rows, holder = x.numel() // max(x.shape[1], 1), first_scaled((gradient, like))
    if train:
        statistics = (None, None, *_statistics(p, saved, deviation), True, 0.0, mask)
        results = aten.native_batch_norm_backward.default(to_float32(g), to_float32(p), value_of(weight), *statistics)
        return _gradients(g, p, _keep_requested(results, mask), rows, _scale_of(deviation, p), holder)
    statistics = (*_operand_values(x, weight, mean, variance), None, None, False, eps, mask)
    to_x, *others = _keep_requested(aten.native_batch_norm_backward.default(to_float32(g), *statistics), mask)
    scale = deviation_scale(p, eps)
    to_x = to_x if to_x is None else _powers.times(to_x, _powers.ratio(scale_one(to_x), reciprocal(p._scale)))
    return _gradients(g, p, (to_x, *others), rows, scale, holder)


@implements(aten.batch_norm_backward.default, family="norm")
def batch_norm_backward_reserved(
    gradient: Any, x: Any, weight: Any, mean: Any, variance: Any, saved: Any, deviation: Any, *rest: Any
) -> tuple:
    """Return the gradients of `native_batch_norm_backward`."""
    return batch_norm_backward(gradient, x, weight, mean, variance, saved, deviation, *rest[:3])


@implements(aten.cudnn_batch_norm_backward.default, aten.miopen_batch_norm_backward.default, family="norm")
def cudnn_batch_norm_backward(
    x: Any, gradient: Any, weight: Any, mean: Any, variance: Any, saved: Any, deviation: Any, eps: float, *_: Any
) -> tuple:
    """Return the gradients of `native_batch_norm_backward`."""
    mask = (True, True, True)
    return batch_norm_backward(gradient, x, weight, mean, variance, saved, deviation, True, eps, mask)


@implements(aten._weight_norm_interface_backward.default, family="norm")
def weight_norm_backward(gradient: Any, v: Any, g: Any, norms: Any, dim: int) -> tuple[Tensor, Tensor]:
    """Return gradients to v: g / |v| (gradient - v <gradient, v> / |v|^2), and to g: <gradient, v> / |v|."""
    given = (gradient, v, g, norms)
    like = first_scaled(given)
    to_w, x, size, length = (operand(y, like) for y in given)
    # The norms are brought under v's scale, so that v / |v| needs none.
    n = _powers.times(to_float32(length), _powers.ratio(length._scale, x._scale))
    dims = [i for i in range(v.dim()) if i != dim % v.dim()]
    unit = to_float32(x) / n
    along = (to_float32(to_w) * unit).sum(dims, keepdim=True)
    to_v = to_float32(size) / n * (to_float32(to_w) - unit * along)
    storage, dtype = storage_of(given), logical_of(given)
    inverse, _ = power_of_scale(x._scale, -1)
    scale, rest = _powers.product(to_w._scale, size._scale, inverse)
    return make_result(to_v, scale, rest, storage, dtype), make_result(along, to_w._scale.clone(), 1.0, storage, dtype)
