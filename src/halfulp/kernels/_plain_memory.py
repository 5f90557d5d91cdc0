"""Checked access to a tensor's memory: the address of its elements or why there is none, and checksums of its rows.

Rows are those of the first dimension. Of a row's words b_1 to b_n, which are its elements, or their halves where they
have 8 bytes,

    sum_j w_j b_j  mod 2^64,    w_j = (((j c mod 2^64) xor m) m) or 1

with two odd constants c and m. Every w_j is odd and no word has more than 32 bits, so that a row in which one word is
another has another checksum; changes of several words, of which a plain sum of bits may see nothing, cancel by chance
alone. Files hold these numbers: they stay what they are.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor

from .._messages import name_type

_PLAIN_CLASSES = frozenset((Tensor, torch.nn.Parameter))
_TRACED_CLASS_NAMES = frozenset(("FakeTensor", "FunctionalTensor"))
_count_dispatch_modes, _count_function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_get_tracing_state, _peek_transforms = torch._C._get_tracing_state, torch._C._functorch.peek_interpreter_stack


def is_floating(x: Any) -> TypeGuard[Tensor]:
    """Return whether x is a tensor, of any class, of floating numbers."""
    return isinstance(x, Tensor) and x.is_floating_point()


def address(x: Tensor) -> int:
    """Return the address of a plain strided tensor's elements, or raise TypeError as `to_plain_memory`."""
    at = 0 if type(x).__name__ in _TRACED_CLASS_NAMES else x.data_ptr()
    if (at == 0 and x.numel()) or x.is_neg():
        raise_no_plain_memory(x, "a tensor")
    return at


def get_plain_address_or_zero(x: Tensor) -> int:
    """Return the address of a contiguous plain CPU tensor's elements; 0 for any other tensor, and for an empty one.

    It holds where no mode of torch watches functions, and for floating-point dtypes: others may be conjugate or
    quantized.

    >>> [get_plain_address_or_zero(x) > 0 for x in (torch.ones(3), torch.ones(2, 3).t(), torch.ones(3).to_sparse())]
    [True, False, False]
    """
    if type(x) not in _PLAIN_CLASSES or not x.is_cpu or x.is_neg() or x.is_nested:
        return 0
    try:
        return x.data_ptr() if x.is_contiguous() else 0
    except RuntimeError:  # sparse, or one of torch.func's
        return 0


def has_operator_interceptors() -> bool:
    """Return whether something sees or replaces the operators that run here: a mode, a tracer, or a transform.

    >>> has_operator_interceptors()
    False
    """
    is_seen = _count_dispatch_modes() > 0 or _count_function_modes() > 0
    return is_seen or _get_tracing_state() is not None or _peek_transforms() is not None


def to_plain_memory(x: Tensor, what: str = "a tensor") -> Tensor:
    """Return a tensor whose strided memory holds its values: x, or a copy where torch defers a sign or the zeros.

    Negative and conjugate bits are resolved and zeros that torch keeps without memory are written out. Subclasses that
    only mark memory of their own (`as_subclass`) are taken by it. Strides stay.

    Raises:
        TypeError: there is no such memory: a wrapper subclass, a FakeTensor, one of torch.func's wrappers, a tensor on
            the meta device, or one that is sparse, quantized, nested or freed.

    >>> turned = torch.complex(torch.zeros(2), torch.ones(2)).conj().imag
    >>> turned.is_neg(), to_plain_memory(turned).is_neg()
    (True, False)
    """
    if type(x) in _PLAIN_CLASSES and x.layout is torch.strided:
        if x._is_zerotensor():
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        if x.is_neg() or x.is_conj():
            x = x.resolve_conj().resolve_neg()
    elif has_strided_values(x):
        with torch._C.DisableTorchFunctionSubclass():
            return to_plain_memory(x.detach().as_subclass(Tensor), what)
    if not has_strided_values(x):
        raise_no_plain_memory(x, what)
    return x


def to_plain_memory_unless_traced(x: Tensor, what: str = "a tensor") -> Tensor:
    """Return `to_plain_memory` of a tensor; a traced or meta tensor, which has no values, unchanged."""
    if x.is_meta or torch.compiler.is_compiling() or type(x).__name__ in _TRACED_CLASS_NAMES:
        return x
    return to_plain_memory(x, what)


