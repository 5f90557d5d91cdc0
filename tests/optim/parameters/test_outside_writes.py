"""After any load, swap or copy the float32 weights change only as the file or the caller says."""

import copy

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim.parameters._outside_writes import read_valid_auxiliary_tensors
from halfulp.scaled import ScaledTensor

from ...laws.optim.cases import UPDATES, Adder, narrow_updates, stored_updates

SIZE = 96


def _model():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def _stepped(update, steps=3):
    """A bfloat16 model and its optimizer with live companions."""
    model = _model()
    optimizer = hu.optim.AdamW(
        model.named_parameters(), lr=1e-2, weight_update=UPDATES[update], param_dtype=torch.bfloat16
    )
    for _ in range(steps):
        _step(model, optimizer)
    return model, optimizer


def _step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape).bfloat16()
    with hu.kernels.engine("reference"):
        optimizer.step()


def _weights(optimizer, model):
    return {name: value.clone() for name, value in optimizer.float32_state_dict(model).items()}


def _equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _shown(model):
    return {name: value.detach().float() for name, value in model.state_dict().items()}


def _load_into_model(model, optimizer, before):
    other = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    return {name: value.float() for name, value in other.items()}


def _torch_file(model, optimizer, before):
    other = torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=1e-2)
    optimizer.load_state_dict(other.state_dict())
    return before


def _torch_file_of_steps(model, optimizer, before):
    twin = copy.deepcopy(model)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for parameter in twin.parameters():
        parameter.grad = torch.ones_like(parameter)
    other.step()
    optimizer.load_state_dict(other.state_dict())
    return before


def _resume(model_first):
    def act(model, optimizer, before):
        files = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for _ in range(2):
            _step(model, optimizer)
        order = ((model, files[0]), (optimizer, files[1]))
        for target, file in order if model_first else reversed(order):
            target.load_state_dict(file)
        return before

    return act


def _averages(given):
    def act(model, optimizer, before):
        ema = hu.optim.EMA(model, 0.5, optimizer=optimizer if given else None)
        with ema.apply():
            pass
        _step(model, optimizer)
        ema.update()
        before, bits = _weights(optimizer, model), _shown(model)
        for _ in range(2):
            with ema.apply():
                now, shown = _weights(optimizer, model), _shown(model)
                for name in now:
                    # An average that has a weight's very bits may be that weight, as bits that are put back are.
                    allowed = [shown, before] if torch.equal(shown[name], bits[name]) else [shown]
                    assert any(torch.equal(now[name], one[name]) for one in allowed), "another weight's low bits"
        return before

    return act


def _vector(factor):
    def act(model, optimizer, before):
        vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.nn.utils.vector_to_parameters(vector * factor, model.parameters())
        return before if factor == 1 else _shown(model)

    return act


def _float32(model, optimizer, before):
    given = {name: value.bfloat16().float() for name, value in before.items()}
    optimizer.load_float32_state_dict(model, given)
    return given


def _assign(model, optimizer, before):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return before


def _swapped(factor):
    """Exchange parameters as model.to() does under set_swap_module_params_on_conversion(True)."""

    def act(model, optimizer, before):
        for parameter in model.parameters():
            parameter.grad = None
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(parameter.detach() * factor))
        return before if factor == 1 else _shown(model)

    return act


def _looked_at(model, optimizer, before):
    optimizer.bytes_per_parameter(), optimizer.state_dict(), str(optimizer)
    return before


def _reinitialised(model, optimizer, before):
    torch.nn.init.normal_(model[0].weight)
    return before | {"0.weight": model[0].weight.detach().float()}


