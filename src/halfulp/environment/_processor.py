"""The processor's name, the instructions that decide how fast narrow numbers are, and the cores of this process."""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path
from typing import Any

_CPUINFO_FILE = Path("/proc/cpuinfo")
# What is printed, and LLVM's names of it.
_LLVM_INSTRUCTION_NAMES = {
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX-512": "avx512f",
    "AVX512_BF16": "avx512bf16",
    "AVX512_FP16": "avx512fp16",
    "AVX_NE_CONVERT": "avxneconvert",
    "AMX_BF16": "amx-bf16",
    "AMX_FP16": "amx-fp16",
    "NEON": "neon",
    "FP16": "fullfp16",
    "BF16": "bf16",
    "SVE": "sve",
    "SME": "sme",
}
# Instructions that multiply, or widen by one instruction, two numbers of 16 bits.
BFLOAT16_INSTRUCTIONS = ("AVX512_BF16", "AVX_NE_CONVERT", "AMX_BF16", "BF16")
FLOAT16_INSTRUCTIONS = ("AVX512_FP16", "AVX_NE_CONVERT", "AMX_FP16", "FP16")
_WIDEST_VECTORS = ("AVX-512", "AVX2", "SVE", "NEON")
# What makes torch use less than the processor has.
LIMITING_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def processor_line() -> str:
    """Return the processor in one line, to stand beside times: name, instructions, cores, and what limits torch.

    >>> processor_line().endswith(("core", "cores")) or "limited by" in processor_line()
    True
    """
    found = list_instructions()
    shown = [next((name for name in _WIDEST_VECTORS if name in found), "")]
    shown += [name for name in found if name in BFLOAT16_INSTRUCTIONS or name in FLOAT16_INSTRUCTIONS]
    if found and len(shown) == 1:
        shown.append("no 16-bit arithmetic")
    count = core_count()
    words = ", ".join(name for name in shown if name)
    limits = [f"{name}={os.environ[name]}" for name in LIMITING_VARIABLES if os.environ.get(name)]
    line = f"{processor_name()}{f' ({words})' if words else ''}, {count} core{'s' if count > 1 else ''}"
    return line + (f", limited by {', '.join(limits)}" if limits else "")


@functools.cache
def processor_name() -> str:
    """Return the processor's name, as the system or LLVM tells it.

    >>> bool(processor_name())
    True
    """
    try:
        rows = _CPUINFO_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:  # of other systems than Linux
        rows = ""
    found = re.search(r"^(?:model name|cpu|cpu model)\s*:\s*(\S.*)$", rows, re.MULTILINE)
    names = found and found[1], _ask_llvm("get_host_cpu_name"), platform.processor(), platform.machine(), "unknown"
    return " ".join(str(next(filter(None, names))).split())


@functools.cache
def list_instructions() -> tuple[str, ...]:
    """Return the names of the instructions that matter here and that LLVM finds in the processor; empty without it.

    >>> set(list_instructions()) <= {*_LLVM_INSTRUCTION_NAMES}
    True
    """
    found = _ask_llvm("get_host_cpu_features") or {}
    return tuple(name for name, own in _LLVM_INSTRUCTION_NAMES.items() if found.get(own))


def core_count() -> int:
    """Return how many cores this process may use.

    >>> core_count() >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ask_llvm(function: str) -> Any:
    """Return the result of a function of LLVM's; None where it is missing or does not know the processor."""
    try:
        from llvmlite import binding

        return getattr(binding, function)()
    except Exception:
        return None
