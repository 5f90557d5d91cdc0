"""Messages call a parameter by the name that its module has for it, where the optimizer was given none."""

import copy

import pytest
import torch

import halfulp as hu
from halfulp.optim.parameters._narrow_groups import UnnamedParameter, name_of


class _Wrapper(torch.nn.Module):
    """As Fabric, DistributedDataParallel and torch.compile put a model into a module of one child."""

    def __init__(self, child, model):
        super().__init__()
        self.add_module(child, model)


def _model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4))).bfloat16()


def _double(model, optimizer):
    model[1][0].weight.data = model[1][0].weight.data.double()
    model[1][0].weight.grad = torch.ones(4, 4, dtype=torch.float64)
    optimizer.step()


def _sparse(model, optimizer):
    model[1][0].weight.grad = torch.eye(4, dtype=torch.bfloat16).to_sparse()
    optimizer.step()


def _gradient_of_another_dtype(model, optimizer):
    weight = model[1][0].weight
    weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    optimizer.step()
    weight.data = torch.ones(4, 3, dtype=torch.bfloat16)
    optimizer.step()


def _file(change):
    def load(model, optimizer):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        change(saved["state"], 2)  # of 1.0.weight
        optimizer.load_state_dict(saved)

    return load


def _cut(state, number):
    state[number]["exp_avg"] = torch.ones(3)


def _lack(state, number):
    del state[number]["exp_avg_sq"]


def _no_dict(state, number):
    state[number] = 3


# What is wrong with 1.0.weight, and is refused.
FAULTS = {
    "dtype": _double,
    "sparse": _sparse,
    "shape": _gradient_of_another_dtype,
    "shape in a file": _file(_cut),
    "lacking in a file": _file(_lack),
    "damaged file": _file(_no_dict),
    "new group": lambda model, optimizer: optimizer.add_param_group(
        {"params": [_complex(model)], "weight_update": "kahan"}
    ),
}


def _complex(model):
    model[1][0].weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model[1][0].weight


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_says_the_modules_name(fault):
    model = _model()
    optimizer = hu.optim.AdamW(list(model.parameters()), lr=0.1, weight_update="kahan")
    with pytest.raises((ValueError, TypeError), match=r"(?<![\w.])1\.0\.weight\b") as raised:
        FAULTS[fault](model, optimizer)
    assert "#" not in str(raised.value)


def test_a_wrapped_optimizers_file_names_parameters():
    model = _model()
    optimizer = hu.optim.wrap(torch.optim.Adagrad, model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][2]["base.sum"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"of parameter 1\.0\.weight has shape \(3,\)"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("child", ["_forward_module", "_orig_mod", "module", "_checkpoint_wrapped_module"])
def test_wrappers_put_nothing_before_it(child):
    model = _model()
    _wrapper = _Wrapper("_forward_module", _Wrapper(child, model))
    assert f"{UnnamedParameter.at(0, model[0].bias)}" == "0.bias"


def test_given_names_and_parameters_of_no_module_stay_as_they_are():
    model = _model()
    named = hu.optim.SGD([("mine", model[0].weight)], lr=0.1).param_groups[0]
    assert name_of(named, 0) == "mine"
    alone = torch.nn.Parameter(torch.ones(2))
    name = name_of({"params": [alone]}, 0)
    assert (f"{name}", repr(name), str(name)) == ("#0", "'#0'", "#0")


def _groups(model):
    return [{"params": [model[0].weight]}, {"params": [model[1][0].weight, model[1][0].bias, model[0].bias], "lr": 0.1}]


UNNAMED = {
    "kahan": lambda model: hu.optim.AdamW(_groups(model), weight_update="kahan", report_interval=1),
    "split8, 8bit": lambda model: hu.optim.Lion(_groups(model), weight_update="split8", state_dtype="8bit"),
    "nearest": lambda model: hu.optim.SGD(_groups(model), lr=0.1, weight_update="nearest", report_interval=1),
    "param_dtype": lambda model: hu.optim.AdamW(_groups(model.float()), param_dtype=torch.float16),
    "wrap": lambda model: hu.optim.wrap(torch.optim.Adagrad, _groups(model), lr=0.1),
    "scaled": lambda model: hu.optim.AdamW(hu.scalify(model.float()).parameters()),
    "components": lambda model: hu.optim.AdamW(hu.multicomponent(model.float(), 2, torch.bfloat16).parameters()),
}


@pytest.mark.parametrize("kind", UNNAMED)
def test_no_module_is_searched_where_nothing_is_wrong(kind, monkeypatch):
    """A name is put into words for messages alone, as the search takes as long as many steps."""
    model = _model()
    optimizer = UNNAMED[kind](model)
    searched = []
    monkeypatch.setattr(UnnamedParameter, "_found", lambda name: searched.append(name) or str(name))
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    copy.deepcopy(optimizer).step()
    optimizer.float32_state_dict(model)
    assert all(type(row.name) is str for row in optimizer.report().rows)
    print(optimizer, optimizer.bytes_per_parameter())
    assert not searched


def test_a_warning_of_lost_updates_says_it_too():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False)).bfloat16()
    optimizer = hu.optim.SGD(model.parameters(), lr=1e-6, report_interval=1, weight_update="nearest")
    model[0].weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    for _ in range(99):
        optimizer.step()
    with pytest.warns(RuntimeWarning, match=r"of the updates of parameter 0\.weight on 100"):
        optimizer.step()
