"""The papers' findings beside ours: what each reports, its statements judged by our verdicts, and docs/evidence.md."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from halfulp.trials._defaults import REFERENCE_RECIPE
from halfulp.trials.evidence._row import (
    FinishedTrials,
    Row,
    bound_mean_gap_error,
    choose_verdict,
    compute_gap_tolerance,
)
from halfulp.trials.evidence._table import describe_judged_loss, format_row_cells, list_table_notes

_BF16_PAPER = "arXiv 2010.06192"
_SCALES_PAPER = "arXiv 1910.12385"
_SCALES_SOURCE = f"{_SCALES_PAPER} and its repository"
_SCALIFY_PAPER = "arXiv 2407.17353"
_SCALIFY_SOURCE = f"{_SCALIFY_PAPER}, table 3"
_MCTENSOR_PAPER = "arXiv 2207.08867"
_MCTENSOR_SOURCE = f"{_MCTENSOR_PAPER} and its notebooks"
_FLASH_PAPER = "arXiv 2602.23349"
_SAME = "no difference"
_TITAN_NOTES = "torchtitan's NVFP4 notes, Llama 3 8B, 200M tokens"


@dataclasses.dataclass(frozen=True)
class PaperResult:
    """A paper's result for a recipe on its own applications, and the verdict that would match it here."""

    says: str
    source: str
    expects: str


_RESNET18_ACCURACIES = "ResNet-18 on ImageNet: 71.48 adaptive, 71.24 without a scale, 71.39 constant or dynamic"
REPORTED_RESULTS: Mapping[str, PaperResult] = {
    "bf16": PaperResult(
        "up to 7% less validation accuracy than with stochastic rounding or Kahan; BERT loses 16% training accuracy",
        _BF16_PAPER,
        "worse",
    ),
    "bf16-update": PaperResult("nearest rounding of the update alone is what hurts", _BF16_PAPER, "worse"),
    "bf16-stochastic": PaperResult(
        "matches 32 bits in 5 of 7 applications, −0.1% to +0.2% over all 7", _BF16_PAPER, _SAME
    ),
    "bf16-kahan": PaperResult("closes the remaining gap on all 7 applications", _BF16_PAPER, _SAME),
    "bf16-split": PaperResult("with 32-bit weights the gap of 16-bit arithmetic closes", _BF16_PAPER, _SAME),
    "bf16-split8": PaperResult(
        "no measurable loss with 8 more bits and 8-bit moments, SGD, AdamW, Lion", _FLASH_PAPER, _SAME
    ),
    "fp16": PaperResult("float16 fails for its range", _BF16_PAPER, "worse"),
    "fp16-constant-1": PaperResult(f"{_RESNET18_ACCURACIES}; SSD512 without a scale diverged", _SCALES_SOURCE, "worse"),
    "fp16-constant-128": PaperResult("SSD512, batch 8: 78.71 (float32 78.94); ResNet-18: 71.39", _SCALES_SOURCE, _SAME),
    "fp16-constant-16384": PaperResult(
        "SSD300: constants from 8 to 8192 give 75.7 to 76.3, adaptive 76.35", _SCALES_SOURCE, _SAME
    ),
    "fp16-dynamic": PaperResult("SSD512, batch 8: 75.04 (float32 78.94); ResNet-18: 71.39", _SCALES_SOURCE, "worse"),
    "fp16-adaptive": PaperResult("SSD512, batch 8: 79.27 (float32 78.94); ResNet-18: 71.48", _SCALES_SOURCE, _SAME),
    "mixed-precision": PaperResult(
        "ResNet-50: 76.04 (float32 75.92); SSD: 77.1 with a scale, diverges without (float32 76.9)",
        "arXiv 1710.03740",
        _SAME,
    ),
    "fp8-training": PaperResult(
        "“slightly higher validation accuracy compared to full precision baseline”, from its abstract",
        "arXiv 1905.12334",
        _SAME,
    ),
    "mxfp8": PaperResult("loss 1.2671 against 1.2738 of bfloat16", _TITAN_NOTES, _SAME),
    "nvfp4": PaperResult("loss 1.2715 against 1.2738 of bfloat16", _TITAN_NOTES, _SAME),
    "scaled-fp16": PaperResult("training loss 2.92 ± 0.12 against 2.87 ± 0.12", _SCALIFY_SOURCE, _SAME),
    "scaled-fp8-state16": PaperResult("training loss 2.93 ± 0.12 against 2.87 ± 0.12", _SCALIFY_SOURCE, _SAME),
    "fp16-mc2": PaperResult(
        "MLP 0.1232869 against 0.1232752 of float32; regression 1.97e-6 against 8.3e-12", _MCTENSOR_SOURCE, _SAME
    ),
    "fp16-mc3": PaperResult(
        "MLP 0.1232873 against 0.1232752 of float32; regression 1.97e-6 against 8.3e-12", _MCTENSOR_SOURCE, _SAME
    ),
    "fp64-mc2": PaperResult(
        "mammals: mean average precision 0.9148 against 0.9106 of float64", _MCTENSOR_SOURCE, _SAME
    ),
}


