"""Straight-line arithmetic, written once: device functions in plain Python, recorded as typed instructions.

A device function is a plain function over + - * / (and comparisons), the operations below and those of `_operations`.
Given `Traced` values it writes itself down, without branches, for three writers: `vector` turns it into machine code,
`triton` into source, and `_interpreter` runs it; the operations below compute on tensors, too. A traced value has a
kind: a real ("f32", "f64"), an unsigned word ("w32", "w64"), a "mask", or the "address" of an array.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch

from ._canary import compute_float32_square_root, to_float64

ArithmeticNetwork = TypeVar("ArithmeticNetwork", bound=Callable[..., list[Any]])

MANTISSA_BITS_BY_DTYPE = {torch.float32: 23, torch.float64: 52}
_EXPONENT_BIAS_BY_DTYPE = {torch.float32: 127, torch.float64: 1023}
_WORD_DTYPE_BY_REAL_DTYPE = {torch.float32: torch.int32, torch.float64: torch.int64}
_REAL_KIND_BY_DTYPE = {torch.float32: "f32", torch.float64: "f64"}
Number = float | np.number
_KIND_BY_NUMPY_TYPE: dict[type, str] = {
    **{np.float32: "f32", np.float64: "f64"},
    **{np.uint32: "w32", np.uint64: "w64", np.int64: "w64"},
}
_COMPARISONS = ("lt", "gt", "le", "ge", "eq", "ne")
# First letters of the kinds of operands; operations on words, which have names of their own, take words.
_OPERAND_KIND_BY_OPERATION = {
    **dict.fromkeys((*_COMPARISONS, "add", "sub", "mul", "div", "neg", "abs", "sqrt", "rint", "floor"), "f"),
    **dict.fromkeys(("product_error", "multiply_add", "gather", "to_word", "to_float32", "to_float64"), "f"),
    **dict.fromkeys(("to_real", "low_word", "high_word", "widen", "block_largest"), "w"),
    **{"bits": "fw", "not": "m", "and": "m", "or": "m", "mask_eq": "m", "word_div": ""},
}
_SHIFTS = ("word_shl", "word_shr", "word_sar")
COUNTER_COPIES = 4  # of counters that neighbours take turns at
_MOST_INLINED_INSTRUCTIONS = 60  # instructions up to which a network is better written out than called


class Trace:
    """A list of instructions (operation, operands, extra), each computed once."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype  # of reals whose operation does not say another
        self.lines: list[tuple[str, tuple[int, ...], Any]] = []
        self.kinds: list[str] = []  # of each one's result
        self.tables: list[tuple[float, ...]] = []
        self.functions: list[RecordedFunction] = []
        # What is written at the end: (address, bits, whether once per block) -> instruction.
        self.stores: dict[tuple[int, int, bool], int] = {}
        # What is added up, counted, or whose largest is found, over all elements: (how, instruction).
        self.sums: list[tuple[str, int]] = []
        # Words added to counters: (address, instruction of the place, of the word, how far apart copies of them are).
        self.counter_additions: list[tuple[int, int, int, int]] = []
        # Those that hold for few elements, if any, so that a loop may ask first whether one does.
        self.rare_masks: set[int] = set()
        self._line_numbers: dict[tuple, int] = {}
        self._function_numbers: dict[tuple, int] = {}

    def emit(
        self, operation: str, operands: Sequence[Traced | Number] = (), extra: object = None, kind: str | None = None
    ) -> Traced:
        """Append an instruction and return its value; an equal earlier instruction is reused.

        The result's kind is by default that of the traced operands; numbers beside them take it.
        """
        own = kind or self.find_kind(*operands)
        key = (operation, tuple(self._find_instruction_number(x, own) for x in operands), extra)
        self._check_operands(operation, key[1], own)
        if key not in self._line_numbers:
            self._line_numbers[key] = len(self.lines)
            self.lines.append(key)
            self.kinds.append(own)
        return Traced(self, self._line_numbers[key])

    def _check_operands(self, operation: str, operands: Sequence[int], kind: str) -> None:
        """Refuse operands of another kind than an operation has, and shifts by as many bits as a word has, or more."""
        kinds = [self.kinds[k] for k in operands]
        default = {"word": "w", "mask": ""}.get(operation[:4])
        taken = _OPERAND_KIND_BY_OPERATION.get(operation, default if "_" in operation else None)
        is_wrong = taken is not None and any(one[0] not in taken for one in kinds)
        if operation == "select":
            is_wrong = kinds != ["mask", kind, kind]
        if is_wrong:
            raise TypeError(
                f"a device function has no {operation} of {', '.join(kinds)}: words have functions of their own, "
                "comparisons give masks for & | ~ and select, whose two values are of one kind"
            )
        name, _, number = self.lines[operands[-1]] if operation in _SHIFTS else ("", (), (0, 0))
        if name == "word" and not 0 <= number[0] < number[1]:
            raise TypeError(f"{operation} by {number[0]} bits of words of {number[1]} in a device function")

    def emit_binary(self, operation: str, a: Traced | Number, b: Traced | Number) -> Traced:
        """Append an operation on two reals or two words; comparisons give masks."""
        kind = self.find_kind(a, b)
        kinds = {x.kind if isinstance(x, Traced) else _KIND_BY_NUMPY_TYPE.get(type(x), kind) for x in (a, b)}
        if len(kinds) > 1:
            raise TypeError(
                f"{operation} of {' and '.join(sorted(kinds))} in a device function, whose operands are of one kind: "
                "word(x) and real(w) take a value's bits, to_real(w) and to_word(x) its number"
            )
        numbers = [Traced(self, self._find_instruction_number(x, kind)) for x in (a, b)]
        family = {"w": "word_", "m": "mask_"}.get(kind[0], "")
        name = operation if operation.startswith("word_") else family + operation
        return self.emit(name, numbers, None, "mask" if operation in _COMPARISONS else kind)

    def find_kind(self, *operands: Traced | Number) -> str:
        """Return the kind of the first traced value, or else of the first typed number, or else the trace's reals."""
        traced = [x.kind for x in operands if isinstance(x, Traced)]
        typed = [_KIND_BY_NUMPY_TYPE[type(x)] for x in operands if type(x) in _KIND_BY_NUMPY_TYPE]
        return (traced or typed or [_REAL_KIND_BY_DTYPE[self.dtype]])[0]

    def emit_load(self, bits: int, address: Traced, index: Traced) -> Traced:
        """Load an array's element, or its block's one, as a word: the value stored before, if there was a store."""
        per_block = self._is_block_index(f"load{bits}", index)
        stored = self.stores.get((address.number, bits, per_block))
        if stored is None:
            return self.emit("load", (address,), (bits, per_block), "w64" if bits == 64 else "w32")
        value = Traced(self, stored)
        return value if bits >= 32 else self.emit_binary("word_and", value, np.uint32((1 << bits) - 1))

    def emit_store(self, bits: int, address: Traced, index: Traced, value: Traced) -> None:
        """Write the low bits of a word to an array's element, or once per block, behind all that is read."""
        place = address.number, bits, self._is_block_index(f"store{bits}", index)
        self.stores[place] = self._find_instruction_number(value, "w64" if bits == 64 else "w32")

    def _is_block_index(self, name: str, index: Traced) -> bool:
        if not isinstance(index, Traced) or index.kind not in ("index", "block"):
            kind = index.kind if isinstance(index, Traced) else type(index).__name__
            raise TypeError(f"{name} in a device function takes the index of the element or of its block, got {kind}")
        return index.kind == "block"

    def emit_total(self, how: str, value: Traced) -> None:
        """Add a float64 up ("sum"), find the largest float32's word or float64 ("max"), or count a mask ("count")."""
        self.sums.append((how, value.number))

    def emit_counter_addition(self, address: Traced, place: Traced, word: Traced, copy_stride: int = 0) -> None:
        """Add a 64-bit word of each element to an entry of an array of such words.

        Where copies of the counters, COUNTER_COPIES in all, lie `copy_stride` apart, a writer may spread the elements
        over them, since additions to one word wait for each other.
        """
        self.counter_additions.append((address.number, place.number, word.number, copy_stride))

    def find_output_instructions(self) -> list[int]:
        """Return the instructions whose values leave the trace: what is stored, summed up and deposited."""
        deposited = [number for _, place, word, _ in self.counter_additions for number in (place, word)]
        return [*self.stores.values(), *(number for _, number in self.sums), *deposited]

    def add_constant_table(self, values: tuple[float, ...]) -> int:
        """Return the number of a table of constants, added if it is new."""
        if values not in self.tables:
            self.tables.append(values)
        return self.tables.index(values)

    def emit_call(self, function: Callable, arguments: tuple) -> list[Traced]:
        """Return the results of a function of lists of values; it is recorded once for all calls with such lists.

        Arguments that are no lists belong to the function; the same value given twice is one input of it.
        """
        real = _REAL_KIND_BY_DTYPE[self.dtype]
        numbers = [[self._find_instruction_number(x, real) for x in a] if isinstance(a, list) else a for a in arguments]
        distinct = list(dict.fromkeys(k for a in numbers if isinstance(a, list) for k in a))
        shape = tuple(tuple(map(distinct.index, a)) if isinstance(a, list) else a for a in numbers)
        if (function, shape) not in self._function_numbers:
            self._function_numbers[function, shape] = len(self.functions)
            self.functions.append(_record_called_function(function, shape, self.dtype, len(distinct)))
        place = self._function_numbers[function, shape]
        piece = self.functions[place]
        if len(piece.trace.lines) <= _MOST_INLINED_INSTRUCTIONS:
            return function(*arguments)
        made = self.emit("call", [Traced(self, k) for k in distinct], place)
        return [self.emit("part", (made,), k) for k in range(len(piece.results))]

    def count_instructions(self) -> int:
        """Return the number of instructions with all calls inlined."""
        return sum(
            self.functions[extra].trace.count_instructions() if name == "call" else 1 for name, _, extra in self.lines
        )

    def digest(self) -> str:
        """Return a hash of everything recorded."""
        called = [(piece.trace.digest(), piece.results) for piece in self.functions]
        written = sorted(self.stores.items()), self.sums, self.counter_additions
        recorded = self.dtype, self.lines, self.kinds, self.tables, called, written
        return hashlib.sha256(repr(recorded).encode()).hexdigest()

    def _find_instruction_number(self, x: Traced | Number, kind: str) -> int:
        if isinstance(x, Traced):
            return x.number
        if kind[0] == "w":
            width = int(kind[1:])
            if int(x) != x or not -(1 << width - 1) <= x < 1 << width:
                raise TypeError(f"{x!r} beside a word in a device function: give a whole number of {width} bits")
            return self.emit("word", (), (int(x), width), kind).number
        if kind == "mask":
            if not isinstance(x, bool | np.bool_):
                raise TypeError(f"{x!r} beside a mask in a device function: give True or False, or a comparison")
            return self.emit_binary("eq", 0.0, 0.0 if x else 1.0).number
        # Reals of the trace's own dtype are plain constants.
        extra = float(x).hex() if kind == _REAL_KIND_BY_DTYPE[self.dtype] else (float(x).hex(), kind)
        return self.emit("constant", (), extra, kind).number


