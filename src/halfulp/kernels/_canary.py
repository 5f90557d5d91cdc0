"""The canary: each compiled kernel is run on fixed elements and compared with its reference before its first use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .._messages import ENVIRONMENT
from .._torch_versions import find_dtype
from ._threads import keeping_subnormals


class KernelMismatchError(RuntimeError):
    """Raised when a compiled kernel gives other bits than its reference, as under unsafe compiler options."""


# The kernels that were compared in this process.
_compared_kernels: set[Hashable] = set()


def check_bits(
    name: str, fast: Callable[[], list[torch.Tensor]], reference: Callable[[], list[torch.Tensor]], key: Hashable = None
) -> None:
    """Raise if a compiled kernel and its reference differ in a bit; two NaNs count as equal.

    Args:
        name: the kernel, for the message.
        fast: runs the compiled kernel on fixed elements and returns what it wrote.
        reference: the same in plain torch.
        key: of the kernel, which is compared once in a process; without one at every call.
    """
    if key in _compared_kernels:
        return
    with disable_callers_modes():
        pairs = list(zip(fast(), reference(), strict=True))
        wrong = [position for position, (a, b) in enumerate(pairs) if not same_bits(a, b)]
    for position in wrong:
        raise KernelMismatchError(
            f"kernel {name}: result {position} of the compiled kernel differs from its reference on fixed elements. "
            "Remove the kernel cache (HALFULP_CACHE_DIR or ~/.cache/halfulp); if it "
            f"persists, set HALFULP_ENGINE=reference and report it; {ENVIRONMENT}"
        )
    if key is not None:
        _compared_kernels.add(key)


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
    if equal.all() or a.dtype == find_dtype("float4_e2m1fn_x2"):  # of which torch 2.8 cannot ask whether it is NaN
        return bool(equal.all())
    return bool((equal | (a.isnan() & b.isnan())).all())
