"""Products of matrices of expansions against exact rationals: bounds, ranges, special values, shapes."""

import itertools
import math
import threading
from fractions import Fraction

import pytest
import torch

from halfulp.arithmetic import _matmul, pointwise, renormalize, split
from halfulp.arithmetic._matmul import (
    _borrow_workspace,
    _cut_into_inner_blocks,
    _plan_workspace,
    find_largest_magnitude,
    matmul,
    split_into_float16_components,
)
from halfulp.kernels import engine, same_bits

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PRECISION = {F16: 11, BF16: 8, F32: 24, F64: 53}


def _expansion(x: torch.Tensor, components: int, dtype: torch.dtype):
    """Values near x whose components are all full."""
    parts = [x.to(dtype)]
    for _ in range(components - 1):
        parts.append((parts[-1].double() * 2.0 ** -PRECISION[dtype] * (torch.rand_like(x) - 0.5)).to(dtype))
    return renormalize(tuple(parts), components, dtype)


def _exact(parts, *index) -> list[Fraction]:
    """A row or column as rationals."""
    columns = [part[index].double().tolist() for part in parts]
    return [sum(map(Fraction, values)) for values in zip(*columns, strict=True)]


def _errors(a, b, c, entries=25):
    """log2 of the largest |c - a b| / |a||b| over some entries."""
    worst = -math.inf
    m, n = c[0].shape
    for _ in range(entries):
        i, j = int(torch.randint(m, ())), int(torch.randint(n, ()))
        products = [x * y for x, y in zip(_exact(a, i), _exact(b, slice(None), j), strict=True)]
        off = abs(sum(Fraction(float(part[i, j])) for part in c) - sum(products))
        size = sum(map(abs, products))
        if off:
            worst = max(worst, _log2(off) - _log2(size))
    return worst


def _log2(x: Fraction) -> float:
    shift = x.numerator.bit_length() - x.denominator.bit_length()
    return shift + math.log2(x / Fraction(2) ** shift)


@pytest.mark.parametrize(
    ("dtype", "left", "right", "components", "bits"),
    [
        (F64, 2, 2, 2, 104),
        (F64, 2, 1, 2, 104),
        (F64, 1, 2, 2, 104),
        (F64, 3, 3, 3, 153),
        (F64, 4, 4, 4, 206),
        (F64, 2, 2, 1, 52),
        (F32, 2, 2, 2, 48.5),
        (F32, 2, 1, 2, 48.5),
        (F32, 3, 3, 3, 66),
        (F32, 4, 2, 4, 90),
        (BF16, 2, 2, 2, 15.5),
        (BF16, 3, 1, 3, 20),
        (BF16, 4, 4, 4, 31),
        (F16, 2, 2, 2, 20),
        (F16, 3, 3, 3, 29),
        (F16, 4, 4, 4, 29),
    ],
)
def test_the_error_keeps_its_bound(seed, dtype, left, right, components, bits):
    a = _expansion(torch.randn(18, 70, dtype=F64), left, dtype)
    b = _expansion(torch.randn(70, 17, dtype=F64), right, dtype)
    c = matmul(a, b, components, dtype)
    assert _errors(a, b, c) <= -bits
    assert _errors(a, b, matmul(a, b, components, dtype)) <= -bits
    assert all(part.dtype == dtype and part.shape == (18, 17) for part in c)
    for part, behind in itertools.pairwise(c):
        half_ulp = torch.exp2(torch.frexp(part.double()).exponent.double() - PRECISION[dtype] - 1.0)
        assert (behind.double().abs() <= half_ulp).all(), "not canonical"


@pytest.mark.parametrize(("dtype", "left", "right"), [(BF16, 4, 4), (BF16, 3, 4), (F16, 4, 4), (F32, 4, 3)])
@pytest.mark.parametrize("size", [6, 40])
def test_narrow_operands_of_wide_results(seed, dtype, left, right, size):
    """The first component of a few bits leaves more to the second one than a slice holds."""
    a = _expansion(torch.randn(size, size, dtype=F64), left, dtype)
    b = _expansion(torch.randn(size, size, dtype=F64), right, dtype)
    assert _errors(a, b, matmul(a, b, 2, F64)) <= -104


@pytest.mark.parametrize("inner", [1, 2, 511, 513, 1700])
def test_any_inner_length(seed, inner):
    a = _expansion(torch.randn(9, inner, dtype=F64), 2, F64)
    b = _expansion(torch.rand(inner, 70, dtype=F64), 2, F64)
    c = matmul(a, b, 2, F64)
    assert _errors(a, b, c, 8) <= -104


