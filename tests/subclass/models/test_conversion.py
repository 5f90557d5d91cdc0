"""Which fallbacks a model caused."""

import copy

import pytest
import torch
from torch import nn

from halfulp.mctensor._convert_model import multicomponent, single_component
from halfulp.subclass import FallbackWarning
from halfulp.subclass import _rule_table as fallback
from halfulp.subclass.models._conversion import fallbacks


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    """As in a fresh process, whatever other tests did."""
    monkeypatch.setattr(fallback, "_warned_fallbacks", set())


class Lacking(nn.Module):
    """Runs an operator that has no rule beyond float64."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3).double())

    def forward(self) -> torch.Tensor:
        return torch.special.bessel_j0(self.weight.detach()) + self.weight


def test_counts_hang_on_the_model_that_ran():
    one, two = multicomponent(Lacking()), multicomponent(Lacking())
    with pytest.warns(FallbackWarning, match="bessel_j0"):
        one()
    one()
    two()
    assert fallbacks(one) == {"prims.bessel_j0.default": 2}
    assert fallbacks(two) == {"prims.bessel_j0.default": 1}
    assert fallbacks()["prims.bessel_j0.default"] >= 3
    assert fallbacks(nn.Sequential(one, two)) == {"prims.bessel_j0.default": 3}


def test_a_copy_counts_for_itself():
    one = multicomponent(Lacking())
    twin = copy.deepcopy(one)
    with pytest.warns(FallbackWarning):
        twin()
    assert fallbacks(one) == {}
    assert sum(fallbacks(twin).values()) == 1


def test_models_without_components_are_refused():
    model = multicomponent(nn.Linear(2, 2))
    assert fallbacks(model) == {}
    for plain in (nn.Linear(2, 2), single_component(model)):
        with pytest.raises(ValueError, match=r"hu\.multicomponent\(model\)"):
            fallbacks(plain)
