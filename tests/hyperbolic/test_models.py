"""Models by name."""

import pytest

from halfulp.hyperbolic import HalfSpace, PoincareBall, manifold


def test_names():
    assert manifold("half-space") == HalfSpace()
    assert manifold(PoincareBall()) == manifold("ball")
    with pytest.raises(ValueError, match="'halfspace' is unknown: choose one of 'half-space', 'ball'"):
        manifold("halfspace")
