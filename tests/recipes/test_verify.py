"""verify: proves what is exact, names what is not, and leaves the model as it was."""

import pytest
import torch
from torch import nn

from halfulp.kernels import same_bits
from halfulp.recipes import verify
from halfulp.scaled import ScaledTensor
from halfulp.scaled._registry import RULES

aten = torch.ops.aten


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 3))


def test_a_network_with_dropout_is_proved_and_left_as_it_was(seed):
    model, batch = network(), torch.randn(8, 6)
    model(batch).sum().backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
    state = torch.random.get_rng_state()
    found = verify(model, batch, "scaled-fp16", seed=seed)
    assert found.passed, found
    assert list(found.gradients) == [name for name, _ in model.named_parameters()]
    assert found.fallbacks == {}
    assert torch.equal(torch.random.get_rng_state(), state)
    for parameter, (value, grad) in zip(model.parameters(), before):
        assert type(parameter.data) is torch.Tensor
        assert same_bits(parameter.detach(), value)
        assert same_bits(parameter.grad, grad)


def test_a_wrong_rule_is_found_and_named(seed, monkeypatch):
    right = RULES[aten.tanh.default]
    monkeypatch.setitem(RULES, aten.tanh.default, lambda x: right(ScaledTensor(x.payload, 1.0)))
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    found = verify(model, torch.randn(8, 6), "scaled-fp16", seed=seed)
    assert not found.passed
    assert found.first[:2] == ("aten.tanh.default", "1")
    assert "FAILED" in str(found)
    assert "aten.tanh.default in 1" in str(found)


def test_an_operator_without_a_rule_is_counted(seed, monkeypatch):
    from halfulp.tensors import _fallback

    monkeypatch.setattr(_fallback, "_warned", set())
    library = torch.library.Library("halfulp_test", "FRAGMENT")
    library.define("odd(Tensor x) -> Tensor")
    library.impl("odd", lambda x: x * 1.0, "CPU")

    class Strange(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y + torch.ops.halfulp_test.odd(y.detach())

    with pytest.warns(_fallback.FallbackWarning, match="halfulp_test.odd"):
        found = verify(Strange(3, 2), torch.randn(4, 3), "scaled-fp16", trials=1)
    assert found.fallbacks == {"halfulp_test.odd.default": 1}
    assert not found.passed
    assert "ran on decoded values 1 times" in str(found)


def test_batches_and_losses_of_every_form(seed):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))
            self.table = nn.Parameter(torch.randn(5, 3), requires_grad=False)

        def forward(self, x, ids=None):
            rows = x @ self.weight if ids is None else x @ self.weight + self.table[ids]
            return {"loss": rows.square().mean(), "rows": rows}

    x, ids = torch.randn(4, 3), torch.tensor([0, 1, 4, 4])
    for batch in (x, (x, ids), {"x": x, "ids": ids}):
        assert verify(Two(), batch, "scaled-fp16", trials=1).equal == 1
    found = verify(nn.Linear(3, 2), x, "scaled-fp8", loss=lambda y: y.exp().sum(), trials=1)
    assert found.to_dict()["passed"] is True


def test_what_cannot_be_verified_is_refused():
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    with pytest.raises(NotImplementedError, match="rounds by design; verify takes recipes with a payload"):
        verify(model, x, "bf16-kahan")
    with pytest.raises(ValueError, match="did you mean 'scaled-fp16'"):
        verify(model, x, "scaled-fp61")
    with pytest.raises(ValueError, match="no float32 parameters"):
        verify(model.double(), x.double(), "scaled-fp16")
    with pytest.raises(ValueError, match=r"the loss has shape \[4, 2\]"):
        verify(nn.Linear(3, 2), x, "scaled-fp16", loss=lambda y: y)
