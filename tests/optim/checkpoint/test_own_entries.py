"""What users and modules keep beside weights and moments: entries of the state, extra states, frozen parameters."""

import copy
import io

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits


class Counting(torch.nn.Linear):
    """A module with a state of its own, which is no tensor."""

    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen, "scale": torch.ones(2, dtype=torch.bfloat16)}

    def set_extra_state(self, state):
        self.seen, self.scale = state["seen"], state["scale"]


def _stepped(kind=hu.optim.AdamW, **options):
    weight = torch.nn.Parameter(torch.randn(8).bfloat16())
    optimizer = kind([("weight", weight)], **options)
    _step(weight, optimizer)
    return weight, optimizer


def _step(weight, optimizer):
    weight.grad = torch.ones_like(weight)
    with hu.kernels.engine("reference"):
        optimizer.step()


def test_extra_states_go_out_and_come_back():
    model = torch.nn.Sequential(Counting(4, 4), torch.nn.Sequential(Counting(4, 2)))
    model[0].seen, model[1][0].seen = 3, 5
    optimizer = hu.optim.AdamW(model.named_parameters(), param_dtype=torch.bfloat16)
    file = optimizer.float32_state_dict(model)
    assert file["0._extra_state"]["scale"].dtype == torch.bfloat16, "a module's state is its own"
    other = torch.nn.Sequential(Counting(4, 4), torch.nn.Sequential(Counting(4, 2)))
    target = hu.optim.AdamW(other.named_parameters(), param_dtype=torch.bfloat16)
    target.load_float32_state_dict(other, {f"module.{name}": value for name, value in file.items()})
    assert (other[0].seen, other[1][0].seen) == (3, 5)
    assert torch.equal(target.float32_state_dict(other)["0.weight"], file["0.weight"])


def test_extra_states_come_back_beside_hooks_that_ask_for_weights():
    model = torch.nn.Sequential(Counting(3, 2).bfloat16())
    model.register_load_state_dict_pre_hook(lambda module, given, *_: given.update({"0.bias": given["0.bias"]}))
    optimizer = hu.optim.SGD(model.parameters(), lr=0.1)
    file = optimizer.float32_state_dict(model)
    file["0._extra_state"]["seen"] = 3
    optimizer.load_float32_state_dict(model, file)
    assert model[0].seen == 3


def test_numbers_of_numpy_in_groups_are_saved_as_pythons():
    """A schedule by np.cos writes them, and weights_only takes none."""
    weight = torch.nn.Parameter(torch.ones(4).bfloat16())
    optimizer = hu.optim.AdamW([weight], lr=np.float64(0.1))
    optimizer.param_groups[0] |= {"betas": (np.float64(0.8), np.float32(0.5)), "own": [np.int64(3)]}
    _step(weight, optimizer)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    (group,) = torch.load(buffer, weights_only=True)["param_groups"]
    assert (group["lr"], group["betas"], group["own"]) == (0.1, (0.8, 0.5), [3])
    assert {type(number) for number in (group["lr"], *group["betas"])} == {float}


def test_looks_allocate_nothing_for_frozen_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)).bfloat16()
    model[0].requires_grad_(False)
    optimizer = hu.optim.AdamW(model.named_parameters(), weight_update="split")
    expected = {name: value.float() for name, value in model.state_dict().items()}
    elements = sum(p.numel() for p in model.parameters())
    stepped = sum(p.numel() for p in model[1].parameters())
    assert optimizer.bytes_per_parameter() == 2 + (2 + 2 + 2 + 2) * stepped / elements
    for _ in range(2):
        found = optimizer.float32_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    hu.optim.EMA(model, 0.5, optimizer=optimizer).update()
    held = {id(p) for p, state in optimizer.state.items() if state}
    assert not held & {id(p) for p in model[0].parameters()}


