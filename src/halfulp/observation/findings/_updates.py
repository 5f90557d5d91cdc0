"""Findings about weight updates and other sums: what rounding takes of weights, moments, averages and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..._qualified_names import make_name_pattern
from ...optim import OPTIMIZERS
from .._finding import Finding, Severity
from .._record import ParameterRecord, RealisedChanges, Record
from .._text import (
    KAHAN_ARGUMENT,
    compute_confidence,
    describe_lr,
    format_percent,
    get_significand_bits,
    is_narrow_dtype,
    is_wide_dtype,
    name_dtype,
    read_option_number,
    write_optimizer_code,
)
from ._kind import FindingKind, register_finding

if TYPE_CHECKING:
    from ..auditing._audit import Audit, ParameterStateAudit
    from ..auditing._tensors import TensorAudit
    from ..forecasting._layers import Forecast, LayerForecast


# Fewer elements say nothing of a share of 10%.
FEWEST_UPDATES = 32
# A tenth of the movement missing is a learning rate a tenth smaller, which no training shows; half is a different run.
UPDATES_LOST_WARNING_BELOW_KEPT_SHARE = 0.9
UPDATES_LOST_ERROR_BELOW_KEPT_SHARE = 0.5
# Large updates are most of the movement and survive, so that nearly all of it may take place while most elements stand
# still: a character GPT in bfloat16 that loses 51% of its updates and realises 99% ends with a validation loss of 2.16
# instead of float32's 2.12 (docs/compare.md).
WARNING_ABOVE_CANCELLED_UPDATE_SHARE = 0.5


def grade_severity_of_lost_movement(dtype: torch.dtype, realised: float | None, cancelled: float) -> Severity | None:
    """Return how bad it is, where updates of weights of a dtype are rounded to nearest; None where few are lost.

    `realised`, the share of the wanted movement that took place, is None or NaN where it is not known; `cancelled` is
    the share of the updates that left their element as it was.
    """
    if realised is None or realised != realised or is_wide_dtype(dtype):
        return None
    if realised < UPDATES_LOST_WARNING_BELOW_KEPT_SHARE:
        return "error" if realised < UPDATES_LOST_ERROR_BELOW_KEPT_SHARE else "warning"
    return "warning" if cancelled >= WARNING_ABOVE_CANCELLED_UPDATE_SHARE else None


def is_explained_by_chance(change: RealisedChanges, realised: float, spread: float = 1.0) -> bool:
    """Return whether stochastic rounding, which is right on average, may have made a share of movement by chance.

    The mean of n changes that are each kept with probability p is off by about sqrt((1/p - 1) / n) of itself: within
    four times that it may be chance. `spread` is the mean of 1/p over 1 over the mean of p: of weights up to 3, as a
    layer's lie in several binades, and p halves from one to the next.

    >>> few, many = RealisedChanges(seen=250, cancelled=225), RealisedChanges(seen=25000, cancelled=22500)
    >>> is_explained_by_chance(few, 0.3), is_explained_by_chance(many, 0.3)
    (True, False)
    """
    kept = 1 - change.lost_share
    return kept > 0 and (1 - realised) ** 2 < 16 * (spread / kept - 1) / change.seen


def make_lost_change_evidence(change: RealisedChanges, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return what a finding of changes that rounding loses has as evidence."""
    shares = {"lost": change.lost_share, "realised": change.realised_share}
    return {**shares, "seen": change.seen, "dtype": name_dtype(dtype)}


def _describe_kahan_cure(parameter: ParameterRecord) -> dict[str, Any]:
    """Return what `make_finding` takes: the class's cure with lines of code, or another one where hu.optim has none."""
    is_halfulp = parameter.is_held_by_halfulp_optimizer
    if not (is_halfulp or parameter.is_wrappable or parameter.optimizer in OPTIMIZERS):
        return {"cure": f"keep these in float32: hu.optim.wrap takes no {parameter.optimizer}", "write": ""}
    return {"write": write_optimizer_code(parameter.optimizer, KAHAN_ARGUMENT, is_halfulp)}


def has_compensated_rounding(parameter: ParameterRecord) -> bool:
    """Return whether a weight update of halfulp's keeps what rounding drops, beside the weight or on average."""
    return parameter.weight_update not in ("nearest", "none")


