"""Findings about ranges and scales: underflow, overflow, NaN, quantizers and their blocks, loss scales."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ... import formats
from ...formats import Format
from .._finding import Finding, Severity
from .._record import Record, Role, TensorRecord
from .._text import compute_confidence, find_format, format_percent, name_dtype, pluralize, read_option_number
from ._kind import FindingKind, register_finding

if TYPE_CHECKING:
    from ..auditing._audit import Audit
    from ..auditing._tensors import TensorAudit


# bfloat16's and float32's largest numbers are beyond this power of two.
FLOAT32_RANGE_THRESHOLD = 2.0**100
GRADIENT_ROLES: tuple[Role, ...] = ("activation gradient", "weight gradient")


def list_tensor_records_of_roles(record: Record, *roles: Role) -> list[TensorRecord]:
    """Return the tensors of some roles, in order of computation."""
    return sorted((tensor for (role, _), tensor in record.tensors.items() if role in roles), key=lambda t: t.order)


def count_nonzero(tensor: TensorRecord) -> int:
    """Return how many sampled elements are finite and not zero."""
    return sum(tensor.histogram.values())


def measure_subnormal_share(tensor: TensorRecord, format: Format) -> float:
    """Return the share of sampled nonzero elements that are below a format's smallest normal number."""
    below = sum(count for binade, count in tensor.histogram.items() if binade < format.emin)
    return below / max(1, count_nonzero(tensor))


def estimate_vanished_count(tensor: TensorRecord, format: Format) -> float:
    """Return an estimate of how many sampled elements became zero when they were rounded to a format.

    Zeros tell nothing, since dropout and ReLU make them. Rounding sends an interval of the smallest number's width to
    it, and half as much, next to zero, to zero. Numbers spread evenly on so small a scale: half as many vanished.
    """
    lowest = math.frexp(format.smallest_subnormal)[1] - 1
    return 0.5 * sum(count for binade, count in tensor.histogram.items() if binade <= lowest)


def estimate_vanished_share(tensor: TensorRecord, format: Format) -> float:
    """Return an estimate of the share of elements that became zero when they were rounded to a format."""
    vanished = estimate_vanished_count(tensor, format)
    return vanished / max(1.0, count_nonzero(tensor) + vanished)


def measure_overflow_margin(tensor: TensorRecord, format: Format) -> float:
    """Return how many binades lie between a tensor's largest magnitude and the format's."""
    return math.log2(format.max / tensor.amax) if tensor.amax > 0 else math.inf


def has_float32_range(format: Format | None) -> bool:
    """Return whether a format reaches as far as float32 does: what leaves it finds no more room in bfloat16 either."""
    return format is not None and format.max >= FLOAT32_RANGE_THRESHOLD


def has_gradient_scaler(record: Record) -> bool:
    """Return whether a gradient scaler was seen."""
    return any(step.loss_scale is not None for step in record.history) or bool(record.sites)


FEWEST_NONZERO_ACTIVATION_ELEMENTS = 32
# Products sum activations, so what counts is the error's energy: small ones beside large ones, as in a softmax, harm
# nothing. e4m3 rounds with a relative error of 2^-4 / sqrt(3) = 3.6%; a float16 tensor that is worse has lost its use.
WARNING_ABOVE_ROUNDING_ERROR_SHARE = 0.036
ERROR_ABOVE_ROUNDING_ERROR_SHARE = 0.5
FEWEST_ZERO_STEPS = 2


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

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in list_tensor_records_of_roles(record, "activation"):
            held_in, count = find_format(tensor.dtype), count_nonzero(tensor)
            if held_in is None:
                continue
            all_zero = tensor.steps >= FEWEST_ZERO_STEPS and tensor.is_zero_in_all_steps
            if all_zero and _is_rounded_to_zero(tensor.input_amax or 0.0, tensor.weight_amax, held_in):
                # Inputs times weights underflow; of zeros no histogram tells.
                weights = "" if tensor.weight_amax is None else f" and weights up to {tensor.weight_amax:.3g}"
                said = f"all activations are 0 in {held_in.name} in all {tensor.steps} sampled steps, of inputs up to "
                said += f"{tensor.input_amax:.3g}{weights}"
                sure, subnormal, noise = 1 - 0.5**tensor.steps, 0.0, math.inf
            elif (
                count >= FEWEST_NONZERO_ACTIVATION_ELEMENTS
                and tensor.rms > 0
                and tensor.amax < held_in.smallest_normal * 2
            ):
                # Rounding to multiples of q errs by q / sqrt(12) on average.
                noise = held_in.smallest_subnormal / (math.sqrt(12) * tensor.rms)
                subnormal = measure_subnormal_share(tensor, held_in)
                said = f"{format_percent(subnormal)} of nonzero activations are subnormal in {held_in.name}, with a "
                said += f"rounding error of {format_percent(min(1.0, noise))} of their size"
                sure = compute_confidence(count, FEWEST_NONZERO_ACTIVATION_ELEMENTS)
            else:
                continue
            if noise >= WARNING_ABOVE_ROUNDING_ERROR_SHARE:
                severity: Severity = "error" if noise >= ERROR_ABOVE_ROUNDING_ERROR_SHARE else "warning"
                evidence: dict[str, Any] = {"subnormal": subnormal, "noise": noise, "amax": tensor.amax}
                evidence |= {"rms": tensor.rms, "seen": count}
                is_wide = has_float32_range(held_in)
                yield self.make_finding(tensor.name, severity, sure, said, is_wide=is_wide, **evidence)


