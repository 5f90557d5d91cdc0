"""Functions of one element on scaled tensors, and comparisons: held to torch's and to their equations."""

import operator

import pytest
import torch
import torch.nn.functional as F

from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor
from halfulp.scaled import _powers_of_two as _powers
from halfulp.scaled.rules import _elementwise as rules
from halfulp.subclass import strict
from halfulp.testing import check_rule

from ...samples import drawn

SMOOTH = {
    "anywhere": "exp exp2 expm1 tanh sin cos tan atan asinh sinh cosh erf erfc sinc sigmoid angle sgn sign frac "
    "special.i0e special.i1e special.i1 special.bessel_j0 special.bessel_j1 special.spherical_bessel_j0 "
    "special.modified_bessel_i1",
    "between -1 and 1": "asin acos atanh erfinv",
    "between 0 and 1": "special.ndtri logit",
    "above 1": "acosh log log2 log10 log1p",
}
DRAW = {
    "anywhere": lambda: torch.randn(40),
    "between -1 and 1": lambda: torch.rand(40) * 1.9 - 0.95,
    "between 0 and 1": lambda: torch.rand(40) * 0.9 + 0.05,
    "above 1": lambda: torch.rand(40) + 1.1,
}
UNARY = [(name, domain) for domain, names in SMOOTH.items() for name in names.split()]
# Their gradients are sums and quotients of several rounded steps, which rules round in another order.
ODD = "tanh sin asin atan asinh atanh erf log1p expm1 sinh tan erfinv frac"


def function(name):
    return torch.special.__dict__[name.removeprefix("special.")] if "." in name else getattr(torch, name)


@pytest.mark.parametrize(("name", "domain"), UNARY)
def test_results_have_the_plain_operators_bits_under_every_scale(seed, name, domain):
    check_rule(function(name), lambda: (DRAW[domain](),), seed=seed, trials=3, gradients=False)


@pytest.mark.parametrize(("name", "domain"), [(n, d) for n, d in UNARY if not n.startswith("special.") and n != "frac"])
def test_gradients_do_not_depend_on_scales(seed, name, domain):
    check_rule(function(name), lambda: (DRAW[domain](),), seed=seed, trials=2, exact=1e-5)


def test_functions_of_two_arguments(seed):
    def positive():
        return torch.rand(20) + 0.1, torch.rand(20) + 0.1

    for name in ("igamma", "igammac", "atan2"):
        check_rule(getattr(torch, name), positive, seed=seed, trials=3, gradients=name == "atan2", exact=1e-6)


@pytest.mark.parametrize("name", ODD.split())
def test_small_arguments_do_not_vanish_in_float16(seed, name):
    x = torch.randn(30) * 1e-9
    found = function(name)(ScaledTensor.encode(x)).decode()
    torch.testing.assert_close(found, function(name)(x), rtol=2e-3, atol=1e-12)


@pytest.mark.parametrize("name", ["exp", "exp2", "expm1", "cosh", "sinh"])
def test_large_results_keep_their_magnitude_in_float16(name):
    x = torch.tensor([-20.0, 0.0, 3.0, 19.0, float("inf"), float("nan")])
    encoded = ScaledTensor.encode(x)
    found, expected = function(name)(encoded).decode(), function(name)(encoded.decode())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=20.0, equal_nan=True)


def test_zeros_of_any_scale_and_empty_tensors():
    zeros = torch.zeros_like(ScaledTensor.encode(torch.ones(3)))
    for name, _ in UNARY:
        found, expected = function(name)(zeros).decode(), function(name)(torch.zeros(3))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0, equal_nan=True)
        assert function(name)(ScaledTensor.encode(torch.ones(0))).shape == (0,)
    assert zeros.tanh().scale == _powers.SCALE_OF_ZEROS


def test_the_sign_is_of_the_payload():
    x = ScaledTensor(torch.tensor([-2.0, 0.0, 1.0, -0.0]), 2.0**9)
    assert x.sign().scale == 1
    assert x.sign().tolist() == [-1, 0, 1, 0]


def test_frexp_is_of_the_value():
    mantissa, exponent = torch.frexp(ScaledTensor(torch.tensor([1.5, 3.0]), 2.0**9))
    assert mantissa.tolist() == [0.75, 0.75]
    assert exponent.tolist() == [10, 11]


def test_scales_of_results_are_their_own():
    x = ScaledTensor(torch.randn(3), 2.0**-3)
    for name, _ in UNARY:
        assert function(name)(x).scale is not x.scale


