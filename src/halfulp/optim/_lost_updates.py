"""The lost-update meter: the share of updates that rounding cancelled, what states lose, and remedies."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._messages import find_users_level
from .parameters._parameter_plan import LostUpdates, ParameterPlan
from .states._codec import DoubleBF16, Plain, Scaled
from .states._int8_blocks import Int8Blocks
from .states._state import Codec

MANY_SAMPLES = 100
MUCH_BELOW_RANGE = 0.01
WIDE_STALL = 0.01
_CURE = "use weight_update='split8' (one more byte), 'kahan' (two), or 'stochastic' (none, some noise)"
_CURE_BELOW_RANGE = "give them State('8bit', block=16), which fewer share, or torch.bfloat16"
_CURE_STALLED = "give it State(torch.bfloat16), which is rounded stochastically, or torch.float32"
_CURE_BELOW_FLOAT32 = "use weight_update='split-stochastic' (bfloat16) or 'kahan', float32 ones with param_dtype="


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
        below_float32: whether most updates were lost in a float32 sum, below 2^-24 of the weight.
    """

    name: str
    weight_update: str
    samples: int
    cancelled: float
    realised: float
    updates: float
    below_float32: bool = False


@dataclass(frozen=True)
class LostUpdateReport:
    """Lost updates of an optimizer.

    Attributes:
        rows: one per parameter with metered steps, most cancelled first.
        cancelled: share over all parameters; None before the first metered step.
        realised: wanted update that was realised, over all parameters; None before the first metered step.
        below_range: share of the elements of 8-bit states that are so much smaller than their block's largest that
            only the smallest code is left for them; None without such states.
        stalled: the names of states that are decaying means rounded to nearest, each with the share of a steady value
            within which it no longer moves, the largest over the parameters.
    """

    rows: tuple[LostUpdateRow, ...]
    cancelled: float | None
    realised: float | None
    below_range: float | None = None
    stalled: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        """A readable summary."""
        return "\n".join([*self._updates(), *self._states()])

    def _states(self) -> list[str]:
        lines = [
            f"state {name}, rounded to nearest, stops within {width:.0%} of a steady mean: {_CURE_STALLED}"
            for name, width in self.stalled
            if width > WIDE_STALL
        ]
        if self.below_range is None:
            return lines
        said = f"8-bit states: {self.below_range:.2%} of the elements lie below the range of their block's codes"
        return [said + (f": {_CURE_BELOW_RANGE}" if self.below_range > MUCH_BELOW_RANGE else ""), *lines]

    def _updates(self) -> list[str]:
        if self.cancelled is None:
            return ["lost updates: none metered yet (one step in `report_interval` is)"]
        lines = [f"lost updates: {self.cancelled:.1%} of all element updates cancelled by rounding, "
                 f"{self.realised:.1%} of the wanted movement kept"]  # fmt: skip
        bad = [row for row in self.rows if row.cancelled > 0.5 and row.weight_update == "nearest"]
        lines += [f"  {row.name}: {row.cancelled:.0%} cancelled ({row.weight_update})" for row in self.rows[:5]]
        if len(self.rows) > 5:
            lines.append(f"  ... and {len(self.rows) - 5} more (report().rows)")
        if bad:
            lines.append(f"  {len(bad)} tensors lose over half of their updates: {_CURE}")
        below = sum(row.below_float32 for row in self.rows)
        if below:
            lines.append(
                f"  {below} tensors lose updates below 2^-24 of the weight in float32 sums: {_CURE_BELOW_FLOAT32}"
            )
        return lines


def summarize_lost_updates(
    plans: Iterable[ParameterPlan], stalled: tuple[tuple[str, float], ...] = ()
) -> LostUpdateReport:
    """Return the report over some parameters, whose states stall as `stall_widths` says."""
    plans = list(plans)
    below_range = share_below_range(plans)
    counted = [(plan, plan.record.lost) for plan in plans if plan.record.lost is not None]
    rows = [
        LostUpdateRow(
            plan.name,
            plan.spec.update.name,
            lost.samples,
            _share(lost.cancelled, lost.seen),
            _share(lost.kept, lost.wanted),
            lost.seen,
            _is_below_float32(plan, lost),
        )
        for plan, lost in counted
    ]
    rows.sort(key=lambda row: -row.cancelled)
    if not counted:
        return LostUpdateReport((), None, None, below_range, stalled)
    seen, cancelled, wanted, kept = (
        sum(getattr(lost, name) for _, lost in counted) for name in ("seen", "cancelled", "wanted", "kept")
    )
    return LostUpdateReport(tuple(rows), _share(cancelled, seen), _share(kept, wanted), below_range, stalled)


