"""Bad input: each answered with what was given, what is allowed and what to do, before anything is written."""

import functools

import pytest
import torch

import halfulp as hu

from ..laws.optim.cases import UPDATES, differing, snapshot

KINDS = [hu.optim.SGD, hu.optim.Adam, hu.optim.AdamW, hu.optim.Lion]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def _parameter(dtype=torch.bfloat16, shape=(8,)):
    return torch.nn.Parameter(torch.ones(shape).to(dtype), requires_grad=dtype.is_floating_point or dtype.is_complex)


@kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32, torch.uint8, torch.bool])
def test_other_dtypes_are_refused(kind, dtype):
    with pytest.raises(ValueError, match=r"allowed are bfloat16, float16 and float32"):
        kind([_parameter(dtype)], lr=0.1)
    with pytest.raises(ValueError, match=r"parameter w .*allowed"):
        kind([("w", _parameter(dtype))], lr=0.1)


@kinds
@pytest.mark.parametrize(
    "lr", [-1.0, float("nan"), float("inf"), "fast", None, torch.tensor([0.1, 0.2]), torch.tensor(-1.0)]
)
def test_a_rate_that_is_none(kind, lr):
    with pytest.raises((ValueError, TypeError)):
        kind([_parameter()], lr=lr)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (hu.optim.SGD, {"momentum": -0.1}),
        (hu.optim.SGD, {"weight_decay": -1}),
        (hu.optim.SGD, {"weight_decay": float("nan")}),
        (hu.optim.SGD, {"dampening": float("inf")}),
        (hu.optim.SGD, {"momentum": float("nan")}),
        (hu.optim.AdamW, {"betas": (1.0, 0.999)}),
        (hu.optim.AdamW, {"betas": (0.9, -0.1)}),
        (hu.optim.AdamW, {"betas": (float("nan"), 0.9)}),
        (hu.optim.AdamW, {"betas": (0.9,)}),
        (hu.optim.AdamW, {"betas": (0.9, 0.99, 0.999)}),
        (hu.optim.AdamW, {"betas": 0.9}),
        (hu.optim.AdamW, {"eps": -1e-8}),
        (hu.optim.Lion, {"betas": (0.9, 1.0)}),
        (hu.optim.AdamW, {"seed": -1}),
        (hu.optim.AdamW, {"seed": 0.5}),
        (hu.optim.AdamW, {"report_interval": -1}),
        (hu.optim.AdamW, {"report_interval": True}),
        (hu.optim.AdamW, {"param_dtype": torch.float64}),
        (hu.optim.AdamW, {"param_dtype": "bf61"}),
        (hu.optim.AdamW, {"format": "e9m9"}),
        (hu.optim.AdamW, {"weight_update": "kahn"}),
        (hu.optim.AdamW, {"unknown_option": 1}),
    ],
)
def test_hyper_parameters_out_of_range(kind, options):
    parameter = _parameter(torch.float32 if "format" in options else torch.bfloat16)
    with pytest.raises((ValueError, TypeError), match=r".{10}"):
        kind([parameter], **{"lr": 0.1, **options})


@kinds
def test_a_sparse_gradient_is_refused_with_what_to_do(kind):
    parameter = _parameter(shape=(8, 4))
    optimizer = kind([("embedding", parameter)], lr=0.1)
    parameter.grad = torch.ones(8, 4).bfloat16().to_sparse()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"embedding has a sparse gradient: .*sparse=False"):
        optimizer.step()
    assert torch.equal(parameter.detach(), before["0.0"])


@kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_gradient_of_another_dtype_is_refused(kind, dtype):
    parameter = _parameter()
    optimizer = kind([parameter], lr=0.1)
    parameter.grad_dtype, parameter.grad = None, torch.ones(8, dtype=dtype)
    with pytest.raises(ValueError, match="allowed are bfloat16, float16 and float32"):
        optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(8).bfloat16())


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps", "betas"])
def test_what_a_scheduler_writes_is_checked_before_anything_moves(name):
    first, second = _parameter(), _parameter()
    optimizer = hu.optim.AdamW([{"params": [first]}, {"params": [second]}], lr=0.1)
    first.grad, second.grad = torch.ones(8).bfloat16(), torch.ones(8).bfloat16()
    optimizer.step()
    before = snapshot(optimizer)
    good = optimizer.param_groups[1][name]
    optimizer.param_groups[1][name] = (float("nan"), 0.9) if name == "betas" else float("nan")
    with pytest.raises(ValueError, match=name):
        optimizer.step()
    assert differing(before, snapshot(optimizer)) == [], "the first group moved"
    assert [state["step"] for state in optimizer.state.values()] == [1, 1]
    optimizer.param_groups[1][name] = good
    optimizer.step()
    assert [state["step"] for state in optimizer.state.values()] == [2, 2]


