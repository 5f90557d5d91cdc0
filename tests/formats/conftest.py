"""A format as gfloat describes it."""

from collections.abc import Callable

import gfloat
import pytest

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


@pytest.fixture
def gfloat_of() -> Callable[[Format], gfloat.FormatInfo]:
    return to_gfloat
