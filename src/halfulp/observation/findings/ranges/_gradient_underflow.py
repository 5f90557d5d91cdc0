"""gradient-underflow: gradients that are too small for the format that holds them."""

from collections.abc import Iterator

from ..._dtypes import dtype_name
from ..._finding import Finding, Severity, in_words
from ..._words import confidence_of, percent
from ...record._record import Record, TensorRecord
from .._kind import FindingKind, register_finding
from .._range_use import (
    GRADIENTS,
    has_wide_range,
    loss_is_scaled,
    nonzero,
    rounds_to_zero,
    storage_format,
    subnormal_share,
    tensors,
    vanished_share,
)

FEWEST = 32
# Gradients span many binades and each drives its own weight, so shares count, not energy. Of a tensor whose typical
# element has lost digits half is subnormal; with a fifth at zero whole rows of weights stop.
SUBNORMAL = 0.5
VANISHED_WARNING = 0.05
VANISHED_ERROR = 0.2
# float32's and bfloat16's numbers begin below this power of two: gradients that are all 0 in these are no underflow.
NARROW = -100
STEPS = 3
UNSCALED = "scale the loss: torch.amp.GradScaler, or hu.AdaptiveGradScaler, which gives each layer its own scale"
SCALER = (
    "import halfulp as hu\n"
    "scaler = hu.AdaptiveGradScaler(model)\n"
    "scaler.scale(loss).backward()\n"
    "scaler.step(optimizer)\n"
    "scaler.update()"
)
SUBNORMALS = "gradients of {place} are too small for {format}: {subnormal:share} have lost digits"
SCALED = "hu.AdaptiveGradScaler, which gives each layer its own scale, or gradients in bfloat16"
SCALED_WIDE = "hu.AdaptiveGradScaler, which gives each layer its own scale"


@register_finding
class GradientUnderflow(FindingKind):
    """Gradients lie in the subnormal range of their format or below it, and become zero."""

    code = "gradient-underflow"
    cure = UNSCALED
    says = "gradients of {place} are too small for {format}: {vanished:share} became zero"
    write = SCALER
    worst = "vanished"
    explained_by = ("site-holds-scale", "scale-collapsed", "dtype-not-asked", "activation-underflow")

    def in_record(self, record: Record) -> Iterator[Finding]:
        cure = SCALED if loss_is_scaled(record) else UNSCALED
        yield from self._all_gone(record, cure)
        for tensor in tensors(record, *GRADIENTS):
            if _vanished_here(record, tensor):
                yield self._gone(tensor, cure)
                continue
            held_in, count = storage_format(tensor), nonzero(tensor)
            if held_in is None or count < FEWEST:
                continue
            subnormal, vanished = subnormal_share(tensor, held_in), vanished_share(tensor, held_in)
            severity = _severity(subnormal, vanished)
            if severity is not None:
                yield self.found(
                    tensor.name,
                    severity,
                    confidence_of(count, FEWEST),
                    f"{percent(subnormal)} of nonzero {tensor.role}s are subnormal in {held_in.name}, "
                    f"about {percent(vanished)} became zero",
                    cure=SCALED_WIDE if cure == SCALED and has_wide_range(held_in) else cure,
                    says=self.says if vanished >= VANISHED_WARNING else SUBNORMALS,
                    write=self.write,
                    role=tensor.role,
                    format=held_in.name,
                    subnormal=subnormal,
                    vanished=vanished,
                    amax=tensor.amax,
                    seen=count,
                )

    def _gone(self, tensor: TensorRecord, cure: str) -> Finding:
        """Of gradients that are all zeros no histogram tells."""
        back = ", which those that they are made of are not"
        if tensor.before_cast:
            back = f", to which a cast rounds {tensor.before_cast:.3g} and less"
        elif tensor.role != "weight gradient":
            back = f", on the way back from {in_words(tensor.sources)}, whose own are not"
        return self.found(
            tensor.name,
            "error",
            1 - 0.5**tensor.steps,
            f"all {tensor.role}s are 0 in {dtype_name(tensor.dtype)} in all {tensor.steps} sampled steps{back}",
            cure=cure,
            role=tensor.role,
            subnormal=0.0,
            vanished=1.0,
            amax=0.0,
            seen=0,
        )

    def _all_gone(self, record: Record, cure: str) -> Iterator[Finding]:
        """Where a loss is so small that its first gradient is zero, no later one tells of it."""
        found = tensors(record, *GRADIENTS)
        steps = min((one.steps for one in found), default=0)
        if steps < STEPS or any(one.zeros < one.elements for one in found):
            return
        for tensor in found:
            held_in = storage_format(tensor)
            if tensor.role == "activation gradient" and held_in is not None and held_in.emin > NARROW:
                yield self.found(
                    tensor.name,
                    "error",
                    1 - 0.5**steps,
                    f"all gradients are 0 in all {steps} sampled steps, from here in {held_in.name} on",
                    cure=cure,
                    write=self.write,
                    role=tensor.role,
                    format=held_in.name,
                    subnormal=0.0,
                    vanished=1.0,
                    amax=0.0,
                    seen=0,
                )
                return


def _vanished_here(record: Record, tensor: TensorRecord) -> bool:
    """Return whether gradients that are all zeros were lost where they are: those that they come from are not zeros."""
    held_in = storage_format(tensor)
    # Exponents of their own move gradients between modules.
    if held_in is None or record.sites or tensor.steps < STEPS or not tensor.elements:
        return False
    if tensor.zeros < tensor.elements:
        return False
    if tensor.role == "weight gradient":
        module, _, own = tensor.name.rpartition(".")
        back = record.tensors.get(("activation gradient", module))
        made = [one.name for one in tensors(record, GRADIENTS[0]) if module in one.sources]
        entered = [one.amax for one in tensors(record, "activation") if one.name in made]
        if back is None or own != "weight" or not entered:
            return False
        return rounds_to_zero(back.amax, max(entered), held_in)
    if tensor.before_cast is not None and rounds_to_zero(tensor.before_cast, None, held_in):
        return True
    pairs = []
    for source in tensor.sources:
        back = record.tensors.get(("activation gradient", source))
        weight = record.tensors.get(("weight", f"{source}.weight"))
        pairs.append((0.0 if back is None else back.amax, None if weight is None else weight.amax))
    return bool(pairs) and all(rounds_to_zero(*pair, held_in) for pair in pairs)


def _severity(subnormal: float, vanished: float) -> Severity | None:
    if vanished >= VANISHED_ERROR:
        return "error"
    return "warning" if vanished >= VANISHED_WARNING or subnormal >= SUBNORMAL else None