@kinds
def test_no_parameters_is_torchs_error(kind):
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        kind([], lr=0.1)


@kinds
def test_a_parameter_twice_is_refused(kind):
    parameter = _parameter()
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        kind([{"params": [parameter]}, {"params": [parameter]}], lr=0.1)
    with pytest.raises(ValueError, match="the same parameter twice"):
        kind([parameter, parameter], lr=0.1)


@kinds
def test_a_tensor_instead_of_a_list_is_torchs_error(kind):
    with pytest.raises(TypeError, match="iterable"):
        kind(_parameter(), lr=0.1)
    with pytest.raises(ValueError, match="non-leaf"):
        kind([_parameter() * 2], lr=0.1)


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was():
    first = _parameter()
    optimizer = hu.optim.AdamW([first], lr=0.1)
    for group in ({"params": [_parameter(torch.float64)]}, {"params": [_parameter()], "weight_update": "kahn"}):
        with pytest.raises(ValueError, match=r"allowed|unknown"):
            optimizer.add_param_group(group)
        assert [group["params"] for group in optimizer.param_groups] == [[first]]
    optimizer.add_param_group({"params": [_parameter()], "weight_update": "kahan"})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError])
def test_a_group_that_any_error_stops_is_added_to_none(wrapped, error, monkeypatch):
    given = [_parameter()]
    optimizer = hu.optim.wrap(torch.optim.SGD, given, lr=0.1) if wrapped else hu.optim.SGD(given, lr=0.1)

    def fail(groups):
        raise error("no")

    monkeypatch.setattr("halfulp.optim._optimizer.refuse_overlapping_parameters", fail)
    with pytest.raises(error, match="no"):
        optimizer.add_param_group({"params": [_parameter()]})
    assert len(optimizer.param_groups) == 1
    assert not wrapped or len(optimizer.base.param_groups) == 1


def test_narrowing_happens_to_all_groups_or_to_none():
    good, bad = _parameter(torch.float32), _parameter(torch.float64)
    with pytest.raises(ValueError, match="allowed"):
        hu.optim.AdamW([good, bad], param_dtype=torch.bfloat16)
    assert good.dtype == torch.float32


def test_narrowing_keeps_a_gradient_that_waits():
    narrow, wide = _parameter(torch.float32), _parameter(torch.float32)
    narrow.grad = torch.full_like(narrow, 1 + 2.0**-9)
    hu.optim.SGD([narrow, wide], lr=0.1, param_dtype=torch.bfloat16)
    assert narrow.grad.dtype == torch.bfloat16
    assert torch.equal(narrow.grad, torch.ones_like(narrow))
    assert wide.grad is None


def test_feedback_and_split_say_what_to_use_instead():
    with pytest.raises(ValueError, match=r"feedback"):
        hu.optim.Lion([_parameter()], weight_update="feedback")
    with pytest.raises(ValueError, match=r"kahan.*master"):
        hu.optim.Lion([_parameter(torch.float16)], weight_update="split")


def test_a_parameter_whose_dtype_changes_is_noticed():
    parameter = _parameter()
    optimizer = hu.optim.AdamW([parameter], lr=0.1, weight_update="kahan")
    parameter.grad = torch.ones(8).bfloat16()
    optimizer.step()
    parameter.data = parameter.data.half()
    parameter.grad = None
    parameter.grad_dtype, parameter.grad = None, torch.ones(8)
    with pytest.raises(ValueError, match="convert a model before its optimizer is made"):
        optimizer.step()


@pytest.mark.parametrize("key", ["wieght_update", "weight_decays", "param_type", "beta", "state_dtypes"])
def test_a_misspelt_key_of_a_group_is_refused(key):
    group = {"params": [torch.nn.Parameter(torch.ones(2))], key: 1}
    with pytest.raises(ValueError, match=f"unknown key '{key}': did you mean"):
        hu.optim.AdamW([group])


def test_keys_of_users_and_schedulers_stay():
    own = {"name": "head", "initial_lr": 1.0, "max_lr": 1.0, "max_momentum": 0.9, "base_momentum": 0.8, "lr_scale": 2}
    optimizer = hu.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(2))], **own}], momentum=0.9)
    assert own.items() <= optimizer.param_groups[0].items()


@pytest.mark.parametrize("options", [{"lr": [1e-3]}, {"eps": b"1e-8"}, {"betas": (None, 0.99)}, {"weight_decay": None}])
def test_a_number_that_is_none_is_refused(options):
    with pytest.raises(TypeError, match="give a number"):
        hu.optim.AdamW([torch.nn.Parameter(torch.ones(2))], **options)


def test_averages_with_the_optimizer_of_another_model_are_refused():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="steps none of the model's parameters"):
        hu.optim.EMA(model, optimizer=hu.optim.AdamW(other.parameters()))


