"""The share of 8-bit states below their codes' range: what a comparison with float32 states finds."""

import pytest
import torch

import halfulp as hu


def _stepped(gradient, state_dtype, kind=hu.optim.AdamW, steps=3):
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    optimizer = kind([parameter], lr=0.1, state_dtype=state_dtype, report_interval=0)
    with hu.kernels.engine("reference"):
        for _ in range(steps):
            parameter.grad = gradient
            optimizer.step()
    return optimizer


@pytest.mark.parametrize(("small", "share"), [(0.0, 0.0), (1e-4, 0.0), (1e-12, 0.5)])
def test_elements_are_below_the_range_that_are_not_zero_and_have_the_smallest_code(seed, small, share):
    gradient = torch.where(torch.arange(64) % 2 == 0, 1.0, small).expand(4, 64)
    optimizer = _stepped(gradient, "8bit")
    exact = next(state["exp_avg"] for state in _stepped(gradient, torch.float32).state.values())
    wanted = ((exact != 0) & (exact < 1e-7 * exact.max())).double().mean().item()
    report = optimizer.report()
    assert report.below_range == wanted == share
    assert f"8-bit states: {share:.2%} of the elements lie below the range" in str(report)
    assert ("State('8bit', block=16)" in str(report)) == (share > 0.01)


def test_ordinary_gradients_are_within_the_range(seed):
    assert _stepped(torch.randn(16, 64), "8bit").report().below_range <= 0.001


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16, "bfloat16x2"])
def test_other_states_have_no_such_line(seed, states):
    report = _stepped(torch.randn(4, 64), states).report()
    assert report.below_range is None
    assert "8-bit" not in str(report)


def test_first_moments_without_a_second_one_are_not_counted(seed):
    """A zero of theirs may be true."""
    assert _stepped(torch.randn(4, 64), "8bit", hu.optim.Lion).report().below_range is None


def test_a_first_moment_alone_in_8_bits_is_judged_by_its_second_one(seed):
    gradient = torch.where(torch.arange(64) % 4 == 0, 1e-12, 1.0).expand(4, 64)
    states = {"exp_avg": "8bit", "exp_avg_sq": torch.float32}
    assert _stepped(gradient, states).report().below_range == 0.25
