"""States saved by name, as pipelines and torchtitan do: split, merged and regrouped parameters keep their bits."""

import copy
import functools
import itertools

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim.parameters._random_identity import hash_parameter_name

STEPS = 3
ROUNDING = {
    "stochastic": {"weight_update": "stochastic"},
    "8bit": {"weight_update": "split8", "state_dtype": "8bit"},
    "kahan": {"weight_update": "kahan-stochastic", "state_dtype": torch.bfloat16},
    "components": {"weight_update": "components"},
}


class Net(torch.nn.Module):
    """Four layers, or some of them under the names that they have among all."""

    def __init__(self, layers="0123"):
        super().__init__()
        torch.manual_seed(0)
        all_layers = {key: torch.nn.Linear(16, 16).bfloat16() for key in "0123"}
        self.layers = torch.nn.ModuleDict({key: all_layers[key] for key in layers})


def _flat(model, optimizer):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return get_optimizer_state_dict(model, optimizer, options=options)


def _set_flat(model, optimizer, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, flat, options=options)


def _nested(model, optimizer):
    return get_optimizer_state_dict(model, optimizer)


def _set_nested(model, optimizer, saved):
    set_optimizer_state_dict(model, optimizer, saved)


def _by_param_names(model, optimizer):
    """As torchtitan flattens: everything once per name, but for the names."""
    saved, flat = optimizer.state_dict(), {}
    for group in saved["param_groups"]:
        for number, name in zip(group["params"], group["param_names"]):
            flat |= {f"param_groups.{name}.{k}": v for k, v in group.items() if k not in ("params", "param_names")}
            flat |= {f"state.{name}.{k}": v for k, v in saved["state"].get(number, {}).items()}
    return flat


