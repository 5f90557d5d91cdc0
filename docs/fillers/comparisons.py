"""What `halfulp compare` found, from docs/results."""

import json
from collections.abc import Sequence
from typing import Any

from ._places import place
from ._tables import RESULTS, grid


def _lines(file: str, task: str) -> list[dict[str, str]]:
    """A comparison's table of a task, none where it was not run."""
    path = RESULTS / file
    if not path.exists():
        return []
    from halfulp.trials import Evidence
    from halfulp.trials.evidence._table import format_row_cells

    evidence = Evidence.from_json(path.read_text(encoding="utf-8"))
    return [format_row_cells(evidence, row) for row in evidence.rows(task)] if task in evidence.tasks() else []


def _comparison(task: str, columns: Sequence[str]) -> str:
    lines = _lines("compare.json", task)
    return _chosen(lines, columns) if lines else ""


def _chosen(lines: list[dict[str, str]], columns: Sequence[str]) -> str:
    names = [name for name in lines[0] if name in columns or name.endswith(" loss")]
    return grid(names, [[line[name] for name in names] for line in lines])


_SHORT = ("recipe", "gap to fp32", "verdict", "cancelled", "bytes/param", "step time")


_LONG = (*_SHORT, "accuracy", "movement kept")


@place
def compare_text_short() -> str:
    """The character-level GPT, the columns that decide."""
    return _comparison("text", _SHORT)


@place
def compare_text() -> str:
    """The character-level GPT."""
    return _comparison("text", _LONG)


@place
def compare_digits() -> str:
    """The digits classifier."""
    return _comparison("digits", _LONG)


@place
def compare_scaled() -> str:
    """The GPT of Scalify's kind, the paper's gaps (arXiv 2407.17353, table 3) beside ours."""
    lines = _lines("scaled.json", "gpt-scaled")
    paper = {"scaled-fp16-master": "0.00", "scaled-fp16": "+0.05", "scaled-fp8": "+0.05", "scaled-fp8-state16": "+0.06"}
    lines = [{**line, "gap in the paper": paper.get(line["recipe"], "–")} for line in lines]
    return _chosen(lines, (*_SHORT, "gap in the paper")) if lines else ""


@place
def compare_scaled_digits() -> str:
    """The same recipes on the classifier of digits."""
    lines = _lines("scaled.json", "digits")
    return _chosen(lines, _SHORT) if lines else ""


def _scaled_gradients(file: str, task: str) -> str:
    lines = _lines(file, task)
    shown = ("recipe", "gap to fp32", "verdict", "accuracy", "skipped")
    return _chosen(lines, (next(name for name in lines[0] if name.endswith(" loss")), *shown)) if lines else ""


@place
def compare_two_heads() -> str:
    """Gradients in float16 and eight bits, two losses far apart, under every policy."""
    return _scaled_gradients("two-heads.json", "two-heads")


@place
def compare_e5m2_text() -> str:
    """Eight-bit gradients of a character-level GPT."""
    return _scaled_gradients("e5m2.json", "text")


@place
def compare_e5m2_images() -> str:
    """Eight-bit gradients of a residual network."""
    return _scaled_gradients("e5m2.json", "cifar10-resnet")


def _notes(task: str) -> str:
    path = RESULTS / "compare.json"
    if not path.exists():
        return ""
    from halfulp.trials import Evidence
    from halfulp.trials.evidence._table import list_table_notes

    evidence = Evidence.from_json(path.read_text(encoding="utf-8"))
    return list_table_notes(evidence, task)[0]


@place
def compare_text_notes() -> str:
    """How long the character-level GPT trained, and on what."""
    return _notes("text")


@place
def compare_digits_notes() -> str:
    """How long the digits classifier trained, and on what."""
    return _notes("digits")


@place
def compare_setting() -> str:
    """How the comparison was run."""
    path = RESULTS / "compare.json"
    if not path.exists():
        return ""
    data = json.loads(path.read_text(encoding="utf-8"))
    versions = data["trials"][0]["settings"]["versions"]
    said = ", ".join(f"{name} {value}" for name, value in versions.items())
    minutes, workers = data["run"]["seconds"] / 60, data["run"]["workers"]
    processor = data["run"].get("processor", "the CPU")
    spent = f"{minutes:.1f} minutes by {workers} workers of one thread on {processor}"
    limited = RESULTS / "compare-avx2.json"
    if limited.exists():
        run = json.loads(limited.read_text(encoding="utf-8"))["run"]
        spent += (
            f"; {run['seconds'] / 60:.1f} with its instructions above AVX2 switched off (docs/results/{limited.name})"
        )
    return f"`halfulp compare`: {spent} ({said}; docs/results/compare.json)."


def _suite(file: str) -> Any:
    from halfulp.trials import Evidence

    path = RESULTS / file
    return Evidence.from_json(path.read_text(encoding="utf-8")) if path.exists() else None


@place
def evidence() -> str:
    """The papers' suite: statements, a table per task, and what was left out."""
    from ._papers import write_report_sections

    found = _suite("evidence.json")
    return "" if found is None else write_report_sections(found)


@place
def evidence_two_heads() -> str:
    """The statements about adaptive scales, from the comparison of all scales on two losses."""
    from halfulp.trials import Evidence

    from ._papers import judge_statements

    path = RESULTS / "two-heads.json"
    if not path.exists():
        return ""
    found = judge_statements(Evidence.from_json(path.read_text(encoding="utf-8")))
    rows = [(one.claim, one.verdict, one.numbers) for one in found if one.claim.startswith("adaptive scales")]
    return grid(("statement", "verdict", "numbers"), rows)


@place
def evidence_again() -> str:
    """The verdicts of one task by two sets of seeds, how many agree, and what decides where they do not."""
    from halfulp.trials.evidence._table import format_with_spread

    from ._papers import OPEN, judge_statements

    runs = [_suite("evidence-first.json"), _suite("evidence-again.json")]
    if None in runs:
        return ""
    (task,) = runs[0].tasks()
    seeds = [sorted({one["settings"]["seed"] for one in run.trials}) for run in runs]
    first, again = ({row.recipe: row for row in run.rows(task)} for run in runs)
    judged = [name for name, row in first.items() if row.verdict not in ("reference", "control")]
    rows, differ = [], []
    for name in judged:
        pair = (first[name], again[name])
        same = pair[0].verdict == pair[1].verdict
        cells = [
            cell
            for row in pair
            for cell in (format_with_spread(row.gap, row.gap_spread, 5, sign=True), str(row.verdict))
        ]
        rows.append([name, *cells, "yes" if same else "no"])
        if not same:
            limits = " and ".join(f"{abs(row.gap):.2g} against a noise of {row.noise:.2g}" for row in pair)
            differ.append(f"- {name}: {limits}; gaps up to {pair[0].tolerance:.2g} can be called no difference.")
    words = [f"seeds {numbers[0]} to {numbers[-1]}" for numbers in seeds]
    headers = ("recipe", *(cell for one in words for cell in (f"gap, {one}", "verdict")), "the same")
    claims = [pair for pair in zip(*map(judge_statements, runs)) if any(one.verdict != OPEN for one in pair)]
    kept = f"{sum(one.verdict == other.verdict for one, other in claims)} of {len(claims)} statements that it decides"
    agree = f"{len(judged) - len(differ)} of {len(judged)} recipes"
    said = f"{task}: {agree} have the same verdict by {' and by '.join(words)}, and {kept}."
    return "\n\n".join([said, *(["\n".join(differ)] if differ else []), grid(headers, rows)])
