"""Codes of 8-bit states: the cube root by which they are found is near enough."""

import numpy as np
import torch

from halfulp.kernels import Trace
from halfulp.kernels._device_function import PointerTableFunction
from halfulp.kernels._operations import load32, real, store32, word
from halfulp.kernels.vector._machine_function import get_array_address
from halfulp.kernels.vector._table_loop import compile_pointer_table_kernel
from halfulp.optim.states._int8_blocks import LARGEST_UNSIGNED_CUBE, approximate_cube_root_plus_offset


def _roots(x):
    """`approximate_cube_root_plus_offset` of float32, compiled."""
    trace = Trace(torch.float32)
    i, source, out = (trace.emit(*given) for given in (("index", (), None, "index"), *_addresses(2)))
    store32(out, i, word(approximate_cube_root_plus_offset(real(load32(source, i)), np.float32(-0.0))))
    found = np.zeros_like(x)
    chunks, pointers = np.array([[0, 0, len(x), 0]]), np.array([[x.ctypes.data, found.ctypes.data]])
    compile_pointer_table_kernel("test", PointerTableFunction(trace, 2))(
        0, 1, get_array_address(chunks), get_array_address(pointers), *[0] * 4
    )
    return found


def _addresses(count):
    return [("address", (), column, "address") for column in range(count)]


def test_a_root_is_near_enough():
    """Beside every cube, and at a fixed sample of all numbers from 0 to the largest cube of a code.

    A code's threshold has its root at most .385 above the code and the chance, so that a root within .1 tells the code
    or one less.
    """
    cubes = np.arange(256, dtype=np.float32) ** 3
    beside = [np.nextafter(cubes, np.float32(end)) for end in (-1.0, 2.0**24)]
    sample = np.arange(0, int(LARGEST_UNSIGNED_CUBE.view(np.uint32)) + 1, 601, dtype=np.uint32).view(np.float32)
    x = np.concatenate([cubes, *(np.clip(values, 0, LARGEST_UNSIGNED_CUBE) for values in beside), sample])
    assert np.abs(_roots(x) - np.cbrt(x.astype(np.float64))).max() < 0.05
