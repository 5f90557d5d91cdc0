"""replicas-differ: ranks whose weights should be the same bits and are not."""

from collections.abc import Iterator

from ..._finding import Finding
from ...record._record import Record
from .._kind import FindingKind, register_finding


@register_finding
class ReplicasDiffer(FindingKind):
    """Ranks hold different bits of a parameter that data-parallel training keeps equal."""

    code = "replicas-differ"
    cure = (
        "broadcast the parameters from rank 0, and seed what rounds randomly alike on all ranks; "
        "hu.optim draws the same bits on every rank"
    )
    explained_by = ("random-bits-repeat",)

    def in_record(self, record: Record) -> Iterator[Finding]:
        differing = [name for name, same in record.replicas.items() if not same]
        if differing:
            said = f"{len(differing)} of {len(record.replicas)} parameters differ between {record.replica_of[1]} ranks"
            yield self.found(differing, "error", 1.0, said, differing=len(differing), ranks=record.replica_of[1])