def _set_by_param_names(model, optimizer, flat):
    """As torchtitan loads: what the live groups and states hold is looked up under the names."""
    _step_nowhere(optimizer)
    numbers, state, groups = itertools.count(), {}, []
    for group in optimizer.param_groups:
        names, own = group["param_names"], []
        for name, parameter in zip(names, group["params"]):
            own.append(next(numbers))
            state[own[-1]] = {k: flat[f"state.{name}.{k}"] for k in optimizer.state[parameter]}
        options = {k: flat[f"param_groups.{names[0]}.{k}"] for k in group if k not in ("params", "param_names")}
        groups.append({"params": own, **options})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _step_nowhere(optimizer):
    """Make the states, as loading by name needs them: a step of zeros at a learning rate of 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate


WAYS = {
    "torch, flat": (_flat, _set_flat),
    "torch": (_nested, _set_nested),
    "torchtitan": (_by_param_names, _set_by_param_names),
}
FLAT = ["torch, flat", "torchtitan"]


def _one_group(named):
    return named


def _decay_groups(named):
    matrices = [pair for pair in named if pair[0].endswith("weight")]
    return [{"params": matrices}, {"params": [pair for pair in named if pair not in matrices]}]


def _last_layer_apart(named):
    """As many groups, of as many parameters, as decay groups have; others."""
    half = len(named) // 2
    return [{"params": named[half:]}, {"params": named[:half]}]


GROUPS = [_one_group, _decay_groups, _last_layer_apart]


def _optimizer(model, groups=_one_group, rounding="stochastic", kind=hu.optim.AdamW):
    # Updates of about a tenth of a place: chance decides on all of them.
    return kind(groups(list(model.named_parameters())), lr=1e-4, weight_decay=0.01, seed=5, **ROUNDING[rounding])


def _train(model, optimizer, first, last):
    for step in range(first, last):
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(hash((hash_parameter_name(name), step)) % 2**31)
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        optimizer.step()
        optimizer.zero_grad()


def _bits(model, optimizer):
    found = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        held = optimizer.state[parameter].items()
        found |= {f"{name} {key}": value for key, value in held if isinstance(value, torch.Tensor)}
    return found


def _differing(ours, theirs):
    return [name for name, value in ours.items() if not same_bits(value, theirs[name])]


@functools.cache
def _uninterrupted(rounding, groups=_one_group):
    model = Net()
    optimizer = _optimizer(model, groups, rounding)
    _train(model, optimizer, 0, 2 * STEPS)
    return _bits(model, optimizer)


def _resume(layers, groups, rounding, way, weights, saved):
    """Go on from a file with some of the layers, in groups of their own."""
    model = Net(layers)
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    optimizer = _optimizer(model, groups, rounding)
    WAYS[way][1](model, optimizer, copy.deepcopy(saved))
    assert optimizer.param_groups[0]["lr"] == 1e-4
    _train(model, optimizer, STEPS, 2 * STEPS)
    return _bits(model, optimizer)


# Groups before and after; torch gives a nested file's options to groups as the file has them.
REGROUPED = [(way, *pair) for way in FLAT for pair in itertools.product(GROUPS, GROUPS)]
REGROUPED += [("torch", groups, groups) for groups in GROUPS]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rounding", ROUNDING)
@pytest.mark.parametrize(("way", "before", "after"), REGROUPED)
def test_regrouped_parameters_keep_their_bits(way, before, after, rounding):
    model = Net()
    optimizer = _optimizer(model, before, rounding)
    _train(model, optimizer, 0, STEPS)
    saved = WAYS[way][0](model, optimizer)
    resumed = _resume("0123", after, rounding, way, model.state_dict(), saved)
    assert _differing(resumed, _uninterrupted(rounding, before)) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rounding", ROUNDING)
@pytest.mark.parametrize("way", FLAT)
@pytest.mark.parametrize("groups", GROUPS)
def test_pipeline_stages_load_what_all_or_other_stages_saved(groups, way, rounding):
    """All layers, two stages of two, and stages of one and three go on from each other's files."""
    model = Net()
    optimizer = _optimizer(model, groups, rounding)
    _train(model, optimizer, 0, STEPS)
    weights, saved, wanted = model.state_dict(), WAYS[way][0](model, optimizer), _uninterrupted(rounding)
    merged = {}
    for layers in ("01", "23"):
        stage = Net(layers)
        stepped = _optimizer(stage, groups, rounding)
        _train(stage, stepped, 0, STEPS)
        merged |= WAYS[way][0](stage, stepped)
    for file in (saved, merged):
        for layers in ("0123", "01", "23", "0", "123"):
            assert _differing(_resume(layers, groups, rounding, way, weights, file), wanted) == [], layers


@pytest.mark.parametrize("way", WAYS)
def test_nothing_in_a_file_grows_with_the_square_of_the_parameters(way):
    """Identities are told by names; the names themselves are torch's own entry, which torchtitan leaves out."""
    model = Net()
    optimizer = _optimizer(model, _decay_groups)
    _train(model, optimizer, 0, 1)
    saved = WAYS[way][0](model, optimizer)
    groups = {"": saved["param_groups"]} if way == "torch" else saved
    assert "identities" not in repr([groups, optimizer.param_groups])
    lists = {name: value for name, value in saved.items() if isinstance(value, list) and len(value) > 1}
    assert {name.rpartition(".")[2] for name in lists} <= {"param_names", "param_groups"}
    assert way != "torchtitan" or not lists


def _older(saved):
    """A state_dict as older versions wrote it: with the numbers beside the names."""
    for group in saved["param_groups"]:
        group["identities"] = [hash_parameter_name(name) for name in group["param_names"]]
    return saved