@pytest.mark.parametrize("fresh", [True, False])
def test_a_users_entry_in_the_state_is_saved_and_loaded(seed, fresh):
    weight, optimizer = _stepped()
    optimizer.state[weight]["importance"] = torch.arange(3)
    optimizer.state[weight]["seen"] = {"often": 2}
    optimizer.state["run"] = 7
    file = copy.deepcopy(optimizer.state_dict())
    if fresh:
        weight, optimizer = _stepped()
    optimizer.load_state_dict(file)
    assert torch.equal(optimizer.state[weight]["importance"], torch.arange(3))
    assert (optimizer.state[weight]["seen"], optimizer.state["run"]) == ({"often": 2}, 7)
    assert optimizer.state[weight]["importance"] is not file["state"][0]["importance"]


@pytest.mark.parametrize("key", ["run", (1, 2), None])
@pytest.mark.parametrize("value", [3, {"mine": 2}])
def test_an_entry_of_ones_own_may_have_any_key_but_a_number(seed, key, value):
    weight, optimizer = _stepped()
    optimizer.state[key] = value
    again, resumed = _stepped()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.state[key] == copy.deepcopy(optimizer).state[key] == value
    for one, stepped in ((weight, optimizer), (again, resumed)):
        _step(one, stepped)
        assert stepped.state[one]["step"] == 2


@pytest.mark.parametrize("key", [0, False, 1, 9])
def test_an_entry_of_ones_own_under_a_number_is_refused_where_it_is_saved(seed, key):
    weight, optimizer = _stepped()
    optimizer.add_param_group({"params": [("other", torch.nn.Parameter(torch.zeros(2).bfloat16()))]})
    optimizer.state[key] = {"mine": 1}
    with pytest.raises(ValueError, match=rf"state\[{key!r}\] is an entry of your own.*such as 'my_{key}'"):
        optimizer.state_dict()
    _step(weight, optimizer)
    optimizer.state[f"my_{key}"] = optimizer.state.pop(key)
    assert optimizer.state_dict()["state"][f"my_{key}"] == {"mine": 1}


def test_a_wrapped_optimizers_entries_are_kept_too_and_refused_alike(seed):
    make = lambda: _stepped(lambda params: hu.optim.wrap(torch.optim.RMSprop, params, weight_update="split"))  # noqa: E731
    (_, optimizer), (_, resumed) = make(), make()
    optimizer.state["run"] = 3
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.state["run"] == 3
    optimizer.base.state["inner"] = 5
    with pytest.raises(NotImplementedError, match="saves 'inner' beside"):
        optimizer.state_dict()


def test_a_state_of_no_parameter_is_refused(seed):
    _, optimizer = _stepped()
    file = optimizer.state_dict()
    file["state"][9] = {"step": 1}
    with pytest.raises(ValueError, match="no optimizer state_dict"):
        optimizer.load_state_dict(file)


def test_another_weight_updates_tensors_are_still_refused(seed):
    _, optimizer = _stepped(weight_update="split")
    file = optimizer.state_dict()
    file["state"][0]["master"] = torch.zeros(8)
    with pytest.raises(ValueError, match="master"):
        optimizer.load_state_dict(file)


def test_a_torch_file_whose_step_is_a_whole_number_is_a_torch_file(seed):
    weight = torch.nn.Parameter(torch.randn(8))
    theirs = torch.optim.AdamW([weight])
    weight.grad = torch.ones(8)
    theirs.step()
    file = theirs.state_dict()
    file["state"][0]["step"] = 1
    ours, optimizer = _stepped(weight_update="split")
    optimizer.load_state_dict(file)
    assert torch.equal(optimizer.state[ours]["exp_avg"].float(), file["state"][0]["exp_avg"].bfloat16().float())