ACTS = {
    "model.load_state_dict": _load_into_model,
    "a torch file without states": _torch_file,
    "a torch file": _torch_file_of_steps,
    "resume, model first": _resume(True),
    "resume, optimizer first": _resume(False),
    "EMA swap": _averages(False),
    "EMA swap that knows the optimizer": _averages(True),
    "the same vector to parameters": _vector(1),
    "another vector to parameters": _vector(1.5),
    "load_float32_state_dict": _float32,
    ".data = a copy": _assign,
    "swapped with a copy": _swapped(1),
    "swapped with another": _swapped(-1.5),
    "a look": _looked_at,
    "initialised again": _reinitialised,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("update", narrow_updates())
def test_float32_weights_change_only_as_the_caller_says(seed, update, act):
    model, optimizer = _stepped(update)
    expected = ACTS[act](model, optimizer, _weights(optimizer, model))
    assert _equal(_weights(optimizer, model), expected)
    # What was read is also what the next step starts from.
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    if UPDATES[update].feeds_back:
        return
    _step(model, optimizer)
    assert _equal(_weights(optimizer, model), expected)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_writes_again_and_again_are_warned_of_and_one_write_is_not(steps, seed, recwarn):
    """Each drops the low bits of the whole parameter, so that what is under half an ulp never arrives."""
    parameter = torch.nn.Parameter(torch.ones(SIZE).bfloat16())
    optimizer = hu.optim.SGD([parameter], lr=1.0, weight_update="split")

    def write_and_step():
        with torch.no_grad():
            parameter.clamp_(-1.5, 1.5)
        for _ in range(steps):
            parameter.grad = torch.full((SIZE,), -(2.0**-9) / steps).bfloat16()
            optimizer.step()

    write_and_step()
    assert not recwarn.list
    with pytest.warns(RuntimeWarning, match="written between steps"):
        write_and_step(), write_and_step()
    count = len(recwarn.list)
    write_and_step(), write_and_step()
    assert len(recwarn.list) == count  # once
    assert bool((parameter == 1).all())


@pytest.mark.parametrize("update", narrow_updates())
def test_an_average_that_forgets_nothing_keeps_the_float32_weights(seed, update):
    if UPDATES[update].feeds_back:
        return
    model, optimizer = _stepped(update)
    with hu.kernels.engine("reference"):
        ema = hu.optim.EMA(model, 1.0, optimizer=optimizer, weight_update=UPDATES[update])
        before = ema.float32_state_dict()
        for _ in range(5):
            _step(model, optimizer)
            ema.update()
        after = ema.float32_state_dict()
    assert all(same_bits(before[name], after[name]) for name in before)


def test_a_model_of_other_parameters_is_refused(seed):
    model = _model().bfloat16()
    optimizer = hu.optim.AdamW(model.parameters(), weight_update="split")
    with pytest.raises(ValueError, match="no parameter of this model"):
        optimizer.float32_state_dict(copy.deepcopy(model))


def _copied_into(parameter):
    values, before = torch.randn(SIZE) * 100, parameter.payload.clone()
    parameter.copy_(values)
    # What is equal keeps its companion.
    parameter.copy_(torch.where(parameter.payload == before, -values, values))


SCALED_WRITES = {
    "copy_": _copied_into,
    "mul_": lambda parameter: parameter.mul_(3.0),
    "mul_ by a power of two": lambda parameter: parameter.mul_(2.0),
    "add_": lambda parameter: parameter.add_(0.5),
    "zero_": torch.Tensor.zero_,
    "a payload": lambda parameter: parameter.payload.copy_(parameter.payload.flip(0)),
}


@pytest.mark.filterwarnings("ignore:parameters are written between steps")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("write", SCALED_WRITES)
@pytest.mark.parametrize("update", [name for name, update in UPDATES.items() if update.scales and name != "exact"])
def test_a_scaled_weight_is_what_was_written_last(seed, update, write):
    model = torch.nn.Linear(SIZE, 1, bias=False)
    model.weight = torch.nn.Parameter(ScaledTensor.encode(torch.randn(SIZE), torch.float16))
    optimizer = hu.optim.SGD(model.named_parameters(), lr=1e-3, weight_update=UPDATES[update])

    def step(size):
        model.weight.grad = ScaledTensor.encode(torch.randn(SIZE) * size)
        with hu.kernels.engine("reference"):
            optimizer.step()

    for _ in range(2):  # without, then with a copy of what was there
        step(1.0)
        with torch.no_grad():
            SCALED_WRITES[write](model.weight)
        written = model.weight.detach().decode()
        if write != "a payload":
            assert torch.equal(_weights(optimizer, model)["weight"], written)
        read = _weights(optimizer, model)
        step(0.0)
        assert torch.equal(model.weight.detach().decode(), written)
        assert _equal(_weights(optimizer, model), read), "a step starts from what is read"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("update", "store"), stored_updates("sgd"))
def test_what_was_written_is_the_whole_weight(seed, update, store):
    """Numbers beside a format's grid too: its companions hold nothing of what the writer's number is rounded by."""
    held = Adder(update, torch.randn(SIZE), store)
    held.add(torch.randn(SIZE) * 2.0**-7)
    with torch.no_grad():
        held.parameter.copy_(torch.randn(SIZE))
    read = held.plan.spec.update.read(
        held.plan.spec.store, [held.parameter.detach(), *read_valid_auxiliary_tensors(held.plan)]
    )
    assert torch.equal(read, held.plan.spec.store.decode(held.parameter.detach()))
