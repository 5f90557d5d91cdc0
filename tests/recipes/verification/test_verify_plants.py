"""verify finds or names each planted fault, and passes models that are right however they keep their state."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfulp.kernels import same_bits
from halfulp.recipes import verify
from halfulp.recipes._training_step import default_loss, in_float64, reference, relative
from halfulp.scaled import ScaledTensor
from halfulp.scaled._registry import RULES

aten = torch.ops.aten
RECIPES = ("scaled-fp16", "fp16-adaptive")


class _Bounded(torch.autograd.Function):
    """The identity, whose gradient is bounded: right under no loss scale but 1."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.1, 0.1)


class _Net(nn.Module):
    """Two layers; what a subclass adds happens between them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.between(torch.tanh(self.first(x))))

    def between(self, x):
        return x


class BoundsGradients(_Net):
    def between(self, x):
        return _Bounded.apply(x)


class Counts(_Net):
    """A Python counter decides what happens: another run of one copy would differ."""

    calls = 0

    def between(self, x):
        self.calls += 1
        return x * self.calls


class UnsavedBuffer(_Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def between(self, x):
        self.seen += 1
        return x * self.seen


class OwnGenerator(_Net):
    def __init__(self):
        super().__init__()
        self.draws = torch.Generator().manual_seed(5)

    def between(self, x):
        return x * torch.rand(x.shape, generator=self.draws)


class DrawsByPython(_Net):
    def between(self, x):
        return x if random.random() < 0.5 else x * 2


class DrawsByNumPy(_Net):
    def between(self, x):
        return x * float(np.random.rand())


class KeepsAnActivation(_Net):
    def between(self, x):
        self.kept = [x]
        return x


class TransposedDropout(_Net):
    def between(self, x):
        return F.dropout(x.view(-1, 4, 4).transpose(1, 2), 0.3).reshape(x.shape)


class ChannelsLastDropout(_Net):
    def between(self, x):
        return F.dropout(x.view(-1, 4, 2, 2).to(memory_format=torch.channels_last), 0.3).reshape(x.shape)


class MasksByTheLowestNumber(_Net):
    """As transformers' attention does: what stands for no value is divided by more than a power of two."""

    def between(self, x):
        rows = torch.where(x.detach() > 0, x, torch.finfo(torch.float32).min) / 2.8284271247461903
        return torch.softmax(rows, -1)


class OnlyInFloat32(_Net):
    """As with kernels that there are for float32 alone."""

    def between(self, x):
        if x.dtype != torch.float32:
            raise TypeError("float32 alone")
        return x - 0.9 * x.mean(0, keepdim=True)


class Normalizes(_Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def between(self, x):
        return self.norm(x)


RIGHT = (
    *(_Net, Counts, UnsavedBuffer, OwnGenerator, DrawsByPython, DrawsByNumPy, KeepsAnActivation),
    *(TransposedDropout, ChannelsLastDropout, Normalizes, MasksByTheLowestNumber, OnlyInFloat32),
    lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True),
)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", RIGHT)
def test_what_is_right_passes_and_stays_as_it_was(make, recipe, seed):
    model, batch = make(), torch.randn(8, 6) if isinstance(make(), _Net) else torch.randn(4, 5, 6)
    model(batch).sum().backward()
    before = [(p.grad, p.grad.clone()) for p in model.parameters()]
    states = random.getstate(), torch.random.get_rng_state(), np.random.get_state()[1].copy()
    found = verify(model, batch, recipe, seed=seed)
    assert found.passed, found
    assert not found.merged
    for parameter, (grad, value) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is grad
        assert same_bits(grad, value)
    assert random.getstate() == states[0]
    assert torch.equal(torch.random.get_rng_state(), states[1])
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_a_gradient_that_is_bounded_inside_the_model_fails_exponents_and_passes_scales(seed):
    model, batch = BoundsGradients(), torch.randn(8, 6)
    found = verify(model, batch, "fp16-adaptive", seed=seed)
    assert not found.passed
    assert found.to_dict()["passed"] is False
    assert "gradient 'first.weight' under a loss scale of 2^24 alone" in found.wrong
    assert str(found).startswith("FAILED: ")
    assert verify(model, batch, "scaled-fp16", seed=seed).passed


def test_a_hook_that_bounds_a_gradient_is_kept_or_refused(seed):
    model, batch = _Net(), torch.randn(8, 6)
    handle = model.last.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    found = verify(model, batch, "fp16-adaptive", seed=seed)
    assert not found.passed
    assert any("'last.weight'" in name for name in found.wrong)
    with pytest.raises(ValueError, match=r"'last.weight' has hooks, which would never run"):
        verify(model, batch, "scaled-fp16", seed=seed)
    handle.remove()
    handle = model.last.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    for recipe in RECIPES:
        with pytest.raises(ValueError, match=r"'last.weight' has a hook that runs after.*remove it for the proof"):
            verify(model, batch, recipe, seed=seed)
    handle.remove()
    assert verify(model, batch, "fp16-adaptive", seed=seed).passed