@pytest.mark.parametrize("inner", [600, 1700, 2500])
def test_long_sums_of_two_float32_that_do_not_cancel(seed, inner):
    a, b = split(torch.rand(6, inner, dtype=F64), F32, 2), split(torch.rand(inner, 6, dtype=F64), F32, 2)
    c = matmul(a, b, 2, F32)
    assert _errors(a, b, c, 20) <= -48
    stacked = matmul(tuple(p.expand(2, -1, -1) for p in a), tuple(p.expand(2, -1, -1) for p in b), 2, F32)
    assert all(torch.equal(x[1], y) for x, y in zip(stacked, c, strict=True))


@pytest.mark.parametrize("dtype", [F32, F64])
def test_single_components_are_plain_tensors(seed, dtype):
    a, b = torch.randn(20, 21).to(dtype), torch.randn(21, 22).to(dtype)
    assert torch.equal(matmul((a,), (b,), 1, dtype)[0], a @ b)


@pytest.mark.parametrize("span", [10, 30, 60, 200, 900])
def test_exponents_that_span_more_than_slices_reach(seed, span):
    scale = lambda *shape: torch.exp2((torch.rand(*shape, dtype=F64) - 0.5) * span)  # noqa: E731
    a = _expansion(torch.randn(40, 41, dtype=F64) * scale(40, 41), 2, F64)
    b = _expansion(torch.randn(41, 39, dtype=F64) * scale(41, 39), 2, F64)
    c = matmul(a, b, 2, F64)
    assert _errors(a, b, c, 60) <= -104


def test_a_few_entries_out_of_reach(seed):
    """Large with large and tiny with tiny, except where the tiny ones of either meet."""
    a, b = torch.randn(64, 64, dtype=F64), torch.randn(64, 64, dtype=F64)
    a[:3, :32], b[32:, :2] = 2.0**-80, 2.0**-80
    b[:32, :2] = 0
    a, b = _expansion(a, 2, F64), _expansion(b, 2, F64)
    c = matmul(a, b, 2, F64)
    corner = [tuple(part[:3] for part in a), tuple(part[:, :2] for part in b), tuple(part[:3, :2] for part in c)]
    assert _errors(*corner) <= -104
    assert _errors(a, b, c) <= -104


def test_magnitudes_that_do_not_count_in_float32(seed):
    a = torch.tensor([[1.0, 2.0**-70]], dtype=F64).repeat(60, 30)
    b = torch.tensor([[2.0**-70], [1.0]], dtype=F64).repeat(30, 60)
    a, b = _expansion(a, 2, F64), _expansion(b, 2, F64)
    c = matmul(a, b, 2, F64)
    assert _errors(a, b, c) <= -104


@pytest.mark.parametrize(("left", "right"), [(1e300, 1e-300), (1e-300, 1e290), (1e150, 1e150), (1e-320, 1e300)])
def test_near_the_ends_of_the_range(seed, left, right):
    a = _expansion(torch.randn(30, 31, dtype=F64) * left, 1 if left < 1e-300 else 2, F64)
    b = _expansion(torch.randn(31, 30, dtype=F64) * right, 1, F64)
    c = matmul(a, b, 2, F64)
    assert _errors(a, b, c) <= -104


def test_zeros_stay_zeros(seed):
    a = torch.randn(50, 50, dtype=F64).tril()
    b = torch.randn(50, 50, dtype=F64).tril()
    c = matmul(_expansion(a, 2, F64), _expansion(b, 2, F64), 2, F64)
    assert not any(part.triu(1).any() for part in c)
    nothing = matmul((torch.zeros(40, 40, dtype=F64),), (b[:40, :40],), 2, F64)
    assert not any(part.any() for part in nothing)


def test_overflow_is_an_infinity_with_zeros_behind(seed):
    big = (torch.full((30, 30), 1e300, dtype=F64), torch.full((30, 30), 1e280, dtype=F64))
    head, tail = matmul(big, big, 2, F64)
    assert (head == torch.inf).all()
    assert not tail.any()


@pytest.mark.parametrize(("dtype", "size"), [(F64, 30), (F64, 6), (F32, 30), (BF16, 30), (F16, 30)])
def test_infinities_and_nans_follow_the_plain_product(seed, dtype, size):
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    a[1, 2], a[3, 4], b[0, 5], b[2, :] = torch.inf, torch.nan, -torch.inf, 0
    pairs = [(x, torch.where(x.isfinite(), x * 2.0 ** -(PRECISION[dtype] + 1), 0.0).to(dtype)) for x in (a, b)]
    head, tail = matmul(*pairs, 2, dtype)
    plain = a.double() @ b.double()
    special = ~plain.isfinite()
    assert same_bits(head[special].double(), plain[special])
    assert not tail[special].any()
    clean = [tuple(torch.where(x[0].isfinite(), part, 0.0) for part in x) for x in pairs]
    for part, other in zip((head, tail), matmul(*clean, 2, dtype), strict=True):
        assert torch.equal(part[~special], other[~special])


