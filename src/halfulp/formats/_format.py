"""A floating-point format as data, with the properties of torch.finfo derived from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch

IEEE_SPECIALS = (True, "ieee", True, True, True, True)
FN_SPECIALS = (False, "all_ones", True, True, True, True)
FNUZ_SPECIALS = (False, "negative_zero", True, True, False, True)
FINITE_SPECIALS = (False, None, True, True, True, True)
SCALE_SPECIALS = (False, "all_ones", False, False, False, False)

# Format.layout -> name in torch. A packed dtype (float4_e2m1fn_x2: two values a byte) is no element dtype.
TORCH_NAME_BY_LAYOUT: dict[tuple[Any, ...], str] = {
    (11, 52, 1023, *IEEE_SPECIALS): "float64",
    (8, 23, 127, *IEEE_SPECIALS): "float32",
    (5, 10, 15, *IEEE_SPECIALS): "float16",
    (8, 7, 127, *IEEE_SPECIALS): "bfloat16",
    (5, 2, 15, *IEEE_SPECIALS): "float8_e5m2",
    (5, 2, 16, *FNUZ_SPECIALS): "float8_e5m2fnuz",
    (4, 3, 7, *FN_SPECIALS): "float8_e4m3fn",
    (4, 3, 8, *FNUZ_SPECIALS): "float8_e4m3fnuz",
    (8, 0, 127, *SCALE_SPECIALS): "float8_e8m0fnu",
}

# Those that ml_dtypes has besides, which repeats no types of numpy.
_ML_DTYPES_NAME_BY_LAYOUT: dict[tuple[Any, ...], str] = {
    (4, 3, 7, *IEEE_SPECIALS): "float8_e4m3",
    (4, 3, 11, *FNUZ_SPECIALS): "float8_e4m3b11fnuz",
    (3, 4, 3, *IEEE_SPECIALS): "float8_e3m4",
    (3, 2, 3, *FINITE_SPECIALS): "float6_e3m2fn",
    (2, 3, 1, *FINITE_SPECIALS): "float6_e2m3fn",
    (2, 1, 1, *FINITE_SPECIALS): "float4_e2m1fn",
}
_NUMPY_NAMES = ("float64", "float32", "float16")

NaN = Literal["ieee", "all_ones", "negative_zero"]
Overflow = Literal["inf", "nan", "saturate"]


@dataclass(frozen=True, repr=False)
class Format:
    """A floating-point format: ``value = (-1)^s * 2^(e - bias) * 1.m``, and ``2^(1 - bias) * 0.m`` where e = 0.

    A format of your own works wherever a catalogued one does; nothing has to be registered. A code is laid
    out ``sign | exponent | mantissa``, most significant bit first.

    Args:
        name: What reports call it.
        exponent_bits: Width of the exponent field, 1 to 11.
        mantissa_bits: Explicit bits of the significand, 0 to 52; the precision is one more.
        bias: Subtracted from the exponent field. Default ``2^(exponent_bits - 1) - 1``, and one more where
            NaN sits at negative zero.
        infinities: Whether there are infinities. Under ``nan="ieee"`` they are the codes with all exponent
            bits set and no mantissa bit; elsewhere the largest magnitude that is not NaN.
        nan: Where NaN sits: ``"ieee"`` (exponent all ones, mantissa not 0), ``"all_ones"`` (exponent and
            mantissa all ones, either sign), ``"negative_zero"`` (the code of -0 only), or None (there is none).
        subnormals: Whether the exponent field 0 holds subnormals; without them it holds zero only.
        signed: Whether there are negative numbers.
        signed_zero: Whether -0 exists. Default: yes where there are a sign and a zero whose negative is not NaN.
        zero: Whether 0 exists; without it the exponent field 0 is one more binade of normal numbers.
        overflow: What a number beyond ``max`` becomes unless the caller says otherwise: ``"inf"``, ``"nan"`` or
            ``"saturate"`` (plus or minus ``max``). Default: ``"inf"`` where there are infinities, ``"nan"`` for
            the fnuz kind (as in torch and ml_dtypes), else ``"saturate"`` (as torch's cast to e4m3fn, which sends
            even an infinity to 448). An infinity that is given counts as overflow, under every policy
            (OCP 8-bit floating point, 2023, table 2). Under ``"nan"`` a format without NaN shows the overflow as
            NaN in the float that holds its values; it has no code for it.

    Raises:
        ValueError: If no such format can exist, or float64 cannot hold its numbers.

    >>> e4m4 = Format("mine", exponent_bits=4, mantissa_bits=4)
    >>> print(e4m4)
    mine: 9 bits, max 248, min normal 2^-6, eps 2^-4
    >>> e4m4.max, e4m4.smallest_subnormal, e4m4.binades
    (248.0, 0.0009765625, 18)
    >>> e4m4
    Format('mine', 4, 4)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int = None  # type: ignore[assignment]  # None stands for the default and never outlives __init__
    infinities: bool = True
    nan: NaN | None = "ieee"
    subnormals: bool = True
    signed: bool = True
    signed_zero: bool = None  # type: ignore[assignment]
    zero: bool = True
    overflow: Overflow = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _check_fields(self)
        for field, value in _find_default_fields(self).items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)
        _check_field_consistency(self)
        # A compiler takes integers of an argument for variables, a string for a constant (rounding._modes).
        object.__setattr__(self, "_key", repr(tuple(getattr(self, field.name) for field in fields(self))))

    if TYPE_CHECKING:

        @property
        def _key(self) -> str: ...

    # sizes ------------------------------------------------------------------------------------------------

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def precision(self) -> int:
        """Bits of the significand with its implicit one: p, as in IEEE 754."""
        return self.mantissa_bits + 1

    @property
    def max_code(self) -> int:
        """Code of ``max``: positive codes count up with their values."""
        if self.nan == "ieee":
            return (((1 << self.exponent_bits) - 1) << self.mantissa_bits) - 1
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1 - (self.nan == "all_ones") - self.infinities

    # range ------------------------------------------------------------------------------------------------

    @property
    def emax(self) -> int:
        """Exponent of ``max``: 2^emax <= max < 2^(emax + 1)."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number, which is 2^emin."""
        return self.zero - self.bias

    @property
    def max(self) -> float:
        """Largest finite number."""
        fraction = self.max_code & (2**self.mantissa_bits - 1)
        return math.ldexp(2**self.mantissa_bits + fraction, self.emax - self.mantissa_bits)

    @property
    def min(self) -> float:
        """Lowest finite number: -max; without a sign 0, or the smallest number where there is no 0."""
        if self.signed:
            return -self.max
        return 0.0 if self.zero else self.smallest_normal

    @property
    def smallest_normal(self) -> float:
        """Smallest positive number of full precision."""
        return math.ldexp(1.0, self.emin)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive number: ``smallest_normal`` where there are no subnormals."""
        return math.ldexp(1.0, self.emin - self.mantissa_bits * self.subnormals)

    @property
    def eps(self) -> float:
        """Distance from 1 to the next number, 2^-mantissa_bits; half of it is the largest relative error."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def binades(self) -> int:
        """Number of powers of two from the smallest positive number to ``max`` (fp16: 40)."""
        return self.emax - self.emin + self.mantissa_bits * self.subnormals + 1

    # kin --------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> tuple[int, int, int, bool, NaN | None, bool, bool, bool, bool]:
        """All that fixes the meaning of a code: every field but ``name`` and ``overflow``."""
        specials = (self.infinities, self.nan, self.subnormals, self.signed, self.signed_zero, self.zero)
        return self.exponent_bits, self.mantissa_bits, self.bias, *specials

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The installed torch's dtype of this layout, or None."""
        name = self.torch_dtype_name
        if name is None:
            return None
        from .._torch_versions import find_torch_dtype

        return find_torch_dtype(name)

    @property
    def torch_dtype_name(self) -> str | None:
        """Name of this layout in torch, or None; known without torch."""
        return TORCH_NAME_BY_LAYOUT.get(self.layout)

    @property
    def ml_dtypes_name(self) -> str | None:
        """Name of this layout in ml_dtypes, or None."""
        name = _ML_DTYPES_NAME_BY_LAYOUT.get(self.layout, self.torch_dtype_name)
        return None if name in _NUMPY_NAMES else name

    def holds(self, other: Format) -> bool:
        """Return whether every finite number of ``other`` is one of this format's (-0 and NaN left aside).

        A format with a single normal number is judged as if it had a whole binade of them.

        >>> from halfulp.formats import bf16, e5m2, fp16, fp32
        >>> fp16.holds(e5m2), fp16.holds(bf16), fp32.holds(bf16)
        (True, False, True)
        """
        return (
            other.mantissa_bits <= self.mantissa_bits
            and other.max <= self.max
            and other.emin - other.mantissa_bits >= self.emin - self.mantissa_bits
            and (self.subnormals or other.smallest_subnormal >= self.smallest_normal)
            and (self.signed or not other.signed)
            and (self.zero or not other.zero)
        )

    # words ------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        words = [
            f"{self.bits} bits",
            f"max {self.max:.6g}",
            f"min normal 2^{self.emin}",
            f"eps 2^{-self.mantissa_bits}",
            *(["unsigned"] if not self.signed else []),
            *(["no zero"] if not self.zero else []),
            *(["no subnormals"] if not self.subnormals and self.mantissa_bits else []),
            *(["no infinity"] if not self.infinities else []),
            *(["no NaN"] if self.nan is None else []),
        ]
        return f"{self.name}: {', '.join(words)}"

    def __repr__(self) -> str:
        defaults = {field.name: field.default for field in fields(self)[3:]} | _find_default_fields(self)
        given = {name: getattr(self, name) for name in defaults}
        special = [f", {name}={value!r}" for name, value in given.items() if value != defaults[name]]
        return f"Format({self.name!r}, {self.exponent_bits}, {self.mantissa_bits}{''.join(special)})"


