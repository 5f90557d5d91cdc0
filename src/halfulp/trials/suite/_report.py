"""What the papers' suite found: sections as Markdown, and JSON."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...pages import write_whole
from .._defaults import REFERENCE
from ..evidence._evidence import JSON_SCHEMA, Evidence
from ..evidence._row import FinishedTrials, Row
from ..evidence._table import format_cells, name_judged_loss, write_table_notes
from ..running._progress import describe_duration
from ._statements import REPORTED_RESULTS, explain_loss, judge_statements


def write_report_sections(evidence: FinishedTrials) -> str:
    """Return the sections of the report as Markdown, without a head."""
    findings = [[one.claim, one.source, one.verdict, one.numbers] for one in judge_statements(evidence)]
    sections = [
        _write_run_section(evidence),
        _write_section("The papers’ findings", ("statement", "paper", "verdict", "numbers"), findings),
        *(_write_task_section(evidence, task) for task in evidence.tasks()),
    ]
    if evidence.run.get("failed"):
        said = "The command ended with an error because of these; a row above counts the seeds that finished."
        headers = ("task", "recipe", "seeds", "why")
        sections.append(_write_section("Trials that failed, and why", headers, group_failed_trials(evidence), said))
    left_out = [
        [task, ", ".join(recipe for recipe, said in of_task.items() if said == why), why]
        for task, of_task in evidence.run.get("left_out", {}).items()
        for why in dict.fromkeys(of_task.values())
    ]
    sections.append(_write_section("Pairs that were not run, and why", ("task", "recipes", "why"), left_out))
    return "\n\n".join(sections)


def _write_section(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], *said: str, notes: str = ""
) -> str:
    """Return a heading, sentences, a table if it has rows, and notes."""
    lines = [headers, ["---"] * len(headers), *rows] if rows else []
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
    return "\n\n".join(filter(None, [f"## {title}", *said, table, notes]))


def _write_run_section(evidence: FinishedTrials) -> str:
    run = evidence.run
    recipes = {record["settings"]["recipe"]["name"] for record in evidence.trials}
    seeds = {record["settings"]["seed"] for record in evidence.trials}
    seeds_said = f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'}"
    said = [
        f"{len(evidence.tasks())} tasks, {len(recipes)} recipes, {seeds_said}, {len(evidence.trials)} trials of size "
        f"“{run['size']}”, {_describe_training_time(evidence)}.",
        "Every row of a task starts from the same float32 weights, sees the same batches and uses the same "
        "hyper-parameters. Gaps are paired by seed; verdicts are corrected for the number of recipes on the task.",
        "What a paper reports is on its own application and quoted from a text that was read; figures that could not "
        "be checked against one are left out.",
    ]
    if len(seeds) < 3:
        few = f"{seeds_said} {'is' if len(seeds) == 1 else 'are'} too few"
        said.append(f"{few} for a spread that decides: a verdict needs three.")
    return _write_section("How it was run", (), (), *said)


def _describe_training_time(evidence: FinishedTrials) -> str:
    """Return how much CPU time the training took, in words."""
    results = [record["result"] for record in evidence.trials]
    steps = [record["settings"]["steps"] for record in evidence.trials]
    seconds = sum(result["step_ms"] / 1000 * count for result, count in zip(results, steps))
    return f"about {describe_duration(seconds)} of training steps on one thread each of {evidence.run['processor']}"


def _write_task_section(evidence: FinishedTrials, task: str) -> str:
    loss = name_judged_loss(evidence, task)
    shown = (loss, "gap to fp32", "verdict", "accuracy", "movement kept", "bytes/param", "step time")
    rows = []
    for row in evidence.rows(task):
        words = format_cells(evidence, row)
        found = (record["result"]["diverged_at"] for record in evidence.of_recipe(task, row.recipe))
        steps = [str(step) for step in found if step is not None]
        if row.diverged and steps:
            words["verdict"] += f" at step {', '.join(steps)}"
        paper = REPORTED_RESULTS.get(row.recipe)
        reported = f"{paper.says} ({paper.source})" if paper else "–"
        rows.append([row.recipe, *(words[name] for name in shown), reported, _describe_disagreement(row)])
    title = evidence.of_task(task)[0]["settings"]["task"]["title"]
    headers = ("recipe", *shown, "its paper, on its own application", "where ours disagrees")
    notes = "\n".join(f"- {note}" for note in write_table_notes(evidence, task))
    return _write_section(f"{task}: {title}", headers, rows, notes=notes)


def _describe_disagreement(row: Row) -> str:
    """Describe how our verdict differs from the paper's, and the reading that best explains it."""
    paper = REPORTED_RESULTS.get(row.recipe)
    if paper is None or row.verdict in (None, "unclear", paper.expects):
        return ""
    if row.verdict == "better":
        return "" if paper.expects == "no difference" else "better here"
    lost = row.verdict in ("worse", "diverged")
    if lost == (paper.expects == "worse"):
        return ""
    if lost:
        return f"{row.verdict} here; {explain_loss(row)}"
    return f"no loss here; {_explain_no_loss(row)}"


