"""States begin with the value that their rule says, wherever and however late they are made."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim.rules._adam_variants import PRODIGY
from halfulp.optim.rules._update_rule import StateSlot, UpdateRule
from halfulp.optim.states._state import encode_constant_state

from ...laws.optim.cases import CODECS, RULES, differing, snapshot

YOGI, ADAN = RULES["yogi"][0], RULES["adan"][0]


@pytest.fixture(autouse=True)
def _reference():
    with hu.kernels.engine("reference"):
        yield


def _parameter(shape=(4, 64), dtype=torch.bfloat16):
    return torch.nn.Parameter(torch.linspace(-1, 1, 256).reshape(shape).to(dtype))


def _step(optimizer, steps=1):
    for step in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                values = torch.linspace(-1, 1 + step, parameter.numel()).reshape(parameter.shape)
                if isinstance(parameter, hu.ScaledTensor):
                    parameter.grad = hu.ScaledTensor.encode(values)
                else:
                    parameter.grad = values.to(parameter.dtype)
        optimizer.step()


def _second(optimizer, parameter):
    """The float32 values of the second moment."""
    plan = optimizer._plans[parameter]
    return plan.spec.codecs[1].decode(plan.states[1])


@pytest.mark.parametrize("value", [1e-6, 0.1, 2.0**127, 1e-30])
@pytest.mark.parametrize("codec", CODECS)
def test_every_storage_holds_the_initial_value(codec, value):
    parameter = _parameter()
    optimizer = YOGI([parameter], initial_accumulator_value=value, state_dtype=CODECS[codec])
    optimizer.bytes_per_parameter()
    held = _second(optimizer, parameter).double()
    error = {"fp32": 0, "bf16x2": 2**-17, "8bit": 0.015, "8bit-16": 0.015}.get(codec, 2**-9) + 2**-24
    assert ((held - value).abs() <= error * value).all()
    form = {"8bit": "_codes", "4bit": "_packed"}.get(codec[:4], "")
    assert (optimizer.state[parameter][f"exp_avg{form}"] == 0).all()


@pytest.mark.parametrize("codec", [torch.float32, torch.bfloat16, torch.float16, "fp8", torch.float8_e5m2])
def test_scaled_states_begin_there_too(codec):
    parameter = torch.nn.Parameter(hu.ScaledTensor.encode(torch.linspace(-1, 1, 256).reshape(4, 64)))
    optimizer = YOGI([parameter], initial_accumulator_value=0.1, state_dtype=codec)
    optimizer.bytes_per_parameter()
    assert ((_second(optimizer, parameter) - 0.1).abs() <= 0.26 * 0.1).all()
    _step(optimizer)
    assert (_second(optimizer, parameter) > 0.05).all()


def test_a_signed_state_and_a_number_instead_of_a_function():
    def sums(w, g, total):
        return g, total + g

    rule = UpdateRule("sums", sums, (StateSlot("total", 1, initial=-2.5),), lambda group, step: ())

    class Sums(hu.optim.Optimizer):
        def rule(self, group):
            return rule

    for codec in CODECS.values():
        parameter = _parameter()
        optimizer = Sums([parameter], {}, state_dtype=codec)
        optimizer.bytes_per_parameter()
        plan = optimizer._plans[parameter]
        torch.testing.assert_close(
            plan.spec.codecs[0].decode(plan.states[0]), torch.full((4, 64), -2.5), rtol=0.01, atol=0
        )


def test_the_value_is_the_groups_own_and_a_later_group_has_it_too():
    first, second, third = _parameter(), _parameter(), _parameter()
    groups = [{"params": [first]}, {"params": [second], "initial_accumulator_value": 2.0}]
    optimizer = YOGI(groups, initial_accumulator_value=0.5)
    _step(optimizer, 3)
    optimizer.add_param_group({"params": [third], "initial_accumulator_value": 4.0})
    with pytest.raises(ValueError, match="begins with nan"):
        optimizer.add_param_group({"params": [_parameter()], "initial_accumulator_value": float("nan")})
    with pytest.raises(ValueError, match="initial_accumulator_value='x' is no number"):
        optimizer.add_param_group({"params": [_parameter()], "initial_accumulator_value": "x"})
    assert len(optimizer.param_groups) == 3
    optimizer.bytes_per_parameter()
    assert (_second(optimizer, third) == 4).all()
    for parameter, value in ((first, 0.5), (second, 2.0)):
        assert (_second(optimizer, parameter) != value).any()
        assert ((_second(optimizer, parameter) - value).abs() < 0.05).all()


@pytest.mark.parametrize("codec", ["default", "8bit", "bf16x2", "fp32"])
def test_a_resumed_run_gives_late_parameters_the_saved_groups_value(codec):
    """A parameter without a gradient so far has no state in the file; it begins as in the run that was saved."""

    def made(value):
        parameters = [_parameter(), _parameter()]
        return parameters, YOGI(parameters, initial_accumulator_value=value, state_dtype=CODECS[codec])

    (one, late), optimizer = made(0.5)
    one.grad = torch.ones_like(one)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert list(saved["state"]) == [0]
    (other, other_late), resumed = made(3.0)
    other_late.grad = torch.ones_like(late)
    resumed.step()  # what it made so far by its own value is dropped
    with torch.no_grad():
        other.copy_(one), other_late.copy_(late)
    resumed.load_state_dict(saved)
    _step(optimizer, 2), _step(resumed, 2)
    assert differing(snapshot(optimizer), snapshot(resumed)) == []


def test_a_file_without_states_of_this_package_resets_to_the_initial_value():
    parameter = _parameter()
    optimizer = YOGI([parameter], initial_accumulator_value=0.5, state_dtype=torch.float32)
    _step(optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["identities"]
    saved["state"] = {}
    optimizer.load_state_dict(saved)
    assert (_second(optimizer, parameter) == 0.5).all()
    assert (optimizer.state[parameter]["exp_avg"] == 0).all()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("steps", [0, 2])
def test_copies_go_on_alike(duplicate, steps, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, YOGI.__module__, sys.modules.get(YOGI.__module__) or _module_of(YOGI))
    parameter = _parameter()
    optimizer = YOGI([parameter], initial_accumulator_value=0.5)
    _step(optimizer, steps)
    _, other = duplicate((parameter, optimizer))
    _step(optimizer, 2), _step(other, 2)
    assert differing(snapshot(optimizer), snapshot(other)) == []


def _module_of(kind):
    import types

    module = types.ModuleType(kind.__module__)
    setattr(module, kind.__name__, kind)
    return module


@pytest.mark.parametrize("kind", [YOGI, ADAN])
@pytest.mark.parametrize("codec", ["default", "8bit", "bf16x2"])
def test_a_shard_steps_as_the_whole(kind, codec):
    """Rows of a parameter alone, keyed by their place in the whole, have the whole's states."""
    whole = kind([_parameter()], state_dtype=CODECS[codec], weight_update="nearest")
    whole.bytes_per_parameter()
    rows = _parameter().detach()[:2].clone()
    part = kind([torch.nn.Parameter(rows)], state_dtype=CODECS[codec], weight_update="nearest")
    part.bytes_per_parameter()
    for name, value in whole.state[whole.param_groups[0]["params"][0]].items():
        if isinstance(value, torch.Tensor):
            mine = part.state[part.param_groups[0]["params"][0]][name]
            assert same_bits(value[:2], mine)


