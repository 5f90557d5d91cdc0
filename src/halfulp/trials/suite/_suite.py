"""run_suite: train the papers' tasks under their recipes, whatever some pairs refuse, and report what was found."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...pages import write_whole
from ...recipes import Recipe
from .._defaults import REFERENCE, TWIN
from ..evidence._evidence import Evidence
from ..evidence._row import FinishedTrials, Row
from ..evidence._table import format_cells, name_judged_loss, write_table_notes
from ..running._plan import Trial, plan_trials
from ..running._progress import describe_duration
from ..running._training import Listener, open_training_run
from ._statements import COMMON_RECIPES, LEFT_OUT_AT_SMALL, REPORTED_RESULTS, SUITE_TASKS, judge_statements


def write_report_sections(evidence: FinishedTrials) -> str:
    """Return the sections of the report as Markdown, without a head."""
    findings = [[one.claim, one.source, one.verdict, one.numbers] for one in judge_statements(evidence)]
    sections = [
        _write_section("How it was run", (), (), *_describe_run(evidence)),
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


def _write_section(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], *said: str) -> str:
    """Return a heading, a table if it has rows, and sentences; these stand first where there is no table."""
    lines = [headers, ["---"] * len(headers), *rows] if rows else []
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
    return "\n\n".join(filter(None, [f"## {title}", table, *said]))


def _describe_run(evidence: FinishedTrials) -> list[str]:
    run, trials = evidence.run, evidence.trials
    recipes = {record["settings"]["recipe"]["name"] for record in trials}
    seeds = {record["settings"]["seed"] for record in trials}
    seeds_said = f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'}"
    seconds = sum(record["result"]["step_ms"] / 1000 * record["settings"]["steps"] for record in trials)
    said = [
        f"{len(evidence.tasks())} tasks, {len(recipes)} recipes, {seeds_said}, {len(trials)} trials of size "
        f"“{run['size']}”, about {describe_duration(seconds)} of training steps on one thread each of "
        f"{run['processor']}.",
        "Every row of a task starts from the same float32 weights, sees the same batches and uses the same "
        "hyper-parameters. Gaps are paired by seed; verdicts are corrected for the number of recipes on the task. A "
        "finding is confirmed if all rows that are decided agree with it, refuted if none does, and mixed otherwise.",
        "What a paper reports is on its own application and quoted from a text that was read; figures that could not "
        "be checked against one are left out.",
    ]
    if len(seeds) < 3:
        few = f"{seeds_said} {'is' if len(seeds) == 1 else 'are'} too few"
        said.append(f"{few} for a spread that decides: a verdict needs three.")
    return said


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
    headers = ("recipe", *shown, "its paper, on its own application", "ours differs")
    notes = "\n".join(f"- {note}" for note in write_table_notes(evidence, task))
    return _write_section(f"{task}: {title}", headers, rows, notes)


def _describe_disagreement(row: Row) -> str:
    """Return our verdict where it is not what the paper's result would be here."""
    paper = REPORTED_RESULTS.get(row.recipe)
    expected = (None, "unclear", paper.expects, "diverged" if paper.expects == "worse" else "better") if paper else ()
    return "" if paper is None or row.verdict in expected else f"{row.verdict} here"


def group_failed_trials(evidence: FinishedTrials) -> list[tuple[str, str, str, str]]:
    """Return task, recipe, seeds and error of failed trials, those of one error in one line."""
    seeds: dict[tuple[str, str, str], list[str]] = {}
    for one in evidence.run.get("failed", []):
        seeds.setdefault((one["task"], one["recipe"], one["why"]), []).append(str(one["seed"]))
    return [(task, recipe, ", ".join(of_seeds), why) for (task, recipe, why), of_seeds in seeds.items()]


def write_suite_report(evidence: FinishedTrials) -> str:
    """Return the report as one Markdown file."""
    command = f"halfulp compare --suite papers --size {evidence.run['size']}"
    written = f"This page is written by `{command} --data DIR --out DIR`."
    return f"# The papers’ tables, every recipe side by side\n\n{written}\n\n{write_report_sections(evidence)}\n"


