"""The accumulator: carries, the value that its words stand for, and how that is rounded, by every engine."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from halfulp.arithmetic import _exact_sums as kernels
from halfulp.arithmetic._exact_sum_kernels import (
    LIMB_COUNT,
    MIN_EXPONENT,
    WORD_COUNT,
    LimbRange,
    make_carry_and_rounding_kernel,
)
from halfulp.formats import get
from halfulp.formats._reference import round_exact
from halfulp.kernels import engine, same_bits
from halfulp.kernels.vector import _machine_function
from halfulp.kernels.vector._table_loop import compile_pointer_table_kernel

ENGINES = ("llvm", "reference")


def value(limbs: torch.Tensor) -> int:
    return sum(int(v) << (32 * i) for i, v in enumerate(limbs.tolist()))


def carried(limbs: torch.Tensor, run_by: str) -> torch.Tensor:
    """All limbs of an accumulator that reaches as far as those given, with carries passed on; the last has the sign."""
    rows = torch.cat([limbs, torch.zeros(len(limbs), 4, dtype=torch.int64)], 1)
    return kernels._round_windows(run_by, rows, LimbRange(limbs=limbs.shape[1]), None)[:, :LIMB_COUNT]


@pytest.mark.parametrize("run_by", ENGINES)
def test_carries_run_through_any_number_of_limbs(run_by, seed):
    choices = [0, 0, 1, -1, 2**32 - 1, 2**32 - 1, 2**32, -(2**32), 2**62, -(2**62), -(2**63)]
    rows = []
    for _ in range(300):
        pool = random.sample(choices, 4)
        rows.append([random.choice(pool) for _ in range(20)] + [0])
    limbs = torch.tensor(rows)
    for made, given in zip(carried(limbs, run_by), limbs):
        assert value(made) == value(given)
        assert ((made[:-1] >= 0) & (made[:-1] < 2**32)).all()
    # A carry, and a borrow, through all of them.
    ones = torch.tensor([[2**32] + [2**32 - 1] * 19 + [0], [-1] + [0] * 19 + [1]])
    assert [value(limbs) for limbs in carried(ones, run_by)] == [2**640, 2**640 - 1]


@pytest.mark.parametrize("run_by", ENGINES)
def test_words_are_the_exact_sum(run_by, seed):
    x = torch.from_numpy(np.ldexp(torch.randn(2, 400).double().numpy(), torch.randint(-1060, 1020, (2, 400)).numpy()))
    with engine(run_by):
        words = kernels.sum_rows(x, None, None)
    assert words.shape == (2, WORD_COUNT)
    assert words[:, -1].tolist() == [400, 400]
    for row, made in zip(x.tolist(), words):
        assert Fraction(value(made[:LIMB_COUNT])) * Fraction(2) ** MIN_EXPONENT == sum(map(Fraction, row))


def test_rounding_of_any_integer(seed):
    """Values around ties, of every size that a format can hold, as multiples of the lowest limb's unit."""
    for name, dtype in (
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
        ("fp32", torch.float32),
        ("fp64", torch.float64),
    ):
        format = get(name)
        precision = round(1 - torch.tensor(torch.finfo(dtype).eps, dtype=torch.float64).log2().item())
        made, correct = [], []
        for _ in range(60):
            mantissa = random.choice([random.getrandbits(precision), 2**precision - 1, 2 ** (precision - 1), 1])
            whole = (2 * mantissa + 1 << 80) + random.choice([-1, 0, 1])
            lowest = round(torch.tensor(torch.finfo(dtype).smallest_normal, dtype=torch.float64).log2().item())
            exponent = random.randint(max(MIN_EXPONENT, lowest - 90 - 2 * precision), -lowest - 70)
            exact = Fraction(random.choice([-1, 1]) * whole) * Fraction(2) ** exponent
            integer = int(exact / Fraction(2) ** MIN_EXPONENT)
            limbs = [integer >> (32 * i) & (2**32 - 1) for i in range(LIMB_COUNT - 1)]
            limbs.append(integer >> (32 * (LIMB_COUNT - 1)))
            words = torch.tensor([*limbs, 0, 0, 0, 1])
            wanted = torch.tensor(round_exact(exact, format), dtype=torch.float64).to(dtype)
            made.append(words)
            correct.append(wanted)
        for run_by in ENGINES:
            with engine(run_by):
                assert same_bits(kernels.round_accumulators(torch.stack(made), dtype), torch.stack(correct))


@pytest.mark.parametrize(("dtype", "level"), [(torch.float32, 3), (torch.float64, 0)], ids=str)
@pytest.mark.parametrize("result", [None, torch.float32], ids=str)
def test_kernels_of_many_limbs_are_left_unoptimized(dtype, level, result, monkeypatch, tmp_path):
    """LLVM's passes take 5 s on those of float64's sums, and 13 s on those of its products."""

    class Asked(Exception):
        pass

    def make_target_machine(level):
        raise Asked(level)

    monkeypatch.setenv("HALFULP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_machine_function, "_make_target_machine", make_target_machine)
    for product in (False, True):
        table = make_carry_and_rounding_kernel(LimbRange.for_terms(dtype, product), result)
        with pytest.raises(Asked) as asked:
            compile_pointer_table_kernel("exact_sums", table)
        assert asked.value.args == (level,)
