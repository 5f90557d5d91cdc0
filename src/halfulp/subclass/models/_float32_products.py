"""float32_products: a model whose 16-bit products run in float32 where the processor lacks them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from ..._torch_versions import is_exporting, saved_tensor_hooks
from ...arithmetic.float32_products._product import PRODUCTS, product
from ...environment._narrow_products import widened_dtypes
from ...kernels import constant_result, note
from ._checkpointing import capture_hooks
from ._module_parameters import check_module
from ._replaced_forward import ReplacedForward, plain_forward

Model = TypeVar("Model", bound=nn.Module)
_MARK = "_halfulp_float32_products"
_EVERYWHERE, _EAGER = "everywhere", "eager"
_ATTENTION = nn.functional.multi_head_attention_forward
# The same without its own dispatch to modes, which would run all of it with this file's mode off.
_UNDISPATCHED_ATTENTION = types.FunctionType(
    _ATTENTION.__code__,
    {**_ATTENTION.__globals__, "has_torch_function": lambda tensors: False},
    _ATTENTION.__name__,
    _ATTENTION.__defaults__,
)


def float32_products(model: Model, enabled: bool = True) -> Model:
    """Compute a model's products of bfloat16 and float16 tensors in float32 where the processor lacks instructions.

    There torch multiplies 16-bit matrices 5 to 50 times as slowly as float32 ones. Operands are widened, which is
    exact, multiplied and summed in float32, and the result is rounded once; the products of the backward pass, alike:

        y = round(float32(x) float32(w)),   dx = round(float32(dy) float32(w)^T)

    which differs from what 16-bit instructions give by the order of summation alone. This covers matmul and its kin,
    linear and bilinear layers, einsum, convolutions, attention and recurrent layers (whose state stays in float32
    within one call), called by any module of the model, under torch.autocast too. Activations are kept for backward in
    16 bits, so that the memory stays what it was, up to one product's operands in float32 at a time.

    Nothing changes where the processor has the instructions, on other devices, for tensors of other dtypes or classes,
    and for products outside of the model's forward passes. `halfulp.kernels.report()` counts the products; the
    environment variable HALFULP_FLOAT32_PRODUCTS ("always", "never") overrules what the processor says.
    `halfulp.convert` does this to the 16-bit models that it makes.

    It holds through autograd, activation checkpointing, torch.compile (the same bits, where the compiler keeps the
    order of sums), deepcopy and pickle. Modules that are added to the model later are covered while its own forward
    runs; call this again if they are called by themselves. What torch.export writes has the model's own operators.
    torch.jit.script cannot compile such a model.

    Args:
        model: whose forward passes are changed, in place.
        enabled: False for torch's own products again.

    Returns:
        The model.

    Raises:
        TypeError: no module.

    >>> import torch, halfulp as hu
    >>> model = hu.float32_products(torch.nn.Linear(3, 2).bfloat16())
    >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).dtype
    torch.bfloat16
    """
    check_module(model, "float32_products")
    for module in model.modules():
        if not enabled:
            marked, forward = module.__dict__.pop(_MARK, False), module.__dict__.get("forward")
            if marked and isinstance(forward, ProductsForward):
                forward.restore()
        elif _MARK not in module.__dict__ and _has_forward(module):
            module.__dict__[_MARK] = _EVERYWHERE
            ProductsForward(module).put()
    if any(isinstance(forward, ReplacedForward) and forward.reads_graphs for forward in _own_forwards(model)):
        leave_compiled_products(model)
    return model


def leave_compiled_products(model: nn.Module, leave: bool = True) -> None:
    """Leave a model's products to torch where a compiler traces them, for whoever reads its graphs; or no longer."""
    for module in model.modules():
        if _MARK in module.__dict__:
            module.__dict__[_MARK] = _EAGER if leave else _EVERYWHERE


def has_float32_products(model: nn.Module) -> bool:
    """Return whether `float32_products` was called on a model."""
    return any(_MARK in module.__dict__ for module in model.modules())


def forward_before_products(model: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that somebody has given a module itself, below this file's; None for that of its class."""
    return next(
        (forward for forward in _own_forwards(model, deep=False) if not isinstance(forward, ProductsForward)), None
    )


def _own_forwards(model: nn.Module, deep: bool = True) -> Iterator[Callable[..., Any]]:
    """Yield the forwards that modules were given themselves, each followed by those inside it."""
    for module in model.modules() if deep else (model,):
        forward = vars(module).get("forward")
        while forward is not None:
            yield forward
            forward = forward.own if isinstance(forward, ReplacedForward) else None


class ProductsForward(ReplacedForward):
    """A module's ``forward``, whose narrow products run in float32 where the processor lacks them."""

    refusal = (
        "torch.jit.script cannot compile a model whose products halfulp computes in float32: call "
        "halfulp.float32_products(model, False) before"
    )

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None = None) -> None:
        super().__init__(module)
        if own is not None:
            self.inner = self.__wrapped__ = own
            # A method of the module's class is not its own.
            self.own = None if getattr(own, "__func__", None) is type(module).forward else own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        if is_exporting() or not widened_dtypes() or _is_active() or self._mark() is None:
            return self.inner(*args, **kwargs)
        if torch.compiler.is_compiling():
            if self._mark() == _EAGER:
                _note_left()
                return self.inner(*args, **kwargs)
            with _MODE:
                return self.inner(*args, **kwargs)
        return _under_mode(self.inner, args, kwargs)

    def _mark(self) -> str | None:
        module = self._module()
        return None if module is None else module.__dict__.get(_MARK)

    def _of(self, module: nn.Module) -> Callable[..., Any]:
        return ProductsForward(module, super()._of(module))

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return ProductsForward(memo[id(self._module())], super().__deepcopy__(memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._module(), self.own)


def _rebuilt(module: nn.Module, own: Callable[..., Any] | None) -> ProductsForward:
    return ProductsForward(module, plain_forward(module) if own is None else own)


def _has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward pass of its own in Python, which lists, scripted and compiled modules lack."""
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
        return False
    return type(module).forward is not nn.Module.forward


class _Products(TorchFunctionMode):
    """Sends the torch functions that multiply to `product`; all others run as they are."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is _ATTENTION:
            # A function in Python, whose products this mode would not see: a mode is off while it handles a call.
            with self:
                return _UNDISPATCHED_ATTENTION(*args, **kwargs)
        if function not in PRODUCTS:
            # dynamo cannot trace this method's super() under a mode.
            return (torch.unflatten if function is torch.Tensor.unflatten else function)(*args, **kwargs)
        if not torch.compiler.is_compiling():
            hooks = saved_tensor_hooks()
            if hooks is not None:
                capture_hooks(hooks[0], _recomputed, "hu.float32_products")
        return product(function, args, kwargs)


_MODE = _Products()


@constant_result
def _note_left() -> None:
    note("float32 products", "left to torch in a graph that an AdaptiveGradScaler's backend compiles")


def _is_active() -> bool:
    count = torch._C._len_torch_function_stack()
    return any(torch._C._get_function_stack_at(k) is _MODE for k in range(count))


def _under_mode(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function under the mode, below all others: they see products of the dtypes that the model asked for."""
    above = _popped()
    _push_mode(_MODE)
    _pushed(above)
    try:
        return function(*args, **kwargs)
    finally:
        above = _popped()
        above.remove(_MODE)
        _pushed(above)


def _popped() -> list[TorchFunctionMode]:
    return [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]


def _pushed(modes: list[TorchFunctionMode]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what activation checkpointing runs again, under the mode."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _is_active() else _under_mode(function, args, kwargs)

    return run
