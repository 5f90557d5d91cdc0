"""Policies of "Adaptive Loss Scaling" and "Gradient Scaling": scales by the statistics of a product's operands."""

from __future__ import annotations

import abc
import dataclasses
import math

from torch import Tensor

from ..formats import Format
from ._estimators import (
    PAPER_SHARE,
    Version,
    abs_range,
    bounded,
    bounds,
    element_wise,
    lognormal,
    power_of_two,
    underflow_bound,
)
from ._moments import LogMoments, Moments
from ._operands import Operands
from ._policy import Policy
from ._site import Site


@dataclasses.dataclass(frozen=True)
class Published(Policy):
    """What the estimators of Zhao et al. (arXiv 1910.12385, IJCAI-20) have in common.

    Each gives alpha, by which a product's gradient should be multiplied so that what the product passes on stays in
    range; the exponent of the product's site rises by floor(log2 alpha). Statistics are made, and copied to the host
    product by product, in measured iterations only.

    Args:
        scale_bound: Upper bound of one alpha; the papers take 16 (first version) and 65,504; None is none.
        accumulated_bound: Upper bound of a site's scale over the global one: the papers' 1024 and 65,504; None is none.
    """

    scale_bound: float | None = None
    accumulated_bound: float | None = None

    wants_operands = True

    @abc.abstractmethod
    def log2_alpha(self, operands: Operands, format: Format) -> float:
        """The base-2 logarithm of alpha; NaN where an operand is not finite."""

    def proposed(self, site: Site, operands: Operands, format: Format, anchor: Site) -> int | None:
        """The exponent of a site by its product's operands, whose gradient is stored at the present one."""
        alpha = self.log2_alpha(operands, format)
        # Zeros alone say nothing of how far to go.
        if math.isnan(alpha) or not bool(operands.gradient.any()):
            return None
        alpha = bounded(
            alpha,
            self.scale_bound or math.inf,
            self.accumulated_bound or math.inf,
            accumulated=2.0 ** (site.exponent - anchor.exponent),
        )
        return site.exponent + power_of_two(alpha)

    def at_the_loss(self, gradient: Tensor, format: Format, anchor: Site) -> list[int]:
        """Proposals for the site whose wide gradient is about to be rounded: none, but for those with a rule for it."""
        return []

    def exponent(self, site: Site) -> int | None:
        """The least that its products propose, as each knows how far it may go."""
        return min(site.proposals, default=None)


@dataclasses.dataclass(frozen=True)
class UnderflowBound(Published):
    """At most a share of what a product passes on may underflow, if its operands are Gaussian and independent.

    See `halfulp.gradients._estimators.underflow_bound` for the equations. At the loss, where a wide gradient is rounded
    before the first product, the rule for lognormal gradients holds (IJCAI-20).

    Args:
        version: ``"sum"`` counts the terms of each sum (IJCAI-20), ``"product"`` does not (the first paper).
        share: The share that may underflow.
    """

    version: Version = "sum"
    share: float = PAPER_SHARE

    name = "underflow-bound"

    def log2_alpha(self, operands: Operands, format: Format) -> float:
        """See the class."""
        low, high = bounds(format)
        gradient, weight = Moments.of(operands.gradient), Moments.of(operands.weight)
        return underflow_bound(
            gradient, weight, operands.fan, version=self.version, share=self.share, u_min=low, u_max=high
        )

    def at_the_loss(self, gradient: Tensor, format: Format, anchor: Site) -> list[int]:
        """What keeps a lognormal gradient, stored at the global exponent, from underflow."""
        low, high = bounds(format)
        alpha = lognormal(LogMoments.of(gradient), share=self.share, u_min=low, u_max=high)
        return [] if math.isnan(alpha) else [anchor.exponent + power_of_two(alpha)]


@dataclasses.dataclass(frozen=True)
class ElementWise(Published):
    """No single product of two elements may underflow, unless a sum could then overflow.

    Args:
        rescue_share: Only this share of the products is to be saved, the largest of them; None means all.
    """

    rescue_share: float | None = None

    name = "element-wise"

    def log2_alpha(self, operands: Operands, format: Format) -> float:
        """See `halfulp.gradients._estimators.element_wise`."""
        low, high = bounds(format)
        return element_wise(
            operands.gradient,
            operands.weight,
            u_min=low,
            u_max=high,
            fan=operands.fan,
            rescue_share=self.rescue_share,
        )


@dataclasses.dataclass(frozen=True)
class AbsRange(Published):
    """The product of the smallest operands may not underflow, unless a sum of the largest could then overflow."""

    name = "abs-range"

    def log2_alpha(self, operands: Operands, format: Format) -> float:
        """See `halfulp.gradients._estimators.abs_range`."""
        low, high = bounds(format)
        return abs_range(
            Moments.of(operands.gradient), Moments.of(operands.weight), operands.fan, u_min=low, u_max=high
        )
