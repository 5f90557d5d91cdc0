"""Policies of "Adaptive Loss Scaling" and "Gradient Scaling", and their rules: from statistics to a scale's logarithm.

Zhao, Vogel, Ahmed, "Adaptive Loss Scaling for Mixed Precision Training" (arXiv 1910.12385) and "Gradient Scaling"
(IJCAI-20). Every rule gives the two bounds of log2(alpha), NaN where a number is not finite, and none where there is
nothing to scale. Everywhere ``u_min`` and ``u_max`` are the smallest positive and the largest number of the format, and
``fan`` is K, the terms in each sum: out_features of a linear layer, out_channels x kernel size of a convolution.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import Format
from ._functions import BackwardProductOperands
from ._policy import Policy
from ._site import MAX_EXPONENT, Site


@dataclasses.dataclass(frozen=True)
class OperandStats:
    """Statistics of a tensor that the rules read."""

    # Over all elements, zeros too; std divides by the count (no Bessel correction).
    mean: float
    std: float
    amax: float
    # Least magnitude of the elements that are not zero; 0 where there is none.
    smallest_nonzero: float
    # False if an element is NaN or infinite; mean and std mean nothing then.
    is_finite: bool

    @classmethod
    def measure(cls, x: Tensor) -> OperandStats:
        """Measure a floating-point tensor of any shape on its device, with one copy to the host.

        Sums are made in float32 (float64 for a float64 tensor) of x divided by its largest magnitude, so that the
        squares of no finite tensor overflow or vanish.

        >>> OperandStats.measure(torch.tensor([0.0, -4.0, 1.0, 3.0]))
        OperandStats(mean=0.0, std=2.549..., amax=4.0, smallest_nonzero=1.0, is_finite=True)
        """
        x = widen_to_float32(x)
        if not x.numel():
            return cls(0.0, 0.0, 0.0, 0.0, True)
        low, high = torch.aminmax(x)
        amax = torch.maximum(-low, high)
        unit = x / torch.where(amax > 0, amax, 1)
        mean = unit.mean()
        # CUDA means are sums times a rounded 1 / count: equal numbers may lie a rounding beside theirs.
        std = torch.where(low == high, 0, (unit - mean).square().mean().sqrt())
        smallest = torch.where(x == 0, torch.inf, x.abs()).amin()
        mean, std, amax, smallest = torch.stack([mean, std, amax, smallest]).tolist()
        return cls(mean * amax, std * amax, amax, smallest if amax else 0.0, math.isfinite(amax))


def widen_to_float32(x: Tensor) -> Tensor:
    """Return a tensor's real numbers in float32, or float64 as they are; no gradient flows back."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)


# The papers' constants.
PAPER_UNDERFLOW_SHARE = 1e-3
PAPER_LEAST_PRODUCT_OF_MINIMA = 1e-15  # abs_range takes no product of minima for smaller than this

_LOG2_ROUNDING_ERROR = 2.0**-36  # a sum of a few logarithms below 2^11 is nearer than this to the true one


class LogScaleBounds(NamedTuple):
    """Bounds of log2(alpha): alpha is at least 1 and what keeps from underflow, unless an overflow forbids it."""

    # -infinity where nothing asks for it.
    lower: float
    # It wins; infinity where nothing could overflow.
    upper: float

    @property
    def log2_alpha(self) -> float:
        """The rule's result, min(max(lower, 0), upper)."""
        return min(max(self.lower, 0.0), self.upper)


UNLIMITED_LOG_SCALE_BOUNDS = LogScaleBounds(-math.inf, math.inf)
# Of operands that are not finite.
_NAN_LOG_SCALE_BOUNDS = LogScaleBounds(math.nan, math.nan)


