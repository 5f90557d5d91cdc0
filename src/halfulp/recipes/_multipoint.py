"""multipoint: weights of few bits, with a second or third point for the output channels that need one."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._messages import name_type
from ._training_step import call_model_on_batch

_CONVOLUTION_CLASSES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRIED_SCALE_SHARES = torch.linspace(0.3, 1.0, 15, dtype=torch.float64, device="cpu").tolist()
_MOST_POINTS_PER_CHANNEL = 4
_SCALE_BYTES = 4
_CHANNEL_INDEX_BYTES = 4  # the index of a channel beside an extra point


@dataclass
class LayerPoints:
    """One layer's points per output channel, the bytes of all, and its error, the same with one point as `before`.

    An error is the mean square of what quantization changes in the outputs over that of the outputs, on the batches.
    """

    name: str
    points: Tensor
    bytes: int
    error: float
    before: float


@dataclass
class Multipoint:
    """The result of `multipoint`: each layer's points, the bytes with one point per channel, and layers left alone."""

    layers: dict[str, LayerPoints]
    single_bytes: int
    kept: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all quantized weights."""
        return sum(layer.bytes for layer in self.layers.values())

    def __str__(self) -> str:
        """A table of layers."""
        ratio = self.bytes / self.single_bytes
        lines = [f"{self.bytes:,} bytes, {ratio:.3f} times those of one point per channel"]
        for layer in self.layers.values():
            counts = ", ".join(f"{int((layer.points == n).sum())} of {n}" for n in layer.points.unique().tolist())
            lines.append(f"  {layer.name}: error {layer.before:.2e} -> {layer.error:.2e}, channels by points {counts}")
        return "\n".join([*lines, *([f"  kept: {', '.join(self.kept)}"] if self.kept else [])])


class MultipointLayer(nn.Module):
    """A linear layer or convolution whose weight is a sum of points: integers of few bits, each with a scale.

    Its buffers are the codes of all points packed into uint8, and of each point a float32 scale and the number of its
    output channel.
    """

    like: Tensor
    codes: Tensor
    scales: Tensor
    channels: Tensor

    def __init__(self, layer: nn.Module, bits: int, codes: Tensor, scales: Tensor, channels: Tensor) -> None:
        super().__init__()
        self.bits: int = bits
        self.shape: tuple[int, ...] = tuple(cast(Tensor, layer.weight).shape)
        self._convolves = isinstance(layer, _CONVOLUTION_CLASSES)
        # Of the dtype of the weight, which it follows when the model is converted.
        self.register_buffer("like", cast(Tensor, layer.weight).detach().new_empty(0), persistent=False)
        self.register_buffer("codes", pack_codes(codes, bits))
        self.register_buffer("scales", scales.float())
        self.register_buffer("channels", channels.to(torch.int32))
        del layer.weight
        self.layer = layer

    @property
    def weight(self) -> Tensor:
        """The weight that the points sum to."""
        scales, channels = self.scales, self.channels
        codes = unpack_codes(self.codes, self.bits, len(scales) * math.prod(self.shape[1:]))
        points = codes.view(len(scales), -1).to(torch.float32) * scales[:, None]
        rows = torch.zeros(self.shape[0], points.shape[1], dtype=torch.float32, device=points.device)
        return rows.index_add(0, channels, points).view(self.shape).to(self.like.dtype)

    @property
    def bias(self) -> Tensor | None:
        """The layer's bias."""
        return cast("Tensor | None", self.layer.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MultipointLayer:
        """Convert and move the layer; its scales keep their digits."""
        scales, convert = self.scales, cast("Callable[..., nn.Module]", super()._apply)
        convert(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
        return self

    def forward(self, input: Tensor) -> Tensor:
        """The layer's forward pass."""
        if self._convolves:
            convolved: Tensor = cast(Any, self.layer)._conv_forward(input, self.weight, self.bias)
            return convolved
        return F.linear(input, self.weight, self.bias)


def multipoint(
    model: nn.Module,
    bits: int,
    batches: Iterable[Any],
    budget: float = 1.1,
    *,
    keep: str | Iterable[str] = (),
) -> Multipoint:
    """Quantize weights to a few bits in place after training, with several points for channels that need them.

    Multipoint quantization (Liu, Ye, Zhou and Liu, arXiv 2002.09049): the weights w of an output channel become

        w ~ a_1 q_1 + ... + a_n q_n,   (a_k, q_k) = argmin |r_k - a q|,   r_1 = w,   r_{k+1} = r_k - a_k q_k,

    with integers q from -(2^(b-1) - 1) to 2^(b-1) - 1. Given a, q is r / a rounded; given q, a = <r, q> / <q, q>. The
    first a is searched by the error of the outputs, E (r . x)^2 over the batches, the others by |r - a q|. Where n
    grows is chosen by that error too, as a share of the layer's outputs: the point that removes most per byte comes
    next, while the budget lasts; n is at most 4.

    Args:
        model: its linear layers and convolutions are replaced by `MultipointLayer`.
        bits: of a code, 2 to 8.
        batches: inputs for the model, a few hundred examples: tensors, tuples of arguments or dicts of them.
        budget: bytes of the quantized weights with their scales, over those with one point per channel.
        keep: a glob, or several, over names of layers that stay as they are.

    Returns:
        A table of points, errors and bytes.

    Raises:
        ValueError: bits out of range, no batches, no such layer or one with forward hooks, a glob that matches none,
            numbers that are not finite, or a budget that no choice meets.
        TypeError: no module, or a budget that is no number.

    >>> import torch, halfulp as hu
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    >>> made = hu.multipoint(model, 4, [torch.randn(256, 64)], budget=1.2)
    >>> made.bytes <= 1.2 * made.single_bytes, model[0].codes.dtype
    (True, torch.uint8)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"multipoint takes a torch.nn.Module, got {name_type(model)}")
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(f"bits={bits!r}: a code has 2 to 8")
    kinds = (nn.Linear, *_CONVOLUTION_CLASSES)
    layers = {
        name: m
        for name, m in model.named_modules()
        if name and type(m) in kinds and hasattr(m, "weight") and m.weight.is_floating_point() and m.weight.numel()
    }
    globs = [keep] if isinstance(keep, str) else list(keep)
    idle = [glob for glob in globs if not any(fnmatchcase(name, glob) for name in layers)]
    if idle:
        raise ValueError(f"keep={idle!r} matches none of the layers {', '.join(layers) or '(there is none)'}")
    kept = tuple(name for name in layers if any(fnmatchcase(name, glob) for glob in globs))
    chosen = {name: layer for name, layer in layers.items() if name not in kept}
    if not chosen:
        raise ValueError(f"no linear layer or convolution is left to quantize: {', '.join(layers) or 'there is none'}")
    for name, layer in chosen.items():
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise ValueError(f"layer {name} has forward hooks, which its successor does not run: remove them before")
        if not layer.weight.isfinite().all():
            raise ValueError(f"the weight of layer {name} is not finite, which no code is: leave it out by keep=")
    sizes = {name: math.ceil(layer.weight[0].numel() * bits / 8) + _SCALE_BYTES for name, layer in chosen.items()}
    single = sum(size * len(chosen[name].weight) for name, size in sizes.items())
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise TypeError(f"budget={budget!r} is {name_type(budget)}: give a number, 1.1 for a tenth more bytes")
    if not budget >= 1:
        raise ValueError(
            f"budget={budget!r} is met by no choice: one point of {bits} bits per channel already takes {single:,} "
            "bytes, which counts as 1; give 1 or more, or fewer bits"
        )
    moments = _measure_input_second_moments(model, chosen, batches)
    ladders = {name: _CandidatePoints(layer, bits, moments[name]) for name, layer in chosen.items()}
    points = _choose_point_counts_by_channel(ladders, sizes, single * (budget - 1))
    made, quantized = {}, {}
    for name, ladder in ladders.items():
        count, channels = int(points[name].sum()), len(points[name])
        held = count * sizes[name] + (count - channels) * _CHANNEL_INDEX_BYTES
        errors = ladder.compute_error(points[name]), ladder.compute_error(torch.ones_like(points[name]))
        made[name] = LayerPoints(name, points[name], held, *errors)
        numbers = torch.arange(_MOST_POINTS_PER_CHANNEL, dtype=torch.int64, device="cpu")
        k, c = (numbers[:, None] < points[name]).nonzero().unbind(1)
        quantized[chosen[name]] = MultipointLayer(chosen[name], bits, ladder.codes[k, c], ladder.scales[k, c], c)
    for owner in [*model.modules()]:  # a layer may stand in several places
        for key, layer in owner._modules.items():
            if layer in quantized:
                setattr(owner, key, quantized[layer])
    return Multipoint(made, single, kept)


class _CandidatePoints:
    """Points of all channels of a layer, most first: codes [points, channels, inputs], scales [points, channels].

    `errors` [points + 1, channels] are what n points leave of E (r . x)^2, over the mean square of an output.
    """

    def __init__(self, layer: Any, bits: int, moment: Tensor) -> None:
        residual = layer.weight.detach().to("cpu", torch.float64).flatten(1)
        errors, codes, scales = [_compute_output_errors(residual, moment)], [], []
        for k in range(_MOST_POINTS_PER_CHANNEL):
            code, a = _fit_codes_and_scale_to_rows(residual, 2 ** (bits - 1) - 1, None if k else moment)
            residual = residual - a[:, None] * code
            codes.append(code)
            scales.append(a)
            errors.append(_compute_output_errors(residual, moment))
        self.codes, self.scales, self.errors = torch.stack(codes), torch.stack(scales), torch.stack(errors)
        self.errors /= float(self.errors[0].mean()) or 1.0

    def compute_error(self, points: Tensor) -> float:
        """Return the error of the layer with so many points by channel."""
        return float(self.errors.gather(0, points[None]).mean())


def _fit_codes_and_scale_to_rows(residual: Tensor, max_code: int, moment: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the codes and scale of each row that leave the smallest error, of outputs or of weights."""
    largest = residual.abs().amax(1)
    best = torch.full_like(largest, torch.inf)
    codes, scales = torch.zeros_like(residual), torch.zeros_like(largest)
    for share in _TRIED_SCALE_SHARES:
        a = torch.where(largest > 0, share * largest / max_code, 1.0)
        code = (residual / a[:, None]).round().clamp(-max_code, max_code)
        norm = code.square().sum(1)
        a = torch.where(norm > 0, (residual * code).sum(1) / norm.clamp(min=1), a)
        left = residual - a[:, None] * code
        error = left.square().sum(1) if moment is None else _compute_output_errors(left, moment)
        better = error < best
        best = torch.where(better, error, best)
        codes, scales = torch.where(better[:, None], code, codes), torch.where(better, a, scales)
    return codes, scales


def _compute_output_errors(rows: Tensor, moment: Tensor) -> Tensor:
    """Return E (row . x)^2 of each row under the second moment of its group's inputs."""
    grouped = rows.view(len(moment), -1, rows.shape[1])
    return ((grouped @ moment) * grouped).sum(2).flatten()


def _choose_point_counts_by_channel(
    ladders: Mapping[str, _CandidatePoints], sizes: Mapping[str, int], bytes_left: float
) -> dict[str, Tensor]:
    """Return the points of each channel: one, and then that which removes most error per byte while bytes are left."""
    points = {name: torch.ones_like(ladder.scales[0], dtype=torch.int64) for name, ladder in ladders.items()}
    costs = {name: size + _CHANNEL_INDEX_BYTES for name, size in sizes.items()}
    # What one more point adds to the error, per byte: by layer and channel.
    added_errors = {name: (ladder.errors.diff(dim=0) / costs[name]).tolist() for name, ladder in ladders.items()}
    heap = [
        (added, name, channel) for name, by_points in added_errors.items() for channel, added in enumerate(by_points[1])
    ]
    heapq.heapify(heap)
    while heap:
        added, name, channel = heapq.heappop(heap)
        if added >= 0 or costs[name] > bytes_left:
            continue
        bytes_left -= costs[name]
        points[name][channel] += 1
        n = int(points[name][channel])
        if n < _MOST_POINTS_PER_CHANNEL:
            heapq.heappush(heap, (added_errors[name][n][channel], name, channel))
    return points


def _measure_input_second_moments(
    model: nn.Module, chosen: Mapping[str, Any], batches: Iterable[Any]
) -> dict[str, Tensor]:
    """Return E x x^T of what each layer's output channels read, [groups, inputs, inputs], in float64 on the CPU."""
    sums: dict[str, Tensor] = {}
    counts = dict.fromkeys(chosen, 0)

    def add_moment(name: str, layer: Any, x: Tensor) -> None:
        rows = _unfold_input_rows(layer, x.detach().to("cpu", torch.float64))
        sums[name] = sums.get(name, 0) + rows.transpose(1, 2) @ rows
        counts[name] += rows.shape[1]

    handles = [
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs, name=name: add_moment(name, layer, *args, *kwargs.values()), with_kwargs=True
        )
        for name, layer in chosen.items()
    ]
    training, seen = [module for module in model.modules() if module.training], 0
    try:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                seen += 1
                call_model_on_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    if not seen:
        raise ValueError("batches= holds nothing: give a few hundred inputs of the model, [x] for one batch")
    missing = [name for name, count in counts.items() if not count]
    if missing:
        raise ValueError(f"the batches do not reach {', '.join(missing)}: leave them out by keep=, or give others")
    wrong = [name for name in chosen if not sums[name].isfinite().all()]
    if wrong:
        raise ValueError(f"what {', '.join(wrong)} read is not finite: give batches on which the model is")
    return {name: sums[name] / counts[name] for name in chosen}


def _unfold_input_rows(layer: Any, x: Tensor) -> Tensor:
    """Return the inputs that the output channels of a layer read, [groups, positions, inputs]."""
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, x.shape[-1])
    spatial = len(layer.kernel_size)
    x = x if x.dim() == spatial + 2 else x[None]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    for d, (size, stride, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation)):
        x = x.unfold(2 + d, dilation * (size - 1) + 1, stride)[..., ::dilation]
    # [batch, groups, inputs of a group, *positions, *kernel] -> [groups, positions, inputs of a group x kernel]
    x = x.unflatten(1, (layer.groups, -1)).movedim(2, 2 + spatial)
    return x.movedim(1, 0).flatten(2 + spatial).flatten(1, 1 + spatial)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack signed integers of so many bits behind each other into bytes.

    >>> pack_codes(torch.tensor([1, -1, 3]), 4)
    tensor([241,   3], dtype=torch.uint8)
    """
    flat = codes.reshape(-1).to(torch.int64) & (2**bits - 1)
    places = torch.arange(max(bits, 8), dtype=torch.int64, device=flat.device)
    singles = ((flat[:, None] >> places[:bits]) & 1).reshape(-1)
    octets = F.pad(singles, (0, -len(singles) % 8)).view(-1, 8)
    return (octets << places[:8]).sum(1).to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the inverse of `pack_codes`, as int8.

    >>> unpack_codes(torch.tensor([241, 3], dtype=torch.uint8), 4, 3)
    tensor([ 1, -1,  3], dtype=torch.int8)
    """
    places = torch.arange(max(bits, 8), dtype=torch.int64, device=packed.device)
    singles = (packed.to(torch.int64)[:, None] >> places[:8]) & 1
    words = (singles.reshape(-1)[: count * bits].view(-1, bits) << places[:bits]).sum(1)
    return torch.where(words >= 2 ** (bits - 1), words - 2**bits, words).to(torch.int8)
