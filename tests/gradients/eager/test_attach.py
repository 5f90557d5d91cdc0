"""Attaching a scaler to a model: copies, frozen parameters, exports, transforms, and what cannot be watched."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp, stack_module_state, vmap

import halfulp as hu
from halfulp.kernels import same_bits

from ..exponents import WIDTH, assert_same, batch, clear, mean_square, mlp, plainly, scrambled


def trial(model, run, seed):
    wanted = plainly(seed, run, model)
    scaler = hu.AdaptiveGradScaler(model)
    return scrambled(seed, scaler, lambda: scaler.scale(run()).backward(), model), wanted


def test_frozen_parameters_by_functions(seed):
    model, x = mlp(), batch()
    model[2].weight.requires_grad_(False)
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model)
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model), wanted)
    model[2].weight.requires_grad_(True)
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model), wanted)


def test_a_module_that_raised_may_be_called_again(seed):
    class Moody(nn.Linear):
        bad = False

        def forward(self, x):
            if self.bad:
                raise KeyError("bad")
            return super().forward(x)

    model, x = nn.Sequential(*mlp(1), Moody(WIDTH, WIDTH), *mlp(1)), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model)
    model[1].bad = True
    for _ in range(2):
        with pytest.raises(KeyError, match="bad"):
            model(x)
    model[1].bad = False
    assert_same(scrambled(seed, scaler, lambda: scaler.scale(mean_square(model(x))).backward(), model), wanted)


def test_a_pickled_copy_is_plain(seed):
    model, x = mlp(), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    scaler = hu.AdaptiveGradScaler(model)
    scaler.scale(mean_square(model(x))).backward()
    clear(model)
    twin = pickle.loads(pickle.dumps(model))
    assert_same(plainly(seed, lambda: mean_square(twin(x)), twin), wanted)
    again = hu.AdaptiveGradScaler(twin)
    assert_same(scrambled(seed, again, lambda: again.scale(mean_square(twin(x))).backward(), twin), wanted)


def test_a_deep_copy_is_plain(seed):
    model, x = mlp(), batch()
    wanted = plainly(seed, lambda: mean_square(model(x)), model)
    hu.AdaptiveGradScaler(model)
    twin = copy.deepcopy(model)
    again = hu.AdaptiveGradScaler(twin)
    assert_same(scrambled(seed, again, lambda: again.scale(mean_square(twin(x))).backward(), twin), wanted)


@dataclasses.dataclass
class Found:
    value: torch.Tensor


def test_data_classes_carry_gradients(seed):
    class Giving(nn.Linear):
        def forward(self, x):
            return Found(super().forward(x.value))

    model, x = nn.Sequential(Giving(WIDTH, WIDTH), Giving(WIDTH, WIDTH)), batch()
    found, wanted = trial(model, lambda: mean_square(model(Found(x)).value), seed)
    assert_same(found, wanted)


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
def test_models_are_exported_and_traced_as_they_are(seed):
    model, x = mlp(), batch()
    wanted = model(x)
    hu.AdaptiveGradScaler(model)
    assert same_bits(torch.export.export(model, (x,)).module()(x), wanted)
    traced = torch.jit.trace(model, (x,))
    assert same_bits(traced(x), wanted)
    assert "CloneBackward" not in str(traced(x).grad_fn)


@deprecated
def test_forward_derivatives_are_plain(seed):
    model, x, direction = mlp(), batch(), batch()
    wanted = jvp(model, (x,), (direction,))
    hu.AdaptiveGradScaler(model)
    for found, expected in zip(jvp(model, (x,), (direction,)), wanted):
        assert same_bits(found, expected)


def test_an_ensemble_by_vmap_has_one_scale_and_is_told(seed):
    base, x = mlp(), batch()
    parameters, _ = stack_module_state([mlp() for _ in range(3)])

    def run():
        return mean_square(vmap(lambda own: functional_call(base, own, (x,)))(parameters))

    wanted = torch.autograd.grad(run(), list(parameters.values()))
    scaler = hu.AdaptiveGradScaler(base)
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