def warn_if_mostly_lost(plans: Iterable[ParameterPlan]) -> None:
    """Warn once per parameter whose nearest rounding cancelled over half of its updates on 100 metered steps."""
    for plan in plans:
        lost = plan.record.lost
        if lost is not None and lost.mostly_lost == MANY_SAMPLES and plan.spec.update.name == "nearest":
            lost.mostly_lost += 1
            warnings.warn(
                f"nearest rounding cancelled {_share(lost.cancelled, lost.seen):.0%} of the updates of "
                f"parameter {plan.name} on {MANY_SAMPLES} sampled steps: it is hardly training; {_CURE}",
                RuntimeWarning,
                stacklevel=find_users_level(),
            )


def _is_below_float32(plan: ParameterPlan, lost: LostUpdates) -> bool:
    """Return whether over half of the updates were cancelled in the float32 sum, not by a later rounding.

    Where a stochastic rounding follows, which cancels updates of all sizes, their root mean square is held against the
    typical weight's last place.
    """
    spec = plan.spec
    if lost.cancelled <= 0.5 * lost.seen or not spec.update.rounds_sum or spec.update.name == "nearest":
        return False
    if not spec.update.draws(spec.store):
        return True
    typical = spec.store.decode(plan.payloads[0]).abs().median().item() * plan.scale
    binade = math.frexp(typical)[1] - 1 if 0 < typical < math.inf else -math.inf
    return math.sqrt(lost.wanted / lost.seen) < 2.0 ** (binade - 24)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def stall_widths(plan: ParameterPlan, group: Mapping[str, Any]) -> dict[str, float]:
    """Return, for each decaying mean rounded to nearest, within about which share of a steady value it stops moving.

    A step moves it by (1 - retention) of its distance, which rounding cancels below half a unit in the last place. A
    share near 1 or above it is a state that never moves but by larger values.
    """
    found = {}
    for codec, slot in zip(plan.spec.codecs, plan.spec.rule.states):
        kept, bits = slot.retained(group), _nearest_bits(codec)
        if kept is not None and bits is not None and 0 < kept < 1:
            found[slot.name] = 2.0 ** -(bits + 1) / (1 - kept)
    return found


def share_below_range(plans: Iterable[ParameterPlan]) -> float | None:
    """Return the share of 8-bit state elements on this rank that have the smallest code for a value that is not 0.

    That is code 1 of a second moment, which a positive one gets at least, and code 0 of a first moment whose second
    moment is not 0. First moments that have no second one beside them are not counted: their zeros may be true.

    Returns:
        None where there are no such states.
    """
    below = elements = 0
    for plan in plans:
        specs = list(zip(plan.spec.rule.states, plan.spec.codecs, plan.states))
        seconds = [tensors[0] for state, _, tensors in specs if state.degree == 2]
        for state, codec, tensors in specs:
            if not isinstance(codec, Int8Blocks) or not seconds:
                continue
            codes = tensors[0]
            least = codes == 1 if state.degree == 2 else (codes == 0) & (seconds[0] != 0)
            below += int(torch.count_nonzero(least))
            elements += codes.numel()
    return below / elements if elements else None


def _nearest_bits(codec: Codec) -> int | None:
    """Return the bits behind the leading one of a state rounded to nearest; None for one rounded stochastically."""
    if isinstance(codec, DoubleBF16):
        return 16
    if isinstance(codec, Plain | Scaled) and not codec.stochastic:
        # A second moment is stored as its root, whose rounding counts twice.
        return codec.store.mantissa_bits - (isinstance(codec, Scaled) and codec.squared)
    return None