@pytest.mark.parametrize("storage", drawn([torch.float32, torch.float16], 1, "values"))
def test_rules_of_values_trace_into_one_graph(seed, storage):
    def many(x):
        y = x.tanh() + x.exp() + x.square().sqrt() + x.sign() + (x * x + 1).rsqrt() + x.floor() + x**3
        return torch.where(y > x, y.log1p(), torch.erf(y)) + torch.lgamma(y.square() + 1) + x.sort()[0]

    x = ScaledTensor.encode(torch.rand(12) + 0.5, storage).requires_grad_()
    eager = many(x)
    compiled = torch.compile(many, backend="aot_eager", fullgraph=True)(x)
    # A graph keeps squares in float32 that float16 payloads round eagerly.
    apart = 1e-6 if storage == torch.float32 else 4e-3
    torch.testing.assert_close(compiled.detach().decode(), eager.detach().decode(), rtol=apart, atol=apart)
    (expected,), (found,) = (torch.autograd.grad(y.sum(), x) for y in (eager, compiled))
    rtol = 1e-5 if storage == torch.float32 else 1e-2
    torch.testing.assert_close(found.decode(), expected.decode(), rtol=rtol, atol=rtol)


EXPONENTS = (0, 1, 2, 3, 4, 7, -1, -2, -3, 0.5, -0.5, 1.5, 0.3)


def positive():
    return (torch.rand(30) + 0.1,)


@pytest.mark.parametrize("name", ["sqrt", "rsqrt", "reciprocal", "square"])
def test_powers_have_the_plain_operators_bits(seed, name):
    check_rule(getattr(torch, name), positive, seed=seed, gradients=False)
    check_rule(getattr(torch, name), positive, seed=seed, exact=1e-6, trials=3)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_a_number_as_exponent(seed, exponent):
    check_rule(lambda x: x**exponent, positive, seed=seed, gradients=False)
    check_rule(lambda x: x**exponent, positive, seed=seed, exact=1e-5, trials=3)


def test_a_tensor_as_exponent_and_as_base(seed):
    check_rule(torch.pow, lambda: (*positive(), torch.randn(30)), seed=seed, exact=1e-5)
    check_rule(lambda x: 2.5**x, lambda: (torch.randn(30),), seed=seed, exact=1e-5)
    check_rule(torch.float_power, lambda: (*positive(), torch.randn(30)), seed=seed, exact=1e-5, gradients=False)


def test_scales_are_powers_of_two():
    for exponent in range(-20, 21):
        x = ScaledTensor(torch.tensor([1.5]), 2.0**exponent)
        for name in ("sqrt", "rsqrt", "square", "reciprocal"):
            assert torch.frexp(getattr(x, name)().scale)[0] == 0.5
        assert x.square().scale == 4.0**exponent


@pytest.mark.parametrize("exponent", [-126, -125, -1, 0, 1, 126, 127])
def test_roots_of_the_ends_of_the_range(exponent, monkeypatch):
    for traced in (False, True):
        if traced:
            monkeypatch.setattr(rules._powers, "read_scale", lambda scale: None)
        root, under = rules.take_root_of_scale(torch.tensor(2.0**exponent))
        assert float(root) ** 2 * float(under) == 2.0**exponent
        assert under in (1, 2)


def test_squares_keep_what_float32_holds(seed):
    x = ScaledTensor(torch.rand(10) + 1, 2.0**-70)
    assert torch.equal(x.square().decode(torch.float64).float(), x.decode(torch.float32).square())
    small = ScaledTensor.encode((torch.rand(10) + 1) * 1e-6)
    torch.testing.assert_close(small.square().decode(), small.decode().square(), rtol=1e-3, atol=0.0)


def test_zeros_infinities_and_negative_numbers():
    x = torch.tensor([0.0, float("inf"), -1.0, float("nan")])
    scaled = ScaledTensor(x / 8, 8.0)
    for function in (torch.sqrt, torch.rsqrt, torch.reciprocal, torch.square):
        assert same_bits(function(scaled).decode(), function(x))
    zeros = torch.zeros_like(ScaledTensor.encode(torch.ones(2)))
    assert zeros.sqrt().tolist() == [0, 0]
    assert zeros.rsqrt().tolist() == [float("inf")] * 2


def one():
    return (torch.randn(3, 4) * 3,)


CASES = {
    "relu": F.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "softplus": F.softplus,
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "threshold": lambda x: F.threshold(x, 0.3, -2.0),
    "glu": lambda x: F.glu(x, 1),
    "logsigmoid": F.logsigmoid,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu eval": lambda x: F.rrelu(x),
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
}


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_plain_tensors_under_all_scales(case, seed):
    with strict():
        check_rule(CASES[case], one, seed=seed, trials=2)


def test_prelu_is_close(seed):
    with strict():
        check_rule(lambda x, w: F.prelu(x, w[0]), lambda: (*one(), *one()), seed=seed, exact=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [case for case in CASES if case != "rrelu"])
