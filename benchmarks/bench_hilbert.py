"""Hilbert matrices solved in components, against exact rationals: `python -m benchmarks.bench_hilbert`."""

import argparse
from fractions import Fraction

from ._harness import set_threads
from ._results import Result, Table, save

SIZES = (12, 20, 40)
COLUMNS = {
    "problem": "",
    "N": "",
    "components": "",
    "bits": "",
    "condition": "",
    "solved to": ".1f",
    "true digits": ".1f",
    "allowed": ".1f",
    "bar": "",
    "met": "",
}
TEXT = """The Hilbert matrix 1/(i + j + 1) and a right-hand side of ones (for lstsq with two rows repeated), entered \
as fractions. "solved to" is minus log2 of the largest error of the solution beside its largest entry, against the \
solution in 4,000 bits of the matrix as its components hold it; for Cholesky, of L L^T beside the matrix. "true \
digits" is the same beside the solution of the true Hilbert matrix in exact rationals, and "allowed" is what the \
rounding of the matrix to its components leaves of that: bits minus log2 of the condition, |a| |a^-1| in the maximum \
norm."""
FORMS = ((2, "float32"), (2, "float64"), (3, "float64"), (4, "float64"))


def inverse_of_hilbert(size: int) -> list[list[Fraction]]:
    """Of the true matrix, whose entries are integers, by Choi's formula (1983)."""
    from math import comb

    def entry(i: int, j: int) -> int:
        left, right = comb(size + i - 1, size - j), comb(size + j - 1, size - i)
        return (-1) ** (i + j) * (i + j - 1) * left * right * comb(i + j - 2, i - 1) ** 2

    return [[Fraction(entry(i, j)) for j in range(1, size + 1)] for i in range(1, size + 1)]


def exact(x) -> list[list[Fraction]]:
    """An MCTensor's values."""
    rows, columns = x.shape
    parts = [part.tolist() for part in x.components]
    return [[sum(Fraction(part[i][j]) for part in parts) for j in range(columns)] for i in range(rows)]


def bits_of(found: list[list[Fraction]], wanted: list[list[Fraction]]) -> float:
    """Minus log2 of the largest error beside the largest entry."""
    import mpmath

    pairs = [(x, y) for left, right in zip(found, wanted, strict=True) for x, y in zip(left, right, strict=True)]
    ratio = max(abs(x - y) for x, y in pairs) / max(abs(y) for _, y in pairs)
    return float(-mpmath.log(mpmath.mpf(ratio.numerator) / ratio.denominator, 2)) if ratio else float("inf")


def solution(a: list[list[Fraction]], b: list[list[Fraction]]) -> list[list[Fraction]]:
    """a^-1 b in 4,000 bits, as fractions."""
    import mpmath

    with mpmath.workprec(4000):
        left, right = (
            mpmath.matrix([[mpmath.mpf(x.numerator) / x.denominator for x in row] for row in m]) for m in (a, b)
        )
        found = left**-1 * right
        whole = [[int(mpmath.nint(mpmath.ldexp(x, 2000))) for x in found[i, :]] for i in range(found.rows)]
    return [[Fraction(x, 2**2000) for x in row] for row in whole]


def product(a: list[list[Fraction]], b: list[list[Fraction]]) -> list[list[Fraction]]:
    """a b."""
    columns = list(zip(*b, strict=True))
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in columns] for row in a]


def rows_of(size: int, components: int, dtype: str) -> list[dict]:
    """Every problem of one matrix."""
    import math

    import torch

    import halfulp as hu

    entries = [[Fraction(1, i + j + 1) for j in range(size)] for i in range(size)]
    kind = getattr(torch, dtype)
    a = hu.MCTensor.encode(entries, components, kind)
    b = hu.MCTensor.encode(torch.ones(size, 1, dtype=kind), components)
    held, ones, true = exact(a), exact(b), inverse_of_hilbert(size)
    identity = [[Fraction(i == j) for j in range(size)] for i in range(size)]
    norms = [max(sum(abs(x) for x in row) for row in m) for m in (entries, true)]
    condition = math.log2(norms[0]) + math.log2(norms[1])
    tall, right = torch.cat([a, a[:2]]), torch.cat([b, b[:2]])
    problems = {
        "solve": (lambda: torch.linalg.solve(a, b), solution(held, ones), product(true, ones)),
        "inv": (lambda: torch.linalg.inv(a), solution(held, identity), true),
        "lstsq": (lambda: torch.linalg.lstsq(tall, right).solution, solution(held, ones), product(true, ones)),
        "cholesky": (lambda: torch.linalg.cholesky(a), held, None),
    }
    bits = components * {"float32": 24, "float64": 53}[dtype]
    rows = []
    for name, (call, wanted, truth) in problems.items():
        row = {"problem": name, "N": size, "components": f"{components} {dtype}", "bits": bits}
        row |= {"condition": f"2^{condition:.0f}", "bar": f"solved to {bits - 4} bits"}
        try:
            found = exact(call())
        except torch.linalg.LinAlgError as error:
            rows.append(
                {**row, "met": False if condition < bits - 10 else None, "bar": f"refused: {str(error).split('.')[0]}"}
            )
            continue
        found = product(found, [list(column) for column in zip(*found, strict=True)]) if truth is None else found
        solved = bits_of(found, wanted)
        row |= {"solved to": solved, "met": solved >= bits - 4}
        if truth is not None:
            row |= {"true digits": bits_of(found, truth), "allowed": bits - condition}
        rows.append(row)
    return rows


def main() -> None:
    """Every size, form and problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="rows of the matrices")
    sizes = parser.parse_args().sizes
    set_threads(1)
    table = Table("Hilbert matrices", COLUMNS)
    for size in sizes:
        for components, dtype in FORMS:
            for row in rows_of(size, components, dtype):
                table.add(**row)
    save(Result("hilbert", "Hilbert matrices", TEXT, "python -m benchmarks.bench_hilbert", tables=[table]))


if __name__ == "__main__":
    main()
