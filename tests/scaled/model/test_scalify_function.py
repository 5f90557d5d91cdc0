"""Functions and training steps on scaled tensors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfulp as hu
from halfulp.scaled import ScaledTensor


def test_plain_in_plain_out_with_gradients(seed):
    def function(x, *, other, n):
        return {"y": (x @ other["w"]).relu() * n, "n": n}

    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 3)
    out = hu.scalify(function, torch.float32)(x, other={"w": w}, n=2)
    assert type(out["y"]) is torch.Tensor
    assert out["n"] == 2
    wanted = function(x.detach(), other={"w": w}, n=2)["y"]
    assert torch.equal(out["y"], wanted)
    out["y"].sum().backward()
    assert type(x.grad) is torch.Tensor
    twin = x.detach().requires_grad_()
    function(twin, other={"w": w}, n=2)["y"].sum().backward()
    assert torch.equal(x.grad, twin.grad)


def test_scaled_in_scaled_out(seed):
    x = ScaledTensor.encode(torch.randn(3))
    assert isinstance(hu.scalify(torch.relu)(x), ScaledTensor)
    ids = torch.tensor([1, 2])
    assert hu.scalify(lambda x: x)(ids) is ids


def test_a_training_step(seed):
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    x, y = torch.randn(64, 8), torch.randint(3, (64,))

    def step_of(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    ours = hu.scalify(step_of(hu.scalify(copy.deepcopy(plain))))
    theirs = step_of(plain)
    for _ in range(10):
        loss, wanted = ours(x, y), theirs(x, y)
        assert type(loss) is torch.Tensor
    assert loss == pytest.approx(wanted.item(), rel=5e-3)


def test_bad_input():
    with pytest.raises(ValueError, match="a payload is one of"):
        hu.scalify(torch.relu, torch.int8)
    with pytest.raises(TypeError, match="a module or a function"):
        hu.scaled.scalify_function(None)
