"""Operands for tests of expansions: random, cancelling, with gaps, at the ends of the range; and exact values."""

import ctypes
import itertools
import math
import random
import struct
from fractions import Fraction

import torch

PRECISION = {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
SMALLEST = {torch.float64: -1074, torch.float32: -149, torch.bfloat16: -133, torch.float16: -24}


def nearest(value: float, dtype: torch.dtype) -> float:
    """A float64 in a dtype, as torch rounds it: by float32. A tensor for each takes ten times as long."""
    if dtype == torch.float64:
        return value
    value = ctypes.c_float(value).value
    if dtype == torch.float32 or not math.isfinite(value):
        return value
    if dtype == torch.float16:
        try:
            return struct.unpack("<e", struct.pack("<e", value))[0]
        except OverflowError:
            return math.copysign(math.inf, value)
    (word,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.unpack("<f", struct.pack("<I", word + 0x7FFF + (word >> 16 & 1) & 0xFFFF0000))[0]


def half_ulp(value: float, dtype: torch.dtype) -> float:
    """Half the spacing of a dtype's numbers at a value."""
    if value == 0:
        return 0.0
    place = max(math.frexp(value)[1] - PRECISION[dtype], SMALLEST[dtype])
    return math.ldexp(0.5, place)


def canonical(n: int, dtype: torch.dtype, low: int = -60, high: int = 60) -> list[float]:
    """One canonical expansion: full, sparse or with a gap."""
    head = math.ldexp(random.choice((1, -1)) * random.uniform(1, 2), random.randint(low, high))
    return followed([nearest(head, dtype)], n, dtype)


def followed(parts: list[float], n: int, dtype: torch.dtype) -> list[float]:
    """The same leading components, and others behind."""
    parts = list(parts)
    while len(parts) < n:
        half = half_ulp(parts[-1], dtype)
        kind = random.random()
        if kind < 0.1 or half == 0:
            value = 0.0
        elif kind < 0.3:
            value = half * random.choice((1, -1))
        elif kind < 0.5:
            value = half * random.uniform(-1, 1) * 2.0 ** -random.randint(1, 90)
        else:
            value = half * random.uniform(-1, 1)
        value = nearest(value, dtype)
        parts.append(value if abs(value) <= half else 0.0)
    return parts


def opponent(x: list[float], dtype: torch.dtype, reach: int = 60) -> list[float]:
    """A second operand: unrelated, cancelling the leading components, or a power of two off."""
    n, kind = len(x), random.random()
    if kind < 0.4:
        return canonical(n, dtype, -reach, reach)
    if kind < 0.8:
        return followed([-part for part in x[: random.randint(1, n)]], n, dtype)
    factor = 2.0 ** -random.choice((0, 1, 2, PRECISION[dtype] - 1, PRECISION[dtype], PRECISION[dtype] + 1))
    return followed([nearest(x[0] * factor, dtype)], n, dtype)


def stacked(rows: list[list[float]], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Expansions, one a row, as a tuple of components."""
    return tuple(torch.tensor(column, dtype=torch.float64).to(dtype) for column in zip(*rows))


def exact(parts: tuple[torch.Tensor, ...]) -> list[Fraction]:
    """The values of all elements."""
    columns = [part.double().flatten().tolist() for part in parts]
    return [sum(map(Fraction, row), Fraction(0)) for row in zip(*columns)]


def assert_canonical(parts: tuple[torch.Tensor, ...]) -> None:
    """Every component is at most half an ulp of the one before."""
    dtype = parts[0].dtype
    for row in zip(*(part.double().flatten().tolist() for part in parts)):
        for before, behind in itertools.pairwise(row):
            if math.isfinite(before):
                assert abs(behind) <= half_ulp(before, dtype), row