@dataclass(frozen=True)
class RecordedFunction:
    """A function of the trace: its own trace, and which instructions are its results."""

    trace: Trace
    results: tuple[int, ...]


@functools.cache
def _record_called_function(
    function: Callable, argument_layout: tuple, dtype: torch.dtype, input_count: int
) -> RecordedFunction:
    def call_on_lists(*values):
        return function(*([values[k] for k in a] if isinstance(a, tuple) else a for a in argument_layout))

    trace, results = record_function(call_on_lists, dtype, input_count)
    return RecordedFunction(trace, tuple(x.number for x in results))


def record_out_of_line(network: ArithmeticNetwork) -> ArithmeticNetwork:
    """Return a network, (lists of values and constants) -> a list of values, that large kernels hold once and call."""

    @functools.wraps(network)
    def run(*arguments: Any) -> list[Any]:
        values = (x for a in arguments if isinstance(a, list) for x in a)
        traced = next((x for x in values if isinstance(x, Traced)), None)
        found: list[Any] = network(*arguments) if traced is None else traced.trace.emit_call(network, arguments)
        return found

    return cast("ArithmeticNetwork", run)


def _make_operator_methods(operation: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """Return the methods of an operation whose first operand, or second one, is traced."""
    return (lambda own, other: own.trace.emit_binary(operation, own, other)), (
        lambda own, other: own.trace.emit_binary(operation, other, own)
    )


def _make_method(operation: str) -> Callable[..., Any]:
    """Return the method of an operation whose operands are all traced."""
    return lambda *operands: operands[0].trace.emit(operation, operands)


class Traced:
    """A symbolic value: the number of the instruction that will compute it."""

    __slots__ = ("number", "trace")
    __array_ufunc__ = None  # a NumPy scalar beside it leaves the operation to it

    def __init__(self, trace: Trace, number: int) -> None:
        self.trace, self.number = trace, number

    @property
    def kind(self) -> str:
        """The kind of value: "f32", "f64", "w32", "w64", "mask", "address" or "index"."""
        return self.trace.kinds[self.number]

    def __repr__(self) -> str:
        return f"a value of kind {self.kind}"

    def __bool__(self) -> bool:
        raise TypeError("a device function has no branches: write select(condition, a, b), and & | ~ for and, or, not")

    __add__, __radd__ = _make_operator_methods("add")
    __sub__, __rsub__ = _make_operator_methods("sub")
    __mul__, __rmul__ = _make_operator_methods("mul")
    __truediv__, __rtruediv__ = _make_operator_methods("div")
    __lt__, __gt__, __le__, __ge__ = (_make_operator_methods(name)[0] for name in ("lt", "gt", "le", "ge"))
    __eq__, __ne__ = (_make_operator_methods(name)[0] for name in ("eq", "ne"))
    __neg__, __abs__, __invert__, __and__, __or__ = map(_make_method, ("neg", "abs", "not", "and", "or"))
    __rand__, __ror__ = __and__, __or__
    __hash__ = object.__hash__

    def __pow__(self, other):
        raise TypeError("a device function has no powers: write x * x, or sqrt(x)")

    __rpow__ = __pow__

    def __floordiv__(self, other):
        raise TypeError("a device function has no // and %: write floor(x / y) of halfulp.kernels")

    __rfloordiv__ = __mod__ = __rmod__ = __floordiv__


Value = torch.Tensor | Traced


def product_error(a, b, p):
    """a b - p for p = a b rounded, itself rounded once (exact where it is representable)."""
    return a.trace.emit("product_error", (a, b, p)) if isinstance(a, Traced) else _product_error(a, b, p)


def square_root(x: Any) -> Any:
    """Return the correctly rounded square root."""
    if isinstance(x, Traced):
        return x.trace.emit("sqrt", (x,))
    # torch's own roots are an ulp off for some inputs on the CPU.
    if x.dtype == torch.float32:
        return compute_float32_square_root(x)
    s = x.sqrt()
    p = s * s
    better = s + ((x - p) - _product_error(s, s, p)) / (s + s)
    return torch.where(is_finite(better), better, s)


def round_to_integer(x):
    """Round to an integer, ties to even."""
    return x.trace.emit("rint", (x,)) if isinstance(x, Traced) else x.round()


def select(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b; of tensors too."""
    if isinstance(condition, Traced):
        kind = condition.trace.find_kind(a, b)
        return condition.trace.emit("select", (condition, a, b), None, kind)
    return torch.where(condition, a, b) if isinstance(condition, torch.Tensor) else a if condition else b


def _emit_bit_cast(x: Traced) -> Traced:
    """Return the word of a real, or the real of a word."""
    return x.trace.emit("bits", (x,), None, ("w" if x.kind[0] == "f" else "f") + x.kind[1:])


def _emit_word_operation(operation: str, x: Traced, number: int) -> Traced:
    return x.trace.emit_binary(f"word_{operation}", x, np.uint64(number) if x.kind == "w64" else np.uint32(number))


def _find_mantissa_bits_and_bias(x: Any) -> tuple[int, int]:
    """Return the bits of a real's fraction, and the bias of its exponent."""
    dtype = torch.float64 if (x.kind == "f64" if isinstance(x, Traced) else x.dtype == torch.float64) else torch.float32
    return MANTISSA_BITS_BY_DTYPE[dtype], _EXPONENT_BIAS_BY_DTYPE[dtype]


def power_of_two_below(x):
    """2^floor(log2 |x|) for a normal x; 0 for zeros and subnormals, infinity for infinities and NaNs."""
    mantissa, bias = _find_mantissa_bits_and_bias(x)
    mask = (2 * bias + 1) << mantissa
    if isinstance(x, Traced):
        return _emit_bit_cast(_emit_word_operation("and", _emit_bit_cast(x), mask))
    return (x.contiguous().view(_WORD_DTYPE_BY_REAL_DTYPE[x.dtype]) & mask).view(x.dtype)


def exponent(x: Any) -> Any:
    """floor(log2 |x|) for a normal x, as a real number."""
    mantissa, bias = _find_mantissa_bits_and_bias(x)
    if not isinstance(x, Traced):
        biased = (x.contiguous().view(_WORD_DTYPE_BY_REAL_DTYPE[x.dtype]) >> mantissa) & (2 * bias + 1)
        return (biased - bias).to(x.dtype)
    word, is_wide = _emit_word_operation("shr", _emit_bit_cast(x), mantissa), x.kind == "f64"
    word = x.trace.emit("low_word", (word,), None, "w32") if is_wide else word
    biased = _emit_word_operation("and", word, 2 * bias + 1)
    number = x.trace.emit("to_real", (_emit_word_operation("sub", biased, bias),), None, "f32")
    return x.trace.emit("to_float64", (number,), None, "f64") if is_wide else number


def power_of_two(k: Any) -> Any:
    """2^k for an integer k in the range of normal numbers."""
    mantissa, bias = _find_mantissa_bits_and_bias(k)
    if not isinstance(k, Traced):
        return ((k.nan_to_num(0.0).to(_WORD_DTYPE_BY_REAL_DTYPE[k.dtype]) + bias) << mantissa).view(k.dtype)
    biased = select(k == k, k, 0.0) + float(bias)
    whole = k.trace.emit("to_word", (biased,), None, "w" + k.kind[1:])
    return _emit_bit_cast(_emit_word_operation("shl", whole, mantissa))


def gather(table: tuple[float, ...], index):
    """table[index] for an integer index within it."""
    if isinstance(index, Traced):
        return index.trace.emit("gather", (index,), index.trace.add_constant_table(table))
    values = torch.tensor(table, dtype=index.dtype, device=index.device)
    return values[index.nan_to_num(0.0).clamp(0, len(table) - 1).long()]


def block_largest(x):
    """Return the largest of a block's words, for each of its elements."""
    return x.trace.emit("block_largest", (x,))


def round_to_float32(x):
    """Return a float64 rounded to float32, ties to even, as float64."""
    if not isinstance(x, Traced):
        return x.float().double()
    return x.trace.emit("to_float64", (x.trace.emit("to_float32", (x,), None, "f32"),), None, "f64")


def is_finite(x: Any) -> Any:
    """Return whether a value is neither infinite nor NaN."""
    return (x - x) == 0.0


def record_function(function: Callable, dtype: torch.dtype, input_count: int) -> tuple[Trace, list[Traced]]:
    """Record what a function of `input_count` values of a dtype computes; return the trace and the results."""
    trace = Trace(dtype)
    values = [trace.emit("input", (), k) for k in range(input_count)]
    return trace, list(function(*values))


def _product_error(a: torch.Tensor, b: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.float32:
        # 24 + 24 bits fit into 53, and so does the difference from the rounded product.
        return (to_float64(a) * to_float64(b) - to_float64(p)).float().to(a.device)
    (fa, ka), (fb, kb) = torch.frexp(a), torch.frexp(b)
    k = (ka + kb).to(a.dtype)
    high = fa * fb
    a1, a2 = _split_float64(fa)
    b1, b2 = _split_float64(fb)
    low = ((a1 * b1 - high) + a1 * b2 + a2 * b1) + a2 * b2
    # Where p is subnormal it left out more than the product of the mantissas did.
    error = scale_by_power_of_two((high - scale_by_power_of_two(p, -k)) + low, k)
    return torch.where(is_finite(p), error, p - p)


def _split_float64(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a float64 into 26 and 27 bits (Veltkamp)."""
    t = x * 134217729.0
    high = t - (t - x)
    return high, x - high


def scale_by_power_of_two(x, k):
    """x 2^k for an integer k, rounded once, for |x| not near the ends of the range or k beyond all of it."""
    reach = 1000.0 if is_computed_in_float64(x) else 120.0
    first = select(k > reach, reach, select(k < -reach, -reach, k))
    rest = k - first
    rest = select(rest > reach, reach, select(rest < -reach, -reach, rest))
    return (x * power_of_two(first)) * power_of_two(rest)


def is_computed_in_float64(x) -> bool:
    """Return whether a value is computed in float64."""
    return (x.trace.dtype if isinstance(x, Traced) else x.dtype) == torch.float64
