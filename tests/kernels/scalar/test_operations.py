"""Every scalar operation, in plain Python and as an instruction, on random and special words."""

import numpy as np
import pytest
import torch

from halfulp.kernels import compile_kernel, same_bits
from halfulp.kernels.scalar._instructions import INTRINSICS
from halfulp.kernels.scalar._operations import (
    SCALARS,
    load32,
    load64,
    prefetch,
    real,
    real64,
    store32,
    store64,
    widen,
    word,
    word64,
)

SPECIAL = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7F800000, 0x7F800001, 0xFF800000, 0x00800000, 0x007FFFFF]
SPECIAL += [0x3F800000, 0xBF800000, 0x4EFFFFFF, 0x33800000, 0x00000100]
SHIFTS = ("shl", "shr", "shl64", "shr64")


def words(count: int, rng: np.random.Generator) -> np.ndarray:
    chosen = rng.choice(np.array(SPECIAL, np.uint64), count)
    return np.where(rng.random(count) < 0.5, chosen, rng.integers(0, 2**32, count, dtype=np.uint64)).astype(np.uint32)


def two(n, a, b, out):
    for i in range(n):
        store32(out, i, operation(load32(a, i), load32(b, i)))  # noqa: F821  bound


def one(n, a, b, out):
    for i in range(n):
        store32(out, i, operation(load32(a, i)))  # noqa: F821


def two_reals(n, a, b, out):
    for i in range(n):
        store32(out, i, word(operation(real(load32(a, i)), real(load32(b, i)))))  # noqa: F821


def one_real(n, a, b, out):
    for i in range(n):
        store32(out, i, word(operation(real(load32(a, i)))))  # noqa: F821


def to_real_word(n, a, b, out):
    for i in range(n):
        store32(out, i, word(operation(load32(a, i))))  # noqa: F821


def from_real(n, a, b, out):
    for i in range(n):
        store32(out, i, operation(real(load32(a, i))))  # noqa: F821


def two_wide(n, a, b, out):
    for i in range(n):
        store64(out, i, operation(load64(a, i), load64(b, i)))  # noqa: F821


def chosen(n, a, b, out):
    for i in range(n):
        x, y = load32(a, i), load32(b, i)
        store32(out, i, operation(x > y, x, y))  # noqa: F821


def through_real64(n, a, b, out):
    for i in range(n):
        store64(out, i, word64(real64(load64(a, i))))


def from_real64(n, a, b, out):
    for i in range(n):
        store64(out, i, operation(real64(load64(a, i))))  # noqa: F821


def wider(n, a, b, out):
    for i in range(n):
        store64(out, i, operation(load32(a, i)))  # noqa: F821


KERNELS = {
    **dict.fromkeys(["add", "sub", "mul", "bit_and", "bit_or", "bit_xor", "shl", "shr"], two),
    **dict.fromkeys(["divide", "maximum"], two_reals),
    **dict.fromkeys(["sqrt", "sign_of"], one_real),
    **dict.fromkeys(["real", "to_real"], to_real_word),
    **dict.fromkeys(["word", "to_word"], from_real),
    **dict.fromkeys(["add64", "sub64", "and64", "or64", "xor64", "shl64", "shr64"], two_wide),
    **dict.fromkeys(["real64", "word64"], through_real64),
    "to_word64": from_real64,
    "widen": wider,
    "select": chosen,
}
MEMORY = ["load8", "load16", "load32", "load64", "store8", "store16", "store32", "store64", "amax16x32"]
INDEX = ["low_word", "high_word"]
COUNTED = ["under16", "under_quotients16", "squares16"]


def test_every_operation_is_tested_and_has_an_instruction():
    assert set(SCALARS) == set(INTRINSICS) == {*KERNELS, *MEMORY, *INDEX, *COUNTED, "prefetch"}


def asks_ahead(n, a, b, out):
    for i in range(n):
        prefetch(a + 4 * i)
        prefetch(-8 * i)
        store32(out, i, load32(a, i))


def test_a_prefetch_of_any_address_changes_nothing(cache):
    a, out = np.arange(100, dtype=np.uint32), np.zeros(100, np.uint32)
    compile_kernel(asks_ahead, "void(int64, int64, int64, int64)")(100, a.ctypes.data, 0, out.ctypes.data)
    assert (a == out).all()
    assert prefetch(0) is None


@pytest.mark.parametrize("name", KERNELS)
def test_python_is_the_instruction(name, cache, seed):
    rng = np.random.default_rng(seed)
    body, n = KERNELS[name], 2000
    wide = body in (two_wide, through_real64, from_real64)
    a, b = words(n * (2 if wide else 1), rng), words(n * (2 if wide else 1), rng)
    if name in SHIFTS:
        b = np.ascontiguousarray((b % (64 if wide else 32)).view(np.uint64) % 64 if wide else b % 32)
    if name == "to_word":
        a = np.clip(a.view(np.float32), -(2.0**31), 2.0**31 - 128)
        a = np.nan_to_num(a).astype(np.float32)
    if name == "to_word64":
        a = rng.random(n) * 2.0 ** rng.integers(-40, 31, n)
    results = [np.zeros(n, np.uint64) for _ in range(2)]
    signature = "void(int64, int64, int64, int64)"
    compile_kernel(body, signature, {"operation": SCALARS[name]})(
        n, a.ctypes.data, b.ctypes.data, results[0].ctypes.data
    )
    body.__globals__["operation"] = SCALARS[name]
    with np.errstate(all="ignore"):
        body(n, a.ctypes.data, b.ctypes.data, results[1].ctypes.data)
    if body in (two_reals, one_real, to_real_word):
        x, y = (torch.from_numpy(r.view(np.float32)[:n]) for r in results)
        places = [i for i in range(n) if not same_bits(x[i], y[i])] if not same_bits(x, y) else []
        assert not places, [(hex(a[i]), hex(b[i]), x[i], y[i]) for i in places[:5]]
    else:
        assert (results[0] == results[1]).all()


