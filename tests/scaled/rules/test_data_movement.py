"""Views, indexing, complex views and lists of scaled tensors."""

import pytest
import torch
import torch.nn.functional as F

from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor
from halfulp.scaled._registry import FAMILY_BY_OPERATOR
from halfulp.subclass import strict
from halfulp.testing import check_rule

ROWS = torch.tensor([0, 2, 0])
INDEX = torch.tensor([[0, 1, 1], [2, 0, 2], [1, 1, 0]])
MASK = torch.tensor([[True, False, True], [False, False, True], [True, False, False]])


def pair():
    return torch.randn(3, 3), torch.randn(3, 3)


CASES = {
    "index_put": lambda x, v: x.index_put((ROWS[:2],), v[:2]),
    "index_put accumulate": lambda x, v: x.index_put((ROWS,), v, accumulate=True),
    "index_put mask": lambda x, v: x.index_put((MASK,), v.flatten()[:4]),
    "index_put number": lambda x, v: x.index_put((MASK,), torch.tensor(0.3)),
    "scatter": lambda x, v: x.scatter(0, ROWS.view(1, 3), v[:1]),
    "scatter number": lambda x, v: x.scatter(1, INDEX, 0.3),
    "scatter_add": lambda x, v: x.scatter_add(1, INDEX, v),
    "scatter_reduce sum": lambda x, v: x.scatter_reduce(1, INDEX, v, "sum"),
    "scatter_reduce mean": lambda x, v: x.scatter_reduce(1, INDEX, v, "mean", include_self=False),
    "scatter_reduce amax": lambda x, v: x.scatter_reduce(1, INDEX, v, "amax"),
    "scatter_reduce amin": lambda x, v: x.scatter_reduce(1, INDEX, v, "amin"),
    "index_add": lambda x, v: x.index_add(0, ROWS, v, alpha=0.7),
    "index_copy": lambda x, v: x.index_copy(0, ROWS[:2], v[:2]),
    "index_fill": lambda x, v: x.index_fill(0, ROWS, 0.3),
    "put": lambda x, v: x.put(ROWS, v[0], accumulate=True),
    "take": lambda x, v: x.take(INDEX),
    "gather": lambda x, v: x.gather(1, INDEX),
    "index_select": lambda x, v: x.index_select(0, ROWS),
    "index": lambda x, v: x[ROWS, ROWS],
    "embedding": lambda x, v: F.embedding(INDEX, x),
    "embedding by frequency": lambda x, v: F.embedding(INDEX, x, padding_idx=1, scale_grad_by_freq=True),
    "take_along_dim": lambda x, v: torch.take_along_dim(x, INDEX, 0),
}
WITHOUT_GRADIENTS = {
    "scatter add": lambda x, v: x.scatter(1, INDEX, v, reduce="add"),
    "scatter multiply": lambda x, v: x.scatter(0, ROWS.view(1, 3), v[:1], reduce="multiply"),
    "scatter number times": lambda x, v: x.scatter(0, ROWS.view(1, 3), 0.3, reduce="multiply"),
}
PRODUCTS = {
    "scatter_reduce prod": lambda x, v: x.scatter_reduce(1, INDEX, v, "prod"),
    "index_reduce prod": lambda x, v: x.index_reduce(0, ROWS, v, "prod"),
}


@pytest.mark.filterwarnings("ignore:The reduce argument:UserWarning")
@pytest.mark.parametrize("case", [*CASES, *WITHOUT_GRADIENTS])
def test_bits_are_those_of_plain_tensors_under_all_scales(case, seed):
    with strict():
        function = CASES.get(case) or WITHOUT_GRADIENTS[case]
        check_rule(function, pair, seed=seed, trials=2, gradients=case in CASES)


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("case", PRODUCTS)
def test_products_are_close(case, seed):
    with strict():
        check_rule(PRODUCTS[case], pair, seed=seed, exact=1e-5, gradients=False)


@pytest.mark.parametrize("case", ["index_put", "scatter_add", "index_copy", "gather", "embedding"])
def test_narrow_payloads(case, differences, seed):
    function = CASES[case]
    if case in ("gather", "embedding"):
        assert max(differences(lambda x: function(x, None), [(3, 3)])) < 1e-2
    else:
        assert max(differences(function, [(3, 3), (3, 3)])) < 1e-2


def put_rows(x, v):
    x[ROWS[:2]] = v[:2]


def put_number(x, v):
    x[MASK] = 0.25


def add_at(x, v):
    x[1] += v[0]


def in_a_view(x, v):
    x.t()[1:].view(2, 3)[:, 1].mul_(2).add_(v[0, :2])


def masked(x, v):
    x[:2].masked_fill_(MASK[:2], 0.5)


