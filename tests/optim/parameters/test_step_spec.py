"""Step specifications are values: equal ones have equal hashes, and they can be pickled and copied."""

import copy
import pickle

import pytest
import torch

import halfulp as hu
from halfulp.optim import StateSlot, UpdateRule

OPTIMIZERS = {
    "SGD": (hu.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (hu.optim.Adam, {"amsgrad": True}),
    "AdamW": (hu.optim.AdamW, {}),
    "Lion": (hu.optim.Lion, {}),
    "wrap": (lambda params, **options: hu.optim.wrap(torch.optim.RMSprop, params, **options), {}),
}
PARAMETERS = {
    "bfloat16": (lambda: torch.ones(8, 32, dtype=torch.bfloat16), {"weight_update": "split8"}),
    "float16": (lambda: torch.ones(8, 32, dtype=torch.float16), {"weight_update": "kahan"}),
    "components": (lambda: torch.ones(8, 32, dtype=torch.bfloat16), {"weight_update": hu.Components(3)}),
    "e4m3": (lambda: torch.ones(8, 32), {"format": "e4m3", "weight_update": "stochastic"}),
    "e8m5": (lambda: torch.ones(8, 32), {"format": "e8m5", "weight_update": "master"}),
    "scaled": (lambda: hu.ScaledTensor.encode(torch.ones(8, 32), torch.float16), {}),
    "fp8": (lambda: hu.ScaledTensor.encode(torch.ones(8, 32), torch.float8_e4m3fn), {"weight_update": "master"}),
}


# wrap takes no scaled tensors.
PAIRS = [(a, b) for a in OPTIMIZERS for b in PARAMETERS if a != "wrap" or b not in ("scaled", "fp8")]


@pytest.mark.parametrize(("name", "parameter"), PAIRS)
def test_specifications_are_pickled(name, parameter):
    kind, options = OPTIMIZERS[name]
    make, more = PARAMETERS[parameter]
    optimizer = kind([torch.nn.Parameter(make())], **options, **more)
    spec = optimizer._get_valid_plan(optimizer.param_groups[0], 0).spec
    for again in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert again == spec
        assert hash(again) == hash(spec)


def sums(w, g, a, b, c, d, take):
    return -(take * g), a + g, b + g, c + g, d + g


def values(group, step):
    return (0.1,)


class Sums(hu.optim.Optimizer):
    """An optimizer with more states than a kernel finds scales for."""

    def rule(self, group):
        return UpdateRule("sums", sums, tuple(StateSlot(name, 1) for name in "abcd"), values)


@pytest.mark.parametrize("engine", ["reference", "llvm"])
def test_more_states_under_scales_than_a_kernel_takes_are_refused_with_the_cure(engine):
    p = torch.nn.Parameter(hu.ScaledTensor.encode(torch.ones(8, 32), torch.float16))
    with pytest.raises(ValueError, match=r"keeps 4 states .*#0, but at most 3 .*state_dtype=\{'d': torch\.float32\}"):
        Sums([p], {})
    for choice in ({"d": torch.float32}, {"d": torch.bfloat16}):
        p.grad = hu.ScaledTensor.encode(torch.ones(8, 32), torch.float16)
        optimizer = Sums([p], {}, state_dtype=choice)
        with hu.kernels.engine(engine):
            optimizer.step()
        assert all((optimizer.state[p][name].float() == 1).all() for name in "d")
    plain = torch.nn.Parameter(torch.ones(8, 32).bfloat16())
    Sums([plain], {})


def test_a_rule_whose_values_are_not_those_of_its_update_is_refused():
    def step(w, g, lr):
        return (-(lr * g),)

    with pytest.raises(TypeError, match="values is a function"):
        UpdateRule("named", step, (), ("lr",), lambda group, step: (0.1,))
    for values in ((), (0.1, 0.2)):

        class Wrong(hu.optim.Optimizer):
            _rule = UpdateRule("wrong", step, (), lambda group, step, values=values: values)

        p = torch.nn.Parameter(torch.ones(8))
        p.grad = torch.ones(8)
        with pytest.raises(ValueError, match=r"values of rule 'wrong' .* takes \('lr',\)"):
            Wrong([p], {}).step()
        assert (p == 1).all()


def _step_once(rule, dtype=torch.float32, **options):
    class Own(hu.optim.Optimizer):
        def rule(self, group):
            return rule

    p = torch.nn.Parameter(torch.ones(8, dtype=dtype))
    p.grad = torch.ones_like(p)
    optimizer = Own([p], {}, **options)
    try:
        optimizer.step()
    finally:
        assert (p == 1).all()


def _descend(w, g, *states):
    return (-g, *states)


@pytest.mark.parametrize(
    ("names", "factors", "options"),
    [
        (("m", "m"), (), {}),
        (("step",), (), {}),
        (("states_begun",), (), {}),
        (("m",), ("m",), {}),
        ((), ("step",), {}),
        (("residual",), (), {"dtype": torch.bfloat16, "weight_update": "kahan"}),
        (("low_bits",), (), {"dtype": torch.bfloat16, "weight_update": "split"}),
        ((), ("master",), {"dtype": torch.bfloat16, "weight_update": "master"}),
    ],
)
def test_two_tensors_of_one_name_in_a_parameters_state_are_refused(names, factors, options):
    more = {"prepare": lambda t, group, step: (t.gradient, ()), "factors": lambda shape: dict.fromkeys(factors, (2,))}
    slots = tuple(StateSlot(name, 1) for name in names)
    rule = UpdateRule("twice", _descend, slots, lambda group, step: (), **(more if factors else {}))
    with pytest.raises(ValueError, match=r"twice among what the state of parameter #0 holds"):
        _step_once(rule, **options)


def test_what_is_no_rule_state_or_reduction_is_refused():
    values, found = (lambda group, step: (0.1,)), hu.optim.Reduction(lambda w: w)
    for states, reductions in (((), [found]), ((), (len,)), ([StateSlot("m", 1)], ()), (("m",), ())):
        with pytest.raises(TypeError, match=r"is a tuple of (StateSlot|Reduction)s, got"):
            UpdateRule("wrong", _descend, states, values, reductions=reductions)
    for name, degree in (("", 1), (3, 1), ("m", 0), ("m", 3)):
        with pytest.raises(ValueError, match="give a name, and 1 or 2"):
            StateSlot(name, degree)
    with pytest.raises(TypeError, match=r"Own\.rule gives None: return an UpdateRule"):
        _step_once(None)
    lacking = type("Lacking", (hu.optim.Optimizer,), {})
    with pytest.raises(TypeError, match="Lacking has no rule"):
        lacking([torch.nn.Parameter(torch.ones(2))], {})


@pytest.mark.parametrize("late", [(), (0.1, 0.2)])
def test_late_constants_that_are_not_those_of_the_update_are_refused(late):
    def step(w, g, lr):
        return (-(lr * g),)

    def step_prepared(w, g, prepared, lr):
        return (-(lr * prepared),)

    sums = {"reductions": (hu.optim.Reduction(lambda w: w),), "late_values": lambda group, step, sums: late}
    for update, more in ((step, sums), (step_prepared, {"prepare": lambda t, group, step: (t.gradient, late)})):
        with pytest.raises(ValueError, match=r"values of rule 'late' .* takes \('lr',\)"):
            _step_once(UpdateRule("late", update, (), lambda group, step: (), **more))
    short = {"prepare": lambda t, group, step: (t.gradient[:2], (0.1,))}
    with pytest.raises(ValueError, match=r"prepares a tensor of shape \(2,\) for a parameter of shape \(8,\)"):
        _step_once(UpdateRule("short", step_prepared, (), lambda group, step: (), **short))
