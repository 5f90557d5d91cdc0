"""Traces as machine code: rows of any length, and networks that a long trace holds once and calls."""

import math
from fractions import Fraction

import pytest
import torch

from halfulp.kernels import BROADCAST_COPIES, compile_trace, record_function, record_out_of_line, same_bits, select
from halfulp.kernels._device_function import ElementTraceBuilder
from halfulp.kernels._operations import add, load32, real, sqrt, store32, word
from halfulp.kernels._trace import block_largest
from halfulp.kernels.vector import _processor
from halfulp.kernels.vector._loop import split_into_block_phases

from .rows import run_rows


@record_out_of_line
def _mixed(x: list, y: list, n: int) -> list:
    """Something of more than 100 operations."""
    out = [*x, *y]
    for _ in range(12):
        for k in range(len(out)):
            out[k] = out[k] * 0.75 - out[k - 1] * 0.5
    return out[:n]


def _long(a, b):
    """Two thousand operations written out once, five times as many with every call."""
    x = [a, b]
    for k in range(60):
        x = _mixed(x, [b * (1.0 + k), a], 2)
    return [select(x[0] > x[1], x[0], x[1]), x[1] / (abs(x[0]) + 1.0)]


def _short(a, b):
    return [*_mixed([a], [b], 1), a + b]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [_short, _long])
