"""The contract of torch's GradScaler, one list of tests that both classes pass."""

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.gradients import Dynamic
from halfulp.kernels import same_bits

from .exponents import WIDTH, batch, mean_square, mlp

# What both raise, each in words of its own.
REFUSED = (ValueError, RuntimeError, AssertionError)
START, INTERVAL = 2.0**10, 3


def of_torch(model: nn.Module, interval: int = INTERVAL, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=START, growth_interval=interval, **options)


def with_one_scale(model: nn.Module, interval: int = INTERVAL, **options: Any) -> torch.amp.GradScaler:
    return hu.AdaptiveGradScaler(model, init_scale=START, policy=Dynamic(interval), **options)


def with_exponents(model: nn.Module, interval: int = INTERVAL, **options: Any) -> torch.amp.GradScaler:
    return hu.AdaptiveGradScaler(model, init_scale=START, interval=2, **options)


MAKERS = [of_torch, with_one_scale, with_exponents]
both = pytest.mark.parametrize("make", MAKERS)


@dataclasses.dataclass
class Run:
    """A model in training, by one of the scalers."""

    model: nn.Module
    scaler: torch.amp.GradScaler
    opt: torch.optim.Optimizer
    x: torch.Tensor

    def backward(self, factor: float = 1.0) -> None:
        self.opt.zero_grad()
        self.scaler.scale(factor * mean_square(self.model(self.x))).backward()

    def step(self, factor: float = 1.0) -> Any:
        self.backward(factor)
        result = self.scaler.step(self.opt)
        self.scaler.update()
        return result

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def ready(make: Callable, optimizer: Callable = torch.optim.SGD, **options: Any) -> Run:
    model = mlp()
    return Run(model, make(model, **options), optimizer(model.parameters(), lr=0.1), batch())


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused_with_what_to_save(copied, seed):
    run = ready(with_exponents)
    for held in (run.scaler, (run.model, run.scaler)):
        with pytest.raises(TypeError, match=r"save scaler\.state_dict\(\), make"):
            copied(held)


def test_a_growth_that_no_policy_has_is_refused(seed):
    for make in (with_one_scale, with_exponents):
        scaler = ready(make).scaler
        before = scaler.state_dict()
        for refused in (scaler.set_growth_factor, scaler.set_backoff_factor, scaler.set_growth_interval):
            with pytest.raises(NotImplementedError, match=r"powers of two.*give policy="):
                refused(3)
        assert scaler.state_dict() == before


@both
@pytest.mark.parametrize("times", [lambda s, g: g * s.get_scale(), lambda s, g: s.scale(g)], ids=["get_scale", "scale"])
def test_gradients_set_by_hand_are_unscaled(make, times, seed):
    run = ready(make)
    run.scaler.scale(torch.zeros(1))  # torch's makes its scale here
    for spike in (1.0, float("nan"), 1.0):
        before, made = run.weights(), [torch.randn_like(p) * spike for p in run.model.parameters()]
        for p, gradient in zip(run.model.parameters(), made):
            p.grad = times(run.scaler, gradient)
        run.scaler.step(run.opt)
        run.scaler.update()
        wanted = [w if spike != spike else w.add(g, alpha=-0.1) for w, g in zip(before, made)]
        assert same(run.weights(), wanted)


@both
def test_gradients_taken_by_autograd_grad_are_scaled(make, seed):
    run = ready(make)
    parameters = list(run.model.parameters())
    wanted = torch.autograd.grad(mean_square(run.model(run.x)), parameters)
    found = torch.autograd.grad(run.scaler.scale(mean_square(run.model(run.x))), parameters)
    assert same([g / run.scaler.get_scale() for g in found], list(wanted))
    for p, gradient in zip(parameters, found):
        p.grad = gradient
    before = run.weights()
    run.scaler.step(run.opt)
    run.scaler.update()
    assert same(run.weights(), [w.add(g, alpha=-0.1) for w, g in zip(before, wanted)])


@both
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_optimizers_step_as_others(make, kind, seed):
    results = []
    for fused in (False, True):
        torch.manual_seed(seed)
        run = ready(make, lambda parameters, lr, fused=fused: kind(parameters, lr=lr, fused=fused))
        for factor in (1.0, float("inf"), 1.0, 1.0):
            run.step(factor)
        steps = [float(state["step"]) for state in run.opt.state.values() if "step" in state]
        results.append((run.weights(), steps))
    (weights, steps), (fused_weights, fused_steps) = results
    assert steps == fused_steps
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(weights, fused_weights))


@both
def test_several_optimizers_step_and_skip_apart(make, seed):
    run = ready(make)
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (run.model[0], run.model[4]))
    run.backward()
    run.model[4].bias.grad[0] = torch.inf
    before = [layer.weight.detach().clone() for layer in (run.model[0], run.model[4])]
    run.scaler.step(first)
    run.scaler.step(second)
    run.scaler.update()
    assert not same_bits(run.model[0].weight, before[0])
    assert same_bits(run.model[4].weight, before[1])
    run.backward()
    run.scaler.step(first)
    with pytest.raises(REFUSED, match="already been called"):
        run.scaler.step(first)
    with pytest.raises(REFUSED, match="after step"):
        run.scaler.unscale_(first)
    run.scaler.unscale_(second)
    with pytest.raises(REFUSED, match="already been called"):
        run.scaler.unscale_(second)
    run.scaler.step(second)
    run.scaler.update()


