"""The digits of every operator of op_db on MCTensors: `python -m benchmarks.bench_mctensor_operators`.

Each floating operator of torch.testing's op_db that is neither sparse nor jiterator, in five formats and five cases,
with both ways of keeping gradients, against four float64 components: see _operator_digits.
"""

import argparse
import pickle
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from . import _operator_bounds as bounds
from ._operator_digits import CASES, FORMATS, GRADIENTS, findings, is_random, long_constants
from ._operator_judge import ORDER, VERDICTS, Finding
from ._results import Result, Table, save, show
from .bench_op_coverage import name_of, operators


class Known(NamedTuple):
    """Why something is not within its bound, and in which formats and cases; None for all."""

    why: str
    kinds: tuple[str, ...] | None = None
    cases: tuple[str, ...] | None = None


PYTHON = "torch's Python function takes the logarithm of a plain operand alone, before any operator with an MCTensor"
COMPLEX = "counted; complex results are plain, and sums of the gradient that comes back from them cancel"
CANCELS = "counted; torch's formula of the gradient subtracts nearly equal values, each rounded to the components"
CONDITION = "counted; a condition beyond what float64 and the components hold"
SCALE = "one scale serves a whole float16 tensor, and that of a step holds larger values than the result's"
SHARES = "an element of 2^40 is all of two distances, and its gradient 1 - 1; float64 finds exactly 0"
FAR, GAPS, HALF = ("far element",), ("gaps",), ("2 x fp16",)
# What is not within the bound nor counted, and why; anything else is a defect.
KNOWN = {
    "nn.functional.gaussian_nll_loss": Known(PYTHON, cases=("plain operands",)),
    "stft": Known(COMPLEX),
    "corrcoef": Known("of two points it is 1 or -1, and the gradient is 0 by cancellation: no digit of it is right"),
    "cholesky_inverse": Known(CONDITION, cases=FAR),
    "linalg.lstsq": Known(CONDITION, cases=FAR),
    "linalg.pinv.hermitian": Known(CONDITION, cases=FAR),
    "pinverse": Known(CONDITION, cases=FAR),
    "linalg.matrix_rank.hermitian": Known("counted; the tolerance is the dtype's, not float64's", cases=FAR),
    "norm.inf": Known("a gap beyond float64, not mended: the norm, rounded, equals no operand", ("2 x f32",), GAPS),
    "linalg.pinv.singular": Known("counted; rounded to the components the singular matrix is regular"),
    "logcumsumexp": Known("counted; torch's formula takes logarithms of gradients, which are rounded at each step"),
    "nn.functional.triplet_margin_loss": Known(SHARES, cases=FAR),
    "nn.functional.triplet_margin_with_distance_loss": Known(SHARES, cases=FAR),
    "special.i0e": Known(CANCELS),
    "special.i1e": Known(CANCELS),
    "special.erfcx": Known(SCALE, HALF),
    "special.log_ndtr": Known(SCALE, HALF),
    "linalg.matrix_power": Known(SCALE, HALF, FAR),
    "scatter_reduce.amax": Known(SCALE + ": no operand equals the result, and torch divides by how many do", HALF, FAR),
    "masked.logaddexp": Known("a plain float16 gradient has no scale, and its steps are subnormal", HALF),
    "topk": Known("equal elements: any of them may be taken", ("2 x bf16",)),
}
MISSES = ("fails", "cut", "outside", "NaN", "differs")


def known_of(name: str, kind: str, case: str) -> str:
    """The reason, or nothing."""
    known = KNOWN.get(name)
    if known is None or kind not in (known.kinds or FORMATS) or case not in (known.cases or CASES):
        return ""
    return known.why


def summary(found: dict[str, dict[tuple, Finding]]) -> Table:
    """How many operators are what, in every situation."""
    table = Table(
        "Operators by format, case and gradients",
        {"format": "", "case": "", "gradients": ""} | dict.fromkeys(VERDICTS, "") | {"met": ""},
        note=". ".join(f"{name}: {text}" for name, text in VERDICTS.items()) + ".",
    )
    for kind in FORMATS:
        for case in CASES:
            for gradients in GRADIENTS:
                rows = {name: each[kind, case, gradients] for name, each in found.items() if each}
                counts = Counter(finding.verdict for finding in rows.values())
                missed = [name for name, finding in rows.items() if finding.verdict in MISSES]
                missed = [name for name in missed if not known_of(name, kind, case)]
                cells = {name: counts[name] for name in VERDICTS}
                table.add(format=kind, case=case, gradients=gradients, **cells, met=not missed)
    return table


def missed(found: dict[str, dict[tuple, Finding]]) -> Table:
    """Everything that is neither within its bound nor counted nor refused."""
    columns = {"operator": "", "format": "", "case": "", "gradients": "", "verdict": "", "x bound": ".3g", "where": ""}
    table = Table("Beyond the bound", columns | {"why": ""})
    for name, each in found.items():
        for (kind, case, gradients), finding in each.items():
            if finding.verdict in MISSES:
                situation = {"operator": name, "format": kind, "case": case, "gradients": gradients}
                what = {"verdict": finding.verdict, "x bound": finding.ratio, "where": finding.where}
                table.add(**situation, **what, why=known_of(name, kind, case) or "unknown")
    return table


