"""Names, aliases and dtypes find their format; what is unknown is answered with near ones."""

import ml_dtypes
import pytest
import torch

import halfulp.formats as formats
from halfulp._torch_versions import find_torch_dtype
from halfulp.formats import Format, get, names, parse

WIDE = ["fp64", "fp32", "tf32", "fp16", "bf16", "e8m5", "e8m3", "e8m1"]
NARROW = ["e5m2", "e5m2fnuz", "e4m3", "e4m3fn", "e4m3fnuz", "e3m4", "e3m2fn", "e2m3fn", "e2m1fn", "e8m0"]


def test_every_name_is_an_attribute_and_is_found():
    assert names() == WIDE + NARROW
    for name in names():
        assert getattr(formats, name) is get(name)
        assert get(name).name == name
        assert get(get(name)) is get(name)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("float64", "fp64"),
        ("float32", "fp32"),
        ("float16", "fp16"),
        ("half", "fp16"),
        ("bfloat16", "bf16"),
        ("torch.bfloat16", "bf16"),
        (" BF16 ", "bf16"),
        ("tensorfloat32", "tf32"),
        ("float8_e4m3fn", "e4m3fn"),
        ("float8-e4m3fnuz", "e4m3fnuz"),
        ("float8_e5m2", "e5m2"),
        ("float8_e3m4", "e3m4"),
        ("float6_e3m2fn", "e3m2fn"),
        ("float6_e2m3fn", "e2m3fn"),
        ("float4_e2m1fn", "e2m1fn"),
        ("float8_e8m0fnu", "e8m0"),
        ("e8m10", "tf32"),
        ("e8m23", "fp32"),
        ("e11m52", "fp64"),
        ("e5m10", "fp16"),
    ],
)
def test_aliases(alias, name):
    assert get(alias) is get(name)


def test_ml_dtypes_names_and_torch_dtypes_find_the_format_back():
    for name in names():
        format = get(name)
        if format.ml_dtypes_name:
            assert get(format.ml_dtypes_name) is format
        if format.torch_dtype:
            assert get(format.torch_dtype) is format
            assert get(str(format.torch_dtype)) is format


ML_DTYPES = sorted(name for name in dir(ml_dtypes) if name.startswith(("bfloat", "float")))
TORCH = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point}


def _numbers(info, *words: str) -> tuple[float, ...]:
    return tuple(float(getattr(info, word)) for word in ("max", "smallest_normal", *words))


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_type_of_ml_dtypes_has_a_format_of_its_numbers(name):
    format = get(name.removeprefix("float8_"))
    assert format.ml_dtypes_name == name
    assert _numbers(format, "eps") == _numbers(ml_dtypes.finfo(getattr(ml_dtypes, name)), "eps")


@pytest.mark.parametrize("dtype", sorted(TORCH - {find_torch_dtype("float4_e2m1fn_x2")}, key=str), ids=str)
def test_every_dtype_has_a_format_of_its_numbers(dtype):
    # torch.finfo's eps of float8_e5m2fnuz is half of the distance from 1 to the next number.
    assert get(dtype).torch_dtype is dtype
    assert _numbers(get(dtype)) == _numbers(torch.finfo(dtype))


def test_packed_float4_stands_for_its_element():
    assert get(torch.float4_e2m1fn_x2) is formats.e2m1fn


def test_any_ieee_layout_has_a_name():
    made = get("e5m7")
    assert made == Format("e5m7", 5, 7)
    assert (made.infinities, made.nan, made.bias, made.overflow) == (True, "ieee", 15, "inf")
    assert get("e3m4fnuz") == Format("e3m4fnuz", 3, 4, infinities=False, nan="negative_zero")
    assert get("e4m3b11fnuz").ml_dtypes_name == "float8_e4m3b11fnuz"
    assert parse("bf16") is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("bfloat15", "unknown format 'bfloat15': did you mean bfloat16"),
        ("e4m3f", "did you mean e4m3fn"),
        ("e3m5fn", "unknown format"),
        ("xyzzy", 'hu.Format("mine", exponent_bits=4, mantissa_bits=4)'),
        ("", "unknown format ''"),
        ("e1m3", "no finite normal number is left"),
        ("e12m3", "exponent_bits is an integer from 1 to 11, got 12"),
        ("mxfp4", "hu.formats.get_block"),
        (torch.int8, "torch.int8 is no floating-point format; torch's dtypes that are: float64"),
        (torch.complex64, "no floating-point format"),
    ],
)
def test_unknown_is_answered(given, message):
    with pytest.raises(ValueError) as error:
        get(given)
    assert message in str(error.value)


@pytest.mark.parametrize("given", [None, 8, 1.5, ["bf16"]])
def test_wrong_type_is_answered(given):
    with pytest.raises(TypeError, match=r"a format is a hu\.Format, a name such as 'bf16' or a torch\.dtype"):
        get(given)
