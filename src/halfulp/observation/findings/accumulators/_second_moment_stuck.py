"""second-moment-stuck: the average of squared gradients no longer follows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....optim import OPTIMIZERS
from ..._code import optimizer_code
from ..._dtypes import cannot_decay, dtype_name, is_wide
from ..._finding import Finding
from ..._lost_movement import may_be_chance
from ..._words import confidence_of, percent
from ...auditing._audit import Audit
from ...auditing._movement import SECOND_MOMENTS, stuck_second_moments
from ...auditing._symptom import as_findings
from ...record._record import ParameterRecord, Realised, Record
from .._kind import FindingKind, register_finding

if TYPE_CHECKING:
    from ...forecasting._data import ForecastData, LayerForecast

FEWEST = 32
# With half of its changes missing the average follows a different, slower horizon than beta2 says.
HALF = 0.5
# Squares of gradients spread over decades, and a few of the largest decide how much movement took place: 400 decreases
# that were rounded stochastically have shown 15% of it by chance.
FEWEST_STOCHASTIC = 4000


@register_finding
class SecondMomentStuck(FindingKind):
    """Decreases of the second moment are smaller than half its spacing: steps follow gradients of long ago."""

    code = "second-moment-stuck"
    cure = "keep the state in float32 (state_dtype=torch.float32 of hu.optim), or a beta2 of at most 0.99"
    says = "the second moment of {place} cannot fall: {lost:share} of its decreases are lost in {dtype}"
    write = optimizer_code(None, {}, "state_dtype=torch.float32")
    role = "second moment"
    wide_cure = "nothing, if steps may follow gradients of long ago; else a smaller beta2, or float64"
    worst = "lost"
    explained_by = ("state-mismatch", "dtype-changed-on-resume")
    shares_cause_with = ("updates-lost", "weight-frozen", "weight-decay-lost", "freeze-ahead")

    def in_record(self, record: Record) -> Iterator[Finding]:
        for name, parameter in record.parameters.items():
            for state, change in parameter.states.items():
                if state not in SECOND_MOMENTS or change.seen < FEWEST or not _stuck(parameter, change):
                    continue
                dtype = dtype_name(parameter.state_dtypes.get(state))
                yield self.found(
                    name,
                    "note" if is_wide(parameter.state_dtypes.get(state, parameter.dtype)) else "warning",
                    confidence_of(change.seen, FEWEST),
                    f"{percent(change.lost_share)} of decreases of {state} lost in {dtype}",
                    cure=self.cure_in(parameter.state_dtypes.get(state)),
                    write=_code(parameter),
                    state=state,
                    lost=change.lost_share,
                    realised=change.realised_share,
                    seen=change.seen,
                    dtype=dtype,
                )

    def in_audit(self, audit: Audit) -> Iterator[Finding]:
        yield from as_findings(self, stuck_second_moments(audit))

    def in_forecast(self, forecast: ForecastData) -> Iterator[Finding]:
        stuck = [layer for layer in forecast.layers if _grows_only(layer)]
        if stuck:
            beta2, dtype = stuck[0].beta2, dtype_name(stuck[0].denominator)
            said = f"a second moment in {dtype} cannot decay at beta2 {beta2:g}: it only grows"
            yield self.found(
                [layer.name for layer in stuck],
                "warning",
                1.0,
                said,
                cure=self.cure_in(stuck[0].denominator),
                beta2=beta2,
                dtype=dtype,
            )


def _code(parameter: ParameterRecord) -> str:
    """Return the lines that keep the states of an optimizer in float32; empty for one that is not here."""
    if parameter.optimizer not in OPTIMIZERS:
        return ""
    return optimizer_code(parameter.optimizer, parameter.options, "state_dtype=torch.float32")


def _grows_only(layer: LayerForecast) -> bool:
    return layer.beta2 is not None and cannot_decay(1 - layer.beta2, layer.denominator)


def _stuck(parameter: ParameterRecord, change: Realised) -> bool:
    """Return whether an average stands still.

    Only decreases are counted: gradients above the average make changes that are large enough. torch rounds to nearest,
    and counts tell. What rounds a state stochastically loses most decreases too and is right on average: there the
    movement tells.
    """
    if parameter.optimizer_module.startswith("torch.optim."):
        return change.known and change.lost_share >= HALF
    realised = change.realised_share
    if realised is None or realised >= HALF or change.seen < FEWEST_STOCHASTIC:
        return False
    return not may_be_chance(change, realised)