MISSING_GRADIENT_CURE = "see whether the loss depends on it; set requires_grad=False if it is to stay"
# Shares of the learning rates to come that train nothing; a schedule that ends at 0 leaves thousandths behind.
WARNING_FROM_WASTED_SHARE_OF_COMING_LR = 0.02
ERROR_ABOVE_LR_SHARE_AFTER_FREEZE = 0.5
FROZEN_FROM_START_DIAGNOSIS = "{place} [is|are] frozen from the first step on: {dtype} weights at lr {freeze_lr}"
UPDATE_SOURCE_OPTIMIZER_STATE = "the optimizer's state"


@register_finding
class FreezeAhead(FindingKind):
    """At the learning rates of this schedule rounding to nearest holds a layer where it is."""

    code = "freeze-ahead"
    cure = "weight_update='kahan' or 'stochastic' of hu.optim, or keep these in float32"
    says = "{place} [freezes|freeze] from step {freeze_step} on: {dtype} weights at lr {freeze_lr}"
    write = write_optimizer_code(None, KAHAN_ARGUMENT)

    wide_cure = "nothing, if so little is not missed; else a schedule that ends earlier, or float64"
    worst = "after_freeze"

    def find_in_forecast(self, forecast: Forecast) -> Iterator[Finding]:
        frozen: dict[tuple[Severity, str], list[LayerForecast]] = {}
        for layer in forecast.layers:
            if layer.freeze_step is not None and layer.weight_update == "nearest":
                severity: Severity = (
                    "warning" if layer.after_freeze >= WARNING_FROM_WASTED_SHARE_OF_COMING_LR else "note"
                )
                severity = "error" if layer.after_freeze >= ERROR_ABOVE_LR_SHARE_AFTER_FREEZE else severity
                frozen.setdefault((severity, name_dtype(layer.dtype)), []).append(layer)
        for (severity, dtype), layers in frozen.items():
            worst = max(layers, key=lambda layer: layer.after_freeze)
            steps = sorted({layer.freeze_step for layer in layers if layer.freeze_step is not None})
            first = "now" if steps[0] == forecast.start else f"step {steps[0]}"
            said, lr = f"frozen in {dtype} from {first} on, ", f"at lr {worst.freeze_lr:.3g}"
            if len(steps) > 1:
                said = f"freezes in {dtype} from {first} to step {steps[-1]}, first "
            said += f"{lr}: {format_percent(worst.after_freeze)} of the learning rate to come trains nothing"
            evidence: dict[str, Any] = {"freeze_step": worst.freeze_step, "freeze_lr": worst.freeze_lr}
            evidence |= {"after_freeze": worst.after_freeze, "dtype": dtype}
            yield self.make_finding(
                [layer.name for layer in layers],
                severity,
                1.0 if worst.updates == UPDATE_SOURCE_OPTIMIZER_STATE else 0.8,
                said,
                says=FROZEN_FROM_START_DIAGNOSIS if steps == [forecast.start] else self.says,
                write=write_optimizer_code(forecast.rule, KAHAN_ARGUMENT, forecast.is_halfulp),
                is_wide=is_wide_dtype(worst.dtype),
                **evidence,
            )


POSSIBLE_COPY_CURE = "set requires_grad=False if it is a copy of weights; else see whether the loss depends on it"


@register_finding
class NeverStepped(FindingKind):
    """A trainable parameter is in no optimizer, or never got a gradient, and keeps its first value."""

    code = "never-stepped"
    cure = "give it to the optimizer, or set requires_grad=False if it is to stay"
    role = "weight"

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        # An observation without an optimizer says nothing of who steps what.
        if all(parameter.optimizer is None for parameter in record.parameters.values()):
            return
        steps = len(record.sampled_steps)
        for name, parameter in record.parameters.items():
            if not parameter.requires_grad:
                continue
            if parameter.optimizer is None:
                gradient, numel = record.tensors.get(("weight gradient", name)), parameter.numel
                if not steps or (gradient is not None and not gradient.is_zero_in_all_steps):
                    yield self.make_finding(name, "error", 1.0, "trainable, but in no optimizer", numel=numel)
                else:  # perhaps a copy
                    said = f"trainable, in no optimizer, and no gradient in any of {steps} sampled steps, as of a "
                    said += "target or average"
                    told: dict[str, Any] = {"numel": numel, "sampled_steps": steps}
                    yield self.make_finding(name, "note", 1 - 0.5**steps, said, cure=POSSIBLE_COPY_CURE, **told)
            # Of a shard without elements the gradient goes to other ranks.
            elif steps and parameter.gradients == 0 and parameter.numel:
                said = f"no gradient in any of {steps} sampled steps"
                yield self.make_finding(
                    name, "warning", 1 - 0.5**steps, said, cure=MISSING_GRADIENT_CURE, sampled_steps=steps
                )


