"""8-bit states against float64 over 1,000 AdamW steps, beside torchao's: `python -m benchmarks.bench_states`."""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

import halfulp as hu

BLOCK, ROWS, STEPS = 32, 256, 1000
RATIOS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
SPIKES = (1e3, 1e4, 1e6, 1e12, float("inf"))
SAVED = Path(__file__).parent / "results" / "states.json"


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
        exact -= m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-16)
    return float(parameter.detach().double()[:, 1:].sum() / exact[:, 1:].sum())


def contenders() -> dict[str, Callable]:
    """halfulp's 8-bit states, and torchao's where it is installed."""
    options = {"lr": 1.0, "weight_decay": 0.0, "eps": 1e-16}
    made = {"halfulp 8-bit": lambda given: hu.optim.AdamW(given, state_dtype="8bit", report_interval=0, **options)}
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        return made
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    made["torchao 8-bit"] = lambda given: AdamW8bit(given, block_size=BLOCK, **options)
    return made


def main() -> None:
    """Print the table and keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    rows = []
    for what, values in (("ratio", RATIOS), ("spike", SPIKES)):
        for value in values:
            found = {name: displacement(make, **{what: value}, steps=steps) for name, make in contenders().items()}
            rows.append({"what": what, "value": str(value), **found})
            print(rows[-1], flush=True)
    SAVED.write_text(json.dumps({"steps": steps, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
