"""Tables of a comparison as words and aligned text, with notes and a headline."""

from collections import Counter

from ... import formats
from ..._messages import align_columns
from ...pages import MISSING_VALUE_TEXT
from .._defaults import PASSING_VERDICTS, REFERENCE_RECIPE
from ._row import FinishedTrials, Row, get_judged_loss


def format_number(value: float | None, digits: int = 4, sign: bool = False) -> str:
    """Return a number with fixed digits, a dash where there is none.

    >>> format_number(1.23456), format_number(0.01, 3, sign=True), format_number(None)
    ('1.2346', '+0.010', '–')
    """
    if value is None:
        return MISSING_VALUE_TEXT
    value = round(value, digits) + 0.0
    text = f"{value:{'+' if sign and value else ''}.{digits}f}"
    return text.replace("-", "−")


def format_with_spread(value: float | None, spread: float | None, digits: int | None, sign: bool = False) -> str:
    """Return a mean and, from two seeds on, its spread; with two significant digits where none are fixed.

    >>> format_with_spread(1.5, 0.02, 2), format_with_spread(1.5, None, 2), format_with_spread(2.8e-11, 1e-12, None)
    ('1.50 ± 0.02', '1.50', '2.8e-11 ± 1e-12')
    """

    def format_one(one: float | None, sign: bool = False) -> str:
        if digits is not None or one is None:
            return format_number(one, digits or 0, sign)
        return f"{one:{'+' if sign and one else ''}.2g}".replace("-", "−").replace("e−", "e-")

    return (
        format_one(value, sign)
        if value is None or spread is None
        else f"{format_one(value, sign)} ± {format_one(spread)}"
    )


def format_percent(value: float | None, digits: int = 1) -> str:
    """Return a share as per cent.

    >>> format_percent(0.515), format_percent(None)
    ('51.5%', '–')
    """
    return MISSING_VALUE_TEXT if value is None else f"{100 * value:.{digits}f}%"


def describe_judged_loss(evidence: FinishedTrials, task: str) -> str:
    """Return in words which loss judges the task."""
    judged_by = evidence.of_task(task)[0]["settings"]["task"]["judged_by"]
    return judged_by.replace("_", " ").replace("train ", "training ")


def format_row_cells(evidence: FinishedTrials, row: Row) -> dict[str, str]:
    """Return the cells of a row as text, by column header, the same in every table."""
    float32 = [
        abs(loss) for loss in map(get_judged_loss, evidence.of_recipe(row.task, REFERENCE_RECIPE)) if loss is not None
    ]
    # On a task whose float32 loss would have no digits, losses have two that count.
    digits = None if float32 and max(float32) < 1e-4 else 4
    verdict = f"diverged ({row.diverged} of {row.seeds})" if row.diverged else row.verdict or "needs 3 seeds"
    cells = {
        "recipe": row.recipe,
        describe_judged_loss(evidence, row.task): format_with_spread(row.loss, row.loss_spread, digits),
        "gap to fp32": MISSING_VALUE_TEXT
        if row.verdict == "reference"
        else format_with_spread(row.gap, row.gap_spread, digits, sign=True),
        "verdict": verdict,
        "accuracy": format_percent(row.accuracy),
        "cancelled": format_percent(row.cancelled),
        "movement kept": format_percent(row.realised, 0),
    }
    if row.accuracy is not None and row.accuracy_spread is not None:
        cells["accuracy"] += f" ± {100 * row.accuracy_spread:.1f}"
    if has_gradient_formats(evidence, row.task):
        cells["skipped"] = format_number(row.skipped, 0 if row.skipped is None or row.skipped.is_integer() else 1)
    size, is_imitated = (
        format_number(compute_stored_bytes(row), 1),
        row.emulated or row.gradient_format or row.operand_format,
    )
    cells["bytes/param"] = f"({size})" if row.emulated else size
    cells["step time"] = "emulated" if is_imitated else MISSING_VALUE_TEXT if row.speed is None else f"{row.speed:.2f}×"
    return cells


def list_filled_column_headers(evidence: FinishedTrials, task: str) -> list[str]:
    """Return the columns of a task's table that hold something."""
    lines = [format_row_cells(evidence, row) for row in evidence.rows(task)]
    return [header for header in lines[0] if any(line[header] != MISSING_VALUE_TEXT for line in lines)]


def has_gradient_formats(evidence: FinishedTrials, task: str) -> bool:
    """Return whether a recipe of the comparison has a format for gradients."""
    return any(record["settings"]["recipe"].get("gradient_format") for record in evidence.of_task(task))


def compute_stored_bytes(row: Row) -> float | None:
    """Return bytes per parameter as measured; of an emulated format, what its bits would take."""
    if row.emulated is None or row.bytes_per_parameter is None:
        return row.bytes_per_parameter
    return row.bytes_per_parameter * formats.get(row.emulated).bits / 32


