"""Law: states of few bits leave the mean step as it is in float32, of small elements too, or are refused."""

import dataclasses

import pytest
import torch

import halfulp as hu

from .cases import CODECS, RULES, build, rule_of

SHAPE = (128, 64)
# How far the mean step may be from float32's, of elements as large as their block's largest, and of small ones.
BOUNDS = {"bf16": (0.003, 0.003), "8bit": (0.015, 0.08)}
# Its second moment is of g - m, to which the noise of m in 8 bits adds: small elements step less.
BY_THE_FIRST_MOMENT = ("AdaBelief",)
# Of those that look at whole tensors no element's step is a mean of its own gradients, or it is Adam's.
WITH_STATES = [rule for rule in RULES if rule_of(rule).states and not rule_of(rule).has_data_dependent_constants]


def small_elements():
    """Where gradients are small beside others of their block: in half of the blocks."""
    small = torch.zeros(SHAPE, dtype=torch.bool)
    small[:, 33:] = True
    return small


def mean_steps(rule, choices, seed, steps):
    """The mean of the last two fifths of the steps under each choice of states, over that in float32, by size."""
    generator = torch.Generator().manual_seed(seed)
    small = small_elements()
    sizes = torch.where(small, 3e-5, 1.0)
    parameters = [torch.nn.Parameter(torch.zeros(SHAPE)) for _ in (*choices, None)]
    optimizers = [
        build(rule, "exact", [parameter], "fp32", state_dtype=choice, weight_decay=0.0)
        for parameter, choice in zip(parameters, (*choices, torch.float32))
    ]
    for group in (optimizer.param_groups[0] for optimizer in optimizers):
        # Means of a hundred steps arrive early, and fluctuate so often that a maximum of their noise shows.
        group |= {"betas": tuple(min(beta, 0.99) for beta in group["betas"])} if "betas" in group else {}
    for step in range(steps):
        if step == steps * 3 // 5:
            before = [parameter.detach().clone() for parameter in parameters]
        gradient = sizes * (1 + 0.2 * torch.randn(SHAPE, generator=generator))
        for parameter, optimizer in zip(parameters, optimizers):
            parameter.grad = gradient
            optimizer.step()
    moved = [(parameter.detach() - old).double() for parameter, old in zip(parameters, before)]
    return [[(one[part].sum() / moved[-1][part].sum()).item() for part in (~small, small)] for one in moved[:-1]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", BOUNDS)
@pytest.mark.parametrize("rule", WITH_STATES)
def test_the_mean_step_is_float32s(seed, rule, codec):
    grows = any(state.maximum_of for state in rule_of(rule).states)  # a maximum of noise, for long
    ((large, small),) = mean_steps(rule, [CODECS[codec]], seed, 1000 if grows else 600)
    assert abs(large - 1) <= BOUNDS[codec][0]
    assert abs(small - 1) <= BOUNDS[codec][1] or (codec == "8bit" and rule in BY_THE_FIRST_MOMENT)


def test_a_running_maximum_that_is_not_declared_breaks_it(seed, monkeypatch):
    class Undeclared(hu.optim.AdamW):
        def rule(self, group):
            rule = super().rule(group)
            states = (dataclasses.replace(state, maximum_of=None) for state in rule.states)
            return dataclasses.replace(rule, states=tuple(states))

    monkeypatch.setitem(RULES, "undeclared", (Undeclared, {"lr": 0.01, "amsgrad": True}))
    found = mean_steps("undeclared", [CODECS[codec] for codec in BOUNDS], seed, 1000)
    for bounds, (large, small) in zip(BOUNDS.values(), found, strict=True):
        assert large < 1 - bounds[0]
        assert small < 1 - bounds[1]
