"""The proof that gradient exponents change nothing: which gradients it compares, and what counts as a difference."""

import torch
from torch import nn

from halfulp.gradients.eager._replay import LearnedGraph
from halfulp.recipes import verify


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
    found = verify(_Model(torch.mul), torch.randn(3), "fp16-adaptive", loss=torch.sum, seed=seed)
    assert found.gradients == {"weight": 0.0}
    assert found.unused == ["unused"]


def test_a_gradient_that_is_lost_under_some_scale_is_a_difference(seed):
    model = _Model(_LostWhenLarge.apply)
    found = verify(model, torch.randn(3), "fp16-adaptive", loss=torch.sum, trials=8, seed=seed)
    assert found.wrong == ["gradient 'weight' under a loss scale of 2^24 alone"]


class _Grows(_Model):
    """Calls its product once more each time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        for _ in range(self.calls):
            x = self.product(x, self.weight)
        return x


class _LostLater(_Model):
    """Its gradient is bounded from the third step on."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        product = _LostWhenLarge.apply if self.calls > 2 else torch.mul
        return product(x, self.weight)


def _network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def test_a_forward_pass_whose_graph_is_known_is_proved(seed):
    found = verify(_network(), torch.randn(4, 6), "fp16-adaptive", seed=seed)
    assert found.passed
    assert found.replays == 2
    assert "another at each pass" not in str(found)
    assert verify(_network(), torch.randn(4, 6), "scaled-fp16", seed=seed).replays is None


def test_a_graph_that_changes_is_proved_and_said_not_to_be_known(seed):
    found = verify(_Grows(torch.mul), torch.randn(3), "fp16-adaptive", seed=seed)
    assert found.passed
    assert found.replays == 0
    assert "its graph is another at each pass" in str(found)


def test_a_wrong_hook_of_a_known_graph_fails(seed, monkeypatch):
    move = LearnedGraph._move
    for wrong in (lambda exponent, sign: (exponent + 1, sign), lambda exponent, sign: (exponent, 0)):
        monkeypatch.setattr(LearnedGraph, "_move", lambda self, *sites, wrong=wrong: wrong(*move(self, *sites)))
        found = verify(_network(), torch.randn(4, 6), "fp16-adaptive", seed=seed)
        assert not found.passed
        assert {name.partition(" in ")[2] for name in found.wrong} <= {"step 3 of a copy", "step 4 of a copy"}


def test_what_goes_wrong_in_a_later_step_fails(seed):
    found = verify(_LostLater(None), torch.ones(3), "fp16-adaptive", loss=lambda y: 4 * y.sum(), seed=seed)
    assert found.wrong == ["gradient 'weight' in step 3 of a copy"]
