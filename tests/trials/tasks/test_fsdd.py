"""Spectra of spoken digits: a tone stands in its band of the mel scale."""

import math

import pytest
import torch

from halfulp.trials.tasks._fsdd import BANDS, FRAMES, HOP, RATE, _compute_log_spectra


@pytest.mark.parametrize("frequency", [700, 1500, 3000])
def test_a_tone_is_loudest_in_the_band_whose_middle_is_nearest_on_the_mel_scale(frequency: int) -> None:
    samples = (2 * math.pi * frequency / RATE * torch.arange(FRAMES * HOP)).sin()
    spectra = _compute_log_spectra(samples[None])
    assert spectra.shape == (1, 1, FRAMES, BANDS)
    share = math.log1p(frequency / 700) / math.log1p(RATE / 2 / 700)
    nearest = round(share * (BANDS + 1)) - 1  # the first band has its middle one step above 0 Hz
    assert bool((spectra[0, 0, 2:-2].argmax(1) == nearest).all())