def move(n, a, b, out):
    for i in range(n):
        put(out, i, get(a, i))  # noqa: F821  bound


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_memory(bits, cache, seed):
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 256, 64 * bits // 8, dtype=np.uint8)
    bind = {"get": SCALARS[f"load{bits}"], "put": SCALARS[f"store{bits}"]}
    compiled, plain = np.zeros_like(a), np.zeros_like(a)
    compile_kernel(move, "void(int64, int64, int64, int64)", bind)(64, a.ctypes.data, 0, compiled.ctypes.data)
    for i in range(64):
        bind["put"](plain.ctypes.data, i, bind["get"](a.ctypes.data, i))
    assert (compiled == a).all()
    assert (plain == a).all()


def highest(n, a, b, out):
    for i in range(n):
        store32(out, i, peak(a, i))  # noqa: F821


@pytest.mark.parametrize(("name", "dtype"), [("amax16x32", np.uint32)])
def test_peaks(name, dtype, cache, seed):
    """Also where the 16 neighbours are not aligned."""
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 2 ** (8 * np.dtype(dtype).itemsize), 48, dtype=np.uint64).astype(dtype)
    out = np.zeros(33, np.uint32)
    compile_kernel(highest, "void(int64, int64, int64, int64)", {"peak": SCALARS[name]})(
        33, a.ctypes.data, 0, out.ctypes.data
    )
    half = dtype(np.iinfo(dtype).max >> 1)
    assert out.tolist() == [int((a[i : i + 16] & half).max()) for i in range(33)]
    assert out.tolist() == [int(SCALARS[name](a.ctypes.data, i)) for i in range(33)]


def counted(n, a, nonzero, normal, scale, out):
    for i in range(n):
        store64(out, 3 * i, widen(under16(a, i, nonzero, normal)))  # noqa: F821
        quotients = under_quotients16(a, i, real(scale), real(nonzero), real(normal))  # noqa: F821
        store64(out, 3 * i + 1, widen(quotients))
        store64(out, 3 * i + 2, word64(squares16(a, i)))  # noqa: F821


@pytest.mark.parametrize("scale", [0.75, 1e-3, 1e-30, 0.0])
def test_counts_of_sixteen(cache, seed, scale):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(400) * 10.0 ** rng.integers(-3, 3, 400)).astype(np.float32)
    x[::31], x[5], x[90], x[200:216] = 0, np.inf, np.nan, np.repeat(np.float32(0.25), 16)
    low, high = np.float32(0.25), np.float32(3)
    n, out = 384, np.zeros((384, 3), np.uint64)
    bind = {name: SCALARS[name] for name in COUNTED}
    kernel = compile_kernel(counted, "void(int64, int64, uint32, uint32, uint32, int64)", bind)
    words_of = (value.view(np.uint32) for value in (low, high, np.float32(scale)))
    kernel(n, x.ctypes.data, *words_of, out.ctypes.data)
    with np.errstate(all="ignore"):
        quotients = np.abs(x) / np.float32(scale)
        for k, size in enumerate((np.abs(x), quotients)):
            under = [((x != 0) & (size < low))[i : i + 16].sum() for i in range(n)]
            small = [((size >= low) & (size < high))[i : i + 16].sum() for i in range(n)]
            assert out[:, k].tolist() == [int(a) + (int(b) << 16) for a, b in zip(under, small)]
    squares = np.where(np.isfinite(x), x.astype(np.float64), 0) ** 2
    sums = np.array([squares[i : i + 16].sum() for i in range(n)])
    assert np.allclose(out[:, 2].view(np.float64), sums, rtol=1e-14, atol=0)
    for i in range(0, n, 7):
        plain = (
            SCALARS["under16"](x.ctypes.data, i, low.view(np.uint32), high.view(np.uint32)),
            SCALARS["under_quotients16"](x.ctypes.data, i, np.float32(scale), low, high),
            SCALARS["squares16"](x.ctypes.data, i).view(np.uint64),
        )
        assert [int(one) for one in plain] == out[i].tolist()


def index_words(n, a, b, out):
    for i in range(n):
        store32(out, i + i, low_word(i * 0x123456789))  # noqa: F821
        store32(out, i + i + 1, high_word(i * 0x123456789))  # noqa: F821


def test_index_words(cache):
    out = np.zeros(200, np.uint32)
    bind = {name: SCALARS[name] for name in INDEX}
    compile_kernel(index_words, "void(int64, int64, int64, int64)", bind)(100, 0, 0, out.ctypes.data)
    wanted = [word for i in range(100) for word in divmod(i * 0x123456789, 2**32)[::-1]]
    assert out.tolist() == wanted
    assert [int(SCALARS["low_word"](2**40 + 5)), int(SCALARS["high_word"](2**40 + 5))] == [5, 256]
