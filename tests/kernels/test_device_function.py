"""Device functions under bound names keep their closures and defaults."""

import numpy as np

from halfulp.kernels._device_function import bind_free_variables

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
