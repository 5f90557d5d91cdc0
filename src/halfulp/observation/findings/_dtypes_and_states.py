"""Findings about what was asked for and is not there: dtypes, patterns, states, a resumed run's precision."""

from collections.abc import Iterator
from typing import Any

import torch

from .._finding import Finding, Severity
from .._record import Record
from .._text import get_significand_bits, name_dtype
from ..auditing._audit import Audit
from ._kind import FindingKind, register_finding


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
            yield self.found(name, severity, 1.0, said, **evidence)


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
            yield self.found(tuple(asked.other), "error", 1.0, said, **evidence)


@register_finding
class PatternEmpty(FindingKind):
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
                yield self.found((), "error", 1.0, said, pattern=asked.pattern, asked=asked.asked)


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
            yield self.found(name, severity, 1.0, f"parameter in {dtype}, {states}", dtype=dtype, states=states)

    def find_in_audit(self, audit: Audit) -> Iterator[Finding]:
        for name, state in audit.states.items():
            if not state.shapes_match:
                said = "a moment has another shape than the parameter"
                cure = "see whether states and weights are of one run, and in the order of its parameters"
                yield self.found(name, "error", 1.0, said, cure=cure)
            if state.advanced is not None and state.advanced < 0:
                before, after = state.steps
                said = f"step {after} in B, {before} in A: B is the older one, or its steps began anew"
                yield self.found(name, "warning", 0.9, said, cure="swap A and B", before=before, after=after)
