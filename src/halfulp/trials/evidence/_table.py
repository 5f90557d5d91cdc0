"""Tables of a comparison as words and aligned text, with notes and a headline."""

from collections import Counter

from ... import formats
from ..._messages import align_columns
from ...pages import DASH
from .._defaults import PASSING_VERDICTS, REFERENCE
from ._row import LEAST_RELATIVE_GAP, FinishedTrials, Row, read_judged_loss


def format_number(value: float | None, digits: int = 4, sign: bool = False) -> str:
    """Return a number with fixed digits, a dash where there is none.

    >>> format_number(1.23456), format_number(0.01, 3, sign=True), format_number(None)
    ('1.2346', '+0.010', '–')
    """
    if value is None:
        return DASH
    value = round(value, digits) + 0.0
    text = f"{value:{'+' if sign and value else ''}.{digits}f}"
    return text.replace("-", "−")


def format_with_spread(value: float | None, spread: float | None, digits: int | None = 4, sign: bool = False) -> str:
    """Return a mean and, from two seeds on, its spread; with two significant digits where none are fixed.

    >>> format_with_spread(1.5, 0.02, 2), format_with_spread(1.5, None, 2), format_with_spread(2.8e-11, 1e-12, None)
    ('1.50 ± 0.02', '1.50', '2.8e-11 ± 1e-12')
    """

    def say(one: float | None, sign: bool = False) -> str:
        if digits is not None or one is None:
            return format_number(one, digits or 0, sign)
        return f"{one:{'+' if sign and one else ''}.2g}".replace("-", "−").replace("e−", "e-")

    return say(value, sign) if value is None or spread is None else f"{say(value, sign)} ± {say(spread)}"


def format_percent(value: float | None, digits: int = 1) -> str:
    """Return a share as per cent.

    >>> format_percent(0.515), format_percent(None)
    ('51.5%', '–')
    """
    return DASH if value is None else f"{100 * value:.{digits}f}%"


def name_judged_loss(evidence: FinishedTrials, task: str) -> str:
    """Return in words which loss judges the task."""
    judged_by = evidence.of_task(task)[0]["settings"]["task"]["judged_by"]
    return judged_by.replace("_", " ").replace("train ", "training ")


def format_cells(evidence: FinishedTrials, row: Row) -> dict[str, str]:
    """Return the cells of a row as text, by column header, the same in every table."""
    float32 = [abs(loss) for loss in map(read_judged_loss, evidence.of_recipe(row.task, REFERENCE)) if loss is not None]
    # On a task whose float32 loss would have no digits, losses have two that count.
    digits = None if float32 and max(float32) < 1e-4 else 4
    verdict = f"diverged ({row.diverged} of {row.seeds})" if row.diverged else row.verdict or "needs 3 seeds"
    accuracy = "" if row.own_accuracy is None else f" · {format_percent(row.own_accuracy)}"
    cells = {
        "recipe": row.recipe,
        name_judged_loss(evidence, row.task): format_with_spread(row.loss, row.loss_spread, digits),
        "gap to fp32": DASH
        if row.verdict == "reference"
        else format_with_spread(row.gap, row.gap_spread, digits, sign=True),
        "verdict": verdict,
        "accuracy": format_percent(row.accuracy),
        "own arithmetic": DASH
        if row.own_loss is None
        else f"{format_with_spread(row.own_loss, None, digits)}{accuracy}",
        "cancelled": format_percent(row.cancelled),
        "movement kept": format_percent(row.realised, 0),
    }
    if row.accuracy is not None and row.accuracy_spread is not None:
        cells["accuracy"] += f" ± {100 * row.accuracy_spread:.1f}"
    if has_gradient_formats(evidence, row.task):
        cells["skipped"] = format_number(row.skipped, 0 if row.skipped is None or row.skipped.is_integer() else 1)
        worst = f"{format_percent(row.underflow)} · {format_percent(row.worst_underflow, 0)}"
        cells["underflow"] = DASH if row.underflow is None else worst
    size, is_imitated = (
        format_number(compute_stored_bytes(row), 1),
        row.emulated or row.gradient_format or row.operand_format,
    )
    cells["bytes/param"] = f"({size})" if row.emulated else size
    cells["step time"] = "emulated" if is_imitated else DASH if row.speed is None else f"{row.speed:.2f}×"
    return cells


