"""The processor that kernels are compiled for: this machine's, or that of HALFULP_CPU_NAME and HALFULP_CPU_FEATURES."""

from __future__ import annotations

import contextlib
import functools
import os

from ..._messages import ENV_HINT


def find_llvm_target() -> tuple[str, str, str]:
    """Return its LLVM triple, name and features (``"+avx2,+f16c"``); a "generic" one has the given features alone."""
    return _find_triple_name_and_features(os.environ.get("HALFULP_CPU_NAME"), os.environ.get("HALFULP_CPU_FEATURES"))


@functools.cache
def _find_triple_name_and_features(name: str | None, features: str | None) -> tuple[str, str, str]:
    from llvmlite import binding

    # Versions that need it no longer raise an error.
    with contextlib.suppress(RuntimeError):
        binding.initialize()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    if features is None and name == "generic":
        features = "+f16c" if _is_x86() else ""
    elif features is None:
        features = ""
        with contextlib.suppress(RuntimeError):  # LLVM cannot tell on every kind of processor
            features = binding.get_host_cpu_features().flatten()
    return binding.get_process_triple(), name or binding.get_host_cpu_name(), features


@functools.cache
def explain_unsupported_machine() -> str:
    """Return why llvmlite, which is installed, cannot compile for this machine; "" where it can."""
    try:
        from llvmlite import binding

        binding.Target.from_triple(find_llvm_target()[0])
    except Exception as error:  # its library does not load, or was built without this processor
        lines = str(error).splitlines() or [""]
        return f"llvmlite cannot compile for this machine ({type(error).__name__}: {lines[0]})"
    # They are there on x86 since 2012, and on every other processor that LLVM knows. Without them LLVM calls functions
    # of a runtime library that is not there when code is compiled in memory.
    if not _is_x86() or has_cpu_features("f16c"):
        return ""
    given = "HALFULP_CPU_FEATURES lacks +f16c" if "HALFULP_CPU_FEATURES" in os.environ else "the processor lacks F16C"
    return f"{given}, the instructions for float16"


@functools.cache
def check_cpu_feature_signs() -> None:
    """Raise ValueError over a feature without a sign in HALFULP_CPU_FEATURES, over which LLVM ends the process."""
    for feature in filter(None, os.environ.get("HALFULP_CPU_FEATURES", "").split(",")):
        if feature[0] not in "+-":
            raise ValueError(
                f"HALFULP_CPU_FEATURES names {feature!r}: features are +name or -name, separated by commas; {ENV_HINT}"
            )


def has_cpu_features(*features: str) -> bool:
    """Return whether machine code may use all of some features, named as LLVM names them: "avx2", "avx512f", "fma"."""
    allowed = set(find_llvm_target()[2].split(","))
    return all(f"+{feature}" in allowed for feature in features)


def find_vector_bits() -> int:
    """Return the width of the vectors that kernels work on; narrower processors work on parts of them."""
    return 512 if has_cpu_features("avx512f") else 256


def has_vector_fma(bits: int) -> bool:
    """Return whether vectors of that width can be multiplied and added with one rounding."""
    wanted = {256: ("avx2", "fma"), 512: ("avx512f",)}.get(bits)
    return wanted is not None and has_cpu_features(*wanted)


def _is_x86() -> bool:
    from llvmlite import binding

    triple: str = binding.get_process_triple()
    return triple.startswith("x86")