# In units of the standard deviation: a chance of one in 10^8 per tensor, of which a model has hundreds.
ROUNDING_BIAS_LIMIT_SIGMAS = 6.0
# A correlation below a tenth leaves at least 99% of the variance independent: it slows no average down.
ROUNDING_CORRELATION_LIMIT = 0.1
FEWEST_ROUNDING_DECISIONS = 256
# Of small updates few are rounded up, and each that is by chance in two steps looks like a large correlation.
FEWEST_EXPECTED_COINCIDENCES = 6


@register_finding
class RandomBitsRepeat(FindingKind):
    """Stochastic rounding goes one way too often, or the same way again on another step."""

    code = "random-bits-repeat"
    cure = "draw fresh bits for every step and rank; hu.optim's are a hash of seed, step, parameter and element"
    role = "update"

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            rounding = parameter.rounding
            if rounding is None or rounding.seen < FEWEST_ROUNDING_DECISIONS:
                continue
            seen, variance = rounding.seen, rounding.variance
            sure = compute_confidence(seen, FEWEST_ROUNDING_DECISIONS)
            # A correlation is between two steps; of n decisions n times their mean variance are as good as open.
            opened = variance / max(1, len(record.sampled_steps))
            least = float("inf")
            if opened:
                # No decision's variance is over a quarter, so that chance correlates them by at most half of 1 over
                # the root.
                by_chance = ROUNDING_BIAS_LIMIT_SIGMAS / 2 / opened**0.5, FEWEST_EXPECTED_COINCIDENCES / opened
                least = max(ROUNDING_CORRELATION_LIMIT, *by_chance)
            correlation = rounding.repeated
            if correlation is not None and correlation > least:
                said = f"two steps round the same way, with a correlation of {correlation:.2g}"
                yield self.make_finding(name, "error", sure, said, correlation=correlation, seen=seen)
            deviations = rounding.excess / variance**0.5 if variance > 0 else 0.0
            # A bias of a hundredth of a spacing per rounding is as small as the rounding of float32 arithmetic before.
            bias = rounding.excess / seen
            if abs(deviations) > ROUNDING_BIAS_LIMIT_SIGMAS and abs(bias) > 0.01:
                way = "up" if bias > 0 else "down"
                said = f"rounds {way} too often by {abs(bias):.2g}, {abs(deviations):.3g} standard deviations"
                yield self.make_finding(name, "error", sure, said, bias=bias, deviations=deviations, seen=seen)


# Without a computed update only the count of unchanged elements is left; half of them is more than a schedule explains.
WARNING_UNCHANGED_SHARE_OF_UNKNOWN_UPDATES = 0.5


