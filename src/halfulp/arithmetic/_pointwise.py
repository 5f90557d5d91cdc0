"""Any element-wise function of expansions: which arithmetic it runs in, and the kernel that runs it.

Pairs of bfloat16 take float32. x0 + x1 = X + xi exactly, where xi is mostly 0, so that a sum or a product is v + w with
an error below 2^-46 |v|. That decides both roundings to bfloat16 unless v or what its rounding left lies beside a tie.

All others take float64, which mostly holds an operand's components together. There, and beside the ends of the range,
the elements are in doubt: a kernel computes them by the network instead.
"""

from __future__ import annotations

import array
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..kernels import (
    BROADCAST_COPIES,
    MOST_SERIAL_ELEMENTS,
    FastPathTrace,
    address,
    compile_trace,
    define_operator,
    is_finite,
    keeping_subnormals,
    note_fallback,
    power_of_two_below,
    product_error,
    record_function,
    run_chunks,
    select,
    select_engine,
    to_plain_memory,
)
from ..kernels._operations import add, bit_and, bit_or, bit_xor, real, shl, shr, sub, word
from ..kernels._threads import cached_attribute, count_kernel_threads
from ..kernels.triton._expansions import MOST_POINTWISE_INSTRUCTIONS, VECTOR_ELEMENTS, PointwiseKernel
from ..kernels.triton._launch import find_checked_kernel
from ..rounding._kernels import increment_tensor_version
from ._functions import EXPANSION_FUNCTION_BY_NAME, LARGEST_ANGLE
from ._operators import (
    SIXTEEN_BIT_LIMITS_BY_DTYPE,
    Terms,
    fast_two_sum,
    round_to_components,
    sum_float16_components,
    to_float64_terms,
    two_sum,
)

# Outside of these magnitudes float32 overflows, or loses bits below its normal numbers.
_LEAST_SAFE_WORD, _GREATEST_SAFE_WORD = (127 - 100) << 24, (127 + 126) << 24
_BFLOAT16_MASK, _SIGN_MASK = 0xFFFF0000, 0x80000000
_ARITHMETIC_OPERATOR_BY_NAME = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def make_fast_function_with_doubt_mask(
    name: str, counts: tuple[int, ...], components: int, dtype: torch.dtype
) -> tuple[Callable[..., Terms], torch.dtype] | None:
    """Return a function of components of one dtype to a result's and a mask of those in doubt, and its arithmetic."""
    if name not in _ARITHMETIC_OPERATOR_BY_NAME or dtype not in SIXTEEN_BIT_LIMITS_BY_DTYPE:
        return None
    if dtype == torch.bfloat16 and components == 2 and max(counts) <= 2:
        pair_function, count = _BFLOAT16_PAIR_FUNCTION_BY_NAME[name], counts[0]
        return lambda *values: pair_function(list(values[:count]), list(values[count:])), torch.float32

    def compute_in_float64(*values: Any) -> Terms:
        a, doubt_a = _sum_components_with_loss_mask(list(values[: counts[0]]), dtype)
        b, doubt_b = _sum_components_with_loss_mask(list(values[counts[0] :]), dtype)
        rest = _ARITHMETIC_OPERATOR_BY_NAME[name](a, b)
        doubt = doubt_a | doubt_b | ~(abs(rest) < SIXTEEN_BIT_LIMITS_BY_DTYPE[dtype][2] / 2)
        found = []
        for _ in range(components):
            found.append(_round_assuming_no_overflow(rest, dtype))
            rest = rest - found[-1]
        return [*found, doubt]

    return compute_in_float64, torch.float64


def _sum_components_with_loss_mask(x: Terms, dtype: torch.dtype) -> tuple[Any, Any]:
    """Add components up in float64; a first one of 0, which has a sign, is all. Say where bits were lost."""
    total, lost = x[0], x[0] != x[0]
    for part in x[1:]:
        before, total = total, total + part
        if dtype != torch.float16:  # all of whose bits fit
            lost = lost | (total - before != part) | (total - part != before)
    return select(x[0] == 0.0, x[0], total), lost


