"""Index maps of shards, layouts and sizes of every kind, and shardings that are refused."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Partial, _StridedShard

import halfulp as hu
from halfulp.kernels import IndexMap, engine, same_bits
from halfulp.optim.parameters._local_tensors import find_index_map
from halfulp.optim.step._kernel import run_reference_step

from ...laws.optim.cases import build, decoded, differing, snapshot
from .shards import SHAPE, make_problem, on_every_rank, sharded


@pytest.mark.parametrize(("dim", "world", "shape"), [(2, 2, SHAPE), (1, 3, (5, 16, 6)), (0, 3, (4096 * 2,))])
def test_a_sharding_that_cuts_blocks_is_refused(dim, world, shape):
    whole = torch.zeros(shape).bfloat16()

    def body(rank, mesh):
        parameter = torch.nn.Parameter(sharded(whole, mesh, dim, world, rank))
        if rank == 1:
            with pytest.raises(ValueError, match="blocks of 32 states are cut: shard dimension 0"):
                hu.optim.AdamW([("w", parameter)], state_dtype="8bit")

    on_every_rank(world, body)


def test_the_index_map_of_a_dtensor_is_its_place():
    whole = torch.zeros(SHAPE)

    def body(rank, mesh):
        found = find_index_map(sharded(whole, mesh, 0, 3, rank))
        assert found == IndexMap.shard(SHAPE, 0, *((0, 3), (3, 6), (6, 7))[rank])
        replicated = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
        assert find_index_map(replicated) == IndexMap.whole(SHAPE)
        pending = DTensor.from_local(whole, mesh, [Partial()], run_check=False)
        with pytest.raises(ValueError, match="redistribute"):
            find_index_map(pending)

    on_every_rank(3, body)


def test_the_index_map_of_a_strided_shard_is_a_grid_and_asks_no_other_rank():
    def body(rank, mesh):
        strided = [_StridedShard(0, split_factor=4)]  # every piece of two rows is cut in two
        given = DTensor.from_local(torch.zeros(4, 3), mesh, strided, run_check=False, shape=(8, 3), stride=(3, 1))
        with CommDebugMode() as said:
            found = find_index_map(given)
        assert said.get_total_counts() == 0
        assert found == IndexMap((4, 3), (8, 3), (rank, 0), (2, 1))

    on_every_rank(2, body)


def test_index_maps_with_steps_draw_as_the_whole(seed):
    """A strided shard: every second row, and the last three columns, straight through the kernel's reference."""
    start, gradients = make_problem(seed)
    start, gradient = start[0], gradients[0][0]
    parameter = torch.nn.Parameter(start.clone())
    optimizer = build("adamw", "stochastic", [parameter])
    optimizer.bytes_per_parameter()
    plan = optimizer._plans[parameter]
    c, key = tuple(0.1 * (k + 1) for k in range(len(plan.spec.rule.constants))), 12345
    whole = [start.clone(), *(torch.zeros_like(start) for _ in range(2))]
    run_reference_step(
        plan.spec, whole[:1], gradient, [[whole[1]], [whole[2]]], c, key, IndexMap.whole(tuple(start.shape))
    )
    rows = slice(1, None, 2)
    some = [start[rows, 29:].contiguous(), *(torch.zeros(3, 3).bfloat16() for _ in range(2))]
    place = IndexMap((3, 3), tuple(start.shape), (1, 29), (2, 1))
    run_reference_step(plan.spec, some[:1], gradient[rows, 29:].contiguous(), [[some[1]], [some[2]]], c, key, place)
    for part, all_of_it in zip(some, whole):
        assert same_bits(part, all_of_it[rows, 29:].contiguous())


def _layouts():
    base = torch.randn(6, 4, 5, 3)
    yield "transposed", base[:, :, 0, 0].clone().t()
    yield "channels_last", base.clone().contiguous(memory_format=torch.channels_last)
    yield "strided", base.clone()[::2, :, 1:3]
    yield "permuted", base.clone().permute(3, 1, 0, 2)
    yield "offset", base.clone().flatten()[7:50]
    yield "0-d", torch.tensor(1.25)
    yield "empty", torch.zeros(0, 3)
    yield "one", torch.randn(1)


