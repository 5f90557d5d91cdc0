"""AMSGrad under narrow states against float64 over 6,000 steps: `python -m benchmarks.bench_running_maximum`."""

import argparse
import dataclasses

import torch

import halfulp as hu
from halfulp.optim import State

from ._results import Result, Table, save

TEXT = """AdamW with amsgrad=True (lr 1, betas .9 and .999, eps 1e-8) on float32 weights, Gaussian gradients with mean \
0.3: the mean step of the last tenth, divided by float64's on the same gradients, of elements whose gradients are all \
alike, and of 31 elements of every block of 32 whose gradients are a 30,000th of the first one's. Storages that \
hu.optim refuses were measured under the same rule without the word that the third state is a running maximum."""
BLOCK, ROWS, STEPS, EPS, SMALL = 32, 64, 6000, 1e-8, 1 / 30_000
NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
BF16, F32 = torch.bfloat16, torch.float32
NEAREST = State(BF16, "nearest")
STORAGES = {
    "float32 throughout": (F32, F32, F32),
    "bfloat16 throughout": (BF16, BF16, BF16),
    "8 bits throughout": ("8bit", "8bit", "8bit"),
    "bfloat16, but the maximum float32": (BF16, BF16, F32),
    "8 bits, but v float32": ("8bit", F32, "8bit"),
    "bfloat16, but v float32": (BF16, F32, BF16),
    "by default: bfloat16, v float32, the maximum to nearest": (BF16, F32, NEAREST),
    "8 bits, v float32, the maximum bfloat16 to nearest": ("8bit", F32, NEAREST),
}
WITHIN = 0.01


class Undeclared(hu.optim.AdamW):
    """AdamW whose rule does not say that a state is a running maximum, so that any storage is taken."""

    def rule(self, group: dict) -> hu.optim.UpdateRule:
        """Return AdamW's rule with that word left out."""
        rule = super().rule(group)
        return dataclasses.replace(rule, states=tuple(dataclasses.replace(s, maximum_of=None) for s in rule.states))


def is_taken(choice: tuple) -> bool:
    """Whether hu.optim takes a storage under amsgrad."""
    parameter = torch.nn.Parameter(torch.zeros(ROWS, BLOCK, dtype=F32))
    try:
        hu.optim.AdamW([parameter], amsgrad=True, state_dtype=dict(zip(NAMES, choice)))
    except ValueError:
        return False
    return True


def mean_steps(ratio: float, steps: int) -> dict[str, tuple[float, float]]:
    """For each storage the mean of the last steps over float64's, and the bytes of its states per element.

    Args:
        ratio: the size of gradients over that of their block's first one.
        steps: how many.
    """
    torch.manual_seed(0)
    options = {"lr": 1.0, "weight_decay": 0.0, "eps": EPS, "amsgrad": True, "report_interval": 0}
    parameters = [torch.nn.Parameter(torch.zeros(ROWS, BLOCK, dtype=F32)) for _ in STORAGES]
    optimizers = [
        Undeclared([parameter], state_dtype=dict(zip(NAMES, choice)), **options)
        for parameter, choice in zip(parameters, STORAGES.values())
    ]
    size = torch.full((BLOCK,), ratio, dtype=F32)
    size[0] = 1.0
    m, v, top, exact = torch.zeros(4, ROWS, BLOCK, dtype=torch.float64)
    for step in range(1, steps + 1):
        gradient = size * (torch.randn(ROWS, BLOCK, dtype=F32) + 0.3)
        if step == steps - steps // 10 + 1:
            starts, exact = [parameter.detach().double() for parameter in parameters], torch.zeros_like(exact)
        for parameter, optimizer in zip(parameters, optimizers):
            parameter.grad = gradient
            optimizer.step()
        wide = gradient.double()
        m, v = 0.9 * m + 0.1 * wide, 0.999 * v + 0.001 * wide * wide
        top = torch.maximum(top, v)
        exact -= m / (1 - 0.9**step) / ((top / (1 - 0.999**step)).sqrt() + EPS)
    found = {}
    for name, parameter, optimizer, start in zip(STORAGES, parameters, optimizers, starts):
        moved = parameter.detach().double() - start
        held = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
        size_of = sum(tensor.nbytes for tensor in held) / parameter.numel()
        found[name] = float(moved[:, 1:].sum() / exact[:, 1:].sum()), size_of
    return found


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    columns = {"storage": "", "bytes": ".2f", "alike": ".4f", "small": ".4f", "taken": "", "bar": ""}
    table = Table("Mean step under AMSGrad, in units of float64's", columns)
    alike, small = mean_steps(1.0, steps), mean_steps(SMALL, steps)
    for name, choice in STORAGES.items():
        steps_kept, taken = (alike[name][0], small[name][0]), is_taken(choice)
        bar = {"bar": f"within {WITHIN:g} of 1", "met": all(abs(kept - 1) <= WITHIN for kept in steps_kept)}
        cells = {"storage": name, "bytes": alike[name][1], "alike": steps_kept[0], "small": steps_kept[1]}
        table.add(**cells, taken=taken, **(bar if taken else {}))
    save(
        Result(
            "running_maximum",
            "AMSGrad under narrow states",
            TEXT,
            "python -m benchmarks.bench_running_maximum",
            tables=[table],
        )
    )


if __name__ == "__main__":
    main()