def test_older_files_load_and_keep_their_bits():
    model = Net()
    optimizer = _optimizer(model, _decay_groups)
    _train(model, optimizer, 0, STEPS)
    saved = _older(copy.deepcopy(optimizer.state_dict()))
    resumed = _optimizer(model, _decay_groups)
    resumed.load_state_dict(copy.deepcopy(saved))
    assert all("identities" not in group for group in resumed.state_dict()["param_groups"])
    _train(model, resumed, STEPS, 2 * STEPS)
    assert _differing(_bits(model, resumed), _uninterrupted("stochastic", _decay_groups)) == []
    flat = {
        f"param_groups.{name}.{key}": value
        for group in saved["param_groups"]
        for name in group["param_names"]
        for key, value in group.items()
    }
    states = {f"state.{name}.{k}": v for name, v in _states(saved).items() for k, v in v.items()}
    for way in FLAT:
        for layers in ("0123", "23"):
            stage = Net(layers)
            WAYS[way][1](stage, _optimizer(stage), {**flat, **states})


def _states(saved):
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    return {names[number]: state for number, state in saved["state"].items()}


@pytest.mark.parametrize(("before", "after"), [("named", "named"), ("named", "unnamed"), ("unnamed", "unnamed")])
def test_a_run_goes_on_with_its_bits_when_names_go(before, after):
    def made(kind):
        model = Net()
        given = model.named_parameters() if kind == "named" else model.parameters()
        return model, hu.optim.AdamW(given, lr=1e-4, weight_update="stochastic", seed=5)

    model, optimizer = made(before)
    _train(model, optimizer, 0, 2 * STEPS)
    wanted = _bits(model, optimizer)
    model, optimizer = made(before)
    _train(model, optimizer, 0, STEPS)
    for kind in (after, before, after):  # also through files of the resumed run
        other, resumed = made(kind)
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        model, optimizer = other, resumed
    _train(model, optimizer, STEPS, 2 * STEPS)
    assert _differing(_bits(model, optimizer), wanted) == []


def test_unnamed_parameters_that_are_split_by_name_are_refused_with_the_cure():
    model = Net()
    optimizer = hu.optim.AdamW(model.parameters(), lr=1e-4, weight_update="stochastic")
    _train(model, optimizer, 0, 1)
    stage = Net("01")
    with pytest.raises(ValueError, match=r"identities.*needs names, optimizers made from model\.named_parameters\(\)"):
        _set_flat(stage, hu.optim.AdamW(stage.parameters(), weight_update="stochastic"), _flat(model, optimizer))


def test_names_in_another_order_are_refused_and_those_of_a_part_are_its_own():
    """What torch saves by name it puts into our order when it loads; a dict that is loaded without it is as saved."""
    model = Net()
    optimizer = _optimizer(model)
    _train(model, optimizer, 0, 1)
    turned = hu.optim.AdamW(list(model.named_parameters())[::-1], lr=1e-4, weight_update="stochastic")
    with pytest.raises(ValueError, match=r"in another order, such as layers\.0\.weight for layers\.3\.bias"):
        turned.load_state_dict(_nested(model, optimizer))
    part = hu.optim.AdamW(model.layers.named_parameters(), lr=1e-4, weight_update="stochastic")
    _set_nested(model, part, _nested(model, optimizer))
    assert part.state[model.layers["0"].weight]["step"] == 1


def test_copies_and_edited_groups_keep_the_names_numbers():
    model = Net()
    optimizer = _optimizer(model, _decay_groups)
    one, other = copy.deepcopy(optimizer), _optimizer(model)
    assert all("identities" not in group for group in one.param_groups)
    group = other.param_groups[0]
    group["params"].reverse()
    other.state_dict()
    assert group["param_names"] == [name for name, _ in model.named_parameters()][::-1]
    group["params"][0] = torch.nn.Parameter(group["params"][0].detach().clone())
    other.state_dict()
    assert other._stream_ids[group["params"][0]] == ("layers.3.bias", hash_parameter_name("layers.3.bias"))


