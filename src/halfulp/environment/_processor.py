"""The processor's name, the instructions that decide how fast narrow numbers are, and the cores of this process."""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path
from typing import Any

_CPUINFO_FILE = Path("/proc/cpuinfo")
# Those that decide how fast narrow numbers are, by LLVM's names.
_KNOWN_INSTRUCTIONS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bf16", "avx512fp16", "avxneconvert", "amx-bf16", "amx-fp16"),
    *("neon", "fullfp16", "bf16", "sve", "sme"),
)
# Parts of the names of instructions that multiply, or widen by one instruction, two numbers of 16 bits.
_SIXTEEN_BIT_INSTRUCTION_SUFFIXES = ("bf16", "fp16", "avxneconvert")
_VECTOR_INSTRUCTIONS = ("avx512f", "avx2", "sve", "neon")
# What makes torch use less than the processor has.
INSTRUCTION_LIMIT_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def describe_processor() -> str:
    """Return the processor in one line, to stand beside times: name, instructions, cores, and what limits torch.

    >>> describe_processor().endswith(("core", "cores")) or "limited by" in describe_processor()
    True
    """
    found = list_processor_instructions()
    shown = [next((name for name in _VECTOR_INSTRUCTIONS if name in found), "")]
    shown += [name for name in found if name.endswith(_SIXTEEN_BIT_INSTRUCTION_SUFFIXES)]
    if found and len(shown) == 1:
        shown.append("no 16-bit arithmetic")
    count = count_cores()
    words = ", ".join(name for name in shown if name)
    limits = [f"{name}={os.environ[name]}" for name in INSTRUCTION_LIMIT_VARIABLES if os.environ.get(name)]
    line = f"{read_processor_name()}{f' ({words})' if words else ''}, {count} core{'s' if count > 1 else ''}"
    return line + (f", limited by {', '.join(limits)}" if limits else "")


@functools.cache
def read_processor_name() -> str:
    """Return the processor's name, as the system or LLVM tells it.

    >>> bool(read_processor_name())
    True
    """
    try:
        rows = _CPUINFO_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:  # of other systems than Linux
        rows = ""
    found = re.search(r"^(?:model name|cpu|cpu model)\s*:\s*(\S.*)$", rows, re.MULTILINE)
    names = found and found[1], _call_llvm("get_host_cpu_name"), platform.processor(), platform.machine(), "unknown"
    return " ".join(str(next(filter(None, names))).split())


@functools.cache
def list_processor_instructions() -> tuple[str, ...]:
    """Return the names of the instructions that matter here and that LLVM finds in the processor; empty without it.

    >>> set(list_processor_instructions()) <= {*_KNOWN_INSTRUCTIONS}
    True
    """
    found = _call_llvm("get_host_cpu_features") or {}
    return tuple(name for name in _KNOWN_INSTRUCTIONS if found.get(name))


def count_cores() -> int:
    """Return how many cores this process may use.

    >>> count_cores() >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _call_llvm(function: str) -> Any:
    """Return the result of a function of LLVM's; None where it is missing or does not know the processor."""
    try:
        from llvmlite import binding

        return getattr(binding, function)()
    except Exception:
        return None
