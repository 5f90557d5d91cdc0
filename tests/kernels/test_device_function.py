"""Device functions under bound names keep their closures and defaults, and take operands of one kind."""

import numpy as np
import pytest
import torch

from halfulp.kernels import maximum, run_trace_on_tensors, same_bits, select, sqrt
from halfulp.kernels._device_function import bind_free_variables, record_word_function
from halfulp.kernels._operations import add, bit_or, sar, shl, to_real, word

FACTOR, HALF = np.float32(1.0), np.float32(0.5)


def _scaled(x, *, offset=HALF):
    return x * FACTOR + offset


def _made(power):
    """A device function of a function that makes them."""

    def raised(x):
        return _scaled(x) if power == 1 else _scaled(raised_by(x))

    def raised_by(x):
        return x * inner(x)

    inner = _scaled
    return raised


def test_names_are_bound_through_closures_and_keyword_defaults_stay():
    assert bind_free_variables(_scaled, {"FACTOR": 3})(2) == 6.5
    assert bind_free_variables(_made(1), {"FACTOR": 3})(2) == 6.5
    assert bind_free_variables(_made(2), {"FACTOR": 3})(2) == 2 * 6.5 * 3 + 0.5
    assert _made(2)(2) == 2 * 2.5 + 0.5, "the functions themselves are as they were"


def test_names_of_a_closure_can_be_bound():
    def double(x):
        return x * number

    number = 2
    assert bind_free_variables(double, {"number": 5})(3) == 15
    assert bind_free_variables(double, {})(3) == 6


@pytest.mark.parametrize("known", [True, False])
def test_masks_take_true_and_false(known):
    def combine(x):
        mask = x < 1.0
        return mask & known, mask | known, known & mask, known | mask, select(mask, known, mask)

    x = torch.tensor([0.0, 2.0, torch.nan])
    recorded = record_word_function(combine, "f32")
    found = run_trace_on_tensors(recorded.trace, (), {0: x}, recorded.results)[0]
    assert [one.tolist() for one in found] == [one.tolist() for one in combine(x)[:4]] + [[known, False, False]]


@pytest.mark.parametrize("first", [True, False])
def test_a_number_may_stand_first_in_maximum(first):
    recorded = record_word_function(lambda x: maximum(1.0, x) if first else maximum(x, 1.0), "f32")
    x = torch.tensor([-2.0, 0.5, 3.0, torch.nan])
    found = run_trace_on_tensors(recorded.trace, (), {0: x}, recorded.results)[0][0]
    assert same_bits(found, torch.maximum(x, torch.ones(())))


# What torch, LLVM and Triton would each take for something else, or would end in an error of their own.
_UNLIKE_KINDS = {
    "a fraction of a word": (lambda w: w > 0.5, "w32"),
    "a number beyond a word": (lambda w: add(w, 1 << 32), "w32"),
    "a number below a word": (lambda w: add(w, -(1 << 31) - 1), "w32"),
    "a shift by all bits": (lambda w: shl(w, 32), "w32"),
    "a shift by more bits": (lambda w: sar(w, 70), "w64"),
    "bits of reals by operators": (lambda x, y: x & y, "f32", "f32"),
    "words functions on reals": (lambda x, y: bit_or(x, y), "f32", "f32"),
    "no of a real": (lambda x: ~x, "f32"),
    "a root of a word": (lambda w: sqrt(w), "w32"),
    "a quotient of words": (lambda v, w: v / w, "w32", "w32"),
    "minus of a word": (lambda w: -w, "w32"),
    "a sum of masks": (lambda x: (x > 0.0) + (x < 1.0), "f32"),
    "an order of masks": (lambda x: (x > 0.0) < (x < 1.0), "f32"),
    "a number beside a mask": (lambda x: (x > 0.0) & 1, "f32"),
    "a real as a condition": (lambda x: select(x, x, 0.0), "f32"),
    "a mask beside a real": (lambda x: select(x > 0.0, x, x > 1.0), "f32"),
    "a real beside a mask": (lambda x: select(x > 0.0, x > 1.0, x), "f32"),
    "bits of a mask": (lambda x: word(x > 0.0), "f32"),
    "the number of a real": (lambda x: to_real(x), "f32"),
}


@pytest.mark.parametrize("name", _UNLIKE_KINDS)
def test_operands_of_another_kind_are_refused_as_they_are_recorded(name):
    function, *kinds = _UNLIKE_KINDS[name]
    with pytest.raises(TypeError, match=r"in a device function|a device function has no"):
        record_word_function(function, *kinds)


def test_negative_numbers_beside_words_are_their_bits():
    recorded = record_word_function(lambda w: add(w, -3), "w32")
    five = torch.tensor([5], dtype=torch.int32)
    assert run_trace_on_tensors(recorded.trace, (), {0: five}, recorded.results)[0][0].tolist() == [2]