def test_what_replaced_narrowed_parameters_has_states_that_files_load_into():
    """accelerate puts shards in the places of parameters, and torch loads into the states that there are."""
    model = Net().float()
    options = {"lr": 1e-2, "param_dtype": torch.bfloat16, "weight_update": "stochastic"}
    optimizer = hu.optim.AdamW(model.named_parameters(), **options)
    _train(model, optimizer, 0, 2)
    other = Net().float()
    resumed = hu.optim.AdamW(other.named_parameters(), **options)
    for group in resumed.param_groups:
        group["params"] = [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]
    assert [len(state) for state in resumed.state_dict()["state"].values()] == [
        len(state) for state in optimizer.state_dict()["state"].values()
    ]
    assert {state["step"] for state in resumed.state_dict()["state"].values()} == {0}


def test_a_wrapped_optimizers_states_are_not_dropped_in_silence():
    """What torch flattens are the entries of `optimizer.state`, in which a wrapped optimizer's own states are not."""
    model = Net()
    make = lambda: hu.optim.wrap(torch.optim.RMSprop, model.named_parameters(), lr=1e-3, weight_update="kahan")  # noqa: E731
    optimizer = make()
    _train(model, optimizer, 0, 2)
    resumed = make()
    with pytest.raises(ValueError, match=r"holds no states of RMSprop for parameter layers\.0\.weight"):
        _set_flat(model, resumed, _flat(model, optimizer))
    _set_nested(model, resumed, _nested(model, optimizer))
    assert same_bits(
        resumed.base.state[resumed._shadow_by_parameter[model.layers["0"].weight]]["square_avg"],
        optimizer.base.state[optimizer._shadow_by_parameter[model.layers["0"].weight]]["square_avg"],
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("way", FLAT)
def test_a_stage_reads_its_part_of_a_distributed_checkpoint(way, tmp_path, needs_torch):
    needs_torch("distributed.checkpoint that writes without torch's own warning")
    from torch.distributed.checkpoint import load, save

    model = Net()
    optimizer = _optimizer(model, _decay_groups, "8bit")
    _train(model, optimizer, 0, STEPS)
    save({"optimizer": WAYS[way][0](model, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    for layers in ("01", "23"):
        stage = Net(layers)
        stepped = _optimizer(stage, _one_group, "8bit")
        _step_nowhere(stepped)
        template = {"optimizer": WAYS[way][0](stage, stepped)}
        load(template, checkpoint_id=tmp_path, no_dist=True)
        resumed = _resume(layers, _one_group, "8bit", way, model.state_dict(), template["optimizer"])
        assert _differing(resumed, _uninterrupted("8bit")) == []


LACKS = {
    ("named", "unnamed"): r"param_groups\.layers\..*\.identities",
    ("unnamed", "named"): r"param_groups\.layers\..*\.param_names",
}


@pytest.mark.parametrize(("before", "after"), LACKS)
def test_a_flat_state_of_the_other_kind_is_refused_by_torch(before, after):
    def made(kind):
        model = Net()
        given = model.named_parameters() if kind == "named" else model.parameters()
        return model, hu.optim.AdamW(given, lr=1e-4, weight_update="stochastic", seed=5)

    model, optimizer = made(before)
    _train(model, optimizer, 0, STEPS)
    saved = _flat(model, optimizer)
    with pytest.raises(KeyError, match=LACKS[before, after]):
        _set_flat(*made(after), saved)
    other, resumed = made(before)
    _set_flat(other, resumed, saved)
    named, final = made("named")
    final.load_state_dict(resumed.state_dict())
    assert final.state[named.layers["0"].weight]["step"] == STEPS


def test_a_flat_state_of_other_parameters_or_states_is_refused():
    model = Net("01")
    optimizer = _optimizer(model)
    _train(model, optimizer, 0, 1)
    saved = _flat(model, optimizer)
    with pytest.raises((KeyError, ValueError), match=r"layers\.[23]\.|holds nothing of parameter"):
        _set_flat(model := Net(), _optimizer(model), saved)
    with pytest.raises(KeyError, match=r"\.momentum"):
        _set_flat(model := Net("01"), _optimizer(model, kind=hu.optim.SGD), saved)
