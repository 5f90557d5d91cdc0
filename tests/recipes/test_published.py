"""Published recipes: each ingredient on the task planted for it, and operands rounded as by hand."""

import copy

import pytest
import torch
from benchmarks._published_recipes import PLANTS
from torch import nn

import halfulp as hu

from ..samples import drawn


def _name(plant):
    return f"{plant.recipe}: {plant.ingredient}".replace(" ", "-")


@pytest.mark.parametrize("plant", drawn(PLANTS, 3, "plants"), ids=_name)
def test_a_recipe_learns_its_planted_task_and_fails_without_the_ingredient(plant):
    ours, without = plant.losses(seed=5)
    assert ours < 0.4
    assert not without < 0.9  # an infinite or NaN loss too


@pytest.mark.parametrize("name", ["linear", "convolution"])
def test_operands_and_results_are_rounded_as_by_hand(name, seed):
    torch.manual_seed(seed % 2**31)
    layer, x = {
        "linear": lambda: (nn.Linear(6, 5), torch.randn(7, 6)),
        "convolution": lambda: (nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 5, 5)),
    }[name]()
    model, plain = nn.Sequential(copy.deepcopy(layer), nn.LayerNorm(5)), layer
    hu.convert(model, hu.Recipe(name="mine", operand_format="e5m2"))

    def narrow(t):
        return t.to(torch.float8_e5m2).float()

    x.requires_grad_()
    with torch.no_grad():
        by_hand = copy.deepcopy(plain)
        by_hand.weight.copy_(narrow(plain.weight))
        wanted = narrow(by_hand(narrow(x)))
    got = model[0](x)
    assert torch.equal(got, wanted)
    assert torch.equal(model[0](input=x), wanted)
    slope = torch.randn_like(got)
    got.backward(slope)
    rounded = narrow(x.detach()).requires_grad_()
    by_hand(rounded).backward(slope)
    assert torch.equal(model[0].weight.grad, by_hand.weight.grad)
    assert torch.equal(x.grad, rounded.grad)
    assert isinstance(model[0].weight, nn.Parameter)
    assert torch.equal(model[0].weight, plain.weight)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(copy.deepcopy(model)[0](x), wanted)
    assert torch.equal(hu.revert(model)[0](x), plain(x))


def test_exempt_layers_and_those_that_raise_keep_their_weight():
    recipe = hu.Recipe(name="mine", operand_format="e5m2", float32=["0"])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, plain = torch.randn(3, 4), copy.deepcopy(model)
    hu.convert(model, recipe)
    assert torch.equal(model[0](x), plain[0](x))
    assert not torch.equal(model[1](x), plain[1](x))
    with pytest.raises(RuntimeError, match="shapes"):
        model[1](torch.randn(3, 5))
    assert isinstance(model[1].weight, nn.Parameter)
    said = str(hu.explain(plain, recipe))
    assert "operands in e5m2" in said


def test_operand_formats_go_with_float32_parameters_alone():
    for fields in ({"param_dtype": "bfloat16"}, {"payload": "float16"}, {"emulate": "fp16"}):
        with pytest.raises(ValueError, match=r"operand_format='e5m2', which rounds what products read"):
            hu.Recipe(name="mine", operand_format="e5m2", **fields)
    with pytest.raises(ValueError, match="unknown format"):
        hu.Recipe(name="mine", operand_format="e5q2")
    for name in ("mixed-precision", "fp8-training"):
        recipe = hu.recipes.get(name)
        assert hu.Recipe.from_json(recipe.to_json()) == recipe
        assert "float32: *Norm*" in recipe.explain()


_LAYERS = {
    "linear": (lambda: nn.Linear(40, 24), (3, 50, 40), (1, 0), (-1, -1)),
    "convolution": (lambda: nn.Conv2d(36, 20, 3, padding=1), (40, 36, 3, 3), (1, 0), (1, 1)),
    "transposed": (lambda: nn.ConvTranspose2d(36, 20, 2), (40, 36, 3, 3), (0, 1), (1, 1)),
}


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("name", _LAYERS)
def test_blocks_lie_along_what_each_product_sums_over(name, format, seed):
    torch.manual_seed(seed % 2**31)
    make, shape, (inputs, outputs), (channels, _) = _LAYERS[name]
    layer, x = make(), torch.randn(shape).exp().requires_grad_()
    model = hu.convert(nn.Sequential(copy.deepcopy(layer)), hu.Recipe(name="mine", operand_format=format))
    got = model[0](x)
    slope = torch.randn_like(got).exp()
    got.backward(slope)

    def with_weight(dim):
        other = copy.deepcopy(layer)
        with torch.no_grad():
            other.weight.copy_(hu.quantize(layer.weight, format, dim=dim))
        return other

    def by_examples(t):
        flat = t.detach().flatten(0, -2) if name == "linear" else t.detach()
        return hu.quantize(flat, format, dim=0).view(t.shape)

    assert torch.equal(got, with_weight(inputs)(hu.quantize(x, format, dim=channels)))
    whole = x.detach().requires_grad_()
    with_weight(outputs)(whole).backward(hu.quantize(slope, format, dim=channels))
    torch.testing.assert_close(x.grad, whole.grad)
    layer(by_examples(x)).backward(by_examples(slope))
    torch.testing.assert_close(model[0].weight.grad, layer.weight.grad)
    layer.zero_grad()
    layer(x.detach()).backward(slope)
    # Two sums of so many positive numbers, each within that many roundings of the exact one.
    count = slope.numel() // layer.bias.numel()
    torch.testing.assert_close(model[0].bias.grad, layer.bias.grad, rtol=count * 2.0**-23, atol=0)
    assert torch.equal(copy.deepcopy(model)[0](x), got)
    assert torch.equal(hu.revert(model)[0](x), layer(x))


def test_block_formats_are_of_operands_alone():
    recipe = hu.Recipe(name="mine", operand_format=hu.formats.get_block("nvfp4"))
    assert recipe == hu.Recipe(name="mine", operand_format="nvfp4")
    assert "operand_format: nvfp4" in recipe.explain()
    for fields in ({"gradient_format": "e5m2"}, {"param_dtype": "bfloat16"}):
        with pytest.raises(ValueError, match="operand_format='nvfp4'"):
            hu.Recipe(name="mine", operand_format="nvfp4", **fields)
    with pytest.raises(ValueError, match="goes with operand_format= alone"):
        hu.Recipe(name="mine", emulate="nvfp4")
