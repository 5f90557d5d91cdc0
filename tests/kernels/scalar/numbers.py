"""A device function on NumPy's numbers: it is recorded, and what it wrote down computed by NumPy alone."""

import operator

import numpy as np
import torch

from halfulp.kernels import Trace

TYPES = {"w32": np.uint32, "w64": np.uint64, "f32": np.float32, "f64": np.float64, "mask": np.bool_}
KINDS = {np.dtype(kind): name for name, kind in TYPES.items()}
_SIGNED = {"w32": np.int32, "w64": np.int64}
_INFIX = {
    **{"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv},
    **{"lt": operator.lt, "gt": operator.gt, "le": operator.le, "ge": operator.ge, "eq": operator.eq},
    **{"ne": operator.ne, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "shl": operator.lshift},
    **{"shr": operator.rshift, "neg": operator.neg, "abs": np.abs, "not": operator.invert, "select": np.where},
    **{"sqrt": np.sqrt, "floor": np.floor, "sar": lambda a, n: (a.view(np.int64) >> n.view(np.int64)).view(np.uint64)},
    **{"low_word": lambda x: x & np.uint64(0xFFFFFFFF), "high_word": lambda x: x >> np.uint64(32)},
    **{"widen": lambda x: x, "to_float64": lambda x: x, "to_float32": lambda x: x},
    **{"to_real": lambda x: x.view(np.int32), "multiply_add": lambda a, b, c: a * b + c},
    **{"mulh16": lambda a, b: (a >> 16) * (b >> 16) & 0xFFFF0000 | (a & 0xFFFF) * (b & 0xFFFF) >> 16},
}


def on_numbers(function, *arrays):
    """Return a device function's result for all elements of arrays, whose dtypes are the kinds of its arguments."""
    trace = Trace(torch.float32)
    result = function(*(trace.emit("input", (), k, KINDS[x.dtype]) for k, x in enumerate(arrays)))
    values = []
    with np.errstate(all="ignore"):
        for (operation, operands, extra), kind in zip(trace.lines, trace.kinds):
            values.append(_value(operation, extra, kind, [values[k] for k in operands], arrays))
    return np.broadcast_to(values[result.number], arrays[0].shape)


def _value(operation, extra, kind, given, arrays):
    if operation == "input":
        return arrays[extra]
    if operation == "word":
        return np.array([extra[0] % 2 ** extra[1]], TYPES[kind])
    if operation == "constant":
        return np.array([float.fromhex(extra if isinstance(extra, str) else extra[0])], TYPES[kind])
    if operation == "bits":
        return given[0].view(TYPES[kind])
    if operation == "to_word":
        return given[0].astype(_SIGNED[kind]).view(TYPES[kind])
    return _INFIX[operation.removeprefix("word_").removeprefix("mask_")](*given).astype(TYPES[kind])
