"""The rounding unit: settings, refusals, random streams, copies."""

import pytest
import torch

from halfulp import formats
from halfulp.emulation import region
from halfulp.emulation._rounder import Rounder
from halfulp.rounding import Down, Nearest, Stochastic, TowardZero, Up, quantize


@pytest.mark.parametrize("rounding", [Nearest(), TowardZero(), Up(), Down()])
@pytest.mark.parametrize("format", ["bf16", "e4m3fn", "fp16", "e8m1", "e5m2", "tf32"])
def test_rounds_as_quantize(seed, rounding, format):
    x = torch.randn(100) * torch.randn(100).exp2()
    rounder = Rounder(format, rounding, None)
    want = quantize(x, format, rounding)
    assert torch.equal(rounder.round_copy(x, ""), want)
    rounder.round_in_place(x, "")
    assert torch.equal(x, want)


def test_overflow_policy():
    x = torch.tensor([torch.finfo(torch.float32).min])
    assert Rounder("bf16", "nearest", None).round_copy(x, "").item() == -float("inf")
    assert Rounder("bf16", "nearest", "saturate").round_copy(x, "").item() == formats.bf16.min


@pytest.mark.parametrize(
    ("format", "error", "words"),
    [
        ("mxfp8_e4m3", ValueError, "block format"),
        (formats.nvfp4, TypeError, "BlockFormat"),
        ("e8m0", ValueError, "no zero"),
        ("nonsense", ValueError, "nonsense"),
        (3, TypeError, "int"),
        (formats.Format("u", 4, 3, signed=False, signed_zero=False), ValueError, "negative"),
    ],
)
def test_unusable_formats(format, error, words):
    with pytest.raises(error, match=words):
        Rounder(format, "nearest", None)


def test_unusable_roundings_and_policies():
    with pytest.raises(ValueError, match="nearst"):
        Rounder("bf16", "nearst", None)
    with pytest.raises(ValueError, match="overflow"):
        Rounder("bf16", "nearest", "wrap")


def test_narrow_tensors():
    x = torch.tensor([0.3], dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"op gives.*bfloat16.*second rounding"):
        Rounder("e8m3", "nearest", None).round_copy(x, "op")
    with pytest.raises(NotImplementedError, match="float8"):
        Rounder("bf16", "nearest", None).round_copy(x.to(torch.float8_e5m2), "op")


def test_integers_pass():
    x = torch.arange(3)
    rounder = Rounder("e8m1", "nearest", None)
    assert rounder.round_copy(x, "") is x
    rounder.round_in_place(x, "")
    assert x.tolist() == [0, 1, 2]


def test_torchs_generator_governs(seed):
    def draw():
        with region("e8m1", Stochastic()):
            return torch.stack([torch.ones(2000) + 0.2, torch.ones(2000) + 0.2])

    torch.manual_seed(seed)
    first = draw()
    torch.manual_seed(seed)
    assert torch.equal(first, draw())
    assert not torch.equal(first[0], first[1])
    assert abs(first.mean().item() - 1.2) < 0.03
    assert not torch.equal(draw(), draw())


def test_a_seed_is_refused():
    with pytest.raises(ValueError, match=r"got Stochastic\(seed=5.*take 'stochastic' and torch\.manual_seed"):
        region("e8m1", Stochastic(seed=5))
