"""A recorded device function as the source of a Triton function on blocks of elements."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import linecache
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .._threads import cached_attribute
from .._trace import Trace
from . import _operations as operations

# No fused multiply-add: it rounds once where the reference rounds twice.
COMPILE_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
LONG_TRACE_INSTRUCTIONS = 1000  # with those of calls; a longer trace takes too long to compile like others
_INFIX_OPERATOR_BY_OPERATION = {
    **{"add": "+", "sub": "-", "mul": "*", "lt": "<", "gt": ">", "le": "<=", "ge": ">=", "eq": "==", "ne": "!="},
    **{"and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>"},
}
# What an operation that is no function of `_operations` is as an expression of its operands x, y and z.
_EXPRESSION_BY_OPERATION = {
    "not": "{x} == 0",
    "select": "tl.where({x}, {y}, {z})",
    "floor": "tl.floor({x})",
    "low_word": "{x}.to(tl.uint32)",
    "high_word": "({x} >> 32).to(tl.uint32)",
    "widen": "{x}.to(tl.uint64)",
    "to_real": "{x}.to(tl.int32, bitcast=True).to(tl.float32)",
    "to_word": "{x}.to(tl.int32).to(tl.uint32, bitcast=True).to({type})",
    "to_float32": "{x}.to(tl.float32)",
    "to_float64": "{x}.to(tl.float64)",
    "word_sar": "({x}.to(tl.int64, bitcast=True) >> {y}.to(tl.int64)).to(tl.uint64, bitcast=True)",
    "word_mulh16": "(({x} >> 16) * ({y} >> 16) & 0xFFFF0000) | (({x} & 0xFFFF) * ({y} & 0xFFFF) >> 16)",
    "multiply_add": "{x} * {y} + {z}",
}
_TRITON_TYPE_BY_KIND = {"f32": "tl.float32", "f64": "tl.float64", "w32": "tl.uint32", "w64": "tl.uint64"}


def write_module(functions: Iterable[str], kernel: str, size: int = 0) -> str:
    """Return the source of a Triton module: a kernel, the functions that it calls, and operations that those call.

    Beyond LONG_TRACE_INSTRUCTIONS instructions the kernel's tile has at most a vector of float64 per thread.
    """
    texts = {
        name: f"@triton.jit\n{inspect.getsource(function).rstrip()}"
        for name, function in vars(operations).items()
        if inspect.isfunction(function)
    }
    if size > LONG_TRACE_INSTRUCTIONS:
        texts |= {name: texts[f"{name}_in_loop"].replace("_in_loop", "") for name in ("read", "write")}
    written = "\n\n\n".join([*functions, kernel])
    for name, text in reversed(texts.items()):  # each stands behind those that it calls
        if f"{name}(" in written:
            written = f"{text}\n\n\n{written}"
    return f"import triton\nimport triton.language as tl\n\n\n{written}"


def write_element_function(name: str, trace: Trace, arguments: Mapping[Any, str]) -> str:
    """Return the source of a device function of blocks i of elements, in blocks b, of which some lanes exist.

    It takes i, b, the arguments, which are named by the addresses' columns and by the inputs that are used, `lanes` and
    `aligned`, and returns the sums' values.
    """
    lines = _write_lines(trace, arguments)
    for (address, bits, per_block), number in trace.stores.items():
        place, index = arguments[trace.lines[address][2]], "b[:, None]" if per_block else "i"
        if bits == 4:
            lines.append(f"store4({place}, b, i, v{number}, lanes, aligned)")
        else:
            to = f"element_pointer({place}, tl.uint{bits}, aligned) + {index}"
            lines.append(f"write({to}, v{number}.to(tl.uint{bits}), lanes)")
    for address, number, word, _ in trace.counter_additions:
        lines.append(f"add_to_counter64({arguments[trace.lines[address][2]]}, v{number}, v{word}, lanes)")
    lines += [f"return {', '.join(f'v{number}' for _, number in trace.sums)}"] if trace.sums else []
    return _write_function(name, ["i", "b", *arguments.values(), "lanes", "aligned: tl.constexpr"], lines)


def write_functions(name: str, trace: Trace, results: Sequence[int]) -> list[str]:
    """Return the sources of a device function of inputs x0, x1, ... and of those that it calls, which come first.

    If any looks constants up, each takes `tables` behind its inputs, the address of the values of
    `concatenate_tables(trace)`.

    >>> from halfulp.kernels._device_function import record_word_function
    >>> from halfulp.kernels._operations import mul
    >>> piece = record_word_function(lambda x: mul(x, x), "w32")
    >>> print(*write_functions("square", piece.trace, piece.results))
    @triton.jit
    def square(x0):
        v0 = x0
        v1 = v0 * v0
        return v1
    """
    found: dict[str, str] = {}
    tables = _list_tables(trace)
    offsets = dict(zip(tables, itertools.accumulate(map(len, tables), initial=0)))

    def write(name: str, trace: Trace, results: Sequence[int]) -> None:
        names: dict[Any, str] = {k: f"x{k}" for k in range(sum(line[0] == "input" for line in trace.lines))}
        arguments = [*names.values(), *(["tables"] if offsets else [])]
        for k, piece in enumerate(trace.functions):
            told = repr((piece.trace.digest(), piece.results))
            called = f"piece_{hashlib.sha256(told.encode()).hexdigest()[:16]}"
            names["call", k] = f"{called}({{}}{', tables' if offsets else ''})"
            if called not in found:
                write(called, piece.trace, piece.results)
        names |= {("table", k): str(offsets[table]) for k, table in enumerate(trace.tables)}
        found[name] = _write_function(name, arguments, _write_lines(trace, names, results))

    write(name, trace, results)
    return list(found.values())


def concatenate_tables(trace: Trace) -> tuple[float, ...]:
    """Return the constants that a trace and those that it calls look up, one table behind the other."""
    return tuple(itertools.chain(*_list_tables(trace)))


def _list_tables(trace: Trace) -> list[tuple[float, ...]]:
    called = (table for piece in trace.functions for table in _list_tables(piece.trace))
    return list(dict.fromkeys([*trace.tables, *called]))


def find_needed_instructions(trace: Trace, results: Iterable[int] = ()) -> set[int]:
    """Return the numbers of the instructions on which results, and what a trace stores and sums up, depend."""
    needed = {*results, *trace.find_output_instructions()}
    for number in reversed(range(len(trace.lines))):
        if number in needed:
            needed.update(trace.lines[number][1])
    return needed


@functools.cache
def load_triton_module(source: str) -> dict[str, object]:
    """Return the names of a generated module, which imports triton; Triton reads its text to compile from it."""
    name = f"<halfulp triton {hashlib.sha256(source.encode()).hexdigest()[:32]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, object] = {"__name__": name, "__file__": name}
    exec(compile(source, name, "exec"), namespace)
    return namespace


class TritonKernel:
    """The base of kernels, whose text is compiled at the first launch."""

    source: Any  # the text of the module, with the kernel's function `run`

    @cached_attribute
    def triton_function(self) -> Any:
        """The Triton function; NotImplementedError over an operation that has no form on Triton's blocks."""
        return load_triton_module(self.source)["run"]


