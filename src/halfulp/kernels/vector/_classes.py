"""Choices by what a number is, infinite, NaN or zero, in the one instruction that AVX-512 has for them.

VFIXUPIMM replaces a number by a constant where another one is of some classes. It takes the place of a difference, a
comparison and a masked move in x where w - w == 0, else 0, which device functions write for finite numbers.
"""

from __future__ import annotations

from typing import Any

from .._trace import Trace
from ._processor import has_features

# Four bits per class, from the lowest: quiet NaN, signaling NaN, zero, 1, -infinity, infinity, negative, positive.
# 0 keeps the number, 1 takes the one that is classified; 7 and 8 are -0 and 0.
_NOT_FINITE, _ZERO, _TAKE_FINITE = 0x00110011, 0x00000100, 0x11001100
_RESPONSES = {(0.0).hex(): 8, (-0.0).hex(): 7}


def choice(trace: Trace, number: int) -> tuple[int, int, int] | None:
    """Return, for a select that chooses by class, the kept and the classified instruction and the table, else None."""
    condition, x, y = trace.lines[number][1]
    found = _condition(trace, condition)
    if found is None:
        return None
    of, classes = found
    kept, other = (x, y) if classes == _NOT_FINITE else (y, x)
    response = _response(trace, other)
    if response is None:
        return (y, of, _TAKE_FINITE) if classes == _NOT_FINITE and x == of else None
    return kept, of, classes * response


def fits(lanes: int) -> bool:
    """Return whether the processor has the instruction for so many float32."""
    return (lanes == 16 and has_features("avx512f")) or (lanes == 8 and has_features("avx512f", "avx512vl"))


def write_choice(b: Any, kept: Any, of: Any, table: int) -> Any:
    """Write the instruction; `kept` are reals or words."""
    ir = b.ir
    lanes, i32, reals = kept.type.count, b.i32, of.type
    mask = ir.IntType(lanes)
    given = [reals, reals, b.shape(i32, lanes), i32, mask, *([i32] if lanes == 16 else [])]
    name = f"llvm.x86.avx512.mask.fixupimm.ps.{32 * lanes}"
    function = b.b.module.globals.get(name) or ir.Function(b.b.module, ir.FunctionType(reals, given), name)
    values = [b.b.bitcast(kept, reals), of, b.constant(given[2], table), ir.Constant(i32, 0)]
    values.append(ir.Constant(mask, (1 << lanes) - 1))
    current_rounding = [ir.Constant(i32, 4)] if lanes == 16 else []
    return b.b.bitcast(b.b.call(function, values + current_rounding), kept.type)


def _condition(trace: Trace, number: int) -> tuple[int, int] | None:
    """Return of what a mask holds where it is finite, or where it is zero; None for other masks."""
    operation, operands, _ = trace.lines[number]
    if operation == "and":
        left = [k for k in operands if not _holds(trace, k)]
        return _condition(trace, left[0]) if len(left) == 1 else None
    if operation != "eq" or trace.kinds[operands[0]] != "f32":
        return None
    first, second = operands
    name, terms, _ = trace.lines[first]
    if name == "sub" and terms[0] == terms[1] and (first == second or _response(trace, second)):
        return terms[0], _NOT_FINITE
    return (first, _ZERO) if _response(trace, second) else None


def _holds(trace: Trace, number: int) -> bool:
    """Return whether a mask is true because it compares a word with itself."""
    operation, operands, _ = trace.lines[number]
    return operation == "word_eq" and operands[0] == operands[1]


def _response(trace: Trace, number: int) -> int | None:
    """Return the response that gives a constant; None where there is none."""
    operation, _, extra = trace.lines[number]
    if operation == "word" and extra == (0, 32):
        return 8
    return _RESPONSES.get(extra) if operation == "constant" and isinstance(extra, str) else None
