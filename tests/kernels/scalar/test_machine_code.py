"""What compiling a kernel leaves in memory: its machine code, and of the compiler's own data next to nothing."""

import ast
import ctypes
import gc
import types
from pathlib import Path

import numpy as np
import pytest
from numba.core.ir import FunctionIR
from numba.core.typeinfer import TypeInferer

import halfulp
from halfulp.kernels import compile_kernel
from halfulp.kernels.scalar import _compile
from halfulp.kernels.scalar._operations import add, load32, store32

ROOT = Path(halfulp.__file__).parent
CONSTANT = np.uint32(0)
SIGNATURE = "void(int64, int64)"


def summed(x, y):
    """A piece."""
    return add(x, add(y, CONSTANT))


def loop(n, a):
    """A kernel of one piece, another one for every CONSTANT."""
    for i in range(n):
        store32(a, i, summed(load32(a, i), CONSTANT))


def compiled(constant: int):
    return compile_kernel(loop, SIGNATURE, {"CONSTANT": np.uint32(constant)})


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


def programs() -> list:
    """All that Numba has read and typed, and still holds."""
    return [found for found in gc.get_objects() if type(found) in (FunctionIR, TypeInferer)]


def test_a_kernel_keeps_little_memory(cache):
    """The first loads the compiler, later ones keep .12 MB; .68 MB where pass managers and types stay.

    It is what malloc gave out, not what the process holds, so that what was free before counts alike.
    """
    compiled(1)
    before = bytes_in_use()
    for constant in range(2, 8):
        compiled(constant)
    assert bytes_in_use() - before < 6 * 300_000


def test_nothing_of_a_compilation_stays(cache):
    """Neither the program as Numba sees it nor its types: they are a hundred times the machine code."""
    compiled(11)
    gc.collect()
    known = {id(found) for found in programs()}
    kernel = compiled(12)
    gc.collect()
    assert not [found for found in programs() if id(found) not in known]
    x = np.array([5], np.uint32)
    kernel(1, x.ctypes.data)
    assert x[0] == 5 + 12 + 12


def test_only_kernels_are_assembled(cache, monkeypatch):
    """A piece is optimized and made machine code in the kernels that it is linked into, and by itself never."""
    # Larger pieces of other kernels may be there: what a kernel does not inline is a symbol of its own.
    monkeypatch.setattr(_compile, "_device_functions", {})
    compiled(41)
    pieces = [result for piece in _compile._device_functions.values() for result in piece.overloads.values()]
    assert pieces
    for result in pieces:
        assert result.library._compiled_object is None
        assert not result.library.codegen._engine.is_symbol_defined(result.fndesc.mangled_name)


def test_a_compiled_kernel_is_as_a_loaded_one(cache):
    """What calling it needs is there, and neither has more."""
    (first,) = compiled(21).overloads.values()
    (second,) = compiled(21).overloads.values()
    assert first.library is not second.library
    for field in ("type_annotation", "call_helper", "metadata"):
        assert not getattr(first, field), field
        assert not getattr(second, field), field
    assert first.library._shared_module is second.library._shared_module is None


def test_all_kernels_are_made_in_one_place():
    """What becomes machine code elsewhere would keep the compiler's memory, and might miss the cache."""
    makers = ["kernels/scalar/_compile.py", "arithmetic/exact_sums/_block_sums.py"]
    found = []
    for path in (path for path in sorted(ROOT.rglob("*.py")) if "njit" in path.read_text()):
        tree = ast.parse(path.read_text())
        uses = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
        if "njit" in uses | imported:
            assert "machine_code" in imported, path
            assert not uses & {"disable_compile", "_cache"}, path
            found.append(str(path.relative_to(ROOT)))
    assert sorted(found) == sorted(makers)
    engines = [path for path in ROOT.rglob("*.py") if "create_mcjit_compiler" in path.read_text()]
    assert [path.name for path in engines] == ["_machine_function.py"]


@pytest.mark.parametrize("name", ["ModulePassManager", "FunctionPassManager"])
def test_llvmlites_pass_managers_free_themselves(cache, name):
    """Each is disposed of once, with its Python object, and by llvmlite's own way."""
    from llvmlite.binding import ffi, newpassmanagers

    compiled(31)
    kind = getattr(newpassmanagers, name)
    assert isinstance(kind._dispose, types.FunctionType)
    assert kind._dispose is not ffi.ObjectRef._dispose
    manager = kind()
    manager.close()
    manager.close()
    assert manager.closed
