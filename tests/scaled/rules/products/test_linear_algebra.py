"""Factorisations and solvers have the plain operator's bits whatever the representation."""

import pytest
import torch

from halfulp.scaled import ScaledTensor
from halfulp.testing import check_rule

A = torch.linalg


def matrix():
    return (torch.randn(4, 4) + 4 * torch.eye(4),)


def system():
    return *matrix(), torch.randn(4, 2)


def symmetric(x):
    return x @ x.mT + torch.eye(4)


OF_A_MATRIX = {
    "inv": A.inv,
    "det": A.det,
    "slogdet": lambda x: A.slogdet(x)[1],
    "cholesky": lambda x: A.cholesky(symmetric(x)),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(A.cholesky(symmetric(x))),
    "qr": A.qr,
    "svd": lambda x: A.svd(x)[1],
    "svdvals": A.svdvals,
    "eigh": lambda x: A.eigh(symmetric(x))[0],
    "eigvalsh": lambda x: A.eigvalsh(symmetric(x)),
    "lu": lambda x: A.lu(x)[1:],
    "lu_factor": lambda x: A.lu_factor(x)[0],
    "matrix_exp": lambda x: torch.matrix_exp(x * 0.25),
    "matrix_power": lambda x: A.matrix_power(x, 3),
    "pinv": A.pinv,
    "cond": A.cond,
    "ldl": lambda x: A.ldl_factor(symmetric(x).detach())[0],
    "matrix_norm": lambda x: A.matrix_norm(x, "nuc"),
}
OF_A_SYSTEM = {
    "solve": A.solve,
    "triangular": lambda a, b: A.solve_triangular(a, b, upper=True),
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, A.cholesky(symmetric(a))),
    "lu_solve": lambda a, b: A.lu_solve(*A.lu_factor(a), b),
}


@pytest.mark.parametrize("name", OF_A_MATRIX)
def test_of_a_matrix(seed, name):
    check_rule(OF_A_MATRIX[name], matrix, seed=seed, trials=2, exact=1e-4)


@pytest.mark.parametrize("name", OF_A_SYSTEM)
def test_of_a_system(seed, name):
    check_rule(OF_A_SYSTEM[name], system, seed=seed, trials=2, exact=1e-4)


def test_least_squares(seed):
    """Close only: torch's own bits change with where operands lie in memory."""
    a, b = system()
    found = A.lstsq(ScaledTensor(a / 8, 8.0), ScaledTensor(b * 4, 0.25)).solution
    torch.testing.assert_close(found.decode(), A.lstsq(a, b).solution, rtol=1e-4, atol=1e-4)


def test_eigenvalues_of_any_matrix_are_plain_complex_numbers():
    x = ScaledTensor.encode(*matrix())
    values, vectors = A.eig(x)
    assert type(values) is type(vectors) is torch.Tensor
    assert values.is_complex()
    torch.testing.assert_close(values, A.eig(x.decode())[0])


def test_tall_matrices_and_reflectors(seed):
    def tall():
        return (torch.randn(6, 3),)

    check_rule(A.qr, tall, seed=seed, trials=2, exact=1e-4)
    check_rule(A.pinv, tall, seed=seed, trials=2, exact=1e-4)
    check_rule(lambda x: A.householder_product(*torch.geqrf(x)), tall, seed=seed, trials=2, gradients=False)
    check_rule(A.householder_product, lambda: (*tall(), torch.rand(3)), seed=seed, trials=2, exact=1e-4)


def test_float16_payloads(seed):
    a, b = (ScaledTensor.encode(x) for x in system())
    torch.testing.assert_close(A.solve(a, b).decode(), A.solve(a.decode(), b.decode()), rtol=1e-2, atol=1e-2)
    assert A.inv(a).payload.dtype == torch.float16
    assert not A.inv_ex(a).info.any()


@pytest.mark.parametrize("function", [A.det, lambda x: A.slogdet(x)[1], lambda x: A.solve(x, x[:, :2]).sum()])
@pytest.mark.parametrize("part", [lambda x: x[:, :4], lambda x: x[:, :4].mT, lambda x: x[::2, 1:4]])
def test_gradients_of_matrices_that_are_parts_of_others(function, part, seed):
    x = (
        (torch.randn(5, 7)[:4] + 2 * torch.eye(5, 7)[:4])
        if part(torch.empty(4, 7)).shape[0] == 4
        else torch.randn(6, 7)
    )
    plain, scaled = x.clone().requires_grad_(), ScaledTensor.encode(x, torch.float32).detach().requires_grad_()
    for tensor in (plain, scaled):
        function(part(tensor)).backward()
    assert (scaled.grad.decode() - plain.grad).norm() <= 1e-3 * plain.grad.norm()
