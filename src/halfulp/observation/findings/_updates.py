"""Findings about weight updates: lost, frozen, biased, or never made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._finding import Finding, Severity
from .._record import ParameterRecord, Record, RoundingRecord
from .._text import KAHAN, at_lr, confidence_of, dtype_name, is_wide, number, optimizer_code, percent, precision
from ..auditing._audit import Audit
from ..auditing._symptoms import (
    FEWEST,
    LITTLE_LOST,
    as_findings,
    frozen_weights,
    keeps_the_rest,
    lost_decay,
    lost_updates,
    may_be_chance,
    severity_of_loss,
)
from ._kind import FindingKind, register_finding

if TYPE_CHECKING:
    from ..forecasting._layers import ForecastData, LayerForecast

# Shares of the learning rates to come that train nothing; a schedule that ends at 0 leaves thousandths behind.
FREEZE_WARNING = 0.02
FREEZE_ERROR = 0.5
FROZEN = "{place} [is|are] frozen from the first step on: {dtype} weights at lr {freeze_lr}"
FROM_STATE = "the optimizer's state"


@register_finding
class FreezeAhead(FindingKind):
    """Under this schedule the learning rate falls so low that rounding to nearest holds a layer where it is."""

    code = "freeze-ahead"
    cure = "weight_update='kahan' or 'stochastic' of hu.optim, or keep these in float32"
    says = "{place} [freezes|freeze] from step {freeze_step} on: {dtype} weights at lr {freeze_lr}"
    write = optimizer_code(None, {}, KAHAN)

    wide_cure = "nothing, if so little is not missed; else a schedule that ends earlier, or float64"
    worst = "after_freeze"

    def in_forecast(self, forecast: ForecastData) -> Iterator[Finding]:
        frozen: dict[tuple[Severity, str], list[LayerForecast]] = {}
        for layer in forecast.layers:
            if layer.freeze_step is not None and layer.weight_update == "nearest":
                frozen.setdefault((_grade_freeze(layer), dtype_name(layer.dtype)), []).append(layer)
        for (severity, dtype), layers in frozen.items():
            worst = max(layers, key=lambda layer: layer.after_freeze)
            yield self.found(
                [layer.name for layer in layers],
                severity,
                1.0 if worst.updates == FROM_STATE else 0.8,
                _describe_freeze(layers, worst, dtype, forecast.start),
                says=FROZEN if worst.freeze_step == forecast.start else self.says,
                write=optimizer_code(forecast.rule, {"lr": worst.lr, "weight_decay": worst.weight_decay}, KAHAN),
                cure=self.cure_in(worst.dtype),
                freeze_step=worst.freeze_step,
                freeze_lr=worst.freeze_lr,
                after_freeze=worst.after_freeze,
                dtype=dtype,
            )


def _grade_freeze(layer: LayerForecast) -> Severity:
    if layer.after_freeze >= FREEZE_ERROR:
        return "error"
    return "warning" if layer.after_freeze >= FREEZE_WARNING else "note"


def _describe_freeze(layers: list[LayerForecast], worst: LayerForecast, dtype: str, start: int) -> str:
    steps = sorted({layer.freeze_step for layer in layers if layer.freeze_step is not None})
    said = "now" if steps[0] == start else f"step {steps[0]}"
    lr = f"at lr {worst.freeze_lr:.3g}"
    one, several = (
        f"frozen in {dtype} from {said} on, {lr}",
        f"freezes in {dtype} from {said} to step {steps[-1]}, first {lr}",
    )
    rest = f"{percent(worst.after_freeze)} of the learning rate to come trains nothing"
    return f"{one if len(steps) == 1 else several}: {rest}"


COPY = "set requires_grad=False if it is a copy of weights; else see whether the loss depends on it"


@register_finding
class NeverStepped(FindingKind):
    """A trainable parameter is in no optimizer, or never got a gradient, and keeps its first value."""

    code = "never-stepped"
    cure = "give it to the optimizer, or set requires_grad=False if it is to stay"
    role = "weight"

    def in_record(self, record: Record) -> Iterator[Finding]:
        # An observation without an optimizer says nothing of who steps what.
        if all(parameter.optimizer is None for parameter in record.parameters.values()):
            return
        for name, parameter in record.parameters.items():
            if not parameter.requires_grad:
                continue
            if parameter.optimizer is None:
                yield self._left_out(record, name, parameter.numel)
            # Of a shard without elements the gradient goes to other ranks.
            elif record.sampled_steps and parameter.gradients == 0 and parameter.numel:
                said = f"no gradient in any of {len(record.sampled_steps)} sampled steps"
                yield self.found(
                    name,
                    "warning",
                    1 - 0.5 ** len(record.sampled_steps),
                    said,
                    cure="see whether the loss depends on it; set requires_grad=False if it is to stay",
                    sampled_steps=len(record.sampled_steps),
                )

    def _left_out(self, record: Record, name: str, numel: int) -> Finding:
        """Of a parameter in no optimizer: whether the loss depends on it tells a forgotten one from a copy."""
        steps, gradient = len(record.sampled_steps), record.tensors.get(("weight gradient", name))
        if not steps or (gradient is not None and gradient.zeros < gradient.elements):
            return self.found(name, "error", 1.0, "trainable, but in no optimizer", numel=numel)
        said = f"trainable, in no optimizer, and no gradient in any of {steps} sampled steps, as of a target or average"
        return self.found(name, "note", 1 - 0.5**steps, said, cure=COPY, numel=numel, sampled_steps=steps)


# In units of the standard deviation: a chance of one in 10^8 per tensor, of which a model has hundreds.
DEVIATIONS = 6.0
# A correlation below a tenth leaves at least 99% of the variance independent: it slows no average down.
CORRELATION = 0.1
FEWEST_ROUNDED = 256
# Of small updates few are rounded up, and each that is by chance in two steps looks like a large correlation.
COINCIDENCES = 6


@register_finding
class RandomBitsRepeat(FindingKind):
    """Stochastic rounding goes one way too often, or the same way again on another step or rank."""

    code = "random-bits-repeat"
    cure = "draw fresh bits for every step and rank; hu.optim's are a hash of seed, step, parameter and element"
    role = "update"

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            rounding = parameter.rounding
            if rounding is None or rounding.seen < FEWEST_ROUNDED:
                continue
            steps = max(1, len(record.sampled_steps))
            yield from self._each(name, rounding, steps, confidence_of(rounding.seen, FEWEST_ROUNDED))

    def _each(self, name: str, rounding: RoundingRecord, steps: int, confidence: float) -> Iterator[Finding]:
        # A correlation is between two steps; of n decisions n times their mean variance are as good as open.
        seen, opened = rounding.seen, rounding.variance / steps
        # No decision's variance is over a quarter, so that chance correlates them by at most half of 1 over the root.
        least = max(CORRELATION, DEVIATIONS / 2 / opened**0.5, COINCIDENCES / opened) if opened else float("inf")
        # Of ranks the record has what chance does not explain.
        for what, correlation, limit in (
            ("steps", rounding.repeated, least),
            ("ranks", rounding.between_ranks, CORRELATION),
        ):
            if correlation is not None and correlation > limit:
                said = f"two {what} round the same way, with a correlation of {correlation:.2g}"
                yield self.found(name, "error", confidence, said, correlation=correlation, between=what, seen=seen)
        deviations = rounding.excess / rounding.variance**0.5 if rounding.variance > 0 else 0.0
        # A bias of a hundredth of a spacing per rounding is as small as the rounding of float32 arithmetic before it.
        bias = rounding.excess / seen
        if abs(deviations) > DEVIATIONS and abs(bias) > 0.01:
            way = "up" if bias > 0 else "down"
            said = f"rounds {way} too often by {abs(bias):.2g}, {abs(deviations):.3g} standard deviations"
            yield self.found(name, "error", confidence, said, bias=bias, deviations=deviations, seen=seen)


# Without a computed update only the count of unchanged elements is left; half of them is more than a schedule explains.
UNKNOWN_LOST = 0.5


@register_finding
class UpdatesLost(FindingKind):
    """Updates are smaller than half the gap to the weights' neighbouring numbers: rounding puts the weights back."""

    code = "updates-lost"
    cure = "weight_update='kahan' of hu.optim, or keep these in float32"
    says = "{place} [loses|lose] {lost:share} of [its|their] updates: {dtype} weights{at_lr}"
    write = optimizer_code(None, {}, KAHAN)
    role = "update"
    wide_cure = "nothing, if these are at rest; else a larger learning rate, or float64"
    worst = "lost"
    explained_by = ("dtype-not-asked", "dtype-changed-on-resume")

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            update = parameter.update
            if parameter.optimizer is None or update.seen < FEWEST or not update.cancelled:
                continue
            severity = _grade_loss(parameter)
            if severity is None:
                continue
            realised = update.realised_share
            said, smaller = f"{percent(update.lost_share)} of updates lost in {dtype_name(parameter.dtype)}", ""
            if realised is None:
                said = f"{percent(update.lost_share)} of elements with a gradient unchanged"
            elif realised >= LITTLE_LOST:
                smaller = f", the smaller ones, though {percent(min(1.0, realised))} of the movement took place"
            yield self.found(
                name,
                severity,
                confidence_of(update.seen, FEWEST) * (1.0 if update.known else 0.5),
                said + at_lr(parameter.options) + smaller,
                cure=self.cure_in(parameter.dtype),
                says=self.says if update.known else "",
                write=optimizer_code(parameter.optimizer, parameter.options, KAHAN),
                lost=update.lost_share,
                realised=realised,
                seen=update.seen,
                dtype=dtype_name(parameter.dtype),
                lr=number(parameter.options, "lr"),
            )

    def in_audit(self, audit: Audit) -> Iterator[Finding]:
        yield from as_findings(self, lost_updates(audit))