def test_one_element_of_a_constant_state_stands_for_all():
    optimizer = YOGI([_parameter()], state_dtype="8bit")
    optimizer.bytes_per_parameter()
    codec = optimizer._plans[optimizer.param_groups[0]["params"][0]].spec.codecs[1]
    shape = torch.Size([3, 96])
    made = [torch.zeros(size, dtype=dtype) for size, dtype in codec.describe_tensors("", shape).values()]
    codec.encode(made, torch.full(shape, 0.3), None)
    assert [tensor.unique().tolist() for tensor in made] == [[one.item()] for one in encode_constant_state(codec, 0.3)]


OPTION = "initial_accumulator_value"


def _two_groups():
    both = [_parameter(), _parameter()]
    return YOGI([{"params": [parameter]} for parameter in both], initial_accumulator_value=0.1), both


@pytest.mark.parametrize("value", [math.nan, -1.0, 3.4e38, "0.1", None, True])
def test_a_refused_value_leaves_no_state_behind(value):
    """The step after the correction begins where it should."""
    (optimizer, both), (other, expected) = _two_groups(), _two_groups()
    optimizer.param_groups[1][OPTION] = value
    with pytest.raises((ValueError, TypeError), match="exp_avg_sq"):
        _step(optimizer)
    assert not optimizer.state.get(both[1])
    optimizer.param_groups[1][OPTION] = 0.1
    _step(optimizer)
    _step(other)
    assert all(map(same_bits, both, expected))


