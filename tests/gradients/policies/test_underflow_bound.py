"""The papers' rules against mpmath, brute force over all products, exact fractions and Monte Carlo."""

import math
import types
from fractions import Fraction

import mpmath
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfulp.formats import fp16
from halfulp.gradients import AbsRange, ElementWise, UnderflowBound
from halfulp.gradients import _underflow_bound as rules
from halfulp.gradients._functions import BackwardProductOperands

# The constants of the papers' code for fp16: u_min is about 2^-24.
U = {"u_min": 6e-8, "u_max": 65504.0}
FREE = {"u_min": 1.0, "u_max": 1e300}  # an upper bound that never holds
NEAR = 1e-9
DEVIATIONS = 5.5  # two-sided, below one in ten million


def wild(*shape, low=-30, high=5, zeros=0.3, dtype=torch.float32):
    """Normal numbers times random powers of two, some of them zero."""
    x = torch.randn(shape, dtype=torch.float64) * torch.exp2(torch.randint(low, high, shape).double())
    return torch.where(torch.rand(shape) < zeros, 0, x).to(dtype)


def random_moments():
    low, high = sorted((torch.randn(2, dtype=torch.float64) * 2.0 ** int(torch.randint(-40, 10, ()))).tolist())
    mean, std = low + (high - low) * float(torch.rand(())), (high - low) * float(torch.rand(()))
    amax = max(abs(low), abs(high))
    return rules.OperandStats(mean, std, amax, amax * float(torch.rand(())) + 1e-18, True)


def bounds(policy, g, w, fan, u_min, u_max):
    """The bounds of a policy for a format of these limits."""
    format = types.SimpleNamespace(smallest_subnormal=u_min, max=u_max)
    (found,) = policy.list_bounds_by_each_rule(BackwardProductOperands(g, w, fan), format)
    return found


def element_wise(g, w, fan, **limits):
    return bounds(ElementWise(), g, w, fan, **limits)


def abs_range(g, w, fan, **limits):
    return bounds(AbsRange(), g, w, fan, **limits)


def log2(value):
    return float(mpmath.log(value, 2))


def least_and_most(alpha, most):
    return log2(min(max(alpha, mpmath.mpf(1)), most))


class Watch(TorchDispatchMode):
    """The largest tensor that was made, and how often a number was read on the host."""

    largest = reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *(tensor.numel() for tensor in tensors)])
        self.reads += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return out


