"""What compiling a kernel leaves in memory: its machine code, and of the compiler's own data next to nothing."""

import copy
import ctypes
import gc
from pathlib import Path

import numpy as np
import pytest

import halfulp
from halfulp.kernels import get_array_address
from halfulp.kernels.vector._machine_function import compile_machine_function

ROOT = Path(halfulp.__file__).parent


def compiled(constant: int):
    """A kernel, another one for every constant."""

    def loop(vectors, count, array):
        with vectors.loop(vectors.int64(0), count, 1) as i:
            place = vectors.pointer(array, i, vectors.i64)
            vectors.b.store(mixed(vectors, vectors.b.add(vectors.b.load(place), vectors.int64(constant))), place)

    def mixed(vectors, x):
        b, word = vectors.b, vectors.int64
        for k in range(40):
            x = b.xor(b.add(b.mul(x, word(2 * k + 3)), word(constant)), b.ashr(x, word(k)))
        return x

    return compile_machine_function("loop", f"of this test, {constant}", 2, loop)


def bytes_in_use() -> int:
    """What malloc has given out, in heaps and apart."""
    fields = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    info = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in fields]})
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        pytest.skip("memory in use is asked of glibc's mallinfo2")
    ask.restype = info
    gc.collect()
    found = ask()
    return found.uordblks + found.hblkhd


def test_a_kernel_keeps_little_memory(cache):
    """The first loads the compiler, later ones keep their machine code and an engine that holds it.

    It is what malloc gave out, not what the process holds, so that what was free before counts alike.
    """
    compiled(1)
    before = bytes_in_use()
    for constant in range(2, 8):
        compiled(constant)
    assert bytes_in_use() - before < 6 * 100_000


def test_a_compiled_kernel_is_as_a_loaded_one(cache):
    results = []
    for _ in range(2):
        x = np.arange(5)
        compiled(21)(5, get_array_address(x))
        results.append(x.tolist())
    assert results[0] == results[1] != list(range(5))
    assert len(list(cache.iterdir())) == 1


def test_all_kernels_are_made_in_one_place():
    """What becomes machine code elsewhere would keep the compiler's memory, and might miss the cache."""
    engines = [path for path in ROOT.rglob("*.py") if "create_mcjit_compiler" in path.read_text()]
    assert [path.name for path in engines] == ["_machine_function.py"]


def test_a_copy_of_what_holds_a_kernel_holds_the_same_one():
    kernel = compiled(11)
    held = {"kernel": [kernel]}
    assert copy.deepcopy(held)["kernel"][0] is kernel
    assert copy.copy(kernel) is kernel
