"""Copies, states of other dtypes and optimizers, wrappers, tied weights, and files that are refused."""

import copy
import io
import pickle
import re

import pytest
import torch

import halfulp as hu
from halfulp.kernels import engine

from ...laws.optim.cases import differing, snapshot
from ..parameters.shards import make_problem, on_every_rank, sharded
from .steps import make_model, make_optimizer, set_gradients, take_steps, through_disk


@pytest.mark.parametrize(("update", "codec"), [("split8", "8bit"), ("kahan", "default"), ("components-4", "default")])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_goes_on_with_the_same_bits(update, codec, way):
    model = make_model()
    optimizer = make_optimizer(update, codec, model)
    take_steps(model, optimizer, 0, 3)
    pair = (model, optimizer)
    if way == "deepcopy":
        other, twin = copy.deepcopy(pair)
    elif way == "pickle":
        other, twin = pickle.loads(pickle.dumps(pair))
    else:
        buffer = io.BytesIO()
        torch.save(pair, buffer)
        buffer.seek(0)
        other, twin = torch.load(buffer, weights_only=False)
    take_steps(model, optimizer, 3, 6)
    take_steps(other, twin, 3, 6)
    assert differing(snapshot(optimizer), snapshot(twin)) == []
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in other.parameters()}


@pytest.mark.parametrize("update", ["split8", "kahan"])
def test_saving_leaves_the_groups_as_they_are_and_can_be_repeated(update):
    model = make_model()
    optimizer = make_optimizer(update, "8bit", model)
    take_steps(model, optimizer, 0, 2)
    before = [dict(group) for group in optimizer.param_groups]
    first, second = optimizer.state_dict(), optimizer.state_dict()
    assert first["param_groups"] == second["param_groups"]
    for group, was in zip(optimizer.param_groups, before, strict=True):
        assert list(group) == list(was)
        assert all(group[key] is value for key, value in was.items())


@pytest.mark.parametrize("codec", ["fp32", "8bit", "default", "bf16x2"])
def test_states_load_into_another_dtype_through_float32(codec):
    model = make_model()
    optimizer = make_optimizer("kahan", "fp32", model)
    take_steps(model, optimizer, 0, 3)
    twin = make_optimizer("kahan", codec, model)
    twin.load_state_dict(optimizer.state_dict())
    parameter = model[0].weight
    plan = twin._plans[parameter]
    for number, name in enumerate(("exp_avg", "exp_avg_sq")):
        exact = optimizer.state[parameter][name]
        found = plan.spec.codecs[number].decode(plan.states[number])
        assert (found - exact).abs().max() <= exact.abs().max() * 0.01


SAME = [
    (torch.optim.SGD, hu.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, hu.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adam, hu.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.AdamW, hu.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, hu.optim.AdamW, {"lr": 0.01}),
]


@pytest.mark.parametrize(("theirs", "ours", "options"), SAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_own_state_is_loaded_and_goes_on(theirs, ours, options, dtype):
    model = make_model()
    other = copy.deepcopy(model).float()
    model = model.to(dtype)
    source = theirs(other.parameters(), **options)
    take_steps(other, source, 0, 5)
    model.load_state_dict(other.state_dict())
    more = {} if dtype == torch.float32 else {"weight_update": "split", "state_dtype": torch.float32}
    target = ours(model.parameters(), **{**options, "lr": 123.0}, **more)
    target.load_state_dict(through_disk(source.state_dict()))
    assert target.param_groups[0]["lr"] == options["lr"]
    if dtype == torch.bfloat16:
        target.load_float32_state_dict(model, other.state_dict())
    for step in range(5, 8):
        set_gradients(other, step)
        for mine, their in zip(model.parameters(), other.parameters()):
            mine.grad_dtype, mine.grad = None, their.grad.clone()
        source.step()
        with engine("reference"):
            target.step()
    for mine, their in zip(target.float32_state_dict(model).values(), other.state_dict().values()):
        torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-6)


