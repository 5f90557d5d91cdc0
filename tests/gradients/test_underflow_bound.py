"""The bound of policy "underflow-bound", by simulation: of random products and losses few enough numbers become 0."""

import random

import pytest
import torch

from halfulp.formats import get
from halfulp.gradients import UnderflowBound
from halfulp.gradients._operands import Factor
from halfulp.gradients._site import Site
from halfulp.rounding import quantize

SHARE = 1e-3


def numbers(*shape):
    """Of one of several distributions, and of any magnitude."""
    x = torch.randn(shape)
    match random.randrange(5):
        case 1:
            x = torch.rand(shape) - 0.5
        case 2:
            x = torch.distributions.Laplace(0.0, 1.0).sample(shape)
        case 3:
            x = x * torch.randn(shape[0], *[1] * (len(shape) - 1)).exp()
        case 4:
            x = x.relu() * x.sign()
    return x * 2.0 ** random.randint(-12, -2)


def gradient_of_a_loss():
    y = (numbers(256, 64) * 2.0 ** random.randint(0, 12)).requires_grad_()
    losses = (
        lambda: y.square().mean(),
        lambda: torch.nn.functional.cross_entropy(y, torch.randint(64, (256,))),
        lambda: torch.nn.functional.huber_loss(y, numbers(256, 64)),
        lambda: torch.nn.functional.binary_cross_entropy_with_logits(y, torch.rand(256, 64)),
    )
    return torch.autograd.grad(random.choice(losses)(), y)[0]


def share_of_zeros(true, exponent, format):
    stored = quantize((true * 2.0**exponent).float(), format)
    return float((stored[true != 0] == 0).double().mean()) if true.any() else 0.0


def held(proposal, true, exponent, format):
    """Whether the share is kept, or an overflow forbids it."""
    return share_of_zeros(true, exponent, format) <= SHARE or exponent >= proposal.most


@pytest.mark.parametrize("format", ["fp16", "e5m2"])
@pytest.mark.parametrize("trial", range(20))
def test_a_product_and_a_loss_keep_the_bound(format, trial, seed):
    random.seed(seed + trial)
    policy, format, anchor = UnderflowBound(share=SHARE), get(format), Site("global", None, 0)
    k, site = random.choice([16, 64, 256]), Site("product", anchor, 0)
    g, w = numbers(512, k), numbers(k, 128)
    site.proposals = [policy.proposed(site, Factor(w, "left").operands(g), format, anchor)]
    assert held(site.proposals[0], g.double() @ w.double(), policy.exponent(site), format)
    loss = gradient_of_a_loss().double()
    site.proposals = [policy.at_the_loss(site, loss.float(), format, anchor)]
    assert held(site.proposals[0], loss, policy.exponent(site), format)


def test_the_largest_demand_holds_and_then_the_smallest_limit(seed):
    policy, anchor = UnderflowBound(), Site("global", None, 0)
    site = Site("matmul", anchor, 3)
    for proposals, wanted in (([(5, 20), (9, 30)], 9), ([(5, 7), (9, 30)], 7), ([(2, 1)], 1), ([], None)):
        site.proposals = [policy_proposal(*one) for one in proposals]
        assert policy.exponent(site) == wanted


def policy_proposal(least, most):
    from halfulp.gradients._published import Proposal

    return Proposal(least, most)
