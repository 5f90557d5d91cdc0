"""The processor's name, the instructions that decide how fast narrow numbers are, and the cores of this process."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# What is printed, by the names of Linux, LLVM and macOS, in small letters and digits alone.
_INSTRUCTIONS = {
    "AVX2": ("avx2",),
    "FMA": ("fma", "fma3"),
    "F16C": ("f16c",),
    "AVX-512": ("avx512f",),
    "AVX512_BF16": ("avx512bf16",),
    "AVX512_FP16": ("avx512fp16",),
    "AVX_NE_CONVERT": ("avxneconvert",),
    "AMX_BF16": ("amxbf16",),
    "AMX_FP16": ("amxfp16",),
    "NEON": ("asimd", "neon", "advsimd"),
    "FP16": ("asimdhp", "fullfp16", "featfp16"),
    "BF16": ("bf16", "featbf16"),
    "SVE": ("sve",),
    "SME": ("sme", "featsme"),
}
# Instructions that multiply, or widen by one instruction, two numbers of 16 bits.
BFLOAT16 = ("AVX512_BF16", "AVX_NE_CONVERT", "AMX_BF16", "BF16")
FLOAT16 = ("AVX512_FP16", "AVX_NE_CONVERT", "AMX_FP16", "FP16")
_WIDEST = ("AVX-512", "AVX2", "SVE", "NEON")
# What makes torch use less than the processor has.
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def processor_line() -> str:
    """Return the processor in one line, to stand beside times: name, instructions, cores, and what limits torch.

    >>> processor_line().endswith(("core", "cores")) or "limited by" in processor_line()
    True
    """
    found = instructions()
    shown = [next((name for name in _WIDEST if name in found), "")]
    shown += [name for name in found if name in BFLOAT16 or name in FLOAT16]
    if found and len(shown) == 1:
        shown.append("no 16-bit arithmetic")
    count = core_count()
    words = ", ".join(name for name in shown if name)
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if os.environ.get(name)]
    line = f"{processor_name()}{f' ({words})' if words else ''}, {count} core{'s' if count > 1 else ''}"
    return line + (f", limited by {', '.join(limits)}" if limits else "")


@functools.cache
def processor_name() -> str:
    """Return the processor's name, as the system or LLVM tells it.

    >>> bool(processor_name())
    True
    """
    found = ""
    if sys.platform == "darwin":
        found = _sysctl("machdep.cpu.brand_string")
    elif rows := _cpuinfo():
        found = next((rows[key] for key in ("model name", "cpu", "cpu model") if rows.get(key)), "")
    return " ".join((found or _llvm_name() or platform.processor() or platform.machine() or "unknown").split())


@functools.cache
def instructions() -> tuple[str, ...]:
    """Return the names of the instructions that matter here and that the processor has; empty where unknown.

    >>> set(instructions()) <= {*_INSTRUCTIONS}
    True
    """
    if sys.platform == "darwin":
        return known_instructions(_macos_features())
    rows = _cpuinfo()
    listed = f"{rows.get('flags', '')} {rows.get('features', '')}".split()
    return known_instructions(listed or _llvm_features())


def known_instructions(listed: Iterable[str]) -> tuple[str, ...]:
    """Return the known instruction sets among those that a system or LLVM lists.

    >>> known_instructions(["fpu", "avx2", "avx512_bf16"]), known_instructions(["+avx512f", "fullfp16"])
    (('AVX2', 'AVX512_BF16'), ('AVX-512', 'FP16'))
    """
    found = {re.sub(r"[^a-z0-9]", "", name.lower()) for name in listed}
    return tuple(name for name, names in _INSTRUCTIONS.items() if found & set(names))


def core_count() -> int:
    """Return how many cores this process may use.

    >>> core_count() >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpuinfo() -> dict[str, str]:
    """Return the first value of each of Linux's keys; empty on other systems."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    rows: dict[str, str] = {}
    for line in lines:
        key, colon, value = line.partition(":")
        if colon:
            rows.setdefault(key.strip().lower(), value.strip())
    return rows


def _sysctl(*arguments: str) -> str:
    """Return a value that macOS tells of the machine; empty where it has none."""
    try:
        command = ["/usr/sbin/sysctl", "-n", *arguments]
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=5
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _macos_features() -> list[str]:
    if platform.machine() != "arm64":
        return f"{_sysctl('machdep.cpu.features')} {_sysctl('machdep.cpu.leaf7_features')}".split()
    wanted = ("AdvSIMD", "arm.FEAT_FP16", "arm.FEAT_BF16", "arm.FEAT_SME")
    return [name.removeprefix("arm.") for name in wanted if _sysctl(f"hw.optional.{name}") == "1"]


def _llvm_name() -> str:
    try:
        from llvmlite import binding

        return str(binding.get_host_cpu_name())
    except Exception:  # missing, or of a library that does not load
        return ""


def _llvm_features() -> list[str]:
    try:
        from llvmlite import binding

        return [name for name, there in binding.get_host_cpu_features().items() if there]
    except Exception:  # missing, of a library that does not load, or a processor that LLVM does not know
        return []
