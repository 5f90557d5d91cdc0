"""Rounding by Triton beside the reference: every kernel that a format can ask for, on a device or interpreted."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch

import halfulp as hu
from halfulp import formats
from halfulp.formats import BlockFormat, get, get_block
from halfulp.kernels import address, same_bits
from halfulp.kernels.triton._launch import TensorKernel
from halfulp.rounding import _blocks as blocks
from halfulp.rounding import get_rounding
from halfulp.rounding._blocks import choose_block_dtype, make_block_target, round_blocks_by_reference
from halfulp.rounding._kernels import make_triton_plan, round_by_reference
from halfulp.rounding._quantize import find_target
from halfulp.rounding._target import WORD64_LAYOUT, choose_word_layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MODES = ("nearest", "toward_zero", "up", "down", "stochastic")
BLOCKS = [get_block(name) for name in formats.block_names()]
BLOCKS += [
    *(dataclasses.replace(get_block("mxfp4"), name=f"mxfp4_{how}", scale_rounding=how) for how in ("floor", "nearest")),
    dataclasses.replace(get_block("nvfp4"), name="nvfp4_up", scale_rounding="up"),
    BlockFormat("odd", formats.e4m3fn, formats.e8m0, 7),
    BlockFormat("long", formats.e4m3fn, formats.e8m0, 1024),
    BlockFormat("scaled_bf16", formats.e2m3fn, formats.bf16, 16, scale_rounding="nearest"),
    BlockFormat("flat", formats.e2m1fn, hu.Format("e8m2flat", 8, 2, subnormals=False), 16, tensor_scale=True),
    BlockFormat("fnuz", formats.e4m3fnuz, formats.e8m0, 8),
]


def mode_of(name: str) -> object:
    """A rounding, whose random bits are given."""
    return hu.Stochastic(seed=5) if name == "stochastic" else name


def kernels() -> Iterator[tuple[torch.dtype, str, str, str | None, object]]:
    """One format and policy for each kernel of elements: dtype, mode, format, policy, plan."""
    seen = set()
    for dtype, mode, name, policy in itertools.product(DTYPES, MODES, formats.names(), (None, "saturate")):
        try:
            target = find_target(get(name), get_rounding(mode_of(mode)), policy, dtype)
        except ValueError:
            continue  # the dtype cannot hold the format's numbers
        if target is None or (dtype != torch.float64 and choose_word_layout(target) is WORD64_LAYOUT):
            continue
        plan = make_triton_plan(dtype, target)
        if plan.kernel not in seen:
            seen.add(plan.kernel)
            yield dtype, mode, name, policy, plan


def block_kernels() -> Iterator[tuple[torch.dtype, str, BlockFormat, object]]:
    """Every block format in two modes: dtype, mode, format, plan."""
    modes = itertools.cycle(("stochastic", "up", "stochastic", "down", "toward_zero"))
    for dtype, format in itertools.product(DTYPES, BLOCKS):
        for mode in ("nearest", next(modes)):
            target = make_block_target(format, get_rounding(mode_of(mode)), None, dtype)
            work = choose_block_dtype(dtype, target)
            if work is not None:
                yield dtype, mode, format, blocks.make_block_triton_plan(work, target)


def elements(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Random words, small numbers, and the special ones."""
    generator = torch.Generator().manual_seed(seed)
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    limit = torch.iinfo(width)
    words = torch.randint(limit.min, limit.max, (count,), generator=generator, dtype=torch.int64).to(width)
    x = words.view(dtype)
    half = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    x = torch.where(torch.arange(count) % 3 == 0, half, x)
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -448.0, 464.0, 2.0**-24, 1e-45, 5e-324]
    x[5 : 5 + len(special)] = torch.tensor(special, dtype=torch.float64).to(dtype)
    return x


