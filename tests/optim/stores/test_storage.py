"""Stores: every 16-bit code decodes to its number, and encoding rounds as torch does, or up with the right chance."""

import pytest
import torch

import halfulp as hu
from halfulp.kernels import same_bits
from halfulp.optim._storage import BF16, F32, FP16, make_format_store

from ...laws.optim.cases import SPECIAL, Adder

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STORES = {"bf16": BF16, "fp16": FP16}


def _every_code(dtype):
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


@pytest.mark.parametrize("name", STORES)
def test_every_code_decodes_and_encodes_back(name):
    codes = _every_code(DTYPES[name])
    real = STORES[name].decode(codes)
    assert same_bits(real, codes.float())
    assert same_bits(STORES[name].encode(real, None), codes)
    full = torch.full(codes.shape, 2**32 - 1)
    finite = codes.isfinite()
    assert same_bits(STORES[name].encode(real, full)[finite], codes[finite]), "an exact value needs no rounding"


@pytest.mark.parametrize("name", STORES)
def test_nearest_is_torchs(seed, name):
    words = torch.randint(-(2**31), 2**31, (200_000,)).to(torch.int32).view(torch.float32)
    values = torch.cat([words, torch.tensor(SPECIAL), torch.randn(50_000)])
    assert same_bits(STORES[name].encode(values, None), values.to(DTYPES[name]))


@pytest.mark.parametrize("name", [*STORES, "e4m3fn", "e5m2", "e8m3", "e8m1"])
def test_stochastic_takes_a_neighbour_with_the_chance_of_its_nearness(seed, name):
    """Also among subnormals; by the compiled piece, through an optimizer."""
    fmt = hu.formats.get(DTYPES.get(name, name))
    spots = [1.0 + 0.3 * fmt.eps, -1.9, 3.7, fmt.smallest_subnormal * 2.3, -fmt.smallest_subnormal * 0.2]
    if fmt.bits == 16 or fmt.exponent_bits == 8:
        spots = spots[:3] + [x for x in spots[3:] if abs(x) > 1e-44]
    n = 40_000
    values = torch.tensor(spots).repeat_interleave(n)
    held = Adder("stochastic", torch.zeros_like(values), name, seed, engine="llvm" if name in STORES else "reference")
    held.add(values)
    got = held.parameter.detach().float().reshape(-1, n)
    low, high = (hu.quantize(values, fmt, rounding).reshape(-1, n)[:, 0] for rounding in (hu.Down(), hu.Up()))
    for spot, below, above, row in zip(torch.tensor(spots).double(), low.double(), high.double(), got.double()):
        assert ((row == below) | (row == above)).all()
        chance = float((spot - below) / (above - below))
        share = float((row == above).double().mean())
        assert abs(share - chance) < 6 * (chance * (1 - chance) / n) ** 0.5 + 2**-13


def test_float32_is_kept_whole_but_for_the_bits_of_a_nan():
    values = torch.tensor([*SPECIAL, 1.1754942e-38])
    assert same_bits(F32.decode(F32.encode(values, None)), values)
    strange = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert (F32.decode(strange).view(torch.int32) == 0x7FC00000).all()


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e3m4", "e8m5", "e8m1", "fp16", "bf16", "tf32", "e4m3"])
def test_a_formats_store_is_quantize(seed, name):
    store = make_format_store(name)
    values = torch.cat([torch.tensor(SPECIAL), torch.randn(20_000) * 2 ** torch.empty(20_000).uniform_(-20, 20)])
    assert same_bits(store.encode(values, None), hu.quantize(values, name))


@pytest.mark.parametrize("name", ["e8m0", "e4m3fnuz", "e5m2fnuz"])
def test_a_format_that_cannot_hold_weights_is_refused(name):
    with pytest.raises(ValueError, match="cannot hold weights"):
        hu.optim.SGD([torch.nn.Parameter(torch.zeros(2))], format=name)


def test_format_is_for_float32_parameters():
    with pytest.raises(ValueError, match="format= keeps values of a format in float32"):
        hu.optim.SGD([torch.nn.Parameter(torch.zeros(2).bfloat16())], format="e4m3fn")
    with pytest.raises(ValueError, match="give one of them"):
        hu.optim.SGD([torch.nn.Parameter(torch.zeros(2))], format="e4m3fn", param_dtype=torch.bfloat16)


def test_format_fp32_is_no_format():
    parameter = torch.nn.Parameter(torch.randn(9))
    optimizer = hu.optim.SGD([parameter], lr=0.1, format="fp32")
    before, parameter.grad = parameter.detach().clone(), torch.randn(9)
    optimizer.step()
    assert torch.equal(parameter.detach(), before - 0.1 * parameter.grad)