def _is_rounded_to_zero(entered: float, weight: float | None, format: Format) -> bool:
    """Return whether zeros are what rounding made of inputs times weights, and not a mask, a ReLU or a zero weight."""
    # float32's range is not left by what trains, and a format of 8 bits has a scale: zeros are a quantizer's work.
    if has_float32_range(format) or format.bits < 16:
        return False
    if weight is None:  # handed on
        return 0 < entered <= format.smallest_subnormal / 2
    # A gate that began at zero is as small as its first updates, and zeros behind it are meant.
    return weight >= format.smallest_normal and 0 < entered * weight < format.smallest_normal


# Where the optimizer's states are kept in float32, its denominators are.
DENOMINATOR_STATE_NAMES = ("exp_avg_sq", "square_avg", "sum", "exp_inf")


@register_finding
class EpsZero(FindingKind):
    """The optimizer's eps rounds to zero in its dtype: where a second moment is zero too, the update is 0/0."""

    code = "eps-zero"
    cure = (
        "eps=1e-7 or more in float16 (1e-4 where the moments underflow too), or float32 states; hu.optim "
        "computes in float32"
    )
    says = "{place} [divides|divide] by zero where the second moment is zero: eps {eps} is 0 in {dtype}"
    role = "second moment"
    wide_cure = "an eps that the dtype holds, such as 1e-8"

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            eps = read_option_number(parameter.options, "eps")
            # Others add eps in float32 whatever they store.
            if not parameter.optimizer_module.startswith("torch.optim.") or eps is None or not eps > 0:
                continue
            dtypes = parameter.state_dtypes
            dtype = next((dtypes[one] for one in DENOMINATOR_STATE_NAMES if one in dtypes), parameter.dtype)
            if dtype.is_floating_point and float(torch.tensor(eps, dtype=dtype, device="cpu")) == 0:
                is_wide, kind = has_float32_range(formats.get(dtype)), name_dtype(dtype)
                yield self.make_finding(
                    name, "error", 1.0, f"eps {eps:.3g} is 0 in {kind}", is_wide=is_wide, eps=eps, dtype=kind
                )


# A loss scale makes gradients overflow now and then; what it cannot mend is there in every step.
FEWEST_NONFINITE_STEPS = 3
NONFINITE_CURE_BY_ROLE: dict[Role, str] = {
    "activation": "compute this layer in float32 or bfloat16, or bound what it divides by or exponentiates",
    "activation gradient": (
        "see what takes this output, the next layer or the loss: what its backward pass divides by (sqrt, norm or log "
        "at 0) needs an eps inside"
    ),
    "weight gradient": "see what this layer's backward pass divides by (sqrt, norm or log at 0), and add an eps inside",
}
LAST_CLEAN_CHECKPOINT_ADVICE = "load the last clean checkpoint, which `halfulp audit` finds"
OBSERVE_LATER_STEPS_ADVICE = "observe the steps after it (hu.observe)"
OBSERVE_EVERY_STEP_ADVICE = (
    LAST_CLEAN_CHECKPOINT_ADVICE + ", and observe from there with interval=1 to see where the first one comes from"
)


