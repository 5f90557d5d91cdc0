"""The exact reference: rounding, encoding and decoding one number at a time, on rationals."""

import math
import numbers
from fractions import Fraction
from typing import Literal, cast, get_args

from ._format import Format, Overflow

RoundingName = Literal["nearest", "zero", "up", "down", "stochastic"]


def round_exact(
    x: float | Fraction,
    format: Format,
    mode: RoundingName = "nearest",
    u: Fraction | None = None,
    overflow: Overflow | None = None,
) -> float:
    """Round ``x`` to a number of ``format``: slow, exact, and the reference of every fast kernel.

    The numbers of a format are thought to go on beyond ``max`` with the spacing of their binade. ``x`` lies
    between two neighbours of that endless grid, ``lo <= |x| < hi``, with ``fraction = (|x| - lo) / (hi - lo)``:

    - ``"nearest"``: the nearer one; at a tie the one whose last digit is even, and where both are odd (no
      mantissa bits) ``hi``, as IEEE 754-2019 section 4.3.1 says; between 0 and the smallest normal number of a
      format without subnormals, 0.
    - ``"zero"``: lo. ``"up"``: toward plus infinity. ``"down"``: toward minus infinity.
    - ``"stochastic"``: hi if and only if ``u < fraction``, so hi with probability ``fraction`` for uniform u.

    A result beyond ``max`` is an overflow and becomes what ``overflow`` says with the sign of ``x``: infinity, NaN or
    ``max``. So "nearest" overflows from ``max`` plus half a spacing on (the tie decided as above), "stochastic" by
    chance between ``max`` and the next point of the grid and always beyond it. A mode that goes toward zero never
    overflows and gives ``max``: "zero", "down" for positive ``x``, "up" for negative. An infinity overflows in every
    mode. NaN stays NaN, also for a format without NaN: the float that is returned can hold it, and `encode` refuses it.

    A result of 0 has the sign of ``x`` where the format has -0. In a format without a sign -0 is 0 and every other
    negative number NaN. In a format without a zero, what is below the smallest number becomes the smallest number,
    in every mode; 0 too (as torch's cast to float8_e8m0fnu).

    Args:
        x: A float, integer or Fraction.
        format: The target.
        mode: See above.
        u: The draw of ``"stochastic"``, in [0, 1).
        overflow: In place of ``format.overflow``.

    Raises:
        ValueError: If the mode, ``u`` or the overflow policy is not allowed here.
        TypeError: If ``x`` is no real number.

    >>> from halfulp.formats import bf16, e2m1fn, e4m3fn, fp16
    >>> round_exact(Fraction(1, 3), bf16), round_exact(Fraction(1, 3), bf16, "zero")
    (0.333984375, 0.33203125)
    >>> round_exact(464, e4m3fn), round_exact(465, e4m3fn, overflow="nan"), round_exact(-1e9, fp16)
    (448.0, nan, -inf)
    >>> round_exact(1.125, e2m1fn, "stochastic", u=Fraction(1, 5))
    1.5
    """
    policy = resolve_overflow_policy(format, overflow)
    if mode not in get_args(RoundingName):
        raise ValueError(f"mode is one of {', '.join(get_args(RoundingName))}; got {mode!r}")
    if (mode == "stochastic") != (u is not None):
        raise ValueError(f"u is given with mode 'stochastic' and only there; got mode {mode!r} and u {u!r}")
    if u is not None and not 0 <= u < 1:
        raise ValueError(f"u lies in [0, 1), got {u!r}")
    sign, magnitude = _split_sign(x)
    if magnitude is None:
        return math.nan
    if sign < 0 and not format.signed and magnitude != 0:
        return math.nan
    if isinstance(magnitude, float):  # an infinity
        return _find_overflow_result(sign, format, policy)
    rounded = _round_magnitude(magnitude, sign, format, mode, u)
    if rounded > format.max:
        inward = mode in ("zero", "down" if sign > 0 else "up")
        return math.copysign(format.max, sign) if inward else _find_overflow_result(sign, format, policy)
    negative = sign < 0 and (format.signed_zero if rounded == 0 else format.signed)
    return -float(rounded) if negative else float(rounded)


def decode(code: int, format: Format) -> float:
    """Return the number that a code stands for.

    Codes with the exponent field 0 and a mantissa are 0 in a format without subnormals.

    Raises:
        ValueError: If the code does not fit into the format's bits.

    >>> from halfulp.formats import e4m3fn
    >>> decode(0x7E, e4m3fn), decode(0x81, e4m3fn), decode(0x7F, e4m3fn)
    (448.0, -0.001953125, nan)
    """
    if not isinstance(code, int) or not 0 <= code < 2**format.bits:
        raise ValueError(f"a code of {format.name} is an integer from 0 to {2**format.bits - 1}, got {code!r}")
    width = format.exponent_bits + format.mantissa_bits
    negative, magnitude = divmod(code, 2**width)
    if format.nan == "negative_zero" and negative and magnitude == 0:
        return math.nan
    value = _decode_magnitude(magnitude, format)
    return -value if negative and (value != 0 or format.signed_zero) else value


