"""Policies with one scale for all gradients, as in torch.amp.GradScaler."""

from __future__ import annotations

import dataclasses

from .._overflow import explains, short_of_overflow
from .._site import Reading, Site, Sites
from ._policy import Amax, Policy, check_count, lowest


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
        """Return None: the global exponent stays."""
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
        check_count("headroom", self.headroom, 0, 30)

    def exponent(self, site: Site) -> int | None:
        """Return the exponent that this site alone would allow; the scaler takes the least of all sites."""
        return Amax(self.headroom, self.headroom).exponent(site)


def measured_scale(
    policy: Policy, sites: Sites, readings: dict[Site, dict[str, Reading]], iteration: int
) -> int | None:
    """The exponent that all measured gradients allow, kept below an overflow that they do not explain.

    That may have been outside the model, where nothing is measured: in the gradient of a float16 loss, say.
    """
    global_site = sites.global_site
    wanted = lowest(policy, sites)
    if wanted is None and readings:
        # Every gradient is stored as zero.
        wanted = 2 * global_site.exponent - policy.exponent_after_overflow(global_site)
    if wanted is None or global_site.overflow is None:
        return wanted
    if any(explains(kinds, global_site.overflow.exponent) for kinds in readings.values()):
        global_site.forget_overflow()
    return short_of_overflow(global_site, wanted, iteration, None)


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
        check_count("growth_interval", self.growth_interval, 1, 10**9)

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
        """The dynamic scale, not under the floor."""
        floor = max((low for start, low in self.floors if step >= start), default=exponent - 1)
        return max(super().global_exponent(exponent, skipped, since, step), floor)