def bound_log_scale(
    gradient: OperandStats,
    weight: OperandStats | None = None,
    fan: int = 1,
    *,
    share: float = PAPER_UNDERFLOW_SHARE,
    u_min: float,
    u_max: float,
) -> LogScaleBounds:
    """Return the papers' rule: the least scale at which a Gaussian output underflows with probability ``share``.

    The gradient g (with moments mu_g, s_g) meets the weight W in sums of K = ``fan`` products. With
    P(|alpha o| < u_min) = erf(u_min / (sqrt(2) alpha s_o)) <= share,

        alpha = max(u_min / (sqrt(2) erfinv(share) s_o), 1), at most u_max / (K max|g| max|W|)
        s_o^2 = 0.5 K (s_g^2 + mu_g^2) (s_W^2 + mu_W^2)     (IJCAI-20; a ReLU keeps half of the terms)

    Without a weight o is the gradient: s_o = s_g, and K = 1 whatever ``fan`` says. The upper bound may be less than 1,
    and wins. s_o = 0 gives alpha = 1. arXiv 1910.12385 has the same rule without 0.5 K.

    >>> g, w = OperandStats.measure(torch.tensor([-1e-6, 1e-6])), OperandStats.measure(torch.tensor([-1.0, 1.0]))
    >>> bound_log_scale(g, w, 512, u_min=6e-8, u_max=65504.0).log2_alpha
    1.581...
    """
    if not (gradient.is_finite and (weight is None or weight.is_finite)):
        return _NAN_LOG_SCALE_BOUNDS
    if weight is None:
        log_sigma, log_largest = _compute_log2(gradient.std), _compute_log2(gradient.amax)
    else:
        log_sigma = _compute_log2(math.hypot(gradient.std, gradient.mean)) + _compute_log2(
            math.hypot(weight.std, weight.mean)
        )
        log_sigma += 0.5 * math.log2(0.5 * fan)
        # The largest of the four corner products of the two ranges is the product of the largest magnitudes.
        log_largest = math.log2(fan) + _compute_log2(gradient.amax) + _compute_log2(weight.amax)
    if log_sigma == -math.inf:
        return UNLIMITED_LOG_SCALE_BOUNDS
    threshold = math.sqrt(2) * torch.special.erfinv(torch.tensor(share, dtype=torch.float64, device="cpu")).item()
    return LogScaleBounds(math.log2(u_min) - math.log2(threshold) - log_sigma, math.log2(u_max) - log_largest)


def floor_log2_with_tolerance(log2_alpha: float) -> int:
    """Return floor(log2 alpha), of a log2 alpha that may lie a rounding short of a whole number."""
    # Logarithms may leave an exact power of two a rounding short of its exponent.
    return math.floor(log2_alpha + _LOG2_ROUNDING_ERROR)


def _compute_log2(value: float) -> float:
    return math.log2(value) if value else -math.inf


