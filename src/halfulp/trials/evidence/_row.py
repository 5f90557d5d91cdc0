"""The trials of one recipe on one task together, and the statistics of a few seeds: when a difference is one."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._defaults import REFERENCE_RECIPE, TWIN_RECIPE

_INTEGRATION_POINTS = 2000

FloatArray = NDArray[np.float64]


@functools.lru_cache(maxsize=256)
def find_gap_quantile(seeds: int, recipes: int, level: float = 0.05) -> float:
    """Return the quantile, in standard errors, for the largest of several recipes' mean gaps.

    It is k, which the largest exceeds by chance as often as the level says. For one recipe it is Student's two-sided
    quantile. Several recipes' deviations may differ by any factor, so each mean gap is measured in units of the larger
    of two: its own deviation and the pooled one, the root mean square over the recipes. In the worst case j recipes
    scatter alike and the others not at all. With the squares of the deviations T B and T (1 - B), where T and B are
    independent (chi square and beta), the chance of an alarm is

        j E[ P(|t| > k sqrt(j max(B, 1/m))) ],   t Student's of j (n - 1) degrees of freedom,

    at most, for m recipes of n seeds, and k is the least number for which that is the level or less for every j. This
    is of gaps that are drawn apart; what correlation adds is left to the level.

    >>> [round(find_gap_quantile(seeds, recipes), 3) for seeds, recipes in ((3, 1), (3, 5), (5, 1), (5, 5))]
    [4.303, 4.303, 2.776, 3.152]
    """
    found = 1.0
    for scattering in range(1, recipes + 1):
        low = high = found
        while _bound_false_alarm_probability(high, seeds, recipes, scattering) > level:
            high *= 2
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            is_low = _bound_false_alarm_probability(middle, seeds, recipes, scattering) > level
            low, high = (middle, high) if is_low else (low, middle)
        found = high
    return found


def _bound_false_alarm_probability(k: float, seeds: int, recipes: int, scattering_recipes: int) -> float:
    """Bound the chance that any of ``scattering_recipes`` recipes exceeds k standard errors (Bonferroni)."""
    degrees = seeds - 1
    if scattering_recipes == 1:
        return float(_compute_student_tail(np.array([k]), degrees)[0])
    # The integral over B by midpoints in the angle with sine^2 = B.
    angle = (np.arange(_INTEGRATION_POINTS) + 0.5) * (math.pi / 2 / _INTEGRATION_POINTS)
    weights = np.sin(angle) ** (degrees - 1) * np.cos(angle) ** ((scattering_recipes - 1) * degrees - 1)
    shares = np.maximum(np.sin(angle) ** 2, 1 / recipes)
    beyond = _compute_student_tail(k * np.sqrt(scattering_recipes * shares), scattering_recipes * degrees)
    return scattering_recipes * float(weights @ beyond / weights.sum())


def _compute_student_tail(t: FloatArray, degrees: int) -> FloatArray:
    """Return the tail P(|t'| > t) of Student's distribution, a finite sum (Abramowitz, 26.7.3 and 26.7.4)."""
    angle = np.arctan(t / math.sqrt(degrees))
    square = np.cos(angle) ** 2
    odd = degrees % 2
    term = np.cos(angle) if odd else np.ones_like(angle)
    total = term if degrees > 1 else np.zeros_like(angle)
    for power in range(2 + odd, degrees - 1, 2):
        term = term * square * (power - 1) / power
        total = total + term
    inside = np.sin(angle) * total
    return 1 - (2 / math.pi * (angle + inside) if odd else inside)


LEAST_NOTABLE_RELATIVE_GAP = 1e-3

# Where the twin stays with float32 to the last digits, it is enough to know the loss to a hundredth.
_RELATIVE_TOLERANCE_OF_GAP = 10 * LEAST_NOTABLE_RELATIVE_GAP

# A gap of up to three times what the start alone changes is still called no difference.
_TWIN_SCATTER_FACTOR = 3

# How often chance may call one of several recipes worse or better by each of two limits, of which the lower counts.
_POOLED_FALSE_ALARM_RATE, _BONFERRONI_FALSE_ALARM_RATE = 0.037, 0.005
# Up to so many recipes the first share holds; it falls with the cube root of more.
_MOST_RECIPES_AT_FULL_LEVEL = 5


def bound_mean_gap_error(gaps: Sequence[float], twin_gaps: Sequence[float], reference_loss: float) -> float | None:
    """Return how far a recipe's true gap may be from its mean gap: the largest of three bounds.

    - half the 95% confidence interval of the mean of the gaps, paired by seed (Student's t);
    - the same for a mean of as many gaps that scatter about 0 as those between float32 and its twin do, whose start
      differs by 1e-7; it keeps three gaps that happen to lie close together from looking certain;
    - a thousandth of float32's loss: less than that matters to nobody.

    The first two fall with the square root of the seeds, so that more seeds tell smaller differences.
    None where there are fewer than three seeds: then there is no verdict.

    >>> bound_mean_gap_error([0.060, 0.062, 0.064], [1e-5], 2.0)
    0.0049...
    """
    count = len(gaps)
    if count < 3:
        return None
    own = find_gap_quantile(count, 1) * math.sqrt(_compute_variance(gaps) / count)
    twins = (
        find_gap_quantile(len(twin_gaps) + 1, 1) * _compute_rms_about_zero(twin_gaps) / math.sqrt(count)
        if twin_gaps
        else 0.0
    )
    return max(own, twins, LEAST_NOTABLE_RELATIVE_GAP * abs(reference_loss))


def compute_noise_threshold(
    gaps: Sequence[float], twin_gaps: Sequence[float], reference_loss: float, compared: Sequence[Sequence[float]] = ()
) -> float | None:
    """Return how large a mean gap must be to count as one among those of all recipes compared.

    At least `bound_mean_gap_error`. Where several recipes are compared it also exceeds the lower of two, in standard
    errors of the mean, so that chance calls any of them worse or better in about 5% of comparisons at most:

    - the `find_gap_quantile` of so many recipes at `get_false_alarm_rate`, where the deviation of a recipe's gaps is
      at least the pooled one: at three seeds a small deviation is mostly chance;
    - Student's quantile with Bonferroni's correction, for the recipe's own deviation: one recipe that scatters wildly
      does not hide what is certain of the others.

    Args:
        gaps: of this recipe, one per seed.
        twin_gaps: between float32 and its twin.
        reference_loss: float32's loss.
        compared: the gaps of every recipe compared, of this one too; those of fewer than three seeds do not count.

    >>> compute_noise_threshold([0.060, 0.062, 0.064], [], 2.0, [[0.060, 0.062, 0.064], [0.02, 0.01, 0.03]])
    0.0210...
    """
    alone = bound_mean_gap_error(gaps, twin_gaps, reference_loss)
    family = [one for one in compared if len(one) > 2]
    if alone is None or len(family) < 2:
        return alone
    count, own = len(gaps), math.sqrt(_compute_variance(gaps))
    pooled = find_gap_quantile(count, len(family), get_false_alarm_rate(len(family))) * max(
        own, pool_standard_deviations(family)
    )
    bonferroni = find_gap_quantile(count, 1, _BONFERRONI_FALSE_ALARM_RATE / len(family)) * own
    return max(alone, min(pooled, bonferroni) / math.sqrt(count))


def get_false_alarm_rate(recipes: int) -> float:
    """Return the level of the quantile for so many recipes: 3.7%, and less for more than five.

    Gaps to the same float32 run on the same batches are not drawn apart: of two or three that scatter by far the most,
    with correlations of 0.9 to 0.99, any exceeds the quantile up to 1.3 times as often as its level says among five
    recipes, 1.4 times among ten. This keeps all of that within 5%, by simulation (benchmarks/bench_verdicts.py).

    >>> [round(get_false_alarm_rate(recipes), 4) for recipes in (2, 5, 10)]
    [0.037, 0.037, 0.0294]
    """
    return float(_POOLED_FALSE_ALARM_RATE * min(1.0, _MOST_RECIPES_AT_FULL_LEVEL / recipes) ** (1 / 3))


def pool_standard_deviations(compared: Sequence[Sequence[float]]) -> float:
    """Return the root mean square of the standard deviations of several recipes' gaps, weighted by degrees of freedom.

    >>> pool_standard_deviations([[1.0, 3.0], [0.0, 0.0]])
    1.0
    """
    degrees = sum(len(gaps) - 1 for gaps in compared)
    return math.sqrt(sum((len(gaps) - 1) * _compute_variance(gaps) for gaps in compared) / degrees)


def compute_gap_tolerance(twin_gaps: Sequence[float], reference_loss: float) -> float:
    """Return the sum of gap and interval that is still called no difference: the larger of two.

    - a hundredth of float32's loss;
    - three times the root mean square of the gaps between float32 and its twin.

    Neither grows with the seeds, and an interval that falls below both always leads to a verdict.

    >>> compute_gap_tolerance([1e-5, 0.0, -1e-5], 2.0)
    0.02
    """
    return max(
        _RELATIVE_TOLERANCE_OF_GAP * abs(reference_loss), _TWIN_SCATTER_FACTOR * _compute_rms_about_zero(twin_gaps)
    )


def _compute_variance(gaps: Sequence[float]) -> float:
    """Return the variance in floats, as `statistics.variance` is too slow for simulations."""
    mean = math.fsum(gaps) / len(gaps)
    return math.fsum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)


def _compute_rms_about_zero(twin_gaps: Sequence[float]) -> float:
    """Return the root mean square of gaps whose true mean is 0."""
    return math.sqrt(math.fsum(gap * gap for gap in twin_gaps) / len(twin_gaps)) if twin_gaps else 0.0


def choose_verdict(gap: float, noise: float | None, tolerance: float, interval: float | None = None) -> str | None:
    """Return "worse", "better", "no difference" or "unclear" for a gap in a loss; None without a noise.

    A gap within its noise is no difference only where ``abs(gap) + interval`` is within the tolerance. That is said of
    one recipe, and needs no correction for the others; without an interval, the noise takes its place.

    >>> [choose_verdict(gap, x, 0.02) for gap, x in ((0.06, 0.005), (-0.001, 0.005), (0.001, 0.5), (0.06, None))]
    ['worse', 'no difference', 'unclear', None]
    >>> choose_verdict(0.001, 0.5, 0.02, interval=0.005)
    'no difference'
    """
    if noise is None:
        return None
    if abs(gap) > noise:
        return "worse" if gap > 0 else "better"
    return "no difference" if abs(gap) + (noise if interval is None else interval) <= tolerance else "unclear"


TrialRecord = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """The results of one recipe on one task: losses in nats, gaps paired by seed, None where unknown.

    Attributes:
        task, recipe, description: Whose results they are.
        seeds: How many trials.
        diverged: In how many the training loss or the judged loss was not finite; then the means are None.
        loss, loss_spread: The loss that judges the task, in float32 on the decoded weights.
        gap, gap_spread: Minus float32's loss, paired by seed.
        noise: What a gap must exceed to be called one, from three seeds on, corrected for the number of recipes.
        interval: The same for this recipe alone, without that correction: how far the true gap may be from ``gap``.
        tolerance: What gap and interval together may come to and still be called no difference.
        verdict: "reference", "control", "worse", "better", "no difference", "unclear" (the seeds leave room for
            a large gap: more of them), "diverged", or None.
        accuracy, accuracy_spread: Share of validation targets ranked first, in float32 on the decoded weights.
        cancelled: Share of updates that rounding cancelled, sampled during training.
        realised: How much of the wanted movement took place, sum(wanted x realised) / sum(wanted^2): stochastic
            rounding cancels most updates and still realises all of it, nearest rounding does not.
        bytes_per_parameter: Weight, companions, states and gradient.
        step_ms, speed: Median process CPU time of a step on one thread; as a multiple of float32's.
        emulated: The format that the arithmetic only imitates, or None; its memory and speed are the imitation's.
        gradient_format: The format that gradients only imitate, or None; memory and speed likewise.
        operand_format: The format that operands of products only imitate, or None; memory and speed likewise.
        skipped: Steps that were skipped because a gradient was not finite.
    """

    task: str
    recipe: str
    description: str
    seeds: int
    diverged: int
    loss: float | None
    loss_spread: float | None
    gap: float | None
    gap_spread: float | None
    noise: float | None
    interval: float | None
    tolerance: float
    verdict: str | None
    accuracy: float | None
    accuracy_spread: float | None
    cancelled: float | None
    realised: float | None
    bytes_per_parameter: float | None
    step_ms: float | None
    speed: float | None
    emulated: str | None
    gradient_format: str | None
    operand_format: str | None
    skipped: float | None


def make_rows(task: str, records: Sequence[TrialRecord]) -> list[Row]:
    """Return one row per recipe of a task, in the order of the records, which are all of that task."""
    by_recipe = _group_by_recipe(records)
    reference = by_recipe.get(REFERENCE_RECIPE, {})
    twins = _compute_gaps_paired_by_seed(by_recipe.get(TWIN_RECIPE, {}), reference)
    compared = [
        _compute_gaps_paired_by_seed(own, reference)
        for recipe, own in by_recipe.items()
        if recipe not in (REFERENCE_RECIPE, TWIN_RECIPE) and not _count_diverged_trials(own)
    ]
    return [_make_recipe_row(task, recipe, own, reference, twins, compared) for recipe, own in by_recipe.items()]


def _group_by_recipe(records: Iterable[TrialRecord]) -> dict[str, dict[int, TrialRecord]]:
    """Return trials of one task by recipe and seed."""
    found: dict[str, dict[int, TrialRecord]] = {}
    for record in records:
        settings = record["settings"]
        found.setdefault(settings["recipe"]["name"], {})[settings["seed"]] = record
    return found


def check_trial_record(record: TrialRecord) -> None:
    """Refuse what is not a finished trial as this version writes it."""
    try:
        settings, result = record["settings"], record["result"]
        task = settings["task"]
        make_rows(task["name"], [record])
        texts = task["title"], task["rule"], result["data"]
        numbers = settings["seed"], settings["steps"], result["parameters"], result["targets"]
        if not all(isinstance(one, str) for one in texts) or not all(type(one) is int for one in numbers):
            raise TypeError(f"words are {texts}, whole numbers {numbers}")
        dict(task["hyper"]), dict(settings["versions"]), task["batch"]
        for step, loss in result["curve"]:
            int(step), math.frexp(loss)
    except KeyError as missing:
        raise ValueError(f"it has no {missing.args[0]!r}") from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"a field is of another kind: {error}") from None


def get_judged_loss(record: TrialRecord) -> float | None:
    """Return the loss of a trial that judges its task; None where it diverged."""
    part = record["settings"]["task"]["judged_by"].removesuffix("_loss")
    loss: float | None = record["result"]["float32"][part]["loss"]
    return loss


def _compute_gaps_paired_by_seed(own: dict[int, TrialRecord], reference: dict[int, TrialRecord]) -> list[float]:
    """Return the judged losses of trials minus those of others from the same seeds."""
    pairs = ((get_judged_loss(own[seed]), get_judged_loss(reference[seed])) for seed in own if seed in reference)
    return [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]


def _count_diverged_trials(own: dict[int, TrialRecord]) -> int:
    """Return in how many trials the training loss or the judged loss was not finite."""
    return sum(
        record["result"]["diverged_at"] is not None or get_judged_loss(record) is None for record in own.values()
    )


def _make_recipe_row(
    task: str,
    recipe: str,
    own: dict[int, TrialRecord],
    reference: dict[int, TrialRecord],
    twins: list[float],
    compared: list[list[float]],
) -> Row:
    """Return the row of one recipe, from its trials and float32's by seed and the gaps of all recipes."""
    results = [record["result"] for record in own.values()]
    settings = next(iter(own.values()))["settings"]["recipe"]
    losses = [get_judged_loss(record) for record in own.values()]
    diverged = _count_diverged_trials(own)
    gaps = _compute_gaps_paired_by_seed(own, reference) if not diverged else []
    baseline = _compute_mean([get_judged_loss(record) for record in reference.values()])
    alone, allowed = bound_mean_gap_error(gaps, twins, baseline or 0.0), compute_gap_tolerance(twins, baseline or 0.0)
    limit = compute_noise_threshold(
        gaps, twins, baseline or 0.0, compared if recipe not in (REFERENCE_RECIPE, TWIN_RECIPE) else ()
    )
    step_ms_of_float32 = _compute_mean([record["result"]["step_ms"] for record in reference.values()])
    accuracies = [result["float32"]["validation"]["accuracy"] for result in results]
    gap, judged = _compute_mean(gaps), {REFERENCE_RECIPE: "reference", TWIN_RECIPE: "control"}.get(recipe)
    if diverged:
        judged = "diverged"
    elif judged is None and gap is not None:
        judged = choose_verdict(gap, limit, allowed, alone)
    means = {
        name: _compute_mean([result.get(name) for result in results])
        for name in ("cancelled", "realised", "bytes_per_parameter", "step_ms", "skipped")
    }
    step_ms = means["step_ms"]
    return Row(
        task=task,
        recipe=recipe,
        description=settings["description"],
        seeds=len(results),
        diverged=diverged,
        loss=_compute_mean(losses),
        loss_spread=_compute_standard_deviation(losses),
        gap=gap,
        gap_spread=_compute_standard_deviation(gaps),
        noise=limit,
        interval=alone,
        tolerance=allowed,
        verdict=judged,
        accuracy=_compute_mean(accuracies),
        accuracy_spread=_compute_standard_deviation(accuracies),
        speed=step_ms / step_ms_of_float32 if step_ms is not None and step_ms_of_float32 else None,
        emulated=settings["emulate"],
        gradient_format=settings.get("gradient_format"),
        operand_format=settings.get("operand_format"),
        **means,
    )


def _compute_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _compute_standard_deviation(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) == len(values) > 1 else None


@dataclasses.dataclass(frozen=True)
class FinishedTrials:
    """Every trial of a comparison with its settings, ``{"settings": ..., "result": ...}``, and how it was run."""

    trials: tuple[TrialRecord, ...]
    run: dict[str, Any]

    def tasks(self) -> list[str]:
        """Return the names of the tasks that have trials under float32, in order: without one there is no gap."""
        heads = (record["settings"] for record in self.trials)
        return list(dict.fromkeys(head["task"]["name"] for head in heads if head["recipe"]["name"] == REFERENCE_RECIPE))

    def of_task(self, task: str) -> list[TrialRecord]:
        """Return the trials of one task."""
        return [record for record in self.trials if record["settings"]["task"]["name"] == task]

    def of_recipe(self, task: str, recipe: str) -> list[TrialRecord]:
        """Return the trials of one recipe on one task."""
        return [record for record in self.of_task(task) if record["settings"]["recipe"]["name"] == recipe]

    def gaps(self, task: str, recipe: str, other: str = REFERENCE_RECIPE) -> list[float]:
        """Return a recipe's judged loss minus another's, for each seed that finished under both."""
        trials = _group_by_recipe(self.of_task(task))
        return _compute_gaps_paired_by_seed(trials.get(recipe, {}), trials.get(other, {}))

    def rows(self, task: str | None = None) -> list[Row]:
        """Return one row per recipe, of one task or of all."""
        chosen = self.tasks() if task is None else [task]
        return [row for name in chosen for row in make_rows(name, self.of_task(name))]

    def row(self, task: str, recipe: str) -> Row:
        """Return the row of one recipe on one task.

        Raises:
            ValueError: it was not among those compared.
        """
        for row in self.rows(task):
            if row.recipe == recipe:
                return row
        raise ValueError(f"no trial of recipe {recipe!r} on task {task!r} in this evidence")
