"""The operations of a trace as LLVM instructions, on scalars or vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from .._threads import cached_attribute
from .._trace import RecordedFunction, Trace
from ._builder import (
    VectorBuilder,
    get_lane_type,
    has_fixup_instruction,
    match_select_to_fixup,
    write_fixup_instruction,
)
from ._processor import find_llvm_target, find_vector_bits, has_vector_fma

# Operations that are one instruction of LLVM: methods of llvmlite's builder, predicates and functions.
_LLVM_INSTRUCTION_BY_OPERATION = {
    **{"word_add": "add", "word_sub": "sub", "word_mul": "mul", "word_shl": "shl", "word_shr": "lshr"},
    **{"word_sar": "ashr", "word_and": "and_", "word_or": "or_", "word_xor": "xor"},
    **{"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv", "and": "and_", "or": "or_"},
}
_LLVM_CAST_BY_OPERATION = {
    **{"bits": "bitcast", "to_real": "sitofp", "to_float64": "fpext", "to_float32": "fptrunc"},
    **{"low_word": "trunc", "widen": "zext"},
}
_FLOAT_PREDICATE_BY_OPERATION = {"lt": "<", "gt": ">", "le": "<=", "ge": ">=", "eq": "=="}
_UNSIGNED_PREDICATE_BY_OPERATION = {
    "mask_eq": "==",
    "word_ne": "!=",
    **{f"word_{name}": sign for name, sign in _FLOAT_PREDICATE_BY_OPERATION.items()},
}
_LLVM_INTRINSIC_BY_OPERATION = {"abs": "fabs", "sqrt": "sqrt", "rint": "rint", "floor": "floor"}
_PLACE_OPERATIONS = ("address", "index", "block")  # of elements, which loads and stores know themselves


class InstructionWriter(VectorBuilder):
    """Writes the operations of a trace on so many lanes; functions are inlined unless it `calls_functions`."""

    def __init__(self, builder, trace: Trace, lanes: int, calls_functions: bool = False) -> None:
        super().__init__(builder)
        self.trace, self.lanes, self.calls_functions = trace, lanes, calls_functions
        self.is_float64 = trace.dtype == torch.float64
        self.real_type = self.make_vector_type(self.f64 if self.is_float64 else self.f32, lanes)
        self.word_type = self.make_vector_type(self.i64 if self.is_float64 else self.i32, lanes)
        is_full = lanes * (64 if self.is_float64 else 32) == find_vector_bits() and has_vector_fma(find_vector_bits())
        # AMD's cores add in two units and multiply in two others: every second sum runs in those, as 1 x + y.
        self.adds_by_fma = is_full and find_llvm_target()[1].startswith("znver")

    def write_instructions(
        self, inputs: Any, known: dict[int, Any] | None = None, only: Collection[int] | None = None
    ) -> list:
        """Write all instructions, or `only` some, and return their values; `known` ones were computed elsewhere.

        `inputs` are the values of inputs by number or name, and of elements of arrays by (address, extra).
        """
        values: list = [None] * len(self.trace.lines)
        for _ in self.write_in_order(values, inputs, known, only, range(len(values))):
            pass
        return values

    def write_in_order(self, values: list, inputs: Any, known: Any, only: Any, order: Iterable[int]) -> Iterator[None]:
        """Write one instruction after the other, in an order, and yield behind each; `values` is filled."""
        self.values = values
        for number in order:
            operation, operands, extra = self.trace.lines[number]
            self.kind, self.number = self.trace.kinds[number], number
            if known is not None and number in known:
                values[number] = known[number]
            elif only is not None and number not in only:
                continue
            elif operation in ("input", "load"):
                values[number] = inputs[(*operands, extra) if operands else extra]
            elif operation == "part":
                values[number] = values[operands[0]][extra]
            else:
                values[number] = self.write_operation(operation, extra, *(values[k] for k in operands))
            yield

    def write_operation(self, operation: str, extra: Any, *values: Any) -> Any:
        """Write one operation, and return its value."""
        if operation in ("add", "sub") and self.number % 2 and self.adds_by_fma and values[0].type == self.real_type:
            x, y = values
            if operation == "add":
                return self.call_intrinsic("fma", x, self.opaque_ones, y)
            return self.call_intrinsic("fma", y, self.b.fneg(self.opaque_ones), x)
        if operation in _LLVM_INSTRUCTION_BY_OPERATION:
            return getattr(self.b, _LLVM_INSTRUCTION_BY_OPERATION[operation])(*values)
        if operation in _LLVM_CAST_BY_OPERATION:
            return getattr(self.b, _LLVM_CAST_BY_OPERATION[operation])(
                *values, self.make_type_of_kind(self.kind, self.lanes)
            )
        if operation in _FLOAT_PREDICATE_BY_OPERATION:
            return self.b.fcmp_ordered(_FLOAT_PREDICATE_BY_OPERATION[operation], *values)
        if operation in _UNSIGNED_PREDICATE_BY_OPERATION:
            return self.b.icmp_unsigned(_UNSIGNED_PREDICATE_BY_OPERATION[operation], *values)
        if operation in _LLVM_INTRINSIC_BY_OPERATION:
            return self.call_intrinsic(_LLVM_INTRINSIC_BY_OPERATION[operation], *values)
        return None if operation in _PLACE_OPERATIONS else getattr(self, f"write_{operation}")(extra, *values)

    @cached_attribute
    def opaque_ones(self):
        """A vector of ones that LLVM does not know to be ones, so that it keeps products with them."""
        scalar = get_lane_type(self.real_type)
        with self.b.goto_entry_block():
            one = self.b.asm(self.ir.FunctionType(scalar, [scalar]), "", "=x,0", [self.ir.Constant(scalar, 1.0)], False)
            return self.splat(one, self.lanes)

    def write_call(self, number, *values):
        """Return the results of a device function: called where it is compiled apart, else inlined."""
        piece = self.trace.functions[number]
        if not self.calls_functions:
            computed = InstructionWriter(self.b, piece.trace, self.lanes).write_instructions(list(values))
            return [computed[k] for k in piece.results]
        returned = self.b.call(self.declare_function(piece), values)
        return [self.b.extract_value(returned, k) for k in range(len(piece.results))]

    def declare_function(self, piece: RecordedFunction):
        """Return a device function as an LLVM function of vectors in registers; one per module."""
        ir, module = self.ir, self.b.module
        inputs = sum(line[0] == "input" for line in piece.trace.lines)
        told = repr((piece.trace.digest(), piece.results, self.lanes))
        name = f"halfulp_piece_{hashlib.sha256(told.encode()).hexdigest()[:16]}"
        known = module.globals.get(name)
        if known is not None:
            return known
        kind = ir.FunctionType(ir.LiteralStructType([self.real_type] * len(piece.results)), [self.real_type] * inputs)
        function = ir.Function(module, kind, name)
        function.linkage, function.calling_convention = "internal", "fastcc"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        computed = InstructionWriter(builder, piece.trace, self.lanes, self.calls_functions).write_instructions(
            list(function.args)
        )
        together = self.make_undefined_vector(kind.return_type)
        for k, number in enumerate(piece.results):
            together = builder.insert_value(together, computed[number], k)
        builder.ret(together)
        return function

    def write_constant(self, extra, *_):
        number = extra if isinstance(extra, str) else extra[0]
        return self.constant(self.make_type_of_kind(self.kind, self.lanes), float.fromhex(number))

    def write_word(self, extra, *_):
        return self.constant(self.make_type_of_kind(self.kind, self.lanes), extra[0])

    def write_to_word(self, _, x):
        whole = self.b.fptosi(x, self.make_type_like(x, self.i32))
        return whole if self.kind == "w32" else self.b.zext(whole, self.make_type_like(x, self.i64))

    def write_high_word(self, _, x):
        return self.b.trunc(self.b.lshr(x, self.constant(x.type, 32)), self.make_type_like(x, self.i32))

    def write_neg(self, _, x):
        name, operands, _ = self.trace.lines[self.trace.lines[self.number][1][0]]
        if name == "mul" and self.trace.lines[operands[0]][0] == "input":
            factor, other = (self.values[k] for k in operands)
            if factor is not None and other is not None:  # -(c x) as (-c) x: -c is made once for all elements
                return self.b.fmul(self.b.fneg(factor), other)
        return self.b.fneg(x)

    def write_multiply_add(self, _, a, b, c):
        if has_vector_fma(find_vector_bits()):
            return self.call_intrinsic("fma", a, b, c)
        return self.b.fadd(self.b.fmul(a, b), c)

    def write_word_mulh16(self, _, a, b):
        halves = self.make_vector_type(self.i16, 2 * self.lanes)
        wide = self.make_vector_type(self.i32, 2 * self.lanes)
        x, y = (self.b.zext(self.b.bitcast(value, halves), wide) for value in (a, b))
        high = self.b.lshr(self.b.mul(x, y), self.constant(wide, 16))
        return self.b.bitcast(self.b.trunc(high, halves), a.type)

    def write_product_error(self, _, a, b, p):
        return self.call_intrinsic("fma", a, b, self.b.fneg(p))

    def write_ne(self, _, x, y):
        return self.b.fcmp_unordered("!=", x, y)

    def write_not(self, _, x):
        return self.b.xor(x, self.constant(x.type, 1))

    def write_select(self, _, condition, x, y):
        is_fixable = self.kind in ("f32", "w32") and has_fixup_instruction(self.lanes)
        if is_fixable and (found := match_select_to_fixup(self.trace, self.number)) is not None:
            kept, classified = (self.values[k] for k in found[:2])
            if kept is not None and classified is not None:
                return write_fixup_instruction(self, kept, classified, found[2])
        return self.b.select(condition, x, y)

    def write_gather(self, number, index):
        ir, b = self.ir, self.b
        values = self.trace.tables[number]
        name = f"halfulp_table_{hashlib.sha256(repr((self.is_float64, values)).encode()).hexdigest()[:16]}"
        table = b.module.globals.get(name)
        if table is None:
            kind = ir.ArrayType(get_lane_type(self.real_type), len(values))
            table = ir.GlobalVariable(b.module, kind, name)
            table.initializer, table.global_constant, table.linkage = ir.Constant(kind, list(values)), True, "internal"
        last, zero = (self.constant(self.real_type, value) for value in (float(len(values) - 1), 0.0))
        inside = b.select(b.fcmp_ordered(">", index, zero), index, zero)
        inside = b.select(b.fcmp_ordered("<", inside, last), inside, last)
        whole = b.fptosi(inside, self.word_type)
        first = ir.Constant(self.i32, 0)
        if self.lanes == 1:
            return b.load(b.gep(table, [first, whole]))
        made = self.make_undefined_vector(self.real_type)
        for k in range(self.lanes):
            entry = b.load(b.gep(table, [first, self.extract_lane(whole, k)]))
            made = b.insert_element(made, entry, ir.Constant(self.i32, k))
        return made
