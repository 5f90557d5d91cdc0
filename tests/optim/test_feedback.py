"""Feedback: what stochastic rounding loses comes back through the first moment."""

import warnings

import pytest
import torch

import halfulp as hu


def _drift(update, steps=600, elements=4000):
    """Deviation over elements of the share of a constant update that was kept, and its mean."""
    w = (torch.rand(elements) + 1).bfloat16()
    parameter = torch.nn.Parameter(w.clone())
    parameter.grad_dtype = None
    optimizer = hu.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_update=update, state_dtype=torch.float32)
    parameter.grad = torch.full((elements,), -(2.0**-12))
    for _ in range(steps):
        optimizer.step()
    whole = (steps - 9 * (1 - 0.9**steps)) * 2.0**-12
    kept = (parameter.detach().double() - w.double()) / whole
    return float(kept.std()), float(kept.mean())


def test_it_is_right_on_average_with_far_less_noise_than_stochastic_rounding(seed):
    (noise, mean), (plain, plain_mean) = _drift("feedback"), _drift("stochastic")
    assert abs(mean - 1) < 0.03
    assert abs(plain_mean - 1) < 0.03
    assert noise < plain / 4


def _optimizer(update="feedback", lr=0.01, states=None):
    parameter = torch.nn.Parameter(torch.randn(64).bfloat16())
    optimizer = hu.optim.AdamW([parameter], lr=lr, weight_update=update, state_dtype=states)
    parameter.grad = torch.randn(64).bfloat16()
    return parameter, optimizer


@pytest.mark.parametrize("factor", [2.5, 0.3, 100])
def test_a_rate_that_jumps_is_warned_of(factor):
    _, optimizer = _optimizer()
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= factor
    with pytest.warns(RuntimeWarning, match="repaid"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize("factors", [(2.0,), (0.5,), (0.0, 0.0), (1.5, 1.5)])
def test_other_changes_are_not(factors):
    parameter, optimizer = _optimizer()
    optimizer.step()
    for factor in factors:
        optimizer.param_groups[0]["lr"] *= factor
        optimizer.step()
    assert parameter.detach().isfinite().all()
    assert optimizer.state[parameter]["exp_avg"].isfinite().all()


def test_nothing_is_put_in_while_the_rate_is_zero():
    a, first = _optimizer("feedback", 0.0, torch.float32)
    b, second = _optimizer("stochastic", 0.0, torch.float32)
    b.grad = a.grad.clone()
    first.step()
    second.step()
    assert torch.equal(first.state[a]["exp_avg"], second.state[b]["exp_avg"])


@pytest.mark.parametrize("kind", [hu.optim.Lion, hu.optim.SGD])
def test_rules_without_a_moment_to_use_refuse_it(kind):
    with pytest.raises(ValueError, match="feedback"):
        kind([torch.nn.Parameter(torch.zeros(2).bfloat16())], lr=0.1, weight_update=hu.Feedback())