def has_strided_values(x: Tensor) -> bool:
    """Return whether a tensor's memory holds strided values of its dtype."""
    if x.layout is not torch.strided or x.is_quantized or x.is_nested or x.is_meta:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x) or type(x).__name__ in _TRACED_CLASS_NAMES:
        return False
    return x.data_ptr() != 0 or x.numel() == 0


def is_non_overlapping_and_dense(x: Tensor) -> bool:
    """Return whether x's elements fill one contiguous range of memory, each once, in whatever order."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def overlaps_itself(x: Tensor) -> bool:
    """Return whether two elements of a strided tensor may share memory, so that it cannot be written."""
    if not x.numel():
        return False
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size != 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def raise_no_plain_memory(x: Tensor, what: str, remedy: str = "give a plain tensor of its values") -> NoReturn:
    """Raise TypeError, which says why a tensor has no plain memory and what to do; `remedy` for unknown classes."""
    if x.layout is not torch.strided:
        kind, remedy = f"a {str(x.layout).removeprefix('torch.')} tensor", "give x.to_dense()"
    elif x.is_nested:
        kind, remedy = "a nested tensor", "give its padded form, or its parts"
    elif x.is_quantized:
        kind, remedy = f"a quantized tensor ({x.dtype})", "give x.dequantize()"
    elif torch._C._functorch.is_functorch_wrapped_tensor(x):
        kind, remedy = "a tensor inside a transform of torch.func", "call it outside grad, vmap and functionalize"
    elif type(x).__name__ == "FakeTensor":
        kind, remedy = "a FakeTensor, which has a shape and no numbers", "leave FakeTensorMode first"
    elif x.is_meta:
        kind, remedy = "on the meta device, which holds no numbers", "give it memory first: model.to_empty(device=...)"
    elif x._is_zerotensor():
        kind, remedy = "a tensor of zeros that torch has not written out", "make it by torch.zeros(shape)"
    elif x.is_neg():
        kind, remedy = "a view whose memory holds the values with the other sign", "give x.resolve_neg()"
    elif type(x) not in _PLAIN_CLASSES:
        kind, remedy = f"{name_type(x)}, a tensor class whose numbers lie in other tensors", remedy
    else:
        kind, remedy = "a tensor whose memory was freed", "call it where its storage is allocated"
    raise TypeError(f"{what} is {kind}: {remedy}")


_WORD_DTYPE_BY_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# Odd 64-bit constants with about as many ones as zeros, as signed integers; the first is 2^64 / golden ratio (Knuth,
# vol. 3, 6.4).
_CHECKSUM_WEIGHT_STEP, _CHECKSUM_WEIGHT_FACTOR = -0x61C8864680B583EB, -0x4B47D0C5E2A3A5A7
_MOST_CHECKSUM_WORDS_AT_ONCE = 2**22


def compute_row_checksums(values: Tensor) -> Tensor:
    """Return the int64 checksum of each row of a tensor; a 0-d tensor has one.

    >>> before = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> after = before + torch.tensor([[0.0, 0.0], [0.0, 1e-6]])
    >>> compute_row_checksums(before) == compute_row_checksums(after)
    tensor([ True, False])
    """
    rows = (values.detach() if values.dim() else values.detach()[None]).unsqueeze(-1).flatten(1)
    parts = rows.split(max(1, _MOST_CHECKSUM_WORDS_AT_ONCE // max(1, rows.shape[1])))
    words = rows.shape[1] * (2 if rows.element_size() == 8 else 1)
    numbers = torch.arange(1, words + 1, dtype=torch.int64, device=rows.device)
    weights = (((numbers * _CHECKSUM_WEIGHT_STEP) ^ _CHECKSUM_WEIGHT_FACTOR) * _CHECKSUM_WEIGHT_FACTOR) | 1
    dtype = _WORD_DTYPE_BY_ITEMSIZE[rows.element_size()]
    return torch.cat([(part.contiguous().view(dtype).long() * weights).sum(1) for part in parts])


def checksum(values: Tensor) -> int:
    """Return one checksum of a whole tensor: that of its rows' checksums."""
    return int(compute_row_checksums(compute_row_checksums(values)[None]))
