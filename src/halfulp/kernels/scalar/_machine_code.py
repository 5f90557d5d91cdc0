"""The machine code of one kernel, from the cache or compiled, without the memory that only the compiler needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .._cache import MachineCodeCache

# Of Numba's compiler for kernels; its own types know some of them only.
JIT_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def machine_code(dispatcher: Any, name: str, key: str, signature: str, pieces: Iterable[Any] = ()) -> Callable:
    """Return the dispatcher with machine code for one signature only.

    Args:
        dispatcher: what numba.njit made of a kernel.
        name: of the cache entry.
        key: of the cache entry: whatever the machine code depends on, short of the compiler and the processor.
        signature: Numba's signature string.
        pieces: dispatchers of what the kernel inlines.
    """
    from numba.core.compiler_lock import global_compiler_lock

    with global_compiler_lock:
        _free_pass_managers()
        cache = dispatcher._cache = MachineCodeCache(name, key)
        try:
            dispatcher.compile(signature)
        finally:
            cache.end_turn()
        dispatcher.disable_compile()
        for result in dispatcher.overloads.values():
            _free_copy_to_inline(result.library)
        for part in (dispatcher, *pieces):
            _forget_compilation(part)
    return dispatcher


def _forget_compilation(dispatcher: Any) -> None:
    """Drop all of a compilation but what calling and inlining need, as a cached kernel has it."""
    for signature, result in dispatcher.overloads.items():
        dispatcher.overloads[signature] = result._replace(type_annotation="", call_helper=None, metadata=None)


def _free_copy_to_inline(library: Any) -> None:
    """Free the code that the cache entry was made of or came with: no kernel is inlined into another."""
    copy, library._shared_module, library._linking_libraries = library._shared_module, None, []
    if copy is not None and copy is not library._final_module:
        copy.close()


def _free_pass_managers() -> None:
    """Free llvmlite's pass managers, which would keep .02 to .3 MB each, a dozen per kernel.

    They have a method for it, NewPassManager._dispose; the empty one of ObjectRef, their first base, hides it (0.44 to
    0.50). Where a version has mended that, or has no such classes, nothing is done.
    """
    from llvmlite.binding import ffi

    for kind in _pass_managers():
        if kind._dispose is ffi.ObjectRef._dispose:
            hidden = [base.__dict__["_dispose"] for base in kind.__mro__[1:] if "_dispose" in base.__dict__]
            kind._dispose = next((method for method in hidden if method is not ffi.ObjectRef._dispose), kind._dispose)


def _pass_managers() -> Iterable[Any]:
    from llvmlite import binding

    names = ("ModulePassManager", "FunctionPassManager")
    module = getattr(binding, "newpassmanagers", None)
    return [getattr(module, name) for name in names if hasattr(module, name)]
