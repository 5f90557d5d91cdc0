"""random-bits-repeat: stochastic rounding that is biased, or draws the same bits again."""

from collections.abc import Iterator

from ..._finding import Finding
from ..._words import confidence_of
from ...record._record import Record, RoundingRecord
from .._kind import FindingKind, register_finding

# In units of the standard deviation: a chance of one in 10^8 per tensor, of which a model has hundreds.
DEVIATIONS = 6.0
# A correlation below a tenth leaves at least 99% of the variance independent: it slows no average down.
CORRELATION = 0.1
FEWEST = 256
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
            if rounding is None or rounding.seen < FEWEST:
                continue
            steps = max(1, len(record.sampled_steps))
            yield from self._each(name, rounding, steps, confidence_of(rounding.seen, FEWEST))

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
