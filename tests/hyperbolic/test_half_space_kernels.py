"""The fused kernels against the same formulas as torch operations, and against plain autograd."""

import pytest
import torch

from halfulp.hyperbolic import HalfSpace
from halfulp.hyperbolic import _half_space_kernels as kernels
from halfulp.kernels import engine
from halfulp.mctensor import MCTensor


def table(dtype: torch.dtype, components: int, width: int = 2) -> torch.Tensor:
    x = torch.randn(50, width, dtype=torch.float64)
    x[:, -1] = (3 * x[:, -1]).exp()
    x = x.to(dtype)
    return x if components == 1 else MCTensor.encode(x, components, scale="none")


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.decode() if isinstance(x, MCTensor) else x.double()


FORMATS = [(torch.float32, 1, 2e-6), (torch.float32, 2, 1e-13), (torch.float64, 1, 1e-14), (torch.float64, 2, 1e-14)]


@pytest.mark.parametrize("choice", ["auto", "reference"])
@pytest.mark.parametrize(("dtype", "components", "bound"), FORMATS)
def test_geodesics(dtype, components, bound, choice, seed):
    p = table(dtype, components)
    v = torch.randn(50, 2).to(dtype) * whole(p)[:, 1:].to(dtype)
    wanted = HalfSpace().exp(whole(p), v.double().clone().requires_grad_()).detach()
    with engine(choice):
        found = HalfSpace().exp(p, v)
    assert type(found) is type(p)
    assert found.dtype == dtype
    scale = wanted.abs() + whole(p).abs() + whole(p)[:, 1:]
    assert float(((whole(found) - wanted).abs() / scale).max()) < bound


@pytest.mark.parametrize("choice", ["auto", "reference"])
@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize(("dtype", "components", "bound"), FORMATS)
def test_pairs(dtype, components, bound, width, choice, seed):
    u, v = table(dtype, components, width), table(dtype, components, width)
    a, b = whole(u).clone().requires_grad_(), whole(v).clone().requires_grad_()
    wanted = HalfSpace().distance(a, b)
    wanted.sum().backward()
    parts = [[c[:, k].contiguous() for k in range(width) for c in getattr(x, "components", (x,))] for x in (u, v)]
    made = torch.empty(1 + 2 * width, 50, dtype=torch.float64)
    with engine(choice):
        kernels.pairs(width, components, dtype)(parts[0] + parts[1], made.unbind())
    assert torch.allclose(made[0], wanted.detach(), rtol=1e-13)
    assert torch.allclose(made[1 : 1 + width].t(), a.grad, rtol=1e-11, atol=1e-13 * float(a.grad.abs().max()))
    assert torch.allclose(made[1 + width :].t(), b.grad, rtol=1e-11, atol=1e-13 * float(b.grad.abs().max()))


def test_engines_agree_to_the_bit(seed):
    p, v = table(torch.float64, 2), torch.randn(50, 2, dtype=torch.float64)
    found = HalfSpace().exp(p, v)
    with engine("reference"):
        again = HalfSpace().exp(p, v)
    assert all(torch.equal(a, b) for a, b in zip(found.components, again.components))


def test_strided_and_wide_points_take_a_way_too(seed):
    p = table(torch.float64, 1, 40)
    v = torch.randn_like(p) * p[:, -1:] / 40
    found = HalfSpace().exp(p, v)
    assert torch.allclose(HalfSpace().distance(p, found), HalfSpace().norm(p, v).squeeze(-1))
    p = table(torch.float64, 1)
    wide = torch.cat([p, p], 1)[:, ::2].flip(1)[:, [1, 0]]
    v = torch.randn(2, 50, dtype=torch.float64).t()
    assert torch.equal(HalfSpace().exp(p, v), HalfSpace().exp(p.contiguous(), v.contiguous()))
    assert wide.shape == p.shape