def _round_assuming_no_overflow(x, dtype: torch.dtype):
    """Round a float64 that no rounding makes infinite: see `round_to_narrow_dtype`."""
    precision, lowest, _ = SIXTEEN_BIT_LIMITS_BY_DTYPE[dtype]
    magic, least = power_of_two_below(x) * (1.5 * 2.0 ** (53 - precision)), 1.5 * 2.0 ** (lowest + 53 - precision)
    magic = select(magic > least, magic, least)
    nearest = (x + magic) - magic
    return select(nearest == 0.0, x * 0.0, nearest)


def _add_bfloat16_pairs(x: Terms, y: Terms) -> Terms:
    (a, left_a), (b, left_b) = _renormalize_pair(x), _renormalize_pair(y)
    s, e = two_sum(a, b)
    v, w = fast_two_sum(s, e + (left_a + left_b))
    sign = bit_and(bit_and(word(x[0]), word(y[0])), _SIGN_MASK)
    first, second, doubt = _round_to_bfloat16_pair_with_doubt(v, w, left_a, left_b, v == 0.0)
    return [real(bit_or(word(first), sign)), second, doubt | (left_a != 0.0) & (left_b != 0.0)]


def _multiply_bfloat16_pairs(x: Terms, y: Terms) -> Terms:
    (a, left_a), (b, left_b) = _renormalize_pair(x), _renormalize_pair(y)
    p = a * b
    v, w = fast_two_sum(p, product_error(a, b, p) + (left_a * b + left_b * a))
    sign = bit_and(bit_xor(word(x[0]), word(y[0])), _SIGN_MASK)
    # A product that float32 takes for 0 leaves the sign of a second component to the network.
    is_zero = (v == 0.0) & ((a == 0.0) | (b == 0.0))
    first, second, doubt = _round_to_bfloat16_pair_with_doubt(v, w, left_a, left_b, is_zero)
    return [real(bit_or(bit_and(word(first), _BFLOAT16_MASK ^ _SIGN_MASK), sign)), second, doubt]


_BFLOAT16_PAIR_FUNCTION_BY_NAME: dict[str, Callable[[Terms, Terms], Terms]] = {
    "add": _add_bfloat16_pairs,
    "sub": lambda x, y: _add_bfloat16_pairs(x, [-t for t in y]),
    "mul": _multiply_bfloat16_pairs,
}


def _renormalize_pair(x: Terms) -> tuple[Any, Any]:
    return fast_two_sum(*x) if len(x) > 1 else (x[0], x[0] * 0.0)


def _round_to_bfloat16_pair_with_doubt(v, w, left_a, left_b, is_zero) -> tuple[Any, Any, Any]:
    """Round v + w to two bfloat16; say where they may be others, as other bits are lost or the range ends."""
    first = _round_to_bfloat16(v)
    rest = (v - first) + w
    lost = bit_or(bit_or(word(w), word(left_a)), word(left_b)) != 0
    # |v - first| of 4 units or more of v keeps what was lost below a unit or two of the rest.
    beside_tie = bit_and(add(word(v), 4), 0x7FF8) == 0
    rest_beside_tie = bit_and(add(word(rest), 0x8004), 0xFFF8) == 0
    size = shl(word(v), 1)
    in_range = (sub(size, _LEAST_SAFE_WORD) < _GREATEST_SAFE_WORD - _LEAST_SAFE_WORD) | is_zero
    return first, _round_to_bfloat16(rest), lost & (beside_tie | rest_beside_tie) | ~in_range


def _round_to_bfloat16(x):
    """Round float32 to bfloat16, ties to even, still as float32."""
    bits = word(x)
    return real(bit_and(add(add(bits, 0x7FFF), bit_and(shr(bits, 16), 1)), _BFLOAT16_MASK))