class PaperFinding(NamedTuple):
    """A paper's finding: the verdict that it expects of some recipes beside the best of others, on every task.

    Recipes and tasks are globs. "No difference" is fulfilled by "better" too.
    """

    claim: str
    source: str
    recipes: str
    expects: str
    others: str = REFERENCE_RECIPE
    tasks: str = "*"


_CONSTANTS = "fp16-constant-*"
_ON_REGRESSION = "on the linear regression, float16 MCTensor weights equal float64"
_BEST_CONSTANT = "adaptive scales are no worse than the best constant scale, without tuning"
_TWO_LOSSES = "adaptive scales are better than any constant scale where two losses are far apart"
_NO_LOSS_SCALE = "with scales that propagate, float16 stays with float32 without a loss scale"
PAPER_FINDINGS = (
    PaperFinding("bfloat16 with nearest rounding everywhere loses against float32", _BF16_PAPER, "bf16", "worse"),
    PaperFinding("rounding the weight update to nearest loses by itself", _BF16_PAPER, "bf16-update", "worse"),
    PaperFinding("rounding forward and backward loses nothing by itself", _BF16_PAPER, "bf16-split", _SAME),
    PaperFinding("stochastic rounding stays with float32", _BF16_PAPER, "bf16-stochastic", _SAME),
    PaperFinding("Kahan summation stays with float32", _BF16_PAPER, "bf16-kahan", _SAME),
    PaperFinding("weights of several float16 components stay with float32", _MCTENSOR_PAPER, "fp16-mc?", _SAME),
    PaperFinding(_ON_REGRESSION, _MCTENSOR_PAPER, "fp16-mc?", _SAME, "fp64", "linear-regression"),
    PaperFinding(_BEST_CONSTANT, _SCALES_PAPER, "fp16-adaptive", _SAME, _CONSTANTS),
    PaperFinding(_TWO_LOSSES, _SCALES_PAPER, "fp16-adaptive", "better", _CONSTANTS, "two-heads"),
    PaperFinding("scaled FP8, float16 state, stays with float32", _SCALIFY_PAPER, "scaled-fp8-state16", _SAME),
    PaperFinding(_NO_LOSS_SCALE, _SCALIFY_PAPER, "scaled-fp16", _SAME),
)

CONFIRMED, REFUTED, MIXED, OPEN = "confirmed", "refuted", "mixed", "not decidable at this size"


@dataclasses.dataclass(frozen=True)
class JudgedStatement:
    """A paper's finding, our verdict on it, and the numbers behind the verdict."""

    claim: str
    source: str
    verdict: str
    numbers: str


def judge_statements(evidence: FinishedTrials) -> list[JudgedStatement]:
    """Return every finding, in the order of the papers: confirmed or refuted by all rows that are decided, or mixed."""
    rows = evidence.rows()
    return [_judge_finding(evidence, rows, finding) for finding in PAPER_FINDINGS]