def _makers():
    """Everything that takes a weight update for parameters that may be float32, and what makes them narrow."""
    yield "AdamW", hu.optim.AdamW, {"param_dtype": torch.bfloat16}
    yield "groups", lambda params, **given: hu.optim.SGD([{"params": params, **given}]), {"param_dtype": torch.bfloat16}
    yield "added", _added, {"param_dtype": torch.bfloat16}
    yield "wrap", functools.partial(hu.optim.wrap, torch.optim.SGD), {"param_dtype": torch.bfloat16}
    yield (
        "EMA",
        lambda params, **given: hu.optim.EMA(torch.nn.ParameterList(params), **given),
        {"dtype": torch.bfloat16},
    )


def _added(params, **given):
    optimizer = hu.optim.SGD([torch.nn.Parameter(torch.ones(2).bfloat16())])
    optimizer.add_param_group({"params": params, **given})


@pytest.mark.parametrize("update", [name for name in UPDATES if name != "exact"])
@pytest.mark.parametrize(("make", "narrow"), [pytest.param(*row[1:], id=row[0]) for row in _makers()])
def test_a_weight_update_that_no_parameter_can_use_is_refused(make, narrow, update):
    feeds_back = UPDATES[update].feeds_back
    if feeds_back and make is not hu.optim.AdamW:
        return  # refused for another reason
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    ((key, value),) = narrow.items()
    with pytest.raises(ValueError, match=rf"these are float32 .*: give {key}={value} as well, or leave weight_update"):
        make(params, weight_update=UPDATES[update])
    assert all(parameter.dtype == torch.float32 for parameter in params)
    make(params, weight_update=UPDATES[update], **narrow)


def test_float32_parameters_beside_narrow_ones_take_no_weight_update():
    narrow, wide = torch.nn.Parameter(torch.ones(2).bfloat16()), torch.nn.Parameter(torch.ones(2))
    optimizer = hu.optim.AdamW([{"params": [narrow]}, {"params": [wide]}], weight_update="split8")
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    hu.optim.AdamW([wide], weight_update="exact")
    hu.optim.AdamW([wide], weight_update="kahan", format="e8m3")
    hu.optim.AdamW([{"params": []}], weight_update="split8")


OTHER_RANKS = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module, distribute_tensor
import halfulp as hu

rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)


def said(make):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16()
    optimizer = make(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    return said_at_step(wrapped, optimizer, torch.bfloat16)


def said_of_shards(make, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    return said_at_step(model, make(model), dtype)


def said_of_a_plane(make):
    torch.manual_seed(seed)
    model = distribute_module(nn.Linear(4, 4).bfloat16(), dist.init_device_mesh("cpu", (1, 2)))
    return said_at_step(lambda x: model(distribute_tensor(x, model.weight.device_mesh)), make(model), torch.bfloat16)


def said_at_step(run, optimizer, dtype):
    parameters = optimizer.param_groups[0]["params"]
    run(torch.ones(2, 4).to(dtype)).sum().backward()
    before = [getattr(parameter, "_local_tensor", parameter).detach().clone() for parameter in parameters]
    try:
        optimizer.step()
    except ValueError as error:
        now = [getattr(parameter, "_local_tensor", parameter) for parameter in parameters]
        assert all(torch.equal(one, other) for one, other in zip(before, now))
        return str(error)


def made(weight_update="kahan", **options):
    return lambda model: hu.AdamW(model.named_parameters(), weight_update=weight_update, **options)


assert said(made()) is None
found = said(made("kahan" if rank else "split8"))
assert "rank 1 trains in another way than rank 0: weight_update of group 0 is kahan there, and split8" in found, found
found = said(made(seed=rank))
assert "seed of group 0 is 1 there, and 0 on rank 0" in found, found
found = said(made(state_dtype="8bit") if rank else made(state_dtype="4bit"))
assert "state_dtype of group 0 is 8bit there, and 4bit" in found, found
found = said(lambda model: (hu.SGD if rank else hu.Lion)(model.named_parameters(), lr=0.1))
assert "the optimizer is SGD there, and Lion" in found, found
assert said(made(report_interval=rank)) is None
for shards in (said_of_shards, said_of_a_plane):
    assert shards(made()) is None
    found = shards(made("kahan" if rank else "split8"))
    assert "rank 1 trains in another way than rank 0: weight_update of group 0 is kahan there" in found, found
found = said_of_shards(lambda model: hu.AdamW(model.parameters(), lr=0.1 + rank), torch.float32)
assert "lr of group 0 is 1.1 there, and 0.1 on rank 0" in found, found
hu.__version__ = f"0.{rank}"
assert "halfulp is 0.1 there, and 0.0 on rank 0" in said(made()), said
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def test_ranks_that_train_in_other_ways_are_named_at_the_first_step(in_two_processes):
    in_two_processes(OTHER_RANKS)