@register_finding
class UpdatesLost(FindingKind):
    """Updates are smaller than half the gap to the weights' neighbouring numbers: rounding puts the weights back."""

    code = "updates-lost"
    cure = "weight_update='kahan' of hu.optim, or keep these in float32"
    says = "{place} [loses|lose] {lost:share} of [its|their] updates: {dtype} weights{at_lr}"
    write = write_optimizer_code(None, KAHAN_ARGUMENT)
    role = "update"
    worst = "lost"
    explained_by = ("dtype-not-asked", "dtype-changed-on-resume")

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            update = parameter.update
            if parameter.optimizer is None or update.seen < FEWEST_UPDATES or not update.cancelled:
                continue
            severity = _grade_severity_of_lost_updates(parameter)
            if severity is None:
                continue
            sure = compute_confidence(update.seen, FEWEST_UPDATES) * (1.0 if update.known else 0.5)
            said = _describe_lost_updates(update, parameter.dtype, parameter.options)
            says = self.says if update.known else ""
            evidence = make_lost_change_evidence(update, parameter.dtype)
            evidence["lr"] = read_option_number(parameter.options, "lr")
            told: dict[str, Any] = {"says": says, **_describe_kahan_cure(parameter)}
            yield self.make_finding(name, severity, sure, said, **told, **evidence)

    def find_in_audit(self, audit: Audit) -> Iterator[Finding]:
        for name, state in audit.states.items():
            row, update = audit.tensors.get(name), state.update
            if row is None or update is None or update.seen < FEWEST_UPDATES:
                continue
            severity = grade_severity_of_lost_movement(row.b.dtype, update.realised_share, update.lost_share)
            if severity is None:
                continue
            said, sure = _describe_lost_updates(update, row.b.dtype, state.options), 1.0
            # Weights that move although their format loses nearly every update are copies of wider ones, and so may be
            # those whose states have more digits. An optimizer of halfulp holds the states that it was asked for.
            digits = [get_significand_bits(dtype) or 0 for _, dtype in state.dtypes.values()]
            has_wider_states = bool(digits) and min(digits) > (get_significand_bits(row.b.dtype) or 0)
            is_copy = update.lost_share > 0.99 and row.share_unchanged < 0.5
            if is_copy or (state.weight_update is None and has_wider_states):
                severity, sure = "warning", 0.5
                said += ", unless wider weights are kept elsewhere"
            code = write_optimizer_code(None, KAHAN_ARGUMENT, state.weight_update is not None)
            evidence: dict[str, Any] = {**make_lost_change_evidence(update, row.b.dtype), "lr": state.options.get("lr")}
            yield self.make_finding(name, severity, sure, said, write=code, **evidence)


def _describe_lost_updates(update: RealisedChanges, dtype: torch.dtype, options: Mapping[str, Any]) -> str:
    lost, realised = format_percent(update.lost_share), update.realised_share
    if realised is None:
        return f"{lost} of elements with a gradient unchanged{describe_lr(options)}"
    said = f"{lost} of updates lost in {name_dtype(dtype)}{describe_lr(options)}"
    if realised < UPDATES_LOST_WARNING_BELOW_KEPT_SHARE:
        return said
    return f"{said}, the smaller ones, though {format_percent(min(1.0, realised))} of the movement took place"


def _grade_severity_of_lost_updates(parameter: ParameterRecord) -> Severity | None:
    """Return how bad it is; None where stochastic rounding cancels updates and is right on average, or few are lost."""
    update = parameter.update
    if not update.known:
        if has_compensated_rounding(parameter) or is_wide_dtype(parameter.dtype):
            return None
        lr = parameter.options.get("lr", 1.0)
        return "warning" if lr != 0 and update.lost_share >= WARNING_UNCHANGED_SHARE_OF_UNKNOWN_UPDATES else None
    realised = update.realised_share
    to_nearest = parameter.rounding is None and parameter.weight_update == "nearest"
    found = grade_severity_of_lost_movement(parameter.dtype, realised, update.lost_share if to_nearest else 0.0)
    if realised is None or parameter.rounding is None:
        return found
    # Of so many that are kept by chance, as variance tells for small probabilities, none is left in e^-16 of the cases.
    none_kept = update.cancelled == update.seen and parameter.rounding.variance < 16
    return None if none_kept or is_explained_by_chance(update, realised, spread=3.0) else found


# Decay is a regularizer: half of it is the decay of another experiment, a little less is a slightly weaker one.
DECAY_LOST_WARNING_BELOW_KEPT_SHARE = 0.5