def _find_default_fields(format: Format) -> dict[str, object]:
    """Return the values that ``None`` stands for, by the other fields."""
    at_zero = format.nan == "negative_zero"
    return {
        "bias": 2 ** (format.exponent_bits - 1) - 1 + at_zero,
        "signed_zero": format.signed and format.zero and not at_zero,
        "overflow": "inf" if format.infinities else "nan" if at_zero else "saturate",
    }


def _check_fields(format: Format) -> None:
    """Raise for a field of the wrong type or out of its range."""
    if not isinstance(format.name, str) or not format.name:
        raise ValueError(f"a format's name is a non-empty string, got {format.name!r}")
    for field, low, high in (("exponent_bits", 1, 11), ("mantissa_bits", 0, 52), ("bias", -2000, 2000)):
        value = getattr(format, field)
        if field == "bias" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"{format.name}: {field} is an integer from {low} to {high}, got {value!r}")
    for field in ("infinities", "subnormals", "signed", "signed_zero", "zero"):
        value = getattr(format, field)
        if not isinstance(value, bool) and not (field == "signed_zero" and value is None):
            raise ValueError(f"{format.name}: {field} is True or False, got {value!r}")
    for field, allowed in (("nan", get_args(NaN)), ("overflow", get_args(Overflow))):
        value = getattr(format, field)
        if value is not None and value not in allowed:
            raise ValueError(f"{format.name}: {field} is one of {', '.join(allowed)}, or None; got {value!r}")


