"""torch.linalg on MCTensors: all digits of the components, and float64's gradients."""

import pytest
import torch

from halfulp.tensors import MCTensor, strict

FORMATS = {torch.float64: 2.0**-94, torch.float32: 2.0**-38, torch.float16: 2.0**-12}


def _matrix(dtype, size=5):
    values = torch.randn(size, size, dtype=torch.float64) + 4 * torch.eye(size, dtype=torch.float64)
    return MCTensor.encode(values, 2, dtype) / 3


def _largest(x):
    return x.abs().max().item()


@pytest.mark.parametrize("dtype", FORMATS)
def test_products_give_the_matrix_back(dtype, seed):
    a, bound = _matrix(dtype), FORMATS[dtype]
    b = MCTensor.encode(torch.randn(5, 3, dtype=torch.float64), 2, dtype)
    one = torch.eye(5, dtype=dtype)
    with strict():
        assert _largest(a @ torch.linalg.solve(a, b) - b) <= 64 * bound
        assert _largest(a @ torch.linalg.solve(a, b[:, 0]) - b[:, 0]) <= 64 * bound
        assert _largest(torch.linalg.inv(a) @ a - one) <= 64 * bound
        root = torch.linalg.cholesky(a @ a.mT)
        assert _largest(root @ root.mT - a @ a.mT) <= 256 * bound
        q, r = torch.linalg.qr(a[:, :3])
        assert _largest(q @ r - a[:, :3]) <= 64 * bound
        assert _largest(q.mT @ q - one[:3, :3]) <= 64 * bound
        x = torch.linalg.lstsq(a[:, :3], b).solution
        assert _largest(a[:, :3].mT @ (a[:, :3] @ x - b)) <= 256 * bound
        assert _largest(torch.linalg.det(a) * torch.linalg.det(torch.linalg.inv(a)) - 1) <= 256 * bound
        sign, size = torch.linalg.slogdet(a)
        assert _largest(sign * size.exp() / torch.linalg.det(a) - 1) <= 256 * bound
        lower = torch.linalg.solve_triangular(a, b, upper=False)
        assert _largest(a.tril() @ lower - b) <= 64 * bound


@pytest.mark.parametrize("gradients", ["first", "components"])
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: torch.linalg.solve(a, b),
        lambda a, b: torch.linalg.solve(a.mT, b),
        lambda a, b: torch.linalg.solve(a, b.mT, left=False),
        lambda a, b: torch.linalg.det(a.mT) + torch.linalg.det(a * 2),
        lambda a, b: torch.linalg.inv(a),
        lambda a, b: torch.linalg.det(a),
        lambda a, b: torch.linalg.slogdet(a)[1],
        lambda a, b: torch.linalg.cholesky(a @ a.mT),
        lambda a, b: torch.linalg.qr(a)[1],
    ],
)
def test_gradients(function, gradients, seed):
    found = MCTensor.encode(_matrix(torch.float64), 2, torch.float64, gradients=gradients).requires_grad_()
    b = torch.randn(5, 2, dtype=torch.float64)
    with strict():
        (function(found, b) ** 2).sum().backward()
    wanted = found.detach().decode().requires_grad_()
    (function(wanted, b) ** 2).sum().backward()
    gradient = found.grad.decode() if isinstance(found.grad, MCTensor) else found.grad
    assert (gradient - wanted.grad).abs().max() <= 2.0**-36 * wanted.grad.abs().max()


def test_a_singular_matrix_raises():
    a = MCTensor.encode([[1.0, 2.0], [2.0, 4.0]], 2, torch.float64)
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(a)
