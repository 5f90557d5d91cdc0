"""Weights that are handed to an optimizer enter by every weight update: infinite ones too."""

import itertools

import pytest
import torch

import halfulp as hu
from halfulp.kernels import engine

from ...laws.optim.cases import UPDATES, narrow_updates

GIVEN = [name for name in narrow_updates() if not UPDATES[name].feeds_back]
COMPILED = [("kahan", "llvm"), ("components-3", "llvm")]


@pytest.mark.parametrize(("update", "engine_name"), [*itertools.product(GIVEN, ["reference"]), *COMPILED])
def test_infinite_weights_stay_infinite_and_cost_the_others_nothing(update, engine_name):
    values = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 0.0]).bfloat16()
    parameter = torch.nn.Parameter(values.clone())
    optimizer = hu.optim.wrap(torch.optim.SGD, [parameter], lr=0.5, weight_update=UPDATES[update], report_interval=1)
    with engine(engine_name):
        for gradient in (0.0, 1.0, -2.0):
            parameter.grad = torch.full((5,), gradient).bfloat16()
            optimizer.step()
    assert parameter.tolist()[:3] == [1.5, torch.inf, -torch.inf]
    assert parameter[3].isnan()
    assert parameter[4] == 0.5