@register_finding
class WeightDecayLost(FindingKind):
    """Weight decay is smaller than half the spacing of the weights' numbers, so that the weights never decay."""

    code = "weight-decay-lost"
    cure = "weight_update='kahan' or 'stochastic' of hu.optim, which round decay and update as one, or float32 weights"
    says = "{place} [does|do] not decay: {lost:share} of weight decay rounds away{at_lr}"
    write = write_optimizer_code(None, KAHAN_ARGUMENT)
    role = "weight"
    worst = "lost"
    explained_by = ("updates-lost", "weight-frozen", "dtype-not-asked", "dtype-changed-on-resume")
    shares_cause_with = ("freeze-ahead",)

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            decay = parameter.decay
            # In float32 that is a schedule's last steps, when decay has nothing left to do.
            if decay is None or decay.seen < FEWEST_UPDATES or is_wide_dtype(parameter.dtype):
                continue
            realised = decay.realised_share
            if (realised if realised is not None else 1 - decay.lost_share) < DECAY_LOST_WARNING_BELOW_KEPT_SHARE:
                lr, rate = (read_option_number(parameter.options, key) for key in ("lr", "weight_decay"))
                said = f"{format_percent(decay.lost_share)} of weight decay lost in {name_dtype(parameter.dtype)}"
                said += "" if lr is None or rate is None else f" (1 - {lr * rate:.3g} a step)"
                evidence: dict[str, Any] = {"realised": realised, "seen": decay.seen, "lost": decay.lost_share}
                evidence |= {"lr": lr, "weight_decay": rate}
                sure, cure = compute_confidence(decay.seen, FEWEST_UPDATES), _describe_kahan_cure(parameter)
                yield self.make_finding(name, "warning", sure, said, **cure, **evidence)

    def find_in_forecast(self, forecast: Forecast) -> Iterator[Finding]:
        losing = [
            (layer.decay_lost, layer)
            for layer in forecast.layers
            if layer.decay_lost is not None
            and layer.weight_update == "nearest"
            and not is_wide_dtype(layer.dtype)
            and layer.decay_lost > 1 - DECAY_LOST_WARNING_BELOW_KEPT_SHARE
        ]
        if losing:
            lost, worst = max(losing, key=lambda pair: pair[0])
            said = f"{format_percent(lost)} of weight decay will be lost in {name_dtype(worst.dtype)} "
            said += f"(1 - {worst.lr * worst.weight_decay:.3g} a step at most)"
            code = write_optimizer_code(forecast.rule, KAHAN_ARGUMENT, forecast.is_halfulp)
            names = [layer.name for _, layer in losing]
            evidence: dict[str, Any] = {"lr": worst.lr, "weight_decay": worst.weight_decay}
            yield self.make_finding(names, "warning", 1.0, said, write=code, lost=lost, **evidence)


# A smaller sample, as of a scalar, may stand still by chance for some steps.
FEWEST_FROZEN_ELEMENTS = 8
# Rows of an embedding that no batch has stand still in health.
DENSE_GRADIENT_NONZERO_SHARE = 0.5
# An element at a power of two may go down and come back: so rare, movement is no sign of somebody who writes.
LOST_SHARE_OF_FROZEN_BY_ROUNDING = 0.9
FEWEST_MOVED_ELEMENTS = 16
FROZEN_BY_ROUNDING_CURE = "keep it in float32, or step it with weight_update='kahan' of hu.optim"
OVERWRITTEN_WEIGHT_CURE = (
    "find what writes its old value back after each step (copy_, load_state_dict, a weight made anew in forward); "
    "hu.optim's weight updates need a parameter that stays"
)


