"""Operations on one element: what device functions call, in plain Python, recorded as traces, and on tensors.

Words are 32-bit unsigned integers and reals are float32; names that end in 64 work on 64-bit words and float64.
Operations on words have names of their own: they wrap around, where NumPy's numbers warn or become wider.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from . import _trace
from ._trace import Traced, square_root

# NumPy's and Python's numbers, and traced values.
Word = Any
Real = Any
Function = TypeVar("Function", bound=Callable[..., Any])
SCALARS: dict[str, Callable[..., Any]] = {}
_U32 = 0xFFFFFFFF
_U64 = 0xFFFFFFFFFFFFFFFF
_CTYPES = {8: ctypes.c_uint8, 16: ctypes.c_uint16, 32: ctypes.c_uint32, 64: ctypes.c_uint64}


def _record_operation(traced: Callable[..., Any]) -> Callable[[Function], Function]:
    """Make a function of scalars an operation of the language, which writes itself down where a value is traced."""

    def operation(function: Function) -> Function:
        @functools.wraps(function)
        def run(*values: Any) -> Any:
            trace = next((x.trace for x in values if isinstance(x, Traced)), None)
            return function(*values) if trace is None else traced(trace, *values)

        SCALARS[function.__name__] = run
        return cast("Function", run)

    return operation


def _word(operation: str) -> Callable[[Function], Function]:
    return _record_operation(lambda trace, a, b: trace.binary(f"word_{operation}", a, b))


def _convert(operation: str, kind: str) -> Callable[[Function], Function]:
    return _record_operation(lambda trace, x: trace.emit(operation, (x,), None, kind))


def _load(bits: int) -> Callable[[Function], Function]:
    return _record_operation(lambda trace, address, i: trace.load(bits, address, i))


def _store(bits: int) -> Callable[[Function], Function]:
    return _record_operation(lambda trace, address, i, value: trace.store(bits, address, i, value))


@_record_operation(lambda _, condition, a, b: _trace.select(condition, a, b))
def select(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b; of tensors too."""
    return _trace.select(condition, a, b)


@_word("add")
def add(a: Word, b: Word) -> np.uint32:
    """(a + b) mod 2^32."""
    return np.uint32((int(a) + int(b)) & _U32)


@_word("sub")
def sub(a: Word, b: Word) -> np.uint32:
    """(a - b) mod 2^32."""
    return np.uint32((int(a) - int(b)) & _U32)


@_word("mul")
def mul(a: Word, b: Word) -> np.uint32:
    """(a * b) mod 2^32."""
    return np.uint32((int(a) * int(b)) & _U32)


@_word("and")
def bit_and(a: Word, b: Word) -> np.uint32:
    """Bitwise and of two words."""
    return np.uint32(int(a) & int(b))


@_word("or")
def bit_or(a: Word, b: Word) -> np.uint32:
    """Bitwise or of two words."""
    return np.uint32(int(a) | int(b))


@_word("xor")
def bit_xor(a: Word, b: Word) -> np.uint32:
    """Bitwise exclusive or of two words."""
    return np.uint32(int(a) ^ int(b))


@_word("shl")
def shl(a: Word, n: Word) -> np.uint32:
    """Return a word shifted left by n < 32."""
    return np.uint32((int(a) << int(n)) & _U32)


@_word("shr")
def shr(a: Word, n: Word) -> np.uint32:
    """Return a word shifted right by n < 32, zeros coming in."""
    return np.uint32(int(a) >> int(n))


@_convert("low_word", "w32")
def low_word(index: Word) -> np.uint32:
    """Return the low 32 bits of a 64-bit index."""
    return np.uint32(int(index) & _U32)


@_convert("high_word", "w32")
def high_word(index: Word) -> np.uint32:
    """Return the high 32 bits of a 64-bit index."""
    return np.uint32((int(index) >> 32) & _U32)


