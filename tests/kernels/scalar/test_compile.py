"""From pieces to machine code: names, constants, digests."""

import numpy as np
import pytest

from halfulp.kernels import compile_kernel, digest
from halfulp.kernels.scalar._compile import _device_functions
from halfulp.kernels.scalar._operations import add, bit_xor, load32, mul, store32

THREE = np.uint32(3)


def twice(x):
    return add(x, x)


def thrice(x):
    return mul(x, THREE)


def apply(first, last, source, target):
    for i in range(first, last):
        store32(target, i, change(load32(source, i)))  # noqa: F821  bound


SIGNATURE = "void(int64, int64, int64, int64)"


def run(kernel, x: np.ndarray) -> np.ndarray:
    out = np.zeros_like(x)
    kernel(0, len(x), x.ctypes.data, out.ctypes.data)
    return out


def test_bound_names(cache):
    x = np.array([1, 7, 2**31], np.uint32)
    assert run(compile_kernel(apply, SIGNATURE, {"change": twice}), x).tolist() == [2, 14, 0]
    assert run(compile_kernel(apply, SIGNATURE, {"change": thrice}), x).tolist() == [3, 21, 2**31]
    assert len(list(cache.iterdir())) == 2


def moved(x):
    return add(twice(x), THREE)


def test_kernels_share_the_pieces_that_are_the_same_and_no_others(cache, monkeypatch):
    x = np.array([1, 7, 2**31], np.uint32)
    _device_functions.clear()
    assert run(compile_kernel(apply, SIGNATURE, {"change": moved}), x).tolist() == [5, 17, 3]
    assert {piece.__name__ for piece, _ in _device_functions} == {"moved", "twice"}
    assert run(compile_kernel(apply, SIGNATURE, {"change": twice}), x).tolist() == [2, 14, 0]
    assert len(_device_functions) == 2
    monkeypatch.setitem(moved.__globals__, "THREE", np.uint32(4))
    assert run(compile_kernel(apply, SIGNATURE, {"change": moved}), x).tolist() == [6, 18, 4]
    # A piece is another where what it is bound to is.
    monkeypatch.setitem(moved.__globals__, "twice", thrice)
    assert run(compile_kernel(apply, SIGNATURE, {"change": moved}), x).tolist() == [8, 32, 4]
    assert [piece.__name__ for piece, _ in _device_functions] == ["twice", "moved", "moved", "thrice", "moved"]


def test_pieces_of_one_name_are_never_linked_to_each_other(cache, forked_python, tmp_path):
    """Two kernels, compiled in two processes and loaded in a third, each keep their own pieces."""
    (tmp_path / "pieces.py").write_text(
        "from halfulp.kernels.scalar._operations import add, load32, mul, store32, sub\n"
        "def plus(a, b): return add(a, b)\n"
        "def minus(a, b): return sub(a, b)\n"
        "def loop(source, target, n):\n"
        "    for i in range(n):\n"
        "        for j in range(i):\n"
        "            store32(target, i, change(load32(source, j), change(load32(source, i), load32(target, i))))\n"
        "def kernel(source, target, n):\n"
        "    loop(source, target, n)\n"
    )
    program = """
        import sys
        import numpy as np
        import pieces
        from halfulp.kernels import compile_kernel
        def run(name):
            kernel = compile_kernel(pieces.kernel, "void(int64, int64, int64)", {{"change": getattr(pieces, name)}})
            x, out = np.arange(1, 40, dtype=np.uint32), np.zeros(39, np.uint32)
            kernel(x.ctypes.data, out.ctypes.data, 39)
            return out.tolist()
        print([run(name) for name in {names}])
    """
    plus = eval(forked_python(program.format(names=["plus"])))
    minus = eval(forked_python(program.format(names=["minus"])))
    assert plus != minus
    assert eval(forked_python(program.format(names=["plus", "minus"]))) == plus + minus
    assert eval(forked_python(program.format(names=["minus", "plus"]))) == minus + plus
    assert len(list(cache.iterdir())) == 2


def test_digest_sees_pieces_constants_and_bindings():
    bindings = [{"change": twice}, {"change": thrice}, {"change": bit_xor}, {"change": add}]
    assert len({digest(apply, bind) for bind in bindings}) == 4
    assert digest(apply, bindings[0]) == digest(apply, dict(bindings[0]))
    before = digest(thrice)
    globals()["THREE"] = np.uint32(4)
    try:
        assert digest(thrice) != before
    finally:
        globals()["THREE"] = np.uint32(3)
    assert digest(thrice) == before


KERNEL = """
from halfulp.kernels.scalar._operations import add, mul
import numpy as np
FACTOR = np.uint32(3)
def piece(x, y=2, *, z=5): return add(x, mul(y, z))
def kernel(x): return piece(mul(x, FACTOR), 7)
"""
EDITS = {
    "an operation": ("return add(x, mul", "return mul(x, mul"),
    "a literal": ("FACTOR), 7", "FACTOR), 8"),
    "the type of a literal": ("FACTOR), 7", "FACTOR), 7.0"),
    "a constant of the file": ("uint32(3)", "uint32(4)"),
    "the type of a constant": ("uint32(3)", "uint64(3)"),
    "a default": ("y=2", "y=3"),
    "a default of a keyword": ("z=5", "z=6"),
    "what a name stands for": ("import add, mul", "import mul as add, add as mul"),
    "the order of arguments": ("mul(x, FACTOR)", "mul(FACTOR, x)"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_whatever_changes_machine_code_changes_its_key(edit: str) -> None:
    def key(source: str) -> str:
        exec(compile(source, "kernel.py", "exec"), space := {"__name__": "kernel"})
        return digest(space["kernel"])

    assert KERNEL.count(EDITS[edit][0]) == 1
    assert key(KERNEL) == key(KERNEL)
    assert key(KERNEL.replace(*EDITS[edit])) != key(KERNEL)


def uses_a_module(x):
    return np.uint32(x)


def test_a_module_in_a_piece_is_refused(cache):
    with pytest.raises(TypeError, match="import the function itself"):
        compile_kernel(apply, SIGNATURE, {"change": uses_a_module})
