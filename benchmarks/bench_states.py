"""8-bit states against float64 over 1,000 AdamW steps, beside torchao's: `python -m benchmarks.bench_states`."""

import argparse
import os
from collections.abc import Callable

import torch

import halfulp as hu

from ._results import Result, Table, save

TEXT = """AdamW (lr 1, eps 1e-8) on float32 weights over 1,000 steps of Gaussian gradients with mean 0.3: the mean \
displacement of 31 elements of every block of 32, divided by float64's on the same gradients. 1 is all of it. First \
their gradients are smaller than those of the block's first element by a ratio; then all are alike, but that one gets \
a single spike at step 10. Codes reach down to 5e-7 of a block's largest moment: beyond a ratio of 1e-4 and a finite \
spike of 1e6 no bar is set."""
BLOCK, ROWS, STEPS, EPS = 32, 256, 1000, 1e-8
RATIOS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
SPIKES = (1e3, 1e4, 1e6, 1e12, float("inf"))
OURS, PEER = "halfulp 8-bit", "torchao 8-bit"
LEAST_RATIO, MOST_SPIKE, WITHIN = 1e-4, 1e6, 0.05


def displacement(make: Callable, ratio: float = 1.0, spike: float = 0.0, steps: int = STEPS) -> float:
    """Mean displacement over float64's, of elements beside one that is 1 / ratio times as large, or has one spike."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(ROWS, BLOCK, dtype=torch.float32))
    optimizer = make([parameter])
    size = torch.full((BLOCK,), ratio, dtype=torch.float32)
    size[0] = 1.0
    m, v, exact = torch.zeros(3, ROWS, BLOCK, dtype=torch.float64)
    for step in range(1, steps + 1):
        gradient = size * (torch.randn(ROWS, BLOCK, dtype=torch.float32) + 0.3)
        if spike and step == 10:
            gradient[:, 0] = spike
        parameter.grad = gradient
        optimizer.step()
        wide = gradient.double()
        m, v = 0.9 * m + 0.1 * wide, 0.999 * v + 0.001 * wide * wide
        exact -= m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + EPS)
    return float(parameter.detach().double()[:, 1:].sum() / exact[:, 1:].sum())


def contenders() -> dict[str, Callable]:
    """halfulp's 8-bit states, and torchao's where it is installed."""
    options = {"lr": 1.0, "weight_decay": 0.0, "eps": EPS}
    made = {OURS: lambda given: hu.optim.AdamW(given, state_dtype="8bit", report_interval=0, **options)}
    # It is the arithmetic that is compared: compiled on the processor, it is the same and starts slowly.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        return made
    made[PEER] = lambda given: AdamW8bit(given, block_size=BLOCK, **options)
    return made


def judged(what: str, value: float, kept: float) -> dict:
    """The bar of a row; none is set beyond the codes' range."""
    if value < LEAST_RATIO or (what == "spike" and MOST_SPIKE < value < float("inf")):
        return {}
    return {"bar": f"within {WITHIN:g} of 1", "met": abs(kept - 1) <= WITHIN}


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    made = contenders()
    columns = {"elements": "", "size": "", **dict.fromkeys(made, ".3f"), "bar": ""}
    table = Table("Displacement kept by 8-bit states", columns)
    said = {"ratio": "gradient / block's largest", "spike": "after a spike of"}
    for what, values in (("ratio", RATIOS), ("spike", SPIKES)):
        for value in values:
            found = {name: displacement(make, **{what: value}, steps=steps) for name, make in made.items()}
            table.add(elements=said[what], size=f"{value:g}", **found, **judged(what, value, found[OURS]))
            print(table.rows[-1], flush=True)
    save(Result("states", "8-bit states", TEXT, "python -m benchmarks.bench_states", tables=[table]))


if __name__ == "__main__":
    main()