Parts = tuple[torch.Tensor, ...]
Dtypes = tuple[torch.dtype, ...]
PRECISION_BY_DTYPE = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
MAX_COMPONENTS: int = 4
ANGLE_FUNCTION_NAMES = ("sin", "cos")
_ROW_LENGTH = 8192
_PYTHON_ARRAY_TYPECODE_BY_DTYPE = {
    torch.float32: "f",
    torch.float64: "d",
}  # of Python's arrays, which cost less to make than tensors


@dataclass(eq=False)
class ElementwiseKernels:
    """A function of a few values per element, as kernels that fill tensors with its results."""

    name: str  # for the cache of machine code, and for messages
    function: Callable[..., Terms]  # as many values as there are inputs -> as many terms as there are outputs
    arithmetic: torch.dtype
    stored: Dtypes  # of the inputs in memory
    written: Dtypes  # of the outputs in memory
    # The same function in fewer steps, with a mask of elements in doubt behind its terms, and its arithmetic.
    fast_function_with_doubt_mask: tuple[Callable[..., Terms], torch.dtype] | None = None
    exact: bool = False  # whether the terms are numbers of `written`

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Fill `outputs` (contiguous, of one shape; they may be inputs too) from inputs that broadcast to them."""
        written, count, device = tuple(outputs), outputs[0].numel(), outputs[0].device
        engine = select_engine(device.type)
        if not count:
            return
        if engine == "llvm":
            run_on_broadcast_operands(self.cpu_kernel, inputs, written)
        elif engine == "triton" and (kernel := self._find_triton_kernel(device, count % VECTOR_ELEMENTS == 0)):
            kernel(inputs, written)
        else:
            with keeping_subnormals():
                for target, term in zip(written, self.evaluate(inputs), strict=True):
                    target.copy_(term)

    def evaluate(self, inputs: Sequence[torch.Tensor]) -> Terms:
        """Return the terms, by plain torch."""
        return self.function(*(part.to(self.arithmetic) for part in inputs))

    @cached_attribute
    def recorded_trace(self) -> tuple[Any, list[int]]:
        """The instructions, and which of them are results."""
        trace, results = record_function(self.function, self.arithmetic, len(self.stored))
        return trace, [r.number if hasattr(r, "number") else trace.emit("add", (r, 0.0)).number for r in results]

    @cached_attribute
    def cpu_kernel(self) -> Callable[..., Any]:
        """The kernel of the processor."""
        quick = None
        if self.fast_function_with_doubt_mask is not None:
            trace, found = record_function(*self.fast_function_with_doubt_mask, len(self.stored))
            *results, doubt = (value.number for value in found)
            quick = FastPathTrace(trace, tuple(results), doubt)
        return compile_trace(self.name, *self.recorded_trace, self.stored, self.written, quick, self.exact)

    @cached_attribute
    def triton_kernel(self) -> PointwiseKernel:
        """The kernel of an accelerator."""
        return PointwiseKernel(*self.recorded_trace)

    def _find_triton_kernel(self, device: torch.device, whole: bool) -> Any:
        """Return the kernel of an accelerator, compared with plain torch; None, counted, where there is none."""
        label, size = f"{self.name} of {', '.join(map(str, self.stored))}", self.triton_kernel.size
        if size > MOST_POINTWISE_INSTRUCTIONS:
            note_fallback("engine", f"{label} is too long for Triton, {size} instructions: plain torch instead")
            return None
        count = 512 if whole else 515
        trial = [part[:count] for part in _make_canary_inputs(self.stored)]

        def run(kernel: PointwiseKernel, device: torch.device) -> list[torch.Tensor]:
            made = [torch.empty(count, dtype=dtype, device=device) for dtype in self.written]
            kernel([part.to(device) for part in trial], made)
            return [part.cpu() for part in made]

        def reference() -> list[torch.Tensor]:
            return [term.to(dtype) for term, dtype in zip(self.evaluate(trial), self.written)]

        return find_checked_kernel((self, whole), label, device, lambda: self.triton_kernel, run, reference)


@functools.cache
def _make_canary_inputs(stored: Dtypes) -> list[torch.Tensor]:
    """Return fixed elements, different per input: both signs, magnitudes from 2^-12 to 2^12, zeros, infinities, NaN."""
    made = []
    for k, dtype in enumerate(stored):
        ramp = torch.linspace(-1, 1, 509, dtype=torch.float64, device="cpu").roll(61 * k)
        value = (ramp * torch.exp2(torch.linspace(-12, 12, 509, dtype=torch.float64, device="cpu"))).to(dtype)
        special = torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan], dtype=dtype, device="cpu")
        made.append(torch.cat([special.roll(k), value]))
    return made


@functools.cache
def make_pointwise_kernels(
    name: str, operands: tuple[tuple[torch.dtype, int], ...], components: int, dtype: torch.dtype
) -> ElementwiseKernels:
    """Return the kernels of a function, from its operands' and its result's dtypes and numbers of components.

    The arithmetic is float32 where + - * / and roots of up to two float32 are asked for, else float64.
    """
    if name not in EXPANSION_FUNCTION_BY_NAME:
        raise ValueError(f"no function {name!r} of expansions: there are {', '.join(names())}")
    function = EXPANSION_FUNCTION_BY_NAME[name]
    if len(operands) != function.operands:
        raise ValueError(f"{name} takes {function.operands} operands, got {len(operands)}")
    check_component_dtypes(*operands, (dtype, components))
    counts, dtypes = tuple(count for _, count in operands), {dtype, *(kind for kind, _ in operands)}
    is_narrow = function.any_precision and dtypes == {torch.float32} and max(components, *counts) <= 2
    arithmetic = torch.float32 if is_narrow else torch.float64

    def evaluate(*values: Any) -> Terms:
        terms, rest = [], list(values)
        for kind, count in operands:
            parts, rest = rest[:count], rest[count:]
            if kind == torch.float16 == dtype and name != "renormalize":  # of which terms have no order
                parts = sum_float16_components(parts)
            elif kind != arithmetic:
                parts = to_float64_terms(parts)
            terms.append(parts)
        if dtype == arithmetic:
            return function.network(*terms, components)[:components]
        # So many components carry the result and a few bits more.
        working = -(-(components * PRECISION_BY_DTYPE[dtype] + 4) // PRECISION_BY_DTYPE[arithmetic])
        return round_to_components(function.network(*terms, working), dtype, components)

    stored, written = tuple(kind for kind, count in operands for _ in range(count)), (dtype,) * components
    quick = make_fast_function_with_doubt_mask(name, counts, components, dtype) if len(dtypes) == 1 else None
    return ElementwiseKernels(f"pointwise_{name}", evaluate, arithmetic, stored, written, quick, exact=True)


def pointwise(name: str, *operands: Parts, components: int, dtype: torch.dtype, out: Parts | None = None) -> Parts:
    """Apply a function to expansions, element by element, within the bounds that its network states.

    Args:
        name: one of `names()`.
        operands: each a tuple of 1 to 4 components, largest first, of one dtype (float16, bfloat16, float32, float64)
            and shape; shapes broadcast.
        components: of the result, 1 to 4.
        dtype: of the result's components.
        out: components to write into, of the broadcast shape; they may be an operand's own.

    Returns:
        The result's components, largest first, without gradient.

    Raises:
        ValueError: an unknown name, the wrong number of operands, or of components; components that differ in shape, or
            `out` that requires gradients.
        TypeError: a dtype that is not one of the four; components, or `out`, of another dtype than they should be.

    >>> import torch
    >>> third = pointwise("div", (torch.ones(()),), (torch.full((), 3.0),), components=2, dtype=torch.float32)
    >>> float(third[0].double() + third[1].double()) - 1 / 3 < 2**-48
    True
    """
    flat, kinds, plain = [], [], True
    for parts in operands:
        kinds.append(find_component_kind(parts))
        for part in parts:
            flat.append(part)
            plain = plain and type(part) is torch.Tensor
    if out is None and (not plain or torch.compiler.is_compiling()):
        return tuple(_pointwise_operator(name, flat, [count for _, count in kinds], components, dtype))
    elements = make_pointwise_kernels(name, tuple(kinds), components, dtype)
    if out is None:
        return _fill_results(name, elements, flat, None)
    if find_component_kind(out) != (dtype, components):
        raise TypeError(f"out is {components} tensors of {dtype}, got {[part.dtype for part in out]}")
    if torch.is_grad_enabled() and any(part.requires_grad for part in out):
        raise ValueError("out requires gradients and would be written in place: write under torch.no_grad()")
    written = _fill_results(name, elements, flat, out)
    for part in written:
        increment_tensor_version(part)
    return written


def run_on_like_operands(name: str, a: Parts, b: Parts) -> Parts:
    """`pointwise` of two contiguous operands of one shape, dtype and number of components, and a result of these.

    In half the steps: small operators take as long as their steps in Python.
    """
    first = a[0]
    if type(first) is not torch.Tensor or type(b[0]) is not torch.Tensor or torch.compiler.is_compiling():
        return pointwise(name, a, b, components=len(a), dtype=first.dtype)
    elements, count = _make_kernels_for_like_operands(name, first.dtype, len(a)), first.numel()
    if not count or select_engine(first.device.type) != "llvm":
        return pointwise(name, a, b, components=len(a), dtype=first.dtype)
    made = tuple([torch.empty_like(first) for _ in a])
    row = count if count < _ROW_LENGTH else _ROW_LENGTH
    words = [row, count]
    for part in (*a, *b, *made):
        words += (part.data_ptr(), row, 1)
    _run_kernel_on_rows(elements.cpu_kernel, words)
    return made


@functools.cache
def _make_kernels_for_like_operands(name: str, dtype: torch.dtype, components: int) -> ElementwiseKernels:
    """Return the kernels of `run_on_like_operands`."""
    return make_pointwise_kernels(name, ((dtype, components),) * 2, components, dtype)


def names() -> tuple[str, ...]:
    """Return the names of all functions that `pointwise` computes.

    >>> "exp" in names()
    True
    """
    return tuple(EXPANSION_FUNCTION_BY_NAME)


def find_component_kind(parts: Sequence[torch.Tensor]) -> tuple[torch.dtype, int]:
    """Return the dtype of a value's components and their number; kernels read all as they read the first one.

    Raises:
        TypeError, ValueError: they are none, or differ in dtype, or in shape.
    """
    if not parts:
        raise ValueError(f"0 components: allowed are 1 to {MAX_COMPONENTS}")
    first = parts[0]
    for part in parts[1:]:
        if part.dtype is not first.dtype:
            raise TypeError(f"components of {first.dtype} and {part.dtype}: those of one value have one dtype")
        if part.shape != first.shape:
            raise ValueError(
                f"components of shapes {tuple(first.shape)} and {tuple(part.shape)}: those of one value have one shape"
            )
    return first.dtype, len(parts)


def check_component_dtypes(*kinds: tuple[torch.dtype, int]) -> None:
    """Raise unless operands and results have 1 to MAX_COMPONENTS components of a known dtype."""
    for kind, count in kinds:
        if kind not in PRECISION_BY_DTYPE:
            raise TypeError(f"components of {kind}: allowed are float16, bfloat16, float32 and float64")
        if not 1 <= count <= MAX_COMPONENTS:
            raise ValueError(f"{count} components: allowed are 1 to {MAX_COMPONENTS}")


def _fill_results(name: str, elements: ElementwiseKernels, flat: Sequence[torch.Tensor], out: Parts | None) -> Parts:
    if name in ANGLE_FUNCTION_NAMES:
        far = (flat[0].abs() > LARGEST_ANGLE) & torch.isfinite(flat[0])
        if bool(far.any()):
            raise ValueError(
                f"{name} of components takes angles up to 2**20, got {float(flat[0][far][0]):.6g}: reduce them "
                "first, or take x.decode()"
            )
    first = flat[0]
    shape = first.shape
    for part in flat:
        if part.shape != shape:
            shapes = {part.shape for part in flat if part.dim()}  # mostly one
            shape = shapes.pop() if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
            break
    if out is not None and all(part.is_contiguous() and part.shape == shape for part in out):
        written = out
        flat = [part.clone() if _is_written_before_read(part, out) else part for part in flat]
    else:
        written = _make_outputs_like(first, shape, elements.written[0], len(elements.written))
    elements(flat, written)
    if out is not None and out is not written:
        for target, part in zip(out, written, strict=True):
            target.copy_(part)
        return out
    return written


def _is_written_before_read(part: torch.Tensor, out: Parts) -> bool:
    """Return whether elements of an operand are written before they are read: it shares memory otherwise than alike."""
    memory = part.untyped_storage().data_ptr()
    if all(memory != other.untyped_storage().data_ptr() for other in out):
        return False
    is_alike = any(part.data_ptr() == other.data_ptr() and part.shape == other.shape for other in out)
    return not (is_alike and part.is_contiguous())


def _make_outputs_like(first: torch.Tensor, shape: torch.Size, dtype: torch.dtype, components: int) -> Parts:
    """Return new contiguous tensors, in half the time for a contiguous one of that shape and dtype."""
    if first.dtype is dtype and first.is_contiguous() and first.shape == shape:
        return tuple([torch.empty_like(first) for _ in range(components)])
    return tuple([torch.empty((*shape,), dtype=dtype, device=first.device) for _ in range(components)])


def run_on_broadcast_operands(kernel: Callable[..., Any], flat: Sequence[torch.Tensor], written: Parts) -> None:
    """Run a kernel on operands that broadcast to the results, which are contiguous and not empty."""
    shape, count = written[0].shape, written[0].numel()
    row = count if count < _ROW_LENGTH else _ROW_LENGTH
    words, _alive = [row, count], flat
    for part in flat:
        at = part.data_ptr()
        if not at or part.is_neg() or part.shape != shape or not part.is_contiguous():
            words, _alive = _make_operand_words(flat, shape, count)
            row = words[0]
            break
        words += (at, row, 1)
    for part in written:
        words += (part.data_ptr() or address(part), row, 1)
    _run_kernel_on_rows(kernel, words)


def _run_kernel_on_rows(kernel: Callable[..., Any], words: list[int]) -> None:
    """Run a kernel on a table that begins with the elements of a row and of all rows."""
    (row, count), table = words[:2], array.array("q", words)
    rows = -(-count // row)
    if count < MOST_SERIAL_ELEMENTS or rows == 1 or count_kernel_threads() == 1:
        kernel(0, rows, table.buffer_info()[0])
    else:
        run_chunks(kernel, np.full(rows, row, np.int64), table.buffer_info()[0])


def _make_operand_words(flat: Sequence[torch.Tensor], shape: torch.Size, count: int) -> tuple[list[int], Sequence[Any]]:
    """Return the table's words for operands of any shapes and strides, and the tensors that own them."""
    row = count if count < _ROW_LENGTH else _ROW_LENGTH
    for part in flat:
        if part.shape != shape and part.numel() != 1:
            row = shape[-1]
            break
    words = [row, count]
    alive: list[torch.Tensor | array.array[Any]] = []
    for part in map(to_plain_memory, flat):
        if part.shape != shape:
            owner, entry = _lay_out_operand_values(part, shape, row)
            alive.append(owner)
            words += entry
        else:
            part = part.contiguous()
            alive.append(part)
            words += (address(part), row, 1)
    return words, alive


