"""4-bit codes: the paper's maps, draws that are right on average, and what no code stands for."""

from fractions import Fraction
from itertools import pairwise

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim.states._int4_blocks import Int4Blocks

BLOCK = 64


def _stored(x, squared, random=None):
    codec = Int4Blocks(BLOCK, squared)
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in codec.describe_tensors("x", x.shape).values()]
    codec.encode(tensors, x, random)
    return tensors, codec.decode(tensors)


def _signed_map():
    """The equation of the paper's appendix: sign, e zeros, a one, and f bits that count midpoints in [0.1, 1]."""
    found = {Fraction(0), Fraction(1)}
    for zeros in range(3):
        parts = 2 ** (2 - zeros)
        edges = [Fraction(1, 10) + Fraction(9, 10) * k / parts for k in range(parts + 1)]
        middles = [(low + high) / 2 * Fraction(1, 10**zeros) for low, high in pairwise(edges)]
        found |= {sign * one for one in middles for sign in (1, -1)}
    return sorted(found)


@pytest.mark.parametrize("squared", [False, True])
def test_codes_stand_for_the_papers_numbers(squared):
    wanted = [Fraction(k + 1, 16) for k in range(16)] if squared else _signed_map()
    numbers = torch.tensor([float(x) for x in wanted] * (BLOCK // 16)).reshape(1, BLOCK)
    (packed, scale), found = _stored(numbers, squared)
    assert torch.equal(found, numbers)
    assert (packed.dtype, packed.shape, scale.dtype) == (torch.uint8, (1, BLOCK // 2), torch.float32)
    assert {int(code) for byte in packed.flatten() for code in (byte & 15, byte >> 4)} == set(range(16))


@pytest.mark.parametrize("squared", [False, True])
def test_draws_are_right_on_average_within_the_map(seed, squared):
    draws, edge = 4096, Fraction(1, 16) if squared else -Fraction(71, 80)
    x = torch.rand(1, BLOCK) * (1 - float(edge)) + float(edge)
    x[0, 0] = 1.0  # the scale, under which -0.8875 is the least that fits
    random = torch.randint(0, 2**32, (draws, BLOCK), dtype=torch.int64)
    _, found = _stored(x.expand(draws, BLOCK).contiguous(), squared, random)
    assert len(found.unique(dim=0)) > 1
    # The widest gap is .225, two numbers around the middle of it have a standard deviation of half of it.
    assert (found.double().mean(0) - x[0]).abs().max() < 0.225 / 2 * 5.5 / draws**0.5


@pytest.mark.parametrize("engine", ["llvm", "reference"])
def test_infinities_stay_in_the_range_and_a_nan_takes_its_block_along(engine):
    weight = torch.nn.Parameter(torch.ones(2, 2 * BLOCK).bfloat16())
    optimizer = hu.optim.AdamW([weight], lr=1e-3, state_dtype=hu.optim.State("4bit", block=BLOCK))
    weight.grad = torch.ones_like(weight)
    weight.grad[0, 3], weight.grad[1, 5] = torch.nan, torch.inf
    with hu.kernels.engine(engine):
        optimizer.step()
    scales = optimizer.state[weight]["exp_avg_scale"]
    assert torch.isnan(scales).tolist() == [[True, False], [False, False]]
    assert scales[1].tolist() == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_steady_gradient_of_either_sign_is_kept(seed, sign):
    """The map has no -1: were the scale the largest magnitude, the largest negative momentum would settle at 44%."""
    weight = torch.nn.Parameter(torch.zeros(16, BLOCK))
    optimizer = hu.optim.SGD([weight], lr=1e-2, momentum=0.9, state_dtype=hu.optim.State("4bit", block=BLOCK))
    gradient = sign * (torch.rand(16, BLOCK) + 0.1)
    for _ in range(200):
        weight.grad = gradient
        optimizer.step()
    wanted = -gradient * 1e-2 * sum(sum(0.9**k for k in range(n + 1)) for n in range(200))
    assert (weight / wanted).mean().item() == pytest.approx(1, abs=0.01)


def test_tiny_blocks_are_zero_and_large_ones_are_kept(seed):
    x = torch.rand(4, BLOCK) + 0.5
    for exponent, is_zero in ((-130, True), (-126, False), (126, False)):
        _, found = _stored(torch.ldexp(x, torch.tensor(exponent)), False)
        assert bool((found == 0).all()) is is_zero
        assert torch.isfinite(found).all()


@pytest.mark.parametrize(("update", "wanted"), [("split8", 6.1), ("stochastic", 5.1)])
def test_bytes_per_parameter(update, wanted):
    weight = torch.nn.Parameter(torch.ones(64, 256).bfloat16())
    optimizer = hu.optim.AdamW([weight], weight_update=update, state_dtype="4bit")
    assert optimizer.bytes_per_parameter() == wanted - 0.1 + 2 * 4 / 128 <= wanted


def test_blocks_of_two_lengths_are_refused_and_of_two_kinds_go_together():
    weight = torch.nn.Parameter(torch.ones(64, 256).bfloat16())
    with pytest.raises(ValueError, match=r"blocks of \[32, 128\].*State\('8bit', block=128\)"):
        hu.optim.AdamW([weight], state_dtype={"exp_avg": "4bit", "exp_avg_sq": "8bit"})
    states = {"exp_avg": "4bit", "exp_avg_sq": hu.optim.State("8bit", block=128)}
    optimizer = hu.optim.AdamW([weight], state_dtype=states)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert {"exp_avg_packed", "exp_avg_sq_codes"} <= optimizer.state[weight].keys()


@pytest.mark.parametrize("shape", [(8, 128), (8, 4, 32), (8, 3, 64, 1), (4096,)])
def test_files_of_plain_states_go_into_any_storage(seed, shape):
    def made(state_dtype):
        weight = torch.nn.Parameter(start.clone())
        return weight, hu.optim.AdamW([("w", weight)], lr=1e-3, state_dtype=state_dtype)

    start = torch.randn(shape).bfloat16()
    weight, optimizer = made(torch.float32)
    weight.grad = torch.randn(shape).bfloat16()
    optimizer.step()
    for target in ("4bit", "8bit", torch.float32):
        other, loaded = made(target)
        loaded.load_state_dict(optimizer.state_dict())
        if target == torch.float32:
            assert all(same_bits(loaded.state[other][k], v) for k, v in optimizer.state[weight].items() if k != "step")
        plans = optimizer._plans[weight], loaded._plans[other]
        moments = [plan.spec.codecs[0].decode(plan.states[0]) for plan in plans]
        apart = (moments[0].reshape(-1) - moments[1].reshape(-1)).abs().max()
        assert apart <= moments[0].abs().max() * (0.127 if target == "4bit" else 0.02)
