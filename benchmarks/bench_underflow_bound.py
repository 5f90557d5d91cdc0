"""The bound of policy "underflow-bound", by simulation: `python -m benchmarks.bench_underflow_bound`."""

import argparse

from ._results import Result, Table, save

TEXT = """Random products of matrices (512, K) and (K, 128), K 16, 64 or 256, and gradients of random losses \
(squares, cross-entropy, Huber, binary cross-entropy) with respect to (256, 64) numbers; normal, uniform, Laplace, \
with rows of lognormal size, and half zeros; over 10 and more powers of two. The policy sees the operands and says an \
exponent; then the true gradient, in float64, is rounded to the format at that exponent."""
COUNT, SEED = 1000, 51803
FORMATS = ("fp16", "e5m2")


def main() -> None:
    """A row for each format and kind."""
    import random

    import torch

    from ._underflow_trials import KINDS, SHARE, tried

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="gradients of each kind in each format")
    count = parser.parse_args().count
    torch.set_num_threads(1)
    columns = {"format": "", "gradients of": "", "number": "", "share within": "", "at the limit of overflow": ""}
    table = Table("The underflow bound", {**columns, "largest share": ".4%", "bar": "", "met": ""})
    for number, name in enumerate(FORMATS):
        random.seed(SEED + number)
        torch.manual_seed(SEED + number)
        for kind in KINDS:
            trials = [tried(kind, name) for _ in range(count)]
            free = [one for one in trials if one.zeros <= SHARE or not one.limited]
            row = {"format": name, "gradients of": f"a {kind}", "number": count}
            row |= {"share within": sum(one.zeros <= SHARE for one in trials)}
            row |= {"at the limit of overflow": count - len(free)}
            row |= {"largest share": max((one.zeros for one in free), default=0.0)}
            held = sum(one.held for one in trials)
            table.add(**row, bar=f"all; {held} of {count}", met=held == count)
    table.note = f"""The bound is {SHARE:.1%} of the elements that are not zero. At the limit: where more become zero, \
and the largest would overflow at the next larger exponent. The largest share is that of the others."""
    title, command = "The bound of underflow-bound", "python -m benchmarks.bench_underflow_bound"
    save(Result("underflow_bound", title, TEXT, command, tables=[table]))


if __name__ == "__main__":
    main()
