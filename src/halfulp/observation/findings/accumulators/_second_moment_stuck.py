"""second-moment-stuck: the average of squared gradients no longer follows them."""

from collections.abc import Iterator

from ..._finding import Finding
from ...record._record import Record
from .._kind import FindingKind, register_finding
from .._words import confidence_of, dtype_name, percent

# As the optimizers of torch, torchao, bitsandbytes and halfulp call it.
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "second_moment", "state2", "sum")
FEWEST = 32
# With half of its change missing the average follows a different, slower horizon than beta2 says.
REALISED = 0.5


@register_finding
class SecondMomentStuck(FindingKind):
    """Changes of the second moment are smaller than half its spacing: steps follow gradients of long ago."""

    code = "second-moment-stuck"
    cure = "keep the state in float32 (state_dtype=torch.float32 of hu.optim), or a beta2 of at most 0.99"
    explained_by = ("state-mismatch", "dtype-changed-on-resume")

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            for state, change in parameter.states.items():
                realised = change.realised_share
                if state not in SECOND_MOMENTS or change.seen < FEWEST or realised is None or not realised < REALISED:
                    continue
                dtype = dtype_name(parameter.state_dtypes.get(state))
                yield self.found(
                    name,
                    "warning",
                    confidence_of(change.seen, FEWEST),
                    f"{percent(change.lost_share)} of changes of {state} lost in {dtype}",
                    state=state,
                    lost=change.lost_share,
                    realised=realised,
                    seen=change.seen,
                    dtype=dtype,
                )
