"""verify: proves what is exact, names what is not, and leaves the model as it was."""

import json

import pytest
import torch
from torch import nn

from halfulp.kernels import same_bits
from halfulp.mctensor import multicomponent, single_component
from halfulp.recipes import verify
from halfulp.recipes._training_step import relative
from halfulp.scaled import ScaledTensor, scalify, unscalify
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
    from halfulp.subclass import _fallbacks as _fallback

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


def test_without_a_finite_float32_there_is_nothing_to_compare_with(seed):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    x[1, 2] = float("nan")
    with pytest.raises(ValueError, match="the loss is nan: nothing to compare with; give another batch"):
        verify(model, x, "scaled-fp16")
    with pytest.raises(ValueError, match="the loss is inf"):
        verify(model, torch.ones(4, 3), "scaled-fp16", loss=lambda y: (y - y + 1e30).square().sum())


def test_a_gradient_of_float32_that_is_not_finite_is_named(seed):
    class Rooted(nn.Module):
        def __init__(self):
            super().__init__()
            self.fine, self.odd = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            odd = self.odd(x)
            return {"loss": self.fine(x).sum() + (odd - odd.detach()).sum().sqrt()}  # the root of 0 has slope infinity

    with pytest.raises(ValueError, match=r"the gradient of 'odd.weight' is not finite.*give another batch"):
        verify(Rooted(), torch.randn(4, 3), "scaled-fp16")


def test_parameters_without_a_gradient_are_listed_apart(seed):
    class WithSpare(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.spare = nn.Linear(2, 2)

    model, x = WithSpare(), torch.randn(4, 3)
    found = verify(model, x, "scaled-fp16", seed=seed)
    assert found.unused == ["spare.weight", "spare.bias"]
    assert found.to_dict()["unused"] == found.unused
    assert found.equal == len(found.gradients) == 2
    assert str(found).startswith("passed: 2 of 2 gradients")
    assert "without a gradient: spare.weight, spare.bias" in str(found)
    for loss in (lambda y: y.detach().sum(), lambda y: (y.detach() * torch.ones((), requires_grad=True)).sum()):
        with pytest.raises(ValueError, match="no parameter has a gradient"):
            verify(model, x, "scaled-fp16", loss=loss)


def test_a_gradient_that_only_the_scaled_model_has_is_a_difference(seed):
    class Sometimes(nn.Linear):
        def forward(self, x):
            bias = self.bias if isinstance(self.bias, ScaledTensor) else self.bias.detach()
            return x @ self.weight.t() + bias

    found = verify(Sometimes(3, 2), torch.randn(4, 3), "scaled-fp16", trials=1)
    assert found.gradients["bias"] == float("inf")
    assert not found.passed


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_counts_as_different(seed, monkeypatch, wrong):
    right = RULES[aten.tanh_backward.default]
    monkeypatch.setitem(RULES, aten.tanh_backward.default, lambda grad, y: right(grad, y) * wrong)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    found = verify(model, torch.randn(8, 6), "scaled-fp16", seed=seed)
    assert found.gradients["0.weight"] == float("inf")
    assert found.gradients["2.weight"] == 0
    assert not found.passed
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["gradients"]["0.weight"] is None
    assert data["first"] == ["aten.tanh_backward.default", "the backward pass", None]


def test_infinities_and_nan_agree_only_with_themselves():
    kinds = [float("nan"), float("inf"), float("-inf"), 1.0]
    for a, wanted in enumerate(kinds):
        for b, got in enumerate(kinds):
            difference = relative(torch.tensor([2.0, wanted]), torch.tensor([2.0, got]))
            assert difference == (0 if a == b else float("inf")), (wanted, got)


def test_eight_bit_products_are_said_to_be_left_out(seed):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    found = verify(model, x, "scaled-fp8", trials=1)
    assert found.passed
    assert found.to_dict()["left_out"] == "eight-bit products"
    assert str(found).startswith("passed (eight-bit products left out, as no part of the proof): 2 of 2 gradients")
    found = verify(model, x, "scaled-fp16", trials=1)
    assert found.left_out is None
    assert "left out" not in str(found)


def test_arguments_of_the_wrong_kind_are_refused(seed):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    for trials in (0, -1):
        with pytest.raises(ValueError, match=f"trials={trials}: give at least 1"):
            verify(model, x, "scaled-fp16", trials=trials)
    with pytest.raises(TypeError, match=r"the model is a function: give a torch.nn.Module"):
        verify(lambda x: x, x, "scaled-fp16")
    with pytest.raises(TypeError, match="the loss is an int: give a function"):
        verify(model, x, "scaled-fp16", loss=3)
    with pytest.raises(TypeError, match="the loss gave a float: give a scalar tensor"):
        verify(model, x, "scaled-fp16", loss=lambda y: y.sum().item())


def test_models_of_our_own_tensors_are_refused_with_the_way_back(seed):
    x = torch.randn(4, 3)
    scaled, split = scalify(nn.Linear(3, 2)), multicomponent(nn.Linear(3, 2), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"'weight' is a ScaledTensor.*halfulp.scaled.unscalify\(copy"):
        verify(scaled, x, "scaled-fp16")
    with pytest.raises(ValueError, match=r"'weight' is a MCTensor.*halfulp.mctensor.single_component\(copy"):
        verify(split, x, "scaled-fp16")
    for plain in (unscalify(scaled), single_component(split, torch.float32)):
        assert verify(plain, x, "scaled-fp16", trials=1).passed
