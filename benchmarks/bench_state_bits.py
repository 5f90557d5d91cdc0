"""AdamW with states of fewer bits beside its float32 self: `python -m benchmarks.bench_state_bits [--steps N]`.

Three seeds, two processes of one thread, three minutes of processor time.
"""

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from ._results import Result, Table, save
from .bench_rules_in_bf16 import SEEDS, train

TITLE = "AdamW with states of 32, 8 and 4 bits, in a training"
TEXT = """The GPT of the task "text" (width 128, so that all matrices are of whole blocks of 128; batches of 16 x 64), \
trained by AdamW (lr 3e-3, weight decay .1) in float32, and again in bfloat16 by `split8` with states of 32, 8 and 4 \
bits, from the same start on the same batches. The loss is of the validation text, in nats per character, \
computed in float32 from the float32 weights. The twin is a float32 run whose start differs by 1e-7 of each weight."""
RUNS = {
    "float32": ("float32", {}),
    "twin": ("twin", {}),
    "split8, float32 states": ("split8", {"state_dtype": "float32"}),
    "split8, 8-bit states": ("split8", {"state_dtype": "8bit"}),
    "split8, 4-bit states": ("split8", {"state_dtype": "4bit"}),
}
BASE = "split8, float32 states"


def main() -> None:
    """Every run, three seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps
    runs = [(name, seed) for name in RUNS for seed in SEEDS]
    updates, options = zip(*(RUNS[name] for name, _ in runs))
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        many = [[value] * len(runs) for value in ("AdamW", steps, 128)]
        found = pool.map(train, many[0], updates, [seed for _, seed in runs], *many[1:], options)
        losses = dict(zip(runs, found))
    table = Table(
        f"Gaps after {steps} steps",
        {"run": "", "bytes": ".2f", "loss": ".4f", "gap": "+.5f", "to float32 states": "+.5f", "largest": ".5f"},
        note='"bytes" are those of weights, states and gradients per parameter; "gap" is the mean over the seeds to '
        'float32, "to float32 states" to the same weight update beside float32 states, "largest" the largest of these.',
    )
    for name in RUNS:
        own = [losses[name, seed] for seed in SEEDS]
        gaps, others = (
            [loss - losses[base, seed][0] for (loss, _), seed in zip(own, SEEDS)] for base in ("float32", BASE)
        )
        table.add(
            **{"run": name, "bytes": own[0][1], "loss": statistics.mean(loss for loss, _ in own)},
            **{"gap": statistics.mean(gaps), "to float32 states": statistics.mean(others)},
            largest=max(map(abs, others)),
        )
    result = Result("state_bits", TITLE, TEXT, "python -m benchmarks.bench_state_bits")
    result.tables = [table]
    save(result)


if __name__ == "__main__":
    main()
