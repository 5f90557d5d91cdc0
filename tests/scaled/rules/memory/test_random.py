"""Random operators draw what plain tensors draw."""

import pytest
import torch
import torch.nn.functional as F

from halfulp.scaled import ScaledTensor
from halfulp.scaled._registry import LOGICALS
from halfulp.subclass import strict
from halfulp.testing import check_rule


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
@pytest.mark.parametrize("logical", LOGICALS)
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
