"""Device functions that look at tensors: extremes of the whole, samples counted in formats, and changes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ...kernels import _operations as o
from ...kernels import select
from ...kernels._device_function import Recording, Table, bind_names
from ...kernels._trace import block_largest
from ...rounding import _blocks as b
from ...rounding._blocks import BlockKind, bind_device_functions
from ...rounding._target import WORD_COUNT

# The words of infinity in memory, and bits of the fraction.
INFINITE_WORDS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
KERNEL_DTYPES = tuple(INFINITE_WORDS)
INFINITE_WORD = INFINITE_WORDS[torch.float32]
# Where sums of `make_counts_table` begin: squares, what was found since the step began, formats of single elements.
SQUARES_SUM, FINITE_SUM, FIRST_FORMAT_SUM = 0, 2, 4
# Exponents of float32, from that of its smallest subnormal number on; one more bin takes what is not counted.
EXPONENT_BINS = 277
_ZERO_WORD = np.uint32(0)


def _load_magnitude(dtype: torch.dtype, array: Any, index: Any) -> Any:
    """Return an element's magnitude as the word of memory."""
    load: Any = o.load32 if dtype == torch.float32 else o.load16
    return o.bit_and(load(array, index), 0x7FFFFFFF if dtype == torch.float32 else 0x7FFF)


@functools.cache
def make_extremes_table(dtype: torch.dtype) -> Table:
    """Return the kernel that finds extremes of finite tensors.

    Sums: infinity's word less that of the smallest number, zeros, and the largest. An infinity or NaN shows in the
    last, which is then none of a finite number, and makes the first meaningless.
    """
    element = Recording(1)
    magnitude = _load_magnitude(dtype, element.arrays[0], element.index)
    # The fraction where float32 has it: of float16 the number times 2^-112.
    shift = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}[dtype]
    a = o.shl(magnitude, shift) if shift else magnitude
    element.trace.gather_sum("max", select(a == 0, _ZERO_WORD, o.sub(INFINITE_WORD, a)))
    element.trace.gather_sum("count", a == 0)
    element.trace.gather_sum("max", a)
    return Table(element.trace, 1, is_far_memory=True)


@functools.cache
def make_counts_table(singles: int) -> Table:
    """Return the kernel that counts float32 numbers by exponent and in formats of single elements.

    Columns: the sample, and int64 (COPIES, EXPONENT_BINS + 1). Constants: three words of each format, the first
    magnitudes that become nonzero, normal and too large. Sums: squares, finite numbers (twice), zeros, and for each
    constant what is below it.
    """
    element = Recording(2, 3 * singles, "w32")
    sample, counters = element.arrays
    a = _load_magnitude(torch.float32, sample, element.index)
    finite, zero = a < INFINITE_WORD, a == 0
    value: Any = element.trace.emit("to_float64", (o.real(select(finite, a, _ZERO_WORD)),), None, "f64")
    element.trace.gather_sum("sum", value * value)
    for mask in (finite, finite, zero):
        element.trace.gather_sum("count", mask)
    for limit in element.constants:
        element.trace.gather_sum("count", a < limit)
    # A subnormal number's digits are those of the integer that its word is.
    subnormal = o.sub(o.shr(o.word(o.to_real(a)), 23), 127)
    place = select(a < 0x800000, subnormal, o.add(o.shr(a, 23), 22))
    place = select(finite & ~zero, place, np.uint32(EXPONENT_BINS))
    o.deposit64(counters, place, element.trace.emit("word", (), (1, 64), "w64"), EXPONENT_BINS + 1)
    return Table(element.trace, 2, constants=3 * singles)


@functools.cache
def make_block_counts_table(kind: BlockKind) -> Table:
    """Return the kernel that counts float32 numbers in a block format.

    Columns: the sample, and one that is not read. Constants: the words of the first payloads that become nonzero and
    normal, those of `rounding.blocks`, and two of the float64 that is the largest of all finite blocks. Sums: elements
    of finite blocks, those that become zero, those that become subnormal, and zeros in blocks whose largest stays.
    """
    element = Recording(2, 2 + 2 * WORD_COUNT + len(b.BlockConstants._fields) + 2, "w32")
    (nonzero, normal), words, amax = element.constants[:2], element.constants[2:-2], element.constants[-2:]
    c, d, of_block = b.split_words(words)
    if kind.scales_by_amax:
        low, high = map(o.widen, amax)
        largest = o.real(o.bit_or(low, o.shl(high, 32)))
        of_block = of_block._replace(amax=o.word(element.trace.emit("to_float32", (largest,), None, "f32")))
        of_block = b.add_tensor_scale(of_block)
    names: dict[str, Any] = bind_device_functions(kind)
    a = o.bit_and(o.load32(element.arrays[0], element.index), c.magnitude)
    top = block_largest(a)
    scale = bind_names(names["scale_of"], names)(top, c, d, of_block)
    inverse = bind_names(names["inverse_of"], names)(scale, c, of_block)
    payload, payload_of_top = (bind_names(names["payload"], names)(x, inverse, c) for x in (a, top))
    finite = top < c.infinity
    gone = finite & (a != 0) & (payload < nonzero)
    stays = finite & ~(payload_of_top < nonzero)
    for mask in (finite, gone, finite & (payload < normal) & ~(payload < nonzero), gone & stays):
        element.trace.gather_sum("count", mask)
    return Table(element.trace, 2, len(element.constants), block=kind.block, partial=True)


@functools.cache
def make_changes_table() -> Table:
    """Return the kernel that compares wanted changes of float64 values with the actual ones.

    Columns: before, after, wanted change. Constant: what wanted changes must be below to count. Sums: changes that
    count, those of them that left the bits as they were, squares of wanted changes, and their products with what took
    place.
    """
    element = Recording(3, 1, "f64")
    words = [o.load64(array, element.index) for array in element.arrays]
    before, after, wanted = map(o.real, words)
    (limit,), zero = element.constants, np.float64(0.0)
    change = after - before
    counts = (wanted != zero) & (wanted < limit) & (wanted > np.float64(-np.inf)) & (abs(change) < np.float64(np.inf))
    counts = counts & (wanted == wanted)
    element.trace.gather_sum("count", counts)
    element.trace.gather_sum("count", counts & (words[0] == words[1]))
    asked, took = select(counts, wanted, zero), select(counts, change, zero)
    element.trace.gather_sum("sum", asked * asked)
    element.trace.gather_sum("sum", asked * took)
    return Table(element.trace, 3, constants=1)