@register_finding
class FirstNonfinite(FindingKind):
    """NaN or infinity appeared; this is the first module or tensor that had it."""

    code = "first-nonfinite"
    cure = NONFINITE_CURE_BY_ROLE["activation"]
    says = "{place} [has|have] the first NaN or infinity: [its|their] {role}, in step {step}"
    wide_cure = "bound what this layer divides by or exponentiates, or takes the root or the logarithm of"
    explained_by = ("eps-zero",)
    spreads = True

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        found = [tensor for tensor in record.tensors.values() if tensor.first_nonfinite is not None]
        outputs_alone = all(tensor.role == "activation" for tensor in found)
        if has_gradient_scaler(record):
            lasting = {id(one) for one in found if one.nonfinite_steps == one.steps >= FEWEST_NONFINITE_STEPS}
            found = [one for one in found if one.role not in GRADIENT_ROLES or id(one) in lasting]
        if not found:
            return
        first = min(found, key=_get_first_nonfinite_step_and_order)
        step, others = _get_first_nonfinite_step_and_order(first)[0], len(found) - 1
        severity: Severity = "error"
        told: dict[str, Any] = {"tensors": len(found)}
        broken = [one for one in found if one.role == "weight" and _get_first_nonfinite_step_and_order(one)[0] == step]
        if broken:
            # A weight that was not finite before the first step in which it is looked at.
            own = [one for one in broken if one.name.rpartition(".")[0] == first.name]
            first, told["weights"] = min(own or broken, key=_get_first_nonfinite_step_and_order), len(broken)
            before = max((one for one in record.sampled_steps if one < step), default=None)
            also = f", as {pluralize(len(broken) - 1, 'other weight')} did" if len(broken) > 1 else ""
            clean = "" if before is None else f"; at step {before}, the sampled one before, none did"
            said, cure = f"held NaN or infinity before step {step} began{also}{clean}", OBSERVE_EVERY_STEP_ADVICE
        else:
            # Attention masks of -inf are infinite, and neither the loss nor a gradient that they lead to is.
            is_finite = all(one.loss is None or math.isfinite(one.loss) for one in record.history)
            has_gradients = any(role in GRADIENT_ROLES for role, _ in record.tensors)
            severity = "note" if outputs_alone and is_finite and (not others or has_gradients) else "error"
            counted = f"{first.nonfinite} of {first.elements} elements since step {step}"
            said = f"{first.role} has the first NaN or infinity, {counted}; {others} more tensors have some since"
            cure = NONFINITE_CURE_BY_ROLE.get(first.role, LAST_CLEAN_CHECKPOINT_ADVICE)
            if first.role == "activation" and has_float32_range(find_format(first.dtype)):
                cure = self.wide_cure
        told |= {"nonfinite": first.nonfinite, "elements": first.elements, "role": first.role}
        yield self.make_finding(first.name, severity, 1 - 0.5 ** len(found), said, cure=cure, step=step, **told)

    def find_in_audit(self, audit: Audit) -> Iterator[Finding]:
        new = [row for row in audit.tensors.values() if row.b.nonfinite_count > row.a.nonfinite_count]
        old = [row for row in audit.tensors.values() if 0 < row.b.nonfinite_count <= row.a.nonfinite_count]
        if new:
            said = f"{_describe_nonfinite_counts(new)} in B, none of these in A: A is the last clean checkpoint"
            said += " of the two"
            nan, infinite = sum(row.b.nan for row in new), sum(row.b.infinite for row in new)
            names = [row.name for row in new]
            cure = f"go on from A, and {OBSERVE_LATER_STEPS_ADVICE}: the first module with NaN is the cause"
            yield self.make_finding(names, "error", 1.0, said, cure=cure, nan=nan, infinite=infinite, last_clean="A")
        for row in old:
            told: dict[str, Any] = {"nan": row.b.nan, "infinite": row.b.infinite, "last_clean": None}
            # Attention masks are buffers of minus infinity.
            if row.b.nan == 0 and row.role != "parameter" and row.status == "unchanged":
                said, cure = "the same infinities in both: a mask?", "nothing, if it is a mask"
                yield self.make_finding(row.name, "note", 0.5, said, cure=cure, **told)
            else:
                said = f"{_describe_nonfinite_counts([row])}, in A already"
                cure = f"go on from a checkpoint before A, and {OBSERVE_LATER_STEPS_ADVICE}"
                yield self.make_finding(row.name, "error", 1.0, said, cure=cure, **told)


