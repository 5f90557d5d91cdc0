"""Policies set exponents from measurements: the base, the default, and those with one scale for all gradients."""

from __future__ import annotations

import abc
import dataclasses
import math
import statistics
from typing import ClassVar

from .._messages import name_type
from .._names import read_own_docstring, register_entry
from ..formats import Format
from ._functions import BackwardProductOperands
from ._site import Site

_POLICY_BY_NAME: dict[str, type[Policy]] = {}
# Beyond 2^15 more room in the format serves nobody, and sums of squares would leave float32.
_HIGHEST_TARGET_EXPONENT = 15
# Powers of two left free above peaks; above what is usual, where so many binades stay below it.
_HEADROOM_ABOVE_PEAK, _HEADROOM_ABOVE_MEDIAN, _BINADES_BELOW_MEDIAN = 3, 8, 27


@dataclasses.dataclass(frozen=True)
class Policy(abc.ABC):
    """A rule that sets exponents from measurements; subclasses are frozen data, which may be shared and compared.

    Attributes:
        name: What ``AdaptiveGradScaler(policy=...)`` calls it.
        per_site: Whether sites have exponents of their own; else all follow the global one.
        measures: Whether it reads what was measured; else, in the tensors' own dtypes, no edge is put in at all.
        wants_operands: Whether it reads the operands of every product in measured iterations.
    """

    name: ClassVar[str]
    per_site: ClassVar[bool] = True
    measures: ClassVar[bool] = True
    wants_operands: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            register_entry("policy", _POLICY_BY_NAME, cls.name, cls, read_own_docstring(cls))

    @abc.abstractmethod
    def exponent(self, site: Site) -> int | None:
        """Return the exponent of a site that was measured and did not overflow; None leaves it."""

    def exponent_after_overflow(self, site: Site) -> int:
        """Return the exponent of a site that overflowed."""
        return site.exponent - (min(8, site.format.binades // 2) if site.format else 8)

    def global_exponent(self, exponent: int, skipped: bool, since: int, step: int) -> int | None:
        """Return the global exponent after a step, for policies that have no other; None where `exponent` decides.

        Args:
            exponent: As it is.
            skipped: Whether the step overflowed.
            since: Steps since the last change of the global exponent.
            step: Steps taken at all.
        """
        return None

    def propose_exponent_bounds(
        self, site: Site, operands: BackwardProductOperands, format: Format
    ) -> tuple[int, int] | None:
        """Return bounds of a site's exponent from a product's operands, for policies with ``wants_operands``, or None.

        Args:
            site: Whose gradient is stored at its present exponent.
            operands: The gradient, as stored, and what it is multiplied by.
            format: What stores the product.
        """
        return None


def get_policy(policy: Policy | str) -> Policy:
    """Return the policy of that name with its defaults; a Policy is returned as it is."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(f"a policy is a name or a Policy, got {name_type(policy)}")
    if policy not in _POLICY_BY_NAME:
        raise ValueError(f"unknown policy {policy!r}; the policies are {', '.join(_POLICY_BY_NAME)}")
    return _POLICY_BY_NAME[policy]()


@dataclasses.dataclass(frozen=True)
class Amax(Policy):
    """The largest gradient seen lately lands a few powers of two under the format's largest number.

        e = min over kinds of (E - headroom - floor(log2 amax)),   E = min(emax of the format, 15)

    over the gradient that arrives at a site, what its product passes on, and the gradients of its parameters.

    Args:
        headroom: Powers of two left free above the activations' gradients, which grow in sums on their way, and from
            batch to batch; None for 3, or a sixth of fewer than 18 binades, and where that is more for 8 above the
            median of the measurements that count, or what a format of fewer than 35 binades has beyond 27.
        measurements: How many of the last measurements count; exponents fall at once and
            rise when a peak is this old.
    """

    headroom: int | None = None
    measurements: int = 4

    name = "amax"

    def __post_init__(self) -> None:
        if self.headroom is not None:
            check_integer_option("headroom", self.headroom, 0, 30)
        check_integer_option("measurements", self.measurements, 1, 64)

    def exponent(self, site: Site) -> int | None:
        """Return the exponent that the class describes."""
        if site.format is None:
            # What no narrow format stores has no limit, whatever it was before.
            return None
        sizes_by_kind: dict[str, list[float]] = {}
        for entry in list(site.amax_history)[-self.measurements :]:
            for kind, size in entry.items():
                if size > 0:
                    sizes_by_kind.setdefault(kind, []).append(math.ldexp(size, site.history_unit_exponent))
        highest = min(site.format.emax, _HIGHEST_TARGET_EXPONENT)
        limits = [
            highest - _add_headroom_to_peak_exponent(sizes, self.headroom, site.format)
            for sizes in sizes_by_kind.values()
        ]
        return min(limits, default=None)


def _add_headroom_to_peak_exponent(sizes: list[float], headroom: int | None, format: Format) -> int:
    """Return the power of two that must fit under the format's largest number: the largest size plus headroom.

    3 alone makes steps be skipped that a falling scale takes; 8 above peaks that are far above the rest loses the rest,
    and so does what leaves a format too few binades for small gradients (e5m2 has 32).
    """
    largest = math.frexp(max(sizes))[1] - 1
    if headroom is not None:
        return largest + headroom
    usual = largest + min(_HEADROOM_ABOVE_PEAK, format.binades // 6)
    above_usual = min(_HEADROOM_ABOVE_MEDIAN, format.binades - _BINADES_BELOW_MEDIAN)
    return max(usual, math.frexp(statistics.median(sizes))[1] - 1 + above_usual)


def check_integer_option(field: str, given: object, low: int, high: int) -> None:
    """Raise unless an option is an integer within its bounds."""
    if not isinstance(given, int) or isinstance(given, bool) or not low <= given <= high:
        raise ValueError(f"{field} is an integer from {low} to {high}, got {given!r}")


@dataclasses.dataclass(frozen=True)
class Constant(Policy):
    """One scale that never changes ("Mixed Precision Training", Micikevicius et al., arXiv 1710.03740, section 3.2).

    Its value is the scaler's ``init_scale``; the paper uses 8 to 32,768. A step that overflows is skipped.
    """

    name = "constant"
    per_site = False
    measures = False

    def exponent(self, site: Site) -> int | None:
        """Return None: the exponent stays."""
        return None

    def global_exponent(self, exponent: int, skipped: bool, since: int, step: int) -> int:
        """Return the exponent as it is."""
        return exponent


@dataclasses.dataclass(frozen=True)
class Measured(Policy):
    """One scale that puts the largest of all gradients under the format's largest number, measured all along.

    What Micikevicius et al. recommend where statistics are at hand: "a factor so that its product with the maximum
    absolute gradient value is below 65,504". It stays short of a scale that overflowed though the model's gradients
    allow it, as the gradient of a float16 loss may, for as long as overflows are remembered.

    Args:
        headroom: Powers of two left free above it.
    """

    headroom: int = 1

    name = "measured"
    per_site = False

    def __post_init__(self) -> None:
        check_integer_option("headroom", self.headroom, 0, 30)

    def exponent(self, site: Site) -> int | None:
        """Return the exponent that this site alone would allow; the scaler takes the least of all sites."""
        return Amax(self.headroom).exponent(site)


@dataclasses.dataclass(frozen=True)
class Dynamic(Policy):
    """One scale that is halved when a step overflows and doubled after a number of steps that do not.

    As `torch.amp.GradScaler` does, and Micikevicius et al.'s dynamic loss scaling.

    Args:
        growth_interval: Steps without overflow after which the scale doubles.
    """

    growth_interval: int = 2000

    name = "dynamic"
    per_site = False
    measures = False

    def __post_init__(self) -> None:
        check_integer_option("growth_interval", self.growth_interval, 1, 10**9)

    def exponent(self, site: Site) -> int | None:
        """Return None: only overflows decide."""
        return None

    def global_exponent(self, exponent: int, skipped: bool, since: int, step: int) -> int:
        """Return the exponent halved after an overflow, doubled after enough steps without, or unchanged."""
        if skipped:
            return exponent - 1
        return exponent + (since >= self.growth_interval)


@dataclasses.dataclass(frozen=True)
class RisingFloor(Dynamic):
    """`Dynamic` with a smallest scale that rises on a schedule ("enhanced loss scaling" of "Mixed Precision Training
    With 8-bit Floating Point", Mellempudi et al., arXiv 1905.12334, section 3.2).

    Late in a training single overflows must not take the scale down for long, as gradients have become small.

    Args:
        floors: Pairs of a step and the smallest exponent from then on. The default is the paper's for GNMT: 2^13 from
            step 40,000 and 2^15 from 150,000.
    """

    floors: tuple[tuple[int, int], ...] = ((40_000, 13), (150_000, 15))

    name = "rising-floor"

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = [step for step, _ in self.floors]
        if steps != sorted(set(steps)) or any(step < 0 for step in steps):
            raise ValueError(f"floors are pairs of a step and an exponent, by rising steps, got {self.floors!r}")

    def global_exponent(self, exponent: int, skipped: bool, since: int, step: int) -> int:
        """Return the dynamic scale's exponent, at least the floor's."""
        floor = max((low for start, low in self.floors if step >= start), default=exponent - 1)
        return max(super().global_exponent(exponent, skipped, since, step), floor)
