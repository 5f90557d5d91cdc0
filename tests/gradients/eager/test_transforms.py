"""Models under torch.func, torch.export and torch.jit, and functions that no region can watch."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp, stack_module_state, vmap

import halfulp as hu
from halfulp.kernels import same_bits

from ..exponents import WIDTH, assert_same, batch, clear, mean_square, mlp, plainly, scrambled

MODES = ["function", "module"]


class Doing(nn.Module):
    """Two layers and what is done with them."""

    def __init__(self, forward):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._does = forward

    def forward(self, x):
        return self._does(self, x)


# Of torch, which calls what it deprecates.
deprecated = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@deprecated
@pytest.mark.parametrize("mode", MODES)
def test_models_are_exported_and_traced_as_they_are(mode, seed):
    model, x = mlp(), batch()
    wanted = model(x)
    hu.AdaptiveGradScaler(model, mode=mode)
    assert same_bits(torch.export.export(model, (x,)).module()(x), wanted)
    traced = torch.jit.trace(model, (x,))
    assert same_bits(traced(x), wanted)
    assert "CloneBackward" not in str(traced(x).grad_fn)


@deprecated
@pytest.mark.parametrize("mode", MODES)
def test_forward_derivatives_are_plain(mode, seed):
    model, x, direction = mlp(), batch(), batch()
    wanted = jvp(model, (x,), (direction,))
    hu.AdaptiveGradScaler(model, mode=mode)
    for found, expected in zip(jvp(model, (x,), (direction,)), wanted):
        assert same_bits(found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_an_ensemble_by_vmap_has_one_scale_and_is_told(mode, seed):
    base, x = mlp(), batch()
    parameters, _ = stack_module_state([mlp() for _ in range(3)])

    def run():
        return mean_square(vmap(lambda own: functional_call(base, own, (x,)))(parameters))

    wanted = torch.autograd.grad(run(), list(parameters.values()))
    scaler = hu.AdaptiveGradScaler(base, mode=mode)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.0)
    scaler.scale(run()).backward()
    for parameter, gradient in zip(parameters.values(), wanted):
        assert same_bits(parameter.grad / scaler.get_scale(), gradient)
    with pytest.warns(UserWarning, match="came from no forward pass"):
        scaler.step(optimizer)


def inner_vmap(model, x):
    return model.last(vmap(model.first)(x))


def inner_grad(model, x):
    return model.last(x) + torch.func.grad(lambda z: model.first(z).sum())(x)


def inner_writes(model, x):
    h = model.first(x) * 1
    torch._foreach_mul_([h], 2.0)
    return model.last(h)


@pytest.mark.parametrize(
    ("forward", "match"),
    [
        (inner_vmap, "transform of torch.func"),
        (inner_grad, "transform of torch.func"),
        (inner_writes, "write into each"),
    ],
)
def test_what_cannot_be_watched_is_refused(forward, match, seed):
    model, x = Doing(forward), batch()
    hu.AdaptiveGradScaler(model)
    with pytest.raises(NotImplementedError, match=match):
        model(x)


@pytest.mark.parametrize("forward", [inner_vmap, inner_writes])
def test_modules_are_exact_around_what_cannot_be_watched(forward, seed):
    model, x = Doing(forward), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model, mode="module")
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model), wanted)


@torch.library.custom_op("halfulp_tests::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """An operator whose backward pass is a custom Function that torch makes."""
    return x @ weight


product.register_autograd(
    lambda ctx, gradient: (gradient @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ gradient),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.mark.parametrize("weight", ["parameter", "view", "made"])
@pytest.mark.parametrize("late", [False, True])
def test_operators_with_a_backward_pass_in_python_are_exact(weight, late, seed):
    """Theirs is a Function within a torch function; ``late``: in an iteration that watches no Function."""

    def forward(m, x):
        of = {"parameter": m.first.weight, "view": m.first.weight.T, "made": m.first.weight * m.last.weight}[weight]
        return m.last((product(m.first(x).tanh(), of) if m.uses else m.first(x)).tanh())

    model, x = Doing(forward), batch()
    model.uses = True
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    model.uses = not late
    scaler = hu.AdaptiveGradScaler(model)
    for _ in range(2):
        scaler.scale(mean_square(model(x))).backward()
        scaler._controller.backward.end_iteration()
    model.uses = True
    for _ in range(2):
        found = scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model)
        assert_same(found, wanted)


def test_functional_calls_are_exact(seed):
    model, other, x = mlp(), mlp(), batch()
    own = dict(other.named_parameters())

    def run():
        return mean_square(functional_call(model, own, (x,)))

    wanted = plainly(seed, run, other)
    scaler = hu.AdaptiveGradScaler(model)
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(run()).backward(), other), wanted)


def test_outputs_of_unknown_kinds_are_refused_at_the_loss(seed):
    class Box:
        def __init__(self, value):
            self.value = value

    model, x = Doing(lambda m, x: Box(m.last(m.first(x)))), batch()
    plain = copy.deepcopy(model)
    scaler = hu.AdaptiveGradScaler(model)
    with pytest.raises(ValueError, match="an object other than a list, tuple, dict or data class"):
        scaler.scale(mean_square(model(x).value))
    scaler.detach()
    mean_square(model(x).value).backward()
    mean_square(plain(x).value).backward()
    for a, b in zip(model.parameters(), plain.parameters()):
        assert same_bits(a.grad, b.grad)
    clear(model)