def _get_first_nonfinite_step_and_order(tensor: TensorRecord) -> tuple[int, int]:
    """Return the step of a tensor's first NaN or infinity, and its turn within it."""
    return tensor.first_nonfinite or (0, 0)


def _describe_nonfinite_counts(rows: list[TensorAudit]) -> str:
    counts = {"NaN": sum(row.b.nan for row in rows), "infinite": sum(row.b.infinite for row in rows)}
    elements = sum(row.numel for row in rows)
    return " and ".join(f"{count} {word}" for word, count in counts.items() if count) + f" of {elements} elements"


FEWEST_NONZERO_GRADIENT_ELEMENTS = 32
# Gradients span many binades and each drives its own weight, so shares count, not energy. Of a tensor whose typical
# element has lost digits half is subnormal; with a fifth at zero whole rows of weights stop.
WARNING_ABOVE_SUBNORMAL_SHARE = 0.5
WARNING_ABOVE_VANISHED_SHARE = 0.05
ERROR_ABOVE_VANISHED_SHARE = 0.2
# float32's and bfloat16's numbers begin below this power of two: gradients that are all 0 in these are no underflow.
FLOAT32_RANGE_EMIN_THRESHOLD = -100
FEWEST_VANISHED_STEPS = 3
REMEDY_IF_LOSS_IS_UNSCALED = (
    "scale the loss: torch.amp.GradScaler, or hu.AdaptiveGradScaler, which gives each layer its own scale"
)
ADAPTIVE_SCALER_CODE = (
    "import halfulp as hu\n"
    "scaler = hu.AdaptiveGradScaler(model)\n"
    "scaler.scale(loss).backward()\n"
    "scaler.step(optimizer)\n"
    "scaler.update()"
)
SUBNORMAL_GRADIENTS_DIAGNOSIS = "gradients of {place} are too small for {format}: {subnormal:share} have lost digits"
REMEDY_IF_LOSS_IS_SCALED = "hu.AdaptiveGradScaler, which gives each layer its own scale, or gradients in bfloat16"
REMEDY_IF_RANGE_IS_WIDE = "hu.AdaptiveGradScaler, which gives each layer its own scale"


@register_finding
class GradientUnderflow(FindingKind):
    """Gradients lie in the subnormal range of their format or below it, and become zero."""

    code = "gradient-underflow"
    cure = REMEDY_IF_LOSS_IS_UNSCALED
    says = "gradients of {place} are too small for {format}: {vanished:share} became zero"
    write = ADAPTIVE_SCALER_CODE
    worst = "vanished"
    explained_by = ("site-holds-scale", "scale-collapsed", "dtype-not-asked", "activation-underflow")

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        cure = REMEDY_IF_LOSS_IS_SCALED if has_gradient_scaler(record) else REMEDY_IF_LOSS_IS_UNSCALED
        found = [one for one in list_tensor_records_of_roles(record, *GRADIENT_ROLES) if one.elements]
        steps = min((one.steps for one in found), default=0)
        nothing_arrives = steps >= FEWEST_VANISHED_STEPS and all(one.is_zero_in_all_steps for one in found)
        outputs = [one for one in found if one.role == "activation gradient"]
        sources = {after.name: before for before, after in itertools.pairwise(outputs)}
        for tensor in found:
            held_in, count, own, says = find_format(tensor.dtype), count_nonzero(tensor), cure, self.says
            source = sources.get(tensor.name) if tensor.role == "activation gradient" else None
            if held_in is None:
                continue
            if nothing_arrives:
                # Of a loss whose first gradient is zero no later gradient tells.
                if tensor.role != "activation gradient" or held_in.emin <= FLOAT32_RANGE_EMIN_THRESHOLD:
                    continue
                name, sure, subnormal, vanished = name_dtype(tensor.dtype), 1 - 0.5**steps, 0.0, 1.0
                said = f"all gradients are 0 in all {steps} sampled steps, from here in {name} on"
            elif source is not None and _is_cast_to_zero(tensor, source, held_in):
                name, sure, subnormal, vanished = held_in.name, 1 - 0.5**tensor.steps, 0.0, 1.0
                said = f"all gradients are 0 in {name} in all {tensor.steps} sampled steps, and up to "
                said += f"{source.amax:.3g} before the cast"
            elif count >= FEWEST_NONZERO_GRADIENT_ELEMENTS:
                name, sure = held_in.name, compute_confidence(count, FEWEST_NONZERO_GRADIENT_ELEMENTS)
                subnormal, vanished = measure_subnormal_share(tensor, held_in), estimate_vanished_share(tensor, held_in)
                said = f"{format_percent(subnormal)} of nonzero {tensor.role}s are subnormal in {name}, about "
                said += f"{format_percent(vanished)} became zero"
                own = (
                    REMEDY_IF_RANGE_IS_WIDE if cure == REMEDY_IF_LOSS_IS_SCALED and has_float32_range(held_in) else cure
                )
                says = self.says if vanished >= WARNING_ABOVE_VANISHED_SHARE else SUBNORMAL_GRADIENTS_DIAGNOSIS
            else:
                continue
            if vanished >= WARNING_ABOVE_VANISHED_SHARE or subnormal >= WARNING_ABOVE_SUBNORMAL_SHARE:
                severity: Severity = "error" if vanished >= ERROR_ABOVE_VANISHED_SHARE else "warning"
                evidence: dict[str, Any] = {"format": name, "subnormal": subnormal, "vanished": vanished}
                evidence |= {"amax": tensor.amax, "seen": count, "role": tensor.role}
                words: dict[str, Any] = {"cure": own, "says": says, "write": self.write}
                yield self.make_finding(tensor.name, severity, sure, said, **words, **evidence)
                if nothing_arrives:
                    return


