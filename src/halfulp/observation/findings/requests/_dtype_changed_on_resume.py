"""dtype-changed-on-resume: a run that came back in another precision."""

from collections.abc import Iterator

from ..._finding import Finding
from ...auditing._audit import Audit
from ...auditing._damage import changed_dtypes
from ...auditing._symptom import as_findings
from ...record._record import Record
from .._kind import FindingKind, register_finding


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