def test_narrow_payloads(case, differences, seed):
    # A payload that is rounded may step over a threshold; both sides start from the rounded one.
    assert max(differences(CASES[case], [(8, 8)])) < 2e-2


@pytest.mark.parametrize("case", ["gelu", "silu", "mish", "hardswish", "elu", "leaky_relu", "softshrink", "glu"])
def test_the_scale_stays(case):
    x = ScaledTensor.encode(torch.tensor([1e-4, -2e-4]), torch.float16)
    assert torch.equal(CASES[case](x.view(1, 2)).scale, x.scale)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("softsign", "tanhshrink")])
def test_the_gradients_scale_stays(case, seed):
    x = ScaledTensor.encode(torch.randn(3, 4), torch.float16).requires_grad_()
    y = CASES[case](x)
    gradient = ScaledTensor(torch.randn(y.shape).half(), 2.0**-21)
    (found,) = torch.autograd.grad(y, x, gradient)
    assert torch.equal(found.scale, gradient.scale)


@pytest.mark.parametrize("case", ["softplus", "logsigmoid", "hardsigmoid"])
def test_what_does_not_vanish_at_zero_fits(case):
    for x in (torch.tensor([1e-9, -2e-9]), torch.zeros(2)):
        y = CASES[case](ScaledTensor.encode(x, torch.float16))
        assert torch.allclose(y.decode(), CASES[case](x), rtol=1e-3)


def test_large_numbers_and_zeros():
    large = torch.tensor([1e20, -1e20])
    zeros = torch.zeros_like(ScaledTensor.encode(torch.ones(2), torch.float16))
    for case, function in CASES.items():
        if case != "glu" and "rrelu" not in case:
            y = function(ScaledTensor.encode(large, torch.float16))
            assert torch.allclose(y.decode(), function(large), rtol=1e-3, atol=1e-6 * y.abs().max().item() + 2e-3), case
            assert torch.allclose(function(zeros).decode(), function(torch.zeros(2)), rtol=1e-3), case


def positives():
    return (torch.rand(20) * 3 + 0.5,)


def pair():
    return torch.rand(20) + 0.5, torch.rand(20) + 0.5


SPECIAL_UNARY = (
    "lgamma digamma i0 special.log_ndtr special.erfcx special.entr special.bessel_y0 special.modified_bessel_k1"
)
BINARY = "xlogy special.xlog1py logaddexp logaddexp2 nextafter special.zeta ldexp"


@pytest.mark.parametrize("name", SPECIAL_UNARY.split())
def test_one_argument(seed, name):
    check_rule(function(name), positives, seed=seed, trials=3, gradients=False)


@pytest.mark.parametrize("name", BINARY.split())
def test_two_arguments(seed, name):
    check_rule(function(name), pair, seed=seed, trials=3, gradients=False, exact=1e-6)


@pytest.mark.parametrize("name", ["lgamma", "digamma", "xlogy", "logaddexp", "special.entr"])
def test_gradients(seed, name):
    arguments = pair if name in BINARY.split() else positives
    check_rule(function(name), arguments, seed=seed, trials=3, exact=1e-5)


def test_orders_and_polynomials(seed):
    check_rule(lambda x: torch.polygamma(2, x), positives, seed=seed, trials=3, exact=1e-5)
    check_rule(lambda x: torch.special.multigammaln(x + 2, 2), positives, seed=seed, trials=3, exact=1e-5)
    for name in ("chebyshev_polynomial_t", "hermite_polynomial_h", "legendre_polynomial_p"):
        check_rule(function(f"special.{name}"), lambda: (*positives(), torch.tensor(3)), seed=seed, gradients=False)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, float("inf")])
def test_distances(seed, p):
    check_rule(lambda x, y: torch.cdist(x, y, p), lambda: (torch.randn(5, 3), torch.randn(4, 3)), seed=seed, exact=1e-4)
    check_rule(lambda x: F.pdist(x, p), lambda: (torch.randn(5, 3),), seed=seed, trials=3, exact=1e-4)


def test_products_and_norms(seed):
    check_rule(torch.linalg.cross, lambda: (torch.randn(5, 3), torch.randn(5, 3)), seed=seed, trials=3, exact=1e-6)
    check_rule(lambda x: torch.renorm(x, 2, 0, 1.0), lambda: (torch.randn(5, 3),), seed=seed, trials=3, exact=1e-5)
    check_rule(lambda x, y: torch.dist(x, y), lambda: (torch.randn(5), torch.randn(5)), seed=seed, exact=1e-5)


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_samplers(seed, mode):
    def plane():
        return torch.randn(2, 3, 5, 5), torch.rand(2, 4, 4, 2) * 2 - 1

    def space():
        return torch.randn(1, 2, 3, 4, 5), torch.rand(1, 2, 3, 2, 3) * 2 - 1

    def sample(x, grid):
        return F.grid_sample(x, grid, mode=mode, align_corners=False)

    check_rule(sample, plane, seed=seed, trials=3)
    if mode != "bicubic":
        check_rule(sample, space, seed=seed, trials=3)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_and_segments(seed, mode):
    index, offsets = torch.randint(0, 6, (10,)), torch.tensor([0, 3, 7])
    check_rule(
        lambda w: F.embedding_bag(index, w, offsets, mode=mode), lambda: (torch.randn(6, 4),), seed=seed, trials=3
    )
    check_rule(
        lambda x: torch.segment_reduce(x, mode, lengths=torch.tensor([2, 3, 5])),
        lambda: (torch.randn(10),),
        seed=seed,
        trials=3,
    )


