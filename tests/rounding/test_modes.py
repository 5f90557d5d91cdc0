"""The modes and their names."""

import dataclasses
import pickle

import pytest

from halfulp.rounding import Down, Nearest, Stochastic, TowardZero, Up, get_rounding, rounding_names


def test_names():
    assert rounding_names() == [mode.name for mode in (Nearest, TowardZero, Up, Down, Stochastic)]
    for name in rounding_names():
        assert get_rounding(name).name == name
        assert get_rounding(name.upper().replace("_", "-")) == get_rounding(name)
    assert get_rounding(Up()) is not None


def test_frozen_and_equal():
    assert Stochastic(3) == Stochastic(3) != Stochastic(4)
    assert Nearest() != TowardZero()
    assert pickle.loads(pickle.dumps(Stochastic(3))) == Stochastic(3)
    assert len({Nearest(), Nearest(), Up()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Stochastic(3).seed = 4


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "x"])
def test_bad_seed(seed):
    with pytest.raises(ValueError, match="seed"):
        Stochastic(seed)


def test_unknown():
    with pytest.raises(ValueError, match="stochastic"):
        get_rounding("stochastik")
    with pytest.raises(TypeError, match=r"Up\(\)"):
        get_rounding(Up)
    with pytest.raises(TypeError, match="name"):
        get_rounding(3)
