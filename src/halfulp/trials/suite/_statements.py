"""The suite "papers": its tasks and recipes, and the papers' findings, each confirmed, refuted or not decidable."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ...recipes import Recipe
from .._defaults import FAILING_VERDICTS, PASSING_VERDICTS, TWIN
from ..evidence._row import FinishedTrials, Row, compute_half_interval, compute_interval, read_judged_loss
from ..evidence._table import format_number, format_percent

_BF16_PAPER = "arXiv 2010.06192"
_SCALES_SOURCE = "arXiv 1910.12385 and its repository"
_SCALIFY_SOURCE = "arXiv 2407.17353, table 3"
_MCTENSOR_SOURCE = "arXiv 2207.08867 and its notebooks"
_FLASH_PAPER = "arXiv 2602.23349"
_TITAN_NOTES = "torchtitan's NVFP4 notes, Llama 3 8B, 200M tokens"


@dataclasses.dataclass(frozen=True)
class PaperResult:
    """A paper's result for a recipe on its own applications, and the verdict that would match it here."""

    says: str
    source: str
    expects: str


_RECIPE_UPDATE_ONLY = Recipe(
    name="bf16-update",
    description="float32 arithmetic, weights held to bfloat16 by nearest rounding",
    format="bf16",
    weight_update="nearest",
)
_RECIPE_8BIT_STATES = Recipe(
    name="bf16-split-8bit",
    description="exact float32 weights in 16 + 16 bits, 8-bit moments",
    param_dtype="bfloat16",
    weight_update="split",
    state_dtype="8bit",
)
_FEW_BITS = ("e8m5-kahan-stochastic", "e8m3-kahan-stochastic", "e8m1-kahan-stochastic")
_OPERANDS = ("mixed-precision", "fp8-training", "mxfp8", "nvfp4")
# On every task.
COMMON_RECIPES: tuple[str | Recipe, ...] = (
    *("fp32", "fp32-twin", "bf16", _RECIPE_UPDATE_ONLY, "bf16-stochastic", "bf16-kahan", "bf16-split", "bf16-split8"),
    *(_RECIPE_8BIT_STATES, "fp16"),
    *_FEW_BITS,
    *("fp16-constant-1", "fp16-constant-128", "fp16-constant-16384", "fp16-dynamic", "fp16-adaptive"),
    *("e5m2-adaptive", *_OPERANDS),
    *("scaled-fp16", "scaled-fp8-state16"),
)
# Several components in every operator take ten to forty times as long: on the tasks of their paper alone.
COMPONENT_RECIPES: tuple[str, ...] = ("fp16-mc2", "fp16-mc3")
FLOAT64_RECIPES: tuple[str, ...] = ("fp64", "fp64-mc2")
FEW_BIT_RECIPES: tuple[str, ...] = ("e8m5", "e8m3", "e8m1")

# What is left out of a task although it would run, and why.
RECIPES_LEFT_OUT: Mapping[str, tuple[tuple[str, ...], str]] = {
    "two-heads": (
        _FEW_BITS,
        "left out: this task is about gradients far apart, and the emulation would take most of its time",
    ),
}
WHY_NO_COMPONENTS = (
    "left out: several components in every operator take ten to forty times as long, see the MCTensor tasks"
)

# Tasks, and what they are trained under beside the common recipes.
SUITE_TASKS: Mapping[str, tuple[str, ...]] = {
    "digits-fpu": FEW_BIT_RECIPES,
    "digits": (),
    "digits-slow": (),
    "cifar10-resnet-half": (),
    "sst2": (),
    "ml100k": (),
    "fsdd": (),
    "tinyshakespeare": (),
    "tinyshakespeare-lstm": (),
    "two-heads": (),
    "mammals": FLOAT64_RECIPES,
    "cancer-mlp": (*COMPONENT_RECIPES, *FLOAT64_RECIPES),
    "linear-regression": (*COMPONENT_RECIPES, *FLOAT64_RECIPES),
}

