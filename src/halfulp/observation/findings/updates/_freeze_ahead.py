"""freeze-ahead: under the planned schedule, rounding will stop a layer before its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..._code import KAHAN, optimizer_code
from ..._dtypes import dtype_name
from ..._finding import Finding, Severity
from ..._words import percent
from .._kind import FindingKind, register_finding

if TYPE_CHECKING:
    from ...forecasting._data import ForecastData, LayerForecast

# Shares of the learning rates to come that train nothing; a schedule that ends at 0 leaves thousandths behind.
WARNING = 0.02
ERROR = 0.5
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
                frozen.setdefault((_severity(layer), dtype_name(layer.dtype)), []).append(layer)
        for (severity, dtype), layers in frozen.items():
            worst = max(layers, key=lambda layer: layer.after_freeze)
            yield self.found(
                [layer.name for layer in layers],
                severity,
                1.0 if worst.updates == FROM_STATE else 0.8,
                _words(layers, worst, dtype, forecast.start),
                says=FROZEN if worst.freeze_step == forecast.start else self.says,
                write=optimizer_code(forecast.rule, {"lr": worst.lr, "weight_decay": worst.weight_decay}, KAHAN),
                cure=self.cure_in(worst.dtype),
                freeze_step=worst.freeze_step,
                freeze_lr=worst.freeze_lr,
                after_freeze=worst.after_freeze,
                dtype=dtype,
            )


def _severity(layer: LayerForecast) -> Severity:
    if layer.after_freeze >= ERROR:
        return "error"
    return "warning" if layer.after_freeze >= WARNING else "note"


def _words(layers: list[LayerForecast], worst: LayerForecast, dtype: str, start: int) -> str:
    steps = sorted({layer.freeze_step for layer in layers if layer.freeze_step is not None})
    said = "now" if steps[0] == start else f"step {steps[0]}"
    lr = f"at lr {worst.freeze_lr:.3g}"
    one, several = (
        f"frozen in {dtype} from {said} on, {lr}",
        f"freezes in {dtype} from {said} to step {steps[-1]}, first {lr}",
    )
    rest = f"{percent(worst.after_freeze)} of the learning rate to come trains nothing"
    return f"{one if len(steps) == 1 else several}: {rest}"
