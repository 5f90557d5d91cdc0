"""Operations of device functions beside + - * / and comparisons: each writes itself down on traced values.

Words are unsigned integers and reals floating-point numbers, of 32 or 64 bits; a result is as wide as the operands.
Operations on words have names of their own, since they wrap around.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import _trace
from ._trace import Trace, Traced, square_root

# Traced values; numbers beside one take its kind. NumPy's numbers alone, as constants that a device function is given
# in the place of values, give a number.
Word = Any
Real = Any


def _find_trace(*values: Any) -> Trace:
    for x in values:
        if isinstance(x, Traced):
            return x.trace
    kinds = ", ".join(type(x).__name__ for x in values)
    raise TypeError(
        f"an operation of device functions got {kinds}: call it inside of one, with at least one value that it was "
        "given; what else is known comes in as a constant"
    )


def _make_word_operation(
    operation: str, numpy_function: Callable[..., Any] | None = None
) -> Callable[[Word, Word], Word]:
    def run(a: Word, b: Word) -> Word:
        if numpy_function and isinstance(a, np.unsignedinteger) and isinstance(b, np.unsignedinteger):
            return numpy_function(np.array([a]), np.array([b]))[0]  # arrays wrap around
        return _find_trace(a, b).emit_binary(f"word_{operation}", a, b)

    return run


def _make_conversion(
    operation: str, kind: str, numpy_function: Callable[..., Any] | None = None
) -> Callable[[Any], Any]:
    """Return a conversion to a kind, without its width where that is the operand's."""

    def run(x: Any) -> Any:
        if numpy_function and isinstance(x, np.generic):
            return numpy_function(x)
        trace = _find_trace(x)
        return trace.emit(operation, (x,), None, kind if kind[1:] else kind + x.kind[1:])

    return run


def _make_load(bits: int) -> Callable[[Word, Word], Word]:
    return lambda address, i: _find_trace(address).emit_load(bits, address, i)


def _make_store(bits: int) -> Callable[[Word, Word, Word], None]:
    return lambda address, i, word: _find_trace(address).emit_store(bits, address, i, word)


# Modulo 2^32, or 2^64.
add = _make_word_operation("add", np.add)
sub = _make_word_operation("sub", np.subtract)
mul = _make_word_operation("mul", np.multiply)
bit_and = _make_word_operation("and", np.bitwise_and)
bit_or = _make_word_operation("or", np.bitwise_or)
bit_xor = _make_word_operation("xor", np.bitwise_xor)
# By fewer bits than the word has; zeros come in, but copies of the sign by `sar`.
shl = _make_word_operation("shl", np.left_shift)
shr = _make_word_operation("shr", np.right_shift)
sar = _make_word_operation("sar")
# Of each 16-bit half of two words the high 16 bits of their product.
multiply_packed_high16 = _make_word_operation("mulh16")
# The bits of a real, the real with a word's bits, and halves of words of 64 bits.
word = _make_conversion("bits", "w", lambda x: x.view(f"u{x.itemsize}"))
real = _make_conversion("bits", "f", lambda x: x.view(f"f{x.itemsize}"))
low_word, high_word = _make_conversion("low_word", "w32"), _make_conversion("high_word", "w32")
widen = _make_conversion("widen", "w64")
# The float32 nearest to a word read as a signed 32-bit integer, and a real in [-2^31, 2^31) truncated to such a word; a
# float64 in [0, 2^31) becomes a word of 64 bits.
to_real = _make_conversion("to_real", "f32", lambda x: np.float32(x.view(np.int32)))
to_word = _make_conversion("to_word", "w", lambda x: x.astype(f"i{x.itemsize}").view(f"u{x.itemsize}"))
# Element i of an array at an address, as a word of 64 or else of 32 bits; of 4 bits even elements lie in low halves.
load4, load8, load16, load32, load64 = map(_make_load, (4, 8, 16, 32, 64))
# (address, i, word): the low bits of a word become element i.
store4, store8, store16, store32, store64 = map(_make_store, (4, 8, 16, 32, 64))


def add_to_counter64(address: Word, i: Word, w: Word, copy_stride: int = 0) -> None:
    """Add a word to the 64-bit element i of an array, or of a copy of it; see `Trace.emit_counter_addition`."""
    _find_trace(address).emit_counter_addition(address, i, w, copy_stride)


def select(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b; of tensors too."""
    return _trace.select(condition, a, b)


def multiply_add(a: Real, b: Real, c: Real) -> Real:
    """a b + c, rounded once or twice: for exact products, and for guesses that a comparison corrects."""
    return _find_trace(a, b, c).emit("multiply_add", (a, b, c))


def divide(a: np.float32, b: np.float32) -> np.float32:
    """a / b, correctly rounded."""
    with np.errstate(all="ignore"):
        return a / b


def _python_number_to_float32(x: Any) -> Any:
    """Return a number of Python as a float32, and anything else as it is."""
    return np.float32(x) if type(x) in (int, float) else x


def sqrt(a: np.float32) -> np.float32:
    """Return the square root, correctly rounded."""
    a = _python_number_to_float32(a)
    with np.errstate(all="ignore"):
        root: np.float32 = np.sqrt(a) if isinstance(a, np.generic) else square_root(a)
        return root


def floor(x: Any) -> Any:
    """Return a real rounded down to an integer; of tensors too."""
    x = _python_number_to_float32(x)
    if isinstance(x, Traced):
        return x.trace.emit("floor", (x,))
    return np.floor(x) if isinstance(x, np.generic) else x.floor()


def maximum(a: np.float32, b: np.float32) -> np.float32:
    """Return the larger of two reals; NaN if either is."""
    larger: np.float32 = select((a > b) | (a != a), a, b)
    return larger


def sign_of(x: np.float32) -> np.float32:
    """-1, 0 or 1; NaN for NaN."""
    if isinstance(x, np.generic):
        return np.float32(np.sign(x))
    sign: np.float32 = select(x != x, x, select(x > 0.0, 1.0, select(x < 0.0, -1.0, 0.0)))
    return sign


# Pickled by their names, as parts of a step's specification.
for _name, _operation in [*globals().items()]:
    if getattr(_operation, "__closure__", None) is not None and _operation.__module__ == __name__:
        _operation.__name__ = _operation.__qualname__ = _name
