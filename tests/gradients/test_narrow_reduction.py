"""Gradients sent in bfloat16 between 1, 2 and 4 gloo processes, beside the equation computed apart, and refusals."""

import types

import pytest
import torch
from torch import nn

import halfulp as hu
from halfulp.gradients import reduce_in_bfloat16

START = """
import copy, os, sys, torch
torch.set_num_threads(1)
import torch.distributed as dist
from torch import nn
import halfulp as hu
from halfulp.gradients import reduce_in_bfloat16

rank, path, seed, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(os.environ["SIZE"])
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=size)
Parallel = nn.parallel.DistributedDataParallel
torch.manual_seed(seed)
start = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
inputs = torch.randn(12, size, 5, 7)


def whole(tensor):
    return tensor.detach().clone()


def same_everywhere(tensors):
    for x in tensors:
        every = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(every, x)
        assert all(torch.equal(x, other) for other in every)


def gradients(model, step, scale=1.0):
    # The weights stay, so that each rank's own gradient is known of a model alone.
    model.zero_grad()
    (model(inputs[step, rank]).square().mean() * scale).backward()
    return [whole(p.grad) for p in model.parameters()]


def own(step, scale=1.0):
    found = []
    for k in range(size):
        model = copy.deepcopy(start)
        (model(inputs[step, k]).square().mean() * scale).backward()
        found.append([p.grad for p in model.parameters()])
    return found


def end():
    dist.barrier()
    dist.destroy_process_group()
    # Threads of the group may outlive it, and then the interpreter's end is an abort.
    sys.stdout.flush()
    os._exit(0)


"""
EQUATION = """
def narrow(x):
    return x.bfloat16().float()


def check():
    model = Parallel(copy.deepcopy(start))
    reduction = reduce_in_bfloat16(model)
    owed = [[torch.zeros_like(p) for p in start.parameters()] for _ in range(size)]
    late = [torch.zeros_like(p) for p in start.parameters()]
    totals = [[torch.zeros_like(p, dtype=torch.float64) for p in start.parameters()] for _ in range(2)]
    for step in range(12):
        found, each = gradients(model, step), own(step)
        for j, mine in enumerate(found):
            sums = torch.zeros_like(mine)
            for k in range(size):
                given = each[k][j] + owed[k][j]
                owed[k][j] = given - narrow(given)
                sums = sums + narrow(given)
            mean = sums / size
            if size == 1:
                mean, owed[0][j] = each[0][j], torch.zeros_like(mean)
            else:
                mean, late[j] = narrow(mean + late[j]), (mean + late[j]) - narrow(mean + late[j])
            assert torch.equal(mean, mine), (step, j, (mean - mine).abs().max())
            totals[0][j] += mine
            totals[1][j] += sum(one[j].double() for one in each) / size
        same_everywhere(found)
    # Nothing is lost: what is missing is owed.
    for j, (got, wanted) in enumerate(zip(*totals)):
        missing = sum(one[j].double() for one in owed) / size + late[j]
        assert torch.allclose(got + missing, wanted, rtol=1e-6, atol=1e-7), j
    return reduction


reduction = check()
count = sum(p.numel() for p in start.parameters())
if size > 1:
    padding = size * 4
    assert 12 * 2 * 2 * count * (size - 1) // size <= reduction.bytes_sent <= 12 * 2 * 2 * (count + padding)
end()
"""
RESUMED = """
import io


def weights(stop=None, saved=None):
    model = Parallel(copy.deepcopy(start))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    reduction = reduce_in_bfloat16(model, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = 0
    if saved is not None:
        first = 6
        held = torch.load(io.BytesIO(saved), weights_only=True)
        reduction.load_state_dict(held["reduction"])
        model.load_state_dict(held["model"])
        scaler.load_state_dict(held["scaler"])
    for step in range(first, stop or 12):
        optimizer.zero_grad()
        scaler.scale(model(inputs[step, rank]).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    held = {"reduction": reduction.state_dict(), "model": model.state_dict(), "scaler": scaler.state_dict()}
    if stop is not None:
        file = io.BytesIO()
        torch.save(held, file)
        return file.getvalue()
    return [whole(p) for p in model.parameters()]


again = weights(saved=weights(stop=6))
assert all(map(torch.equal, weights(), again))
same_everywhere(again)

# A scale that changes changes no bit: what is owed is in its units.
def applied(scales):
    model = Parallel(copy.deepcopy(start))
    given = type("Scaler", (), {"get_scale": lambda self: self.scale})()
    given.scale = scales[0]
    reduce_in_bfloat16(model, scaler=given)
    found = []
    for step, given.scale in enumerate(scales):
        found.append([g / given.scale for g in gradients(model, step, given.scale)])
    return found


for one, other in zip(applied([1.0] * 6), applied([1.0, 8.0, 8.0, 2.0**20, 0.5, 1.0])):
    assert all(map(torch.equal, one, other))

# What is not finite is sent, and not owed.
model = Parallel(copy.deepcopy(start))
reduce_in_bfloat16(model)
bad = gradients(model, 0, float("inf") if rank == 0 else 1.0)
assert all(not g.isfinite().all() for g in bad)
assert all(g.isfinite().all() for g in gradients(model, 1))
end()
"""


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_are_those_of_the_equation(size, in_processes):
    in_processes(START + EQUATION, size, SIZE=str(size))


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(in_processes):
    in_processes(START + RESUMED, 2, SIZE="2")


