"""Recorded device functions as loops over tables of pointers: every operation, width, length, block and sum."""

import itertools

import numpy as np
import pytest
import torch

from halfulp.kernels import Trace, same_bits
from halfulp.kernels import _operations as o
from halfulp.kernels._device_function import PointerTableFunction, bind_free_variables, record_word_function
from halfulp.kernels._operations import (
    add,
    add_to_counter64,
    bit_and,
    bit_or,
    high_word,
    low_word,
    mul,
    real,
    select,
    shl,
    shr,
    sub,
    widen,
    word,
)
from halfulp.kernels._trace import block_largest
from halfulp.kernels.vector._machine_function import get_array_address
from halfulp.kernels.vector._table_loop import compile_pointer_table_kernel

from ..scalar.numbers import on_numbers
from ..scalar.test_operations import words

LENGTHS = (*range(70), 128, 1000)
KERNELS = {}


def recorded(function, columns, **more):
    """The table of a device function of (trace, i, block, *addresses)."""
    trace = Trace(torch.float32)
    i, block = (trace.emit(name, (), None, name) for name in ("index", "block"))
    function(trace, i, block, *(trace.emit("address", (), j, "address") for j in range(columns)))
    return PointerTableFunction(trace, columns, **more)


def run(table, arrays, chunks=None, constants=None, keys=None):
    """Run a table on arrays, all of them one row; return the sums of each chunk."""
    chunks = np.array([[0, 0, len(arrays[0]), 0]] if chunks is None else chunks, np.int64)
    pointers = np.array([[array.ctypes.data for array in arrays]], np.int64)
    sums = np.zeros((len(chunks), table.sum_column_count))
    constants = np.zeros((1, 1), np.float32) if constants is None else constants
    keys = np.zeros((1, 1), np.uint64) if keys is None else keys
    key = table.make_cache_key()
    if key not in KERNELS:
        KERNELS[key] = compile_pointer_table_kernel("test", table)
    kernel = KERNELS[key]
    given = chunks, pointers, np.zeros(1, np.int64), constants, keys, sums
    kernel(0, len(chunks), *map(get_array_address, given))
    return sums


