"""Gradients of gradients: equal to GradScaler's, or refused."""

import pytest
import torch
from torch import nn

import halfulp as hu

from ..exponents import WIDTH, assert_same, batch, clear, gradients, mean_square, mlp, plainly, scramble, scrambled


def penalised(model, x, scaler):
    """Torch's own recipe: the norm of the input's gradient, unscaled by hand."""
    loss = mean_square(model(x))
    gradient = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)[0] / scaler.get_scale()
    scaler.scale(loss + (gradient.norm() - 1).square()).backward()


def test_a_gradient_penalty_is_grad_scalers_and_said_once(seed):
    model, x = mlp(), batch().requires_grad_()
    penalised(model, x, torch.amp.GradScaler("cpu", init_scale=2.0**12))
    wanted = gradients(model)
    clear(model)
    scaler = hu.AdaptiveGradScaler(model, init_scale=2.0**12)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(mean_square(model(x))).backward()
    scramble(scaler)
    scaler._controller.sites.global_site.exponent = 12
    scaler._controller.backward.end_iteration()
    clear(model)
    with pytest.warns(UserWarning, match="create_graph=True") as said:
        penalised(model, x, scaler)
    assert len(said) == 1
    assert_same(gradients(model), wanted)
    scaler.step(opt)
    scaler.update()
    clear(model)
    penalised(model, x, scaler)  # a second warning would be an error


class Forces(nn.Module):
    """An energy and its gradient by the positions."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x):
        x = x.clone().requires_grad_()
        energy = self.net(x).sum()
        return energy, torch.autograd.grad(energy, x, create_graph=True)[0]


def unscaled_penalty(model, x):
    x = x.clone().requires_grad_()
    loss = mean_square(model(x))
    return loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()


def forces(model, x):
    energy, force = model(x)
    return energy + mean_square(force)


@pytest.mark.filterwarnings("ignore:gradients are taken with create_graph:UserWarning")
@pytest.mark.parametrize(
    ("make", "loss", "mode"),
    [
        pytest.param(mlp, unscaled_penalty, "function", id="penalty-function"),
        pytest.param(mlp, unscaled_penalty, "module", id="penalty-module"),
        pytest.param(Forces, forces, "function", id="forces-function"),
        pytest.param(Forces, forces, "module", id="forces-module"),
    ],
)
@pytest.mark.filterwarnings("ignore:a gradient of the scaled loss")
def test_gradients_of_gradients_are_exact_or_refused(make, loss, mode, seed):
    model, x = make(), batch()
    wanted = plainly(seed, lambda: loss(model, x), model)
    scaler = hu.AdaptiveGradScaler(model, mode=mode)
    try:
        found = scrambled(seed, scaler, lambda: scaler.scale(loss(model, x)).backward(), model)
    except (ValueError, NotImplementedError):
        return
    for key, gradient in wanted.items():
        assert (found[key] - gradient).norm() <= 1e-4 * gradient.norm(), key
