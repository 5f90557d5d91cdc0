"""An optimizer whose float32 run wrap could not follow is refused by name when it is wrapped."""

import pytest
import torch

import halfulp as hu


class Lookahead(torch.optim.Optimizer):
    """Slow weights beside another optimizer's fast ones, as the public implementations keep them."""

    def __init__(self, inner, k=2, alpha=0.5):
        self.inner, self.k, self.alpha = inner, k, alpha
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def step(self, closure=None):
        self.inner.step()


class Listed(torch.optim.SGD):
    """Several inner optimizers."""

    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, **options)
        self.parts = [torch.optim.Adam(params), torch.optim.SGD(params)]


def _weight():
    return torch.nn.Parameter(torch.ones(4).bfloat16())


CASES = {
    "a function that makes one": (
        lambda: (lambda params: Lookahead(torch.optim.SGD(params, lr=0.1)), [_weight()]),
        "Lookahead .* SGD",
    ),
    "a list of others": (lambda: (Listed, [_weight()]), "Listed .* Adam in 'parts'"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name(case):
    given, told = CASES[case]
    with pytest.raises(NotImplementedError, match=told):
        hu.optim.wrap(*given(), weight_update="split")


def test_what_the_message_says_works():
    weight = _weight()
    optimizer = hu.optim.wrap(torch.optim.SGD, [weight], lr=2.0**-12, weight_update="split")
    for _ in range(64):
        weight.grad = torch.ones_like(weight)
        with hu.kernels.engine("reference"):
            optimizer.step()
    assert torch.equal(weight.detach().float(), torch.full((4,), 1 - 2.0**-6))
