"""Products of bfloat16 and float16 in float32, rounded once, where a processor has no instructions; the functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._torch_versions import get_saved_tensor_hooks
from ..environment._narrow_products import SIXTEEN_BIT_DTYPES, list_dtypes_multiplied_in_float32
from ..kernels import assume_constant_result, note_fallback

# By name, where a function is met as a method, a function of torch and an operator of torch.ops alike.
PRODUCT_FUNCTION_NAMES = {
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv", "addr"),
    *("linear", "bilinear", "inner", "outer", "ger", "dot", "vdot", "einsum", "tensordot", "chain_matmul"),
    *("linalg_matmul", "linalg_vecdot", "linalg_multi_dot"),
    *("multi_dot", "kron", "cdist", "smm", "sspaddmm", "hspmm", "_sparse_mm", "sparse_sampled_addmm", "matrix_power"),
    *("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "conv_tbc"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("scaled_dot_product_attention", "multi_head_attention_forward", "_scaled_mm", "_grouped_mm"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu"),
}
# One step in time.
RECURRENT_CELL_NAMES = {"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}


def read_operator_name(function: Callable[..., Any] | str) -> str:
    """Return the operator's name without its overload.

    >>> import torch
    >>> read_operator_name(torch.ops.aten.mm.default), read_operator_name(torch.conv2d)
    ('mm', 'conv2d')
    """
    name = getattr(function, "__name__", str(function))
    return name.split(".")[0].removeprefix("aten::")


# Products that stay torch's: elementwise ones, which add nothing up; sparse ones; those that torch refuses, or takes in
# part, in 16 bits. Whole attention is a function in Python, whose products come here one by one.
_PRODUCTS_LEFT_NARROW = {
    *("addr", "outer", "ger", "kron", "linalg_vecdot"),
    *("smm", "sspaddmm", "hspmm", "_sparse_mm", "sparse_sampled_addmm"),
    *("cdist", "matrix_power", "_scaled_mm", "_grouped_mm", "multi_head_attention_forward"),
}
# What torch.autocast computes in its dtype on the CPU, of the above.
_AUTOCAST_PRODUCT_NAMES = {
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "linear"),
    *("conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "scaled_dot_product_attention",
}
# Of one operand they are views of it, or the operand itself.
_NAMES_NEEDING_SEVERAL_OPERANDS = ("einsum", "chain_matmul", "multi_dot")
# By function and not by name: dynamo looks functions up as it traces, and cannot read their names.
_TORCH_NAMESPACES = (torch, torch.Tensor, torch.nn.functional, torch._C._nn, torch.linalg, torch._VF, torch.functional)
NAME_BY_PRODUCT_FUNCTION: dict[Any, str] = {
    getattr(holder, name): name
    for holder in _TORCH_NAMESPACES
    for name in sorted((PRODUCT_FUNCTION_NAMES | RECURRENT_CELL_NAMES) - _PRODUCTS_LEFT_NARROW)
    if callable(getattr(holder, name, None))
}
_autograd: Any = torch._C._autograd
_PLAIN_TENSOR_CLASSES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_AUTOCAST_OPERAND_DTYPES = (torch.float32, *SIXTEEN_BIT_DTYPES)
_SEQUENCE_CLASSES = (list, tuple)  # Dynamo of torch 2.6 cannot trace `list | tuple`


def call_product_in_float32(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function that multiplies: in float32 where torch has only slow kernels for its operands.

    Products of two bfloat16 or two float16 numbers are exact in float32 (except beyond its range), and float32 sums
    are what instructions for 16-bit operands form too, so the result differs from theirs by the order of summation
    alone. The result is rounded once, and so is each gradient, which is a product itself. For the backward pass the
    narrow operands are kept, not their float32 copies. Operands that are not plain narrow tensors of one dtype on the
    CPU, and `out=`, leave the function, one of `NAME_BY_PRODUCT_FUNCTION`, as it is.
    """
    name = NAME_BY_PRODUCT_FUNCTION[function]
    dtype = _find_dtype_to_widen(name, args, kwargs)
    if dtype is None:
        return function(*args, **kwargs)
    _count_product(name, dtype)
    if not torch.is_autocast_enabled("cpu"):
        return _call_in_float32(function, args, kwargs, dtype, (dtype,))
    given = _AUTOCAST_OPERAND_DTYPES if name in _AUTOCAST_PRODUCT_NAMES else (dtype,)
    with torch.autocast("cpu", enabled=False):
        return _call_in_float32(function, args, kwargs, dtype, given)


@assume_constant_result
def _count_product(name: str, dtype: torch.dtype) -> None:
    note_fallback("float32 products", f"{name} of {str(dtype).removeprefix('torch.')}")


