"""Controller: what happens to exponents at the end of each iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats import fp16
from ._backward import Backward
from ._measure import Measured, by_site, copied
from ._overflow import Culprit, all_finite, downstream, measured_culprits, unmeasured_culprits
from ._parallel import least
from ._policy import Amax, lowest
from ._site import Reading, Site
from ._state import load_sites

# After so many intervals gradients may be others, and a site may go again where it overflowed.
_FORGET = 8


@dataclasses.dataclass(frozen=True)
class LastStep:
    """What the last ``scaler.step(optimizer)`` did.

    Attributes:
        applied: Whether the optimizer stepped.
        reason: Why it did not, in words; empty where it did.
        culprits: The sites that overflowed, each with the exponent that it had.
    """

    applied: bool
    reason: str = ""
    culprits: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return "applied" if self.applied else f"skipped: {self.reason}"


class Controller:
    """Measurements in, exponents out.

    Args:
        backward: whose sites are set, by whose policy, and whose measurements are read.
        interval: a measurement every so many iterations.
        floor, ceiling: bounds of all exponents.
    """

    def __init__(self, backward: Backward, interval: int, floor: int, ceiling: int) -> None:
        self.backward = backward
        self.sites = backward.sites
        self.policy = backward.policy
        self.interval = interval
        self.floor, self.ceiling = floor, ceiling
        self.start = self.sites.anchor.exponent
        self.iteration = 0
        self.since = 0
        self.losses: list[Tensor] = []
        self._measured: list[Measured] = []
        self._culprits: list[Culprit] = []
        self._skipped = False
        self._unknown = 0
        self._again = False
        # How many overflows no measurement saw, and whether the last iteration left one to the next.
        self._unseen = 0
        self._in_doubt = False

    def read(self, flags: list[Tensor]) -> bool:
        """Whether any flag is set; measurements of the iteration come along in the same copy."""
        values, measured = self.backward.measurements.read(flags)
        self._measured += measured
        return any(value != 0 for value in values)

    def skip(self, untouched: bool) -> LastStep:
        """A step that must not be taken, as gradients are not finite: who is to blame.

        ``untouched``: nobody could clip the parameters' gradients meanwhile, which spreads what is not finite.
        """
        self._skipped = True
        if not all(copied([all_finite(loss) for loss in self.losses])):
            return LastStep(False, "the loss is not finite, so that no exponent is to blame; look at the forward pass")
        if not self.policy.per_site:
            self._culprits = [Culprit(self.sites.anchor, spreads=False)]
            exponent = self.sites.anchor.exponent
            return LastStep(False, f"gradients overflowed at the scale of all, 2^{exponent}", (("global", exponent),))
        found = measured_culprits(self._measured) or self._unmeasured(untouched)
        if found is None:
            self._in_doubt = True
            return LastStep(False, "gradients overflowed; where, the next step, which is measured, will show")
        # What no site of the model made came from outside, at the global exponent.
        found = found or [Culprit(self.sites.anchor, spreads=False)]
        self._culprits += [one for one in found if one not in self._culprits]
        blamed = tuple((one.site.key, one.site.exponent) for one in found)
        words = ", ".join(f"{key} at 2^{exponent}" for key, exponent in blamed)
        return LastStep(False, f"gradients overflowed at {words}", blamed)

    def _unmeasured(self, untouched: bool) -> list[Culprit] | None:
        """Who is to blame as far as parameters' gradients tell, if they are as backward left them."""
        backward = self.backward
        if untouched and not backward.parallel:
            return unmeasured_culprits(backward.readers(), list(backward.order), backward.edges(), backward.measuring)
        # Where measuring did not tell either, the global exponent is left; another process may know better.
        self._unknown += backward.measuring
        return [] if self._unknown > (2 if backward.parallel else 0) else None

    def update(self) -> None:
        """Set the exponents of the next iteration."""
        if self.policy.per_site:
            self._update_sites()
        else:
            self._update_anchor()
        anchor = self.sites.anchor
        if self.backward.parallel and self.policy.measures and (self.backward.measuring or self._skipped):
            anchor.exponent = least(anchor.exponent, self.device())
        self._renew()

    def device(self) -> torch.device:
        """Where the parameters are."""
        return next((parameter.device for parameter, _ in self.backward.readers()), torch.device("cpu"))

    def restart(self, exponent: int) -> None:
        """Set the global exponent by hand, and end the iteration."""
        self._set(self.sites.anchor, exponent)
        self._renew()

    def assign(self, exponents: Mapping[str, int]) -> None:
        """Set exponents by hand, all others to 0, and begin a new iteration."""
        unknown = [key for key in exponents if key not in self.sites]
        if unknown:
            raise ValueError(
                f"no sites {', '.join(unknown)}; the sites are {', '.join(site.key for site in self.sites)}"
            )
        for site in self.sites:
            self._set(site, exponents.get(site.key, 0))
        self._renew()

    @property
    def progress(self) -> list:
        """The iteration, steps since the global scale last changed, whether this one is measured, roundings, unseen."""
        return [self.iteration, self.since, self.backward.measuring, self.backward.roundings, self._unseen]

    def adopt(self, exponent: int, since: int) -> None:
        """Start from another scaler's scale, and its count of steps without an overflow."""
        for site in self.sites:
            self._set(site, exponent)
        self.sites.start = self.start = exponent
        self.since = since

    def resume(self, given: dict[str, Any], progress: list) -> None:
        """Take over the sites of a state."""
        load_sites(given, self.sites, self.backward.format or fp16)
        for key, values in given.items():
            self._set(self.sites[key], values["exponent"])
        self.iteration, self.since, self.backward.measuring, self.backward.roundings, self._unseen = progress

    def _update_sites(self) -> None:
        """Overflowed sites fall; the others follow the policy where they were measured."""
        readings = by_site(self._measured)
        fallen = self._fall(readings)
        if self.backward.measuring and (self._culprits or not self._skipped):
            self._unseen += self._in_doubt and not self._skipped
            self._in_doubt = False
        lost = self._recovered(readings)
        for site, kinds in readings.items():
            if site not in fallen and all(reading.finite for reading in kinds.values()):
                self._follow(site, kinds, site in lost)
        self._again = bool(lost) or self._rise(readings)
        anchor = self.sites.anchor
        if not self._culprits and self.backward.measuring and not anchor.history:
            # Nothing narrow is there to say how far it may go: it comes back from an overflow step by step.
            self._set(anchor, min(self.start, anchor.exponent + 1))

    def _fall(self, readings: dict[Site, dict[str, Reading]]) -> dict[Site, None]:
        """Lower the sites that overflowed, and those that saw infinities only; which these were."""
        culprits = [one.site for one in self._culprits]
        for site in culprits:
            site.overflows += 1
            site.overflowed = site.exponent
        # What follows an activation's overflow gets the same room for one step, a measured one.
        spreading = [one.site for one in self._culprits if one.spreads]
        blind = [site for site in downstream(spreading, list(self.backward.order)) if _blind(site, readings)]
        fallen = dict.fromkeys([*culprits, *blind])
        for site in fallen:
            self._set(site, self.policy.lowered(site))
        return fallen

    def _follow(self, site: Site, kinds: dict[str, Reading], lost: bool) -> None:
        """Set the exponent of a site that was measured and did not overflow; ``lost``: all arrives as zero there."""
        site.remember(kinds)
        exponent = (Amax() if lost else self.policy).exponent(site)
        if not lost and not self.policy.wants_operands and all(reading.amax for reading in kinds.values()):
            # The policy has seen all that may overflow. Operands alone do not tell of sums for weights.
            site.overflowed = None
        if exponent is not None:
            # The first that nobody saw may have been a spike, which is gone.
            margin = max(0, self._unseen - 1)
            self._set(site, _short_of_overflow(site, exponent - margin))

    def _rise(self, readings: dict[Site, dict[str, Reading]]) -> bool:
        """Raise all where everything is stored as zero, and what the loss gave is not known, as in compiled graphs."""
        narrow = [reading for kinds in readings.values() for reading in kinds.values() if reading.format]
        if not narrow or self.sites.anchor in readings or any(reading.amax != 0 for reading in narrow):
            return False
        for site in readings:
            self._set(site, _short_of_overflow(site, 2 * site.exponent - self.policy.lowered(site)))
        return True

    def _recovered(self, readings: dict[Site, dict[str, Reading]]) -> set[Site]:
        """The sites where all that arrives is stored as zero, though it was larger; how large is filled in."""
        found = set()
        for source, target in self.backward.edges():
            arrived = readings.get(source, {}).get("received")
            passed = readings.get(target, {}).get("passed")
            if arrived is not None and arrived.amax == 0 and passed is not None and passed.finite and passed.amax:
                readings[source]["received"] = dataclasses.replace(arrived, amax=passed.amax)
                found.add(source)
        return found

    def _update_anchor(self) -> None:
        """One scale for all."""
        anchor = self.sites.anchor
        for site, kinds in by_site(self._measured).items():
            site.remember(kinds)
        for one in self._culprits:
            one.site.overflows += 1
        self.since += 1
        wanted = self.policy.global_exponent(anchor.exponent, self._skipped, self.since, self.iteration + 1)
        if wanted is None:
            if not self._skipped and not self.backward.measuring:
                return
            wanted = self.policy.lowered(anchor) if self._skipped else lowest(self.policy, self.sites)
            if wanted is None and self._measured:
                # Every gradient is stored as zero.
                wanted = 2 * anchor.exponent - self.policy.lowered(anchor)
        if wanted is not None and (wanted != anchor.exponent or self._skipped):
            self.since = 0
            self._set(anchor, wanted)

    def _set(self, site: Site, exponent: int) -> None:
        site.exponent = max(self.floor, min(self.ceiling, exponent))

    def _renew(self) -> None:
        self.iteration += 1
        self.backward.renew()
        # Early gradients change quickly, and an overflow left sites without a measurement.
        early = self.iteration < self.interval and self.iteration & (self.iteration - 1) == 0
        self.backward.measuring = early or self._skipped or self._again or self.iteration % self.interval == 0
        for site in self.sites:
            site.proposals.clear()
        if self.iteration % (_FORGET * self.interval) == 0:
            self._unseen = max(0, self._unseen - 1)
            for site in self.sites:
                site.overflowed = None
        self._measured.clear()
        self._culprits.clear()
        self.losses.clear()
        self._unknown = self._unknown if self._skipped else 0
        self._skipped = self._again = False


def _short_of_overflow(site: Site, exponent: int) -> int:
    """The exponent that is wanted; halfway to where the site overflowed lately, if it is not short of that.

    A site that does not overflow there any more, as it is there or above, may go anywhere.
    """
    if site.overflowed is None or not site.exponent < site.overflowed <= exponent:
        return exponent
    return (site.exponent + site.overflowed) // 2


def _blind(site: Site, readings: dict[Site, dict]) -> bool:
    """Whether a site that an overflow reached was not measured in this iteration with finite gradients."""
    if site.measured and site.format is None:
        # It reaches as far as float32.
        return False
    kinds = readings.get(site)
    return kinds is None or not all(reading.finite for reading in kinds.values())