def _is_cast_to_zero(tensor: TensorRecord, source: TensorRecord, format: Format) -> bool:
    """Return whether an output's gradients are zeros because those that the backward pass had before are too small."""
    # Zeros of other causes, such as a mask or a gate, stand before gradients of any size.
    if tensor.steps < FEWEST_VANISHED_STEPS or not tensor.is_zero_in_all_steps or tensor.scale != source.scale:
        return False
    # A format of 8 bits has a scale.
    is_narrow = format.bits >= 16 and format.emin > FLOAT32_RANGE_EMIN_THRESHOLD
    return is_narrow and not source.nonfinite and 0 < source.amax <= format.smallest_subnormal / 2


# From step to step and from batch to batch the largest of a tensor's elements varies by a factor of two and more.
NEAR_OVERFLOW_BINADES = 2.0


@register_finding
class OverflowNear(FindingKind):
    """The largest magnitude is within a factor of four of the largest number that the format holds."""

    code = "overflow-near"
    cure = (
        "compute this layer in bfloat16 or float32, or divide its inputs by a power of two; hu.scalify gives "
        "every tensor a scale"
    )
    says = "{place} [comes|come] near overflow: {role} of {amax} in {format}"
    wide_cure = "divide its inputs by a power of two, or bound what it multiplies, sums or exponentiates"
    worst = "-margin"
    explained_by = ("dtype-not-asked", "payload-saturated", "first-nonfinite")

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        gradients = () if has_gradient_scaler(record) else ("activation gradient", "weight gradient")
        for tensor in list_tensor_records_of_roles(record, "activation", "weight", *gradients):
            held_in = find_format(tensor.dtype)
            # What has a scale fills the range on purpose; what is stored in 8 bits has one that nothing tells.
            if held_in is None or tensor.dtype.itemsize < 2 or tensor.scale != 1.0:
                continue
            # A mask is filled with the lowest number of such a range: torch.finfo(dtype).min.
            if has_float32_range(held_in) and tensor.amax == held_in.max:
                continue
            left = measure_overflow_margin(tensor, held_in)
            if left < NEAR_OVERFLOW_BINADES:
                said = f"{tensor.role} reaches {tensor.amax:.4g} in {held_in.name}, {left:.2g} powers of two below its "
                said += "largest"
                evidence: dict[str, Any] = {"role": tensor.role, "amax": tensor.amax, "margin": left}
                evidence |= {"format": held_in.name, "steps": tensor.steps}
                sure, is_wide = max(0.5, compute_confidence(tensor.steps, 2)), has_float32_range(held_in)
                yield self.make_finding(tensor.name, "warning", sure, said, is_wide=is_wide, **evidence)


FEWEST_BLOCK_ELEMENTS = 64
# Of normally distributed numbers 4-bit blocks hide up to 12%; twice that is one large element in most blocks.
WARNING_ABOVE_SHARE_ZEROED_IN_BLOCKS = 0.25
ERROR_ABOVE_SHARE_ZEROED_IN_BLOCKS = 0.5


