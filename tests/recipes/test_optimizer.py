"""Recipes that torch.optim steps: weights of several components, or of float64."""

import copy

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp import formats, recipes
from halfulp.formats import round_exact
from halfulp.mctensor import MCTensor
from halfulp.recipes import Recipe
from halfulp.rounding import quantize

from .steps import converted

HYPER = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"lr": 1e-2}, "AdamW": {"lr": 1e-2}}


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def trained(name: str, start: nn.Module, rule: str, steps: int = 20) -> dict[str, torch.Tensor]:
    ours, optimizer = converted(recipes.get(name), copy.deepcopy(start), rule, **HYPER[rule])
    for _ in range(steps):
        ours(torch.arange(7)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.float32_state_dict(ours)


def firm(start: nn.Module) -> dict[str, torch.Tensor]:
    """Where gradients are not next to 0: Adam divides a smaller one by its own size, rounding and all."""
    twin = copy.deepcopy(start)
    twin(torch.arange(7)).square().mean().backward()
    return {name: p.grad.abs() > 1e-2 * p.grad.abs().max() for name, p in twin.named_parameters()}


@pytest.mark.parametrize("rule", ["SGD", "AdamW"])
def test_two_float16_train_as_float64_does(rule, seed):
    start = model()
    chosen = firm(start)
    wanted = trained("fp64", start, rule)
    found = trained("fp16-mc2", start, rule)
    for name, value in wanted.items():
        assert value.dtype == found[name].dtype == torch.float32
        torch.testing.assert_close(found[name][chosen[name]], value[chosen[name]], rtol=1e-3, atol=1e-4)


def test_what_the_optimizer_tells(seed):
    ours, optimizer = converted(recipes.get("fp16-mc3"), model(), "AdamW", **HYPER["AdamW"])
    ours(torch.arange(7)).float().square().mean().backward()
    optimizer.step()
    assert all(isinstance(parameter, MCTensor) for parameter in ours.parameters())
    # Three float16 each of weight, gradient and two moments, and beside every tensor a scale or a step.
    assert optimizer.bytes_per_parameter() == pytest.approx(24, rel=0.01)
    assert optimizer.report().cancelled is None
    wide, optimizer = converted(recipes.get("fp64"), model(), "SGD", lr=0.1)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float64}
    assert optimizer.bytes_per_parameter() == 8


def test_a_rule_that_torch_has_not_is_refused_and_the_model_is_as_it_was():
    start = model()
    with pytest.raises(ValueError, match=r"'fp16-mc2' steps by torch\.optim: unknown rule 'Lion'.*SGD, Adam, AdamW"):
        converted(recipes.get("fp16-mc2"), start, "Lion", lr=0.1)
    assert not any(isinstance(parameter, MCTensor) for parameter in recipes.revert(start).parameters())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"components": 5, "param_dtype": "float16"}, "1 to 4"),
        ({"components": 2}, "param_dtype="),
        ({"components": 2, "param_dtype": "float16", "weight_update": "kahan"}, "weight_update='components'"),
        ({"param_dtype": "float64", "state_dtype": "8bit"}, "leave them out"),
        ({"param_dtype": "float32"}, "leave it out"),
    ],
)
def test_choices_that_exclude_each_other(fields, words):
    with pytest.raises(ValueError, match=words):
        Recipe(name="x", **fields)


def test_collage_keeps_two_bfloat16_of_weight_and_second_moment(seed):
    ours, optimizer = converted(recipes.get("bf16-mc2"), model(), "AdamW", amsgrad=True, lr=1e-3)
    ours(torch.arange(7)).float().square().mean().backward()
    optimizer.step()
    names = {"residual", "exp_avg_sq", "exp_avg_sq_residual", "max_exp_avg_sq", "max_exp_avg_sq_residual", "exp_avg"}
    for parameter, state in optimizer.state.items():
        # Norms are float32, which loses nothing.
        wanted = names if parameter.dtype == torch.bfloat16 else names - {"residual"}
        assert {name for name, value in state.items() if torch.is_tensor(value)} == wanted
        held = {value.dtype for value in state.values() if torch.is_tensor(value)}
        assert held == {torch.bfloat16} | ({torch.float32} if parameter.dtype == torch.float32 else set())
    _, plain = converted(recipes.get("bf16-mc2"), model(), "SGD", momentum=0.9, lr=1e-3)
    assert plain.param_groups[0]["state_dtype"] is None


@pytest.mark.parametrize(("rule", "hyper"), [("SGD", {"momentum": 0.9}), ("AdamW", {})])
@pytest.mark.parametrize("name", ["e8m1-stochastic", "e8m3-kahan", "e8m5-kahan-stochastic"])
def test_weights_and_states_are_values_of_the_format(name: str, rule: str, hyper: dict, seed: int) -> None:
    model = nn.Linear(5, 3)
    recipe = recipes.get(name)
    model, optimizer = converted(recipe, model, rule, lr=0.01, seed=seed, **hyper)
    for _ in range(4):
        model(torch.randn(7, 5)).square().mean().backward()
        optimizer.step()
    seen = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    seen = [value for value in seen if torch.is_tensor(value) and value.dim()]
    assert len(seen) > 2
    for value in seen:
        exact = [float(round_exact(x, formats.get(recipe.format))) for x in value.double().flatten().tolist()]
        assert value.double().flatten().tolist() == exact


