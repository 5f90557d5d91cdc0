"""Which 16-bit dtypes the processor multiplies itself, and which products are computed in float32 instead."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

import torch

from ..kernels import assume_constant_result

SIXTEEN_BIT_DTYPES = (torch.bfloat16, torch.float16)
FLOAT32_PRODUCTS_VARIABLE = "HALFULP_FLOAT32_PRODUCTS"
FLOAT32_PRODUCTS_CHOICES = ("auto", "always", "never")
_forced_float32_product_dtypes: tuple[torch.dtype, ...] | None = None


@assume_constant_result
def list_dtypes_multiplied_in_float32() -> tuple[torch.dtype, ...]:
    """Return the dtypes whose products on the CPU are computed in float32.

    Those for which oneDNN, torch's library of products on the CPU, has no kernel on this processor: torch then falls
    back to loops that take 5 to 50 times as long as float32's. The environment variable HALFULP_FLOAT32_PRODUCTS
    decides otherwise: "always" or "never", read once in a process.

    Raises:
        ValueError: the variable is none of "auto", "always", "never".

    >>> with force_float32_products(torch.float16):
    ...     list_dtypes_multiplied_in_float32()
    (torch.float16,)
    """
    return (
        _detect_dtypes_multiplied_in_float32()
        if _forced_float32_product_dtypes is None
        else _forced_float32_product_dtypes
    )


@contextlib.contextmanager
def force_float32_products(*dtypes: torch.dtype) -> Iterator[None]:
    """Compute the products of these dtypes in float32, and of no others, inside a block and in the whole process."""
    global _forced_float32_product_dtypes
    before, _forced_float32_product_dtypes = _forced_float32_product_dtypes, dtypes
    try:
        yield
    finally:
        _forced_float32_product_dtypes = before


def find_natively_multiplied_dtypes() -> tuple[torch.dtype, ...]:
    """Return the 16-bit dtypes that oneDNN multiplies on this processor, as it says; ONEDNN_MAX_CPU_ISA limits it."""
    if not torch.backends.mkldnn.is_available():
        return ()
    asked = (torch.ops.mkldnn._is_mkldnn_bf16_supported, torch.ops.mkldnn._is_mkldnn_fp16_supported)
    return tuple(dtype for dtype, is_supported in zip(SIXTEEN_BIT_DTYPES, asked) if is_supported())


@functools.cache
def _detect_dtypes_multiplied_in_float32() -> tuple[torch.dtype, ...]:
    wish = os.environ.get(FLOAT32_PRODUCTS_VARIABLE, "auto")
    if wish not in FLOAT32_PRODUCTS_CHOICES:
        raise ValueError(
            f"{FLOAT32_PRODUCTS_VARIABLE}={wish!r} is unknown: choose one of {', '.join(FLOAT32_PRODUCTS_CHOICES)}"
        )
    if wish == "auto":
        native = find_natively_multiplied_dtypes()
        return tuple(dtype for dtype in SIXTEEN_BIT_DTYPES if dtype not in native)
    return SIXTEEN_BIT_DTYPES if wish == "always" else ()
