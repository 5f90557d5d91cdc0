"""Roundings of one's own: as a device function they are the library's, bit for bit, and bad ones are refused."""

import pytest
import torch

import halfulp as hu
from halfulp.kernels import engine, same_bits
from halfulp.rounding import Rounding, _modes, register_rounding
from halfulp.rounding._quantize import encode_target

from .oracle import ROUNDED, random_patterns


@pytest.fixture
def registered():
    """Roundings that are forgotten afterwards."""
    before, recorded = dict(_modes.ROUNDING_CLASS_BY_NAME), dict(_modes._recorded_decision_by_name)
    yield register_rounding
    for held, was in ((_modes.ROUNDING_CLASS_BY_NAME, before), (_modes._recorded_decision_by_name, recorded)):
        held.clear()
        held.update(was)


def rounding(name, function):
    body = {"name": name, "goes_away": staticmethod(function), "__doc__": "One of the tests."}
    return type("Own", (Rounding,), body)


def nearest(fraction, half, odd, negative):
    return (fraction > half) | ((fraction == half) & odd)


def up(fraction, half, odd, negative):
    return ~negative


def down(fraction, half, odd, negative):
    return negative


def toward_zero(fraction, half, odd, negative):
    return fraction != fraction


OWN = {function.__name__: function for function in (nearest, up, down, toward_zero)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("onto", "function", "dtype"),
    [(row[0], OWN[row[1]], row[2]) for row, taken in ROUNDED.items() if taken and row[1] in OWN],
    ids=lambda one: getattr(one, "name", None),
)
def test_the_librarys_modes_written_by_a_user_have_their_bits(registered, onto, function, dtype, seed):
    registered(rounding(f"own_{function.__name__}", function))
    tiny = torch.randn(4096, dtype=torch.float64) * torch.exp2(torch.randint(-150, 20, (4096,)).double())
    x = torch.cat([random_patterns(dtype, 4096), tiny.to(dtype), (tiny * 2.0**100).to(dtype)])
    # Where the magnitude is beyond the largest number, directed modes stop at it, and own ones overflow.
    x = x[(x.double().abs() <= onto.max) | x.isnan()] if function is not nearest else x
    wanted = hu.quantize(x, onto, function.__name__)
    assert same_bits(hu.quantize(x, onto, f"own_{function.__name__}"), wanted)
    with engine("reference"):
        assert same_bits(hu.quantize(x[::17], onto, f"own_{function.__name__}"), wanted[::17])


def test_blocks_scales_and_models_take_them(registered, seed):
    registered(rounding("own_nearest", nearest))
    x = torch.randn(8, 64)
    for format in ("mxfp8_e4m3", "mxfp4", "nvfp4"):
        for dtype in (torch.float32, torch.float64):
            wanted = hu.quantize(x.to(dtype), format, "nearest")
            assert same_bits(hu.quantize(x.to(dtype), format, "own_nearest"), wanted)
    layer = torch.nn.Linear(64, 4)
    found = []
    for name in ("nearest", "own_nearest"):
        with hu.emulate(layer, "e4m3fn", rounding=name):
            found.append(layer(x).detach())
    assert same_bits(*found)
    compiled = torch.compile(lambda x: hu.quantize(x, "e4m3fn", "own_nearest"), backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(x), hu.quantize(x, "e4m3fn"))


def test_what_is_no_rounding_is_refused(registered):
    with pytest.raises(TypeError, match=r"subclass of hu\.rounding\.Rounding"):
        registered(nearest)
    with pytest.raises(TypeError, match=r"static method goes_away\(fraction, half, odd, negative\)"):
        registered(rounding("own", lambda fraction: fraction))
    with pytest.raises(TypeError, match="static method"):
        registered(type("Own", (Rounding,), {"name": "own", "goes_away": nearest}))
    with pytest.raises(TypeError, match="defines no static method"):
        registered(type("Own", (Rounding,), {"name": "own"}))
    with pytest.raises(ValueError, match="lower-case letters"):
        registered(rounding("Own Rounding", nearest))
    for name in ("nearest", "stochastic"):
        with pytest.raises(ValueError, match=f"rounding '{name}' exists already"):
            registered(rounding(name, nearest))
    registered(rounding("own", nearest))
    registered(rounding("own", nearest))  # as when a module is loaded again
    with pytest.raises(ValueError, match="rounding 'own' exists already"):
        registered(rounding("own", up))


def test_what_the_language_lacks_is_refused_at_its_line(registered):
    with pytest.raises(TypeError, match=r"test_own_roundings.py, line .*no branches"):
        registered(rounding("branching", lambda fraction, half, odd, negative: fraction > half or odd))
    with pytest.raises(TypeError, match=r"numbering.*a mask"):
        registered(rounding("numbering", lambda fraction, half, odd, negative: fraction))


@pytest.mark.parametrize("first", [True, False])
def test_a_name_stands_for_one_function_whatever_it_closes_over(registered, first):
    def made(is_first):
        return lambda fraction, half, odd, negative: fraction > half if is_first else fraction < half

    registered(rounding("closing", made(first)))
    registered(rounding("closing", made(first)))
    with pytest.raises(ValueError, match="rounding 'closing' exists already"):
        registered(rounding("closing", made(not first)))


def test_classes_that_are_not_registered_are_refused(registered):
    registered(rounding("known", nearest))
    for name in ("nearest", "known", "unknown"):
        with pytest.raises(TypeError, match="Own is no registered rounding"):
            hu.quantize(torch.ones(2), "e4m3fn", rounding(name, up)())


def test_an_operator_with_a_rounding_that_nobody_registered_says_so(registered):
    mode = registered(rounding("gone", nearest))()
    text = encode_target(hu.formats.e4m3fn, mode, None, torch.float32)
    del _modes.ROUNDING_CLASS_BY_NAME["gone"]
    with pytest.raises(ValueError, match="rounding 'gone' is not known in this process: import the module"):
        torch.ops.halfulp.quantize(torch.ones(2), text, 0, 0)