def encode(value: float | Fraction, format: Format) -> int:
    """Return the code of a number of ``format``: the inverse of `decode`, and one code (quiet, positive) for NaN.

    Raises:
        ValueError: If the format has no such number: round it first.
        TypeError: If ``value`` is no real number.

    >>> from halfulp.formats import e4m3fn
    >>> hex(encode(-448, e4m3fn)), hex(encode(float("nan"), e4m3fn))
    ('0xfe', '0x7f')
    >>> encode(0.3, e4m3fn)
    Traceback (most recent call last):
        ...
    ValueError: 0.3 is no number of e4m3fn; round it first: round_exact gives 0.3125
    """
    sign, magnitude = _split_sign(value)
    if magnitude is None:
        return _find_nan_code(format)
    if isinstance(magnitude, float):  # an infinity
        if not format.infinities or (sign < 0 and not format.signed):
            raise ValueError(f"{format.name} has no {value}; its largest number is {format.max}")
        return format.max_code + 1 | (sign < 0) << (format.exponent_bits + format.mantissa_bits)
    rounded = round_exact(value, format, overflow="saturate")
    if rounded != value or math.copysign(1, rounded) != sign:
        raise ValueError(f"{value} is no number of {format.name}; round it first: round_exact gives {rounded}")
    if magnitude < Fraction(format.smallest_normal):
        code = int(magnitude / Fraction(format.smallest_subnormal))
    else:
        exponent = _floor_log2(magnitude)
        fraction = magnitude / Fraction(2) ** exponent - 1
        code = ((exponent + format.bias) << format.mantissa_bits) + int(fraction * 2**format.mantissa_bits)
    return code | (sign < 0) << (format.exponent_bits + format.mantissa_bits)


def all_values(format: Format) -> list[float]:
    """Return every finite number of a format, ascending; 0 once.

    Raises:
        ValueError: If the format has more than 20 bits.

    >>> from halfulp.formats import e2m1fn
    >>> all_values(e2m1fn)[7:]
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    if format.bits > 20:
        raise ValueError(f"{format.name} has 2^{format.bits} codes; all_values lists formats of up to 20 bits")
    positive = {_decode_magnitude(code, format) for code in range(format.max_code + 1)}
    values = positive | {-value for value in positive} if format.signed else positive
    return sorted(values)


def resolve_overflow_policy(format: Format, overflow: str | None) -> Overflow:
    """Return the overflow policy that applies, checked."""
    policy = format.overflow if overflow is None else overflow
    if policy not in get_args(Overflow):
        allowed = ", ".join(get_args(Overflow))
        raise ValueError(f"overflow is one of {allowed}, or None for the format's own; got {overflow!r}")
    if policy == "inf" and not format.infinities:
        raise ValueError(f"{format.name} has no infinities: overflow='inf' is not possible, take 'saturate' or 'nan'")
    return cast("Overflow", policy)


def _split_sign(x: float | Fraction) -> tuple[int, Fraction | float | None]:
    """Return the sign (of a zero too) and the magnitude: a Fraction, infinity, or None for NaN."""
    if isinstance(x, numbers.Rational):  # NumPy's are no integers of any size
        return (-1 if x < 0 else 1), abs(Fraction(int(x.numerator), int(x.denominator)))
    if not isinstance(x, numbers.Real) or not hasattr(x, "as_integer_ratio"):
        raise TypeError(f"a float, integer or Fraction is wanted, got {type(x).__name__}")
    if math.isnan(x):
        return 1, None
    # NumPy's wider ones are not rounded to float first.
    magnitude = math.inf if abs(x) == math.inf else abs(Fraction(*map(int, x.as_integer_ratio())))
    return int(math.copysign(1, x)), magnitude


def _find_overflow_result(sign: int, format: Format, policy: Overflow) -> float:
    """Return the result for a number beyond the largest, by the overflow policy."""
    return math.copysign({"inf": math.inf, "nan": math.nan, "saturate": format.max}[policy], sign)


def _round_magnitude(
    magnitude: Fraction, sign: int, format: Format, mode: RoundingName, u: Fraction | None
) -> Fraction:
    """Round a magnitude in a mode to the format's grid, as if that went on beyond its largest number."""
    if not format.zero and magnitude < Fraction(format.smallest_normal):
        return Fraction(format.smallest_normal)
    spacing = Fraction(format.smallest_subnormal)
    if magnitude >= Fraction(format.smallest_normal):
        spacing = Fraction(2) ** (_floor_log2(magnitude) - format.mantissa_bits)
    steps = magnitude // spacing
    fraction = magnitude / spacing - steps
    away = {
        "nearest": fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and steps % 2 == 1),
        "zero": False,
        "up": fraction > 0 and sign > 0,
        "down": fraction > 0 and sign < 0,
        "stochastic": u is not None and u < fraction,
    }[mode]
    return (steps + away) * spacing


def _floor_log2(magnitude: Fraction) -> int:
    """Return the e with 2^e <= magnitude < 2^(e + 1)."""
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return exponent if magnitude >= Fraction(2) ** exponent else exponent - 1


def _decode_magnitude(magnitude: int, format: Format) -> float:
    """Return the value of a code without its sign bit."""
    if magnitude > format.max_code:
        infinity = format.max_code + 1
        return math.inf if format.infinities and magnitude == infinity else math.nan
    field, fraction = divmod(magnitude, 2**format.mantissa_bits)
    if field == 0 and format.zero:
        return math.ldexp(fraction * format.subnormals, format.emin - format.mantissa_bits)
    return math.ldexp(2**format.mantissa_bits + fraction, field - format.bias - format.mantissa_bits)


def _find_nan_code(format: Format) -> int:
    """Return the code of the quiet NaN."""
    width = format.exponent_bits + format.mantissa_bits
    if format.nan is None:
        raise ValueError(f"{format.name} has no NaN; clear NaN first, or take a format that has one")
    if format.nan == "negative_zero":
        return 1 << width
    if format.nan == "all_ones":
        return (1 << width) - 1
    return (format.max_code + 1) | 1 << (format.mantissa_bits - 1)
