"""Triton kernels as the library launches them, compiled for GPUs that need not be there, and what their code does."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

WIDEST = 16  # bytes that one instruction of a thread loads or stores
SIZES = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8}
_ACCESS = re.compile(r"tt\.(load|store) (%\w+).*: (\S+?)(?: loc\(.*)?$")
_MOVED = re.compile(r"(%\w+) = tt\.(?:splat|addptr|broadcast|expand_dims) (%\w+)")
_CARRIED = re.compile(r"(%\w+) = (%\w+)")
_TENSOR = re.compile(r"tensor<((?:\d+x)+)!tt\.ptr<(\w+)>")
_FUSED = re.compile(r"call .*@llvm\.fma\.(?:v(\d+))?f")
_MEMORY = re.compile(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)\b")


@dataclass
class Launch:
    """What a kernel is launched for.

    Attributes:
        family: of kernels.
        name: of the operation.
        least: bytes per element that it must read, and write; None for kernels on something else than elements.
        arrays: that it reads, where one program reads several tiles of each; 0 for one tile.
    """

    family: str = ""
    name: str = ""
    least: tuple[float, float] | None = None
    arrays: int = 0


@dataclass
class Kernel:
    """One kernel, compiled for one architecture.

    Attributes:
        launch: what it was launched for.
        function: its name.
        architecture: such as 90.
        read, written: bytes of arrays per element.
        narrowest: bytes of the narrowest instruction that loads or stores elements; 0 where there is none.
        surplus: how many such instructions there are, over the fewest that there can be for a thread's elements.
        spills: bytes that ptxas keeps in memory for lack of registers.
        registers: of a thread.
        fused: multiply-adds beyond those that the source asks for.
        inexact: instructions that flush subnormal numbers or approximate.
    """

    launch: Launch
    function: str
    architecture: int
    read: float = 0.0
    written: float = 0.0
    narrowest: int = 0
    surplus: float = 1.0
    spills: int = 0
    registers: int = 0
    fused: int = 0
    inexact: int = 0


@dataclass
class _Arrays:
    """The arrays of one direction: elements and bytes of each one's tile, and sizes of what all threads share."""

    tiles: list[tuple[int, int]] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)

    def bytes(self) -> int:
        return sum(count * size for count, size in self.tiles)


class _NoDevice:
    """What Triton asks of a driver before it compiles."""

    architecture = 90

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling(architectures: tuple[int, ...], found: list[Kernel], launch: Launch) -> Iterator[None]:
    """Let operators on the CPU launch Triton kernels, which are compiled for every architecture and not run.

    Args:
        architectures: such as (80, 90, 100).
        found: takes the kernels, each once.
        launch: what is launched now; whoever launches changes it.
    """
    import triton
    from triton.runtime.jit import JITFunction

    import halfulp as hu
    from halfulp.kernels import _engine
    from halfulp.kernels.triton import _launch

    driver, compile_and_run, seen = _NoDevice(), JITFunction.run, set()

    def run(self, *arguments, grid, warmup=False, **options):
        given = dict(zip(self.arg_names, arguments))
        for driver.architecture in architectures:
            compiled = compile_and_run(self, *arguments, grid=grid, warmup=True, **options)
            if (compiled.hash, driver.architecture) not in seen:
                seen.add((compiled.hash, driver.architecture))
                kernel = Kernel(Launch(**vars(launch)), compiled.metadata.name, driver.architecture)
                found.append(examine(compiled.asm, 32 * compiled.metadata.num_warps, kernel))
        for name, argument in given.items():
            if name.startswith("output"):
                argument.zero_()  # or a division would step on and on, by what the memory held

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(_engine, "_choose_triton_or_reference", return_value=("triton", "")),
        mock.patch.object(_launch, "_build_checked_kernel", lambda name, device, build, run, reference: build()),
        hu.kernels.engine("triton"),
    ):
        triton.runtime.driver.set_active(driver)
        yield


