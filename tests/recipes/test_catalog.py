"""The named recipes."""

import pytest

from halfulp import recipes


def test_what_the_command_line_promises() -> None:
    wanted = ["fp32", "fp32-twin", "bf16", "bf16-stochastic", "bf16-kahan", "bf16-split", "bf16-split8", "bf16-mixed"]
    wanted += ["bf16-feedback", "bf16-master", "bf16-kahan-stochastic"]
    for bits in ("e8m5", "e8m3", "e8m1"):
        wanted += [bits, f"{bits}-stochastic", f"{bits}-kahan", f"{bits}-kahan-stochastic"]
    assert set(wanted) <= set(recipes.names())


def test_names_are_the_recipes_own() -> None:
    assert [recipes.get(name).name for name in recipes.names()] == recipes.names()


def test_a_recipe_passes_through() -> None:
    recipe = recipes.get("bf16-kahan").replace(name="mine")
    assert recipes.get(recipe) is recipe


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'bf16-kahan'"):
        recipes.get("bf16-khan")
