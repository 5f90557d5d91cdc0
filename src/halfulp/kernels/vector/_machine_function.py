"""LLVM instructions as a function in memory: compiled by llvmlite once per machine, and kept in a cache on disk."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..._messages import ENV_HINT
from .._engine import note_fallback, warn_once_of_fallback
from .._threads import flushes_subnormals, hold_while_forking, keeping_subnormals
from ._processor import find_llvm_target

_FUNCTION_SYMBOL = "halfulp_kernel"
_HALFULP_OBJECT_TAG = b"halfulp-object-1"
_compile_lock = threading.RLock()
# What holds functions in memory, for as long as the process: they may run at any time.
_live_engines: list[Any] = []

hold_while_forking(_compile_lock)  # llvmlite has a lock too, which a child would find held


def compile_machine_function(
    name: str, key: str, argument_count: int, write: Callable[..., None], optimized: bool = True
) -> Kernel:
    """Return a compiled function of so many integers of 64 bits, addresses mostly, which runs without Python's lock.

    `write(builder, *arguments)` writes the instructions, which `key` determines, but for the sources of `kernels`; so
    does it whether they are `optimized`.

    >>> import numpy as np
    >>> def fill(b, first, last, array):
    ...     with b.loop(first, last, 1) as i:
    ...         b.b.store(i, b.pointer(array, i, b.i64))
    >>> numbers = np.zeros(3, np.int64)
    >>> compile_machine_function("fill", "of the example", 3, fill)(0, 3, get_array_address(numbers))
    >>> numbers
    array([0, 1, 2])
    """
    import llvmlite

    with _compile_lock:
        path = find_kernel_cache_file(name, key, llvmlite.__version__)
        address = _load_kernel_file(path)
        kernel_cache_counts["compiled" if address is None else "found"] += 1
        if address is None:
            code = _compile_object(argument_count, write, optimized)
            _write_kernel_file(path, code)
            address = _link_object(code)
    return Kernel(_FUNCTION_TYPE(address), struct.Struct(f"{argument_count}q").pack)


class Kernel:
    """A compiled function of integers of 64 bits. A copy, as part of what holds it, is the same one.

    The integers travel as one argument, packed: ctypes takes .2 us for that, and .1 for each of several.
    """

    __slots__ = ("pack", "run")

    def __init__(self, run: Callable[[bytes], None], pack: Callable[..., bytes]) -> None:
        self.run, self.pack = run, pack

    def __call__(self, *arguments: int) -> None:
        """Run the function, with subnormal numbers kept."""
        if flushes_subnormals():
            with keeping_subnormals():
                self.run(self.pack(*arguments))
        else:
            self.run(self.pack(*arguments))

    def __copy__(self) -> Kernel:
        return self

    def __deepcopy__(self, memo: object) -> Kernel:
        return self


_FUNCTION_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def get_array_address(array: np.ndarray) -> int:
    """Return where an array's elements lie: whoever gives the address to a kernel keeps the array."""
    found: int = array.__array_interface__["data"][0]
    return found


def _link_object(code: bytes) -> int:
    """Link an object file into the process; return the address of its function, or raise ValueError over others."""
    from llvmlite import binding

    if not code.startswith(_HALFULP_OBJECT_TAG):
        raise ValueError("no object file")
    # An engine for each: all objects call their function by one name.
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _make_target_machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code[len(_HALFULP_OBJECT_TAG) :]))
    engine.finalize_object()
    address: int = engine.get_function_address(_FUNCTION_SYMBOL)
    if not address:
        raise ValueError(f"an object file without {_FUNCTION_SYMBOL}")
    _live_engines.append(engine)
    return address


