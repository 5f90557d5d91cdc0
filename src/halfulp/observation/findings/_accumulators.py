"""Findings about long sums that a narrow format stops: moments, averages, gradients, residual streams, counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...optim import OPTIMIZERS
from .._finding import Finding, Severity
from .._record import ParameterRecord, RealisedChanges, Record
from .._text import (
    compute_confidence,
    format_percent,
    get_significand_bits,
    is_wide_dtype,
    name_dtype,
    write_optimizer_code,
)
from ._kind import FindingKind, register_finding
from ._updates import is_explained_by_chance, make_lost_change_evidence

FEWEST_ADDED_ELEMENTS = 32
# What rounding takes of a sum of a few gradients is below a hundredth; a tenth of the batch is a smaller batch.
WARNING_BELOW_KEPT_SHARE_OF_SUMS = 0.9
ERROR_BELOW_KEPT_SHARE_OF_SUMS = 0.5


@register_finding
class AccumulationSwamped(FindingKind):
    """Gradients that are added to a sum in a narrow type are smaller than half its spacing, and are dropped."""

    code = "accumulation-swamped"
    cure = "accumulate in float32: hu.float32_gradients(model), or float32 parameters under autocast"
    write = "import halfulp as hu\nhu.float32_gradients(model)  # before the first backward"
    role = "weight gradient"
    wide_cure = "fewer micro-batches, or each divided by their number before its backward pass"
    worst = "-realised"

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            sums = parameter.accumulation or RealisedChanges()
            realised = sums.realised_share
            if realised is None or realised >= WARNING_BELOW_KEPT_SHARE_OF_SUMS or sums.seen < FEWEST_ADDED_ELEMENTS:
                continue
            held_in = parameter.gradient_dtype or parameter.dtype
            severity: Severity = "error" if realised < ERROR_BELOW_KEPT_SHARE_OF_SUMS else "warning"
            sure, is_wide = compute_confidence(sums.seen, FEWEST_ADDED_ELEMENTS), is_wide_dtype(held_in)
            said = f"{format_percent(1 - realised)} of what is added to .grad is lost in {name_dtype(held_in)}"
            yield self.found(name, severity, sure, said, is_wide=is_wide, **make_lost_change_evidence(sums, held_in))


FEWEST_AVERAGE_CHANGES = 16
# An average that takes half of its changes lags behind; one that takes a tenth stays where it began.
WARNING_BELOW_KEPT_SHARE_OF_AVERAGE = 0.5
ERROR_BELOW_KEPT_SHARE_OF_AVERAGE = 0.1


@register_finding
class AverageStuck(FindingKind):
    """A running average, as of an EMA or a normalization, loses its changes to rounding and stays where it was."""

    code = "average-stuck"
    cure = "keep the average in float32, or use hu.optim.EMA, whose weight_update keeps what rounding would lose"
    says = "the average {place} stands still: {lost:share} of its changes are lost in {dtype}"
    worst = "lost"
    explained_by = ("dtype-not-asked", "dtype-changed-on-resume")

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, average in record.averages.items():
            change = average.change
            realised = change.realised_share
            if change.seen < FEWEST_AVERAGE_CHANGES or realised is None or is_wide_dtype(average.dtype):
                continue
            if realised < WARNING_BELOW_KEPT_SHARE_OF_AVERAGE:
                severity: Severity = "error" if realised < ERROR_BELOW_KEPT_SHARE_OF_AVERAGE else "warning"
                sure = compute_confidence(change.seen, FEWEST_AVERAGE_CHANGES)
                said = f"{format_percent(change.lost_share)} of changes lost in {name_dtype(average.dtype)}"
                yield self.found(name, severity, sure, said, **make_lost_change_evidence(change, average.dtype))


@register_finding
class PositionsCollide(FindingKind):
    """Neighbouring positions have one code: they were counted, or multiplied by frequencies, in 16 bits."""

    code = "positions-collide"
    cure = (
        "count positions in int64 and compute their angles in float32, outside of autocast; round sines and cosines "
        "alone"
    )
    explained_by = ("dtype-not-asked",)

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, positions in record.positions.items():
            digits = get_significand_bits(positions.dtype)
            assert digits is not None
            dtype, counted = name_dtype(positions.dtype), 2**digits
            said = f"of {positions.length} positions those from {counted} on are rounded to {dtype}'s whole numbers"
            yield self.found(name, "error", 1.0, said, length=positions.length, counted=counted, dtype=dtype)


FEWEST_RESIDUAL_CHANGES = 256
# Rounding a sum is right on average while what is added is larger than half a spacing; where half is gone it is not.
WARNING_BELOW_KEPT_SHARE_OF_RESIDUAL = 0.5
ERROR_BELOW_KEPT_SHARE_OF_RESIDUAL = 0.1


@register_finding
class ResidualSwamped(FindingKind):
    """What a layer adds to a residual stream is smaller than half the spacing of the stream's numbers, and is lost."""

    code = "residual-swamped"
    cure = (
        "keep the residual stream in float32 (float32 embeddings under autocast, x.float() before the first layer), or "
        "normalize it before it grows"
    )
    worst = "-realised"
    explained_by = ("dtype-not-asked",)

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, residual in record.residuals.items():
            change = residual.change
            realised = change.realised_share
            if realised is None or change.seen < FEWEST_RESIDUAL_CHANGES:
                continue
            if not realised < WARNING_BELOW_KEPT_SHARE_OF_RESIDUAL:
                continue
            severity: Severity = "error" if realised < ERROR_BELOW_KEPT_SHARE_OF_RESIDUAL else "warning"
            said = f"{format_percent(min(1.0, 1 - realised))} of what it adds to the residual stream is lost in "
            said += f"{name_dtype(residual.dtype)}: it adds {residual.added:.3g} to numbers of {residual.stream:.3g}"
            evidence: dict[str, Any] = {"added": residual.added, "stream": residual.stream}
            evidence |= make_lost_change_evidence(change, residual.dtype)
            yield self.found(name, severity, compute_confidence(change.seen, FEWEST_RESIDUAL_CHANGES), said, **evidence)