def test_second_moments_do_not_freeze(seed: int) -> None:
    model, optimizer = converted(recipes.get("e8m3-stochastic"), nn.Linear(64, 64), "AdamW", lr=0.0, seed=seed)
    for step in range(2000):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 if step < 200 else 0.01)
        optimizer.step()
    second = torch.cat([state["exp_avg_sq"].flatten() for state in optimizer.state.values()])
    wide = torch.tensor(0.0)
    for step in range(2000):
        wide = 0.999 * wide + 0.001 * (1.0 if step < 200 else 1e-4)
    assert second.mean().item() == pytest.approx(wide.item(), rel=0.1)


@pytest.mark.parametrize(("rule", "name", "wanted"), [("Adagrad", "sum", 200.0), ("RMSprop", "square_avg", 0.866)])
def test_second_moments_of_other_names_do_not_freeze(rule: str, name: str, wanted: float, seed: int) -> None:
    hyper = {"alpha": 0.99} if rule == "RMSprop" else {}
    model, optimizer = converted(recipes.get("e8m3"), nn.Linear(64, 64), rule, lr=0.0, seed=seed, **hyper)
    for _ in range(200):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    second = torch.cat([state[name].flatten() for state in optimizer.state.values()])
    assert second.mean().item() == pytest.approx(wanted, rel=0.03)
    assert torch.equal(second, quantize(second, "e8m3"))


@pytest.mark.parametrize(
    ("rule", "hyper", "names"),
    [
        ("SGDScheduleFree", {}, ["z"]),
        ("AdamWScheduleFree", {}, ["z"]),
        ("Prodigy", {}, ["p0"]),
        ("RMSprop", {"centered": True}, ["square_avg", "grad_avg"]),
        ("Adafactor", {}, ["row_var", "col_var"]),
    ],
)
def test_states_used_to_the_last_digits_and_factors_are_not_rounded(
    rule: str, hyper: dict, names: list[str], seed: int
) -> None:
    model, optimizer = converted(recipes.get("e8m3-kahan"), nn.Linear(5, 3), rule, lr=0.01, seed=seed, **hyper)
    for _ in range(3):
        model(torch.randn(7, 5)).square().mean().backward()
        optimizer.step()
    state = optimizer.state[model.weight]
    for name in names:
        assert not torch.equal(state[name], quantize(state[name], "e8m3")), name
    for name in set(state) - {"step", "residual", *names}:
        assert torch.equal(state[name], quantize(state[name], "e8m3")), name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["bf16-split8", "scaled-fp16-kahan", "scaled-fp8-stochastic"])
@pytest.mark.parametrize(
    ("rule", "exact"), [("SGDScheduleFree", "z"), ("AdamWScheduleFree", "z"), ("Prodigy", "p0"), ("Muon", None)]
)
def test_narrow_states_leave_out_what_a_rule_uses_to_the_last_digits(
    name: str, rule: str, exact: str | None, seed: int
) -> None:
    model, optimizer = converted(recipes.get(name), nn.Linear(64, 32, bias=False), rule, lr=0.01, seed=seed)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    (state,) = optimizer.state.values()
    assert exact is None or state[exact].dtype == torch.float32
    others = [value for key, value in state.items() if torch.is_tensor(value) and key.startswith(("exp_avg", "mom"))]
    assert all(value.dtype != torch.float32 for value in others if value.shape == (32, 64))


def test_what_the_recipe_chooses_is_no_option(seed: int) -> None:
    model = recipes.convert(nn.Linear(4, 4), "bf16-split8")
    with pytest.raises(ValueError, match=r"state_dtype='8bit' beside recipe 'bf16-split8', which chooses it"):
        recipes.optimizer(model, "AdamW", state_dtype="8bit")
    with pytest.raises(ValueError, match=r"recipe\.replace\(weight_update=\.\.\.\)"):
        recipes.optimizer(model, "AdamW", weight_update="kahan")


def test_muon_steps_matrices_and_adamw_the_rest(seed):
    ours, optimizer = converted(recipes.get("bf16-split8"), torch.nn.Sequential(torch.nn.Linear(4, 3)), "Muon", lr=1e-3)
    ours(torch.ones(2, 4)).float().square().mean().backward()
    optimizer.step()
    found = [(group["use_muon"], group["param_names"]) for group in optimizer.param_groups]
    assert found == [(True, ["0.weight"]), (False, ["0.bias"])]
    assert "exp_avg_sq" in optimizer.state[ours[0].bias]
    assert "momentum_buffer" in optimizer.state[ours[0].weight]
    two = recipes.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), "bf16-split8")
    chosen = recipes.optimizer(two, "Muon", lr=0.02, adamw_lr=1e-3, use_muon="0.weight")
    found = [(group["lr"], group["param_names"]) for group in chosen.param_groups]
    assert found == [(0.02, ["0.weight"]), (1e-3, ["0.bias", "1.weight", "1.bias"])]


