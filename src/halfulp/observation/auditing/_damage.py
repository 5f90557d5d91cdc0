"""What an audit shows of broken or altered tensors: other dtypes, NaN, saturation, zeros, states that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ... import formats
from .._finding import Severity
from .._text import dtype_name, is_narrow, percent, precision
from ._audit import Audit, StateAudit, TensorAudit
from ._symptom import Symptom

# A payload whose scale follows its largest element has one there; more than a thousandth of all is clipping.
CLIPPED, CLIPPED_MUCH, CLIPPED_FEWEST = 1e-3, 1e-2, 8
# Formats of float32's range do not saturate; a mask is filled with their lowest number.
WIDE_RANGE = 2.0**100
GO_BACK = "go on from A, and observe the steps after it (hu.observe): the first module with NaN is the cause"
GO_FURTHER_BACK = "go on from a checkpoint before A, and observe the steps after it (hu.observe)"


def changed_dtypes(audit: Audit) -> Iterator[Symptom]:
    """Yield tensors and states that have another dtype or storage in B, and what differs from a contract."""
    for name, row in audit.tensors.items():
        if row.a.dtype != row.b.dtype:
            yield _changed(name, "", row.a.dtype, row.b.dtype)
        elif row.a.storage != row.b.storage:
            said = f"{row.a.storage} storage in A, {row.b.storage} in B"
            yield Symptom((name,), "warning", 1.0, said, {"before": row.a.storage, "after": row.b.storage})
    for name, state in audit.states.items():
        for key, (before, after) in state.dtypes.items():
            if before is not None and after is not None and before != after:
                yield _changed(name, f"{key} ", before, after)
    for name, said in audit.contract:
        yield Symptom((name,) if name else (), "error", 1.0, f"the precision contracts differ: {said}")


def _changed(name: str, what: str, before: torch.dtype, after: torch.dtype) -> Symptom:
    digits = precision(before), precision(after)
    said = f"{what}{dtype_name(before)} in A, {dtype_name(after)} in B"
    evidence = {"before": dtype_name(before), "after": dtype_name(after), "state": what.strip() or None}
    fewer = digits[0] is not None and (digits[1] is None or digits[1] < digits[0])
    if digits[0] is not None and digits[1] is not None and fewer:
        said += f": {digits[0] - digits[1]} digits fewer"
    return Symptom((name,), "error" if fewer else "warning", 1.0, said, evidence)


def nonfinite_tensors(audit: Audit) -> Iterator[Symptom]:
    """Yield the tensors with NaN or infinity: those that A had clean, then those that it had not."""
    new = [row for row in audit.tensors.values() if row.b.nonfinite > row.a.nonfinite]
    old = [row for row in audit.tensors.values() if 0 < row.b.nonfinite <= row.a.nonfinite]
    if new:
        said = f"{_counted(new)} in B, none of these in A: A is the last clean checkpoint of the two"
        counts = {"nan": sum(row.b.nan for row in new), "infinite": sum(row.b.infinite for row in new)}
        yield Symptom(tuple(row.name for row in new), "error", 1.0, said, {**counts, "last_clean": "A"}, GO_BACK)
    for row in old:
        # Attention masks are buffers of minus infinity.
        constant = row.b.nan == 0 and row.role != "parameter" and row.status == "unchanged"
        evidence: dict[str, Any] = {"nan": row.b.nan, "infinite": row.b.infinite, "last_clean": None}
        said = "the same infinities in both: a mask?" if constant else f"{_counted([row])}, in A already"
        cure = "nothing, if it is a mask" if constant else GO_FURTHER_BACK
        yield Symptom((row.name,), "note" if constant else "error", 0.5 if constant else 1.0, said, evidence, cure)
    for name, state in audit.states.items():
        for key, (before, after) in state.nonfinite.items():
            if after:
                said = f"{after} elements of {key} are NaN or infinite in B, {before} in A"
                numbers = {"state": key, "before": before, "after": after}
                yield Symptom((name,), "error", 1.0, said, numbers, GO_FURTHER_BACK if before else GO_BACK)


def _counted(rows: list[TensorAudit]) -> str:
    counts = {"NaN": sum(row.b.nan for row in rows), "infinite": sum(row.b.infinite for row in rows)}
    elements = sum(row.numel for row in rows)
    return " and ".join(f"{count} {word}" for word, count in counts.items() if count) + f" of {elements} elements"


def saturated_payloads(audit: Audit) -> Iterator[Symptom]:
    """Yield tensors many of whose elements lie at the largest number of their format."""
    for name, row in audit.tensors.items():
        # A scale that follows the largest element puts one there.
        count = row.b.saturated - 1
        share = count / max(1, row.numel)
        if count < CLIPPED_FEWEST or share < CLIPPED or not _saturates(row.b.dtype) or row.b.constant is not None:
            continue
        said = f"{percent(share)} of elements at the largest number of {dtype_name(row.b.dtype)}"
        before = row.a.saturated / max(1, row.numel)
        severity: Severity = "error" if share >= CLIPPED_MUCH else "warning"
        yield Symptom((name,), severity, 0.9, said, {"share": share, "before": before, "elements": row.numel})


def _saturates(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and is_narrow(dtype) and formats.get(dtype).max < WIDE_RANGE


def zeroed_tensors(audit: Audit) -> Iterator[Symptom]:
    """Yield tensors that became zero as a whole, or in half of their elements with another dtype."""
    for name, row in audit.tensors.items():
        if precision(row.b.dtype) is None or row.numel < 2 or row.role == "buffer":
            continue
        share, before = row.b.zeros / row.numel, row.a.zeros / row.numel
        evidence = {"zeros": share, "before": before, "elements": row.numel}
        if share == 1 and before < 1:
            yield Symptom((name,), "error", 1.0, f"all zeros in B, {percent(before)} zeros in A", evidence)
        elif share - before > 0.5 and row.a.dtype != row.b.dtype:
            said = f"{percent(share)} zeros in {dtype_name(row.b.dtype)}, {percent(before)} before"
            yield Symptom((name,), "error", 0.9, said, evidence)


def mismatched_states(audit: Audit) -> Iterator[Symptom]:
    """Yield parameters whose optimizer states have other shapes, digits or steps than they should."""
    for name, state in audit.states.items():
        row = audit.tensors.get(name)
        if row is None:
            continue
        if not state.shapes_match:
            said = f"a state has another shape than the parameter, {row.shape}"
            cure = "see whether states and weights are of one run, and in the order of its parameters"
            yield Symptom((name,), "error", 1.0, said, {}, cure)
        if state.advanced is not None and state.advanced < 0:
            before, after = state.steps
            said = f"step {after} in B, {before} in A: B is the older one, or its steps began anew"
            yield Symptom((name,), "warning", 0.9, said, {"before": before, "after": after}, "swap A and B")
        yield from _other_digits(name, row, state)


def _other_digits(name: str, row: TensorAudit, state: StateAudit) -> Iterator[Symptom]:
    # Optimizers of halfulp hold states in the dtype that they were asked for, beside what a weight's dtype loses.
    if state.weight_update is not None or state.compensated or state.coded:
        return
    bits = precision(row.b.dtype)
    for key, (_, dtype) in state.dtypes.items():
        digits = precision(dtype)
        if bits is None or digits is None or digits == bits or key in state.reduced:
            continue
        stored, kept = dtype_name(row.b.dtype), dtype_name(dtype)
        evidence = {"parameter": stored, "state": key, "dtype": kept}
        if digits > bits:
            said = f"saved in {stored} beside {key} in {kept}: the weights were rounded when they were saved"
            yield Symptom((name,), "warning", 0.7, said, evidence, "save the weights in the dtype of the training")
        else:
            said = f"saved in {stored} beside {key} in {kept}: a load into narrower weights rounds states"
            yield Symptom((name,), "warning", 0.7, said, evidence)
