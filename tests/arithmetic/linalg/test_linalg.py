"""Linear algebra of expansions against mpmath: all digits, hard conditions, scales, matrices that have no answer."""

import inspect
import itertools
from fractions import Fraction

import mpmath
import pytest
import torch

from halfulp.arithmetic import _linalg as linalg
from halfulp.arithmetic import renormalize

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
PRECISION = {BF16: 8, F32: 24, F64: 53}
KINDS = [(1, F64), (2, F64), (3, F64), (4, F64), (2, F32), (3, F32), (2, BF16)]


@pytest.fixture(autouse=True)
def _many_digits():
    with mpmath.workprec(1200):
        yield


def _expansion(x: torch.Tensor, components: int, dtype: torch.dtype):
    parts = [x.to(dtype)]
    for _ in range(components - 1):
        parts.append((parts[-1].double() * 2.0 ** -PRECISION[dtype] * (torch.rand_like(x) - 0.5)).to(dtype))
    return renormalize(tuple(parts), components, dtype)


def _matrix(parts) -> mpmath.matrix:
    values = [part.double().tolist() for part in parts]
    rows, columns = parts[0].shape
    return mpmath.matrix([[sum(mpmath.mpf(v[i][j]) for v in values) for j in range(columns)] for i in range(rows)])


def _off(found: mpmath.matrix, wanted: mpmath.matrix) -> float:
    """log2 of the largest error beside the largest entry."""
    error = max(abs(x) for x in found - wanted)
    return float(mpmath.log(error / max(abs(x) for x in wanted) + mpmath.mpf(2) ** -900, 2))


def _conditioned(size: int, digits: float) -> torch.Tensor:
    u, v = (torch.linalg.qr(torch.randn(size, size, dtype=F64)).Q for _ in range(2))
    return u @ torch.diag(10.0 ** -torch.linspace(0, digits, size, dtype=F64)) @ v


def _symmetric(a):
    full = _matrix(a).T * _matrix(a)
    rows = [[full[i, j] for j in range(full.cols)] for i in range(full.rows)]
    parts = []
    for _ in range(len(a)):
        part = torch.tensor([[float(x) for x in row] for row in rows], dtype=F64).to(a[0].dtype)
        parts.append(part)
        rows = [[x - mpmath.mpf(float(p)) for x, p in zip(r, q, strict=True)] for r, q in zip(rows, part, strict=True)]
    return tuple(parts)


@pytest.mark.parametrize(("components", "dtype"), KINDS)
def test_systems_have_all_their_digits(seed, components, dtype):
    wanted = -(components * PRECISION[dtype] - 4)
    a = _expansion(torch.randn(7, 7, dtype=F64), components, dtype)
    b = _expansion(torch.randn(7, 2, dtype=F64), components, dtype)
    exact = _matrix(a)
    assert _off(_matrix(linalg.solve(a, b, components, dtype)), mpmath.inverse(exact) * _matrix(b)) <= wanted
    assert _off(_matrix(linalg.inverse(a, components, dtype)), mpmath.inverse(exact)) <= wanted
    found = sum(mpmath.mpf(float(part)) for part in linalg.det(a, components, dtype))
    assert _off(mpmath.matrix([found]), mpmath.matrix([mpmath.det(exact)])) <= wanted


@pytest.mark.parametrize(("components", "dtype"), KINDS)
def test_factors_have_all_their_digits(seed, components, dtype):
    wanted = -(components * PRECISION[dtype] - 5)
    a = _expansion(torch.randn(9, 6, dtype=F64), components, dtype)
    exact = _matrix(a)
    q, r = linalg.qr(a, components, dtype)
    assert _off(_matrix(q) * _matrix(r), exact) <= wanted
    assert _off(_matrix(q).T * _matrix(q), mpmath.eye(6)) <= wanted
    assert not any(part.tril(-1).any() for part in r)
    whole = sum(part.double() for part in a)
    assert torch.equal(r[0].diagonal().sign(), torch.linalg.qr(whole).R.diagonal().sign().to(dtype))
    square = _symmetric(a)
    lower = linalg.cholesky(square, components, dtype)
    assert _off(_matrix(lower), mpmath.cholesky(_matrix(square))) <= wanted
    assert not any(part.triu(1).any() for part in lower)


@pytest.mark.parametrize("digits", [8, 12, 14])
def test_hard_conditions_lose_nothing(seed, digits):
    a, b = (_conditioned(8, digits),), (torch.randn(8, 2, dtype=F64),)
    exact = _matrix(a)
    solution = mpmath.inverse(exact) * _matrix(b)
    assert _off(_matrix(linalg.solve(a, b, 2, F64)), solution) <= -102
    q, r = linalg.qr(a, 2, F64)
    assert _off(_matrix(q) * _matrix(r), exact) <= -101
    assert _off(_matrix(q).T * _matrix(q), mpmath.eye(8)) <= -101
    found = sum(mpmath.mpf(float(part)) for part in linalg.det(a, 2, F64))
    assert _off(mpmath.matrix([found]), mpmath.matrix([mpmath.det(exact)])) <= -100