def _steps(ours: nn.Module, optimizer, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        for place, parameter in enumerate(ours.parameters()):
            parameter.grad = torch.full_like(parameter, 2.0 ** -(step % 5 + place))
        optimizer.step()


def test_a_float32_master_stays_float32_under_a_format():
    ours = nn.Linear(8, 8, bias=False)
    nn.init.ones_(ours.weight)
    recipes.convert(ours, recipes.get("e8m3").replace(name="mine", weight_update="master"))
    optimizer = recipes.optimizer(ours, "SGD", lr=2.0**-7)
    for _ in range(64):
        ours.weight.grad = torch.ones_like(ours.weight)
        optimizer.step()
    assert (ours.weight == 0.5).all()


def test_a_resumed_run_draws_the_bits_of_the_states_anew(seed):
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        return converted(recipes.get("e8m3-stochastic"), model(), "AdamW", seed=seed, lr=0.1)

    torch.manual_seed(seed)
    ours, optimizer = make()
    _steps(ours, optimizer, 5)
    again, resumed = make()
    again.load_state_dict(ours.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    optimizer.state["mine"] = {"kept": torch.zeros(3)}  # an entry of the user's own
    for one, stepped in ((ours, optimizer), (again, resumed)):
        _steps(one, stepped, 5, 5)
    assert all(map(torch.equal, ours.state_dict().values(), again.state_dict().values()))


@pytest.mark.parametrize("name", ["e8m3", "e5m2-none"])
def test_an_optimizer_that_rounds_by_hooks_is_not_copied(name):
    _, optimizer = converted(recipes.get(name), model(), "SGD", lr=0.1)
    with pytest.raises(NotImplementedError, match=f"recipe '{name}' rounds .* which copies and pickles"):
        copy.deepcopy(optimizer)


def test_muon_and_the_adamw_beside_it_store_states_as_the_recipe_says():
    ours, optimizer = converted(recipes.get("bf16-mc2"), nn.Linear(32, 32), "Muon", lr=1e-3)
    ours(torch.randn(4, 32, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    assert {"exp_avg_sq", "exp_avg_sq_residual"} <= optimizer.state[ours.bias].keys()
    assert "momentum_buffer" in optimizer.state[ours.weight]


@pytest.mark.parametrize("wrap", ["compiled", "wrapped"])
def test_rounded_gradients_are_asked_of_the_model_within_a_wrapper(wrap):
    inner = nn.Linear(4, 2)
    recipes.convert(inner, "e5m2-adaptive")
    outer = torch.compile(inner, backend="eager") if wrap == "compiled" else nn.Sequential(inner)
    optimizer = recipes.optimizer(outer, "SGD", lr=0.1)
    outer(torch.ones(3, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="these were not rounded"):
        optimizer.step()
    if wrap == "compiled":  # by another backend than a scaler's, which refuses that
        return
    scaler = recipes.scaler(recipes.get("e5m2-adaptive"), inner)
    before = inner.weight.detach().clone()
    while torch.equal(inner.weight, before):  # steps whose gradients overflow at first are left out
        optimizer.zero_grad()
        scaler.scale(outer(torch.ones(3, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


class _WithExtraState(nn.Linear):
    def __init__(self, extra):
        super().__init__(4, 4)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("extra", [{"scale": 3}, torch.full((2,), 1 / 3, dtype=torch.float64)], ids=["dict", "float64"])
@pytest.mark.parametrize("what", ["fp16-mc2", "bf16-kahan", "averages"])
def test_float32_state_dicts_are_copies_and_leave_extra_state_as_it_is(what, extra, seed):
    model = nn.Sequential(_WithExtraState(extra), nn.BatchNorm1d(4))
    hu.convert(model, "bf16-kahan" if what == "averages" else what)
    optimizer = hu.recipes.optimizer(model, "SGD", lr=0.1)
    source = hu.optim.EMA(model) if what == "averages" else optimizer
    found = source.float32_state_dict(*([] if what == "averages" else [model]))
    assert found.keys() >= {"0.weight", "0.bias", "0._extra_state", "1.running_mean"}
    kept = found.pop("0._extra_state")
    assert kept == extra if isinstance(extra, dict) else torch.equal(kept, extra)
    before = {name: value.clone() for name, value in found.items()}
    model(torch.randn(8, 4).to(next(model.parameters()).dtype)).float().square().mean().backward()
    optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in found.items())
