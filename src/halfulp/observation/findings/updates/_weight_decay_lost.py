"""weight-decay-lost: rounding the weight cancels its decay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..._code import KAHAN, optimizer_code
from ..._dtypes import dtype_name, is_wide
from ..._finding import Finding
from ..._words import confidence_of, number, percent
from ...auditing._audit import Audit
from ...auditing._movement import lost_decay
from ...auditing._symptom import as_findings
from ...record._record import Record
from .._kind import FindingKind, register_finding

if TYPE_CHECKING:
    from ...forecasting._data import ForecastData

FEWEST = 32
# Decay is a regularizer: half of it is the decay of another experiment, a little less is a slightly weaker one.
REALISED = 0.5


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
            if decay is None or decay.seen < FEWEST:
                continue
            realised = decay.realised_share
            share = realised if realised is not None else 1 - decay.lost_share
            if not share < REALISED:
                continue
            lr, rate = number(parameter.options, "lr"), number(parameter.options, "weight_decay")
            factor = f" (1 - {lr * rate:.3g} a step)" if lr is not None and rate is not None else ""
            yield self.found(
                name,
                "note" if is_wide(parameter.dtype) else "warning",
                confidence_of(decay.seen, FEWEST),
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
            if layer.decay_lost is not None and layer.weight_update == "nearest" and layer.decay_lost > 1 - REALISED
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