# moments ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("power", [-900, -130, -10, 0, 10, 100, 900])
def test_moments_of_any_size(dtype, power, seed):
    x = wild(40, 50, low=0, high=3).double() * 2.0**power + 2.0**power
    x = x.to(dtype)
    wide = x.double()
    if not wide.isfinite().all():
        assert not rules.OperandStats.measure(x).is_finite
        return
    numbers = wide.flatten().tolist()
    exact = [Fraction(number) for number in numbers]
    mean = sum(exact) / len(exact)
    variance = sum((number - mean) ** 2 for number in exact) / len(exact)
    found, amax = rules.OperandStats.measure(x), max(map(abs, numbers))
    rounding = 1e-13 if dtype == torch.float64 else 1e-5
    assert found.is_finite
    assert abs(found.mean - mean) <= rounding * amax
    root = float(mpmath.sqrt(mpmath.mpf(variance.numerator) / variance.denominator))
    assert found.std == pytest.approx(root, rel=rounding, abs=0)
    assert found.amax == amax
    assert found.smallest_nonzero == min((abs(number) for number in numbers if number), default=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_moments_at_the_edges(dtype):
    assert rules.OperandStats.measure(torch.empty(0, 3, dtype=dtype)) == rules.OperandStats(0, 0, 0, 0, True)
    assert rules.OperandStats.measure(torch.zeros(7, dtype=dtype)) == rules.OperandStats(0, 0, 0, 0, True)
    assert rules.OperandStats.measure(-torch.zeros((), dtype=dtype)) == rules.OperandStats(0, 0, 0, 0, True)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    one = rules.OperandStats.measure(torch.tensor(-smallest, dtype=dtype))
    assert one == rules.OperandStats(-smallest, 0, smallest, smallest, True)
    tenth = torch.full((1001,), 0.1, dtype=dtype)
    assert rules.OperandStats.measure(tenth).std == 0
    assert rules.OperandStats.measure(tenth).mean == pytest.approx(tenth[0].item(), rel=1e-6)
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.tensor([1.0, bad, 0.0], dtype=dtype)
        assert not rules.OperandStats.measure(x).is_finite


def test_equal_numbers_have_no_std_where_a_mean_is_a_sum_times_the_inverse_count(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "mean", lambda x: x.sum() * (1 / torch.tensor(float(x.numel()))))
    assert torch.ones(41).mean() != 1
    assert rules.OperandStats.measure(torch.full((41,), 0.1)).std == 0


def test_moments_are_copied_once_and_leave_no_graph(seed):
    x = torch.randn(20, requires_grad=True)
    saved = []
    with Watch() as watch, torch.autograd.graph.saved_tensors_hooks(saved.append, lambda kept: kept):
        found = (rules.OperandStats.measure(x),)
    assert (watch.reads, saved) == (0, [])
    assert all(type(number) in (float, int, bool) for moments in found for number in vars(moments).values())


# the rules against their formulas -----------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1e-12, 1e-5, 1e-3, 0.3])
def test_underflow_bound_is_the_formula(share, seed):
    for _ in range(50):
        g, w, fan = random_moments(), random_moments(), int(torch.randint(1, 5000, ()))
        of = mpmath.sqrt(2) * mpmath.erfinv(mpmath.mpf(share))
        second = [mpmath.mpf(m.std) ** 2 + mpmath.mpf(m.mean) ** 2 for m in (g, w)]
        corner = mpmath.mpf(g.amax) * w.amax
        most = mpmath.mpf(U["u_max"]) / (fan * corner)
        sigma = mpmath.sqrt(second[0] * second[1] * mpmath.mpf(fan) / 2)
        wanted = least_and_most(U["u_min"] / (of * sigma), most)
        assert rules.bound_log_scale(g, w, fan, share=share, **U).log2_alpha == pytest.approx(wanted, abs=NEAR)
        wanted = least_and_most(U["u_min"] / (of * g.std), U["u_max"] / mpmath.mpf(g.amax))
        assert rules.bound_log_scale(g, None, fan, share=share, **U).log2_alpha == pytest.approx(wanted, abs=NEAR)


def test_abs_range_is_the_formula(seed):
    for low in (-45, -12, 10):
        for _ in range(10):
            g, w, fan = wild(9, 7, low=low, high=low + 8), wild(7, 5), int(torch.randint(1, 500, ()))
            a, b = ([mpmath.mpf(abs(n)) for n in x.flatten().tolist() if n] for x in (g, w))
            least = max(min(a) * min(b), mpmath.mpf(rules.PAPER_LEAST_PRODUCT_OF_MINIMA))
            wanted = least_and_most(U["u_min"] / (fan * least), U["u_max"] / (fan * max(a) * max(b)))
            found = abs_range(g, w, fan, **U)
            assert found.log2_alpha == pytest.approx(wanted, abs=NEAR)


def brute_force(g, w, fan):
    """The rule on all products, made one by one in float64."""
    products = (g.double().reshape(-1, g.shape[-1], 1) * w.double().reshape(1, w.shape[0], -1)).abs().flatten()
    products = products[products > 0]
    lower = (U["u_min"] / products).clamp(min=1).sort().values
    return math.log2(min(max([1.0, *lower[-1:].tolist()]), U["u_max"] / (fan * float(products.max()))))


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [(torch.float64, -60, 20), (torch.float32, -45, 0), (torch.float16, -20, 9)]
)
def test_element_wise_is_brute_force(dtype, low, high, seed):
    for rows, inner, columns in ((1, 1, 1), (13, 7, 5), (6, 40, 9)):
        g = wild(rows, inner, low=low, high=high, dtype=dtype)
        w = wild(inner, columns, low=-15, high=9, dtype=dtype)
        g[0, 0] = w[0, 0] = 1e-3
        found = element_wise(g, w, inner, **U)
        assert found.log2_alpha == pytest.approx(brute_force(g, w, inner), abs=NEAR)


def test_element_wise_takes_batches_and_convolutions(seed):
    g, w = wild(2, 3, 6), wild(6, 4)
    assert element_wise(g, w, 6, **U) == element_wise(g.reshape(6, 6), w, 6, **U)
    images, kernel = wild(2, 6, 5, 5), wild(6, 3, 3, 3)
    found = element_wise(images.movedim(1, -1), kernel, 54, **U)
    assert found.log2_alpha == pytest.approx(brute_force(images.movedim(1, -1), kernel, 54), abs=NEAR)


def test_element_wise_never_makes_the_products(seed):
    g, w = torch.randn(300, 8), torch.randn(8, 200)
    with Watch() as watch:
        element_wise(g, w, 8, **U)
    assert watch.largest == g.numel()


# what the rules promise ---------------------------------------------------------------------------------------


def share_below(outputs, log2_alpha, expected):
    """The share that underflows, less the expected one, in standard deviations of the count."""
    found = float((outputs.double() * 2.0**log2_alpha).abs().lt(FREE["u_min"]).double().mean())
    return (found - expected) / math.sqrt(expected * (1 - expected) / outputs.numel())


def test_gaussian_gradients_underflow_at_the_share(seed):
    g, share = torch.randn(200_000) * 1e-4, 0.02
    alone = rules.bound_log_scale(rules.OperandStats.measure(g), share=share, **FREE)
    assert abs(share_below(g, alone.log2_alpha, share)) < DEVIATIONS