@pytest.mark.parametrize("digits", [15.5, 17, 19, 22, 30])
def test_what_float64_cannot_tell_from_singular_is_refused_or_right(seed, digits):
    """Of matrices whose low components alone make them regular, float64 may not know the sign of the determinant."""
    for _ in range(8):
        head = torch.randn(5, 4, dtype=F64) @ torch.randn(4, 5, dtype=F64)
        a = renormalize((head, torch.randn(5, 5, dtype=F64) * 10.0**-digits), 3, F64)
        exact = mpmath.det(_matrix(a))
        try:
            found = linalg.det(a, 2, F64)
        except torch.linalg.LinAlgError:
            continue
        assert _off(mpmath.matrix([sum(mpmath.mpf(float(part)) for part in found)]), mpmath.matrix([exact])) <= -90


def test_rows_and_columns_of_all_sizes(seed):
    scale = torch.exp2(torch.arange(-300, 301, 100, dtype=F64))
    a = (scale[:, None] * torch.randn(7, 7, dtype=F64) * scale.flip(0),)
    b = (torch.randn(7, 1, dtype=F64),)
    with mpmath.workprec(4000):
        wanted = mpmath.lu_solve(_matrix(a), _matrix(b))
        found = _matrix(linalg.solve(a, b, 2, F64))
        assert all(abs(x - y) <= abs(y) * mpmath.mpf(2) ** -80 for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("scale", [1e300, 1e-300])
def test_near_the_ends_of_the_range(seed, scale):
    a = torch.randn(4, 4, dtype=F64) + 4 * torch.eye(4, dtype=F64)
    x = linalg.solve((a * scale,), (a[:, :1] * scale,), 2, F64)
    assert torch.allclose(x[0], torch.eye(4, dtype=F64)[:, :1], atol=1e-15)
    assert float(linalg.det((torch.eye(2, dtype=F64) * scale,), 2, F64)[0]) == (torch.inf if scale > 1 else 0)
    assert torch.allclose(
        linalg.cholesky((a @ a.T * scale,), 2, F64)[0] ** 2 / scale, torch.linalg.cholesky(a @ a.T) ** 2
    )
    q, r = linalg.qr((a * scale,), 2, F64)
    assert torch.allclose(q[0] @ (r[0] / scale), a)


def test_many_factors_of_a_determinant_do_not_overflow_on_the_way():
    values = torch.cat([torch.full((40,), 1e20, dtype=F64), torch.full((40,), 1e-20, dtype=F64)])
    head, tail = linalg.det((torch.diag(values),), 2, F64)
    wanted = mpmath.mpf(1e20) ** 40 * mpmath.mpf(1e-20) ** 40
    assert abs(mpmath.mpf(float(head)) + mpmath.mpf(float(tail)) - wanted) <= mpmath.mpf(2) ** -100


def test_stacks(seed):
    a, b = torch.randn(2, 1, 5, 5, dtype=F64), torch.randn(3, 5, 2, dtype=F64)
    x = linalg.solve((a,), (b,), 2, F64)
    assert x[0].shape == (2, 3, 5, 2)
    one = linalg.solve((a[1, 0],), (b[2],), 2, F64)
    assert torch.allclose(x[0][1, 2], one[0], rtol=1e-13)
    assert linalg.det((a,), 2, F64)[0].shape == (2, 1)
    q, r = linalg.qr((a[..., :3, :],), 2, F64)
    assert q[0].shape == (2, 1, 3, 3)
    assert r[0].shape == (2, 1, 3, 5)
    assert torch.allclose(q[0] @ r[0], a[..., :3, :])
    assert torch.allclose(linalg.inverse((a,), 2, F64)[0] @ a, torch.eye(5, dtype=F64), atol=1e-9)


STACKED = {
    "solve": lambda a, b: (linalg.solve(a, b, 2, F64),),
    "inverse": lambda a, b: (linalg.inverse(a, 2, F64),),
    "cholesky": lambda a, b: (linalg.cholesky(tuple(x + x.mT + 6 * torch.eye(5) for x in a), 2, F64),),
    "qr": lambda a, b: linalg.qr(a, 2, F64),
    "det": lambda a, b: (tuple(x[..., None] for x in linalg.det(a, 2, F64)),),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stack", [(2,), (1, 2), (2, 1)])
@pytest.mark.parametrize("name", STACKED)
def test_a_stack_has_the_results_of_its_matrices(name, stack, seed):
    rows = 5
    a = torch.randn(*stack, rows, rows, dtype=F64) / rows**0.5 + 2 * torch.eye(rows, dtype=F64)
    b = torch.randn(*stack, rows, 2, dtype=F64)
    found = STACKED[name]((a,), (b,))
    for place in itertools.product(*map(range, stack)):
        for many, one in zip(found, STACKED[name]((a[place],), (b[place],)), strict=True):
            assert torch.allclose(many[0][place], one[0], rtol=1e-14, atol=1e-15)
            assert torch.allclose(many[0][place] - one[0] + many[1][place], one[1], rtol=0, atol=1e-30)


def test_every_public_function_is_held_to_stacks():
    public = {name for name, x in vars(linalg).items() if inspect.isfunction(x) and x.__module__ == linalg.__name__}
    assert {name for name in public if not name.startswith("_")} == STACKED.keys()


def test_empty_and_one_by_one():
    one = torch.full((1, 1), 3.0)
    assert float(linalg.inverse((one,), 2, F32)[0]) == float(torch.tensor(1 / 3))
    assert linalg.solve((torch.ones(0, 0),), (torch.ones(0, 2),), 2, F32)[0].shape == (0, 2)
    assert [float(part) for part in linalg.det((torch.ones(0, 0),), 2, F32)] == [1.0, 0.0]
    assert linalg.qr((torch.ones(3, 0),), 2, F32)[0][0].shape == (3, 0)


def test_a_singular_matrix_has_no_answer(seed):
    for _ in range(12):
        a = torch.randint(-3, 4, (6, 5)).double()
        a = torch.cat([a, a[:, :1] + a[:, 1:2]], 1)
        within = (a.sum(1, keepdim=True),)
        calls = [
            lambda a=a, b=within: linalg.solve((a,), b, 2, F64),
            lambda a=a: linalg.inverse((a,), 2, F64),
            lambda a=a: linalg.qr((a,), 2, F64),
            lambda a=a: linalg.cholesky((a @ a.T,), 2, F64),
            lambda a=a: linalg.det((a,), 2, F64),
        ]
        for call in calls:
            with pytest.raises(torch.linalg.LinAlgError, match="float64"):
                call()


def _hilbert(size: int, components: int):
    rows = [[Fraction(1, i + j + 1) for j in range(size)] for i in range(size)]
    parts = []
    for _ in range(components):
        parts.append(torch.tensor([[float(x) for x in row] for row in rows], dtype=F64))
        rows = [
            [x - Fraction(float(p)) for x, p in zip(r, q, strict=True)] for r, q in zip(rows, parts[-1], strict=True)
        ]
    return tuple(parts)


def test_a_matrix_beyond_float64s_condition_is_refused(seed):
    """The Hilbert matrix of 20 rows, of a condition of 1e28."""
    a, b = _hilbert(20, 3), (torch.randn(20, 2, dtype=F64),)
    for call in (
        lambda: linalg.solve(a, b, 2, F64),
        lambda: linalg.inverse(a, 2, F64),
        lambda: linalg.cholesky(a, 2, F64),
        lambda: linalg.qr(a, 2, F64),
        lambda: linalg.det(a, 2, F64),
    ):
        with pytest.raises(torch.linalg.LinAlgError, match="beyond about 1e15"):
            call()


def test_a_solution_beyond_float64_is_an_error():
    a = (torch.tensor([[1e-300, 0.0], [0.0, 1.0]], dtype=F64),)
    with pytest.raises(torch.linalg.LinAlgError, match="beyond float64's largest"):
        linalg.solve(a, (torch.tensor([[1e300], [-1e300]], dtype=F64),), 2, F64)


def test_inside_compile(seed):
    a = torch.randn(5, 5, dtype=F64)

    def both(x):
        return linalg.solve((x,), (x[:, :2],), 2, F64), linalg.qr((x,), 2, F64), linalg.det((x,), 2, F64)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for made, wanted in zip(torch.utils._pytree.tree_leaves(compiled(a)), torch.utils._pytree.tree_leaves(both(a))):
        assert torch.equal(made, wanted)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda a: linalg.solve((a,), (torch.ones(3),), 2, F64), ValueError, "unsqueeze"),
        (lambda a: linalg.solve((a,), (torch.ones(2, 1),), 2, F64), ValueError, "(2, 1)"),
        (lambda a: linalg.det((a[:, :2],), 2, F64), ValueError, "square"),
        (lambda a: linalg.inverse((a * torch.nan,), 2, F64), ValueError, "NaN"),
        (lambda a: linalg.solve((a,), (a / 0,), 2, F64), ValueError, "infinities"),
        (lambda a: linalg.inverse((a.long(),), 2, F64), TypeError, "int64"),
        (lambda a: linalg.inverse((a,), 0, F64), ValueError, "1 to 4"),
        (lambda a: linalg.cholesky((-a,), 2, F64), torch.linalg.LinAlgError, "positive definite"),
    ],
)
def test_bad_input(call, error, text):
    with pytest.raises(error) as caught:
        call(torch.eye(3, dtype=F64))
    assert text in str(caught.value)
