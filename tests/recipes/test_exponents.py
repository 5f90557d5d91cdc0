"""The proof that gradient exponents change nothing: which gradients it compares, and what counts as a difference."""

import torch
from torch import nn

from halfulp.recipes._exponents import verify_exponents


class _LostWhenLarge(torch.autograd.Function):
    """x w, whose weight has no gradient where what arrives is above 8."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return None, None if gradient.abs().max() > 8 else gradient * x


class _Model(nn.Module):
    def __init__(self, product):
        super().__init__()
        self.weight, self.unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
        self.product = product

    def forward(self, x):
        return self.product(x, self.weight)


def test_it_compares_every_gradient_that_there_is_and_no_other(seed):
    found = verify_exponents(_Model(torch.mul), torch.randn(3), None, torch.sum, 2, seed)
    assert found["gradients"] == {"weight": 0.0}
    assert found["unused"] == ["unused"]


def test_a_gradient_that_is_lost_under_some_scale_is_a_difference(seed):
    found = verify_exponents(_Model(_LostWhenLarge.apply), torch.randn(3), None, torch.sum, 8, seed)
    assert found["wrong"] == ["gradient 'weight' under a loss scale of 2^24 alone"]