LAYOUTS = [name for name, _ in _layouts()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("update", ["split8", "kahan-stochastic", "master"])
def test_a_layout_changes_nothing(seed, layout, update):
    values = dict(_layouts())[layout].bfloat16()
    stored = values.as_strided(values.shape, values.stride()) if layout == "offset" else values
    strided, plain = torch.nn.Parameter(stored), torch.nn.Parameter(values.clone(memory_format=torch.contiguous_format))
    a, b = (build("adamw", update, [p], seed=seed) for p in (strided, plain))
    for _ in range(3):
        gradient = torch.randn(values.shape).bfloat16()
        plain.grad = gradient
        strided.grad = torch.empty_like(strided).copy_(gradient)
        a.step()
        b.step()
    assert strided.stride() == stored.stride()
    assert torch.equal(strided.detach(), plain.detach())
    assert torch.equal(decoded(a, strided).reshape(plain.shape), decoded(b, plain))


@pytest.mark.parametrize("update", ["split8", "stochastic"])
def test_expanded_and_transposed_gradients_are_gradients(seed, update):
    one, other = (torch.nn.Parameter(torch.ones(8, 8).bfloat16()) for _ in range(2))
    a, b = (build("sgd", update, [p], seed=seed) for p in (one, other))
    for gradient in (
        torch.randn(()).bfloat16().expand(8, 8),
        torch.randn(8, 1).bfloat16().expand(8, 8),
        torch.randn(8, 8).bfloat16().t(),
    ):
        one.grad, other.grad = gradient, gradient.contiguous()
        a.step()
        b.step()
        assert torch.equal(one.detach(), other.detach())


def test_parameters_that_share_storage_are_stepped_apart():
    flat = torch.ones(64).bfloat16()
    left, right = torch.nn.Parameter(flat[:32]), torch.nn.Parameter(flat[32:])
    optimizer = build("sgd", "stochastic", [left, right], lr=1.0)
    left.grad = torch.full((32,), 0.5).bfloat16()
    optimizer.step()
    assert (flat[:32] < 0.6).all()
    assert (flat[32:] == 1).all()


def test_many_sizes_step_in_one_call_as_they_do_alone(seed):
    """Across the edges of chunks and of the serial limit."""
    sizes = [0, 1, 3, 31, 32, 33, 1000, 16383, 16384, 16385, 70_000]
    starts = [torch.randn(n).bfloat16() for n in sizes]
    gradients = [torch.randn(n).bfloat16() for n in sizes]
    together = [(f"p{k}", torch.nn.Parameter(start.clone())) for k, start in enumerate(starts)]
    joint = build("adamw", "split8", together, seed=seed)
    for (_, parameter), gradient in zip(together, gradients):
        parameter.grad = gradient
    joint.step()
    for k, start in enumerate(starts):
        alone = torch.nn.Parameter(start.clone())
        single = build("adamw", "split8", [(f"p{k}", alone)], seed=seed)
        alone.grad = gradients[k]
        with engine("reference"):
            single.step()
        assert torch.equal(alone.detach(), together[k][1].detach())


def test_moving_the_data_of_a_parameter_is_noticed():
    parameter = torch.nn.Parameter(torch.ones(64).bfloat16())
    optimizer = build("sgd", "kahan", [parameter], lr=1.0, weight_decay=0.0)
    parameter.grad = torch.full((64,), 2.0**-4).bfloat16()
    optimizer.step()
    old = parameter.detach()
    parameter.data = parameter.data.clone()
    optimizer.step()
    assert (old == 1 - 2.0**-4).all()
    assert (parameter.detach() < old).all()


def test_snapshots_see_everything():
    parameter = torch.nn.Parameter(torch.ones(64).bfloat16())
    optimizer = build("adamw", "kahan", [parameter])
    parameter.grad = torch.ones(64).bfloat16()
    before = snapshot(optimizer)
    optimizer.step()
    assert set(differing(before, snapshot(optimizer))) == {"0.0", "0.0.exp_avg", "0.0.exp_avg_sq", "0.0.residual"}
