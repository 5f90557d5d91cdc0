"""Weight updates by name or object, and what is refused."""

import copy
import io
import pickle

import pytest
import torch

import halfulp as hu
from halfulp.optim.weight_updates._rounding import StochasticallyRounded
from halfulp.optim.weight_updates._weight_update import find_weight_update, register_weight_update

from ...laws.optim.cases import UPDATES


@pytest.mark.parametrize(("wrong", "near"), [("kahn", "kahan"), ("spilt8", "split8"), ("stocastic", "stochastic")])
def test_an_unknown_name_is_answered_with_near_ones(wrong, near):
    with pytest.raises(ValueError, match=f"'{wrong}' is unknown: did you mean .*{near}"):
        hu.optim.AdamW([torch.nn.Parameter(torch.zeros(2).bfloat16())], weight_update=wrong)


@pytest.mark.parametrize("wrong", [7, 3.5, object(), [], b"kahan"])
def test_what_is_no_weight_update_is_a_type_error(wrong):
    with pytest.raises(TypeError, match="weight_update takes a name or a WeightUpdate object"):
        hu.optim.AdamW([torch.nn.Parameter(torch.zeros(2).bfloat16())], weight_update=wrong)


@pytest.mark.parametrize(
    ("given", "name"),
    [(hu.Nearest(), "nearest"), (hu.Stochastic(), "stochastic"), ("kahan", "kahan"), (hu.Split(bits=8), "split8")],
)
def test_rounding_objects_and_names_mean_the_same(given, name):
    assert find_weight_update(given) == UPDATES[name]


@pytest.mark.parametrize("given", [hu.Up(), hu.Down(), hu.TowardZero(), hu.Stochastic(seed=3)])
def test_a_rounding_that_no_update_has_is_refused(given):
    with pytest.raises(ValueError, match=r"nearest|seed="):
        hu.optim.SGD([torch.nn.Parameter(torch.zeros(2).bfloat16())], weight_update=given)


def test_random_words_that_are_not_drawn_are_refused():
    class Undrawn(StochasticallyRounded):
        name = "undrawn"

        def list_random_bits_per_draw(self, store):
            return ()

    p = torch.nn.Parameter(torch.ones(2).bfloat16())
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"'undrawn' rounds by more random words than the 0 of"):
        hu.optim.SGD([p], weight_update=Undrawn()).step()
    assert (p == 1).all()


def test_a_name_can_be_given_once():
    with pytest.raises(ValueError, match="exists already"):
        register_weight_update(hu.Kahan())


def test_float16_with_split_names_what_to_use():
    with pytest.raises(ValueError, match=r"kahan.*master"):
        hu.optim.AdamW([torch.nn.Parameter(torch.zeros(2).half())], weight_update="split")


@pytest.mark.parametrize("name", UPDATES)
def test_param_groups_that_trainers_save_as_they_are_load_with_weights_only(name):
    file = io.BytesIO()
    torch.save({"weight_update": UPDATES[name]}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"weight_update": UPDATES[name]}


class _Own(StochasticallyRounded):
    name = "not registered"


def test_a_weight_update_that_is_not_registered_is_pickled_and_copied_as_any_object():
    own = _Own()
    assert copy.deepcopy(own) == own
    assert pickle.loads(pickle.dumps(own)) == own
    file = io.BytesIO()
    torch.save(own, file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
