"""Pooling, resampling and folding: bits do not depend on scales."""

import pytest
import torch
import torch.nn.functional as F

from halfulp.subclass import strict
from halfulp.testing import check_rule


def images():
    return (torch.randn(2, 4, 6, 6),)


def rows():
    return (torch.randn(2, 4, 8),)


def volumes():
    return (torch.randn(1, 2, 4, 4, 4),)


CASES = {
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), rows),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), images),
    "max_pool2d indices": (lambda x: F.max_pool2d(x, 2, return_indices=True), images),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), volumes),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), rows),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), images),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), volumes),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 3), rows),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (4, 3)), images),
    "adaptive_avg_pool2d mean": (lambda x: F.adaptive_avg_pool2d(x, 1), images),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 3), volumes),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 4), images),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 3), volumes),
    "fractional_max_pool2d": (
        lambda x: F.fractional_max_pool2d(x, 2, 3, _random_samples=torch.full((2, 4, 2), 0.3)),
        images,
    ),
    "max_unpool2d": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), images),
    "fold": (lambda x: F.fold(F.unfold(x, 3), (6, 6), 3), images),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), images),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), images),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), images),
    "nearest 1d": (lambda x: F.interpolate(x, scale_factor=1.5), rows),
    "nearest 3d": (lambda x: F.interpolate(x, scale_factor=2), volumes),
    "linear": (lambda x: F.interpolate(x, 5, mode="linear"), rows),
    "trilinear": (lambda x: F.interpolate(x, 3, mode="trilinear"), volumes),
}
CASES |= {
    mode: (lambda x, mode=mode: F.interpolate(x, (9, 5), mode=mode), images)
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
}
CASES |= {
    f"{mode} antialias": (lambda x, mode=mode: F.interpolate(x, (4, 3), mode=mode, antialias=True), images)
    for mode in ("bilinear", "bicubic")
}


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_plain_tensors_under_all_scales(case, seed):
    with strict():
        check_rule(*CASES[case], seed=seed, trials=2)


def test_lp_pool_is_close(seed):
    with strict():
        check_rule(lambda x: F.lp_pool2d(x, 2, 2), images, seed=seed, exact=1e-5)


@pytest.mark.parametrize("case", ["max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "bilinear", "fold"])
def test_narrow_payloads(case, differences, seed):
    function, make = CASES[case]
    assert max(differences(function, [make()[0].shape])) < 1e-2