def _lay_out_operand_values(
    part: torch.Tensor, shape: torch.Size, row: int
) -> tuple[torch.Tensor | array.array[Any], tuple[int, int, int]]:
    """Return a broadcast operand as the kernel reads it: repeated LANES times, row by row, or written out."""
    if part.numel() == 1:
        if part.dtype in _PYTHON_ARRAY_TYPECODE_BY_DTYPE:
            copies = array.array(_PYTHON_ARRAY_TYPECODE_BY_DTYPE[part.dtype], (part.item(),)) * BROADCAST_COPIES
            return copies, (copies.buffer_info()[0], 0, 0)
        part = part.reshape(1).expand(BROADCAST_COPIES).contiguous()
        return part, (address(part), 0, 0)
    if part.dim() == 1 and part.shape[-1] == row:
        part = part.contiguous()
        return part, (address(part), 0, 1)
    if part.shape[-1] == 1:
        part = part.expand(*shape[:-1], 1).reshape(-1, 1).expand(-1, BROADCAST_COPIES).contiguous()
        return part, (address(part), BROADCAST_COPIES, 0)
    part = part.expand(shape).contiguous()
    return part, (address(part), row, 1)


def _run_pointwise_operator(
    name: str, parts: list[torch.Tensor], counts: list[int], components: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    starts = itertools.accumulate(counts, initial=0)
    kinds = tuple((parts[start].dtype, count) for start, count in zip(starts, counts))
    return list(_fill_results(name, make_pointwise_kernels(name, kinds, components, dtype), parts, None))


_pointwise_operator = define_operator(
    "pointwise(str name, Tensor[] parts, int[] counts, int components, ScalarType dtype) -> Tensor[]",
    _run_pointwise_operator,
    lambda name, parts, counts, components, dtype: [
        parts[0].new_empty(torch.broadcast_shapes(*(part.shape for part in parts)), dtype=dtype)
        for _ in range(components)
    ],
)


def split(x: torch.Tensor, dtype: torch.dtype, components: int) -> Parts:
    """Return a tensor as a sum of components, each the nearest number to what the ones before left.

    Args:
        x: any shape, float16, bfloat16, float32 or float64.
        dtype: of the components.
        components: 1 to 4.

    >>> import torch
    >>> [float(part) for part in split(torch.tensor(0.1, dtype=torch.float64), torch.float32, 2)]
    [0.10000000149011612, -1.4901161415892261e-09]
    """
    return pointwise("renormalize", (x,), components=components, dtype=dtype)


def merge(parts: Parts, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the sum of all components, rounded once to a dtype.

    >>> import torch
    >>> merge((torch.tensor(1.0), torch.tensor(2.0**-30)), torch.float64).item() - 1 == 2.0**-30
    True
    """
    if len(parts) <= 2 or dtype != torch.float64:
        return pointwise("renormalize", parts, components=1, dtype=dtype)[0]
    first, second, third = pointwise("renormalize", parts, components=3, dtype=dtype)
    # Where the second is half a spacing, the third decides the tie.
    other = first + 2 * second
    tie = (other - first == 2 * second) & (torch.nextafter(first, other) == other) & (second != 0)
    return torch.where(tie & (third.sign() == second.sign()), other, first)


def renormalize(parts: Parts, components: int, dtype: torch.dtype | None = None) -> Parts:
    """Return canonical components of the same sum, |next| <= ulp(previous) / 2, from terms of any order and overlap."""
    return pointwise("renormalize", parts, components=components, dtype=dtype or parts[0].dtype)


def compare(a: Parts, b: Parts) -> torch.Tensor:
    """Return the sign of a - b by value, exactly, as int8: -1, 0, 1, and 2 where either is NaN.

    >>> import torch
    >>> one, tiny = torch.tensor(1.0), torch.tensor(2.0**-60)
    >>> int(compare((one, tiny), (one,)))
    1
    """
    return pointwise("compare", a, b, components=1, dtype=torch.float32)[0].to(torch.int8)


ScaledOperand = tuple[Parts, torch.Tensor | None]  # components, and their 0-d scale
_OperandKinds = tuple[tuple[torch.dtype, int, bool], ...]


def can_evaluate_scaled_operands(name: str, operands: Sequence[ScaledOperand]) -> bool:
    """Return whether `evaluate_scaled_operands_in_float64` computes a function of these operands, not compiled."""
    if name in ANGLE_FUNCTION_NAMES or torch.compiler.is_compiling():
        return False
    return all(
        type(part) is torch.Tensor for parts, scale in operands for part in (*parts, *_list_scale_if_present(scale))
    )


def evaluate_scaled_operands_in_float64(
    name: str, operands: Sequence[ScaledOperand], components: int
) -> tuple[Parts, torch.Tensor]:
    """Return a function as float64 components, and the magnitude of each element, 0 where it is not finite."""
    kinds = tuple((parts[0].dtype, len(parts), scale is not None) for parts, scale in operands)
    shapes = {part.shape for parts, _ in operands for part in parts}
    shape = next(iter(shapes)) if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
    model = next((parts[0] for parts, _ in operands if parts[0].dim()), operands[0][0][0])
    *made, size = _make_outputs_like(model, shape, torch.float64, components + 1)
    _make_scaled_kernels(name, kinds, components)(
        [x for parts, scale in operands for x in (*parts, *_list_scale_if_present(scale))], (*made, size)
    )
    return tuple(made), size


def round_under_scale(
    wide: Parts, scale: torch.Tensor, components: int, dtype: torch.dtype, keeps_nonzero: bool = False
) -> Parts:
    """Return the components whose sum times a scale, 0-d and a power of two, is the value of float64 components."""
    made = _make_outputs_like(wide[0], wide[0].shape, dtype, components)
    # A product with the reciprocal has the quotient's bits, as scales are powers of two.
    _make_rounding_kernels(len(wide), components, dtype, keeps_nonzero)([*wide, scale.double().reciprocal()], made)
    return made


def _list_scale_if_present(scale: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return () if scale is None else (scale,)


@functools.cache
def _make_scaled_kernels(name: str, kinds: _OperandKinds, components: int) -> ElementwiseKernels:
    def function(*values: Any) -> Terms:
        rest, operands = list(values), []
        for dtype, count, scaled in kinds:
            parts, rest = rest[:count], rest[count:]
            if scaled:
                scale, *rest = rest
                terms = [t * scale for t in (sum_float16_components(parts) if dtype == torch.float16 else parts)]
            else:
                terms = parts if dtype == torch.float64 else to_float64_terms(parts)
            operands.append(terms)
        made = EXPANSION_FUNCTION_BY_NAME[name].network(*operands, components)[:components]
        return [*made, select(is_finite(made[0]), abs(made[0]), 0.0)]

    stored = tuple(one for dtype, count, scaled in kinds for one in [*[dtype] * count, *[torch.float32] * scaled])
    return ElementwiseKernels(f"scaled_{name}", function, torch.float64, stored, (torch.float64,) * (components + 1))


@functools.cache
def _make_rounding_kernels(count: int, components: int, dtype: torch.dtype, keeps_nonzero: bool) -> ElementwiseKernels:
    rounding = make_pointwise_kernels("renormalize", ((torch.float64, count),), components, dtype)
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps

    def function(*values: Any) -> Terms:
        *wide, inverse = values
        made = rounding.function(*(part * inverse for part in wide))
        if keeps_nonzero:
            vanished = made[0] == 0.0
            made[0] = select(vanished & (wide[0] > 0.0), least, made[0])
            made[0] = select(vanished & (wide[0] < 0.0), -least, made[0])
        return made

    stored, written = (torch.float64,) * (count + 1), (dtype,) * components
    return ElementwiseKernels("components_under_scale", function, torch.float64, stored, written, exact=True)
