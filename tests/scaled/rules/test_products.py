"""Products, convolutions and linear algebra of scaled tensors."""

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import halfulp as hu
from halfulp.scaled import ScaledTensor
from halfulp.scaled._powers_of_two import LARGEST_SCALE, SCALE_OF_ZEROS
from halfulp.subclass import strict
from halfulp.testing import check_rule

OFFSETS = torch.tensor([4, 8, 16], dtype=torch.int32)
PRODUCTS = {
    "mm": (torch.mm, (40, 600), (600, 20)),
    "mm of a view": (lambda a, b: torch.mm(a.t(), b[::2]), (30, 5), (60, 4)),
    "mm of an expanded": (lambda a, b: torch.mm(a.expand(5, 30), b), (1, 30), (30, 4)),
    "mm of nothing": (torch.mm, (3, 0), (0, 4)),
    "bmm": (torch.bmm, (3, 4, 60), (3, 60, 5)),
    "mv": (torch.mv, (4, 60), (60,)),
    "dot": (torch.dot, (60,), (60,)),
    "linear": (functional.linear, (2, 5, 600), (7, 600), (7,)),
    "linear without bias": (functional.linear, (2, 5, 60), (7, 60)),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.3, alpha=-1.7), (5,), (4, 600), (600, 5)),
    "addmm beta 0": (lambda c, a, b: torch.addmm(c, a, b, beta=0), (4, 5), (4, 60), (60, 5)),
    "addmm alpha 0": (lambda c, a, b: torch.addmm(c, a, b, alpha=0), (4, 5), (4, 60), (60, 5)),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, beta=0.1), (4, 5), (3, 4, 60), (3, 60, 5)),
    "addbmm": (lambda c, a, b: torch.addbmm(c, a, b, alpha=0.1), (4, 5), (3, 4, 60), (3, 60, 5)),
    "addmv": (lambda c, a, b: torch.addmv(c, a, b, beta=2), (4,), (4, 60), (60,)),
    "addr": (lambda c, a, b: torch.addr(c, a, b, beta=0.5, alpha=3), (4, 5), (4,), (5,)),
    "outer": (torch.outer, (4,), (5,)),
    "mul": (torch.mul, (4, 5), (5,)),
    "mul by a number": (lambda a: a * 0.95 * 3, (4, 5)),
    "mul by 0": (lambda a: a * 0.0, (4, 5)),
    "div": (torch.div, (4, 20), (20,)),
    "div by a number": (lambda a: a / 0.3, (4, 5)),
    "div of a number": (lambda a: 0.3 / a, (4, 5)),
    "addcmul": (lambda c, a, b: torch.addcmul(c, a, b, value=0.3), (4, 5), (4, 1), (5,)),
    "addcdiv": (lambda c, a, b: torch.addcdiv(c, a, b, value=0.3), (20, 20), (20, 1), (20,)),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), (4, 5), (5,)),
    "lerp by a tensor": (torch.lerp, (4, 5), (5,), (4, 1)),
    "bilinear": (functional.bilinear, (2, 3), (2, 4), (5, 3, 4), (5,)),
    "einsum": (lambda a, b: torch.einsum("bij,kj->bik", a, b), (3, 4, 6), (5, 6)),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=2), (3, 4, 6), (4, 6, 2)),
    "kron": (torch.kron, (3, 4), (2, 2)),
    "multi_dot": (lambda a, b, c: torch.linalg.multi_dot([a, b, c]), (3, 4), (4, 5), (5, 2)),
    "grouped rows": (lambda a, b: torch._grouped_mm(a, b, offs=OFFSETS), (16, 16), (3, 16, 8)),
    "grouped columns": (lambda a, b: torch._grouped_mm(a, b, offs=OFFSETS), (8, 16), (16, 8)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_the_plain_one_whatever_the_scales(name, seed):
    operator, *shapes = PRODUCTS[name]
    with strict():
        check_rule(operator, lambda: [torch.randn(shape) for shape in shapes], trials=2, seed=seed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in PRODUCTS if not name.endswith((" 0", "nothing"))])
