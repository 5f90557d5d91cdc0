"""Every scalar operation, in plain Python and as an instruction, on random and special words."""

import ctypes

import numpy as np
import pytest
import torch

from halfulp.kernels import Trace, same_bits
from halfulp.kernels._operations import SCALARS
from halfulp.kernels.vector._instructions import Instructions
from halfulp.kernels.vector._machine_function import machine_function

SPECIAL = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7F800000, 0x7F800001, 0xFF800000, 0x00800000, 0x007FFFFF]
SPECIAL += [0x3F800000, 0xBF800000, 0x4EFFFFFF, 0x33800000, 0x00000100]
SHIFTS = ("shl", "shr", "shl64", "shr64", "sar64")
# The kinds of operands and result.
KINDS = {
    **dict.fromkeys(
        ["add", "sub", "mul", "bit_and", "bit_or", "bit_xor", "shl", "shr", "multiply_high16"], ("w32", "w32", "w32")
    ),
    **dict.fromkeys(["divide", "maximum"], ("f32", "f32", "f32")),
    **dict.fromkeys(["sqrt", "sign_of", "floor"], ("f32", "f32")),
    **dict.fromkeys(["real", "to_real"], ("w32", "f32")),
    **dict.fromkeys(["word", "to_word"], ("f32", "w32")),
    **dict.fromkeys(["add64", "sub64", "mul64", "and64", "or64", "xor64", *SHIFTS[2:]], ("w64", "w64", "w64")),
    "multiply_add": ("f32", "f32", "f32", "f32"),
    "real64": ("w64", "f64"),
    "word64": ("f64", "w64"),
    "to_word64": ("f64", "w64"),
    "widen": ("w32", "w64"),
    "low_word": ("w64", "w32"),
    "high_word": ("w64", "w32"),
}
MEMORY = [f"{verb}{bits}" for verb in ("load", "store") for bits in (4, 8, 16, 32, 64)] + ["deposit64"]
TYPES = {"w32": np.uint32, "w64": np.uint64, "f32": np.float32, "f64": np.float64}


def words(count: int, rng: np.random.Generator) -> np.ndarray:
    chosen = rng.choice(np.array(SPECIAL, np.uint64), count)
    return np.where(rng.random(count) < 0.5, chosen, rng.integers(0, 2**32, count, dtype=np.uint64)).astype(np.uint32)


def test_every_operation_is_tested():
    assert set(SCALARS) == {*KINDS, *MEMORY, "select"}


def compiled(name: str, function, kinds: tuple[str, ...], lanes: int, given: list[np.ndarray]) -> np.ndarray:
    """A function's results for all elements of arrays, by its instructions on vectors."""
    *operands, result = kinds
    trace = Trace(torch.float32)
    recorded = function(*(trace.emit("input", (), k, kind) for k, kind in enumerate(operands)))
    assert recorded.kind == result
    made = np.zeros(len(given[0]), TYPES[result])

    def write(vectors, count, *places):
        b, types = vectors.b, {"w32": vectors.i32, "w64": vectors.i64, "f32": vectors.f32, "f64": vectors.f64}
        with vectors.loop(vectors.word(0), count, lanes) as i:
            shapes = [vectors.shape(types[kind], lanes) for kind in kinds]
            *sources, target = (vectors.pointer(place, i, shape) for place, shape in zip(places, shapes))
            values = [b.load(source, align=4) for source in sources]
            b.store(Instructions(b, trace, lanes).run(values)[recorded.number], target, align=4)

    key = f"{name} {kinds} {lanes} {trace.digest()}"
    kernel = machine_function(name, key, 2 + len(operands), write)
    kernel(len(made), *(array.ctypes.data for array in (*given, made)))
    return made


def operands(name: str, kinds: tuple[str, ...], count: int, rng: np.random.Generator) -> list[np.ndarray]:
    if name == "to_word":
        x = np.clip(words(count, rng).view(np.float32), -(2.0**31), 2.0**31 - 128)
        return [np.nan_to_num(x).astype(np.float32)]
    if name == "to_word64":
        return [rng.random(count) * 2.0 ** rng.integers(-40, 31, count)]
    if name == "multiply_add":  # whose product is exact
        whole = [rng.integers(-4096, 4096, count).astype(np.float32) for _ in range(2)]
        return [*whole, words(count, rng).view(np.float32)]
    given = [words(count * (1 + kind.endswith("64")), rng).view(TYPES[kind]) for kind in kinds[:-1]]
    if name in SHIFTS:
        given[1] = given[1] % TYPES[kinds[0]](int(kinds[0][1:]))
    return given


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("name", KINDS)
def test_python_is_the_instruction(name, lanes, cache, seed):
    kinds, count = KINDS[name], 2000
    given = operands(name, kinds, count, np.random.default_rng(seed))
    made = compiled(name, SCALARS[name], kinds, lanes, given)
    with np.errstate(all="ignore"):
        plain = np.array([SCALARS[name](*values) for values in zip(*given)], TYPES[kinds[-1]])
    if kinds[-1].startswith("f") and kinds[0] != "w64":
        assert same_bits(torch.from_numpy(made), torch.from_numpy(plain))
    else:
        assert made.tobytes() == plain.tobytes()


@pytest.mark.parametrize("lanes", [1, 8])
def test_a_choice(lanes, cache, seed):
    rng = np.random.default_rng(seed)
    given = [words(2000, rng) for _ in range(2)]
    made = compiled("select", lambda x, y: SCALARS["select"](x > y, x, y), ("w32", "w32", "w32"), lanes, given)
    assert made.tolist() == np.maximum(*given).tolist()


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_memory(bits, seed):
    """In plain Python; tables of pointers load and store as instructions."""
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 256, 64 * bits // 8, dtype=np.uint8)
    copy = np.zeros_like(a)
    for i in range(64):
        word = SCALARS[f"load{bits}"](a.ctypes.data, i)
        assert int(word) == int.from_bytes(ctypes.string_at(a.ctypes.data + i * bits // 8, bits // 8), "little")
        SCALARS[f"store{bits}"](copy.ctypes.data, i, word)
    assert (copy == a).all()


def test_an_index_is_a_word_in_python():
    assert [int(SCALARS["low_word"](2**40 + 5)), int(SCALARS["high_word"](2**40 + 5))] == [5, 256]