def scattered(x, v):
    x.scatter_(1, INDEX, v).index_add_(0, ROWS, v)


@pytest.mark.parametrize("write", [put_rows, put_number, add_at, in_a_view, masked, scattered])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_place_and_in_views(write, dtype, seed):
    plain, values = torch.randn(3, 3), torch.randn(3, 3)
    x = ScaledTensor.encode(plain, dtype, scale=2.0**-2)
    v = ScaledTensor.encode(values, dtype, scale=2.0**1)
    plain, values = x.decode(), v.decode()
    view = x.view(9)
    with strict():
        write(x, v)
    write(plain, values)
    assert torch.allclose(
        x.decode(), plain, rtol=2e-3 if dtype == torch.float16 else 1e-6, atol=1e-3 if dtype == torch.float16 else 0
    )
    assert same_bits(view.decode(), x.decode().view(9))


def test_writing_into_zeros_of_any_scale(seed):
    values = ScaledTensor.encode(torch.randn(3, 3) * 1e-9, torch.float16)
    for function in CASES.values():
        y = function(torch.zeros_like(values), values)
        expected = function(torch.zeros(3, 3), values.decode())
        assert torch.allclose(y.decode(), expected, rtol=1e-3, atol=1e-12)


def test_a_plain_tensor_takes_scaled_values(seed):
    v = ScaledTensor.encode(torch.randn(3, 3), torch.float32)
    plain = torch.zeros(3, 3)
    plain.index_put_((ROWS[:2],), v[:2])
    assert same_bits(plain[ROWS[:2]], v[:2].decode())
    assert isinstance(torch.zeros(3, 3).scatter_add(1, INDEX, v), ScaledTensor)


