"""Row: the trials of one recipe on one task together; FinishedTrials: all rows of a comparison."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from .._defaults import REFERENCE, TWIN
from ._statistics import interval, noise, spread, tolerance, verdict

Record = dict[str, Any]


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
        own_loss, own_accuracy: Validation in the recipe's own arithmetic.
        validation_loss: Validation loss in float32, beside ``own_loss``.
        cancelled: Share of updates that rounding cancelled, sampled during training.
        realised: How much of the wanted movement took place, sum(wanted x realised) / sum(wanted^2): stochastic
            rounding cancels most updates and still realises all of it, nearest rounding does not.
        bytes_per_parameter: Weight, companions, states and gradient.
        step_ms, speed: Median process CPU time of a step on one thread; as a multiple of float32's.
        emulated: The format that the arithmetic only imitates, or None; its memory and speed are the imitation's.
        gradient_format: The format that gradients only imitate, or None; memory and speed likewise.
        operand_format: The format that operands of products only imitate, or None; memory and speed likewise.
        skipped: Steps that were skipped because a gradient was not finite.
        underflow, worst_underflow: Of the gradient elements that are not zero without rounding, the share that was
            stored as zero, sampled during training: of all, and of the site that lost most.
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
    validation_loss: float | None
    own_loss: float | None
    own_accuracy: float | None
    cancelled: float | None
    realised: float | None
    bytes_per_parameter: float | None
    step_ms: float | None
    speed: float | None
    emulated: str | None
    gradient_format: str | None
    operand_format: str | None
    skipped: float | None
    underflow: float | None
    worst_underflow: float | None


def rows(task: str, records: Sequence[Record]) -> list[Row]:
    """Return one row per recipe of a task, in the order of the records, which are all of that task."""
    by_recipe = _group_by_recipe(records)
    reference = by_recipe.get(REFERENCE, {})
    twins = _pair_gaps(by_recipe.get(TWIN, {}), reference)
    compared = [
        _pair_gaps(own, reference)
        for recipe, own in by_recipe.items()
        if recipe not in (REFERENCE, TWIN) and not _count_diverged(own)
    ]
    return [_make_row(task, recipe, own, reference, twins, compared) for recipe, own in by_recipe.items()]


def _group_by_recipe(records: Iterable[Record]) -> dict[str, dict[int, Record]]:
    """Return trials of one task by recipe and seed."""
    found: dict[str, dict[int, Record]] = {}
    for record in records:
        settings = record["settings"]
        found.setdefault(settings["recipe"]["name"], {})[settings["seed"]] = record
    return found


def check_record(record: Record) -> None:
    """Refuse what is not a finished trial as this version writes it.

    Raises:
        ValueError: a field is missing or of another kind; the message names it.
    """
    try:
        rows(record["settings"]["task"]["name"], [record])
        list(record["result"]["curve"])
    except KeyError as missing:
        raise ValueError(f"it has no {missing.args[0]!r}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"a field is of another kind: {error}") from None


def read_judged_loss(record: Record) -> float | None:
    """Return the loss of a trial that judges its task; None where it diverged."""
    part = record["settings"]["task"]["judged_by"].removesuffix("_loss")
    loss: float | None = record["result"]["float32"][part]["loss"]
    return loss


def _pair_gaps(own: dict[int, Record], reference: dict[int, Record]) -> list[float]:
    """Return the judged losses of trials minus those of others from the same seeds."""
    pairs = ((read_judged_loss(own[seed]), read_judged_loss(reference[seed])) for seed in own if seed in reference)
    return [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]


def _count_diverged(own: dict[int, Record]) -> int:
    """Return in how many trials the training loss or the judged loss was not finite."""
    return sum(
        record["result"]["diverged_at"] is not None or read_judged_loss(record) is None for record in own.values()
    )


def _make_row(
    task: str,
    recipe: str,
    own: dict[int, Record],
    reference: dict[int, Record],
    twins: list[float],
    compared: list[list[float]],
) -> Row:
    """Return the row of one recipe, from its trials and float32's by seed and the gaps of all recipes."""
    results = [record["result"] for record in own.values()]
    settings = next(iter(own.values()))["settings"]["recipe"]
    losses = [read_judged_loss(record) for record in own.values()]
    diverged = _count_diverged(own)
    gaps = _pair_gaps(own, reference) if not diverged else []
    baseline = _compute_mean([read_judged_loss(record) for record in reference.values()])
    alone, allowed = interval(gaps, twins, baseline or 0.0), tolerance(twins, baseline or 0.0)
    limit = noise(gaps, twins, baseline or 0.0, compared if recipe not in (REFERENCE, TWIN) else ())
    speed = _compute_ratio(
        _compute_mean([r["step_ms"] for r in results]), [r["result"]["step_ms"] for r in reference.values()]
    )
    accuracies = [result["float32"]["validation"]["accuracy"] for result in results]
    return Row(
        task=task,
        recipe=recipe,
        description=settings["description"],
        seeds=len(results),
        diverged=diverged,
        loss=_compute_mean(losses),
        loss_spread=_compute_spread(losses),
        gap=_compute_mean(gaps),
        gap_spread=_compute_spread(gaps),
        noise=limit,
        interval=alone,
        tolerance=allowed,
        verdict=_judge(recipe, diverged, _compute_mean(gaps), limit, alone, allowed),
        accuracy=_compute_mean(accuracies),
        accuracy_spread=_compute_spread(accuracies),
        validation_loss=_compute_mean([result["float32"]["validation"]["loss"] for result in results]),
        own_loss=_compute_mean([result["own"]["loss"] for result in results]),
        own_accuracy=_compute_mean([result["own"]["accuracy"] for result in results]),
        cancelled=_compute_mean([result["cancelled"] for result in results]),
        realised=_compute_mean([result["realised"] for result in results]),
        bytes_per_parameter=_compute_mean([result["bytes_per_parameter"] for result in results]),
        step_ms=_compute_mean([result["step_ms"] for result in results]),
        speed=speed,
        emulated=settings["emulate"],
        gradient_format=settings.get("gradient_format"),
        operand_format=settings.get("operand_format"),
        skipped=_compute_mean([result.get("skipped") for result in results]),
        underflow=_compute_mean([_read_underflow(result, "mean") for result in results]),
        worst_underflow=_compute_mean([_read_underflow(result, "worst") for result in results]),
    )


