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
validation batches. Neither clips nor decays here, which a `Step` leaves to its user. The script's verdict is of one \
run, and calls a gap below 1% of the loss no difference."""
RECIPES = {1e-3: ("bf16", "bf16-stochastic", "bf16-kahan", "bf16-split8"), 1e-4: ("bf16", "bf16-kahan")}
STEPS, BATCH, TIME, LAYERS, HEADS, WIDTH = 500, 8, 32, 2, 4, 64
LEAST, WARM, BETAS = 0.1, 50, (0.9, 0.99)  # the last rate as a share of the first
SCRIPT = [
    "config/train_shakespeare_char.py",
    *("--device=cpu", "--compile=False", "--dtype=float32", "--eval_interval=100000", "--eval_iters=1"),
    *(f"--batch_size={BATCH}", f"--block_size={TIME}", f"--n_layer={LAYERS}", f"--n_head={HEADS}", f"--n_embd={WIDTH}"),
    *("--dropout=0.0", "--gradient_accumulation_steps=1", "--weight_decay=0.0", "--grad_clip=0.0"),
    *(f"--max_iters={STEPS - 1}", f"--lr_decay_iters={STEPS}", f"--warmup_iters={WARM}"),
    f"--beta2={BETAS[1]}",
]


def by_script(lr) -> dict[str, tuple[float, str]]:
    """The gap and the verdict of each recipe, by the script itself in the current folder."""
    from halfulp.trials._script import compare_script

    arguments = [*SCRIPT, f"--learning_rate={lr}", f"--min_lr={lr * LEAST}"]
    found = compare_script("train.py", arguments, RECIPES[lr], listen=lambda *said: print(*said, flush=True))
    return {row.recipe: (row.gap or 0.0, row.verdict) for row in found.rows()}


def by_step(lr) -> dict[str, tuple[float, str, float]]:
    """The same by a `Step` that builds the model of the current folder's model.py, and float32's loss."""
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
        return LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * (step - WARM) / (steps - WARM)))

    task = Step(
        lambda model, number: model(*batch("train", number))[1],
        make,
        steps=STEPS,
        rule="AdamW",
        rate=rate,
        judge=lambda model, number: model(*batch("val", number))[1],
        judged=64,
        name="nanogpt",
        lr=lr,
        betas=BETAS,
        weight_decay=0.0,
    )
    evidence = hu.compare(task, ["fp32-twin", *RECIPES[lr]], seeds=3)
    loss = evidence.row("nanogpt", "fp32").loss
    return {row.recipe: (row.gap or 0.0, str(row.verdict), loss) for row in evidence.rows()}


def main() -> None:
    """Prepares a copy of the checkout, and compares both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--lr", type=float, choices=RECIPES, help="one learning rate, beside the rows of the others")
    given = parser.parse_args()
    text = (given.data / "tinyshakespeare" / "input.txt").resolve()
    rates = [given.lr] if given.lr else list(RECIPES)
    columns = {"lr": "g", "recipe": "", "gap, script": "+.4f", "verdict, script": "", "gap, Step": "+.4f"}
    table = Table("nanoGPT under recipes", columns | {"verdict, Step": "", "bar": "", "met": ""})
    command = "python -m benchmarks.bench_public_script CHECKOUT --data DIR"
    result = Result("public_script", "Somebody else's training script", TEXT, command, tables=[table])
    table.rows = [row for (lr, _), row in result.earlier_rows("lr", "recipe").items() if lr not in rates]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "nanoGPT")
        shutil.copytree(given.checkout, place, ignore=shutil.ignore_patterns(".git"))
        shutil.copy(text, place / "data" / "shakespeare_char" / "input.txt")
        subprocess.run([sys.executable, "data/shakespeare_char/prepare.py"], cwd=place, check=True)
        os.chdir(place)
        for lr in rates:
            script, step = by_script(lr), by_step(lr)
            for name in RECIPES[lr]:
                (gap, verdict), (other, others, loss) = script[name], step[name]
                row = {"lr": lr, "recipe": name, "gap, script": gap, "verdict, script": verdict}
                row |= {"gap, Step": other, "verdict, Step": others}
                same = verdict == others or abs(other) <= 0.01 * loss
                table.add(**row, bar="the same verdict, or a gap below the script's 1%", met=same)
                print(row, flush=True)
        os.chdir("/")
    save(result)


if __name__ == "__main__":
    main()
