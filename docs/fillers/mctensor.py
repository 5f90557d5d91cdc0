"""MCTensor: bounds, digits and speed."""

import re

from ._places import place
from ._tables import all_tables, benchmark_rows, benchmark_table, grid, measured, paragraph


@place
def mctensor_speed() -> str:
    """MCTensor's operations beside torch's and the rivals'."""
    return benchmark_table("mctensor", "MCTensor: time", ("operation", "x torch", "MCTensor", "torch-dd"))


@place
def mctensor_bounds() -> str:
    """The stated bounds of MCTensor's arithmetic, beside the worst errors found."""
    columns = ("operation", "2 components", "3 and 4 components", "worst of 2", "worst of more")
    return benchmark_table("mctensor_operators", "Error bounds", columns)


@place
def mctensor_products() -> str:
    """The same of matrix products."""
    return benchmark_table("mctensor_operators", "Error bounds of products", ("operation", "bound", "worst"))


@place
def mctensor_digits() -> str:
    """Functions and operators against their bounds."""
    return "\n\n".join(filter(None, (_mctensor_values(), _mctensor_operators(), _mctensor_beyond())))


def _mctensor_values() -> str:
    """Functions over their whole domains, by kind of components."""
    rows = benchmark_rows("mctensor_values", "functions")
    found = []
    for kind in dict.fromkeys(row["components"] for row in rows):
        here = [row for row in rows if row["components"] == kind]
        worst = max(row["largest error in bounds"] for row in here)
        values, wrong = (sum(row[name] for row in here) for name in ("values", "wrong"))
        found.append([kind.replace("torch.", ""), str(len(here)), f"{values:,}", f"{worst:.2f}", str(wrong)])
    return _introduced(
        "Functions over their whole domains, against mpmath or rational arithmetic "
        "(`python -m benchmarks.bench_mctensor_values`): random arguments, multiples of pi/2, near integers, "
        "subnormal numbers, gaps, the ends of the range.",
        grid(["components", "functions", "values", "largest error in bounds", "wrong"], found),
    )


def _introduced(text: str, *parts: str) -> str:
    """A paragraph and what follows it."""
    return "\n\n".join([paragraph(text), *filter(None, parts)])


def _mctensor_operators() -> str:
    """op_db's operators: how many situations are what, by format and gradients."""
    rows = benchmark_rows("mctensor_operators", "Operators by format")
    kinds = ("within", "plain", "counted", "refused", "fails", "cut", "outside", "NaN", "differs")
    found = []
    for pair in dict.fromkeys((row["format"], row["gradients"]) for row in rows):
        here = [row for row in rows if (row["format"], row["gradients"]) == pair]
        found.append([*pair, *(f"{sum(row[kind] for row in here):,}" for kind in kinds)])
    return _introduced(
        "The floating operators of torch's `op_db`, with operands that have digits in all components, with plain ones "
        "beside them, with a constant, with a gap between components and with one far element, against four float64 "
        "components (`python -m benchmarks.bench_mctensor_operators`; what each word means stands in "
        "[its measurements](benchmarks/mctensor-operators.md)). What is counted is an operator in one of these five "
        "cases.",
        grid(["format", "gradients", *kinds], found),
        _how_many_operators(),
    )


def _how_many_operators() -> str:
    result = measured("mctensor_operators")
    said = re.search(r"\d+ operators with floating operands.*?(?=, on \d)", result.text) if result else None
    return paragraph(f"These are {said[0]}.") if said else ""


def _mctensor_beyond() -> str:
    """What is beyond the bound, and why."""
    grouped: dict[tuple[str, str], dict[str, dict]] = {}
    for row in benchmark_rows("mctensor_operators", "Beyond"):
        here = grouped.setdefault((row["operator"], row["why"]), {"format": {}, "case": {}, "gradients": {}})
        for column, seen in here.items():
            seen[row[column]] = None
    found = [
        [operator, *(", ".join(here[name]) for name in ("format", "case", "gradients")), why]
        for (operator, why), here in sorted(grouped.items())
    ]
    return _introduced(
        "What is beyond the bound there:", grid(["operator", "formats", "cases", "gradients", "why"], found)
    )


@place
def mctensor_experiments() -> str:
    """The paper's experiments."""
    return all_tables("mctensor_experiments")
