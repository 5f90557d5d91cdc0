"""state-mismatch: optimizer states in another precision than the parameter."""

from collections.abc import Iterator

from ..._dtypes import dtype_name
from ..._finding import Finding
from ...auditing._audit import Audit
from ...auditing._damage import mismatched_states
from ...auditing._symptom import as_findings
from ...record._record import Record
from .._kind import FindingKind, register_finding


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