@pytest.mark.parametrize("resumed", [None, "before the switch", "before the first step after it", "after it"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_momentum_that_is_switched_on_later_begins_undampened(seed, resumed, nesterov):
    dampening = 0.0 if nesterov else 0.5
    start, found = torch.randn(8), []
    for kind in (torch.optim.SGD, hu.optim.SGD):
        weight = torch.nn.Parameter(start.clone())
        optimizer = kind([weight], lr=0.1, dampening=dampening)
        generator = torch.Generator().manual_seed(2)
        for step in range(6):
            times = {"before the switch": 2, "before the first step after it": 3, "after it": 4}
            if resumed and kind is hu.optim.SGD and step == times[resumed]:
                file = copy.deepcopy(optimizer.state_dict())
                optimizer = kind([weight], lr=0.1, dampening=dampening)
                optimizer.load_state_dict(file)
            if step == 2:
                optimizer.param_groups[0].update(momentum=0.9, nesterov=nesterov)
            weight.grad = torch.randn(8, generator=generator)
            optimizer.step()
        found.append(weight.detach())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


SWITCHES = {
    "amsgrad": (hu.optim.AdamW, {"amsgrad": True}, {"amsgrad": False}, "max_exp_avg_sq"),
    "Adam": (hu.optim.Adam, {"amsgrad": True}, {"amsgrad": False}, "max_exp_avg_sq"),
    "momentum": (hu.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.0}, "momentum_buffer"),
}
STORED = {"float32": {"state_dtype": torch.float32}, "bfloat16x2": {"state_dtype": "bfloat16x2"}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("states", STORED)
@pytest.mark.parametrize("name", SWITCHES)
def test_a_run_whose_states_were_switched_off_is_saved_loaded_and_goes_on(seed, name, states, again):
    """The switched off state stays, as in torch.optim, and goes on where it is switched on again."""
    kind, on, off, left = SWITCHES[name]
    start = torch.randn(8).bfloat16()

    def run(resumed):
        weight = torch.nn.Parameter(start.clone())
        optimizer = kind([weight], **on, **STORED[states])
        for number in range(8):
            if number == 3:
                optimizer.param_groups[0].update(off)
            if number == 6 and again:
                optimizer.param_groups[0].update({option: on[option] for option in off})
            if number == 5 and resumed:
                file = copy.deepcopy(optimizer.state_dict())
                assert left in file["state"][0]
                weight = torch.nn.Parameter(weight.detach().clone())
                optimizer = kind([weight], **(on if resumed == "as made" else on | off), **STORED[states])
                optimizer.load_state_dict(file)
            _step(weight, optimizer)
        return weight, optimizer.state[weight]

    (weight, held), *others = run(None), run("as made"), run("switched off")
    for other, theirs in others:
        assert same_bits(weight, other)
        assert held.keys() - {"states_begun"} == theirs.keys() - {"states_begun"}
        assert all(same_bits(value, theirs[key]) for key, value in held.items() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("state_dtype", [None, torch.float32, "8bit"])
def test_a_torch_file_whose_states_were_switched_off_is_loaded_and_goes_on(seed, state_dtype):
    start, weights = torch.randn(64, 32), []
    theirs_weight = torch.nn.Parameter(start.clone())
    theirs = torch.optim.AdamW([theirs_weight], amsgrad=True)
    for number in range(4):
        theirs.param_groups[0]["amsgrad"] = number < 2
        theirs_weight.grad = torch.randn(64, 32)
        theirs.step()
    ours_weight = torch.nn.Parameter(theirs_weight.detach().clone())
    choice = {"exp_avg": state_dtype} if state_dtype == "8bit" else state_dtype
    ours = hu.optim.AdamW([ours_weight], state_dtype=choice)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for one, optimizer in ((theirs_weight, theirs), (ours_weight, ours)):
        optimizer.param_groups[0]["amsgrad"] = True
        one.grad = torch.full((64, 32), 2.0**-4)
        optimizer.step()
        weights.append(one.detach())
    assert (ours.state[ours_weight]["max_exp_avg_sq"] >= theirs.state[theirs_weight]["max_exp_avg_sq"] * 0.99).all()
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4 if state_dtype == "8bit" else 1e-5)
