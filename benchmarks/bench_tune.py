"""What hu.tune finds, and whether training every candidate finds the same: `python -m benchmarks.bench_tune`."""

import argparse
import time

import halfulp as hu
from halfulp.trials import Tuned

from ._results import Result, Table, save

TEXT = """`hu.tune` on two tasks of `halfulp compare`, three seeds each, with the tolerance that `compare` judges by. \
"Trained" counts the candidates that it trained, of those that it considered."""
CONTROL = """ The control trains every candidate from every seed and takes the one of fewest bytes that holds; mixes \
of updates by layer are left out there, as only the search makes them."""
TASKS = ("digits", "text")


def searched(task: str) -> tuple[Tuned, float]:
    """The search and the minutes that it took."""
    begin = time.monotonic()
    return hu.tune(task), (time.monotonic() - begin) / 60


def row_of(task: str, tuned: Tuned, minutes: float, control: bool) -> dict:
    """One task's row; the control trains all candidates."""
    trained = [one for one in tuned.candidates if one.outcome != "not trained"]
    cells = {
        "task": task,
        "recipe": tuned.recipe.name,
        "bytes": tuned.bytes_per_parameter,
        "gap": next(one.gap for one in tuned.candidates if one.recipe == tuned.recipe),
        "trained": f"{len(trained) - 1} of {len(tuned.candidates) - 1}",
        "minutes": minutes,
    }
    if control:
        uniform = [one.recipe for one in tuned.candidates if "-on-" not in one.recipe.name]
        evidence = hu.compare(task, [*uniform, "fp32-twin"])
        kept = [row for row in evidence.rows(task) if row.verdict in ("no difference", "better", "reference")]
        bytes_of = {one.recipe.name: one.bytes_per_parameter for one in tuned.candidates}
        best = min(kept, key=lambda row: bytes_of[row.recipe])
        cells["every candidate"] = f"{best.recipe}, {bytes_of[best.recipe]:.2f}"
        cells["met"] = tuned.bytes_per_parameter <= bytes_of[best.recipe] + 1e-9
    return cells


def candidates_of(tuned: Tuned) -> Table:
    """What became of each candidate of a search."""
    columns = {"recipe": "", "bytes": ".2f", "gap": "+.4f", "outcome": "", "why": ""}
    table = Table(f"Candidates on {tuned.evidence.tasks()[0]}", columns)
    for one in tuned.candidates:
        table.add(recipe=one.recipe.name, bytes=one.bytes_per_parameter, gap=one.gap, outcome=one.outcome, why=one.why)
    return table


def main() -> None:
    """All tasks, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--no-control", action="store_true", help="do not train every candidate")
    chosen = parser.parse_args()
    columns = {"task": "", "recipe": "", "bytes": ".2f", "gap": "+.4f", "trained": "", "minutes": ".1f"}
    columns |= {} if chosen.no_control else {"every candidate": "", "met": ""}
    table = Table("The cheapest recipe without a difference to float32", columns)
    details = []
    for task in chosen.only:
        tuned, minutes = searched(task)
        print(tuned, flush=True)
        table.add(**row_of(task, tuned, minutes, not chosen.no_control))
        details.append(candidates_of(tuned))
    text, option = (TEXT, " --no-control") if chosen.no_control else (TEXT + CONTROL, "")
    save(
        Result("tune", "What tuning finds", text, f"python -m benchmarks.bench_tune{option}", tables=[table, *details])
    )


if __name__ == "__main__":
    main()
