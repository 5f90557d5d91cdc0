"""Traces on tensors: each operation has the bits of the plain function on NumPy's numbers, on any layout of memory."""

import numpy as np
import pytest
import torch

from halfulp.kernels import _operations as op
from halfulp.kernels import run_trace_on_tensors, same_bits
from halfulp.kernels._device_function import ElementTraceBuilder
from halfulp.kernels._trace import Trace, block_largest

from ..scalar.numbers import on_numbers

INTEGERS = {"w32": (np.uint32, torch.int32), "w64": (np.uint64, torch.int64)}
REALS = {"f32": (np.float32, torch.float32), "f64": (np.float64, torch.float64)}
SPECIAL = [0.0, -0.0, 1.0, -1.5, 2.0**-149, 2.0**-126, 3.4e38, torch.inf, -torch.inf, torch.nan, 2.0**-60, 1e-40]
THREE, TWENTY = np.float32(3.0), np.uint32(20)
OPERATIONS = {
    "add": (op.add, "w32", "w32"),
    "sub": (op.sub, "w32", "w32"),
    "mul": (op.mul, "w32", "w32"),
    "bit_and": (op.bit_and, "w32", "w32"),
    "bit_or": (op.bit_or, "w32", "w32"),
    "bit_xor": (op.bit_xor, "w32", "w32"),
    "shl": (lambda a, n: op.shl(a, op.bit_and(n, np.uint32(31))), "w32", "w32"),
    "shr": (lambda a, n: op.shr(a, op.bit_and(n, np.uint32(31))), "w32", "w32"),
    "shr by a number": (lambda a: op.shr(a, np.uint32(13)), "w32"),
    "shr by nothing": (lambda a: op.shr(a, np.uint32(0)), "w32"),
    "less": (lambda a, b: op.select(a < b, a, b), "w32", "w32"),
    "at least": (lambda a, b: op.select(a >= b, a, b), "w32", "w32"),
    "more than a number": (lambda a: op.select(a > np.uint32(2**31), a, np.uint32(7)), "w32"),
    "neither": (lambda a: op.select(a == np.uint32(0), np.uint32(2**32 - 1), np.uint32(5)), "w32"),
    "multiply_packed_high16": (op.multiply_packed_high16, "w32", "w32"),
    "low_word": (op.low_word, "w64"),
    "high_word": (op.high_word, "w64"),
    "widen": (op.widen, "w32"),
    "to_real": (op.to_real, "w32"),
    "to_word": (lambda w: op.to_word(op.to_real(w) * np.float32(0.5)), "w32"),
    "to_word of 64 bits": (lambda w: op.to_word(op.real(op.bit_and(op.word(w), np.uint64(0x41CFFFFFFFFFFFFF)))), "f64"),
    "add of 64 bits": (op.add, "w64", "w64"),
    "sub of 64 bits": (op.sub, "w64", "w64"),
    "bit_and of 64 bits": (op.bit_and, "w64", "w64"),
    "bit_or of 64 bits": (op.bit_or, "w64", "w64"),
    "bit_xor of 64 bits": (op.bit_xor, "w64", "w64"),
    "shl of 64 bits": (lambda a, n: op.shl(a, op.bit_and(n, np.uint64(63))), "w64", "w64"),
    "shr of 64 bits": (lambda a, n: op.shr(a, op.bit_and(n, np.uint64(63))), "w64", "w64"),
    "less64": (lambda a, b: op.select(a < b, a, b), "w64", "w64"),
    "plus": (lambda x, y: x + y, "f32", "f32"),
    "minus a number": (lambda x: np.float32(0.3) - x, "f32"),
    "times": (lambda x, y: x * y, "f32", "f32"),
    "multiply_add": (lambda x, y: op.multiply_add(op.to_real(op.shr(op.word(x), TWENTY)), THREE, y), "f32", "f32"),
    "divide": (op.divide, "f32", "f32"),
    "divide by a number": (lambda x: op.divide(x, np.float32(3.0)), "f32"),
    "divide a number": (lambda x: op.divide(np.float32(3.0), x), "f32"),
    "sqrt": (op.sqrt, "f32"),
    "maximum": (op.maximum, "f32", "f32"),
    "sign_of": (op.sign_of, "f32"),
    "negative": (lambda x: -x, "f32"),
    "size": (lambda x: abs(x), "f32"),
    "ordered": (lambda x, y: op.select((x < y) & ~(x == y) | (x != x), x, y), "f32", "f32"),
    "numbers": (lambda x: op.divide(np.float32(1.0), np.float32(3.0)) + x * np.float32(-0.0), "f32"),
    "bits": (lambda w: op.word(op.real(op.bit_or(w, np.uint32(1 << 22)))), "w32"),
    "times64": (lambda x, y: x * y + np.float64(0.1), "f64", "f64"),
}


def _given(kind, count=2000):
    if kind in INTEGERS:
        bits = int(kind[1:])
        words = torch.randint(-(2**63), 2**63 - 1, (count,)) >> (64 - bits)
        edges = torch.tensor([0, 1, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1))])
        return torch.cat([edges.repeat_interleave(len(edges)), words]).to(INTEGERS[kind][1])
    values = torch.randn(count, dtype=torch.float64) * 2.0 ** torch.randint(-140, 120, (count,))
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    return torch.cat([special, values]).to(REALS[kind][1])


