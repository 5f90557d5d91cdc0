"""Format's properties against torch, ml_dtypes and counting; what it refuses."""

import copy
import dataclasses
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_p3109

from halfulp.formats import Format, all_values, decode, e4m3fn, e5m2, e8m0, fp16, fp32, get, names

from .oracle import to_gfloat

SMALL = [name for name in names() if get(name).bits <= 16]


@pytest.mark.parametrize("name", [n for n in names() if get(n).torch_dtype and n != "e8m0"])
def test_properties_are_those_of_torch_finfo(name):
    format, finfo = get(name), torch.finfo(get(name).torch_dtype)
    assert format.bits == finfo.bits
    assert (format.max, format.min) == (finfo.max, finfo.min)
    assert format.smallest_normal == finfo.smallest_normal
    if name != "e5m2fnuz":  # torch says 1/8, but its next number after 1 is 1.25
        assert format.eps == finfo.eps


@pytest.mark.parametrize("name", [n for n in names() if get(n).ml_dtypes_name])
def test_properties_are_those_of_ml_dtypes_finfo(name):
    format, finfo = get(name), ml_dtypes.finfo(getattr(ml_dtypes, get(name).ml_dtypes_name))
    assert format.bits == finfo.bits
    assert (format.max, format.min) == (float(finfo.max), float(finfo.min))
    assert format.eps == float(finfo.eps)
    assert (format.exponent_bits, format.mantissa_bits) == (finfo.nexp, finfo.nmant)
    assert format.smallest_normal == float(finfo.smallest_normal)
    if format is not e8m0:  # ml_dtypes gives 0, which e8m0 does not have
        assert format.smallest_subnormal == float(finfo.smallest_subnormal)


@pytest.mark.parametrize("name", ["fp16", "fp32", "fp64"])
def test_properties_are_those_of_numpy_finfo(name):
    format, finfo = get(name), np.finfo(get(name).torch_dtype.__str__().removeprefix("torch."))
    assert (format.max, format.eps, format.bits) == (float(finfo.max), float(finfo.eps), finfo.bits)
    assert format.smallest_normal == float(finfo.smallest_normal)
    assert format.smallest_subnormal == float(finfo.smallest_subnormal)


@pytest.mark.parametrize("name", SMALL)
def test_properties_are_those_of_the_counted_numbers(name):
    format, values = get(name), all_values(get(name))
    positive = [v for v in values if v > 0]
    exponents = {math.frexp(v)[1] - 1 for v in positive}
    assert (format.min, format.max) == (values[0], values[-1])
    assert format.smallest_subnormal == positive[0]
    assert format.binades == len(exponents)
    assert format.emax == max(exponents)
    assert 2.0**format.emin == format.smallest_normal
    assert (0.0 in values) == format.zero
    if format.max > 1:
        assert min(v for v in values if v > 1) - 1 == format.eps
    assert decode(format.max_code, format) == format.max


def test_dtypes_belong_to_the_layout_not_to_the_name():
    assert Format("mine", 5, 10).torch_dtype is torch.float16
    assert Format("mine", 8, 7, overflow="saturate").torch_dtype is torch.bfloat16
    assert Format("mine", 8, 7, subnormals=False).torch_dtype is None
    assert Format("mine", 4, 3, bias=11, infinities=False, nan="negative_zero").ml_dtypes_name == "float8_e4m3b11fnuz"


def test_words():
    assert str(e4m3fn) == "e4m3fn: 8 bits, max 448, min normal 2^-6, eps 2^-3, no infinity"
    assert repr(fp16) == "Format('fp16', 5, 10)"
    assert "no subnormals" in str(Format("mine", 5, 3, subnormals=False))
    assert "unsigned, no zero" in str(e8m0)


