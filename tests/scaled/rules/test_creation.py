"""Scaled tensors that operators make: constants, initial values, random numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfulp.scaled import ScaledTensor
from halfulp.scaled._registry import LOGICAL_DTYPES
from halfulp.subclass import strict
from halfulp.testing import check_rule


@pytest.fixture
def x():
    return ScaledTensor.encode(torch.randn(2, 3), torch.float16)


@pytest.mark.parametrize("value", [0.0, 1.0, -3e-12, 7e20, float("inf"), -float("inf"), float("nan")])
def test_numbers(x, value):
    for y in (torch.full_like(x, value), x.new_full((2, 3), value)):
        assert isinstance(y, ScaledTensor)
        assert y.payload.dtype == torch.float16
        assert torch.allclose(y.decode(), torch.full((2, 3), value), rtol=1e-3, atol=0, equal_nan=True)


def test_zeros_take_any_scale_and_ones_take_one(x):
    for y in (
        torch.zeros_like(x),
        x.new_zeros(2, 3),
        torch.empty_like(x),
        x.new_empty(2),
        x.new_empty_strided((2,), (1,)),
    ):
        assert y.scale.item() == 2.0**-126
        assert not y.any()
    for y in (torch.ones_like(x), x.new_ones(2, 3)):
        assert y.scale.item() == 1.0
        assert y.decode().eq(1).all()


def test_other_dtypes_are_plain(x):
    assert type(torch.zeros_like(x, dtype=torch.long)) is torch.Tensor
    assert type(x.new_ones(2, dtype=torch.bool)) is torch.Tensor
    assert torch.ones_like(x, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_strides_are_those_of_plain_tensors(x):
    assert torch.zeros_like(x.t()).stride() == torch.zeros_like(torch.zeros(2, 3).t()).stride()
    assert x.new_empty_strided((2, 3), (1, 2)).stride() == (1, 2)


def test_each_has_a_scale_of_its_own(x):
    zeros = torch.zeros_like(x)
    zeros.copy_(x)
    assert torch.zeros_like(x).scale.item() == 2.0**-126


INITS = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
ARGUMENTS = {"constant_": (0.3,), "sparse_": (0.2,)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", INITS)
@pytest.mark.parametrize("is_parameter", [False, True])
def test_every_initialization(name, dtype, is_parameter, seed):
    shape = (4, 4, 3) if name == "dirac_" else (6, 4)
    weight = ScaledTensor.encode(torch.full(shape, 9.0), dtype)
    weight = nn.Parameter(weight) if is_parameter else weight
    plain = torch.full(shape, 9.0)
    initialize, given = getattr(nn.init, name), ARGUMENTS.get(name, ())
    torch.manual_seed(seed)
    assert initialize(weight, *given) is weight
    torch.manual_seed(seed)
    initialize(plain, *given)
    found = weight.detach().decode()
    assert found.isfinite().all()
    assert (found != 9.0).all()
    # Truncated draws are made by writes in place, each rounded; the inverse error function magnifies the first.
    is_rounded_often = name == "trunc_normal_" and dtype != torch.float16
    if name not in ("orthogonal_", "sparse_") and not is_rounded_often:
        assert torch.allclose(found, plain, rtol=0.07, atol=0.01 * plain.abs().max().item())


@pytest.mark.parametrize("sizes", [(4,), (3, 5), (0, 2)])
def test_eye_is_written_into_a_scaled_tensor(sizes):
    shape = sizes * 2 if len(sizes) == 1 else sizes
    x = ScaledTensor.encode(torch.randn(shape), torch.float16)
    assert torch.eye(*sizes, out=x) is x
    assert torch.equal(x.decode(), torch.eye(*sizes))


def one():
    return (torch.rand(4, 6) + 0.1,)


CASES = {
    "dropout": lambda x: F.dropout(x, 0.25),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.25, True),
}
DRAWN = {
    "bernoulli": lambda x: torch.bernoulli(x.clamp(max=1)),
    "bernoulli p": lambda x: x.bernoulli(0.3),
    "bernoulli_": lambda x: x.clone().bernoulli_(),
    "normal_": lambda x: x.clone().normal_(1e-3, 2e-3),
    "uniform_": lambda x: x.clone().uniform_(-1e-4, 1e-4),
    "exponential_": lambda x: x.clone().exponential_(3.0),
    "trunc_normal_": lambda x: torch.nn.init.trunc_normal_(x.clone(), std=0.02),
    "kaiming_uniform_": lambda x: torch.nn.init.kaiming_uniform_(x.clone()),
    "orthogonal_": lambda x: torch.nn.init.orthogonal_(x.clone()),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "multinomial": lambda x: x.multinomial(3),
    "poisson": torch.poisson,
    "normal": lambda x: torch.normal(x, x),
}


@pytest.mark.parametrize("case", CASES)
def test_with_gradients(case, seed):
    with strict():
        check_rule(CASES[case], one, seed=seed, trials=2, exact=1e-6)


@pytest.mark.parametrize("case", DRAWN)
def test_without_gradients(case, seed):
    with torch.no_grad(), strict():
        check_rule(DRAWN[case], one, seed=seed, trials=2, exact=1e-6, gradients=False)


LIKE = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x, **options: torch.randint_like(x, 9, **options),
}


@pytest.mark.parametrize("case", LIKE)
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("logical", LOGICAL_DTYPES)
def test_numbers_like_another_are_float32s_whatever_the_logical_dtype(case, asked, logical, seed):
    x = ScaledTensor(torch.randn(64), 1.0, torch.float32 if asked else logical)
    options = {"dtype": logical} if asked else {}
    torch.manual_seed(seed)
    found = LIKE[case](x, **options)
    torch.manual_seed(seed)
    assert found.dtype == logical
    assert torch.equal(found.payload * found.scale, LIKE[case](torch.empty(64)))


def test_parameters_are_initialised_within_their_storage(seed):
    x = ScaledTensor.encode(torch.zeros(256), torch.float8_e4m3fn)
    with torch.no_grad():
        x.normal_(0.0, 1e-9)
    assert x.payload.dtype == torch.float8_e4m3fn
    assert 0.5e-9 < x.decode().std() < 2e-9
