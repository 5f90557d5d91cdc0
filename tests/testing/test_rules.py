"""check_rule: what it passes, and that it names every kind of wrong rule."""

import pytest
import torch

import halfulp as hu
from halfulp.scaled import ScaledTensor
from halfulp.testing import RuleError, check_rule

_LIBRARY = torch.library.Library("halfulp_testing", "DEF")


def _operator(name, plain, rule):
    _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    _LIBRARY.impl(name, plain, "CPU")
    packet = getattr(torch.ops.halfulp_testing, name)
    ScaledTensor.implements(packet.default)(rule)
    return packet


def _normal():
    return (torch.randn(4, 3) + 3,)


def test_a_right_rule_passes(seed):
    thrice = _operator("thrice", lambda x: x * 3, lambda x: ScaledTensor(x.payload * 3, x.scale, x.dtype))
    check_rule(thrice, _normal, seed=seed, gradients=False)
    check_rule(torch.ops.aten.mm, lambda: (torch.randn(3, 4), torch.randn(4, 2)), seed=seed, exact=1e-6)
    check_rule(torch.tanh, _normal, seed=seed)


def test_results_of_every_kind_are_compared(seed):
    check_rule(lambda x: (-x, {"more": x * 2}, 3, None), _normal, seed=seed)
    check_rule(lambda xs: xs[0] * xs[1], lambda: ([torch.randn(3), torch.randn(3)],), seed=seed)


@pytest.mark.parametrize(
    ("name", "rule", "words"),
    [
        ("forgets", lambda x: ScaledTensor(x.payload + 1, x.scale, x.dtype), "depends on the scales"),
        ("wrong", lambda x: ScaledTensor.encode(x.decode() + 2, torch.float32), "is not the plain operator's"),
        ("shape", lambda x: ScaledTensor((x.decode() + 1)[:1], 1.0), r"torch.float32 \[1, 3\] for"),
        ("kind", lambda x: ScaledTensor(x.decode() + 1, 1.0, torch.float64), "torch.float64"),
    ],
)
def test_a_wrong_rule_is_named(seed, name, rule, words):
    operator = _operator(name, lambda x: x + 1, rule)
    with pytest.raises(RuleError, match=words) as caught:
        check_rule(operator, _normal, seed=seed, gradients=False)
    assert f"halfulp_testing.{name}: result 0" in str(caught.value)
    assert "seed=" in str(caught.value)
    assert isinstance(caught.value, AssertionError)


def _write_and_triple(x):
    x.payload.mul_(2)
    return ScaledTensor(x.payload * 1.5, x.scale.clone(), x.dtype)


@pytest.mark.parametrize(
    ("name", "plain", "rule", "words"),
    [
        ("writes", lambda x: x * 3, _write_and_triple, "argument 0 afterwards is not the plain operator's"),
        ("returns", torch.clone, lambda x: x, "memory of result 0 .* shared with argument 0"),
        ("shares", lambda x: x * 2, lambda x: ScaledTensor(x.payload, x.scale * 2, x.dtype), "memory of result 0"),
    ],
)
def test_a_rule_that_writes_or_shares_an_argument_is_named(seed, name, plain, rule, words):
    with pytest.raises(RuleError, match=words):
        check_rule(_operator(name, plain, rule), _normal, seed=seed, gradients=False)


def test_writes_and_views_that_the_plain_operator_has_pass(seed):
    check_rule(lambda x: x.mul_(2), _normal, seed=seed, gradients=False)
    check_rule(lambda x: (x.view(-1), x.detach(), x[:0]), _normal, seed=seed)


@pytest.mark.parametrize("options", [{"trials": 0}, {"exact": False}, {"exact": -1.0}, {"exact": float("nan")}])
def test_options_under_which_nothing_would_be_checked_are_refused(options):
    with pytest.raises(ValueError, match="give 1 or more trials"):
        check_rule(torch.neg, _normal, **options)


def test_float64_arguments_have_gradients_of_float32_numbers(seed):
    check_rule(torch.neg, lambda: (torch.randn(3).double(),), seed=seed)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_compared_under_modes_without(seed, mode):
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 2

        @staticmethod
        def backward(context, grad):
            return ScaledTensor(grad.payload * 2, grad.scale**2) if isinstance(grad, ScaledTensor) else grad * 2

    with mode(), pytest.raises(RuleError, match="gradient 0"):
        check_rule(Squared.apply, _normal, seed=seed)


def test_a_wrong_gradient_is_named(seed):
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 2

        @staticmethod
        def backward(context, gradient):
            if not isinstance(gradient, ScaledTensor):
                return gradient * 2
            return ScaledTensor(gradient.payload * 2, 1.0)

    with pytest.raises(RuleError, match=r"gradient 0 depends on the scales.*2\^"):
        check_rule(Off.apply, _normal, seed=seed)
    check_rule(Off.apply, _normal, seed=seed, gradients=False)


def test_a_gradient_that_an_argument_does_not_have_is_compared_as_none(seed):
    def cut(x, y):
        return x * 2 + y.detach()

    check_rule(cut, lambda: (*_normal(), *_normal()), seed=seed)


def test_the_tolerance_is_of_the_plain_operator_only(seed):
    near = _operator("near", lambda x: x, lambda x: ScaledTensor(x.payload * (1 + 1e-5), x.scale, x.dtype))
    with pytest.raises(RuleError):
        check_rule(near, _normal, seed=seed, gradients=False)
    check_rule(near, _normal, seed=seed, gradients=False, exact=1e-4)


def test_nan_and_infinities_are_values(seed):
    check_rule(torch.neg, lambda: (torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0]),), seed=seed)


def test_random_numbers_outside_are_left_alone():
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    check_rule(torch.neg, _normal)
    assert torch.equal(torch.rand(3), wanted)


def test_arguments_without_a_scale_are_refused():
    with pytest.raises(ValueError, match="no floating tensor"):
        check_rule(torch.neg, lambda: (torch.arange(3),))
    with pytest.raises(ValueError, match="magnitudes about 1"):
        check_rule(torch.neg, lambda: (torch.tensor([1.2e-38]),), trials=40)


def test_it_is_at_hand():
    assert hu.testing.check_rule is check_rule


def test_the_sign_of_zero_is_a_bit(seed):
    unsigned = _operator("unsigned", lambda x: -x, lambda x: ScaledTensor(0 - x.payload, x.scale, x.dtype))
    by_scale = _operator(
        "by_scale", lambda x: -x, lambda x: ScaledTensor(-x.payload if x.scale == 1 else 0 - x.payload, x.scale)
    )
    for operator, words in (
        (unsigned, "is not the plain operator's: 0.0 for -0.0"),
        (by_scale, "depends on the scale"),
    ):
        with pytest.raises(RuleError, match=words):
            check_rule(operator, lambda: (torch.tensor([1.0, 0.0]),), seed=seed, gradients=False)
