"""Findings about what should agree: replicas, two runs of one module, dtypes asked for and found, states, losses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ... import formats
from .._finding import Finding, Severity
from .._record import OutputDifference, Record
from .._text import compute_confidence, format_percent, get_significand_bits, is_wide_dtype, name_dtype
from ._kind import FindingKind, register_finding

if TYPE_CHECKING:
    from ..auditing._audit import Audit


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
                yield self.make_finding(pair.name, "warning", 1.0, said, **evidence)


# Where neighbouring numbers are as far apart as the loss changes from step to step, half of its changes are not seen.
LOSS_SPACING_TO_CHANGE_LIMIT = 1.0
FEWEST_LOSSES = 4


@register_finding
class LossRoundedTooCoarsely(FindingKind):
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
        sure, is_wide = compute_confidence(losses, FEWEST_LOSSES), is_wide_dtype(record.loss_dtype)
        yield self.make_finding((), "warning", sure, said, is_wide=is_wide, gap=gap, dtype=dtype, losses=losses)


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
            yield self.make_finding(pair.name, "error", 1.0, said, **evidence)


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
            yield self.make_finding(differing, "error", 1.0, said, differing=len(differing), ranks=record.replica_of[1])


@register_finding
class DtypeChangedOnResume(FindingKind):
    """After loading a checkpoint, tensors have another dtype than the run had that wrote it."""

    code = "dtype-changed-on-resume"
    cure = (
        "load in the dtype that was saved (torch_dtype= of from_pretrained, no .to() afterwards), or allow it "
        "in hu.contract(...).check"
    )

    def find_in_audit(self, audit: Audit) -> Iterator[Finding]:
        changed: list[tuple[str, str, torch.dtype | None, torch.dtype | None]] = [
            (name, "", row.a.dtype, row.b.dtype) for name, row in audit.tensors.items()
        ]
        for name, state in audit.states.items():
            changed += [(name, key, *pair) for key, pair in state.dtypes.items() if None not in pair]
        for name, key, before, after in changed:
            if before == after:
                continue
            said = f"{key} {name_dtype(before)} in A, {name_dtype(after)} in B".lstrip()
            severity: Severity = "warning"
            digits, left = get_significand_bits(before), get_significand_bits(after)
            if digits is not None and (left is None or left < digits):
                severity = "error"
                said += "" if left is None else f": {digits - left} digits fewer"
            evidence: dict[str, Any] = {"before": name_dtype(before), "after": name_dtype(after), "state": key or None}
            yield self.make_finding(name, severity, 1.0, said, **evidence)


@register_finding
class DtypeNotAsked(FindingKind):
    """Tensors have another dtype or format than was asked for."""

    code = "dtype-not-asked"
    cure = (
        "set the dtype where it is used (model.to, torch.autocast) and look again: a device, a filter or a "
        "wrapper may turn a request off without a word; hu.convert raises where a recipe cannot be had"
    )

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for asked in record.expectations:
            if not asked.other:
                continue
            there, other = ", ".join(dict.fromkeys(asked.other.values())), len(asked.other)
            evidence: dict[str, Any] = {"asked": asked.asked, "there": there, "other": other}
            evidence |= {"matched": len(asked.matched), "pattern": asked.pattern}
            said = f"{asked.asked} was asked for; {other} have {there}"
            yield self.make_finding(tuple(asked.other), "error", 1.0, said, **evidence)


@register_finding
class PatternMatchesNothing(FindingKind):
    """A pattern that was to choose modules or parameters matches none, so that nothing was done."""

    code = "pattern-empty"
    cure = (
        "take names from model.named_modules(), with * for a layer's number; the `where=` of hu.scalify and "
        "hu.multicomponent raise where nothing matches"
    )

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for asked in record.expectations:
            if not asked.matched:
                said = f"{asked.pattern!r} matches no name, where {asked.asked} was asked for"
                yield self.make_finding((), "error", 1.0, said, pattern=asked.pattern, asked=asked.asked)


@register_finding
class InconsistentOptimizerState(FindingKind):
    """States of a torch optimizer have another dtype than their parameter: one was cast after the other was made."""

    code = "state-mismatch"
    cure = (
        "make the optimizer after the model has its dtype, and load states with optimizer.load_state_dict, "
        "which casts them; hu.optim says state_dtype="
    )
    role = "first moment"
    explained_by = ("dtype-changed-on-resume",)

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            # Others choose the dtype of their states on purpose.
            if not parameter.optimizer_module.startswith("torch.optim.") or not parameter.dtype.is_floating_point:
                continue
            other = {key: one for key, one in parameter.state_dtypes.items() if one != parameter.dtype}
            other.pop("step", None)
            if not other:
                continue
            narrower = any(one.itemsize < parameter.dtype.itemsize for one in other.values())
            states = ", ".join(f"{key} in {name_dtype(one)}" for key, one in other.items())
            severity: Severity = "error" if narrower else "warning"
            dtype = name_dtype(parameter.dtype)
            yield self.make_finding(name, severity, 1.0, f"parameter in {dtype}, {states}", dtype=dtype, states=states)

    def find_in_audit(self, audit: Audit) -> Iterator[Finding]:
        for name, state in audit.states.items():
            if not state.shapes_match:
                said = "a moment has another shape than the parameter"
                cure = "see whether states and weights are of one run, and in the order of its parameters"
                yield self.make_finding(name, "error", 1.0, said, cure=cure)
            if state.steps_between is not None and state.steps_between < 0:
                before, after = state.steps
                said = f"step {after} in B, {before} in A: B is the older one, or its steps began anew"
                yield self.make_finding(name, "warning", 0.9, said, cure="swap A and B", before=before, after=after)
