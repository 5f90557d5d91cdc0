"""Operators that are taken apart, or whose operands are encoded, before autograd sees them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from ..kernels import hide_own_frames_from_compiler, list_present_operators
from ..kernels._threads import hold_while_forking
from ..subclass._derivation import aten, find_functional_form, parse_operators
from ._derivation import make_unrounded_writing_rule, note_float64_fallback
from ._mctensor import ENTRY_DISPATCH_KEY, ENTRY_DISPATCH_KEY_NAME, MCTensor, attach_autograd_history
from ._result_type import (
    ResultType,
    encode_plain_operands,
    has_plain_operand,
    is_plain_floating,
    make_result,
    result_type,
)

# Those whose operands must all have one dtype.
SAME_DTYPE_OPERATORS = parse_operators("""
    conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution conv_tbc prelu bilinear linear matmul mm bmm mv dot addmm baddbmm addmv addbmm
    addr inner tensordot outer vdot
""")


def promote_operands(arguments: tuple, options: dict) -> tuple[tuple, dict]:
    """Make all floating tensors MCTensors of the promoted dtype, where one is an MCTensor and dtypes differ."""
    tensors = [x for x in (*arguments, *options.values()) if isinstance(x, Tensor) and x.is_floating_point()]
    if len({x.dtype for x in tensors}) <= 1 or not any(isinstance(x, MCTensor) for x in tensors):
        return arguments, options
    form = result_type(tensors)

    def promote(x: Any) -> Any:
        if isinstance(x, MCTensor):
            return x.to(form.dtype) if x.dtype != form.dtype else x
        return encode_plain_operands(x, form, with_gradients=True) if is_plain_floating(x) else x

    return tuple(map(promote, arguments)), {name: promote(x) for name, x in options.items()}


def _encode_operands_of_mctensors(arguments: tuple, options: dict) -> tuple[tuple, dict] | None:
    """Return arguments with plain floating tensors encoded, gradients flowing back; None where none is an MCTensor."""
    leaves = [x for x in tree_leaves((arguments, options)) if isinstance(x, Tensor)]
    if not any(isinstance(x, MCTensor) for x in leaves):
        return None
    if not has_plain_operand(arguments, options):
        return arguments, options
    return encode_plain_operands((arguments, options), result_type(leaves), with_gradients=True)


def _run_steps_on_encoded_operands(steps: Callable, *arguments: Any, **options: Any) -> Any:
    encoded = _encode_operands_of_mctensors(arguments, options)
    return NotImplemented if encoded is None else steps(*encoded[0], **encoded[1])


def _run_where_with_number(condition: Tensor, a: Any, b: Any) -> Any:
    """a where the condition holds, b elsewhere, one of which is a number, and leaves the other's dtype."""
    x, value = (a, b) if isinstance(a, Tensor) else (b, a)
    if not isinstance(x, MCTensor) or isinstance(value, complex):
        return NotImplemented
    if x.dim():
        number = torch.scalar_tensor(value, dtype=torch.float64, device=x.device)
    else:
        number = MCTensor.encode(value, len(x._parts), x.dtype, device=x.device)
    return torch.where(condition, x, number) if x is a else torch.where(condition, number, x)


def _find_quantile(
    operator: OpOverload, x: Any, q: float, dim: int | None = None, keepdim: bool = False, **options: Any
) -> Any:
    if not isinstance(x, MCTensor):
        return NotImplemented
    at = MCTensor.encode(q, max(2, len(x._parts)), x.dtype, device=x.device)
    return operator(x, at, dim, keepdim, **options)


