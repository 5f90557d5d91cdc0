"""Devices other than the CPU and CUDA: tried once on fixed elements, and refused by name where bits differ."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from .._messages import ENVIRONMENT
from ._canary import disable_callers_modes, same_bits

# Metal has no float64; of other devices torch says so itself.
_DEVICES_WITHOUT_FLOAT64 = frozenset(("mps",))
_device_verdicts: dict[tuple[torch.device, Hashable], str] = {}


def has_float64(device: torch.device) -> bool:
    """Return whether tensors on a device can be float64: not on MPS, and not on every XPU.

    >>> has_float64(torch.device("cpu")), has_float64(torch.device("mps"))
    (True, False)
    """
    if device.type in _DEVICES_WITHOUT_FLOAT64:
        return False
    if device.type != "xpu" or not torch.xpu.is_available():
        return True
    return bool(getattr(torch.xpu.get_device_properties(device), "has_fp64", True))


def require_float64(device: torch.device, what: str) -> None:
    """Refuse a device that has no float64, of which products of scales and sums of components are made.

    Raises:
        NotImplementedError: it has none.

    >>> require_float64(torch.device("mps"), "ScaledTensors")
    Traceback (most recent call last):
    ...
    NotImplementedError: ScaledTensors on mps: the device has no float64. Keep them on the CPU; `halfulp env` prints ...
    """
    if not has_float64(device):
        raise NotImplementedError(
            f"{what} on {device.type}: the device has no float64. Keep them on the CPU; {ENVIRONMENT}"
        )


def to_float64(x: Tensor) -> Tensor:
    """Return x in float64, on the CPU where its device has none.

    >>> to_float64(torch.ones(2)).dtype
    torch.float64
    """
    return x.double() if has_float64(x.device) else x.cpu().double()


def float32_root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of float32 numbers, on their device.

    torch's own is 1 ulp off for a sixth of all float32 inputs on the CPU; through float64 it is exact.

    >>> float32_root(torch.tensor([2.0, 4.0]))
    tensor([1.4142, 2.0000])
    """
    return to_float64(x).sqrt().float().to(x.device)


def require_same_bits(
    device: torch.device, what: str, key: Hashable, run: Callable[[torch.device], list[Tensor]], otherwise: str
) -> None:
    """Refuse a device whose plain torch operations give other bits than the CPU's, or none; each is tried once.

    Args:
        device: the device.
        what: is computed there, for the message.
        key: of the computation.
        run: does it on fixed elements on a device, and returns results on the CPU.
        otherwise: the remedy.

    Raises:
        NotImplementedError: the results differ, or the device cannot compute them.
    """
    if device.type in ("cpu", "meta") or (device.type == "cuda" and not torch.version.hip):
        return  # known to give the reference's bits
    if (device, key) not in _device_verdicts:
        _device_verdicts[device, key] = ""  # while it is tried
        with disable_callers_modes():
            _device_verdicts[device, key] = _describe_difference(device, run)
    if reason := _device_verdicts[device, key]:
        raise NotImplementedError(f"{what} on {device.type}: {reason}. {otherwise}; {ENVIRONMENT}")


def _describe_difference(device: torch.device, run: Callable[[torch.device], list[Tensor]]) -> str:
    """Return why a device cannot be used; "" where it can."""
    try:
        found = run(device)
    except Exception as error:  # whatever a backend raises for what it lacks
        lines = str(error).splitlines() or [""]
        return f"torch cannot compute it there ({type(error).__name__}: {lines[0]})"
    wanted = run(torch.device("cpu"))
    if len(found) == len(wanted) and all(map(same_bits, found, wanted)):
        return ""
    return "plain torch operations give other bits there than on the CPU, as where subnormal numbers are flushed"
