"""Optimizers that share parameters, each given to the scaler in turn: every one steps by the true gradients."""

import contextlib
import itertools
import weakref

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits

from .exponents import batch, mean_square, mlp

SGD = torch.optim.SGD
KINDS = {
    "plain": lambda p: SGD(p, lr=0.1),
    "fused": lambda p: SGD(p, lr=0.1, fused=True),
    "own": lambda p: hu.optim.SGD(p, lr=0.1),
    "wrapped": lambda p: hu.optim.wrap(SGD, p, lr=0.1),
}
BETWEEN = {
    "nothing": lambda scaler, first, second, model: None,
    "first unscaled": lambda scaler, first, second, model: scaler.unscale_(first),
    "both unscaled": lambda scaler, first, second, model: (scaler.unscale_(second), scaler.unscale_(first)),
    "clipped": lambda scaler, first, second, model: (scaler.unscale_(first), clip(model)),
    "clipped late": lambda scaler, first, second, model: (scaler.unscale_(first), scaler.unscale_(second), clip(model)),
}


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def pair(**options):
    """A model, its twin, and a scaler of the first."""
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    return model, twin, hu.AdaptiveGradScaler(model, **options)


def backward(model, x, scaler=None):
    loss = mean_square(model(x) - x)
    (loss if scaler is None else scaler.scale(loss)).backward()


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(found, wanted):
    assert len(found) == len(wanted)
    assert all(a is b if a is None or b is None else same_bits(a, b) for a, b in zip(found, wanted))


def seen_by(optimizer, model, seen):
    """Record the gradients that an optimizer steps by."""
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(model)))
    return optimizer


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("kinds", [*itertools.product(KINDS, repeat=2)], ids="-".join)
@pytest.mark.parametrize("policy", ["amax", "dynamic"])
def test_every_optimizer_steps_by_the_true_gradients(policy, kinds, between, seed):
    model, twin, scaler = pair(policy=policy)
    seen, wanted = [], []
    optimizers = [seen_by(KINDS[kind](model.parameters()), model, seen) for kind in kinds]
    theirs = [seen_by(KINDS[kind](twin.parameters()), twin, wanted) for kind in kinds]
    for _ in range(3):
        parts = batch(), batch()
        for optimizer in (*optimizers, *theirs):
            optimizer.zero_grad()
        for part in parts:
            backward(model, part, scaler)
            backward(twin, part)
        BETWEEN[between](scaler, *optimizers, model)
        if "clipped" in between:
            clip(twin)
        for optimizer, other in zip(optimizers, theirs):
            scaler.step(optimizer)
            assert scaler.last_step.applied
            other.step()
        scaler.update()
    assert len(seen) == len(wanted) == 6
    assert all(gradient.abs().max() > 1e-5 for gradient in seen[0])
    for one, other in zip(seen, wanted):
        assert_equal(one, other)
    assert_equal(list(model.parameters()), list(twin.parameters()))


def test_torch_divides_again_for_each(seed):
    # Why the scaler differs from it here.
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = SGD(model.parameters(), lr=0.0), SGD(model.parameters(), lr=0.0)
    backward(model, batch(), scaler)
    scaler.step(optimizers[0])
    once = gradients(model)
    scaler.step(optimizers[1])
    assert_equal(gradients(model), [gradient / 1024 for gradient in once])