@register_finding
class WeightFrozen(FindingKind):
    """A weight that the optimizer steps, with gradients that are not zero, still holds its first bits."""

    code = "weight-frozen"
    cure = FROZEN_BY_ROUNDING_CURE
    says = "{place} [has|have] not moved in {sampled_steps} sampled steps: {dtype} weights{at_lr}"
    write = write_optimizer_code(None, KAHAN_ARGUMENT)
    role = "update"
    wide_cure = "nothing, if it is at rest; else a larger learning rate, or float64"
    worst = "lost"
    explained_by = ("updates-lost", "never-stepped", "scale-collapsed", "first-nonfinite")

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        steps = len(record.sampled_steps)
        for name, parameter in record.parameters.items():
            update, lr = parameter.update, read_option_number(parameter.options, "lr")
            if parameter.optimizer is None or parameter.moved != 0 or steps < 2 or lr == 0:
                continue
            if not parameter.nonzero_gradients or update.seen < FEWEST_FROZEN_ELEMENTS:
                continue
            rounded, moves = update.lost_share >= LOST_SHARE_OF_FROZEN_BY_ROUNDING, update.seen - update.cancelled
            gradient = record.tensors.get(("weight gradient", name))
            nonzero = 0.0 if gradient is None else sum(gradient.histogram.values()) / max(1, gradient.sampled)
            if not rounded and (moves < FEWEST_MOVED_ELEMENTS or nonzero <= DENSE_GRADIENT_NONZERO_SHARE):
                continue
            if has_compensated_rounding(parameter) and not _is_compensated_movement_overdue(record, parameter):
                continue
            severity: Severity = "note" if rounded and is_wide_dtype(parameter.dtype) else "error"
            sure = compute_confidence(update.seen, 32) * compute_confidence(steps, 1) * (1.0 if update.known else 0.5)
            dtype = name_dtype(parameter.dtype)
            said = f"has not moved in {steps} sampled steps in {dtype}{describe_lr(parameter.options)}"
            told: dict[str, Any] = {"cure": OVERWRITTEN_WEIGHT_CURE, "says": "", "write": ""}
            if rounded:
                told = {"is_wide": is_wide_dtype(parameter.dtype), **_describe_kahan_cure(parameter)}
            else:
                said += ", though updates changed it"
            evidence: dict[str, Any] = {"moved": 0.0, "sampled_steps": steps, "seen": update.seen}
            evidence |= {"lost": update.lost_share, "dtype": dtype, "lr": lr}
            yield self.make_finding(name, severity, sure, said, **told, **evidence)

    def find_in_audit(self, audit: Audit) -> Iterator[Finding]:
        moving = {make_name_pattern(name) for name, row in audit.tensors.items() if row.status == "changed"}
        for name, row in audit.tensors.items():
            if row.status != "unchanged" or row.role in ("average", "buffer") or not row.numel:
                continue
            if get_significand_bits(row.a.dtype) is None or row.b.nonfinite_count:
                continue
            if name in audit.states:
                yield from self._find_frozen_when_stepped(row, audit.states[name])
            else:
                yield self._make_never_stepped_finding(row, audit, make_name_pattern(name) in moving)

    def _find_frozen_when_stepped(self, row: TensorAudit, state: ParameterStateAudit) -> Iterator[Finding]:
        steps, lr = state.steps_between, state.options.get("lr")
        if state.compensation_moved or steps == 0 or lr == 0:
            return
        during = f"in {steps} steps" if steps is not None and steps > 0 else "between the checkpoints"
        said = f"has not moved {during} in {name_dtype(row.a.dtype)}{describe_lr(state.options)}"
        evidence: dict[str, Any] = {"moved": 0.0, "steps": steps, "elements": row.numel, "lr": lr}
        if state.all_zero:
            said += ", and its moments are 0: no gradient arrives"
            yield self.make_finding(row.name, "note", 0.9, said, cure=MISSING_GRADIENT_CURE, **evidence)
        else:
            sure = 1.0 if row.numel >= FEWEST_UPDATES else 0.9
            code = write_optimizer_code(None, KAHAN_ARGUMENT, state.weight_update is not None)
            yield self.make_finding(
                row.name, "error", sure, said, is_wide=is_wide_dtype(row.a.dtype), write=code, **evidence
            )

    def _make_never_stepped_finding(self, row: TensorAudit, audit: Audit, siblings_moved: bool) -> Finding:
        said = f"not one of {row.numel} elements moved in {name_dtype(row.a.dtype)}"
        if row.b.constant is not None and row.numel > 1:
            said += f", all still {row.b.constant:g}"
        evidence: dict[str, Any] = {"moved": 0.0, "elements": row.numel, "constant": row.b.constant}
        on_purpose = "nothing, if it is frozen on purpose or a constant"
        if audit.states and audit.states_complete:
            said += "; the optimizer holds no state of it"
            return self.make_finding(row.name, "note", 0.5, said, cure=on_purpose, **evidence)
        if is_narrow_dtype(row.a.dtype):
            return self.make_finding(row.name, "warning", 0.8 if row.numel >= FEWEST_UPDATES else 0.5, said, **evidence)
        if siblings_moved:
            said += ", those of other layers did"
            cure = "see whether it is meant to be frozen and gets a gradient"
            return self.make_finding(row.name, "warning", 0.6, said, cure=cure, **evidence)
        return self.make_finding(row.name, "note", 0.3, said, cure=on_purpose, **evidence)


def _is_compensated_movement_overdue(record: Record, parameter: ParameterRecord) -> bool:
    """Return whether updates that are kept until they show add up to more than the largest weight's spacing."""
    update, weight = record.tensors.get(("update", parameter.name)), record.tensors.get(("weight", parameter.name))
    digits = get_significand_bits(parameter.dtype)
    if not parameter.update.known or update is None or weight is None or not is_narrow_dtype(parameter.dtype):
        return False
    assert digits is not None  # of a narrow dtype
    steps = record.history[-1].step + 1 if record.history else 0
    return steps * update.amax > 2.0 ** (1 - digits) * weight.amax


