"""The accumulator in torch integers: carries, and the value that its words stand for."""

import random
from fractions import Fraction

import numpy as np
import torch

from halfulp.arithmetic.exact_sums import _run as kernels
from halfulp.arithmetic.exact_sums._accumulator import LIMBS, TERMS, UNIT, WORDS
from halfulp.arithmetic.exact_sums._reference import carried, round_words, words_of
from halfulp.formats import get
from halfulp.formats._reference import round_exact
from halfulp.kernels import same_bits


def value(limbs: torch.Tensor) -> int:
    return sum(int(v) << (32 * i) for i, v in enumerate(limbs.tolist()))


def test_carries_run_through_any_number_of_limbs(seed):
    choices = [0, 0, 1, -1, 2**32 - 1, 2**32 - 1, 2**32, -(2**32), 2**62, -(2**62), -(2**63)]
    for _ in range(300):
        pool = random.sample(choices, 4)
        limbs = torch.tensor([random.choice(pool) for _ in range(20)] + [0])
        made = carried(limbs[None])[0]
        assert value(made) == value(limbs)
        assert ((made[:-1] >= 0) & (made[:-1] < 2**32)).all()
    # A carry, and a borrow, through all of them.
    ones = torch.tensor([[1] + [2**32 - 1] * 19 + [0]])
    ones[0, 0] = 2**32
    assert value(carried(ones)[0]) == 2**640
    less = torch.tensor([[-1] + [0] * 19 + [1]])
    assert carried(less)[0].tolist() == [2**32 - 1] * 20 + [0]


def test_words_are_the_exact_sum(seed):
    x = torch.from_numpy(np.ldexp(torch.randn(2, 400).double().numpy(), torch.randint(-1060, 1020, (2, 400)).numpy()))
    words = words_of(x)
    assert words.shape == (2, WORDS)
    assert words[:, TERMS].tolist() == [400, 400]
    for row, made in zip(x.tolist(), words):
        assert Fraction(value(made[:LIMBS])) * Fraction(2) ** UNIT == sum(map(Fraction, row))


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
        for _ in range(60):
            mantissa = random.choice([random.getrandbits(precision), 2**precision - 1, 2 ** (precision - 1), 1])
            whole = (2 * mantissa + 1 << 80) + random.choice([-1, 0, 1])
            lowest = round(torch.tensor(torch.finfo(dtype).smallest_normal, dtype=torch.float64).log2().item())
            exponent = random.randint(max(UNIT, lowest - 90 - 2 * precision), -lowest - 70)
            exact = Fraction(random.choice([-1, 1]) * whole) * Fraction(2) ** exponent
            integer = int(exact / Fraction(2) ** UNIT)
            limbs = [integer >> (32 * i) & (2**32 - 1) for i in range(LIMBS - 1)]
            limbs.append(integer >> (32 * (LIMBS - 1)))
            words = torch.tensor([*limbs, 0, 0, 0, 1])
            wanted = torch.tensor(round_exact(exact, format), dtype=torch.float64).to(dtype)
            assert same_bits(round_words(words, dtype), wanted)
            assert same_bits(kernels.rounded(words[None], dtype)[0], wanted)
