"""The lost-update meter: the share of updates that rounding cancelled, and remedies."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from .._messages import find_user_stack_level
from .parameters._parameter_plan import ParameterPlan

MOSTLY_LOST_STEPS_BEFORE_WARNING = 100
_REMEDY_TEXT = "use weight_update='split8' (one more byte), 'kahan' (two), or 'stochastic' (none, some noise)"


@dataclass(frozen=True)
class LostUpdateRow:
    """One parameter's metered steps.

    Attributes:
        name: of the parameter.
        weight_update: how it is written.
        samples: metered steps.
        cancelled: share of its nonzero element updates that left the stored weight unchanged.
        realised: sum u (realised change) / sum u^2 over elements: 1 where the weights moved as wanted (the effective
            descent quality of arXiv 2405.03637).
        updates: nonzero element updates seen.
    """

    name: str
    weight_update: str
    samples: int
    cancelled: float
    realised: float
    updates: float


@dataclass(frozen=True)
class LostUpdateReport:
    """Lost updates of an optimizer.

    Attributes:
        rows: one per parameter with metered steps, most cancelled first.
        cancelled: share over all parameters; None before the first metered step.
        realised: wanted update that was realised, over all parameters; None before the first metered step.
    """

    rows: tuple[LostUpdateRow, ...]
    cancelled: float | None
    realised: float | None

    def __str__(self) -> str:
        """A readable summary."""
        if self.cancelled is None:
            return "lost updates: none metered yet (one step in `report_interval` is)"
        lines = [f"lost updates: {self.cancelled:.1%} of all element updates cancelled by rounding, "
                 f"{self.realised:.1%} of the wanted movement kept"]  # fmt: skip
        bad = [row for row in self.rows if row.cancelled > 0.5 and row.weight_update == "nearest"]
        lines += [f"  {row.name}: {row.cancelled:.0%} cancelled ({row.weight_update})" for row in self.rows[:5]]
        if len(self.rows) > 5:
            lines.append(f"  ... and {len(self.rows) - 5} more (report().rows)")
        if bad:
            lines.append(f"  {len(bad)} tensors lose over half of their updates: {_REMEDY_TEXT}")
        return "\n".join(lines)


def summarize_lost_updates(plans: Iterable[ParameterPlan]) -> LostUpdateReport:
    """Return the report over some parameters."""
    counted = [(plan, plan.record.lost_updates) for plan in plans if plan.record.lost_updates is not None]
    if not counted:
        return LostUpdateReport((), None, None)
    rows = []
    for plan, lost in counted:
        cancelled = _divide_or_zero(lost.cancelled_updates, lost.updates)
        realised = _divide_or_zero(lost.update_times_change, lost.squared_updates)
        rows.append(
            LostUpdateRow(plan.name, plan.spec.update.name, lost.counted_steps, cancelled, realised, lost.updates)
        )
    rows.sort(key=lambda row: -row.cancelled)
    names = ("updates", "cancelled_updates", "squared_updates", "update_times_change")
    updates, cancelled, squares, products = (sum(getattr(lost, name) for _, lost in counted) for name in names)
    return LostUpdateReport(tuple(rows), _divide_or_zero(cancelled, updates), _divide_or_zero(products, squares))


def warn_if_mostly_lost(plans: Iterable[ParameterPlan]) -> None:
    """Warn once per parameter whose nearest rounding cancelled over half of its updates on 100 metered steps."""
    for plan in plans:
        lost = plan.record.lost_updates
        if (
            lost is not None
            and lost.mostly_lost_steps == MOSTLY_LOST_STEPS_BEFORE_WARNING
            and plan.spec.update.name == "nearest"
        ):
            lost.mostly_lost_steps += 1
            warnings.warn(
                f"nearest rounding cancelled {_divide_or_zero(lost.cancelled_updates, lost.updates):.0%} of the "
                f"updates of parameter {plan.name} on {MOSTLY_LOST_STEPS_BEFORE_WARNING} sampled steps: it is hardly "
                f"training; {_REMEDY_TEXT}",
                RuntimeWarning,
                stacklevel=find_user_stack_level(),
            )


def _divide_or_zero(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
