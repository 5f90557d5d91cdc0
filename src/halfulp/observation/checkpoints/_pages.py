"""Pages of mapped files brought into reach at once, which costs far less than one interruption for each."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from typing import Any

from torch import Tensor

from ...kernels import address, plain

# Of linux/mman.h, since Linux 5.14; older ones refuse it, and pages come one by one.
_POPULATE_READ = 22


def map_pages(tensor: Tensor) -> None:
    """Map the pages of a contiguous tensor for reading, where the system can; nothing is copied."""
    advise = _madvise()
    if advise is None or not tensor.numel():
        return
    first = address(plain(tensor))
    start = first - first % mmap.PAGESIZE
    advise(start, first + tensor.numel() * tensor.element_size() - start, _POPULATE_READ)


@functools.cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
