"""Python's operators on numbers of a written function are those on Python's own numbers."""

import math
import operator

import numpy as np
import pytest
import torch

from halfulp.kernels import choose, compile_code, larger, lesser, same_bits

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
WHOLE = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "and_", "or_", "xor", "lshift", "rshift", "floordiv", *COMPARISONS)
} | {
    "neg": lambda x, y: -x + y,
    "reversed": lambda x, y: (7 - y) * 3 + (1 << y),
    "chosen": lambda x, y: lesser(x, 5 * y) + larger(x, y),
}
REAL = {name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", *COMPARISONS)}


def compiled(name: str, kind: str, function, given: np.ndarray) -> np.ndarray:
    """What a function gives for every row (x, y) of an array, as 64-bit words."""
    made = np.zeros(len(given), np.int64)

    def write(code, count, source, target):
        with code.span(0, count) as i:
            pair = code.memory(source, getattr(code, kind), 2)
            found = function(pair[i, 0], pair[i, 1])
            code.memory(target, code.i64)[i] = found.bits() if found.is_real else found.to(code.i64)

    compile_code(name, f"{name} {kind} of the test", 3, write)(len(given), given.ctypes.data, made.ctypes.data)
    return made


@pytest.mark.parametrize("name", WHOLE)
def test_integers(name, seed, monkeypatch, tmp_path):
    monkeypatch.setenv("HALFULP_CACHE_DIR", str(tmp_path))
    signed = name not in ("floordiv",)
    given = np.array([[x * (-1) ** (k * signed), k % 9 + 1] for k, x in enumerate((0, 1, 5, 17, 2**40 + 3, 2**62))])
    plain = {"lesser": min, "larger": max}
    wanted = []
    for x, y in given.tolist():
        value = plain["lesser"](x, 5 * y) + plain["larger"](x, y) if name == "chosen" else WHOLE[name](x, y)
        wanted.append((int(value) + 2**63) % 2**64 - 2**63)
    assert compiled(name, "i64", WHOLE[name], given).tolist() == wanted


@pytest.mark.parametrize("name", REAL)
def test_reals(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HALFULP_CACHE_DIR", str(tmp_path))
    values = (0.0, -0.0, 1.5, -3.25, 1e308, math.inf, math.nan)
    given = np.array([[x, y] for x in values for y in values])
    with np.errstate(all="ignore"):
        wanted = REAL[name](given[:, 0], given[:, 1])
    made = compiled(name, "f64", REAL[name], given)
    if wanted.dtype == bool:
        assert made.tolist() == wanted.astype(int).tolist()
    else:
        assert same_bits(torch.from_numpy(made.view(np.float64)), torch.from_numpy(wanted))


def test_words_of_32_bits_have_no_sign(monkeypatch, tmp_path):
    monkeypatch.setenv("HALFULP_CACHE_DIR", str(tmp_path))
    given = np.array([[0xFFFFFFFF, 1], [1, 0xFFFFFFFF], [0x80000000, 31]], np.uint32)
    assert compiled("above", "i32", lambda x, y: x > y, given).tolist() == [1, 0, 1]
    assert compiled("moved", "i32", lambda x, y: x >> (y & 31), given).tolist() == [0x7FFFFFFF, 0, 1]
    assert compiled("around", "i32", lambda x, y: x + y, given).tolist() == [0, 0, 0x8000001F]


def test_vectors_variables_and_ways(monkeypatch, tmp_path):
    """The lanes of a vector meet a scalar, a variable carries what a loop found, and one of two ways is taken."""
    monkeypatch.setenv("HALFULP_CACHE_DIR", str(tmp_path))

    def write(code, count, source, target):
        found, elements = code.memory(target, code.i64), code.memory(source, code.i64)
        total = code.variable(code.number(0).spread(4))
        limit = code.variable(100)
        with code.span(0, count, 4) as i:
            row = elements.lanes(i, 4)
            total += choose(row < limit, row, 0)
        found[0] = total.folded(operator.add)
        n = code.variable(count)
        with code.span(0, 3), code.when(n > 3):
            n.set(n >> 1)
        found[1] = n
        for place, value in ((2, 5), (3, 500)):
            with code.either(elements[0] + value > limit) as (above, below):
                with above:
                    found[place] = 1
                with below:
                    found[place] = -1

    given, made = np.arange(0, 160, 10), np.zeros(4, np.int64)
    compile_code("ways", "of the test", 3, write)(len(given), given.ctypes.data, made.ctypes.data)
    assert made.tolist() == [sum(range(0, 100, 10)), 2, -1, 1]
