"""Powers of two: rounding by bits against exact arithmetic, products at the ends of the range."""

import math

import pytest
import torch

from halfulp.scaled import _powers_of_two as _powers
from halfulp.scaled._powers_of_two import LARGEST_SCALE, SMALLEST_SCALE, round_number_to_power, round_to_power


def expected(value, rounding):
    """By frexp, which is exact."""
    mantissa, exponent = math.frexp(value)
    low = math.ldexp(1.0, exponent - 1)
    if mantissa == 0.5 or rounding == "down":
        return low
    return 2 * low if rounding == "up" or value * value >= 2 * low * low else low


@pytest.mark.parametrize("rounding", ["down", "up", "nearest"])
def test_rounding_is_exact_on_tensors_and_numbers(rounding, seed):
    values = torch.cat(
        [torch.randn(2000).abs() * 2.0 ** torch.randint(-120, 120, (2000,)), 2.0 ** torch.arange(-126, 127)]
    )
    values = values[(values >= SMALLEST_SCALE) & (values <= 2.0**126)].float()
    wanted = [expected(value, rounding) for value in values.tolist()]
    assert round_to_power(values, rounding).tolist() == wanted
    assert [round_number_to_power(value, rounding) for value in values.tolist()] == wanted


def test_the_ends_of_the_range_are_kept():
    ends = torch.tensor([0.0, 1e-45, 2.0**-127, 3.4e38])
    for rounding in ("down", "up", "nearest"):
        assert round_to_power(ends, rounding).tolist() == [
            SMALLEST_SCALE,
            SMALLEST_SCALE,
            SMALLEST_SCALE,
            LARGEST_SCALE,
        ]
    assert round_number_to_power(0.0) == SMALLEST_SCALE
    assert round_number_to_power(1e300) == LARGEST_SCALE


def test_other_ways_of_rounding_are_refused():
    with pytest.raises(ValueError, match="'stochastic': allowed for powers of two are down, up, nearest"):
        round_to_power(torch.tensor(1.0), "stochastic")


@pytest.mark.parametrize("traced", [False, True])
def test_a_product_out_of_range_leaves_the_rest_to_the_payload(traced, monkeypatch):
    if traced:
        monkeypatch.setattr(_powers, "read_scale", lambda scale: None)
    for powers in [(-100, -100), (100, 100), (3, -5), (-126, -126), (127, 127), (-126, 127)]:
        scale, rest = _powers.multiply_scales(*(torch.tensor(2.0**power) for power in powers))
        assert scale.dtype == torch.float32
        assert SMALLEST_SCALE <= scale.item() <= LARGEST_SCALE
        exact = sum(powers)
        if -149 - 126 <= exact <= 254:
            assert math.log2(scale.item()) + math.log2(float(rest)) == exact


def test_a_payload_times_a_power_beyond_float32_is_exact_or_infinite():
    payload = torch.tensor([2.0**-120, -(2.0**-140), 0.0, 3.0, torch.inf])
    for power in (128, 150, 253):
        found = _powers.multiply_by_power(payload, 2.0**power)
        assert torch.equal(found, (payload.double() * 2.0**power).float())


def test_scales_are_powers_of_two_in_range():
    assert _powers.make_scale(0.25).item() == 0.25
    for wrong in (3.0, 0.0, -1.0, math.inf, math.nan, 2.0**-127):
        with pytest.raises(ValueError, match="allowed are powers of two"):
            _powers.make_scale(wrong)
    with pytest.raises(ValueError, match="without dimensions"):
        _powers.make_scale(torch.ones(2))
