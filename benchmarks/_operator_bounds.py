"""The stated error bounds of MCTensors' arithmetic, and the worst errors that random operands show.

Errors are against exact rationals, of functions against mpmath; operands have digits below a float64's and gaps, and
half of the sums cancel, some to their last bits.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch

from halfulp.mctensor import MCTensor
from halfulp.mctensor._encode import compute_exact_values

from ._results import Table

TWO = ((torch.bfloat16, 2), (torch.float32, 2), (torch.float64, 2))
MORE = ((torch.float32, 3), (torch.float64, 3), (torch.float64, 4))
PRECISION = {torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
# Names in torch and mpmath, and the interval that operands are drawn from.
FUNCTIONS = {
    "exp": (-8, 8),
    "log": (2.0**-8, 2.0**8),
    "log1p": (-0.9, 8),
    "expm1": (-8, 8),
    "sin": (-8, 8),
    "cos": (-8, 8),
    "tanh": (-4, 4),
    "asinh": (-8, 8),
    "sigmoid": (-8, 8),
}


class Bound(NamedTuple):
    """One line of the page: how many u^2 for two components, and how many bits short of n p for more."""

    operation: str
    squares: float | None
    short: int
    operands: int
    function: Callable
    reference: Callable


def exact(x: MCTensor) -> list[Fraction | float]:
    """Every element's exact value, flattened."""
    return compute_exact_values(x.components, x.scale)


def _sigmoid(x):
    import mpmath

    return 1 / (1 + mpmath.exp(-x))


def _square_root(x):
    import mpmath

    return mpmath.sqrt(x)


ARITHMETIC = (
    Bound("+ -", 3, 4, 2, lambda a, b: a + b, lambda a, b: a + b),
    Bound("*", 5, 4, 2, lambda a, b: a * b, lambda a, b: a * b),
    Bound("/", 15, 4, 2, lambda a, b: a / b, lambda a, b: a / b),
    Bound("sqrt", 4, 4, 1, torch.sqrt, _square_root),
)
PLAIN = Bound("+ with a plain tensor", 2, 4, 2, lambda a, b: a + b.components[0], lambda a, b: a + b)


def _operands(dtype: torch.dtype, count: int, low: float, high: float, size: int) -> MCTensor:
    """Half with digits to the last, half with a gap behind the first component."""
    first = (torch.rand(size, dtype=torch.float64) * (high - low) + low).to(dtype).double()
    bits = PRECISION[dtype]
    rest = torch.rand(size, dtype=torch.float64) - 0.5
    near, far = rest * 2.0**-bits, rest * 2.0 ** -(bits * count - 4)
    gapped = torch.arange(size) % 2 == 0
    return MCTensor.encode(MCTensor.from_components([first, first * torch.where(gapped, far, near)]), count, dtype)


def worst(bound: Bound, kinds: tuple, low: float, high: float, size: int) -> float:
    """The largest error of some formats, as a multiple of the bound."""
    import mpmath

    largest = 0.0
    for dtype, count in kinds:
        bits = PRECISION[dtype]
        a, b = (_operands(dtype, count, low, high, size) for _ in range(2))
        b = b * (torch.arange(size) % 4 - 1.5).sign().to(dtype)
        if bound.operation == "+ -":
            b = torch.where(torch.arange(size) % 8 == 0, -a * (1 + 2.0 ** -(bits - 4)), b)
        if bound is PLAIN:
            b = MCTensor.encode(b.components[0], count, dtype)
        given = (a, b)[: bound.operands]
        two = count == 2 and bound.squares is not None
        allowed = bound.squares * 2.0 ** (-2 * bits) if two else 2.0 ** (bound.short - count * bits)
        for found, *values in zip(exact(bound.function(*given)), *map(exact, given)):
            if bound.reference is not _square_root and bound.operation not in FUNCTIONS:
                wanted = bound.reference(*map(Fraction, values))
                error = abs(Fraction(found) - wanted) / abs(wanted) if wanted else Fraction(0)
            else:
                with mpmath.workdps(90):
                    wanted = bound.reference(*(mpmath.mpf(v.numerator) / v.denominator for v in map(Fraction, values)))
                    found = Fraction(found)
                    error = abs(mpmath.mpf(found.numerator) / found.denominator - wanted) / abs(wanted)
            largest = max(largest, float(error) / allowed)
    return largest


def table(size: int = 64) -> Table:
    """Every line of the page with the worst errors found."""
    import mpmath

    columns = {
        "operation": "",
        "2 components": "",
        "3 and 4 components": "",
        "worst of 2": ".2f",
        "worst of more": ".2f",
    }
    rows = Table("Error bounds", columns | {"met": ""}, note="Worst errors as multiples of the bound beside.")
    for bound in (*ARITHMETIC, PLAIN):
        two, more = worst(bound, TWO, 0.25, 4, size), worst(bound, MORE, 0.25, 4, size)
        cells = {"2 components": f"{bound.squares:g} u²", "3 and 4 components": f"2^-(np - {bound.short})"}
        rows.add(operation=bound.operation, **cells, **_found(two, more))
    for name, (low, high) in FUNCTIONS.items():
        reference = _sigmoid if name == "sigmoid" else getattr(mpmath, name)
        bound = Bound(name, 64, 10, 1, getattr(torch, name), reference)
        two, more = worst(bound, TWO, low, high, size), worst(bound, MORE, low, high, size)
        cells = {"2 components": "2^-(2p - 6)", "3 and 4 components": "2^-(np - 10)"}
        rows.add(operation=name, **cells, **_found(two, more))
    return rows


def _found(two: float, more: float) -> dict:
    return {"worst of 2": two, "worst of more": more, "met": max(two, more) <= 1}


def products(size: int = 24) -> Table:
    """Matrix products against exact rationals, relative to |A||B|."""
    columns = {"operation": "", "bound": "", "worst": ".2f", "met": ""}
    rows = Table("Error bounds of products", columns)
    for dtype, bits in ((torch.float64, 104), (torch.float32, 48)):
        a, b = (_operands(dtype, 2, -4, 4, size * size).reshape(size, size) for _ in range(2))
        left, right = ([[Fraction(v) for v in exact(row)] for row in x] for x in (a, b.t().contiguous()))
        largest = 0.0
        for row, found in zip(left, a @ b):
            for column, value in zip(right, exact(found)):
                terms = [x * y for x, y in zip(row, column)]
                largest = max(largest, float(abs(Fraction(value) - sum(terms)) / sum(map(abs, terms))) * 2.0**bits)
        name = f"matmul, two {str(dtype).removeprefix('torch.')}"
        rows.add(operation=name, bound=f"2^-{bits} |A||B|", worst=largest, met=largest <= 1)
    return rows
