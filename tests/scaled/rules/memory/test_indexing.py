"""Writing at indices: bits do not depend on scales, and in place as out of place."""

import pytest
import torch
import torch.nn.functional as F

from halfulp.kernels import same_bits
from halfulp.scaled import ScaledTensor
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
