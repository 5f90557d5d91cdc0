"""An oracle for rounding that knows no bits: the two neighbours of a number in the sorted list of all values."""

import contextlib
import itertools
from fractions import Fraction
from functools import lru_cache

import mpmath
import numpy as np
import torch

from halfulp.formats import BlockFormat, Format, get, names, round_exact
from halfulp.rounding import Stochastic, get_rounding, quantize, rounding_names
from halfulp.rounding._target import make_target

EXTRA = [
    Format("flush", 4, 3, subnormals=False),
    Format("flushed_bf16", 8, 7, subnormals=False),
    Format("deep", 8, 3, bias=131),
    Format("single", 7, 0, infinities=False, nan=None),
    Format("no_zero", 4, 2, zero=False, subnormals=False, infinities=False, nan=None),
    Format("unsigned", 4, 3, signed=False),
    Format("p3109", 4, 3, nan="negative_zero"),
    Format("b11", 4, 3, bias=11, infinities=False, nan="negative_zero"),
    Format("wide", 6, 9),
    # Its smallest numbers are subnormal in float32, its smallest normal ones are not.
    Format("low", 7, 9, bias=121),
]
# Every format of the catalogue, and of users, whose numbers can be listed.
FORMATS = [*(get(name) for name in names() if get(name).bits <= 20), *EXTRA]
MODES = rounding_names()
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _takes(format: Format, mode: str, dtype: torch.dtype) -> bool:
    with contextlib.suppress(ValueError):
        make_target(format, get_rounding(mode), None, dtype)
        return True
    return False


ROUNDED = {row: _takes(*row) for row in itertools.product(FORMATS, MODES, DTYPES)}


def oracle(
    x: np.ndarray, format: Format, mode: str, policy: str | None = None, v: np.ndarray | None = None, count: int = 31
) -> np.ndarray:
    """float64 numbers rounded to a format of up to 20 bits.

    For "stochastic", v are integers in [0, 2^count), and the upper neighbour is taken where v < floor(2^count f).
    """
    with np.errstate(invalid="ignore"):
        grid = _grid(format)
        a = np.minimum(np.abs(x), grid[-1])
        low = np.searchsorted(grid, a, side="right") - 1
        below_all = low < 0
        low = np.clip(low, 0, len(grid) - 2)
        lo, hi = grid[low], grid[low + 1]
        fraction = (a - lo) / (hi - lo)
        odd = (lo / (hi - lo)) % 2 == 1
        chosen = get_rounding(mode)
        away = {
            "nearest": lambda: (fraction > 0.5) | ((fraction == 0.5) & odd),
            "toward_zero": lambda: fraction >= 1,
            "up": lambda: (fraction > 0) & (x > 0),
            "down": lambda: (fraction > 0) & (x < 0),
            "stochastic": lambda: v < np.floor(fraction * 2.0**count),
        }.get(mode, lambda: (fraction > 0) & chosen.goes_away(fraction, 0.5, odd, np.signbit(x)))()
        r = np.where(below_all, grid[0], np.where(away, hi, lo))
        over = (r > format.max) | (np.abs(x) >= grid[-1])
        inward = {"toward_zero": x == x, "up": x < 0, "down": x > 0}.get(mode, x != x) & np.isfinite(x)
        beyond = {"inf": np.inf, "nan": np.nan, "saturate": format.max}[policy or format.overflow]
        r = np.where(over, np.where(inward, format.max, beyond), r)
        negative = np.signbit(x) & np.where(r == 0, format.signed_zero, format.signed)
        r = np.where(negative, -r, r)
        refused = np.isnan(x) | (not format.signed and (x < 0))
        return np.where(refused, np.nan, r)


@lru_cache
def _grid(format: Format) -> np.ndarray:
    """The numbers from 0 on, and the one that would follow the largest."""
    field, fraction = np.divmod(np.arange(format.max_code + 1.0), 2.0**format.mantissa_bits)
    values = np.ldexp(2.0**format.mantissa_bits + fraction, (field - format.bias - format.mantissa_bits).astype(int))
    if format.zero:
        small = np.ldexp(fraction * format.subnormals, format.emin - format.mantissa_bits)
        values = np.unique(np.where(field == 0, small, values))
    return np.append(values, values[-1] + 2.0 ** (format.emax - format.mantissa_bits))


