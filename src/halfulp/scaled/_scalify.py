"""Models and functions on scaled tensors: their parameters, their inputs, their product layers, and the way back."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map

from .._messages import name_type
from ..kernels import define_operator, hide_own_frames_from_compiler
from ..subclass.models._conversion import (
    ParameterRef,
    ParameterSelector,
    check_module_takes_conversion,
    copy_attributes,
    decode_parameter,
    list_matching_parameters,
    list_module_parameters,
    remove_forward_hooks,
    replace_parameters,
)
from ..subclass.models._float32_products import get_original_class
from ._float8 import linear_fp8
from ._operands import WideMode, choose_home_for_storage, encode_plain_tensor, is_wider_than_home, round_to_home
from ._registry import FULL_RANGE_STORAGES, LOGICAL_DTYPES, check_storage_dtype, implements
from ._rescale import InputGradientRescaling, find_rescaled_modules, rescale_input_gradient
from ._scaled_tensor import ScaledTensor, apply_conversion

_RECURRENT_CLASSES = (nn.RNNBase, nn.RNNCellBase)
_PRODUCT_LAYER_CLASSES = (nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention, *_RECURRENT_CLASSES)

# An operator for compilers, which do not trace autograd functions that make tensor subclasses.
_round_to_home_operator = define_operator(
    "bring_home(Tensor x) -> Tensor", lambda x: x.clone(), lambda x: torch.empty_like(x)
)
torch.library.register_autograd("halfulp::bring_home", lambda context, gradient: gradient)


@implements(_round_to_home_operator, family="rescaling")
def round_copy_to_home(x: ScaledTensor) -> ScaledTensor:
    """Round the values to the home storage, under a measured scale; return a copy of what is no wider."""
    return round_to_home(x) if is_wider_than_home(x) else x.clone()


@hide_own_frames_from_compiler
def _round_inputs_to_home(
    module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Round a layer's inputs to the home: a forward pre-hook. Compiled graphs leave it to the products' rules."""
    if torch.compiler.is_compiling() or not any(map(is_wider_than_home, (*arguments, *options.values()))):
        return None
    found: dict[int, Any] = {}  # attention asks whether query, key and value are the same

    def round_once(x: Any) -> Any:
        if id(x) not in found:
            found[id(x)] = apply_conversion(x, round_to_home, None) if is_wider_than_home(x) else x
        return found[id(x)]

    return tuple(map(round_once, arguments)), {name: round_once(x) for name, x in options.items()}


@hide_own_frames_from_compiler
def _round_results_to_home(module: nn.Module, arguments: tuple[Any, ...], results: Any) -> Any:
    """Round a recurrent layer's results to the home: without a fused kernel it ends in pointwise operators."""
    if torch.compiler.is_compiling():
        return tree_map(lambda x: _round_to_home_operator(x) if isinstance(x, ScaledTensor) else x, results)
    return tree_map(lambda x: apply_conversion(x, round_to_home, None) if is_wider_than_home(x) else x, results)


# `like` makes the result a scaled tensor, in compiled graphs too: operators of plain tensors give plain ones.
_encode_as_scaled_operator = define_operator(
    "scaled_like(Tensor x, Tensor like, ScalarType storage) -> Tensor",
    lambda x, like, storage: x.clone(),
    lambda x, like, storage: torch.empty_like(x),
)


@implements(_encode_as_scaled_operator, family="creation")
def encode_as_scaled(x: Tensor, like: ScaledTensor, storage: torch.dtype) -> ScaledTensor:
    """Encode a plain tensor as payload x scale, the scale measured."""
    made: ScaledTensor = encode_plain_tensor(x, storage)
    return made.clone() if made._payload is x else made


