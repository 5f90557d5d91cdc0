"""Which fallbacks a model caused, and by which names files hold whole models."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from halfulp.mctensor._convert_model import multicomponent, single_component
from halfulp.scaled import scalify
from halfulp.subclass import FallbackWarning
from halfulp.subclass import _rule_table as fallback
from halfulp.subclass.models._conversion import fallbacks
from halfulp.subclass.models._float32_products import float32_products


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


STATE_DICT_HOOKS = {
    "_save_auxiliary_tensors",
    "_load_auxiliary_tensors",
    "_check_entries_of_all_modules",
    "_drop_loaded_missing_keys",
}
STORED_NAMES = {
    multicomponent: {"rebuild_mctensor", "_attribute_fallbacks_to_model", *STATE_DICT_HOOKS},
    lambda model: scalify(model, torch.float8_e4m3fn, matmul="fp8"): {
        *("rebuild_scaled_tensor", "_attribute_fallbacks_to_model", "_keep_gradients_plain", "rescale_input_gradient"),
        *("_round_inputs_to_home", "_round_results_to_home", "_run_linear_fp8", *STATE_DICT_HOOKS),
    },
    float32_products: {"make_empty_module"},
}


@pytest.mark.parametrize("convert", STORED_NAMES)
def test_files_of_whole_models_hold_names_that_stay(convert):
    """Under another name, models that torch.save wrote before could not be loaded."""
    found = set()

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            if module.startswith("halfulp."):
                found.add(name)
            return super().find_class(module, name)

    model = convert(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GRU(16, 16)))
    Unpickler(io.BytesIO(pickle.dumps(model))).load()
    assert found == STORED_NAMES[convert]
