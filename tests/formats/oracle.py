"""What judges formats: gfloat's description of them, and equality that tells NaN and the sign of zero."""

import math

import gfloat

from halfulp.formats import Format


def to_gfloat(format: Format) -> gfloat.FormatInfo:
    high = {"ieee": 2**format.mantissa_bits - 1, "all_ones": 1, "negative_zero": 0, None: 0}[format.nan]
    return gfloat.FormatInfo(
        format.name,
        k=format.bits,
        precision=format.precision,
        bias=format.bias,
        is_signed=format.signed,
        domain=gfloat.Domain.Extended if format.infinities else gfloat.Domain.Finite,
        has_nz=format.signed_zero,
        num_high_nans=high,
        has_subnormals=format.subnormals,
        is_twos_complement=False,
    )


MODES = {
    "nearest": gfloat.RoundMode.TiesToEven,
    "zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
}


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
