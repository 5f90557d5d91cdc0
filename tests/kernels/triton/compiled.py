"""What the compiler makes of a kernel for a GPU that need not be there."""

import pytest


def instructions(kernel, capability: int, aligned: bool, ragged: bool = False) -> list[str]:
    """The instructions of a `TensorKernel`, without their operands; skips where no compiler is installed."""
    # Triton 3.2, torch 2.6's, takes other arguments here; 3.4's division flushes subnormals.
    triton = pytest.importorskip("triton", "3.5", reason="Triton is not installed, or older than 3.5")
    from triton.backends.compiler import GPUTarget

    types = {p.name: "constexpr" if p.is_constexpr else p.annotation_type for p in kernel.triton_function.params}
    switches = {(list(types).index("aligned"),): aligned, (list(types).index("ragged"),): ragged}
    source = triton.compiler.ASTSource(kernel.triton_function, types, switches, {})
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kernel.options).asm["ptx"]
    lines = [[word for word in line.split() if word[0] != "@"] for line in ptx.splitlines() if line.startswith("\t")]
    return [words[0] for words in lines if words]


def inexact(found: list[str]) -> list[str]:
    """Those of the instructions that round otherwise than the reference, or flush subnormal numbers."""
    return [i for i in found if i.startswith("fma") or ".ftz" in i or ".approx" in i or ".full" in i]