@pytest.mark.parametrize("spoilt", ["shared", "of the first", "of the second"])
@pytest.mark.parametrize("unscaled", [False, True])
def test_an_infinity_skips_whom_it_concerns_and_lowers_the_scale_once(spoilt, unscaled, seed):
    model, twin, scaler = pair(policy=hu.gradients.Dynamic(growth_interval=1000), init_scale=2.0**12)
    reference = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000)
    shared = {"of the first": 0, "shared": 2, "of the second": 4}

    def run(scaler, model):
        parameters = list(model.parameters())
        optimizers = [SGD(parameters[:4], lr=0.1), SGD(parameters[2:], lr=0.1)]
        backward(model, torch.ones(4, 8), scaler)
        parameters[shared[spoilt]].grad[0, 0] = torch.inf
        applied = []
        for optimizer in optimizers:
            if unscaled:
                scaler.unscale_(optimizer)
            before = [p.clone() for p in optimizer.param_groups[0]["params"]]
            scaler.step(optimizer)
            applied.append(any(not torch.equal(a, b) for a, b in zip(before, optimizer.param_groups[0]["params"])))
        scaler.update()
        return applied, scaler.get_scale()

    found, wanted = run(scaler, model), run(reference, twin)
    assert found == wanted
    assert found[1] == 2.0**11


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_a_loss_for_each_optimizer(to_none, clips, seed):
    model, twin, scaler = pair()
    seen, wanted = [], []
    optimizers = [seen_by(SGD(model.parameters(), lr=0.1), model, seen) for _ in range(2)]
    theirs = [seen_by(SGD(twin.parameters(), lr=0.1), twin, wanted) for _ in range(2)]
    for _ in range(2):
        for optimizer, other in zip(optimizers, theirs):
            x = batch()
            optimizer.zero_grad(set_to_none=to_none)
            other.zero_grad(set_to_none=to_none)
            backward(model, x, scaler)
            backward(twin, x)
            if clips:
                scaler.unscale_(optimizer)
                clip(model), clip(twin)
            scaler.step(optimizer)
            other.step()
        scaler.update()
    for one, other in zip(seen, wanted, strict=True):
        assert_equal(one, other)


def test_a_backward_pass_elsewhere_leaves_shared_gradients_unscaled(seed):
    model, twin, scaler = pair()
    parts, their_parts = [list(m.parameters()) for m in (model, twin)]
    optimizers = [SGD(parts, lr=0.1), SGD(parts[2:], lr=0.1)]
    theirs = [SGD(their_parts, lr=0.1), SGD(their_parts[2:], lr=0.1)]
    x = batch()
    backward(model, x, scaler)
    scaler.unscale_(optimizers[0])
    # This one reaches the first layer alone, whose gradient is made anew.
    parts[0].grad = parts[1].grad = None
    scaler.scale(parts[0].square().sum() + parts[1].sum()).backward()
    torch.nn.utils.clip_grad_norm_(parts[2:], 1e-3)
    scaler.step(optimizers[1])
    scaler.update()
    backward(twin, x)
    torch.nn.utils.clip_grad_norm_(their_parts[2:], 1e-3)
    theirs[1].step()
    assert_equal(parts[2:], their_parts[2:])


@pytest.mark.parametrize("call", ["unscale_ of another", "step of another", "step"])
def test_a_sum_of_divided_and_scaled_gradients_is_refused(call, seed):
    model, _, scaler = pair()
    first, second = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)
    backward(model, batch(), scaler)
    scaler.unscale_(first)
    backward(model, batch(), scaler)
    before = [p.clone() for p in model.parameters()]
    act = {"unscale_ of another": scaler.unscale_, "step of another": scaler.step, "step": scaler.step}[call]
    with pytest.raises(ValueError, match=r"the gradient of 0\.weight was unscaled, and a scaled backward pass"):
        act(first if call == "step" else second)
    assert_equal(list(model.parameters()), before)
    # As it says: cleared, the next one is scaled alone.
    second.zero_grad()
    x = batch()
    backward(model, x, scaler)
    scaler.unscale_(second)
    found = gradients(model)
    second.zero_grad()
    backward(model, x)
    assert_equal(found, gradients(model))


def test_each_optimizer_is_unscaled_once(seed):
    model, _, scaler = pair()
    first, second = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)
    backward(model, batch(), scaler)
    for optimizer in (first, second):
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer"):
            scaler.unscale_(optimizer)
    for optimizer in (first, second):
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
            scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"after step\(\)"):
            scaler.unscale_(optimizer)
    scaler.update()


def test_a_closure_is_refused_for_each(seed):
    model, _, scaler = pair()
    backward(model, batch(), scaler)
    scaler.step(SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="a closure would be called without the scale"):
        scaler.step(SGD(model.parameters(), lr=0.1), closure=lambda: 0.0)