@pytest.mark.parametrize("dtype", [F64, F32, BF16])
@pytest.mark.parametrize(
    ("left", "right"), [((3, 5, 4), (4, 6)), ((2, 1, 5, 4), (3, 4, 6)), ((5, 4), (2, 4, 3)), ((7, 1, 4), (4, 1))]
)
def test_stacks_are_their_matrices(seed, dtype, left, right):
    """Within the bound: the plain products choose their order of additions by shape and processor."""
    a = split(torch.randn(left, dtype=F64), dtype, 2)
    b = split(torch.randn(right, dtype=F64), dtype, 2)
    c = matmul(a, b, 2, dtype)
    assert all(same_bits(part, other) for part, other in zip(c, matmul(a, b, 2, dtype), strict=True))
    batch = torch.broadcast_shapes(left[:-2], right[:-2])
    assert c[0].shape == (*batch, left[-2], right[-1])
    stack = [part.expand(*batch, *part.shape[-2:]).reshape(-1, *part.shape[-2:]) for part in (*a, *b)]
    whole = [part.reshape(-1, *c[0].shape[-2:]) for part in c]
    for k in range(batch.numel()):
        one = [part[k] for part in stack]
        x, y = tuple(one[:2]), tuple(one[2:])
        for made in (tuple(part[k] for part in whole), matmul(x, y, 2, dtype)):
            assert _errors(x, y, made) <= 6 - 2 * PRECISION[dtype]


def test_larger_stacks_go_by_slices_too(seed):
    a = _expansion(torch.randn(3, 24, 30, dtype=F64), 2, F64)
    b = _expansion(
        torch.randn(3, 30, 20, dtype=F64) * torch.tensor([1.0, 1e200, 1e-200], dtype=F64).view(3, 1, 1), 2, F64
    )
    c = matmul(a, b, 2, F64)
    for k in range(3):
        one = [tuple(part[k] for part in parts) for parts in (a, b, c)]
        assert _errors(*one, 8) <= -104


def test_any_strides(seed):
    a, b = (_expansion(torch.randn(40, 40, dtype=F64), 2, F64) for _ in range(2))
    turned = [tuple(part.t().contiguous().t() for part in parts) for parts in (a, b)]
    for dtype in (F64, F32):
        one = [split(parts[0], dtype, 2) for parts in (a, b)]
        two = [tuple(part.t().contiguous().t() for part in parts) for parts in one]
        for x, y in zip(matmul(*one, 2, dtype), matmul(*two, 2, dtype), strict=True):
            assert torch.equal(x, y)
    for x, y in zip(matmul(a, b, 2, F64), matmul(*turned, 2, F64), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("left", "right"), [((0, 3), (3, 2)), ((2, 0), (0, 3)), ((2, 3), (3, 0)), ((0, 2, 3), (3, 2))])
def test_empty_ones(left, right):
    c = matmul((torch.ones(left),), (torch.ones(right),), 2, F32)
    plain = torch.ones(left) @ torch.ones(right)
    assert all(torch.equal(part, plain) for part in c)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("left", "right", "components"), [(2, 2, 2), (1, 2, 2), (3, 2, 3), (4, 4, 4)])
@pytest.mark.parametrize("span", [0, 300])
def test_long_dot_products(seed, left, right, components, span):
    scale = torch.exp2((torch.rand(3001, dtype=F64) - 0.5) * span)
    a = _expansion(torch.randn(1, 3001, dtype=F64) * scale, left, F64)
    b = _expansion(torch.randn(3001, 2, dtype=F64) * scale[:, None], right, F64)
    c = matmul(a, b, components, F64)
    assert _errors(a, b, c, entries=3) <= -(104 if components == 2 else 53 * components - 8)


def test_long_dot_products_with_special_values(seed):
    a = torch.randn(3, 3000, dtype=F64)
    a[0, 5], a[1, 7] = torch.inf, torch.nan
    head, tail = matmul((a, torch.zeros_like(a)), (a[2:].mT, torch.zeros(3000, 1, dtype=F64)), 2, F64)
    plain = a @ a[2:].mT
    torch.testing.assert_close(head, plain, equal_nan=True)
    assert not tail[:2].any()
    assert tail[2].any()