def test_every_length_has_the_bits_of_tensors(function, dtype, seed):
    trace, results = record_function(function, dtype, 2)
    kernel = compile_trace("test", trace, [r.number for r in results], [dtype] * 2, [dtype] * 2)
    for count in (*range(1, 2 * BROADCAST_COPIES + 2), 100):
        a, b = torch.randn(2, count, dtype=dtype)
        expected = function(a, b)
        behind = torch.full((2, count + BROADCAST_COPIES), 7.0, dtype=dtype)
        outputs = [part[:count] for part in behind]
        run_rows(kernel, count, [a, b], [(count, 1)] * 2, outputs)
        assert all(map(same_bits, outputs, expected))
        assert bool((behind[:, count:] == 7.0).all())
        run_rows(kernel, count, [a, b], [(count, 1)] * 2, [a, b])
        assert all(map(same_bits, [a, b], expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rows_with_a_broadcast_operand(dtype, seed):
    trace, results = record_function(_long, torch.float64, 2)
    kernel = compile_trace("test", trace, [r.number for r in results], [dtype] * 2, [torch.float64] * 2)
    for rows, columns in ((3, 1), (4, 7), (2, 19)):
        a, b = torch.randn(rows, columns).to(dtype), torch.randn(rows, 1).to(dtype)
        outputs = [torch.empty(rows, columns, dtype=torch.float64) for _ in range(2)]
        repeated = b.expand(-1, BROADCAST_COPIES).contiguous()
        run_rows(kernel, columns, [a, repeated], [(columns, 1), (BROADCAST_COPIES, 0)], outputs)
        assert all(map(same_bits, outputs, _long(a.double(), b.double())))


def test_a_network_is_recorded_once_for_lists_of_one_shape():
    trace, _ = record_function(_long, torch.float64, 2)
    assert len(trace.functions) == 2, "the first call alone takes a value twice"
    assert trace.count_instructions() > 59 * len(trace.functions[0].trace.lines)
    assert len(trace.lines) < 500


def test_a_value_given_twice_is_another_shape():
    trace, _ = record_function(lambda a, b: [*_mixed([a, b], [a, b], 2), *_mixed([a, b], [b, a], 2)], torch.float64, 2)
    assert [sum(line[0] == "input" for line in piece.trace.lines) for piece in trace.functions] == [2, 2]


def test_the_digest_tells_what_is_called():
    def of(factor):
        @record_out_of_line
        def network(x):
            for _ in range(100):
                x = [x[0] * factor + 1.0]
            return x

        return record_function(lambda a: network([a]), torch.float64, 1)[0].digest()

    assert of(2.0) == of(2.0)
    assert of(2.0) != of(3.0)


def test_the_digest_tells_the_kinds_of_its_inputs():
    def of(kind):
        element = ElementTraceBuilder(0)
        word = element.add_input("word", kind)
        return (word * word).trace.digest()

    assert of("w32") == of("w32")
    assert of("w32") != of("w64")


def test_a_short_network_is_written_out():
    trace, _ = record_function(lambda a, b: record_out_of_line(lambda x: [x[0] + x[1]])([a, b]), torch.float64, 2)
    assert [line[0] for line in trace.lines] == ["input", "input", "add"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_results_are_stored_to_nearest(stored, dtype, seed):
    """Halves and their neighbours, subnormals, overflow, infinities, NaN; the oracle compares exact distances."""
    trace, results = record_function(lambda a: [a + a], dtype, 1)
    kernel = compile_trace("test", trace, [r.number for r in results], [dtype], [stored])
    codes = torch.randint(0, 2**15 - 1, (400,)).to(torch.int16)
    around = torch.stack([codes.view(stored), (codes + 1).view(stored)]).double()
    around = around[:, around.isfinite().all(0)]
    middle = around.mean(0)
    near = [middle, middle * (1 + 2.0**-40), middle * (1 - 2.0**-40), middle * (1 + 2.0**-22), around[0]]
    limits = torch.finfo(stored)
    special = [0.0, limits.max, limits.max * (1 + limits.eps / 4) * (1 - 2.0**-50), limits.max * (1 + limits.eps)]
    values = torch.cat([*near, torch.tensor([*special, torch.inf, torch.nan], dtype=torch.float64)])
    values = torch.cat([values, -values])
    halves = (values / 2).to(dtype)
    values = halves.double() * 2
    out = torch.empty(len(values), dtype=stored)
    run_rows(kernel, len(values), [halves], [(len(values), 1)], [out])
    for value, found in zip(values.tolist(), out):
        assert same_bits(found, _nearest(value, stored)), value


def _nearest(value: float, stored: torch.dtype) -> torch.Tensor:
    """By comparing distances to the two neighbours exactly, ties to the even code."""
    if value != value or abs(value) == float("inf"):
        return torch.tensor(value, dtype=stored)
    limits = torch.finfo(stored)
    low = torch.tensor(min(abs(value), limits.max), dtype=torch.float64).to(stored)
    codes = [int(low.view(torch.int16)) + k for k in (-1, 0, 1)]
    sizes = {c: float(torch.tensor(c, dtype=torch.int16).view(stored).double()) for c in codes if c >= 0}
    top = 2.0 ** math.frexp(limits.max)[1]  # where infinity would stand if it were a number
    sizes = {c: top if size == float("inf") else size for c, size in sizes.items()}
    best = min(sizes, key=lambda c: (abs(Fraction(sizes[c]) - Fraction(abs(value))), c % 2))
    return torch.tensor(best, dtype=torch.int16).view(stored) * math.copysign(1.0, value)


def _sums(a, b):
    return [a + b, a - b, b + a, b - a, a + b, a - b, (a - a) - (b - b), a - (b + b)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["znver3", "haswell"])
def test_sums_that_run_in_units_that_multiply_have_the_bits_of_sums(name, dtype, assembly_of, cache):
    """Every second one, on AMD's Zen alone: signed zeros, infinities, NaN and subnormal numbers too."""
    if not _processor.has_vector_fma(_processor.find_vector_bits()):
        pytest.skip("vectors without fused products")
    limits, written = torch.finfo(dtype), assembly_of(name)
    trace, results = record_function(_sums, dtype, 2)
    kernel = compile_trace(f"sums on {name}", trace, [r.number for r in results], [dtype] * 2, [dtype] * 8)
    code = "".join(written)
    assert ("vfmadd" in code) == (name == "znver3")
    assert "vadd" in code
    special = [0.0, 1.0, math.inf, limits.max, limits.tiny, limits.smallest_normal * limits.eps, limits.eps, 1 / 3]
    values = torch.tensor([*special, *(-x for x in special), math.nan], dtype=dtype)
    a, b = (x.reshape(-1).contiguous() for x in torch.meshgrid(values, values, indexing="ij"))
    outputs = [torch.empty_like(a) for _ in range(8)]
    run_rows(kernel, len(a), [a, b], [(len(a), 1)] * 2, outputs)
    for found, wanted in zip(outputs, _sums(a, b)):
        assert same_bits(found, wanted)
        assert torch.equal(found.signbit() & (found == 0), wanted.signbit() & (wanted == 0))


@pytest.mark.parametrize("written_before", [False, True])
def test_what_waits_for_a_quotient_is_computed_behind_a_blocks_largest_words(written_before):
    """With what it alone reads, but an array that is written before."""
    element = ElementTraceBuilder(3)
    first, second, third = element.arrays
    element.emit_block_index()
    loaded, y, i = load32(first, element.index), real(load32(second, element.index)), element.index
    root = sqrt(y)
    quotient = real(loaded) / root
    store32(second, i, add(word(root), block_largest(word(root))))
    store32(third, i, word(quotient))
    if written_before:
        store32(first, i, word(root + root))
    phases = split_into_block_phases(element.trace)
    assert {root.number, y.number} <= phases.first_loop_lines
    assert quotient.number in phases.lines_after_largest
    assert (loaded.number in phases.first_loop_lines) is written_before
    assert (loaded.number in phases.carried_lines) is written_before
    assert quotient.number not in phases.first_loop_lines
