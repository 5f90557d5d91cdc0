"""The canary: kernels, and devices other than the CPU and CUDA, are tried on fixed elements before their first use.

A kernel is compared with its reference, a device's plain torch operations with the CPU's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .._messages import ENV_HINT
from .._torch_versions import find_torch_dtype
from ._threads import keeping_subnormals


class KernelMismatchError(RuntimeError):
    """Raised when a compiled kernel gives other bits than its reference, as under unsafe compiler options."""


# The kernels that were compared in this process.
_verified_kernel_keys: set[Hashable] = set()


def check_bits(
    name: str, fast: Callable[[], list[torch.Tensor]], reference: Callable[[], list[torch.Tensor]], key: Hashable = None
) -> None:
    """Raise if a compiled kernel and its reference in plain torch differ in a bit on fixed elements; all NaNs are one.

    A kernel with a key is compared once in a process, one without at every call.
    """
    if key in _verified_kernel_keys:
        return
    with disable_callers_modes():
        for position, (found, wanted) in enumerate(zip(fast(), reference(), strict=True)):
            if not same_bits(found, wanted):
                raise KernelMismatchError(
                    f"kernel {name}: result {position} of the compiled kernel differs from its reference on fixed "
                    "elements. Remove the kernel cache (HALFULP_CACHE_DIR or ~/.cache/halfulp); if it persists, set "
                    f"HALFULP_ENGINE=reference and report it; {ENV_HINT}"
                )
    if key is not None:
        _verified_kernel_keys.add(key)


@contextlib.contextmanager
def disable_callers_modes() -> Iterator[None]:
    """Return a context without the caller's dispatch modes (FakeTensorMode, emulation), autograd and flush-to-zero."""
    with _disable_current_modes(), torch.no_grad(), keeping_subnormals():
        yield


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors agree in dtype, shape and every bit; all NaNs count as equal.

    >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    >>> same_bits(torch.tensor([torch.nan]), torch.tensor([7.0]))
    False
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_complex():
        return same_bits(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    if not a.dtype.is_floating_point:
        return bool(torch.equal(a, b))
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[a.element_size()]
    equal = a.resolve_neg().contiguous().view(words) == b.resolve_neg().contiguous().view(words)
    if equal.all() or a.dtype == find_torch_dtype(
        "float4_e2m1fn_x2"
    ):  # of which torch 2.8 cannot ask whether it is NaN
        return bool(equal.all())
    return bool((equal | (a.isnan() & b.isnan())).all())


# Metal has no float64; of other devices torch says so itself.
_DEVICES_WITHOUT_FLOAT64 = frozenset(("mps",))
_refusal_by_device_and_key: dict[tuple[torch.device, Hashable], str] = {}


def has_float64(device: torch.device) -> bool:
    """Return whether tensors on a device can be float64: not on MPS, and not on every XPU.

    >>> has_float64(torch.device("cpu")), has_float64(torch.device("mps"))
    (True, False)
    """
    if device.type == "xpu" and torch.xpu.is_available():
        return bool(getattr(torch.xpu.get_device_properties(device), "has_fp64", True))
    return device.type not in _DEVICES_WITHOUT_FLOAT64


def require_float64(device: torch.device, what: str) -> None:
    """Refuse a device that has no float64, of which products of scales and sums of components are made.

    >>> require_float64(torch.device("mps"), "ScaledTensors")
    Traceback (most recent call last):
    ...
    NotImplementedError: ScaledTensors on mps: the device has no float64. Keep them on the CPU; `halfulp env` prints ...
    """
    if not has_float64(device):
        raise NotImplementedError(
            f"{what} on {device.type}: the device has no float64. Keep them on the CPU; {ENV_HINT}"
        )


def to_float64(x: torch.Tensor) -> torch.Tensor:
    """Return x in float64, on the CPU where its device has none.

    >>> to_float64(torch.ones(2)).dtype
    torch.float64
    """
    return x.double() if has_float64(x.device) else x.cpu().double()


def compute_float32_square_root(x: torch.Tensor) -> torch.Tensor:
    """Return the correctly rounded square root of float32 numbers, on their device.

    torch's own is 1 ulp off for a sixth of all float32 inputs on the CPU; through float64 it is exact.

    >>> compute_float32_square_root(torch.tensor([2.0, 4.0]))
    tensor([1.4142, 2.0000])
    """
    return to_float64(x).sqrt().float().to(x.device)


def require_same_bits_as_cpu(
    device: torch.device, what: str, key: Hashable, run: Callable[[torch.device], list[torch.Tensor]], remedy: str
) -> None:
    """Refuse a device whose plain torch operations give other bits than the CPU's, or none; each key is tried once.

    `run` computes `what` of fixed elements on a device and returns the results on the CPU; `remedy` says what to do.
    """
    if device.type in ("cpu", "meta") or (device.type == "cuda" and not torch.version.hip):
        return  # known to give the reference's bits
    if (device, key) not in _refusal_by_device_and_key:
        _refusal_by_device_and_key[device, key] = ""  # while it is tried
        with disable_callers_modes():
            _refusal_by_device_and_key[device, key] = _explain_unusable_device(device, run)
    if reason := _refusal_by_device_and_key[device, key]:
        raise NotImplementedError(f"{what} on {device.type}: {reason}. {remedy}; {ENV_HINT}")


def _explain_unusable_device(device: torch.device, run: Callable[[torch.device], list[torch.Tensor]]) -> str:
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
