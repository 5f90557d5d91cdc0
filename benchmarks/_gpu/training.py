"""A short training of a character-level GPT on the device under six recipes, three seeds each."""

from __future__ import annotations

import statistics

from ._engines import no_silent_fallback
from ._run import Run

TITLE = "Trainings"
RECIPES = ("fp32", "bf16", "bf16-stochastic", "bf16-kahan", "bf16-split8", "scaled-fp16-kahan")
SEEDS = 3
STEPS, TINY_STEPS = 450, 2
WINDOWS = 8  # that a dry run validates on
COLUMNS = {
    "recipe": "", "seed": "", "validation loss": ".4f", "in float32": ".4f", "accuracy": ".1%",
    "updates cancelled": ".1%", "bytes a parameter": ".1f", "s": ".1f", "failed": "",
}  # fmt: skip


def task_on(run: Run):
    """The task `text` with data and model on the device."""
    from halfulp.trials.tasks._task import Data
    from halfulp.trials.tasks._text import PythonHelpText

    class OnDevice(PythonHelpText):
        def load(self) -> Data:
            data = super().load()
            windows = WINDOWS if run.tiny else None
            validation = tuple(part[:windows].to(run.device) for part in data.validation)
            return Data(tuple(part.to(run.device) for part in data.train), validation, data.note)

        def model(self, data: Data, seed: int):
            return super().model(data, seed).to(run.device)

    return OnDevice()


def measure(run: Run) -> None:
    """Eighteen trainings, which several processes share."""
    steps = TINY_STEPS if run.tiny else STEPS
    note = f"Task text of `halfulp compare`: {steps} steps of AdamW, a quarter of a million parameters, on the device; "
    note += "several trainings at once, so that seconds are no measure of speed."
    table = run.table(TITLE, COLUMNS, note)
    task = task_on(run)
    data = task.load()
    for recipe in RECIPES:
        for seed in range(1 if run.tiny else SEEDS):
            cells = {"recipe": recipe, "seed": seed}
            run.attempt(
                f"{recipe}, seed {seed}",
                lambda cells=cells: _row(run, table, cells, task, data, steps),
                lambda why, cells=cells: run.add(table, **cells, failed=why),
            )


def _row(run: Run, table, cells: dict, task, data, steps: int) -> None:
    import time

    from halfulp import recipes
    from halfulp.trials.running._plan import Trial
    from halfulp.trials.running._trial import run_trial as train

    start = time.perf_counter()
    with no_silent_fallback(scaled=cells["recipe"].startswith("scaled")):
        found = train(Trial(task, recipes.get(cells["recipe"]), cells["seed"], steps), data)
    own, wide = found["own"], found["float32"]["validation"]
    cells |= {
        "validation loss": own["loss"],
        "in float32": wide["loss"],
        "accuracy": own["accuracy"],
        "updates cancelled": found["cancelled"],
        "bytes a parameter": found["bytes_per_parameter"],
        "s": time.perf_counter() - start,
    }
    run.add(table, **cells)
    if found["diverged_at"] is not None:
        run.fail(f"{cells['recipe']}, seed {cells['seed']}", f"diverged at step {found['diverged_at']}")


def summary(rows: list[dict]) -> list[dict]:
    """Per recipe the mean and the range over seeds, and the gap to float32."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get("in float32") is not None:
            found.setdefault(row["recipe"], []).append(row["in float32"])
    if "fp32" not in found:
        return []
    base = statistics.fmean(found["fp32"])
    return [
        {"recipe": recipe, "seeds": len(losses), "in float32": statistics.fmean(losses),
         "range": max(losses) - min(losses), "gap": statistics.fmean(losses) / base - 1}
        for recipe, losses in found.items()
    ]  # fmt: skip
