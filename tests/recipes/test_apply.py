"""Applying a recipe to a model."""

import copy

import pytest
import torch
from torch import nn

from halfulp import recipes
from halfulp.recipes import Recipe
from halfulp.recipes._apply import scaler

HYPER = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 1e-3}}


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scaled=None) -> None:
    loss = model(torch.arange(7)).float().square().mean()
    if scaled is None:
        loss.backward()
        optimizer.step()
    else:
        scaled.scale(loss).backward()
        scaled.step(optimizer)
        scaled.update()
    optimizer.zero_grad()


def firm(start: nn.Module) -> dict[str, torch.Tensor]:
    """Where gradients are not next to 0: Adam divides a smaller one by its own size, rounding and all."""
    twin = copy.deepcopy(start)
    twin(torch.arange(7)).square().mean().backward()
    return {name: p.grad.abs() > 1e-2 * p.grad.abs().max() for name, p in twin.named_parameters()}


def runs_with(name: str) -> str:
    return "AdamW" if "feedback" in name else "SGD"


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_takes_steps(name: str, seed: int) -> None:
    recipe = recipes.get(name)
    ours, optimizer = recipes.apply(recipe, model(), runs_with(name), seed=seed, **HYPER[runs_with(name)])
    before = copy.deepcopy(list(ours.parameters()))
    scaled = scaler(recipe, ours)
    # A scale that is too large at first is lowered step by step.
    for _ in range(3 if scaled is None else 20):
        step(ours, optimizer, scaled)
    assert any(not torch.equal(old, new) for old, new in zip(before, ours.parameters()))
    dtype = getattr(torch, recipe.param_dtype or "float32")
    assert {parameter.dtype for parameter in ours.parameters()} == {dtype}
    assert {value.dtype for value in optimizer.float32_state_dict(ours).values()} == {torch.float32}


@pytest.mark.parametrize("rule", ["SGD", "AdamW"])
def test_fp32_is_torch_optim(rule: str, seed: int) -> None:
    theirs = model()
    chosen = firm(theirs)
    ours, optimizer = recipes.apply(recipes.get("fp32"), copy.deepcopy(theirs), rule, **HYPER[rule])
    peer = getattr(torch.optim, rule)(theirs.parameters(), **HYPER[rule])
    for _ in range(5):
        step(ours, optimizer)
        step(theirs, peer)
    for mine, other, where in zip(ours.parameters(), theirs.parameters(), chosen.values()):
        torch.testing.assert_close(mine[where], other[where], rtol=1e-5, atol=1e-6)


def test_the_low_bits_of_the_start_are_kept(seed: int) -> None:
    start = model()
    ours, optimizer = recipes.apply(recipes.get("bf16-split"), copy.deepcopy(start), "AdamW", lr=1e-3)
    decoded = optimizer.float32_state_dict(ours)
    for name, parameter in start.named_parameters():
        assert torch.equal(decoded[name], parameter)


def test_the_twin_differs_a_little(seed: int) -> None:
    start = model()
    ours, _ = recipes.apply(recipes.get("fp32-twin"), copy.deepcopy(start), "SGD", seed=seed, lr=0.1)
    for mine, other in zip(ours.parameters(), start.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=0)
    assert any(not torch.equal(mine, other) for mine, other in zip(ours.parameters(), start.parameters()))


def test_buffers_are_narrowed(seed: int) -> None:
    class Shifted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("shift", torch.ones(2))
            self.register_buffer("count", torch.zeros(2, dtype=torch.long))

    ours, _ = recipes.apply(recipes.get("bf16"), Shifted(), "SGD", lr=0.1)
    assert ours.shift.dtype == torch.bfloat16
    assert ours.count.dtype == torch.long


