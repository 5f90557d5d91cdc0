"""Spectra of spoken digits: a tone stands in its band of the mel scale."""

import math

import pytest
import torch

from halfulp.trials.tasks._fsdd import (
    FRAME_COUNT,
    HOP_SAMPLES,
    MEL_BAND_COUNT,
    SAMPLE_RATE_HZ,
    WINDOW_SAMPLES,
    _compute_log_spectra,
)


def _make_tone(frequency: int) -> torch.Tensor:
    return (2 * math.pi * frequency / SAMPLE_RATE_HZ * torch.arange(FRAME_COUNT * HOP_SAMPLES)).sin()[None]


@pytest.mark.parametrize("frequency", [700, 1500, 3000])
def test_a_tone_is_loudest_in_the_band_whose_middle_is_nearest_on_the_mel_scale(frequency: int) -> None:
    spectra = _compute_log_spectra(_make_tone(frequency))
    assert spectra.shape == (1, 1, FRAME_COUNT, MEL_BAND_COUNT)
    share = math.log1p(frequency / 700) / math.log1p(SAMPLE_RATE_HZ / 2 / 700)
    nearest = round(share * (MEL_BAND_COUNT + 1)) - 1  # the first band has its middle one step above 0 Hz
    assert bool((spectra[0, 0, 2:-2].argmax(1) == nearest).all())


def test_the_bands_divide_the_energy_of_a_tone_among_them() -> None:
    """Parseval's sum of a windowed tone of mean square 1/2; half of it lies at negative frequencies."""
    expected = WINDOW_SAMPLES * torch.hann_window(WINDOW_SAMPLES).square().sum() / 4
    for frequency in (700, 1500, 3000):
        energies = _compute_log_spectra(_make_tone(frequency)).exp().sum(-1)[0, 0, 2:-2]
        assert torch.allclose(energies, expected, rtol=0.01), frequency
