"""float32_products: a model whose 16-bit products run in float32 where the processor lacks them."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from ..._torch_versions import get_saved_tensor_hooks, is_exporting
from ...arithmetic._float32_products import NAME_BY_PRODUCT_FUNCTION, call_product_in_float32, iterate_tensors
from ...environment._narrow_products import list_dtypes_multiplied_in_float32
from ...kernels import assume_constant_result, note_fallback
from ._conversion import check_is_module, wrap_recomputed_function
from ._parameter_holders import EMULATED_FORMAT_ATTRIBUTE

ModelType = TypeVar("ModelType", bound=nn.Module)
# What a module of the model holds: where its products are widened.
_WIDENED_MARK_ATTRIBUTE = "_halfulp_float32_products"
_WIDENED_EVERYWHERE, _WIDENED_WHERE_EAGER = "everywhere", "eager"
# What a class holds: the class made of it, and what that was made of.
_WIDENED_CLASS_ATTRIBUTE = "_halfulp_with_float32_products"
_ORIGINAL_CLASS_ATTRIBUTE = "_halfulp_without_float32_products"


def float32_products(model: ModelType, enabled: bool = True) -> ModelType:
    """Compute a model's products of bfloat16 and float16 tensors in float32 where the processor lacks instructions.

    There torch multiplies 16-bit matrices 5 to 50 times as slowly as float32 ones. Operands are widened, which is
    exact, multiplied and summed in float32, and the result is rounded once; the products of the backward pass, alike:

        y = round(float32(x) float32(w)),   dx = round(float32(dy) float32(w)^T)

    which differs from what 16-bit instructions give by the order of summation alone. This covers matmul and its kin,
    linear and bilinear layers, einsum, convolutions, attention and recurrent layers (whose state stays in float32
    within one call), called by any module of the model, under torch.autocast too. For the backward pass operands are
    kept in 16 bits, as torch keeps them; results that attention and recurrent layers keep besides are in float32.

    Nothing changes where the processor has the instructions, on other devices, for models without numbers of such a
    dtype, and for products outside of the model's forward passes. `halfulp.kernels.count_fallbacks()` counts the
    products, those of compiled graphs once when they are traced; the environment variable HALFULP_FLOAT32_PRODUCTS
    ("always", "never") overrules what the processor says. `halfulp.convert` does this to 16-bit models that it makes.

    It holds through autograd, activation checkpointing, torch.compile (where a compiler may leave out roundings between
    operators, as in any 16-bit graph), copies and pickle: modules get a class of their own, under the name of the one
    that they had. Modules that are added to the model later, lazy ones before their first batch, and modules with
    parametrizations or a forward that somebody has given them are covered while the forward of a module around them
    runs. What torch.export and torch.jit.script write has the model's own operators.

    Args:
        model: whose forward passes are changed, in place.
        enabled: False for torch's own products again.

    Returns:
        The model.

    Raises:
        TypeError: no module.
        ValueError: HALFULP_FLOAT32_PRODUCTS is unknown, or the model is under `hu.emulate`.

    >>> import torch, halfulp as hu
    >>> model = hu.float32_products(torch.nn.Linear(3, 2).bfloat16())
    >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).dtype
    torch.bfloat16
    """
    check_is_module(model, "float32_products")
    list_dtypes_multiplied_in_float32()
    if any(hasattr(parameter, EMULATED_FORMAT_ATTRIBUTE) for parameter in model.parameters()):
        raise ValueError("the model is emulated, in float32 without 16-bit products: call float32_products after that")
    for module in model.modules():
        if not enabled:
            vars(module).pop(_WIDENED_MARK_ATTRIBUTE, None)
            # A class that somebody has made of this file's since stays, and finds no mark.
            object.__setattr__(module, "__class__", get_original_class(module))
        elif _WIDENED_MARK_ATTRIBUTE not in vars(module) and _has_replaceable_forward(module):
            _set_float32_product_class(module)
    if any(isinstance(vars(module).get("forward"), ForwardTracedByCompiler) for module in model.modules()):
        leave_compiled_products_to_torch(model)
    return model


def get_original_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, as it was before `float32_products`."""
    kind = type(module)
    found: type[nn.Module] = vars(kind).get(_ORIGINAL_CLASS_ATTRIBUTE, kind)
    return found


class ForwardTracedByCompiler:
    """Base of forwards whose graph a compiler reads: `float32_products` leaves their products to torch."""

    inner: Callable[..., Any]