@dataclasses.dataclass(frozen=True)
class SuiteEvidence(Evidence):
    """The results of `run_suite`: rows of every comparison, pairs left out and why, and the papers' statements.

    ``run`` has besides how it was run the ``size``; ``left_out``: by task and recipe, why a pair has no trials; and
    ``failed``: the task, recipe, seed and error of each trial that raised.
    """

    file_stem: ClassVar[str] = "evidence"
    kind_in_words: ClassVar[str] = "suite"

    def to_dict(self) -> dict[str, Any]:
        """Return what a comparison does, and the papers' statements."""
        return {**super().to_dict(), "statements": [dataclasses.asdict(one) for one in judge_statements(self)]}

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page of a comparison, and beside it evidence.md with the papers' figures and findings."""
        super().to_html(path)
        write_whole(Path(path).with_suffix(".md"), write_suite_report(self))


_WHY_NOT_AT_SMALL = "left out at small, which is to take an hour of one core: name the recipe, or take --size full"


def run_suite(
    size: str = "small",
    seeds: int | Sequence[int] = 3,
    data: str | None = None,
    out: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    listen: Listener | None = None,
    tasks: Sequence[str] | None = None,
    recipes: Sequence[str] | None = None,
) -> SuiteEvidence:
    """Train the papers' kinds of tasks under every recipe, and set their figures and findings beside ours.

    A trial that raises does not end the run: it is listed with what it said. So is what does not go together.

    Args:
        size: Of every trial: "smoke", "small" or "full".
        seeds: How many (0, 1, ...), or which.
        data, workers, resume, overwrite, listen: As `halfulp.compare` takes them.
        out: A folder for evidence.json, evidence.html and evidence.md, and for finished trials.
        tasks, recipes: Names, to run a part; None is all.

    Returns:
        The evidence.

    Raises:
        ValueError: an unknown name, missing data, an output folder that cannot be written or holds something else, or
            no task whose float32 trained.
        TrialError: a worker was killed; what had finished is kept in ``out``.
    """
    trials, left_out = plan_suite(size, seeds, data, tasks, recipes)
    failed: list[dict[str, Any]] = []
    with open_training_run(out, workers, listen, resume, overwrite, SuiteEvidence) as run:
        run.more_run_facts = {"size": size, "left_out": left_out, "failed": failed}
        run.train_missing(trials, failed=failed)
        if not run.make_evidence().tasks():
            said = {one["task"]: one["why"] for one in failed if one["recipe"] == REFERENCE}
            told = "; ".join(f"{task}: {why}" for task, why in said.items())
            raise ValueError(f"no trial under {REFERENCE} finished, against which every gap is measured: {told}")
    evidence = run.make_evidence()
    assert isinstance(evidence, SuiteEvidence)
    return evidence


def plan_suite(
    size: str,
    seeds: int | Sequence[int],
    data: str | None,
    tasks: Sequence[str] | None = None,
    recipes: Sequence[str] | None = None,
) -> tuple[list[Trial], dict[str, dict[str, str]]]:
    """Return the trials of the suite, and by task and recipe why a pair is none of them."""
    common = {one if isinstance(one, str) else one.name: one for one in COMMON_RECIPES}
    everything: dict[str, str | Recipe] = {**common, **{name: name for own in SUITE_TASKS.values() for name in own}}
    allowed = {REFERENCE, TWIN, *_choose_names("recipe", recipes, everything)}
    left_out: dict[str, dict[str, str]] = {}
    trials: list[Trial] = []
    for task in _choose_names("task", tasks, SUITE_TASKS):
        own = [everything[name] for name in (*common, *SUITE_TASKS[task]) if name in allowed]
        late = LEFT_OUT_AT_SMALL.get(task, ()) if size == "small" and recipes is None else ()
        for trial in plan_trials(task, own, seeds, None, data, size, left_out):
            if trial.recipe.name in late:
                left_out.setdefault(task, {})[trial.recipe.name] = _WHY_NOT_AT_SMALL
            else:
                trials.append(trial)
    return trials, left_out


def _choose_names(kind: str, given: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    unknown = sorted(set(given or ()) - set(known))
    if unknown:
        raise ValueError(f"the suite has no {kind} {', '.join(unknown)}; it has {', '.join(known)}")
    return [name for name in known if given is None or name in given]