# What "small" leaves out of these tasks unless it is named: all that it trains took about an hour of one core.
LEFT_OUT_AT_SMALL: Mapping[str, tuple[str, ...]] = {
    "cifar10-resnet-half": (
        "fp16",
        *_FEW_BITS,
        "e5m2-adaptive",
        *_OPERANDS,
        "scaled-fp16",
        "scaled-fp8-state16",
    ),
    "tinyshakespeare": (*_FEW_BITS, "e5m2-adaptive", *_OPERANDS),
    "tinyshakespeare-lstm": (*_FEW_BITS, "e5m2-adaptive", *_OPERANDS),
    "two-heads": ("e5m2-adaptive", *_OPERANDS, "scaled-fp8-state16"),
}
WHY_NOT_AT_SMALL = "left out at small, which is to take an hour of one core: name the recipe, or take --size full"

_RESNET18_ACCURACIES = "ResNet-18 on ImageNet: 71.48 adaptive, 71.24 without a scale, 71.39 constant or dynamic"
REPORTED_RESULTS: Mapping[str, PaperResult] = {
    "bf16": PaperResult(
        "up to 7% less validation accuracy than with stochastic rounding or Kahan; BERT loses 16% training accuracy",
        _BF16_PAPER,
        "worse",
    ),
    "bf16-update": PaperResult("nearest rounding of the update alone is what hurts", _BF16_PAPER, "worse"),
    "bf16-stochastic": PaperResult(
        "matches 32 bits in 5 of 7 applications, −0.1% to +0.2% over all 7", _BF16_PAPER, "no difference"
    ),
    "bf16-kahan": PaperResult("closes the remaining gap on all 7 applications", _BF16_PAPER, "no difference"),
    "bf16-split": PaperResult("with 32-bit weights the gap of 16-bit arithmetic closes", _BF16_PAPER, "no difference"),
    "bf16-split8": PaperResult(
        "no measurable loss with 8 more bits and 8-bit moments, SGD, AdamW, Lion",
        _FLASH_PAPER,
        "no difference",
    ),
    "fp16": PaperResult("float16 fails for its range", _BF16_PAPER, "worse"),
    "fp16-constant-1": PaperResult(f"{_RESNET18_ACCURACIES}; SSD512 without a scale diverged", _SCALES_SOURCE, "worse"),
    "fp16-constant-128": PaperResult(
        "SSD512, batch 8: 78.71 (float32 78.94); ResNet-18: 71.39", _SCALES_SOURCE, "no difference"
    ),
    "fp16-constant-16384": PaperResult(
        "SSD300: constants from 8 to 8192 give 75.7 to 76.3, adaptive 76.35", _SCALES_SOURCE, "no difference"
    ),
    "fp16-dynamic": PaperResult("SSD512, batch 8: 75.04 (float32 78.94); ResNet-18: 71.39", _SCALES_SOURCE, "worse"),
    "fp16-adaptive": PaperResult(
        "SSD512, batch 8: 79.27 (float32 78.94); ResNet-18: 71.48", _SCALES_SOURCE, "no difference"
    ),
    "mixed-precision": PaperResult(
        "ResNet-50: 76.04 (float32 75.92); SSD: 77.1 with a scale, diverges without (float32 76.9)",
        "arXiv 1710.03740",
        "no difference",
    ),
    "fp8-training": PaperResult(
        "“slightly higher validation accuracy compared to full precision baseline”, from its abstract",
        "arXiv 1905.12334",
        "no difference",
    ),
    "mxfp8": PaperResult("loss 1.2671 against 1.2738 of bfloat16", _TITAN_NOTES, "no difference"),
    "nvfp4": PaperResult("loss 1.2715 against 1.2738 of bfloat16", _TITAN_NOTES, "no difference"),
    "scaled-fp16": PaperResult("training loss 2.92 ± 0.12 against 2.87 ± 0.12", _SCALIFY_SOURCE, "no difference"),
    "scaled-fp8-state16": PaperResult(
        "training loss 2.93 ± 0.12 against 2.87 ± 0.12", _SCALIFY_SOURCE, "no difference"
    ),
    "fp16-mc2": PaperResult(
        "MLP 0.1232869 against 0.1232752 of float32; regression 1.97e-6 against 8.3e-12",
        _MCTENSOR_SOURCE,
        "no difference",
    ),
    "fp16-mc3": PaperResult(
        "MLP 0.1232873 against 0.1232752 of float32; regression 1.97e-6 against 8.3e-12",
        _MCTENSOR_SOURCE,
        "no difference",
    ),
    "fp64-mc2": PaperResult(
        "mammals: mean average precision 0.9148 against 0.9106 of float64", _MCTENSOR_SOURCE, "no difference"
    ),
}


