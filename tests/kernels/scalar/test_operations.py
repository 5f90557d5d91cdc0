"""Every operation, by NumPy and as an instruction, on random and special words."""

import numpy as np
import pytest
import torch

from halfulp.kernels import Trace, same_bits
from halfulp.kernels import _operations as o
from halfulp.kernels.vector._instructions import InstructionWriter
from halfulp.kernels.vector._machine_function import compile_machine_function

from .numbers import TYPES, on_numbers

SPECIAL = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7F800000, 0x7F800001, 0xFF800000, 0x00800000, 0x007FFFFF]
SPECIAL += [0x3F800000, 0xBF800000, 0x4EFFFFFF, 0x33800000, 0x00000100]
SHIFTS = ("shl", "shr", "sar")
BINARY = ("add", "sub", "mul", "bit_and", "bit_or", "bit_xor", "shl", "shr")
# The kinds of operands and result.
KINDS = {
    **dict.fromkeys([(name, 32) for name in BINARY], ("w32", "w32", "w32")),
    **dict.fromkeys([(name, 64) for name in [*BINARY, "sar"]], ("w64", "w64", "w64")),
    **dict.fromkeys([(name, 32) for name in ("divide", "maximum")], ("f32", "f32", "f32")),
    **dict.fromkeys([(name, 32) for name in ("sqrt", "sign_of", "floor")], ("f32", "f32")),
    ("multiply_packed_high16", 32): ("w32", "w32", "w32"),
    ("multiply_add", 32): ("f32", "f32", "f32", "f32"),
    **dict.fromkeys([("real", 32), ("to_real", 32)], ("w32", "f32")),
    **dict.fromkeys([("word", 32), ("to_word", 32)], ("f32", "w32")),
    ("real", 64): ("w64", "f64"),
    ("word", 64): ("f64", "w64"),
    ("to_word", 64): ("f64", "w64"),
    ("widen", 32): ("w32", "w64"),
    ("low_word", 64): ("w64", "w32"),
    ("high_word", 64): ("w64", "w32"),
}


def words(count: int, rng: np.random.Generator) -> np.ndarray:
    chosen = rng.choice(np.array(SPECIAL, np.uint64), count)
    return np.where(rng.random(count) < 0.5, chosen, rng.integers(0, 2**32, count, dtype=np.uint64)).astype(np.uint32)


def compiled(name: str, function, kinds: tuple[str, ...], lanes: int, given: list[np.ndarray]) -> np.ndarray:
    """A function's results for all elements of arrays, by its instructions on vectors."""
    *operands, result = kinds
    trace = Trace(torch.float32)
    recorded = function(*(trace.emit("input", (), k, kind) for k, kind in enumerate(operands)))
    assert recorded.kind == result
    made = np.zeros(len(given[0]), TYPES[result])

    def write(vectors, count, *places):
        b, types = vectors.b, {"w32": vectors.i32, "w64": vectors.i64, "f32": vectors.f32, "f64": vectors.f64}
        with vectors.loop(vectors.int64(0), count, lanes) as i:
            shapes = [vectors.make_vector_type(types[kind], lanes) for kind in kinds]
            *sources, target = (vectors.pointer(place, i, shape) for place, shape in zip(places, shapes))
            values = [b.load(source, align=4) for source in sources]
            b.store(InstructionWriter(b, trace, lanes).write_instructions(values)[recorded.number], target, align=4)

    key = f"{name} {kinds} {lanes} {trace.digest()}"
    kernel = compile_machine_function(name, key, 2 + len(operands), write)
    kernel(len(made), *(array.ctypes.data for array in (*given, made)))
    return made


def operands(name: str, kinds: tuple[str, ...], count: int, rng: np.random.Generator) -> list[np.ndarray]:
    if name == "to_word" and kinds[0] == "f32":
        x = np.clip(words(count, rng).view(np.float32), -(2.0**31), 2.0**31 - 128)
        return [np.nan_to_num(x).astype(np.float32)]
    if name == "to_word":
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
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_numpys_number_is_the_instructions(case, lanes, cache, seed):
    (name, _), kinds, count = case, KINDS[case], 2000
    given = operands(name, kinds, count, np.random.default_rng(seed))
    made = compiled(name, getattr(o, name), kinds, lanes, given)
    plain = on_numbers(getattr(o, name), *given)
    if kinds[-1].startswith("f") and kinds[0] != "w64":
        assert same_bits(torch.from_numpy(made), torch.from_numpy(plain.copy()))
    else:
        assert made.tobytes() == plain.tobytes()


@pytest.mark.parametrize("lanes", [1, 8])
def test_a_choice(lanes, cache, seed):
    rng = np.random.default_rng(seed)
    given = [words(2000, rng) for _ in range(2)]
    made = compiled("select", lambda x, y: o.select(x > y, x, y), ("w32", "w32", "w32"), lanes, given)
    assert made.tolist() == np.maximum(*given).tolist()


def test_an_operation_is_part_of_a_device_function():
    with pytest.raises(TypeError, match="got int, int: call it inside of one"):
        o.add(1, 2)
    assert o.sub(np.uint32(1), np.uint32(2)) == np.uint32(2**32 - 1), "a constant"


def test_a_number_of_python_is_a_float32():
    assert o.sqrt(2.0) == np.sqrt(np.float32(2.0))
    assert o.floor(2.5) == o.floor(2) == 2.0