def test_a_product_of_float16_payloads_is_near(name, differences, seed):
    operator, *shapes = PRODUCTS[name]

    # A quotient by what is near 0 leaves float16's range, and one such gradient outweighs all others: if the terms of
    # its sum cancel, what they were rounded by is all that is left.
    def apart(*tensors: Tensor) -> Tensor:
        last = tensors[-1]
        return operator(*tensors[:-1], last.abs() + 1) if "div" in name else operator(*tensors)

    assert max(differences(apart, shapes)) < 1e-2


def test_far_scales_change_nothing(seed):
    a, b, c = torch.randn(4, 60), torch.randn(60, 5), torch.randn(5)
    for left, right, of_bias in [(50, 50, 0), (-50, -50, 0), (50, -50, 40), (0, 0, 60), (-40, -40, -60)]:
        x, y, z = (ScaledTensor(t * 2.0**-k, 2.0**k) for t, k in ((a, left), (b, right), (c, of_bias)))
        assert torch.equal((x @ y).decode(), a @ b)
        assert torch.equal(torch.addmm(z, x, y).decode(), torch.addmm(c, a, b))
        assert torch.equal((x[:, :5] * z / z).decode(), a[:, :5] * c / c)


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_rounded_quotients_are_of_values(mode, seed):
    for divisor in (torch.randn(5), 0.07, 30.0):
        pairs = [] if isinstance(divisor, float) else [divisor]
        check_rule(
            lambda a, b=divisor: torch.div(a, b, rounding_mode=mode),
            lambda pairs=pairs: [torch.randn(4, 5), *pairs],
            trials=2,
            seed=seed,
        )
    x = ScaledTensor.encode(torch.tensor([-1e-6, 1e-6, 0.0]))
    assert (x // 1000).tolist() == [-1.0, 0.0, 0.0]


def test_a_result_that_a_long_sum_makes_large_fits():
    x = ScaledTensor(torch.ones(1, 70000, dtype=torch.float16), 1.0)
    y = x @ x.t()
    assert y.payload.dtype == torch.float16
    assert y.item() == 70016.0
    assert torch.addmm(ScaledTensor.encode(torch.zeros(1)), x, x.t()).item() == 70016.0


def test_zeros_of_any_scale_decide_nothing():
    x = ScaledTensor.encode(torch.tensor([3.0, -5.0]))
    zeros = torch.zeros_like(x)
    assert torch.addcmul(zeros, x, x).tolist() == [9.0, 25.0]
    assert torch.lerp(zeros, x, 0.5).tolist() == [1.5, -2.5]
    assert (x * zeros).tolist() == (zeros / x).tolist() == [0.0, 0.0]
    assert (x * 0).scale.item() <= SCALE_OF_ZEROS * x.scale.item()
    assert (x / zeros).tolist() == [float("inf"), -float("inf")]
    chosen = torch.where(torch.tensor([True, False]), x / zeros, x)
    assert chosen.tolist() == [float("inf"), -5.0]
    assert torch.addmm(zeros, ScaledTensor.encode(torch.eye(2)), ScaledTensor.encode(torch.eye(2))).tolist() == [
        [1.0, 0.0],
        [0.0, 1.0],
    ]


def test_infinities_and_nan_stay():
    inf = float("inf")
    mask = ScaledTensor.encode(torch.tensor([[0.0, -inf], [0.0, 0.0]]))
    ones = ScaledTensor.encode(torch.full((1, 2, 2), 1e10))
    assert torch.baddbmm(mask, ones, ones).isneginf().tolist() == [[[False, True], [False, False]]]
    x = ScaledTensor.encode(torch.tensor([1.0, inf, float("nan")]))
    assert str((x * 2.0).tolist()) == "[2.0, inf, nan]"
    assert str((x / 0).tolist()) == "[inf, inf, nan]"
    assert str((x * inf).tolist()) == "[inf, inf, nan]"


def test_plain_tensors_of_other_kinds_meet_scaled_ones():
    x = ScaledTensor.encode(torch.tensor([1.0, 2.0]))
    assert (x * torch.tensor([3, 4])).tolist() == [3.0, 8.0] == (torch.tensor([3, 4]) * x).tolist()
    assert (x * torch.tensor([True, False])).tolist() == [1.0, 0.0]
    assert torch.equal(x * 1j, torch.tensor([1j, 2j]))
    assert torch.equal(x / 1j, torch.tensor([-1j, -2j]))
    assert (x @ torch.tensor([2.0, 3.0])).item() == 8.0
    assert torch.lerp(torch.zeros(2), torch.ones(2), x / 2).tolist() == [0.5, 1.0]


def test_eight_bit_payloads_multiply_into_float16(seed):
    a, b = (ScaledTensor.encode(torch.randn(6, 6), dtype) for dtype in (torch.float8_e5m2, torch.float8_e4m3fn))
    y = a @ b
    assert y.payload.dtype == torch.float16
    exact = a.decode(torch.float64) @ b.decode(torch.float64)
    assert (y.decode(torch.float64) - exact).abs().max() <= exact.abs().max() * 2**-11


def test_moving_averages_of_decaying_values_stay_finite(seed):
    average, square = (torch.zeros_like(ScaledTensor.encode(torch.randn(64))) for _ in range(2))
    wide = [torch.zeros(64, dtype=torch.float64) for _ in range(2)]
    gradient = torch.randn(64)
    for _ in range(1000):
        gradient = gradient * 0.99
        g = ScaledTensor.encode(gradient)
        average.lerp_(g, 0.1)
        square.mul_(0.95).addcmul_(g, g, value=0.05)
        wide = [wide[0].lerp(g.decode(torch.float64), 0.1), 0.95 * wide[1] + 0.05 * g.decode(torch.float64) ** 2]
    assert average.payload.isfinite().all()
    assert square.payload.isfinite().all()
    # What the payloads held at first, rounded, is gone by now; the scales are those of the first gradients.
    assert (average.decode(torch.float64) - wide[0]).abs().max() < 1e-5
    assert (square.decode(torch.float64) - wide[1]).abs().max() < 1e-5


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_gives_the_same_bits(dynamic, seed):
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.linear(x, weight, bias) / x.shape[0] * 0.3 / weight[0, 0]

    shapes = ((24, 30), (40, 30), (40,))
    tensors = [ScaledTensor.encode(torch.randn(shape), torch.float32).requires_grad_() for shape in shapes]
    twins = [x.detach().clone().requires_grad_() for x in tensors]
    run(*tensors).sum().backward()
    torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")(*twins).sum().backward()
    assert all(torch.equal(x.grad.decode(), y.grad.decode()) for x, y in zip(tensors, twins))


def test_results_that_outgrow_their_scale_take_a_larger_one():
    x = ScaledTensor.encode(torch.tensor([1e-3, 1.0, 2.0, 1.5]), torch.float16)
    y = x.reciprocal()
    gradient = y * y * 2
    wanted = 2 / x.decode().double() ** 2
    assert ((gradient.decode().double() - wanted).abs() <= 2e-3 * wanted).all()
    large = ScaledTensor(torch.full((4,), 2048.0, dtype=torch.float16), 1.0)
    assert (large * large).tolist() == [2.0**22] * 4
    mixed = ScaledTensor(torch.tensor([2048.0, torch.inf, torch.nan], dtype=torch.float16), 1.0)
    squares = (mixed * mixed).decode()
    assert squares[0] == 2.0**22
    assert squares[1] == torch.inf
    assert squares[2].isnan()


def test_a_wide_product_of_graphs_keeps_the_rules_of_operators():
    from halfulp.scaled.rules import _products

    operator = torch.ops.halfulp.multiply_into_float32.default
    for shapes in (((3, 5), (5, 4)), ((2, 3, 5), (2, 5, 4)), ((0, 5), (5, 4)), ((3, 0), (0, 4))):
        a, b = (torch.randn(shape).to(torch.float16) for shape in shapes)
        torch.library.opcheck(operator, (a, b), test_utils=("test_schema", "test_faketensor"))
        assert torch.equal(_products.multiply_into_float32(a, b), a.float() @ b.float())
    a = torch.randn(5, 3).to(torch.float16).t()  # as of a weight's gradient
    torch.library.opcheck(operator, (a, torch.randn(5, 4).half()), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch, as it loads its compiler
@pytest.mark.parametrize("bias", [False, True])
def test_compiled_float16_products_on_a_gpu_take_no_float32_matrices(bias):
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch.manual_seed(0)
    layer = hu.scalify(torch.nn.Linear(64, 48, bias=bias).cuda(), torch.float16)
    x = ScaledTensor.encode(torch.randn(32, 64, device="cuda"), torch.float16).requires_grad_()

    def loss() -> torch.Tensor:
        return (layer(x).decode() ** 2).sum()

    loss().backward()
    eager = [layer.weight.grad.decode(), x.grad.decode()]
    layer.zero_grad()
    x.grad = None
    _, texts = run_fw_bw_and_get_code(torch.compile(loss, fullgraph=True))
    assert all("multiply_into_float32" in text and "extern_kernels.mm" not in text for text in texts)
    for found, expected in zip((layer.weight.grad.decode(), x.grad.decode()), eager):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))