CONFIRMED, REFUTED, OPEN = "confirmed", "refuted", "not decidable at this size"
# A verdict on a finding, and the numbers behind it.
Judgement = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class JudgedStatement:
    """A paper's finding, our verdict on it, and the numbers behind the verdict."""

    claim: str
    source: str
    verdict: str
    numbers: str


def judge_statements(evidence: FinishedTrials) -> list[JudgedStatement]:
    """Return every statement, in the order of the papers."""
    judged = [(claim, source, *judge(evidence)) for claim, source, judge in _JUDGED_FINDINGS]
    return [
        JudgedStatement(claim, source, verdict, numbers or "no task of this run tells")
        for claim, source, verdict, numbers in judged
    ]


def _judge_nearest_rounding(evidence: FinishedTrials) -> Judgement:
    rows = _find_rows(evidence, "bf16")
    said = []
    for row in rows:
        points = ""
        if _has_accuracy(evidence, row.task) and not row.diverged:
            points = f", {_format_points(evidence, row)}"
        said.append(f"{row.task} {_format_gap(row)}{points} ({row.verdict or 'too few seeds'})")
    lost, kept = (sum(row.verdict in verdicts for row in rows) for verdicts in (FAILING_VERDICTS, PASSING_VERDICTS))
    return _decide_by_counts(lost, kept), "; ".join(said)


def _judge_loss_at_low_rates(evidence: FinishedTrials) -> Judgement:
    shares: list[list[float]] = []
    said = []
    for task in ("digits-fpu", "digits", "digits-slow"):
        kept = [record["result"]["realised"] for record in evidence.of_recipe(task, "bf16")]
        if not kept or None in kept or task not in evidence.tasks():
            return OPEN, ""
        shares.append([1 - one for one in kept])
        rate = evidence.of_task(task)[0]["settings"]["task"]["hyper"]["lr"]
        lost, gap = format_percent(statistics.fmean(shares[-1])), _format_gap(evidence.row(task, "bf16"))
        said.append(f"{lost} at {rate:g} (training loss {gap})")
    rising = all(max(one) < min(other) for one, other in itertools.pairwise(shares))
    falling = all(min(one) > max(other) for one, other in itertools.pairwise(shares))
    verdict = OPEN if min(map(len, shares)) < 3 else CONFIRMED if rising else REFUTED if falling else OPEN
    return verdict, f"share of the wanted movement that rounding undid on the digits: {', '.join(said)}"


def _judge_weight_update(evidence: FinishedTrials) -> Judgement:
    update, arithmetic = _find_rows(evidence, "bf16-update"), _find_rows(evidence, "bf16-split")
    pairs = [(one, other) for one in update for other in arithmetic if one.task == other.task]
    told = [
        (one, other) for one, other in pairs if one.verdict in FAILING_VERDICTS or other.verdict in FAILING_VERDICTS
    ]
    for_it = sum(other.verdict not in FAILING_VERDICTS for _, other in told)
    against = sum(one.verdict not in FAILING_VERDICTS for one, _ in told)
    said = "; ".join(f"{one.task}: update {_format_gap(one)}, arithmetic {_format_gap(other)}" for one, other in pairs)
    return _decide_by_counts(for_it, against), said