@pytest.mark.parametrize("second", KINDS)
def test_gradients_that_the_first_ones_zero_grad_cleared(second, seed):
    """torch's GradScaler steps a fused optimizer, which does nothing, and refuses others."""
    outcomes = []
    for make in (lambda model: torch.amp.GradScaler("cpu"), hu.AdaptiveGradScaler):
        model = mlp()
        optimizers = SGD(model.parameters(), lr=0.1), KINDS[second](model.parameters())
        scaler = make(model)
        backward(model, batch(), scaler)
        scaler.step(optimizers[0])
        optimizers[0].zero_grad()
        before = [p.clone() for p in model.parameters()]
        try:
            scaler.step(optimizers[1])
            outcomes.append("taken")
        except (AssertionError, ValueError) as error:
            outcomes.append("refused")
            last = str(error)
        assert_equal(list(model.parameters()), before)
        scaler.update()
    assert outcomes == ["taken" if second == "fused" else "refused"] * 2
    if second != "fused":
        assert "no gradients: there is nothing to step with" in last
        assert "another optimizer's zero_grad(), which clears what they share, after all steps" in last


def test_gradients_are_not_kept_alive(seed):
    model, _, scaler = pair()
    optimizer = SGD(model.parameters(), lr=0.1)
    backward(model, batch(), scaler)
    scaler.step(optimizer)
    held = [weakref.ref(p.grad) for p in model.parameters()]
    assert all(one() is not None for one in held)
    optimizer.zero_grad()
    assert all(one() is None for one in held)
    scaler.update()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("updates", [True, False])
def test_a_second_pass_after_unscaling_is_stepped_with_unscaled_or_refused(to_none, updates, seed):
    """As a sharpness-aware step has two: the first one's gradients, unscaled, say where the second is taken."""
    model, _, scaler = pair()
    x, optimizer = batch(), SGD(model.parameters(), lr=0.1)
    backward(model, x, scaler)
    scaler.unscale_(optimizer)
    first = gradients(model)
    if updates:
        scaler.update()
    optimizer.zero_grad(set_to_none=to_none)
    backward(model, x, scaler)
    before = [p.detach().clone() for p in model.parameters()]
    if not updates:
        told = r"gradient of 0\.weight comes from a scaled.*still scaled: call scaler\.update"
        with pytest.raises(ValueError, match=told):
            scaler.step(optimizer)
        assert_equal(list(model.parameters()), before)
        return
    scaler.step(optimizer)
    assert_equal(gradients(model), first)


def test_a_gradient_that_only_a_later_pass_made_is_not_stepped_with_scaled(seed):
    """As an expert's or a head's that the first pass did not reach."""
    model, _, scaler = pair()
    optimizer = SGD(model.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    backward(model, batch(), scaler)
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    model.requires_grad_(True)
    backward(model, batch(), scaler)
    for parameter in list(model.parameters())[2:]:
        parameter.grad = None
    with pytest.raises(
        ValueError, match=r"gradient of 0\.weight comes from a scaled.*still scaled: call scaler\.update"
    ):
        scaler.step(optimizer)


def test_a_gradient_replaced_after_unscaling_takes_no_scaled_one(seed):
    model, _, scaler = pair()
    optimizer = SGD(model.parameters(), lr=0.1)
    backward(model, batch(), scaler)
    scaler.unscale_(optimizer)
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clamp(-1, 1)
    backward(model, batch(), scaler)
    with pytest.raises(
        ValueError, match=r"gradient of 0\.weight comes from a scaled.*still scaled: call scaler\.update"
    ):
        scaler.step(optimizer)


@pytest.mark.parametrize("in_place", [True, False])
def test_gradients_of_a_second_pass_that_the_user_divides_are_stepped_with(in_place, seed):
    model, _, scaler = pair()
    x, optimizer = batch(), SGD(model.parameters(), lr=0.1)
    backward(model, x, scaler)
    scaler.unscale_(optimizer)
    true = gradients(model)
    optimizer.zero_grad()
    backward(model, x, scaler)
    for parameter in model.parameters():
        if in_place:
            parameter.grad.div_(scaler.get_scale())
        else:
            parameter.grad = parameter.grad / scaler.get_scale()
    told = pytest.warns(
        RuntimeWarning, match=r"0\.weight comes.*written since: it is taken as unscaled.*scaler\.update"
    )
    with told if in_place else contextlib.nullcontext():
        scaler.step(optimizer)
    assert_equal(gradients(model), true)