def list_headers(evidence: FinishedTrials, task: str) -> list[str]:
    """Return the columns of a task's table that hold something."""
    lines = [format_cells(evidence, row) for row in evidence.rows(task)]
    return [header for header in lines[0] if any(line[header] != DASH for line in lines)]


def has_gradient_formats(evidence: FinishedTrials, task: str) -> bool:
    """Return whether a recipe of the comparison has a format for gradients."""
    return any(record["settings"]["recipe"].get("gradient_format") for record in evidence.of_task(task))


def compute_stored_bytes(row: Row) -> float | None:
    """Return bytes per parameter as measured; of an emulated format, what its bits would take."""
    if row.emulated is None or row.bytes_per_parameter is None:
        return row.bytes_per_parameter
    return row.bytes_per_parameter * formats.get(row.emulated).bits / 32


def write_table_notes(evidence: FinishedTrials, task: str) -> list[str]:
    """Return the notes beneath the table of a task, which explain its columns."""
    if "notes" in evidence.run:
        return list(evidence.run["notes"])
    record = evidence.of_task(task)[0]
    settings, result = record["settings"], record["result"]
    target = settings["task"].get("target", "example")
    rows = evidence.rows(task)
    accuracy = (
        f"Accuracy and own arithmetic (loss · accuracy as the recipe itself computes them) are on validation data, "
        f"where one {target} is {100 / result['targets']:.2g}%."
    )
    has_accuracy = target and any(row.accuracy is not None for row in rows)
    said = [
        f"{settings['steps']} steps of {settings['task']['rule']}, {rows[0].seeds} "
        f"{'seed' if rows[0].seeds == 1 else 'seeds'}, {result['parameters']:,} parameters; {result['data']}.",
        "Loss in nats, mean ± spread over seeds, in float32 on the decoded weights; gaps are paired by seed.",
        accuracy if has_accuracy else "Own arithmetic: the loss as the recipe itself computes it, on validation data.",
        "Cancelled: the share of weight updates that rounding turned into nothing. Movement kept: how much of the "
        "wanted movement took place, large updates counting most; stochastic rounding makes up for what it cancels.",
        f"Step time is CPU time on one thread against fp32's {format_number(rows[0].step_ms, 2)} ms.",
    ]
    if any(row.verdict is None for row in rows):
        said.append("A verdict needs 3 seeds: --seeds 3 --resume trains only what is missing.")
    together = sum(row.noise is not None and row.verdict not in ("reference", "control") for row in rows)
    if together > 1:
        said.append(
            f"Verdicts are corrected for the {together} recipes: by chance any of them is called worse or better in at "
            "most 5% of comparisons."
        )
    if any(row.verdict == "unclear" for row in rows):
        more = f"--seeds {2 * rows[0].seeds} --resume"
        said.append(f"Unclear: the gaps of the seeds lie too far apart to tell. More seeds will: {more}.")
    if has_gradient_formats(evidence, task):
        said.append(
            "Skipped: steps without an update, as a gradient was not finite. Underflow: of the gradient elements that "
            "are not zero when the same step runs without rounding, the share that the format stored as zero, of all · "
            "of the layer that lost most, in sampled steps that were not skipped."
        )
        said.append(
            "Formats of gradients are imitated in float32 tensors, slowly; the bytes are those of float32 gradients."
        )
    if any(row.emulated for row in rows):
        said.append(
            "Emulated formats live in float32 tensors, slowly; the bytes in brackets are what their bits would take."
        )
    return said


def format_tables(evidence: FinishedTrials) -> str:
    """Return all tables as aligned plain text, with their notes."""
    parts = []
    for task in evidence.tasks():
        headers = list_headers(evidence, task)
        lines = [format_cells(evidence, row) for row in evidence.rows(task)]
        table = align_columns([headers, *([line[header] for header in headers] for line in lines)])
        parts += [task, *table, *write_table_notes(evidence, task), ""]
    return "\n".join(parts).rstrip()