def _check_field_consistency(format: Format) -> None:
    """Raise where the fields contradict each other or leave no number."""
    contradictions = [
        (
            format.nan == "ieee" and not format.infinities,
            'nan="ieee" keeps a code for infinity; without infinities take nan="all_ones", "negative_zero" or None',
        ),
        (
            format.nan == "ieee" and format.mantissa_bits == 0,
            'nan="ieee" needs a mantissa bit to tell NaN from infinity; take mantissa_bits=1 or nan="all_ones"',
        ),
        (
            format.nan == "negative_zero" and not (format.signed and format.zero),
            'nan="negative_zero" needs a sign and a zero; take nan="all_ones"',
        ),
        (
            format.signed_zero and not (format.signed and format.zero and format.nan != "negative_zero"),
            "there is no -0 without a sign and a zero, or where NaN has its code; take signed_zero=False",
        ),
        (
            not format.zero and format.subnormals,
            "without a zero the exponent field 0 holds normal numbers; take subnormals=False",
        ),
        (
            format.overflow == "inf" and not format.infinities,
            'overflow="inf" needs infinities; take overflow="saturate" or "nan"',
        ),
        (
            format.max_code < format.zero << format.mantissa_bits,
            "no finite normal number is left beside zero, infinities and NaN; take more exponent_bits"
            " (2 or more under IEEE rules), or infinities=False, nan=None",
        ),
    ]
    for wrong, remedy in contradictions:
        if wrong:
            raise ValueError(f"{format.name}: {remedy}")
    if format.emax > 1023 or format.emin - format.mantissa_bits < -1074:
        raise ValueError(
            f"{format.name}: its numbers reach from 2^{format.emin - format.mantissa_bits} to 2^{format.emax},"
            f" float64 from 2^-1074 to 2^1023; take another bias (got {format.bias}) or fewer exponent_bits"
        )
