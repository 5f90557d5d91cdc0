"""Findings about what was asked for and is not there: dtypes, patterns, states, a resumed run's precision."""

from collections.abc import Iterator

from .._finding import Finding
from .._record import Record
from .._text import dtype_name
from ..auditing._audit import Audit
from ..auditing._symptoms import as_findings, changed_dtypes, mismatched_states
from ._kind import FindingKind, register_finding


@register_finding
class DtypeChangedOnResume(FindingKind):
    """After loading a checkpoint, tensors have another dtype than the run had that wrote it."""

    code = "dtype-changed-on-resume"
    cure = (
        "load in the dtype that was saved (torch_dtype= of from_pretrained, no .to() afterwards), or allow it "
        "in hu.contract(...).check"
    )

    def in_record(self, record: Record) -> Iterator[Finding]:
        differences: dict[str, list[tuple[str, str]]] = {}
        for contract in reversed(record.expectations):  # whose dtypes are the last
            for name, there in contract.other.items() if contract.source == "contract" else ():
                differences.setdefault(name, []).append((contract.asked, there))
        alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for name, found in differences.items():
            alike.setdefault(tuple(found), []).append(name)
        for pairs, names in alike.items():
            asked, there = (", ".join(words) for words in zip(*pairs))
            yield self.found(
                names,
                "error",
                1.0,
                f"the contract says {asked}, the resumed run has {there}",
                asked=asked,
                there=there,
                other=len(names),
            )

    def in_audit(self, audit: Audit) -> Iterator[Finding]:
        yield from as_findings(self, changed_dtypes(audit))


@register_finding
class DtypeNotAsked(FindingKind):
    """Tensors have another dtype or format than was asked for."""

    code = "dtype-not-asked"
    cure = (
        "set the dtype where it is used (model.to, torch.autocast) and look again: a device, a filter or a "
        "wrapper may turn a request off without a word; hu.convert raises where a recipe cannot be had"
    )

    def in_record(self, record: Record) -> Iterator[Finding]:
        for asked in record.expectations:
            if asked.source == "contract" or not asked.other:
                continue
            there = ", ".join(dict.fromkeys(asked.other.values()))
            yield self.found(
                tuple(asked.other),
                "error",
                1.0,
                f"{asked.asked} was asked for ({asked.source}); {len(asked.other)} have {there}",
                asked=asked.asked,
                there=there,
                other=len(asked.other),
                matched=len(asked.matched),
                pattern=asked.pattern,
            )


@register_finding
class PatternEmpty(FindingKind):
    """A pattern that was to choose modules or parameters matches none, so that nothing was done."""

    code = "pattern-empty"
    cure = (
        "take names from model.named_modules(), with * for a layer's number; the `where=` of hu.scalify and "
        "hu.multicomponent raise where nothing matches"
    )

    def in_record(self, record: Record) -> Iterator[Finding]:
        for asked in record.expectations:
            if not asked.matched:
                said = f"{asked.pattern!r} matches no name, where {asked.asked} was asked for ({asked.source})"
                yield self.found((), "error", 1.0, said, pattern=asked.pattern, asked=asked.asked, source=asked.source)


@register_finding
class StateMismatch(FindingKind):
    """States of a torch optimizer have another dtype than their parameter: one was cast after the other was made."""

    code = "state-mismatch"
    cure = (
        "make the optimizer after the model has its dtype, and load states with optimizer.load_state_dict, "
        "which casts them; hu.optim says state_dtype="
    )
    role = "first moment"
    explained_by = ("dtype-changed-on-resume",)

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            # Others choose the dtype of their states on purpose.
            if not parameter.optimizer_module.startswith("torch.optim.") or not parameter.dtype.is_floating_point:
                continue
            other = {key: dtype for key, dtype in parameter.state_dtypes.items() if dtype != parameter.dtype}
            other.pop("step", None)
            if not other:
                continue
            narrower = any(dtype.itemsize < parameter.dtype.itemsize for dtype in other.values())
            states = ", ".join(f"{key} in {dtype_name(dtype)}" for key, dtype in other.items())
            yield self.found(
                name,
                "error" if narrower else "warning",
                1.0,
                f"parameter in {dtype_name(parameter.dtype)}, {states}",
                dtype=dtype_name(parameter.dtype),
                states=states,
            )

    def in_audit(self, audit: Audit) -> Iterator[Finding]:
        yield from as_findings(self, mismatched_states(audit))