@register_finding
class BlockElementsHidden(FindingKind):
    """One element of a block is so much larger that the scale it sets sends the others to zero."""

    code = "block-hidden"
    cure = (
        "a format with smaller blocks (nvfp4 for mxfp4) or more exponent bits (mxfp8_e5m2), or leave this "
        "layer out of emulation"
    )
    worst = "hidden"
    explained_by = ("quantized-to-zero",)

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in record.tensors.values():
            count, format = count_nonzero(tensor), tensor.asked_format
            if tensor.block_hidden is None or count < FEWEST_BLOCK_ELEMENTS:
                continue
            share = min(1.0, tensor.block_hidden / count)
            if share >= WARNING_ABOVE_SHARE_ZEROED_IN_BLOCKS:
                severity: Severity = "error" if share >= ERROR_ABOVE_SHARE_ZEROED_IN_BLOCKS else "warning"
                said = f"{format_percent(share)} of nonzero elements of {tensor.role} become 0 beside their block's "
                said += f"largest in {format}"
                evidence: dict[str, Any] = {"hidden": share, "role": tensor.role, "format": format, "seen": count}
                sure = compute_confidence(count, FEWEST_BLOCK_ELEMENTS)
                yield self.make_finding(tensor.name, severity, sure, said, **evidence)


# "FP4 All the Way", arXiv 2505.19115, section 4: training with quantized gradients stalls where the gradient's norm
# falls below sqrt(3) times the standard deviation of the quantization noise times the square root of the size.
STALLING_GRADIENT_TO_NOISE_RATIO = math.sqrt(3.0)


@register_finding
class GradientBelowNoise(FindingKind):
    """The gradient is smaller than sqrt(3) times the noise of its quantization, where quantized training stalls."""

    code = "gradient-below-noise"
    cure = "finish the training with gradients in bfloat16, or in a format of smaller blocks (nvfp4)"
    worst = "-ratio"
    explained_by = ("block-hidden", "gradient-underflow", "payload-saturated", "quantized-to-zero")

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in list_tensor_records_of_roles(record, *GRADIENT_ROLES):
            noise = tensor.quantization_error
            if tensor.asked_format is None or not noise or not tensor.rms < STALLING_GRADIENT_TO_NOISE_RATIO * noise:
                continue
            said = f"{tensor.role} is {tensor.rms / noise:.2g} times the quantization noise of {tensor.asked_format}; "
            said += f"training stalls below {STALLING_GRADIENT_TO_NOISE_RATIO:.2f}"
            evidence: dict[str, Any] = {"ratio": tensor.rms / noise, "rms": tensor.rms, "noise": noise}
            evidence |= {"role": tensor.role, "steps": tensor.steps}
            yield self.make_finding(
                tensor.name, "warning", max(0.5, compute_confidence(tensor.steps, 4)), said, **evidence
            )


# A scale taken from the largest magnitude puts one element of each tensor there, and its near neighbours.
FEWEST_SATURATED_ELEMENTS = 8
WARNING_ABOVE_SATURATED_SHARE = 0.001
# The largest elements carry most of a product: with a hundredth of them cut off the layer computes something else.
ERROR_ABOVE_SATURATED_SHARE = 0.01
SCALE_BEFORE_ROUNDING_CURE = (
    "scale this tensor before it is rounded (hu.scalify gives every tensor a scale), or round it to mxfp8_e4m3, "
    "whose blocks have scales, or to e5m2"
)