WRITES = {
    "w[mask] = number": lambda w, v: w.__setitem__(MASK, v),
    "w[rows] = number": lambda w, v: w.__setitem__(ROWS, v),
    "w[mask] = tensor": lambda w, v: w.__setitem__(MASK, torch.full((4,), v)),
    "w[mask] = scaled tensor": lambda w, v: w.__setitem__(MASK, ScaledTensor.encode(torch.full((4,), v))),
    "w[0] = number": lambda w, v: w.__setitem__(0, v),
    "masked_fill_": lambda w, v: w.masked_fill_(MASK, v),
    "masked_scatter_": lambda w, v: w.masked_scatter_(MASK, torch.full((4,), v)),
    "index_fill_": lambda w, v: w.index_fill_(0, ROWS, v),
    "index_copy_": lambda w, v: w.index_copy_(0, ROWS[:2], torch.full((2, 3), v)),
    "index_put_": lambda w, v: w.index_put_((ROWS,), torch.tensor(v)),
    "scatter_ of a number": lambda w, v: w.scatter_(1, INDEX, v),
    "scatter_": lambda w, v: w.scatter_(1, INDEX, torch.full((3, 3), v)),
    "put_": lambda w, v: w.put_(ROWS, torch.full((3,), v)),
    "fill_diagonal_": lambda w, v: w.fill_diagonal_(v),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_of_which_nothing_would_be_left_is_refused(write, seed):
    """However it is spelled; the tensor is as it was, and takes the number once its scale is as small."""
    w = ScaledTensor.encode(torch.randn(3, 3), torch.float16)
    before = w.decode().clone()
    with pytest.raises(
        ValueError, match=r"a value of magnitude \S+ is 0 in torch.float16 under the scale .*with_scale"
    ):
        WRITES[write](w, 1e-9)
    assert torch.equal(w.decode(), before)
    for small in (0.0, 1e-6):
        expected = before.clone()
        WRITES[write](w, small)
        WRITES[write](expected, small)
        torch.testing.assert_close(w.decode(), expected, rtol=2**-4, atol=0)
    w.copy_((w * 2.0**-12).with_scale(2.0**-12))
    WRITES[write](w, 1e-9)
    assert ((w.decode() - 1e-9).abs() < 1e-10).any()


def test_a_write_nowhere_is_none(seed):
    w = ScaledTensor.encode(torch.randn(3, 3), torch.float16)
    before = w.decode().clone()
    w[torch.zeros(3, 3, dtype=torch.bool)] = 1e-9
    w.masked_fill_(torch.zeros(3, 3, dtype=torch.bool), 1e-9)
    w.index_fill_(0, torch.tensor([], dtype=torch.int64), 1e-9)
    w.index_put_((ROWS,), torch.tensor(1e-9), accumulate=True)  # what is added may be too little
    assert torch.equal(w.decode(), before)


@pytest.mark.parametrize(
    "operator",
    [
        torch.fft.rfft,
        torch.fft.fft2,
        lambda x: torch.fft.irfft(torch.fft.rfft(x)),
        lambda x: torch.view_as_complex(x.reshape(3, 2, 2)),
        lambda x: torch.complex(x, 2 * x),
        lambda x: torch.polar(x.abs(), x),
        lambda x: torch.fft.rfft(x).abs(),
    ],
)
def test_values_and_gradients(seed, operator):
    check_rule(operator, lambda: (torch.randn(3, 4),), seed=seed, trials=3, exact=1e-5)


def test_results_are_plain_and_gradients_arrive():
    x = ScaledTensor.encode(torch.randn(8)).requires_grad_()
    spectrum = torch.fft.rfft(x)
    assert type(spectrum) is torch.Tensor
    back = torch.fft.irfft(spectrum)
    assert type(back) is torch.Tensor
    (back * x).sum().backward()
    torch.testing.assert_close(x.grad.decode(), 2 * x.detach().decode(), rtol=1e-2, atol=1e-2)


def test_real_times_complex(seed):
    factor = torch.randn(4, dtype=torch.complex64)
    for operator in (torch.mul, torch.add, torch.sub, torch.div):
        check_rule(lambda x, f=operator: f(x, factor), lambda: (torch.randn(4) + 3,), seed=seed, trials=2, exact=1e-5)
    check_rule(lambda x: x * 2j + 1j, lambda: (torch.randn(4),), seed=seed, trials=2, exact=1e-5)
    check_rule(lambda x: x.to(torch.complex64), lambda: (torch.randn(4),), seed=seed, trials=2, exact=1e-5)


def lists(dtype):
    plain = [[torch.rand(2, 3) + 0.5 for _ in range(2)] for _ in range(3)]
    scaled = [[ScaledTensor.encode(x, dtype) for x in tensors] for tensors in plain]
    return [[x.decode() for x in tensors] for tensors in scaled], scaled


LISTS = {
    "add": lambda a, b, c: torch._foreach_add(a, b, alpha=0.3),
    "add number": lambda a, b, c: torch._foreach_add(a, 0.5),
    "add numbers": lambda a, b, c: torch._foreach_add(a, [0.5, 2.0]),
    "add tensor": lambda a, b, c: torch._foreach_add(a, torch.tensor(0.5)),
    "sub": lambda a, b, c: torch._foreach_sub(a, b),
    "mul": lambda a, b, c: torch._foreach_mul(a, b),
    "mul number": lambda a, b, c: torch._foreach_mul(a, 0.9),
    "mul tensor": lambda a, b, c: torch._foreach_mul(a, torch.tensor(0.9)),
    "div": lambda a, b, c: torch._foreach_div(a, b),
    "div numbers": lambda a, b, c: torch._foreach_div(a, [0.9, 1.1]),
    "addcmul": lambda a, b, c: torch._foreach_addcmul(a, b, c, value=0.1),
    "addcmul numbers": lambda a, b, c: torch._foreach_addcmul(a, b, c, [0.1, 0.2]),
    "addcdiv": lambda a, b, c: torch._foreach_addcdiv(a, b, c, value=-0.1),
    "addcdiv tensor": lambda a, b, c: torch._foreach_addcdiv(a, b, c, torch.tensor([0.1, 0.2])),
    "lerp": lambda a, b, c: torch._foreach_lerp(a, b, 0.3),
    "lerp list": lambda a, b, c: torch._foreach_lerp(a, b, c),
    "sqrt": lambda a, b, c: torch._foreach_sqrt(a),
    "pow": lambda a, b, c: torch._foreach_pow(a, 2.0),
    "pow of number": lambda a, b, c: torch._foreach_pow(2.0, a),
    "neg": lambda a, b, c: torch._foreach_neg(a),
    "maximum": lambda a, b, c: torch._foreach_maximum(a, b),
    "clamp_min": lambda a, b, c: torch._foreach_clamp_min(a, 0.8),
    "norm": lambda a, b, c: torch._foreach_norm(a),
    "norm inf": lambda a, b, c: torch._foreach_norm(a, float("inf")),
    "max": lambda a, b, c: torch._foreach_max(a),
    "sign": lambda a, b, c: torch._foreach_sign(a),
}
IN_PLACE = {
    "add_": lambda a, b, c: torch._foreach_add_(a, b, alpha=-0.1),
    "mul_": lambda a, b, c: torch._foreach_mul_(a, 0.9),
    "addcmul_": lambda a, b, c: torch._foreach_addcmul_(a, b, c, 0.1),
    "addcdiv_": lambda a, b, c: torch._foreach_addcdiv_(a, b, c, [0.1, 0.2]),
    "lerp_": lambda a, b, c: torch._foreach_lerp_(a, b, 0.1),
    "sqrt_": lambda a, b, c: torch._foreach_sqrt_(a),
    "div_": lambda a, b, c: torch._foreach_div_(a, b),
    "zero_": lambda a, b, c: torch._foreach_zero_(a),
    "copy_": lambda a, b, c: torch._foreach_copy_(a, b),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", [*LISTS, *IN_PLACE])
def test_as_on_plain_tensors(case, dtype, seed):
    plain, scaled = lists(dtype)
    function = LISTS.get(case) or IN_PLACE[case]
    with strict():
        found = function(*scaled)
    expected = function(*plain)
    if case in IN_PLACE:
        found, expected = scaled[0], plain[0]
    assert all(isinstance(x, ScaledTensor) for x in found)
    for x, y in zip(found, expected, strict=True):
        assert torch.allclose(x.decode(), y, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-7)


FOREACH = {str(x): x for x in FAMILY_BY_OPERATOR if x._schema.name.startswith("aten::_foreach_")}
COUNT = 3
GIVEN = {
    "List[Tensor]": lambda: [torch.rand(3, 3) * 0.8 + 0.1 for _ in range(COUNT)],
    "List[number]": lambda: [0.3, 0.7, 0.6],
    "Tensor": lambda: torch.tensor(0.3),
    "scalars": lambda: [0.3, 0.7, 0.6],
    "number": lambda: 0.7,
    "dtype": lambda: torch.float64,
    "memory_format": lambda: torch.contiguous_format,
    "bool": lambda: True,
}


@pytest.mark.parametrize("name", FOREACH)
def test_every_argument_of_every_operator_on_lists_arrives(name, seed):
    """With no argument at its default, by position and by name, on values that every function takes."""
    operator = FOREACH[name]
    places = operator._schema.arguments
    plain = {place.name: GIVEN[place.name if place.name in GIVEN else str(place.type)]() for place in places}
    if operator._overloadname == "Tensor" and "scalars" in plain:
        plain["scalars"] = torch.tensor(plain["scalars"])
    scaled = {
        place: [ScaledTensor.encode(y, torch.float32) for y in x] if str(kind.type) == "List[Tensor]" else x
        for (place, x), kind in zip(plain.items(), places)
    }
    kept = {place.name for place in places if place.kwarg_only}
    results = []
    for given in (plain, scaled):
        positional = [x for place, x in given.items() if place not in kept]
        found = operator(*positional, **{place: given[place] for place in kept})
        results.append(given["self"] if found is None else found)
    for wanted, found in zip(*results, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.allclose(found.decode(found.dtype), wanted, rtol=1e-6, atol=1e-7)


def test_clipping_gradients(seed):
    p = [torch.nn.Parameter(ScaledTensor.encode(torch.randn(3), torch.float16)) for _ in range(2)]
    for x in p:
        x.grad = ScaledTensor.encode(torch.randn(3), torch.float16)
    total = torch.cat([x.grad.decode() for x in p]).norm()
    with strict():
        assert torch.nn.utils.clip_grad_norm_(p, 1e-3).item() == pytest.approx(total.item(), rel=1e-2)
    assert torch.cat([x.grad.decode() for x in p]).norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_fused_optimizers_are_refused_with_the_remedy():
    p = torch.nn.Parameter(ScaledTensor.encode(torch.ones(3)))
    p.grad = ScaledTensor.encode(torch.ones(3))
    with pytest.raises(NotImplementedError, match=r"fused=False"):
        torch.optim.Adam([p], fused=True).step()


def test_kron_writes_values_and_scale_into_its_output(seed):
    # torch writes into an _unsafe_view of the output, which autograd does not know as a view of it.
    x = ScaledTensor.encode(50 * torch.randn(2, 2), torch.float32)
    wanted = torch.kron(x, x)
    out = torch.ones_like(wanted)
    torch.kron(x, x, out=out)
    assert torch.equal(out.decode(), wanted.decode())


def test_a_plain_output_that_is_empty_is_resized_beside_a_scaled_one(seed):
    x = ScaledTensor.encode(torch.randn(3, 4))
    values, places = ScaledTensor.encode(torch.ones(3)), torch.empty(0, dtype=torch.int64)
    torch.max(x, 1, out=(values, places))
    wanted = x.decode().max(1)
    assert torch.equal(values.decode(), wanted.values)
    assert torch.equal(places, wanted.indices)


def test_unscaling_gradients_finds_what_is_not_finite(seed):
    g = [ScaledTensor.encode(torch.randn(3), torch.float32) for _ in range(2)]
    before, found = [x.decode() for x in g], torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(g, found, torch.tensor(0.25))
    assert found.item() == 0.0
    assert all(same_bits(x.decode(), y * 0.25) for x, y in zip(g, before))
    g[1][0] = float("inf")
    torch._amp_foreach_non_finite_check_and_unscale_(g, found, torch.tensor(1.0))
    assert found.item() == 1.0
