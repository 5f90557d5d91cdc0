"""Random products and losses, and which share of their gradients policy "underflow-bound" lets become zero."""

from __future__ import annotations

import dataclasses
import random

import torch
import torch.nn.functional as F
from torch import Tensor

from halfulp.formats import Format, get
from halfulp.gradients import UnderflowBound
from halfulp.gradients._functions import SecondFactor
from halfulp.gradients._site import Site
from halfulp.gradients._underflow_bound import ExponentProposal
from halfulp.rounding import quantize

SHARE = 1e-3
KINDS = ("product", "loss")


def numbers(*shape: int) -> Tensor:
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


def gradient_of_a_loss() -> Tensor:
    """That of one of four losses, with respect to what it reads (256, 64)."""
    y = (numbers(256, 64) * 2.0 ** random.randint(0, 12)).requires_grad_()
    losses = (
        lambda: y.square().mean(),
        lambda: F.cross_entropy(y, torch.randint(64, (256,))),
        lambda: F.huber_loss(y, numbers(256, 64)),
        lambda: F.binary_cross_entropy_with_logits(y, torch.rand(256, 64)),
    )
    return torch.autograd.grad(random.choice(losses)(), y)[0]


@dataclasses.dataclass(frozen=True)
class Trial:
    """What became of one gradient.

    Attributes:
        zeros: Of the elements that are not zero, the share that the format stores as zero at the exponent.
        limited: Whether the largest of them would overflow at the next larger exponent.
    """

    zeros: float
    limited: bool

    @property
    def held(self) -> bool:
        """Whether the share is kept, or no scale does better without an overflow."""
        return self.zeros <= SHARE or self.limited


def _trial(proposal: ExponentProposal | None, true: Tensor, format: Format) -> Trial:
    site = Site("product", Site("global", None, 0), 0)
    site.proposals = [] if proposal is None else [proposal]
    exponent = UnderflowBound(share=SHARE).exponent(site) or 0
    stored = quantize((true * 2.0**exponent).float(), format)
    zeros = float((stored[true != 0] == 0).double().mean()) if true.any() else 0.0
    return Trial(zeros, float(true.abs().max()) * 2.0 ** (exponent + 1) > format.max)


def tried(kind: str, name: str) -> Trial:
    """One gradient, a product's or a loss's, in the format of a name; drawn by `random` and torch."""
    policy, format = UnderflowBound(share=SHARE), get(name)
    site = Site("product", Site("global", None, 0), 0)
    if kind == "loss":
        true = gradient_of_a_loss().double()
        return _trial(policy.propose_bounds_at_loss(site, true.float(), format), true, format)
    k = random.choice([16, 64, 256])
    gradient, weight = numbers(512, k), numbers(k, 128)
    proposal = policy.propose_bounds(site, SecondFactor(weight, "left").align_operands(gradient), format)
    return _trial(proposal, gradient.double() @ weight.double(), format)