def _change(name):
    def corrupt(saved):
        state = saved["state"]
        match name:
            case "shape":
                state[0]["exp_avg_codes"] = state[0]["exp_avg_codes"][:-1].clone()
            case "missing state":
                del state[1]["exp_avg_sq"]
            case "missing companion":
                del state[1]["low_bits"]
            case "companion dtype":
                state[0]["low_bits"] = state[0]["low_bits"].float()
            case "nan step":
                state[0]["step"] = float("nan")
            case "negative step":
                state[0]["step"] = -1
            case "half step":
                state[0]["step"] = 1.5
            case "no step number":
                state[0]["step"] = None
            case "string step":
                state[0]["step"] = "many"
            case "huge step":
                state[0]["step"] = float("inf")
            case "string state":
                state[0]["exp_avg_codes"] = "zeros"
            case "string companion":
                state[0]["low_bits"] = "zeros"
            case "list state":
                state[2] = [1, 2, 3]
            case "integer state":
                state[0]["exp_avg_codes"] = state[0]["exp_avg_codes"].long()
            case "no state":
                del saved["state"]
            case "no groups":
                del saved["param_groups"]
            case "state list":
                saved["state"] = []
            case "groups dict":
                saved["param_groups"] = {}
            case "group without params":
                del saved["param_groups"][0]["params"]
            case "one parameter less":
                saved["param_groups"][0]["params"].pop()
            case "another group":
                saved["param_groups"].append(copy.deepcopy(saved["param_groups"][0]))
            case "other names":
                saved["param_groups"][0]["param_names"][0] = "encoder.weight"
            case "other weight update":
                saved["param_groups"][0]["weight_update"] = {"name": "kahan"}
            case "unknown weight update":
                saved["param_groups"][0]["weight_update"] = "khan"
            case "nan rate":
                saved["param_groups"][0]["lr"] = float("nan")
            case "string rate":
                saved["param_groups"][0]["lr"] = "fast"
            case "bad betas":
                saved["param_groups"][0]["betas"] = (0.9, 1.5)
            case "missing option":
                del saved["param_groups"][0]["betas"]
            case "another optimizer":
                saved["param_groups"][0]["momentum"] = 0.9
            case "no dict":
                return "state"
            case "nothing":
                return None
            case "scale":
                state[0]["exp_avg_scale"] = torch.zeros(3).bfloat16()
            case "parameter numbers":
                saved["param_groups"][0]["params"] = [0, 1, 2, 3, 4, "five"]
        return saved

    return corrupt


CORRUPT = [
    "shape", "missing state", "missing companion", "companion dtype", "nan step", "negative step",
    "half step", "no step number", "string step", "huge step", "string state", "string companion", "list state",
    "integer state", "no state", "no groups", "state list", "groups dict", "group without params",
    "one parameter less", "another group", "other names", "other weight update", "unknown weight update", "nan rate",
    "string rate", "bad betas", "missing option", "another optimizer", "no dict", "nothing", "scale",
    "parameter numbers",
]  # fmt: skip


@pytest.mark.parametrize("what", CORRUPT)
def test_a_corrupt_or_foreign_state_dict_is_refused_and_nothing_changes(what):
    model = make_model()
    optimizer = make_optimizer("split8", "8bit", model)
    take_steps(model, optimizer, 0, 2)
    before, groups = snapshot(optimizer), repr(optimizer)
    steps = [state["step"] for state in optimizer.state.values()]
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    saved["param_groups"][0]["lr"] = 0.5
    with pytest.raises(ValueError, match=r".{20}"):
        optimizer.load_state_dict(_change(what)(saved))
    assert differing(before, snapshot(optimizer)) == []
    assert repr(optimizer) == groups
    assert [state["step"] for state in optimizer.state.values()] == steps


