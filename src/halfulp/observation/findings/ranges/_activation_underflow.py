"""activation-underflow: activations that are too small for the format that holds them."""

import math
from collections.abc import Iterator

from ..._finding import Finding
from ..._words import confidence_of, percent
from ...record._record import Record, TensorRecord
from .._kind import FindingKind, register_finding
from .._range_use import has_wide_range, nonzero, rounds_to_zero, storage_format, subnormal_share, tensors

FEWEST = 32
# Products sum activations, so what counts is the error's energy: small ones beside large ones, as in a softmax, harm
# nothing. e4m3 rounds with a relative error of 2^-4 / sqrt(3) = 3.6%; a float16 tensor that is worse has lost its use.
WARNING = 0.036
ERROR = 0.5
STEPS = 2


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
    wide_cure = "scale the layer's output up by a power of two and undo it later; hu.scalify gives every tensor a scale"
    worst = "noise"
    explained_by = ("dtype-not-asked",)

    def in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in tensors(record, "activation"):
            if _all_vanished(tensor):
                yield self._gone(tensor)
                continue
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
                cure=self.wide_cure if has_wide_range(held_in) else self.cure,
                subnormal=subnormal,
                noise=noise,
                amax=tensor.amax,
                rms=tensor.rms,
                seen=count,
            )

    def _gone(self, tensor: TensorRecord) -> Finding:
        """Of outputs that are all zeros no histogram tells."""
        held_in = storage_format(tensor)
        assert held_in is not None
        entered = tensor.input_amax
        weights = "" if tensor.weight_amax is None else f" and weights up to {tensor.weight_amax:.3g}"
        return self.found(
            tensor.name,
            "error",
            1 - 0.5**tensor.steps,
            f"all activations are 0 in {held_in.name} in all {tensor.steps} sampled steps, of inputs up to "
            f"{entered:.3g}{weights}",
            subnormal=0.0,
            noise=math.inf,
            amax=0.0,
            rms=0.0,
            seen=0,
        )


def _all_vanished(tensor: TensorRecord) -> bool:
    """Return whether outputs are zeros because what they are made of is below their format's numbers."""
    held_in = storage_format(tensor)
    if held_in is None or tensor.steps < STEPS or not tensor.elements or tensor.zeros < tensor.elements:
        return False
    return tensor.input_amax is not None and rounds_to_zero(tensor.input_amax, tensor.weight_amax, held_in)