def leave_compiled_products_to_torch(model: nn.Module, leave: bool = True) -> None:
    """Leave a model's products to torch where a compiler traces them, for whoever reads its graphs; or no longer."""
    for module in model.modules():
        if _WIDENED_MARK_ATTRIBUTE in vars(module):
            vars(module)[_WIDENED_MARK_ATTRIBUTE] = _WIDENED_WHERE_EAGER if leave else _WIDENED_EVERYWHERE


def _set_float32_product_class(module: nn.Module) -> None:
    forward: Any = vars(module).get("forward")
    is_read = (
        isinstance(forward, ForwardTracedByCompiler)
        and getattr(forward.inner, "__func__", None) is type(module).forward
    )
    is_changed = (forward is not None and not is_read) or parametrize.is_parametrized(module)
    made = None if is_changed else _make_float32_product_class(type(module))
    if made is None:
        why = "has parametrizations or a forward of its own" if is_changed else "is of a class that allows no subclass"
        note_fallback("float32 products", f"left to torch in {type(module).__name__}, which {why}, called by itself")
        return
    vars(module)[_WIDENED_MARK_ATTRIBUTE] = _WIDENED_EVERYWHERE
    object.__setattr__(module, "__class__", made)
    if is_read:
        forward.inner = forward.__wrapped__ = types.MethodType(made.forward, module)


def _has_replaceable_forward(module: nn.Module) -> bool:
    """Return whether a module has a Python forward pass of its own; lists, scripted and compiled modules have none."""
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
        return False
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return False  # it changes its class at the first batch
    if isinstance(module, torch.fx.GraphModule):
        # It writes its class's forward anew; the modules that it calls are covered.
        note_fallback("float32 products", "left to torch in functions that a torch.fx.GraphModule calls by itself")
        return False
    return type(module).forward is not nn.Module.forward


def _make_float32_product_class(base: type[nn.Module]) -> type[nn.Module] | None:
    """Return the subclass whose modules run a class's forward in `_run_forward`; None where it cannot be subclassed."""
    # A class, and no function that a module holds: shallow copies and replicas run themselves, and no cycle keeps
    # models alive.
    if _WIDENED_CLASS_ATTRIBUTE not in vars(base):
        named = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        try:
            made: Any = types.new_class(base.__name__, (base,), {}, lambda scope: scope.update(named))
        except Exception:  # its __init_subclass__ or metaclass wants more, or refuses
            return None
        made.forward = _make_forward(made, base.forward)
        made.__reduce_ex__ = _pickle_by_original_class
        setattr(made, _ORIGINAL_CLASS_ATTRIBUTE, base)
        setattr(base, _WIDENED_CLASS_ATTRIBUTE, made)
    found: type[nn.Module] = vars(base)[_WIDENED_CLASS_ATTRIBUTE]
    return found