@_convert("bits", "w32")
def word(x: Real) -> np.uint32:
    """Return the bits of a float32."""
    return np.float32(x).view(np.uint32)


@_convert("bits", "f32")
def real(w: Word) -> np.float32:
    """Return the float32 with these bits."""
    return np.uint32(w).view(np.float32)


@_convert("to_real", "f32")
def to_real(w: Word) -> np.float32:
    """Return the float32 nearest to a word read as a signed 32-bit integer."""
    return np.float32(np.uint32(w).view(np.int32))


@_convert("to_word", "w32")
def to_word(x: Real) -> np.uint32:
    """Return a float32 in [-2^31, 2^31) truncated to a signed 32-bit integer, as a word."""
    return np.int32(x).view(np.uint32)


@_word("mulh16")
def multiply_high16(a: Word, b: Word) -> np.uint32:
    """Return, of each 16-bit half of two words, the high 16 bits of their product."""
    low, high = (int(a) & 0xFFFF) * (int(b) & 0xFFFF), (int(a) >> 16) * (int(b) >> 16)
    return np.uint32(high & 0xFFFF0000 | low >> 16)


@_record_operation(lambda trace, *given: trace.emit("multiply_add", given))
def multiply_add(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a b + c, rounded once or twice: for exact products, and for guesses that a comparison corrects."""
    return np.float32(a) * np.float32(b) + np.float32(c)


@_record_operation(lambda trace, a, b: trace.binary("div", a, b))
def divide(a: np.float32, b: np.float32) -> np.float32:
    """a / b in float32, correctly rounded."""
    with np.errstate(all="ignore"):
        return np.float32(a) / np.float32(b)


@_record_operation(lambda _, x: square_root(x))
def sqrt(a: np.float32) -> np.float32:
    """sqrt(a) in float32, correctly rounded."""
    with np.errstate(all="ignore"):
        root: np.float32 = np.sqrt(np.float32(a))
        return root


@_record_operation(lambda _, x: _trace.floor(x))
def floor(x: Any) -> Any:
    """Return a real rounded down to an integer; of tensors too."""
    return _trace.floor(x) if hasattr(x, "floor") else np.floor(x)


@_record_operation(lambda trace, a, b: select((a > b) | (a != a), a, b))
def maximum(a: np.float32, b: np.float32) -> np.float32:
    """Return the larger of two float32; NaN if either is."""
    return a if a > b or a != a else b


@_record_operation(lambda trace, x: select(x != x, x, select(x > 0.0, 1.0, select(x < 0.0, -1.0, 0.0))))
def sign_of(x: np.float32) -> np.float32:
    """-1, 0 or 1 as float32; NaN for NaN."""
    return np.float32(np.sign(x))


@_load(4)
def load4(address: Word, i: Word) -> np.uint32:
    """Return the unsigned half of a byte at element i of an array at an address, even elements in the low halves."""
    return np.uint32(int(_read(8, address, int(i) // 2)) >> 4 * (int(i) % 2) & 15)


@_load(8)
def load8(address: Word, i: Word) -> np.uint32:
    """Return the unsigned byte at element i of an array at an address, as a word."""
    return _read(8, address, i)


@_load(16)
def load16(address: Word, i: Word) -> np.uint32:
    """Return the unsigned 16-bit element i of an array at an address, as a word."""
    return _read(16, address, i)


@_load(32)
def load32(address: Word, i: Word) -> np.uint32:
    """Return the 32-bit element i of an array at an address."""
    return _read(32, address, i)


@_store(4)
def store4(address: Word, i: Word, w: Word) -> None:
    """Write the low 4 bits of a word to element i, half a byte."""
    shift, held = 4 * (int(i) % 2), int(_read(8, address, int(i) // 2))
    _write(8, address, int(i) // 2, (held & ~(15 << shift)) | (int(w) & 15) << shift)


@_store(8)
def store8(address: Word, i: Word, w: Word) -> None:
    """Write the low 8 bits of a word to element i."""
    _write(8, address, i, w)


@_store(16)
def store16(address: Word, i: Word, w: Word) -> None:
    """Write the low 16 bits of a word to element i."""
    _write(16, address, i, w)


@_store(32)
def store32(address: Word, i: Word, w: Word) -> None:
    """Write a word to element i."""
    _write(32, address, i, w)


@_word("add")
def add64(a: Word, b: Word) -> np.uint64:
    """(a + b) mod 2^64."""
    return np.uint64((int(a) + int(b)) & _U64)


@_word("sub")
def sub64(a: Word, b: Word) -> np.uint64:
    """(a - b) mod 2^64."""
    return np.uint64((int(a) - int(b)) & _U64)


@_word("mul")
def mul64(a: Word, b: Word) -> np.uint64:
    """(a * b) mod 2^64."""
    return np.uint64((int(a) * int(b)) & _U64)


@_word("and")
def and64(a: Word, b: Word) -> np.uint64:
    """Bitwise and of two 64-bit words."""
    return np.uint64(int(a) & int(b))


@_word("or")
def or64(a: Word, b: Word) -> np.uint64:
    """Bitwise or of two 64-bit words."""
    return np.uint64(int(a) | int(b))


@_word("xor")
def xor64(a: Word, b: Word) -> np.uint64:
    """Bitwise exclusive or of two 64-bit words."""
    return np.uint64(int(a) ^ int(b))


@_word("shl")
def shl64(a: Word, n: Word) -> np.uint64:
    """Return a 64-bit word shifted left by n < 64."""
    return np.uint64((int(a) << int(n)) & _U64)


@_word("shr")
def shr64(a: Word, n: Word) -> np.uint64:
    """Return a 64-bit word shifted right by n < 64, zeros coming in."""
    return np.uint64(int(a) >> int(n))


@_word("sar")
def sar64(a: Word, n: Word) -> np.uint64:
    """Return a 64-bit word, read as a signed integer, shifted right by n < 64: rounded down."""
    return np.uint64((np.int64(np.uint64(a).view(np.int64)) >> int(n)).view(np.uint64))


@_convert("widen", "w64")
def widen(w: Word) -> np.uint64:
    """Return a word as a 64-bit word."""
    return np.uint64(w)


@_convert("bits", "f64")
def real64(w: Word) -> np.float64:
    """Return the float64 with these bits."""
    return np.uint64(w).view(np.float64)


@_convert("bits", "w64")
def word64(x: Real) -> np.uint64:
    """Return the bits of a float64."""
    return np.float64(x).view(np.uint64)


@_convert("to_word", "w64")
def to_word64(x: Real) -> np.uint64:
    """Return a float64 in [0, 2^31) truncated to an integer, as a 64-bit word."""
    return np.uint64(int(x))


@_load(64)
def load64(address: Word, i: Word) -> np.uint64:
    """Return the 64-bit element i of an array at an address."""
    return np.uint64(_CTYPES[64].from_address(int(address) + int(i) * 8).value)


@_store(64)
def store64(address: Word, i: Word, w: Word) -> None:
    """Write a 64-bit word to element i."""
    _CTYPES[64].from_address(int(address) + int(i) * 8).value = int(w)


@_record_operation(lambda trace, *given: trace.deposit(*given))
def deposit64(address: Word, i: Word, w: Word, apart: int = 0) -> None:
    """Add a word to the 64-bit element i of an array, or of a copy of it; see `Trace.deposit`."""
    store64(address, i, add64(load64(address, i), w))


def _read(bits: int, address: Word, i: Word) -> np.uint32:
    return np.uint32(_CTYPES[bits].from_address(int(address) + int(i) * bits // 8).value)


def _write(bits: int, address: Word, i: Word, w: Word) -> None:
    _CTYPES[bits].from_address(int(address) + int(i) * bits // 8).value = int(w) & ((1 << bits) - 1)
