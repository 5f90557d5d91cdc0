"""torch.linalg on MCTensors: all digits of the components, and float64's gradients."""

import pytest
import torch

from halfulp.mctensor import MCTensor
from halfulp.subclass import strict

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
        assert _largest(torch.linalg.det(a) * torch.linalg.det(torch.linalg.inv(a)) - 1) <= 256 * bound
        sign, size = torch.linalg.slogdet(a)
        assert _largest(sign * size.exp() / torch.linalg.det(a) - 1) <= 256 * bound
        lower = torch.linalg.solve_triangular(a, b, upper=False)
        assert _largest(a.tril() @ lower - b) <= 64 * bound
        upper = torch.linalg.solve_triangular(a, b, upper=True, unitriangular=True)
        assert _largest(a.triu(1) @ upper + upper - b) <= 64 * bound


OF_STACKS = {
    "solve": lambda a, b: torch.linalg.solve(a, b),
    "solve from the right": lambda a, b: torch.linalg.solve(a, b.mT, left=False),
    "inv": lambda a, b: torch.linalg.inv(a),
    "det": lambda a, b: torch.linalg.det(a),
    "slogdet": lambda a, b: torch.stack(torch.linalg.slogdet(a), -1),
    "cholesky": lambda a, b: torch.linalg.cholesky(a @ a.mT),
    "cholesky, upper": lambda a, b: torch.linalg.cholesky(a @ a.mT, upper=True),
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, a.tril()),
    "cholesky_solve, upper": lambda a, b: torch.cholesky_solve(b, a.triu(), upper=True),
    "qr": lambda a, b: torch.cat(torch.linalg.qr(a), -1),
    **{
        f"solve_triangular, {upper}, {left}, {ones}": lambda a, b, upper=upper, left=left, ones=ones: (
            torch.linalg.solve_triangular(a, b if left else b.mT, upper=upper, left=left, unitriangular=ones)
        )
        for upper in (False, True)
        for left in (False, True)
        for ones in (False, True)
    },
}


@pytest.mark.parametrize("name", OF_STACKS)
def test_a_stack_has_the_results_of_its_matrices(name, seed):
    a = torch.stack([_matrix(torch.float64, 3) for _ in range(4)]).unflatten(0, (2, 2))
    b = MCTensor.encode(torch.randn(2, 2, 3, 2, dtype=torch.float64), 2)
    function = OF_STACKS[name]
    with strict():
        found = function(a, b)
        for i, j in ((0, 0), (0, 1), (1, 1)):
            assert torch.equal(found[i, j], function(a[i, j], b[i, j]))
    wanted = function(a.decode(), b.decode())
    assert torch.allclose(found.decode(), wanted, rtol=1e-9, atol=1e-9)


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


def test_functions_with_information_raise_too():
    a = MCTensor.encode([[[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [2.0, 4.0]]], 2, torch.float64)
    one = MCTensor.encode(torch.ones(2, 2, 1, dtype=torch.float64), 2)
    for call in (torch.linalg.inv_ex, lambda a: torch.linalg.solve_ex(a, one), lambda a: torch.linalg.cholesky_ex(-a)):
        with pytest.raises(torch.linalg.LinAlgError):
            call(a)
    found, information = torch.linalg.inv_ex(a[:1])
    assert torch.equal(found, torch.linalg.inv(a[:1]))
    assert information.tolist() == [0]


@pytest.mark.filterwarnings("ignore::halfulp.subclass.FallbackWarning")
@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (0, 0)])
@pytest.mark.parametrize("name", ["inv", "det", "cholesky", "qr", "matrix_power", "solve", "lstsq"])
def test_empty_stacks(name, shape):
    x = torch.zeros(shape, dtype=torch.float64)
    more = {"matrix_power": (-2,)}.get(name)
    wanted = getattr(torch.linalg, name)(x, *(more or ((x,) if name in ("solve", "lstsq") else ())))
    mine = MCTensor.encode(x, 2)
    found = getattr(torch.linalg, name)(mine, *(more or ((mine,) if name in ("solve", "lstsq") else ())))
    for ours, theirs in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted)):
        assert ours.shape == theirs.shape


def test_counting_along_a_dimension():
    x = MCTensor.encode([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]], 2, torch.float64)
    assert torch.count_nonzero(x, dim=1).tolist() == [2, 1]
    assert torch.count_nonzero(x, dim=(0, 1)) == torch.count_nonzero(x) == 3


@pytest.mark.filterwarnings("ignore::halfulp.subclass.FallbackWarning")
@pytest.mark.parametrize(("components", "dtype"), [(2, torch.bfloat16), (2, torch.float64), (3, torch.float32)])
def test_attention_of_a_row_that_is_masked_whole(components, dtype, seed):
    """0, and no NaN in the gradient, as torch in float64."""
    x = MCTensor.encode(torch.randn(1, 1, 3, 4, dtype=torch.float64), components, dtype).requires_grad_()
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    out = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    out.square().sum().backward()
    plain = x.detach().decode().requires_grad_()
    wanted = torch.nn.functional.scaled_dot_product_attention(plain, plain, plain, attn_mask=mask)
    wanted.square().sum().backward()
    assert not out[0, 0, 1].detach().decode().any()
    assert torch.allclose(out.detach().decode(), wanted.detach(), atol=1e-3)
    # Three gradients, of queries, keys and values, each rounded to the dtype, and so are their sums.
    assert torch.allclose(x.grad.double(), plain.grad, rtol=2.0**-6, atol=0.05)