def _explain_no_loss(row: Row) -> str:
    if row.underflow is not None:
        return f"{100 * row.underflow:.1f}% of the gradient elements underflow on this task"
    if row.realised is not None:
        return f"the updates are large enough here: {100 * row.realised:.0f}% of the movement is kept"
    return "the task is smaller than the paper's"


def group_failed_trials(evidence: FinishedTrials) -> list[tuple[str, str, str, str]]:
    """Return task, recipe, seeds and error of failed trials, those of one error in one line."""
    seeds: dict[tuple[str, str, str], list[str]] = {}
    for one in evidence.run.get("failed", []):
        seeds.setdefault((one["task"], one["recipe"], one["why"]), []).append(str(one["seed"]))
    return [(task, recipe, ", ".join(of_seeds), why) for (task, recipe, why), of_seeds in seeds.items()]


def write_suite_report(evidence: FinishedTrials) -> str:
    """Return the report as one Markdown file."""
    command = f"halfulp compare --suite {evidence.run['suite']} --size {evidence.run['size']}"
    written = f"This page is written by `{command} --data DIR --out DIR`."
    return f"# The papers’ tables, every recipe side by side\n\n{written}\n\n{write_report_sections(evidence)}\n"


@dataclasses.dataclass(frozen=True)
class SuiteEvidence(Evidence):
    """The results of `run_suite`: rows of every comparison, pairs left out and why, and the papers' statements.

    ``run`` has besides how it was run the ``suite``, the ``size``, ``left_out``: by task and recipe, why a pair has
    no trials; and ``failed``: the task, recipe, seed and error of each trial that raised.
    """

    file_stem: ClassVar[str] = "evidence"
    kind_in_words: ClassVar[str] = "suite"

    def tasks(self) -> list[str]:
        """Return the names of the tasks that have trials under float32: without one there is no gap."""
        heads = (record["settings"] for record in self.trials)
        return list(dict.fromkeys(head["task"]["name"] for head in heads if head["recipe"]["name"] == REFERENCE))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: each task's and recipe's settings once, and a curve's two ends."""
        shared: dict[str, dict[str, Any]] = {"tasks": {}, "recipes": {}}
        trials = []
        for record in self.trials:
            settings, result = record["settings"], dict(record["result"])
            task, recipe = settings["task"], settings["recipe"]
            shared["tasks"][task["name"]], shared["recipes"][recipe["name"]] = task, recipe
            result["curve"] = [result["curve"][0], result["curve"][-1]] if result["curve"] else []
            head = {"task": task["name"], "recipe": recipe["name"], "seed": settings["seed"]}
            trials.append({**head, "steps": settings["steps"], "result": result})
        versions = self.trials[0]["settings"]["versions"] if self.trials else {}
        return {
            "schema": JSON_SCHEMA,
            "run": self.run,
            "versions": versions,
            "statements": [dataclasses.asdict(one) for one in judge_statements(self)],
            "rows": [dataclasses.asdict(row) for row in self.rows()],
            **shared,
            "suite trials": trials,
        }

    def to_json(self) -> str:
        """Return ``to_dict`` as JSON text without NaN or infinities, a trial a line."""
        whole = self.to_dict()
        parts = []
        for key, value in whole.items():
            if isinstance(value, list):
                lines = ",\n  ".join(json.dumps(one, allow_nan=False) for one in value)
                parts.append(f"{json.dumps(key)}: [\n  {lines}\n ]")
            else:
                parts.append(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
        return "{\n " + ",\n ".join(parts) + "\n}\n"

    @classmethod
    def _read_trial_records(cls, data: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {
                "settings": {
                    "task": data["tasks"][one["task"]],
                    "recipe": data["recipes"][one["recipe"]],
                    "seed": one["seed"],
                    "steps": one["steps"],
                    "versions": data["versions"],
                },
                "result": one["result"],
            }
            for one in data["suite trials"]
        ]

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page of a comparison, and beside it evidence.md with the papers' figures and findings."""
        super().to_html(path)
        write_whole(Path(path).with_suffix(".md"), write_suite_report(self))
