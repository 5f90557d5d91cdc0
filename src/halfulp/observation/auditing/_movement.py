"""What an audit shows of changes that rounding took away: frozen weights, lost updates and decay, stuck averages."""

from __future__ import annotations

from collections.abc import Iterator

from ..._qualified_names import pattern_of
from .._finding import Severity
from .._lost_movement import FEWEST, HALF_LOST, LITTLE_LOST, severity_of_loss
from .._text import KAHAN, at_lr, cannot_decay, dtype_name, is_narrow, is_wide, optimizer_code, percent, precision
from ._audit import Audit, Lost, StateAudit, TensorAudit
from ._symptom import Symptom

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
