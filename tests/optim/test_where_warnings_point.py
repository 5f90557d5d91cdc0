"""Every warning of an optimizer points at the user's line, whatever of this package and torch stands between."""

import warnings

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import halfulp as hu
from halfulp.kernels import _engine as _engines
from halfulp.optim import _lost_updates


def _model(dtype=torch.bfloat16):
    return torch.nn.Linear(4, 4).to(dtype)


def _step(optimizer):
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        parameter.grad = torch.full_like(parameter, 2.0**-20)
    optimizer.step()


def _optimizer(model, **options):
    return hu.optim.SGD(model.named_parameters(), **{"lr": 2.0**-20, **options})


def _averages_that_are_made():
    model = _model()
    _optimizer(model)
    AveragedModel(model)


def _writes_between_steps():
    model = _model()
    optimizer = _optimizer(model, weight_update="kahan")
    for _ in range(3):
        _step(optimizer)
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)


def _updates_that_are_lost():
    optimizer = _optimizer(_model(), weight_update="nearest", report_interval=1)
    for _ in range(_lost_updates.MOSTLY_LOST_STEPS_BEFORE_WARNING):
        _step(optimizer)


CASES = {
    _averages_that_are_made: "keeps its averages",
    _writes_between_steps: "written between steps",
    _updates_that_are_lost: "cancelled",
}


@pytest.mark.parametrize("case", CASES)
def test_the_line_is_the_users(case, monkeypatch, seed):
    monkeypatch.setattr(_engines, "_fallback_counts", type(_engines._fallback_counts)())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        case()
    assert {CASES[case] in str(one.message) for one in told} == {True}
    assert {one.filename for one in told} == {__file__}
