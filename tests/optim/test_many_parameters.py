"""Parameters that come, go and change places: nothing is kept alive, nothing is mixed up, and time stays linear."""

import copy
import gc
import sys
import weakref

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits

MAKERS = {
    "AdamW": lambda params, **given: hu.optim.AdamW(params, lr=1e-2, **given),
    "SGD": lambda params, **given: hu.optim.SGD(params, lr=1e-2, momentum=0.9, **given),
    "narrowed": lambda params, **given: hu.optim.AdamW(params, lr=1e-2, param_dtype=torch.bfloat16, **given),
    "wrap": lambda params, **given: hu.optim.wrap(torch.optim.Adagrad, params, lr=1e-2, **given),
    "wrap of another": lambda params, **given: hu.optim.wrap(_Own, params, lr=1e-2, **given),
}


class _Own(torch.optim.RMSprop):
    """Stepped with all parameters at once, as it is not torch.optim's."""


def _parameters(maker, count=6):
    dtype = torch.float32 if maker == "narrowed" else torch.bfloat16
    return [torch.nn.Parameter(torch.linspace(0.1, 0.9, 5 + k).to(dtype)) for k in range(count)]


def _step(optimizer, parameters, number=0):
    for parameter in parameters:
        if parameter is not None:
            # The gradient goes with the parameter's length, wherever it stands.
            parameter.grad = torch.linspace(-1 - number, 1, len(parameter)).to(parameter.dtype)
    optimizer.step()


def _named(parameters, named):
    return [(f"p{k}", parameter) for k, parameter in enumerate(parameters)] if named else parameters


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("how", ["deleted with its state", "replaced"])
def test_a_parameter_that_left_is_freed(maker, how, needs_torch):
    if (maker, how) == ("wrap", "replaced"):
        needs_torch("Adagrad that steps parameters which came after it was made")
    parameters = _parameters(maker)
    optimizer = MAKERS[maker]([{"params": parameters[:4]}, {"params": parameters[4:]}])
    _step(optimizer, parameters)
    group = optimizer.param_groups[0]
    if how == "deleted with its state":
        optimizer.state.pop(parameters[0], None)
        gone = [weakref.ref(group["params"].pop(0))]
        parameters[0] = None
    else:
        gone = [weakref.ref(group["params"][0])]
        dtype = group["params"][0].dtype
        group["params"][0] = parameters[0] = torch.nn.Parameter(torch.linspace(0.1, 0.9, 5).to(dtype))
    del group
    _step(optimizer, parameters, 1)
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    assert all(reference() is None for reference in gone)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("surgery", ["first deleted", "reversed", "replaced", "deleted and put back"])
def test_surgery_keeps_bits_names_and_files(maker, named, surgery, needs_torch):
    """Every parameter goes on with its own random bits and states, and the file saved afterwards loads."""
    if (maker, surgery) == ("wrap", "replaced"):
        needs_torch("Adagrad that steps parameters which came after it was made")
    ours, theirs = _parameters(maker), _parameters(maker)
    ours_by, theirs_by = (MAKERS[maker](_named(p, named), weight_update="stochastic") for p in (ours, theirs))
    for number in range(2):
        _step(ours_by, ours, number), _step(theirs_by, theirs, number)
    params = ours_by.param_groups[0]["params"]
    if surgery == "first deleted":
        ours_by.state.pop(params.pop(0), None)
    elif surgery == "reversed":
        params.reverse()
    elif surgery == "replaced":
        params[0] = torch.nn.Parameter(ours[0].detach().clone())
    else:
        kept = params.pop(1)
        ours_by.zero_grad(), theirs_by.zero_grad()
        _step(ours_by, params, 2), _step(theirs_by, [p for p in theirs if len(p) != len(kept)], 2)
        params.insert(1, kept)
    saved = copy.deepcopy(ours_by.state_dict())
    if named:
        numbers = {len(p): int(n[1:]) for p, n in zip(params, ours_by.param_groups[0]["param_names"])}
        assert numbers == {5 + k: k for k in range(len(ours)) if 5 + k in numbers}
    fresh = [torch.nn.Parameter(p.detach().clone()) for p in params]
    names = saved["param_groups"][0].get("param_names")
    resumed = MAKERS[maker](list(zip(names, fresh)) if named else fresh, weight_update="stochastic")
    resumed.load_state_dict(saved)
    for number in (3, 4):
        _step(ours_by, params, number), _step(theirs_by, theirs, number), _step(resumed, fresh, number)
    for mine, again in zip(params, fresh):
        assert same_bits(mine.detach(), again.detach())
        if surgery != "replaced" or mine is not params[0]:
            assert same_bits(mine.detach(), theirs[len(mine) - 5].detach())


