"""Streams of random words: uniform, independent of neighbours, steps and other keys, and of one element's other draws.

Counts of cells are compared with what chance gives: chi-squares, in standard deviations from their mean.
"""

import numpy as np
import pytest
import torch

from halfulp.kernels._device_function import record_word_function
from halfulp.kernels._interpreter import run_trace_on_tensors, to_signed_integer
from halfulp.rounding import mix64, random_words
from halfulp.rounding._random_bits import (
    WEYL_STEP,
    compute_stream_counters,
    compute_stream_position,
    draw_word,
    hash_element,
)

COUNT = 1 << 18
LIMIT = 6.5  # beyond it once in ten million, a tail a little longer than a normal one's included


def list_drawn_words(key, number, count=COUNT, first=0):
    """Some of the words of neighbouring elements, by the device functions that kernels are written from."""
    piece = record_word_function(
        lambda *x: draw_word(hash_element(*compute_stream_position(*x)), number), "w32", "w32", "w64"
    )
    halves = to_signed_integer(key & 0xFFFFFFFF, 32), to_signed_integer(key >> 32, 32)
    given = {0: halves[0], 1: halves[1], 2: torch.arange(first, first + count)}
    return run_trace_on_tensors(piece.trace, (), given, piece.results)[0][0].to(torch.int64) & 0xFFFFFFFF


def surprise(*parts, bits=5):
    """How many standard deviations the counts of cells are from those of independent uniform numbers of 16 bits."""
    cell = torch.zeros_like(parts[0])
    for part in parts:
        cell = cell * 2**bits + (part >> 16 - bits)
    cells = 1 << bits * len(parts)
    expected = len(cell) / cells
    found = ((torch.bincount(cell, minlength=cells).double() - expected) ** 2 / expected).sum().item()
    return (found - (cells - 1)) / (2 * (cells - 1)) ** 0.5


def draws(key, count=COUNT):
    """What a step of many draws takes: the halves of the first word, and the upper halves of others."""
    words = [list_drawn_words(key, number, count) for number in range(4)]
    return [words[0] >> 16, words[0] & 0xFFFF, *(word >> 16 for word in words[1:])]


def test_the_first_word_is_that_of_random_words(seed):
    key = mix64(seed, 1)
    assert torch.equal(
        list_drawn_words(key, 0, 100, 2**32 - 50), random_words(key, torch.arange(2**32 - 50, 2**32 + 50))
    )


def test_draws_of_an_element_and_its_neighbours_are_independent(seed):
    found = draws(mix64(seed, 2))
    for a, one in enumerate(found):
        assert abs(surprise(one, bits=10)) < LIMIT
        for other in found[a + 1 :]:
            assert abs(surprise(one, other)) < LIMIT
        for lag in (1, 2, 3, 8, 64, 4096):
            for other in found:
                assert abs(surprise(one[lag:], other[:-lag])) < LIMIT, (a, lag)
    for three in ((0, 1, 2), (0, 2, 3), (1, 2, 3), (2, 3, 4)):
        assert abs(surprise(*(found[k] for k in three), bits=4)) < LIMIT, three


@pytest.mark.parametrize("number", [0, 1])
def test_steps_are_independent_of_each_other(seed, number):
    """Of every element over steps: pairs of steps, and the variance of means, which sequential keys had at .915."""
    steps, count = 512, 2048
    words = torch.stack([list_drawn_words(mix64(seed, step, 7), number, count) for step in range(steps)])
    for lag in (1, 2, 16):
        assert abs(surprise((words[lag:] >> 16).flatten(), (words[:-lag] >> 16).flatten())) < LIMIT
    for half in (words >> 16, words & 0xFFFF):
        means = ((half.double() + 0.5) / 65536 - 0.5).mean(0)
        ratio = means.square().mean().item() * 12 * steps
        assert abs(ratio - 1) < 5.5 * (2 / count) ** 0.5
        assert abs(means.mean().item()) * (12 * steps * count) ** 0.5 < 5.5


def test_streams_of_other_keys_are_no_shifted_copies(seed):
    """From where their counters agree on, two streams are independent: in pairs, and over many of them."""
    inverse, count, pairs = pow(int(WEYL_STEP), -1, 1 << 32), 1024, 200
    first, second = [], []
    for k in range(pairs):
        one, other = mix64(seed, k, 1), mix64(seed, k, 2)
        (a, _), (b, _) = (compute_stream_counters(key, torch.zeros(1, dtype=torch.int64)) for key in (one, other))
        shift = (int(b) - int(a)) * inverse % (1 << 32)
        theirs, mine = random_words(other, torch.arange(count)), random_words(one, torch.arange(shift, shift + count))
        agreeing = (compute_stream_counters(key, torch.tensor([place]))[0] for key, place in ((one, shift), (other, 0)))
        assert torch.equal(*agreeing)
        assert (theirs == mine).sum() < 4
        first.append(mine)
        second.append(theirs)
    one, other = torch.cat(first), torch.cat(second)
    for half in (lambda words: words >> 16, lambda words: words & 0xFFFF):
        assert abs(surprise(half(one), half(other), bits=6)) < LIMIT


def test_elements_beyond_32_bits_are_no_copies_either(seed):
    key = mix64(seed, 3)
    (a, own), (b, other) = (compute_stream_counters(key, torch.tensor([place])) for place in (0, 1 << 32))
    assert own != other
    shift = (int(b) - int(a)) * pow(int(WEYL_STEP), -1, 1 << 32) % (1 << 32)
    near, far = (random_words(key, place + torch.arange(1000)) for place in (shift, 1 << 32))
    assert (near == far).sum() < 4


def test_neighbouring_keys_start_apart(seed):
    """Steps, parameters and seeds that follow each other: no bit of the first words is likelier set in both."""
    words = np.array([[int(random_words(mix64(seed, s, p), torch.tensor([0]))) for p in range(32)] for s in range(32)])
    for one, other in ((words[1:], words[:-1]), (words[:, 1:], words[:, :-1])):
        differing = np.bitwise_xor(one, other).ravel()
        shares = np.array([(differing >> bit & 1).mean() for bit in range(32)])
        assert (abs(shares - 0.5) * 2 * len(differing) ** 0.5 < 5.5).all()