def constants_table(constants: dict[str, dict[float, str]]) -> Table:
    """Inexact numbers of torch's formulas that lost digits."""
    table = Table("Numbers of formulas with a float64's digits only", {"operator": "", "number": "", "where": ""})
    for name, each in constants.items():
        for number, where in each.items():
            table.add(operator=name, number=repr(number), where=where)
    return table


def every_operator(found: dict[str, dict[tuple, Finding]]) -> Table:
    """One row an operator: the worst of each format, with what went through float64."""
    table = Table("Each operator", {"operator": ""} | dict.fromkeys(FORMATS, "") | {"through float64": ""})
    for name, each in found.items():
        cells, fallbacks = {}, set()
        for kind in FORMATS:
            rows = {key: finding for key, finding in each.items() if key[0] == kind}
            (_, case, gradients), worst = max(rows.items(), key=lambda row: ORDER.index(row[1].verdict))
            fallbacks |= {operator for finding in rows.values() for operator in finding.fallbacks}
            cells[kind] = (
                worst.verdict if worst.verdict in (None, "within") else f"{worst.verdict}: {case}, {gradients}"
            )
        table.add(operator=name, **cells, **{"through float64": ", ".join(sorted(fallbacks))})
    return table


def refusals(found: dict[str, dict[tuple, Finding]]) -> Table:
    """The errors, each once."""
    table = Table("Refused", {"operator": "", "error": ""})
    for name, each in found.items():
        for error in sorted({finding.where for finding in each.values() if finding.verdict == "refused"})[:2]:
            table.add(operator=name, error=error)
    return table


@dataclass
class Progress:
    """What has been found so far: kept in a file by --keep, so that a long run can be taken up again."""

    stated: list[Table] = field(default_factory=list)
    found: dict[str, dict[tuple, Finding]] = field(default_factory=dict)
    constants: dict[str, dict[float, str]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def examine(self, op, most: int, seed: int) -> None:
        """Add one operator."""
        name, began = name_of(op), time.perf_counter()
        self.seen.add(name)
        each = dict(findings(op, most, seed, FORMATS, CASES))
        if any(finding.verdict for finding in each.values()):
            self.found[name] = each
            if numbers := long_constants(op, most, seed):
                self.constants[name] = numbers
        if time.perf_counter() - began > 20:
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        for key, finding in each.items():
            if finding.verdict in MISSES:
                print(name, *key, finding, flush=True)

    def _tables(self) -> list[Table]:
        if not self.found:
            return []
        made = [make(self.found) for make in (summary, missed, refusals, every_operator)]
        return [*made, constants_table(self.constants)]

    def result(self, entries: int, most: int) -> Result:
        """Everything as tables."""
        left = f", the others left out for want of time (of {entries})" if len(self.seen) < entries else ""
        return Result(
            "mctensor_operators",
            "Digits of operators on MCTensors",
            "The stated bounds of the arithmetic, and the worst errors found. "
            f"{len(self.found)} operators with floating operands, of {len(self.seen)} entries of op_db that draw "
            f"nothing{left}, on {most} of torch's own samples each, in five formats and five cases with both ways of "
            "keeping gradients. The reference is the same call on four float64 components, which hold the operands "
            "exactly; the bound is 2^-(bits - 10) of a result and of what it changes by when every operand changes by "
            "its last bit, 2^-(bits - 12) for gradients of all components and 2^-(p - 4) for plain ones, with what "
            "torch's own formula loses of an element in float64, in last bits of the format. What went through "
            "float64, counted, is held to 48 bits. The reference is itself checked: against torch's float64, by its "
            "response to changes of the last bits, and its gradients, to 2^-50, by the slope of its results: torch's "
            "formulas hold numbers of their own as float64.",
            "python -m benchmarks.bench_mctensor_operators",
            tables=[*self.stated, *self._tables()],
        )


def main() -> None:
    """All operators, or those of the given names; the JSON where all ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only operators of these names")
    parser.add_argument("--most", type=int, default=1, help="samples an operator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long, and say how far it came")
    parser.add_argument("--keep", type=Path, help="a file of what was found, from which a second call goes on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    chosen = [op for op in operators() if not is_random(op) and (not options.names or name_of(op) in options.names)]
    random.Random(options.seed).shuffle(chosen)  # what --minutes leaves out is any of them
    progress = pickle.loads(options.keep.read_bytes()) if options.keep and options.keep.exists() else Progress()
    start = time.perf_counter()
    if not options.names and not progress.stated:
        progress.stated = [bounds.table(), bounds.products()]
    for op in chosen:
        if time.perf_counter() - start > 60 * options.minutes:
            break
        if name_of(op) not in progress.seen:
            progress.examine(op, options.most, options.seed)
    if options.keep:
        options.keep.write_bytes(pickle.dumps(progress))
    (show if options.names else save)(progress.result(len(chosen), options.most))


if __name__ == "__main__":
    main()