@pytest.fixture
def alone(process_group, seed):
    return nn.parallel.DistributedDataParallel(nn.Linear(4, 2))


def test_one_process_sends_nothing(alone):
    reduction = reduce_in_bfloat16(alone)
    alone(torch.randn(3, 4)).square().mean().backward()
    assert reduction.bytes_sent == 0
    assert not torch.equal(alone.module.weight.grad, alone.module.weight.grad.bfloat16().float())


def test_what_it_cannot_reduce_is_refused(alone):
    with pytest.raises(TypeError, match="got a Tensor"):
        reduce_in_bfloat16(torch.ones(2))
    with pytest.raises(TypeError, match="scaler= takes"):
        reduce_in_bfloat16(alone, scaler=3)
    reduce_in_bfloat16(alone)
    with pytest.raises(ValueError, match="takes no second one"):
        reduce_in_bfloat16(alone)
    with pytest.raises(NotImplementedError, match=r"'module.weight' is a ScaledTensor.*payload_hook"):
        reduce_in_bfloat16(nn.parallel.DistributedDataParallel(hu.scalify(nn.Linear(4, 2))))
    with pytest.raises(ValueError, match=r"got a Linear: .*reduce_dtype=torch\.bfloat16"):
        reduce_in_bfloat16(nn.Linear(4, 2))


def same_state(one, other):
    parts = one["rank_0"]["weight"].pop("sent"), other["rank_0"]["weight"]["sent"]
    return torch.equal(*parts) and {**one, "rank_0": None} == {**other, "rank_0": None}


def test_states_of_others_are_refused(alone):
    reduction = reduce_in_bfloat16(alone)
    held = {**reduction.state_dict(), "rank_0": {"weight": {"sent": torch.ones(8)}}}
    reduction.load_state_dict(held)
    assert same_state(reduction.state_dict(), held)
    wrong = {
        "its keys are step": {"step": 3},
        "not the state of rank_0 of 1 under version 1": {**held, "version": 2},
        "not the state of rank_0 of 1 under": {**held, "ranks": 4},
        "rank_1: each rank": {**{key: value for key, value in held.items() if key != "rank_0"}, "rank_1": {}},
        "of another model: it has the unknown 'layer'": {**held, "rank_0": {"layer": {}}},
        "of another model, whose 'weight' has another size": {**held, "rank_0": {"weight": {"sent": torch.ones(1)}}},
    }
    for words, state in wrong.items():
        with pytest.raises(ValueError, match=words):
            reduction.load_state_dict(state)
    with pytest.raises((AttributeError, TypeError)):
        reduction.load_state_dict({**held, "rank_0": {"weight": 3}})
    assert same_state(reduction.state_dict(), held)


def test_a_state_is_loaded_onto_the_parameters_device(alone):
    """As one that torch.load has mapped to the CPU; here the other way, which every machine has."""
    reduction = reduce_in_bfloat16(alone)
    reduction.names = {torch.empty(2, 4, device="meta"): "weight"}
    reduction.load_state_dict({**reduction.state_dict(), "rank_0": {"weight": {"sent": torch.ones(8)}}})
    assert reduction.state_dict()["rank_0"]["weight"]["sent"].device.type == "meta"


def test_a_loss_that_was_not_scaled_is_told_as_without_a_reduction(alone):
    scaler = hu.AdaptiveGradScaler(alone)
    reduce_in_bfloat16(alone, scaler=scaler)
    alone(torch.randn(3, 4)).square().mean().backward()
    with pytest.raises(ValueError, match="there is nothing to unscale"):
        scaler.step(torch.optim.SGD(alone.parameters(), lr=0.1))


def test_gradients_that_bfloat16_cannot_send_are_refused(alone):
    reduction = reduce_in_bfloat16(alone)
    with pytest.raises(NotImplementedError, match=r"a gradient of torch\.float64"):
        reduction._round_with_feedback("other", "sent", torch.ones(3, dtype=torch.float64))
    sparse = types.SimpleNamespace(buffer=lambda: torch.ones(2).to_sparse())
    with pytest.raises(NotImplementedError, match="sparse=False"):
        reduction.average_bucket(sparse)