def test_parameters_appended_to_the_list_step_and_unnamed_ones_among_named_are_refused():
    first, second = _parameters("AdamW", 2)
    optimizer = hu.optim.AdamW([first], weight_update="stochastic")
    optimizer.param_groups[0]["params"].extend([second])
    _step(optimizer, [first, second])
    assert optimizer.param_groups[0]["identities"] == [0, 1]
    named = hu.optim.AdamW([("a", first)])
    named.param_groups[0]["params"].append(second)
    before = second.detach().clone()
    with pytest.raises(ValueError, match="without a name: use add_param_group"):
        _step(named, [first, second])
    assert same_bits(second.detach(), before)
    narrowed = hu.optim.AdamW([torch.nn.Parameter(torch.ones(3))], param_dtype=torch.bfloat16)
    wide = torch.nn.Parameter(torch.ones(3))
    narrowed.param_groups[0]["params"].append(wide)
    with pytest.raises(ValueError, match=r"is torch\.float32, but its group holds torch\.bfloat16"):
        _step(narrowed, [wide])
    assert wide.eq(1).all()


class _Calls:
    """Counts Python calls and the steps of comprehensions' loops, which time can only estimate."""

    def __init__(self, function):
        self.count = 0
        sys.setprofile(self._see)
        try:
            function()
        finally:
            sys.setprofile(None)

    def _see(self, frame, event, _):
        self.count += event in ("call", "c_call")


@pytest.mark.parametrize("maker", ["AdamW", "narrowed", "wrap"])
def test_calls_grow_linearly_with_tensors(maker):
    """First steps, later ones, counted ones, new memory, reading and saving: each tensor costs what the last did."""

    def calls(count):
        model = torch.nn.ParameterList(
            torch.nn.Parameter(torch.ones(4, dtype=torch.float32 if maker == "narrowed" else torch.bfloat16))
            for _ in range(count)
        )
        found, made = {}, []
        found["make"] = _Calls(lambda: made.append(MAKERS[maker](model.named_parameters(), report_interval=3))).count
        optimizer = made[0]
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        for name in ("first", "second", "counted"):
            found[name] = _Calls(optimizer.step).count
        for parameter in model:
            parameter.data = parameter.data.clone()
        found["new memory"] = _Calls(optimizer.step).count
        if maker != "wrap":
            found["read"] = _Calls(lambda: optimizer.float32_state_dict(model)).count
        found["save"] = _Calls(lambda: made.append(optimizer.state_dict())).count
        found["load"] = _Calls(lambda: optimizer.load_state_dict(made[1])).count
        return found

    calls(3)  # compiles and fills caches
    small, large = calls(50), calls(150)
    for name, count in large.items():
        assert count <= 3.1 * small[name] + 200, (name, small[name], count)


def test_calls_of_averages_grow_linearly_with_tensors():
    def calls(count):
        model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(4).bfloat16()) for _ in range(count))
        ema = hu.optim.EMA(model, 0.9, dtype=torch.float32)
        found = {"update": _Calls(ema.update).count, "read": _Calls(ema.float32_state_dict).count}
        found["show"] = _Calls(lambda: ema.apply().__enter__()).count
        return found | {"save": _Calls(ema.state_dict).count}

    calls(3)  # compiles and fills caches
    small, large = calls(50), calls(150)
    for name, count in large.items():
        assert count <= 3.1 * small[name] + 200, (name, small[name], count)


def test_a_parameter_that_comes_takes_no_number_and_no_state_of_one_that_left():
    one, other, left, new, grouped = parameters = [torch.nn.Parameter(torch.ones(3).bfloat16()) for _ in range(5)]
    optimizer = hu.optim.AdamW([one, other, left], lr=0.1)
    _step(optimizer, parameters[:3])
    del optimizer.param_groups[0]["params"][2]
    _step(optimizer, [one, other])
    optimizer.param_groups[0]["params"].append(new)
    optimizer.add_param_group({"params": [grouped]})
    _step(optimizer, parameters)
    optimizer.param_groups[0]["params"].append(left)
    _step(optimizer, parameters)
    numbers = [number for group in optimizer.param_groups for number in group["identities"]]
    assert len(set(numbers)) == 5
    assert optimizer.state[left]["step"] == 2
