"""Controller: what happens to exponents at the end of each iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats import fp16
from ..rounding._random_bits import STREAM_VERSION
from ._measurement import Measurement, by_site, recovered, to_host
from ._overflow import (
    OverflowSource,
    all_finite,
    downstream,
    explains,
    finite_sites,
    forget_if_old,
    is_blind,
    is_wide,
    measured_overflow_sources,
    short_of_overflow,
    suspects,
    unmeasured_overflow_sources,
)
from ._schedule import is_measured
from ._site import GLOBAL, Reading, Site
from .checkpoint._state import load_sites
from .eager._backward import Backward
from .policies._policy import Amax
from .policies._single_scale import measured_scale
from .reports._last_step import LastStep

# For so many intervals an overflow is remembered, times the site's patience.
_MEMORY = 4
# After so many skipped steps in a row, or overflows of one site, all exponents of the iteration fall as one scale.
_ROW, _STRIKES = 4, 4
_FALL = 8
_SHORT = 4


class Controller:
    """Sets every exponent at the end of an iteration, from measurements and overflows.

    Whether an iteration is measured, and the global exponent, are the same in all processes: they follow from the
    number of the iteration, from which steps were skipped, and from what `_agreed` says. Other exponents may differ.

    Args:
        backward: whose sites are set, by whose policy, and whose measurements are read.
        interval: a measurement every so many iterations, as `is_measured` says.
        floor, ceiling: bounds of all exponents.
    """

    def __init__(self, backward: Backward, interval: int, floor: int, ceiling: int) -> None:
        self.backward = backward
        self.sites = backward.sites
        self.policy = backward.policy
        self.interval = interval
        self.floor, self.ceiling = floor, ceiling
        self.start = self.sites.global_site.exponent
        self.iteration = 0
        # The iteration from which `is_measured` counts, and how many steps in a row were skipped before it.
        self._restarted = 0
        self._skips_in_row = 0
        # The iteration from which exponents follow what losses send into the model.
        self.following = backward.following
        self.since = 0
        self.losses: list[Tensor] = []
        self._measured: list[Measurement] = []
        self._overflow_sources: list[OverflowSource] = []
        self._skipped = False
        backward.processes.after_join(self.catch_up)
        # Whether exponents are to blame for that: not for a loss that is no number.
        self._overflowed = False
        self._measure_next = False

    def read(self, flags: list[Tensor]) -> bool:
        """Read whether any flag is set, and the iteration's measurements, by one copy from the device."""
        binades = self.following.taken(flags[0].device) if self.backward.measuring else []
        values, measured = self.backward.measurements.read([*flags, *binades])
        self._measured += measured
        self.following.read += [int(binade) for binade in values[len(flags) :] if math.isfinite(binade)]
        found = any(value != 0 for value in values[: len(flags)])
        # Gradients that are shared tell all processes the same, but for what is done to them afterwards.
        return not self._agreed("step", int(not found))[0]

    def skip(self, untouched: bool) -> LastStep:
        """Note that a step is skipped, as gradients are not finite, and find the sites that overflowed.

        ``untouched``: nobody could clip the parameters' gradients meanwhile, which spreads what is not finite.
        """
        self._skipped = True
        finite = all(to_host([all_finite(loss) for loss in self.losses]))
        found, by_reader = self._found(untouched) if finite and self.policy.per_site else (None, {})
        if self.backward.processes.in_join:
            # Nobody can be asked: it may be another's.
            finite, unknown = True, False
        else:
            finite, unknown = map(bool, self._agreed("skipped step", int(finite), int(found is None)))
        if not finite:
            return LastStep(False, "the loss is not finite, so that no exponent is to blame; look at the forward pass")
        self._overflowed = True
        global_site = self.sites.global_site
        if not self.policy.per_site:
            self._overflow_sources = [OverflowSource(global_site, spreads=False)]
            words = f"gradients overflowed at the scale of all, 2^{global_site.exponent}"
            return LastStep(False, words, (("global", global_site.exponent),))
        if found is None and not unknown:
            return LastStep(False, "gradients overflowed at a site of another process, whose scaler tells which")
        if found is None and not self.backward.measuring:
            self._doubt(by_reader)
            return LastStep(False, "gradients overflowed; where, the next step, which is measured, will show")
        # What no site of the model made came from outside, at the global exponent.
        found = found or [OverflowSource(global_site, spreads=False)]
        self._overflow_sources += [one for one in found if one not in self._overflow_sources]
        blamed = tuple((one.site.key, one.site.exponent) for one in found)
        words = ", ".join(f"{key} at 2^{exponent}" for key, exponent in blamed)
        return LastStep(False, f"gradients overflowed at {words}", blamed)

    def _found(self, untouched: bool) -> tuple[list[OverflowSource] | None, dict[Site, bool]]:
        """Return the sites that overflowed, and by site whether its parameters' gradients are finite, if checked."""
        backward = self.backward
        found = measured_overflow_sources(self._measured)
        if found or not untouched or backward.processes:
            return found or None, {}
        finite = finite_sites(backward.readers())
        return unmeasured_overflow_sources(finite, backward.reached(), backward.edges(), backward.measuring), finite

    def update(self) -> None:
        """Set the exponents of the next iteration."""
        before = self.sites.global_site.exponent
        if self.policy.per_site:
            self._update_sites()
        else:
            self._update_global_site()
        if self.backward.processes.in_join and self.policy.measures:
            self._keep_together(before)
        elif self.backward.measuring or self._skipped:
            global_site = self.sites.global_site
            exponent, calm = self._agreed("update", global_site.exponent, int(not self._measure_next))
            global_site.exponent, self._measure_next = exponent, not calm
        self._renew()

    def _agreed(self, occasion: str, *values: int) -> list[int]:
        """The minimum of each value over all processes; ``occasion`` names the point at which they meet."""
        return self.backward.processes.agreed(occasion, self.iteration, list(values), self.device)

    def _keep_together(self, before: int) -> None:
        """Set the global exponent without communication, by what all processes know: which steps were skipped."""
        falls = self._skipped and (self._skips_in_row > 1 or not self.policy.per_site)
        self._set(self.sites.global_site, before - _FALL // 2 if falls else before)
        self._measure_next = False

    def catch_up(self) -> None:
        """Copy the counters of the process with the most iterations, after a ``join()`` where some ran out of data."""
        global_site = self.sites.global_site
        numbers = [self.iteration, self.since, self._restarted, self._skips_in_row, global_site.exponent]
        numbers = self.backward.processes.furthest(numbers, self.device())
        self.iteration, self.since, self._restarted, self._skips_in_row, global_site.exponent = numbers
        self.backward.measuring = is_measured(self.iteration, self._restarted, self.interval)

    def device(self) -> torch.device:
        """The device of the parameters."""
        return next((parameter.device for parameter, _ in self.backward.readers()), torch.device("cpu"))

    def restart(self, exponent: int) -> None:
        """Set the global exponent by hand, and end the iteration."""
        self._set(self.sites.global_site, exponent)
        self._renew()

    def assign(self, exponents: Mapping[str, int]) -> None:
        """Set exponents by hand, all others to 0, and begin a new iteration."""
        unknown = [key for key in exponents if key not in self.sites]
        if unknown:
            raise ValueError(
                f"no sites {', '.join(unknown)}; the sites are {', '.join(site.key for site in self.sites)}"
            )
        self.sites.set_reference(None)
        for site in self.sites:
            self._set(site, exponents.get(site.key, 0))
            site.forget_overflow()
        self._renew()

    @property
    def progress(self) -> list:
        """The counters that a state holds beside its sites.

        The iteration, steps since the global scale last changed, whether this one is measured, roundings, the iteration
        from which measured ones are counted, how many steps in a row were skipped, and the version of the stream of
        random bits, which roundings key.
        """
        return [
            self.iteration,
            self.since,
            self.backward.measuring,
            self.backward.roundings,
            self._restarted,
            self._skips_in_row,
            STREAM_VERSION,
        ]

    def adopt(self, exponent: int, since: int) -> None:
        """Adopt another scaler's scale and its count of steps without an overflow."""
        self.sites.set_reference(None)
        for site in self.sites:
            self._set(site, exponent)
        self.sites.start = self.start = exponent
        self.since = since

    def check_stream(self, progress: list) -> None:
        """Refuse a state whose gradients were rounded by another version of the stream of random bits.

        Raises:
            ValueError: so they were, stochastically.
        """
        version = progress[6] if len(progress) == 7 else 1
        if self.backward.draws and progress[3] and version != STREAM_VERSION:
            raise ValueError(
                f"'progress' of the state_dict is of version {version} of the stream of random bits, known is "
                f"{STREAM_VERSION}: gradients would be rounded by other bits than the saved run's. To accept that, set "
                f"its fourth number, of roundings, to 0; to go on with the same, use the halfulp that saved it"
            )

    def resume(self, given: dict[str, Any], progress: list) -> None:
        """Load the sites of a state."""
        load_sites(given, self.sites, self.backward.format or fp16)
        for key, values in given.items():
            self._set(self.sites[key], values["exponent"])
        self.iteration, self.since, self.backward.measuring, self.backward.roundings = progress[:4]
        self._restarted, self._skips_in_row = progress[4:6]
        # States of before exponents followed losses hold them as they are.
        reference = given[GLOBAL].get("reference") or (progress[6:] if len(progress) == 8 else (None, 0))
        self.sites.global_site.loss_binade, self.following.resumes = reference
        self.following.decide(self.iteration)
        self.sites.note_lowest()

    # sites with exponents of their own ------------------------------------------------------------------------

    def _update_sites(self) -> None:
        """Lower the sites that overflowed, and set the others that were measured by the policy."""
        if self._skipped and not self._overflowed:
            return
        self._skips_in_row = self._skips_in_row + 1 if self._skipped else 0
        if not (self._skipped or self.backward.measuring):
            return
        narrow = any(one.reading.format for one in self._measured)
        if self.sites.global_site.loss_binade is None:
            self.following.update_reference(narrow, self.floor, self.ceiling)
        readings = by_site(self._measured)
        fallen = self._fall(readings)
        if self.backward.measuring and not self._skipped:
            self._settle_doubts(readings)
        lost = recovered(self.backward.edges(), readings, self.following.measured_lift)
        for site, kinds in readings.items():
            if site not in fallen and all(reading.finite for reading in kinds.values()):
                self._follow(site, kinds, site in lost)
        self._measure_next = bool(lost) or self._rise(readings)
        global_site = self.sites.global_site
        if not self._overflow_sources and self.backward.measuring and not global_site.history:
            # Nothing narrow is there to say how far it may go: it comes back from an overflow step by step.
            self._set(global_site, self._allowed(global_site, min(self.start, global_site.exponent + 1)))
        self.following.update_reference(narrow, self.floor, self.ceiling)
        self.sites.note_lowest()

    def _doubt(self, finite: Mapping[Site, bool]) -> None:
        """Note which sites may have overflowed, as parameters' gradients tell; they fall if the next ones do not."""
        backward = self.backward
        order = backward.reached()
        known = suspects(finite, backward.edges())
        may = [*known, *downstream(list(known), order)] if known else order
        for site in dict.fromkeys(may):
            if not is_wide(site):
                self._note(site, doubted=True)

    def _note(self, site: Site, doubted: bool = False) -> None:
        site.note_overflow(self.iteration, _MEMORY * self.interval, site.exponent, doubted)

    def _fall(self, readings: dict[Site, dict[str, Reading]]) -> dict[Site, None]:
        """Lower the sites that overflowed, and those whose measurements were all infinite; return them."""
        sources = [one.site for one in self._overflow_sources]
        for site in sources:
            site.overflows += 1
            self._note(site)
        if self._skips_in_row > _ROW or any(x.overflow and x.overflow.strikes > _STRIKES for x in sources):
            return self._fall_together()
        if sources and self.backward.measuring:
            # It was seen who overflowed: nobody else is suspected.
            self.sites.acquit()
        # What follows an activation's overflow gets the same room for one step, a measured one.
        spreading = [one.site for one in self._overflow_sources if one.spreads]
        blind = [site for site in downstream(spreading, self.backward.reached()) if is_blind(site, readings)]
        fallen = dict.fromkeys([*sources, *blind])
        for site in fallen:
            if site not in sources:
                # What comes again and again would show in one site after the other.
                self._note(site, doubted=True)
            self._lower(site)
        return fallen

    def _fall_together(self) -> dict[Site, None]:
        """Lower all sites to one exponent, after lowering single ones did not stop the overflows.

        It does not follow losses where one pass reaches several outputs, of which the first one may mislead.
        """
        if self.following.several:
            self.following.resumes = self.iteration + _MEMORY * self.interval
        reached = dict.fromkeys([*self.backward.reached(), self.sites.global_site])
        # Steps in a row, of which the last one shows who overflowed: the global one falls at once to the others, which
        # are far below it by now, and nothing holds these down.
        seen = self._skips_in_row > _ROW and self.backward.measuring and bool(self._overflow_sources)
        own = [site for site in reached if not site.follows_global] if seen else []
        highest = max(site.exponent for site in own or reached)
        for site in self.sites:
            if site.exponent > highest - _FALL:
                self._set(site, highest - _FALL)
                if site in reached and not seen:
                    site.note_overflow(self.iteration, _MEMORY * self.interval, highest, doubted=True)
        return reached

    def _lower(self, site: Site) -> None:
        """Lower a site that overflowed, at least to the exponent that the policy derives from its history."""
        wanted = None if self.policy.wants_operands else self.policy.exponent(site)
        fallen = self.policy.exponent_after_overflow(site)
        self._set(site, fallen if wanted is None else min(fallen, wanted))

    def _settle_doubts(self, readings: dict[Site, dict[str, Reading]]) -> None:
        """Use a measured iteration without overflow to decide which suspected sites overflowed earlier.

        A site that would have overflowed then explains them. While there is none, all that may have overflowed fall.
        """
        doubted = self.sites.doubted()
        if any(explains(readings[site], overflow.exponent) for site, overflow in doubted.items() if site in readings):
            self.sites.acquit()
            return
        for site, overflow in doubted.items():
            if site.exponent >= overflow.exponent and not site.may_be_free:
                self._lower(site)

    def _follow(self, site: Site, kinds: dict[str, Reading], lost: bool) -> None:
        """Set the exponent of a site that was measured and did not overflow; ``lost``: all arrives as zero there."""
        site.remember(kinds)
        exponent = (Amax() if lost else self.policy).exponent(site)
        if site.overflow is not None and self._supersedes_overflow(site, site.overflow.exponent, kinds, lost):
            site.forget_overflow()
        if exponent is not None:
            halves = lost or self.policy.wants_operands
            self._set(site, self._halved(site, exponent) if halves else self._allowed(site, exponent))

    def _supersedes_overflow(self, site: Site, overflowed: int, kinds: dict[str, Reading], lost: bool) -> bool:
        """Whether a new measurement limits a site's exponent better than its remembered overflow does."""
        if site.exponent <= self.floor:
            # It cannot fall further, and is finite there.
            return True
        # Operands alone do not tell of sums for weights.
        return not lost and not self.policy.wants_operands and explains(kinds, overflowed)

    def _rise(self, readings: dict[Site, dict[str, Reading]]) -> bool:
        """Raise all sites where every gradient is stored as zero and the loss's own gradient was not measured."""
        narrow = [reading for kinds in readings.values() for reading in kinds.values() if reading.format]
        if not narrow or self.sites.global_site in readings or any(reading.amax != 0 for reading in narrow):
            return False
        for site in readings:
            self._set(site, self._halved(site, 2 * site.exponent - self.policy.exponent_after_overflow(site)))
        return True

    def _allowed(self, site: Site, exponent: int) -> int:
        """Return the wanted exponent, limited below the last overflow while that is remembered."""
        forget_if_old(site, self.iteration)
        if site.overflow is None or site.may_be_free:
            return exponent
        return min(exponent, site.overflow.exponent - self._short(site))

    def _short(self, site: Site) -> int:
        """Return how many powers of two a site stays below the exponent at which it overflowed."""
        return min(_SHORT, site.exponent - self.policy.exponent_after_overflow(site))

    def _halved(self, site: Site, exponent: int) -> int:
        short = None if self.policy.wants_operands else self._short(site)
        return short_of_overflow(site, exponent, self.iteration, short)

    # one scale for all ----------------------------------------------------------------------------------------

    def _update_global_site(self) -> None:
        """Set the global exponent, for policies with one scale for all gradients."""
        global_site = self.sites.global_site
        readings = by_site(self._measured)
        for site, kinds in readings.items():
            site.remember(kinds)
        for one in self._overflow_sources:
            one.site.overflows += 1
            self._note(one.site)
        self.since += 1
        wanted = self.policy.global_exponent(global_site.exponent, self._skipped, self.since, self.iteration + 1)
        if wanted is None:
            if not self._skipped and not self.backward.measuring:
                return
            found = measured_scale(self.policy, self.sites, readings, self.iteration)
            wanted = self.policy.exponent_after_overflow(global_site) if self._skipped else found
        if wanted is not None and (wanted != global_site.exponent or self._skipped):
            self.since = 0
            self._set(global_site, wanted)

    def _set(self, site: Site, exponent: int) -> None:
        site.exponent = max(self.floor, min(self.ceiling, exponent))

    def _renew(self) -> None:
        self.iteration += 1
        self.backward.end_iteration()
        if self._skipped:
            # An overflow left sites without a measurement, and what comes may overflow, too.
            self._restarted = self.iteration
        self.backward.measuring = self._measure_next or is_measured(self.iteration, self._restarted, self.interval)
        followed = self.following.on
        self.following.decide(self.iteration)
        if self.following.on and not followed:
            # Exponents of meanwhile are meant for losses of meanwhile.
            self.sites.set_reference(None)
        for site in self.sites:
            site.proposals.clear()
        self._measured.clear()
        self.following.read.clear()
        self._overflow_sources.clear()
        self.losses.clear()
        self._skipped = self._overflowed = self._measure_next = False
