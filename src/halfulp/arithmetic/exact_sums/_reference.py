"""Exact sums in torch's integer operations: slow, on any device, and what the compiled kernels must agree with."""

from __future__ import annotations

import torch

from ._accumulator import LAYOUTS, LIMB, LIMBS, LOW, MINUS, NEGATIVE_ZEROS, PLUS, TERMS, UNIT, WORDS, Layout

_AT_ONCE = 1 << 20  # elements whose integers are in memory at a time
_HALF = 26  # bits of the lower half of a float64's mantissa
_HEAD = 62  # bits of the leading part that is rounded


def words_of(a: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    """The accumulator of every row: of a, or of the products of a and b.

    Args:
        a: (rows, columns), float16, bfloat16, float32 or float64, any strides.
        b: as a, or None.

    Returns:
        int64 (rows, WORDS): limbs from the lowest, all in [0, 2^32) but the highest, which has the sign; four counts.
    """
    rows, columns = a.shape
    words = torch.zeros(rows, WORDS, dtype=torch.int64, device=a.device)
    step = max(1, _AT_ONCE // max(1, rows))
    for start in range(0, columns, step):
        part = slice(start, start + step)
        _add(words, a[:, part], None if b is None else b[:, part])
        words[:, :LIMBS] = carried(words[:, :LIMBS])
    return words


def round_words(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The float nearest to each accumulator's value, ties to even.

    Args:
        words: int64 (..., WORDS), one accumulator or several added up.
        dtype: float16, bfloat16, float32 or float64.
    """
    layout = LAYOUTS[dtype]
    digits = carried(words[..., :LIMBS])
    negative = digits[..., -1] < 0
    magnitude = torch.where(negative[..., None], carried(-digits), digits)
    bits, zero = _nearest(magnitude, layout)
    plus, minus, negative_zeros, terms = words[..., LIMBS:].unbind(-1)
    negative = torch.where(zero, (terms > 0) & (terms == negative_zeros), negative)
    infinity = layout.fields << layout.mantissa
    special = (plus != 0) | (minus != 0)
    bits = torch.where(special, infinity, bits)
    negative = torch.where(special, minus != 0, negative)
    bits = bits | negative.to(torch.int64) << (layout.width - 1)
    nan = (plus != 0) & (minus != 0)
    bits = torch.where(nan, infinity | 1 << (layout.mantissa - 1), bits)
    return bits.to(layout.word).view(dtype)


def carried(limbs: torch.Tensor) -> torch.Tensor:
    """Pass carries on until every limb but the last is in [0, 2^32); limbs are the last dimension."""
    for _ in range(2):
        limbs = _low(limbs) + _passed(limbs >> LIMB)
    # Now every limb but the last lies in [-1, 2^32]: what is left are carries of 1, and then of -1, that run through.
    last = torch.arange(limbs.shape[-1], device=limbs.device, dtype=torch.int64) == limbs.shape[-1] - 1
    ahead = _running(limbs == 1 << LIMB, limbs == LOW).to(torch.int64)
    limbs = limbs + ahead
    limbs = torch.where((limbs >= 1 << LIMB) & ~last, limbs - (1 << LIMB), limbs)
    limbs = limbs - _running(limbs == -1, limbs == 0).to(torch.int64)
    return torch.where((limbs < 0) & ~last, limbs + (1 << LIMB), limbs)


def _low(limbs: torch.Tensor) -> torch.Tensor:
    return torch.cat([limbs[..., :-1] & LOW, limbs[..., -1:]], -1)


def _passed(carries: torch.Tensor) -> torch.Tensor:
    """Return the carry into each limb."""
    return torch.cat([torch.zeros_like(carries[..., :1]), carries[..., :-1]], -1)


def _running(starts: torch.Tensor, passes: torch.Tensor) -> torch.Tensor:
    """Return which limbs a carry reaches, from a limb that starts one through all that propagate it."""
    index = torch.arange(starts.shape[-1], device=starts.device, dtype=torch.int64).expand(starts.shape)
    stop = torch.where(passes, -1, index).cummax(-1).values
    goes_out = (stop >= 0) & starts.gather(-1, stop.clamp(min=0))
    return _passed(goes_out)


def _numbers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sign, mantissa, exponent, whether infinite, whether NaN: a finite element is +-mantissa * 2^exponent."""
    layout = LAYOUTS[x.dtype]
    word = x.contiguous().view(layout.word).to(torch.int64)
    field = (word >> layout.mantissa) & layout.fields
    fraction = word & ((1 << layout.mantissa) - 1)
    mantissa = torch.where(field > 0, fraction | 1 << layout.mantissa, fraction)
    special = field == layout.fields
    exponent = field.clamp(min=1) - 1 + layout.least_exponent
    return word < 0, mantissa, exponent, special & (fraction == 0), special & (fraction != 0)


def _add(words: torch.Tensor, a: torch.Tensor, b: torch.Tensor | None) -> None:
    """Add each row's terms to its accumulator."""
    negative, mantissa, exponent, infinite, nan = _numbers(a)
    zero = mantissa == 0
    if b is None:
        terms = [(mantissa, exponent)]
    else:
        negative_b, mantissa_b, exponent_b, infinite_b, nan_b = _numbers(b)
        zero_b = mantissa_b == 0
        nan = nan | nan_b | (infinite & zero_b) | (zero & infinite_b)
        infinite = (infinite | infinite_b) & ~nan
        zero, negative = zero | zero_b, negative ^ negative_b
        terms = _product(mantissa, mantissa_b, exponent + exponent_b, a.dtype)
    finite = ~(infinite | nan)
    for value, place in terms:
        _deposit(words, torch.where(finite, value, 0), torch.where(finite, place, 0), negative)
    words[:, PLUS] += (nan | (infinite & ~negative)).sum(1)
    words[:, MINUS] += (nan | (infinite & negative)).sum(1)
    words[:, NEGATIVE_ZEROS] += (zero & finite & negative).sum(1)
    words[:, TERMS] += a.shape[1]


def _product(m: torch.Tensor, n: torch.Tensor, exponent: torch.Tensor, dtype: torch.dtype) -> list:
    """m * n * 2^exponent as terms whose integers stay below 2^55."""
    if LAYOUTS[dtype].precision <= 24:
        return [(m * n, exponent)]
    low = (1 << _HALF) - 1
    high_m, low_m, high_n, low_n = m >> _HALF, m & low, n >> _HALF, n & low
    middle = high_m * low_n + low_m * high_n
    return [(low_m * low_n, exponent), (middle, exponent + _HALF), (high_m * high_n, exponent + 2 * _HALF)]


def _deposit(words: torch.Tensor, value: torch.Tensor, exponent: torch.Tensor, negative: torch.Tensor) -> None:
    """Add +-value * 2^exponent, value < 2^55, to three neighbouring limbs."""
    place = exponent - UNIT
    limb, shift = place // LIMB, place % LIMB
    rest = value >> (LIMB - shift)
    pieces = (value << shift) & LOW, rest & LOW, rest >> LIMB
    start = torch.arange(words.shape[0], device=words.device, dtype=torch.int64)[:, None] * WORDS
    for k, piece in enumerate(pieces):
        signed = torch.where(negative, -piece, piece)
        words.view(-1).scatter_add_(0, (start + limb + k).reshape(-1), signed.reshape(-1))


def _nearest(magnitude: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of the nearest float, and whether the value is 0; of settled limbs that are not negative."""
    padded = torch.nn.functional.pad(magnitude, (2, 0))
    index = torch.arange(padded.shape[-1], device=padded.device, dtype=torch.int64)
    used = padded != 0
    top = torch.where(used, index, 2).amax(-1)
    bottom = torch.where(used, index, padded.shape[-1]).amin(-1)
    first, second, third = (padded.gather(-1, top[..., None] - k)[..., 0] for k in range(3))
    length = torch.frexp(first.to(torch.float64)).exponent.to(torch.int64)
    spread = second << (_HEAD - LIMB)
    head = (first << (_HEAD - length)) + (spread >> length) + (third >> (length + 2))
    lost = (spread & ((1 << length) - 1)) | (third & ((1 << (length + 2)) - 1))
    # Below 62 bits it matters only whether there is anything.
    head = head | ((lost != 0) | (bottom < top - 2)).to(torch.int64)
    exponent = (top - 2) * LIMB + UNIT + length - 1
    drop = _HEAD - layout.precision + (layout.lowest - exponent).clamp(0, layout.precision + 1)
    kept, rest, half = head >> drop, head & ((1 << drop) - 1), 1 << (drop - 1)
    kept = kept + ((rest > half) | ((rest == half) & (kept & 1 == 1))).to(torch.int64)
    # A mantissa's leading bit, or one that a carry made, adds 1 to the exponent field.
    field = (exponent - layout.lowest).clamp(min=0)
    bits = kept + (field.clamp(max=layout.fields - 2) << layout.mantissa)
    bits = torch.where(field > layout.fields - 2, layout.fields << layout.mantissa, bits)
    zero = ~used.any(-1)
    return torch.where(zero, 0, bits), zero