def _judge_ten_bit_accuracy(evidence: FinishedTrials) -> Judgement:
    found = [row for row in _find_rows(evidence, "e8m1-kahan-stochastic") if row.task == "digits-fpu"]
    if not found or found[0].accuracy is None:
        return OPEN, "" if not found else "diverged"
    accuracy, spread = found[0].accuracy, found[0].accuracy_spread or 0.0
    clear = abs(accuracy - 0.9) > spread and found[0].seeds > 2
    of_float32 = format_percent(evidence.row("digits-fpu", "fp32").accuracy)
    said = f"{format_percent(accuracy)} ± {100 * spread:.1f}, float32 {of_float32}"
    return (CONFIRMED if accuracy >= 0.9 else REFUTED) if clear else OPEN, said


def _judge_linear_regression(evidence: FinishedTrials) -> Judgement:
    names = ("fp32", "fp64", "fp16-mc2", "fp16-mc3")
    found = {row.recipe: row for row in evidence.rows("linear-regression") if row.recipe in names}
    if set(names) - set(found):
        return OPEN, ""
    said = ", ".join(f"{name} {_format_two_digits(found[name].loss)}" for name in names)
    wide = _list_losses(evidence, "linear-regression", "fp64")
    for name in ("fp16-mc2", "fp16-mc3"):
        own = _list_losses(evidence, "linear-regression", name)
        if len(own) < 3 or len(wide) < 3:
            return OPEN, said
        if min(own) > 2 * max(wide):
            digits = "two float16 hold 22 bits, three 33, float64 53, and the residual ends where the digits do"
            return REFUTED, f"{digits}; mean square of the residuals: {said}"
    return CONFIRMED, f"mean square of the residuals: {said}"


def _judge_need_of_loss_scale(evidence: FinishedTrials) -> Judgement:
    scaled = {row.task: row for row in _find_rows(evidence, "scaled-fp16")}
    plain = [row for row in _find_rows(evidence, "fp16") if row.task in scaled]
    without = {row.task: row.verdict for row in _find_rows(evidence, "fp16-constant-1")}
    # Float16 weights lose to rounding too, which no scale repairs; float32 weights lose by the gradients' range alone.
    told = [row for row in plain if row.verdict in FAILING_VERDICTS and without.get(row.task) in FAILING_VERDICTS]
    if plain and not told:
        tasks = ", ".join(row.task for row in plain)
        return OPEN, f"float16 gradients without a scale are sure to lose on none of {tasks}"
    helped = sum(_is_repaired_by_scales(row, scaled[row.task]) for row in told)
    said = (f"{row.task}: float16 {_format_gap(row)}, with scales {_format_gap(scaled[row.task])}" for row in told)
    return _decide_by_counts(helped, len(told) - helped), "; ".join(said)


def _is_repaired_by_scales(plain: Row, scaled: Row) -> bool:
    """Return whether scales take away most of what plain float16 loses."""
    if scaled.diverged or scaled.gap is None:
        return False
    return bool(plain.diverged) or plain.gap is None or scaled.gap < plain.gap / 2


def _judge_adaptive_scales(evidence: FinishedTrials, tasks: Sequence[str] | None, better: bool) -> Judgement:
    """Judge the adaptive scales against the best constant one, by losses paired by seed."""
    good, bad, told = 0, 0, []
    unclear: list[str] = []
    for task in evidence.tasks() if tasks is None else [task for task in tasks if task in evidence.tasks()]:
        rows = {row.recipe: row for row in evidence.rows(task)}
        constants = [row for name, row in rows.items() if name.startswith("fp16-constant-")]
        if "fp16-adaptive" not in rows or not constants:
            continue
        alive = [row for row in constants if row.loss is not None]
        best = min(alive, key=lambda row: row.loss or 0.0, default=None)
        if best is None or rows["fp16-adaptive"].loss is None:
            good, bad = good + (best is None), bad + (best is not None)
            told.append(f"{task}: {'every constant' if best is None else 'adaptive'} diverged")
            continue
        gaps = evidence.gaps(task, "fp16-adaptive", best.recipe)
        limit = compute_interval(gaps, evidence.gaps(task, TWIN), rows["fp32"].loss or 0.0)
        mean = statistics.fmean(gaps) if gaps else 0.0
        told.append(f"{task}: {mean:+.3g} ± {_format_two_digits(limit)} beside {best.recipe.removeprefix('fp16-')}")
        if limit is None:
            continue
        bad += mean > limit
        if better:
            good += mean < -limit
        elif mean <= limit:
            near = mean + limit <= rows["fp32"].tolerance
            good += near
            unclear += [] if near else [task]
    if better:
        return (CONFIRMED if good else REFUTED if bad else OPEN), "; ".join(told)
    verdict = REFUTED if bad else CONFIRMED if good and not unclear else OPEN
    why = f"the seeds do not tell on {', '.join(unclear)}; " if unclear and verdict == OPEN else ""
    return verdict, why + "; ".join(told)


