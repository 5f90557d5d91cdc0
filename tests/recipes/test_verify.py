"""verify: proves what is exact, names what is not, and leaves the model as it was."""

import json
import math
import random
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfulp.gradients import AdaptiveGradScaler
from halfulp.gradients.eager import _replay
from halfulp.kernels import same_bits
from halfulp.mctensor import multicomponent, single_component
from halfulp.recipes import _verify, verify
from halfulp.recipes._training_step import (
    SUM_ORDER_TOLERANCE,
    _clamp_where_both_are_huge,
    compute_relative_difference,
    is_close_to_float32,
    run_float64_step,
    run_one_step,
    select_gradient_results,
)
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
    from halfulp.subclass import _rule_table as _fallback

    monkeypatch.setattr(_fallback, "_warned_fallbacks", set())
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
        assert verify(Two(), batch, "scaled-fp16", trials=1).equal_gradient_count == 1
    found = verify(nn.Linear(3, 2), x, "scaled-fp8", loss=lambda y: y.exp().sum(), trials=1)
    assert found.to_dict()["passed"] is True


def test_a_float64_twin_with_an_output_of_another_shape_judges_nothing(seed):
    class Turned(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, y.detach().t().contiguous() if self.turns and y.dtype == torch.float64 else y.detach()

    model, x, loss = Turned(3, 2), torch.randn(4, 3), lambda y: y[0].square().mean()
    for model.turns in (False, True):
        plain = run_one_step(model, x, loss)
        assert (run_float64_step(model, x, loss, plain) is None) is model.turns


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
    assert found.equal_gradient_count == len(found.gradients) == 2
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
            difference = compute_relative_difference(torch.tensor([2.0, wanted]), torch.tensor([2.0, got]))
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


@pytest.mark.parametrize("offs", [(0.0, 0.5, 0.25), (0.5, 0.0, 0.0), (0.0, 0.0, 0.125)])
def test_a_report_is_the_maximum_over_trials(monkeypatch, offs):
    model = nn.Linear(3, 2)
    left = list(offs)

    def step(*arguments, **options):
        run, off = run_one_step(*arguments, **options), left.pop(0)
        return run | {name: grad * (1 + off) for name, grad in select_gradient_results(run).items()}

    monkeypatch.setattr(_verify, "run_one_step", step)
    found = verify(model, torch.ones(4, 3), "scaled-fp16", trials=3)
    assert not left
    assert list(found.gradients.values()) == [pytest.approx(max(offs))] * 2
    assert found.wrong == ["gradient 'weight'", "gradient 'bias'"]
    assert not found.passed


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
    make = _replay.make_multiplying_hook
    for wrong in (lambda exponent, sign: (exponent + 1, sign), lambda exponent, sign: (exponent, 0)):

        def make_wrong(backward, node_name, moves, wrong=wrong):
            return make(backward, node_name, tuple((slot, *wrong(*move)) for slot, *move in moves))

        monkeypatch.setattr(_replay, "make_multiplying_hook", make_wrong)
        found = verify(_network(), torch.randn(4, 6), "fp16-adaptive", seed=seed)
        assert not found.passed
        assert {name.partition(" in ")[2] for name in found.wrong} <= {"step 3 of a copy", "step 4 of a copy"}


def test_what_goes_wrong_in_a_later_step_fails(seed):
    found = verify(_LostLater(None), torch.ones(3), "fp16-adaptive", loss=lambda y: 4 * y.sum(), seed=seed)
    assert found.wrong == ["gradient 'weight' in step 3 of a copy"]


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


class Normalizes(_Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def between(self, x):
        return self.norm(x)


RIGHT = (
    *(_Net, Counts, UnsavedBuffer, OwnGenerator, DrawsByPython, DrawsByNumPy),
    *(TransposedDropout, ChannelsLastDropout, Normalizes, MasksByTheLowestNumber),
    lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True),
)


@pytest.mark.sampled(1)
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


def test_hooks_on_gradients_are_refused(seed):
    model, batch = _Net(), torch.randn(8, 6)
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        handle = getattr(model.last.weight, register)(lambda tensor: None)
        for recipe in RECIPES:
            with pytest.raises(ValueError, match=r"'last.weight' has a hook on its gradient.*remove it for the proof"):
                verify(model, batch, recipe, seed=seed)
        handle.remove()
    assert verify(model, batch, "fp16-adaptive", seed=seed).passed


def _flushing(rule):
    def rounded(*arguments, **options):
        result = rule(*arguments, **options)
        values = result.decode(torch.float32)
        return ScaledTensor.encode(torch.where(values.abs() < 1e-2 * values.abs().max(), 0.0, values), torch.float32)

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
    ],
)
def test_a_wrong_rule_fails_wherever_it_shows(operator, wrong, model, loss, words, seed, monkeypatch):
    monkeypatch.setitem(RULES, operator, wrong(RULES[operator]))
    found = verify(model(), torch.randn(64, 6), "scaled-fp16", loss=loss, seed=seed)
    assert not found.passed
    assert words in found.wrong, found
    assert found.first[0] == str(operator)


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
    with pytest.raises(ValueError, match=r"the model cannot be copied, and the proof runs on copies.*cannot pickle"):
        verify(model, torch.randn(8, 6), "scaled-fp16", seed=seed)


