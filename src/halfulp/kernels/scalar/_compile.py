"""Compilation of plain Python functions to one kernel: names are bound, Numba compiles, the result is cached.

A kernel is written as an ordinary function that calls other ordinary functions (its pieces) and the scalar operations
of `_scalar`. Compiling walks the names it uses: a scalar operation becomes its instruction, another function is
compiled and inlined, a name in `bind` takes what the caller chose (the update rule, the rounding), and constants stay.
The cache key is a hash over the byte code and constants of all of them, so an edit in any file is a new kernel.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Mapping

import numpy as np

from ._machine_code import JIT_OPTIONS, machine_code
from ._operations import SCALARS

Bindings = Mapping[str, object]


_ALLOWED = types.FunctionType | types.BuiltinFunctionType | type | np.generic | int | float | tuple


def digest(function: Callable, bind: Bindings | None = None) -> str:
    """A hash of everything that a kernel's machine code depends on, short of the compiler and the processor."""
    sink = hashlib.sha256()
    _feed(sink, function, dict(bind or {}), {})
    return sink.hexdigest()


def compile_kernel(function: Callable, signature: str, bind: Bindings | None = None) -> Callable:
    """Compile a kernel for one signature, or load it from the cache.

    Args:
        function: the kernel, a plain function over the scalar operations, its pieces and the names in `bind`.
        signature: Numba's signature string; the kernel is compiled for it alone, and runs without the GIL.
        bind: what the free names of the kernel and of its pieces stand for.
    """
    import numba

    from ._pipeline import KernelCompiler

    bound = dict(bind or {})
    done: dict = {}
    rebuilt = _rebuild(function, bound, done)
    dispatcher = numba.njit(pipeline_class=KernelCompiler, **JIT_OPTIONS)(rebuilt)
    pieces = [piece for piece in done.values() if hasattr(piece, "overloads")]
    return machine_code(dispatcher, function.__name__, digest(function, bound) + signature, signature, pieces)


# Pieces by what their machine code depends on: most kernels share most of theirs. Nobody but a kernel calls one, so
# that it needs no way in from Python or C; those took longer to compile than the pieces, and more memory.
_device_functions: dict[tuple[Callable, str], object] = {}


def _rebuild(function: Callable, bind: dict, done: dict) -> types.FunctionType:
    """Rebuild a function over a namespace of its own, in which every name is compiled or constant."""
    namespace = {"__builtins__": __builtins__, "__name__": function.__module__}
    for name in _names(function.__code__):
        value = resolve(function, name, bind)
        if value is not None:
            namespace[name] = _compiled(value, bind, done)
    rebuilt = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    # Symbols are global to a process: two pieces of one name, loaded from the cache, would be linked as one.
    rebuilt.__qualname__ = f"{function.__name__}_{digest(function, bind)[:16]}"
    return rebuilt


def _compiled(value: object, bind: dict, done: dict) -> object:
    import numba

    if not isinstance(value, types.FunctionType):
        return value
    if SCALARS.get(value.__name__) is value:
        from ._instructions import INTRINSICS

        return INTRINSICS[value.__name__]
    from ._pipeline import PieceCompiler

    place = value, bool(bind)
    if place not in done:
        key = value, digest(value, bind)
        if key not in _device_functions:
            piece = numba.njit(pipeline_class=PieceCompiler, **JIT_OPTIONS | {"no_cpython_wrapper": True})
            _device_functions.setdefault(key, piece(_rebuild(value, bind, done)))
        done[place] = _device_functions[key]
    return done[place]


def resolve(function: Callable, name: str, bind: dict) -> object:
    """Return what a name in a kernel is bound to; None for a builtin or an attribute."""
    value = bind.get(name, function.__globals__.get(name))
    if value is None or isinstance(value, _ALLOWED):
        return value
    raise TypeError(
        f"kernel piece {function.__name__} uses {name} = {value!r}: allowed are plain functions, scalar operations "
        "and numbers; import the function itself, not its module"
    )


def _names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names(constant)
    return sorted(set(names))


def _feed(sink, function: Callable, bind: dict, seen: dict) -> None:
    place = function, bool(bind)
    known = place in seen
    # Told again where it is met again: which of two pieces stands under a name is what kernels differ in.
    sink.update(f"piece {seen.setdefault(place, len(seen))}".encode())
    if known:
        return
    _feed_code(sink, function.__code__)
    sink.update(repr((function.__defaults__, function.__kwdefaults__)).encode())
    for name in _names(function.__code__):
        value = resolve(function, name, bind)
        sink.update(name.encode())
        if not isinstance(value, types.FunctionType):
            sink.update(repr((type(value).__name__, value)).encode())
        elif SCALARS.get(value.__name__) is value:
            sink.update(value.__name__.encode())
        else:
            _feed(sink, value, bind, seen)


def _feed_code(sink, code: types.CodeType) -> None:
    sink.update(code.co_code)
    sink.update(repr((code.co_names, code.co_varnames)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _feed_code(sink, constant)
        else:
            sink.update(repr(constant).encode())
