"""The exact reference: unsigned formats, overflow, flushed subnormals, codes of NaN, and what is refused."""

import math
import random
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from halfulp.formats import Format, all_values, decode, encode, fp16, fp64, get, round_exact

from .oracle import MODES, same


def test_e8m0_rounds_as_torch_and_ml_dtypes(seed):
    format = get("e8m0")
    inputs = [2.0 ** random.uniform(-140, 127.9) for _ in range(1000)] + [1.5 * 2.0**e for e in range(-126, 128)]
    # Both send every float32 between 2^-127 and 2^-126 up, though most lie nearer to 2^-127.
    inputs = [x for x in inputs if not 2.0**-127 < x < 2.0**-126]
    inputs = np.array([*inputs, math.inf, 2.0**-149], dtype=np.float32)
    torchs = torch.from_numpy(inputs).to(torch.float8_e8m0fnu).double().tolist()
    ml = inputs.astype(ml_dtypes.float8_e8m0fnu).astype(np.float64).tolist()
    for x, a, b in zip(inputs.tolist(), torchs, ml):
        assert same(round_exact(x, format), a), x
        assert same(a, b), x


def test_e8m0_has_no_zero_and_no_sign():
    format = get("e8m0")
    for mode in MODES:
        assert round_exact(0.0, format, mode) == round_exact(-0.0, format, mode) == 2.0**-127
        assert round_exact(2.0**-140, format, mode) == 2.0**-127
        for negative in (-1.0, -math.inf, -5e-324):
            assert math.isnan(round_exact(negative, format, mode))
    assert math.isnan(round_exact(2.0**128, format))
    assert round_exact(2.0**128, format, "zero") == round_exact(2.0**200, format, overflow="saturate") == 2.0**127
    assert round_exact(3.0, format, "zero") == 2.0
    assert round_exact(2.0**-127 * 1.4, format) == 2.0**-127
    assert round_exact(2.0**-127 * 1.01, format, "up") == 2.0**-126


def test_unsigned_formats_have_no_negatives():
    format = Format("ue4m3", 4, 3, infinities=False, nan="all_ones", signed=False)
    assert same(round_exact(-0.0, format), 0.0)
    assert math.isnan(round_exact(-1e-9, format))
    assert round_exact(1e9, format) == format.max == 448
    with pytest.raises(ValueError, match=r"-1\.0 is no number of ue4m3"):
        encode(-1.0, format)


def test_overflow_is_stated_for_every_mode_and_policy():
    format, policies = get("e4m3"), {"inf": math.inf, "nan": math.nan, "saturate": 240.0}
    for policy, beyond in policies.items():
        for sign in (1, -1):
            for x, reached in (
                (math.inf, dict.fromkeys(MODES, True)),
                (1e9, {"nearest": True, "zero": False, "up": sign > 0, "down": sign < 0}),
                (248.0, {"nearest": True, "zero": False, "up": sign > 0, "down": sign < 0}),
                (math.nextafter(248.0, 0), {"nearest": False, "zero": False, "up": sign > 0, "down": sign < 0}),
            ):
                for mode in MODES:
                    expected = math.copysign(beyond if reached[mode] else 240.0, sign)
                    assert same(round_exact(sign * x, format, mode, overflow=policy), expected), (policy, x, mode)
    assert round_exact(244, format, "stochastic", u=Fraction(1, 4)) == 240
    assert round_exact(244, format, "stochastic", u=Fraction(1, 5)) == math.inf


