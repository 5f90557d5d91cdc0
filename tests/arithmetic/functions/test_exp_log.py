"""Elementary functions of expansions against mpmath, and both engines' bits."""

import math
import random

import mpmath
import pytest
import torch

from halfulp.arithmetic import pointwise
from halfulp.kernels import engine, same_bits

from ..expansion_values import PRECISION, SMALLEST, assert_canonical, followed, nearest, stacked

ORACLE = {name: getattr(mpmath, name) for name in ("exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "asinh")}
ORACLE["sigmoid"] = lambda x: 1 / (1 + mpmath.exp(-x))


def signed(x: float) -> float:
    return random.choice((1, -1)) * x


def head(name: str, reach: float) -> float:
    """An argument where the function is hard: near zeros, at the ends, everywhere between."""
    tiny, middle = signed(2.0 ** random.uniform(-reach / 4, 0)), signed(random.uniform(0, 8))
    if name in ("exp", "expm1", "tanh", "sigmoid"):
        return random.choice((tiny, middle, random.uniform(-0.65, 0.65) * reach))
    if name == "log":
        return random.choice((2.0 ** random.uniform(-reach, reach), 1 + signed(2.0 ** random.uniform(-20, -1)), 1.0))
    if name == "log1p":
        return random.choice((tiny * 0.9, 2.0 ** random.uniform(0, reach)))
    if name in ("sin", "cos"):
        turns = random.randint(-300_000, 300_000) * math.pi / 2
        return random.choice((tiny, middle, signed(random.uniform(0, 2.0**20)), turns))
    return random.choice((tiny, middle, signed(2.0 ** random.uniform(0, reach))))


def arguments(name: str, n: int, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, ...]:
    reach = {torch.float64: 1000, torch.float16: 12}.get(dtype, 120)
    rows = []
    while len(rows) < count:
        row = followed([nearest(head(name, reach), dtype)], n, dtype)
        value = sum(row)
        if math.isfinite(value) and (name not in ("log", "log1p") or value > -0.99):
            rows.append(row)
    return stacked(rows, dtype)


def limit(n: int, dtype: torch.dtype) -> float:
    p = PRECISION[dtype]
    if n == 1:  # one rounding of what float64 made, or float64's own few
        return 2.0 ** -(p - 4) if dtype == torch.float64 else 2.0 ** -(p - 1)
    return 2.0 ** -(2 * p - 6) if n == 2 else 2.0 ** -(n * p - 10)


def check(name: str, x: tuple, got: tuple) -> None:
    n, dtype = len(x), x[0].dtype
    with mpmath.workprec(700):
        for row, parts in zip(zip(*(p.double().tolist() for p in x)), zip(*(p.double().tolist() for p in got))):
            wanted = ORACLE[name](sum(map(mpmath.mpf, row), mpmath.mpf(0)))
            if abs(wanted) > float(torch.finfo(dtype).max):
                assert not math.isfinite(parts[0])
                continue
            error = abs(sum(map(mpmath.mpf, parts), mpmath.mpf(0)) - wanted)
            assert error <= limit(n, dtype) * abs(wanted) + 4 * mpmath.mpf(2) ** SMALLEST[dtype], (row, parts)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", ORACLE)
def test_two_components_within_the_bound(name, n, dtype, seed):
    x = arguments(name, n, dtype, 120)
    got = pointwise(name, x, components=n, dtype=dtype)
    assert_canonical(got)
    check(name, x, got)
    with engine("reference"):
        wanted = pointwise(name, x, components=n, dtype=dtype)
    assert all(same_bits(a, b) for a, b in zip(got, wanted))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("name", ORACLE)
def test_more_components_within_the_bound(name, n, seed):
    """By the reference: the machine code of these takes seconds to compile, and one of them is compared below."""
    x = arguments(name, n, torch.float64, 60)
    with engine("reference"):
        got = pointwise(name, x, components=n, dtype=torch.float64)
    check(name, x, got)


def test_three_components_compiled_and_reference_agree(seed):
    x = arguments("exp", 3, torch.float64, 100)
    got = pointwise("exp", x, components=3, dtype=torch.float64)
    with engine("reference"):
        wanted = pointwise("exp", x, components=3, dtype=torch.float64)
    assert all(same_bits(a, b) for a, b in zip(got, wanted))


SPECIAL = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, -2.0], dtype=torch.float64)


@pytest.mark.parametrize("name", ORACLE)
def test_special_values_are_torchs(name):
    got = pointwise(name, (SPECIAL, torch.zeros_like(SPECIAL)), components=2, dtype=torch.float64)
    wanted = getattr(torch, name)(SPECIAL)
    odd = ~torch.isfinite(wanted) | (wanted == 0)
    assert same_bits(torch.where(odd, got[0], 0.0), torch.where(odd, wanted, 0.0))
    assert torch.allclose(got[0], wanted, rtol=1e-15, equal_nan=True)
    assert not bool(got[1][odd].any())


def test_powers(seed):
    bases = [random.choice((random.uniform(0.1, 20), 1 + random.uniform(-1, 1) * 2.0**-30)) for _ in range(200)]
    exponents = [random.choice((random.uniform(-60, 60), float(random.randint(-9, 9)))) for _ in range(200)]
    x = stacked([followed([base], 2, torch.float64) for base in bases], torch.float64)
    y = stacked([followed([value], 2, torch.float64) for value in exponents], torch.float64)
    got = pointwise("pow", x, y, components=2, dtype=torch.float64)
    with mpmath.workprec(400):
        for k in range(200):
            base, power = (sum(mpmath.mpf(float(p[k])) for p in parts) for parts in (x, y))
            wanted = base**power
            assert abs(sum(mpmath.mpf(float(p[k])) for p in got) - wanted) <= mpmath.mpf(2) ** -100 * wanted


def test_special_powers_are_torchs():
    grid = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 0.5, -0.5, math.inf, -math.inf, math.nan])
    a, b = (t.flatten().double() for t in torch.meshgrid(grid, grid, indexing="ij"))
    zero = torch.zeros_like(a)
    got = pointwise("pow", (a, zero), (b, zero), components=2, dtype=torch.float64)[0]
    wanted = torch.pow(a, b)
    odd = ~torch.isfinite(wanted) | (wanted == 0)
    assert same_bits(torch.where(odd, got, 0.0), torch.where(odd, wanted, 0.0))
    assert torch.allclose(got, wanted, rtol=1e-15, equal_nan=True)
