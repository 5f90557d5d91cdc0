"""Recipes are plain data: they survive JSON, refuse what is unknown, and say what they do."""

import copy
import dataclasses
import pickle

import pytest
import torch

from halfulp import formats, recipes
from halfulp.recipes import Recipe


def test_dtypes_and_formats_become_names() -> None:
    recipe = Recipe(name="x", param_dtype=torch.bfloat16, state_dtype=torch.float32)
    assert (recipe.param_dtype, recipe.state_dtype) == ("bfloat16", "float32")
    assert Recipe(name="x", format=formats.e8m3, emulate=formats.e8m3).format == "e8m3"


def test_mix_from_dict_and_list() -> None:
    pairs = (("*Norm", "kahan"), ("*", "stochastic"))
    for given in (dict(pairs), [list(pair) for pair in pairs], pairs):
        recipe = Recipe(name="x", param_dtype="bfloat16", weight_update=given)
        assert recipe.weight_update == pairs
        assert recipe.list_weight_update_names() == ("kahan", "stochastic")


def test_gradient_scales() -> None:
    for scale in (1024, 1024.0):
        recipe = Recipe(name="x", gradient_format=formats.fp16, gradient_scale=scale)
        assert (recipe.gradient_format, recipe.to_dict()["gradient_scale"]) == ("fp16", 1024.0)
        assert "gradient_scale: 1024" in recipe.explain()
        assert Recipe.from_json(recipe.to_json()) == recipe
    assert "gradient_scale" not in recipe.replace(gradient_scale=None).explain()
    assert "gradient_scale: amax, each layer has a scale of its own" in recipe.replace(gradient_scale="amax").explain()


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipes.get("fp32").name = "other"
    with pytest.raises(TypeError):
        Recipe("x")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weight_update": "kahn", "param_dtype": "bfloat16"}, "kahan"),
        ({"param_dtype": "bfloat61"}, "bfloat16"),
        ({"state_dtype": "8bits"}, "8bit"),
        ({"format": "e4m3nf"}, "e4m3fn"),
        ({"emulate": "bf61"}, "bf16"),
        ({"perturb": float("nan")}, "finite"),
        ({"perturb": -1.0}, ">= 0"),
        ({"perturb": 1e-7, "payload": "float16"}, "how far float32 itself drifts"),
        ({"name": "  "}, "name"),
        ({"format": "e8m3", "param_dtype": "bfloat16"}, "one of the two"),
        ({"weight_update": "kahan"}, "param_dtype="),
        ({"weight_update": {"*": "kahn"}, "param_dtype": "bfloat16"}, "kahan"),
        ({"gradient_format": "e5m2fm"}, "e5m2"),
        ({"gradient_format": "fp16", "gradient_scale": "dynamc"}, "dynamic"),
        ({"gradient_format": "fp16", "gradient_scale": 1000}, "power of two"),
        ({"gradient_format": "fp16", "gradient_scale": 0}, "power of two"),
        ({"gradient_format": "fp16", "gradient_scale": -2.0}, "power of two"),
        ({"gradient_format": "fp16", "gradient_scale": float("inf")}, "power of two"),
        ({"gradient_format": "fp16", "gradient_scale": True}, "power of two"),
        ({"gradient_format": "fp16", "gradient_scale": 2.0**61}, "power of two"),
        ({"gradient_scale": "amax"}, "gradient_format="),
        ({"gradient_rounding": "stochastic"}, "gradient_format="),
        ({"gradient_format": "fp16", "gradient_rounding": "stochastc"}, "stochastic"),
        ({"gradient_scale": 1.0}, "gradient_format="),
        ({"gradient_format": "fp16", "param_dtype": "float16"}, "leave out param_dtype"),
        ({"gradient_format": "fp16", "param_dtype": "float64"}, "leave out param_dtype"),
        ({"gradient_format": "fp16", "param_dtype": "float16", "components": 2}, "leave out param_dtype"),
        ({"gradient_format": "fp16", "payload": "float16"}, "leave out"),
        ({"gradient_format": "fp16", "emulate": "fp16"}, "leave out"),
    ],
)
def test_wrong_values_are_refused(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("*", r"\*")):
        Recipe(**({"name": "x"} | fields))


@pytest.mark.parametrize("given", [5, [1], [("*", "kahan", "split")], ["kahan"]])
def test_weight_updates_that_are_no_pairs_are_refused(given: object) -> None:
    with pytest.raises(TypeError, match="give a name, pairs of a glob and a name, or a dict"):
        Recipe(name="x", param_dtype="bfloat16", weight_update=given)


def test_fields_hold_names_and_tuples_whatever_they_were_given() -> None:
    recipe = Recipe(name="x", param_dtype=torch.float16, weight_update=[["*", "kahan"]], float32=["*Norm*"])
    same = Recipe(name="x", param_dtype="float16", weight_update={"*": "kahan"})
    assert recipe == same
    assert hash(recipe) == hash(same)
    assert (recipe.param_dtype, recipe.weight_update, recipe.float32) == ("float16", (("*", "kahan"),), ("*Norm*",))
    assert pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe) == recipe
    assert recipe.replace(weight_update=(("0.*", "split"),)).weight_update == (("0.*", "split"),)
    assert {field.name: field.default for field in dataclasses.fields(Recipe)}["float32"] == ("*Norm*",)


def test_unknown_fields_are_refused_everywhere() -> None:
    for make in (
        lambda: Recipe.from_dict({"name": "x", "weigth_update": "kahan"}),
        lambda: recipes.get("fp32").replace(weigth_update="kahan"),
    ):
        with pytest.raises(ValueError, match="weight_update"):
            make()
    with pytest.raises(ValueError, match="needs a name"):
        Recipe.from_dict({})


@pytest.mark.parametrize("text", ["", "[1]", "{", '"fp32"', "null"])
def test_text_that_is_no_recipe(text: str) -> None:
    with pytest.raises(ValueError, match="not the JSON of a recipe"):
        Recipe.from_json(text)