def _grade_loss(parameter: ParameterRecord) -> Severity | None:
    """Return how bad it is; None where stochastic rounding cancels updates and is right on average, or few are lost."""
    update = parameter.update
    if not update.known:
        if keeps_the_rest(parameter):
            return None
        lr = parameter.options.get("lr", 1.0)
        severity: Severity = "note" if is_wide(parameter.dtype) else "warning"
        return severity if lr != 0 and update.lost_share >= UNKNOWN_LOST else None
    realised = update.realised_share
    to_nearest = parameter.rounding is None and parameter.weight_update == "nearest"
    found = severity_of_loss(parameter.dtype, realised, update.lost_share if to_nearest else 0.0)
    if realised is None or parameter.rounding is None:
        return found
    # Of so many that are kept by chance, as variance tells for small probabilities, none is left in e^-16 of the cases.
    none_kept = update.cancelled == update.seen and parameter.rounding.variance < 16
    return None if none_kept or may_be_chance(update, realised, spread=3.0) else found


FEWEST_DECAYED = 32
# Decay is a regularizer: half of it is the decay of another experiment, a little less is a slightly weaker one.
DECAY_REALISED = 0.5


@register_finding
class WeightDecayLost(FindingKind):
    """Weight decay is smaller than half the spacing of the weights' numbers, so that the weights never decay."""

    code = "weight-decay-lost"
    cure = "weight_update='kahan' or 'stochastic' of hu.optim, which round decay and update as one, or float32 weights"
    says = "{place} [does|do] not decay: {lost:share} of weight decay rounds away{at_lr}"
    write = optimizer_code(None, {}, KAHAN)
    role = "weight"
    wide_cure = "nothing, if so small a decay is not missed; else a larger one, or float64"
    worst = "lost"
    explained_by = ("updates-lost", "weight-frozen", "dtype-not-asked", "dtype-changed-on-resume")
    shares_cause_with = ("freeze-ahead",)

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            decay = parameter.decay
            if decay is None or decay.seen < FEWEST_DECAYED:
                continue
            realised = decay.realised_share
            share = realised if realised is not None else 1 - decay.lost_share
            if not share < DECAY_REALISED:
                continue
            lr, rate = number(parameter.options, "lr"), number(parameter.options, "weight_decay")
            factor = f" (1 - {lr * rate:.3g} a step)" if lr is not None and rate is not None else ""
            yield self.found(
                name,
                "note" if is_wide(parameter.dtype) else "warning",
                confidence_of(decay.seen, FEWEST_DECAYED),
                f"{percent(decay.lost_share)} of weight decay lost in {dtype_name(parameter.dtype)}{factor}",
                cure=self.cure_in(parameter.dtype),
                write=optimizer_code(parameter.optimizer, parameter.options, KAHAN),
                lost=decay.lost_share,
                realised=realised,
                seen=decay.seen,
                lr=lr,
                weight_decay=rate,
            )

    def in_audit(self, audit: Audit) -> Iterator[Finding]:
        yield from as_findings(self, lost_decay(audit))

    def in_forecast(self, forecast: ForecastData) -> Iterator[Finding]:
        losing = [
            (layer, layer.decay_lost)
            for layer in forecast.layers
            if layer.decay_lost is not None
            and layer.weight_update == "nearest"
            and layer.decay_lost > 1 - DECAY_REALISED
        ]
        if losing:
            worst, lost = max(losing, key=lambda pair: pair[1])
            yield self.found(
                [layer.name for layer, _ in losing],
                "note" if is_wide(worst.dtype) else "warning",
                1.0,
                f"{percent(lost)} of weight decay will be lost in {dtype_name(worst.dtype)} "
                f"(1 - {worst.lr * worst.weight_decay:.3g} a step at most)",
                write=optimizer_code(forecast.rule, {"lr": worst.lr, "weight_decay": worst.weight_decay}, KAHAN),
                cure=self.cure_in(worst.dtype),
                lost=lost,
                lr=worst.lr,
                weight_decay=worst.weight_decay,
            )


