"""Rounding in blocks against one element at a time on rationals, and against ml_dtypes."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch

from halfulp import formats
from halfulp.formats import BlockFormat, get_block
from halfulp.kernels import engine, same_bits
from halfulp.rounding import Down, Stochastic, Up, quantize

NAMES = formats.block_names()
VARIANTS = [get_block(name) for name in NAMES]
VARIANTS += [
    dataclasses.replace(get_block(name), name=f"{name}_{choice}", scale_rounding=choice)
    for name in ("mxfp4", "mxfp8_e5m2", "mxfp8_e4m3")
    for choice in ("floor", "nearest")
]
VARIANTS += [
    dataclasses.replace(get_block("nvfp4"), name="nvfp4_up", scale_rounding="up"),
    BlockFormat("odd", formats.e4m3fn, formats.e8m0, 7),
    BlockFormat("scaled_bf16", formats.e2m3fn, formats.bf16, 16, scale_rounding="nearest"),
    BlockFormat("fnuz", formats.e4m3fnuz, formats.e8m0, 8),
]
variants = pytest.mark.parametrize("block_format", VARIANTS, ids=lambda block: block.name)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
MODES = {"nearest": "nearest", "toward_zero": "zero", "up": "up", "down": "down"}


def rows(count: int = 24, length: int = 96) -> torch.Tensor:
    """Blocks of all magnitudes, with zeros, specials, and what lies at the ends of float32."""
    x = torch.randn(count, length) * torch.exp2(torch.randint(-120, 100, (count, 1)).float())
    x[0], x[1], x[2] = torch.randn(length) * 1e-38, torch.randn(length) * 1e-44, torch.rand(length) * 3.4e38
    x[3] = 0
    x[3, ::2] = -0.0
    x[4, 5], x[5, 40] = torch.nan, -torch.inf
    x[6] = torch.randint(-24, 24, (length,)) / 4
    x[7, 1:] *= 2.0**-60
    return x


@variants
def test_exact_reference(block_format, exact_blocks, seed):
    x = rows()
    q = quantize(x, block_format)
    assert same_bits(q, torch.from_numpy(exact_blocks(x.numpy(), block_format)))
    with engine("reference"):
        assert same_bits(quantize(x, block_format), q)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp8_e5m2"])
@pytest.mark.parametrize("rounding", ["toward_zero", "up", "down"])
def test_directed_modes(name, rounding, exact_blocks, seed):
    x = rows(12)
    q = quantize(x, name, rounding)
    assert same_bits(q, torch.from_numpy(exact_blocks(x.numpy(), get_block(name), MODES[rounding])))
    with engine("reference"):
        assert same_bits(quantize(x, name, rounding), q)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES)
@variants
def test_engines_agree(block_format, dtype, seed):
    """Rows of whole blocks, of a part of one at their end, and shorter than one."""
    x = rows().to(dtype)
    whole, ragged, short = x, x[:, :50], x[:, :5]
    for y, rounding in (
        *((whole, "nearest"), (ragged, "nearest"), (short, "nearest"), (whole, "down")),
        *((ragged, Stochastic(3)), (short, Stochastic(3))),
    ):
        with engine("reference"):
            wanted = quantize(y, block_format, rounding)
        assert same_bits(quantize(y, block_format, rounding), wanted)


@variants
def test_float64_beyond_float32(block_format, seed):
    """A scale stops at the ends of its range; elements saturate above it, and vanish below."""
    powers = torch.tensor([-1060.0, -600, -150, 0, 150, 900], dtype=torch.float64)
    x = torch.randn(6, 32).double() * torch.exp2(powers)[:, None]  # float32 holds them, but for the powers
    q = quantize(x, block_format)
    with engine("reference"):
        assert same_bits(quantize(x, block_format), q)
    if not block_format.tensor_scale and block_format.scale is formats.e8m0:
        assert not bool(q[:2].any())
        largest = block_format.element.max * block_format.scale.max
        assert bool((q[5].abs() == largest).all())
        assert same_bits(q[3], quantize(x[3].float(), block_format).double())


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4"])
def test_elements_of_ml_dtypes(name, seed):
    """With the floor scale of the OCP specification, computed from the definition."""
    block_format = dataclasses.replace(get_block(name), scale_rounding="floor")
    element = block_format.element
    x = torch.randn(64, 128) * 10
    blocks = x.view(-1, 32).numpy()
    exponent = np.floor(np.log2(np.abs(blocks).max(1, keepdims=True).astype(np.float64))) - element.emax
    scaled = (blocks / np.exp2(exponent)).astype(np.float32).clip(-element.max, element.max)
    payload = scaled.astype(getattr(ml_dtypes, element.ml_dtypes_name)).astype(np.float64)
    wanted = (payload * np.exp2(exponent)).astype(np.float32).reshape(64, 128)
    assert same_bits(quantize(x, block_format), torch.from_numpy(wanted))


def test_stochastic_is_unbiased(seed):
    """The mean over many draws of blocks that no scale saturates."""
    x = torch.randn(4, 32)
    draws = 4000
    many = x.repeat(draws, 1)
    for block in (get_block("mxfp4"), get_block("mxfp6_e2m3"), next(b for b in VARIANTS if b.name == "nvfp4_up")):
        q = quantize(many, block, Stochastic()).view(draws, 4, 32).double()
        low, high = (quantize(x, block, side).double() for side in (Down(), Up()))
        gap = high - low
        chance = torch.where(gap > 0, (x - low) / gap, 0.0)
        deviation = gap * (chance * (1 - chance) / draws).sqrt()
        # Bernstein's inequality at e^-21, so that rare events are allowed for.
        assert bool(((q.mean(0) - x).abs() <= 6.5 * deviation + 8 * gap / draws + 1e-6 * x.abs()).all())
    assert not torch.equal(quantize(x, "mxfp4", Stochastic()), quantize(x, "mxfp4", Stochastic()))
    assert same_bits(quantize(x, "mxfp4", Stochastic(1)), quantize(x, "mxfp4", Stochastic(1)))


def test_specials_and_zeros():
    x = torch.ones(2, 64)
    x[0, 3], x[1, 40] = torch.nan, torch.inf
    for name in NAMES:
        q = quantize(x, name)
        size = get_block(name).block
        assert bool(q[0, :size].isnan().all())
        assert not bool(q[0, size:].isnan().any())
        assert bool(q[1, 40 // size * size : 40 // size * size + size].isnan().all())
        assert quantize(torch.zeros(64), name).eq(0).all()
        assert bool(quantize(torch.full((64,), -0.0), name).signbit().all())


def test_shapes_dims_and_out(seed):
    x = torch.randn(5, 40, 6)
    for name in ("mxfp4", "nvfp4"):
        wanted = quantize(x.movedim(1, -1).contiguous(), name).movedim(-1, 1)
        assert same_bits(quantize(x, name, dim=1), wanted)
        assert same_bits(quantize(x, name, dim=-2), wanted)
        out = torch.empty_like(x)
        assert quantize(x, name, dim=1, out=out) is out
        assert same_bits(out, wanted)
        y = x.clone()
        quantize(y, name, out=y)
        assert same_bits(y, quantize(x, name))
        assert quantize(torch.empty(0, 32), name).shape == (0, 32)
        assert quantize(torch.empty(3, 0), name).shape == (3, 0)
        assert quantize(torch.tensor(1.3), name).shape == ()
        assert same_bits(quantize(x.transpose(0, 2), name), quantize(x.transpose(0, 2).contiguous(), name))


def test_a_short_tail_is_a_block(seed):
    x = torch.randn(3, 45)
    q = quantize(x, "mxfp4", Stochastic(1))
    padded = torch.zeros(3, 64)
    padded[:, :45] = x
    assert same_bits(quantize(x, "mxfp4"), quantize(padded, "mxfp4")[:, :45].contiguous())
    with engine("reference"):
        assert same_bits(quantize(x, "mxfp4", Stochastic(1)), q)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled(seed):
    torch._dynamo.reset()
    x = torch.randn(8, 96)

    def every(x):
        out = torch.empty_like(x)
        quantize(x, "mxfp8_e4m3", out=out)
        return out, quantize(x, "nvfp4"), quantize(x, "mxfp4", Stochastic(), dim=0), quantize(x, "mxfp4", Stochastic(2))

    torch.manual_seed(seed)
    wanted = every(x)
    torch.manual_seed(seed)
    assert all(same_bits(a, b) for a, b in zip(torch.compile(every, fullgraph=True)(x), wanted))


def test_bad_input():
    x = torch.ones(4, 32)
    with pytest.raises(ValueError, match="saturate"):
        quantize(x, "mxfp4", overflow="inf")
    with pytest.raises(ValueError, match="dim"):
        quantize(x, "mxfp4", dim=2)
    with pytest.raises(ValueError, match="unknown"):
        quantize(x, "mxfp5")
    with pytest.raises(ValueError, match="sign"):
        quantize(x, BlockFormat("bad", formats.e8m0, formats.e8m0, 32))
    with pytest.raises(ValueError, match="mantissa"):
        quantize(x, BlockFormat("bad", formats.fp32, formats.e8m0, 32))


@pytest.mark.parametrize("scale", ["e8m0", "e4m3fn"])
@pytest.mark.parametrize("block", [679, 4096, 4097, 524288])
def test_blocks_of_any_length(block, scale, seed):
    """Also those that no kernel holds on its stack."""
    form = BlockFormat("long", element=formats.get("e4m3fn"), scale=formats.get(scale), block=block)
    x = torch.randn(2, 5000)
    found = quantize(x, form)
    with engine("reference"):
        assert same_bits(found, quantize(x, form))


def test_a_tensor_scale_of_infinity_by_infinity_is_nan():
    """Where neither the largest magnitude nor its divisor is a float32."""
    vast = BlockFormat("vast", formats.e4m3fn, formats.e8m0, 8, tensor_scale=True)
    assert quantize(torch.full((16,), 1e300, dtype=torch.float64), vast).isnan().all()
