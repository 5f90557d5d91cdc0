"""Eight-bit floats: casts of values forward and of gradients backward, and products of eight-bit matrices."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import define_operator, hide_own_frames_from_compiler
from ..subclass._in_backward import make_differentiable
from ._operands import move_power_to_scale
from ._registry import check_storage_dtype, implements
from ._scaled_tensor import ScaledTensor, measure_rms_scale, round_to_storage


def cast(x: Tensor, *, forward: torch.dtype | None = None, backward: torch.dtype | None = None) -> Tensor:
    """Round values to a storage dtype on the way forward, and their gradient to another on the way back.

    A scaled tensor is brought to the power of two next to the root mean square of its finite non-zero elements, or as
    much more as its largest one needs, and its payload becomes `forward`. A plain tensor is rounded under such a scale
    and stays plain. Gradients are treated alike with `backward`. What is rounded is the same with and without
    autograd, and inside torch.compile.

    Args:
        x: a ScaledTensor or a plain floating tensor of any shape.
        forward: float8_e4m3fn, float8_e5m2, float16, bfloat16 or float32; None leaves values as they are.
        backward: the same for the gradient.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        TypeError: x is no tensor.
        ValueError: x is not floating, or a dtype that no payload can have.

    >>> import torch
    >>> cast(torch.tensor([1.0, 1.05, 1.2]), forward=torch.float8_e4m3fn)
    tensor([1.0000, 1.0000, 1.2500])
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}: floating tensors are cast")
    for dtype in (forward, backward):
        if dtype is not None:
            check_storage_dtype(dtype)
    if forward is None and backward is None:
        return x
    made: Tensor = _differentiable_cast(x, forward, backward)
    return made


def linear_fp8(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear with eight-bit operands: y = cast(x) cast(weight)^T + bias.

    The product takes e4m3fn operands forward; backward the gradient is rounded to e5m2 and meets the same e4m3fn
    operands. All products are accumulated in float32 and stored in float16; the bias and its gradient stay wide.
    From "Scalify" (Balança et al., arXiv 2407.17353), algorithm 6. `eight_bit_engine` says how products are computed.

    Args:
        x: [..., in], a ScaledTensor, or a plain tensor, which is then rounded and multiplied in its own dtype.
        weight: [out, in].
        bias: [out], or None.

    Returns:
        [..., out].

    >>> import torch
    >>> x, w = ScaledTensor.encode(torch.ones(2, 3)), ScaledTensor.encode(torch.ones(4, 3))
    >>> linear_fp8(x, w).payload.dtype, linear_fp8(x, w).tolist()[0]
    (torch.float16, [3.0, 3.0, 3.0, 3.0])
    """
    operands = (cast(tensor, forward=torch.float8_e4m3fn) for tensor in (x, weight))
    y = cast(functional.linear(*operands), backward=torch.float8_e5m2)
    return y if bias is None else y + bias


def _cast_plain_tensor(x: Tensor, forward: torch.dtype | None, backward: torch.dtype | None) -> Tensor:
    if forward is None:
        return x.clone()
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    scale = measure_rms_scale(x.to(torch.float32), forward)
    return (round_to_storage(wide / scale, forward).to(wide.dtype) * scale).to(x.dtype)


_cast_operator = define_operator(
    "cast(Tensor x, ScalarType? forward, ScalarType? backward) -> Tensor",
    _cast_plain_tensor,
    lambda x, forward, backward: torch.empty_like(x),
)


@implements(_cast_operator, family="rescaling")
def normalize_and_cast_payload(
    x: ScaledTensor, forward: torch.dtype | None, backward: torch.dtype | None
) -> ScaledTensor:
    """Bring a payload to a root mean square of about 1 and round it; the scale takes the factor."""
    if forward is None:
        return x.clone()
    return move_power_to_scale(x._payload, x._scale, measure_rms_scale(x._payload, forward), forward, x.dtype)


@hide_own_frames_from_compiler
def _cast_backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
    return gradient if context.dtype is None else _differentiable_cast(gradient, context.dtype, None), None, None


_differentiable_cast = make_differentiable(
    _cast_operator,
    lambda ctx, inputs, output: setattr(ctx, "dtype", inputs[2]),
    _cast_backward,
    lambda context, tangent, *_: tangent.clone(),
)


def eight_bit_engine(device: torch.device | str) -> Literal["scaled_mm", "emulated"]:
    """Return how products of eight-bit matrices are computed on a device.

    "scaled_mm": by torch._scaled_mm on the device's eight-bit units (CUDA of compute capability 8.9 and above),
    where all sides are multiples of 16 and one operand is e4m3fn. "emulated": payloads are widened to
    float32 and multiplied there, which gives the same products, summed in float32.

    >>> eight_bit_engine("cpu")
    'emulated'
    """
    device = torch.device(device)
    # On CPUs _scaled_mm gives the same sums no faster: they have no eight-bit units.
    return "scaled_mm" if device.type == "cuda" and has_cuda_capability(device, 8, 9) else "emulated"


@functools.cache
def has_cuda_capability(device: torch.device, major: int, minor: int) -> bool:
    """Return whether a CUDA device has at least a compute capability; False under ROCm, whose formats may be others."""
    if not torch.cuda.is_available() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (major, minor)
