"""The choice of the engine that runs a kernel (torch reference or compiled twin), and counts of fallbacks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator

import torch

from .._messages import ENV_HINT, find_user_stack_level
from .vector._processor import check_cpu_feature_signs, explain_unsupported_machine

ENGINES = ("auto", "llvm", "triton", "reference")
_UNKNOWN_ENGINE_MESSAGE = (
    f"is unknown: the processor's compiled kernels are called 'llvm' now; choose one of {', '.join(ENGINES)}"
)
_fallback_counts: Counter[tuple[str, str]] = Counter()
_requested_engine = "auto"


_thread_settings = threading.local()  # whether it runs the reference, where it was ever asked to


def note_fallback(kind: str, text: str) -> None:
    """Count a fallback from the fast path, for `count_fallbacks`."""
    _fallback_counts[kind, text] += 1


def warn_once_of_fallback(kind: str, text: str) -> None:
    """Count a fallback, and warn at its first."""
    if not _fallback_counts[kind, text]:
        warnings.warn(text, RuntimeWarning, stacklevel=find_user_stack_level())
    note_fallback(kind, text)


def count_fallbacks() -> dict[str, int]:
    """Return how often each fallback happened in this process, by description.

    >>> isinstance(count_fallbacks(), dict)
    True
    """
    return {f"{kind}: {text}": count for (kind, text), count in _fallback_counts.items()}


@contextlib.contextmanager
def engine(name: str) -> Iterator[None]:
    """Run kernels by one engine inside a block: "llvm" (on the processor), "triton", "reference" (torch), or "auto".

    "triton" on CPU tensors needs Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported.

    The environment variable HALFULP_ENGINE does the same for a whole process.

    >>> with engine("reference"):
    ...     select_engine("cpu")
    'reference'
    """
    global _requested_engine
    if name not in ENGINES:
        raise ValueError(f"engine {name!r} {_UNKNOWN_ENGINE_MESSAGE}")
    before, _requested_engine = _requested_engine, name
    try:
        yield
    finally:
        _requested_engine = before


@contextlib.contextmanager
def use_reference_in_thread() -> Iterator[None]:
    """Run by plain torch inside a block, in this thread alone, whatever engine was asked for."""
    before, _thread_settings.reference = getattr(_thread_settings, "reference", False), True
    try:
        yield
    finally:
        _thread_settings.reference = before


def select_engine(device: str) -> str:
    """Return the engine for tensors on a kind of device: "llvm" or "reference", on CUDA "triton" or "reference"."""
    name, reason = choose_engine_and_fallback_reason(device)
    if reason:
        warn_once_of_fallback("engine", reason)
    return name


def choose_engine_and_fallback_reason(device: str) -> tuple[str, str]:
    """Return `select_engine`'s engine, and, unsaid, why it is not the fast one; "" where it is or there is no other."""
    wish = _find_wanted_engine()
    if wish not in ENGINES:
        raise ValueError(f"HALFULP_ENGINE={wish!r} {_UNKNOWN_ENGINE_MESSAGE}; {ENV_HINT}")
    if wish == "triton" or (wish == "auto" and device == "cuda"):
        return _choose_triton_or_reference(device, wish)
    if wish == "reference" or device != "cpu":
        return "reference", ""
    check_cpu_feature_signs()
    if why := _explain_missing_package("llvmlite") or explain_unsupported_machine():
        if wish == "llvm":
            raise ImportError(f"engine 'llvm' was asked for, but {why}; {ENV_HINT}")
        return "reference", f"{why}: kernels run as plain torch, slower and with the same bits"
    return "llvm", ""


# Every small operator asks, and os.environ raises and catches an error for a variable that is not set: 2 us.
_raw_environment = getattr(os.environ, "_data", None)
_engine_variable_key = getattr(os.environ, "encodekey", str)("HALFULP_ENGINE")


def _find_wanted_engine() -> str:
    """Return the engine that was asked for: in this thread, in this process, or in the environment."""
    if getattr(_thread_settings, "reference", False):
        return "reference"
    is_set = _requested_engine == "auto" and (_raw_environment is None or _engine_variable_key in _raw_environment)
    return os.environ.get("HALFULP_ENGINE", "auto") if is_set else _requested_engine


def allows_machine_code() -> bool:
    """Return whether nobody asked for another engine on the processor, whether or not there is a compiler."""
    return _find_wanted_engine() in ("auto", "llvm")


def _choose_triton_or_reference(device: str, wish: str) -> tuple[str, str]:
    if wish == "triton" and not (device == "cuda" or (device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")):
        interpreted = ", or set TRITON_INTERPRET=1 for Triton's interpreter" if device == "cpu" else ""
        raise ValueError(
            f"engine 'triton' runs on CUDA tensors, got tensors on {device}: choose 'auto'{interpreted}; {ENV_HINT}"
        )
    if why := _explain_missing_package("triton"):
        if wish == "triton":
            raise ImportError(f"engine 'triton' was asked for, but {why}; {ENV_HINT}")
        return "reference", f"{why}: kernels on CUDA run as plain torch operations, slower and with the same bits"
    # Tensors of ROCm say "cuda", and no Triton kernel has run there. Whoever asks for them gets them, compared with the
    # reference before their first use as everywhere.
    if wish == "auto" and torch.version.hip:
        return "reference", (
            "kernels on ROCm run as plain torch operations, since Triton's are made for CUDA: "
            "HALFULP_ENGINE=triton tries them"
        )
    return "triton", ""


@functools.cache
def _explain_missing_package(name: str) -> str:
    """Return why a package cannot be imported; "" where it can. It is imported, as the caller is about to use it."""
    try:
        importlib.import_module(name)
    except Exception as error:  # or a library does not load, a version lacks a driver
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return f"{name} is not installed (pip install {name})"
        lines = str(error).splitlines() or [""]
        return f"{name} cannot be imported ({type(error).__name__}: {lines[0]})"
    return ""
