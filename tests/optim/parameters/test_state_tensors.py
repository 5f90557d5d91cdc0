"""8-bit codes in files: other storages, other loaders, and shards of other sizes."""

import copy

import pytest
import torch

import halfulp as hu
from halfulp.optim.states._int8_blocks import compute_scale_shape

from ...laws.optim.cases import differing, snapshot

MADE = {
    hu.optim.AdamW: (torch.optim.AdamW, {}),
    hu.optim.Adam: (torch.optim.Adam, {"maximize": True}),
    hu.optim.SGD: (torch.optim.SGD, {"momentum": 0.9}),
}


def _stepped(kind, state_dtype="8bit", steps=2, **options):
    parameter = torch.nn.Parameter(torch.zeros(8, 64))
    optimizer = kind([parameter], lr=0.1, state_dtype=state_dtype, **options)
    with hu.kernels.engine("reference"):
        for _ in range(steps):
            parameter.grad = torch.randn(8, 64)
            optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("switches", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_torchs_optimizer_stops_at_codes_and_takes_none_for_moments(seed, kind, switches):
    theirs, options = MADE[kind]
    _, optimizer = _stepped(kind, **options)
    other = torch.nn.Parameter(torch.zeros(8, 64))
    torchs = theirs([other], lr=0.1, **options, **switches)
    saved = optimizer.state_dict()
    saved["param_groups"] = [{**torchs.param_groups[0], "params": saved["param_groups"][0]["params"]}]
    torchs.load_state_dict(saved)
    other.grad = torch.randn(8, 64)
    with pytest.raises((TypeError, AttributeError, RuntimeError)):
        torchs.step()
    assert (other == 0).all()


@pytest.mark.parametrize("own", [hu.optim.State("8bit", block=16), torch.float32, "bfloat16x2"])
def test_states_of_another_storage_are_refused(seed, own):
    _, optimizer = _stepped(hu.optim.AdamW)
    _, other = _stepped(hu.optim.AdamW, own)
    before = snapshot(other)
    with pytest.raises(ValueError, match="give it the state_dtype of the optimizer that saved the file"):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not differing(before, snapshot(other))


def test_a_state_dict_loaded_and_saved_again_is_the_same(seed):
    _, optimizer = _stepped(hu.optim.AdamW)
    _, other = _stepped(hu.optim.AdamW, steps=1)
    other.load_state_dict(optimizer.state_dict())
    a, b = (one.state_dict()["state"][0] for one in (optimizer, other))
    assert a.keys() == b.keys() >= {"exp_avg", "exp_avg_codes", "exp_avg_scale"}
    with torch.no_grad():
        other.param_groups[0]["params"][0].copy_(optimizer.param_groups[0]["params"][0])
    assert differing(snapshot(optimizer), snapshot(other)) == []


def test_codes_of_a_later_version_are_refused(seed):
    _, optimizer = _stepped(hu.optim.AdamW)
    later = optimizer.state_dict()
    later["state"][0]["exp_avg"] = 3
    with pytest.raises(ValueError, match="codes of version 3"):
        optimizer.load_state_dict(later)


@pytest.mark.parametrize("shape", [(8, 64), (3, 4, 64), (8, 4, 16), (51, 128), (0, 64), (4096,)])
def test_scales_shard_as_the_rows_of_the_parameter_do(shape):
    """Cut along dimension 0 into any number of parts, the scales of the parts are the parts of the scales."""
    for block in (16, 32, 64):
        whole = compute_scale_shape(torch.Size(shape), block)
        for world in (1, 2, 3, 4):
            parts = torch.zeros(shape, dtype=torch.uint8).chunk(world) if shape[0] else [torch.zeros(shape)]
            if len(shape) == 1 and parts[0].numel() % block:
                continue  # cuts a block: refused
            own = torch.zeros(whole).chunk(world) if shape[0] else [torch.zeros(whole)]
            assert [compute_scale_shape(part.shape, block) for part in parts] == [part.shape for part in own]
        assert whole.numel() * block == torch.Size(shape).numel()


def test_a_version_whose_codes_were_left_out_is_refused(seed):
    """torch.distributed.checkpoint loads only the names that are in the state_dict it loads into."""
    _, optimizer = _stepped(hu.optim.AdamW)
    _, other = _stepped(hu.optim.AdamW, torch.float32)
    saved, before = optimizer.state_dict(), snapshot(other)
    saved["state"][0] = {name: value for name, value in saved["state"][0].items() if not name.endswith("_codes")}
    with pytest.raises(ValueError, match=r"distributed\.checkpoint reads no others"):
        other.load_state_dict(saved)
    assert not differing(before, snapshot(other))


SHARDED = """
import datetime, os, sys, torch
torch.set_num_threads(1)
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
import halfulp as hu
from halfulp.optim.parameters._local_tensors import wrap_like_dtensor

rank, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
hu.kernels.engine("reference").__enter__()  # no compilation in three processes


class Net(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(rows, 64))
        self.filters = nn.Parameter(torch.randn(rows, 4, 4, 2))
        self.few = nn.Parameter(torch.randn(2, 32))  # no row for the third process


def made(rows, mesh):
    torch.manual_seed(seed)
    net = Net(rows).bfloat16() if mesh is None else fully_shard(Net(rows).bfloat16(), mesh=mesh)
    return net, hu.optim.AdamW(net.named_parameters(), lr=0.01, state_dtype="8bit", report_interval=0)


def trained(net, optimizer, steps, mesh):
    for step in steps:
        torch.manual_seed(seed + step)
        for parameter in net.parameters():
            gradient = torch.randn(parameter.shape).to(parameter.dtype)
            parameter.grad = distribute_tensor(gradient, mesh, parameter.placements) if mesh else gradient
        optimizer.step()
    return net, optimizer


def values(net, optimizer):
    found = {}
    for name, parameter in net.named_parameters():
        plan = optimizer._plans[parameter]
        decoded = [codec.decode(tensors) for codec, tensors in zip(plan.spec.codecs, plan.states)]
        assert plan.spec.codecs[0].tensor_count == 2, "8-bit codes"
        for number, value in enumerate([*plan.payloads, *plan.auxiliary_tensors, *decoded]):
            value = wrap_like_dtensor(value, parameter)
            found[name, number] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def check(net, optimizer, expected):
    found = values(net, optimizer)
    wrong = [key for key in expected if not torch.equal(found[key], expected[key])]
    assert found.keys() == expected.keys() and not wrong, wrong


expected = {}
for rows in (51, 64):
    plain = trained(*made(rows, None), range(3), None)
    three = values(*plain)
    expected[rows] = {key: value.clone() for key, value in three.items()}, values(*trained(*plain, [3], None))

for ranks in (2, 3):
    if rank >= ranks:
        continue
    wait = datetime.timedelta(seconds=90)  # for one that has failed
    dist.init_process_group("gloo", timeout=wait, init_method=f"file://{path}{ranks}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for rows in (51, 64):
        if ranks == 2:
            net, optimizer = trained(*made(rows, mesh), range(3), mesh)
            check(net, optimizer, expected[rows][0])
            model, states = get_state_dict(net, optimizer)
            dcp.save({"model": model, "states": states}, checkpoint_id=f"{path}.{rows}")
        net, optimizer = made(rows, mesh)
        model, states = get_state_dict(net, optimizer)
        dcp.load({"model": model, "states": states}, checkpoint_id=f"{path}.{rows}")
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=states)
        check(net, optimizer, expected[rows][0])
        check(*trained(net, optimizer, [3], mesh), expected[rows][1])
    dist.barrier()
    dist.destroy_process_group()
# Threads of the groups may outlive them, and then the interpreter's end is an abort.
sys.stdout.flush()
os._exit(0)
"""


def test_distributed_checkpoints_of_two_processes_go_on_in_two_and_three_as_unsharded(in_processes, needs_torch):
    needs_torch("distributed.checkpoint that writes without torch's own warning")
    in_processes(SHARDED, 3)
