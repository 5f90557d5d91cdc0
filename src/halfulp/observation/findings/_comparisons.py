"""Findings about two computations that should agree: replicas, compiled modules, recomputed ones, losses in a row."""

import math
from collections.abc import Iterator
from typing import Any

from ... import formats
from .._finding import Finding
from .._record import OutputDifference, Record
from .._text import compute_confidence, format_percent, name_dtype
from ._kind import FindingKind, register_finding

# Another order of a layer's sums changes a float32 result by some units in the last place; a rounding to 16 bits that
# one side leaves out is thousands of them.
FLOAT32_TOLERANCE_IN_EPS = 64
FLOAT32_EPS = 2.0**-23


def is_explained_by_sum_order(difference: OutputDifference) -> bool:
    """Return whether float32 sums in another order, rounded once more to the outputs' own format, explain it."""
    try:
        eps = max(formats.get(dtype).eps for dtype in difference.dtypes)
    except ValueError:
        return difference.differing == 0
    return difference.relative <= (eps if eps > FLOAT32_EPS else FLOAT32_TOLERANCE_IN_EPS * eps)


@register_finding
class CompiledDiffers(FindingKind):
    """A compiled module gives other values than eager: the compiler left out a cast that the code has."""

    code = "compiled-differs"
    cure = (
        'torch.compile(model, options={"emulate_precision_casts": True}); hu.quantize and hu.emulate are operators '
        "that no compiler leaves out"
    )
    role = "activation"
    worst = "relative"

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for pair in record.compiled:
            if pair.differing and not is_explained_by_sum_order(pair):
                said = f"{format_percent(pair.differing)} of outputs in {pair.dtypes[1]} differ from eager, by "
                said += f"{format_percent(pair.relative)} of their size"
                evidence: dict[str, Any] = {"differing": pair.differing, "relative": pair.relative}
                yield self.found(pair.name, "warning", 1.0, said, **evidence)


# Where neighbouring numbers are as far apart as the loss changes from step to step, half of its changes are not seen.
LOSS_SPACING_TO_CHANGE_LIMIT = 1.0
FEWEST_LOSSES = 4


@register_finding
class LossCancels(FindingKind):
    """The loss is rounded more coarsely than it changes: large terms cancel, or its dtype is too narrow."""

    code = "loss-cancels"
    cure = (
        "compute the loss in float32 (logits.float()), and as a mean of small terms instead of a difference "
        "of large ones"
    )
    wide_cure = "compute the loss as a mean of small terms instead of a difference of large ones, or in float64"
    explained_by = ("dtype-not-asked",)

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        losses, gap = sum(step.loss is not None for step in record.history), record.loss_gap
        if gap is None or losses < FEWEST_LOSSES or not gap >= LOSS_SPACING_TO_CHANGE_LIMIT:
            return
        dtype = name_dtype(record.loss_dtype)
        said = f"neighbouring losses in {dtype} are {gap:.3g} times as far apart as the loss changes from step to step"
        if math.isinf(gap):
            said = f"neighbouring losses in {dtype} are so far apart that the loss stands still"
        sure, cure = compute_confidence(losses, FEWEST_LOSSES), self.choose_cure(record.loss_dtype)
        yield self.found((), "warning", sure, said, cure=cure, gap=gap, dtype=dtype, losses=losses)


@register_finding
class RecomputeDiffers(FindingKind):
    """Gradient checkpointing recomputes a module in another dtype or to other values than the forward pass had."""

    code = "recompute-differs"
    cure = (
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False, preserve_rng_state=True), which recomputes under "
        "the autocast of the forward pass"
    )
    role = "activation"
    worst = "relative"

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for pair in record.recomputed:
            first, second = pair.dtypes
            if first == second and (not pair.differing or is_explained_by_sum_order(pair)):
                continue
            said = f"computed in {first}, recomputed in {second}" if first != second else f"recomputed in {second} too"
            said += f"; {format_percent(pair.differing)} of outputs differ, by {format_percent(pair.relative)} of "
            said += "their size"
            evidence: dict[str, Any] = {"first": first, "second": second}
            evidence |= {"differing": pair.differing, "relative": pair.relative}
            yield self.found(pair.name, "error", 1.0, said, **evidence)


@register_finding
class ReplicasDiffer(FindingKind):
    """Ranks hold different bits of a parameter that data-parallel training keeps equal."""

    code = "replicas-differ"
    cure = (
        "broadcast the parameters from rank 0, and seed what rounds randomly alike on all ranks; "
        "hu.optim draws the same bits on every rank"
    )
    explained_by = ("random-bits-repeat",)

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        differing = [name for name, same in record.replicas.items() if not same]
        if differing:
            said = f"{len(differing)} of {len(record.replicas)} parameters differ between {record.replica_of[1]} ranks"
            yield self.found(differing, "error", 1.0, said, differing=len(differing), ranks=record.replica_of[1])