def _find_column_extremes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least nonzero magnitude (else infinity) and the largest one of every column."""
    size = rows.abs()
    return torch.where(size == 0, torch.inf, size).amin(0), size.amax(0)


# the policies -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OperandStatisticsPolicy(Policy):
    """Base of the policies of Zhao et al. (arXiv 1910.12385, IJCAI-20), which read each product's operands.

    Each gives alpha, by which a product's gradient should be multiplied so that what the product passes on stays in
    range, as a lower bound against underflow and an upper one against overflow; of all products of a site the largest
    lower bound holds, and then the smallest upper one. Statistics are made, and copied to the host
    product by product, in measured iterations only.
    """

    wants_operands = True

    @abc.abstractmethod
    def list_bounds_by_each_rule(self, operands: BackwardProductOperands, format: Format) -> list[LogScaleBounds]:
        """Return the bounds of log2 alpha, by each rule of the policy; NaN where an operand is not finite."""

    def propose_exponent_bounds(
        self, site: Site, operands: BackwardProductOperands, format: Format
    ) -> tuple[int, int] | None:
        """Return the bounds of a site's exponent by a product's operands; the gradient is stored at the present one."""
        # Zeros alone say nothing of how far to go.
        if not bool(operands.gradient.any()):
            return None
        bounds = self.list_bounds_by_each_rule(operands, format)
        if any(math.isnan(one.upper) for one in bounds):
            return None
        lower, upper = max([0.0, *(one.lower for one in bounds)]), min(one.upper for one in bounds)
        # Up for what must be reached, down for what must not be passed.
        least = site.exponent - floor_log2_with_tolerance(-lower)
        return least, MAX_EXPONENT if upper == math.inf else site.exponent + floor_log2_with_tolerance(upper)

    def exponent(self, site: Site) -> int | None:
        """Return the largest lower bound of all proposals, at most the smallest upper one."""
        if not site.proposed_bounds:
            return None
        return min(max(least for least, _ in site.proposed_bounds), min(most for _, most in site.proposed_bounds))


@dataclasses.dataclass(frozen=True)
class UnderflowBound(OperandStatisticsPolicy):
    """Lets at most a share of a product's outputs underflow, if its operands are Gaussian and independent.

    See `bound_log_scale` for the equations: the rule for the product and the one for the gradient alone hold together.

    Args:
        share: The share that may underflow.
    """

    share: float = PAPER_UNDERFLOW_SHARE

    name = "underflow-bound"

    def __post_init__(self) -> None:
        if not isinstance(self.share, (int, float)) or not 0 < self.share < 1:
            raise ValueError(f"share is between 0 and 1, both excluded; got {self.share!r}")

    def list_bounds_by_each_rule(self, operands: BackwardProductOperands, format: Format) -> list[LogScaleBounds]:
        """Return the bounds by the rule for the product and by the one for the gradient alone."""
        limits: dict[str, Any] = {"share": self.share, "u_min": format.smallest_subnormal, "u_max": format.max}
        gradient, weight = OperandStats.measure(operands.gradient), OperandStats.measure(operands.weight)
        return [bound_log_scale(gradient, weight, operands.fan, **limits), bound_log_scale(gradient, **limits)]


@dataclasses.dataclass(frozen=True)
class ElementWise(OperandStatisticsPolicy):
    """No single product of two elements may underflow, unless a sum could then overflow.

    Of every product p = g_ik w_kj that is not zero, without making them: only the extremes of |g_ik| and |w_kj| for
    every inner index k count.

        alpha = min(max over p of max(u_min / |p|, 1), min over p of u_max / (K |p|))
    """

    name = "element-wise"

    def list_bounds_by_each_rule(self, operands: BackwardProductOperands, format: Format) -> list[LogScaleBounds]:
        """Return the bounds that the class describes."""
        g, w = widen_to_float32(operands.gradient), widen_to_float32(operands.weight)
        if not (g.numel() and w.numel()):
            return [UNLIMITED_LOG_SCALE_BOUNDS]
        g, w = g.reshape(-1, g.shape[-1]), w.reshape(w.shape[0], -1).T
        table = torch.stack([*_find_column_extremes(g), *_find_column_extremes(w)]).to("cpu").double().log2()
        if not (table[1::2] < math.inf).all():
            return [_NAN_LOG_SCALE_BOUNDS]
        least, largest = (table[0] + table[2]).min().item(), (table[1] + table[3]).max().item()
        if largest == -math.inf:
            return [UNLIMITED_LOG_SCALE_BOUNDS]
        log_fan = math.log2(operands.fan)
        return [
            LogScaleBounds(math.log2(format.smallest_subnormal) - least, math.log2(format.max) - (log_fan + largest))
        ]


@dataclasses.dataclass(frozen=True)
class AbsRange(OperandStatisticsPolicy):
    """The product of the smallest operands may not underflow, unless a sum of the largest could then overflow.

    It lifts that product as if it occurred:

        alpha = max((u_min / K) / max(min|g| min|W|, 1e-15), 1), at most (u_max / K) / (max|g| max|W|)

    over the elements that are not zero. That u_min is divided by K too is the papers' code's choice.
    """

    name = "abs-range"

    def list_bounds_by_each_rule(self, operands: BackwardProductOperands, format: Format) -> list[LogScaleBounds]:
        """Return the bounds that the class describes."""
        gradient, weight = OperandStats.measure(operands.gradient), OperandStats.measure(operands.weight)
        if not (gradient.is_finite and weight.is_finite):
            return [_NAN_LOG_SCALE_BOUNDS]
        if not (gradient.amax and weight.amax):
            return [UNLIMITED_LOG_SCALE_BOUNDS]
        log_fan = math.log2(operands.fan)
        minima = math.log2(gradient.smallest_nonzero) + math.log2(weight.smallest_nonzero)
        least = max(minima, math.log2(PAPER_LEAST_PRODUCT_OF_MINIMA))
        largest = math.log2(gradient.amax) + math.log2(weight.amax)
        u_min, u_max = format.smallest_subnormal, format.max
        return [LogScaleBounds(math.log2(u_min) - log_fan - least, math.log2(u_max) - (log_fan + largest))]
