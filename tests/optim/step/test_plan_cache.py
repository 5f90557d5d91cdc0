"""Plans are not written to; whatever they were made from may change, and then a new plan takes their place."""

import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch

import halfulp as hu


def _made(dtype=torch.bfloat16, **options):
    model = torch.nn.Linear(8, 8, bias=False).to(dtype)
    states = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    given = {"lr": 0.1, "weight_update": "kahan", "state_dtype": states, "report_interval": 1, **options}
    return model, hu.optim.AdamW(model.named_parameters(), **given)


def _step(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _changed(change):
    """A way that changes something of (model, optimizer, the weight's state) in place."""

    def way(model, optimizer):
        change(model, optimizer, optimizer.state[model.weight])
        return model.weight, optimizer

    return way


def _option(name, value):
    return _changed(lambda model, optimizer, state: optimizer.param_groups[0].update({name: value}))


def _memory(change):
    return _changed(lambda model, optimizer, state: setattr(model.weight, "data", change(model.weight.data)))


def _buffer_copies(duplicate):
    def way(model, optimizer):
        model, optimizer = duplicate((model, optimizer))
        return model.weight, optimizer

    return way


def _entry_of_state_dtype(model, optimizer, state):
    optimizer.param_groups[0]["state_dtype"]["exp_avg"] = hu.optim.State(torch.float32)


def _parameter_added(model, optimizer):
    added = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [("added", added)]})
    return added, optimizer


def _parameter_replaced(model, optimizer):
    model.weight = optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(model.weight.detach().clone())
    return model.weight, optimizer


# A further way to make a plan out of date joins here: (model, optimizer) -> the parameter and the optimizer to look at.
WAYS = {
    "new memory": _memory(torch.clone),
    "new strides": _memory(torch.t),
    "state_dtype": _option("state_dtype", torch.float32),
    "an entry of state_dtype": _changed(_entry_of_state_dtype),
    "param_dtype": _option("param_dtype", torch.bfloat16),
    "seed": _option("seed", 5),
    "rule": _option("amsgrad", True),
    "load_state_dict": _changed(lambda model, optimizer, state: optimizer.load_state_dict(optimizer.state_dict())),
    "deepcopy": _buffer_copies(copy.deepcopy),
    "pickle": _buffer_copies(lambda both: pickle.loads(pickle.dumps(both))),
    "state replaced": _changed(lambda model, optimizer, state: optimizer.state.update({model.weight: dict(state)})),
    "state tensor replaced": _changed(lambda model, optimizer, state: state.update(exp_avg=state["exp_avg"].clone())),
    "state tensor deleted": _changed(lambda model, optimizer, state: state.pop("exp_avg_sq")),
    "memory of a state tensor": _changed(
        lambda model, optimizer, state: setattr(state["exp_avg_sq"], "data", state["exp_avg_sq"].clone())
    ),
    "auxiliary tensor deleted": _changed(lambda model, optimizer, state: state.pop("residual")),
    "add_param_group": _parameter_added,
    "parameter replaced": _parameter_replaced,
    "cleared": _changed(lambda model, optimizer, state: optimizer._plans.invalidate_all()),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_out_of_date_is_planned_anew(way, seed):
    model, optimizer = _made()
    _step(optimizer), _step(optimizer)
    old = optimizer._plans[model.weight]
    parameter, changed = WAYS[way](model, optimizer)
    before = parameter.detach().clone()
    _step(changed)
    new = changed._plans[parameter]
    assert new is not old
    assert (new.payload_address, new.stride) == (parameter.data_ptr(), parameter.stride())
    state = changed.state[parameter]
    assert new.state is state
    assert [state[name].data_ptr() for name in new.spec.tensor_names] == new.stored_tensor_addresses
    assert not torch.equal(parameter.detach(), before)
    _step(changed)
    assert changed._plans[parameter] is new
    if old.parameter is parameter:
        assert new.record is old.record
        assert new.record.lost_updates.counted_steps == 4


def test_a_plan_is_not_assigned_to(seed):
    model, optimizer = _made()
    _step(optimizer)
    plan = optimizer._plans[model.weight]
    for field in dataclasses.fields(plan):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, field.name, None)
    with pytest.raises((AttributeError, TypeError)):
        plan.gradient = None


def test_tables_go_with_their_plans_and_stay_with_them(seed):
    _model, optimizer = _made()
    other = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [("other", other)], "state_dtype": torch.float32})
    with hu.kernels.engine("llvm"):
        _step(optimizer)
        (table,) = optimizer._plans.batch_tables.tables
        _step(optimizer)
        assert optimizer._plans.batch_tables.tables == [table], "the same plans"
        other.data = other.data.clone()
        _step(optimizer)
        (newer,) = optimizer._plans.batch_tables.tables
        assert newer is not table
        assert [one is two for one, two in zip(newer.plans, table.plans)] == [True, False]
        assert newer.pointers[1, 0] == other.data_ptr()
        optimizer._plans.invalidate_all()
    assert optimizer._plans.batch_tables is None


def test_what_a_step_was_given_is_gone_after_it(seed):
    """Also after a step that failed: no plan, table or record keeps a gradient."""
    model, optimizer = _made()
    _step(optimizer)
    gradient = weakref.ref(model.weight.grad)
    model.weight.grad = None
    gc.collect()
    assert gradient() is None
    other = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [("other", other)]})
    model.weight.grad, other.grad = torch.ones_like(model.weight), torch.ones(4).bfloat16().to_sparse()
    gradient = weakref.ref(model.weight.grad)
    with pytest.raises(ValueError, match="sparse gradient"):
        optimizer.step()
    model.weight.grad = None
    gc.collect()
    assert gradient() is None


def test_a_rule_that_is_made_at_every_step_is_the_same_rule(seed):
    class Own(hu.optim.AdamW):
        def rule(self, group):
            return dataclasses.replace(super().rule(group))

    model = torch.nn.Linear(8, 8).bfloat16()
    optimizer = Own(model.parameters(), lr=0.1)
    _step(optimizer)
    plan = optimizer._plans[model.weight]
    _step(optimizer)
    assert optimizer._plans[model.weight] is plan


def test_an_option_that_the_parameters_cannot_follow_is_refused(seed):
    model, optimizer = _made(torch.float32, weight_update=None)
    _step(optimizer)
    optimizer.param_groups[0]["param_dtype"] = torch.bfloat16
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"is torch\.float32, but its group holds torch\.bfloat16: add parameters by"):
        _step(optimizer)
    assert torch.equal(model.weight.detach(), before)
