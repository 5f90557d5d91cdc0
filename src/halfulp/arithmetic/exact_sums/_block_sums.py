"""The kernel that adds up blocks of neighbours: which of the vector loops is exact for a block, if any."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from ...kernels import machine_code, source_digest
from ._accumulate import A_STEP, B_STEP, BLOCKS, COLUMNS, ONE_BY_ONE, PER_ROW, RECORD, SHARE, SIZE, SMALLEST, A, B
from ._accumulator import BLOCK, LAYOUTS, Layout, block_size
from ._vector_loops import extracted, keeps_subnormals, peeled, ranges, unfolded

NONE = -1  # in place of the smallest word less 1: there is nothing but zeros
LAST = 1020  # largest exponent of a number that terms are added to
SAFE = -960  # below this exponent a product of float64 may be rounded to 0
PEEL = -2  # as many summands as it takes


def compile_blocks(dtype: torch.dtype, product: bool) -> Callable:
    """A kernel (first, last, setup, records, their address, that of BLOCK words per share) for shares of blocks.

    Of each block it writes a record: how many summands, a free word, how many terms are -0, then the float64 summands,
    zero or normal, whose sum is the block's, exactly. Where no loop is exact it writes ONE_BY_ONE instead.
    """
    import numba

    layout = LAYOUTS[dtype]
    name = f"exact_blocks_{str(dtype).removeprefix('torch.')}{'_product' if product else ''}"
    key = f"{name} {source_digest(Path(__file__).parent)}"

    def inlined(function: Callable) -> Callable:
        function.__qualname__ = f"{function.__name__}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        return numba.njit(nogil=True, error_model="numpy")(function)

    cutting = inlined(_cutting)
    decide = inlined(_decision(layout, dtype, product, cutting))
    peel = inlined(_peeling(dtype, product, cutting))
    find, cut, keeps = ranges(dtype, product), extracted(dtype, product), keeps_subnormals()
    bytes_each = layout.width // 8

    def run(first, last, setup, records, address, scratch):
        keeping = keeps(setup[SMALLEST]) == 1
        for share in range(first, last):
            for block in range(share * setup[SHARE], min((share + 1) * setup[SHARE], setup[BLOCKS])):
                row = block // setup[PER_ROW]
                start = (block - row * setup[PER_ROW]) * setup[SIZE]
                count = min(setup[SIZE], setup[COLUMNS] - start)
                a = setup[A] + row * setup[A_STEP] + start * bytes_each
                b = setup[B] + row * setup[B_STEP] + start * bytes_each
                record = address + block * (8 * RECORD)
                find(a, b, count, record)
                summands, first_cut, second_cut = decide(records, block, keeping)
                if summands == PEEL:
                    summands = peel(a, b, count, scratch + share * (8 * BLOCK), first_cut, records, block, record)
                elif summands > 1:
                    cut(a, b, count, record, first_cut, second_cut)
                records[block, 0] = summands

    run.__name__ = name
    return machine_code(inlined(run), name, key, "void(int64, int64, int64[::1], int64[:,::1], int64, int64)")


def _decision(layout: Layout, dtype: torch.dtype, product: bool, cutting: Callable) -> Callable:
    """A function (records, block, keeping) of how many summands, and the bits of what terms are cut by.

    The terms are below 2^(top + 1) and multiples of 2^unit; a block has at most 2^carries of them. A sum in float64 is
    exact while it is below 2^53 units. A term added to 1.5 * 2^k, and that taken away again, is cut to a multiple of
    2^(k - 52); the cut parts' sum stays in the binade of 2^k, and the rests, at most 2^(k - 53) each, are exact.

    `keeping` is whether the processor keeps subnormal numbers; if not, blocks that need them are added one by one.
    """
    wide = dtype == torch.float64
    mantissa, own_bias = layout.mantissa, layout.fields >> 1
    fraction, bias, fields = (52, 1023, 2047) if product else (mantissa, own_bias, layout.fields)
    # A product's last bit may be 2^(e + f - 2 * mantissa), and its leading one 2^(e + f + 1).
    below = 2 * mantissa + 1 if product else mantissa
    carries = block_size(dtype, product).bit_length() - 1
    # Turning float16 into float32 is exact in every mode.
    always = dtype == torch.float16

    def decision(records, block, keeping):
        high, low = records[block, 0] >> fraction, (records[block, 1] + 1) >> fraction
        some, kept = records[block, 1] != NONE, always or keeping
        if high == fields or (not product and some and low == 0 and not kept):
            return ONE_BY_ONE, 0, 0
        if product and records[block, 4] != NONE and records[block, 5] != NONE:
            left, right = (records[block, 4] + 1) >> mantissa, (records[block, 5] + 1) >> mantissa
            if ((left == 0 or right == 0) and not kept) or (wide and left + right - 2 * own_bias < SAFE):
                return ONE_BY_ONE, 0, 0
        if not some:
            return 0, 0, 0
        top, unit = max(high, 1) - bias, max(low, 1) - bias - below
        if not wide and top + 1 + carries - unit <= 53:
            return 1, 0, 0
        first = top + 2 + carries
        if first > LAST or unit < (-1074 if keeping else -1022):
            return ONE_BY_ONE, 0, 0
        if not (product and wide):
            exact = first - 53 + carries - unit <= 53
            return (2 if exact else PEEL), cutting(first), 0
        # What is left of the products, and their errors: twice as many terms.
        second = first - 53 + carries + 2
        exact = second - 53 + carries + 1 - unit <= 53
        return (3 if exact else PEEL), cutting(first), cutting(second)

    return decision


def _peeling(dtype: torch.dtype, product: bool, cutting: Callable) -> Callable:
    """A function that cuts a block's terms until nothing is left; returns how many sums of cut parts it wrote."""
    unfold, peel = unfolded(dtype, product), peeled()
    doubled = product and dtype == torch.float64
    carries = block_size(dtype, product).bit_length() - 1 + doubled

    def peeling(a, b, count, terms, cut, records, block, record):
        zeros = records[block, 2]
        unfold(a, b, count, terms)
        if doubled:
            count = 2 * count
            cut = cut + (1 << 52)
        for k in range(3, RECORD):
            peel(terms, count, cut, record)
            records[block, k] = records[block, 0]
            most = records[block, 1]
            if most == 0:
                records[block, 2] = zeros
                return k - 2
            cut = cutting(max(most >> 52, 1) - 1023 + 2 + carries)
        return ONE_BY_ONE

    return peeling


def _cutting(exponent):
    """The bits of 1.5 * 2^exponent."""
    return ((exponent + 1023) << 52) | (1 << 51)