CONVOLUTIONS = {
    "1d": (lambda x, w: functional.conv1d(x, w, groups=2, dilation=2), (2, 6, 19), (8, 3, 3)),
    "2d": (lambda x, w, b: functional.conv2d(x, w, b, padding=1, stride=2), (2, 6, 9, 9), (8, 6, 3, 3), (8,)),
    "2d same": (lambda x, w, b: functional.conv2d(x, w, b, padding="same"), (2, 3, 6, 6), (4, 3, 3, 3), (4,)),
    "2d without a batch": (functional.conv2d, (6, 9, 9), (8, 6, 3, 3), (8,)),
    "2d of a view": (lambda x, w: functional.conv2d(x.transpose(2, 3)[:, 1:], w), (2, 5, 7, 6), (3, 4, 2, 2)),
    "depthwise": (lambda x, w: functional.conv2d(x, w, groups=6), (2, 6, 7, 7), (6, 1, 3, 3)),
    "3d": (functional.conv3d, (1, 2, 5, 5, 5), (4, 2, 3, 3, 3), (4,)),
    "transposed 1d": (functional.conv_transpose1d, (2, 3, 7), (3, 4, 3), (4,)),
    "transposed 2d": (
        lambda x, w, b: functional.conv_transpose2d(x, w, b, stride=2, groups=2, output_padding=1),
        *((2, 6, 5, 5), (6, 4, 3, 3), (8,)),
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_the_plain_one_whatever_the_scales(name, seed):
    operator, *shapes = CONVOLUTIONS[name]
    with strict():
        check_rule(operator, lambda: [torch.randn(shape) for shape in shapes], trials=2, seed=seed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_of_float16_payloads_is_near(name, differences, seed):
    operator, *shapes = CONVOLUTIONS[name]
    assert max(differences(operator, shapes)) < 1e-2


def test_a_convolution_over_time(seed):
    shapes = [(7, 2, 3), (3, 3, 16), (16,)]
    with strict():  # torch sums the plain one in another order
        check_rule(
            lambda *t: torch.conv_tbc(*t, 1), lambda: [torch.randn(s) for s in shapes], trials=2, seed=seed, exact=1e-6
        )


def test_only_the_gradients_asked_for(seed):
    x = ScaledTensor.encode(torch.randn(2, 3, 5, 5))
    weight = ScaledTensor.encode(torch.randn(4, 3, 3, 3)).requires_grad_()
    functional.conv2d(x, weight).sum().backward()
    assert weight.grad.isfinite().all()
    assert x.grad is None


def test_payloads_stay_near_1(seed):
    x = ScaledTensor.encode(torch.randn(8, 32, 16, 16)).requires_grad_()
    weight = ScaledTensor.encode(torch.randn(32, 32, 3, 3) * 0.02).requires_grad_()
    y = functional.conv2d(x, weight)
    y.backward(ScaledTensor.encode(torch.randn(y.shape) * 1e-4))
    for tensor in (y, x.grad, weight.grad):
        assert 0.25 < tensor.payload.detach().float().square().mean().sqrt() < 4


def test_zeros_and_infinities(seed):
    x = ScaledTensor.encode(torch.randn(1, 2, 5, 5))
    weight = ScaledTensor.encode(torch.randn(3, 2, 3, 3))
    assert not functional.conv2d(torch.zeros_like(x), weight).any()
    bias = ScaledTensor.encode(torch.tensor([1.0, float("inf"), 0.0]))
    y = functional.conv2d(torch.zeros_like(x), weight, bias)
    assert y.mean((0, 2, 3)).tolist() == [1.0, float("inf"), 0.0]


def test_one_graph_of_convolutions_gives_the_same_bits(seed):
    tensors = [ScaledTensor.encode(torch.randn(s), torch.float32) for s in ((2, 4, 6, 6), (3, 4, 3, 3), (3,))]
    twins = [x.clone().requires_grad_() for x in tensors]
    tensors = [x.requires_grad_() for x in tensors]
    functional.conv2d(*tensors).sum().backward()
    torch.compile(functional.conv2d, fullgraph=True, backend="aot_eager")(*twins).sum().backward()
    assert all(torch.equal(x.grad.decode(), y.grad.decode()) for x, y in zip(tensors, twins))


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


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_products_of_another_dtype_are_refused_with_the_remedy(name, seed, needs_torch):
    needs_torch("products with out_dtype=")
    x = ScaledTensor.encode(torch.randn(3, 3) if "bmm" not in name else torch.randn(2, 3, 3))
    given = (x, x, x) if "add" in name else (x, x)
    with pytest.raises(NotImplementedError, match=r"take no out_dtype=: convert the result, \(a @ b\)\.to\(dtype\)"):
        getattr(torch, name)(*given, out_dtype=torch.float32)


@pytest.mark.parametrize("name", ["mul", "div", "matmul", "addcmul", "addcdiv"])
@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_products_and_quotients_under_scales_at_the_edges(name, storage):
    """Exact wherever the result is in float32's range, under the smallest scale and the largest too."""
    numbers = [1.5, -1.25, 1.0]
    edges = [SCALE_OF_ZEROS, 2.0**-60, 1.0, 2.0**60, LARGEST_SCALE]
    for first, second in itertools.product(edges, edges):
        exact = Fraction(first) * (1 / Fraction(second) if "div" in name else Fraction(second))
        if not 2.0**-126 <= exact <= 2.0**125:
            continue
        x, y = (ScaledTensor(torch.tensor(numbers[:2]).to(storage), scale) for scale in (first, second))
        start = ScaledTensor(torch.zeros(2).to(storage), 1.0)
        one = 1.0 if storage == torch.float32 else 0.75  # whose third no storage holds
        if "div" in name:
            y = ScaledTensor(torch.tensor([0.5, 2.0]).to(storage), second)
            wanted = [3.0, -0.625]
        else:
            wanted = [2.25, 1.5625]
        if name == "matmul":
            found, wanted = x @ y, [sum(wanted)]
        elif name in ("mul", "div"):
            found = getattr(torch, name)(x, y)
        else:
            found, wanted = getattr(torch, name)(start, x, y, value=one), [one * value for value in wanted]
        got = [Fraction(value) * Fraction(found.scale.item()) for value in found.payload.double().reshape(-1).tolist()]
        near = 2.0 ** -{torch.float16: 9, torch.bfloat16: 6, torch.float32: 22}[storage]
        for ours, value in zip(got, wanted, strict=True):
            assert abs(ours - Fraction(value) * exact) <= near * abs(Fraction(value) * exact), (first, second)
