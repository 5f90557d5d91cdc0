"""The optimizer as torch.optim's users meet it: schedulers, closures, clipping, scaling, compiling, reporting."""

import copy
import inspect
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import lr_scheduler

import halfulp as hu
from halfulp.kernels import engine

from ..laws.optim.cases import differing, snapshot


def _model(dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
    return torch.nn.Sequential(*layers).to(dtype)


def _batches(steps, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(steps, 8, 16, generator=generator).to(dtype)


SCHEDULERS = {
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.95},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 3]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {},
    "CosineAnnealingLR": {"T_max": 5},
    "ReduceLROnPlateau": {"patience": 0},
    "CyclicLR": {"base_lr": 1e-4, "max_lr": 1e-2},
    "OneCycleLR": {"max_lr": 1e-2, "total_steps": 10},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
}
COMPOSED = {"SequentialLR", "ChainedScheduler", "LRScheduler", "_LRScheduler"}


def test_every_scheduler_of_torch_is_in_the_list():
    found = {
        name
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value) and issubclass(value, lr_scheduler.LRScheduler)
    }
    assert found - COMPOSED - {"SWALR"} <= set(SCHEDULERS)


def _schedule(kind, optimizer):
    if kind == "SequentialLR":
        parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    if kind == "ChainedScheduler":
        parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return lr_scheduler.ChainedScheduler(parts, optimizer)
    return getattr(lr_scheduler, kind)(optimizer, **SCHEDULERS[kind])


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("kind", [*SCHEDULERS, "SequentialLR", "ChainedScheduler"])
def test_every_scheduler_drives_it_as_it_drives_torchs(kind, tensor):
    weights = []
    for family in (torch.optim, hu.optim):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 50))
        lr = torch.tensor(1e-3) if tensor else 1e-3
        optimizer = family.SGD([parameter], lr=lr, momentum=0.9)
        with warnings.catch_warnings(), engine("reference"):
            warnings.simplefilter("ignore")  # of torch's own, about itself
            schedule = _schedule(kind, optimizer)
            for step in range(5):
                parameter.grad = torch.full((50,), 0.1 * (step + 1))
                optimizer.step()
                schedule.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
        weights.append(parameter.detach())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    model, x = _model(), _batches(1)[0]
    optimizer = hu.optim.AdamW(model.parameters(), lr=1e-2)
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        calls.append(loss.item())
        return loss

    with torch.no_grad():
        losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == calls
    assert losses[-1] < losses[0]
    assert optimizer.step() is None


def test_no_gradient_no_step():
    first, second = (torch.nn.Parameter(torch.ones(8).bfloat16()) for _ in range(2))
    optimizer = hu.optim.AdamW([first, second], lr=0.1)
    first.grad = torch.ones(8).bfloat16()
    for _ in range(3):
        optimizer.step()
    assert optimizer.state[first]["step"] == 3
    assert not optimizer.state.get(second)
    assert (second == 1).all()
    optimizer.zero_grad()
    assert first.grad is None
    before = snapshot(optimizer)
    optimizer.step()
    assert differing(before, snapshot(optimizer)) == []


def test_clipping_and_hooks_work_as_with_torch():
    model, calls = _model(), []
    optimizer = hu.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    model(_batches(1)[0]).float().square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert float(norm) > 0.5
    optimizer.step()
    assert calls == ["pre", "post"]


def test_a_gradient_scaler_skips_and_unscales_float16():
    model = _model(torch.float16)
    optimizer = hu.optim.AdamW(model.parameters(), lr=1e-2, weight_update="kahan")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for parameter in model.parameters():
        parameter.grad_dtype = None
    for step, x in enumerate(_batches(4, torch.float16)):
        optimizer.zero_grad()
        scaler.scale(model(x).float().square().mean()).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.float()  # torch's scaler refuses to unscale float16 gradients
        if step == 1:
            model[0].weight.grad[0, 0] = torch.inf
        before = snapshot(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert (differing(before, snapshot(optimizer)) == []) == (step == 1)
    assert {state["step"] for state in optimizer.state.values()} == {3}


def _train(how, backend, update="kahan", steps=20, rule=hu.optim.AdamW):
    torch._dynamo.reset()
    model = _model()
    optimizer = rule(model.named_parameters(), lr=1e-2, weight_update=update)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, steps)
    counter = CompileCounterWithBackend(backend)

    def train_step(x):
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = train_step
    if how == "train_step":
        step = torch.compile(train_step, backend=counter)
    elif how == "step":
        optimizer.step = torch.compile(optimizer.step, backend=counter)
    counts = []
    for x in _batches(steps):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's compiler, about itself
            step(x)
            schedule.step()
        counts.append(counter.frame_count)
    return snapshot(optimizer), counts


