"""The scalar operations as LLVM instructions; imported only when the first kernel is compiled."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32, _F64 = ir.FloatType(), ir.DoubleType()


def operation(name: str, result, arguments: tuple, emit: Callable) -> Callable:
    """An intrinsic of fixed types; `emit(builder, *values)` returns its LLVM value."""
    names = ", ".join("abcdef"[: len(arguments)])
    namespace: dict = {"result": result, "arguments": arguments, "emit": emit}
    source = (
        f"def {name}(context, {names}):\n"
        "    def codegen(target, builder, signature, values):\n"
        "        value = emit(builder, *values)\n"
        "        return target.get_dummy_value() if value is None else value\n"
        "    return result(*arguments), codegen\n"
    )
    exec(source, namespace)
    return intrinsic(namespace[name])


def _binary(name: str, instruction: str) -> Callable:
    return operation(name, types.uint32, (types.uint32, types.uint32), lambda b, x, y: getattr(b, instruction)(x, y))


def _binary64(name: str, instruction: str) -> Callable:
    return operation(name, types.uint64, (types.uint64, types.uint64), lambda b, x, y: getattr(b, instruction)(x, y))


def _sqrt(builder, x):
    return builder.call(builder.module.declare_intrinsic("llvm.sqrt", [_F32]), [x])


def _maximum(builder, x, y):
    ordered = builder.select(builder.fcmp_ordered(">", x, y), x, y)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, ordered)


def _sign_of(builder, x):
    zero, one, minus = (ir.Constant(_F32, value) for value in (0.0, 1.0, -1.0))
    negative = builder.select(builder.fcmp_ordered("<", x, zero), minus, zero)
    known = builder.select(builder.fcmp_ordered(">", x, zero), one, negative)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, known)


def _load(width: ir.IntType) -> Callable:
    def emit(builder, address, i):
        pointer = builder.gep(builder.inttoptr(address, width.as_pointer()), [i])
        value = builder.load(pointer, align=width.width // 8)
        return value if width is _I32 else builder.zext(value, _I32)

    return emit


def _store(width: ir.IntType) -> Callable:
    def emit(builder, address, i, value):
        pointer = builder.gep(builder.inttoptr(address, width.as_pointer()), [i])
        builder.store(value if width is _I32 else builder.trunc(value, width), pointer, align=width.width // 8)

    return emit


def _amax(width: ir.IntType) -> Callable:
    """Return the largest magnitude of 16 neighbours; LLVM does not vectorize a loop of so few iterations."""

    def emit(builder, address, i):
        vector = ir.VectorType(width, 16)
        pointer = builder.gep(builder.inttoptr(address, width.as_pointer()), [i])
        values = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=width.width // 8)
        mask = ir.Constant(vector, [ir.Constant(width, (1 << width.width - 1) - 1)] * 16)
        name = f"llvm.vector.reduce.umax.v16i{width.width}"
        reduce = builder.module.declare_intrinsic(name, fnty=ir.FunctionType(width, [vector]))
        value = builder.call(reduce, [builder.and_(values, mask)])
        return value if width is _I32 else builder.zext(value, _I32)

    return emit


def _load_64(builder, address, i):
    # Some read the words of narrower elements, which may begin anywhere.
    return builder.load(builder.gep(builder.inttoptr(address, _I64.as_pointer()), [i]), align=1)


def _store_64(builder, address, i, value):
    builder.store(value, builder.gep(builder.inttoptr(address, _I64.as_pointer()), [i]), align=8)


def _truncated(builder, x):
    return builder.zext(builder.fptosi(x, _I32), _I64)


def _at(builder, address, i, element: ir.Type, vector: ir.Type):
    pointer = builder.gep(builder.inttoptr(address, element.as_pointer()), [i])
    return builder.bitcast(pointer, vector.as_pointer())


def _splat(builder, value):
    vector = ir.VectorType(value.type, _LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, _LANES), [0] * _LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def _sizes16(builder, address, i):
    """Sixteen float32 as words, their signs left out."""
    words = ir.VectorType(_I32, _LANES)
    given = builder.load(_at(builder, address, i, _I32, words), align=4)
    return builder.and_(given, ir.Constant(words, [0x7FFFFFFF] * _LANES))


def _tally(builder, under, small):
    """How many of sixteen conditions hold, and of sixteen others, none of which holds where the first does."""
    words = ir.VectorType(_I32, _LANES)
    low, high, none = (ir.Constant(words, [value] * _LANES) for value in (1, 1 << 16, 0))
    name = f"llvm.vector.reduce.add.v{_LANES}i32"
    reduce = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(_I32, [words]), name)
    return builder.call(reduce, [builder.select(under, low, builder.select(small, high, none))])


def _under16(builder, address, i, nonzero, normal):
    sizes = _sizes16(builder, address, i)
    above = builder.icmp_signed(">", sizes, ir.Constant(sizes.type, [0] * _LANES))
    low, high = (builder.icmp_signed("<", sizes, _splat(builder, word)) for word in (nonzero, normal))
    return _tally(builder, builder.and_(above, low), builder.and_(builder.not_(low), high))


def _under_quotients16(builder, address, i, scale, nonzero, normal):
    sizes = _sizes16(builder, address, i)
    above = builder.icmp_signed(">", sizes, ir.Constant(sizes.type, [0] * _LANES))
    quotient = builder.fdiv(builder.bitcast(sizes, ir.VectorType(_F32, _LANES)), _splat(builder, scale))
    first, second = _splat(builder, nonzero), _splat(builder, normal)
    under = builder.and_(above, builder.fcmp_ordered("<", quotient, first))
    beyond = builder.fcmp_ordered(">=", quotient, first)
    return _tally(builder, under, builder.and_(beyond, builder.fcmp_ordered("<", quotient, second)))


def _squares16(builder, address, i):
    sizes = _sizes16(builder, address, i)
    finite = builder.icmp_signed("<", sizes, ir.Constant(sizes.type, [0x7F800000] * _LANES))
    sizes = builder.select(finite, sizes, ir.Constant(sizes.type, [0] * _LANES))
    values = builder.fpext(builder.bitcast(sizes, ir.VectorType(_F32, _LANES)), ir.VectorType(_F64, _LANES))
    sums, lanes = builder.fmul(values, values), _LANES
    while lanes > 1:
        lanes //= 2
        halves = [list(range(first, first + lanes)) for first in (0, lanes)]
        parts = [
            builder.shuffle_vector(sums, sums, ir.Constant(ir.VectorType(_I32, lanes), places)) for places in halves
        ]
        sums = builder.fadd(*parts)
    return builder.extract_element(sums, ir.Constant(_I32, 0))


def _prefetch(builder, address):
    """Prefetch into the second-level cache (locality 2), whose queue of pending lines is longer than the first's."""
    pointer = ir.IntType(8).as_pointer()
    takes = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, takes, name)
    to_read, locality, of_data = (ir.Constant(_I32, value) for value in (0, 2, 1))
    builder.call(function, [builder.inttoptr(address, pointer), to_read, locality, of_data])


