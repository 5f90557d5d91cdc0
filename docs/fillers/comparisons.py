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
    from halfulp.trials.evidence._table import cells

    evidence = Evidence.from_json(path.read_text(encoding="utf-8"))
    return [cells(evidence, row) for row in evidence.rows(task)] if task in evidence.tasks() else []


def _comparison(task: str, columns: Sequence[str]) -> str:
    lines = _lines("compare.json", task)
    return _chosen(lines, columns) if lines else ""


def _chosen(lines: list[dict[str, str]], columns: Sequence[str]) -> str:
    names = [name for name in lines[0] if name in columns or name.endswith(" loss")]
    return grid(names, [[line[name] for name in names] for line in lines])


_SHORT = ("recipe", "gap to fp32", "verdict", "cancelled", "bytes/param", "step time")


_LONG = (*_SHORT, "accuracy", "own arithmetic", "movement kept")


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
    """The GPT of Scalify's kind, the paper's gaps beside ours."""
    lines = _lines("scaled.json", "gpt-scaled")
    return _chosen(lines, (*_SHORT, "gap in the paper")) if lines else ""


@place
def compare_scaled_digits() -> str:
    """The same recipes on the classifier of digits."""
    lines = _lines("scaled.json", "digits")
    return _chosen(lines, _SHORT) if lines else ""


def _scaled_gradients(file: str, task: str) -> str:
    lines = _lines(file, task)
    shown = ("recipe", "gap to fp32", "verdict", "accuracy", "skipped", "underflow")
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
    from halfulp.trials.evidence._table import notes

    evidence = Evidence.from_json(path.read_text(encoding="utf-8"))
    return notes(evidence, task)[0]


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
    from halfulp.trials.suite._evidence import SuiteEvidence

    path = RESULTS / file
    return SuiteEvidence.from_json(path.read_text(encoding="utf-8")) if path.exists() else None


@place
def evidence() -> str:
    """The papers' suite: statements, a table per task, and what was left out."""
    from halfulp.trials.suite._report import body

    found = _suite("evidence.json")
    return "" if found is None else body(found)


@place
def evidence_two_heads() -> str:
    """The statements about two losses, from the comparison of all scales on them."""
    from halfulp.trials import Evidence
    from halfulp.trials.suite._statements import statements

    path = RESULTS / "two-heads.json"
    if not path.exists():
        return ""
    found = [
        one for one in statements(Evidence.from_json(path.read_text(encoding="utf-8"))) if "two losses" in one.claim
    ]
    return grid(("statement", "verdict", "numbers"), [(one.claim, one.verdict, one.numbers) for one in found])


@place
def evidence_again() -> str:
    """The verdicts of one task by other seeds of everything, beside those of the tables."""
    from halfulp.trials.evidence._table import with_spread
    from halfulp.trials.suite._evidence import SuiteEvidence

    again, first = _suite("evidence-again.json"), _suite("evidence.json")
    if again is None or first is None:
        return ""
    (task,) = again.tasks()
    compared = {row.recipe for row in again.rows(task)}
    own = [one for one in first.of_task(task) if one["settings"]["recipe"]["name"] in compared]
    before = {row.recipe: row for row in SuiteEvidence(tuple(own), first.run).rows(task)}
    rows = []
    for row in again.rows(task):
        pair = (before[row.recipe], row)
        gaps = [with_spread(one.gap, one.gap_spread, 4, sign=True) for one in pair]
        same = "yes" if pair[0].verdict == row.verdict else "no"
        rows.append([row.recipe, gaps[0], str(pair[0].verdict), gaps[1], str(row.verdict), same])
    seeds = [sorted({one["settings"]["seed"] for one in records}) for records in (own, again.trials)]
    words = [f"seeds {', '.join(map(str, numbers))}" for numbers in seeds]
    headers = ("recipe", f"gap, {words[0]}", "verdict", f"gap, {words[1]}", "verdict", "the same")
    return f"{task}:\n\n{grid(headers, rows)}"