@pytest.mark.parametrize(
    ("needed", "merged"),
    [((), []), (("2",), ["2"]), (("0", "2"), ["0", "2"])],
    ids=["none", "one", "two that are wrong together alone"],
)
def test_sites_that_are_not_exact_by_themselves_are_merged(needed, merged, seed, monkeypatch):
    """As a module would be whose backward pass brings gradients of other sites in: into the scaler that was given."""
    real = _verify.VerificationRuns._run_scaled_step

    def run(self, exponents, merged=()):
        found = real(self, exponents, merged)
        if needed and all(key in exponents and key not in merged for key in needed):
            found = {name: None if value is None else value + 1 for name, value in found.items()}
        return found

    monkeypatch.setattr(_verify.VerificationRuns, "_run_scaled_step", run)
    model, x = _network(), torch.randn(4, 6)
    scaler = AdaptiveGradScaler(model)
    scaler.scale(model(x).sum()).backward()
    model.zero_grad()
    found = verify(model, x, scaler, trials=3, seed=seed)
    assert found.passed
    assert found.merged == merged
    reasons = {row.site: row.merged for row in scaler.sites() if row.site != "global"}
    assert reasons == {key: "not exact by itself" if key in merged else None for key in ("0", "2")}
    assert verify(model, x, "fp16-adaptive", trials=1, seed=seed).merged == merged


def test_random_integers_reach_both_ends(seed):
    runs = types.SimpleNamespace(_generator=torch.Generator().manual_seed(seed))
    drawn = _verify.VerificationRuns.draw_random_integers(runs, -1, 2, 200)
    assert (len(drawn), sorted(set(drawn))) == (200, [-1, 0, 1, 2])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_numbers_beyond_2_to_the_96_are_equal_if_their_signs_are(sign):
    limit = sign * 2.0**96
    for x, other, wanted in (
        *((limit, 2 * limit, limit), (2 * limit, limit, limit), (limit * 4, limit * 2, limit)),
        *((math.inf * sign, 2 * limit, limit), (2 * limit, -2 * limit, limit), (2 * limit, limit / 2, 2 * limit)),
        *((limit / 2, 2 * limit, limit / 2), (1.5, 2 * limit, 1.5)),
    ):
        found = _clamp_where_both_are_huge(torch.tensor([x]), torch.tensor([other]))
        assert found.tolist() == [wanted], (x, other)
    x = torch.tensor([4 * limit])
    assert _clamp_where_both_are_huge(x, x.repeat(2)) is x


def test_what_is_close_to_float32_at_the_edges():
    """Without an exact result by the norm alone and the zeros; beside it, each element and the norm."""
    wanted, tolerance = torch.ones(4, dtype=torch.float64), SUM_ORDER_TOLERANCE
    for share, is_close in ((0.0, True), (0.999, True), (1.001, False)):
        assert is_close_to_float32(wanted, wanted * (1 + share * tolerance), None) is is_close
        assert is_close_to_float32(wanted, wanted * (1 + share * tolerance), wanted.clone()) is is_close
    one_off = wanted.clone()
    one_off[0] += 1.5 * tolerance  # three quarters of the tolerance in the norm
    assert is_close_to_float32(wanted, one_off, None)
    assert not is_close_to_float32(wanted, one_off, wanted.clone())
    small = torch.tensor([1.0, 1e-30])
    assert not is_close_to_float32(small, torch.tensor([1.0, 0.0]), None)
    assert not is_close_to_float32(torch.tensor([1.0, 0.0]), small, None)
    assert is_close_to_float32(None, None, None)
    assert not is_close_to_float32(wanted, None, None)
    assert not is_close_to_float32(wanted, wanted * math.nan, wanted)
    # float32's own error of an element allows as much, of its own binade and below.
    exact = torch.tensor([1.0, 1.0, 2.0**-40], dtype=torch.float64)
    rough = exact + torch.tensor([1e-3, 0.0, 0.0])
    assert is_close_to_float32(rough, exact, exact)
