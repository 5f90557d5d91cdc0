"""Random programs whose gradients keep every bit: `python -m benchmarks.bench_gradient_programs`."""

import argparse

from ._results import Result, Table, save

TEXT = """Random float32 programs (tests/laws/gradient_programs.py): three to fourteen functions and layers of about \
seventy kinds, which read vectors, matrices, numbers and parameters again and again; inputs that want gradients or \
not, calls of a program on its own results, checkpoints, custom Functions and writes in place. Gradients of all \
parameters and inputs under equal and random exponents, in two measured iterations and four more, of which those whose \
graph is known run without a region; a program counts where every bit is that of plain autograd. "By views" is the \
control: the same exponents, moved in nodes of their own instead of in hooks of the nodes that read a tensor."""
COUNT, CONTROL, SEED = 2000, 300, 70421


def exact(count: int, seed: int) -> int:
    """How many of the programs of a seed keep every bit."""
    import random

    from tests.laws.gradient_programs import differs

    chooser = random.Random(seed)
    return sum(not differs(chooser.randrange(2**31)) for _ in range(count))


def main() -> None:
    """A row for the programs, and one for the control."""
    import warnings

    import torch

    from halfulp.gradients.eager._region import ArgumentGradientMover

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="programs")
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch, about checkpoints
    table = Table(
        "Random programs", {"gradients are moved": "", "programs": "", "all bits equal": "", "bar": "", "met": ""}
    )
    held = exact(given.count, given.seed)
    row = {"gradients are moved": "by hooks", "programs": given.count, "all bits equal": held}
    table.add(**row, bar="all", met=held == given.count)
    ArgumentGradientMover.can_move_by_hook = lambda self, tensor: False
    row = {"gradients are moved": "by views (control)", "programs": CONTROL}
    table.add(**row, **{"all bits equal": exact(CONTROL, given.seed)})
    title, command = "Gradient exponents of random programs", "python -m benchmarks.bench_gradient_programs"
    save(Result("gradient_programs", title, TEXT, command, tables=[table]))


if __name__ == "__main__":
    main()
