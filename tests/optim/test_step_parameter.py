"""Parameters that step one by one inside of backward have the bits of one step after it."""

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim.step._batch import Roster

STEPS = 4


def _model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(dtype)


def _train(model, optimizer, inside):
    handles = []
    if inside:
        for group in optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):

                def step(parameter, group=group, position=position):
                    if position % 2:
                        optimizer.step_param(parameter, group)
                    else:
                        optimizer.step_parameter(parameter, group, position)
                    parameter.grad = None

                handles.append(parameter.register_post_accumulate_grad_hook(step))
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batch = torch.randn(4, 8, generator=generator).to(model[0].weight.dtype)
        model(batch).float().square().sum().backward()
        if not inside:
            optimizer.step()
            optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("update", ["nearest", "stochastic", "kahan", "split", "split8", "master"])
def test_the_bits_are_those_of_a_step_after_backward(update):
    found, states = [], []
    for inside in (False, True):
        model = _model()
        named = dict(model.named_parameters())
        groups = [
            {"params": [(n, p) for n, p in named.items() if "weight" in n], "weight_decay": 0.1},
            {"params": [(n, p) for n, p in named.items() if "bias" in n], "weight_update": "kahan"},
        ]
        optimizer = hu.AdamW(groups, lr=1e-2, weight_update=update, report_interval=2)
        found.append(_train(model, optimizer, inside))
        states.append(optimizer.state_dict()["state"])
        assert "metered yet" not in str(optimizer.report())
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))
    for number, state in states[0].items():
        for name, value in state.items():
            other = states[1][number][name]
            assert same_bits(value, other) if isinstance(value, torch.Tensor) else value == other, name


def test_unnamed_parameters_keep_their_random_bits():
    found = []
    for inside in (False, True):
        model = _model()
        found.append(_train(model, hu.SGD(model.parameters(), lr=1e-2, weight_update="stochastic"), inside))
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))


def test_steps_of_both_kinds_follow_each_other():
    one, other = _model(), _model()
    optimizers = [hu.AdamW(model.parameters(), weight_update="stochastic") for model in (one, other)]
    _train(one, optimizers[0], True)
    _train(one, optimizers[0], False)
    _train(other, optimizers[1], False)
    _train(other, optimizers[1], False)
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_step_of_one_parameter_looks_at_no_other_ones_states(monkeypatch):
    weights = [torch.nn.Parameter(torch.ones(4).bfloat16()) for _ in range(5)]
    optimizer = hu.optim.AdamW(weights)
    looked_at, make = [], Roster.from_places
    monkeypatch.setattr(Roster, "from_places", lambda *given: looked_at.append(len(given[4])) or make(*given))
    for weight in weights:
        weight.grad = torch.ones_like(weight)
        optimizer.step_param(weight, optimizer.param_groups[0])
    assert looked_at == [0] * 5


def test_a_parameter_without_a_gradient_stays():
    parameter = torch.nn.Parameter(torch.ones(2).bfloat16())
    optimizer = hu.SGD([parameter], lr=1.0)
    optimizer.step_param(parameter, optimizer.param_groups[0])
    assert parameter.tolist() == [1, 1]


def test_what_cannot_be_done_is_refused():
    parameter, stranger = (torch.nn.Parameter(torch.ones(2).bfloat16()) for _ in range(2))
    optimizer = hu.SGD([parameter], lr=1.0)
    group = optimizer.param_groups[0]
    with pytest.raises(ValueError, match="is not there in a group of this optimizer"):
        optimizer.step_param(stranger, group)
    with pytest.raises(ValueError, match="is not there in a group of this optimizer"):
        optimizer.step_parameter(stranger, group, 0)
    with pytest.raises(ValueError, match="is not there in a group of this optimizer"):
        optimizer.step_parameter(parameter, group, 5)
    with pytest.raises(ValueError, match="a group of this optimizer"):
        optimizer.step_parameter(parameter, dict(group), 0)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="hooks of step"):
        optimizer.step_param(parameter, group)
    wrapped = hu.optim.wrap(torch.optim.Adagrad, [stranger], lr=0.1)
    with pytest.raises(NotImplementedError, match="WrappedOptimizer steps all parameters together"):
        wrapped.step_param(stranger, wrapped.param_groups[0])


def test_a_scheduler_sees_the_steps():
    model = _model()
    optimizer = hu.SGD(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    _train(model, optimizer, True)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 5e-3