# A smaller sample, as of a scalar, may stand still by chance for some steps.
FEWEST_FROZEN = 8
# Rows of an embedding that no batch has stand still in health.
DENSE = 0.5
# An element at a power of two may go down and come back: so rare, movement is no sign of somebody who writes.
MOSTLY_LOST = 0.9
FEWEST_MOVES = 16
ROUNDED = "keep it in float32, or step it with weight_update='kahan' of hu.optim"
WRITTEN_BACK = (
    "find what writes its old value back after each step (copy_, load_state_dict, a weight made anew in forward); "
    "hu.optim's weight updates need a parameter that stays"
)


@register_finding
class WeightFrozen(FindingKind):
    """A weight that the optimizer steps, with gradients that are not zero, still holds its first bits."""

    code = "weight-frozen"
    cure = ROUNDED
    says = "{place} [has|have] not moved in {sampled_steps} sampled steps: {dtype} weights{at_lr}"
    write = optimizer_code(None, {}, KAHAN)
    role = "update"
    wide_cure = "nothing, if it is at rest; else a larger learning rate, or float64"
    worst = "lost"
    explained_by = ("updates-lost", "never-stepped", "scale-collapsed", "first-nonfinite")

    def in_record(self, record: Record) -> Iterator[Finding]:
        steps = len(record.sampled_steps)
        for name, parameter in record.parameters.items():
            update = parameter.update
            if parameter.optimizer is None or parameter.moved != 0 or steps < 2:
                continue
            if number(parameter.options, "lr") == 0 or not parameter.nonzero_gradients or update.seen < FEWEST_FROZEN:
                continue
            rounded, moves = update.lost_share >= MOSTLY_LOST, update.seen - update.cancelled
            if not rounded and (moves < FEWEST_MOVES or not _is_dense(record, parameter)):
                continue
            if keeps_the_rest(parameter) and not _is_due(record, parameter):
                continue
            yield self.found(
                name,
                "note" if rounded and is_wide(parameter.dtype) else "error",
                confidence_of(update.seen, 32) * confidence_of(steps, 1) * (1.0 if update.known else 0.5),
                f"has not moved in {steps} sampled steps in {dtype_name(parameter.dtype)}{at_lr(parameter.options)}"
                + ("" if rounded else ", though updates changed it"),
                cure=self.cure_in(parameter.dtype) if rounded else WRITTEN_BACK,
                says=self.says if rounded else "",
                write=optimizer_code(parameter.optimizer, parameter.options, KAHAN) if rounded else "",
                moved=0.0,
                sampled_steps=steps,
                seen=update.seen,
                lost=update.lost_share,
                dtype=dtype_name(parameter.dtype),
                lr=number(parameter.options, "lr"),
            )

    def in_audit(self, audit: Audit) -> Iterator[Finding]:
        yield from as_findings(self, frozen_weights(audit))


def _is_due(record: Record, parameter: ParameterRecord) -> bool:
    """Return whether updates that are kept until they show add up to more than the largest weight's spacing."""
    update, weight = record.tensors.get(("update", parameter.name)), record.tensors.get(("weight", parameter.name))
    digits = precision(parameter.dtype)
    if not parameter.update.known or update is None or weight is None or digits is None or is_wide(parameter.dtype):
        return False
    steps = record.history[-1].step + 1 if record.history else 0
    return steps * update.amax > 2.0 ** (1 - digits) * weight.amax


def _is_dense(record: Record, parameter: ParameterRecord) -> bool:
    """Return whether most elements of a parameter have gradients."""
    gradient = record.tensors.get(("weight gradient", parameter.name))
    return gradient is not None and gradient.elements - gradient.zeros > DENSE * gradient.elements
