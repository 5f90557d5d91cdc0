"""Composite operators, decomposed or differentiated above __torch_dispatch__: plain operands are encoded before.

`torch.einsum("ij,jk,kl", a, b, c)` multiplies a and b first; where these are plain, no rule of an MCTensor c sees it.
Such an operator has a kernel under a dispatch key that MCTensors carry and no other tensor does: every other operator
falls through it, which costs nothing, and no call without an MCTensor meets it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from ...kernels import present, torch_operators, untraced
from ...subclass._in_backward import refuse_jvp
from ...subclass._rule_table import functional_form
from .._derivation import write_results
from .._formula_constants import IRRATIONAL, formula
from .._mctensor import ENTRY_KEY, ENTRY_KEY_NAME, MCTensor
from .._plain_operands import encode_plain_operands, has_plain
from .._result_type import result_type
from ..rules.elementwise._powers import constant
from ..rules.networks._interpolation import BY_FACTORS, FORWARD
from . import _number_arguments, _plain_results
from ._promoted_operands import PROMOTED, in_one_dtype, of_several_dtypes

aten = torch_operators("aten")
# The mode in which AOTAutograd traces: older versions of torch say that they compile to Dynamo alone.
_FAKE = torch._C._TorchDispatchModeKey.FAKE

# Those in which operands meet one another, or a constant, before they meet all others. Those that hand all operands to
# one operator with a rule, as linear does, and those that write running statistics, as batch_norm, need none.
COMPOSITES = (
    *(aten.einsum.default, aten.linalg_multi_dot.default, aten.chain_matmul.default, aten.bilinear.default),
    *(aten.scaled_dot_product_attention.default, aten.rms_norm.default, aten._weight_norm.default),
    *(aten.kl_div.default, aten.poisson_nll_loss.default, aten.margin_ranking_loss.default),
    *(aten.hinge_embedding_loss.default, aten.cosine_embedding_loss.default, aten.triplet_margin_loss.default),
    *(aten.multilabel_margin_loss.default, aten.cross_entropy_loss.default, aten.grid_sampler.default),
    *(aten.cosine_similarity.default, aten.pairwise_distance.default, aten.cdist.default, aten.isclose.default),
    *(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input),
    *(aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data),
    *(aten.lstm_cell.default, aten.gru_cell.default, aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default),
    *(aten.trapezoid.x, aten.trapz.x, aten.cumulative_trapezoid.x, aten.cov.default, aten.quantile.default),
    *(aten.gradient.tensorarray, aten.gradient.tensorarrayint, aten.nanquantile.default),
    *(aten.float_power.Tensor_Tensor, aten.float_power.Scalar, aten.float_power.Tensor_Scalar),
)
# Those with one rule whose derivative has a step of plain operands alone: what autograd saves has components too.
DIFFERENTIATED = (
    *(aten.addcmul.default, aten.addcdiv.default, aten.lerp.Tensor, aten.atan2.default),
    *(aten.pow.Tensor_Tensor, aten.ldexp.Tensor, aten.xlogy.Tensor, aten.special_xlog1py.default),
    *(aten.binary_cross_entropy_with_logits.default, aten.binary_cross_entropy.default),
)
# Those that put a tensor subclass's result in another tensor than the one given, which stays as it was.
REPLACED = tuple(
    getattr(aten.linalg_matrix_rank, name) for name in aten.linalg_matrix_rank.overloads() if "out" in name
)
_PROMOTED = frozenset(present(PROMOTED))
# Keys above would find the way back to this one.
_BELOW = torch._C._dispatch_keyset_full_after(ENTRY_KEY)
_library = torch.library.Library("aten", "IMPL")


def _entry(operator: OpOverload) -> Callable:
    """An operator's kernel under the key: its function in OWN, else torch's steps of operands that have components."""
    own, is_promoted, is_formula = OWN.get(operator), operator in _PROMOTED, operator in _FORMULAS

    def entered(keys: torch._C.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        # Inside a transform of torch.func a tensor may be one of its own around an MCTensor.
        if torch._C._functorch.peek_interpreter_stack() is None:
            result = NotImplemented if own is None else own(*arguments, **options)
            if result is not NotImplemented:
                return result
            if is_promoted and of_several_dtypes((*arguments, *options.values())):
                refuse_jvp((x for x in arguments if isinstance(x, Tensor)), str(operator))
                arguments, options = in_one_dtype((arguments, options))
            if is_formula and has_plain(arguments, options):
                leaves = [x for x in tree_leaves((arguments, options)) if isinstance(x, Tensor)]
                if any(isinstance(x, MCTensor) for x in leaves):
                    form = result_type(leaves)
                    arguments, options = encode_plain_operands((arguments, options), form, with_gradients=True)
        with formula(operator, (arguments, options)) if is_formula else nullcontext():
            return operator.redispatch(keys & _BELOW, *arguments, **options)

    return untraced(entered)


def ndtr(x: MCTensor) -> Tensor:
    """The normal distribution: torch's formula, 1 + erf, has no digits far below zero."""
    factor = constant(f"-{IRRATIONAL['1 / sqrt 2']}", x)
    # Without dimensions it leaves the dtype of what has some.
    factor = MCTensor.encode(factor, len(x._parts), torch.float64 if x.dim() else x.dtype)
    return torch.erfc(x * factor) * 0.5


def _in_compiled_steps(steps: Callable) -> Callable:
    """Interpolation where a compiler traces: torch takes it apart there before a rule is asked."""

    def interpolate(x: Any, *arguments: Any, **options: Any) -> Any:
        traced = torch.compiler.is_compiling() or torch._C._get_dispatch_mode(_FAKE) is not None
        if not traced or not isinstance(x, MCTensor) or result_type((x,)).fits_float64:
            return NotImplemented
        return steps(x, *arguments, **options)

    return interpolate


# Those with a function of their own, which gives NotImplemented where torch's steps hold all digits.
OWN = {aten.special_ndtr.default: ndtr}
OWN |= {operator: _in_compiled_steps(rule) for operator, rule in (FORWARD | BY_FACTORS).items()}
_FORMULAS = frozenset(present((*COMPOSITES, *DIFFERENTIATED)))
OWN |= _number_arguments.OWN | _plain_results.OWN


def _with_out(operator: OpOverload) -> Callable:
    functional = functional_form(operator)
    assert functional is not None

    def entered(keys: torch._C.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        return write_results(operator, functional, *arguments, **options)

    return untraced(entered)


_ENTERED = dict.fromkeys((*COMPOSITES, *DIFFERENTIATED, *OWN, *PROMOTED))
for _operators, _entering in ((_ENTERED, _entry), (REPLACED, _with_out)):
    for _operator in present(_operators):
        _name = _operator.name().removeprefix("aten::")
        _library.impl(_name, _entering(_operator), ENTRY_KEY_NAME, with_keyset=True)
