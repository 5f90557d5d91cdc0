"""activation-underflow: activations that are too small for the format that holds them."""

import math
from collections.abc import Iterator

from ..._finding import Finding
from ..._words import confidence_of, percent
from ...record._record import Record
from .._kind import FindingKind, register_finding
from .._range_use import nonzero, storage_format, subnormal_share, tensors

FEWEST = 32
# Products sum activations, so what counts is the error's energy: small ones beside large ones, as in a softmax, harm
# nothing. e4m3 rounds with a relative error of 2^-4 / sqrt(3) = 3.6%; a float16 tensor that is worse has lost its use.
WARNING = 0.036
ERROR = 0.5


@register_finding
class ActivationUnderflow(FindingKind):
    """A layer's outputs as a whole lie in the subnormal range of their format, where digits and numbers are lost."""

    code = "activation-underflow"
    cure = (
        "scale the layer's output up by a power of two and undo it later, or compute it in bfloat16; "
        "hu.scalify gives every tensor a scale"
    )
    says = "outputs of {place} are too small for their format: rounding errs by {noise:share} of their size"
    role = "activation"
    explained_by = ("dtype-not-asked",)

    def in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in tensors(record, "activation"):
            held_in, count = storage_format(tensor), nonzero(tensor)
            if held_in is None or count < FEWEST or not tensor.rms > 0 or not tensor.amax < held_in.smallest_normal * 2:
                continue
            # Rounding to multiples of q errs by q / sqrt(12) on average.
            noise = held_in.smallest_subnormal / (math.sqrt(12) * tensor.rms)
            if noise < WARNING:
                continue
            subnormal = subnormal_share(tensor, held_in)
            yield self.found(
                tensor.name,
                "error" if noise >= ERROR else "warning",
                confidence_of(count, FEWEST),
                f"{percent(subnormal)} of nonzero activations are subnormal in {held_in.name}, "
                f"with a rounding error of {percent(min(1.0, noise))} of their size",
                subnormal=subnormal,
                noise=noise,
                amax=tensor.amax,
                rms=tensor.rms,
                seen=count,
            )
