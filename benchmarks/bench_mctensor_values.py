"""Every element-wise function of MCTensors against mpmath: `python -m benchmarks.bench_mctensor_values`."""

import argparse
import random

from ._harness import set_threads
from ._results import Result, Table, save, show

COLUMNS = {"function": "", "components": "", "values": ",", "largest error in bounds": ".3g", "wrong": ",", "met": ""}
TEXT = """Random arguments over the whole domain and hard ones (multiples of pi/2, near integers, subnormal numbers, \
components with gaps, the ends of the range) of every function that `halfulp.arithmetic` has and of those made of \
them, against mpmath or rational arithmetic. An error is in units of the bound that docs/mctensor.md states, four \
smallest subnormals included; wrong is what is beyond it, or not finite where the value fits."""


def table(count: int, seed: int) -> Table:
    """One row for a function and a kind of components."""
    import mpmath
    from tests.mctensor.function_values import CASES, KINDS, drawn, judged

    from halfulp.kernels import engine

    random.seed(seed)
    made = Table("functions of MCTensors against mpmath", COLUMNS)
    with mpmath.workprec(400), engine("reference"):
        for name, case in CASES.items():
            for dtype, components in KINDS:
                worst, wrong = 0.0, []
                for _ in range(count // 20):
                    operands = drawn(case, (dtype, components), 20)
                    largest, lines = judged(name, operands, case.call(*operands))
                    worst, wrong = max(worst, largest), wrong + lines
                for line in wrong[:3]:
                    print(line, flush=True)
                made.add(
                    **{"function": name, "components": f"{components} x {dtype}", "values": count // 20 * 20},
                    **{"largest error in bounds": worst, "wrong": len(wrong), "bar": "0 wrong", "met": not wrong},
                )
    return made


def main() -> None:
    """Everything; --count makes a run of another length, which is saved where it is not shorter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="values of each function and kind")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    set_threads(1)
    result = Result(
        "mctensor_values",
        "Functions of MCTensors",
        TEXT,
        "python -m benchmarks.bench_mctensor_values",
        tables=[table(chosen.count, chosen.seed)],
    )
    if chosen.count >= 200:
        save(result)
    else:
        show(result)


if __name__ == "__main__":
    main()
