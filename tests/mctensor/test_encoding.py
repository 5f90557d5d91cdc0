"""encode, decode and print: no digit that fits is lost, and what does not fit is refused."""

import math
from decimal import Decimal
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch

from halfulp.mctensor import MCTensor

from .exact_values import exact

DTYPES = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def _is_canonical(x):
    for high, low in zip(x.components, x.components[1:]):
        for a, b in zip(high.double().flatten().tolist(), low.double().flatten().tolist()):
            if not math.isfinite(a) or a == 0:
                assert b == 0
                continue
            ulp = max(
                Fraction(2) ** (math.frexp(a)[1] - DTYPES[x.dtype]), Fraction(torch.finfo(x.dtype).smallest_normal)
            )
            assert abs(Fraction(b)) <= ulp / 2
    return True


@pytest.mark.parametrize("components", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_float64_keeps_every_digit_that_fits(dtype, components, seed):
    values = torch.randn(200, dtype=torch.float64) * torch.exp2(torch.randint(-6, 6, (200,)).double())
    x = MCTensor.encode(values, components, dtype)
    assert _is_canonical(x)
    floor = float(x.scale) * 2.0**-25 if x.scale is not None else 0.0
    for found, wanted in zip(exact(x), map(Fraction, values.tolist())):
        assert abs(found - wanted) <= max(abs(wanted) * Fraction(2) ** -(components * DTYPES[dtype]), Fraction(floor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_strings_fractions_and_mpmath(dtype):
    with mpmath.workdps(80):
        pi = mpmath.mpf(1) * mpmath.pi
        given = [
            "0.1",
            "1e-30",
            "-2/3",
            Fraction(1, 7),
            Decimal("0.3"),
            2**60 + 1,
            0.25,
            np.float32(0.1),
            pi,
        ]
        exactly = [
            Fraction(1, 10),
            Fraction(1, 10**30),
            Fraction(-2, 3),
            Fraction(1, 7),
            Fraction(3, 10),
            Fraction(2**60 + 1),
        ]
        exactly += [Fraction(1, 4), Fraction(float(np.float32(0.1))), None]
        exactly[8] = Fraction(int(mpmath.floor(pi * mpmath.mpf(2) ** 240)), 2**240)
    x = MCTensor.encode(given, 3, dtype)
    for found, wanted in zip(exact(x), exactly):
        assert abs(found - wanted) <= max(abs(wanted) * Fraction(2) ** (3 - 3 * DTYPES[dtype]), Fraction(2) ** -150)


def test_numpy_integers_in_lists():
    x = MCTensor.encode([np.int64(2**62 + 1), np.uint8(3), np.int32(0)], 3, torch.float32)
    assert exact(x) == [Fraction(2**62 + 1), Fraction(3), Fraction(0)]


def test_special_numbers():
    x = MCTensor.encode(["inf", "-inf", "nan", -0.0, 0], dtype=torch.float32)
    assert x.components[0].tolist()[:2] == [math.inf, -math.inf]
    assert math.isnan(x.components[0][2])
    assert math.copysign(1, x.components[0][3]) == -1
    assert x.components[1].tolist() == [0.0] * 5
    assert x.tolist()[:2] == [math.inf, -math.inf]
    assert x.to_strings()[3:] == ["-0.", "0."]


def test_shapes_come_from_nesting():
    assert MCTensor.encode([[1, "2", 3.0], [4, 5, 6]]).shape == (2, 3)
    assert MCTensor.encode(7).shape == ()
    assert MCTensor.encode(np.array([[0.5]])).dtype == torch.float64
    assert MCTensor.encode([]).shape == (0,)
    assert MCTensor.encode([MCTensor.encode("0.1", 2), 2.0]).to_strings() == ["0.10000000000000", "2.0000000000000"]


def test_an_mctensor_is_encoded_again_without_loss():
    x = MCTensor.encode("0.1", 4, torch.float64)
    assert exact(MCTensor.encode(x, 4)) == exact(x)
    assert exact(MCTensor.encode(MCTensor.encode(x, 4, torch.bfloat16), 2, torch.float32)) == exact(
        MCTensor.encode(x, 4, torch.bfloat16)
    )


def test_float16_reaches_below_its_own_range():
    x = MCTensor.encode([1e-12, 3e-14], 2, torch.float16)
    assert x.scale.dtype == torch.float32
    assert x.scale.shape == ()
    assert math.frexp(float(x.scale))[0] == 0.5
    assert torch.allclose(x.decode(), torch.tensor([1e-12, 3e-14], dtype=torch.float64), rtol=2.0**-20, atol=0)
    assert MCTensor.encode([1.0], 2, torch.float16, scale="none").scale is None
    assert float(MCTensor.encode([1.0], 2, torch.bfloat16, scale=0.25).scale) == 0.25
    assert MCTensor.encode([1e5], 2, torch.float16).item() == 1e5


def test_from_components_renormalizes(seed):
    parts = [torch.randn(50) * 2.0**-i for i in (9, 0, 3)]
    x = MCTensor.from_components(parts)
    assert _is_canonical(x)
    for found, *terms in zip(exact(x), *(part.double().tolist() for part in parts)):
        assert found == sum(map(Fraction, terms))
    one, small = torch.ones(1), torch.full((1,), 2.0**-30)
    for terms, wanted in (([one, -one], 0), ([one, small, -one], 2.0**-30), ([small, one, -small, -one], 0)):
        assert exact(MCTensor.from_components(terms)) == [wanted]


def test_printing_shows_the_digits_it_holds():
    assert repr(MCTensor.encode("0.1", 2, torch.float64)) == (
        "MCTensor(0.1000000000000000000000000000000, components=2, dtype=torch.float64)"
    )
    assert MCTensor.encode("1/3", 4, torch.float64).to_strings(60) == "0." + "3" * 60
    x = MCTensor.encode([[1.0, 2.0], [3.0, -4.5]], gradients="components").requires_grad_()
    assert "requires_grad=True" in repr(x)
    assert "gradients='components'" in repr(x)
    assert "-4.5" in repr(x)
    assert "..." in repr(MCTensor.encode(torch.zeros(2000)))
    columns = MCTensor.encode(torch.arange(1500.0).reshape(500, 3).T, 1)
    assert "3.000000, 6.000000, ..., 1491.000, 1494.000, 1497.000" in repr(columns)
    assert f"{MCTensor.encode(0.125):.2f}" == "0.12"
    assert "size=(0, 3)" in repr(MCTensor.encode(torch.zeros(0, 3)))
    assert "scale=2**" in repr(MCTensor.encode([1.0], dtype=torch.float16))


@pytest.mark.parametrize(("dtype", "overflow"), [(torch.float16, 16), (torch.bfloat16, 128), (torch.float64, 128)])
@pytest.mark.parametrize("largest", [2.0**-140, 2.0**-126, 2.0**-125, 0.75, 1.0, 1.5, 2.0, 65504.0, 2.0**120, 2.0**127])
def test_an_automatic_scale_leaves_four_binades_of_room(largest, dtype, overflow):
    """Float64's room is float32's, whose range scales have."""
    x = MCTensor.encode([largest, -largest / 3, 0.0], 2, dtype, scale="auto")
    wanted = math.frexp(largest)[1] - (overflow - 4)
    assert float(x.scale) == 2.0 ** max(-126, min(127, wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [[], [0.0, -0.0], 0.0])
def test_zeros_have_the_scale_1(values, dtype):
    x = MCTensor.encode(values, 2, dtype, scale="auto")
    assert float(x.scale) == 1.0
    assert torch.equal(x.decode(), torch.as_tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("exponent", [-126, 127])
def test_a_scale_may_be_the_first_and_the_last_power_of_two(exponent):
    x = MCTensor.encode([1.5 * 2.0**exponent], 1, torch.float32, scale=2.0**exponent)
    assert (float(x.scale), x.components[0].item()) == (2.0**exponent, 1.5)


BAD = {
    "a scale above the last": (lambda: MCTensor.encode([1.0], scale=2.0**128), r"to 2\*\*127"),
    "a negative scale": (lambda: MCTensor.encode([1.0], scale=-0.5), "powers of two"),
    "the scale 0": (lambda: MCTensor.encode([1.0], scale=0.0), "powers of two"),
    "an infinite scale": (lambda: MCTensor.encode([1.0], scale=math.inf), "powers of two"),
    "a scale that is NaN": (lambda: MCTensor.encode([1.0], scale=math.nan), "powers of two"),
    "no component": (lambda: MCTensor.encode([1.0], 0), "1 to 4"),
    "five": (lambda: MCTensor.encode([1.0], 5), "1 to 4"),
    "integers": (lambda: MCTensor.encode(torch.arange(3)), r"x\.double"),
    "complex": (lambda: MCTensor.encode(torch.ones(2, dtype=torch.complex64)), "real and the imaginary"),
    "a complex number": (lambda: MCTensor.encode([1j]), "complex"),
    "an integer dtype": (lambda: MCTensor.encode([1.0], 2, torch.int32), "float16, bfloat16, float32 or float64"),
    "out of range": (lambda: MCTensor.encode([1e6], 2, torch.float16, scale="none"), r"65504.*1e\+06.*scale=2\.0\*\*"),
    "out of float32's range": (
        lambda: MCTensor.encode([1e300], 2, torch.float32),
        "scale",
    ),
    "out of a scale's range": (lambda: MCTensor.encode([1e6], 2, torch.float16, scale=0.5), "scale"),
    "no power of two": (lambda: MCTensor.encode([1.0], scale=3.0), "powers of two"),
    "below float32's normal range": (lambda: MCTensor.encode([1.0], scale=2.0**-127), r"powers of two from 2\*\*-126"),
    "an unknown scale": (lambda: MCTensor.encode([1.0], scale="big"), "auto"),
    "no number": (lambda: MCTensor.encode(["one"]), "no number"),
    "ragged": (lambda: MCTensor.encode([[1.0], [1.0, 2.0]]), "shape"),
    "gradients": (lambda: MCTensor.encode([1.0], gradients="all"), "first"),
    "no tensors": (lambda: MCTensor.from_components([]), "1 to 4"),
    "several dtypes": (lambda: MCTensor.from_components([torch.ones(1), torch.ones(1).double()]), "several dtypes"),
    "beyond float64": (lambda: MCTensor.encode("1e400"), "float64"),
    "digits": (lambda: MCTensor.encode(1.0).to_strings(0), "digits"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_advice(case):
    call, words = BAD[case]
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    "call", [lambda: MCTensor([1.0]), lambda: MCTensor.encode(object()), lambda: MCTensor.from_components([1.0])]
)
def test_the_wrong_type_is_refused_with_advice(call):
    with pytest.raises(TypeError, match=r"encode|allowed"):
        call()