FEWEST_ACCUMULATED_ELEMENTS = 32
# What rounding takes of a sum of a few gradients is below a hundredth; a tenth of the batch is a smaller batch.
ACCUMULATION_LOST_WARNING_BELOW_KEPT_SHARE = 0.9
ACCUMULATION_LOST_ERROR_BELOW_KEPT_SHARE = 0.5


@register_finding
class GradientAccumulationSwamped(FindingKind):
    """Gradients that are added to a sum in a narrow type are smaller than half its spacing, and are dropped."""

    code = "accumulation-swamped"
    cure = "accumulate in float32: hu.float32_gradients(model), or float32 parameters under autocast"
    write = "import halfulp as hu\nhu.float32_gradients(model)  # before the first backward"
    role = "weight gradient"
    wide_cure = "fewer micro-batches, or each divided by their number before its backward pass"
    worst = "-realised"

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            sums = parameter.accumulation or RealisedChanges()
            realised = sums.realised_share
            if (
                realised is None
                or realised >= ACCUMULATION_LOST_WARNING_BELOW_KEPT_SHARE
                or sums.seen < FEWEST_ACCUMULATED_ELEMENTS
            ):
                continue
            held_in = parameter.gradient_dtype or parameter.dtype
            severity: Severity = "error" if realised < ACCUMULATION_LOST_ERROR_BELOW_KEPT_SHARE else "warning"
            sure, is_wide = compute_confidence(sums.seen, FEWEST_ACCUMULATED_ELEMENTS), is_wide_dtype(held_in)
            said = f"{format_percent(1 - realised)} of what is added to .grad is lost in {name_dtype(held_in)}"
            yield self.make_finding(
                name, severity, sure, said, is_wide=is_wide, **make_lost_change_evidence(sums, held_in)
            )


FEWEST_AVERAGE_CHANGES = 16
# An average that takes half of its changes lags behind; one that takes a tenth stays where it began.
AVERAGE_STUCK_WARNING_BELOW_KEPT_SHARE = 0.5
AVERAGE_STUCK_ERROR_BELOW_KEPT_SHARE = 0.1


@register_finding
class AverageStuck(FindingKind):
    """A running average, as of an EMA or a normalization, loses its changes to rounding and stays where it was."""

    code = "average-stuck"
    cure = "keep the average in float32, or use hu.optim.EMA, whose weight_update keeps what rounding would lose"
    says = "the average {place} stands still: {lost:share} of its changes are lost in {dtype}"
    worst = "lost"
    explained_by = ("dtype-not-asked", "dtype-changed-on-resume")

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, average in record.averages.items():
            change = average.change
            realised = change.realised_share
            if change.seen < FEWEST_AVERAGE_CHANGES or realised is None or is_wide_dtype(average.dtype):
                continue
            if realised < AVERAGE_STUCK_WARNING_BELOW_KEPT_SHARE:
                severity: Severity = "error" if realised < AVERAGE_STUCK_ERROR_BELOW_KEPT_SHARE else "warning"
                sure = compute_confidence(change.seen, FEWEST_AVERAGE_CHANGES)
                said = f"{format_percent(change.lost_share)} of changes lost in {name_dtype(average.dtype)}"
                yield self.make_finding(name, severity, sure, said, **make_lost_change_evidence(change, average.dtype))


@register_finding
class PositionsCollide(FindingKind):
    """Neighbouring positions have one code: they were counted, or multiplied by frequencies, in 16 bits."""

    code = "positions-collide"
    cure = (
        "count positions in int64 and compute their angles in float32, outside of autocast; round sines and cosines "
        "alone"
    )
    explained_by = ("dtype-not-asked",)

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, positions in record.positions.items():
            digits = get_significand_bits(positions.dtype)
            assert digits is not None
            dtype, counted = name_dtype(positions.dtype), 2**digits
            said = f"of {positions.length} positions those from {counted} on are rounded to {dtype}'s whole numbers"
            yield self.make_finding(name, "error", 1.0, said, length=positions.length, counted=counted, dtype=dtype)


FEWEST_RESIDUAL_CHANGES = 256
# Rounding a sum is right on average while what is added is larger than half a spacing; where half is gone it is not.
WARNING_BELOW_KEPT_SHARE_OF_RESIDUAL = 0.5
ERROR_BELOW_KEPT_SHARE_OF_RESIDUAL = 0.1


