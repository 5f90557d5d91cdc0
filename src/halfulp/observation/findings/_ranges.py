"""Findings about numbers that leave a format's range: underflow, overflow, an eps of zero, NaN and infinities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from ... import formats
from ...formats import Format
from .._finding import Finding, Severity
from .._record import Record, Role, TensorRecord
from .._text import compute_confidence, format_percent, name_dtype, pluralize, read_option_number
from ..auditing._audit import Audit, TensorAudit
from ._kind import FindingKind, register_finding

# bfloat16's and float32's largest numbers are beyond this power of two.
FLOAT32_RANGE_THRESHOLD = 2.0**100
GRADIENT_ROLES: tuple[Role, ...] = ("activation gradient", "weight gradient")


def get_storage_format(tensor: TensorRecord) -> Format | None:
    """Return the format of a tensor's dtype; None for integers and other dtypes without a format."""
    try:
        return formats.get(tensor.dtype)
    except ValueError:
        return None


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


def estimate_vanished_share(tensor: TensorRecord, format: Format) -> float:
    """Return an estimate of the share of elements that became zero when they were rounded to a format.

    Zeros tell nothing, since dropout and ReLU make them. Rounding sends an interval of the smallest number's width to
    it, and half as much, next to zero, to zero. Numbers spread evenly on so small a scale: half as many vanished.
    """
    lowest = math.frexp(format.smallest_subnormal)[1] - 1
    vanished = 0.5 * sum(count for binade, count in tensor.histogram.items() if binade <= lowest)
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
ROUNDING_NOISE_WARNING = 0.036
ROUNDING_NOISE_ERROR = 0.5
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
            held_in, count = get_storage_format(tensor), count_nonzero(tensor)
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
            if noise >= ROUNDING_NOISE_WARNING:
                severity: Severity = "error" if noise >= ROUNDING_NOISE_ERROR else "warning"
                cure = self.wide_cure if has_float32_range(held_in) else self.cure
                evidence: dict[str, Any] = {"subnormal": subnormal, "noise": noise, "amax": tensor.amax}
                evidence |= {"rms": tensor.rms, "seen": count}
                yield self.found(tensor.name, severity, sure, said, cure=cure, **evidence)


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
            found = [
                parameter.state_dtypes[state] for state in DENOMINATOR_STATE_NAMES if state in parameter.state_dtypes
            ]
            dtype = found[0] if found else parameter.dtype
            if dtype.is_floating_point and float(torch.tensor(eps, dtype=dtype, device="cpu")) == 0:
                cure = self.wide_cure if has_float32_range(formats.get(dtype)) else self.cure
                said = f"eps {eps:.3g} is 0 in {name_dtype(dtype)}"
                yield self.found(name, "error", 1.0, said, cure=cure, eps=eps, dtype=name_dtype(dtype))


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
            found = [
                one
                for one in found
                if one.role not in GRADIENT_ROLES or one.nonfinite_steps == one.steps >= FEWEST_NONFINITE_STEPS
            ]
        if not found:
            return
        first = min(found, key=_get_first_nonfinite_step)
        step, others = _get_first_nonfinite_step(first)[0], len(found) - 1
        severity: Severity = "error"
        told: dict[str, Any] = {"tensors": len(found)}
        broken = [one for one in found if one.role == "weight" and _get_first_nonfinite_step(one)[0] == step]
        if broken:
            # A weight that was not finite before the first step in which it is looked at.
            own = [one for one in broken if one.name.rpartition(".")[0] == first.name]
            first, told["weights"] = min(own or broken, key=_get_first_nonfinite_step), len(broken)
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
            if first.role == "activation" and has_float32_range(get_storage_format(first)):
                cure = self.wide_cure
        told |= {"nonfinite": first.nonfinite, "elements": first.elements, "role": first.role}
        yield self.found(first.name, severity, 1 - 0.5 ** len(found), said, cure=cure, step=step, **told)

    def find_in_audit(self, audit: Audit) -> Iterator[Finding]:
        new = [row for row in audit.tensors.values() if row.b.nonfinite > row.a.nonfinite]
        old = [row for row in audit.tensors.values() if 0 < row.b.nonfinite <= row.a.nonfinite]
        if new:
            said = f"{_describe_nonfinite_counts(new)} in B, none of these in A: A is the last clean checkpoint"
            said += " of the two"
            nan, infinite = sum(row.b.nan for row in new), sum(row.b.infinite for row in new)
            names = [row.name for row in new]
            cure = f"go on from A, and {OBSERVE_LATER_STEPS_ADVICE}: the first module with NaN is the cause"
            yield self.found(names, "error", 1.0, said, cure=cure, nan=nan, infinite=infinite, last_clean="A")
        for row in old:
            told: dict[str, Any] = {"nan": row.b.nan, "infinite": row.b.infinite, "last_clean": None}
            # Attention masks are buffers of minus infinity.
            if row.b.nan == 0 and row.role != "parameter" and row.status == "unchanged":
                said, cure = "the same infinities in both: a mask?", "nothing, if it is a mask"
                yield self.found(row.name, "note", 0.5, said, cure=cure, **told)
            else:
                said = f"{_describe_nonfinite_counts([row])}, in A already"
                cure = f"go on from a checkpoint before A, and {OBSERVE_LATER_STEPS_ADVICE}"
                yield self.found(row.name, "error", 1.0, said, cure=cure, **told)


def _get_first_nonfinite_step(tensor: TensorRecord) -> tuple[int, int]:
    """Return the step of a tensor's first NaN or infinity, and its turn within it."""
    return tensor.first_nonfinite or (0, 0)


def _describe_nonfinite_counts(rows: list[TensorAudit]) -> str:
    counts = {"NaN": sum(row.b.nan for row in rows), "infinite": sum(row.b.infinite for row in rows)}
    elements = sum(row.numel for row in rows)
    return " and ".join(f"{count} {word}" for word, count in counts.items() if count) + f" of {elements} elements"


FEWEST_NONZERO_GRADIENT_ELEMENTS = 32
# Gradients span many binades and each drives its own weight, so shares count, not energy. Of a tensor whose typical
# element has lost digits half is subnormal; with a fifth at zero whole rows of weights stop.
SUBNORMAL_SHARE_WARNING = 0.5
VANISHED_SHARE_WARNING = 0.05
VANISHED_SHARE_ERROR = 0.2
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
            held_in, count, own, told = get_storage_format(tensor), count_nonzero(tensor), cure, {"write": self.write}
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
                told["says"] = self.says if vanished >= VANISHED_SHARE_WARNING else SUBNORMAL_GRADIENTS_DIAGNOSIS
            else:
                continue
            if vanished >= VANISHED_SHARE_WARNING or subnormal >= SUBNORMAL_SHARE_WARNING:
                severity: Severity = "error" if vanished >= VANISHED_SHARE_ERROR else "warning"
                evidence: dict[str, Any] = {"format": name, "subnormal": subnormal, "vanished": vanished}
                evidence |= {"amax": tensor.amax, "seen": count, "role": tensor.role}
                yield self.found(tensor.name, severity, sure, said, cure=own, **told, **evidence)
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
            held_in = get_storage_format(tensor)
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
                cure = self.wide_cure if has_float32_range(held_in) else self.cure
                evidence: dict[str, Any] = {"role": tensor.role, "amax": tensor.amax, "margin": left}
                evidence |= {"format": held_in.name, "steps": tensor.steps}
                sure = max(0.5, compute_confidence(tensor.steps, 2))
                yield self.found(tensor.name, "warning", sure, said, cure=cure, **evidence)
