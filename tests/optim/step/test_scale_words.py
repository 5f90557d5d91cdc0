"""The choice of scales on a device: as device functions of words, number for number what the CPU path chooses."""

import itertools
import math

import numpy as np
import pytest
import torch

from halfulp.optim.states._float8 import PAYLOADS
from halfulp.optim.states._scaled import Scaled
from halfulp.optim.step import _scale_words as words
from halfulp.optim.step._scales import WINDOWS, reachable_scale, weight_scale

STATES = [dtype for dtype in PAYLOADS if dtype not in (torch.float32, torch.bfloat16)]
GREATEST = float(np.finfo(np.float32).max)


def _word(x):
    return np.float32(x).view(np.uint32)


def _real(w):
    return float(np.uint32(w).view(np.float32))


def _magnitudes(seed):
    """Zero, the ends of float32's range, both sides of powers of two, and some numbers between."""
    powers = [
        2.0**k for k in (-149, -148, -140, -127, -126, -125, -60, -24, -1, 0, 1, 14, 15, 16, 60, 118, 119, 126, 127)
    ]
    sides = [float(np.nextafter(np.float32(p), np.float32(to))) for p in powers for to in (0.0, np.inf)]
    drawn = np.exp2(np.random.default_rng(seed).uniform(-149, 127, 12)).astype(np.float32).tolist()
    return [0.0, *powers, *sides, *drawn, GREATEST]


@pytest.mark.parametrize("dtype", WINDOWS)
def test_the_scale_of_a_weight_and_the_factor_to_it_are_the_cpus(seed, dtype):
    new_scale = words.weight_scale_function(dtype)
    most, magnitudes = torch.finfo(dtype).max, _magnitudes(seed)
    stored = [x for x in magnitudes[::3] if x <= most] + [most]
    scales = [2.0**k for k in (-126, -125, -63, -1, 0, 5, 90, 126, 127)]
    for present, largest, payload in itertools.product(scales, magnitudes, stored):
        scale, factor = weight_scale(dtype, present, largest), 1.0
        if scale != present:
            scale, factor = reachable_scale(dtype, present, scale, payload)
        found = new_scale(_word(present), _word(largest), _word(payload))
        given = f"{present=} {largest=} {payload=}"
        assert _real(found) == scale, given
        assert 2.0**-126 <= scale <= 2.0**127, given
        assert _real(words.ratio(_word(present), found, _word(payload))) == factor, given
        assert _real(words.inverse(found)) == 1 / scale, given


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("dtype", STATES)
def test_the_scale_of_a_state_is_the_cpus(seed, dtype, squared):
    codec = Scaled(PAYLOADS[dtype], squared, stochastic=True)
    scale_of, most = words.state_scale_function(codec), torch.finfo(dtype).max
    edges = [math.ldexp(most, k) for k in range(-160, 112)]
    sides = [float(np.nextafter(np.float32(x), np.float32(to))) for x in edges for to in (0.0, np.inf)]
    for largest in (*_magnitudes(seed), *map(float, np.float32(edges)), *sides):
        found = scale_of(_word(largest))
        assert _real(found) == codec.fitting(largest), largest
        assert _real(words.inverse(found)) == 1 / codec.fitting(largest)