def _recorded(function, *kinds):
    trace = Trace(torch.float32)
    result = function(*(trace.emit("input", (), k, kind) for k, kind in enumerate(kinds)))
    return trace, result


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_numpys_bits(seed, name):
    function, *kinds = OPERATIONS[name]
    given = [_given(kind) for kind in kinds]
    if len(given) == 2:
        given[1] = torch.cat([given[1][:25].flip(0), given[1][25:].roll(7)])
    trace, result = _recorded(function, *kinds)
    ((found,), _) = run_trace_on_tensors(trace, (), dict(enumerate(given)), [result.number])
    dtype = (INTEGERS | REALS)[result.kind]
    types = [(INTEGERS | REALS)[kind][0] for kind in kinds]
    arrays = [x.numpy().view(one) for x, one in zip(given, types)]
    wanted = on_numbers(function, *arrays)
    assert found.dtype == dtype[1]
    assert wanted.dtype == dtype[0]
    assert same_bits(found, torch.from_numpy(wanted.copy()).view(dtype[1]))


def _moved():
    """y = 2x + c into an array of 16 bits that is read too, by halves of float32 words; sums of what was read."""
    element = ElementTraceBuilder(2, constant_count=1)
    i, (a, b), (c,) = element.index, element.arrays, element.constants
    x = op.real(op.shl(op.load16(a, i), np.uint32(16)))
    op.store16(a, i, op.shr(op.word(x + x + c), np.uint32(16)))
    op.store32(b, i, op.word(x))
    element.trace.emit_total("max", op.word(abs(x)))
    return element.trace


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (4, 6)])
def test_memory_of_any_shape_and_stride_is_written_in_place(seed, shape):
    start = torch.randn(shape).bfloat16()
    for held in (start.clone(), start.clone().mT if len(shape) == 2 else torch.stack([start, start])[0]):
        before, copy = held.clone(), torch.zeros(held.shape)
        _, (largest,) = run_trace_on_tensors(_moved(), [held, copy], {("constant", 0): 0.5})
        assert same_bits(copy, before.float())
        cut = (2 * before.float() + 0.5).view(torch.int32) >> 16
        assert same_bits(held, cut.to(torch.int16).view(torch.bfloat16))
        assert largest == (before.float().abs().max().item() if held.numel() else 0.0)


def test_an_array_that_is_read_and_written_is_read_first():
    element = ElementTraceBuilder(2)
    i, (a, b) = element.index, element.arrays
    old, other = op.load32(a, i), op.load32(b, i)
    op.store32(a, i, other)
    op.store32(b, i, old)
    x, y = torch.arange(3.0), torch.arange(3.0) + 5
    run_trace_on_tensors(element.trace, [x, y])
    assert (x.tolist(), y.tolist()) == ([5.0, 6.0, 7.0], [0.0, 1.0, 2.0])


@pytest.mark.parametrize("count", [0, 1, 4, 6, 8])
def test_blocks_have_their_largest_word_and_the_last_may_be_short(count):
    element = ElementTraceBuilder(2)
    i, (a, tops) = element.index, element.arrays
    block = element.trace.emit("block", (), None, "block")
    top = block_largest(op.load32(a, i))
    op.store32(tops, block, top)
    op.store32(a, i, op.sub(top, op.load32(a, i)))
    words = torch.arange(count, dtype=torch.int32) * -3
    found, largest = words.clone(), torch.zeros(-(-count // 4), dtype=torch.int32)
    run_trace_on_tensors(element.trace, [found, largest], block=4)
    unsigned = (words.long() & 0xFFFFFFFF).split(4) if count else []
    tops = [int(part.max()) for part in unsigned]
    assert (largest.long() & 0xFFFFFFFF).tolist() == tops
    assert (found.long() & 0xFFFFFFFF).tolist() == [t - w for part, t in zip(unsigned, tops) for w in part.tolist()]


def test_the_default_dtype_and_flushed_subnormals_change_nothing(seed):
    values = torch.randn(100).bfloat16() * 2.0**-125
    held = [values.clone() for _ in range(2)]
    run_trace_on_tensors(_moved(), [held[0], torch.zeros(100)], {("constant", 0): 2.0**-130})
    assert (held[0].float().abs() < 2.0**-126).any(), "the case has subnormal numbers"
    torch.set_default_dtype(torch.float64)
    flushes = torch.set_flush_denormal(True)
    try:
        run_trace_on_tensors(_moved(), [held[1], torch.zeros(100, dtype=torch.float32)], {("constant", 0): 2.0**-130})
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_flush_denormal(False)
    assert flushes
    assert same_bits(*held)


def test_meta_tensors_are_run_through():
    trace, result = _recorded(lambda x: op.select(x > np.float32(0.0), op.sqrt(x), x), "f32")
    ((found,), _) = run_trace_on_tensors(trace, (), {0: torch.empty(3, 4, device="meta")}, [result.number])
    assert (found.shape, found.device.type) == ((3, 4), "meta")
