"""Muon and Adafactor in bfloat16 beside their float32 selves: `python -m benchmarks.bench_rules_in_bf16 [--steps N]`.

The character GPT of the task "text", three seeds. Two processes of one thread, four minutes of processor time.
"""

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from ._results import Result, Table, save

TITLE = "Muon and Adafactor in bfloat16"
TEXT = """The task "text" (a GPT of a quarter of a million parameters on characters, batches of 16 x 64), trained by \
Muon (matrices; AdamW the rest, `adjust_lr_fn="match_rms_adamw"`) and Adafactor in float32, and again in bfloat16 by \
each weight update, from the same start on the same batches. The loss is of the validation text, in nats per \
character, computed in float32 from the float32 weights (`float32_state_dict`); gaps are to float32's of the same \
seed. The twin is a float32 run whose start differs by 1e-7 of each weight: its gap is no effect of a precision."""
RULES = {
    "Muon": {"lr": 2e-3, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"},
    "Adafactor": {"lr": 1e-2},
    "AdamW": {"lr": 3e-3, "weight_decay": 0.1},
}
JUDGED = ("Muon", "Adafactor")
UPDATES = ("split8", "stochastic", "kahan", "nearest")
BAR, SEEDS = 0.002, (0, 1, 2)


def train(
    rule: str, run: str, seed: int, steps: int, width: int = 96, options: dict[str, Any] | None = None
) -> tuple[float, float]:
    """The validation loss after a training, by a weight update in bfloat16 or in float32 ("float32", "twin").

    Args:
        rule, run, seed, steps: of the training.
        width: of the model.
        options: of the optimizer, beside the rule's.

    Returns:
        Beside the loss the bytes per parameter.
    """
    import copy

    import torch

    import halfulp as hu
    from halfulp.trials import tasks

    torch.set_num_threads(1)
    task = tasks.get("text")
    data = task.load()

    model = task.model(data, seed)
    if width != 96:
        torch.manual_seed(seed)
        model = type(model)(model.tokens.num_embeddings, width=width, time=task.time)
    start = copy.deepcopy(model)
    if run == "twin":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))
    made = {"weight_update": run, "param_dtype": "bf16"} if run in UPDATES else {}
    kind = hu.optim.OPTIMIZERS[rule]
    optimizer = kind(kind.split_groups(model.named_parameters()), seed=seed, **made, **RULES[rule], **(options or {}))
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, (x, y) in enumerate(task.batches(data, seed, steps)):
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * task.lr_factor(step, steps)
        torch.nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    start.load_state_dict(optimizer.float32_state_dict(model))
    x, y = data.validation
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(start(a).flatten(0, 1), b.flatten(), reduction="sum").double()
            for a, b in zip(x.split(64), y.split(64))
        ]
    return float(sum(losses) / y.numel()), optimizer.bytes_per_parameter()


def main() -> None:
    """Every rule and weight update, three seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps
    runs = [(rule, run, seed) for rule in JUDGED for run in ("float32", "twin", *UPDATES) for seed in SEEDS]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found = pool.map(train, *zip(*runs), [steps] * len(runs))
        losses = {run: loss for run, (loss, _) in zip(runs, found)}
    table = Table(
        f"Gaps to float32 after {steps} steps",
        {"rule": "", "run": "", "loss": ".4f", "gap": "+.5f", "largest": ".5f", "bar": ""},
        note='"gap" is the mean over the seeds, "largest" the largest of one seed.',
    )
    for rule, run in dict.fromkeys(pair[:2] for pair in runs):
        found = [losses[rule, run, seed] for seed in SEEDS]
        gaps = [loss - losses[rule, "float32", seed] for loss, seed in zip(found, SEEDS)]
        cells = {"rule": rule, "run": run, "loss": statistics.mean(found), "gap": statistics.mean(gaps)}
        is_judged = run in UPDATES and run != "nearest"
        judged = {"bar": f"|gap| {BAR}", "met": abs(cells["gap"]) <= BAR} if is_judged else {}
        table.add(**cells, largest=max(map(abs, gaps)), **judged)
    result = Result("rules_in_bf16", TITLE, TEXT, "python -m benchmarks.bench_rules_in_bf16")
    result.tables = [table]
    save(result)


if __name__ == "__main__":
    main()