REALS = {"divide": 2, "maximum": 2, "sqrt": 1, "sign_of": 1}
WORDS = dict.fromkeys(("add", "sub", "mul", "bit_and", "bit_or", "bit_xor", "shl", "shr"), 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("narrow", [False, True], ids=["words", "beside bytes"])
@pytest.mark.parametrize("name", [*REALS, *WORDS, "to_real", "to_word", "add of reals", "comparisons", "64 bits"])
def test_every_operation_is_numpys(name, narrow, seed):
    rng = np.random.default_rng(seed)
    a, b = words(203, rng), words(203, rng)
    if name in ("shl", "shr"):
        b = b % np.uint32(32)
    if name == "to_word":
        a = np.nan_to_num(np.clip(a.view(np.float32), -(2.0**31), 2.0**31 - 128)).astype(np.float32).view(np.uint32)

    def value(x, y):
        if name in REALS:
            return word(getattr(o, name)(*[real(x), real(y)][: REALS[name]]))
        if name in WORDS:
            return getattr(o, name)(x, y)
        if name == "to_real":
            return word(getattr(o, name)(x))
        if name == "to_word":
            return getattr(o, name)(real(x))
        if name == "add of reals":
            return word(-(abs(real(x)) + real(y) * real(x)) - real(y))
        if name == "comparisons":
            found = [x < y, x <= y, x > y, x >= y, x == y, x != y, real(x) < real(y), real(x) != real(y)]
            found += [(x < y) & (x != y), (x < y) | (x == y), (x < y) == (real(x) < real(y))]
            total = np.uint32(0)
            for k, mask in enumerate(found):
                total = add(total, select(mask, np.uint32(1 << k), np.uint32(0)))
            return total
        both = bit_or(widen(x), shl(widen(y), np.uint64(32)))
        return add(low_word(both * both), high_word(add(both, both)))

    def function(trace, i, block, x, y, out, byte):
        if narrow:
            o.store8(byte, i, o.load8(byte, i))
        o.store32(out, i, value(o.load32(x, i), o.load32(y, i)))

    out, kept = np.zeros_like(a), np.arange(203).astype(np.uint8)
    run(recorded(function, 4), [a, b, out, kept])
    wanted = on_numbers(value, a, b).copy()
    assert same_bits(torch.from_numpy(out.view(np.float32)), torch.from_numpy(wanted.view(np.float32)))
    assert (kept == np.arange(203).astype(np.uint8)).all()


TYPES = {8: np.uint8, 16: np.uint16, 32: np.uint32}


@pytest.mark.parametrize("widths", [*itertools.product((8, 16, 32), repeat=2)], ids=str)
def test_every_length_writes_its_elements_and_no_others(widths, seed):
    """One array is changed in place, the other filled from it; both have neighbours in front and behind."""
    rng = np.random.default_rng(seed)
    first, second = (TYPES[bits] for bits in widths)

    def function(trace, i, block, a, b):
        x = getattr(o, f"load{widths[0]}")(a, i)
        getattr(o, f"store{widths[0]}")(a, i, add(x, np.uint32(3)))
        getattr(o, f"store{widths[1]}")(b, i, mul(getattr(o, f"load{widths[0]}")(a, i), np.uint32(5)))

    table = recorded(function, 2)
    for length in LENGTHS:
        a = rng.integers(0, np.iinfo(first).max, length + 8).astype(first)
        b = rng.integers(0, np.iinfo(second).max, length + 8).astype(second)
        wanted_a, wanted_b = a.copy(), b.copy()
        wanted_a[3 : 3 + length] += first(3)
        wanted_b[3 : 3 + length] = (wanted_a[3 : 3 + length].astype(np.uint64) * 5).astype(second)
        run(table, [a, b], [[0, 3, length, 0]])
        assert (a == wanted_a).all(), length
        assert (b == wanted_b).all(), length


@pytest.mark.parametrize("narrow", [False, True])
def test_constants_counters_and_sums(narrow, seed):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal(777).astype(np.float32)
    kept = np.arange(777).astype(np.uint16)
    out = np.zeros(777, np.uint32)

    def function(trace, i, block, x, result, other):
        if narrow:
            o.store16(other, i, o.load16(other, i))
        constant = trace.emit("input", (), ("constant", 1), "f32")
        o.store32(result, i, trace.emit("input", (), ("counter", 0), "w32"))
        value = real(o.load32(x, i)) * constant
        trace.emit_total("sum", trace.emit("to_float64", (value,), None, "f64"))
        trace.emit_total("max", bit_and(word(value), np.uint32(0x7FFFFFFF)))

    start = record_word_function(
        lambda low, high, index: add(add(low, mul(high, np.uint32(3))), low_word(index)), *["w32"] * 2, "w64"
    )
    table = recorded(function, 3, constant_count=2, random_stream_function=start, random_counter_step=1)
    chunks = [[0, 0, 500, 10], [0, 500, 277, 1 << 33]]
    key = np.array([[7 | 11 << 32]], np.uint64)
    sums = run(table, [a, out, kept], chunks, np.array([[9.0, 2.0]], np.float32), key)
    parts = 2 * a[:500].astype(np.float64), 2 * a[500:].astype(np.float64)
    for row, part in zip(sums, parts):
        assert row[0] == pytest.approx(part.sum(), rel=1e-12)
        assert row[1] == np.abs(part).max()
    assert (out[:500] == np.arange(500) + 7 + 33 + 10).all()
    assert (out[500:] == np.arange(277) + 7 + 33).all()
    assert (kept == np.arange(777)).all()


@pytest.mark.parametrize("block", [16, 32, 64, 256])
def test_blocks_store_what_their_largest_says(block, seed):
    """Differences from a block's largest, what was there per block before, and draws behind it."""
    rng = np.random.default_rng(seed)
    count = 7 * block
    x = rng.integers(0, 2**31, count, dtype=np.uint32)
    codes, tops = rng.integers(0, 200, count).astype(np.uint8), rng.integers(0, 2**16, 7).astype(np.uint16)
    narrow = rng.integers(0, 2**16, count).astype(np.uint16)

    def function(trace, i, b, values, bytes_, scales, sixteen):
        value, before = o.load32(values, i), o.load16(scales, b)
        top = block_largest(value)
        counter = trace.emit("input", (), ("counter", 0), "w32")
        o.store16(sixteen, i, add(o.load16(sixteen, i), before))
        o.store16(scales, b, shr(top, np.uint32(16)))
        o.store32(values, i, add(sub(top, value), counter))
        is_top = select(value == top, np.uint32(1), np.uint32(0))
        o.store8(bytes_, i, add(o.load8(bytes_, i), is_top))

    start = record_word_function(lambda low, high, index: low_word(index), "w32", "w32", "w64")
    table = recorded(function, 4, random_stream_function=start, random_counter_step=1, block_size=block)
    rows, old = x.reshape(7, block).copy(), tops.copy()
    largest = rows.max(1, keepdims=True)
    wanted_codes = codes.reshape(7, block) + (rows == largest)
    wanted_narrow = (narrow.reshape(7, block) + old[:, None]).astype(np.uint16)
    run(table, [x, codes, tops, narrow], [[0, 0, 5 * block, 0], [0, 5 * block, 2 * block, 5 * block]])
    assert (x.reshape(7, block) == largest - rows + np.arange(count, dtype=np.uint32).reshape(7, block)).all()
    assert (tops == (largest[:, 0] >> 16)).all()
    assert (codes.reshape(7, block) == wanted_codes).all()
    assert (narrow.reshape(7, block) == wanted_narrow).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block", [16, 32, 48, 512])
@pytest.mark.parametrize("blocks", [1, 2, 3, 16, 17, 35])
def test_any_number_of_blocks_and_what_is_chosen_per_block(blocks, block, seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 100, blocks * block).astype(np.uint32)
    rows = x.reshape(blocks, block).copy()

    def function(trace, i, b, values):
        value = o.load32(values, i)
        top = block_largest(value)
        o.store32(values, i, select(bit_and(top, np.uint32(1)) == np.uint32(1), sub(top, value), value))

    run(recorded(function, 1, block_size=block), [x])
    largest = rows.max(1, keepdims=True)
    assert (x.reshape(blocks, block) == np.where(largest % 2 == 1, largest - rows, rows)).all()


@pytest.mark.parametrize("often", [0.0, 0.01, 1.0])
def test_rare_masks_are_asked_first(often, seed):
    rng = np.random.default_rng(seed)
    x = np.where(rng.random(40 * 32) < often, np.float32(2.0**70), rng.standard_normal(40 * 32)).astype(np.float32)
    before, out = x.copy(), np.zeros_like(x)

    def function(trace, i, b, values, result):
        value = real(o.load32(values, i))
        large = abs(value) > np.float32(2.0**60)
        trace.rare_masks.add(large.number)
        small = value * select(large, np.float32(2.0**-80), np.float32(1.0))
        trace.emit_total("sum", trace.emit("to_float64", (small,), None, "f64"))
        o.store32(values, i, word(small))
        top = block_largest(bit_and(word(small), np.uint32(0x7FFFFFFF)))
        o.store32(result, i, word(select(large, real(top), value)))

    sums = run(recorded(function, 2, block_size=32), [x, out])
    small = np.where(np.abs(before) > 2.0**60, before * np.float32(2.0**-80), before)
    top = np.abs(small).reshape(-1, 32).max(1).repeat(32)
    assert (x == small).all()
    assert (out == np.where(np.abs(before) > 2.0**60, top, before)).all()
    assert sums[0, 0] == pytest.approx(small.astype(np.float64).sum(), rel=1e-12)


SPECIAL = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
ZERO, NEGATIVE_ZERO, NOTHING = np.float32(0.0), np.float32(-0.0), np.uint32(0)


@pytest.mark.parametrize("narrow", [False, True])
def test_choices_by_what_a_number_is(narrow, seed):
    """Finite or not, zero or not, in every form that device functions write; and -(c x), of which -c is made once."""
    rng = np.random.default_rng(seed)
    special = np.array(SPECIAL, np.uint32)
    x = np.concatenate([special, special | np.uint32(1 << 31), words(100, rng)])
    kept = np.concatenate([x[10:], x[:10]])
    out = [np.zeros_like(x) for _ in range(7)]

    def function(trace, i, block, a, k, byte, *results):
        if narrow:
            o.store8(byte, i, o.load8(byte, i))
        value, held = real(o.load32(a, i)), o.load32(k, i)
        gap = value - value
        still = word(value) == word(value)
        factor = trace.emit("input", (), ("constant", 0), "f32")
        found = [
            word(select(gap == ZERO, value, ZERO)),
            select(gap == gap, held, NOTHING),
            word(select((value == ZERO) & still, NEGATIVE_ZERO, real(held))),
            word(select(value == ZERO, ZERO, real(held))),
            select(value == ZERO, held, NOTHING),
            word(select(gap == ZERO, value, real(held))),
            word(-(factor * select(gap == ZERO, value, NEGATIVE_ZERO))),
        ]
        for result, written in zip(results, found):
            o.store32(result, i, written)

    arrays = [x, kept, np.zeros(len(x), np.uint8), *out]
    run(recorded(function, 10, constant_count=1), arrays, constants=np.array([[0.75]], np.float32))
    real_x = x.view(np.float32)
    finite, zero = np.isfinite(real_x), real_x == 0
    with np.errstate(all="ignore"):
        product = -(np.float32(0.75) * np.where(finite, real_x, NEGATIVE_ZERO))
    negative_zero = np.uint32(1 << 31)
    wanted = [
        np.where(finite, x, 0),
        np.where(finite, kept, 0),
        np.where(zero, negative_zero, kept),
        np.where(zero, 0, kept),
        np.where(zero, kept, 0),
        np.where(finite, x, kept),
        product.view(np.uint32),
    ]
    for number, (found, value) in enumerate(zip(out, wanted, strict=True)):
        assert (found == value).all(), number


def test_what_waits_for_a_root_is_computed_a_turn_later(seed):
    """In place, at every length: nothing is computed of what was stored, and nothing is written beyond the end."""
    rng = np.random.default_rng(seed)

    def function(trace, i, block, a, b):
        x = real(o.load32(a, i))
        root = o.sqrt(x)
        o.store32(a, i, word(x + root))
        o.store16(b, i, add(o.load16(b, i), bit_and(word(o.sqrt(root)), np.uint32(255))))

    table = recorded(function, 2)
    for length in LENGTHS:
        a = rng.random(length + 8, dtype=np.float32)
        b = rng.integers(0, 1 << 16, length + 8).astype(np.uint16)
        wanted_a, wanted_b, inside = a.copy(), b.copy(), slice(3, 3 + length)
        root = np.sqrt(a[inside])
        wanted_a[inside] = a[inside] + root
        wanted_b[inside] += (np.sqrt(root).view(np.uint32) & 255).astype(np.uint16)
        run(table, [a, b], [[0, 3, length, 0]])
        assert (a == wanted_a).all(), length
        assert (b == wanted_b).all(), length


def test_what_the_language_lacks_is_named():
    trace = Trace(torch.float32)
    x, w = (trace.emit("input", (), k, kind) for k, kind in enumerate(("f32", "w32")))
    with pytest.raises(TypeError, match=r"add of f32 and w32 in a device function"):
        x + w
    with pytest.raises(TypeError, match="no branches"):
        bool(x > x)
    address = trace.emit("address", (), 0, "address")
    with pytest.raises(TypeError, match="load16 in a device function takes the index of the element or of its block"):
        o.load16(address, w)


SHIFT = np.uint32(1)


def _moved(x):
    return shr(x, SHIFT)


def _twice_moved(x):
    return _moved(_moved(x))


def test_names_are_bound_in_called_functions_too():
    assert on_numbers(bind_free_variables(_twice_moved, {"SHIFT": np.uint32(4)}), np.array([0x1234], np.uint32)) == 0x12
    assert on_numbers(_twice_moved, np.array([16], np.uint32)) == 4


@pytest.mark.parametrize("narrow", [False, True], ids=["words", "beside bytes"])
@pytest.mark.parametrize("apart", [0, 50], ids=["one place each", "in copies"])
def test_words_are_added_to_counters(narrow, apart, seed):
    """Elements, of which any number has one place, in every length and order; what is behind them counts nothing."""
    rng, kind = np.random.default_rng(seed), np.uint16 if narrow else np.uint32
    load = getattr(o, "load16" if narrow else "load32")

    def function(trace, i, block, given, counters):
        x = load(given, i)
        add_to_counter64(counters, bit_and(x, np.uint32(15)), sub(np.uint64(3), widen(x)), apart)
        trace.emit_total("count", x > np.uint32(900))

    for count in LENGTHS:
        x = rng.integers(0, 1000, count).astype(kind)
        made = np.zeros(200, np.int64)
        sums = run(recorded(function, 2), [x, made], chunks=[[0, 0, count, 0]])
        wanted = np.zeros(50, np.int64)
        np.add.at(wanted, x & 15, 3 - x.astype(np.int64))
        assert (made.reshape(4, 50).sum(0) == wanted).all()
        assert sums[0, 0] == (x > 900).sum()


def test_many_sums_counts_and_largest_float64(seed):
    x = np.random.default_rng(seed).normal(size=333)

    def function(trace, i, block, given):
        value = real(o.load64(given, i))
        trace.emit_total("max", value)
        for limit in range(-3, 4):
            trace.emit_total("count", value > np.float64(limit))

    assert run(recorded(function, 1), [x])[0].tolist() == [x.max(), *((x > limit).sum() for limit in range(-3, 4))]