def examine(asm, threads: int, kernel: Kernel) -> Kernel:
    """Fill in what the code of a compiled kernel does."""
    arrays = _arrays(asm["ttir"], threads)
    tile = max((count for one in arrays.values() for count, _ in one.tiles), default=1)
    turns = len(arrays["load"].tiles) / kernel.launch.arrays if kernel.launch.arrays else 1
    kernel.read, kernel.written = arrays["load"].bytes() / tile / turns, arrays["store"].bytes() / tile
    widths: list[int] = []
    for how, count, bits in _MEMORY.findall(asm["ptx"]):
        width, shared = int(count or 1) * int(bits) // 8, arrays["load" if how == "ld" else "store"].shared
        if not count and width in shared:
            shared.remove(width)
        else:
            widths.append(width)
    whole = [(count / threads, size) for one in arrays.values() for count, size in one.tiles if 2 * count >= tile]
    fewest = sum(max(1, math.ceil(own * size / WIDEST)) for own, size in whole)
    kernel.narrowest, kernel.surplus = min(widths, default=0), len(widths) / fewest if fewest else 1.0
    words = [word for line in asm["ptx"].splitlines() if line.startswith("\t") for word in line.split()[:2]]
    # What the source asks for, LLVM may have written out for several turns of a loop, or for vectors.
    asked = _FUSED.findall(asm["llir"]) if "math.fma" in asm["ttir"] else []
    wanted = sum(int(lanes or 1) for lanes in asked)
    kernel.fused = max(0, sum(word.startswith("fma.") for word in words) - wanted)
    kernel.inexact = sum(any(how in word for how in (".ftz", ".approx", ".full")) for word in words)
    kernel.spills, kernel.registers = _resources(asm["ptx"], kernel.architecture)
    return kernel


def _arrays(code: str, threads: int) -> dict[str, _Arrays]:
    """What Triton's code loads and stores; what a block has one of is shared by its threads, as pointers are by all.

    Codes of 4 bits are bytes, half as many as elements. Tables of constants, in which each element looks
    up a place of its own, are no arrays.
    """
    found, tables = {"load": _Arrays(), "store": _Arrays()}, {"%tables"}
    looked_up = 0
    for line in code.splitlines():
        if (moved := _MOVED.search(line)) and moved[2] in tables:
            tables.add(moved[1])
        for name, begun in _CARRIED.findall(line) if "scf.while" in line else ():
            (tables.add if begun in tables else tables.discard)(name)
        match = _ACCESS.search(line)
        if match is None:
            continue
        tensor = _TENSOR.match(match[3])
        if tensor is None:
            found[match[1]].shared.append(SIZES.get(match[3].removeprefix("!tt.ptr<").removesuffix(">"), 8))
        elif match[2] in tables:
            looked_up += 1
        else:
            found[match[1]].tiles.append((math.prod(map(int, tensor[1].rstrip("x").split("x"))), SIZES[tensor[2]]))
    tile = max((count for one in found.values() for count, _ in one.tiles), default=1)
    for one in found.values():
        one.shared += [size for count, size in one.tiles if 2 * count < tile]
    found["load"].shared += [SIZES["f64"]] * (looked_up * math.ceil(tile / threads))
    return found


@functools.cache
def _assembler(architecture: int) -> tuple[str, str]:
    """Triton's own ptxas for an architecture, and the architecture's name."""
    from triton.backends.nvidia.compiler import get_ptxas

    return get_ptxas(architecture).path, f"sm_{architecture}{'a' if architecture >= 90 else ''}"


def _resources(ptx: str, architecture: int) -> tuple[int, int]:
    """The bytes that ptxas spills, and the registers of a thread."""
    assembler, name = _assembler(architecture)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [assembler, "-v", "--fmad=false", f"--gpu-name={name}", str(source), "-o", str(Path(folder, "code"))]
        told = subprocess.run(command, check=True, text=True, capture_output=True).stderr
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", told)))
    return spills, max(map(int, re.findall(r"Used (\d+) registers", told)), default=0)
