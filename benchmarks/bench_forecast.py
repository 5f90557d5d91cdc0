"""The forecast freeze step of each layer beside the measured one: `python -m benchmarks.bench_forecast`."""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ._results import Result, Table, save

TEXT = """A character-level GPT (two layers, width {width}, the text task of `halfulp compare`) is trained in float32 \
for {before} steps and then for {steps} in pure bfloat16 by torch's AdamW, whose updates are rounded to nearest, under \
three schedules. After {share:.0%} of these steps `hu.forecast(model, optimizer, schedule)` says from weights and \
optimizer state at which step each tensor freezes; the training then goes on and shows it: the first step from which \
on fewer than 1% of the nonzero updates change their element. Of tensors of few elements that step is a matter of \
chance (1% of 128 is two elements). What is frozen at the forecast already counts as the step of the forecast."""
BAR = 0.1


@dataclass(frozen=True)
class Run:
    """One fine-tuning in bfloat16."""

    name: str
    lr: float
    betas: tuple[float, float]
    rate: Callable[[float], float]


def cosine(done: float) -> float:
    """A rise over the first twentieth, and half a cosine to 0."""
    import math

    return min(1.0, done / 0.05 + 0.01) * 0.5 * (1 + math.cos(math.pi * done))


RUNS = (
    Run("cosine with warm-up", 1e-4, (0.9, 0.999), cosine),
    Run("linear", 5e-5, (0.9, 0.95), lambda done: 1 - done),
    Run("warm-up, stable, decay", 5e-5, (0.9, 0.99), lambda done: min(1.0, done / 0.05 + 0.01, (1 - done) / 0.4)),
)


def pretrained(width: int, steps: int, seed: int):
    """The task's data, and a model that has learned something in float32."""
    import torch

    from halfulp.trials.tasks import get
    from halfulp.trials.tasks._text import GPT

    task = get("text")
    data = task.load()
    torch.manual_seed(seed)
    letters = int(max(data.train[0].max(), data.validation[0].max())) + 1
    model = GPT(letters, width=width, layers=2, heads=4, time=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    for inputs, targets in task.batches(data, seed + 7, steps):
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    return task, data, model


def measured(run: Run, width: int, before: int, steps: int, at: int, seed: int) -> Iterator[dict]:
    """One row per tensor: what was forecast at a step, and what the whole training showed."""
    import torch

    import halfulp as hu

    task, data, model = pretrained(width, before, seed)
    model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, betas=run.betas, weight_decay=0.1)
    rates = [run.lr * run.rate(step / steps) for step in range(steps)]
    named = dict(model.named_parameters())
    last = dict.fromkeys(named, -1)
    seconds, forecast = 0.0, None
    for step, (inputs, targets) in enumerate(task.batches(data, seed + 1, steps)):
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.param_groups[0]["lr"] = rates[step]
        held = {name: parameter.detach().clone() for name, parameter in named.items()}
        optimizer.step()
        for name, parameter in named.items():
            updated = optimizer.state[parameter]["exp_avg"] != 0
            changed = ((parameter.detach() != held[name]) & updated).sum()
            if changed >= 0.01 * updated.sum() and changed:
                last[name] = step
        if step + 1 == at:
            start = time.perf_counter()
            forecast = hu.forecast(model, optimizer, rates)
            seconds = time.perf_counter() - start
    for layer in forecast.layers:
        found = max(at, last[layer.name] + 1)
        said = steps if layer.freeze_step is None else layer.freeze_step
        yield {
            "schedule": run.name,
            "tensor": layer.name,
            "elements": layer.elements,
            "forecast": said,
            "measured": found,
            "error": abs(said - found) / found,
            "seconds": seconds,
        }


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--before", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--share", type=float, default=0.2, help="when the forecast is made")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    text = TEXT.format(width=options.width, before=options.before, steps=options.steps, share=options.share)
    result = Result("forecast", "Forecast of frozen layers", text, "python -m benchmarks.bench_forecast")
    summary = Table(
        "Forecast and measured freeze steps",
        {
            "schedule": "",
            "tensors": "",
            "within 10%": "",
            "of 1,000 elements and more": "",
            "median error": ".1%",
            "largest error": ".1%",
            "seconds": ".1f",
            "bar": "",
        },
    )
    columns = {"schedule": "", "tensor": "", "elements": "", "forecast": "", "measured": "", "error": ".1%"}
    every = Table("Every tensor", columns)
    at = round(options.share * options.steps)
    for run in RUNS:
        rows = list(measured(run, options.width, options.before, options.steps, at, options.seed))
        errors = sorted(row["error"] for row in rows)
        large = [row for row in rows if row["elements"] >= 1000]
        summary.add(
            **{
                "schedule": run.name,
                "tensors": len(rows),
                "within 10%": sum(error <= BAR for error in errors),
                "of 1,000 elements and more": f"{sum(row['error'] <= BAR for row in large)} of {len(large)}",
                "median error": errors[len(errors) // 2],
                "largest error": errors[-1],
                "seconds": rows[0]["seconds"],
                "bar": "all within 10%",
                "met": errors[-1] <= BAR,
            }
        )
        for row in rows:
            every.add(**row)
    result.tables += [summary, every]
    save(result)


if __name__ == "__main__":
    main()