def test_gaussian_sums_underflow_at_most_at_the_share(seed):
    share, fan = 0.05, 128
    g, w = torch.randn(40_000, fan) * 1e-4, torch.randn(40_000, fan) * 1e-2
    outputs = torch.einsum("ik,ik->i", g.double(), w.double())
    alpha = rules.bound_log_scale(
        rules.OperandStats.measure(g), rules.OperandStats.measure(w), fan, share=share, **FREE
    )
    assert share_below(outputs, alpha.log2_alpha, share) < DEVIATIONS
    # Without a ReLU no term is missing, so that the outputs are wider by the square root of 2; a sum of
    # 128 products is not quite Gaussian.
    expected = float(mpmath.erf(mpmath.erfinv(share) / mpmath.sqrt(2)))
    assert abs(share_below(outputs, alpha.log2_alpha, expected)) < DEVIATIONS + 1


def test_the_upper_bound_keeps_every_sum_finite(seed):
    g, w = torch.randn(50, 64) * 1e6, torch.randn(64, 30)
    moments = rules.OperandStats.measure(g), rules.OperandStats.measure(w)
    for found in (
        rules.bound_log_scale(*moments, 64, **U),
        abs_range(g, w, 64, **U),
        element_wise(g, w, 64, **U),
    ):
        assert found.log2_alpha < 0
        worst = (g.double().abs() @ w.double().abs()).amax() * 2.0 ** rules.floor_log2_with_tolerance(found.log2_alpha)
        assert worst <= fp16.max


# edges ----------------------------------------------------------------------------------------------------------


def test_nothing_to_scale():
    zero, one = torch.zeros(3, 3), torch.ones(3, 3) * 1e-9
    for x in (zero, zero[:0], zero[:, :0]):
        for g, w in ((x, one), (one, x), (x, x)):
            moments = rules.OperandStats.measure(g), rules.OperandStats.measure(w)
            assert rules.bound_log_scale(*moments, 3, **U) == rules.UNLIMITED_LOG_SCALE_BOUNDS
            assert abs_range(g, w, 3, **U) == rules.UNLIMITED_LOG_SCALE_BOUNDS
        assert rules.bound_log_scale(rules.OperandStats.measure(x), **U) == rules.UNLIMITED_LOG_SCALE_BOUNDS
    assert rules.bound_log_scale(rules.OperandStats.measure(one), **U) == rules.UNLIMITED_LOG_SCALE_BOUNDS
    left, right = torch.tensor([[1e-9, 0.0]]), torch.tensor([[0.0], [1.0]])
    for g, w in ((zero, one), (one, zero), (left, right), (zero[:0], one), (one, one[:, :0]), (zero[:, :0], zero[:0])):
        assert element_wise(g, w, 2, **U) == rules.UNLIMITED_LOG_SCALE_BOUNDS


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_gives_nan(bad):
    x, one = torch.tensor([[bad, 1.0], [0.0, 0.0]]), torch.ones(2, 2)
    for g, w in ((x, one), (one, x)):
        moments = rules.OperandStats.measure(g), rules.OperandStats.measure(w)
        assert math.isnan(rules.bound_log_scale(*moments, 2, **U).upper)
        assert math.isnan(abs_range(g, w, 2, **U).upper)
        assert math.isnan(element_wise(g, w, 2, **U).upper)
    assert math.isnan(rules.bound_log_scale(rules.OperandStats.measure(x), **U).upper)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        *((lambda share=share: UnderflowBound(share=share), "share is between 0 and 1") for share in (0, 1, math.nan)),
    ],
)
def test_options_of_the_policies(make, match):
    with pytest.raises(ValueError, match=match):
        make()


# from a scale to an exponent --------------------------------------------------------------------------------------


def test_power_of_two_is_the_exact_floor(seed):
    for power in range(300):
        mantissa = int(torch.randint(1, 2048, ()))
        u_min, u_max = mantissa * 2.0**-40, mantissa * 2.0**20
        g, w = wild(2, zeros=0, dtype=torch.float64).tolist()
        if power % 2:  # here alpha is a power of two, and the logarithms are not exact
            g, w = mantissa * 2.0 ** (power % 30 - 50), 1.0
        tensors = (torch.tensor(number, dtype=torch.float64) for number in (g, w))
        found = rules.floor_log2_with_tolerance(abs_range(*tensors, 1, u_min=u_min, u_max=u_max).log2_alpha)
        product = abs(Fraction(g) * Fraction(w))
        lower = Fraction(u_min) / max(product, Fraction(rules.PAPER_LEAST_PRODUCT_OF_MINIMA))
        alpha = min(max(lower, Fraction(1)), Fraction(u_max) / product)
        assert Fraction(2) ** found <= alpha < Fraction(2) ** (found + 1)