# Its loss goes to zero, of which no share means anything; it has a statement of its own.
_TASK_WITH_ZERO_LOSS = "linear-regression"


def _judge_loss_limit(
    evidence: FinishedTrials,
    recipes: Sequence[str],
    loss: float,
    accuracy: float | None = None,
    or_spread: bool = False,
) -> Judgement:
    """Judge whether recipes lose no more than a limit on every task, by the measure of the paper's claim.

    That is accuracy, a difference, where it is given and the task's paper reports one; else a share of float32's loss.
    With ``or_spread`` float32's spread over seeds is the limit where it is larger. A row is inside by its mean, outside
    if its mean lies beyond the limit by more than the 95% interval, and open in between. Most rows must be inside with
    their whole interval.
    """
    sure, inside, unclear, outside, said = 0, 0, [], [], []
    for row in (row for recipe in recipes for row in _find_rows(evidence, recipe) if row.task != _TASK_WITH_ZERO_LOSS):
        if row.diverged:
            outside.append(row.task)
            said.append(f"{row.task} {row.recipe} diverged")
            continue
        if accuracy is not None and _has_accuracy(evidence, row.task):
            lost, reference = _pair_accuracies(evidence, row)
            limit, told = accuracy, _format_points(evidence, row)
        else:
            lost, reference = evidence.gaps(row.task, row.recipe), _list_losses(evidence, row.task, "fp32")
            limit = loss * statistics.fmean(reference) if reference else 0.0
            told = f"{_format_gap(row)} ± {format_number(compute_half_interval(lost), 4)}"
        said.append(f"{row.task} {row.recipe} {told}")
        reach = compute_half_interval(lost)
        if reach is None:
            unclear.append(row.task)
            continue
        mean = statistics.fmean(lost)
        limit = max(limit, statistics.stdev(reference)) if or_spread else limit
        if mean <= limit:
            inside, sure = inside + 1, sure + (mean + reach <= limit)
        elif mean - reach > limit:
            outside.append(f"{row.task} ({explain_loss(row)})")
        else:
            unclear.append(row.task)
    if outside:
        return REFUTED, f"beyond on {', '.join(dict.fromkeys(outside))}; {'; '.join(said)}"
    if unclear or not inside:
        why = f"the seeds do not tell on {', '.join(dict.fromkeys(unclear))}; " if unclear else ""
        return OPEN, why + "; ".join(said)
    counts = f"{inside} of {inside} inside, {sure} with all of their interval"
    return CONFIRMED if 2 * sure > inside else OPEN, f"{counts}; {'; '.join(said)}"


def _has_accuracy(evidence: FinishedTrials, task: str) -> bool:
    """Return whether papers report such a task by accuracy: not a text's next character, nor equations or edges."""
    target = evidence.of_task(task)[0]["settings"]["task"].get("target", "example")
    return target not in ("", "character", "equation", "edge")


def _pair_accuracies(evidence: FinishedTrials, row: Row) -> tuple[list[float], list[float]]:
    """Return float32's accuracy minus a recipe's for each seed, and float32's."""
    own, reference = (
        {
            record["settings"]["seed"]: record["result"]["float32"]["validation"]["accuracy"]
            for record in evidence.of_recipe(row.task, name)
            if record["result"]["float32"]["validation"]["accuracy"] is not None  # of a trial that diverged
        }
        for name in (row.recipe, "fp32")
    )
    return [reference[seed] - own[seed] for seed in own if seed in reference], list(reference.values())


