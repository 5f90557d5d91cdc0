"""The processor that kernels are compiled for: this machine's, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say."""

from __future__ import annotations

import functools
import os

from ..._messages import ENVIRONMENT


def processor() -> tuple[str, str, str]:
    """Its LLVM triple, name and features (``"+avx2,-avx512f"``) as Numba takes them; part of every cache key."""
    from numba.core.registry import cpu_target

    return cpu_target.target_context.codegen().magic_tuple()


@functools.cache
def check_features() -> None:
    """Check NUMBA_CPU_FEATURES: over a feature without a sign LLVM ends the process.

    Raises:
        ValueError: there is one.
    """
    for feature in filter(None, os.environ.get("NUMBA_CPU_FEATURES", "").split(",")):
        if feature[0] not in "+-":
            raise ValueError(
                f"NUMBA_CPU_FEATURES names {feature!r}: features are +name or -name, separated by commas; {ENVIRONMENT}"
            )


def has_features(*features: str) -> bool:
    """Whether machine code may use all of some features, named as LLVM names them: "avx2", "avx512f", "fma"."""
    allowed = set(processor()[2].split(","))
    return all(f"+{feature}" in allowed for feature in features)


def vector_bits() -> int:
    """Width of the vectors that kernels work on; where a processor has less, LLVM works on parts of them."""
    return 512 if has_features("avx512f") else 256


def has_fused_vectors(bits: int) -> bool:
    """Whether vectors of that width can be multiplied and added with one rounding."""
    wanted = {256: ("avx2", "fma"), 512: ("avx512f",)}.get(bits)
    return wanted is not None and has_features(*wanted)


def has_half_conversions() -> bool:
    """Whether float16 is converted by instructions: not by every x86, by every other processor that LLVM knows here."""
    return not processor()[0].startswith("x86") or has_features("f16c")