def _read_underflow(result: dict[str, Any], which: str) -> float | None:
    """Return the share of gradients that underflowed; None also where every sampled step was skipped."""
    share: float | None = result.get("underflow", {}).get(which)
    return share


def _judge(
    recipe: str, diverged: int, gap: float | None, limit: float | None, alone: float | None, allowed: float
) -> str | None:
    if diverged:
        return "diverged"
    if recipe == REFERENCE:
        return "reference"
    if recipe == TWIN:
        return "control"
    return None if gap is None else verdict(gap, limit, allowed, alone)


def _compute_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _compute_spread(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return spread(known) if len(known) == len(values) else None


def _compute_ratio(value: float | None, reference: Sequence[float]) -> float | None:
    return value / statistics.fmean(reference) if value is not None and reference else None


@dataclasses.dataclass(frozen=True)
class FinishedTrials:
    """Every trial of a comparison with its settings, and how it was run.

    Args:
        trials: One record per trial, ``{"settings": ..., "result": ...}``, plain data.
        run: How it was run: workers, cores, wall seconds.
    """

    trials: tuple[Record, ...]
    run: dict[str, Any]

    def tasks(self) -> list[str]:
        """Return the names of the tasks, in order."""
        return list(dict.fromkeys(record["settings"]["task"]["name"] for record in self.trials))

    def of_task(self, task: str) -> list[Record]:
        """Return the trials of one task."""
        return [record for record in self.trials if record["settings"]["task"]["name"] == task]

    def of_recipe(self, task: str, recipe: str) -> list[Record]:
        """Return the trials of one recipe on one task."""
        return [record for record in self.of_task(task) if record["settings"]["recipe"]["name"] == recipe]

    def gaps(self, task: str, recipe: str, other: str = REFERENCE) -> list[float]:
        """Return a recipe's judged loss minus another's, for each seed that finished under both."""
        trials = _group_by_recipe(self.of_task(task))
        return _pair_gaps(trials.get(recipe, {}), trials.get(other, {}))

    def rows(self, task: str | None = None) -> list[Row]:
        """Return one row per recipe, of one task or of all."""
        chosen = self.tasks() if task is None else [task]
        return [row for name in chosen for row in rows(name, self.of_task(name))]

    def row(self, task: str, recipe: str) -> Row:
        """Return the row of one recipe on one task.

        Raises:
            ValueError: it was not among those compared.
        """
        for row in self.rows(task):
            if row.recipe == recipe:
                return row
        raise ValueError(f"no trial of recipe {recipe!r} on task {task!r} in this evidence")
