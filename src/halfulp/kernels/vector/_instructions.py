"""The operations of a trace as LLVM instructions, on scalars or vectors."""

from __future__ import annotations

import hashlib

import torch

from .._trace import Piece, Trace
from ._half import float_to_half, half_to_float

_PREDICATES = {"lt": "<", "gt": ">", "le": "<=", "ge": ">=", "eq": "=="}


class Instructions:
    """One method per operation of a trace, on scalars or vectors.

    Args:
        builder: writes the instructions.
        trace: the operations.
        lanes: elements of a vector; 1 for scalars.
        one: a vector of ones that LLVM cannot fold, where sums may be written as products (`sum_of`).
        calls: whether pieces become functions, instead of being written out at each use.
    """

    def __init__(self, builder, trace: Trace, lanes: int, one=None, calls: bool = False) -> None:
        from llvmlite import ir

        self.ir, self.b, self.trace, self.lanes, self.calls = ir, builder, trace, lanes, calls
        self.wide = trace.dtype == torch.float64
        self.one, self.sums, self.products = one, 0, 0
        self.mantissa, self.bias = (52, 1023) if self.wide else (23, 127)
        self.real = self.shape(ir.DoubleType() if self.wide else ir.FloatType())
        self.word = self.shape(ir.IntType(64 if self.wide else 32))

    def run(self, inputs: list) -> list:
        """Every instruction's value."""
        values: list = []
        for operation, operands, extra in self.trace.lines:
            if operation == "input":
                values.append(inputs[extra])
            elif operation == "part":
                values.append(values[operands[0]][extra])
            else:
                values.append(getattr(self, f"do_{operation}")(extra, *(values[k] for k in operands)))
        return values

    def shape(self, scalar):
        return scalar if self.lanes == 1 else self.ir.VectorType(scalar, self.lanes)

    def constant(self, kind, value):
        return self.ir.Constant(kind, value if self.lanes == 1 else [value] * self.lanes)

    def intrinsic(self, name: str, *values):
        kind = values[0].type
        suffix = f"{'f64' if self.wide else 'f32'}"
        name = f"llvm.{name}.{suffix if self.lanes == 1 else f'v{self.lanes}{suffix}'}"
        function = self.b.module.globals.get(name)
        if function is None:
            function = self.ir.Function(self.b.module, self.ir.FunctionType(kind, [kind] * len(values)), name)
        return self.b.call(function, values)

    def pointer(self, place, scalar):
        base, i = place
        at = self.b.gep(self.b.inttoptr(base, scalar.as_pointer()), [i])
        return self.b.bitcast(at, self.shape(scalar).as_pointer())

    def load(self, place, dtype: torch.dtype):
        ir, b = self.ir, self.b
        if dtype == torch.bfloat16:
            raw = b.load(self.pointer(place, ir.IntType(16)), align=2)
            words = self.shape(ir.IntType(32))
            value = b.bitcast(b.shl(b.zext(raw, words), self.constant(words, 16)), self.shape(ir.FloatType()))
        elif dtype == torch.float16:
            value = half_to_float(b, b.load(self.pointer(place, ir.IntType(16)), align=2), self.shape)
        else:
            scalar = ir.FloatType() if dtype == torch.float32 else ir.DoubleType()
            value = b.load(self.pointer(place, scalar), align=size_of(dtype))
        if dtype == torch.float64:
            return value if self.wide else b.fptrunc(value, self.real)
        return b.fpext(value, self.real) if self.wide else value

    def store(self, place, dtype: torch.dtype, value) -> None:
        ir, b = self.ir, self.b
        if dtype != torch.float64 and self.wide:
            value = self.to_float32(value, to_odd=dtype != torch.float32)
        elif dtype == torch.float64 and not self.wide:
            value = b.fpext(value, self.shape(ir.DoubleType()))
        if dtype == torch.bfloat16:
            words = self.shape(ir.IntType(32))
            bits = b.bitcast(value, words)
            shown = b.lshr(bits, self.constant(words, 16))
            half = b.add(b.and_(shown, self.constant(words, 1)), self.constant(words, 0x7FFF))
            high = b.lshr(b.add(bits, half), self.constant(words, 16))
            # A NaN whose payload lies in the lower half would become an infinity, and one of ones a zero.
            quiet = b.or_(shown, self.constant(words, 64))
            high = b.select(b.fcmp_unordered("uno", value, value), quiet, high)
            b.store(b.trunc(high, self.shape(ir.IntType(16))), self.pointer(place, ir.IntType(16)), align=2)
            return
        if dtype == torch.float16:
            b.store(float_to_half(b, value, self.shape), self.pointer(place, ir.IntType(16)), align=2)
            return
        scalar = ir.FloatType() if dtype == torch.float32 else ir.DoubleType()
        b.store(value, self.pointer(place, scalar), align=size_of(dtype))

    def to_float32(self, value, to_odd: bool):
        """float64 as float32: to nearest, or to odd where another rounding follows, which then sees what was lost."""
        ir, b = self.ir, self.b
        near = b.fptrunc(value, self.shape(ir.FloatType()))
        if not to_odd:
            return near
        words = self.shape(ir.IntType(32))
        back, bits = b.fpext(near, self.real), b.bitcast(near, words)
        beyond = b.fcmp_ordered(">", self.intrinsic("fabs", back), self.intrinsic("fabs", value))
        below = b.sub(bits, b.zext(beyond, words))
        odd = b.or_(below, b.zext(b.fcmp_ordered("!=", back, value), words))
        return b.bitcast(odd, self.shape(ir.FloatType()))

    def do_call(self, number, *values):
        """A list of the results of a piece: from its function where there is one, else written out."""
        piece = self.trace.pieces[number]
        if not self.calls:
            computed = Instructions(self.b, piece.trace, self.lanes, self.one).run(list(values))
            return [computed[k] for k in piece.results]
        returned = self.b.call(self.function(piece), values)
        return [self.b.extract_value(returned, k) for k in range(len(piece.results))]

    def function(self, piece: Piece):
        """A piece as a function of vectors, which travel in registers; one for all its uses in a module."""
        ir, module = self.ir, self.b.module
        inputs = sum(line[0] == "input" for line in piece.trace.lines)
        told = repr((piece.trace.digest(), piece.results, self.lanes))
        name = f"halfulp_piece_{hashlib.sha256(told.encode()).hexdigest()[:16]}"
        known = module.globals.get(name)
        if known is not None:
            return known
        kind = ir.FunctionType(ir.LiteralStructType([self.real] * len(piece.results)), [self.real] * inputs)
        function = ir.Function(module, kind, name)
        function.linkage, function.calling_convention = "internal", "fastcc"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        one = None if self.one is None else hidden_one(builder, self.real)
        computed = Instructions(builder, piece.trace, self.lanes, one, self.calls).run(list(function.args))
        together = ir.Constant(kind.return_type, ir.Undefined)
        for k, number in enumerate(piece.results):
            together = builder.insert_value(together, computed[number], k)
        builder.ret(together)
        return function

    def do_constant(self, extra, *_):
        return self.constant(self.real, float.fromhex(extra))

    def do_add(self, _, x, y):
        return self.sum_of(x, y, negative=False)

    def do_sub(self, _, x, y):
        return self.sum_of(x, y, negative=True)

    def sum_of(self, x, y, negative: bool):
        """x + y or x - y, every other time as y * 1 + x: some processors add and multiply in different units.

        The result is the same in every bit, and the unit that would be idle shares the work.
        """
        if self.one is None or self.products >= self.sums:
            self.sums += 1
            return self.b.fsub(x, y) if negative else self.b.fadd(x, y)
        self.products += 1
        return self.intrinsic("fma", self.b.fneg(y) if negative else y, self.one, x)

    def do_mul(self, _, x, y):
        self.products += 1
        return self.b.fmul(x, y)

    def do_div(self, _, x, y):
        return self.b.fdiv(x, y)

    def do_neg(self, _, x):
        return self.b.fneg(x)

    def do_abs(self, _, x):
        return self.intrinsic("fabs", x)

    def do_product_error(self, _, a, b, p):
        self.products += 1
        return self.intrinsic("fma", a, b, self.b.fneg(p))

    def do_sqrt(self, _, x):
        return self.intrinsic("sqrt", x)

    def do_rint(self, _, x):
        return self.intrinsic("rint", x)

    def do_floor(self, _, x):
        return self.intrinsic("floor", x)

    def compare(self, operation: str, x, y):
        return self.b.fcmp_ordered(_PREDICATES[operation], x, y)

    def do_lt(self, _, x, y):
        return self.compare("lt", x, y)

    def do_gt(self, _, x, y):
        return self.compare("gt", x, y)

    def do_le(self, _, x, y):
        return self.compare("le", x, y)

    def do_ge(self, _, x, y):
        return self.compare("ge", x, y)

    def do_eq(self, _, x, y):
        return self.compare("eq", x, y)

    def do_ne(self, _, x, y):
        return self.b.fcmp_unordered("!=", x, y)

    def do_and(self, _, x, y):
        return self.b.and_(x, y)

    def do_or(self, _, x, y):
        return self.b.or_(x, y)

    def do_not(self, _, x):
        return self.b.xor(x, self.constant(x.type, 1))

    def do_select(self, _, condition, x, y):
        return self.b.select(condition, x, y)

    def do_power_below(self, _, x):
        mask = self.constant(self.word, (2 * self.bias + 1) << self.mantissa)
        return self.b.bitcast(self.b.and_(self.b.bitcast(x, self.word), mask), self.real)

    def do_exponent(self, _, x):
        shifted = self.b.lshr(self.b.bitcast(x, self.word), self.constant(self.word, self.mantissa))
        biased = self.b.and_(shifted, self.constant(self.word, 2 * self.bias + 1))
        return self.b.sitofp(self.b.sub(biased, self.constant(self.word, self.bias)), self.real)

    def do_power(self, _, k):
        whole = self.b.add(self.integer(k), self.constant(self.word, self.bias))
        return self.b.bitcast(self.b.shl(whole, self.constant(self.word, self.mantissa)), self.real)

    def integer(self, k):
        """A real integer as a word; NaN, which no integer stands for, as 0."""
        known = self.b.select(self.b.fcmp_ordered("ord", k, k), k, self.constant(self.real, 0.0))
        return self.b.fptosi(known, self.word)

    def do_round_to_float32(self, _, x):
        return self.b.fpext(self.b.fptrunc(x, self.shape(self.ir.FloatType())), self.real)

    def do_gather(self, number, index):
        ir, b = self.ir, self.b
        values = self.trace.tables[number]
        scalar = ir.DoubleType() if self.wide else ir.FloatType()
        name = f"halfulp_table_{hashlib.sha256(repr((self.wide, values)).encode()).hexdigest()[:16]}"
        table = b.module.globals.get(name)
        if table is None:
            kind = ir.ArrayType(scalar, len(values))
            table = ir.GlobalVariable(b.module, kind, name)
            table.initializer, table.global_constant, table.linkage = ir.Constant(kind, list(values)), True, "internal"
        last = self.constant(self.real, float(len(values) - 1))
        zero = self.constant(self.real, 0.0)
        inside = b.select(b.fcmp_ordered(">", index, zero), index, zero)
        inside = b.select(b.fcmp_ordered("<", inside, last), inside, last)
        whole = b.fptosi(inside, self.word)
        first = ir.Constant(ir.IntType(32), 0)
        if self.lanes == 1:
            return b.load(b.gep(table, [first, whole]))
        made = ir.Constant(self.real, ir.Undefined)
        for k in range(self.lanes):
            lane = ir.Constant(ir.IntType(32), k)
            made = b.insert_element(made, b.load(b.gep(table, [first, b.extract_element(whole, lane)])), lane)
        return made


def hidden_one(builder, kind):
    """A vector of ones that the optimizer cannot see; see `Instructions.sum_of`."""
    from llvmlite import ir

    one = ir.Constant(kind, [1.0] * kind.count)
    return builder.asm(ir.FunctionType(kind, [kind]), "", "=v,0", [one], side_effect=True)


def size_of(dtype: torch.dtype) -> int:
    """Bytes of an element in memory."""
    return {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4}.get(dtype, 8)