def all_of(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def random_patterns(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Random bit patterns of a dtype, with all specials likely."""
    words = torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64)
    if dtype == torch.float64:
        # A uniform exponent field: half in the range of float32, half anywhere.
        field = torch.where(words % 2 == 0, 1023 + (words >> 8) % 300 - 150, (words >> 8) % 2048)
        tied = torch.where((words >> 20) % 3 == 0, words & ~((1 << 40) - 1), words)
        return ((tied & ~(2047 << 52)) | field << 52).view(torch.float64)
    if dtype == torch.float32:
        words = torch.where((words >> 40) % 3 == 0, words & ~0xFFFF, words)
        return (words & 0xFFFFFFFF).to(torch.int64).sub(2**31).to(torch.int32).view(torch.float32)
    return words.to(torch.int16).view(dtype)


def exact_blocks(x: np.ndarray, format: BlockFormat, mode: str = "nearest") -> np.ndarray:
    """Rows of float32 numbers rounded in blocks on rationals, one element at a time; modes as `round_exact`'s."""
    rows = x.reshape(-1, x.shape[-1])
    parts = [[row[i : i + format.block] for i in range(0, len(row), format.block)] for row in rows]
    peaks = [[float(np.abs(part).max()) for part in row] for row in parts]
    finite = [peak for row in peaks for peak in row if np.isfinite(peak)]
    tensor = _tensor_scale(max(finite, default=0.0), format)
    done = [[_exact_block(part, format, mode, tensor) for part in row] for row in parts]
    return np.stack([np.concatenate(row) for row in done]).reshape(x.shape)


def _tensor_scale(peak: float, format: BlockFormat) -> np.float32 | None:
    if not format.tensor_scale:
        return None
    scale = np.float32(peak) / np.float32(format.element.max * format.scale.max)
    return max(scale, np.float32(2.0**-126))


def _exact_block(part: np.ndarray, format: BlockFormat, mode: str, tensor: np.float32 | None) -> np.ndarray:
    peak = np.abs(part).max()
    if not np.isfinite(peak):
        return np.full(len(part), np.nan, np.float32)
    if tensor is None and format.scale.mantissa_bits == 0:
        scale = Fraction(_exact_scale(Fraction(float(peak)), format))
        payloads = [(_signed_fraction(value), scale) for value in part]
    else:
        unit = np.float32(format.element.max) * (np.float32(1) if tensor is None else tensor)
        rounding = {"up": "up", "nearest": "nearest"}[format.scale_rounding]
        rounded = round_exact(float(peak / unit), format.scale, rounding, overflow="saturate")
        rounded = np.float32(max(rounded, format.scale.smallest_subnormal))
        scale = rounded * (np.float32(1) if tensor is None else tensor)
        with np.errstate(under="ignore"):
            quotients = [value / scale for value in part]
        # A quotient that is lost is not zero to a directed mode.
        tiny = np.float32(2.0**-149)
        payloads = [(float(q if q or not v else np.copysign(tiny, v)), scale) for q, v in zip(quotients, part)]
    results = []
    for (payload, scale), value in zip(payloads, part):
        if isinstance(scale, Fraction):
            element = round_exact(payload / scale, format.element, mode, overflow="saturate")
            product = Fraction(element) * scale
            result = np.float32(float(product)) if product < 2**128 else np.float32(np.inf)
        else:
            element = round_exact(payload, format.element, mode, overflow="saturate")
            result = np.float32(element) * scale
        results.append(np.copysign(result, value) if result == 0 and format.element.signed_zero else result)
    return np.array(results, np.float32)


def _signed_fraction(value: np.float32) -> Fraction:
    return Fraction(float(value))


def _exact_scale(peak: Fraction, format: BlockFormat) -> Fraction:
    """The power of two of a block, found by trying them all."""
    powers = _powers(format.scale.emin, format.scale.emax)
    wanted = peak / Fraction(format.element.max)
    if format.scale_rounding == "up":
        return next((power for power in powers if power >= wanted), powers[-1])
    if format.scale_rounding == "nearest":
        return min(powers, key=lambda power: (abs(power - wanted), -power))
    reach = peak / Fraction(2) ** format.element.emax
    fits = [power for power in powers if power <= reach]
    return fits[-1] if fits else powers[0]


@lru_cache
def _powers(least: int, most: int) -> list[Fraction]:
    return [Fraction(2) ** k for k in range(least, most + 1)]


def tail(statistic: float, degrees: int) -> float:
    """The smaller of the two tail probabilities of a chi-square statistic."""
    upper = float(mpmath.gammainc(degrees / 2, statistic / 2, mpmath.inf, regularized=True))
    return min(upper, 1 - upper)


def rounded(x: torch.Tensor, format: Format, mode: str, policy: str | None = None) -> torch.Tensor | None:
    """The result, or None where the dtype cannot hold it."""
    try:
        return quantize(x, format, Stochastic(5) if mode == "stochastic" else mode, overflow=policy)
    except ValueError as error:
        if "cannot hold" not in str(error):
            raise
        return None


def inputs(dtype: torch.dtype, all_of, random_patterns) -> torch.Tensor:
    return all_of(dtype) if dtype.itemsize == 2 else random_patterns(dtype, 50_000)
