"""What an audit shows: damaged tensors, and movement that rounding took away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ... import formats
from ..._qualified_names import pattern_of
from .._finding import Finding, Severity
from .._record import ParameterRecord, Realised
from .._text import KAHAN, at_lr, cannot_decay, dtype_name, is_narrow, is_wide, optimizer_code, percent, precision
from ._audit import Audit, Lost, StateAudit, TensorAudit


@dataclass(frozen=True, slots=True)
class Symptom:
    """Where something is wrong, how badly, how surely, in words and numbers.

    Attributes:
        where: qualified names.
        severity, confidence, summary: as of a Finding.
        evidence: the numbers.
        cure: what to do, None for what the code's class says.
        dtype: of the numbers, where the class has another cure for wide ones.
        write: lines of code that are the cure, None for what the code's class says.
    """

    where: tuple[str, ...]
    severity: Severity
    confidence: float
    summary: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    cure: str | None = None
    dtype: torch.dtype | None = None
    write: str | None = None


class SymptomKind(Protocol):
    """A class of `findings` that makes findings of its code."""

    def cure_in(self, dtype: torch.dtype | None) -> str:
        """Return what to do about numbers of a dtype."""

    def found(
        self,
        where: tuple[str, ...],
        severity: Severity,
        confidence: float,
        summary: str,
        *,
        cure: str | None = None,
        write: str | None = None,
        **evidence: Any,
    ) -> Finding:
        """Return a finding of its code."""


def as_findings(kind: SymptomKind, symptoms: Iterable[Symptom]) -> Iterator[Finding]:
    """Yield the findings that symptoms make under a code."""
    for one in symptoms:
        yield kind.found(
            one.where,
            one.severity,
            one.confidence,
            one.summary,
            cure=one.cure or kind.cure_in(one.dtype),
            write=one.write,
            **one.evidence,
        )


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


# An average that takes in what is new changes nearly everywhere; a few elements may stand still by chance.
STUCK = 0.95
# As the optimizers of torch, torchao, bitsandbytes and halfulp call it.
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "second_moment", "state2", "sum")


def frozen_weights(audit: Audit) -> Iterator[Symptom]:
    """Yield the weights of which not one element differs between the checkpoints."""
    moving = {pattern_of(name) for name, row in audit.tensors.items() if row.status in ("changed", "barely-moved")}
    for name, row in audit.tensors.items():
        if row.status != "unchanged" or row.role in ("average", "buffer") or not row.numel or row.companions_moved:
            continue
        if precision(row.a.dtype) is None or row.b.nonfinite:
            continue
        state = audit.states.get(name)
        symptom = _stepped(row, state) if state is not None else _unstepped(row, audit, pattern_of(name) in moving)
        if symptom is not None:
            yield symptom


def _stepped(row: TensorAudit, state: StateAudit) -> Symptom | None:
    steps, lr = state.advanced, state.options.get("lr")
    if state.compensation_moved or steps == 0 or lr == 0:
        return None
    during = f"in {steps} steps" if steps is not None and steps > 0 else "between the checkpoints"
    said = f"has not moved {during} in {dtype_name(row.a.dtype)}{at_lr(state.options)}"
    evidence = {"moved": 0.0, "steps": steps, "elements": row.numel, "lr": lr}
    if state.all_zero:
        cure = "see whether the loss depends on it; set requires_grad=False if it is to stay"
        return Symptom((row.name,), "note", 0.9, f"{said}, and its moments are 0: no gradient arrives", evidence, cure)
    return Symptom((row.name,), "error", 1.0 if row.numel >= FEWEST else 0.9, said, evidence, dtype=row.a.dtype)


def _unstepped(row: TensorAudit, audit: Audit, siblings_moved: bool) -> Symptom | None:
    where, said = (row.name,), f"not one of {row.numel} elements moved in {dtype_name(row.a.dtype)}"
    evidence = {"moved": 0.0, "elements": row.numel, "constant": row.b.constant}
    if row.b.constant is not None and row.numel > 1:
        said += f", all still {row.b.constant:g}"
    if audit.states and audit.states_complete:
        return Symptom(where, "note", 0.5, f"{said}; the optimizer holds no state of it", evidence, "nothing, if meant")
    if is_narrow(row.a.dtype):
        return Symptom(where, "warning", 0.8 if row.numel >= FEWEST else 0.5, said, evidence)
    if siblings_moved:
        cure = "see whether it is meant to be frozen and gets a gradient"
        return Symptom(where, "warning", 0.6, f"{said}, those of other layers did", evidence, cure)
    return Symptom(where, "note", 0.3, said, evidence, "nothing, if it is frozen on purpose or a constant")


def lost_updates(audit: Audit) -> Iterator[Symptom]:
    """Yield the weights whose last updates nearest rounding cancelled."""
    for name, state, row in _rounded_to_nearest(audit):
        update = state.update
        if update is None or update.wanted < FEWEST:
            continue
        severity = severity_of_loss(row.b.dtype, update.realised, update.share)
        if severity is None:
            continue
        dtype, confidence = dtype_name(row.b.dtype), 1.0
        said = f"{percent(update.share)} of updates lost in {dtype}{at_lr(state.options)}"
        if update.realised >= LITTLE_LOST:
            said += f", the smaller ones, though {percent(min(1.0, update.realised))} of the movement took place"
        if _kept_elsewhere(update, row, state):
            severity, confidence = "warning", 0.5
            said += ", unless wider weights are kept elsewhere"
        cure = None if is_wide(row.b.dtype) else _cure(update)
        code = optimizer_code(None, state.options, KAHAN if cure is None else 'weight_update="split"')
        yield Symptom((name,), severity, confidence, said, _evidence(update, state, dtype), cure, row.b.dtype, code)


def _kept_elsewhere(update: Lost, row: TensorAudit, state: StateAudit) -> bool:
    """Return whether the weights seem to be copies of wider ones, which a step changes first."""
    if update.share > 0.99 and row.share_unchanged < 0.5:  # they move although their format loses nearly every update
        return True
    if state.weight_update is not None:  # an optimizer of halfulp holds the states that it was asked for
        return False
    digits = precision(row.b.dtype) or 0
    kept = [precision(dtype) or 0 for key, (_, dtype) in state.dtypes.items() if key not in state.reduced]
    return bool(kept) and min(kept) > digits


def lost_decay(audit: Audit) -> Iterator[Symptom]:
    """Yield the weights whose weight decay alone is below what their format can hold."""
    for name, state, row in _rounded_to_nearest(audit):
        decay, rate = state.decay, state.options.get("weight_decay")
        if decay is None or decay.wanted < FEWEST or not decay.realised < HALF_LOST:
            continue
        dtype, lr = dtype_name(row.b.dtype), state.options.get("lr")
        factor = f" (1 - {lr * rate:.3g} a step)" if lr is not None and rate is not None else ""
        said = f"{percent(decay.share)} of weight decay lost in {dtype}{factor}"
        # In float32 that is a schedule's last steps, when decay has nothing left to do.
        severity: Severity = "warning" if is_narrow(row.b.dtype) else "note"
        evidence = {**_evidence(decay, state, dtype), "weight_decay": rate}
        code = optimizer_code(None, state.options, KAHAN)
        yield Symptom((name,), severity, 1.0, said, evidence, dtype=row.b.dtype, write=code)


def stuck_second_moments(audit: Audit) -> Iterator[Symptom]:
    """Yield second moments that can only rise, since their format loses every decay by beta2."""
    for name, state in audit.states.items():
        rate = _second_rate(state)
        if rate is None or state.weight_update is not None:
            continue
        for moment, (_, dtype) in state.dtypes.items():
            if moment not in SECOND_MOMENTS or not cannot_decay(rate, dtype):
                continue
            said = f"{moment} in {dtype_name(dtype)} loses every decay by beta2 = {1 - rate:.6g}"
            unchanged = state.unchanged.get(moment)
            if unchanged is not None and unchanged > HALF_LOST and state.advanced:
                said += f"; {percent(unchanged)} of it unchanged in {state.advanced} steps"
            evidence = {"state": moment, "dtype": dtype_name(dtype), "decay": rate, "unchanged": unchanged}
            yield Symptom((name,), "warning", 1.0, said, evidence, dtype=dtype)


def stuck_averages(audit: Audit) -> Iterator[Symptom]:
    """Yield averages of few bits that stand still while the weights move."""
    moved = any(row.status == "changed" and row.role != "average" for row in audit.tensors.values())
    for name, row in audit.tensors.items():
        if row.role != "average" or not moved or row.numel < FEWEST // 2 or not is_narrow(row.a.dtype):
            continue
        if row.share_unchanged < STUCK or row.companions_moved or row.b.nonfinite or row.b.constant == 0:
            continue
        said = f"{percent(row.share_unchanged)} unchanged in {dtype_name(row.a.dtype)}, while the weights moved"
        severity: Severity = "error" if row.status == "unchanged" else "warning"
        yield Symptom((name,), severity, 0.8, said, {"unchanged": row.share_unchanged, "elements": row.numel})


def _rounded_to_nearest(audit: Audit) -> Iterator[tuple[str, StateAudit, TensorAudit]]:
    """Yield the parameters that nothing wider stands beside and that no other rounding updates."""
    for name, state in audit.states.items():
        row = audit.tensors.get(name)
        if row is None or state.compensated or row.companions_moved or row.b.storage != "plain":
            continue
        if state.weight_update in (None, "nearest"):
            yield name, state, row


def _second_rate(state: StateAudit) -> float | None:
    betas, alpha = state.options.get("betas"), state.options.get("alpha")
    if isinstance(betas, list | tuple) and len(betas) >= 2:
        return 1.0 - float(betas[1])
    return None if alpha is None else 1.0 - float(alpha)


def _evidence(lost: Lost, state: StateAudit, dtype: str) -> dict[str, object]:
    by = {f"lost_by_{name}": count / max(1, lost.wanted) for name, count in lost.lost_by.items()}
    return {
        "lost": lost.share,
        "realised": lost.realised,
        "seen": lost.wanted,
        "dtype": dtype,
        "lr": state.options.get("lr"),
        **by,
    }


def _cure(lost: Lost) -> str | None:
    """Return what to do where the usual cure would lose updates too."""
    kahan = lost.lost_by.get("kahan", 0)
    if kahan <= lost.wanted / 2:
        return None
    return "keep these in float32, or weight_update='split' of hu.optim: the updates are too small for 'kahan'"


# Fewer elements say nothing of a share of 10%.
FEWEST = 32
# A tenth of the movement missing is a learning rate a tenth smaller, which no training shows; half is a different run.
LITTLE_LOST = 0.9
HALF_LOST = 0.5
# Large updates are most of the movement and survive, so that nearly all of it may take place while most elements stand
# still: a character GPT in bfloat16 that loses 51% of its updates and realises 99% ends with a validation loss of 2.16
# instead of float32's 2.12 (docs/compare.md).
MOST_CANCELLED = 0.5


def severity_of_loss(dtype: torch.dtype, realised: float | None, cancelled: float) -> Severity | None:
    """Return how bad it is, where updates of weights of a dtype are rounded to nearest; None where few are lost.

    Args:
        dtype: of the stored weights, beside which nothing keeps what rounding takes away.
        realised: share of the wanted movement that took place; None or NaN where it is not known.
        cancelled: share of the updates that are not zero and left their element as it was.
    """
    if realised is None or realised != realised:
        return None
    if realised < LITTLE_LOST:
        if is_wide(dtype):
            return "note"
        return "error" if realised < HALF_LOST else "warning"
    return "warning" if is_narrow(dtype) and cancelled >= MOST_CANCELLED else None


def may_be_chance(change: Realised, realised: float, spread: float = 1.0) -> bool:
    """Return whether stochastic rounding, which is right on average, may have made a share of movement by chance.

    The mean of n changes that are each kept with probability p is off by about sqrt((1/p - 1) / n) of itself: within
    four times that it may be chance.

    Args:
        change: that was counted.
        realised: the share of movement.
        spread: the mean of 1/p over 1 over the mean of p. Of weights it is up to 3: a layer's lie in several binades,
            and p halves from one to the next.

    >>> few, many = Realised(seen=250, cancelled=225), Realised(seen=25000, cancelled=22500)
    >>> may_be_chance(few, 0.3), may_be_chance(many, 0.3)
    (True, False)
    """
    kept = 1 - change.lost_share
    return kept > 0 and (1 - realised) ** 2 < 16 * (spread / kept - 1) / change.seen


def keeps_the_rest(parameter: ParameterRecord) -> bool:
    """Return whether a weight update of halfulp's keeps what rounding drops, beside the weight or on average."""
    return parameter.weight_update not in ("nearest", "none")
