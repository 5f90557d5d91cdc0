"""Finding the sites that overflowed, whose exponents must fall, when a step is skipped."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ._measurement import Measurement, by_site, to_host
from ._site import Reading, Site


@dataclasses.dataclass(frozen=True)
class OverflowSource:
    """A site that overflowed, and whether what overflowed spreads to those after it in backward."""

    site: Site
    spreads: bool


def measured_overflow_sources(measured: list[Measurement]) -> list[OverflowSource]:
    """The sites where gradients stopped being finite, from a measured backward pass.

    What overflowed in an activation's gradient spreads to all that comes later in backward, so of these only the first
    counts, and none of the parameters that read it; a parameter's gradient spreads nowhere.
    """
    found: list[OverflowSource] = []
    flow = next((one for one in measured if one.kind != "weight" and not one.reading.finite), None)
    if flow is not None:
        found.append(OverflowSource(flow.site, spreads=True))
    for site, kinds in by_site(measured).items():
        others = [reading.finite for kind, reading in kinds.items() if kind != "weight"]
        alone = all(others) and (others or flow is None)
        if "weight" in kinds and not kinds["weight"].finite and alone:
            found.append(OverflowSource(site, spreads=False))
    return found


def suspects(finite: Mapping[Site, bool], edges: Iterable[tuple[Site, Site]]) -> set[Site]:
    """The sites that may have overflowed, from the parameters' gradients alone; none where all of those are finite.

    What overflows shows in all that comes later in backward, so that only the first of the sites with infinite
    gradients count, and those that pass gradients to them, up to the first whose parameters' gradients are finite.
    """
    above: dict[Site, list[Site]] = {}
    for source, target in edges:
        above.setdefault(source, []).append(target)
    found: set[Site] = set()
    for site in (site for site, known in finite.items() if not known):
        way, seen = [site], {site}
        while way:
            for target in above.get(way.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    way += [] if target in finite else [target]
        if all(finite.get(one, True) for one in seen - {site}):
            found |= seen
    return found


def finite_sites(readers: Iterable[tuple[Tensor, Site]]) -> dict[Site, bool]:
    """Whether the gradients of the parameters that each site reads are finite."""
    read = [(parameter.grad, site) for parameter, site in readers if parameter.grad is not None]
    finite: dict[Site, bool] = {}
    for (_, site), flag in zip(read, to_host([all_finite(gradient) for gradient, _ in read])):
        finite[site] = finite.get(site, True) and flag
    return finite


def unmeasured_overflow_sources(
    finite: Mapping[Site, bool], order: list[Site], edges: Iterable[tuple[Site, Site]], guess: bool
) -> list[OverflowSource] | None:
    """The sites that overflowed, from which parameters' gradients are finite alone; None where those do not tell.

    It was a parameter's own gradient where the site passed finite ones on, as a site that it passes gradients to shows.
    Else it may have been an activation's, anywhere on the way: a guess takes, where all sites from one on are not
    finite, that one or the one that passes gradients to it, whichever has the larger exponent.

    Args:
        finite: by site, whether the gradients of the parameters that it reads are.
        order: sites in forward's order.
        edges: pairs of a site and one that passes gradients to it.
        guess: whether to, as measuring did not tell either.
    """
    known = [site for site in order if site in finite]
    bad = [site for site in known if not finite[site]]
    if not bad:
        return []
    passing = {target for source, target in edges if finite.get(source, False)}
    later = known[: known.index(bad[-1]) + 1]
    if not guess and not passing.issuperset(bad):
        return None
    if guess and len(later) > 1 and later == bad:
        last = bad[-1]
        above = [target for source, target in edges if source is last and target in order]
        return [OverflowSource(max([last, *above], key=lambda site: site.exponent), spreads=True)]
    return [OverflowSource(site, spreads=False) for site in bad]


def downstream(sources: list[Site], order: list[Site]) -> list[Site]:
    """The sites that come after the first overflow in backward, which it reaches."""
    places = [order.index(site) for site in sources if site in order]
    return order[: max(places)] if places else []


def all_finite(gradient: Tensor) -> Tensor:
    """Whether a gradient has no infinity and no NaN, on its device."""
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.isfinite(values).all()


def explains(kinds: dict[str, Reading], exponent: int) -> bool:
    """Return whether gradients of this size may overflow at an exponent: they reach half of the largest number."""
    return any(
        reading.format is not None and reading.finite and math.ldexp(reading.amax, exponent + 1) > reading.format.max
        for reading in kinds.values()
    )


def is_wide(site: Site) -> bool:
    """Whether a site was measured and all its gradients have float32's range."""
    return site.measured and site.format is None


def is_blind(site: Site, readings: dict[Site, dict]) -> bool:
    """Return whether a site has no finite measurement in this iteration, because an overflow reached it."""
    if is_wide(site):
        return False
    kinds = readings.get(site)
    return kinds is None or not all(reading.finite for reading in kinds.values())


def short_of_overflow(site: Site, exponent: int, iteration: int, short: int | None) -> int:
    """Return the wanted exponent if it is below the last overflow's, else one halfway to it.

    A site that does not overflow there any more, as it is there or above, may go anywhere.

    Args:
        site: whose exponent it is; where it may go by itself is set.
        exponent: that is wanted.
        iteration: now.
        short: how far the site stays from where it overflowed; None of one that stays where it is known to overflow.
    """
    forget_if_old(site, iteration)
    overflow = site.overflow
    if overflow is None or not site.exponent < overflow.exponent <= exponent:
        return exponent
    half = (site.exponent + overflow.exponent) // 2
    if short is not None:
        # What is all zero where an overflow lowered it to may go that far from now on.
        overflow.exponent = max(overflow.exponent, half + short)
    return half


def forget_if_old(site: Site, iteration: int) -> None:
    """Forget an overflow after as many iterations as it is remembered."""
    if site.overflow is not None and iteration >= site.until:
        site.forget_overflow()
