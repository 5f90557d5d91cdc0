"""Sums that are rounded once, against rationals: any order, shards, threads, specials, gradients, compiled."""

import random
from fractions import Fraction

import pytest
import torch

import halfulp as hu
from halfulp.arithmetic._exact_sums import exact_dot, exact_partial, exact_round, exact_sum
from halfulp.formats import get
from halfulp.formats._reference import round_exact
from halfulp.kernels import engine, same_bits

from .cases import DTYPES, RESULTS

WORDS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
ENGINES = ("llvm", "reference")
INF, NAN = float("inf"), float("nan")


def anything(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Finite floats whose bits are random: every exponent alike, subnormals and zeros among them."""
    bits = 8 * dtype.itemsize
    words = [random.getrandbits(bits) - (1 << (bits - 1)) for _ in range(count)]
    x = torch.tensor(words, dtype=torch.int64).to(WORDS[dtype]).view(dtype)
    return torch.where(x.isfinite(), x, torch.zeros_like(x))


def kinds(dtype: torch.dtype, count: int) -> dict[str, torch.Tensor]:
    near = torch.randn(count, dtype=torch.float64)
    far = near * torch.randint(-12, 12, (count,)).double().exp2()
    x, y = anything(dtype, count), anything(dtype, count // 2)
    full = torch.cat([y, -y.flip(0), anything(dtype, 1)])
    almost = torch.cat([y, -y.flip(0), torch.full((1,), 2.0**-20, dtype=dtype)])
    return {
        "near": near.to(dtype),
        "far": far.to(dtype),
        "anything": x,
        "cancelling": full[torch.randperm(len(full))],
        "almost nothing": almost[torch.randperm(len(almost))],
        "sparse": torch.where(torch.rand(count) < 0.01, x, torch.zeros_like(x)),
        "few": x[:3],
    }


def nearest(exact: Fraction, dtype: torch.dtype) -> float:
    return round_exact(exact, get(dtype))


UNIT = -1074  # of float64's least number; integers of it add up a hundred times as fast as fractions


def integers(x: torch.Tensor) -> list[int]:
    """Multiples of 2^UNIT."""
    pairs = (v.as_integer_ratio() for v in x.double().flatten().tolist())
    return [above << -UNIT - below.bit_length() + 1 for above, below in pairs]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_by", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_is_the_nearest_number_to_the_exact_sum(dtype, run_by, seed):
    for name, x in kinds(dtype, random.randint(2, 2500)).items():
        exact = Fraction(sum(integers(x)), 1 << -UNIT)
        with engine(run_by):
            for wanted in RESULTS[False][dtype]:
                assert float(exact_sum(x, dtype=wanted)) == nearest(exact, wanted), (name, wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_by", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dot_product_is_the_nearest_number_to_the_exact_one(dtype, run_by, seed):
    count = random.randint(2, 1200)
    for (name, a), b in zip(kinds(dtype, count).items(), kinds(dtype, count).values()):
        if name == "cancelling":
            b = torch.cat([b[: len(a) // 2], -b[: len(a) // 2].flip(0), b[:1]])[torch.randperm(len(a))]
        exact = Fraction(sum(v * w for v, w in zip(integers(a), integers(b))), 1 << -2 * UNIT)
        with engine(run_by):
            for wanted in RESULTS[True][dtype]:
                assert float(exact_dot(a, b, dtype=wanted)) == nearest(exact, wanted), (name, wanted)


def test_of_opposite_products_nothing_is_left_but_what_differs(seed):
    x, y = torch.randn(2, 700, dtype=torch.float64)
    tiny = torch.tensor([5e-324], dtype=torch.float64)
    a, b = torch.cat([x, y, tiny]), torch.cat([y, -x, tiny])
    order = torch.randperm(len(a))
    assert exact_dot(a, b) == 0.0
    assert exact_round(exact_partial(a[order], b[order]) * 2).item() == 0.0
    scaled = torch.cat([tiny, torch.full((1,), 2.0**1000, dtype=torch.float64)])
    assert exact_dot(torch.cat([a, scaled[1:]]), torch.cat([b, tiny])).item() == 5e-324 * 2.0**1000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halfway_goes_to_even_in_the_result_not_before(dtype):
    ulp = torch.finfo(dtype).eps
    least = torch.finfo(dtype).smallest_normal * ulp
    for terms, wanted in (
        ([1.0, ulp / 2], 1.0),
        ([1.0 + ulp, ulp / 2], 1.0 + 2 * ulp),
        ([1.0, ulp / 2, least], 1.0 + ulp),
        ([1.0 + ulp, ulp / 2, -least], 1.0 + ulp),
        ([-1.0, -ulp / 2, -least], -1.0 - ulp),
    ):
        assert float(exact_sum(torch.tensor(terms, dtype=torch.float64).to(dtype))) == wanted


def test_a_result_below_the_normal_numbers_is_rounded_once():
    terms = torch.tensor([2.0**-150, 2.0**-151, 2.0**-170], dtype=torch.float64)
    assert float(exact_sum(terms[:1], dtype=torch.float32)) == 0.0
    assert float(exact_sum(terms[::2], dtype=torch.float32)) == 2.0**-149
    assert float(exact_sum(-terms, dtype=torch.float32)) == -(2.0**-149)
    assert float(exact_dot(terms[:1].sqrt(), terms[:1].sqrt())) == 2.0**-150


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_by", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_overflow_happens_at_the_end_if_at_all(dtype, run_by):
    most = torch.finfo(dtype).max
    half_ulp = most - torch.tensor(most, dtype=torch.float64).to(dtype).nextafter(torch.zeros((), dtype=dtype)).item()
    with engine(run_by):
        x = torch.full((3000,), most, dtype=dtype)
        x[1::2] = -most
        assert exact_sum(x.sort().values).item() == 0.0
        x[1] = 0.0
        assert exact_sum(x).item() == most
        assert exact_sum(torch.tensor([most, half_ulp / 4], dtype=dtype)).item() == most
        assert exact_sum(torch.tensor([most, half_ulp / 2], dtype=dtype)).item() == INF
        assert exact_sum(torch.tensor([-most, -most], dtype=dtype)).item() == -INF
        assert exact_dot(x[:1], x[:1]).item() == INF
        assert exact_dot(x[3:4], x[:1]).item() == -INF
        assert exact_dot(x[[0, 3, 0]], x[[0, 0, 1]]).item() == 0.0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_by", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_and_nan(dtype, run_by, seed):
    with engine(run_by):
        for specials, wanted in (
            ([INF], INF),
            ([-INF, -INF], -INF),
            ([INF, -INF], NAN),
            ([NAN], NAN),
            ([NAN, INF], NAN),
        ):
            x = torch.randn(2000).to(dtype)
            x[torch.randperm(2000)[: len(specials)]] = torch.tensor(specials, dtype=dtype)
            made = exact_sum(x)
            assert same_bits(made, torch.tensor(wanted, dtype=dtype)), specials
            assert same_bits(exact_dot(x, torch.full_like(x, 3.0)), made)
            assert same_bits(exact_dot(torch.full_like(x, -2.0), x), -made)
        assert exact_dot(torch.tensor([0.0, 1, 1], dtype=dtype), torch.tensor([INF, 1, 1], dtype=dtype)).isnan()
        assert exact_dot(torch.tensor([-INF, 1, 1], dtype=dtype), torch.tensor([-0.0, 1, 1], dtype=dtype)).isnan()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_by", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sign_of_zero(dtype, run_by):
    def sign(value: torch.Tensor) -> bool:
        assert value.item() == 0.0
        return bool(value.signbit())

    with engine(run_by):
        for count in (1, 5, 1500):
            zeros = torch.full((count,), -0.0, dtype=dtype)
            assert sign(exact_sum(zeros))
            assert sign(exact_dot(zeros, torch.ones_like(zeros)))
            assert sign(exact_dot(-zeros, -torch.ones_like(zeros)))
            assert not sign(exact_dot(zeros, zeros))
            zeros[-1] = 0.0
            assert not sign(exact_sum(zeros))
        assert not sign(exact_sum(torch.tensor([1.0, -1.0, -0.0], dtype=dtype)))
        assert not sign(exact_sum(torch.empty(0, dtype=dtype)))
        assert not sign(exact_round(exact_partial(torch.empty(0, dtype=dtype)), dtype))
        least = torch.tensor([-5e-324], dtype=torch.float64)
        assert sign(exact_sum(least, dtype=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_order_shards_and_threads_change_no_bit(dtype, seed):
    x, y = kinds(dtype, 140_000)["far"], kinds(dtype, 140_000)["near"]
    total, dot, words = exact_sum(x), exact_dot(x, y), exact_partial(x, y)
    order = torch.randperm(len(x))
    assert same_bits(exact_sum(x[order]), total)
    assert torch.equal(exact_partial(x[order], y[order]), words)
    cuts = sorted(random.sample(range(len(x)), 7))
    shards = list(zip(x.tensor_split(cuts), y.tensor_split(cuts)))
    random.shuffle(shards)
    merged = torch.stack([exact_partial(*shard) for shard in shards]).sum(0)
    assert same_bits(exact_round(merged, dtype), dot)
    assert same_bits(exact_round(sum(exact_partial(a) for a, _ in shards), dtype), total)
    torch.set_num_threads(2)
    try:
        many = x.repeat(5)
        assert same_bits(exact_dot(many, y.repeat(5)), exact_round(5 * words, dtype))
        assert same_bits(exact_sum(many.view(-1, 70), 0), exact_sum(many.view(-1, 70).t(), -1))
        assert torch.equal(exact_partial(many), exact_partial(many.flip(0)))
    finally:
        torch.set_num_threads(1)
    with engine("reference"):
        assert same_bits(exact_dot(x, y), dot)
        assert same_bits(exact_round(merged, dtype), dot)


def test_dimensions_are_those_of_torch_sum(seed):
    x = torch.randint(-9, 9, (3, 4, 5, 6)).float()
    for dim in (None, (), 0, -1, 2, (0, 2), (-1, 1), (3, 0, 1, 2), [1]):
        for keepdim in (False, True):
            assert same_bits(exact_sum(x, dim, keepdim), torch.sum(x, dim, keepdim)), dim
            assert same_bits(exact_dot(x, x, dim, keepdim), torch.sum(x * x, dim, keepdim)), dim
    assert exact_sum(x, 1).shape == exact_partial(x, dim=1).shape[:-1] == (3, 5, 6)
    assert same_bits(exact_round(exact_partial(x, x, dim=(0, 3)), torch.float32), exact_dot(x, x, (0, 3)))
    for layout in (x.permute(2, 0, 3, 1), x[:, ::2, 1:, ::3], x[:, :1].expand(3, 7, 5, 6), x[0, 0, 0, 0], x[..., :0]):
        for dim in (None, 0, -1):
            assert same_bits(exact_sum(layout, dim), torch.sum(layout, dim))
            assert same_bits(exact_dot(layout, layout, dim), torch.sum(layout * layout, dim))
    for shape in ((0, 4), (4, 0), (0,)):
        assert same_bits(exact_sum(torch.empty(shape), 0), torch.sum(torch.empty(shape), 0))


def test_operands_broadcast_and_promote(seed):
    a, b = torch.randint(-9, 9, (6, 1, 300)).half(), torch.randint(-9, 9, (5, 300)).bfloat16()
    made = exact_dot(a, b, -1)
    assert made.dtype == torch.float32
    assert same_bits(made, (a.float() * b.float()).sum(-1))
    assert same_bits(exact_dot(b, a, -1), made)
    assert same_bits(exact_dot(b[0], b[0, 0], dtype=torch.float64), (b[0].double() * b[0, 0].double()).sum())
    conjugate = torch.randn(40, dtype=torch.complex64).conj()
    assert same_bits(exact_sum(conjugate.imag), exact_sum(conjugate.resolve_conj().imag.clone()))


def test_many_rows_and_few_columns(seed):
    x = torch.randn(40_000, 3)
    assert same_bits(exact_sum(x, 1), x.double().sum(1).float())
    wide = torch.randn(3, 1_200_000).bfloat16()
    assert same_bits(exact_sum(wide, 1, dtype=torch.float64), wide.double().sum(1))


def test_gradients(seed):
    x, y = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for dim, keepdim in ((None, False), (1, True), ((0, 1), False)):
        assert torch.autograd.gradcheck(lambda a: exact_sum(a, dim, keepdim), (x,))  # noqa: B023
        assert torch.autograd.gradcheck(lambda a, b: exact_dot(a, b, dim, keepdim), (x, y))  # noqa: B023
        assert torch.autograd.gradgradcheck(lambda a, b: exact_dot(a, b, dim, keepdim), (x, y))  # noqa: B023
    assert torch.autograd.gradcheck(lambda a, b: exact_dot(a, b[0], -1), (x, y))
    narrow = torch.randn(5, requires_grad=True, dtype=torch.bfloat16)
    wide = torch.randn(5, requires_grad=True)
    exact_dot(narrow, wide, dtype=torch.float64).backward()
    assert same_bits(narrow.grad, wide.detach().bfloat16())
    assert same_bits(wide.grad, narrow.detach().float())
    scalar = torch.tensor(2.0, requires_grad=True)
    exact_sum(scalar).backward()
    assert scalar.grad == 1.0
    assert not exact_partial(wide).requires_grad


def test_the_graph_of_a_sum_may_be_gone_through_again(seed):
    x = torch.randn(5, requires_grad=True)
    total = exact_sum(x)
    total.backward()
    total.backward()
    assert torch.equal(x.grad, torch.full((5,), 2.0))


def test_compiled_graphs_and_operator_rules(seed):
    x, y = (torch.randn(6, 50, requires_grad=True) for _ in range(2))

    def loss(a, b):
        return exact_sum(exact_dot(a, b, -1, dtype=torch.float64) * 2, dtype=torch.float32)

    made = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, y)
    assert same_bits(made.detach(), loss(x, y).detach())
    made, wanted = (torch.autograd.grad(value, (x, y)) for value in (made, loss(x, y)))
    assert all(same_bits(a, b) for a, b in zip(made, wanted))
    rules = ("test_schema", "test_autograd_registration", "test_faketensor")
    operators = torch.ops.halfulp
    torch.library.opcheck(operators.exact_sum.default, (x, [1], True, torch.float16), test_utils=rules)
    torch.library.opcheck(operators.exact_dot.default, (x, y, [0, 1], False, torch.float64), test_utils=rules)
    torch.library.opcheck(operators.exact_partial.default, (x.detach(), None, [0]), test_utils=rules)
    torch.library.opcheck(operators.exact_round.default, (exact_partial(x, dim=0), torch.float32), test_utils=rules)


def test_transforms_are_refused(seed):
    x = torch.randn(2, 5)
    for call in (
        lambda: torch.vmap(exact_sum)(x),
        lambda: torch.func.grad(exact_sum)(x),
    ):
        with pytest.raises(NotImplementedError, match=r"torch\.func"):
            call()


def test_what_is_refused(seed):
    x = torch.randn(4, 5)
    for wrong in (x.int(), x.bool(), x.to(torch.complex64), x.to(torch.float8_e5m2), [1.0], 2.0):
        with pytest.raises(TypeError, match="float16, bfloat16, float32 and float64"):
            exact_sum(wrong)
        with pytest.raises(TypeError, match="float16, bfloat16, float32 and float64"):
            exact_dot(x, wrong)
        with pytest.raises(TypeError, match="float16, bfloat16, float32 and float64"):
            exact_partial(wrong)
    for dtype in (torch.int64, torch.complex64, torch.float8_e5m2):
        with pytest.raises(TypeError, match="rounded to"):
            exact_sum(x, dtype=dtype)
    with pytest.raises(IndexError, match="dimension 2"):
        exact_sum(x, 2)
    with pytest.raises(IndexError, match=r"dimension 1 .*allowed are -1 to 0"):
        exact_sum(x[0, 0], 1)
    with pytest.raises(ValueError, match="twice"):
        exact_sum(x, (1, -1))
    with pytest.raises(RuntimeError):
        exact_dot(x, x.t())
    with pytest.raises(TypeError, match="int64"):
        exact_round(x)
    with pytest.raises(ValueError, match="138"):
        exact_round(torch.zeros(3, 137, dtype=torch.int64))
    words = exact_partial(x)
    before = words.clone()
    exact_round(words, torch.float32)
    assert torch.equal(words, before)


def test_tensors_of_scales_are_decoded_first(seed):
    value = torch.randn(300).half().double() * 2.0**-40
    scaled, plain = hu.ScaledTensor.encode(value, torch.float32), torch.ones(300)
    for x, name in ((scaled, "ScaledTensor"),):
        calls = [(exact_sum, x), (exact_dot, x, plain), (exact_dot, plain, x), (exact_partial, x)]
        for function, *arguments in (*calls, (exact_partial, plain, x)):
            with pytest.raises(TypeError, match=rf"{function.__name__} takes plain .* got {name}: give x\.decode"):
                function(*arguments)
    assert float(exact_sum(scaled.decode(torch.float64))) == float(sum(map(Fraction, value.tolist())))
