"""Law: every shard of a parameter steps with the bits of the whole, under every weight update."""

import pytest
import torch

from halfulp.kernels import engine, same_bits

from ...optim.parameters.shards import make_problem, on_every_rank, part_of, sharded
from .cases import CODECS, build, narrow_updates


def _whole(start, gradients, update, codec):
    parameter = torch.nn.Parameter(start.clone())
    optimizer = build("adamw", update, [("w", parameter)], state_dtype=codec, seed=3)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return parameter, optimizer


def _assert_same_on_every_rank(dim, world, whole, start, gradients, update, codec):
    parameter, optimizer = whole

    def body(rank, mesh):
        mine = torch.nn.Parameter(sharded(start, mesh, dim, world, rank))
        own = build("adamw", update, [("w", mine)], state_dtype=codec, seed=3)
        for gradient in gradients:
            mine.grad = sharded(gradient, mesh, dim, world, rank)
            own.step()
        assert same_bits(mine.detach().to_local(), part_of(parameter.detach(), dim, world, rank)), (dim, world, rank)
        for name, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor) and value.shape == start.shape:
                held = getattr(own.state[mine][name], "_local_tensor", own.state[mine][name])
                assert same_bits(held, part_of(value, dim, world, rank)), (name, dim, world, rank)

    on_every_rank(world, body)


CASES = [(u, "default") for u in narrow_updates()] + [
    ("split8", "8bit"),
    ("feedback", "8bit"),
    ("kahan", "8bit-16"),
    ("components", "bf16x2"),
]
SHARDINGS = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (2, 4)]


def _keeps_blocks(dim, world, codec):
    """Whether no block of states is cut, which is refused."""
    return dim < 2 or codec in ("default", "bf16x2") or (codec, world) == ("8bit-16", 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("update", "codec", "dim", "world"),
    [(*case, *sharding) for case in CASES for sharding in SHARDINGS if _keeps_blocks(*sharding, case[1])],
)
def test_every_shard_of_a_parameter_steps_as_the_whole(seed, update, codec, dim, world):
    start, gradients = make_problem(seed)
    with engine("reference"):
        whole = _whole(start, gradients, update, CODECS[codec])
        _assert_same_on_every_rank(dim, world, whole, start, gradients, update, CODECS[codec])


@pytest.mark.parametrize(
    ("update", "codec"), [("stochastic", "default"), ("split8", "8bit"), ("kahan-stochastic", "fp32")]
)
def test_compiled_shards_step_as_the_compiled_whole(seed, update, codec):
    start, gradients = make_problem(seed)
    whole = _whole(start, gradients, update, CODECS[codec])
    for dim, world in [(0, 3), (1, 4)]:
        _assert_same_on_every_rank(dim, world, whole, start, gradients, update, CODECS[codec])
