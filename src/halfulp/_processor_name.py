"""The processor's name and its vector instructions, as a person would look them up."""

import functools
import platform
from pathlib import Path

_INFORMATION = Path("/proc/cpuinfo")


@functools.cache
def processor_name() -> str:
    """Return the processor's name as the system tells it, with the widest vector instructions that torch found.

    >>> len(processor_name()) > 3
    True
    """
    name = _listed_name() or platform.processor() or platform.machine() or "unknown processor"
    return " with ".join([name, *_instructions()])


def _listed_name() -> str | None:
    """The name in Linux's list of processors; None where there is no such list, or no name in it."""
    try:
        lines = _INFORMATION.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line)
    return next((name for name in names if name), None)


def _instructions() -> list[str]:
    """One entry, "AVX-512 and bfloat16 products" or what there is, or none."""
    import torch

    def has(name: str) -> bool:
        # Not every version of torch asks for each of them.
        return bool(getattr(torch.cpu, f"_is_{name}_supported", bool)())

    wide = "AVX-512" if has("avx512") else "AVX2" if has("avx2") else None
    narrow = "AMX" if has("amx_tile") else "bfloat16 products" if has("avx512_bf16") else None
    found = [name for name in (wide, narrow) if name is not None]
    return [" and ".join(found)] if found else []