# As the optimizers of torch, torchao, bitsandbytes and halfulp call it.
SECOND_MOMENT_STATE_NAMES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "second_moment", "state2", "sum")
FEWEST_MOMENT_DECREASES = 32
# With half of its changes missing the average follows a different, slower horizon than beta2 says.
STUCK_MOMENT_SHARE = 0.5
# Squares of gradients spread over decades, and a few of the largest decide how much movement took place: 400 decreases
# that were rounded stochastically have shown 15% of it by chance.
FEWEST_STOCHASTIC_DECREASES = 4000


@register_finding
class SecondMomentStuck(FindingKind):
    """Decreases of the second moment are smaller than half its spacing: steps follow gradients of long ago."""

    code = "second-moment-stuck"
    cure = "keep the state in float32 (state_dtype=torch.float32 of hu.optim), or a beta2 of at most 0.99"
    says = "the second moment of {place} cannot fall: {lost:share} of its decreases are lost in {dtype}"
    write = write_optimizer_code(None, "state_dtype=torch.float32")
    role = "second moment"
    worst = "lost"
    explained_by = ("state-mismatch", "dtype-changed-on-resume")
    shares_cause_with = ("updates-lost", "weight-frozen", "weight-decay-lost", "freeze-ahead")

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            for state, change in parameter.states.items():
                is_moment = state in SECOND_MOMENT_STATE_NAMES and change.seen >= FEWEST_MOMENT_DECREASES
                dtype = parameter.state_dtypes.get(state)
                if not is_moment or is_wide_dtype(dtype or parameter.dtype) or not _is_moment_stuck(parameter, change):
                    continue
                code = ""  # for an optimizer that is not here
                if parameter.optimizer in OPTIMIZERS:
                    argument = "state_dtype=torch.float32"
                    code = write_optimizer_code(parameter.optimizer, argument, parameter.is_held_by_halfulp_optimizer)
                sure = compute_confidence(change.seen, FEWEST_MOMENT_DECREASES)
                said = f"{format_percent(change.lost_share)} of decreases of {state} lost in {name_dtype(dtype)}"
                evidence: dict[str, Any] = {"state": state, **make_lost_change_evidence(change, dtype)}
                yield self.found(name, "warning", sure, said, write=code, **evidence)


def _is_moment_stuck(parameter: ParameterRecord, change: RealisedChanges) -> bool:
    """Return whether an average stands still, by its decreases: gradients above it make changes that are large enough.

    torch rounds to nearest, and counts tell. What rounds a state stochastically loses most decreases too and is right
    on average: there the movement tells.
    """
    if parameter.optimizer_module.startswith("torch.optim."):
        return change.known and change.lost_share >= STUCK_MOMENT_SHARE
    realised = change.realised_share
    if realised is None or realised >= STUCK_MOMENT_SHARE or change.seen < FEWEST_STOCHASTIC_DECREASES:
        return False
    return not is_explained_by_chance(change, realised)