@both
def test_closures_are_refused(make, seed):
    run = ready(make)
    run.backward()
    before = run.weights()
    with pytest.raises(REFUSED, match=r"[Cc]losure"):
        run.scaler.step(run.opt, closure=lambda: None)
    assert same(before, run.weights())


@both
def test_arguments_and_results_of_a_step_pass_through(make, seed):
    class Talking(torch.optim.SGD):
        def step(self, *args, **kwargs):
            super().step()
            return args, kwargs

    run = ready(make, Talking)
    run.backward()
    assert run.scaler.step(run.opt, 1, a=2) == ((1,), {"a": 2})
    run.scaler.update()


@both
def test_an_update_before_a_step_is_refused(make, seed):
    run = ready(make)
    run.backward()
    with pytest.raises(REFUSED):
        run.scaler.update()
    for p in run.model.parameters():
        p.grad = None
    with pytest.raises(REFUSED):
        run.scaler.step(run.opt)


@both
def test_a_new_scale_is_taken(make, seed):
    run = ready(make)
    for new in (2.0**4, torch.tensor(2.0**6)):
        run.backward()
        run.scaler.step(run.opt)
        run.scaler.update(new)
        assert run.scaler.get_scale() == float(new)
    assert run.scaler.scale(torch.ones(())) == 2.0**6


@both
def test_states_go_from_one_to_the_other(make, seed):
    run = ready(make)
    for _ in range(4):
        run.step()
    other = ready(make)
    other.scaler.load_state_dict(run.scaler.state_dict())
    assert other.scaler.state_dict() == run.scaler.state_dict()
    other.step()
    assert of_torch(other.model).state_dict().keys() <= run.scaler.state_dict().keys()


@both
def test_accumulated_clipped_gradients_step_as_plain_ones(make, seed):
    run = ready(make)
    plain = copy.deepcopy(run.model)
    for _ in range(3):
        run.opt.zero_grad()
        plain.zero_grad()
        for part in run.x.chunk(2):
            run.scaler.scale(mean_square(run.model(part))).backward()
            mean_square(plain(part)).backward()
        run.scaler.unscale_(run.opt)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (run.model, plain)]
        assert same_bits(*norms)
        run.scaler.step(run.opt)
        run.scaler.update()
        for p in plain.parameters():
            p.data.add_(p.grad, alpha=-0.1)
    assert same(run.weights(), [p.detach() for p in plain.parameters()])


@both
def test_a_skipped_step_is_seen(make, seed):
    """By the scale that falls, where there is one for all, and always by last_step."""
    run = ready(make)
    run.step()
    before, weights = run.scaler.get_scale(), run.weights()
    run.backward()
    run.model[0].weight.grad[0, 0] = torch.nan
    run.scaler.step(run.opt)
    run.scaler.update()
    assert same(weights, run.weights())
    if make is not of_torch:
        assert not run.scaler.last_step.applied
    if make is not with_exponents:
        assert run.scaler.get_scale() < before


def test_parameters_are_swapped_between_steps(seed):
    """As nn.Module converts tensor subclasses; torch swaps none that is referenced weakly."""
    run = ready(with_exponents)
    for _ in range(2):
        run.step()
        for p in run.model.parameters():
            p.grad = None
            torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.5))
    assert run.step() is None
    assert run.scaler.last_step.applied


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripting_an_attached_model_says_what_to_script(seed):
    model, x = nn.Sequential(mlp(), nn.ModuleDict({"a": mlp()})["a"]), batch()
    hu.AdaptiveGradScaler(model)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script\(copy\.deepcopy\(model\)\)"):
        torch.jit.script(model)
    assert same_bits(torch.jit.script(copy.deepcopy(model))(x), model(x))


def test_a_hook_that_keeps_features_is_told_of_the_policy_that_takes_it(seed):
    model, x, kept = mlp(), batch(), {}
    model[2].register_forward_hook(lambda module, args, output: kept.update(features=output))

    def loss():
        out = model(x)
        return mean_square(out) + kept["features"].sum()

    loss().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    scaler = hu.AdaptiveGradScaler(model)
    with pytest.raises(ValueError, match="take policy='dynamic'"):
        scaler.scale(loss())
    scaler.detach()
    scaler = hu.AdaptiveGradScaler(model, policy="dynamic")
    scaler.scale(loss()).backward()
    assert same([p.grad / scaler.get_scale() for p in model.parameters()], wanted)


class Stepping(nn.Module):
    """A model that nobody calls: its training step calls parts."""

    def __init__(self):
        super().__init__()
        self.net, self.heads = mlp(), nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)])
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, x):
        h = self.net(x).tanh() * self.scale
        return mean_square(self.heads[1](self.heads[0](h))) + mean_square(self.net(h))


def test_parts_that_a_step_calls_have_sites(seed):
    model, x = Stepping(), batch()
    model.training_step(x).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    scaler = hu.AdaptiveGradScaler(model, interval=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.scale(model.training_step(x)).backward()
    found = {row.site for row in scaler.sites()}
    assert {"net.0", "net.2", "net.4", "heads.0", "heads.1"} <= found
    scaler.set_exponents({key: number for number, key in enumerate(sorted(found))})
    model.zero_grad()
    scaler.scale(model.training_step(x)).backward()
    for name, p in model.named_parameters():
        assert same_bits(p.grad / scaler.get_scale(), wanted[name]), name
