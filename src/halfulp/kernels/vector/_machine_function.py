"""LLVM instructions as a function in memory: from the cache, or compiled by llvmlite and kept there."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from .._cache import CacheEntry
from ._processor import processor

_FUNCTION_SYMBOL = "halfulp_kernel"
_OBJECT_TAG = b"halfulp-object-1"
_compile_lock = threading.Lock()
# What holds functions in memory, for as long as the process: they may run at any time.
_live_engines: list[Any] = []


def _renew_compile_lock() -> None:
    global _compile_lock
    _compile_lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # a child of a process that was compiling would wait for ever
    os.register_at_fork(after_in_child=_renew_compile_lock)


def machine_function(name: str, key: str, arguments: int, write: Callable[..., None]) -> Kernel:
    """Return a compiled function of so many integers of 64 bits, addresses mostly, which runs without Python's lock.

    Args:
        name: of the cache entry.
        key: whatever the instructions depend on, short of the sources of `kernels`.
        arguments: how many.
        write: (builder of vectors, *arguments) writes the instructions.

    >>> import numpy as np
    >>> def fill(b, first, last, array):
    ...     with b.loop(first, last, 1) as i:
    ...         b.b.store(i, b.pointer(array, i, b.i64))
    >>> numbers = np.zeros(3, np.int64)
    >>> machine_function("fill", "of the example", 3, fill)(0, 3, address_of(numbers))
    >>> numbers
    array([0, 1, 2])
    """
    import llvmlite

    with _compile_lock:
        entry = CacheEntry(name, key, ("llvmlite", llvmlite.__version__))
        address = entry.read(_link_object)
        if address is None:
            code = _compile_object(arguments, write)
            entry.write(code)
            address = _link_object(code)
    return Kernel(_FUNCTION_TYPE(address), struct.Struct(f"{arguments}q").pack)


class Kernel:
    """A compiled function of integers of 64 bits. A copy, as part of what holds it, is the same one.

    The integers travel as one argument, packed: ctypes takes .2 us for that, and .1 for each of several.

    Attributes:
        run: takes the packed arguments.
        pack: packs them.
    """

    __slots__ = ("pack", "run")

    def __init__(self, run: Callable[[bytes], None], pack: Callable[..., bytes]) -> None:
        self.run, self.pack = run, pack

    def __call__(self, *arguments: int) -> None:
        """Run the function."""
        self.run(self.pack(*arguments))

    def __copy__(self) -> Kernel:
        return self

    def __deepcopy__(self, memo: object) -> Kernel:
        return self


_FUNCTION_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def address_of(array: np.ndarray) -> int:
    """Return where an array's elements lie: whoever gives the address to a kernel keeps the array."""
    found: int = array.__array_interface__["data"][0]
    return found


def _link_object(code: bytes) -> int:
    """Link an object file into the process; return the address of its function.

    Raises:
        ValueError: it has no such function.
    """
    from llvmlite import binding

    if not code.startswith(_OBJECT_TAG):
        raise ValueError("no object file")
    # An engine for each: all objects call their function by one name.
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target_machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code[len(_OBJECT_TAG) :]))
    engine.finalize_object()
    address: int = engine.get_function_address(_FUNCTION_SYMBOL)
    if not address:
        raise ValueError(f"an object file without {_FUNCTION_SYMBOL}")
    _live_engines.append(engine)
    return address


def _compile_object(arguments: int, write: Callable[..., None]) -> bytes:
    """Return the object file of the instructions that `write` makes, behind a tag."""
    from llvmlite import binding, ir

    from ._builder import VectorBuilder

    machine = _target_machine()
    module = ir.Module(_FUNCTION_SYMBOL)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)]), _FUNCTION_SYMBOL)
    function.attributes.add("nounwind")
    vectors = VectorBuilder(ir.IRBuilder(function.append_basic_block("entry")))
    vectors.arguments = function.args[0]
    write(vectors, *(vectors.load_word(vectors.arguments, k) for k in range(arguments)))
    vectors.b.ret_void()
    parsed = binding.parse_assembly(str(module))
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    code: bytes = machine.emit_object(parsed)
    return _OBJECT_TAG + code


def _target_machine() -> Any:
    """Return the processor's, new at each call: an engine owns its own, and may be gone before others."""
    from llvmlite import binding

    triple, name, features = processor()
    target = binding.Target.from_triple(triple)
    return target.create_target_machine(
        cpu=name, features=features, opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )
