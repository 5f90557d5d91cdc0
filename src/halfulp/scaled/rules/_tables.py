"""Operators whose rule is one word of the vocabulary, by family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...subclass._derivation import parse_operators
from ._vocabulary import aligned, data_movement, decoded, gated_activation, homogeneous, measured_scale, unit_scale

OPERATOR_NAMES_BY_RULE: dict[tuple[Callable[..., None], str], str] = {
    (homogeneous, "pass-through"): """
        native_dropout relu abs neg leaky_relu amax amin aminmax max max.dim min min.dim median median.dim nanmedian
        nanmedian.dim mode kthvalue cummax cummin argmax argmin all all.dim all.dims any any.dim any.dims count_nonzero
        count_nonzero.dim_IntList sort.* topk.* _unique2.* _unique.* unique_dim.* unique_consecutive.*
        unique_dim_consecutive.* max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d
        max_unpool2d max_unpool3d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d im2col col2im
        pixel_shuffle pixel_unshuffle channel_shuffle
    """,
    (data_movement, "pass-through"): """
        view _unsafe_view _reshape_alias t transpose.int permute expand slice.Tensor select.int unsqueeze squeeze
        squeeze.dim squeeze.dims alias detach split.Tensor split_with_sizes unbind.int diagonal unfold as_strided clone
        flip roll repeat index_select gather index.Tensor _unsafe_index.Tensor embedding take tril triu masked_select
        view_copy _reshape_copy _reshape_alias_copy t_copy transpose_copy.int permute_copy expand_copy slice_copy.Tensor
        select_copy.int unsqueeze_copy squeeze_copy squeeze_copy.dim squeeze_copy.dims alias_copy detach_copy
        lift_fresh_copy split_copy.Tensor split_with_sizes_copy unbind_copy.int diagonal_copy unfold_copy
        as_strided_copy narrow_copy _pack_padded_sequence_backward
    """,
    (unit_scale, "random"): "bernoulli bernoulli.Tensor bernoulli.p multinomial",
    (measured_scale, "random"): """
        normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor poisson binomial _standard_gamma
        _standard_gamma_grad _sample_dirichlet _dirichlet_grad
    """,
    (partial(homogeneous, grad_output=1), "random"): "native_dropout_backward",
    (measured_scale, "indexing"): "scatter_reduce.two index_reduce scatter.reduce scatter.value_reduce",
    (partial(homogeneous, grad_output=1), "indexing"): "embedding_dense_backward",
    (decoded, "complex"): "_fft_r2c complex polar",
    (unit_scale, "unit output"): """
        sigmoid _softmax _log_softmax cos log log2 log10 acos acosh erfc sinc logit atan2 angle special_ndtri
        special_i0e special_bessel_j0 special_spherical_bessel_j0 igamma igammac frexp.Tensor sign sgn
    """,
    (partial(homogeneous, grad_output=1), "unit output"): "tanh_backward sigmoid_backward logit_backward",
    (partial(homogeneous, degree=-1), "power law"): "reciprocal",
    (measured_scale, "power law"): "pow.Tensor_Tensor pow.Scalar",
    (gated_activation, "gated"): "gelu silu mish hardswish elu celu softshrink hardshrink glu _prelu_kernel",
    (partial(gated_activation, at_least_one=True), "gated"): "softplus log_sigmoid_forward",
    (unit_scale, "gated"): "hardsigmoid",
    (measured_scale, "gated"): "rrelu_with_noise_functional",
    (partial(homogeneous, grad_output=1), "gated"): """
        gelu_backward silu_backward mish_backward hardswish_backward hardsigmoid_backward hardtanh_backward
        leaky_relu_backward elu_backward softplus_backward softshrink_backward glu_backward log_sigmoid_backward
        rrelu_with_noise_backward threshold_backward
    """,
    (partial(homogeneous, grad_out=1), "gated"): "hardshrink_backward",
    # Functions of one element; then distances, samplers, bags and segments with their gradients: sums whose number of
    # terms depends on arguments.
    (measured_scale, "special"): """
        lgamma.* digamma.* polygamma.* mvlgamma.* xlogy.* special_xlog1py.* special_zeta.* special_entr.*
        special_log_ndtr.* special_erfcx.* i0.* logaddexp.* logaddexp2.* nextafter.* ldexp.* special_airy_ai.*
        special_bessel_y0.* special_bessel_y1.* special_modified_bessel_i0.* special_modified_bessel_k0.*
        special_modified_bessel_k1.* special_scaled_modified_bessel_k0.* special_scaled_modified_bessel_k1.*
        special_hermite_polynomial_h.* special_hermite_polynomial_he.* special_laguerre_polynomial_l.*
        special_legendre_polynomial_p.* special_chebyshev_polynomial_t.* special_chebyshev_polynomial_u.*
        special_chebyshev_polynomial_v.* special_chebyshev_polynomial_w.* special_shifted_chebyshev_polynomial_t.*
        special_shifted_chebyshev_polynomial_u.* special_shifted_chebyshev_polynomial_v.*
        special_shifted_chebyshev_polynomial_w.* _cdist_forward.* _cdist_backward.* _euclidean_dist.* _pdist_forward.*
        _pdist_backward.* renorm.* embedding_renorm.* linalg_cross.* grid_sampler_2d.* grid_sampler_2d_backward.*
        grid_sampler_3d.* grid_sampler_3d_backward.* _ctc_loss.* _embedding_bag.* _embedding_bag_forward_only.*
        _embedding_bag_dense_backward.* _embedding_bag_per_sample_weights_backward.* _embedding_bag_sparse_backward.*
        _embedding_bag_backward.* embedding_sparse_backward.* dist.* segment_reduce.* _segment_reduce_backward.*
    """,
    # Sparse results are plain: scaled tensors are dense.
    (decoded, "special"): "_sparse_coo_tensor_with_dims_and_tensors",
    (decoded, "comparison"): """
        eq.* ne.* lt.* le.* gt.* ge.* equal.* isin.* allclose.* isnan.* isinf.* isposinf.* isneginf.* signbit.*
        nonzero.* nonzero_static.* logical_not.* logical_and.* logical_or.* logical_xor.* hash_tensor.* argsort.*
        searchsorted.* bucketize.*
    """,
    (measured_scale, "alignment"): "fmod.Tensor fmod.Scalar remainder.Tensor remainder.Scalar remainder.Scalar_Tensor",
    (unit_scale, "alignment"): "heaviside",
    (partial(homogeneous, self=1, other=0), "alignment"): "copysign.Tensor",
    (partial(homogeneous, self=1), "alignment"): """
        copysign.Scalar reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
        replication_pad3d
    """,
    (partial(homogeneous, grad_output=1, self=0), "alignment"): """
        reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward
        replication_pad2d_backward replication_pad3d_backward
    """,
    (aligned, "alignment"): "slice_scatter select_scatter diagonal_scatter as_strided_scatter masked_scatter",
    (partial(homogeneous, grad_output=1), "alignment"): """
        slice_backward select_backward diagonal_backward masked_scatter_backward
    """,
    (partial(homogeneous, grad_in=1), "alignment"): "unfold_backward",
    (partial(homogeneous, self=1), "reduction"): "trace std.correction std_mean.correction",
    (measured_scale, "reduction"): "var.correction var_mean.correction",
    (partial(gated_activation, at_least_one=True), "reduction"): "logsumexp logcumsumexp",
    (measured_scale, "order"): """
        histc.* histogram.* _histogramdd_bin_edges.* _histogramdd_from_bin_cts.* _histogramdd_from_bin_tensors.*
        bincount.* round.decimals floor ceil round trunc
    """,
    (partial(homogeneous, self=1), "pooling"): "fractional_max_pool2d fractional_max_pool3d",
    (partial(homogeneous, grad_output=1, self=0), "pooling"): """
        max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward
        adaptive_max_pool3d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward avg_pool2d_backward
        avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
    """,
    (partial(homogeneous, grad_output=1), "loss"): "_log_softmax_backward_data _softmax_backward_data",
    (measured_scale, "loss"): """
        mse_loss smooth_l1_loss huber_loss soft_margin_loss multi_margin_loss multilabel_margin_loss_forward
        binary_cross_entropy binary_cross_entropy_with_logits
    """,
    (measured_scale, "norm"): "_weight_norm_interface_backward",
    # The fused attention of torch.nn's inference.
    (measured_scale, "attention"): "_native_multi_head_attention _transformer_encoder_layer_fwd",
    # Results after the states are for the backward pass, and stay plain.
    (partial(measured_scale, scaled=3), "recurrent"): "mkldnn_rnn_layer _cudnn_rnn",
    (partial(measured_scale, scaled=2), "recurrent"): "_thnn_fused_lstm_cell",
    (partial(measured_scale, scaled=1), "recurrent"): "_thnn_fused_gru_cell",
    (measured_scale, "recurrent"): """
        mkldnn_rnn_layer_backward _cudnn_rnn_backward _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell_backward
    """,
    (measured_scale, "bilinear"): """
        div.Tensor_mode div.Scalar_mode floor_divide floor_divide.Scalar _grouped_mm _trilinear conv_tbc
        conv_tbc_backward
    """,
    (measured_scale, "linear algebra"): """
        linalg_inv_ex.* linalg_solve_triangular.* triangular_solve.* linalg_cholesky_ex.* cholesky.* cholesky_solve.*
        cholesky_inverse.* linalg_lu.* linalg_lu_factor_ex.* linalg_lu_solve.* lu_unpack.* _lu_with_info.*
        linalg_ldl_factor_ex.* linalg_ldl_solve.* linalg_qr.* geqrf.* linalg_householder_product.* ormqr.* _linalg_svd.*
        _linalg_eigh.* _linalg_eigvals.* linalg_eig.* linalg_eigvals.* linalg_lstsq.* linalg_pinv.* linalg_matrix_exp.*
        _compute_linear_combination.*
    """,
}


for (_register, _family), _names in OPERATOR_NAMES_BY_RULE.items():
    _register(*parse_operators(_names), family=_family)