@pytest.mark.sampled(1)
@pytest.mark.parametrize("update", ["kahan", "stochastic", "split8"])
@pytest.mark.parametrize(("how", "backend"), [("step", "eager"), ("train_step", "eager"), ("train_step", "aot_eager")])
def test_compiled_by_torch_it_gives_the_same_bits_and_is_compiled_once(how, backend, update):
    eager, _ = _train("eager", backend, update)
    compiled, counts = _train(how, backend, update)
    assert differing(eager, compiled) == []
    assert counts[1:] == [counts[1]] * (len(counts) - 1), f"compiled again: {counts}"


def test_compiled_by_inductor_a_step_keeps_its_rounding():
    """Inductor removes a pair of casts, which turns Kahan into nothing; it cannot see into this step."""
    eager, _ = _train("eager", "eager")
    compiled, counts = _train("step", "inductor")
    assert differing(eager, compiled) == []
    assert counts[1:] == [counts[1]] * (len(counts) - 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"weight_update": "stochastic"}, 8.0),
        ({"weight_update": "kahan"}, 10.0),
        ({"weight_update": "split"}, 10.0),
        ({"weight_update": "split8"}, 9.0),
        ({}, 9.0),
        ({"weight_update": "master"}, 12.0),
        ({"weight_update": hu.Components(4)}, 14.0),
        ({"weight_update": "split8", "state_dtype": "8bit"}, 7 + 2 * 2 / 32),
        ({"weight_update": "stochastic", "state_dtype": torch.float32}, 12.0),
    ],
)
def test_bytes_per_parameter_are_what_is_held(options, expected):
    parameter = torch.nn.Parameter(torch.zeros(128, 64).bfloat16())
    optimizer = hu.optim.AdamW([parameter], **options)
    assert optimizer.bytes_per_parameter() == expected
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = [parameter, parameter.grad, *optimizer.state[parameter].values()]
    total = sum(x.numel() * x.element_size() for x in held if isinstance(x, torch.Tensor))
    assert total / parameter.numel() == expected


def test_printing_tells_the_options_and_survives_a_copy():
    optimizer = hu.optim.AdamW(_model().parameters(), lr=0.5, weight_update="kahan")
    text = str(optimizer)
    assert "lr: 0.5" in text
    assert "kahan" in text.lower()
    assert "lost updates" in text
    assert str(copy.deepcopy(optimizer)) == text


def test_learning_happens_in_sixteen_bits():
    """A quadratic whose last steps are far below half a place of bfloat16."""
    target = torch.randn(256, generator=torch.Generator().manual_seed(0))
    losses = {}
    for update in ("nearest", "split8", "kahan", "stochastic"):
        parameter = torch.nn.Parameter(torch.zeros(256).bfloat16())
        optimizer = hu.optim.SGD([("w", parameter)], lr=2e-3, weight_update=update, report_interval=0)
        weights = {"w": parameter}
        for _ in range(1500):
            parameter.grad = (parameter.detach().float() - target).bfloat16()
            optimizer.step()
        plan = optimizer._plans[weights["w"]]
        decoded = plan.spec.update.read(plan.spec.store, plan.weight_tensors)
        losses[update] = float((decoded - target).square().mean())
    exact = float((target * (1 - 2e-3) ** 1500).square().mean())
    assert losses["nearest"] > 5 * exact
    assert abs(losses["split8"] - exact) < 0.1 * exact + 1e-5
    assert abs(losses["kahan"] - exact) < 0.1 * exact + 1e-5
    assert losses["stochastic"] < 2 * exact + 1e-3