def _find_dtype_to_widen(name: str, args: tuple, kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the narrow dtype of operands that are to be multiplied in float32; None to leave the call as it is."""
    dtypes = list_dtypes_multiplied_in_float32()
    if not dtypes or any(kwargs.get(key) is not None for key in ("dtype", "out_dtype", "out")):
        return None
    if name == "lstm" and torch.compiler.is_compiling():
        return None  # AOTAutograd cannot take what torch's float32 kernel keeps for the backward pass
    mask = None
    if name == "scaled_dot_product_attention":
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    found, count = set(), 0
    for x in iterate_tensors((args, kwargs)):
        if type(x) not in _PLAIN_TENSOR_CLASSES or x.device.type != "cpu" or x.layout is not torch.strided:
            return None
        count += 1
        if x is not mask and (x.is_floating_point() or x.is_complex()):
            found.add(x.dtype)
    if count < 2 and name in _NAMES_NEEDING_SEVERAL_OPERANDS:
        return None
    if torch.is_autocast_enabled("cpu") and name in _AUTOCAST_PRODUCT_NAMES:
        dtype = torch.get_autocast_dtype("cpu")
        if found and all(x in _AUTOCAST_OPERAND_DTYPES for x in found):
            return dtype if dtype in dtypes else None
    return found.pop() if len(found) == 1 and found <= set(dtypes) else None


def _call_in_float32(
    function: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    dtype: torch.dtype,
    given: tuple[torch.dtype, ...],
) -> Any:
    """Call a function on float32 copies of operands of the given dtypes, rounded to one dtype as its result is."""
    # Whether a backward pass will need the operands, and autograd lets hooks say how they are kept.
    is_saved = not torch.compiler.is_compiling() and torch.is_grad_enabled() and not torch.jit.is_tracing()
    is_saved = is_saved and not torch._C._are_functorch_transforms_active()
    is_saved = is_saved and _autograd._saved_tensors_hooks_is_enabled()
    if not is_saved or not any(x.requires_grad for x in iterate_tensors((args, kwargs))):
        wide = _map_tensors((args, kwargs), given, lambda x: x.to(dtype).float())
        out = function(*wide[0], **wide[1])
    else:
        saved = _SavedOperands(dtype)
        wide = _map_tensors((args, kwargs), given, saved.widen_operand)
        with saved_tensors_hooks(saved.pack_tensor, saved.unpack_tensor):
            out = function(*wide[0], **wide[1])
        saved.sources.clear()  # the backward pass does not need the others
    return _map_tensors(out, (torch.float32,), lambda y: y.to(dtype))


class _SavedOperands:
    """The operands that a product keeps for its backward pass: narrow ones in place of their float32 copies.

    Hooks of others that are in force (activation checkpointing, offloading to memory) get the narrow operand to keep.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.sources: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        self._outer = get_saved_tensor_hooks()

    def widen_operand(self, x: Tensor) -> Tensor:
        """Return a float32 copy of an operand, whose memory is known to `pack_tensor`."""
        narrow = x.to(self._dtype)
        wide = narrow.float()
        # A float32 parameter under autocast is there anyway.
        self.sources[wide.untyped_storage()._cdata] = x if x.is_leaf else narrow, wide.stride()
        return wide

    def pack_tensor(self, kept: Tensor) -> Any:
        """Return the object that autograd saves for a tensor until the backward pass."""
        source, stride = self.sources.get(kept.untyped_storage()._cdata, (None, ()))
        # Detached, as what a node keeps of its own output would keep the node; memory and count of writes are shared.
        kept, offset = kept.detach(), kept.storage_offset()
        if source is None and kept.dtype == torch.float32:
            # An operand that torch has copied into another order is exact in 16 bits, too.
            narrow = kept.to(self._dtype)
            wide = narrow.float()
            if wide.stride() == kept.stride() and torch.equal(wide, kept):
                source, stride, offset = narrow, kept.stride(), 0
        view = None if source is None else (stride, kept.size(), kept.stride(), offset)
        held = kept if source is None else source
        if self._outer is not None:
            return _PackedTensor(self._outer[0](held), view, None)
        held = held.detach()
        return _PackedTensor(held, view, None if view is None or held.is_inference() else held._version)

    def unpack_tensor(self, kept: _PackedTensor) -> Tensor:
        """Return the tensor that was packed, unless an operand was written into since."""
        held = kept.tensor if self._outer is None else self._outer[1](kept.tensor)
        if kept.view is None:
            return held
        if kept.version is not None and held._version != kept.version:
            raise RuntimeError(
                "a tensor of a product that was computed in float32 (hu.float32_products) has been modified by an "
                f"inplace operation before its gradient was computed: it is at version {held._version}; expected "
                f"version {kept.version} instead"
            )
        stride, *view = kept.view
        wide = held.to(self._dtype).float()
        if wide.stride() != stride:  # hooks keep values, not the order in which they lie
            wide = torch.empty_strided(wide.size(), stride, dtype=wide.dtype, device=wide.device).copy_(wide)
        return wide.as_strided(*view)


class _PackedTensor(NamedTuple):
    """A tensor as autograd holds it: itself, or a narrow operand and which view of its float32 copy was meant."""

    tensor: Any
    view: tuple | None
    version: int | None


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _SEQUENCE_CLASSES):
        for item in value:
            yield from iterate_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from iterate_tensors(item)


def _map_tensors(value: Any, dtypes: tuple[torch.dtype, ...], change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested arguments with the tensors of some dtypes changed."""
    if isinstance(value, Tensor):
        return change(value) if value.dtype in dtypes else value
    if isinstance(value, _SEQUENCE_CLASSES):
        items = [_map_tensors(item, dtypes, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _map_tensors(item, dtypes, change) for key, item in value.items()}
    return value