def test_globs_match_names_and_classes() -> None:
    mix = {"2.bias": "split", "*Embedding*": "kahan", "*Norm": "master", "*": "stochastic"}
    recipe = Recipe(name="x", param_dtype="bfloat16", weight_update=mix)
    assigned = recipes.assign(recipe, model())
    assert assigned["0.weight"] == "kahan"
    assert assigned["1.bias"] == "master"
    assert (assigned["2.weight"], assigned["2.bias"]) == ("stochastic", "split")


def test_a_parameter_without_a_match() -> None:
    recipe = Recipe(name="x", param_dtype="bfloat16", weight_update={"*Norm": "kahan"})
    with pytest.raises(ValueError, match=r"'0\.weight' of a Embedding matches none"):
        recipes.apply(recipe, model(), "SGD", lr=0.1)


def test_only_float32_models() -> None:
    with pytest.raises(TypeError, match=r"model\.float"):
        recipes.apply(recipes.get("bf16"), model().bfloat16(), "SGD", lr=0.1)


def test_unknown_rule() -> None:
    with pytest.raises(ValueError, match="did you mean 'AdamW'"):
        recipes.apply(recipes.get("bf16"), model(), "AdmaW", lr=0.1)


def test_no_scaler_without_a_gradient_format(seed: int) -> None:
    assert scaler(recipes.get("fp32"), model()) is None
    assert scaler(recipes.get("bf16-kahan"), model()) is None


@pytest.mark.parametrize(
    ("name", "policy", "scale"),
    [("fp16-none", "constant", 1.0), ("e5m2-dynamic", "dynamic", 2.0**16), ("fp16-constant-128", "constant", 128.0)],
)
def test_the_scaler_is_the_recipes(name: str, policy: str, scale: float) -> None:
    made = scaler(recipes.get(name), model())
    assert made.get_scale() == scale
    assert made._controller.policy.name == policy
    assert made._controller.backward.format.name == recipes.get(name).gradient_format


@pytest.mark.parametrize("name", ["fp16-none", "fp16-adaptive"])
def test_gradients_are_rounded_as_the_product_reads_them(name: str, seed: int) -> None:
    """One linear layer: its weight's gradient is the product of a rounded gradient, rounded again."""
    ours, optimizer = recipes.apply(recipes.get(name), nn.Linear(3, 2, bias=False), "SGD", lr=1.0)
    x, wanted = torch.randn(5, 3), torch.randn(5, 2) * 2**-6
    scaled = scaler(recipes.get(name), ours)
    scaled.scale((ours(x) * wanted).sum()).backward()
    rounded = (wanted * scaled.get_scale()).half().float()
    exact = (rounded.T @ x).half().float() / scaled.get_scale()
    before = ours.weight.detach().clone()
    scaled.step(optimizer)
    assert scaled.last_step.applied
    torch.testing.assert_close(before - ours.weight.detach(), exact, rtol=2**-9, atol=1e-6)


def test_a_step_without_the_scaler_is_refused(seed: int) -> None:
    recipe = recipes.get("fp16-constant-1024")
    ours, optimizer = recipes.apply(recipe, model(), "SGD", lr=0.1)
    before = copy.deepcopy(list(ours.parameters()))
    with pytest.raises(RuntimeError, match=r"policy='constant', init_scale=1024.0, format='fp16'"):
        step(ours, optimizer)
    assert all(torch.equal(old, new) for old, new in zip(before, ours.parameters()))


@pytest.mark.parametrize("name", ["fp16-none", "fp16-dynamic"])
def test_an_overflow_reaches_no_weight(name: str, seed: int) -> None:
    ours, optimizer = recipes.apply(recipes.get(name), model(), "AdamW", lr=0.1)
    scaled = scaler(recipes.get(name), ours)
    before = copy.deepcopy(list(ours.parameters()))
    scaled.scale(1e9 * ours(torch.arange(7)).square().sum()).backward()
    scaled.step(optimizer)
    assert not scaled.last_step.applied
    assert all(torch.equal(old, new) for old, new in zip(before, ours.parameters()))
