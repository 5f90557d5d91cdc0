"""The named recipes."""

import pytest

from halfulp import recipes

from ..records import REMEDY, list_names_on_record, read_record


def test_what_the_command_line_promises() -> None:
    wanted = ["fp32", "fp32-twin", "bf16", "bf16-stochastic", "bf16-kahan", "bf16-split", "bf16-split8", "bf16-mixed"]
    wanted += ["bf16-feedback", "bf16-master", "bf16-kahan-stochastic"]
    for bits in ("e8m5", "e8m3", "e8m1"):
        wanted += [bits, f"{bits}-stochastic", f"{bits}-kahan", f"{bits}-kahan-stochastic"]
    assert set(wanted) <= set(recipes.names())


def test_gradients() -> None:
    scales = {
        name: (recipes.get(name).gradient_format, recipes.get(name).gradient_scale)
        for name in recipes.names()
        if recipes.get(name).gradient_format
    }
    assert {f"fp16-constant-{scale}" for scale in (1, 16, 128, 1024, 4096, 16384)} <= set(scales)
    assert scales["fp16-none"] == ("fp16", None)
    assert scales["fp16-constant-128"] == ("fp16", 128.0)
    assert scales["fp16-dynamic"] == ("fp16", "dynamic")
    assert scales["e5m2-adaptive"] == scales["e5m2-adaptive-stochastic"] == ("e5m2", "amax")
    assert recipes.get("e5m2-adaptive-stochastic").gradient_rounding == "stochastic"
    for name in set(scales) - {"fp16-none", "e5m2-none"}:
        assert scales[name][1] is not None


def test_names_say_how_many_components_weights_have() -> None:
    found = {name: recipes.get(name).components for name in recipes.names()}
    assert {name: count for name, count in found.items() if count} == {"fp16-mc2": 2, "fp16-mc3": 3, "fp64-mc2": 2}


def test_names_are_the_recipes_own() -> None:
    assert [recipes.get(name).name for name in recipes.names()] == recipes.names()


def test_a_recipe_passes_through() -> None:
    recipe = recipes.get("bf16-kahan").replace(name="mine")
    assert recipes.get(recipe) is recipe


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'bf16-kahan'"):
        recipes.get("bf16-khan")


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_is_as_on_record(name: str) -> None:
    found = {key: value for key, value in recipes.get(name).to_dict().items() if key != "description"}
    assert found == read_record("recipes", name, found), REMEDY


def test_no_recipe_is_lost() -> None:
    assert set(list_names_on_record("recipes")) <= set(recipes.names())
