"""Every float32 word rounded to a format by integers: what `halfulp.quantize` has to give, from the definition alone.

A block of words lies in one power of two, so that all of its numbers are integers times one power of two, and the
numbers of the format beside them are those integers' multiples of another. Nothing of halfulp is used but a format's
definition: mantissa bits, smallest exponent, largest number, and which special numbers there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

BLOCK = 1 << 18  # words, by which 2^22 can be divided: those below it are below 2^-127
INFINITY = 0x7F800000
MODES = ("nearest", "toward_zero", "up", "down")


def positive_blocks(limit: int = 1 << 31) -> Iterator[np.ndarray]:
    """Yield the words of 0 and above, infinity and NaNs too; of fewer, blocks at equal distances."""
    for start in range(0, 1 << 31, BLOCK * max((1 << 31) // limit, 1)):
        yield np.arange(start, start + BLOCK, dtype=np.uint32)


def round_block(words: np.ndarray, format, sign: int) -> dict[str, np.ndarray]:
    """Return, per rounding, the float32 numbers that a block of magnitudes becomes under a sign.

    Args:
        words: float32 words of numbers of one power of two, without a sign.
        format: what is rounded to.
        sign: 1 or -1.
    """
    down_to_zero, away = {1: ("down", "up"), -1: ("up", "down")}[sign]
    first = int(words[0])
    if first >= INFINITY:
        made = np.where(words == INFINITY, _overflow(format), np.float32(np.nan)).astype(np.float32)
        return {mode: _with_sign(made, words, format, sign) for mode in MODES}
    field = first >> 23
    integers = (words & 0x7FFFFF).astype(np.int64) | ((field > 0) << 23)
    unit = max(field, 1) - 150  # exponent of one
    exponent = field - 127 if field else -127  # of the numbers; below 2^-127 every format is at its end
    shift = max(exponent, format.emin) - format.mantissa_bits - unit
    if not format.subnormals and exponent < format.emin:
        shift = format.emin - unit  # 0 and the smallest normal number are neighbours
    if not format.zero and (exponent < format.emin or first < 1 << 22):
        made = np.full(words.shape, 2.0**format.emin, np.float32)
        return {mode: _with_sign(made, words, format, sign) for mode in MODES}
    step = 2.0 ** (unit + max(shift, 0))
    shift = min(max(shift, 0), 40)  # integers have 24 bits
    low = integers >> shift
    rest, half = integers & ((1 << shift) - 1), (1 << shift) >> 1
    odd = (low & 1) == 1
    if not format.subnormals and exponent < format.emin:
        odd = np.zeros_like(odd)  # a tie goes to 0
    up = (rest > half) | ((rest == half) & odd & (shift > 0))
    inward = np.minimum(low * step, format.max)
    nearest, outward = ((low + more) * step for more in (up, rest > 0))
    nearest, outward = (np.where(one > format.max, _overflow(format), one) for one in (nearest, outward))
    made = {"nearest": nearest, "toward_zero": inward, down_to_zero: inward, away: outward}
    return {mode: _with_sign(made[mode].astype(np.float32), words, format, sign) for mode in MODES}


def _overflow(format) -> float:
    return {"inf": np.inf, "nan": np.nan, "saturate": format.max}[format.overflow]


def _with_sign(made: np.ndarray, words: np.ndarray, format, sign: int) -> np.ndarray:
    """Give magnitudes a sign, where the format has it."""
    if sign > 0:
        return made
    if not format.signed:
        return np.where(words == 0, made, np.float32(np.nan))
    return -made if format.signed_zero else np.where(made == 0, made, -made)