def _compile_object(argument_count: int, write: Callable[..., None], optimized: bool) -> bytes:
    """Return the object file of the instructions that `write` makes, behind a tag."""
    from llvmlite import binding, ir

    from ._builder import VectorBuilder

    machine = _make_target_machine(3 if optimized else 0)
    module = ir.Module(_FUNCTION_SYMBOL)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)]), _FUNCTION_SYMBOL)
    function.attributes.add("nounwind")
    vectors = VectorBuilder(ir.IRBuilder(function.append_basic_block("entry")))
    vectors.arguments_address = function.args[0]
    write(vectors, *(vectors.load_word(vectors.arguments_address, k) for k in range(argument_count)))
    vectors.b.ret_void()
    parsed = binding.parse_assembly(str(module))
    options = binding.create_pipeline_tuning_options(speed_level=2 if optimized else 0)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = binding.create_pass_builder(machine, options)
    manager = passes.getModulePassManager()
    manager.run(parsed, passes)
    # It frees itself by a method that the empty one of its first base hides, and would keep .25 MB for each kernel.
    if (dispose := getattr(binding.newpassmanagers.NewPassManager, "_dispose", None)) is not None:
        dispose(manager)
        manager.detach()
    code: bytes = machine.emit_object(parsed)
    return _HALFULP_OBJECT_TAG + code


def _make_target_machine(level: int = 3) -> Any:
    """Return the processor's, new at each call: an engine owns its own, and may be gone before others."""
    from llvmlite import binding

    triple, name, features = find_llvm_target()
    target = binding.Target.from_triple(triple)
    return target.create_target_machine(
        cpu=name, features=features, opt=level, reloc="pic", codemodel="jitdefault", jit=True
    )


_CACHE_FOLDER_REMEDY = f"set HALFULP_CACHE_DIR to a folder that can be written; {ENV_HINT}"
_KERNEL_FILE_HEADER = b"halfulp-kernel-1"
# How many kernels this process found, compiled and wrote, and the bytes that it wrote.
kernel_cache_counts = Counter[str]()
_COMPILER_SOURCE_FILES = tuple(Path(__file__).parents[1] / name for name in ("_operations.py", "vector"))


def find_kernel_cache_folder() -> Path | None:
    """Return the folder of compiled kernels: HALFULP_CACHE_DIR or the user's cache folder; None without either."""
    chosen, base = os.environ.get("HALFULP_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        # No shell replaces the "~" of a container's or a service's variable.
        return Path(chosen).expanduser() if chosen else (Path(base) if base else Path.home() / ".cache") / "halfulp"
    except RuntimeError:
        return None


def find_kernel_cache_file(name: str, key: str, compiler_version: str) -> Path | None:
    """Return where a kernel is kept: the name says what its machine code depends on; None without a folder."""
    folder = find_kernel_cache_folder()
    made_from = key, compiler_version, find_llvm_target(), compute_source_digest(*_COMPILER_SOURCE_FILES)
    digest = hashlib.sha256(repr(made_from).encode()).hexdigest()[:32]
    return None if folder is None else folder / f"{name}-{digest}.kernel"


def _load_kernel_file(path: Path | None) -> int | None:
    """Return the address of a kept kernel's function; None where there is no file, or none that can be read."""
    if path is None:
        return None
    try:
        blob = path.read_bytes()
        tag, checksum, payload = blob[:16], blob[16:48], blob[48:]
        if tag != _KERNEL_FILE_HEADER or hashlib.sha256(payload).digest() != checksum:
            raise ValueError("damaged")
        return _link_object(payload)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RuntimeError) as e:  # the last one is LLVM's
        note_fallback("cache", f"unreadable kernel cache entry ignored ({type(e).__name__}); compiled again")
        return None


def _write_kernel_file(path: Path | None, payload: bytes) -> None:
    """Write a file whole or not at all: of processes that write it at a time, as ranks do, the last one's stays."""
    if path is None:
        warn_once_of_fallback("cache", f"no home folder: kernels are compiled in every process; {_CACHE_FOLDER_REMEDY}")
        return
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(_KERNEL_FILE_HEADER + hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, path)
        kernel_cache_counts.update(written=1, bytes=len(payload))
    except OSError as e:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        warn_once_of_fallback(
            "cache",
            f"kernel cache {path.parent} cannot be written ({e.strerror}): kernels are compiled in every process; "
            f"{_CACHE_FOLDER_REMEDY}",
        )


@functools.cache
def compute_source_digest(*sources: Path) -> str:
    """Return a hash of source files and folders: the part of a cache key that changes with code generators."""
    files = [file for one in sources for file in (sorted(one.glob("*.py")) if one.is_dir() else [one])]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
