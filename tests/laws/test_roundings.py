"""Law: quantize gives, for every format, rounding and dtype, the neighbour that an oracle without bits names."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from halfulp.formats import Format, get, round_exact
from halfulp.kernels import engine, same_bits
from halfulp.rounding import Stochastic, mix64, random_words
from halfulp.rounding._target import FLOAT_DTYPES, count_random_bits, make_target

from ..rounding.oracle import FORMATS, MODES, ROUNDED, all_of, inputs, oracle, random_patterns, rounded

each_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
each_rounding = pytest.mark.parametrize("mode", MODES)
EXACT_MODES = {"nearest": "nearest", "toward_zero": "zero", "up": "up", "down": "down"}


def draws(x: torch.Tensor, format: Format, mode: str, policy: str | None = None) -> dict:
    """What the oracle needs to know about the random bits of `rounded`."""
    if mode != "stochastic":
        return {}
    target = make_target(format, Stochastic(5), policy, x.dtype)
    count = count_random_bits(target) if target else 31
    words = random_words(mix64(5, 0), torch.arange(x.numel())) >> (32 - count)
    return {"v": ((1 << count) - 1 - words).numpy(), "count": count}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("format", "mode", "dtype"),
    [row for row, taken in ROUNDED.items() if taken],
    ids=lambda one: getattr(one, "name", None),
)
def test_every_mode_of_every_format(format, mode, dtype, seed):
    x = inputs(dtype, all_of, random_patterns)
    q = rounded(x, format, mode)
    wanted = oracle(x.double().numpy(), format, mode, **draws(x, format, mode))
    assert same_bits(q.double(), torch.from_numpy(wanted))
    head = x[:: max(1, x.numel() // 4096)].contiguous()
    with engine("reference"):
        reference = rounded(head, format, mode)
    assert same_bits(rounded(head, format, mode), reference)


def test_only_what_a_dtype_cannot_hold_is_refused():
    refused = [row for row, taken in ROUNDED.items() if not taken]
    assert refused
    for format, mode, dtype in refused:
        assert not get(dtype).holds(format)
        assert rounded(torch.ones(2, dtype=dtype), format, mode) is None


AT_THE_ENDS = [
    Format("tiny", 4, 3, bias=40),  # its largest number is below float16's smallest
    Format("far", 3, 10, bias=-35),  # its smallest number is beyond float16's largest
    Format("far, without subnormals", 3, 10, bias=-35, subnormals=False),
    Format("off", 3, 10, bias=-497),
    Format("tiny for float32", 4, 3, bias=164),
    Format("far for float32", 3, 24, bias=-200),
    Format("last", 3, 12, bias=-8),  # its smallest number is float16's last spacing
    Format("more digits", 3, 33, infinities=False, nan="negative_zero"),  # than the float that holds its largest number
]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("format", AT_THE_ENDS, ids=lambda format: format.name)
def test_beyond_the_ends_of_a_dtype_is_exact_or_refused(format, dtype):
    held = get(dtype)
    ends = (held.max, held.smallest_subnormal, format.max, format.smallest_normal, format.smallest_subnormal)
    sizes = [0.0, 1.0, math.inf, math.nan, *(end * factor for end in ends for factor in (0.5, 0.7, 1.0, 1.1, 3.0))]
    x = torch.tensor(sizes + [-size for size in sizes], dtype=torch.float64).to(dtype)
    for mode, policy in itertools.product(EXACT_MODES, ("inf", "nan", "saturate")):
        if policy == "inf" and not format.infinities:
            continue
        wanted = [round_exact(value, format, EXACT_MODES[mode], overflow=policy) for value in x.tolist()]
        got = rounded(x, format, mode, policy)
        if got is None:
            assert not held.holds(format)
        else:
            assert same_bits(got.double(), torch.tensor(wanted, dtype=torch.float64)), (mode, policy)
    assert rounded(x.double(), format, "up", "saturate") is not None


@pytest.mark.sampled(2)
@each_format
@each_rounding
@pytest.mark.parametrize("policy", ["saturate", "nan"])
def test_overflow_policies(format, mode, policy, seed):
    x = torch.cat([random_patterns(torch.float32, 10_000), torch.randn(10_000) * 2.0 ** min(format.emax, 126)])
    q = rounded(x, format, mode, policy)
    wanted = oracle(x.double().numpy(), format, mode, policy, **draws(x, format, mode, policy))
    assert same_bits(q.double(), torch.from_numpy(wanted))


@pytest.mark.sampled(2)
@each_format
@pytest.mark.parametrize("mode", [*EXACT_MODES, "stochastic"])  # the exact reference knows the library's modes
def test_exact_reference(format, mode, seed):
    x = torch.cat([random_patterns(torch.float64, 40), torch.randn(40, dtype=torch.float64) * format.smallest_normal])
    q = rounded(x, format, mode)
    known = draws(x, format, mode)
    for i, value in enumerate(x.tolist()):
        u = Fraction(int(known["v"][i]) * 2 + 1, 2 << known["count"]) if known else None
        exact = round_exact(value, format, EXACT_MODES.get(mode, mode), u)
        assert same_bits(q[i], torch.tensor(exact, dtype=torch.float64)), (value, q[i])


@each_format
def test_stochastic_agrees_across_containers(format, seed):
    x = (torch.randn(4096) * torch.exp2(torch.randint(-30, 10, (4096,)))).bfloat16()
    wanted = rounded(x.double(), format, "stochastic")
    for dtype in (torch.float32, torch.bfloat16):
        q = rounded(x.to(dtype), format, "stochastic")
        if q is not None:
            assert same_bits(q.double(), wanted)