@pytest.mark.parametrize("value", [math.nan, "0.1", None])
@pytest.mark.parametrize("kept", ["all", "no states", "no states and identities"])
def test_a_file_with_a_value_that_cannot_be_is_refused_whole(value, kept):
    optimizer, _ = _two_groups()
    _step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = saved["state"] if kept == "all" else {}
    for group in saved["param_groups"]:
        group["lr"] = 0.5
        if kept == "no states and identities":
            del group["identities"]
    saved["param_groups"][1][OPTION] = value
    before, groups = snapshot(optimizer), [dict(group) for group in optimizer.param_groups]
    with pytest.raises((ValueError, TypeError), match="exp_avg_sq"):
        optimizer.load_state_dict(saved)
    assert differing(before, snapshot(optimizer)) == []
    assert [{**group, "params": 0} for group in optimizer.param_groups] == [{**group, "params": 0} for group in groups]


@pytest.mark.parametrize("codec", ["8bit", "bf16x2", torch.float16])
def test_a_state_of_which_a_part_was_deleted_is_refused(codec):
    """The tensor that is left means nothing alone; without it the state begins anew, at its initial value."""
    parameter = _parameter()
    if codec == torch.float16:
        parameter = torch.nn.Parameter(hu.ScaledTensor.encode(parameter.detach().float()))
    optimizer = YOGI([parameter], initial_accumulator_value=0.5, state_dtype=CODECS.get(codec, codec))
    _step(optimizer, 2)
    state = optimizer.state[parameter]
    names = [name for name in state if name.startswith("exp_avg_sq")]
    assert len(names) == 2
    for name, other in (names, reversed(names)):
        deleted, before = state.pop(name), copy.deepcopy(dict(state))
        with pytest.raises(ValueError, match=f"of parameter #0 lacks '{name}' beside '{other}': put back"):
            _step(optimizer)
        assert before.keys() == state.keys()
        assert before.pop("step") == state["step"]
        assert all(same_bits(value, state[key]) for key, value in before.items())
        state[name] = deleted
        _step(optimizer)
    for name in names:
        del state[name]
    optimizer.bytes_per_parameter()
    assert ((_second(optimizer, parameter) - 0.5).abs() <= 0.01).all()


def test_a_storage_that_is_changed_in_the_group_does_not_forget_the_states():
    parameter = _parameter()
    optimizer = YOGI([parameter], initial_accumulator_value=0.5)
    _step(optimizer, 2)
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["state_dtype"] = "8bit"
    with pytest.raises(ValueError, match=r"'exp_avg_codes', 'exp_avg_scale' beside 'exp_avg': .* a new optimizer"):
        _step(optimizer)
    other = YOGI([parameter], initial_accumulator_value=0.5, state_dtype="8bit")
    other.load_state_dict(saved)
    _step(other)


def test_late_values_need_sums():
    with pytest.raises(ValueError, match="rule 'prodigy' has late_values, which take sums, but no reductions: give it"):
        dataclasses.replace(PRODIGY, reductions=())