@register_finding
class ResidualStreamSwamped(FindingKind):
    """What a layer adds to a residual stream is smaller than half the spacing of the stream's numbers, and is lost."""

    code = "residual-swamped"
    cure = (
        "keep the residual stream in float32 (float32 embeddings under autocast, x.float() before the first layer), or "
        "normalize it before it grows"
    )
    worst = "-realised"
    explained_by = ("dtype-not-asked",)

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, residual in record.residuals.items():
            change = residual.change
            realised = change.realised_share
            if realised is None or change.seen < FEWEST_RESIDUAL_CHANGES:
                continue
            if not realised < WARNING_BELOW_KEPT_SHARE_OF_RESIDUAL:
                continue
            severity: Severity = "error" if realised < ERROR_BELOW_KEPT_SHARE_OF_RESIDUAL else "warning"
            said = f"{format_percent(min(1.0, 1 - realised))} of what it adds to the residual stream is lost in "
            said += f"{name_dtype(residual.dtype)}: it adds {residual.added:.3g} to numbers of {residual.stream:.3g}"
            evidence: dict[str, Any] = {"added": residual.added, "stream": residual.stream}
            evidence |= make_lost_change_evidence(change, residual.dtype)
            yield self.make_finding(
                name, severity, compute_confidence(change.seen, FEWEST_RESIDUAL_CHANGES), said, **evidence
            )


# As the optimizers of torch, torchao, bitsandbytes and halfulp call it.
SECOND_MOMENT_STATE_NAMES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "second_moment", "state2", "sum")
FEWEST_MOMENT_DECREASES = 32
# With half of its changes missing the average follows a different, slower horizon than beta2 says.
STUCK_MOMENT_SHARE = 0.5
# Squares of gradients spread over decades, and a few of the largest decide how much movement took place: 400 decreases
# that were rounded stochastically have shown 15% of it by chance.
FEWEST_STOCHASTIC_MOMENT_DECREASES = 4000


@register_finding
class SecondMomentStuck(FindingKind):
    """Decreases of the second moment are smaller than half its spacing: steps follow gradients of long ago."""

    code = "second-moment-stuck"
    cure = "keep the state in float32 (state_dtype=torch.float32 of hu.optim), or a beta2 of at most 0.99"
    says = "the second moment of {place} cannot fall: {lost:share} of its decreases are lost in {dtype}"
    write = write_optimizer_code(None, "state_dtype=torch.float32")
    role = "second moment"
    worst = "lost"
    explained_by = ("state-mismatch", "dtype-changed-on-resume")
    shares_cause_with = ("updates-lost", "weight-frozen", "weight-decay-lost", "freeze-ahead")

    def find_in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            for state, change in parameter.states.items():
                is_moment = state in SECOND_MOMENT_STATE_NAMES and change.seen >= FEWEST_MOMENT_DECREASES
                dtype = parameter.state_dtypes.get(state)
                if not is_moment or is_wide_dtype(dtype or parameter.dtype) or not _is_moment_stuck(parameter, change):
                    continue
                code = ""  # for an optimizer that is not here
                if parameter.optimizer in OPTIMIZERS:
                    argument = "state_dtype=torch.float32"
                    code = write_optimizer_code(parameter.optimizer, argument, parameter.is_held_by_halfulp_optimizer)
                sure = compute_confidence(change.seen, FEWEST_MOMENT_DECREASES)
                said = f"{format_percent(change.lost_share)} of decreases of {state} lost in {name_dtype(dtype)}"
                evidence: dict[str, Any] = {"state": state, **make_lost_change_evidence(change, dtype)}
                yield self.make_finding(name, "warning", sure, said, write=code, **evidence)


def _is_moment_stuck(parameter: ParameterRecord, change: RealisedChanges) -> bool:
    """Return whether an average stands still, by its decreases: gradients above it make changes that are large enough.

    torch rounds to nearest, and counts tell. What rounds a state stochastically loses most decreases too and is right
    on average: there the movement tells.
    """
    if parameter.optimizer_module.startswith("torch.optim."):
        return change.known and change.lost_share >= STUCK_MOMENT_SHARE
    realised = change.realised_share
    if realised is None or realised >= STUCK_MOMENT_SHARE or change.seen < FEWEST_STOCHASTIC_MOMENT_DECREASES:
        return False
    return not is_explained_by_chance(change, realised)