def _high(builder, index):
    return builder.trunc(builder.lshr(index, ir.Constant(_I64, 32)), _I32)


_LANES = 16
_AT = (types.int64, types.int64)
_LOAD = (types.uint32, _AT)
_STORE = (types.void, (types.int64, types.int64, types.uint32))


@intrinsic
def _select(context, condition, a, b):
    def codegen(target, builder, signature, values):
        return builder.select(*values)

    return a(condition, a, b), codegen


INTRINSICS: dict[str, Callable] = {
    "select": _select,
    "add": _binary("add", "add"),
    "sub": _binary("sub", "sub"),
    "mul": _binary("mul", "mul"),
    "bit_and": _binary("bit_and", "and_"),
    "bit_or": _binary("bit_or", "or_"),
    "bit_xor": _binary("bit_xor", "xor"),
    "shl": _binary("shl", "shl"),
    "shr": _binary("shr", "lshr"),
    "low_word": operation("low_word", types.uint32, (types.int64,), lambda b, x: b.trunc(x, _I32)),
    "high_word": operation("high_word", types.uint32, (types.int64,), _high),
    "word": operation("word", types.uint32, (types.float32,), lambda b, x: b.bitcast(x, _I32)),
    "real": operation("real", types.float32, (types.uint32,), lambda b, x: b.bitcast(x, _F32)),
    "to_real": operation("to_real", types.float32, (types.uint32,), lambda b, x: b.sitofp(x, _F32)),
    "to_word": operation("to_word", types.uint32, (types.float32,), lambda b, x: b.fptosi(x, _I32)),
    "divide": operation("divide", types.float32, (types.float32, types.float32), lambda b, x, y: b.fdiv(x, y)),
    "sqrt": operation("sqrt", types.float32, (types.float32,), _sqrt),
    "maximum": operation("maximum", types.float32, (types.float32, types.float32), _maximum),
    "sign_of": operation("sign_of", types.float32, (types.float32,), _sign_of),
    "load8": operation("load8", *_LOAD, _load(_I8)),
    "load16": operation("load16", *_LOAD, _load(_I16)),
    "load32": operation("load32", *_LOAD, _load(_I32)),
    "store8": operation("store8", *_STORE, _store(_I8)),
    "store16": operation("store16", *_STORE, _store(_I16)),
    "store32": operation("store32", *_STORE, _store(_I32)),
    "amax16x32": operation("amax16x32", *_LOAD, _amax(_I32)),
    "under16": operation("under16", types.uint32, (*_AT, types.uint32, types.uint32), _under16),
    "under_quotients16": operation("under_quotients16", types.uint32, (*_AT, *[types.float32] * 3), _under_quotients16),
    "squares16": operation("squares16", types.float64, _AT, _squares16),
    "prefetch": operation("prefetch", types.void, (types.int64,), _prefetch),
    "add64": _binary64("add64", "add"),
    "sub64": _binary64("sub64", "sub"),
    "and64": _binary64("and64", "and_"),
    "or64": _binary64("or64", "or_"),
    "xor64": _binary64("xor64", "xor"),
    "shl64": _binary64("shl64", "shl"),
    "shr64": _binary64("shr64", "lshr"),
    "widen": operation("widen", types.uint64, (types.uint32,), lambda b, x: b.zext(x, _I64)),
    "real64": operation("real64", types.float64, (types.uint64,), lambda b, x: b.bitcast(x, _F64)),
    "word64": operation("word64", types.uint64, (types.float64,), lambda b, x: b.bitcast(x, _I64)),
    "to_word64": operation("to_word64", types.uint64, (types.float64,), _truncated),
    "load64": operation("load64", types.uint64, (types.int64, types.int64), _load_64),
    "store64": operation("store64", types.void, (types.int64, types.int64, types.uint64), _store_64),
}
