"""Policies of "Adaptive Loss Scaling" and "Gradient Scaling": scales by the statistics of a product's operands."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

from torch import Tensor

from ...formats import Format
from .._products import Operands
from .._site import HIGHEST, Proposal, Site
from ._estimators import (
    PAPER_SHARE,
    LogMoments,
    LogScale,
    Moments,
    Version,
    abs_range,
    bounds,
    clip_scale,
    element_wise,
    lognormal,
    power_of_two,
    sample_sums,
    scale_by_numbers,
    underflow_bound,
)
from ._policy import Policy


@dataclasses.dataclass(frozen=True)
class OperandStatisticsPolicy(Policy):
    """Base of the policies of Zhao et al. (arXiv 1910.12385, IJCAI-20), which read each product's operands.

    Each gives alpha, by which a product's gradient should be multiplied so that what the product passes on stays in
    range, as a lower bound against underflow and an upper one against overflow; of all products of a site the largest
    lower bound holds, and then the smallest upper one. Statistics are made, and copied to the host
    product by product, in measured iterations only.

    Args:
        scale_bound: Upper bound of one alpha; the papers take 16 (first version) and 65,504; None is none.
        accumulated_bound: Upper bound of a site's scale over the global one: the papers' 1024 and 65,504; None is none.
    """

    scale_bound: float | None = None
    accumulated_bound: float | None = None

    wants_operands = True

    @abc.abstractmethod
    def log2_alpha(self, operands: Operands, format: Format) -> list[LogScale]:
        """The base-2 logarithms of alpha, by each rule of the policy; NaN where an operand is not finite."""

    def proposed(self, site: Site, operands: Operands, format: Format, global_site: Site) -> Proposal | None:
        """The bounds of a site's exponent by a product's operands; the gradient is stored at the present one."""
        # Zeros alone say nothing of how far to go.
        if not bool(operands.gradient.any()):
            return None
        return self._proposal(site.exponent, self.log2_alpha(operands, format), site, global_site)

    def _proposal(self, exponent: int, alphas: list[LogScale], site: Site, global_site: Site) -> Proposal | None:
        """The bounds of several rules as one, of a gradient that is stored at an exponent."""
        if any(map(math.isnan, alphas)):
            return None
        cap = clip_scale(
            math.inf,
            self.scale_bound or math.inf,
            self.accumulated_bound or math.inf,
            accumulated=2.0 ** (site.exponent - global_site.exponent),
        )
        lower = max([0.0, *(alpha.lower for alpha in alphas)])
        upper = min(min(alpha.upper for alpha in alphas), cap + (site.exponent - exponent))
        # Up for what must be reached, down for what must not be passed.
        least = exponent - power_of_two(-lower)
        return Proposal(least, HIGHEST if upper == math.inf else exponent + power_of_two(upper))

    def exponent(self, site: Site) -> int | None:
        """The largest lower bound of all proposals, at most the smallest upper one."""
        if not site.proposals:
            return None
        return min(max(one.least for one in site.proposals), min(one.most for one in site.proposals))


@dataclasses.dataclass(frozen=True)
class UnderflowBound(OperandStatisticsPolicy):
    """At most a share of a product's outputs underflows, if its operands are Gaussian and independent.

    See `_estimators.underflow_bound` for the equations. At the loss, where a wide gradient is rounded
    before the first product, the rule for lognormal gradients (IJCAI-20) holds too. The published rules are lower
    bounds of a scale; so is what the gradient of the loss, and a sample of each product's sums, show by themselves, and
    the largest is taken.

    Args:
        version: ``"sum"`` counts the terms of each sum (IJCAI-20), ``"product"`` does not (the first paper).
        share: The share that may underflow.
    """

    version: Version = "sum"
    share: float = PAPER_SHARE

    name = "underflow-bound"

    def log2_alpha(self, operands: Operands, format: Format) -> list[LogScale]:
        """By the published rule for the product, by that for its gradient alone, and by a sample of the sums."""
        low, high = bounds(format)
        limits: dict[str, Any] = {"share": self.share, "u_min": low, "u_max": high}
        gradient, weight = Moments.of(operands.gradient), Moments.of(operands.weight)
        found = [
            underflow_bound(gradient, weight, operands.fan, version=self.version, **limits),
            underflow_bound(gradient, **limits),
        ]
        if gradient.finite and weight.finite:
            found.append(scale_by_numbers(sample_sums(operands.gradient, operands.weight), **limits))
        return found

    def at_the_loss(self, site: Site, gradient: Tensor, format: Format, global_site: Site) -> Proposal | None:
        """Bounds for a gradient at the global exponent, taken as Gaussian, as lognormal, and as it is."""
        low, high = bounds(format)
        limits: dict[str, Any] = {"share": self.share, "u_min": low, "u_max": high}
        moments = Moments.of(gradient)
        if not (moments.finite and moments.nonzero):
            return None
        alphas = [lognormal(LogMoments.of(gradient), **limits), underflow_bound(moments, **limits)]
        return self._proposal(global_site.exponent, [*alphas, scale_by_numbers(gradient, **limits)], site, global_site)


@dataclasses.dataclass(frozen=True)
class ElementWise(OperandStatisticsPolicy):
    """No single product of two elements may underflow, unless a sum could then overflow.

    Args:
        rescue_share: Only this share of the products is to be saved, the largest of them; None means all.
    """

    rescue_share: float | None = None

    name = "element-wise"

    def log2_alpha(self, operands: Operands, format: Format) -> list[LogScale]:
        """See `halfulp.gradients.policies._estimators.element_wise`."""
        low, high = bounds(format)
        limits: dict[str, Any] = {"u_min": low, "u_max": high, "fan": operands.fan, "rescue_share": self.rescue_share}
        return [element_wise(operands.gradient, operands.weight, **limits)]


@dataclasses.dataclass(frozen=True)
class AbsRange(OperandStatisticsPolicy):
    """The product of the smallest operands may not underflow, unless a sum of the largest could then overflow."""

    name = "abs-range"

    def log2_alpha(self, operands: Operands, format: Format) -> list[LogScale]:
        """See `halfulp.gradients.policies._estimators.abs_range`."""
        low, high = bounds(format)
        gradient, weight = Moments.of(operands.gradient), Moments.of(operands.weight)
        return [abs_range(gradient, weight, operands.fan, u_min=low, u_max=high)]
