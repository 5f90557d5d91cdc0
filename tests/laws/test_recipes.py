"""Law: every recipe survives JSON, explains itself, trains, does what it says, and reverts."""

import copy
import functools
import json

import pytest
import torch
from torch import nn

from halfulp import recipes
from halfulp.recipes import Recipe
from halfulp.recipes._optimizer import scaler

from ..recipes.steps import HYPER, converted, model, resnet, step


@pytest.mark.parametrize("name", recipes.names())
def test_json_round_trip(name: str) -> None:
    recipe = recipes.get(name)
    text = recipe.to_json()
    assert Recipe.from_json(text) == recipe
    assert json.loads(text) == recipe.to_dict()
    assert hash(Recipe.from_json(text)) == hash(recipe)


@pytest.mark.parametrize("name", recipes.names())
def test_explains_itself(name: str) -> None:
    recipe = recipes.get(name)
    said = recipe.explain()
    assert said.startswith(f"{name}: ")
    for part in (recipe.param_dtype, recipe.format, recipe.emulate, recipe.gradient_format):
        assert part is None or part in said


def runs_with(name: str) -> str:
    return "AdamW" if "feedback" in name else "SGD"


def moved(before: list[nn.Parameter], model: nn.Module) -> bool:
    return any(not torch.equal(old, new) for old, new in zip(before, model.parameters()))


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_takes_steps(name: str, seed: int) -> None:
    recipe = recipes.get(name)
    ours, optimizer = converted(recipe, model(), runs_with(name), seed=seed, **HYPER[runs_with(name)])
    before = copy.deepcopy(list(ours.parameters()))
    scaled = scaler(recipe, ours)
    # A scale that is too large at first is lowered step by step.
    for _ in range(3 if scaled is None else 20):
        step(ours, optimizer, scaled)
        if scaled is not None and moved(before, ours):
            break
    assert moved(before, ours)
    dtype = getattr(torch, recipe.param_dtype or "float32")
    norms = {"1.weight", "1.bias"} if recipe.is_narrow and recipe.float32 else set()
    for name, parameter in ours.named_parameters():
        assert parameter.dtype == (torch.float32 if name in norms else dtype)
    assert {value.dtype for value in optimizer.float32_state_dict(ours).values()} == {torch.float32}


def course(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, labels: torch.Tensor) -> float:
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


@functools.cache
def plain_course(seed: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor, float]:
    """A model, images, their labels, and the loss after a course in float32."""
    torch.manual_seed(seed)
    x = torch.randn(12, 1, 6, 6)
    labels = x.mean((1, 2, 3)).mul(6).round().clamp(-1, 1).long() + 1
    start = resnet()
    plain = copy.deepcopy(start)
    return start, x, labels, course(plain, torch.optim.SGD(plain.parameters(), lr=0.1), x, labels)


@pytest.mark.parametrize("name", [name for name in recipes.names() if recipes.get(name).is_narrow])
def test_a_normal_cnn_trains_under_every_narrow_recipe(name: str, seed: int) -> None:
    """float32 images in, float32 logits out, and the loss within a tenth of float32's own course."""
    start, x, labels, wanted = plain_course(seed)
    ours, optimizer = converted(name, copy.deepcopy(start), "AdamW" if "feedback" in name else "SGD", lr=0.1)
    assert {b.dtype for b in ours.buffers() if b.is_floating_point()} == (
        {torch.float32} if recipes.get(name).float32 else {torch.bfloat16}
    )
    got = course(ours, optimizer, x, labels)
    assert ours(x).dtype == torch.float32
    if "feedback" not in name:
        assert abs(got - wanted) < 0.1 * max(wanted, 0.5)
    else:
        assert got < 0.9 * nn.functional.cross_entropy(start(x), labels).item()


ALL = recipes.names()


@pytest.mark.parametrize("name", ALL)
def test_revert_is_exact(name: str, seed: int) -> None:
    """Weights, dtypes, classes, hooks and buffers: a model that was never converted, where rounding allows."""
    recipe = recipes.get(name)
    start = nn.Sequential(*resnet(), nn.Linear(3, 2))
    start[-1].requires_grad_(False)
    start[-1].weight.mark = "no decay"
    ours = copy.deepcopy(start)
    ours[-1].weight.mark = "no decay"
    objects = [id(p) for p in ours.parameters()]
    assert recipes.convert(ours, recipe) is ours
    assert recipes.revert(ours) is ours
    if not (recipe.payload or recipe.components):
        assert [id(p) for p in ours.parameters()] == objects
    assert ours[-1].weight.mark == "no decay"
    eps = {"float16": 2.0**-10, "float8_e4m3fn": 2.0**-3}.get(recipe.payload, 1e-6 if recipe.perturb else 0)
    eps = 2.0**-20 if recipe.components and recipe.param_dtype == "float16" else eps
    for mine, other in zip(ours.parameters(), start.parameters(), strict=True):
        assert (type(mine), mine.dtype, mine.requires_grad) == (type(other), other.dtype, other.requires_grad)
        torch.testing.assert_close(mine, other, rtol=eps, atol=eps * 0.1)
    for mine, other in zip(ours.buffers(), start.buffers(), strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
    for mine, other in zip(ours.modules(), start.modules(), strict=True):
        assert vars(mine).keys() == vars(other).keys()
        assert len(mine._forward_pre_hooks) == len(mine._forward_hooks) == 0
        assert not mine._state_dict_hooks


@pytest.mark.parametrize("name", ALL)
def test_explain_says_what_convert_does(name: str, seed: int) -> None:
    ours = nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 5), nn.Linear(5, 3))
    before = copy.deepcopy(ours.state_dict())
    said = recipes.explain(ours, name)
    assert all(torch.equal(value, before[key]) for key, value in ours.state_dict().items())
    assert str(said).startswith(f"{name}: ")
    recipes.convert(ours, name)
    for plan in said.modules:
        for parameter in ours.get_submodule(plan.name).parameters(recurse=False):
            shown = getattr(parameter, "payload", parameter).dtype
            assert str(shown).removeprefix("torch.") in plan.held_as
    assert sum(plan.parameters for plan in said.modules) == sum(p.numel() for p in ours.parameters())
    if recipes.get(name).is_narrow:
        assert said.bytes_after == sum(p.numel() * p.element_size() for p in ours.parameters())
