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
        "in hu.contract"
    )

    def in_record(self, record: Record) -> Iterator[Finding]:
        for contract in record.expectations:
            if contract.source != "contract" or not contract.other:
                continue
            there = ", ".join(dict.fromkeys(contract.other.values()))
            yield self.found(
                tuple(contract.other),
                "error",
                1.0,
                f"the contract says {contract.asked}, the resumed run has {there}",
                asked=contract.asked,
                there=there,
                other=len(contract.other),
            )

    def in_audit(self, audit: Audit) -> Iterator[Finding]:
        yield from as_findings(self, changed_dtypes(audit))