def test_a_sum_in_pieces(seed):
    """More products than exist at a time."""
    a, b = _expansion(torch.randn(1, 300_000, dtype=F64), 2, F64), (torch.randn(300_000, 1, dtype=F64),)
    head, tail = matmul(a, b, 2, F64)
    halves = [matmul(tuple(x[:, p] for x in a), (b[0][p],), 2, F64) for p in (slice(150_000), slice(150_000, None))]
    again = renormalize((*halves[0], *halves[1]), 2)
    size = float(a[0].abs() @ b[0].abs())
    assert abs(float((head - again[0]) + (tail - again[1]))) <= 2.0**-104 * size


@pytest.mark.parametrize(("dtype", "components"), [(F64, 2), (F32, 2), (F32, 3), (BF16, 2), (F16, 2), (BF16, 4)])
def test_the_reference_has_the_same_bits(seed, dtype, components):
    a = _expansion(torch.randn(30, 33, dtype=F64), components, dtype)
    b = _expansion(torch.randn(33, 31, dtype=F64), components, dtype)
    fast = matmul(a, b, components, dtype)
    with engine("reference"):
        slow = matmul(a, b, components, dtype)
    assert all(torch.equal(x, y) for x, y in zip(fast, slow, strict=True))


def test_inside_compile(seed):
    a = _expansion(torch.randn(20, 20, dtype=F64), 2, F64)

    def product(x, y):
        return matmul((x, y), (x, y), 2, F64)

    whole = torch.compile(product, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, whole(*a), product(*a)))