def test_formats_without_subnormals_flush_by_the_mode():
    format = Format("flush", 4, 3, subnormals=False)
    small = format.smallest_normal
    assert [round_exact(small * f, format) for f in (0.49, 0.5, 0.51)] == [0, 0, small]
    assert [round_exact(small * 0.3, format, mode) for mode in ("zero", "up", "down")] == [0, small, 0]
    assert round_exact(-small * 0.3, format, "down") == -small
    assert same(round_exact(-small * 0.3, format), -0.0)
    assert round_exact(small * 0.25, format, "stochastic", u=Fraction(1, 4)) == 0
    assert round_exact(small * 0.25, format, "stochastic", u=Fraction(1, 4) - Fraction(1, 99)) == small
    assert decode(3, format) == 0.0


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str
)
def test_codes_of_nan_are_those_of_torch(dtype, needs_torch):
    if dtype == torch.float16:
        needs_torch("a cast of NaN to float16 that sets the first bit alone")
    width = torch.uint8 if dtype.itemsize == 1 else torch.uint16
    expected = torch.tensor(math.nan).to(dtype).view(width).item()
    assert encode(math.nan, get(dtype)) & 0x7FFF == expected & 0x7FFF


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: round_exact(1.0, get("bf16"), "even"), ValueError, "mode is one of nearest, zero, up, down"),
        (lambda: round_exact(1.0, get("bf16"), "stochastic"), ValueError, "u is given with mode 'stochastic'"),
        (lambda: round_exact(1.0, get("bf16"), u=Fraction(1, 2)), ValueError, "and only there"),
        (lambda: round_exact(1.0, get("bf16"), "stochastic", u=1), ValueError, "u lies in [0, 1), got 1"),
        (lambda: round_exact(1.0, get("bf16"), overflow="wrap"), ValueError, "overflow is one of inf, nan, saturate"),
        (lambda: round_exact(1.0, get("e4m3fn"), overflow="inf"), ValueError, "take 'saturate' or 'nan'"),
        (lambda: round_exact("1", get("bf16")), TypeError, "a float, integer or Fraction is wanted, got str"),
        (lambda: round_exact(1j, get("bf16")), TypeError, "got complex"),
        (lambda: decode(256, get("e5m2")), ValueError, "a code of e5m2 is an integer from 0 to 255, got 256"),
        (lambda: decode(-1, get("e5m2")), ValueError, "got -1"),
        (lambda: decode(1.0, get("e5m2")), ValueError, "got 1.0"),
        (lambda: encode(0.1, get("bf16")), ValueError, "0.1 is no number of bf16; round it first"),
        (lambda: encode(1e9, get("e4m3")), ValueError, "is no number of e4m3"),
        (lambda: encode(-0.0, get("e4m3fnuz")), ValueError, "-0.0 is no number of e4m3fnuz"),
        (lambda: encode(math.inf, get("e4m3fn")), ValueError, "e4m3fn has no inf; its largest number is 448.0"),
        (lambda: all_values(get("fp32")), ValueError, "fp32 has 2^32 codes"),
    ],
)
def test_wrong_calls_are_answered(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize("type_name", ["int8", "uint8", "int16", "int32", "uint64", "int64", "float16", "longdouble"])
def test_numpy_numbers_are_taken_as_they_are(type_name):
    kind = getattr(np, type_name)
    limits = np.finfo(kind) if issubclass(kind, np.floating) else np.iinfo(kind)
    for value in (kind(limits.min), kind(limits.max), kind(0), kind(77)):
        exact = Fraction(*map(int, value.as_integer_ratio())) if issubclass(kind, np.floating) else int(value)
        for mode in ("nearest", "zero", "up", "down"):
            assert round_exact(value, fp64, mode) == round_exact(exact, fp64, mode)
            assert round_exact(value, fp16, mode) == round_exact(exact, fp16, mode)
    assert encode(kind(77), fp16) == encode(77, fp16)


def test_wide_floats_of_numpy_are_rounded_once():
    above = np.nextafter(np.longdouble(1), np.longdouble(2))
    if float(above) != 1:
        pytest.skip("this platform's longdouble is float64")
    assert round_exact(above, fp64, "up") == 1 + 2.0**-52
    assert round_exact(above, fp64) == 1
    assert [round_exact(np.longdouble(x), fp16) for x in ("inf", "-inf", "1e400")] == [math.inf, -math.inf, math.inf]
    assert math.isnan(round_exact(np.longdouble("nan"), fp16))
    assert round_exact(-np.longdouble(0), fp16).hex() == "-0x0.0p+0"