def rms_norm(x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    """x / sqrt(mean(x^2) + eps), times a weight."""
    if eps is None or list(x.shape[x.dim() - len(shape) :]) != list(shape):
        return NotImplemented
    mean = x.square().mean(list(range(-len(shape), 0)), keepdim=True)
    y = x * torch.rsqrt(mean + eps)
    return y if weight is None else y * weight


def cosine_similarity(a: Any, b: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Sum a / max(|a|, eps) times b / max(|b|, eps), with the gradients that torch gives it."""
    a, b = torch.broadcast_tensors(a, b)
    return (_divide_by_norm(a, dim, eps) * _divide_by_norm(b, dim, eps)).sum(dim)


def _divide_by_norm(x: Tensor, dim: int, eps: float) -> Tensor:
    size = torch.linalg.vector_norm(x, 2, dim, True).clone()
    with torch.no_grad():
        size.clamp_min_(eps)
    return x / size


def _refuse_mctensors(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
    if any(isinstance(x, MCTensor) for x in tree_leaves(arguments)):
        raise NotImplementedError(f"{operator} writes one component into a plain tensor: give it x.decode()")
    return NotImplemented


# Those in which operands meet one another, or a constant, before they meet all others. Those that hand all operands to
# one operator with a rule, as linear does, and those that write running statistics, as batch_norm, need none.
ENCODED_COMPOSITE_OPERATORS = parse_operators("""
    einsum linalg_multi_dot chain_matmul bilinear rms_norm _weight_norm kl_div poisson_nll_loss margin_ranking_loss
    hinge_embedding_loss cosine_embedding_loss triplet_margin_loss multilabel_margin_loss cross_entropy_loss
    grid_sampler cosine_similarity pairwise_distance cdist isclose lstm.input gru.input rnn_tanh.input rnn_relu.input
    lstm.data gru.data rnn_tanh.data rnn_relu.data lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell trapezoid.x trapz.x
    cumulative_trapezoid.x cov quantile gradient.tensorarray gradient.tensorarrayint nanquantile
    float_power.Tensor_Tensor float_power.Scalar float_power.Tensor_Scalar
""")
# Those with one rule whose derivative has a step of plain operands alone: what autograd saves has components too.
ENCODED_DIFFERENTIABLE_OPERATORS = parse_operators("""
    addcmul addcdiv lerp.Tensor atan2 pow.Tensor_Tensor ldexp.Tensor xlogy.Tensor special_xlog1py
    binary_cross_entropy_with_logits binary_cross_entropy
""")
# Keys above would find the way back to this one.
_DISPATCH_KEYS_BELOW_ENTRY = torch._C._dispatch_keyset_full_after(ENTRY_DISPATCH_KEY)
_aten_library = torch.library.Library("aten", "IMPL")
# Held while mkldnn is off for the process: its LSTM reads memory as plain numbers.
_mkldnn_lock = threading.RLock()
hold_while_forking(_mkldnn_lock)


def _make_entry_kernel(operator: OpOverload) -> Callable:
    """Return an operator's kernel for the key: its own function, else torch's steps on operands with components."""
    own, is_promoted = FUNCTION_BY_ENTRY_OPERATOR.get(operator), operator in SAME_DTYPE_OPERATORS
    is_encoded = operator in ENCODED_COMPOSITE_OPERATORS or operator in ENCODED_DIFFERENTIABLE_OPERATORS

    def run_entry(keys: torch._C.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        # Inside a transform of torch.func a tensor may be one of its own around an MCTensor.
        if torch._C._functorch.peek_interpreter_stack() is None:
            result = NotImplemented if own is None else own(*arguments, **options)
            if result is not NotImplemented:
                return result
            if is_promoted:
                arguments, options = promote_operands(arguments, options)
            if is_encoded and has_plain_operand(arguments, options):
                arguments, options = _encode_operands_of_mctensors(arguments, options) or (arguments, options)
        if operator is not aten.lstm.input:
            return operator.redispatch(keys & _DISPATCH_KEYS_BELOW_ENTRY, *arguments, **options)
        with _mkldnn_lock:
            before = torch._C._get_mkldnn_enabled()
            torch._C._set_mkldnn_enabled(False)
            try:
                return operator.redispatch(keys & _DISPATCH_KEYS_BELOW_ENTRY, *arguments, **options)
            finally:
                torch._C._set_mkldnn_enabled(before)

    return hide_own_frames_from_compiler(run_entry)


def _run_on_decoded_operands(operator: OpOverload, arguments: tuple, options: dict, form: ResultType) -> Any:
    """Run an operator, with autograd, on the values in float64, and return the result as an MCTensor of a type."""

    def decode(x: Any) -> Any:
        if isinstance(x, MCTensor):
            return x.decode(torch.float64)
        return x.double() if is_plain_floating(x) else x

    wide = operator(*map(decode, arguments), **{name: decode(x) for name, x in options.items()})
    return attach_autograd_history(wide, make_result((wide.detach(),), form))


def _interpolate_in_float64(operator: OpOverload, x: Any, *arguments: Any, **options: Any) -> Any:
    """Interpolate in float64, counted: torch's own steps would round the weights to the components' dtype."""
    if not isinstance(x, MCTensor) or (form := result_type((x,))).fits_float64:
        return NotImplemented
    note_float64_fallback(operator, form)
    return _run_on_decoded_operands(operator, (x, *arguments), options, form)


def _attend_in_float64(*arguments: Any, **options: Any) -> Any:
    """Run attention in float64, counted where that does not hold the digits."""
    tensors = [x for x in (*arguments, *options.values()) if isinstance(x, Tensor)]
    if not any(isinstance(x, MCTensor) for x in tensors):
        return NotImplemented
    device = tensors[0].device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return NotImplemented  # autocast converts the operands and comes back
    form, operator = result_type(tensors), aten.scaled_dot_product_attention.default
    if not form.fits_float64:
        note_float64_fallback(operator, form)
    return _run_on_decoded_operands(operator, arguments, options, form)


_INTERPOLATIONS = parse_operators("""
    upsample_linear1d upsample_linear1d.vec upsample_bilinear2d upsample_bilinear2d.vec upsample_trilinear3d
    upsample_trilinear3d.vec upsample_bicubic2d upsample_bicubic2d.vec
""")
# Those with a function of their own, which gives NotImplemented where torch's steps hold all digits.
FUNCTION_BY_ENTRY_OPERATOR: dict[OpOverload, Callable[..., Any]] = {
    aten.rms_norm.default: functools.partial(_run_steps_on_encoded_operands, rms_norm),
    aten.cosine_similarity.default: functools.partial(_run_steps_on_encoded_operands, cosine_similarity),
    aten.scaled_dot_product_attention.default: _attend_in_float64,
    **{operator: functools.partial(_interpolate_in_float64, operator) for operator in _INTERPOLATIONS},
    aten.where.ScalarOther: _run_where_with_number,
    aten.where.ScalarSelf: _run_where_with_number,
    aten.quantile.scalar: functools.partial(_find_quantile, aten.quantile.default),
    aten.nanquantile.scalar: functools.partial(_find_quantile, aten.nanquantile.default),
    **{
        operator: functools.partial(_refuse_mctensors, operator)
        for operator in parse_operators("""
            vander normal.float_Tensor pad_sequence _pack_padded_sequence _pad_packed_sequence linspace.Tensor_Tensor
            linspace.Tensor_Scalar linspace.Scalar_Tensor logspace.Tensor_Tensor logspace.Tensor_Scalar
            logspace.Scalar_Tensor
        """)
    },
    # They put a tensor subclass's result in another tensor than the one given, which stays as it was.
    **{
        operator: make_unrounded_writing_rule(operator, form)
        for operator in (getattr(aten.linalg_matrix_rank, name) for name in aten.linalg_matrix_rank.overloads())
        if "out" in operator._overloadname and (form := find_functional_form(operator)) is not None
    },
}

_entry_operators = [*ENCODED_COMPOSITE_OPERATORS, *ENCODED_DIFFERENTIABLE_OPERATORS, *SAME_DTYPE_OPERATORS]
for _operator in list_present_operators(dict.fromkeys((*_entry_operators, *FUNCTION_BY_ENTRY_OPERATOR))):
    _name = _operator.name().removeprefix("aten::")
    _aten_library.impl(_name, _make_entry_kernel(_operator), ENTRY_DISPATCH_KEY_NAME, with_keyset=True)