def _make_forward(made: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a class's forward, with the signature, the source and the names of the one inside."""
    run = _run_forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Somebody may hold the bound method of a module that has its old class again.
        inner = super(made, self).forward if isinstance(self, made) else own.__get__(self)
        return run(inner, self, args, kwargs)

    # torch.jit.script compiles the source of the forward inside, and looks its names up here.
    scope = getattr(own, "__globals__", forward.__globals__)
    within = types.FunctionType(forward.__code__, scope, "forward", None, forward.__closure__)
    return functools.wraps(own)(within)


def _pickle_by_original_class(self: nn.Module, protocol: Any) -> Any:
    """Pickle and copy a module by its original class."""
    # A class that somebody has made of this file's is the one that is named.
    made: Any = next(kind for kind in type(self).__mro__ if _ORIGINAL_CLASS_ATTRIBUTE in vars(kind))
    reduced = super(made, self).__reduce_ex__(max(2, int(protocol)))
    if type(self) is not made or not isinstance(reduced, tuple) or getattr(reduced[0], "__name__", "") != "__newobj__":
        return reduced
    return make_empty_module, (vars(made)[_ORIGINAL_CLASS_ATTRIBUTE], *reduced[1][1:]), *reduced[2:]


def make_empty_module(base: type[nn.Module], *arguments: Any) -> nn.Module:
    """Return an empty module of the class made of a class, whose state a pickle then fills in."""
    made = _make_float32_product_class(base) or base
    return made.__new__(made, *arguments)


class _ThreadState(threading.local):
    # Whether a marked module runs that needs no float32 products.
    skips_state_checks = False
    # The hooks for saved tensors that were in force where the mode began.
    hooks_at_entry: Any = None


_thread_state = _ThreadState()


def _run_forward(forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's forward pass, under the mode where the model has numbers of a dtype that is widened."""
    mark = module.__dict__.get(_WIDENED_MARK_ATTRIBUTE)  # vars() of a module is more than torch 2.6 can trace
    dtypes = () if mark is None or is_exporting() else list_dtypes_multiplied_in_float32()
    if not dtypes or _is_mode_active():
        return forward(*args, **kwargs)
    is_compiling = torch.compiler.is_compiling()
    if is_compiling and mark == _WIDENED_WHERE_EAGER:
        _count_products_left_to_torch()
        return forward(*args, **kwargs)
    skips_state_checks = not is_compiling and _thread_state.skips_state_checks
    is_narrow = _has_cpu_state_of_dtypes(module, dtypes, not skips_state_checks)
    if is_narrow or _receives_numbers_of_dtypes(args, kwargs, dtypes):
        if not is_compiling:
            return _call_under_mode(forward, args, kwargs)
        with _PRODUCT_MODE:
            return forward(*args, **kwargs)
    if is_compiling or skips_state_checks:
        return forward(*args, **kwargs)
    _thread_state.skips_state_checks = True
    try:
        return forward(*args, **kwargs)
    finally:
        _thread_state.skips_state_checks = False


def _has_cpu_state_of_dtypes(module: nn.Module, dtypes: tuple[torch.dtype, ...], deep: bool) -> bool:
    """Return whether a module, or with `deep` one inside it, holds numbers of a dtype on the CPU."""
    for one in module.modules() if deep else (module,):
        for held in (one._parameters, one._buffers):
            for x in held.values():
                if x is not None and x.dtype in dtypes and x.device.type == "cpu":
                    return True
    return False


def _receives_numbers_of_dtypes(args: tuple[Any, ...], kwargs: dict[str, Any], dtypes: tuple[torch.dtype, ...]) -> bool:
    """Return whether arguments or torch.autocast bring a dtype."""
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") in dtypes:
        return True
    return any(x.dtype in dtypes and x.device.type == "cpu" for x in iterate_tensors((args, kwargs)))


@assume_constant_result
def _count_products_left_to_torch() -> None:
    note_fallback("float32 products", "left to torch in a graph that an AdaptiveGradScaler's backend compiles")


class _ProductMode(TorchFunctionMode):
    """Sends the torch functions that multiply to `call_product_in_float32`; all others run as they are."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _UNDISPATCHED_COPY_BY_FUNCTION:
            # A function in Python, whose products this mode would not see: a mode is off while it handles a call.
            with self:
                return _UNDISPATCHED_COPY_BY_FUNCTION[function](*args, **kwargs)
        if function not in NAME_BY_PRODUCT_FUNCTION:
            # dynamo cannot trace this method's super() under a mode.
            return (torch.unflatten if function is torch.Tensor.unflatten else function)(*args, **kwargs)
        if not torch.compiler.is_compiling():
            hooks = get_saved_tensor_hooks()
            # A checkpoint around the model's modules runs them again, and they come back here by themselves.
            if hooks is not None and hooks != _thread_state.hooks_at_entry:
                wrap_recomputed_function(hooks[0], _recompute_under_mode, "hu.float32_products")
        return call_product_in_float32(function, args, kwargs)


def _make_undispatched_copy(function: Any) -> Any:
    """Return a function of torch.nn.functional without its own dispatch to modes."""
    scope = dict(function.__globals__)
    scope["has_torch_function"] = scope["has_torch_function_variadic"] = lambda *tensors: False
    return types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)


# Those in Python that multiply more than once, by functions that the mode knows.
_UNDISPATCHED_COPY_BY_FUNCTION = {
    function: _make_undispatched_copy(function)
    for name in ("multi_head_attention_forward", "linear_cross_entropy")
    if (function := getattr(nn.functional, name, None)) is not None
}
_PRODUCT_MODE = _ProductMode()


def _is_mode_active() -> bool:
    count = torch._C._len_torch_function_stack()
    return any(torch._C._get_function_stack_at(k) is _PRODUCT_MODE for k in range(count))


def _call_under_mode(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function under the mode, below all others: they see products of the dtypes that the model asked for."""
    _replace_modes(lambda modes: [*modes, _PRODUCT_MODE])
    _thread_state.hooks_at_entry = get_saved_tensor_hooks()
    try:
        return function(*args, **kwargs)
    finally:
        _thread_state.hooks_at_entry = None
        _replace_modes(lambda modes: [mode for mode in modes if mode is not _PRODUCT_MODE])


def _replace_modes(change: Callable[[list[TorchFunctionMode]], list[TorchFunctionMode]]) -> None:
    """Put other modes in place of all that are in force, the innermost first."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    for mode in reversed(change(modes)):
        _push_mode(mode)


def _recompute_under_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that activation checkpointing recomputes, under the mode."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _is_mode_active() else _call_under_mode(function, args, kwargs)

    return run