def _write_function(name: str, arguments: Iterable[str], lines: Iterable[str]) -> str:
    return f"@triton.jit\ndef {name}({', '.join(arguments)}):\n{indent_lines(lines)}"


def indent_lines(lines: Iterable[str]) -> str:
    """Return lines as the body of a function."""
    return textwrap.indent("\n".join(lines), "    ")


def _write_lines(trace: Trace, names: Mapping[Any, str], results: Sequence[int] = ()) -> list[str]:
    """Return the lines of the instructions that are needed, the last of which returns the results, if any."""
    found, needed = [], find_needed_instructions(trace, results)
    for number, ((operation, operands, extra), kind) in enumerate(zip(trace.lines, trace.kinds)):
        if number not in needed or operation in ("address", "index", "block"):
            continue
        if operation == "call":
            made = ", ".join(f"v{number}_{k}" for k in range(len(trace.functions[extra].results)))
            found.append(f"{made} = {names['call', extra].format(', '.join(f'v{k}' for k in operands))}")
            continue
        found.append(f"v{number} = {_write_expression(trace, operation, operands, extra, kind, names)}")
    return [*found, f"return {', '.join(f'v{k}' for k in results)}"] if results else found


def _write_expression(
    trace: Trace, operation: str, operands: tuple, extra: Any, kind: str, names: Mapping[Any, str]
) -> str:
    values = [f"v{k}" for k in operands]
    name = operation.removeprefix("word_").removeprefix("mask_")
    if operation == "input":
        return names[extra]
    if operation == "load":
        array = names[trace.lines[operands[0]][2]]
        bits, per_block = extra
        if bits == 4:
            return f"load4({array}, b, i, lanes, aligned)"
        cast = ".to(tl.uint32)" if bits < 32 else ""
        if per_block:
            return f"tl.load({array}.to(tl.pointer_type(tl.uint{bits})) + b){cast}[:, None]"
        return f"read(element_pointer({array}, tl.uint{bits}, aligned) + i, lanes){cast}"
    if operation == "constant":
        return _write_constant(float.fromhex(extra if isinstance(extra, str) else extra[0]), kind)
    if operation == "word":
        return f"tl.full([], {extra[0]}, {_TRITON_TYPE_BY_KIND[kind]})"
    if operation == "bits":
        return f"{'real' if kind[0] == 'f' else 'canonical_bits'}({values[0]})"
    if operation == "part":
        return f"{values[0]}_{extra}"
    if operation == "gather":
        last = len(trace.tables[extra]) - 1
        return f"gather(tables + {names['table', extra]}, {values[0]}, {last})"
    if name in _INFIX_OPERATOR_BY_OPERATION:
        return f"{values[0]} {_INFIX_OPERATOR_BY_OPERATION[name]} {values[1]}"
    if inspect.isfunction(vars(operations).get(operation)):
        return f"{operation}({', '.join(values)})"
    if operation not in _EXPRESSION_BY_OPERATION:
        raise NotImplementedError(f"the operation {operation} of a device function has no form on Triton's blocks")
    given = dict(zip("xyz", values), type=_TRITON_TYPE_BY_KIND.get(kind))
    return _EXPRESSION_BY_OPERATION[operation].format(**given)


def _write_constant(value: float, kind: str) -> str:
    """Return a constant as a typed scalar; a zero's sign and a NaN by their bits."""
    if not math.isfinite(value) or (value == 0 and math.copysign(1.0, value) < 0):
        bits = np.array(value, f"f{int(kind[1:]) // 8}").view(f"u{int(kind[1:]) // 8}")
        return f"real(tl.full([], {bits}, tl.uint{kind[1:]}))"
    return f"tl.full([], {value!r}, {_TRITON_TYPE_BY_KIND[kind]})"
