"""Law: every format decodes and encodes its codes, and rounds, as ml_dtypes, gfloat, torch and brute force do."""

import bisect
import itertools
import math
import random
from fractions import Fraction

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halfulp.formats import Format, all_values, decode, encode, get, names, round_exact

from ..formats.oracle import MODES, same, to_gfloat
from ..samples import IS_WHOLE

SPECIALS = [0.0, -0.0, math.inf, -math.inf, 1.0, -1.0, 5e-324, 2.0**-149, 2.0**1023, -1e300]
USERS = [
    Format("p3109", 4, 3, nan="negative_zero"),
    Format("finite", 4, 3, infinities=False, nan=None),
    Format("flush", 4, 3, subnormals=False),
    Format("b11", 4, 3, bias=11, infinities=False, nan="negative_zero"),
    Format("wide", 6, 9),
]


def native(codes: np.ndarray, format: Format) -> np.ndarray:
    """What ml_dtypes (or numpy, for float16) reads in codes."""
    width = np.uint8 if format.bits <= 8 else np.uint16
    dtype = np.float16 if format.name == "fp16" else getattr(ml_dtypes, format.ml_dtypes_name)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return codes.astype(width).view(dtype).astype(np.float64)


def native_wide(codes: list[int], bits: int) -> np.ndarray:
    """What numpy reads in codes of its own floats."""
    with np.errstate(invalid="ignore"):
        return np.array(codes, dtype=f"uint{bits}").view(f"float{bits}").astype(np.float64)


def near_the_grid(format: Format, count: int) -> list[float]:
    """Numbers of the format, the middles between them, both a little off, random ones, and specials."""
    draws = [random.randrange(format.max_code + 1) for _ in range(count)]
    edges = [0, 1, 2, 1 << format.mantissa_bits, format.max_code - 1, format.max_code]
    found = list(SPECIALS)
    for code in {code for code in (*edges, *draws) if 0 <= code <= format.max_code}:
        low = decode(code, format)
        step = (low - decode(code - 1, format)) if code else format.smallest_subnormal
        for point in (low, low + step / 2, low + step * random.random()):
            point = random.choice([-1, 1]) * point
            found += [point, math.nextafter(point, math.inf), math.nextafter(point, -math.inf)]
    return found + [-x for x in found]


@pytest.mark.parametrize("name", [n for n in names() if get(n).bits <= 16 and (get(n).ml_dtypes_name or n == "fp16")])
def test_every_code_decodes_as_in_ml_dtypes_and_encodes_back(name, seed):
    format = get(name)
    codes = np.arange(2**format.bits)
    if format.bits > 8 and not IS_WHOLE:  # the ends of every binade, and every fifth code beside them
        last = 2**format.mantissa_bits - 1
        codes = codes[(codes % 5 == random.randrange(5)) | np.isin(codes & last, (0, 1, last))]
    for code, value in zip(codes.tolist(), native(codes, format).tolist()):
        ours = decode(code, format)
        assert same(ours, value), hex(code)
        if math.isnan(ours):
            assert math.isnan(decode(encode(ours, format), format))
        else:
            assert encode(ours, format) == code


@pytest.mark.parametrize("name", [n for n in names() if get(n).bits <= 16 and get(n).torch_dtype])
def test_every_code_decodes_as_in_torch(name):
    format = get(name)
    codes = torch.arange(2**format.bits).to(torch.uint8 if format.bits <= 8 else torch.uint16)
    for code, value in enumerate(codes.view(format.torch_dtype).double().tolist()):
        assert same(decode(code, format), value), hex(code)


@pytest.mark.parametrize("format", [get(n) for n in names() if get(n).bits <= 14 and n != "e8m0"] + USERS, ids=str)
def test_every_code_decodes_as_in_gfloat(format):
    info = to_gfloat(format)
    for code in range(2**format.bits):
        if format.subnormals or code >> format.mantissa_bits & (2**format.exponent_bits - 1):
            assert same(decode(code, format), gfloat.decode_float(info, code).fval), hex(code)