def test_parameters_and_tensors_that_require_gradients(seed):
    a = torch.nn.Parameter(torch.randn(5, 5))
    assert torch.equal(matmul((a,), (a,), 2, F32)[0], matmul((a.detach(),), (a.detach(),), 2, F32)[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("setting", ["for all", "backends", "backends.mkldnn", "backends.mkldnn.matmul"])
@pytest.mark.parametrize(("dtype", "components", "bits"), [(BF16, 3, 20), (F16, 2, 20), (F32, 1, 21), (F64, 2, 104)])
def test_fewer_bits_for_float32_products_are_not_taken(seed, setting, dtype, components, bits, needs_torch):
    a, b = (split(torch.randn(40, 40, dtype=F64), dtype, components) for _ in range(2))
    plain = matmul(a, b, components, dtype)
    if setting == "for all":
        read, write, words = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, ("medium", "high")
    else:
        needs_torch("settings of precision per backend")
        backend = {
            "backends": lambda: torch.backends,
            "backends.mkldnn": lambda: torch.backends.mkldnn,
            "backends.mkldnn.matmul": lambda: torch.backends.mkldnn.matmul,
        }[setting]()
        read, words = lambda: backend.fp32_precision, ("bf16", "tf32")
        write = lambda word: setattr(backend, "fp32_precision", word)  # noqa: E731
    before = read()
    try:
        for precision in words:
            write(precision)
            made = matmul(a, b, components, dtype)
            assert _errors(a, b, made) <= -bits
            assert read() == precision
    finally:
        write(before)
    assert all(torch.equal(x, y) for x, y in zip(plain, matmul(a, b, components, dtype), strict=True))


@pytest.mark.parametrize("exponent", [-30, -12, 0, 12])
def test_float32_as_float16_components(seed, exponent):
    x = torch.randn(1000) * 2.0**exponent
    for components in (1, 2, 3):
        found = split_into_float16_components(x * 2.0**7, 2.0**-7, components)
        assert all(torch.equal(p, q) for p, q in zip(found, split(x, F16, components), strict=True))
    assert find_largest_magnitude(x) == float(x.abs().max())
    assert math.isnan(find_largest_magnitude(torch.tensor([1.0, torch.nan, -torch.inf])))


def test_memory_is_a_small_multiple_of_the_operands():
    size = 128
    operand = (torch.randn(size, size, dtype=F64), torch.randn(size, size, dtype=F64) * 2.0**-60)
    task = _cut_into_inner_blocks(operand, operand, 2, F64)[0]
    used = sum(math.prod(shape) * dtype.itemsize for shape, dtype in _plan_workspace(task, 3))
    assert used + 2 * 8 * size**2 <= 16 * 8 * size**2


def test_a_workspace_in_use_is_not_handed_out_again():
    layout = (((8, 8), F64),)
    cpu = torch.device("cpu")
    with _borrow_workspace(layout, cpu) as (first,), _borrow_workspace(layout, cpu) as (second,):
        assert first.data_ptr() != second.data_ptr()
    with _borrow_workspace(layout, cpu) as (again,):
        assert again.data_ptr() in (first.data_ptr(), second.data_ptr())


def test_the_oldest_workspaces_make_room(monkeypatch):
    """Their bytes are counted once: torch takes long to count them, and a program may hold hundreds."""
    counted, empty = [], torch.empty
    monkeypatch.setattr(_matmul, "_thread_memory", threading.local())
    monkeypatch.setattr(_matmul, "_MOST_CACHED_BYTES", 1000)

    class Counted(torch.Tensor):
        @property
        def nbytes(self):
            counted.append(tuple(self.shape))
            return self.numel() * self.itemsize

    monkeypatch.setattr(torch, "empty", lambda *given, **options: empty(*given, **options).as_subclass(Counted))
    for n in (50, 60, 50, 70, 60, 50):
        with _borrow_workspace((((n,), F64),), torch.device("cpu")):
            pass
    assert counted == [(50,), (60,), (70,), (60,), (50,)]
    assert list(_matmul._thread_memory.cached) == [(((n,), F64),) for n in (60, 50)]


def test_threads_do_not_share_workspaces(seed):
    a = _expansion(torch.randn(60, 60, dtype=F64), 2, F64)
    wanted, found = matmul(a, a, 2, F64), []

    def run():
        found.extend(matmul(a, a, 2, F64) for _ in range(20))

    workers = [threading.Thread(target=run) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 40
    assert all(torch.equal(x, y) for made in found for x, y in zip(made, wanted, strict=True))


@pytest.mark.parametrize(
    ("a", "b", "components", "dtype", "error", "text"),
    [
        ((torch.ones(2, 3),), (torch.ones(2, 3),), 2, F32, ValueError, "(2, 3)"),
        ((torch.ones(3),), (torch.ones(3, 2),), 2, F32, ValueError, "(..., M, K)"),
        ((torch.ones(2, 2),), (torch.ones(2, 2),), 5, F32, ValueError, "1 to 4"),
        ((torch.ones(2, 2).long(),), (torch.ones(2, 2),), 2, F32, TypeError, "int64"),
        ((torch.ones(2, 2),), (torch.ones(2, 2),), 2, torch.int32, TypeError, "int32"),
    ],
)
def test_bad_input(a, b, components, dtype, error, text):
    with pytest.raises(error) as caught:
        matmul(a, b, components, dtype)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("components", "dtype"),
    [(1, torch.float32), (2, torch.bfloat16), (2, torch.float32), (2, torch.float64), (3, torch.float64)],
)
@pytest.mark.parametrize("shape", [(5, 3, 4, 2), (7, 1, 40, 1), (3, 24, 32, 16)])
def test_permuting_a_stack_permutes_the_bits(components, dtype, shape, seed):
    """And each matrix agrees with its own product but for its rounding."""
    count, m, k, n = shape
    a, b = (
        renormalize(tuple(torch.randn(size).to(dtype) * 2.0 ** (-20 * i) for i in range(components)), components)
        for size in ((count, m, k), (count, k, n))
    )
    order = torch.randperm(count)
    made = matmul(a, b, components, dtype)
    turned = matmul(tuple(part[order] for part in a), tuple(part[order] for part in b), components, dtype)
    assert all(torch.equal(part[order], other) for part, other in zip(made, turned))
    for i in range(count):
        x, y = tuple(part[i] for part in a), tuple(part[i] for part in b)
        off = pointwise(
            "sub", tuple(part[i] for part in made), matmul(x, y, components, dtype), components=1, dtype=F64
        )
        sizes = x[0].double().abs() @ y[0].double().abs()
        assert bool((off[0].abs() <= sizes * 2.0 ** (6 - components * PRECISION[dtype])).all())


def test_of_single_entries_no_more_are_computed_at_a_time_than_memory_is_meant_for(monkeypatch, seed):
    a, b = torch.randn(5, 4, dtype=F64), torch.randn(4, 5, dtype=F64)
    counts, compute = [], _matmul._sum_products
    monkeypatch.setattr(_matmul, "_MOST_PRODUCTS_AT_ONCE", 8)
    monkeypatch.setattr(_matmul, "_sum_products", lambda x, *more: counts.append(x[0].numel()) or compute(x, *more))
    entries = torch.ones(5, 5).nonzero(as_tuple=True)
    (found,) = _matmul._compute_entries_alone((a,), (b,), entries, 1, F64)
    assert counts == [32, 32, 32, 4]
    torch.testing.assert_close(found.view(5, 5), a @ b)