def _judge_finding(evidence: FinishedTrials, rows: Sequence[Row], finding: PaperFinding) -> JudgedStatement:
    fulfilling = (finding.expects, "better") if finding.expects == _SAME else (finding.expects, "diverged")
    agreeing, decided, said = 0, 0, []
    for row in rows:
        if not fnmatchcase(row.recipe, finding.recipes) or not fnmatchcase(row.task, finding.tasks):
            continue
        others = [one for one in rows if one.task == row.task and fnmatchcase(one.recipe, finding.others)]
        if not others:
            continue
        verdict, words = _compare_with_best(evidence, row, others)
        said.append(f"{row.task} {row.recipe} {words}")
        agreeing += verdict in fulfilling
        decided += verdict not in ("unclear", None)
    verdict = OPEN if not decided else CONFIRMED if agreeing == decided else MIXED if agreeing else REFUTED
    numbers = f"{agreeing} of {decided} that are decided; {'; '.join(said)}" if said else "no task of this run tells"
    return JudgedStatement(finding.claim, finding.source, verdict, numbers)


def _compare_with_best(evidence: FinishedTrials, row: Row, others: Sequence[Row]) -> tuple[str | None, str]:
    """Return the verdict on a recipe beside the best of others on its task, by losses paired by seed, and in words."""
    best = min(others, key=lambda one: float("inf") if one.loss is None else one.loss)
    if row.diverged or best.loss is None:
        return ("diverged", "diverged") if row.diverged else ("better", f"where {best.recipe} diverged")
    if best.recipe == REFERENCE_RECIPE:
        gap, limit, verdict = row.gap or 0.0, row.noise, row.verdict
    else:
        gaps = evidence.gaps(row.task, row.recipe, best.recipe)
        gap, limit = statistics.fmean(gaps), bound_mean_gap_error(gaps, [], best.loss)
        verdict = choose_verdict(gap, limit, compute_gap_tolerance([], best.loss))
    reach = "" if limit is None else f" ± {limit:.2g}"
    beside = "" if best.recipe == REFERENCE_RECIPE else f" beside {best.recipe}"
    return verdict, f"{gap:+.2g}{reach}{beside} ({verdict or 'too few seeds'})"


def write_report_sections(evidence: FinishedTrials) -> str:
    """Return the sections of the report as Markdown, without a head."""
    findings = [[one.claim, one.source, one.verdict, one.numbers] for one in judge_statements(evidence)]
    sections = [
        _write_section("How it was run", (), (), *_describe_run(evidence)),
        _write_section("The papers’ findings", ("statement", "paper", "verdict", "numbers"), findings),
        *(_write_task_section(evidence, task) for task in evidence.tasks()),
    ]
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
        f"“{run['size']}”, about {seconds / 60:.1f} min of training steps on one thread each of "
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
    loss = describe_judged_loss(evidence, task)
    shown = (loss, "gap to fp32", "verdict", "accuracy", "movement kept", "bytes/param", "step time")
    rows = []
    for row in evidence.rows(task):
        words = format_row_cells(evidence, row)
        found = (record["result"]["diverged_at"] for record in evidence.of_recipe(task, row.recipe))
        steps = [str(step) for step in found if step is not None]
        if row.diverged and steps:
            words["verdict"] += f" at step {', '.join(steps)}"
        paper = REPORTED_RESULTS.get(row.recipe)
        reported = f"{paper.says} ({paper.source})" if paper else "–"
        rows.append([row.recipe, *(words[name] for name in shown), reported, _describe_disagreement(row)])
    title = evidence.of_task(task)[0]["settings"]["task"]["title"]
    headers = ("recipe", *shown, "its paper, on its own application", "ours differs")
    notes = "\n".join(f"- {note}" for note in list_table_notes(evidence, task))
    return _write_section(f"{task}: {title}", headers, rows, notes)


def _describe_disagreement(row: Row) -> str:
    """Return our verdict where it is not what the paper's result would be here."""
    paper = REPORTED_RESULTS.get(row.recipe)
    expected = (None, "unclear", paper.expects, "diverged" if paper.expects == "worse" else "better") if paper else ()
    return "" if paper is None or row.verdict in expected else f"{row.verdict} here"