def test_a_hook_that_is_linear_passes(seed):
    model = _Net()
    model.last.weight.register_hook(lambda gradient: gradient * 0.5)
    found = verify(model, torch.randn(8, 6), "fp16-adaptive", seed=seed)
    assert found.passed, found


def _flushing(rule):
    def rounded(*arguments, **options):
        result = rule(*arguments, **options)
        values = result.decode(torch.float32)
        return ScaledTensor.encode(torch.where(values.abs() < 1e-3 * values.abs().max(), 0.0, values), torch.float32)

    return rounded


def _off(factor):
    return lambda rule: lambda *arguments, **options: rule(*arguments, **options) * factor


@pytest.mark.parametrize(
    ("operator", "wrong", "model", "loss", "words"),
    [
        # The last operator: no gradient depends on its result.
        (aten.mean.default, _off(70.0), _Net, torch.mean, "the loss"),
        (aten.sum.default, _off(1 + 1e-4), _Net, torch.sum, "the loss"),
        (aten.tanh_backward.default, _flushing, _Net, None, "operator aten.tanh_backward.default in the backward pass"),
        (aten.tanh_backward.default, _off(1 + 1e-4), _Net, None, "gradient 'first.weight'"),
        (aten.tanh.default, _off(1 - 1e-5), _Net, None, "operator aten.tanh.default in the model"),
        (aten.tanh_backward.default, _off(1.01), OnlyInFloat32, None, "gradient 'first.weight'"),
    ],
)
def test_a_wrong_rule_fails_wherever_it_shows(operator, wrong, model, loss, words, seed, monkeypatch):
    monkeypatch.setitem(RULES, operator, wrong(RULES[operator]))
    found = verify(model(), torch.randn(64, 6), "scaled-fp16", loss=loss, seed=seed)
    assert not found.passed
    assert words in found.wrong, found
    assert found.first[0] == str(operator)


def test_where_float64_does_not_run_other_rounding_errors_tell_what_float32_loses(seed):
    model, batch, loss = OnlyInFloat32(), torch.randn(8, 6), default_loss(0)
    plain = reference(model, batch, loss)
    other = in_float64(model, batch, loss, plain)
    off = {name: relative(plain.gradients[name], other.gradients[name]) for name in plain.gradients}
    assert 0 < off["first.weight"] < 1e-4
    assert max(off.values()) < 1e-3


class WrongBuffer(_Net):
    """Its running value is another under a scale, which no gradient shows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.zeros(()))

    def between(self, x):
        factor = 60.0 if isinstance(x, ScaledTensor) else 1.0
        largest = x.detach().abs().amax()
        self.running = 0.1 * factor * (largest.decode() if isinstance(largest, ScaledTensor) else largest)
        return x


def test_a_buffer_that_differs_fails(seed):
    found = verify(WrongBuffer(), torch.randn(8, 6), "scaled-fp16", seed=seed)
    assert "buffer 'running'" in found.wrong
    assert found.values["buffer 'running'"] == pytest.approx(59.0)
    assert not found.passed


def test_state_that_no_copy_has_is_refused(seed):
    calls = []

    class Remembers(_Net):
        def between(self, x):
            calls.append(1)
            return x * len(calls)

    for recipe in RECIPES:
        with pytest.raises(ValueError, match="two runs of the plain model differ in the loss: it keeps a state"):
            verify(Remembers(), torch.randn(8, 6), recipe, seed=seed)


def test_a_closure_on_the_model_itself_is_refused(seed):
    model, batch = _Net(), torch.randn(8, 6)
    model.between = lambda x: x * model.first.bias
    model(batch).sum().backward()
    kept = model.first.bias.grad, model.first.bias.grad.clone()
    for recipe in RECIPES:
        with pytest.raises(ValueError, match=r"reached the model's own 'first.bias'.*make it a method or a module"):
            verify(model, batch, recipe, seed=seed)
    assert model.first.bias.grad is kept[0]
    assert same_bits(*kept)


def test_what_cannot_be_copied_is_refused(seed):
    model = _Net()
    model.lines = (line for line in ())
    with pytest.raises(ValueError, match="the model cannot be copied, and the proof runs on copies: cannot pickle"):
        verify(model, torch.randn(8, 6), "scaled-fp16", seed=seed)
