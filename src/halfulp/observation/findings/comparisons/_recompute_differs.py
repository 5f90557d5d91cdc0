"""recompute-differs: gradient checkpointing that computes something else the second time."""

from collections.abc import Iterator

from ..._finding import Finding
from ..._words import percent
from ...record._record import Record
from .._kind import FindingKind, register_finding
from .._same_outputs import explained_by_order


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

    def in_record(self, record: Record) -> Iterator[Finding]:
        for pair in record.recomputed:
            first, second = pair.dtypes
            if first == second and (not pair.differing or explained_by_order(pair)):
                continue
            said = f"computed in {first}, recomputed in {second}" if first != second else f"recomputed in {second} too"
            yield self.found(
                pair.name,
                "error",
                1.0,
                f"{said}; {percent(pair.differing)} of outputs differ, by {percent(pair.relative)} of their size",
                first=first,
                second=second,
                differing=pair.differing,
                relative=pair.relative,
            )
