"""Linear, convolution, attention and recurrent layers round float32 inputs, and saved factors of them, to the home.

In a chain of pointwise operators between two products, as `0.5 * h * (1 + torch.tanh(...))` of GPT-2, the product and
its multiplication would each keep float32 tensors for the backward pass. The product rounds its operand to the home in
any case; so one more rounding of a factor, which the gradient of the other one is multiplied by, is of the same size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map

from ..._torch_versions import HAS_SAVED_HOOKS
from ...kernels import define_operator, untraced
from ...subclass.models._module_parameters import remove_hooks
from .._registry import implements
from .._scaled_tensor import ScaledTensor
from .._storage_rules import is_above_home, round_to_home, with_float32_payload

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_LAYERS = (nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention, *_RECURRENT)

# An operator for compilers, which do not trace autograd functions that make tensor subclasses.
_bring_home = define_operator("bring_home(Tensor x) -> Tensor", lambda x: x.clone(), lambda x: torch.empty_like(x))
torch.library.register_autograd("halfulp::bring_home", lambda context, gradient: gradient)


@implements(_bring_home, family="rescaling")
def bring_home(x: ScaledTensor) -> ScaledTensor:
    """Round the values to the home storage, under a measured scale; return a copy of what is no wider."""
    return round_to_home(x) if is_above_home(x) else x.clone()


class _BringHome(torch.autograd.Function):
    """The identity up to rounding to the home; gradients pass unchanged."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: ScaledTensor) -> ScaledTensor:
        return round_to_home(x)

    @staticmethod
    def setup_context(context: Any, inputs: tuple, output: ScaledTensor) -> None:
        pass

    @staticmethod
    @untraced
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def jvp(context: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()


def install(model: nn.Module) -> None:
    """Install hooks by which layers with scaled parameters that have a home round their inputs to it."""
    for module in model.modules():
        if _is_product(module) and any(_has_home(p) for p in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_bring_inputs_home, with_kwargs=True)
            if isinstance(module, _RECURRENT):
                module.register_forward_hook(_bring_results_home)


def remove(model: nn.Module) -> None:
    """Remove the hooks of `install`."""
    remove_hooks(model.modules(), lambda hook: hook is _bring_inputs_home or hook is _bring_results_home)


def _is_product(module: nn.Module) -> bool:
    # transformers' layer of GPT-2, known by name: the library is not imported for it.
    return isinstance(module, _LAYERS) or type(module).__name__ == "Conv1D"


def _has_home(parameter: Tensor) -> bool:
    return isinstance(parameter, ScaledTensor) and parameter.home is not None


@untraced
def _bring_inputs_home(module: nn.Module, arguments: tuple, options: dict) -> tuple[tuple, dict] | None:
    """Round a layer's inputs to the home: a forward pre-hook. Compiled graphs leave it to the products' rules."""
    if torch.compiler.is_compiling() or not any(map(is_above_home, (*arguments, *options.values()))):
        return None
    for x in (*arguments, *options.values()):
        if HAS_SAVED_HOOKS and is_above_home(x) and x.grad_fn is not None:
            _narrow_last_factors(x.grad_fn)
    entered = _once_per_tensor()
    return tuple(map(entered, arguments)), {name: entered(x) for name, x in options.items()}


# Backward nodes of operators that move elements and save none of them.
_MOVES = frozenset(
    f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Clone")
)


def _narrow_last_factors(node: Any) -> None:
    """Let the multiplication that made a product's operand save its factors in the home storage.

    A factor that what computed it keeps too (a result of tanh, an operand given from outside) stays, as a narrow copy
    would be memory on top; so does what has hooks already, as of offloading and checkpointing.
    """
    while node is not None and node.name() in _MOVES:
        node = node.next_functions[0][0]
    if node is None or node.name() != "MulBackward0":
        return
    makers = [maker for maker, _ in node.next_functions]
    for maker, saved in zip(makers, (node._raw_saved_self, node._raw_saved_other)):
        is_kept = maker is None or maker.name() in _MOVES or hasattr(maker, "_raw_saved_result")
        if not is_kept and not isinstance(maker, _LEAF) and saved.unpack_hook is None and is_above_home(saved.data):
            saved.register_hooks(round_to_home, with_float32_payload)


_functions: Any = torch._C._functions
_LEAF = _functions.AccumulateGrad


@untraced
def _bring_results_home(module: nn.Module, arguments: tuple, results: Any) -> Any:
    """Round a recurrent layer's results to the home: without a fused kernel it ends in pointwise operators."""
    if torch.compiler.is_compiling():
        return tree_map(lambda x: _bring_home(x) if isinstance(x, ScaledTensor) else x, results)
    return tree_map(lambda x: _BringHome.apply(x) if is_above_home(x) else x, results)


def _once_per_tensor() -> Callable[[Any], Any]:
    """Return a conversion with one result for one tensor: attention asks whether query, key and value are the same."""
    found: dict[int, Tensor] = {}

    def entered(x: Any) -> Any:
        if not is_above_home(x):
            return x
        if id(x) not in found:
            found[id(x)] = _BringHome.apply(x)
        return found[id(x)]

    return entered