@register_finding
class PayloadSaturated(FindingKind):
    """Elements sit at the format's largest number: the scale is out of date or too small, and they were cut off."""

    code = "payload-saturated"
    cure = "a larger scale: hu.rescale(tensor) or current instead of delayed scaling, or e5m2 for this tensor"
    says = "{place} [is|are] cut off at {format}'s largest number: {saturated:share} of [its|their] {role}"
    worst = "saturated"
    explained_by = ("dtype-not-asked",)

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in record.tensors.values():
            held_in, asked = find_format(tensor.dtype), tensor.asked_format
            cases: list[tuple[int, int, str, str, str]] = []
            # Of what the run rounds narrower afterwards; blocks are exempt by their own scales.
            if asked is not None:
                said = f"beyond {asked}'s largest number and reach {tensor.amax:.4g}"
                cases.append((tensor.asked_overflow, tensor.sampled, asked, said, SCALE_BEFORE_ROUNDING_CURE))
            if held_in is not None and not has_float32_range(held_in):
                said = f"at {held_in.name}'s largest number, {held_in.max:.6g}"
                count = tensor.largest - tensor.steps  # a scale puts one there in each step
                cases.append((count, tensor.elements, held_in.name, said, self.cure))
            for count, elements, format, said, cure in cases:
                share = count / max(1, elements)
                if count < FEWEST_SATURATED_ELEMENTS or share < WARNING_ABOVE_SATURATED_SHARE:
                    continue
                sure = compute_confidence(count, FEWEST_SATURATED_ELEMENTS)
                severity: Severity = "error" if share >= ERROR_ABOVE_SATURATED_SHARE else "warning"
                evidence: dict[str, Any] = {"saturated": share, "count": count, "role": tensor.role}
                evidence |= {"format": format, "scale": tensor.scale}
                said = f"{format_percent(share)} of {tensor.role} elements are {said}"
                yield self.make_finding(tensor.name, severity, sure, said, cure=cure, **evidence)


@register_finding
class QuantizedToZero(FindingKind):
    """A quantizer makes zeros of everything: its scale is too large, or its format too coarse."""

    code = "quantized-to-zero"
    cure = (
        "take the scale from the data (largest magnitude over the format's largest number): hu.quantize with "
        "a block format, or hu.scalify"
    )
    role = "activation"
    worst = "elements"
    explained_by = ("activation-underflow", "dtype-not-asked")

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for tensor in list_tensor_records_of_roles(record, "activation"):
            entered = tensor.input_amax
            # Zeros in 16 bits and more are those of a ReLU, a mask or a zero weight, unless a quantizer made them.
            quantizes = tensor.dtype.itemsize == 1 or "quant" in tensor.kind.lower()
            if not quantizes or not tensor.is_zero_in_all_steps or not entered:
                continue
            said = f"all {tensor.elements} outputs in {name_dtype(tensor.dtype)} are 0, of inputs up to {entered:.3g}"
            evidence: dict[str, Any] = {"elements": tensor.elements, "input_amax": entered, "steps": tensor.steps}
            yield self.make_finding(tensor.name, "error", compute_confidence(tensor.elements, 8), said, **evidence)


# A loss scale is there to make gradients larger. Below 1 it makes them smaller than they are.
SMALLEST_USEFUL_LOSS_SCALE = 1.0
# float32 underflows 166 halvings after 2^16, and the scale is exactly 0; 2^-24 is float16's smallest number.
VANISHED_LOSS_SCALE = 2.0**-24


@register_finding
class ScaleCollapsed(FindingKind):
    """The loss scale was halved again and again, to below 1 or to 0, since gradients stayed infinite at every scale."""

    code = "scale-collapsed"
    cure = (
        "find what is infinite at every scale (first-nonfinite names it, torch.autograd.detect_anomaly the line), and "
        "stop a run whose scale falls below 1; hu.AdaptiveGradScaler names the sites that overflow in scaler.last_step"
    )
    explained_by = ("first-nonfinite", "eps-zero", "dtype-not-asked")
    spreads = True

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        read = [*(step.loss_scale for step in record.history), record.loss_scale]
        scales = [scale for scale in read if scale is not None]
        if not scales or not min(scales) < SMALLEST_USEFUL_LOSS_SCALE:
            return
        lowest, steps = min(scales), len(record.history)
        share = record.skipped / max(1, steps + record.skipped)
        start = f"from {max(scales):.4g} " if max(scales) > lowest else ""
        is_lasting = lowest < VANISHED_LOSS_SCALE or scales[-1] < SMALLEST_USEFUL_LOSS_SCALE
        severity: Severity = "error" if is_lasting else "warning"
        said = f"the loss scale fell {start}to {lowest:.4g}, with {format_percent(share)} of steps skipped"
        evidence: dict[str, Any] = {"lowest": lowest, "last": scales[-1], "highest": max(scales)}
        evidence["skipped"] = record.skipped
        yield self.make_finding((), severity, max(0.5, compute_confidence(record.skipped, 4)), said, **evidence)


# Until its first scale fits, a scaler skips one to three steps of every run.
USUAL_SKIPPED_STEPS_AT_START = 3
# A schedule that is a hundredth ahead of its steps changes no result.
WARNING_ABOVE_SKIPPED_SHARE = 0.01


