"""Rules of functions that no power law describes: computed on values in float32, the scale of results measured."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....kernels import torch_operators
from ..._operands import encode_values, logical_of, storage_of
from ..._registry import implements
from .._results import value_of
from .._vocabulary import decoded, measured_scale, overloads

aten = torch_operators("aten")

measured_scale(
    *overloads(aten.lgamma, aten.digamma, aten.polygamma, aten.mvlgamma, aten.xlogy, aten.special_xlog1py),
    *overloads(aten.special_zeta, aten.special_entr, aten.special_log_ndtr, aten.special_erfcx, aten.i0),
    *overloads(aten.logaddexp, aten.logaddexp2, aten.nextafter, aten.ldexp, aten.special_airy_ai),
    *overloads(aten.special_bessel_y0, aten.special_bessel_y1, aten.special_modified_bessel_i0),
    *overloads(aten.special_modified_bessel_k0, aten.special_modified_bessel_k1),
    *overloads(aten.special_scaled_modified_bessel_k0, aten.special_scaled_modified_bessel_k1),
    *overloads(aten.special_hermite_polynomial_h, aten.special_hermite_polynomial_he),
    *overloads(aten.special_laguerre_polynomial_l, aten.special_legendre_polynomial_p),
    *overloads(aten.special_chebyshev_polynomial_t, aten.special_chebyshev_polynomial_u),
    *overloads(aten.special_chebyshev_polynomial_v, aten.special_chebyshev_polynomial_w),
    *overloads(aten.special_shifted_chebyshev_polynomial_t, aten.special_shifted_chebyshev_polynomial_u),
    *overloads(aten.special_shifted_chebyshev_polynomial_v, aten.special_shifted_chebyshev_polynomial_w),
    family="special",
)
# Distances, samplers, bags and segments, with their gradients: sums whose number of terms depends on arguments.
measured_scale(
    *overloads(aten._cdist_forward, aten._cdist_backward, aten._euclidean_dist, aten._pdist_forward),
    *overloads(aten._pdist_backward, aten.renorm, aten.embedding_renorm, aten.linalg_cross),
    *overloads(aten.grid_sampler_2d, aten.grid_sampler_2d_backward, aten.grid_sampler_3d),
    *overloads(aten.grid_sampler_3d_backward, aten._ctc_loss),
    *overloads(aten._embedding_bag, aten._embedding_bag_forward_only, aten._embedding_bag_dense_backward),
    *overloads(aten._embedding_bag_per_sample_weights_backward, aten._embedding_bag_sparse_backward),
    *overloads(aten._embedding_bag_backward, aten.embedding_sparse_backward, aten.dist),
    *overloads(aten.segment_reduce, aten._segment_reduce_backward),
    family="special",
)


@implements(*overloads(aten._ctc_loss_backward), family="special")
def ctc_loss_backward(
    gradient: Any, x: Any, targets: Tensor, lengths: Any, target_lengths: Any, loss: Any, alpha: Any, *options: Any
) -> Tensor:
    """The gradient from a loss and path sums computed again: rounded, large logarithms are wrong by factors."""
    given = (gradient, x)
    values = value_of(x)
    operator = aten._ctc_loss.Tensor if isinstance(lengths, Tensor) else aten._ctc_loss.default
    backward = aten._ctc_loss_backward.Tensor if isinstance(lengths, Tensor) else aten._ctc_loss_backward.default
    loss, alpha = operator(values, targets, lengths, target_lengths, *options)
    found = backward(value_of(gradient), values, targets, lengths, target_lengths, loss, alpha, *options)
    return encode_values(found, storage_of(given), dtype=logical_of(given))


# Sparse results are plain: scaled tensors are dense.
decoded(aten._sparse_coo_tensor_with_dims_and_tensors.default, family="special")
