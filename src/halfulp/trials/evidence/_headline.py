"""The finding of a comparison in words."""

from ... import formats
from ..running._plan import REFERENCE
from ._finished_trials import FinishedTrials
from ._row import Row
from ._statistics import MARGIN
from ._table import loss_name, number, percent

KEPT = ("no difference", "better")


def headline(evidence: FinishedTrials) -> str:
    """Which recipe keeps float32's accuracy on every task with the fewest bytes, or that none does."""
    task = _largest(evidence)
    reference = evidence.row(task, REFERENCE)
    kept = [row for row in evidence.rows(task) if not row.emulated and _keeps_everywhere(evidence, row.recipe)]
    kept = [row for row in kept if row.bytes_per_parameter is not None]
    if not kept:
        verb = "is sure to have stayed" if any(row.verdict == "unclear" for row in evidence.rows()) else "stayed"
        return f"{_few(evidence)}no recipe {verb} with float32".capitalize() + "."
    best = min(kept, key=lambda row: (row.bytes_per_parameter, _gradient_bits(row)))
    verb = "keeps float32’s accuracy" if not _few(evidence) else "stays with float32"
    where = f" ({task})" if len(evidence.tasks()) > 1 else ""
    if best.gradient_format:
        return f"{_few(evidence)}{best.recipe} {verb} with gradients in {best.gradient_format}{where}."
    return (
        f"{_few(evidence)}{best.recipe} {verb} at {number(best.bytes_per_parameter, 1)} bytes per parameter "
        f"instead of {number(reference.bytes_per_parameter, 1)}{where}."
    )


def losers(evidence: FinishedTrials) -> list[str]:
    """Sentences per task: who diverged, who lost most and the share of updates that were lost, who is unclear."""
    said = []
    for task in evidence.tasks():
        rows = [row for row in evidence.rows(task) if row.verdict not in ("reference", "control")]
        diverged = [row.recipe for row in rows if row.diverged]
        if diverged:
            said.append(f"On {task}, {' and '.join(diverged)} diverged.")
        unclear = [row.recipe for row in rows if row.verdict == "unclear"]
        rows = [row for row in rows if row.recipe not in unclear and not _keeps(evidence, row)]
        gaps = [(row.gap, row) for row in rows if row.gap is not None]
        if gaps:
            gap, worst = max(gaps, key=lambda pair: pair[0])
            lost = f": rounding cancelled {percent(worst.cancelled, 0)} of its updates" if worst.cancelled else ""
            if worst.underflow:
                lost = f": {percent(worst.underflow, 0)} of its gradients underflowed"
            if worst.skipped == evidence.of_task(task)[0]["settings"]["steps"]:
                lost = ": every step overflowed and was skipped"
            if lost and worst.realised is not None and worst.realised < 0.5:
                lost += f", and only {percent(worst.realised, 0)} of the wanted movement took place"
            said.append(
                f"On {task}, {worst.recipe} ends {number(gap, 3)} nats above fp32 in {loss_name(evidence, task)}{lost}."
            )
        if unclear:
            said.append(f"On {task}, {' and '.join(unclear)} need{'s' * (len(unclear) == 1)} more seeds for a verdict.")
    return said


def is_indication(evidence: FinishedTrials) -> bool:
    """Whether there are too few seeds for a verdict."""
    return any(row.seeds < 3 for row in evidence.rows())


def _few(evidence: FinishedTrials) -> str:
    if not is_indication(evidence):
        return ""
    seeds = min(row.seeds for row in evidence.rows())
    return f"On {seeds} {'seed' if seeds == 1 else 'seeds'}, "


def _keeps_everywhere(evidence: FinishedTrials, recipe: str) -> bool:
    return all(_keeps(evidence, evidence.row(task, recipe)) for task in evidence.tasks())


def _keeps(evidence: FinishedTrials, row: Row) -> bool:
    """The verdict; from fewer than three seeds, whether the gap is under half a per cent of float32's loss."""
    if row.verdict in ("reference", "control", "diverged"):
        return False
    if row.verdict is not None:
        return row.verdict in KEPT
    reference = evidence.row(row.task, REFERENCE).loss
    return row.gap is not None and reference is not None and row.gap <= 5 * MARGIN * reference


def _gradient_bits(row: Row) -> int:
    return formats.get(row.gradient_format).bits if row.gradient_format else 32


def _largest(evidence: FinishedTrials) -> str:
    """The task with the most parameters."""
    return max(evidence.tasks(), key=lambda task: evidence.of_task(task)[0]["result"]["parameters"])