@register_finding
class SchedulerOnSkips(FindingKind):
    """The scheduler advances on steps that the gradient scaler skipped, so that it ends before the training does."""

    code = "scheduler-on-skips"
    cure = (
        "step the scheduler only after a step was taken: compare scaler.get_scale() before and after scaler.update(), "
        "or ask hu.AdaptiveGradScaler's scaler.last_step.applied"
    )
    explained_by = ("scale-collapsed", "site-holds-scale", "first-nonfinite")

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        scheduled = sum(step.scheduled for step in record.history if step.scheduled is not None)
        if not record.skipped or not scheduled or not record.history:
            return
        taken = record.history[-1].step + 1
        ahead = scheduled - taken
        # One step more than was taken is what the constructor of a scheduler makes.
        if ahead <= 1 or ahead < record.skipped - USUAL_SKIPPED_STEPS_AT_START:
            return
        share = record.skipped / (taken + record.skipped)
        is_unusual = record.skipped > USUAL_SKIPPED_STEPS_AT_START and share >= WARNING_ABOVE_SKIPPED_SHARE
        severity: Severity = "warning" if is_unusual else "note"
        said = f"the scheduler made {scheduled} steps and the optimizer {taken}: {record.skipped} were skipped "
        said += f"({format_percent(share)})"
        evidence: dict[str, Any] = {"scheduled": scheduled, "taken": taken, "skipped": record.skipped}
        yield self.make_finding((), severity, compute_confidence(record.skipped, 1), said, **evidence)


# A dynamic scale is the largest at which nothing overflows. What is this near to the largest number stops it, by itself
# or in a weight gradient, which is its sum over a batch.
SMALL_OVERFLOW_MARGIN_BINADES = 6.0
# Everything else could take a scale larger by as many powers of two.
LEAST_MARGIN_DIFFERENCE_BINADES = 6.0
# Harm done, which a larger scale would save of another tensor.
HARMFUL_VANISHED_SHARE = 0.05
HARMFUL_SUBNORMAL_SHARE = 0.5


@register_finding
class OneSiteLimitsScale(FindingKind):
    """One layer's gradient is so much larger than all others that their loss scale is too small for them."""

    code = "site-holds-scale"
    cure = "hu.AdaptiveGradScaler, which gives each layer its own scale, or compute this layer in float32"
    role = "activation gradient"
    explained_by = ("first-nonfinite",)
    spreads = True

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        if not has_gradient_scaler(record) or record.sites:
            return
        room = [
            (tensor, held_in)
            for tensor in list_tensor_records_of_roles(record, "activation gradient")
            # A loss scale is there for formats without float32's range.
            if (held_in := find_format(tensor.dtype)) is not None and held_in.emin > -100 and tensor.amax > 0
        ]
        if len(room) < 3:
            return
        room.sort(key=lambda pair: measure_overflow_margin(*pair))
        # The widest gap in the half that is nearer to overflow: a large gradient goes on to the layers before it until
        # one makes it small, so that several may be as large.
        margins = [measure_overflow_margin(*pair) for pair in room]
        gap = max(range(1, len(room) // 2 + 1), key=lambda i: margins[i] - margins[i - 1])
        apart = margins[gap] - margins[gap - 1]
        vanished = max(estimate_vanished_share(*pair) for pair in room[gap:])
        subnormal = max(measure_subnormal_share(*pair) for pair in room[gap:])
        is_harmful = vanished >= HARMFUL_VANISHED_SHARE or subnormal >= HARMFUL_SUBNORMAL_SHARE
        if margins[0] <= SMALL_OVERFLOW_MARGIN_BINADES and apart >= LEAST_MARGIN_DIFFERENCE_BINADES and is_harmful:
            names = [tensor.name for tensor, _ in room[:gap]]
            sure = compute_confidence(min(count_nonzero(tensor) for tensor, _ in room), 32)
            said = f"gradients 2^{math.floor(apart)} times the next; at the scale that it allows "
            said += f"{format_percent(subnormal)} of another layer's are subnormal"
            evidence: dict[str, Any] = {"margin": margins[0], "apart": apart}
            evidence |= {"vanished": vanished, "subnormal": subnormal}
            yield self.make_finding(names, "warning", sure, said, **evidence)
