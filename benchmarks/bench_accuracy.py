"""Training under every recipe, beside float32 and its twin: `python -m benchmarks.bench_accuracy`."""

import argparse
import statistics
from pathlib import Path

from ._results import Result, Table, save

TEXT_RECIPES = (
    "fp32",
    "fp32-twin",
    "bf16",
    "bf16-stochastic",
    "bf16-kahan",
    "bf16-kahan-stochastic",
    "bf16-split",
    "bf16-split8",
    "bf16-feedback",
    "bf16-mixed",
)
CLOSE = ("bf16-stochastic", "bf16-kahan", "bf16-split", "bf16-split8")
FORMATS = {"e8m5": 14, "e8m3": 12, "e8m1": 10}
UPDATES = ("", "-stochastic", "-kahan", "-kahan-stochastic")
TEXT = """`hu.compare`: every recipe trains the same model on the same batches with the same hyper-parameters from \
the same starts, one thread per trial; float32's twin, whose start differs by 1e-7, shows what a difference must \
exceed to mean anything. Losses are validated in float32 on the decoded weights."""


def listener():
    """Says on the screen what has finished."""

    def listen(kind: str, trial, content) -> None:
        if kind == "done":
            print("done", trial.key, flush=True)

    return listen


def evidence(task: str, recipes: list[str], seeds: int, workers: int | None, keep: Path | None):
    """The comparison, with finished trials on the screen; ``keep`` is where an interrupted one goes on."""
    import halfulp as hu

    folder = keep / task if keep else None
    again = {"out": folder, "resume": folder.exists()} if folder else {}
    return hu.compare(task, recipes=recipes, seeds=seeds, workers=workers, listen=listener(), **again)


def seconds(found) -> str:
    """How the comparison was run, in words."""
    run = found.run
    return f"{run['workers']} workers on {run['cores']} cores, {run['seconds']:.0f} s"


def text_table(seeds: int, workers: int | None, keep: Path | None) -> Table:
    """The character-level GPT."""
    found = evidence("text", list(TEXT_RECIPES), seeds, workers, keep)
    columns = {"recipe": "", "loss": ".4f", "gap to fp32": "+.4f", "spread of gap": ".4f", "largest |gap|": ".4f"}
    columns |= {"cancelled": ".1%", "B/param": ".2f", "step, x fp32": ".2f"}
    table = Table(
        f"Character-level GPT, AdamW, validation loss in nats, {seeds} seeds",
        {**columns, "verdict": "", "bar": "", "met": ""},
        note=f"The gap is paired by seed; the bar is on its mean. {seconds(found)}.",
    )
    for row in found.rows("text"):
        gaps = gaps_of(found, row.recipe)
        cells = dict(
            zip(
                table.columns,
                (
                    row.recipe,
                    row.loss,
                    row.gap,
                    row.gap_spread,
                    max(map(abs, gaps)) if gaps else None,
                    row.cancelled,
                    row.bytes_per_parameter,
                    row.speed,
                    row.verdict,
                ),
            )
        )
        if row.recipe in CLOSE:
            cells |= {"bar": "|gap| <= 0.002", "met": row.gap is not None and abs(row.gap) <= 0.002}
        elif row.recipe == "bf16":
            cells |= {"bar": "gap >= 0.02", "met": row.gap is not None and row.gap >= 0.02}
        table.add(**cells)
    return table


def gaps_of(found, recipe: str) -> list[float]:
    """Validation loss minus float32's, seed by seed."""
    losses: dict[str, dict[int, float]] = {}
    for record in found.of_task("text"):
        name, seed = record["settings"]["recipe"]["name"], record["settings"]["seed"]
        losses.setdefault(name, {})[seed] = record["result"]["float32"]["validation"]["loss"]
    base = losses["fp32"]
    own = losses[recipe]
    return [own[seed] - base[seed] for seed in own if None not in (own[seed], base.get(seed))]


def digits_table(seeds: int, workers: int | None, keep: Path | None) -> Table:
    """The digits classifier with every operator's output rounded."""
    recipes = ["fp32", *(name + update for name in FORMATS for update in UPDATES)]
    found = evidence("digits-fpu", recipes, seeds, workers, keep)
    rows = {row.recipe: row for row in found.rows("digits-fpu")}
    table = Table(
        f"scikit-learn digits, every operator's output rounded, SGD with momentum, {seeds} seeds",
        {"recipe": "", "bits": "", "accuracy": ".1%", "spread": ".1%", "train loss": ".3f", "bar": "", "met": ""},
        note=f"Accuracy on 360 images (one is 0.28%), in the recipe's own arithmetic. {seconds(found)}.",
    )
    # In the recipe's own arithmetic, which trials keep and rows leave out.
    scores = {
        name: [one["result"]["own"]["accuracy"] for one in found.of_recipe(rows[name].task, name)] for name in rows
    }
    accuracy = {name: None if None in of_seeds else statistics.fmean(of_seeds) for name, of_seeds in scores.items()}
    for name, row in rows.items():
        bits = FORMATS.get(name.split("-")[0], 32)
        cells = {"recipe": name, "bits": bits, "accuracy": accuracy[name], "spread": row.accuracy_spread}
        table.add(**cells, **{"train loss": row.loss}, **digits_bar(name, accuracy))
    return table


def digits_bar(name: str, accuracy: dict[str, float | None]) -> dict:
    """The bar of one recipe, if it has one."""
    value = accuracy[name] or 0.0
    if name == "e8m3":
        return {"bar": "< 80%", "met": value < 0.80}
    if name in ("e8m3-stochastic", "e8m3-kahan"):
        return {"bar": ">= 95%", "met": value >= 0.95}
    if name == "e8m1-kahan-stochastic":
        return {"bar": ">= 88%", "met": value >= 0.88}
    if name in ("e8m1-stochastic", "e8m1-kahan"):
        return {"bar": "< 88%", "met": value < 0.88}
    return {}


def main() -> None:
    """Both tables, or one of them; the other is kept from the last run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", choices=["text", "digits"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--keep", type=Path, help="a folder for finished trials, from which a second call goes on")
    chosen = parser.parse_args()
    makers = {"text": text_table, "digits": digits_table}
    result = Result("accuracy", "Accuracy", TEXT, "python -m benchmarks.bench_accuracy")
    old: list[Table] = result.earlier_tables() if chosen.only else []
    for index, (name, make) in enumerate(makers.items()):
        if chosen.only in (None, name):
            result.tables.append(make(chosen.seeds, chosen.workers, chosen.keep))
        elif index < len(old):
            result.tables.append(old[index])
    save(result)


if __name__ == "__main__":
    main()
