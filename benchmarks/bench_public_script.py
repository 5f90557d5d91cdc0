"""Somebody else's training script under recipes, unmodified, and its model as a `Step`: the same verdicts.

`python -m benchmarks.bench_public_script CHECKOUT --data DIR`, where CHECKOUT is https://github.com/karpathy/nanoGPT
(MIT; nothing of it stands here) and DIR has tinyshakespeare/input.txt.
"""

import argparse
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ._results import Result, Table, save

TEXT = """nanoGPT's train.py, as it is: its own configuration file and prepare.py, its own arguments for the processor \
and a small model (two layers, width 64, 32 characters, batches of 8, 500 steps). `halfulp compare train.py` converts \
the model where the script makes its optimizer, and judges one run by the mean loss of its last tenth. The `Step` \
builds the model of nanoGPT's model.py, with the same hyper-parameters and schedule, from three seeds, judged on \
validation batches. Neither clips nor decays here, which a `Step` leaves to its user."""
RECIPES = ("bf16", "bf16-stochastic", "bf16-kahan", "bf16-split8")
STEPS, BATCH, TIME, LAYERS, HEADS, WIDTH = 500, 8, 32, 2, 4, 64
RATE, LEAST, WARM, BETAS = 1e-3, 1e-4, 50, (0.9, 0.99)
SCRIPT = [
    "config/train_shakespeare_char.py",
    *("--device=cpu", "--compile=False", "--dtype=float32", "--eval_interval=100000", "--eval_iters=1"),
    *(f"--batch_size={BATCH}", f"--block_size={TIME}", f"--n_layer={LAYERS}", f"--n_head={HEADS}", f"--n_embd={WIDTH}"),
    *("--dropout=0.0", "--gradient_accumulation_steps=1", "--weight_decay=0.0", "--grad_clip=0.0"),
    *(f"--max_iters={STEPS - 1}", f"--lr_decay_iters={STEPS}", f"--warmup_iters={WARM}"),
    *(f"--learning_rate={RATE}", f"--min_lr={LEAST}", f"--beta2={BETAS[1]}"),
]


def by_script() -> dict[str, tuple[float, str]]:
    """The gap and the verdict of each recipe, by the script itself in the current folder."""
    from halfulp.trials.script import compare_script

    found = compare_script("train.py", SCRIPT, RECIPES, listen=lambda *said: print("script", *said[:2], flush=True))
    return {row.recipe: (row.gap or 0.0, row.verdict) for row in found.rows}


def by_step() -> dict[str, tuple[float, str]]:
    """The same by a `Step` that builds the model of the current folder's model.py."""
    import numpy as np
    import torch

    import halfulp as hu
    from halfulp.trials.tasks import Step

    sys.path.insert(0, os.getcwd())
    from model import GPT, GPTConfig

    parts = {name: np.fromfile(f"data/shakespeare_char/{name}.bin", dtype=np.uint16) for name in ("train", "val")}
    letters = int(max(part.max() for part in parts.values())) + 1

    def batch(name, number):
        part = torch.from_numpy(parts[name].astype(np.int64))
        generator = torch.Generator().manual_seed(number)
        places = torch.randint(len(part) - TIME, (BATCH, 1), generator=generator) + torch.arange(TIME)
        return part[places], part[places + 1]

    def make(seed):
        torch.manual_seed(seed)
        shape = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": TIME, "vocab_size": letters}
        return GPT(GPTConfig(**shape, dropout=0.0, bias=False))

    def rate(step, steps):
        if step < WARM:
            return (step + 1) / (WARM + 1)
        least = LEAST / RATE
        return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * (step - WARM) / (steps - WARM)))

    task = Step(
        lambda model, number: model(*batch("train", number))[1],
        make,
        steps=STEPS,
        rule="AdamW",
        rate=rate,
        judge=lambda model, number: model(*batch("val", number))[1],
        judged=64,
        name="nanogpt",
        lr=RATE,
        betas=BETAS,
        weight_decay=0.0,
    )
    evidence = hu.compare(task, ["fp32-twin", *RECIPES], seeds=3)
    return {row.recipe: (row.gap or 0.0, str(row.verdict)) for row in evidence.rows()}


def main() -> None:
    """Prepares a copy of the checkout, and compares both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    given = parser.parse_args()
    text = (given.data / "tinyshakespeare" / "input.txt").resolve()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "nanoGPT")
        shutil.copytree(given.checkout, place, ignore=shutil.ignore_patterns(".git"))
        shutil.copy(text, place / "data" / "shakespeare_char" / "input.txt")
        subprocess.run([sys.executable, "data/shakespeare_char/prepare.py"], cwd=place, check=True)
        os.chdir(place)
        script, step = by_script(), by_step()
        os.chdir("/")
    columns = {"recipe": "", "gap, script": "+.4f", "verdict, script": "", "gap, Step": "+.4f", "verdict, Step": ""}
    table = Table("nanoGPT under recipes", columns | {"bar": "", "met": ""})
    for name in RECIPES:
        pair = (script[name], step[name])
        row = dict(zip(columns, (name, *pair[0], *pair[1]), strict=True))
        table.add(**row, bar="the same verdict", met=pair[0][1] == pair[1][1])
        print(row, flush=True)
    command = "python -m benchmarks.bench_public_script CHECKOUT --data DIR"
    save(Result("public_script", "Somebody else's training script", TEXT, command, tables=[table]))


if __name__ == "__main__":
    main()