@pytest.mark.parametrize("other", ["SGD", "Lion"])
def test_another_optimizers_state_is_refused(other):
    model = make_model()
    optimizer = hu.optim.AdamW(model.parameters())
    source = getattr(hu.optim, other)(model.parameters(), lr=0.1)
    take_steps(model, source, 0, 1)
    before = snapshot(optimizer)
    saved = source.state_dict()
    with pytest.raises(ValueError, match=r"another optimizer|holds"):
        optimizer.load_state_dict(saved)
    assert [name for name in differing(before, snapshot(optimizer)) if "." not in name.partition(".")[2]] == []


def test_tied_weights_are_one():
    model = torch.nn.Sequential(torch.nn.Embedding(16, 32), torch.nn.Linear(32, 16, bias=False)).bfloat16()
    model[1].weight = model[0].weight
    optimizer = hu.optim.AdamW(model.parameters(), lr=1e-3, weight_update="split")
    take_steps(model, optimizer, 0, 2)
    out = optimizer.float32_state_dict(model)
    assert torch.equal(out["0.weight"], out["1.weight"])
    optimizer.load_float32_state_dict(model, {name: value + 1 for name, value in out.items()})
    assert torch.equal(optimizer.float32_state_dict(model)["1.weight"], out["0.weight"] + 1)
    assert model[1].weight is model[0].weight


@pytest.mark.parametrize("what", ["missing", "unknown", "shape", "array", "type", "infinite"])
def test_float32_weights_that_do_not_fit_are_refused(what):
    model = make_model()
    optimizer = make_optimizer("kahan", "default", model)
    take_steps(model, optimizer, 0, 1)
    before, out = snapshot(optimizer), optimizer.float32_state_dict(model)
    out = {name: value + 1 for name, value in out.items()}
    if what == "missing":
        del out["0.weight"]
    elif what == "unknown":
        out["extra"] = torch.zeros(2)
    elif what == "shape":
        out["2.bias"] = torch.zeros(9)
    elif what == "array":
        out["2.bias"] = out["2.bias"].numpy()
    elif what == "infinite":
        out["2.bias"][0] = torch.finfo(torch.float32).max
    else:
        out["2.bias"] = "zeros"
    with pytest.raises(ValueError, match=r"0\.weight|extra|2\.bias"):
        optimizer.load_float32_state_dict(model, out)
    assert differing(before, snapshot(optimizer)) == []


@pytest.mark.parametrize("world", [1, 2])
def test_whole_weights_are_refused_for_sharded_parameters(world, seed):
    start, _ = make_problem(seed)

    def body(rank, mesh):
        shard = torch.nn.Parameter(sharded(start, mesh, 0, world, rank))
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(3).bfloat16()), shard])
        optimizer = hu.optim.AdamW(model.parameters(), weight_update="kahan")
        given = {"0": torch.ones(3), "1": start.float()}
        if world > 1:
            with pytest.raises(ValueError, match=r"'1' are no tensors of the model's shapes.*distribute_tensor"):
                optimizer.load_float32_state_dict(model, given)
            assert not model[0].any()
        given["1"] = sharded(start.float() + 2.0**-12, mesh, 0, world, rank)
        optimizer.load_float32_state_dict(model, given)
        found = optimizer.float32_state_dict(model)["1"].to_local()
        assert torch.allclose(found, given["1"].to_local(), rtol=2.0**-16)

    on_every_rank(world, body)


def test_groups_of_different_weight_updates_train_and_save_together():
    model = make_model()
    groups = [
        {"params": model[0].parameters(), "weight_update": "kahan"},
        {"params": model[1].parameters(), "weight_update": hu.Split(16), "state_dtype": torch.float32},
        {"params": model[2].parameters()},
    ]
    optimizer = hu.optim.AdamW(groups, lr=1e-2, weight_update="stochastic")
    take_steps(model, optimizer, 0, 3)
    keys = [set(optimizer.state[layer.weight]) - {"step", "exp_avg", "exp_avg_sq"} for layer in model]
    assert keys == [{"residual"}, {"low_bits"}, set()]
    assert optimizer.state[model[1].weight]["exp_avg"].dtype == torch.float32
    other = copy.deepcopy(model)
    twin = hu.optim.AdamW(
        [{**g, "params": layer.parameters()} for g, layer in zip(groups, other)], lr=1e-2, weight_update="stochastic"
    )
    twin.load_state_dict(through_disk(optimizer.state_dict()))
    take_steps(model, optimizer, 3, 5)
    take_steps(other, twin, 3, 5)
    assert differing(snapshot(optimizer), snapshot(twin)) == []