def list_table_notes(evidence: FinishedTrials, task: str) -> list[str]:
    """Return the notes beneath the table of a task, which explain its columns."""
    if "notes" in evidence.run:
        return list(evidence.run["notes"])
    record = evidence.of_task(task)[0]
    settings, result = record["settings"], record["result"]
    target, rows = settings["task"].get("target", "example"), evidence.rows(task)
    judged = sum(row.noise is not None and row.verdict not in ("reference", "control") for row in rows)
    notes = {
        f"{settings['steps']} steps of {settings['task']['rule']}, {rows[0].seeds} "
        f"{'seed' if rows[0].seeds == 1 else 'seeds'}, {result['parameters']:,} parameters; {result['data']}.": True,
        "Loss in nats, mean ± spread over seeds, in float32 on the decoded weights; gaps are paired by seed.": True,
        f"Accuracy is on validation data, where one {target} is {100 / (result['targets'] or 1):.2g}%.": bool(target)
        and any(row.accuracy is not None for row in rows),
        "Cancelled: the share of weight updates that rounding turned into nothing. Movement kept: how much of the "
        "wanted movement took place, large updates counting most; stochastic rounding makes up for what it "
        "cancels.": True,
        f"Step time is CPU time on one thread against fp32's {format_number(rows[0].step_ms, 2)} ms.": True,
        "A verdict needs 3 seeds: --seeds 3 --resume trains only what is missing.": any(
            row.verdict is None for row in rows
        ),
        f"Verdicts are corrected for the {judged} recipes: by chance any of them is called worse or better in at most "
        "5% of comparisons.": judged > 1,
        f"Unclear: the gaps of the seeds lie too far apart to tell. More will: --seeds {2 * rows[0].seeds} "
        "--resume.": any(row.verdict == "unclear" for row in rows),
        "Skipped: steps without an update, as a gradient was not finite. Formats of gradients are imitated in float32 "
        "tensors, slowly; the bytes are those of float32 gradients.": has_gradient_formats(evidence, task),
        "Emulated formats live in float32 tensors, slowly; the bytes in brackets are what their bits would take.": any(
            row.emulated for row in rows
        ),
    }
    return [note for note, is_needed in notes.items() if is_needed]


def format_tables(evidence: FinishedTrials) -> str:
    """Return all tables as aligned plain text, with their notes."""
    parts = []
    for task in evidence.tasks():
        headers = list_filled_column_headers(evidence, task)
        lines = [format_row_cells(evidence, row) for row in evidence.rows(task)]
        table = align_columns([headers, *([line[header] for header in headers] for line in lines)])
        parts += [task, *table, *list_table_notes(evidence, task), ""]
    return "\n".join(parts).rstrip()


def write_comparison_headline(evidence: FinishedTrials) -> str:
    """Return which recipe keeps float32's accuracy on every task with the fewest bytes, or that none does."""
    task = max(evidence.tasks(), key=lambda task: evidence.of_task(task)[0]["result"]["parameters"])
    reference = evidence.row(task, REFERENCE_RECIPE)
    everywhere = Counter(row.recipe for row in evidence.rows() if row.verdict in PASSING_VERDICTS)
    kept = [
        row
        for row in evidence.rows(task)
        if not row.emulated and row.bytes_per_parameter is not None and everywhere[row.recipe] == len(evidence.tasks())
    ]
    if has_few_seeds(evidence):
        return "Too few seeds for a verdict, which needs three."
    if not kept:
        return "No recipe is sure to stay with float32."
    best = min(kept, key=lambda row: (row.bytes_per_parameter, formats.get(row.gradient_format or "fp32").bits))
    size = (
        f"with gradients in {best.gradient_format}"
        if best.gradient_format
        else f"at {format_number(best.bytes_per_parameter, 1)} bytes per parameter instead of "
        f"{format_number(reference.bytes_per_parameter, 1)}"
    )
    where = f" ({task})" if len(evidence.tasks()) > 1 else ""
    return f"{best.recipe} keeps float32’s accuracy {size}{where}."


def describe_recipes_without_pass(evidence: FinishedTrials) -> list[str]:
    """Return sentences per task: which recipes diverged, are worse by how much, or need more seeds."""
    said = []
    for task in evidence.tasks():
        for verdict, words in (
            ("diverged", "Diverged"),
            ("worse", "Worse than fp32"),
            ("unclear", "In need of more seeds for a verdict"),
        ):
            rows = [row for row in evidence.rows(task) if row.verdict == verdict]
            names = ", ".join(
                row.recipe if row.gap is None else f"{row.recipe} ({format_number(row.gap, 3, sign=True)})"
                for row in rows
            )
            said += [f"{words} on {task}: {names}."] if rows else []
    return said


def has_few_seeds(evidence: FinishedTrials) -> bool:
    """Return whether there are too few seeds for a verdict."""
    return any(row.verdict is None for row in evidence.rows())