def _save_gradient_dtype(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # torch passes them by these names
    ctx.dtype = inputs[0].dtype


@hide_own_frames_from_compiler
def _decode_gradient(context: Any, gradient: Tensor) -> tuple[Any, ...]:
    plain = gradient.decode(context.dtype) if isinstance(gradient, ScaledTensor) else gradient
    return plain, None, None


torch.library.register_autograd("halfulp::scaled_like", _decode_gradient, setup_context=_save_gradient_dtype)


def encode_arguments(arguments: Any, storage: torch.dtype, like: ScaledTensor) -> Any:
    """Encode plain floating tensors, however nested; leave anything else unchanged."""

    # Compilers do not trace autograd functions that make tensor subclasses; operators lack forward-mode derivatives.
    def encode(x: Any) -> Any:
        if not _is_plain_float(x):
            return x
        if torch.compiler.is_compiling():
            return _encode_as_scaled_operator(x, like, storage)
        return ScaledTensor.encode(x, storage, home=like.home)

    return tree_map(encode, arguments)


def _is_plain_float(x: Any) -> bool:
    if not isinstance(x, Tensor) or isinstance(x, ScaledTensor) or x.dtype not in LOGICAL_DTYPES:
        return False
    if x.layout != torch.strided:
        raise ValueError(f"an argument has layout {x.layout}: scaled tensors are dense, x.to_dense()")
    return True


# A plain input with a plain gradient: what computed it is differentiated in its own dtype.
_plain_input_operator = define_operator(
    "plain_input(Tensor x) -> Tensor", lambda x: x.clone(), lambda x: torch.empty_like(x)
)
torch.library.register_autograd(
    "halfulp::plain_input",
    lambda context, gradient: _decode_gradient(context, gradient)[0],
    setup_context=_save_gradient_dtype,
)


@hide_own_frames_from_compiler
def _keep_gradients_plain(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Give plain inputs of a model that require gradients plain ones: a forward pre-hook."""

    def keep_plain(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.requires_grad or x.layout != torch.strided or not _is_plain_float(x):
            return x
        # Compilers do not trace autograd functions whose gradients change class.
        return _plain_input_operator(x) if torch.compiler.is_compiling() else apply_conversion(x, torch.clone, None)

    return tree_map(keep_plain, (arguments, options))


# A module, or a function.
ModuleOrFunction = TypeVar("ModuleOrFunction", bound=Callable[..., Any])


def scalify_function(
    function: ModuleOrFunction, dtype: torch.dtype = torch.float16, wide: WideMode = "autocast"
) -> ModuleOrFunction:
    """Return a function that encodes its floating arguments when called, except those with "mask" in their names.

    What comes out is as what went in: with plain arguments the scaled tensors among the results, however nested, are
    decoded, so that the function can stand in for the other; if an argument is a ScaledTensor they stay scaled.
    Gradients flow through both. Tensors that the function closes over are used as they are: scalify a model that it
    trains, and plain tensors are encoded where they meet scaled ones.

    Args:
        function: any callable, such as a loss, or a training step that calls backward and an optimizer.
        dtype: of the payloads: float16, bfloat16, float8_e4m3fn, float8_e5m2 or float32.
        wide: which results keep a float32 payload, as in `scalify`.

    Raises:
        TypeError: not callable.
        ValueError: no storage dtype, or another wide.

    >>> f = scalify_function(lambda x: (x * 3).relu())
    >>> f(torch.tensor([1e-6, -2e-6]))
    tensor([3.0007e-06, 0.0000e+00])
    >>> f(ScaledTensor.encode(torch.tensor([1.0, 2.0])))
    ScaledTensor([3., 6.], scale=2^3, payload=torch.float16)
    """
    check_storage_dtype(dtype)
    home = choose_home_for_storage(dtype, wide)
    if not callable(function):
        raise TypeError(f"scalify takes a module or a function, got {type(function).__name__}")

    like = ScaledTensor(torch.ones((), dtype=torch.float32, device="cpu"), 1.0, home=home)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    @functools.wraps(function)
    def run_scaled(*arguments: Any, **options: Any) -> Any:
        stays = any(isinstance(x, ScaledTensor) for x in tree_leaves((arguments, options)))
        arguments = tuple(
            x if "mask" in name else encode_arguments(x, dtype, like)
            for x, name in itertools.zip_longest(arguments, positional[: len(arguments)], fillvalue="")
        )
        options = {name: x if "mask" in name else encode_arguments(x, dtype, like) for name, x in options.items()}
        results = function(*arguments, **options)
        if stays:
            return results
        return tree_map(lambda x: x.decode() if isinstance(x, ScaledTensor) else x, results)

    return cast(ModuleOrFunction, run_scaled)


# What `scalify` installs at layers, and `unscalify` removes.
_LAYER_HOOK_FUNCTIONS = (rescale_input_gradient, _round_inputs_to_home, _round_results_to_home)


def scalify(
    model: ModuleOrFunction,
    dtype: torch.dtype = torch.float16,
    matmul: str | None = None,
    where: ParameterSelector = None,
    rescale: InputGradientRescaling = "auto",
    wide: WideMode = "autocast",
) -> ModuleOrFunction:
    """Hold a model's parameters as payload x scale, in place, so that all tensors of its passes carry scales.

    From "Scalify" (Balança et al., arXiv 2407.17353). Every matched parameter becomes an nn.Parameter that is a
    ScaledTensor with a measured scale; the modules, their forward methods and torch.optim optimizers stay as they are.
    A parameter that several modules share stays shared. Parameters are new objects: make optimizers afterwards.
    What the model is given stays plain, and exact, until it meets a parameter: masks, positions and times keep all
    their digits. Results are scaled from there on, and so are the outputs and a loss of them and of plain targets:
    `loss.backward()`, `loss.item()`. Gradients of parameters are ScaledTensors of the same storage, those of plain
    inputs plain.

    Buffers stay as they are. Running statistics are moving averages, which in a narrow payload stop moving, and
    constants such as rotary frequencies keep their digits; neither widens the payloads of what it meets.

    `state_dict` holds plain tensors: `weight`, the values in float32, which any loader may take, and beside it
    `weight.payload_scale`, by which loading gives back the same payload and scale. Loaders that refuse entries they do
    not know take `halfulp.scaled.plain_state_dict(state_dict)`. Files of plain models are encoded as they are loaded.

    A function instead of a model: see `scalify_function`, which this then returns.

    Args:
        model: any module, whose parameters are floating, integer or complex; the last two stay as they are.
        dtype: of the payloads: float16, bfloat16, float8_e4m3fn, float8_e5m2 or float32.
        matmul: "fp8" lets linear layers with a scaled weight (nn.Linear, transformers' Conv1D) multiply in eight bits:
            float8_e4m3fn operands forward, float8_e5m2 gradients backward.
        where: which parameters, a glob over qualified names ("encoder.*.weight"), several of them, or a function of
            the module that holds one and its qualified name; all by default.
        rescale: where gradients are brought back to payloads about 1 (values stay the same): "norms", at the input of
            every normalisation layer; or None. By default "auto": as "norms" where numbers are narrower than float32's
            range, and nowhere where payloads and products have all of it.
        wide: which results keep a float32 payload. "autocast": those of the operators that torch.autocast computes in
            float32 (exp, log, powers, roots, quotients of tensors, sums, softmax, losses) and of pointwise operators
            on them, until a matrix product, convolution, attention, embedding or recurrent layer brings them back to
            `dtype` (for eight bits float16) under a measured scale; see `ScaledTensor.home`. "none": no result is
            wider than its operands, as in the paper.

    Returns:
        The same model, or a function.

    Raises:
        ValueError: no storage dtype, a pattern that matches nothing, sparse parameters or embeddings, parameters that
            an optimizer holds already or that have hooks, another matmul, rescale or wide. The model is as it was.
        TypeError: neither a module nor a function, or a class of modules.

    >>> layer = scalify(torch.nn.Linear(3, 2))
    >>> list(layer.state_dict())
    ['weight', 'weight.payload_scale', 'bias', 'bias.payload_scale']
    >>> loss = torch.nn.functional.mse_loss(layer(torch.ones(4, 3)), torch.zeros(4, 2))
    >>> loss.backward()
    >>> layer.weight.grad.payload.dtype
    torch.float16
    """
    check_storage_dtype(dtype)
    home = choose_home_for_storage(dtype, wide)
    if matmul not in (None, "fp8"):
        raise ValueError(f"matmul={matmul!r}: allowed are None and 'fp8'")
    if isinstance(model, type):
        raise TypeError(f"scalify takes a module or a function, got the class {model.__name__}: make one of it first")
    if not isinstance(model, nn.Module):
        if matmul is not None or where is not None or rescale != "auto":
            raise ValueError("matmul, where and rescale are for models: a function has no modules")
        return scalify_function(model, dtype, wide)
    if rescale == "auto":
        rescale = None if dtype in FULL_RANGE_STORAGES and matmul is None else "norms"
    rescaled = find_rescaled_modules(model, rescale)
    found = [
        place
        for place in list_matching_parameters(list_module_parameters(model), where)
        if _is_scalable_parameter(place)
    ]
    replace_parameters(
        model, found, lambda place: _convert_to_scaled_parameter(place, dtype, home), "scalify", plain=False
    )
    if _keep_gradients_plain not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_keep_gradients_plain, with_kwargs=True)
    remove_forward_hooks(model.modules(), lambda hook: hook in _LAYER_HOOK_FUNCTIONS)
    for module in rescaled:
        module.register_forward_pre_hook(rescale_input_gradient, with_kwargs=True)
    for module in model.modules():
        # Conv1D is transformers' layer of GPT-2, known by name: the library is not imported for it.
        is_product = isinstance(module, _PRODUCT_LAYER_CLASSES) or type(module).__name__ == "Conv1D"
        parameters = module.parameters(recurse=False) if is_product else ()
        if any(isinstance(p, ScaledTensor) and p.home is not None for p in parameters):
            module.register_forward_pre_hook(_round_inputs_to_home, with_kwargs=True)
            if isinstance(module, _RECURRENT_CLASSES):
                module.register_forward_hook(_round_results_to_home)
    _set_eight_bit_forwards(model, matmul)
    return model


def unscalify(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Make a model's parameters plain tensors again, each value rounded once: `scalify` undone, in place.

    Args:
        model: any module; parameters that are no ScaledTensors stay as they are.
        dtype: of the parameters; by default the logical dtype of each, which is what it was before `scalify`.

    Returns:
        The same model.

    Raises:
        ValueError: a dtype that is not floating, a value out of its range, or parameters that an optimizer holds or
            that have hooks. The model is as it was.

    >>> layer = torch.nn.Linear(3, 2)
    >>> start = layer.weight.detach().clone()
    >>> back = unscalify(scalify(layer, torch.float32))
    >>> type(back.weight).__name__, torch.equal(back.weight, start)
    ('Parameter', True)
    """
    if dtype is not None and dtype not in LOGICAL_DTYPES:
        raise ValueError(f"dtype={dtype}: allowed are {', '.join(map(str, LOGICAL_DTYPES))}, and None")
    found = [place for place in list_module_parameters(model) if isinstance(place.value, ScaledTensor)]
    replace_parameters(model, found, lambda place: decode_parameter(place, dtype), "unscalify", plain=True)
    remove_forward_hooks(model.modules(), lambda hook: hook in (*_LAYER_HOOK_FUNCTIONS, _keep_gradients_plain))
    _set_eight_bit_forwards(model, None)
    return model


def _is_scalable_parameter(place: ParameterRef) -> bool:
    check_module_takes_conversion(place)
    if place.value.layout != torch.strided:
        raise ValueError(
            f"parameter {place.name!r} has layout {place.value.layout}: scaled tensors are dense; leave it out by "
            "where="
        )
    return place.value.dtype in LOGICAL_DTYPES


def _convert_to_scaled_parameter(place: ParameterRef, dtype: torch.dtype, home: torch.dtype | None) -> nn.Parameter:
    old = place.value
    if not isinstance(old, ScaledTensor) and type(old.data) is not Tensor:
        raise ValueError(
            f"parameter {place.name!r} is {name_type(old)}: scalify takes plain tensors and ScaledTensors; leave "
            "it out by where="
        )
    new = nn.Parameter(_encode_detached(old, dtype, home), old.requires_grad)
    if old.grad is not None:
        new.grad = _encode_detached(old.grad, dtype, home)
    return copy_attributes(new, old)


def _encode_detached(x: Tensor, dtype: torch.dtype, home: torch.dtype | None) -> ScaledTensor:
    return ScaledTensor.encode(x.detach(), dtype, home=home).detach()


def _set_eight_bit_forwards(model: nn.Module, matmul: str | None) -> None:
    """Give linear layers with a scaled weight the forward of a kind of products, or restore their own."""
    for module in model.modules():
        given = module.__dict__.get("forward")
        if isinstance(given, functools.partial) and given.func in (_run_linear_fp8, _run_transposed_linear_fp8):
            del module.__dict__["forward"]
        forward = find_eight_bit_forward(module) if matmul == "fp8" else None
        if forward is not None and isinstance(module.weight, ScaledTensor):
            module.forward = functools.partial(forward, module)


def find_eight_bit_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the eight-bit forward of a linear layer; None for subclasses with a forward of their own."""
    if isinstance(module, nn.Linear) and get_original_class(module).forward is nn.Linear.forward:
        return _run_linear_fp8
    # transformers' layer of GPT-2, known by name: the library is not imported for it.
    is_transposed = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
    return _run_transposed_linear_fp8 if is_transposed else None


def _run_linear_fp8(module: nn.Linear, input: Tensor) -> Tensor:
    return linear_fp8(input, module.weight, module.bias)


def _run_transposed_linear_fp8(module: Any, x: Tensor) -> Tensor:
    return linear_fp8(x, module.weight.t(), module.bias)