@pytest.mark.parametrize("name", names())
def test_is_a_value(name):
    format = get(name)
    assert eval(repr(format)) == format
    assert pickle.loads(pickle.dumps(format)) == format
    assert copy.deepcopy(format) == format
    assert Format(**dataclasses.asdict(format)) == format
    assert {format: 1}[dataclasses.replace(format)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        format.bias = 3


@pytest.mark.parametrize("precision", [2, 3, 4, 5])
def test_p3109_is_described(precision):
    format = Format("binary8", 8 - precision, precision - 1, nan="negative_zero")
    theirs, ours = format_info_p3109(8, precision), to_gfloat(format)
    for field in ("k", "precision", "bias", "has_nz", "num_high_nans", "domain", "max", "smallest"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert (format.max, format.smallest_subnormal) == (theirs.max, theirs.smallest)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("big", SMALL)
@pytest.mark.parametrize("small", [n for n in SMALL if get(n).bits <= 10])
def test_holds_is_inclusion(big, small):
    big, small = get(big), get(small)
    assert big.holds(small) == (set(all_values(small)) <= set(all_values(big)))
    assert fp32.holds(small)


REFUSED = [
    (("",), {}, "non-empty string"),
    (("x", 0, 3), {}, "exponent_bits is an integer from 1 to 11, got 0"),
    (("x", 12, 3), {}, "exponent_bits is an integer from 1 to 11, got 12"),
    (("x", 5, 53), {}, "mantissa_bits is an integer from 0 to 52, got 53"),
    (("x", 5, -1), {}, "mantissa_bits is an integer"),
    (("x", 5.0, 2), {}, "exponent_bits is an integer"),
    (("x", True, 2), {}, "exponent_bits is an integer"),
    (("x", 5, 2), {"bias": 1.5}, "bias is an integer"),
    (("x", 5, 2), {"infinities": 1}, "infinities is True or False, got 1"),
    (("x", 5, 2), {"signed_zero": "no"}, "signed_zero is True or False"),
    (("x", 5, 2), {"nan": "quiet"}, "nan is one of ieee, all_ones, negative_zero, or None; got 'quiet'"),
    (("x", 5, 2), {"overflow": "wrap"}, "overflow is one of inf, nan, saturate, or None; got 'wrap'"),
    (("x", 5, 2), {"infinities": False}, 'nan="all_ones"'),
    (("x", 5, 0), {}, "needs a mantissa bit"),
    (("x", 5, 2), {"nan": "negative_zero", "signed": False}, 'nan="all_ones"'),
    (("x", 5, 2), {"nan": "negative_zero", "signed_zero": True}, "signed_zero=False"),
    (("x", 5, 2), {"signed": False, "signed_zero": True}, "signed_zero=False"),
    (("x", 5, 2), {"zero": False}, "subnormals=False"),
    (("x", 5, 2), {"infinities": False, "nan": "all_ones", "overflow": "inf"}, 'overflow="saturate"'),
    (("x", 1, 3), {}, "no finite normal number is left"),
    (("x", 1, 0), {"infinities": False, "nan": "all_ones"}, "no finite normal number is left"),
    (("x", 8, 3), {"bias": -1000}, "float64 from 2^-1074 to 2^1023; take another bias"),
    (("x", 8, 3), {"bias": 1200}, "float64 from 2^-1074 to 2^1023; take another bias"),
    (("x", 11, 52), {"bias": 1024}, "float64 from"),
]


@pytest.mark.parametrize(("args", "kwargs", "message"), REFUSED)
def test_refuses_what_cannot_exist(args, kwargs, message):
    args = args if len(args) == 3 else (*args, 5, 2)
    with pytest.raises(ValueError) as error:
        Format(*args, **kwargs)
    assert message in str(error.value)


def test_defaults_follow_the_kind():
    fnuz = Format("x", 5, 2, infinities=False, nan="negative_zero")
    assert (fnuz.bias, fnuz.signed_zero, fnuz.overflow) == (16, False, "nan")
    finite = Format("x", 5, 2, infinities=False, nan=None)
    assert (finite.bias, finite.signed_zero, finite.overflow) == (15, True, "saturate")
    assert (e5m2.overflow, Format("x", 5, 2, signed=False).signed_zero) == ("inf", False)
