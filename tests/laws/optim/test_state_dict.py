"""Law: load_state_dict(state_dict()) is the identity, for every rule and every weight update."""

import copy

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits

from ...optim.state_dicts import assert_same, take_steps
from .cases import RULES, UPDATES, allowed, build, fit

# Every rule and every weight update once, not their product, which would compile for minutes.
PAIRS = [(rule, "kahan") for rule in RULES] + [("momentum", update) for update in UPDATES if update != "kahan"]


@pytest.mark.parametrize(("rule", "update"), [pair for pair in PAIRS if allowed(*pair, "bf16")])
def test_state_dict_load_state_dict_is_the_identity(rule, update):
    """Into itself, and into a fresh optimizer, which then draws the same bits.

    By the reference, whose bits every kernel has: test_kernel.
    """
    store = "bf16"

    def made(values):
        parameters = [torch.nn.Parameter(value.clone()) for value in values]
        return parameters, build(rule, update, parameters, store)

    start = [fit(torch.linspace(-2, 2, 40).reshape(5, 8), store), fit(torch.tensor(0.3), store)]
    start = start[:1] if rule == "muon" else start
    parameters, optimizer = made(start)
    with hu.kernels.engine("reference"):
        take_steps(parameters, optimizer, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    others, fresh = made([parameter.detach() for parameter in parameters])
    for target in (optimizer, fresh):
        target.load_state_dict(copy.deepcopy(saved))
        assert_same(target.state_dict(), saved)
    with hu.kernels.engine("reference"):
        take_steps(parameters, optimizer, 3, 2), take_steps(others, fresh, 3, 2)
    for one, two in zip(parameters, others):
        assert same_bits(one.detach(), two.detach())
    assert_same(fresh.state_dict(), optimizer.state_dict())