@pytest.mark.parametrize("update", ["stochastic", "nearest"])
def test_a_file_of_another_random_stream_is_refused_where_it_draws(seed, update):
    def make(dtype=torch.float32):
        parameter = torch.nn.Parameter(torch.ones(8).bfloat16())
        parameter.grad = torch.ones(8).bfloat16()
        return parameter, hu.optim.AdamW([parameter], lr=0.1, weight_update=update, state_dtype=dtype)

    _, optimizer = make()
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["random_stream"] == 2
    for version in (None, 3):
        older = copy.deepcopy(saved)
        older["param_groups"][0].pop("random_stream")
        older["param_groups"][0].update({} if version is None else {"random_stream": version})
        parameter, other = make()
        if update == "stochastic":
            before = copy.deepcopy(other.state_dict())
            with pytest.raises(ValueError, match=f"param group 0 .*version {version or 1} .*'random_stream': 2 into"):
                other.load_state_dict(older)
            assert other.state_dict() == before
            older["param_groups"][0]["random_stream"] = 2
        other.load_state_dict(older)
        assert other.state[parameter]["step"] == 1
        assert other.state_dict()["param_groups"][0]["random_stream"] == 2


def test_a_newer_versions_file_is_refused_and_nothing_of_it_is_loaded():
    """Entries of the user's own, and what schedulers write, are taken."""

    def make():
        parameter = torch.nn.Parameter(torch.ones(4096).bfloat16())
        parameter.grad = torch.ones(4096).bfloat16()
        optimizer = hu.optim.AdamW([parameter], lr=0.1, weight_update="split8", state_dtype="8bit")
        optimizer.step()
        return parameter, optimizer

    saved = make()[1].state_dict()
    group = saved["param_groups"][0]
    assert group["halfulp"] == hu.__version__
    group.update(initial_lr=0.1, curvature=3)
    saved["state"][0]["curvature"] = torch.ones(3)
    parameter, other = make()
    other.step()
    other.param_groups[0]["lr"] = 0.3
    before, held = copy.deepcopy(other.state_dict()), snapshot(other)
    for version in ("7.3.1", re.sub(r"(\d+)\.\d+$", lambda last: f"{int(last[1]) + 1}.0", hu.__version__)):
        group["halfulp"] = version
        expected = rf"halfulp {re.escape(version)} saved the state_dict.*pip install 'halfulp>={re.escape(version)}'"
        with pytest.raises(ValueError, match=expected):
            other.load_state_dict(saved)
        assert other.state_dict()["param_groups"] == before["param_groups"]
        assert differing(held, snapshot(other)) == []
    for version in (hu.__version__, hu.__version__ + "1"):
        group["halfulp"] = version
        other.load_state_dict(saved)
        assert torch.equal(other.state[parameter]["curvature"], torch.ones(3))
        assert (other.param_groups[0]["initial_lr"], other.param_groups[0]["curvature"]) == (0.1, 3)
        assert "halfulp" not in other.param_groups[0]


def test_a_pickle_of_another_random_stream_is_refused(seed):
    parameter = torch.nn.Parameter(torch.ones(8).bfloat16())
    optimizer = hu.optim.AdamW([parameter], lr=0.1, weight_update="stochastic", state_dtype=torch.float32)
    del optimizer.param_groups[0]["random_stream"]
    with pytest.raises(ValueError, match=r"version 1 of the stream of random bits, known is 2.*use the halfulp that"):
        pickle.loads(pickle.dumps(optimizer))