@pytest.mark.parametrize("name", names())
def test_wide_codes_go_round(name, seed):
    format = get(name)
    for code in [0, format.max_code, *(random.randrange(2**format.bits) for _ in range(300))]:
        value = decode(code, format)
        if not math.isnan(value):
            assert encode(value, format) == code


@pytest.mark.parametrize("name", ["fp16", "fp32", "fp64"])
def test_wide_codes_decode_as_in_numpy(name, seed):
    format = get(name)
    codes = [format.max_code, format.max_code + 1, 1, *(random.randrange(2**format.bits) for _ in range(1000))]
    theirs = native_wide(codes, format.bits)
    for code, value in zip(codes, theirs.tolist()):
        assert same(decode(code, format), value), hex(code)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(
    "format", [get(n) for n in names() if n != "e8m0"] + USERS[:2] + USERS[3:], ids=lambda f: f.name
)
def test_rounds_as_gfloat(format, saturate, mode, seed):
    info = to_gfloat(format)
    policy = "saturate" if saturate or format.nan is None else "inf" if format.infinities else "nan"
    for x in near_the_grid(format, 20):
        theirs = gfloat.round_float(info, x, MODES[mode], sat=policy == "saturate")
        assert same(round_exact(x, format, mode, overflow=policy), theirs), x


@pytest.mark.parametrize("format", [get("bf16"), get("e4m3fn"), get("e5m2"), get("e2m1fn"), *USERS[:2]], ids=str)
def test_rounds_stochastically_as_gfloat(format, seed):
    info, bits = to_gfloat(format), 12
    for x in near_the_grid(format, 60):
        draw = random.randrange(1, 2**bits)
        # gfloat goes up iff fraction >= 1 - draw / 2^bits, we iff fraction > u: u a hair below gives the same.
        u = 1 - Fraction(draw, 2**bits) - Fraction(1, 2**2000)
        theirs = gfloat.round_float(info, x, gfloat.RoundMode.StochasticFastest, True, draw, bits)
        assert same(round_exact(x, format, "stochastic", u=u, overflow="saturate"), theirs), x


@pytest.mark.parametrize("name", [n for n in names() if get(n).ml_dtypes_name and n != "e8m0"])
def test_rounds_float32_to_nearest_as_ml_dtypes(name, seed):
    format = get(name)
    # ml_dtypes overflows e4m3fn to NaN, and rounds float64 twice: float32 inputs only.
    policy = "nan" if name == "e4m3fn" else None
    with np.errstate(over="ignore", under="ignore"):
        points = np.array(near_the_grid(format, 100), dtype=np.float32)
    raw = np.array([random.getrandbits(32) for _ in range(500)], dtype=np.uint32).view(np.float32)
    inputs = np.concatenate([points, raw[~np.isnan(raw)]])
    theirs = inputs.astype(getattr(ml_dtypes, format.ml_dtypes_name)).astype(np.float64)
    for x, value in zip(inputs.tolist(), theirs.tolist()):
        assert same(round_exact(x, format, overflow=policy), value), x


@pytest.mark.parametrize("name", [n for n in names() if get(n).torch_dtype and n not in ("fp64", "e8m0")])
def test_rounds_float32_to_nearest_as_torch(name, seed):
    format = get(name)
    inputs = torch.tensor(near_the_grid(format, 100)).float()
    theirs = inputs.to(format.torch_dtype).double().tolist()
    for x, value in zip(inputs.tolist(), theirs):
        # Versions of torch differ in what e4m3fn makes of an overflow.
        if name != "e4m3fn" or abs(x) <= 464:
            assert same(round_exact(x, format), value), x


def test_nan_goes_in_and_out():
    for name in names():
        for mode in MODES:
            assert math.isnan(round_exact(math.nan, get(name), mode))
    with pytest.raises(ValueError, match="e2m1fn has no NaN; clear NaN first"):
        encode(math.nan, get("e2m1fn"))


