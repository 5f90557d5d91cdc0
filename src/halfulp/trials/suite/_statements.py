"""The suite "papers": its tasks and recipes, and the papers' findings: confirmed, refuted, mixed or not decidable."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from ...recipes import Recipe
from .._defaults import REFERENCE, TWIN
from ..evidence._row import FinishedTrials, Row, choose_verdict, compute_interval, compute_tolerance

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

_FEW_BITS = ("e8m5-kahan-stochastic", "e8m3-kahan-stochastic", "e8m1-kahan-stochastic")
_OPERANDS = ("mixed-precision", "fp8-training", "mxfp8", "nvfp4")
# On every task.
COMMON_RECIPES: tuple[str | Recipe, ...] = (
    *(REFERENCE, TWIN, "bf16"),
    Recipe(
        name="bf16-update",
        description="float32 arithmetic, weights held to bfloat16 by nearest rounding",
        format="bf16",
        weight_update="nearest",
    ),
    *("bf16-stochastic", "bf16-kahan", "bf16-split", "bf16-split8"),
    Recipe(
        name="bf16-split-8bit",
        description="exact float32 weights in 16 + 16 bits, 8-bit moments",
        param_dtype="bfloat16",
        weight_update="split",
        state_dtype="8bit",
    ),
    "fp16",
    *_FEW_BITS,
    *("fp16-constant-1", "fp16-constant-128", "fp16-constant-16384", "fp16-dynamic", "fp16-adaptive"),
    *("e5m2-adaptive", *_OPERANDS),
    *("scaled-fp16", "scaled-fp8-state16"),
)
# Several components in every operator take ten to forty times as long: on the tasks of their paper alone.
_COMPONENTS_AND_FLOAT64 = ("fp16-mc2", "fp16-mc3", "fp64", "fp64-mc2")

# Tasks, and what they are trained under beside the common recipes.
SUITE_TASKS: Mapping[str, tuple[str, ...]] = {
    "digits-fpu": ("e8m5", "e8m3", "e8m1"),
    "digits": (),
    "digits-slow": (),
    "cifar10-resnet-half": (),
    "sst2": (),
    "ml100k": (),
    "fsdd": (),
    "tinyshakespeare": (),
    "tinyshakespeare-lstm": (),
    "two-heads": (),
    "mammals": ("fp64", "fp64-mc2"),
    "cancer-mlp": _COMPONENTS_AND_FLOAT64,
    "linear-regression": _COMPONENTS_AND_FLOAT64,
}

# What "small" leaves out of these tasks unless it is named: all that it trains took about an hour of one core.
LEFT_OUT_AT_SMALL: Mapping[str, tuple[str, ...]] = {
    "cifar10-resnet-half": (
        *("fp16", *_FEW_BITS, "e5m2-adaptive", *_OPERANDS),
        *("scaled-fp16", "scaled-fp8-state16"),
    ),
    "tinyshakespeare": (*_FEW_BITS, "e5m2-adaptive", *_OPERANDS),
    "tinyshakespeare-lstm": (*_FEW_BITS, "e5m2-adaptive", *_OPERANDS),
    "two-heads": (*_FEW_BITS, "e5m2-adaptive", *_OPERANDS, "scaled-fp8-state16"),
}


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
    others: str = REFERENCE
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
    if best.recipe == REFERENCE:
        gap, limit, verdict = row.gap or 0.0, row.noise, row.verdict
    else:
        gaps = evidence.gaps(row.task, row.recipe, best.recipe)
        gap, limit = statistics.fmean(gaps), compute_interval(gaps, [], best.loss)
        verdict = choose_verdict(gap, limit, compute_tolerance([], best.loss))
    reach = "" if limit is None else f" ± {limit:.2g}"
    beside = "" if best.recipe == REFERENCE else f" beside {best.recipe}"
    return verdict, f"{gap:+.2g}{reach}{beside} ({verdict or 'too few seeds'})"
