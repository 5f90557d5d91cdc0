"""Results of rules on an accelerator by one Triton kernel each: scale arithmetic, factors, rounding, saturation.

Without Triton, or for tensors that are no plain memory on a device, `engaged` is False, and rules compute operator by
operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import select_engine
from ...kernels.triton._launch import on_device, ready
from ...kernels.triton._writer import OPTIONS, load_module
from .. import _powers_of_two as _powers
from . import _reference as reference
from ._device_code import KINDS, MODES, module_text

BLOCK = 1024
# Blocks of which a measurement has parts at most.
PARTS = 1024
MOST_SCALES = 4
# Elements on which kernels are compared.
ROWS, COLUMNS = 8, 515
SPECIAL = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65520.0, -1e9, 57344.0, 448.0, 464.0, 2.0**-25, 1e-30)


def engaged(x: Any) -> bool:
    """Return whether what is computed of x now runs as Triton kernels: eagerly on CUDA, or interpreted if asked for."""
    if type(x) is not Tensor or torch.compiler.is_dynamo_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:  # whose tensors have no memory of their own
        return False
    device = x.device.type
    return device in ("cuda", "cpu") and not _powers.is_concrete(x) and select_engine(device) == "triton"


def finish(
    y: Tensor,
    scales: Sequence[Tensor],
    storage: torch.dtype,
    mode: str = "product",
    number: float = 1.0,
    factor: float = 1.0,
) -> tuple[Tensor, Any]:
    """Return a payload, y times two factors rounded once to a storage, and its scale.

    Args:
        y: a payload of any storage, or values in float32.
        scales: at most three, and for "paired" four.
        storage: of the result.
        mode: "product": the scale is that of all scales and the number, within the range of scales, and the factor what
            is beyond; "values": one scale, of values; "ratio": the second of two, of a payload under the first;
            "factor": no scale, the factor is the product; "deviation": the smaller of the number and 1 / scale;
            "paired": "product" without the last scale, divided by the product of the last two; "levelled": "product",
            divided by the second scale; "brought": "ratio" with a factor of at most 2^100; "held": no scale and
            no factors, finite elements stay within bfloat16's range under the scale, and as values.
        number: a power of two.
        factor: of the payload.
    """

    def launch(kernels: dict[str, Any], y: Tensor, *scales: Tensor) -> tuple[Tensor, Any]:
        y = _dense(y)
        out = torch.empty_like(y, dtype=storage)
        scale = None if mode in ("factor", "held") else _scale_like(*scales, y)
        given, made = _bytes(y), _bytes(out)
        held = (*scales, *(given,) * (MOST_SCALES - len(scales)))
        kernels["finish"][_grid(y)](
            given, *held, made, made if scale is None else scale, y.numel(), factor, number,
            MODES.index(mode), len(scales), KINDS[y.dtype], KINDS[storage], BLOCK, **OPTIONS,
        )  # fmt: skip
        return out, scale

    def plain(y: Tensor, *scales: Tensor) -> tuple[Tensor, Any]:
        return reference.finish(y, scales, storage, mode, number, factor)

    return _run(("finish", y.dtype, storage, mode, len(scales)), launch, plain, (y,), tuple(scales))


def add(
    x: Tensor, y: Tensor, sx: Tensor, sy: Tensor, storage: torch.dtype, sign: float = 1.0, keep: bool = False
) -> tuple[Tensor, Tensor]:
    """Return x + sign y under the larger scale, which no stand-in for infinity decides, rounded once, and the scale.

    Args:
        x, y: payloads that `is_pair` accepts.
        sx, sy: their scales.
        storage: of the result; float16 or eight bits if numbers are kept.
        sign: 1 or -1.
        keep: whether sums of numbers of one sign become the smallest number instead of 0.
    """

    def launch(kernels: dict[str, Any], x: Tensor, y: Tensor, sx: Tensor, sy: Tensor) -> tuple[Tensor, Tensor]:
        out, scale = torch.empty_like(x, dtype=storage), torch.empty_like(sx)
        kernels["add"][_grid(x)](
            _bytes(x), _bytes(y), sx, sy, _bytes(out), scale, x.numel(), y.numel(), sign,
            KINDS[x.dtype], KINDS[y.dtype], KINDS[storage], keep, x.shape == y.shape, BLOCK, **OPTIONS,
        )  # fmt: skip
        return out, scale

    def plain(x: Tensor, y: Tensor, sx: Tensor, sy: Tensor) -> tuple[Tensor, Tensor]:
        return reference.add(x, y, sx, sy, storage, sign, keep)

    return _run(("add", x.dtype, y.dtype, storage, keep, x.shape == y.shape), launch, plain, (x, y), (sx, sy))


def affine(
    y: Tensor, base: Tensor, scales: tuple[Tensor, Tensor, Tensor], storage: torch.dtype,
    beta: float, beta_power: float, alpha: float, power: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return beta base + alpha y rounded once, with y a product's payload, and its scale.

    Args:
        y, base: payloads that `is_pair` accepts.
        scales: of base, and of the two factors of the product.
        storage: of the result.
        beta, alpha: numbers.
        beta_power, power: powers of two next to beta, and next to alpha times what brings the product back.
    """

    def launch(
        kernels: dict[str, Any], y: Tensor, base: Tensor, s_base: Tensor, sa: Tensor, sb: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, scale = torch.empty_like(y, dtype=storage), torch.empty_like(s_base)
        kernels["affine"][_grid(y)](
            _bytes(y), _bytes(base), s_base, sa, sb, _bytes(out), scale, y.numel(), base.numel(),
            beta, beta_power, alpha, power,
            KINDS[y.dtype], KINDS[base.dtype], KINDS[storage], y.shape == base.shape, BLOCK, **OPTIONS,
        )  # fmt: skip
        return out, scale

    def plain(y: Tensor, base: Tensor, s_base: Tensor, sa: Tensor, sb: Tensor) -> tuple[Tensor, Tensor]:
        return reference.affine(y, base, s_base, sa, sb, storage, beta, beta_power, alpha, power)

    key = ("affine", y.dtype, base.dtype, storage, y.shape == base.shape)
    return _run(key, launch, plain, (y, base), scales)


def affine_factors(s_base: Tensor, sa: Tensor, sb: Tensor, beta_power: float, power: float) -> Any:
    """Return the scale of beta base + alpha a b, and the factors that bring the payloads of base and a b under it."""

    def launch(kernels: dict[str, Any], *scales: Tensor) -> tuple[Tensor, ...]:
        made = tuple(torch.empty_like(scales[0]) for _ in range(3))
        kernels["affine_factors"][(1,)](*scales, *made, beta_power, power, **OPTIONS)
        return made

    def plain(s_base: Tensor, sa: Tensor, sb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return reference.affine_factors(s_base, sa, sb, beta_power, power)

    return _run(("affine_factors",), launch, plain, (), (s_base, sa, sb))


def level(y: Tensor, storage: torch.dtype, of_zeros: float) -> Tensor:
    """Return the power of two next to the root mean square of finite non-zero elements, or what the largest needs.

    Args:
        y: a payload with elements.
        storage: for which the largest element needs it.
        of_zeros: what is returned where there is no such element.
    """

    def launch(kernels: dict[str, Any], y: Tensor) -> tuple[Tensor]:
        y = _dense(y)
        blocks = -(-y.numel() // BLOCK)
        programs = min(blocks, PARTS)
        parts = torch.empty(3 * programs, dtype=torch.float64, device=y.device)
        out = torch.empty((), dtype=torch.float32, device=y.device)
        loops = -(-blocks // programs)
        kernels["measure"][(programs,)](_bytes(y), parts, y.numel(), programs, loops, KINDS[y.dtype], BLOCK, **OPTIONS)
        kernels["level"][(1,)](parts, out, programs, torch.finfo(storage).max, of_zeros, PARTS, **OPTIONS)
        return (out,)

    def plain(y: Tensor) -> tuple[Tensor]:
        return (reference.level(y, storage, of_zeros),)

    found: Tensor = _run(("level", y.dtype, storage), launch, plain, (y,), ())[0]
    return found


def is_pair(x: Tensor, y: Tensor) -> bool:
    """Return whether two payloads lie alike, or the second repeats along the first."""
    if x.shape == y.shape:
        return x.stride() == y.stride() and _is_dense(x)
    is_suffix = 0 < y.dim() <= x.dim() and x.shape[x.dim() - y.dim() :] == y.shape
    return is_suffix and x.is_contiguous() and y.is_contiguous()


def _run(
    key: tuple[Any, ...],
    launch: Callable[..., Any],
    plain: Callable[..., Any],
    payloads: tuple[Tensor, ...],
    scales: tuple[Tensor, ...],
) -> Any:
    """Launch a kernel, compared with the reference before its first use on a device; else run the reference."""
    device = scales[0].device if not payloads else payloads[0].device
    if any(x.device != device for x in (*payloads, *scales)):
        return plain(*payloads, *scales)  # torch says which lies where

    def trial(run: Callable[..., Any], device: torch.device) -> list[Tensor]:
        with on_device(device):
            results = run(*(x.to(device) for x in _fixed(payloads, len(scales))))
        return [result.cpu() for result in results if result is not None]

    kernels = ready(
        key,
        f"{key[0]} of scaled tensors",
        device,
        _kernels,
        lambda kernels, device: trial(functools.partial(launch, kernels), device),
        lambda: trial(plain, torch.device("cpu")),
    )
    if kernels is None:
        return plain(*payloads, *scales)
    with on_device(device):
        return launch(kernels, *payloads, *scales)


def _fixed(payloads: tuple[Tensor, ...], scales: int) -> list[Tensor]:
    """Return fixed payloads of the same dtypes, the second repeating if it does, and scales."""
    generator = torch.Generator().manual_seed(0)
    found: list[Tensor] = []
    for x in payloads:
        shape = (ROWS, COLUMNS) if not found or x.shape == payloads[0].shape else (COLUMNS,)
        values = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(generator=generator)
        values *= torch.empty_like(values).uniform_(-24, 20, generator=generator).exp2()
        values.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float32, device="cpu")
        found.append(reference.saturated_to(values.flip(-1) if found else values, x.dtype))
    return found + [
        torch.full((), power, dtype=torch.float32, device="cpu") for power in (2.0**-3, 2.0**5, 2.0, 2.0**-2)[:scales]
    ]


def _scale_like(x: Tensor, *_: Tensor) -> Tensor:
    """Return memory for a scale on the device of a scale, or of a payload."""
    if x.dim() or x.dtype != torch.float32:
        return torch.empty((), dtype=torch.float32, device=x.device)
    return torch.empty_like(x)


def _is_dense(x: Tensor) -> bool:
    """Return whether elements fill their memory, in whatever order, so that kernels can go along it."""
    if x.is_contiguous():
        return True
    step = 1
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _dense(x: Tensor) -> Tensor:
    return x if _is_dense(x) else x.contiguous()


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _grid(x: Tensor) -> tuple[int]:
    return (max(1, -(-x.numel() // BLOCK)),)


@functools.cache
def _kernels() -> dict[str, Any]:
    return load_module(module_text())