def write_headline(evidence: FinishedTrials) -> str:
    """Return which recipe keeps float32's accuracy on every task with the fewest bytes, or that none does."""
    task = max(evidence.tasks(), key=lambda task: evidence.of_task(task)[0]["result"]["parameters"])
    reference = evidence.row(task, REFERENCE)
    everywhere = Counter(row.recipe for row in evidence.rows() if _keeps_float32_loss(evidence, row))
    kept = [
        row
        for row in evidence.rows(task)
        if not row.emulated and row.bytes_per_parameter is not None and everywhere[row.recipe] == len(evidence.tasks())
    ]
    seeds = min(row.seeds for row in evidence.rows())
    few = f"On {seeds} {'seed' if seeds == 1 else 'seeds'}, " if has_few_seeds(evidence) else ""
    if not kept:
        verb = "is sure to have stayed" if any(row.verdict == "unclear" for row in evidence.rows()) else "stayed"
        return f"{few}no recipe {verb} with float32".capitalize() + "."
    best = min(kept, key=lambda row: (row.bytes_per_parameter, formats.get(row.gradient_format or "fp32").bits))
    verb = "stays with float32" if few else "keeps float32’s accuracy"
    where = f" ({task})" if len(evidence.tasks()) > 1 else ""
    if best.gradient_format:
        return f"{few}{best.recipe} {verb} with gradients in {best.gradient_format}{where}."
    return (
        f"{few}{best.recipe} {verb} at {format_number(best.bytes_per_parameter, 1)} bytes "
        f"per parameter instead of {format_number(reference.bytes_per_parameter, 1)}{where}."
    )


def describe_losing_recipes(evidence: FinishedTrials) -> list[str]:
    """Return sentences per task: who diverged, who lost most and the share of updates lost, who is unclear."""
    said = []
    for task in evidence.tasks():
        rows = [row for row in evidence.rows(task) if row.verdict not in ("reference", "control")]
        diverged = [row.recipe for row in rows if row.diverged]
        if diverged:
            said.append(f"On {task}, {' and '.join(diverged)} diverged.")
        unclear = [row.recipe for row in rows if row.verdict == "unclear"]
        rows = [row for row in rows if row.recipe not in unclear and not _keeps_float32_loss(evidence, row)]
        gaps = [(row.gap, row) for row in rows if row.gap is not None]
        if gaps:
            gap, worst = max(gaps, key=lambda pair: pair[0])
            lost = (
                f": rounding cancelled {format_percent(worst.cancelled, 0)} of its updates" if worst.cancelled else ""
            )
            if worst.underflow:
                lost = f": {format_percent(worst.underflow, 0)} of its gradients underflowed"
            if worst.skipped == evidence.of_task(task)[0]["settings"]["steps"]:
                lost = ": every step overflowed and was skipped"
            if lost and worst.realised is not None and worst.realised < 0.5:
                lost += f", and only {format_percent(worst.realised, 0)} of the wanted movement took place"
            said.append(
                f"On {task}, {worst.recipe} ends {format_number(gap, 3)} nats above fp32 in "
                f"{name_judged_loss(evidence, task)}{lost}."
            )
        if unclear:
            said.append(f"On {task}, {' and '.join(unclear)} need{'s' * (len(unclear) == 1)} more seeds for a verdict.")
    return said


def has_few_seeds(evidence: FinishedTrials) -> bool:
    """Return whether there are too few seeds for a verdict."""
    return any(row.seeds < 3 for row in evidence.rows())


def _keeps_float32_loss(evidence: FinishedTrials, row: Row) -> bool:
    """Return whether a recipe keeps float32's loss: by its verdict, or on few seeds by a gap under half a per cent."""
    if row.verdict in ("reference", "control", "diverged"):
        return False
    if row.verdict is not None:
        return row.verdict in PASSING_VERDICTS
    reference = evidence.row(row.task, REFERENCE).loss
    return row.gap is not None and reference is not None and row.gap <= 5 * LEAST_RELATIVE_GAP * reference