def test_weighted_bags(seed):
    index, offsets = torch.randint(0, 6, (10,)), torch.tensor([0, 3, 7])
    check_rule(
        lambda w, s: F.embedding_bag(index, w, offsets, mode="sum", per_sample_weights=s),
        lambda: (torch.randn(6, 4), torch.rand(10)),
        seed=seed,
        trials=3,
    )


def test_ctc_loss(seed):
    targets, lengths = torch.randint(1, 5, (2, 3)), (torch.full((2,), 8), torch.full((2,), 3))
    check_rule(
        lambda x: F.ctc_loss(x.log_softmax(-1), targets, *lengths),
        lambda: (torch.randn(8, 2, 5),),
        seed=seed,
        trials=3,
        exact=1e-5,
    )


def test_ctc_loss_of_long_sequences_in_float16(seed):
    """Losses of thousands, whose rounding to float16 is no small number under an exponential."""
    targets, lengths = torch.randint(1, 20, (2, 30)), (torch.full((2,), 500), torch.full((2,), 30))
    x = ScaledTensor.encode((torch.randn(500, 2, 20) * 3).log_softmax(-1)).requires_grad_()
    plain = x.detach().decode().requires_grad_()
    for given in (x, plain):
        F.ctc_loss(given, targets, *lengths, reduction="sum").backward()
    torch.testing.assert_close(x.grad.decode(), plain.grad, rtol=1e-2, atol=1e-2)


def test_sparse_gradients_are_plain():
    weight = ScaledTensor.encode(torch.randn(5, 2)).requires_grad_()
    index = torch.tensor([1, 3, 1])
    F.embedding(index, weight, sparse=True).sum().backward()
    assert weight.grad.is_sparse
    assert weight.grad.to_dense()[:, 0].tolist() == [0, 2, 0, 1, 0]


def test_float16_payloads(seed):
    for name in SPECIAL_UNARY.split():
        x = ScaledTensor.encode(*positives())
        torch.testing.assert_close(function(name)(x).decode(), function(name)(x.decode()), rtol=1e-2, atol=1e-2)


COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
PREDICATES = ("isnan", "isinf", "isposinf", "isneginf", "isfinite", "isreal", "signbit", "logical_not", "nonzero")


def some():
    """Values of which many are equal, and every special one."""
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])
    return torch.cat([torch.randint(-2, 3, (30,)) * 0.75, special])


@pytest.mark.parametrize("name", COMPARE)
def test_tensors_and_numbers(seed, name):
    check_rule(getattr(torch, name), lambda: (some(), some()), seed=seed, trials=3)
    check_rule(lambda x: getattr(torch, name)(x, 0.75), lambda: (some(),), seed=seed, trials=3)
    check_rule(lambda x: getattr(operator, name)(0.75, x), lambda: (some(),), seed=seed, trials=3)


@pytest.mark.parametrize("name", PREDICATES)
def test_tests_of_values(seed, name):
    check_rule(getattr(torch, name), lambda: (some(),), seed=seed, trials=3)


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor", "isclose", "isin"])
def test_pairs(seed, name):
    check_rule(getattr(torch, name), lambda: (some(), some()), seed=seed, trials=3)


def test_plain_tensors_and_other_storages():
    x = ScaledTensor.encode(torch.tensor([1.0, 2.0]), torch.float8_e4m3fn)
    assert (x == torch.tensor([1.0, 3.0])).tolist() == [True, False]
    assert (torch.tensor([1.0, 3.0]) > x).tolist() == [False, True]
    assert (x < torch.tensor([1, 3])).tolist() == [False, True]
    assert type(x == 1) is torch.Tensor


def test_whole_tensors():
    x = ScaledTensor(torch.tensor([1.0, 2.0]), 1.0)
    y = ScaledTensor(torch.tensor([4.0, 8.0]), 0.25)
    assert torch.equal(x, y)
    assert torch.allclose(x, y + 1e-9)
    assert not torch.equal(x, y * 2)
    assert not torch.allclose(x, y * 2)
    assert torch.equal(x, torch.tensor([1.0, 2.0]))
