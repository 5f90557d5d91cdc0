"""Linear and cubic interpolation, with weights of all digits: torch's formula has those of the components' dtype."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....arithmetic import MOST
from ....kernels import torch_operators
from ....subclass._in_backward import COMPONENTS
from ..._derivation import beyond_float64
from ..._mctensor import MCTensor
from ..._result_type import result_type
from ..elementwise._powers import round_to_type

aten = torch_operators("aten")

# Keys' kernel with this parameter, as in torch: "Cubic convolution interpolation for digital image processing" (1981).
_A = -0.75


class _Axis(NamedTuple):
    """A dimension, its length before and after, align_corners, and the requested scale factor."""

    dim: int
    inside: int
    outside: int
    align_corners: bool
    factor: float | None


def _sources(axis: _Axis, device: torch.device) -> Any:
    """Return the position of each new element among the old ones."""
    places = torch.arange(axis.outside, dtype=torch.float64, device=device)
    at: Any = MCTensor.encode(places, MOST, gradients=COMPONENTS)
    if axis.align_corners:
        return at * (axis.inside - 1) / max(axis.outside - 1, 1)
    if axis.factor is not None and axis.factor > 0:
        return (at + 0.5) / axis.factor - 0.5
    return (at + 0.5) * axis.inside / axis.outside - 0.5


def _linear(axis: _Axis, device: torch.device) -> list[tuple[Tensor, MCTensor]]:
    """Return the two neighbours of each new element, and their weights."""
    at: Any = _sources(axis, device)
    if axis.inside == axis.outside:  # torch copies, whatever factor was asked for
        at = _sources(axis._replace(align_corners=True), device)
    at = torch.maximum(at, torch.zeros_like(at))
    left = at.floor().decode().long().clamp(max=axis.inside - 1)
    right = (left + 1).clamp(max=axis.inside - 1)
    share: Any = torch.minimum(at - left, torch.ones_like(at))
    return [(left, 1 - share), (right, share)]


def _cubic(axis: _Axis, device: torch.device) -> list[tuple[Tensor, MCTensor]]:
    """Return the four neighbours of each new element, and their weights."""
    at: Any = _sources(axis, device)
    first = at.floor().decode().long()
    t: Any = at - first
    near = [((_A + 2) * x - (_A + 3)) * x * x + 1 for x in (t, 1 - t)]
    far = [((_A * x - 5 * _A) * x + 8 * _A) * x - 4 * _A for x in (t + 1, 2 - t)]
    weights = (far[0], near[0], near[1], far[1])
    return [((first + k - 1).clamp(0, axis.inside - 1), weight) for k, weight in enumerate(weights)]


def _weighted(x: Any, values: Any, weight: MCTensor, dim: int) -> Tensor:
    own = round_to_type(weight, result_type((x,))._replace(gradients=COMPONENTS, scaled=False))
    return values * own.reshape([-1 if i == dim else 1 for i in range(x.dim())])


def _resampled(x: Any, axis: _Axis, taps: Callable) -> Tensor:
    """Each new element as the weighted sum of its neighbours along one axis."""
    found: Any = None
    for index, weight in taps(axis, x.device):
        term = _weighted(x, x.index_select(axis.dim, index), weight, axis.dim)
        found = term if found is None else found + term
    return found


def _scattered(gradient: Any, axis: _Axis, taps: Callable) -> Tensor:
    """The derivative of `_resampled`: each new element's gradient, weighted, added to its neighbours."""
    pairs = taps(axis, gradient.device)
    shape = [axis.inside if i == axis.dim else size for i, size in enumerate(gradient.shape)]
    values = torch.cat([_weighted(gradient, gradient, weight, axis.dim) for _, weight in pairs], axis.dim)
    return values.new_zeros(shape).index_add(axis.dim, torch.cat([index for index, _ in pairs]), values)


def _axes(inside: Sequence[int], outside: Sequence[int], align: bool, factors: Sequence) -> list[_Axis]:
    every = itertools.zip_longest(inside, outside, factors)
    return [_Axis(2 + i, before, after, align, factor) for i, (before, after, factor) in enumerate(every)]


def _along_axes(step: Callable, taps: Callable) -> Callable:
    """A rule that takes one axis after another: `_resampled` the result, `_scattered` the gradient.

    Its arguments are torch's: the size after, of the gradient the shape before, whether corners fall together, factors.
    """

    def interpolate(x: Any, size: Sequence[int], *arguments: Any, **named: Any) -> Tensor:
        shape, align_corners, *factors = (x.shape, *arguments) if step is _resampled else arguments
        for axis in _axes(shape[2:], size, align_corners, (*factors, *named.values())):
            x = step(x, axis, taps)
        return x

    return interpolate


def _by_factors(taps: Callable) -> Callable:
    """The rule of the overload that takes a size or factors."""
    interpolate = _along_axes(_resampled, taps)

    def by_factors(x: Any, size: Sequence[int] | None, align_corners: bool, factors: Sequence[float] | None) -> Tensor:
        factors = None if size is not None else factors
        size = size if factors is None else [int(n * factor) for n, factor in zip(x.shape[2:], factors)]
        return interpolate(x, size, align_corners, *(factors or ()))

    return by_factors


FORWARD: dict[OpOverload, Callable] = {
    aten.upsample_linear1d.default: _along_axes(_resampled, _linear),
    aten.upsample_bilinear2d.default: _along_axes(_resampled, _linear),
    aten.upsample_trilinear3d.default: _along_axes(_resampled, _linear),
    aten.upsample_bicubic2d.default: _along_axes(_resampled, _cubic),
}
BY_FACTORS: dict[OpOverload, Callable] = {
    aten.upsample_linear1d.vec: _by_factors(_linear),
    aten.upsample_bilinear2d.vec: _by_factors(_linear),
    aten.upsample_trilinear3d.vec: _by_factors(_linear),
    aten.upsample_bicubic2d.vec: _by_factors(_cubic),
}
_BACKWARD: dict[OpOverload, Callable] = {
    aten.upsample_linear1d_backward.default: _along_axes(_scattered, _linear),
    aten.upsample_bilinear2d_backward.default: _along_axes(_scattered, _linear),
    aten.upsample_trilinear3d_backward.default: _along_axes(_scattered, _linear),
    aten.upsample_bicubic2d_backward.default: _along_axes(_scattered, _cubic),
}
for _operator, _rule in (FORWARD | _BACKWARD).items():
    beyond_float64(_operator)(_rule)
