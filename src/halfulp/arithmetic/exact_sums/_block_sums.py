"""The kernel that adds up blocks of neighbours: which of the vector loops is exact for a block, if any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ...kernels import Code, Memory, Number, choose, compile_code, larger, lesser, source_digest
from ._accumulate import A_STEP, B_STEP, BLOCKS, COLUMNS, ONE_BY_ONE, PER_ROW, RECORD, SHARE, SIZE, SMALLEST, A, B
from ._accumulator import BLOCK, LAYOUTS, block_size
from ._vector_loops import BlockLoops

NONE = -1  # in place of the smallest word less 1: there is nothing but zeros
LAST = 1020  # largest exponent of a number that terms are added to
SAFE = -960  # below this exponent a product of float64 may be rounded to 0
PEEL = -2  # as many summands as it takes


def compile_blocks(dtype: torch.dtype, product: bool) -> Callable[..., None]:
    """A kernel (first, last, setup, records, scratch) for shares of blocks; the last three are addresses.

    Of each block it writes a record: how many summands, a free word, how many terms are -0, then the float64 summands,
    zero or normal, whose sum is the block's, exactly. Where no loop is exact it writes ONE_BY_ONE instead. It works in
    BLOCK words of scratch per share.
    """
    name = f"exact_blocks_{str(dtype).removeprefix('torch.')}{'_product' if product else ''}"
    key = f"{name} {source_digest(Path(__file__).parent)}"
    return compile_code(name, key, 5, lambda code, *values: _Blocks(code, dtype, product).write(*values))


class _Blocks:
    """The code that works on blocks."""

    def __init__(self, code: Code, dtype: torch.dtype, product: bool) -> None:
        self.code, self.dtype, self.product = code, dtype, product
        self.layout, self.wide = LAYOUTS[dtype], dtype == torch.float64
        self.loops = BlockLoops(code.b, dtype, product)
        self.carries = block_size(dtype, product).bit_length() - 1

    def write(self, first, last, setup, records, scratch) -> None:
        """Write the loop over shares and their blocks."""
        code, asked, bytes_each = self.code, self.code.memory(setup, self.code.i64), self.layout.width // 8
        keeping = Number(code, self.loops.keeps_subnormals(asked[SMALLEST].value))
        with code.span(first, last) as share:
            stop = lesser((share + 1) * asked[SHARE], asked[BLOCKS])
            with code.span(share * asked[SHARE], stop) as block:
                row = block // asked[PER_ROW]
                start = (block - row * asked[PER_ROW]) * asked[SIZE]
                count = lesser(asked[SIZE], asked[COLUMNS] - start)
                a = asked[A] + row * asked[A_STEP] + start * bytes_each
                b = asked[B] + row * asked[B_STEP] + start * bytes_each
                at = records + block * (8 * RECORD)
                record = code.memory(at, code.i64)
                self.loops.ranges(a.value, b.value, count.value, at.value)
                decided, first_cut, second_cut = self.decision(record, keeping)
                summands = code.variable(decided)
                with code.when(decided == PEEL):
                    terms = scratch + share * (8 * BLOCK)
                    summands.set(self.peeling(a, b, count, terms, first_cut, record))
                with code.when(decided > 1):
                    cuts = first_cut.value, second_cut.value
                    self.loops.extracted(a.value, b.value, count.value, at.value, *cuts)
                record[0] = summands

    def decision(self, record: Memory, keeping: Number) -> tuple[Number, Number, Number]:
        """Return how many summands, and the bits of what terms are cut by.

        The terms are below 2^(top + 1) and multiples of 2^unit; a block has at most 2^carries of them. A sum in float64
        is exact while it is below 2^53 units. A term added to 1.5 * 2^k, and that taken away again, is cut to a
        multiple of 2^(k - 52); the cut parts' sum stays in the binade of 2^k, and the rests, at most 2^(k - 53) each,
        are exact.

        `keeping` is whether the processor keeps subnormal numbers; if not, blocks that need them are added one by one.
        """
        layout, product, wide, carries = self.layout, self.product, self.wide, self.carries
        mantissa, own_bias = layout.mantissa, layout.fields >> 1
        fraction, bias, fields = (52, 1023, 2047) if product else (mantissa, own_bias, layout.fields)
        # A product's last bit may be 2^(e + f - 2 * mantissa), and its leading one 2^(e + f + 1).
        below = 2 * mantissa + 1 if product else mantissa
        high, low, some = record[0] >> fraction, (record[1] + 1) >> fraction, record[1] != NONE
        # Turning float16 into float32 is exact in every mode.
        lost = ~(keeping | (self.dtype == torch.float16))
        singly = high == fields
        if product:
            left, right = (record[4] + 1) >> mantissa, (record[5] + 1) >> mantissa
            vanishing = ((left == 0) | (right == 0)) & lost
            if wide:
                vanishing = vanishing | (left + right - 2 * own_bias < SAFE)
            singly = singly | ((record[4] != NONE) & (record[5] != NONE) & vanishing)
        else:
            singly = singly | (some & (low == 0) & lost)
        top, unit = larger(high, 1) - bias, larger(low, 1) - bias - below
        first = top + 2 + carries
        far = (first > LAST) | (unit < choose(keeping, -1074, -1022))
        if product and wide:
            # What is left of the products, and their errors: twice as many terms.
            second = first - 53 + carries + 2
            exact, summands = second - 53 + carries + 1 - unit <= 53, 3
        else:
            second, exact, summands = first, first - 53 + carries - unit <= 53, 2
        found = choose(far, ONE_BY_ONE, choose(exact, summands, PEEL))
        if not wide:
            found = choose(top + 1 + carries - unit <= 53, 1, found)
        found = choose(singly, ONE_BY_ONE, choose(some, found, 0))
        return found, _cutting(first), _cutting(second)

    def peeling(self, a: Number, b: Number, count: Number, terms: Number, cut: Number, record: Memory) -> Number:
        """Cut a block's terms until nothing is left; return how many sums of cut parts there are."""
        code, doubled = self.code, self.product and self.wide
        carries = self.carries + doubled
        zeros = record[2]
        self.loops.unfolded(a.value, b.value, count.value, terms.value)
        if doubled:
            count, cut = 2 * count, cut + (1 << 52)
        found, k, by = code.variable(ONE_BY_ONE), code.variable(3), code.variable(cut)
        with code.repeat(lambda: k < RECORD):
            self.loops.peeled(terms.value, count.value, by.value, record.address.value)
            record[k] = record[0]
            most = record[1]
            with code.either(most == 0) as (done, more):
                with done:
                    record[2] = zeros
                    found.set(k - 2)
                    k.set(RECORD)
                with more:
                    by.set(_cutting(larger(most >> 52, 1) - 1023 + 2 + carries))
                    k += 1
        return found


def _cutting(exponent: Number) -> Number:
    """The bits of 1.5 * 2^exponent."""
    return ((exponent + 1023) << 52) | (1 << 51)
