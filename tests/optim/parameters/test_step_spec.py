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