@st.composite
def made_formats(draw):
    """Formats a user may make, of up to 9 bits, and of every kind."""
    exponent, mantissa = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    signed, zero = draw(st.booleans()), draw(st.booleans())
    kind = {"nan": draw(st.sampled_from(["ieee", "all_ones", "negative_zero", None]))}
    kind["infinities"] = kind["nan"] == "ieee" or draw(st.booleans())
    bias = draw(st.none() | st.integers(-20, 20))
    assume(kind["nan"] != "ieee" or (mantissa > 0 and exponent > 1))
    assume(kind["nan"] != "negative_zero" or (signed and zero))
    specials = (kind["nan"] == "all_ones") + kind["infinities"]
    if kind["nan"] != "ieee":
        assume(2 ** (exponent + mantissa) - 1 - specials >= zero << mantissa)
    return Format(
        "made", exponent, mantissa, bias, signed=signed, zero=zero, subnormals=zero and draw(st.booleans()), **kind
    )


@settings(deadline=None, max_examples=100)
@given(made_formats())
def test_codes_of_made_formats_go_round_and_count_up(format):
    values = [decode(code, format) for code in range(2**format.bits)]
    for code, value in enumerate(values):
        flushed = (
            format.zero
            and not format.subnormals
            and 0 < code % 2 ** (format.bits - format.signed) < (1 << format.mantissa_bits)
        )
        if math.isnan(value):
            assert format.nan is not None
        elif not flushed:
            assert encode(value, format) == code
    positive = values[: format.max_code + 1]
    assert positive == sorted(positive)
    assert positive[-1] == format.max
    assert sum(map(math.isinf, values)) == format.infinities * (1 + format.signed)
    assert any(map(math.isnan, values)) == (format.nan is not None)
    assert all_values(format) == sorted({value for value in values if math.isfinite(value)})


@settings(deadline=None, max_examples=200)
@given(made_formats(), made_formats())
def test_holds_is_inclusion_for_made_formats(big, small):
    assume(small.max_code > small.zero << small.mantissa_bits)
    assert big.holds(small) == (set(all_values(small)) <= set(all_values(big)))


@settings(deadline=None, max_examples=200)
@given(made_formats(), st.data())
def test_made_formats_round_to_the_neighbour_that_the_mode_names(format, data):
    """Brute force over the list of all numbers, the next point of the grid standing for overflow."""
    values = all_values(format)
    x = Fraction(data.draw(st.floats(float(format.min), format.max)))
    assume(format.zero or abs(x) >= Fraction(format.smallest_normal))
    x = abs(x) if not format.signed else x
    at = bisect.bisect_right(values, x)
    low = Fraction(values[at - 1])
    high = low if low == x else Fraction(values[at])
    assert Fraction(round_exact(x, format, "down")) == low
    assert Fraction(round_exact(x, format, "up")) == high
    assert Fraction(round_exact(x, format, "zero")) == (low if x > 0 else high)
    nearest = Fraction(round_exact(x, format))
    assert nearest in (low, high)
    assert abs(nearest - x) == min(x - low, high - x)
    inner, outer = sorted((low, high), key=abs)
    fraction = (abs(x) - abs(inner)) / (abs(outer) - abs(inner)) if low != high else Fraction(0)
    u = Fraction(data.draw(st.integers(0, 2**20 - 1)), 2**20)
    assert Fraction(round_exact(x, format, "stochastic", u=u)) == (outer if u < fraction else inner)


@settings(deadline=None, max_examples=100)
@given(made_formats(), st.sampled_from([*MODES, "stochastic"]))
def test_numbers_of_made_formats_stay(format, mode):
    u = Fraction(0) if mode == "stochastic" else None
    for value in all_values(format):
        assert same(round_exact(value, format, mode, u=u), value)


@settings(deadline=None, max_examples=100)
@given(made_formats())
def test_ties_of_made_formats_go_to_the_even_code(format):
    values = [value for value in all_values(format) if value >= 0]
    for code, (low, high) in enumerate(itertools.pairwise(values)):
        if format.mantissa_bits == 0 and low > 0:  # one digit: IEEE 754-2019 takes the larger
            expected = high
        elif not format.subnormals and low == 0:
            expected = low
        else:
            expected = (low, high)[encode(low, format) % 2] if format.mantissa_bits else low
        assert round_exact((Fraction(low) + Fraction(high)) / 2, format) == expected, code