def layouts(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same kind of elements as whole vectors, at an odd address, turned, and none."""
    yield "whole", x[:2048]
    yield "odd", x[1:2000]
    yield "turned", x[:1221].view(33, 37).t()
    yield "one", x[7]
    yield "none", x[:0]


def rows(dtype: torch.dtype, seed: int, length: int) -> torch.Tensor:
    """Blocks of all magnitudes, with zeros and special numbers."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-120, 100, (12, 1), generator=generator)
    x = torch.randn(12, length, generator=generator) * torch.exp2(sizes.float())
    x[0], x[1] = x[0] * 1e-38, torch.rand(length, generator=generator) * 3.4e38
    x[3] = 0
    x[4, 5 % length], x[5, 40 % length] = torch.nan, -torch.inf
    x[6] = torch.randint(-24, 24, (length,), generator=generator) / 4
    x[7, 1:] *= 2.0**-60
    return x.to(dtype)


def differing(x: torch.Tensor, device: str, *how: object, **more: object) -> list[str]:
    """Which results of Triton are not the reference's: new, in place, into memory of another order."""
    with hu.kernels.engine("reference"):
        wanted = hu.quantize(x, *how, **more)
    here = x.to(device)
    with hu.kernels.engine("triton"):
        found = {"new": hu.quantize(here, *how, **more), "in place": here.clone()}
        hu.quantize(found["in place"], *how, out=found["in place"], **more)
        if x.dim() == 2:
            found["turned"] = torch.empty(x.shape[::-1], dtype=x.dtype, device=device).t()
            hu.quantize(here, *how, out=found["turned"], **more)
    return [name for name, one in found.items() if not same_bits(one.cpu(), wanted)]


def compare(seed: int, device: str, share: int = 0, shares: int = 1) -> list[str]:
    """Which of a share of all kernels give other bits than the reference; printed when run apart."""
    torch.set_num_threads(1)
    warnings.simplefilter("error", RuntimeWarning)  # of a kernel that cannot be used
    wrong = []
    for dtype, mode, name, policy, _ in list(kernels())[share::shares]:
        for layout, x in layouts(elements(dtype, 2053, seed)):
            for result in differing(x, device, name, mode_of(mode), overflow=policy, counter=seed):
                wrong.append(f"{dtype} to {name}, {mode}, {policy}, {layout}: {result}")
    for dtype, mode, format, _ in list(block_kernels())[share::shares]:
        for length in (2 * format.block, format.block * 3 // 2 + 1):
            for result in differing(rows(dtype, seed, length), device, format, mode_of(mode), counter=seed):
                wrong.append(f"{dtype} to {format.name}, {mode}, rows of {length}: {result}")
    return wrong


def wanted_from(x: torch.Tensor, name: str | BlockFormat, key: int, first: int) -> torch.Tensor:
    """The reference of stochastic rounding of elements that begin at a place of a longer tensor, or of its rows."""
    rounding, wide = get_rounding(mode_of("stochastic")), x.to(torch.float64)
    if isinstance(name, str) and name in formats.names():
        target = find_target(name, rounding, None, x.dtype)
        assert target is not None
        return round_by_reference(wide, target, key, first).to(x.dtype)
    target = make_block_target(get_block(name), rounding, None, x.dtype)
    return round_blocks_by_reference(wide, target, key, first).to(x.dtype)


class Far:
    """A kernel's function whose programs before some are left out, in the interpreter."""

    def __init__(self, run: object, skipped: int, programs: int) -> None:
        self.run, self.skipped, self.programs = run, skipped, programs

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        assert grid == (self.skipped + self.programs,)

        def program_id(builder: object, axis: int) -> object:
            handle = own(builder, axis)
            return TensorHandle(handle.data + np.int32(self.skipped), handle.dtype)

        def launch(*given: object, **options: object) -> None:
            InterpreterBuilder.create_get_program_id = program_id
            try:
                self.run[(self.programs,)](*given, **options)
            finally:
                InterpreterBuilder.create_get_program_id = own

        own = InterpreterBuilder.create_get_program_id
        return launch


def beyond(seed: int) -> list[str]:
    """Which tensors, whose elements up to some 2^32 are left out, are rounded otherwise than by the reference."""
    torch.set_num_threads(1)
    ragged, device, key = (
        dataclasses.replace(get_block("mxfp4"), name="ragged", block=32),
        torch.device("cpu"),
        2**63 + 5,
    )
    wrong = []
    for dtype, name, length, step in (
        (torch.bfloat16, "e4m3fn", None, 1024),
        (torch.float64, "e4m3fn", None, 1024),
        (torch.float32, "mxfp4", 2048, 1024),
        (torch.bfloat16, ragged, 50, 800),
    ):
        skipped = 2**32 // step - 1
        x = rows(dtype, seed, length or 2048)[8]
        x = torch.stack([x] * (1 if length != 50 else 40)).contiguous()
        if length is None:
            plan = make_triton_plan(dtype, find_target(name, get_rounding(mode_of("stochastic")), None, dtype))
        else:
            target = make_block_target(get_block(name), get_rounding(mode_of("stochastic")), None, dtype)
            plan = blocks.make_block_triton_plan(dtype, target)
        kernel, out, first = TensorKernel(plan.kernel.table), torch.empty_like(x), skipped * step
        kernel.__dict__["triton_function"] = Far(kernel.triton_function, skipped, -(-x.numel() // step))
        given = [address(one) - first * x.element_size() for one in (x, out)]
        kernel.launch(device, given, first + x.numel(), plan.constants, key, length=length)
        if not same_bits(out, wanted_from(x, name, key, first)):
            wrong.append(f"{dtype} to {name}")
    return wrong