def _list_losses(evidence: FinishedTrials, task: str, recipe: str) -> list[float]:
    """Return the judged losses of the trials that did not diverge."""
    return [loss for loss in map(read_judged_loss, evidence.of_recipe(task, recipe)) if loss is not None]


def _format_points(evidence: FinishedTrials, row: Row) -> str:
    """Return how much more accurate than float32 a recipe is, in points, with the 95% interval."""
    lost, _ = _pair_accuracies(evidence, row)
    if not lost:
        return "–"
    reach = compute_half_interval(lost)
    gained = format_number(-100 * statistics.fmean(lost), 1, sign=True)
    return f"{gained} ± {format_number(reach and 100 * reach, 1)} points"


def explain_loss(row: Row) -> str:
    """Return in words the reading that best explains why a recipe lost."""
    if row.underflow is not None and row.underflow > 0.01:
        return f"{100 * row.underflow:.1f}% of the gradient elements underflow"
    if row.skipped:
        return f"{row.skipped:.0f} steps were skipped, a larger share of so short a training"
    if row.realised is not None and abs(row.realised - 1) > 0.02:
        return f"{100 * row.realised:.0f}% of the wanted movement took place"
    return "a short training at this size ends before noise averages out"


def _decide_by_counts(for_it: int, against: int) -> str:
    """Return the verdict by the number of tasks that speak for and against a statement."""
    return OPEN if for_it == against else CONFIRMED if for_it > against else REFUTED


def _find_rows(evidence: FinishedTrials, recipe: str) -> list[Row]:
    """Return the rows of a recipe on all tasks."""
    return [row for row in evidence.rows() if row.recipe == recipe]


def _format_gap(row: Row) -> str:
    return "diverged" if row.diverged else format_number(row.gap, 4, sign=True)


def _format_two_digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


_SCALES_PAPER, _SCALIFY_PAPER, _MCTENSOR_PAPER = "arXiv 1910.12385", "arXiv 2407.17353", "arXiv 2207.08867"
# The papers' findings: what they say, where, and how a comparison judges it.
_JUDGED_FINDINGS: tuple[tuple[str, str, Callable[[FinishedTrials], Judgement]], ...] = (
    ("bfloat16 with nearest rounding everywhere loses against float32", _BF16_PAPER, _judge_nearest_rounding),
    ("what nearest rounding loses grows as the learning rate falls", _BF16_PAPER, _judge_loss_at_low_rates),
    (
        "rounding the weight update to nearest is what hurts, rounding forward and backward is not",
        _BF16_PAPER,
        _judge_weight_update,
    ),
    (
        "stochastic rounding and Kahan stay within 0.1% accuracy or 0.2% loss of float32, or inside the seeds' spread",
        _BF16_PAPER,
        partial(
            _judge_loss_limit, recipes=("bf16-stochastic", "bf16-kahan"), loss=0.002, accuracy=0.001, or_spread=True
        ),
    ),
    (
        "ten bits with Kahan and stochastic rounding reach 90% on digits",
        "our measure of arXiv 2010.06192's idea",
        _judge_ten_bit_accuracy,
    ),
    (
        "float16 MCTensor weights of two and three components equal float32",
        _MCTENSOR_PAPER,
        partial(_judge_loss_limit, recipes=COMPONENT_RECIPES, loss=0.002),
    ),
    ("on the linear regression, float16 MCTensor weights equal float64", _MCTENSOR_PAPER, _judge_linear_regression),
    (
        "adaptive scales are nowhere worse than the best constant scale, without tuning",
        _SCALES_PAPER,
        partial(_judge_adaptive_scales, tasks=None, better=False),
    ),
    (
        "adaptive scales are better than any constant scale where two losses are far apart",
        _SCALES_PAPER,
        partial(_judge_adaptive_scales, tasks=("two-heads",), better=True),
    ),
    (
        "scaled FP8 products with float16 state stay within 0.3% of float32",
        _SCALIFY_PAPER,
        partial(_judge_loss_limit, recipes=("scaled-fp8-state16",), loss=0.003),
    ),
    ("with scales that propagate, float16 needs no loss scale", _SCALIFY_PAPER, _judge_need_of_loss_scale),
)
